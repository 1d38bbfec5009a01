-- orch.findings: one row a finding of a probe or a check.
--
--   sweep, trial, run_id   trial and run_id are null for findings of the preflight
--   check_name, severity   severity: info, warning, error
--   step                   null: not of one step
--   value, threshold       what was seen and what it was held against, in the unit of the check; may be non-finite
--   message, advice        what it means; what to do
--   attempt, created_at    which try saw it, from 1; when it was stored
--
-- As with metrics, an attempt supersedes what earlier ones saw from its first step on; those findings are left out.
create view orch.findings as
select
    sweep.name as sweep,
    trial.number as trial,
    trial.run_id,
    finding.check_name,
    finding.severity,
    finding.step,
    finding.value,
    finding.threshold,
    finding.message,
    finding.advice,
    finding.attempt,
    finding.created_at
from orch_ledger.findings as finding
join orch_ledger.sweeps as sweep on sweep.id = finding.sweep_id
left join orch_ledger.trials as trial on trial.id = finding.trial_id
where sweep.archived_at is null
    and not exists (
        select
        from orch_ledger.attempts as later
        where later.trial_id = finding.trial_id
            and later.number > finding.attempt
            and later.first_step <= coalesce(finding.step, 0)
    )
