-- orch.runs: one row a trial, waiting ones included.
--
--   run_id                 MLflow's; null while the trial waits for the first time
--   sweep, trial           trial: its number in the sweep, from 0
--   state                  waiting, running, finished, stopped, diverged, failed, killed, lost
--   params                 what the sweep's file sets, fixed values included; infinities are the texts Infinity, -Infinity
--   verdict                diverged; suspect (an error finding); warning (a warning finding); healthy;
--                          null while waiting or running, and for failed, killed and lost trials
--   diverged_at            step at which it diverged; null: it did not
--   attempts               how often it was begun; 0 while it waits for the first time
--   seconds                time its attempts took together, a running one until now; null before the first. An attempt
--                          whose command died is left out: nobody knows when it stopped
--   host, device, git_commit   of the last attempt; empty while unknown
--   error, reason          traceback of a failure; one line on why it diverged, failed or was stopped; else empty
--   objective              the sweep's metric at the last report, may be non-finite; null while there is none, and
--                          while it runs for the first time. Of a stopped or paused trial: where that was
--   last_step              step of the last report, of a running trial too; null before the first. An attempt that goes
--                          on from a saved state begins at that state's step
--   cell, sample           its grid axes without the seed; number of the sampled configuration in the cell, or null
--   config                 the whole resolved config, defaults included, by dotted field name
--   unstable               true: diverged, or its last value of the metric that the sweep's `unstable` names is NaN or
--                          infinite, whatever it is held against, or beyond the bound; false: neither. null: without a
--                          result, or it never reported that metric, or it ended at a finite value and the trial it is
--                          held against has no finite result above 0
--   more_objectives        the sweep's further metrics at their last report, in the order of the file; empty without
create view orch.runs as
select
    trial.run_id,
    sweep.name as sweep,
    trial.number as trial,
    trial.state,
    sweep.workload,
    trial.params,
    case
        when trial.state = 'diverged' then 'diverged'
        when trial.state not in ('finished', 'stopped') then null
        when exists (
            select from orch.findings as finding
            where finding.run_id = trial.run_id and finding.severity = 'error'
        ) then 'suspect'
        when exists (
            select from orch.findings as finding
            where finding.run_id = trial.run_id and finding.severity = 'warning'
        ) then 'warning'
        else 'healthy'
    end as verdict,
    trial.diverged_at,
    trial.attempts,
    trial.started_at,
    trial.ended_at,
    spent.seconds,
    trial.host,
    trial.device,
    trial.git_commit,
    trial.error,
    trial.reason,
    trial.objective,
    case
        -- written when an attempt ends; until then, and where it died, MLflow's newest values tell it
        when trial.state in ('running', 'lost') or (trial.last_step is null and trial.attempts > 0) then (
            select greatest(
                nullif(attempt.first_step, 0) - 1,
                (
                    select max(latest.step)
                    from public.latest_metrics as latest
                    where latest.run_uuid = trial.run_id
                        -- what is older belongs to attempts before it, and may be done again
                        and (
                            attempt.number = 1
                            or latest.timestamp >= floor(extract(epoch from attempt.started_at) * 1000)::bigint
                        )
                )
            )
            from orch_ledger.attempts as attempt
            where attempt.trial_id = trial.id and attempt.number = trial.attempts
        )
        else trial.last_step
    end as last_step,
    trial.cell,
    trial.sample,
    trial.config,
    case
        when trial.state = 'diverged' then true
        when trial.state not in ('finished', 'stopped') then null
        when sweep.spec ->> 'unstable' is null then false
        else (
            select
                case
                    when not abs(own.last) < 'Infinity' then true
                    -- numeric: a product of two floats may overflow, which PostgreSQL makes an error
                    when sweep.spec #> '{unstable,above}' is not null
                        then own.last::numeric > (sweep.spec #> '{unstable,above}')::numeric * scale.value
                    else own.last::numeric < (sweep.spec #> '{unstable,below}')::numeric * scale.value
                end
            from orch.final_metrics as own
            cross join lateral (
                select
                    case
                        when sweep.spec #> '{unstable,relative_to}' = '{}' then 1
                        else (
                            select other.last::numeric
                            from (
                                select trial.params || (sweep.spec #> '{unstable,relative_to}') as params
                            ) as asked
                            cross join orch_ledger.trials as reference
                            join orch.final_metrics as other on other.run_id = reference.run_id
                            where reference.sweep_id = trial.sweep_id
                                -- an axis whose `when` does not hold there has its default
                                and reference.params = asked.params || (
                                    select coalesce(jsonb_object_agg(axis.key, sweep.spec -> 'otherwise' -> axis.key), '{}')
                                    from jsonb_each(sweep.spec -> 'when') as axis
                                    where exists (
                                        select
                                        from jsonb_each(axis.value) as term
                                        where not exists (
                                            select
                                            from jsonb_array_elements(
                                                case jsonb_typeof(term.value)
                                                    when 'array' then term.value
                                                    else jsonb_build_array(term.value)
                                                end
                                            ) as allowed
                                            where allowed.value = asked.params -> term.key
                                        )
                                    )
                                )
                                and reference.state in ('finished', 'stopped')
                                and other.key = own.key
                                and other.last > 0
                                and other.last < 'Infinity'
                            limit 1
                        )
                    end as value
            ) as scale
            where own.run_id = trial.run_id and own.key = sweep.spec #>> '{unstable,metric}'
        )
    end as unstable,
    trial.more_objectives
from orch_ledger.sweeps as sweep
join orch_ledger.trials as trial on trial.sweep_id = sweep.id
cross join lateral (
    select
        sum(
            case
                when attempt.state = 'lost' then attempt.seconds
                else coalesce(
                    attempt.seconds,
                    extract(epoch from coalesce(attempt.ended_at, clock_timestamp()) - attempt.started_at)
                )
            end
        )::double precision as seconds
    from orch_ledger.attempts as attempt
    where attempt.trial_id = trial.id
) as spent
where sweep.archived_at is null
