-- orch.logs: one row a line that a trial printed, or that a command said of its sweep.
--
--   sweep, trial          trial is null for what a command said
--   attempt               which try printed it, from 1; null trial: which command that drove the sweep
--   stream                stdout, stderr; sweep: what a command said
--   line_number           from 0 in the attempt, over its streams: in the order of writing
--   line                  without its end; control characters are spelled out
--   written_at            when it was printed, by the clock of the machine that printed it
create view orch.logs as
select
    sweep.name as sweep,
    trial.number as trial,
    log.attempt,
    log.stream,
    log.line_number,
    log.line,
    log.written_at
from orch_ledger.logs as log
join orch_ledger.sweeps as sweep on sweep.id = log.sweep_id
left join orch_ledger.trials as trial on trial.id = log.trial_id
where sweep.archived_at is null
