-- orch.metrics: one row a run, key and step: every point that counts.
--
--   run_id, sweep, trial   trial: its number in the sweep
--   key, step              the metric's name; the step at which it was reported
--   value                  NaN and infinity as such (MLflow's tables hold 0 with a flag, and 1.8e308); never null
--   measured_at            when the worker measured it, to the millisecond
--   attempt                which try at the trial measured it, from 1
--
-- A point belongs to the latest attempt that had begun when it was measured. From its first step on an attempt hides
-- what earlier ones measured, also their later steps. Of two values of one (key, step) the one measured last counts.
--
-- The points are read run by run (lateral), so that a condition on sweep or run_id reaches MLflow's index on
-- (run_uuid, key, step) through any join. Grouping or `distinct` over all runs would read every point there is.
create view orch.metrics as
select
    trial.run_id,
    sweep.name as sweep,
    point.key::text as key,
    point.step,
    point.value,
    to_timestamp(point.measured_ms / 1000.0) as measured_at,
    point.attempt,
    trial.number as trial
from orch_ledger.sweeps as sweep
join orch_ledger.trials as trial on trial.sweep_id = sweep.id
cross join lateral (
    select distinct on (raw.key, raw.step)
        raw.key,
        raw.step,
        case
            when raw.is_nan then 'NaN'::double precision
            when raw.value >= 1.7976931348623157e308 then 'Infinity'::double precision
            when raw.value <= -1.7976931348623157e308 then '-Infinity'::double precision
            else raw.value
        end as value,
        raw.timestamp as measured_ms,
        span.attempt
    from (
        -- the first attempt owns all earlier points: its worker's clock may be behind the database's
        select
            attempt.number as attempt,
            case
                when attempt.number = 1 then -9223372036854775808
                else floor(extract(epoch from attempt.started_at) * 1000)::bigint
            end as from_ms,
            coalesce(later.from_ms, 9223372036854775807) as until_ms,
            coalesce(later.first_step, 9223372036854775807) as hidden_from_step
        from orch_ledger.attempts as attempt
        cross join lateral (
            select
                floor(extract(epoch from min(next.started_at)) * 1000)::bigint as from_ms,
                min(next.first_step) as first_step
            from orch_ledger.attempts as next
            where next.trial_id = attempt.trial_id and next.number > attempt.number
        ) as later
        where attempt.trial_id = trial.id
    ) as span
    join public.metrics as raw
        on raw.run_uuid = trial.run_id
        and raw.timestamp >= span.from_ms
        and raw.timestamp < span.until_ms
        and raw.step < span.hidden_from_step
    order by raw.key, raw.step, raw.timestamp desc, raw.is_nan desc, raw.value desc
) as point
where sweep.archived_at is null
