"""One kit over every searcher: what each must do, whatever its algorithm."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic import Field

from orchestrator.search import Searcher, make_searcher, missing_extra, plan_count, plan_notes, search_problems
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


def spec_of(params: str, search: str = "", more: str = "", metric: str = "val/mse") -> SweepSpec:
    def load() -> Any:
        raise AssertionError("not needed")

    described = Description("toy", "", Config, ("val/mse", "cost"), load, "tests", "toy")
    text = f"workload: toy\nmetric: {metric}\nparams: {{{params}}}\n" + (f"search: {{{search}}}\n" if search else "")
    return parse_sweep(text + more, "t.yaml", lambda name: described)


def bowl(candidate: Candidate) -> float:
    """An objective whose best point is lr = 0.01, c_z = 0."""
    params = candidate.params
    return (math.log10(params.get("lr", 0.01)) + 2) ** 2 + params.get("c_z", 0.0) + 0.01 * params.get("seed", 0)


def finished(candidate: Candidate) -> Told:
    """The second metric has its best point at lr = 1."""
    cost = math.log10(candidate.params.get("lr", 1.0)) ** 2
    return Told(candidate, TrialState.FINISHED, bowl(candidate), (cost,))


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

CONDITIONAL = "precision: {choice: [fp32, bf16]}, c_z: {loguniform: [1e-4, 1]}, lr: {loguniform: [1e-4, 1]}"
WHEN = "when: {c_z: {precision: bf16}}"
FEW = "steps: {grid: [4, 8]}, precision: {choice: [fp32, bf16]}, k: {int: [1, 3]}"
HALF = "steps: 4, lr: {uniform: [0.1, 1]}, k: {int: [1, 4]}"

KIT = {
    "grid": (GRID, "", "", 6),
    "grid with seeds": (GRID + ", seed: {grid: [0, 1]}", "", "", 12),
    "no axis": ("steps: 4", "", "", 1),
    "only seeds": ("steps: 4, seed: {grid: [0, 1, 2]}", "", "", 3),
    "grid with a condition": ("precision: {grid: [fp32, bf16]}, c_z: {grid: [0, 1, 2]}", "", WHEN, 4),
    "grid with a zip": (GRID + ", lr: {grid: [0.1, 0.2, 0.3]}", "", "zip: [[k, lr]]", 6),
    "grid with exclusions": (GRID, "", "exclude: [{k: 1, c_z: 1e-3}, {k: [2, 3], c_z: 0}]", 3),
    "grid with an excluded seed": (GRID + ", seed: {grid: [0, 1]}", "", "exclude: [{k: [1, 2], seed: 1}]", 8),
    **{
        f"{name} {kind}": (params, f"{search}, samples: {samples}, seed: 3", more, count)
        for name, search in {
            "random": "algorithm: random",
            "tpe": "algorithm: optuna",
            "qmc": "algorithm: optuna, sampler: qmc",
            "nsga2": "algorithm: optuna, sampler: nsga2",
        }.items()
        for kind, (params, samples, more, count) in {
            "sampled": (SAMPLED, 5, "", 20),
            "nested": (NESTED, 14, "", 14),
            "finite": (FINITE, 20, "", 8),
            "steps in logs": (LOG_STEPS, 14, "", 14),
            "conditional": (CONDITIONAL, 14, WHEN, 14),
            "finite where a condition fails": (FEW, 20, "when: {k: {precision: bf16, steps: 4}}", 6),
            "with exclusions": (HALF, 8, "exclude: [{k: [1, 2]}]", 8),
            "with room for three": (SAMPLED, 8, "budget: {trials: 15}", 12),
            "with enqueued points": (HALF, 5, "", 5),
        }.items()
        if name in ("random", "tpe") or kind in ("nested", "conditional", "with enqueued points")
    },
    "cmaes": (HALF, "algorithm: optuna, sampler: cmaes, samples: 14, seed: 3", "", 14),
}
ENQUEUED = ", enqueue: [{lr: 0.25, k: 3}, {k: 2}, {lr: 0.25, k: 3}]"


@pytest.fixture(params=list(KIT), ids=list(KIT))
def case(request: pytest.FixtureRequest) -> tuple[SweepSpec, int]:
    params, search, more, count = KIT[request.param]
    return spec_of(params, search + (ENQUEUED if request.param.endswith("enqueued points") else ""), more), count


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
        if spec.search.algorithm == "optuna" and spec.search.sampler != "qmc":
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
QMC = "algorithm: optuna, sampler: qmc, "
TWO_METRICS = "[{name: val/mse, mode: min}, {name: cost, mode: max}]"


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


def study_of(spec: SweepSpec, history: list[Told], cell: str = "{}") -> Any:
    """The study from which the next point of a cell would come."""
    from orchestrator.search.configurations import Grouping
    from orchestrator.search.optuna_search import OptunaSearcher

    return OptunaSearcher(spec)._study(cell, Grouping(spec).known(history)[cell], seed=0)


def test_optuna_is_told_means_and_failures_and_nothing_that_runs_for_ever():
    spec = spec_of(SAMPLED, OPTUNA)
    searcher, history = make_searcher(spec), []
    endings = [(1.0, 3.0), (1.0, math.nan), (1.0, math.inf), (None, None)]
    for ending in endings:
        batch = next(b for b in iter(lambda: searcher.ask(history), None) if b[0].cell == {"k": 1})
        for candidate, value in zip(batch, ending, strict=True):
            state = TrialState.RUNNING if value is None else TrialState.FINISHED
            history.append(Told(candidate, state, value))
    study = study_of(spec, history, '{"k":1}')
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "FAIL", "RUNNING"]
    assert study.best_value == study.trials[0].value == 2.0


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "cmaes"])
def test_optuna_knows_six_of_nine_trials_as_pruned_with_the_last_value_of_each(sampler):
    spec = spec_of(HALF, f"algorithm: optuna, sampler: {sampler}, samples: 20")

    def tell(candidate: Candidate) -> Told:
        if candidate.sample % 3 == 0:
            return finished(candidate)
        return Told(candidate, TrialState.STOPPED, float(candidate.sample), last_step=10 * candidate.sample)

    trials = study_of(spec, drive(make_searcher(spec), [], tell, batches=9)).trials
    assert [trial.state.name for trial in trials].count("COMPLETE") == 3
    assert [(t.state.name, t.intermediate_values) for t in trials if t.number % 3] == [
        ("PRUNED", {10 * number: float(number)}) for number in range(9) if number % 3
    ]


def test_with_two_metrics_a_stopped_trial_is_pruned_and_a_diverged_one_failed():
    spec = spec_of(HALF, OPTUNA, metric=TWO_METRICS)
    endings = [finished, diverged, lambda c: Told(c, TrialState.STOPPED, 1.0, (2.0,), 5), finished]
    history = drive(make_searcher(spec), [], lambda c: endings[c.sample](c), batches=4)
    history[3] = Told(history[3].candidate, TrialState.FINISHED, 1.0, (math.nan,))
    study = study_of(spec, history)
    trials = study.trials
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "PRUNED", "FAIL"]
    assert trials[0].values == [history[0].objective, *history[0].more_objectives]


def test_a_configuration_is_complete_when_one_seed_went_to_the_end_and_pruned_when_none_did():
    from orchestrator.search.configurations import Configuration

    def result(*told: tuple[TrialState, float | None, int | None]) -> tuple[Any, ...]:
        rows = [Told(Candidate({}, {}, 0), state, value, (), step) for state, value, step in told]
        found = Configuration({}, {}, len(rows), rows).result()
        return found.state.name, found.values, found.step, found.value_at_step

    finished, stopped = (TrialState.FINISHED, 1.0, None), (TrialState.STOPPED, 3.0, 20)
    assert result(finished, stopped) == ("COMPLETE", (2.0,), None, None)
    assert result(stopped, (TrialState.STOPPED, 5.0, 40)) == ("PRUNED", None, 40, 4.0)
    assert result((TrialState.STOPPED, None, 40))[0] == "FAIL"
    assert result(finished, (TrialState.RUNNING, None, None))[0] == "RUNNING"


def test_optuna_suggests_nothing_while_an_interrupted_trial_waits_to_be_trained_again():
    spec = spec_of("lr: {loguniform: [1e-4, 1]}", "algorithm: optuna, samples: 6, seed: 0")
    whole = drive(make_searcher(spec), [])
    searcher = make_searcher(spec)
    assert searcher.ask([*whole[:2], Told(whole[2].candidate, TrialState.WAITING, None)]) == []
    assert params_of(drive(searcher, whole[:3])) == params_of(whole)


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


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "cmaes"])
def test_a_suggestion_depends_on_the_history_alone_whichever_command_asks_and_however_results_come_in(sampler):
    spec = spec_of(HALF, f"algorithm: optuna, sampler: {sampler}, samples: 24, seed: 1")
    one_command, history, rng = make_searcher(spec), [], random.Random(0)
    while (batch := one_command.ask(history)) is not None:
        assert make_searcher(spec).ask(history) == batch
        history += [Told(candidate, TrialState.RUNNING, None) for candidate in batch]
        running = [number for number, told in enumerate(history) if told.state is TrialState.RUNNING]
        if len(running) == 3:
            number = rng.choice(running)
            history[number] = (diverged if number % 7 == 3 else finished)(history[number].candidate)
    assert len(history) == 24


def test_gp_goes_on_after_a_resume_as_it_would_have():
    spec = spec_of(HALF, "algorithm: optuna, sampler: gp, samples: 12, seed: 2")
    whole = drive(make_searcher(spec), [])  # its first ten are random
    assert params_of(drive(make_searcher(spec), whole[:11])) == params_of(whole)


@pytest.mark.parametrize("sampler", ["nsga2", "cmaes"])
def test_a_rebuilt_study_has_the_generations_of_one_that_lived_on(sampler):
    import optuna

    from orchestrator.search.optuna_samplers import make_sampler

    spec = spec_of(HALF, f"algorithm: optuna, sampler: {sampler}, samples: 40, seed: 1")
    history = drive(make_searcher(spec), [], batches=30)
    living = optuna.create_study(sampler=make_sampler(spec, 0, 40))
    for told in history:  # as the sampler's own loop does; only the points are those of the history
        living.enqueue_trial({name: told.candidate.params[name] for name in ("lr", "k")})
        trial = living.ask()
        assert trial.relative_params is not None
        trial.suggest_float("lr", 0.1, 1), trial.suggest_int("k", 1, 4)
        living.tell(trial, told.objective)
    rebuilt = study_of(spec, history)

    def marks(study: Any) -> list[Any]:
        return [{k: v for k, v in t.system_attrs.items() if k.endswith("generation")} for t in study.trials]

    assert marks(rebuilt) == marks(living)
    assert len({str(mark) for mark in marks(rebuilt)}) > 2


def test_qmc_draws_are_the_points_of_a_scrambled_sobol_sequence():
    from scipy.stats import qmc

    history = drive(
        make_searcher(spec_of("lr: {uniform: [1, 3]}, c_z: {uniform: [0, 1]}", QMC + "samples: 8, seed: 5")), []
    )
    found = [((told.candidate.params["lr"] - 1) / 2, told.candidate.params["c_z"]) for told in history]
    reference = qmc.Sobol(2, scramble=True, seed=5).random(8).tolist()
    assert [pytest.approx(point, abs=1e-12) for point in reference] == found


@pytest.mark.parametrize("search", ["algorithm: random, ", "algorithm: optuna, sampler: qmc, "])
def test_draws_that_learn_nothing_are_the_same_in_all_cells_and_grow_at_the_end(search):
    def draws(samples: int) -> list[list[float]]:
        history = drive(make_searcher(spec_of(SAMPLED, f"{search}samples: {samples}, seed: 1")), [])
        return [
            [
                t.candidate.params["lr"]
                for t in history
                if t.candidate.params["seed"] == seed and t.candidate.cell == cell
            ]
            for cell in ({"k": 1}, {"k": 2})
            for seed in (0, 1)
        ]

    few, many = draws(4), draws(8)
    assert all(cell == few[0] for cell in few)
    assert [cell[:4] for cell in many] == few


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sampler", ["nsga2", "qmc", "cmaes"])
def test_no_sampler_says_anything_of_its_own(sampler, capfd):
    space, more = (HALF, "") if sampler == "cmaes" else (NESTED, "when: {lr: {c_z: 0}}")
    drive(make_searcher(spec_of(space, f"algorithm: optuna, sampler: {sampler}, samples: 12", more)), [])
    assert capfd.readouterr() == ("", "")


# --- Conditions, exclusions, enqueued points, budgets ---------------------------------------------------------------

SAMPLERS = ["algorithm: random, ", "algorithm: optuna, ", "algorithm: optuna, sampler: nsga2, ", QMC]


@pytest.mark.parametrize("search", SAMPLERS)
def test_an_axis_that_does_not_exist_stands_at_its_default_and_is_not_suggested(search):
    spec = spec_of(CONDITIONAL, search + "samples: 20", WHEN)
    history = drive(make_searcher(spec), [])
    for params in params_of(history):
        assert 1e-4 <= params["c_z"] <= 1 if params["precision"] == "bf16" else params["c_z"] == 0.0
    assert {params["precision"] for params in params_of(history)} == {"fp32", "bf16"}
    if "optuna" in search and "qmc" not in search:
        for trial in study_of(spec, history).trials:
            assert ("c_z" in trial.params) == (trial.params["precision"] == 1)


@pytest.mark.parametrize("search", SAMPLERS)
def test_where_no_sampled_axis_exists_a_cell_has_one_configuration(search):
    spec = spec_of("precision: {grid: [fp32, bf16]}, c_z: {uniform: [0.1, 1]}", search + "samples: 5", WHEN)
    history = drive(make_searcher(spec), [])
    assert [told.candidate.params["c_z"] for told in history if told.candidate.cell == {"precision": "fp32"}] == [0.0]
    assert len(history) == plan_count(spec) == 6
    assert plan_notes(spec) == ("c_z: only 1 to 5 distinct points; samples: 5 gives 1 to 5 per cell",)


@pytest.mark.parametrize("search", SAMPLERS)
def test_a_grid_axis_that_exists_by_a_sampled_one_is_trained_once_where_it_does_not(search):
    params = "k: {grid: [2, 3]}, precision: {choice: [fp32, bf16]}, c_z: {choice: [0, 0.5]}"
    spec = spec_of(params, search + "samples: 9", "when: {k: {precision: bf16}}")
    history = drive(make_searcher(spec), [])
    found = sorted((p["precision"], p["k"], p["c_z"]) for p in params_of(history))
    assert found == [*(("bf16", k, c_z) for k in (2, 3) for c_z in (0, 0.5)), ("fp32", 1, 0), ("fp32", 1, 0.5)]
    assert all(told.candidate.cell == {"k": told.candidate.params["k"]} for told in history)


@pytest.mark.parametrize("search", SAMPLERS)
def test_an_excluded_draw_is_drawn_again(search):
    spec = spec_of("k: {int: [1, 8]}, lr: {uniform: [1, 2]}", search + "samples: 12", "exclude: [{k: [1, 2, 3, 4, 5]}]")
    history = drive(make_searcher(spec), [])
    assert len(history) == 12
    assert {told.candidate.params["k"] for told in history} <= {6, 7, 8}


@pytest.mark.parametrize("search", SAMPLERS)
def test_a_draw_of_which_every_seed_is_excluded_is_drawn_again(search):
    params = "k: {int: [1, 8]}, lr: {uniform: [1, 2]}, seed: {grid: [0, 1]}"
    more = "exclude: [{k: [1, 2, 3], seed: [0, 1]}, {k: 4, seed: 1}]"
    history = drive(make_searcher(spec_of(params, search + "samples: 12", more)), [])
    trials = {(told.candidate.params["k"], told.candidate.params["seed"]) for told in history}
    assert {k for k, _ in trials} <= {4, 5, 6, 7, 8}
    assert (4, 1) not in trials
    assert len({(told.candidate.params["k"], told.candidate.params["lr"]) for told in history}) == 12


@pytest.mark.parametrize("search", SAMPLERS)
def test_enqueued_points_come_first_in_the_cells_they_fit(search):
    enqueue = "enqueue: [{k: 2, lr: 0.5}, {lr: 0.25}, {c_z: 0.125}]"
    spec = spec_of(
        "k: {grid: [1, 2]}, lr: {uniform: [0.1, 1]}, c_z: {uniform: [0, 1]}", f"{search}samples: 4, {enqueue}"
    )
    history = drive(make_searcher(spec), [])
    cells = {k: [told.candidate.params for told in history if told.candidate.cell == {"k": k}] for k in (1, 2)}
    assert [len(points) for points in cells.values()] == [4, 4]
    assert (cells[1][0]["lr"], cells[1][1]["c_z"]) == (0.25, 0.125)
    assert [cells[2][0]["lr"], cells[2][1]["lr"], cells[2][2]["c_z"]] == [0.5, 0.25, 0.125]
    assert cells[1][1]["lr"] not in (0.25, 0.5)
    assert 0 < cells[1][0]["c_z"] < 1


def test_a_point_enqueued_later_is_tried_next():
    few = spec_of("lr: {uniform: [0.1, 1]}", "algorithm: optuna, samples: 3")
    more = spec_of("lr: {uniform: [0.1, 1]}", "algorithm: optuna, samples: 5, enqueue: [{lr: 0.5}]")
    history = drive(make_searcher(few), [])
    [candidate] = make_searcher(more).ask(history)
    assert candidate.params["lr"] == 0.5


def test_a_budget_caps_the_samples_of_every_cell_alike_and_says_so():
    spec = spec_of(SAMPLED, "algorithm: random, samples: 100", "budget: {trials: 18}")
    assert plan_count(spec) == len(drive(make_searcher(spec), [])) == 16
    assert plan_notes(spec) == ("budget.trials: 18 has room for 4 samples per cell, not 100",)
    assert search_problems(spec) == []
    small = spec_of(SAMPLED, "algorithm: random, samples: 100", "budget: {trials: 3}")
    text = "3 is too few: one sample in each cell, with all its seeds, makes 4 trials"
    assert search_problems(small) == [("budget.trials", text)]


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    spec = spec_of(HALF, "algorithm: optuna, sampler: cmaes, samples: 5")
    assert missing_extra(spec) == ""
    monkeypatch.setitem(sys.modules, "cmaes", None)  # as if it were not there
    assert missing_extra(spec) == "sampler cmaes needs cmaes: pip install 'orch-sweeps[cmaes]'"
    assert search_problems(spec) == [("search.sampler", missing_extra(spec))]
    assert missing_extra(spec_of(HALF, "algorithm: optuna, sampler: nsga2, samples: 5")) == ""


def test_cmaes_refuses_axes_that_come_and_go_and_names_those_it_does_not_learn():
    cmaes = "algorithm: optuna, sampler: cmaes, samples: 5"
    [(path, text)] = search_problems(spec_of(CONDITIONAL, cmaes, WHEN))
    assert (path, text) == ("search.sampler", "cmaes needs axes that always exist, unlike c_z; write sampler: tpe")
    assert "unlike c_z" in search_problems(spec_of(NESTED, cmaes))[0][1]
    assert "needs an axis with a range" in search_problems(spec_of("precision: {choice: [fp32, bf16]}", cmaes))[0][1]
    notes = plan_notes(spec_of(CONDITIONAL, cmaes))
    assert notes == ("sampler cmaes draws precision at random: it has no model of them",)


@pytest.mark.parametrize("search", ["", "algorithm: random, samples: 500"])
def test_ten_thousand_trials_are_given_in_under_two_milliseconds_each_however_many_are_known(search):
    axes = "k: {grid: [1, 2, 3, 4]}, seed: {grid: [0, 1, 2, 3, 4]}, "
    axes += "lr: {uniform: [1, 2]}" if search else f"c_z: {{grid: {list(range(500))}}}"
    spec = spec_of(axes, search)
    started = time.perf_counter()
    batch = make_searcher(spec).ask([])
    [last] = make_searcher(spec).ask([finished(candidate) for candidate in batch[:-1]])
    seconds = time.perf_counter() - started
    assert len(batch) == plan_count(spec) == 10_000
    assert last == batch[-1]
    assert seconds < 0.002 * 10_000  # some 0.0001 s each on an idle core
