-- orch.final_metrics: one row a run and key.
--
--   run_id, sweep, trial, key
--   last, last_step        value at the highest step, NaN and infinity as such; that step
--   min, max               over the finite values; null when there is none
--   last_finite            the last finite value; null when there is none. Not proof that the run stayed finite
--   nonfinite, points      how many values are NaN or infinite; how many there are
create view orch.final_metrics as
select
    trial.run_id,
    sweep.name as sweep,
    final.key,
    final.last,
    final.last_step,
    final.min,
    final.max,
    final.last_finite,
    final.nonfinite,
    final.points,
    trial.number as trial
from orch_ledger.sweeps as sweep
join orch_ledger.trials as trial on trial.sweep_id = sweep.id
cross join lateral (
    select
        point.key,
        (array_agg(point.value order by point.step desc))[1] as last,
        max(point.step) as last_step,
        min(point.value) filter (where abs(point.value) < 'Infinity') as min,
        max(point.value) filter (where abs(point.value) < 'Infinity') as max,
        (array_agg(point.value order by point.step desc) filter (where abs(point.value) < 'Infinity'))[1]
            as last_finite,
        count(*) filter (where not abs(point.value) < 'Infinity') as nonfinite,
        count(*) as points
    from orch.metrics as point
    where point.run_id = trial.run_id
    group by point.key
) as final
where sweep.archived_at is null
