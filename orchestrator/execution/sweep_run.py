"""Drives one sweep: claims trials, opens their runs, records their fate. Knows no backend and prints nothing."""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.database.borrow import borrowed
from orchestrator.database.connection import is_away
from orchestrator.errors import AlreadyExists, DatabaseLost, NotFound, ResourceError, SpecError
from orchestrator.execution.checkpoints import Unusable, first_step_of, forget, keep_two, owner_of
from orchestrator.execution.failures import Again, Attempted, Machines, Streak, explained, verdict_on
from orchestrator.execution.field_reads import UNREAD_FIELD, field_of
from orchestrator.execution.job import Job
from orchestrator.execution.judging import Case, Judge, Start, Unjudged, copy_in_words
from orchestrator.execution.mirroring import Mirroring
from orchestrator.execution.news import News
from orchestrator.execution.patience import Patience
from orchestrator.execution.population import disband, population_folder
from orchestrator.execution.time_budget import TimeBudget
from orchestrator.ledger.lease import Lease, Unheld
from orchestrator.ledger.models import Wish
from orchestrator.ledger.rows import SweepRow, TrialRow
from orchestrator.ledger.store import Ledger
from orchestrator.masking import hide
from orchestrator.search import plan_count
from orchestrator.search.searcher import Searcher
from orchestrator.spec.cross_fields import resolved
from orchestrator.spec.domains import distinct, ends
from orchestrator.spec.relations import is_active
from orchestrator.spec.resolved import to_json
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.tracking.artifacts import store_text
from orchestrator.tracking.bulk import write_decisions
from orchestrator.tracking.recorder import DISK_PATIENCE_S
from orchestrator.tracking.records import DecisionRow
from orchestrator.trial import Candidate, Failure, Finding, Outcome, Params, Told, TrialState, config_hash, jsonable
from orchestrator.workload import Description, flatten

if TYPE_CHECKING:  # MLflow takes a second to import: a finished sweep is shown without it
    from orchestrator.tracking.runs import Runs

