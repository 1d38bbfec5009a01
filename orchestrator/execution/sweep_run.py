"""Drives one sweep: claims trials, opens their runs, records their fate. Knows no backend and prints nothing."""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.database.connection import is_away
from orchestrator.errors import AlreadyExists, DatabaseLost, NotFound
from orchestrator.execution.checkpoints import first_step_of, forget, owner_of
from orchestrator.execution.field_reads import UNREAD_FIELD, field_of
from orchestrator.execution.job import Job
from orchestrator.execution.news import News
from orchestrator.execution.patience import Patience
from orchestrator.ledger.rows import SweepRow, TrialRow
from orchestrator.ledger.store import Ledger
from orchestrator.search.searcher import Searcher
from orchestrator.spec.domains import distinct, ends
from orchestrator.spec.resolved import to_json
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.tracking.artifacts import store_text
from orchestrator.trial import Candidate, Failure, Finding, Outcome, Told, TrialState, config_hash, jsonable
from orchestrator.workload import Description, flatten

if TYPE_CHECKING:  # MLflow takes a second to import: a finished sweep is shown without it
    from orchestrator.tracking.runs import Runs

RETRYABLE = (Failure.WORKER_DEATH, Failure.OUT_OF_MEMORY, Failure.TIMEOUT)
HOLD_CHECK_S = 5.0
MAX_TRIED_VALUES = 8  # of an axis, to see whether it acts through other fields


class Observer(Protocol):
    """Whoever shows a sweep's progress."""

    def opened(self, run: SweepRun, total: int, workers: int) -> None:
        """Called once, before the first trial; `total` counts every trial the sweep will have."""

    def said(self, text: str) -> None:
        """A remark for the person."""

    def started(self, job: Job) -> None: ...

    def ended(self, job: Job, outcome: Outcome, will_retry: bool) -> None: ...

    def found(self, number: int, finding: Finding) -> None:
        """Called soon after a finding about trial `number` is stored."""


@dataclass(frozen=True)
class Placement:
    """Where and how the trials of a sweep run."""

    device: str
    host: str


