"""The simulated clock: workers train by their curves, ask the searcher when they are free and obey the scheduler.

What happens to a trial is what would happen in a real sweep: see `orchestrator.execution`. In a population a member
that is not finite trains on to its next milestone, where it may copy.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrator.schedulers import Scheduler
from orchestrator.search import Searcher
from orchestrator.simulation.curves import Curve, Curves
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Action, Candidate, Decision, Params, Told, TrialState


@dataclass
class SimulatedTrial:
    """One trial and how far it has come."""

    number: int
    candidate: Candidate
    curves: list[tuple[int, Curve]]  # from which step on; more than one after a copy
    params: Params  # as they are now
    state: TrialState = TrialState.WAITING
    step: int = 0
    num_steps_trained: int = 0
    value: float | None = None  # the objective at its last report that had one
    is_finite: bool = True  # so far, or since it copied a finite state
    reason: str = ""  # why it was stopped

    @property
    def curve(self) -> Curve:
        return self.curves[-1][1]

    def curve_to(self, step: int) -> Curve:
        """The curve whose state the trial had when it came to `step`, before any copy there."""
        return next(curve for since, curve in reversed(self.curves) if since < step)

    @property
    def final(self) -> float | None:
        """Its value, if it has a result that counts among the best: finished or stopped, and finite."""
        counts = self.state in (TrialState.FINISHED, TrialState.STOPPED)
        return self.value if counts and self.value is not None and math.isfinite(self.value) else None


@dataclass(frozen=True)
class Simulated:
    """What came out."""

    trials: Sequence[SimulatedTrial]
    decisions: Sequence[Decision]  # in the order made
    seconds: float  # simulated, until the last worker was done
    num_without_curve: int  # candidates that were left out

    def counts(self) -> Counter[TrialState]:
        return Counter(trial.state for trial in self.trials)

    @property
    def num_steps_trained(self) -> int:
        return sum(trial.num_steps_trained for trial in self.trials)

    @property
    def num_steps_asked(self) -> int:
        return sum(trial.curve.steps[-1] for trial in self.trials)

    def best(self, spec: SweepSpec) -> SimulatedTrial | None:
        """The trial with the best last value; of equal ones the first."""
        sign = 1 if spec.metric.mode == "min" else -1
        finals = [(sign * trial.final, trial.number, trial) for trial in self.trials if trial.final is not None]
        return min(finals)[2] if finals else None


def simulate(spec: SweepSpec, searcher: Searcher, scheduler: Scheduler, curves: Curves, num_workers: int) -> Simulated:
    """Runs the sweep to its end, or to the end of its budget of time."""
    return Clock(spec, searcher, scheduler, curves, num_workers).run()


@dataclass
class Clock:
    spec: SweepSpec
    searcher: Searcher
    scheduler: Scheduler
    curves: Curves
    num_free: int  # workers
    now_s: float = 0.0
    trials: dict[int, SimulatedTrial] = field(default_factory=dict)  # by number
    told: dict[int, Told] = field(default_factory=dict)  # by number, what the searcher knows
    decisions: list[Decision] = field(default_factory=list)
    num_candidates: int = 0
    searched_out: bool = False
    waiting: list[tuple[int, int]] = field(default_factory=list)  # a heap of (step, number): the least far goes first
    events: list[tuple[float, int, int]] = field(default_factory=list)  # a heap of (when it reports, number, step)

    def run(self) -> Simulated:
        limit_s = self.spec.budget.time_s or math.inf
        self._start_trials()
        while self.events and self.events[0][0] <= limit_s:
            self.now_s, number, step = heapq.heappop(self.events)
            self._report(self.trials[number], step)
            self._start_trials()
        if self.events:  # the budget of time is used up: they save their state and wait
            self.now_s = limit_s
            for _, number, _ in self.events:
                self._become(self.trials[number], TrialState.WAITING)
        trials = list(self.trials.values())
        return Simulated(trials, self.decisions, self.now_s, self.num_candidates - len(trials))

    def _start_trials(self) -> None:
        while self.num_free and (trial := self._claim()) is not None:
            self.num_free -= 1
            self._become(trial, TrialState.RUNNING)
            self.scheduler.begin(trial.number, trial.candidate.params)
            if decision := self.scheduler.resume(trial.number):
                self.decisions.append(decision)
                self._copy(trial, decision)
            self._go_on(trial)

    def _claim(self) -> SimulatedTrial | None:
        while not self.waiting and not self.searched_out:
            candidates = self.searcher.ask(list(self.told.values()))
            self.searched_out = candidates is None
            if not candidates:
                break
            for candidate in candidates:
                self._add(candidate)
        return self.trials[heapq.heappop(self.waiting)[1]] if self.waiting else None

    def _add(self, candidate: Candidate) -> None:
        number, self.num_candidates = self.num_candidates, self.num_candidates + 1
        curve = self.curves.of(number, candidate)
        if curve is not None:
            self.trials[number] = SimulatedTrial(number, candidate, [(-1, curve)], candidate.params)
            self.told[number] = Told(candidate, TrialState.WAITING, None)
            heapq.heappush(self.waiting, (0, number))

    def _report(self, trial: SimulatedTrial, step: int) -> None:
        trial.num_steps_trained += step - trial.step
        trial.step, value = step, trial.curve.value(step)
        if value is not None:
            trial.value = value
            trial.is_finite = trial.is_finite and math.isfinite(value)
        decision = self.scheduler.report(trial.number, step, value)
        if decision is not None:
            self.decisions.append(decision)
        self._act(trial, decision)

    def _act(self, trial: SimulatedTrial, decision: Decision | None) -> None:
        action = Action.CONTINUE if decision is None else decision.action
        may_recover = self.spec.schedule.algorithm == "pbt" and decision is None
        if decision is not None and action is Action.EXPLOIT:
            self._copy(trial, decision)
            self._go_on(trial)
        elif decision is not None and action is Action.STOP:
            trial.reason = decision.reason
            self._end(trial, TrialState.STOPPED)
        elif action is Action.PAUSE:
            heapq.heappush(self.waiting, (trial.step, trial.number))
            self._become(trial, TrialState.WAITING)
            self.num_free += 1
        elif trial.step == trial.curve.steps[-1]:
            self._end(trial, TrialState.FINISHED)
        elif not trial.is_finite and self.spec.stop_diverged and not may_recover:
            self._end(trial, TrialState.DIVERGED)
        else:
            self._go_on(trial)

    def _go_on(self, trial: SimulatedTrial) -> None:
        steps = trial.curve.steps
        step = steps[bisect_right(steps, trial.step)]
        when_s = self.now_s + (step - trial.step) * trial.curve.seconds_per_step
        heapq.heappush(self.events, (when_s, trial.number, step))

    def _copy(self, trial: SimulatedTrial, decision: Decision) -> None:
        assert decision.source is not None, "a copy has a source"
        trial.params = {**trial.params, **decision.params}
        source = self.trials[decision.source].curve_to(trial.step)
        trial.curves.append((trial.step, self.curves.copied(trial.number, source, trial.step, trial.params)))
        trial.is_finite = True

    def _end(self, trial: SimulatedTrial, state: TrialState) -> None:
        self._become(trial, state if trial.is_finite else TrialState.DIVERGED)
        self.scheduler.end(trial.number)
        self.num_free += 1

    def _become(self, trial: SimulatedTrial, state: TrialState) -> None:
        trial.state = state
        told = self.told[trial.number]
        last_step = trial.step if state.is_over else None
        self.told[trial.number] = replace(told, state=state, objective=trial.value, last_step=last_step)
