"""What `orch plan` says of a sweep before anything runs: counts, cells, what it can tell, what it would take."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scipy.stats import binom, fisher_exact

from orchestrator.cli.plan import command
from orchestrator.errors import NoResult, SpecError
from orchestrator.planning.cost import kinds_of
from orchestrator.planning.history import PastRun, fit_of, from_history
from orchestrator.planning.plan import plan_of
from orchestrator.planning.probe import Timing, from_probe
from orchestrator.planning.seeds import power, share_told_from_none, trials_needed
from orchestrator.workload import describe, flatten

# Counts


def test_a_plan_counts_trials_configurations_seeds_cells_and_structures(spec_of: Any) -> None:
    text = "params: {x: {grid: [0, 1]}, k: {grid: [1, 2, 3]}, sleep_s: {choice: [0, 1]}, seed: {grid: [0, 1, 2]}}\n"
    plan = plan_of(spec_of(text + "search: {algorithm: random, samples: 2}\n"))
    told = plan.to_json()
    assert {key: told[key] for key in ("trials", "configurations", "seeds", "cells", "trials_per_cell", "groups")} == {
        "trials": 36, "configurations": 12, "seeds": 3, "cells": 6, "trials_per_cell": 6, "groups": 36,
    }  # fmt: skip
    assert told["cell_axes"] == ["x", "k"]
    assert len(told["structures"]) == 3 * 2  # k and sleep_s; x is a scalar that one model may hold several of
    assert "12 configurations x 3 seeds; 6 cells (x x k) of 6 trials; 6 structures (k, sleep_s)" in plan.notes()
    assert json.loads(json.dumps(told)) == told


def test_conditions_zips_and_exclusions_are_counted_as_they_will_be_trained(spec_of: Any) -> None:
    text = """
        params: {x: {grid: [0, 1, 2]}, k: {grid: [1, 2, 3]}, sleep_s: {grid: [0, 1]}, steps: {grid: [1, 2]}}
        zip: [[x, k]]
        when: {sleep_s: {k: [2, 3]}}
        exclude: [{k: 3, steps: 2}]
    """
    plan = plan_of(spec_of("\n".join(line.strip() for line in text.splitlines())))
    # k=1: 1 sleep x 2 steps; k=2: 2 x 2; k=3: 2 x 1
    assert (plan.num_trials, plan.num_cells) == (8, 8)


def test_cells_that_differ_are_counted_as_they_are_and_judged_by_the_smallest(spec_of: Any) -> None:
    text = "params: {x: {grid: [0, 1, 2, 3]}}\nseeds: 3\nexclude: [{seed: [1, 2], x: [1, 2, 3]}]\n"
    plan = plan_of(spec_of(text), shares=(0.0, 0.5))
    assert "4 configurations x 1 to 3 seeds; 4 cells (x) of 1 to 3 trials; 1 structure" in plan.notes()
    assert any(note.startswith("1 trial of the smallest cell tells no shares apart") for note in plan.notes())
    assert plan.notes()[-1].endswith("; it has 1 to 3")
    told = plan.to_json()
    assert (told["trials"], told["configurations"], told["trials_per_cell"], told["max_trials_per_cell"]) == (
        6,
        4,
        1,
        3,
    )
    assert told["tells_from_none"] is None


@pytest.mark.parametrize("search", ["random", "optuna, sampler: qmc"])
def test_a_cell_that_no_draw_reaches_is_not_counted(spec_of: Any, search: str) -> None:
    text = "params: {x: {uniform: [0, 1]}, k: {grid: [1, 2]}}\nwhen: {k: {x: 0.5}}\n"
    plan = plan_of(spec_of(text + f"search: {{algorithm: {search}, samples: 5}}\n"))  # no draw is 0.5 exactly
    assert (plan.num_trials, plan.num_cells, plan.trials_per_cell) == (5, 1, 5)
    text = text.replace("uniform: [0, 1]", "choice: [0, 0.25, 0.5]")
    plan = plan_of(spec_of(text + f"search: {{algorithm: {search}, samples: 5}}\n"))
    assert "4 configurations x 1 seed; 2 cells (k) of 1 to 3 trials" in plan.notes()[1]  # k exists with x=0.5 only


def test_where_optunas_draws_decide_how_many_trials_there_are_the_plan_says_at_most(spec_of: Any) -> None:
    text = "params: {x: {choice: [0, 0.5, 1]}, k: {grid: [1, 2]}}\nsearch: {algorithm: optuna, samples: 3}\n"
    plan = plan_of(spec_of(text + "when: {k: {x: 0.5}}\n"))
    assert plan.notes()[0].startswith("at most 6 trials of orch_lab:Trivial, optuna search (tpe), min val/loss")
    assert plan.notes()[1].startswith("at most 6 configurations x 1 seed; 2 cells (k) of at most 3 trials")
    assert plan.to_json()["at_most"]
    plan = plan_of(spec_of(text))
    assert plan.notes()[0].startswith("6 trials")
    assert not plan.to_json()["at_most"]


def test_a_plan_names_the_scheduler_and_writes_values_as_the_file_does(spec_of: Any) -> None:
    head = "workload: orch_lab:Odd\nmetric: val/loss\n"
    text = 'params: {note: {grid: ["", " ", "a, b", "null", ok]}, file: "", hidden: {grid: [[1, 2], [3]]}}\n'
    plan = plan_of(spec_of(head + text + "scheduler: {algorithm: asha, max_steps: 4}\n"))
    assert plan.notes()[0] == "10 trials of orch_lab:Odd, grid search, min val/loss, scheduler asha"
    assert plan.to_json()["scheduler"]["algorithm"] == "asha"
    values = {row[0]: row[2] for row in plan.table().rows}
    assert values == {"note": '"", " ", "a, b", "null", ok', "hidden": "[1, 2], [3]", "file": '""'}


def test_what_cannot_be_searched_is_refused_at_its_line_before_anything_starts(spec_of: Any) -> None:
    search = "search: {algorithm: optuna, sampler: cmaes, samples: 2}\n"
    with pytest.raises(
        SpecError, match=r"s\.yaml:4  search\.sampler  cmaes needs an axis with a range; write sampler: tpe"
    ):
        spec_of("params: {k: {choice: [0, 1, 2]}}\n" + search)


def test_ten_thousand_trials_are_planned_in_seconds(spec_of: Any) -> None:
    values = ", ".join(f"{number}e-3" for number in range(1, 101))
    text = f"params: {{x: {{grid: [{values}]}}, sleep_s: {{grid: [{values}]}}}}\n"
    started = time.process_time()
    plan = plan_of(spec_of(text))
    assert plan.table().notes[0].startswith("10000 trials")
    assert time.process_time() - started < 10  # CPU: half a second; a square of the trials would take minutes


# Seeds


@pytest.mark.parametrize(("share", "other", "n"), [(0.1, 0.4, 14), (0.0, 0.6, 9), (0.3, 0.9, 6)])
def test_power_is_that_of_fishers_exact_test(share: float, other: float, n: int) -> None:
    is_apart = [
        [fisher_exact([[a, n - a], [b, n - b]]).pvalue <= 0.05 + 1e-9 for b in range(n + 1)] for a in range(n + 1)
    ]
    expected = sum(
        binom.pmf(a, n, share) * binom.pmf(b, n, other) for a in range(n + 1) for b in range(n + 1) if is_apart[a][b]
    )
    assert power(share, other, n) == pytest.approx(expected, rel=1e-9)  # both are sums of some hundred float64 products


def test_the_number_of_trials_is_the_least_that_reaches_80_per_cent_power() -> None:
    for shares in [(0.1, 0.4), (0.0, 0.5), (0.2, 0.9), (0.5, 0.9), (0.0, 1.0)]:
        least = next(n for n in range(1, 200) if power(*shares, n) >= 0.8)
        assert trials_needed(*shares) == least
        assert trials_needed(*reversed(shares)) == least
    assert trials_needed(0.1, 0.4) == 36  # the normal approximation with Yates' correction says 38 (Fleiss, 1981)
    assert trials_needed(0.10, 0.11) is None


def test_three_trials_tell_nothing_and_simulated_sweeps_of_twelve_are_told_apart_as_often_as_said() -> None:
    assert share_told_from_none(3) is None
    share = share_told_from_none(12)
    assert share is not None
    rng = random.Random(0)
    draws = [sum(rng.random() < share for _ in range(12)) for _ in range(4000)]
    is_apart = [fisher_exact([[0, 12], [b, 12 - b]]).pvalue <= 0.05 for b in range(13)]
    told = sum(is_apart[b] for b in draws) / len(draws)
    assert told == pytest.approx(power(0.0, share, 12), abs=0.025)  # four standard errors of 4,000 draws
    assert told > 0.78


def test_a_plan_says_what_its_seeds_tell_and_how_many_would_be_needed(spec_of: Any) -> None:
    notes = plan_of(spec_of("params: {x: 1}\nseeds: 3\n"), shares=(0.1, 0.4)).notes()
    assert any(note.startswith("3 trials a cell tell no shares apart") for note in notes)
    assert any(note.startswith("to tell 10 % from 40 %: 36 trials a cell") for note in notes)
    assert not any("a cell tell" in note for note in plan_of(spec_of("params: {x: 1}\nseeds: 3\n")).notes())


# Minutes


def runs_of(per_step: float, start: float, steps: list[int], k: int = 1) -> list[PastRun]:
    config = flatten(describe("orch_lab:Trivial").resolve({"k": k}))
    return [PastRun("old", config, start + per_step * count, count, None) for count in steps]


def test_the_fit_finds_start_and_seconds_a_step_though_a_third_of_the_runs_were_slow(spec_of: Any) -> None:
    spec_of("params: {x: 1}\n")
    runs = runs_of(0.01, 2.0, [100, 200, 300, 400, 500, 600, 700, 800])
    fit = fit_of(
        [*runs, PastRun("busy", runs[0].config, 90.0, 150, None), PastRun("busy", runs[0].config, 70.0, 650, None)]
    )
    assert (fit.start, fit.per_step) == (pytest.approx(2.0, rel=0.1), pytest.approx(0.01, rel=0.1))
    alike = fit_of(runs_of(0.01, 2.0, [100, 100, 100]))
    assert alike.seconds(200) == pytest.approx(6.0)  # one number of steps only: all counts as steps


def test_minutes_from_history_name_their_runs_and_guess_by_the_nearest_structure(spec_of: Any) -> None:
    spec = spec_of("params: {steps: 600, k: {grid: [1, 2, 8]}, seed: {grid: [0, 1]}}\nresources: {max_concurrent: 2}\n")
    history = runs_of(1.0, 0.0, [100, 200]) + runs_of(3.0, 0.0, [100, 200], k=4)
    rows = [(one.sweep, one.config, one.seconds, one.steps, "cpu", None) for one in history]
    columns = ("sweep", "config", "seconds", "last_step", "device", "bytes")
    found = from_history(lambda *_: (columns, rows), spec, describe(spec.workload))
    # k=1 by itself; k=2 lies one doubling from both, the first wins; k=8 is nearest to k=4; 2 seeds on 2 workers
    assert found.minutes == pytest.approx((600 + 600 + 1800) / 60)
    assert "from 4 runs of old; 2 of 3 structures never ran, guessed by the nearest (k=2 by 1)" in found.basis
    with pytest.raises(NoResult, match="measure it: --probe"):
        from_history(lambda *_: (columns, []), spec, describe(spec.workload))


def test_a_probe_extrapolates_from_later_reports_and_counts_the_first_as_a_start() -> None:
    timing = Timing(False, 3.0, [(10, 2.0), (20, 2.1), (30, 2.2), (40, 9.0)], 0, ())
    assert timing.whole_trial_s(110) == pytest.approx(3.0)  # 2 s, then 100 steps of 10 ms; one long pause moves nothing
    assert Timing(True, 3.0, [], 0, ()).whole_trial_s(None) == 3.0
    assert Timing(False, 3.0, [(10, 2.0)], 0, ()).whole_trial_s(None) is None


def test_a_probe_trains_first_steps_elsewhere_and_tells_minutes_memory_and_a_metric_that_never_comes(
    spec_of: Any,
) -> None:
    text = (
        "params: {steps: 1000, sleep_s: {grid: [0, 0.02]}, seed: {grid: [0, 1, 2]}}\nresources: {max_concurrent: 3}\n"
    )
    spec = spec_of(text + "log_every: 5\n")
    found, remarks = from_probe(spec, describe(spec.workload), budget_s=2.0)
    # 1000 steps of 20 ms are 20 s, those without sleep nearly nothing; a loaded machine only makes it longer
    assert 20 / 60 <= found.minutes < 60 / 60
    assert found.memory_bytes is not None
    assert 10e6 < found.memory_bytes < 1e9
    assert remarks == []
    silent = spec_of("workload: orch_lab:Odd\nmetric: val/loss\nparams: {do: silent}\n")
    _, remarks = from_probe(silent, describe(silent.workload), budget_s=2.0)
    assert remarks == ["metric val/loss: not among what 1 whole trials reported: other, train/loss"]
    failing = spec_of("workload: orch_lab:Odd\nmetric: val/loss\nparams: {do: raise}\n")
    with pytest.raises(NoResult, match="RuntimeError: a planted failure"):
        from_probe(failing, describe(failing.workload), budget_s=2.0)


def test_a_probe_says_how_its_process_died_and_which_kinds_have_no_figure(spec_of: Any) -> None:
    spec = spec_of("workload: orch_lab:Odd\nmetric: val/loss\nparams: {do: {grid: [nothing, die, nan]}}\n")
    found, remarks = from_probe(spec, describe(spec.workload), budget_s=5.0)
    assert remarks == [
        "not counted, as the first steps failed: do=die (its process died, SIGKILL: perhaps out of memory)",
        "without a figure, counted as the slowest of the others: do=nan",
    ]
    assert found.basis.startswith("from the first steps of 1 of 3 kinds of trial")
    dead = spec_of("workload: orch_lab:Odd\nmetric: val/loss\nparams: {do: die}\n")
    with pytest.raises(NoResult, match="could be timed: its process died, SIGKILL"):
        from_probe(dead, describe(dead.workload), budget_s=5.0)


def test_kinds_of_trials_are_told_apart_by_what_costs_and_keep_their_numbers(spec_of: Any) -> None:
    spec = spec_of("params: {x: {grid: [0, 1]}, k: {grid: [1, 2]}, steps: {grid: [5, 6]}, seed: {grid: [0, 1]}}\n")
    kinds = kinds_of(spec, describe(spec.workload))
    assert [(kind.config["k"], kind.steps, kind.num_trials) for kind in kinds] == [
        (1, 5, 4),
        (1, 6, 4),
        (2, 5, 4),
        (2, 6, 4),
    ]


def test_the_command_answers_scripts_in_json_and_refuses_half_a_question(spec_of: Any, tmp_path: Path) -> None:
    spec_of("params: {steps: 3, k: {grid: [1, 2]}}\nseeds: 2\n")

    def typed(*flags: str) -> Any:
        return CliRunner().invoke(command, [str(tmp_path / "s.yaml"), *flags])

    told = json.loads(typed("--json", "--tell-apart", "0.1,40%").output)
    assert (told["trials"], told["tell_apart"]) == (4, {"shares": [0.1, 0.4], "trials_needed": 36})
    assert "two shares are needed" in typed("--tell-apart", "10%").output
    assert "ask for one" in typed("--probe", "--from-history").output
    assert "--format csv the table of parameters; ask for one" in typed("--json", "--format", "csv").output
