"""The simulated sweep: the real searcher and scheduler over curves, on a clock that can be checked by hand."""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from orchestrator.cli import cli
from orchestrator.errors import NotFound, OrchError
from orchestrator.schedulers import make_scheduler
from orchestrator.search import Searcher, make_searcher, plan_count
from orchestrator.simulation import Curves, Landscape, Simulated, simulate
from orchestrator.simulation.recorded import read_curves
from orchestrator.spec.domains import Choice, Grid, Uniform
from orchestrator.spec.sweep_spec import Budget, Metric, Schedule, Search, SweepSpec
from orchestrator.trial import Action, Candidate, Told, TrialState

AXES = {"lr": Uniform(1e-4, 1e-1, log=True), "c_z": Choice((0, Uniform(1e-5, 1e-1, log=True))), "k": Grid((1, 2))}
ASHA = Schedule("asha", grace_steps=30, reduction_factor=3)
PBT = Schedule("pbt", interval_steps=100, perturb=("lr",))


def spec_of(schedule: Schedule = ASHA, samples: int = 50, **more: Any) -> SweepSpec:
    parts: dict[str, Any] = {"fixed": {"steps": 800}, "axes": AXES, "search": Search("random", samples)} | more
    return SweepSpec("s", "toy", Metric("val/loss"), schedule=schedule, **parts)


def outcome(
    spec: SweepSpec, curves: Curves | None = None, num_workers: int = 8, searcher: Searcher | None = None
) -> Simulated:
    searcher, scheduler = searcher or make_searcher(spec), make_scheduler(spec, plan_count(spec))
    return simulate(spec, searcher, scheduler, curves or Landscape(spec, 800), num_workers)


def listed(losses: Sequence[Sequence[float | None]], schedule: Schedule, folder: Path, **more: Any) -> Simulated:
    """What comes of recorded losses: one row a trial, one column a step, from step 1."""
    rows = [
        f"{trial},{step},{'' if loss is None else loss}"
        for trial, row in enumerate(losses)
        for step, loss in enumerate(row, 1)
    ]
    path = folder / "curves.csv"
    path.write_text("\n".join(["trial,step,value", *rows]) + "\n")
    parts = {"axes": {"x": Grid(tuple(range(len(losses))))}, "search": Search(), **more}
    spec = spec_of(schedule, fixed={"steps": len(losses[0])}, **parts)
    return outcome(spec, read_curves(path), num_workers=1)


def test_two_thousand_trials_are_simulated_in_seconds() -> None:
    """The bound is loose for a busy machine: alone it takes half a second. Trials report eight times."""
    spec, began = spec_of(samples=1000, log_every=100), time.perf_counter()
    result = outcome(spec)
    assert len(result.trials) == 2000
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("schedule", [ASHA, PBT])
def test_a_simulation_comes_out_the_same_each_time(schedule: Schedule) -> None:
    first, second = outcome(spec_of(schedule)), outcome(spec_of(schedule))
    assert first.decisions == second.decisions
    assert [trial.value for trial in first.trials] == pytest.approx([one.value for one in second.trials], nan_ok=True)


def test_without_a_scheduler_the_clock_shows_what_a_list_of_jobs_takes() -> None:
    """Each worker takes the next trial when it is free: the end by a schedule of durations alone."""
    spec = spec_of(Schedule(), axes={"k": Grid(tuple(range(20)))}, search=Search(), stop_diverged=False)
    result, free_at = outcome(spec, num_workers=3), [0.0] * 3
    for trial in result.trials:
        heapq.heapreplace(free_at, free_at[0] + 800 * trial.curve.seconds_per_step)
    assert result.seconds == pytest.approx(max(free_at), rel=1e-12)
    assert result.num_steps_trained == result.num_steps_asked == 20 * 800


