"""One kit over every scheduler; then what each algorithm promises, held against Ray's and Optuna's own."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from orchestrator.schedulers import Scheduler, make_scheduler
from orchestrator.schedulers.population import moved
from orchestrator.schedulers.rungs import SuccessiveHalving, bracket_sizes, brackets_of
from orchestrator.spec.domains import Choice, Domain, Grid, Int, Uniform, contains
from orchestrator.spec.sweep_spec import Metric, Mode, Schedule, SweepSpec
from orchestrator.trial import Action, Decision

NAN, INF = math.nan, math.inf
Algorithm = Literal["asha", "median", "hyperband", "pbt"]
ALGORITHMS: tuple[Algorithm, ...] = ("asha", "median", "hyperband", "pbt")
LR = Uniform(1e-4, 1.0, log=True)


def spec_of(
    schedule: Schedule, mode: Mode = "min", axes: dict[str, Domain] | None = None, steps: int = 81
) -> SweepSpec:
    return SweepSpec("s", "toy", Metric("val/loss", mode), {"steps": steps}, axes or {"lr": LR}, schedule=schedule)


def schedule_of(algorithm: Algorithm) -> Schedule:
    return Schedule(algorithm, max_steps=81, reduction_factor=3, interval_steps=9, perturb=("lr",))


def scheduler_of(algorithm: Algorithm, mode: Mode = "min", num_trials: int = 24, begun: bool = True) -> Scheduler:
    scheduler = make_scheduler(spec_of(schedule_of(algorithm), mode))
    for trial in range(num_trials if begun else 0):
        scheduler.begin(trial, {"steps": 81, "lr": 0.01 * (1 + trial)})
    return scheduler


def curve(trial: int, step: int) -> float:
    """A power law towards a floor, with noise: curves cross."""
    rng = random.Random(f"{trial}/{step}")
    floor = random.Random(trial).random()
    return floor + (1 + step) ** -0.5 + rng.gauss(0, 0.02)


def reports(
    scheduler: Scheduler, num_trials: int, value: Callable[[int, int], float | None] = curve, num_steps: int = 81
) -> Iterator[tuple[int, int, float | None, Decision | None]]:
    """Every report and what it was answered, in the order in which eight busy workers make them."""
    rng, waiting, at = random.Random(0), list(range(num_trials)), dict[int, int]()
    while waiting or at:
        while waiting and len(at) < 8:
            at[waiting.pop(0)] = 0
        trial = rng.choice(sorted(at))
        at[trial] += 1
        step = at[trial]
        decision = scheduler.report(trial, step, value(trial, step))
        if is_stop(decision) or step == num_steps:
            del at[trial]
        yield trial, step, value(trial, step), decision


def is_stop(decision: Decision | None) -> bool:
    return decision is not None and decision.action is Action.STOP


def drive(
    scheduler: Scheduler, num_trials: int, value: Callable[[int, int], float | None] = curve
) -> dict[tuple[int, int], Decision]:
    """Every decision, by trial and step, in the order made."""
    return {(trial, step): one for trial, step, _, one in reports(scheduler, num_trials, value) if one is not None}


def actions(decisions: dict[tuple[int, int], Decision]) -> dict[tuple[int, int], Action]:
    return {place: decision.action for place, decision in decisions.items()}


# The kit


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_scheduler_rebuilt_from_its_decisions_decides_as_the_one_that_went_on(algorithm: Algorithm) -> None:
    whole = drive(scheduler_of(algorithm), 24)
    assert {decision.action for decision in whole.values()} > {Action.CONTINUE}
    made, num_first = list(whole.values()), len(whole) // 2
    rebuilt = scheduler_of(algorithm)
    for decision in made[:num_first]:
        rebuilt.replay(decision)
    for decision in made[num_first:]:
        assert rebuilt.report(decision.trial, decision.step, decision.value) == decision


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_that_comes_again_gets_its_decision_again_and_changes_no_other(algorithm: Algorithm) -> None:
    once, twice = scheduler_of(algorithm), scheduler_of(algorithm)
    for trial in range(12):
        expected = once.report(trial, 27, curve(trial, 27))
        assert twice.report(trial, 27, curve(trial, 27)) == expected
        assert twice.report(trial, 27, NAN) is twice.report(trial, 27, None) is twice.report(trial, 27, 0.0)
        assert twice.report(trial, 27, 0.0) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_to_maximise_is_to_minimise_the_negative(algorithm: Algorithm) -> None:
    low = drive(scheduler_of(algorithm, "min"), 24)
    high = drive(scheduler_of(algorithm, "max"), 24, lambda trial, step: -curve(trial, step))
    assert actions(low) == actions(high)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_missing_value_is_not_judged_and_the_next_one_counts_for_the_milestone(algorithm: Algorithm) -> None:
    scheduler = scheduler_of(algorithm)
    assert scheduler.report(0, 27, None) is None
    decision = scheduler.report(0, 28, 0.5)
    assert decision is not None
    assert (decision.step, decision.value) == (28, 0.5)
    assert scheduler.report(0, 29, 0.5) is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_report_across_several_milestones_is_one_decision_at_the_highest(algorithm: Algorithm) -> None:
    scheduler = scheduler_of(algorithm)
    decision = scheduler.report(0, 80, 0.5)
    assert decision is not None
    assert decision.action is Action.CONTINUE
    assert scheduler.report(0, 80, 0.1) is decision
    assert scheduler.report(0, 81, 0.1) is None


@pytest.mark.parametrize("algorithm", ["asha", "median", "hyperband"])
def test_trials_without_a_finite_value_change_nothing_for_the_others(algorithm: Algorithm) -> None:
    """Trials 24 and up report nothing finite; the first 24 are judged as if they were not there."""
    alone, among, rng = scheduler_of(algorithm), scheduler_of(algorithm), random.Random(1)
    for place in [(trial, step) for step in (1, 3, 9, 27) for trial in range(24)]:
        stopped = among.report(24 + place[0], place[1], rng.choice([NAN, INF, -INF]))
        assert stopped is None or stopped.action is Action.STOP
        assert among.report(*place, curve(*place)) == alone.report(*place, curve(*place))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trial_that_would_go_on_behind_max_steps_is_complete_there(algorithm: Algorithm) -> None:
    scheduler = make_scheduler(spec_of(schedule_of(algorithm), steps=200))
    scheduler.begin(0, {"lr": 0.1})  # 200 steps by the file
    scheduler.begin(1, {"lr": 0.1, "steps": 81})
    decision = scheduler.report(0, 81, None)
    assert decision is not None
    assert decision.action is Action.STOP
    assert decision.reason == "complete: max_steps 81 is reached"
    assert scheduler.report(1, 81, 0.5) is None  # it ends by itself: finished, not stopped


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trial_is_not_judged_at_its_own_last_step(algorithm: Algorithm) -> None:
    """Trial 2 is the worst by far. It ends at 27 by itself; trials 0 and 1 go on to 81 and are judged there."""
    scheduler = make_scheduler(spec_of(schedule_of(algorithm), axes={"lr": LR, "steps": Grid((27, 81))}))
    for trial, steps in enumerate((81, 81, 27)):
        scheduler.begin(trial, {"lr": 0.1, "steps": steps})
    for trial in (0, 1):
        assert scheduler.report(trial, 27, 0.5) is not None
    assert scheduler.report(2, 27, 9.0) is None
    assert scheduler.report(2, 28, NAN) is None  # nor behind it


def test_without_a_scheduler_nothing_is_ever_decided() -> None:
    assert drive(make_scheduler(spec_of(Schedule())), 8) == {}


# Successive halving


class FakeTrial:
    """What Ray's schedulers read of a trial."""

    def __init__(self, number: int) -> None:
        self.trial_id = str(number)


