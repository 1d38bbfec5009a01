-- orch.archived: one row a sweep that `orch rm` archived. Its trials and points are in no view; MLflow still shows its runs.
--
--   sweep                  its name before; free again, or by now another sweep's
--   archived_as            its name since: of its experiment in MLflow, and for `orch rm NAME --purge`
--   workload, trials       trials: how many it has
create view orch.archived as
select
    left(sweep.name, -1 - length(sweep.id::text)) as sweep,
    sweep.name as archived_as,
    sweep.workload,
    (select count(*) from orch_ledger.trials as trial where trial.sweep_id = sweep.id) as trials,
    sweep.archived_at
from orch_ledger.sweeps as sweep
where sweep.archived_at is not null
