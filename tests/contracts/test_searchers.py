"""One kit over every searcher: what each must do, whatever its algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import Field

from orchestrator.search import Searcher, make_searcher, plan_count, plan_notes
from orchestrator.spec import SweepSpec, parse_sweep
from orchestrator.trial import Candidate, Told, TrialState, config_hash
from orchestrator.workload import Description, WorkloadConfig


class Config(WorkloadConfig):
    steps: int = 800
    c_z: float = Field(0.0, ge=0)
    k: int = 1
    lr: float = Field(1e-3, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    hidden: list[int] = Field([300])
    clip_norm: float | None = None
    seed: int = 0


def spec_of(params: str, search: str = "") -> SweepSpec:
    def load() -> Any:
        raise AssertionError("not needed")

    described = Description("toy", "", Config, ("val/mse",), load, "tests", "toy")
    text = f"workload: toy\nmetric: val/mse\nparams: {{{params}}}\n" + (f"search: {{{search}}}\n" if search else "")
    return parse_sweep(text, "t.yaml", lambda name: described)


def bowl(candidate: Candidate) -> float:
    """An objective whose best point is lr = 0.01, c_z = 0."""
    params = candidate.params
    return (math.log10(params.get("lr", 0.01)) + 2) ** 2 + params.get("c_z", 0.0) + 0.01 * params.get("seed", 0)


def finished(candidate: Candidate) -> Told:
    return Told(candidate, TrialState.FINISHED, bowl(candidate))


def diverged(candidate: Candidate) -> Told:
    return Told(candidate, TrialState.DIVERGED, math.nan)


def drive(
    searcher: Searcher, history: list[Told], tell: Callable[[Candidate], Told] = finished, batches: int | None = None
) -> list[Told]:
    """Asks one batch at a time and tells its results before the next, as a driver with one worker does."""
    while batches is None or batches > 0:
        batch = searcher.ask(history)
        if batch is None:
            return history
        assert batch, "every trial is over, so there is nothing to wait for"
        history.extend(tell(candidate) for candidate in batch)
        batches = None if batches is None else batches - 1
    return history


def params_of(history: list[Told]) -> list[dict[str, Any]]:
    return [dict(told.candidate.params) for told in history]


GRID = "steps: 4, c_z: {grid: [0, 1e-3]}, k: {grid: [1, 2, 3]}"
SAMPLED = "steps: 4, k: {grid: [1, 2]}, lr: {loguniform: [1e-4, 1]}, seed: {grid: [0, 1]}"
NESTED = (
    "steps: 4, c_z: {choice: [0, {loguniform: [1e-4, 1e-1]}]}, hidden: {choice: [[300], [200, 100]]}, "
    "lr: {uniform: [0.1, 1], step: 0.1}"
)
FINITE = "steps: 4, k: {int: [1, 4]}, precision: {choice: [fp32, bf16]}"
LOG_STEPS = "steps: {logint: [8, 512], step: 8}, lr: {loguniform: [0.1, 10], step: 0.1}, k: {logint: [1, 64]}"

KIT = {
    "grid": (GRID, "", 6),
    "grid with seeds": (GRID + ", seed: {grid: [0, 1]}", "", 12),
    "no axis": ("steps: 4", "", 1),
    "only seeds": ("steps: 4, seed: {grid: [0, 1, 2]}", "", 3),
    **{
        f"{algorithm} {name}": (params, f"algorithm: {algorithm}, samples: {samples}, seed: 3", count)
        for algorithm in ("random", "optuna")
        for name, params, samples, count in (
            ("sampled", SAMPLED, 5, 20),
            ("nested", NESTED, 14, 14),
            ("finite", FINITE, 20, 8),
            ("steps in logs", LOG_STEPS, 14, 14),
        )
    },
}


@pytest.fixture(params=list(KIT.values()), ids=list(KIT))
def case(request: pytest.FixtureRequest) -> tuple[SweepSpec, int]:
    params, search, count = request.param
    return spec_of(params, search), count


def test_the_plan_is_kept_and_no_candidate_comes_twice(case):
    spec, count = case
    history = drive(make_searcher(spec), [])
    assert plan_count(spec) == len(history) == count
    assert len({config_hash(told.candidate.params) for told in history}) == count


def test_candidates_hold_every_named_parameter_in_its_declared_type(case):
    spec, _ = case
    fields = {name: face.check for name, face in Description("", "", Config, (), lambda: None, "", "").fields().items()}
    for told in drive(make_searcher(spec), []):
        params = told.candidate.params
        assert set(params) == {*spec.fixed, *spec.axes}
        for name, value in params.items():
            checked = fields[name](value)
            assert checked == value
            assert type(checked) is type(value)
        assert set(told.candidate.cell) == set(spec.grid_axes)
        assert (told.candidate.sample is None) == (not spec.sampled_axes)


def test_a_search_resumed_half_way_equals_an_uninterrupted_one(case):
    spec, count = case
    whole = drive(make_searcher(spec), [])
    for half in {1, count // 2, count - 1}:
        resumed = drive(make_searcher(spec), whole[:half])
        assert sorted(map(config_hash, params_of(resumed))) == sorted(map(config_hash, params_of(whole)))
        if spec.search.algorithm == "optuna":
            assert params_of(resumed) == params_of(whole)


def test_a_finished_history_asks_for_nothing_more(case):
    spec, _ = case
    history = drive(make_searcher(spec), [])
    assert make_searcher(spec).ask(history) is None


def test_diverged_failed_and_infinite_results_do_not_stop_the_search(case):
    spec, count = case
    endings = (
        diverged,
        finished,
        lambda c: Told(c, TrialState.FAILED, None),
        lambda c: Told(c, TrialState.FINISHED, math.inf),
    )
    told = 0

    def tell(candidate: Candidate) -> Told:
        nonlocal told
        told += 1
        return endings[told % len(endings)](candidate)

    assert len(drive(make_searcher(spec), [], tell)) == count


def test_trials_that_still_run_are_not_given_again(case):
    spec, count = case
    history = drive(make_searcher(spec), [], lambda candidate: Told(candidate, TrialState.RUNNING, None))
    assert len({config_hash(told.candidate.params) for told in history}) == count


def test_a_driver_that_forgets_to_tell_gets_no_repeats(case):
    spec, count = case
    searcher, seen = make_searcher(spec), []
    while (batch := searcher.ask([])) is not None:
        seen += [config_hash(candidate.params) for candidate in batch]
    assert len(set(seen)) == len(seen) == count


def test_parameters_that_came_back_from_json_are_recognised():
    import json

    spec = spec_of("lr: {grid: [1.0, 1e16, 2.5]}, clip_norm: {grid: [null, 1]}")
    history = drive(make_searcher(spec), [])
    stored = json.loads(json.dumps(params_of(history)).replace("1e+16", "10000000000000000"))
    told = [Told(Candidate(params, {}), TrialState.FINISHED, 1.0) for params in stored]
    assert make_searcher(spec).ask(told) is None


def test_three_axes_of_three_are_27_and_a_sampled_fourth_makes_54():
    three = "c_z: {grid: [1, 2, 3]}, k: {grid: [1, 2, 3]}, steps: {grid: [1, 2, 3]}"
    assert plan_count(spec_of(three)) == 27
    assert plan_count(spec_of(three + ", lr: {uniform: [1, 2]}", "algorithm: random, samples: 2")) == 54


def test_a_grid_covers_all_cells_with_the_first_seed_before_the_second():
    history = drive(make_searcher(spec_of(GRID + ", seed: {grid: [5, 6]}")), [])
    assert [told.candidate.params["seed"] for told in history] == [5] * 6 + [6] * 6
    assert [(told.candidate.params["c_z"], told.candidate.params["k"]) for told in history[:6]] == [
        (c_z, k) for c_z in (0.0, 0.001) for k in (1, 2, 3)
    ]


def test_random_draws_are_the_same_in_all_cells_and_for_all_seeds():
    history = drive(make_searcher(spec_of(SAMPLED, "algorithm: random, samples: 4")), [])
    draws = {(told.candidate.params["k"], told.candidate.params["seed"]): [] for told in history}
    for told in history:
        draws[told.candidate.params["k"], told.candidate.params["seed"]].append(told.candidate.params["lr"])
    assert len(draws) == 4
    assert len({tuple(values) for values in draws.values()}) == 1


def test_more_samples_another_axis_or_more_seeds_leave_earlier_draws_alone():
    def draws(params: str, samples: int) -> list[float]:
        history = drive(make_searcher(spec_of(params, f"algorithm: random, samples: {samples}")), [])
        return [told.candidate.params["lr"] for told in history]

    few = draws("lr: {uniform: [1, 2]}", 3)
    assert draws("lr: {uniform: [1, 2]}", 6)[:3] == few
    assert draws("lr: {uniform: [1, 2]}, c_z: {uniform: [0, 1]}", 3) == few
    assert draws("lr: {uniform: [1, 2]}", 3) == few
    other = drive(make_searcher(spec_of("lr: {uniform: [1, 2]}", "algorithm: random, samples: 3, seed: 1")), [])
    assert [told.candidate.params["lr"] for told in other] != few


def test_samples_of_a_small_space_grow_without_changing_the_first_ones():
    def points(samples: int) -> list[dict[str, Any]]:
        return params_of(
            drive(make_searcher(spec_of("k: {logint: [1, 200]}", f"algorithm: random, samples: {samples}")), [])
        )

    assert points(200)[:20] == points(20)
    assert sorted(point["k"] for point in points(500)) == list(range(1, 201))


@pytest.mark.parametrize("algorithm", ["random", "optuna"])
def test_both_ends_of_an_integer_range_are_tried(algorithm):
    history = drive(make_searcher(spec_of("k: {int: [1, 4]}", f"algorithm: {algorithm}, samples: 200")), [])
    assert {told.candidate.params["k"] for told in history} == {1, 2, 3, 4}


@pytest.mark.parametrize("algorithm", ["random", "optuna"])
def test_a_space_smaller_than_samples_is_tried_whole_and_said(algorithm):
    spec = spec_of(FINITE, f"algorithm: {algorithm}, samples: 20")
    searcher = make_searcher(spec)
    drive(searcher, [])
    note = "k, precision: only 8 distinct points; samples: 20 gives 8 per cell"
    assert plan_notes(spec) == (note,)
    assert list(searcher.notes) == [note]


@pytest.mark.parametrize("algorithm", ["random", "optuna"])
def test_a_range_inside_a_choice_gives_numbers_from_both_branches(algorithm):
    history = drive(make_searcher(spec_of(NESTED, f"algorithm: {algorithm}, samples: 30")), [])
    values = [told.candidate.params["c_z"] for told in history]
    assert 0 in values
    assert all(value == 0 or 1e-4 <= value <= 1e-1 for value in values)
    assert any(value > 0 for value in values)
    assert {str(told.candidate.params["hidden"]) for told in history} == {"[300]", "[200, 100]"}


# --- Optuna alone ---------------------------------------------------------------------------------------------------

OPTUNA = "algorithm: optuna, samples: 30, seed: 0"


def test_optuna_gives_one_configuration_with_all_its_seeds_and_goes_round_the_cells():
    searcher, history, cells = make_searcher(spec_of(SAMPLED, OPTUNA)), [], []
    for _ in range(4):
        batch = searcher.ask(history)
        assert [candidate.params["seed"] for candidate in batch] == [0, 1]
        assert len({candidate.params["lr"] for candidate in batch}) == 1
        cells.append((batch[0].cell["k"], batch[0].sample))
        history += [finished(candidate) for candidate in batch]
    assert cells == [(1, 0), (2, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_optuna_learns_in_the_direction_of_the_metric(mode):
    spec = spec_of("lr: {loguniform: [1e-6, 100]}", OPTUNA)
    spec = SweepSpec(**{**vars(spec), "metric": type(spec.metric)("val/mse", mode)})
    sign = 1 if mode == "min" else -1
    history = drive(make_searcher(spec), [], lambda c: Told(c, TrialState.FINISHED, sign * bowl(c)))
    distance = [abs(math.log10(told.candidate.params["lr"]) + 2) for told in history]
    # the first ten are random over eight decades (mean distance 2); TPE then works near the best
    assert sum(distance[15:]) / 15 < 0.6 * sum(distance[:10]) / 10


def test_optuna_is_told_means_and_failures_and_nothing_that_runs_for_ever():
    from optuna.trial import TrialState as StudyState

    from orchestrator.search.optuna_search import OptunaSearcher

    spec = spec_of(SAMPLED, OPTUNA)
    searcher, history = OptunaSearcher(spec), []
    endings = [(1.0, 3.0), (1.0, math.nan), (1.0, math.inf), (None, None)]
    for ending in endings:
        batch = next(b for b in iter(lambda: searcher.ask(history), None) if b[0].cell == {"k": 1})
        for candidate, value in zip(batch, ending, strict=True):
            state = TrialState.RUNNING if value is None else TrialState.FINISHED
            history.append(Told(candidate, state, value))
    known, _ = searcher._sort(history)
    study = searcher._study(known['{"k":1}'], seed=0)
    assert [trial.state for trial in study.trials[:4]] == [
        StudyState.COMPLETE,
        StudyState.FAIL,
        StudyState.FAIL,
        StudyState.RUNNING,
    ]
    assert study.trials[0].value == 2.0
    assert study.best_value == 2.0


def test_optuna_suggests_nothing_while_an_interrupted_trial_waits_to_be_trained_again():
    spec = spec_of("lr: {loguniform: [1e-4, 1]}", "algorithm: optuna, samples: 6, seed: 0")
    whole = drive(make_searcher(spec), [])
    searcher = make_searcher(spec)
    assert searcher.ask([*whole[:2], Told(whole[2].candidate, TrialState.WAITING, None)]) == []
    assert params_of(drive(searcher, whole[:3])) == params_of(whole)


def test_a_stopped_trial_counts_with_its_last_value():
    from orchestrator.search.optuna_search import Configuration

    candidate = Candidate({}, {}, 0)
    stopped = Configuration({}, [Told(candidate, TrialState.STOPPED, 0.5)])
    assert stopped.outcome(1)[1] == 0.5
    assert Configuration({}, [Told(candidate, TrialState.STOPPED, None)]).outcome(1)[1] is None


def test_a_seed_added_later_is_trained_for_the_configurations_there_are():
    history = drive(make_searcher(spec_of(SAMPLED, "algorithm: optuna, samples: 3, seed: 0")), [])
    wider = spec_of(SAMPLED.replace("[0, 1]", "[0, 1, 2]"), "algorithm: optuna, samples: 3, seed: 0")
    batch = make_searcher(wider).ask(history)
    assert [candidate.params["seed"] for candidate in batch] == [2] * 6
    assert {candidate.params["lr"] for candidate in batch} == {told.candidate.params["lr"] for told in history}


def test_a_changed_range_does_not_break_the_search():
    history = drive(make_searcher(spec_of("lr: {uniform: [1, 100]}", "algorithm: optuna, samples: 4")), [])
    longer = drive(make_searcher(spec_of("lr: {uniform: [1, 2]}", "algorithm: optuna, samples: 6")), history)
    assert len(longer) == 6


@pytest.mark.filterwarnings("error")
def test_optuna_says_nothing_of_its_own(capfd):
    drive(make_searcher(spec_of(NESTED, OPTUNA)), [])
    drive(make_searcher(spec_of(LOG_STEPS, OPTUNA)), [])
    assert capfd.readouterr() == ("", "")
