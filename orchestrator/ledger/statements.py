"""The ledger's longer SQL, each statement one transaction of `store.Ledger`."""

from __future__ import annotations

from dataclasses import fields

from sqlalchemy import text

from orchestrator.ledger.rows import AttemptRow, TrialRow

TRIAL_COLUMNS = ", ".join(f"trials.{field.name}" for field in fields(TrialRow))

ATTEMPT_COLUMNS = ", ".join(f"attempts.{field.name}" for field in fields(AttemptRow))

ADD_TRIALS = text(
    f"""
    with given as (
        select row_number() over (order by first.place) as nth, first.*
        from (
            select distinct on (item.config_hash) item.*
            from rows from (
                jsonb_to_recordset(cast(:items as jsonb))
                as (params jsonb, config jsonb, config_hash text, cell jsonb, sample integer)
            ) with ordinality as item (params, config, config_hash, cell, sample, place)
            where not exists (
                select from orch_ledger.trials as known
                where known.sweep_id = :sweep_id and known.config_hash = item.config_hash
            )
            order by item.config_hash, item.place
        ) as first
    )
    insert into orch_ledger.trials as trials (sweep_id, number, params, config, config_hash, cell, sample)
    select
        :sweep_id,
        (select coalesce(max(number) + 1, 0) from orch_ledger.trials where sweep_id = :sweep_id) + nth - 1,
        params, config, config_hash, cell, sample
    from given
    order by nth
    on conflict (sweep_id, config_hash) do nothing
    returning {TRIAL_COLUMNS}
    """
)

CLAIM = text(
    f"""
    with next as (
        select id from orch_ledger.trials
        where sweep_id = :sweep_id and state = 'waiting'
        order by alone, last_step nulls first, number
        limit 1
        for update skip locked
    )
    update orch_ledger.trials as trials
    set state = 'running', started_at = coalesce(trials.started_at, clock_timestamp())
    from next
    where trials.id = next.id
    returning {TRIAL_COLUMNS}
    """
)

# An attempt starts at least 1 ms after its predecessor, whatever the clocks say: points are told apart by time.
BEGIN_ATTEMPT = text(
    f"""
    with closed as (
        update orch_ledger.attempts set state = 'lost', ended_at = clock_timestamp()
        where trial_id = :trial_id and ended_at is null
    ),
    trial as (
        update orch_ledger.trials
        set state = 'running', attempts = attempts + 1, ended_at = null, reason = '', host = :host,
            objective = case when :first_step > 0 then objective end,
            more_objectives = case when :first_step > 0 then more_objectives else '{{}}' end,
            last_step = case when :first_step > 0 then last_step end,
            git_commit = coalesce(nullif(:git_commit, ''), git_commit),
            started_at = coalesce(started_at, clock_timestamp())
        where id = :trial_id
        returning id, attempts
    )
    insert into orch_ledger.attempts as attempts (trial_id, number, started_at, first_step, host, pid)
    select
        trial.id,
        trial.attempts,
        greatest(
            clock_timestamp(),
            cast(:not_before as timestamptz),
            (select max(started_at) + interval '1 millisecond' from orch_ledger.attempts where trial_id = :trial_id)
        ),
        :first_step, :host, :pid
    from trial
    returning {ATTEMPT_COLUMNS}
    """
)

# An attempt that was cut short or died before its first report takes nothing back of what the trial has reported.
REPORTED = """
        objective = coalesce(:objective, trials.objective),
        more_objectives = case
            when array_remove(cast(:more_objectives as double precision[]), null) = '{}' then trials.more_objectives
            else :more_objectives
        end"""

# An attempt that was marked killed may still be finished by its own worker; a lost one is another's by now.
CLOSE_ATTEMPT = """
    update orch_ledger.attempts
    set state = :state, ended_at = clock_timestamp(), failure = :failure, error = :error,
        seconds = :seconds, host = coalesce(nullif(:worker_host, ''), host)
    where trial_id = :trial_id and number = :attempt and state in ('running', 'killed', :state)
    returning trial_id
"""

FINISH = text(
    f"""
    with closed as ({CLOSE_ATTEMPT})
    update orch_ledger.trials as trials
    set state = :state,{REPORTED},
        last_step = coalesce(cast(:last_step as bigint), trials.last_step),
        diverged_at = :diverged_at, reason = :reason, error = :error, ended_at = clock_timestamp(),
        host = coalesce(nullif(:host, ''), trials.host), device = coalesce(nullif(:device, ''), trials.device)
    from closed
    where trials.id = closed.trial_id and trials.attempts = :attempt and trials.state <> 'waiting'
    returning trials.id
    """
)

