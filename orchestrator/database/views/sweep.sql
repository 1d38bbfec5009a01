-- orch.sweep_<name>: one row a trial of one sweep, waiting ones included; the table to group and average.
--
--   run_id, trial, state, verdict   as in orch.runs
--   diverged                        true for diverged trials, else false; never null
--   <field>                         one typed column per field of the resolved config, defaults included
--   <metric>                        the value of orch.final_metrics.last, NaN and infinity as such; null: not reported
--
-- A template: view_catalog.py fills in the names in braces. It says which metrics get a column, and under which name.
-- A metric's column is a subquery of its own: those that a query does not name are neither planned nor read.
create or replace view {view} as
select
    run.run_id,
    run.trial,
    run.state,
    run.state = 'diverged' as diverged,
    run.verdict{columns}
from orch_ledger.trials as trial
join orch.runs as run on run.sweep = {name} and run.trial = trial.number
where trial.sweep_id = {sweep_id}