class FakeController:
    def get_live_trials(self) -> list[Any]:
        return []


class RaysScheduler:
    """One of Ray's own classes behind our face: a decision where it stops, None where it does not."""

    def __init__(self, scheduler: Any, num_trials: int) -> None:
        self._scheduler = scheduler
        self._trials = [FakeTrial(number) for number in range(num_trials)]
        for trial in self._trials:
            scheduler.on_trial_add(FakeController(), trial)

    def stops(self, trial: int, step: int, value: float) -> bool:
        result = {"step": step, "loss": value}
        return bool(self._scheduler.on_trial_result(FakeController(), self._trials[trial], result) == "STOP")


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("reduction_factor", [3, 4, 2.5])
def test_of_200_curves_the_survivors_are_those_of_rays_asha(mode: Mode, reduction_factor: float) -> None:
    from ray.tune.schedulers import AsyncHyperBandScheduler

    rays = RaysScheduler(
        AsyncHyperBandScheduler("step", "loss", mode, 81, 1, reduction_factor, brackets=1), num_trials=200
    )
    ours = make_scheduler(spec_of(Schedule("asha", 81, reduction_factor=reduction_factor), mode))
    stopped_at = {}
    for trial, step, value, decision in reports(ours, 200, num_steps=80):  # at 81 Ray stops whatever is left
        assert value is not None
        assert is_stop(decision) == rays.stops(trial, step, value), decision
        if is_stop(decision):
            stopped_at[trial] = step
    assert 170 <= len(stopped_at) < 200
    assert len({*stopped_at.values()}) >= 3  # rungs that stop somebody