def test_successive_halving_finds_one_of_the_best_in_a_third_of_the_steps() -> None:
    whole, halved = outcome(spec_of(Schedule())), outcome(spec_of())
    assert halved.num_steps_trained < whole.num_steps_trained / 3
    best = halved.best(spec_of())
    assert best is not None
    finals = sorted(trial.final for trial in whole.trials if trial.final is not None)
    assert best.final is not None
    assert best.final <= finals[len(finals) // 20]  # among the best 5 %: the noise may turn neighbours round


def test_made_up_curves_diverge_at_high_learning_rates_only() -> None:
    result = outcome(spec_of(Schedule(), samples=200))
    diverged = [trial.params["lr"] for trial in result.trials if trial.state is TrialState.DIVERGED]
    healthy = [trial.params["lr"] for trial in result.trials if trial.state is TrialState.FINISHED]
    assert len(diverged) + len(healthy) == 400
    assert 20 < len(diverged) < 100
    assert max(healthy) < min(diverged)


def test_recorded_values_decide_and_a_trial_that_is_not_finite_has_diverged(tmp_path: Path) -> None:
    losses = [[loss] * 9 for loss in (1.0, math.nan, 2.0, 3.0, math.inf, 0.5)]
    result = listed(losses, Schedule("asha", max_steps=9, reduction_factor=3), tmp_path)
    states = [trial.state.value for trial in result.trials]
    assert states == ["finished", "diverged", "stopped", "stopped", "diverged", "finished"]
    assert [trial.step for trial in result.trials] == [9, 1, 1, 1, 1, 9]
    best = result.best(spec_of())
    assert best is not None
    assert best.number == 5


def test_a_report_without_the_objective_is_judged_at_the_next(tmp_path: Path) -> None:
    result = listed([[1.0, 1.0, 1.0], [None, 2.0, 1.0]], Schedule("asha", max_steps=3, reduction_factor=3), tmp_path)
    assert [(one.trial, one.step) for one in result.decisions] == [(0, 1), (1, 2)]
    assert result.trials[1].state is TrialState.STOPPED


def test_a_trial_without_the_objective_at_max_steps_ends_there_all_the_same(tmp_path: Path) -> None:
    schedule = Schedule("asha", max_steps=3, reduction_factor=3)
    losses = [[None, 1.0, None, 1.0], [None, None, None, None]]
    result = listed(losses, schedule, tmp_path)
    assert [(trial.step, trial.reason) for trial in result.trials] == [(3, "complete: max_steps 3 is reached")] * 2


def outcome_of(curves: str, folder: Path) -> Simulated:
    """What comes of three trials without a scheduler."""
    path = folder / "curves.csv"
    path.write_text(curves)
    return outcome(spec_of(Schedule(), axes={"x": Grid((0, 1, 2))}, search=Search()), read_curves(path))


def test_a_trial_without_a_recorded_curve_is_left_out_and_keeps_its_number(tmp_path: Path) -> None:
    result = outcome_of("step,value,trial\n1,0.5,2\n2,0.4,2\n1,0.6,0\n", tmp_path)
    assert [trial.number for trial in result.trials] == [0, 2]
    assert result.num_without_curve == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trial,value\n0,1\n", r"curves.csv:1  no column step"),
        ("trial,step,value\n0,1,0.5\n0,x,0.5\n", r"curves.csv:3  trial and step are whole numbers"),
        ("trial,step,value\n0,1,0.5\n0,-1,0.5\n", r"curves.csv:3  trial and step count from 0"),
        (f"trial,step,value\n0,{10**20},0.5\n", r"curves.csv:2  trial and step count from 0"),
        ("trial,step,value\n0,1,\udcff\n", r"curves.csv is no CSV file"),
    ],
)
def test_a_file_that_holds_no_curves_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(OrchError, match=message):
        read_curves(path)
    for other in ("none.csv", "."):
        with pytest.raises(NotFound, match="cannot be read"):
            read_curves(tmp_path / other)


def test_a_trial_that_only_reported_where_it_began_has_no_curve(tmp_path: Path) -> None:
    result = outcome_of("trial,step,value\n0,0,1.0\n0,1,0.9\n1,0,0.5\n", tmp_path)
    assert [(trial.number, trial.step) for trial in result.trials] == [(0, 1)]
    assert result.num_without_curve == 2


def test_when_the_budget_of_time_is_used_up_what_runs_waits() -> None:
    result = outcome(spec_of(Schedule(), budget=Budget(time_s=2000)), num_workers=2)
    assert result.seconds == 2000
    assert result.counts()[TrialState.WAITING] > result.counts()[TrialState.FINISHED] >= 2
    assert TrialState.RUNNING not in result.counts()