BUDGET_REACHED = "budget reached"
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
        lease: Lease | Unheld,
        mirroring: Mirroring | None = None,
        revive_database: Callable[[], None] = lambda: None,
    ) -> None:
        self.sweep, self.spec, self.workload, self.searcher = sweep, spec, workload, searcher
        self.ledger, self.runs, self.observer, self.placement = ledger, runs, observer, placement
        self.run_tags, self.refresh_views, self.mirroring = run_tags, refresh_views, mirroring
        self.trials: dict[int, TrialRow] = {row.number: row for row in ledger.trials(sweep.id)}
        self.abort_reason = ""
        self.without_record: dict[int, str] = {}  # trial number -> why MLflow does not show how it ended
        self.interrupted = False
        self.overdue = False  # what still runs although it was told to stop has had its time
        self.cancelled = False  # by `orch cancel`, from wherever
        self.lost_to: AlreadyExists | None = None  # another command drives this sweep now
        self.end_broken: Callable[[str], None] = _raise_broken  # ends the command without a word more to the backend
        self.time = TimeBudget(spec.budget.time_s, ledger, sweep.id)
        self._judge: Judge = Unjudged()
        self._num_failures: Counter[int] = Counter()  # by trial number, since this command began
        self._streak, self._machines = Streak(), Machines()
        self._alone = {row.number for row in self.trials.values() if row.alone}
        self._lease = lease
        self.patiently = Patience(observer.said, lambda: self.interrupted, lease.renew, revive_database)
        self._spec_text = json.dumps(to_json(spec), indent=2, ensure_ascii=False)
        self._axes = values_by_axis(spec)
        self._news = News(ledger, sweep.id)
        self._searched_out = False
        self._said_stopping = False
        self._trouble = ""  # of the recorders with the database
        self._said_disk = False  # that a journal cannot be written

    def interrupt(self) -> None:
        """What the first signal does: running trials save their state and end, nothing new starts."""
        self.interrupted = True

    # The feed, called by a backend

    @property
    def stopping(self) -> bool:
        return self.interrupted or bool(self.abort_reason) or self.lost_to is not None or self.time.is_up

    @property
    def case(self) -> Case | None:
        if self.spec.schedule.algorithm == "none":
            return None
        return Case(self.sweep.id, self.spec, plan_count(self.spec))

    def judged_by(self, judge: Judge) -> None:
        self._judge = judge

    def next_job(self) -> Job | None:
        if self.lost_to is not None:
            raise self.lost_to
        while not self.stopping and (trial := self._claim()) is not None:
            try:
                return self._opened(trial)
            except (DatabaseLost, AlreadyExists):  # these end the command
                raise
            except Exception as error:  # no run (experiment deleted, ...): this trial fails, the rest goes on
                self._close_unopened(trial, error)
        return None

    def exhausted(self) -> bool:
        # A running trial may come back for another attempt.
        return self._searched_out and all(row.state.is_over for row in self.trials.values())

    def ended(self, job: Job, outcome: Outcome) -> None:
        outcome = self._discreet(outcome)
        if outcome.state is TrialState.KILLED and self.cancelled:
            outcome = replace(outcome, reason="cancelled")
        if outcome.state is TrialState.KILLED and self.time.is_up and not self.interrupted:
            outcome = replace(outcome, state=TrialState.WAITING, reason=BUDGET_REACHED)
        if outcome.state is TrialState.WAITING:
            self._put_back(job, outcome)
        elif not self._tried_again(job, outcome):
            self._close(job, explained(outcome, job))
            self._look_ahead(job, outcome)
        self.time.ended()

    def placeable(self, hosts: Mapping[str, str]) -> None:
        self._machines.hosts = hosts

    @property
    def avoided(self) -> Collection[str]:
        return self._machines.avoided

    def _look_ahead(self, job: Job, outcome: Outcome) -> None:
        """Stops the sweep where what has just ended shows that others will do no better."""
        self._streak = self._streak.after(job.number, outcome)
        if not self.stopping:
            self.abort_reason = self._hopeless(job, outcome)

    def _discreet(self, outcome: Outcome) -> Outcome:
        """Without the database's password, which a workload may have read somewhere and put into its error's text."""
        secrets = [str(self.ledger.engine.url.password or "")]
        return replace(outcome, reason=hide(outcome.reason, secrets), error=hide(outcome.error, secrets))

    def _hopeless(self, job: Job, outcome: Outcome) -> str:
        """Why no other trial will do better than this one; empty where one may."""
        if outcome.failure is Failure.NO_OBJECTIVE and not self._any_objective():
            return f"trial {job.number} ended, but it {outcome.reason}; set metric.name to one of these"
        if outcome.failure is Failure.NO_CHECKPOINT:
            return f"no trial of {job.workload} can go on without a saved state: see trial {job.number} above"
        is_common = self.spec.same_error is not None and len(self._streak.trials) >= self.spec.same_error
        if is_common and self._is_more_to_come():
            return self._streak.explanation(self.sweep.name, self.counts()[TrialState.WAITING])
        return ""

    @property
    def is_left(self) -> bool:
        """True if there is something to resume."""
        is_unfinished = any(row.state.is_unfinished for row in self.trials.values())
        return is_unfinished or len(self.trials) < plan_count(self.spec)

    @property
    def running(self) -> list[int]:
        """The numbers of the trials that run."""
        return [number for number, row in list(self.trials.items()) if row.state is TrialState.RUNNING]

    def _is_more_to_come(self) -> bool:
        return not all(row.state.is_over for row in self.trials.values()) or len(self.trials) < plan_count(self.spec)

    def broken(self, why: str) -> None:
        self.end_broken(why)

    def troubled(self, database: str, disk: str) -> None:
        self._trouble = database
        if disk and not self._said_disk:
            self.observer.said(f"{disk}\nuntil then reports wait in memory; after {DISK_PATIENCE_S:.0f} s trials fail")
        self._said_disk = bool(disk)

    def tick(self) -> None:
        if (
            self._lease.wanted is Wish.CANCEL and not self.cancelled
        ):  # what is not to wait is done by the lease's thread
            self.cancelled = self.interrupted = self._said_stopping = True
            self.observer.said("cancelled by `orch cancel`: running trials save their state and end")
        if self.interrupted and not self._said_stopping:
            self._said_stopping = True
            self.observer.said("stopping: running trials save their state and end; once more stops at once")
        self.patiently.note(self._lease.trouble or self._trouble)
        try:
            self._lease.check()
            self.time.look()
            self.refresh_views(False)
            if self.mirroring is not None:
                self.mirroring.tick(self.history)
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
        if all(row.state.is_over for row in self.trials.values()):
            self._disband()
        self.patiently(self._tell_news)
        if not self.stopping and (fields := self.patiently(self._never_read)):
            self.abort_reason = (
                f"no finished trial read {', '.join(fields)}: all values are the same training under other labels; "
                "make the workload use it, or take it out of params"
            )

    def _disband(self) -> None:
        """Nobody copies any more: the population's states go."""
        run_id = next((row.run_id for row in self.trials.values() if row.run_id), None)
        if run_id is None or self.spec.schedule.algorithm != "pbt":
            return
        if (folder := population_folder(self.runs.artifact_uri(self._experiment_id(), run_id))) is not None:
            disband(folder)

    def _tell_news(self) -> None:
        for row in self._news.take():
            self.observer.found(row.number, row.finding)

    def _never_read(self) -> list[str]:
        """The axes that acted in no finished trial of the sweep, those of earlier commands included."""
        counts = self.ledger.count_messages(self.sweep.id, UNREAD_FIELD)
        unread = {field_of(message): count for message, count in counts.items()}
        finished = [row.params for row in self.trials.values() if row.state is TrialState.FINISHED]
        return [name for name in self._axes if unread.get(name) == sum(map(self._has(name), finished)) > 0]

    def _has(self, axis: str) -> Callable[[Params], bool]:
        """Whether the axis exists for a trial of these parameters."""
        return lambda params: is_active(self.spec, axis, params)

    # What the command reads

    def counts(self) -> Counter[TrialState]:
        return Counter(row.state for row in self.trials.values())

    def expand(self) -> Sequence[TrialRow]:
        """Asks the searcher for more and writes what is new into the ledger, before anything trains."""
        candidates = self.searcher.ask(self.history())
        if candidates is None:
            self._searched_out = True
            return ()
        try:
            items = [self._ledger_item(candidate) for candidate in candidates]
        except SpecError as error:
            if not self.trials:
                raise
            self.abort_reason, self._searched_out = str(error), True  # what is trained by now is kept
            return ()

        def add_again() -> Sequence[TrialRow]:
            self.ledger.add_trials(self.sweep.id, items)  # the first try may have added them
            return [row for row in self.ledger.trials(self.sweep.id) if row.number not in self.trials]

        rows = self.patiently(lambda: self.ledger.add_trials(self.sweep.id, items), add_again)
        self.trials.update((row.number, row) for row in rows)
        return rows

    # Parts

    def _claim(self) -> TrialRow | None:
        if any(self.trials[number].state is TrialState.RUNNING for number in self._alone):
            return None  # nobody trains beside it
        trial = self._claimed()
        while trial is None and not self._searched_out and self.expand():
            trial = self._claimed()
        return trial

    def _claimed(self) -> TrialRow | None:
        if self._alone and self._must_wait():
            return None

        def claim_again() -> TrialRow | None:
            """A claim whose answer was lost has a trial running that nobody trains."""
            lost = [row for row in self.ledger.trials(self.sweep.id) if self._waits_for_us(row)]
            return min(lost, key=lambda row: row.number) if lost else self.ledger.claim(self.sweep.id)

        return self.patiently(lambda: self.ledger.claim(self.sweep.id), claim_again)

    def _must_wait(self) -> bool:
        """True while others run, if only trials are left that train alone."""
        rows = self.trials.values()
        is_left = any(row.state is TrialState.WAITING and not row.alone for row in rows)
        return not is_left and any(row.state is TrialState.RUNNING for row in rows)

    def _waits_for_us(self, row: TrialRow) -> bool:
        ours = self.trials.get(row.number)
        return row.state is TrialState.RUNNING and ours is not None and ours.state is TrialState.WAITING

    def _opened(self, trial: TrialRow) -> Job:
        return self.patiently(lambda: self._open(trial), lambda: self._open(trial, again=True))

    def _open(self, trial: TrialRow, again: bool = False) -> Job:
        """The MLflow run first (its id in the ledger before training starts), then the attempt.

        `again` looks first for the run that a failed try may have made.
        """
        run_id = trial.run_id or self._new_run(trial, again)
        first_step = self.first_step_of(trial)
        start = self._judge.begin(trial.number, trial.params, first_step)
        not_before = None
        if trial.run_id:
            not_before = self.runs.reopen(run_id, trial.attempts + 1, first_step, self._noted(trial, start))
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
        job = self._job(
            replace(trial, run_id=run_id),
            attempt.number,
            artifact_uri,
            _milliseconds(attempt.started_at),
            first_step,
            start,
        )
        if attempt.number == 1:
            store_text(job.artifact_uri, self._spec_text, "sweep.json")
        self._begun(job)
        return job

    def _new_run(self, trial: TrialRow, again: bool) -> str:
        key = f"{self.sweep.id}/{trial.number}"
        run_id = (self.runs.adopt([key]).get(key) if again else None) or self.runs.create(
            self._experiment_id(),
            trial_key=key,
            run_name=f"{self.sweep.name}-{trial.number}",
            params=trial.config,
            tags=self._tags(trial),
        )
        try:
            self.ledger.set_run(trial.id, run_id)
        except AlreadyExists:  # whoever has the sweep now makes runs of their own
            self.runs.discard(run_id)
            raise
        return run_id

    def _begun(self, job: Job) -> None:
        self._remember(job.number, TrialState.RUNNING, None, run_id=job.run_id)
        self.time.begun()
        self.observer.started(job)

    def _noted(self, trial: TrialRow, start: Start) -> dict[str, str]:
        """Stores what was decided where the trial paused, before anybody acts on it; the tag of a copy."""
        if start.decision is None:
            return {}
        with borrowed(self.ledger.engine) as connection:
            write_decisions(connection, [DecisionRow(self.sweep.id, trial.id, trial.attempts, start.decision)])
        is_copy = start.source is not None
        return {f"orch.exploit.step-{start.decision.step}": copy_in_words(start.decision)} if is_copy else {}

    def first_step_of(self, trial: TrialRow) -> int:
        """Where the next attempt at a trial goes on; 0 is the start. Raises Unusable when nobody can say."""
        if not trial.run_id:
            return 0
        owner = owner_of(self.workload.address, self.workload.resolve(trial.params))
        return first_step_of(self.runs.artifact_uri(self._experiment_id(), trial.run_id), owner)

    def _close_unopened(self, trial: TrialRow, error: Exception) -> None:
        """Fails a claimed trial, however far its opening came."""
        what = "not started" if isinstance(error, Unusable) else "no MLflow run"
        reason = f"{what}: {error}".split("\n")[0][:500]
        outcome = Outcome(TrialState.FAILED, reason=reason, error=str(error), failure=Failure.NO_RECORD)

        def reached() -> TrialRow:
            row = next(row for row in self.ledger.trials(self.sweep.id) if row.id == trial.id)
            if row.attempts == trial.attempts:
                self.ledger.begin_attempt(trial.id, self.placement.host, pid=os.getpid())
                row = replace(row, attempts=row.attempts + 1)
            return row

        row = self.patiently(reached)
        job = self._job(row, row.attempts, artifact_uri="", started_at_ms=0)
        self._close(job, outcome)
        self._look_ahead(job, outcome)

    def _put_back(self, job: Job, outcome: Outcome, alone: bool = False) -> None:
        """Lets the trial wait for another attempt; meanwhile MLflow does not show its run as running."""
        self.patiently(lambda: self.ledger.requeue(job.trial_id, job.attempt, outcome, alone=alone))
        self._remember(job.number, TrialState.WAITING, outcome)
        if alone:
            self._alone.add(job.number)
            self.trials[job.number] = replace(self.trials[job.number], alone=True)
        self._end_run(job, replace(outcome, state=TrialState.WAITING, error=""))

    def _close(self, job: Job, outcome: Outcome) -> None:
        device = self.placement.device
        if not self.patiently(
            lambda: self.ledger.finish(job.trial_id, job.attempt, outcome, host=outcome.host, device=device)
        ):
            self.without_record[job.number] = "another command has taken the trial over"
        self._remember(job.number, outcome.state, outcome)
        self._end_run(job, outcome)
        self._judge.over(job.number)
        if outcome.state.is_result:
            self._tidy(job)
        self.observer.ended(job, outcome, will_retry=False)

    def _tidy(self, job: Job) -> None:
        """Leaves of a trial's states those that are still good for something. What stays costs space, no more."""
        try:
            keep_two(job.artifact_uri, job.mode) if self.spec.keep_checkpoints else forget(job.artifact_uri)
        except OSError as error:
            why = error.strerror or error
            self.observer.said(f"trial {job.number}: states that it needs no more could not be removed ({why})")

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

    def _tried_again(self, job: Job, outcome: Outcome) -> bool:
        """Puts a trial back whose failure may be none of its own."""
        if not self.stopping and (blamed := self._machines.blamed(job, outcome)):
            self._run_elsewhere(blamed)
        else:
            again = verdict_on(outcome, job, self._num_failures[job.number], self.spec.retries, self.stopping)
            if again is Again.NO:
                return False
            self._num_failures[job.number] += again is Again.RETRY
            self._put_back(job, outcome, alone=again is Again.ALONE)
        self.observer.ended(job, outcome, will_retry=True)
        return True

    def _run_elsewhere(self, blamed: Sequence[Attempted]) -> None:
        """Puts back what failed through its machine, closed or not; none of it counts as a retry or as one error."""
        for job, outcome in blamed:
            row = self.trials[job.number]
            if row.attempts == job.attempt and row.state in (TrialState.RUNNING, TrialState.FAILED):
                self._put_back(job, outcome)
            else:  # it is being tried again
                self._num_failures[job.number] -= 1
        self._streak = self._streak.without(job.number for job, _ in blamed)
        if len(blamed) > 1:
            self.observer.said(self._machines.remark(blamed))

    def _any_objective(self) -> bool:
        return any(None not in (row.objective, *row.more_objectives) for row in self.trials.values())

    def history(self) -> list[Told]:
        """What a searcher is told: every trial so far, by number."""
        rows = sorted(self.trials.values(), key=lambda row: row.number)
        return [
            Told(row.candidate, row.state, row.objective, tuple(row.more_objectives), row.last_step) for row in rows
        ]

    def _ledger_item(self, candidate: Candidate) -> tuple[Candidate, dict[str, Any], str]:
        """Raises SpecError for a trial that the workload refuses."""
        config = flatten(resolved(self.spec, self.workload.resolve, candidate.params))
        return candidate, {name: jsonable(value) for name, value in config.items()}, config_hash(candidate.params)

    def _job(
        self,
        trial: TrialRow,
        attempt: int,
        artifact_uri: str,
        started_at_ms: int,
        first_step: int = 0,
        start: Start | None = None,
    ) -> Job:
        start = start or Start()
        population = population_folder(artifact_uri) if self.spec.schedule.algorithm == "pbt" else None
        return Job(
            sweep_id=self.sweep.id,
            trial_id=trial.id,
            number=trial.number,
            attempt=attempt,
            run_id=trial.run_id or "",
            workload=self.workload.address,
            params=dict(trial.params),
            metric=self.spec.metric.name,
            stop_diverged=self.spec.stop_diverged,
            log_every=self.spec.log_every,
            checkpoint_every=self.spec.checkpoint_every,
            keep_checkpoints=self.spec.keep_checkpoints,
            mode=self.spec.metric.mode,
            git_commit=self.run_tags.get("orch.git_commit", ""),
            started_at_ms=started_at_ms,
            artifact_uri=artifact_uri,
            first_step=first_step,
            device=self.placement.device,
            trial_time_s=self.spec.resources.trial_time_s,
            thresholds=self.spec.thresholds,
            stop_on=self.spec.stop_on,
            axes={name: values for name, values in self._axes.items() if self._has(name)(trial.params)},
            more_metrics=[metric.name for metric in self.spec.more_metrics],
            changes=start.changes,
            copy_from=start.source,
            max_steps=self.spec.schedule.max_steps,
            alone=trial.alone,
            gpu_share=self.spec.resources.gpu,
            population=str(population or ""),
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
        said = row if outcome is None or outcome.last_step is None else outcome  # else it reported nothing new
        self.trials[number] = replace(
            row,
            state=state,
            run_id=run_id or row.run_id,
            objective=said.objective,
            more_objectives=list(said.more_objectives),
            last_step=said.last_step,
            attempts=row.attempts + (state is TrialState.RUNNING),
        )


def values_by_axis(spec: SweepSpec) -> dict[str, Sequence[Any]]:
    """What the sweep varies, and some of the values; an axis with one value varies nothing."""
    elsewhere = {name: (when.otherwise,) for name, when in spec.when.items()}
    values = {name: distinct([*ends(axis), *elsewhere.get(name, ())]) for name, axis in spec.axes.items()}
    return {name: several[:MAX_TRIED_VALUES] for name, several in values.items() if len(several) > 1}


def _raise_broken(why: str) -> None:
    raise ResourceError(why)


def _milliseconds(moment: dt.datetime) -> int:
    return int(moment.timestamp() * 1000)


def this_host() -> str:
    return socket.gethostname()