def test_among_200_curves_with_holes_the_survivors_are_those_of_rays_asha_without_them() -> None:
    """NaN and infinity stop a trial at its rung; a missing value is judged at the next report. Ray sees neither."""
    from ray.tune.schedulers import AsyncHyperBandScheduler

    def holed(trial: int, step: int) -> float | None:
        draw = random.Random(f"hole/{trial}/{step}").random()
        return None if draw < 0.2 else NAN if draw < 0.25 else INF if draw < 0.3 else curve(trial, step)

    rays = RaysScheduler(AsyncHyperBandScheduler("step", "loss", "min", 81, 1, 3, brackets=1), num_trials=200)
    ours = make_scheduler(spec_of(Schedule("asha", 81, reduction_factor=3)))
    num_nonfinite = num_stopped = 0
    for trial, step, value, decision in reports(ours, 200, holed, num_steps=80):
        num_stopped += is_stop(decision)
        if value is not None and math.isfinite(value):
            assert is_stop(decision) == rays.stops(trial, step, value)
        elif decision is not None:
            assert is_stop(decision)
            num_nonfinite += 1
    assert num_nonfinite > 10
    assert num_stopped > num_nonfinite + 50


def test_one_nan_does_not_blind_successive_halving() -> None:
    scheduler = make_scheduler(spec_of(Schedule("asha", 9, reduction_factor=3), steps=9))
    decisions = [scheduler.report(trial, 1, value) for trial, value in enumerate([1.0, NAN, 2.0, 3.0, INF, 0.5])]
    assert [decision.action.value for decision in decisions if decision] == [
        *("continue", "stop", "stop", "stop", "stop", "continue")
    ]
    assert [decision.reason for decision in decisions if decision][1:4] == [
        "rung 1: nan is worse than any number",
        "rung 1: 2 is worse than 1, the cutoff for the best 33.3 % of the 1 before it",
        "rung 1: 3 is worse than 1.333, the cutoff for the best 33.3 % of the 2 before it",
    ]


def test_equal_values_all_go_on() -> None:
    """Rounding must not put the cutoff above the values it is made of."""
    scheduler = make_scheduler(spec_of(Schedule("asha", 9, reduction_factor=3), "max", steps=9))
    decisions = [scheduler.report(trial, 1, 0.1 + 0.2) for trial in range(50)]
    assert {decision.action for decision in decisions if decision} == {Action.CONTINUE}


def test_a_reason_shows_as_many_digits_as_tell_its_figures_apart() -> None:
    halving = make_scheduler(spec_of(Schedule("asha", 9, reduction_factor=3), steps=9))
    median = make_scheduler(spec_of(Schedule("median", 9, grace_steps=1), steps=9))
    for scheduler in (halving, median):
        for trial in range(3):
            scheduler.report(trial, 1, 1.304)
    close = [scheduler.report(3, 1, 1.30402) for scheduler in (halving, median)]
    equal = [scheduler.report(4, 1, 1.304) for scheduler in (halving, median)]
    assert [one.reason.split(" worse than ")[-1].split(" of the ")[0] for one in (*close, *equal) if one] == [
        *("1.304, the cutoff for the best 33.3 %", "the median 1.304"),
        *("1.304, the cutoff for the best 33.3 %", "the median 1.304"),
    ]
    assert all("1.30402" in one.reason for one in close if one)


def test_rungs_are_powers_of_the_reduction_factor_below_the_end() -> None:
    assert brackets_of(Schedule("asha", reduction_factor=3, grace_steps=100), 800) == [[100, 300]]
    assert brackets_of(Schedule("asha", reduction_factor=3), 9) == [[1, 3]]  # at 9 there is nothing left to save
    assert brackets_of(Schedule("asha", reduction_factor=2.5), 16) == [[1, 3, 7, 16][:3]]


