"""Drives one sweep: what trains next, what follows an ending, when it is over. Knows no backend and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from orchestrator.database.connection import is_away
from orchestrator.errors import AlreadyExists, DatabaseLost, SpecError
from orchestrator.execution.claims import Claims
from orchestrator.execution.endings import Endings, tidy
from orchestrator.execution.failures import Aftermath, Repeat, explained
from orchestrator.execution.field_reads import UNREAD_FIELD, never_read
from orchestrator.execution.job import Job
from orchestrator.execution.judging import Case, Judge, Unjudged
from orchestrator.execution.mirroring import Mirroring
from orchestrator.execution.news import News
from orchestrator.execution.opening import Opening, why_unopened
from orchestrator.execution.patience import Patience
from orchestrator.execution.population import disband
from orchestrator.execution.time_budget import TimeBudget
from orchestrator.execution.trials import Trials
from orchestrator.ledger.lease import Lease
from orchestrator.ledger.models import Wish
from orchestrator.ledger.rows import TrialRow
from orchestrator.masking import hide
from orchestrator.search import plan_count
from orchestrator.search.searcher import Searcher
from orchestrator.tracking.recorder import DISK_PATIENCE_S
from orchestrator.trial import Finding, Outcome, TrialState

BUDGET_REACHED = "budget reached"

T = TypeVar("T")


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


class SweepRun:
    """The `Feed` of one sweep. The ledger is written before anything trains and again as soon as it ends."""

    def __init__(
        self,
        opening: Opening,
        searcher: Searcher,
        observer: Observer,
        refresh_views: Callable[[bool], None],
        lease: Lease,
        mirroring: Mirroring,
        revive_database: Callable[[], None],
        broken: Callable[[str], None],
    ) -> None:
        """`broken`, told why, ends the command without a word more to the backend."""
        self.opening, self.observer, self._lease = opening, observer, lease
        self.sweep, self.spec, self.ledger, self.runs = opening.sweep, opening.spec, opening.ledger, opening.runs
        self.refresh_views, self._mirroring = refresh_views, mirroring
        self.abort_reason = ""
        self.interrupted = False
        self.overdue = False  # what still runs although it was told to stop has had its time
        self.cancelled = False  # by `orch cancel`, from wherever
        self.lost_to: AlreadyExists | None = None  # another command drives this sweep now
        self.broken = broken
        self._said_stopping = False
        self._trouble = ""  # of the recorders with the database
        self._said_disk = False  # that a journal cannot be written
        self.trials = Trials(self.ledger.trials(self.sweep.id), plan_count(self.spec))
        self.time = TimeBudget(self.spec.budget.time_s, self.ledger, self.sweep.id)
        self.patiently = Patience(observer.said, lambda: self.interrupted, lease.renew, revive_database)
        self._claims = Claims(
            self.sweep.id, self.spec, opening.workload, searcher, self.ledger, self.trials, self.patiently
        )
        self._judge: Judge = Unjudged()
        self._endings = Endings(self.ledger, self.runs, self.trials, self.patiently)
        self.without_record = self._endings.without_record
        self._aftermath = Aftermath(self.sweep.name, self.spec, self.trials)
        self._news = News(self.ledger, self.sweep.id)

    # What the command asks

    @property
    def running(self) -> list[int]:
        return self.trials.running

    def interrupt(self) -> None:
        """What the first signal does: running trials save their state and end, nothing new starts."""
        self.interrupted = True

    def expand(self) -> None:
        """Asks the searcher for the first trials, or for more."""
        self._unless_refused(self._claims.expand)

    # The feed, called by a backend: what trains next

    @property
    def stopping(self) -> bool:
        return self.interrupted or bool(self.abort_reason) or self.lost_to is not None or self.time.is_up

    @property
    def case(self) -> Case | None:
        if self.spec.schedule.algorithm == "none":
            return None
        return Case(self.sweep.id, self.spec, self.trials.num_planned)

    def judged_by(self, judge: Judge) -> None:
        self._judge = judge

    def placeable(self, hosts: Mapping[str, str]) -> None:
        self._aftermath.machines.hosts = hosts

    @property
    def avoided(self) -> Collection[str]:
        return self._aftermath.machines.avoided

    def exhausted(self) -> bool:
        return self._claims.is_searched_out and self.trials.are_over

    def next_job(self) -> Job | None:
        if self.lost_to is not None:
            raise self.lost_to
        while not self.stopping and (trial := self._unless_refused(self._claims.next)) is not None:
            try:
                return self._opened(trial)
            except (DatabaseLost, AlreadyExists):  # these end the command
                raise
            except Exception as error:  # no run (experiment deleted, ...): this trial fails, the rest goes on
                self._close(self.patiently(partial(self.opening.unopened, trial)), why_unopened(error))
        return None

    def _unless_refused(self, claim: Callable[[], T]) -> T | None:
        """None where the workload refuses a draw: the sweep ends with what is trained by now."""
        try:
            return claim()
        except SpecError as error:
            if not self.trials:
                raise
            self.abort_reason = str(error)
            return None

    def _opened(self, trial: TrialRow) -> Job:
        opened = partial(self.opening.open, trial, self._judge)
        job = self.patiently(opened, partial(opened, again=True))
        self.trials.begun(job)
        self.time.begun()
        self.observer.started(job)
        return job

    # What follows an ending

    def ended(self, job: Job, outcome: Outcome) -> None:
        outcome = self._as_asked(self._discreet(outcome))
        if outcome.state is TrialState.WAITING:
            self._endings.put_back(job, outcome)
        elif repeat := self._aftermath.repeat(job, outcome, self.stopping):
            self._try_again(repeat)
            self.observer.ended(job, outcome, will_retry=True)
        else:
            self._close(job, outcome)
        self.time.ended()

    def _discreet(self, outcome: Outcome) -> Outcome:
        """Without the database's password, which a workload may have read somewhere and put into its error's text."""
        secrets = [str(self.ledger.engine.url.password or "")]
        return replace(outcome, reason=hide(outcome.reason, secrets), error=hide(outcome.error, secrets))

    def _as_asked(self, outcome: Outcome) -> Outcome:
        """What was cut short bears the name of what cut it short; it was not the trial's doing."""
        if outcome.state is TrialState.KILLED and self.cancelled:
            outcome = replace(outcome, reason="cancelled")
        if outcome.state is TrialState.KILLED and self.time.is_up and not self.interrupted:
            outcome = replace(outcome, state=TrialState.WAITING, reason=BUDGET_REACHED)
        return outcome

    def _try_again(self, repeat: Repeat) -> None:
        for job, outcome in repeat.attempts:
            self._endings.put_back(job, outcome, repeat.alone)
        if repeat.remark:
            self.observer.said(repeat.remark)

    def _close(self, job: Job, outcome: Outcome) -> None:
        """The trial ends, and with it the sweep where that shows that others will do no better."""
        last_word = explained(outcome, job)
        self._endings.close(job, last_word)
        self._judge.over(job.number)
        if outcome.state.is_result:
            tidy(job, self.observer.said)
        self.observer.ended(job, last_word, will_retry=False)
        why_hopeless = self._aftermath.why_hopeless(job, outcome)
        if not self.stopping:
            self.abort_reason = why_hopeless

    # While trials run, and after

    def troubled(self, database: str, disk: str) -> None:
        self._trouble = database
        if disk and not self._said_disk:
            self.observer.said(f"{disk}\nuntil then reports wait in memory; after {DISK_PATIENCE_S:.0f} s trials fail")
        self._said_disk = bool(disk)

    def tick(self) -> None:
        self._hear()
        self.patiently.note(self._lease.trouble or self._trouble)
        try:
            self._lease.check()
            self.time.look()
            self.refresh_views(False)
            self._mirroring.tick(self.trials.history)
            if self._news.is_due():
                self._tell_news()
        except AlreadyExists as error:
            self.lost_to = error
        except Exception as error:  # away for a moment: a view that is a little behind stops nobody
            if not is_away(error):
                raise

    def _hear(self) -> None:
        """Says once that the sweep was told to stop. A wish not to wait for that is the lease's thread's."""
        if self._lease.wanted is Wish.CANCEL and not self.cancelled:
            self.cancelled = self.interrupted = self._said_stopping = True
            self.observer.said("cancelled by `orch cancel`: running trials save their state and end")
        if self.interrupted and not self._said_stopping:
            self._said_stopping = True
            self.observer.said("stopping: running trials save their state and end; once more stops at once")

    def recorded(self) -> None:
        if self.lost_to is not None:
            return
        if self.trials.are_over:
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
        if run_id is not None and (folder := self.opening.population_of(run_id)) is not None:
            disband(folder)

    def _tell_news(self) -> None:
        for row in self._news.take():
            self.observer.found(row.number, row.finding)

    def _never_read(self) -> list[str]:
        """The axes that acted in no finished trial of the sweep, those of earlier commands included."""
        counts = self.ledger.count_messages(self.sweep.id, UNREAD_FIELD)
        finished = [row.params for row in self.trials.values() if row.state is TrialState.FINISHED]
        return never_read(self.spec, counts, finished)
