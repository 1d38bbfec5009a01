"""From a claimed trial to a job that can train: its MLflow run, then its attempt. Claims nothing and is not patient."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.database.borrow import borrowed
from orchestrator.errors import AlreadyExists
from orchestrator.execution.checkpoints import Unusable, first_step_of, owner_of
from orchestrator.execution.field_reads import values_by_axis
from orchestrator.execution.job import Job
from orchestrator.execution.judging import Judge, Start, copy_in_words
from orchestrator.execution.population import population_folder
from orchestrator.ledger.rows import SweepRow, TrialRow
from orchestrator.ledger.store import Ledger
from orchestrator.spec.relations import is_active
from orchestrator.spec.resolved import to_json
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.tracking.artifacts import store_text
from orchestrator.tracking.bulk import write_decisions
from orchestrator.tracking.records import DecisionRow
from orchestrator.trial import Failure, Outcome, TrialState
from orchestrator.workload import Description

if TYPE_CHECKING:  # MLflow takes a second to import: a finished sweep is shown without it
    from orchestrator.tracking.runs import Runs


@dataclass(frozen=True)
class Opening:
    """Opens attempts at the trials of one sweep. The ledger knows each before it trains."""

    sweep: SweepRow
    spec: SweepSpec
    workload: Description
    ledger: Ledger
    runs: Runs
    device: str
    run_tags: Mapping[str, str]

    def open(self, trial: TrialRow, judge: Judge, again: bool = False) -> Job:
        """The MLflow run first (its id in the ledger before training starts), then the attempt.

        `again` looks first for the run that a failed try may have made. Raises Unusable when nobody can say where the
        attempt begins, AlreadyExists when another command has the sweep.
        """
        run_id = trial.run_id or self._new_run(trial, again)
        first_step = self.first_step_of(trial)
        start = judge.begin(trial.number, trial.params, first_step)
        not_before = None
        if trial.run_id:
            not_before = self.runs.reopen(run_id, trial.attempts + 1, first_step, self._noted(trial, start))
        since: dict[str, Any] = {"first_step": first_step, "not_before": not_before, "git_commit": self._git_commit}
        attempt = self.ledger.begin_attempt(trial.id, socket.gethostname(), pid=os.getpid(), **since)
        if attempt.number > 1:
            self.runs.mirror_findings(trial.id)  # this attempt supersedes some of what was found
        artifact_uri = self.artifact_uri(run_id)
        if attempt.number == 1:
            store_text(artifact_uri, self._spec_text, "sweep.json")
        return replace(
            self._job(replace(trial, run_id=run_id, attempts=attempt.number)),
            started_at_ms=int(attempt.started_at.timestamp() * 1000),
            artifact_uri=artifact_uri,
            first_step=first_step,
            changes=start.changes,
            copy_from=start.source,
            population=str(self.population_of(run_id) or ""),
        )

    def unopened(self, trial: TrialRow) -> Job:
        """The attempt at a claimed trial that ends before it trains, however far its opening came."""
        row = next(row for row in self.ledger.trials(self.sweep.id) if row.id == trial.id)
        if row.attempts == trial.attempts:
            attempt = self.ledger.begin_attempt(trial.id, socket.gethostname(), pid=os.getpid())
            row = replace(row, attempts=attempt.number)
        return self._job(row)

    def first_step_of(self, trial: TrialRow) -> int:
        """Where the next attempt at a trial goes on; 0 is the start. Raises Unusable when nobody can say."""
        if not trial.run_id:
            return 0
        owner = owner_of(self.workload.address, self.workload.resolve(trial.params))
        return first_step_of(self.artifact_uri(trial.run_id), owner)

    def artifact_uri(self, run_id: str) -> str:
        return self.runs.artifact_uri(self._experiment_id, run_id)

    def population_of(self, run_id: str) -> Path | None:
        """Where the members of the sweep's population find each other's states; None where there is none."""
        return population_folder(self.artifact_uri(run_id)) if self.spec.schedule.algorithm == "pbt" else None

    def _new_run(self, trial: TrialRow, again: bool) -> str:
        key = f"{self.sweep.id}/{trial.number}"
        run_id = (self.runs.adopt([key]).get(key) if again else None) or self.runs.create(
            self._experiment_id,
            trial_key=key,
            run_name=f"{self.sweep.name}-{trial.number}",
            params=trial.config,
            tags={**self.spec.tags, **self.run_tags, "orch.sweep": self.sweep.name, "orch.number": str(trial.number)},
        )
        try:
            self.ledger.set_run(trial.id, run_id)
        except AlreadyExists:  # whoever has the sweep now makes runs of their own
            self.runs.discard(run_id)
            raise
        return run_id

    def _noted(self, trial: TrialRow, start: Start) -> dict[str, str]:
        """Stores what was decided where the trial paused, before anybody acts on it; the tag of a copy."""
        if start.decision is None:
            return {}
        with borrowed(self.ledger.engine) as connection:
            write_decisions(connection, [DecisionRow(self.sweep.id, trial.id, trial.attempts, start.decision)])
        is_copy = start.source is not None
        return {f"orch.exploit.step-{start.decision.step}": copy_in_words(start.decision)} if is_copy else {}

    def _job(self, trial: TrialRow) -> Job:
        """What is known of an attempt, the trial's last one, before its opening."""
        spec = self.spec
        return Job(
            sweep_id=self.sweep.id,
            trial_id=trial.id,
            number=trial.number,
            attempt=trial.attempts,
            run_id=trial.run_id or "",
            workload=self.workload.address,
            params=dict(trial.params),
            metric=spec.metric.name,
            more_metrics=[metric.name for metric in spec.more_metrics],
            mode=spec.metric.mode,
            stop_diverged=spec.stop_diverged,
            stop_on=spec.stop_on,
            thresholds=spec.thresholds,
            log_every=spec.log_every,
            checkpoint_every=spec.checkpoint_every,
            keep_checkpoints=spec.keep_checkpoints,
            git_commit=self._git_commit,
            started_at_ms=0,
            artifact_uri="",
            device=self.device,
            gpu_share=spec.resources.gpu,
            trial_time_s=spec.resources.trial_time_s,
            max_steps=spec.schedule.max_steps,
            axes={name: some for name, some in self._axes.items() if is_active(spec, name, trial.params)},
            alone=trial.alone,
        )

    @cached_property
    def _axes(self) -> dict[str, Sequence[Any]]:
        return values_by_axis(self.spec)

    @cached_property
    def _spec_text(self) -> str:
        return json.dumps(to_json(self.spec), indent=2, ensure_ascii=False)

    @property
    def _experiment_id(self) -> str:
        assert self.sweep.experiment_id is not None, "a sweep's experiment exists before its first trial"
        return self.sweep.experiment_id

    @property
    def _git_commit(self) -> str:
        return self.run_tags.get("orch.git_commit", "")


def why_unopened(error: Exception) -> Outcome:
    """How a trial ends for which there is no run (its experiment was deleted, ...) or no state to go on from."""
    what = "not started" if isinstance(error, Unusable) else "no MLflow run"
    reason = f"{what}: {error}".split("\n")[0][:500]
    return Outcome(TrialState.FAILED, reason=reason, error=str(error), failure=Failure.NO_RECORD)