# Hyperband


@pytest.mark.parametrize(("max_steps", "factor"), [(81, 3), (243, 3), (64, 4), (100, 3)])
def test_hyperbands_brackets_are_as_large_as_optunas_and_rays(max_steps: int, factor: int) -> None:
    import optuna
    from ray.tune.schedulers import HyperBandScheduler

    num_brackets = len(brackets_of(Schedule("hyperband", reduction_factor=factor), max_steps))
    sizes = bracket_sizes(num_brackets, factor)
    if max_steps != 243:  # the logarithm of 243 by 3 is 4.999... to Optuna: it has a bracket too few
        pruner = optuna.pruners.HyperbandPruner(1, max_steps, factor)
        pruner._try_initialization(optuna.create_study(pruner=pruner))
        assert sizes == pruner._trial_allocation_budgets
    rays = HyperBandScheduler(max_t=max_steps, reduction_factor=factor)
    assert sizes == [rays._get_n0(s) for s in reversed(range(num_brackets))]


def test_the_brackets_of_a_band_cost_about_the_same() -> None:
    """Steps of each bracket if one in three goes on from each rung, which costs it the steps it has not done yet only.

    By hand: 5 x 81 (1 + 2/3 s) / (s + 1) for a bracket with s rungs; sizes are rounded up, by less than a trial.
    """
    brackets, sizes = brackets_of(Schedule("hyperband", reduction_factor=3), 81), bracket_sizes(5, 3)
    assert sizes == [81, 34, 15, 8, 5]
    for rungs, size in zip(brackets, sizes, strict=True):
        ends = [0, *rungs, 81]
        cost = sum(size / 3**k * (ends[k + 1] - ends[k]) for k in range(len(rungs) + 1))
        exact = 5 * 81 * (1 + 2 / 3 * len(rungs)) / (len(rungs) + 1)
        assert exact - 1e-9 <= cost < exact * (1 + 1 / (size - 1))


def test_trials_are_dealt_to_brackets_by_number_and_evenly_from_the_first_on() -> None:
    scheduler = make_scheduler(spec_of(schedule_of("hyperband")))
    assert isinstance(scheduler, SuccessiveHalving)
    scheduler.bracket_of(142)
    sizes, dealt = bracket_sizes(5, 3), [scheduler.bracket_of(trial) for trial in range(143)]
    assert [dealt.count(bracket) for bracket in range(5)] == sizes
    for num_trials in range(1, 144):
        for bracket, size in enumerate(sizes):
            assert abs(dealt[:num_trials].count(bracket) - num_trials * size / 143) < 1.5


def test_the_bracket_that_stops_nobody_early_stops_nobody() -> None:
    scheduler = make_scheduler(spec_of(schedule_of("hyperband")))
    assert isinstance(scheduler, SuccessiveHalving)
    last = [trial for trial in range(143) if scheduler.bracket_of(trial) == 4]
    assert all(scheduler.report(trial, step, float(trial)) is None for trial in last for step in range(1, 81))


# The median rule


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_median_rule_stops_the_trials_that_rays_stops(mode: Mode) -> None:
    from ray.tune.schedulers import MedianStoppingRule

    rays = RaysScheduler(MedianStoppingRule("step", "loss", mode, grace_period=5, min_samples_required=3), 60)
    ours, num_stopped = make_scheduler(spec_of(Schedule("median", 81, grace_steps=5), mode)), 0
    for trial, step, value, decision in reports(ours, 60, num_steps=80):
        if decision is not None and value is not None:  # Ray is given these reports alone
            assert is_stop(decision) == rays.stops(trial, step, value), decision
        num_stopped += is_stop(decision)
    assert 10 < num_stopped < 55


def test_the_median_rule_looks_at_a_trial_about_twenty_times_however_long_it_is() -> None:
    scheduler = make_scheduler(spec_of(Schedule("median", 10_000), steps=10_000))
    assert sum(scheduler.report(0, step, 1.0) is not None for step in range(1, 10_000)) == 20


# Population-based training

PBT = Schedule(
    "pbt", 81, interval_steps=9, quantile=0.25, perturb=("lr",), seed=7
)  # a seed that scales, where a test says by how much


def population(
    size: int, axes: dict[str, Domain] | None = None, num_trials: int | None = None, schedule: Schedule = PBT
) -> Scheduler:
    scheduler = make_scheduler(spec_of(schedule, axes=axes), num_trials)
    for trial in range(size):
        scheduler.begin(trial, {"lr": 0.01 * (1 + trial), "k": trial % 2, "width": 8 * trial, "seed": trial})
    return scheduler


