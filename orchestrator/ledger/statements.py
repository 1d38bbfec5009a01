"""The ledger's longer SQL, each statement one transaction of `store.Ledger`."""

from __future__ import annotations

from dataclasses import fields

from sqlalchemy import text

from orchestrator.ledger.rows import AttemptRow, TrialRow

TRIAL_COLUMNS = ", ".join(f"trials.{field.name}" for field in fields(TrialRow))

ATTEMPT_COLUMNS = ", ".join(f"attempts.{field.name}" for field in fields(AttemptRow))

# A driver's statement changes nothing once another command has taken the sweep. Nobody takes it while one is under way.
OURS = """
    ours as (
        select sweep.id from orch_ledger.sweeps as sweep
        where sweep.id = {sweep_id} and sweep.fence = coalesce(cast(:fence as bigint), sweep.fence)
        for share
    )"""
OUR_SWEEP = OURS.format(sweep_id=":sweep_id")
OUR_TRIAL = OURS.format(sweep_id="(select sweep_id from orch_ledger.trials where id = :trial_id)")

LOCK_SWEEP = text(
    """
    select set_config('idle_in_transaction_session_timeout', :timeout_ms, true)
    from orch_ledger.sweeps
    where id = :sweep_id and fence = coalesce(cast(:fence as bigint), fence)
    for update
    """
)

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
    with {OUR_SWEEP},
    next as (
        select id from orch_ledger.trials
        where sweep_id = :sweep_id and state = 'waiting' and exists (select from ours)
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

SET_RUN = text(
    f"""
    with {OUR_TRIAL}
    update orch_ledger.trials set run_id = :run_id
    where id = :trial_id and exists (select from ours)
    returning id
    """
)

# An attempt starts at least 1 ms after its predecessor, whatever the clocks say: points are told apart by time.
BEGIN_ATTEMPT = text(
    f"""
    with {OUR_TRIAL},
    closed as (
        update orch_ledger.attempts set state = 'lost', ended_at = clock_timestamp()
        where trial_id = :trial_id and ended_at is null and exists (select from ours)
    ),
    trial as (
        update orch_ledger.trials
        set state = 'running', attempts = attempts + 1, ended_at = null, reason = '', host = :host,
            objective = case when :first_step > 0 then objective end,
            more_objectives = case when :first_step > 0 then more_objectives else '{{}}' end,
            last_step = case when :first_step > 0 then last_step end,
            git_commit = coalesce(nullif(:git_commit, ''), git_commit),
            started_at = coalesce(started_at, clock_timestamp())
        where id = :trial_id and exists (select from ours)
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

# An attempt that was marked killed, or lost by a reaper, may still be finished by its own driver. One that is lost
# while its trial is not has been replaced.
CLOSE_ATTEMPT = f"""
    with {OUR_TRIAL},
    closed as (
        update orch_ledger.attempts as attempt
        set state = :state, ended_at = clock_timestamp(), failure = :failure, error = :error,
            seconds = :seconds, host = coalesce(nullif(:worker_host, ''), attempt.host)
        from orch_ledger.trials as trial
        where attempt.trial_id = :trial_id and attempt.number = :attempt and trial.id = attempt.trial_id
            and (attempt.state in ('running', 'killed', :state) or (attempt.state = 'lost' and trial.state = 'lost'))
            and exists (select from ours)
        returning attempt.trial_id
    )"""

FINISH = text(
    f"""
    {CLOSE_ATTEMPT}
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
    {CLOSE_ATTEMPT}
    update orch_ledger.trials as trials
    set state = 'waiting', reason = :reason, ended_at = null, alone = trials.alone or :alone,{REPORTED},
        last_step = case when :state = 'waiting' then coalesce(cast(:last_step as bigint), trials.last_step) end
    from closed
    where trials.id = closed.trial_id and trials.attempts = :attempt
    returning trials.id
    """
)

LET_WAIT = text(
    f"""
    with {OUR_SWEEP},
    released as (
        update orch_ledger.trials as trials
        set state = 'waiting', objective = null, more_objectives = '{{}}', last_step = null, diverged_at = null,
            reason = '', error = '', ended_at = null
        where sweep_id = :sweep_id and (state = any(:states) or number = any(:numbers)) and exists (select from ours)
        returning {TRIAL_COLUMNS}
    ),
    closed as (
        update orch_ledger.attempts set state = 'lost', ended_at = clock_timestamp()
        from released where attempts.trial_id = released.id and attempts.ended_at is null
    )
    select * from released order by number
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
    where id = :sweep_id and fence = coalesce(cast(:fence as bigint), fence)
    returning id
    """
)

RESTATE = text(
    """
    with said as (
        update orch_ledger.sweeps
        set spec = cast(:spec as jsonb), source = :source, description = :description,
            state = case when :reopened then 'interrupted' else state end
        where id = :sweep_id and fence = coalesce(cast(:fence as bigint), fence)
        returning id
    ),
    moved as (
        update orch_ledger.trials as trial
        set params = item.params, cell = item.cell, sample = item.sample, config_hash = item.config_hash
        from jsonb_to_recordset(cast(:items as jsonb))
            as item (id bigint, params jsonb, cell jsonb, sample integer, config_hash text)
        where trial.id = item.id and trial.sweep_id = :sweep_id and exists (select from said)
    )
    select id from said
    """
)

ASK_TO_CANCEL = text(
    """
    update orch_ledger.sweeps
    set wanted = case when wanted = '' and not :now then 'cancel' else 'cancel_now' end
    where id = :sweep_id and fence = :fence and holder <> ''
    returning wanted
    """
)
