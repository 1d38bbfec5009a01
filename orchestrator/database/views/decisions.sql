-- orch.decisions: one row a decision of a scheduler about a trial at a step.
--
--   sweep, trial, run_id   trial: its number in the sweep
--   attempt                which try came to that step first, from 1
--   step                   where the trial was judged; a trial that pauses may be judged again there, before it goes on
--   value                  the objective it was judged by, NaN and infinity as such; null: it was not reported
--   action                 continue; stop; pause (its state is saved, others go on); exploit (it copies another's state)
--   reason                 why, with figures
--   source, params         exploit: the number of the trial whose state was copied, the parameters that changed, with
--                          their new values; else null and {}
--   decided_at             when it was stored
--
-- A step that a later attempt did again was decided once and stays decided: nothing is superseded here.
create view orch.decisions as
select
    sweep.name as sweep,
    trial.number as trial,
    trial.run_id,
    decision.attempt,
    decision.step,
    decision.value,
    decision.action,
    decision.reason,
    decision.source,
    decision.params,
    decision.created_at as decided_at
from orch_ledger.decisions as decision
join orch_ledger.sweeps as sweep on sweep.id = decision.sweep_id
join orch_ledger.trials as trial on trial.id = decision.trial_id
where sweep.archived_at is null