def test_a_member_of_the_worst_quarter_goes_on_from_one_of_the_best_with_other_parameters() -> None:
    scheduler = population(8)
    for trial in range(7):
        scheduler.report(trial, 9, 0.1 * (1 + trial))
    decision = scheduler.report(7, 9, 0.8)
    assert decision is not None
    assert decision.action is Action.EXPLOIT
    assert decision.source in (0, 1)
    lr = 0.01 * (1 + decision.source)
    assert decision.params["lr"] == pytest.approx(0.8 * lr) or decision.params["lr"] == pytest.approx(1.2 * lr)
    assert decision.reason.startswith(f"milestone 9: 0.8 is 8 of 8; goes on from trial {decision.source} (0.")


def test_what_a_member_copies_depends_on_the_others_values_not_on_their_order() -> None:
    decisions = []
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 5, 2, 4]):
        scheduler = population(8, schedule=Schedule(**{**vars(PBT), "quantile": 0.5}))
        for trial in order:
            scheduler.replay(Decision(trial, 9, 0.1 * (1 + trial), Action.CONTINUE, ""))
        decisions.append(scheduler.report(7, 9, 0.8))
    assert decisions[0] is not None
    assert decisions[0] == decisions[1] == decisions[2]


def test_a_diverged_member_copies_even_if_it_is_not_among_the_worst_quarter() -> None:
    scheduler = population(8)
    for trial, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.5, NAN, INF]):
        scheduler.report(trial, 9, value)
    decision = scheduler.report(7, 9, NAN)
    assert decision is not None
    assert (decision.action, decision.source in (0, 1)) == (Action.EXPLOIT, True)


def test_a_copy_keeps_its_own_length_and_nobody_copies_from_a_trial_that_ended_there() -> None:
    """Trials 0 and 1 train 18 steps, 2 and 3 train 81: at step 18 the first two, though better, left no state."""
    scheduler = make_scheduler(spec_of(PBT, axes={"lr": LR, "steps": Choice((18, 81))}))
    for trial in range(4):
        scheduler.begin(trial, {"lr": 0.01 * (1 + trial), "steps": 18 if trial < 2 else 81})
    early = [scheduler.report(trial, 9, 0.1 * (1 + trial)) for trial in range(4)][3]
    late = [scheduler.report(trial, 18, 0.1 * (1 + trial)) for trial in range(4)]
    assert early is not None
    assert (early.source, set(early.params)) == (0, {"lr"})
    assert late[:2] == [None, None]
    assert late[3] is not None
    assert late[3].source == 2


@pytest.mark.parametrize(
    ("num_trials", "reason"),
    [
        (2, "milestone 9: 0.1; makes room for 1 trial behind it"),
        (4, "milestone 9: 0.1; makes room for 3 trials behind it"),
    ],
)
def test_a_pause_says_for_how_many_in_words(num_trials: int, reason: str) -> None:
    decision = population(1, num_trials=num_trials).report(0, 9, 0.1)
    assert decision is not None
    assert (decision.action, decision.reason) == (Action.PAUSE, reason)


def test_a_diverged_member_that_nobody_waits_for_says_whom_it_waits_for() -> None:
    decision = population(2).report(0, 9, NAN)
    assert decision is not None
    assert decision.reason == "milestone 9: nan; waits to copy another, 1 trial of its population to come"


def test_nobody_copies_from_a_diverged_member() -> None:
    scheduler = population(4)
    values = [NAN, INF, NAN, -INF]
    decisions = [scheduler.report(trial, 9, value) for trial, value in enumerate(values)]
    assert [decision.action.value for decision in decisions if decision] == ["pause", "pause", "pause", "continue"]
    assert scheduler.resume(0) is None


def test_members_copy_within_their_cell_only_and_take_the_sampled_axes_with_the_state() -> None:
    axes: dict[str, Domain] = {"k": Grid((0, 1)), "lr": LR, "width": Int(0, 64), "seed": Grid(tuple(range(8)))}
    scheduler = population(8, axes)
    for trial in range(7):
        scheduler.report(trial, 9, 0.1 * (1 + trial))
    decision = scheduler.report(7, 9, 0.8)
    assert decision is not None
    assert decision.source == 1  # trial 0 is better, but has another k
    assert decision.params["width"] == 8
    assert set(decision.params) == {"lr", "width"}