class Listener:
    """A searcher that keeps what it was told."""

    def __init__(self, searcher: Searcher) -> None:
        self._searcher, self.notes = searcher, searcher.notes
        self.history: Sequence[Told] = ()

    def ask(self, history: Sequence[Told]) -> Sequence[Candidate] | None:
        self.history = history
        return self._searcher.ask(history)


def test_optuna_is_told_of_stopped_trials_where_they_were_stopped() -> None:
    schedule = Schedule("asha", grace_steps=100, reduction_factor=3)
    spec = spec_of(schedule, axes={"lr": AXES["lr"]}, search=Search("optuna", 9))
    listener = Listener(make_searcher(spec))
    result = outcome(spec, num_workers=1, searcher=listener)
    assert len(result.trials) == len(listener.history) == 9
    stopped = [told for told in listener.history if told.state is TrialState.STOPPED]
    assert stopped
    for told, trial in zip(listener.history, result.trials, strict=True):
        assert told.state.is_over
        assert (told.state, told.objective, told.last_step) == (trial.state, trial.value, trial.step)


@pytest.mark.parametrize("num_workers", [1, 4, 100])
def test_a_population_goes_on_evenly_loses_nobody_and_gets_better(num_workers: int) -> None:
    alone, evolved = outcome(spec_of(Schedule(), 20)), outcome(spec_of(PBT, 20), num_workers=num_workers)
    for trial in evolved.trials:  # who diverged by the last milestone, at 700, copied
        assert trial.state is TrialState.FINISHED or math.isfinite(trial.curve.value(700) or 0.0)
    assert alone.counts()[TrialState.DIVERGED] > 0
    assert evolved.num_steps_trained == evolved.num_steps_asked == 40 * 800  # each step once
    counts = {action: sum(one.action is action for one in evolved.decisions) for action in Action}
    assert counts[Action.EXPLOIT] > 20
    assert (counts[Action.PAUSE] > 0) == (num_workers < 40)
    middle = [
        sorted(trial.value for trial in result.trials if trial.value is not None and trial.is_finite)
        for result in (alone, evolved)
    ]
    assert middle[1][20] < middle[0][len(middle[0]) // 2]
    for trial in evolved.trials:
        assert trial.params["k"] == trial.candidate.params["k"]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.main(["sweep", *arguments], prog_name="orch", standalone_mode=False)
    return capsys.readouterr().out


SWEEP = """
name: sim
workload: char_gpt
metric: val/loss
params:
  lr: {loguniform: [1e-4, 1e-1]}
search: {algorithm: random, samples: 30}
"""


def test_the_command_says_what_a_scheduler_would_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sim.yaml"
    path.write_text(SWEEP + "scheduler: {algorithm: asha, max_steps: 800, grace_steps: 50, reduction_factor: 3}\n")
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    arguments = (str(path), "--set", "params.steps=800", "--max-concurrent", "4", "--simulate")
    text = command(capsys, *arguments)
    assert "30 trials on 4 workers, made-up curves" in text
    assert "without a scheduler the best is trial" in text
    assert "rung 50: " in text
    figures, decisions = [json.loads(line) for line in command(capsys, *arguments, "--json", "--inline").splitlines()]
    saved = next(row for row in figures if row["figure"] == "steps trained")
    assert saved["asha"] < saved["no scheduler"] / 2
    assert decisions[0]["step"] == 50
    assert not (tmp_path / "home").exists()  # nothing is stored


def test_curves_without_a_simulation_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sim.yaml").write_text(SWEEP)
    with pytest.raises(click.UsageError, match="goes with --simulate"):
        command(capsys, str(tmp_path / "sim.yaml"), "--curves", "other")


def test_a_population_cannot_be_simulated_from_recordings(tmp_path: Path) -> None:
    sampled = {"axes": {"lr": AXES["lr"]}, "search": Search("random", 2)}
    with pytest.raises(OrchError, match="no recording says how"):
        listed([[1.0, 2.0, 3.0], [2.0, 1.0, 0.5]], Schedule("pbt", interval_steps=1), tmp_path, **sampled)