# A trial that waits on purpose has come so far; one whose attempt failed may have to begin anew and is claimed first.
REQUEUE = text(
    f"""
    with closed as ({CLOSE_ATTEMPT})
    update orch_ledger.trials as trials
    set state = 'waiting', reason = :reason, ended_at = null,{REPORTED},
        last_step = case when :state = 'waiting' then coalesce(cast(:last_step as bigint), trials.last_step) end
    from closed
    where trials.id = closed.trial_id and trials.attempts = :attempt
    returning trials.id
    """
)

RELEASE = text(
    f"""
    with released as (
        update orch_ledger.trials as trials
        set state = 'waiting', objective = null, more_objectives = '{{}}', last_step = null, diverged_at = null,
            reason = '', error = '', ended_at = null
        where sweep_id = :sweep_id and (state = any(:states) or number = any(:numbers))
        returning {TRIAL_COLUMNS}
    ),
    closed as (
        update orch_ledger.attempts set state = 'lost', ended_at = clock_timestamp()
        from released where attempts.trial_id = released.id and attempts.ended_at is null
    )
    select * from released order by number
    """
)

MARK = text(
    f"""
    with marked as (
        update orch_ledger.trials as trials
        set state = :state, reason = :reason, ended_at = clock_timestamp()
        where sweep_id = :sweep_id and state = any(:states)
        returning {TRIAL_COLUMNS}
    ),
    closed as (
        update orch_ledger.attempts set state = :state, ended_at = clock_timestamp()
        from marked where attempts.trial_id = marked.id and attempts.ended_at is null
    )
    select * from marked order by number
    """
)

FINDINGS_AFTER = text(
    """
    select
        finding.id, trial.number,
        finding.check_name, finding.severity, finding.message, finding.advice,
        finding.step, finding.value, finding.threshold
    from orch_ledger.findings as finding
    join orch_ledger.trials as trial on trial.id = finding.trial_id
    where finding.sweep_id = :sweep_id and finding.id > :finding_id
    order by finding.id
    """
)

DECISIONS = text(
    """
    select
        trial.number as trial, decision.step, decision.value, decision.action, decision.reason, decision.source,
        decision.params
    from orch_ledger.decisions as decision
    join orch_ledger.trials as trial on trial.id = decision.trial_id
    where decision.sweep_id = :sweep_id
    order by decision.id
    """
)

# Seconds in which at least one attempt ran. One whose command died ended at its last point, as far as anybody knows.
BUSY_SECONDS = text(
    """
    with span as (
        select
            attempt.started_at as begun,
            case
                when attempt.state = 'lost' then (
                    select to_timestamp(max(point.timestamp) / 1000.0)
                    from public.metrics as point
                    where point.run_uuid = trial.run_id
                        and point.timestamp >= extract(epoch from attempt.started_at) * 1000
                        and point.timestamp < coalesce(
                            (
                                select extract(epoch from min(next.started_at)) * 1000
                                from orch_ledger.attempts as next
                                where next.trial_id = attempt.trial_id and next.number > attempt.number
                            ),
                            'infinity'
                        )
                )
                else coalesce(attempt.ended_at, clock_timestamp())
            end as ended
        from orch_ledger.attempts as attempt
        join orch_ledger.trials as trial on trial.id = attempt.trial_id
        where trial.sweep_id = :sweep_id
    ),
    overlap as (
        select
            greatest(begun, max(ended) over (order by begun, ended rows between unbounded preceding and 1 preceding))
                as begun,
            ended
        from span
        where ended > begun
    )
    select coalesce(sum(extract(epoch from ended - begun)) filter (where ended > begun), 0)::double precision
    from overlap
    """
)

COUNT_MESSAGES = text(
    """
    select finding.message, count(distinct trial.id)
    from orch_ledger.findings as finding
    join orch_ledger.trials as trial on trial.id = finding.trial_id and trial.attempts = finding.attempt
    where finding.sweep_id = :sweep_id and finding.check_name = :check_name and trial.state = 'finished'
    group by finding.message
    """
)

SET_SWEEP_STATE = text(
    """
    update orch_ledger.sweeps
    set state = :state,
        started_at = case when :state = 'running' then coalesce(started_at, clock_timestamp()) else started_at end,
        ended_at = case when :state in ('created', 'running') then null else clock_timestamp() end
    where id = :sweep_id
    returning id
    """
)

HOLDER = text(
    """
    select activity.application_name, activity.backend_start
    from pg_locks as lock
    left join pg_stat_activity as activity on activity.pid = lock.pid
    where lock.locktype = 'advisory' and lock.granted and lock.objsubid = 2
        and lock.database = (select oid from pg_database where datname = current_database())
        and lock.classid = cast(:class as integer)::oid and lock.objid = cast(:object as integer)::oid
    """
)