def test_a_copy_is_no_source_at_its_milestone_and_one_far_ahead_has_no_state_left() -> None:
    scheduler = population(4)
    scheduler.report(0, 9, 0.1)
    copied = scheduler.report(1, 9, 0.2)
    assert copied is not None
    assert copied.source == 0
    for trial, value in ((2, 0.9), (3, 0.8)):
        decision = scheduler.report(trial, 9, value)
        assert decision is not None
        assert decision.source in (0, None)
    ahead = population(2)
    for step in (9, 18, 27):
        ahead.report(0, step, 0.1)
    late = ahead.report(1, 9, 0.9)
    assert late is not None
    assert late.action is Action.CONTINUE


def test_a_state_of_another_step_is_not_copied() -> None:
    """The best member's report at the milestone lacked the objective: its state is one of step 10."""
    scheduler = population(2)
    scheduler.report(0, 10, 0.1)
    decision = scheduler.report(1, 9, 0.9)
    assert decision is not None
    assert decision.action is Action.CONTINUE


def test_what_is_copied_are_the_parameters_the_state_was_trained_with() -> None:
    scheduler = population(3, schedule=Schedule(**{**vars(PBT), "quantile": 0.5}))
    scheduler.report(0, 9, 0.1)
    scheduler.report(2, 18, 0.5)
    moved_on = scheduler.report(0, 18, 0.9)  # trial 0 copies from 2 at step 18; its state of step 9 had its own lr
    assert moved_on is not None
    assert moved_on.source == 2
    decision = scheduler.report(1, 9, 0.9)
    assert decision is not None
    assert decision.source == 0
    assert decision.params["lr"] in (pytest.approx(0.008), pytest.approx(0.012))


def test_a_member_ahead_pauses_for_those_that_wait_and_is_judged_when_it_is_taken_up_again() -> None:
    """Four members on one worker."""
    scheduler = make_scheduler(spec_of(PBT), num_trials=4)
    for trial, value in enumerate([0.9, 0.1, 0.2, 0.3]):
        scheduler.begin(trial, {"lr": 0.1})
        decision = scheduler.report(trial, 9, value)
        assert decision is not None
        assert decision.action is (Action.PAUSE if trial < 3 else Action.CONTINUE)
    decision = scheduler.resume(0)
    assert decision is not None
    assert (decision.action, decision.step, decision.source) == (Action.EXPLOIT, 9, 1)
    assert scheduler.resume(0) is None
    assert scheduler.resume(1) is None  # good as it is
    assert scheduler.report(0, 9, 0.9) == decision


def test_nobody_waits_for_a_member_that_is_over_or_has_a_worker() -> None:
    scheduler = make_scheduler(spec_of(PBT), num_trials=3)
    for trial in (0, 1):
        scheduler.begin(trial, {"lr": 0.1})
    scheduler.end(2)  # never began
    decision = scheduler.report(0, 9, 0.1)
    assert decision is not None
    assert decision.action is Action.CONTINUE  # trial 1 runs


@pytest.mark.parametrize(
    "domain",
    [LR, Uniform(0.0, 1.0, step=0.25), Int(1, 9), Int(1, 1024, log=True), Choice((1, 2, 4)), Choice((0, LR))],
)
def test_a_moved_value_stays_in_its_domain_and_reaches_several_places(domain: Domain) -> None:
    rng, value, seen = random.Random(0), moved_start(domain), set()
    for _ in range(300):
        value = moved(domain, value, rng)
        assert contains(domain, value)
        assert isinstance(value, int) == isinstance(moved_start(domain), int) or isinstance(domain, Choice)
        seen.add(value)
    assert len(seen) >= 3


def moved_start(domain: Any) -> Any:
    return domain.options[0] if isinstance(domain, Choice) else domain.low


def test_a_choice_moves_to_a_neighbour_unless_it_is_drawn_anew() -> None:
    domain = Choice(tuple(range(100)))
    moves = Counter(abs(moved(domain, 50, random.Random(seed)) - 50) for seed in range(400))
    # One in four is drawn anew: 300 neighbours expected, standard deviation 8.7
    assert 300 - 35 < moves[1] < 300 + 35


def test_an_axis_that_is_inactive_stays_as_it_is() -> None:
    assert moved(LR, 0.0, random.Random(0)) == 0.0
