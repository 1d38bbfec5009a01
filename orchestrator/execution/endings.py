"""Writes how attempts ended: into the ledger first, into MLflow then. Decides nothing about what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.errors import AlreadyExists, DatabaseLost, NotFound
from orchestrator.execution.checkpoints import forget, keep_two
from orchestrator.execution.job import Job
from orchestrator.execution.patience import Patience
from orchestrator.execution.trials import Trials
from orchestrator.ledger.store import Ledger
from orchestrator.trial import Outcome, TrialState

if TYPE_CHECKING:  # MLflow takes a second to import: a finished sweep is shown without it
    from orchestrator.tracking.runs import Runs


@dataclass(frozen=True)
class Endings:
    """Of the attempts of one command. Waits for a database that is away."""

    ledger: Ledger
    runs: Runs
    trials: Trials
    patiently: Patience
    without_record: dict[int, str] = field(default_factory=dict)  # trial -> why MLflow does not show how it ended

    def put_back(self, job: Job, outcome: Outcome, alone: bool = False) -> None:
        """Lets the trial wait for another attempt; meanwhile MLflow does not show its run as running."""
        self.patiently(lambda: self.ledger.requeue(job.trial_id, job.attempt, outcome, alone=alone))
        self.trials.ended(job.number, outcome, TrialState.WAITING, alone)
        self._end_run(job, replace(outcome, state=TrialState.WAITING, error=""))

    def close(self, job: Job, outcome: Outcome) -> None:
        """The trial ends with this attempt."""

        def finish() -> bool:
            return self.ledger.finish(job.trial_id, job.attempt, outcome, host=outcome.host, device=job.device)

        if not self.patiently(finish):
            self.without_record[job.number] = "another command has taken the trial over"
        self.trials.ended(job.number, outcome, outcome.state)
        self._end_run(job, outcome)

    def _end_run(self, job: Job, outcome: Outcome) -> None:
        """Ends the MLflow run; one that cannot be written (deleted meanwhile, ...) is named at the sweep's end."""
        try:
            if not job.run_id:
                raise NotFound(outcome.reason)
            self.patiently(lambda: self._terminate(job, outcome))
        except (DatabaseLost, AlreadyExists):
            raise
        except Exception as error:  # MLflow's own errors have no common base that we could name without importing it
            self.without_record[job.number] = str(error).split("\n")[0][:300]

    def _terminate(self, job: Job, outcome: Outcome) -> None:
        tags = {"orch.host": outcome.host} if outcome.host else {}
        self.runs.terminate(job.run_id, outcome.state, outcome.reason, outcome.diverged_at, tags, job.trial_id)
        if outcome.error:
            self.runs.log_text(job.run_id, outcome.error, "error.txt")


def tidy(job: Job, say: Callable[[str], None]) -> None:
    """Leaves of a trial's states those that are still good for something. What stays costs space, no more."""
    try:
        keep_two(job.artifact_uri, job.mode) if job.keep_checkpoints else forget(job.artifact_uri)
    except OSError as error:
        why = error.strerror or error
        say(f"trial {job.number}: states that it needs no more could not be removed ({why})")