class SweepRun:
    """The `Feed` of one sweep. The ledger is written before anything trains and again as soon as it ends."""

    def __init__(
        self,
        sweep: SweepRow,
        spec: SweepSpec,
        workload: Description,
        searcher: Searcher,
        ledger: Ledger,
        runs: Runs,
        observer: Observer,
        placement: Placement,
        run_tags: Mapping[str, str],
        refresh_views: Callable[[bool], None],
        keep_hold: Callable[[], None],
    ) -> None:
        self.sweep, self.spec, self.workload, self.searcher = sweep, spec, workload, searcher
        self.ledger, self.runs, self.observer, self.placement = ledger, runs, observer, placement
        self.run_tags, self.refresh_views = run_tags, refresh_views
        self.trials: dict[int, TrialRow] = {row.number: row for row in ledger.trials(sweep.id)}
        self.abort_reason = ""
        self.without_record: dict[int, str] = {}  # trial number -> why MLflow does not show how it ended
        self.interrupted = False
        self.lost_to: AlreadyExists | None = None  # another command drives this sweep now
        self._num_failures: Counter[int] = Counter()  # by trial number, since this command began
        self._keep_hold, self._held_at = keep_hold, time.monotonic()
        self.patiently = Patience(observer.said, lambda: self.interrupted, keep_hold)
        self._spec_text = json.dumps(to_json(spec), indent=2, ensure_ascii=False)
        self._axes = values_by_axis(spec)
        self._news = News(ledger, sweep.id)
        self._searched_out = False
        self._said_stopping = False

    def interrupt(self) -> None:
        """What the first signal does: running trials save their state and end, nothing new starts."""
        self.interrupted = True

    # The feed, called by a backend

    @property
    def stopping(self) -> bool:
        return self.interrupted or bool(self.abort_reason) or self.lost_to is not None

    def next_job(self) -> Job | None:
        if self.lost_to is not None:
            raise self.lost_to
        while (trial := self._claim()) is not None:
            try:
                return self._opened(trial)
            except (DatabaseLost, AlreadyExists):  # these end the command
                raise
            except Exception as error:  # no run (experiment deleted, ...): this trial fails, the rest goes on
                self._close_unopened(trial, error)
        return None

    def exhausted(self) -> bool:
        unfinished = (TrialState.WAITING, TrialState.RUNNING)  # a running trial may come back for another attempt
        return self._searched_out and not any(row.state in unfinished for row in self.trials.values())

    def ended(self, job: Job, outcome: Outcome) -> None:
        if self._deserves_retry(job, outcome):
            self.patiently(lambda: self.ledger.requeue(job.trial_id, job.attempt, outcome))
            self._remember(job.number, TrialState.WAITING, outcome)
            self.observer.ended(job, outcome, will_retry=True)
            return
        self._close(job, outcome)
        if outcome.failure is Failure.NO_OBJECTIVE and not self._any_objective():
            self.abort_reason = f"trial {job.number} ended, but it {outcome.reason}; set metric.name to one of these"

    def tick(self) -> None:
        if self.interrupted and not self._said_stopping:
            self._said_stopping = True
            self.observer.said("stopping: running trials save their state and end; once more stops at once")
        try:
            self._check_hold()
            self.refresh_views(False)
            if self._news.is_due():
                self._tell_news()
        except AlreadyExists as error:
            self.lost_to = error
        except Exception as error:  # away for a moment: a view that is a little behind stops nobody
            if not is_away(error):
                raise

    def recorded(self) -> None:
        if self.lost_to is not None:
            return
        self.patiently(self._tell_news)
        if not self.stopping and (fields := self.patiently(self._never_read)):
            self.abort_reason = (
                f"no finished trial read {', '.join(fields)}: all values are the same training under other labels; "
                "make the workload use it, or take it out of params"
            )

    def _tell_news(self) -> None:
        for row in self._news.take():
            self.observer.found(row.number, row.finding)

    def _never_read(self) -> list[str]:
        """The axes that acted in no finished trial of the sweep, those of earlier commands included."""
        num_finished = self.counts()[TrialState.FINISHED]
        counts = self.ledger.count_messages(self.sweep.id, UNREAD_FIELD)
        unread = {field_of(message) for message, count in counts.items() if count == num_finished}
        return [name for name in self._axes if name in unread]

    def _check_hold(self) -> None:
        """A restarted database has forgotten that the sweep is ours; somebody else may have taken it since."""
        if time.monotonic() - self._held_at > HOLD_CHECK_S:
            self._held_at = time.monotonic()
            self._keep_hold()

    # What the command reads

    def counts(self) -> Counter[TrialState]:
        return Counter(row.state for row in self.trials.values())

    def expand(self) -> Sequence[TrialRow]:
        """Asks the searcher for more and writes what is new into the ledger, before anything trains."""
        candidates = self.searcher.ask(self._history())
        if candidates is None:
            self._searched_out = True
            return ()
        items = [self._ledger_item(candidate) for candidate in candidates]

        def add_again() -> Sequence[TrialRow]:
            self.ledger.add_trials(self.sweep.id, items)  # the first try may have added them
            return [row for row in self.ledger.trials(self.sweep.id) if row.number not in self.trials]

        rows = self.patiently(lambda: self.ledger.add_trials(self.sweep.id, items), add_again)
        self.trials.update((row.number, row) for row in rows)
        return rows

    # Parts

    def _claim(self) -> TrialRow | None:
        trial = self._claimed()
        while trial is None and not self._searched_out and self.expand():
            trial = self._claimed()
        return trial

    def _claimed(self) -> TrialRow | None:
        def claim_again() -> TrialRow | None:
            """A claim whose answer was lost has a trial running that nobody trains."""
            lost = [row for row in self.ledger.trials(self.sweep.id) if self._waits_for_us(row)]
            return min(lost, key=lambda row: row.number) if lost else self.ledger.claim(self.sweep.id)

        return self.patiently(lambda: self.ledger.claim(self.sweep.id), claim_again)

    def _waits_for_us(self, row: TrialRow) -> bool:
        ours = self.trials.get(row.number)
        return row.state is TrialState.RUNNING and ours is not None and ours.state is TrialState.WAITING

    def _opened(self, trial: TrialRow) -> Job:
        return self.patiently(lambda: self._open(trial), lambda: self._open(trial, again=True))

    def _open(self, trial: TrialRow, again: bool = False) -> Job:
        """The MLflow run first (its id in the ledger before training starts), then the attempt.

        `again` looks first for the run that a failed try may have made.
        """
        attempt_number, first_step = trial.attempts + 1, 0
        if trial.run_id is None:
            key = f"{self.sweep.id}/{trial.number}"
            run_id = (self.runs.adopt([key]).get(key) if again else None) or self.runs.create(
                self._experiment_id(),
                trial_key=key,
                run_name=f"{self.sweep.name}-{trial.number}",
                params=trial.config,
                tags=self._tags(trial),
            )
            self.ledger.set_run(trial.id, run_id)
            not_before = None
        else:
            run_id = trial.run_id
            first_step = self._first_step(trial, run_id)
            not_before = self.runs.reopen(run_id, attempt_number, first_step)
        attempt = self.ledger.begin_attempt(
            trial.id,
            self.placement.host,
            first_step=first_step,
            not_before=not_before,
            pid=os.getpid(),
            git_commit=self.run_tags.get("orch.git_commit", ""),
        )
        if attempt.number > 1:
            self.runs.mirror_findings(trial.id)  # this attempt supersedes some of what was found
        artifact_uri = self.runs.artifact_uri(self._experiment_id(), run_id)
        job = self._job(trial, attempt.number, run_id, artifact_uri, _milliseconds(attempt.started_at), first_step)
        if attempt.number == 1:
            store_text(job.artifact_uri, self._spec_text, "sweep.json")
        self._remember(trial.number, TrialState.RUNNING, None, run_id=run_id)
        self.observer.started(job)
        return job

    def _first_step(self, trial: TrialRow, run_id: str) -> int:
        """Where the next attempt at a trial goes on."""
        owner = owner_of(self.workload.address, self.workload.resolve(trial.params))
        return first_step_of(self.runs.artifact_uri(self._experiment_id(), run_id), owner)

    def _close_unopened(self, trial: TrialRow, error: Exception) -> None:
        """Fails a claimed trial, however far its opening came."""
        reason = f"no MLflow run: {error}".split("\n")[0][:500]
        outcome = Outcome(TrialState.FAILED, reason=reason, error=str(error), failure=Failure.NO_RECORD)

        def reached() -> TrialRow:
            row = next(row for row in self.ledger.trials(self.sweep.id) if row.id == trial.id)
            if row.attempts == trial.attempts:
                self.ledger.begin_attempt(trial.id, self.placement.host, pid=os.getpid())
                row = replace(row, attempts=row.attempts + 1)
            return row

        row = self.patiently(reached)
        self._close(self._job(row, row.attempts, row.run_id or "", "", 0), outcome)

    def _close(self, job: Job, outcome: Outcome) -> None:
        device = self.placement.device
        if not self.patiently(
            lambda: self.ledger.finish(job.trial_id, job.attempt, outcome, host=outcome.host, device=device)
        ):
            self.without_record[job.number] = "another command has taken the trial over"
        self._remember(job.number, outcome.state, outcome)
        self._end_run(job, outcome)
        if outcome.state.is_result:
            forget(job.artifact_uri)
        self.observer.ended(job, outcome, will_retry=False)

    def _end_run(self, job: Job, outcome: Outcome) -> None:
        """Ends the MLflow run; one that cannot be written (deleted meanwhile, ...) is named at the sweep's end."""
        try:
            if not job.run_id:
                raise NotFound(outcome.reason)
            self.patiently(lambda: self._terminate(job, outcome))
        except DatabaseLost:
            raise
        except Exception as error:  # MLflow's own errors have no common base that we could name without importing it
            self.without_record[job.number] = str(error).split("\n")[0][:300]

    def _terminate(self, job: Job, outcome: Outcome) -> None:
        tags = {"orch.host": outcome.host} if outcome.host else {}
        self.runs.terminate(job.run_id, outcome.state, outcome.reason, outcome.diverged_at, tags, job.trial_id)
        if outcome.error:
            self.runs.log_text(job.run_id, outcome.error, "error.txt")

    def _deserves_retry(self, job: Job, outcome: Outcome) -> bool:
        if self.stopping or outcome.state is not TrialState.FAILED:
            return False
        self._num_failures[job.number] += 1
        if self._num_failures[job.number] > self.spec.retries.count:
            return False
        if outcome.failure is Failure.NO_OBJECTIVE:
            return False
        return self.spec.retries.any_error or outcome.failure in RETRYABLE

    def _any_objective(self) -> bool:
        return any(row.objective is not None for row in self.trials.values())

    def _history(self) -> list[Told]:
        rows = sorted(self.trials.values(), key=lambda row: row.number)
        return [Told(Candidate(row.params, row.cell, row.sample), row.state, row.objective) for row in rows]

    def _ledger_item(self, candidate: Candidate) -> tuple[Candidate, dict[str, Any], str]:
        config = flatten(self.workload.resolve(candidate.params))
        return candidate, {name: jsonable(value) for name, value in config.items()}, config_hash(candidate.params)

    def _job(
        self, trial: TrialRow, attempt: int, run_id: str, artifact_uri: str, started_at_ms: int, first_step: int = 0
    ) -> Job:
        return Job(
            sweep_id=self.sweep.id,
            trial_id=trial.id,
            number=trial.number,
            attempt=attempt,
            run_id=run_id,
            workload=self.workload.address,
            params=dict(trial.params),
            metric=self.spec.metric.name,
            stop_diverged=self.spec.stop_diverged,
            log_every=self.spec.log_every,
            checkpoint_every=self.spec.checkpoint_every,
            started_at_ms=started_at_ms,
            artifact_uri=artifact_uri,
            first_step=first_step,
            device=self.placement.device,
            trial_time_s=self.spec.resources.trial_time_s,
            thresholds=self.spec.thresholds,
            stop_on=self.spec.stop_on,
            axes=self._axes,
        )

    def _experiment_id(self) -> str:
        assert self.sweep.experiment_id is not None, "a sweep's experiment exists before its first trial"
        return self.sweep.experiment_id

    def _tags(self, trial: TrialRow) -> dict[str, str]:
        return {
            **self.spec.tags,
            **self.run_tags,
            "orch.sweep": self.sweep.name,
            "orch.number": str(trial.number),
            "orch.state": TrialState.RUNNING.value,
            "orch.attempt": "1",
        }

    def _remember(self, number: int, state: TrialState, outcome: Outcome | None, run_id: str | None = None) -> None:
        """Keeps our copy of the ledger's row in step, so that progress and searching read no database."""
        row = self.trials[number]
        self.trials[number] = replace(
            row,
            state=state,
            run_id=run_id or row.run_id,
            objective=outcome.objective if outcome else row.objective,
            attempts=row.attempts + (state is TrialState.RUNNING),
        )


def values_by_axis(spec: SweepSpec) -> dict[str, Sequence[Any]]:
    """What the sweep varies, and some of the values; an axis with one value varies nothing."""
    values = {name: distinct(ends(axis)) for name, axis in spec.axes.items()}
    return {name: several[:MAX_TRIED_VALUES] for name, several in values.items() if len(several) > 1}


def _milliseconds(moment: dt.datetime) -> int:
    return int(moment.timestamp() * 1000)


def this_host() -> str:
    return socket.gethostname()
