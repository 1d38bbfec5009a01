"""What schedulers decide is carried out, stored once and visible; time budgets; several objectives. End to end."""

from __future__ import annotations

import json
import math
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.reports.pareto import pareto_front
from tests.conftest import Orch
from tests.faults.conftest import value_of, wait_until

LAB = """
    import json, math, os, signal, time
    from pathlib import Path
    from orchestrator.trial import Report
    from orchestrator.workload import WorkloadConfig, fusible


    class Said:
        '''Reports what it is told to for each trial, at steps 1 to 9; `text` is evaluated there.'''

        class Config(WorkloadConfig):
            text: str = "1.0"
            x: float = fusible(0.0)
            steps: int = 9
            seed: int = 0

        metrics = ("val/loss", "size")

        def run(self, config, context):
            for step in range(1, config.steps + 1):
                scope = {"trial": context.trial, "step": step, "x": config.x, "nan": math.nan, "inf": math.inf}
                yield Report(step, {"val/loss": eval(config.text, scope), "size": config.x})


    class Climber:
        '''Climbs by `rate` a step from where its state says; is killed at a step once when asked to.'''

        class Config(WorkloadConfig):
            rate: float = fusible(1.0)
            steps: int = 40
            sleep_s: float = 0.0
            nan_below: float = 0.0  # a slower one falls at step 3
            die: str = ""  # `trial/step/file`: once, while there is no such file
            saves: bool = True
            heard_every: int = 1  # steps between reports that have the height
            seed: int = 0

        metrics = ("height", "rate")

        def run(self, config, context):
            saved = context.checkpoint.load()
            step, height = json.loads(saved) if saved else (0, 0.0)
            while step < config.steps:
                if context.stopping:
                    self._save(config, context, step, height)
                    return
                time.sleep(config.sleep_s)
                step, height = step + 1, height + config.rate
                if step == 3 and config.rate < config.nan_below:
                    height = math.nan
                if context.should_report(step) or step == config.steps:
                    said = {} if step % config.heard_every else {"height": height}
                    yield Report(step, {**said, "rate": config.rate})
                if context.checkpoint.due(step) and step < config.steps:
                    self._save(config, context, step, height)
                if config.die:
                    self._die(config, context.trial, step)

        def _save(self, config, context, step, height):
            if config.saves:
                context.checkpoint.save(step, json.dumps([step, height]).encode())

        def _die(self, config, trial, step):
            at_trial, at_step, file = config.die.split("/", 2)
            if (trial, step) == (int(at_trial), int(at_step)) and not Path(file).exists():
                Path(file).touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""
POPULATION = """
    workload: lab_decisions:Climber
    metric: {name: height, mode: max}
    params: {rate: {uniform: [0.5, 2.0]}, steps: 40%s}
    search: {algorithm: random, samples: 5, seed: 1}
    scheduler: {algorithm: pbt, interval_steps: 10, perturb: [rate]}
    log_every: 5
    checkpoint_every: 4
"""
ASHA = "scheduler: {algorithm: asha, grace_steps: 1, reduction_factor: 3, max_steps: 9}"
DECIDED = "select trial, step, value, action, source, params, reason from decisions where sweep = '%s'"


@pytest.fixture(scope="module")
def lab(orch: Orch) -> Orch:
    (orch.folder / "lab_decisions.py").write_text(textwrap.dedent(LAB))
    return Orch({**orch.env, "PYTHONPATH": str(orch.folder)}, orch.folder)


@pytest.fixture(scope="module")
def ray_lab(ray_orch: Orch, lab: Orch) -> Orch:
    return Orch({**ray_orch.env, "PYTHONPATH": str(lab.folder)}, lab.folder)


def states(orch: Orch, name: str) -> list[str]:
    return [row["state"] for row in orch.rows(f"select state from runs where sweep = '{name}' order by trial")]


def series(orch: Orch, name: str, key: str) -> dict[int, dict[int, float]]:
    """By trial: the value at each step; fails if a step was counted twice."""
    rows = orch.rows(f"select trial, step, value from metrics where sweep = '{name}' and key = '{key}' order by 1, 2")
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        assert row["step"] not in found.setdefault(row["trial"], {})
        found[row["trial"]][row["step"]] = float(row["value"])
    return found


# Stopping


def test_successive_halving_stops_what_is_not_finite_and_is_not_blinded_by_it(lab: Orch, name: str) -> None:
    text = f"""
        workload: lab_decisions:Said
        metric: val/loss
        params: {{text: "[1.0, nan, 2.0, 3.0, inf, 0.5][trial]", x: {{grid: [0, 1, 2, 3, 4, 5]}}}}
        {ASHA}
        log_every: 1
    """
    done = lab("sweep", lab.sweep_file(text, name), "--inline")
    assert states(lab, name) == ["finished", "diverged", "stopped", "stopped", "diverged", "finished"]
    rows = lab.rows(DECIDED % name + " and step = 1 order by trial")
    assert [row["action"] for row in rows] == ["continue", "stop", "stop", "stop", "stop", "continue"]
    assert [str(rows[trial]["value"]).lower()[:3] for trial in (1, 4)] == ["nan", "inf"]
    runs = lab.rows(f"select reason, verdict, last_step, objective from runs where sweep = '{name}' and trial = 2")
    assert runs == [{"reason": rows[2]["reason"], "verdict": "healthy", "last_step": 1, "objective": 2.0}]
    assert "rung 1: 2 is worse than" in rows[2]["reason"]
    assert rows[2]["reason"] in lab("status", name).out
    assert f"{name}: 6/6 finished (2 diverged, 2 stopped)" in done.out


def test_a_stopped_trial_is_best_only_with_a_note_that_names_the_best_that_finished(lab: Orch, name: str) -> None:
    text = f"""
        workload: lab_decisions:Said
        metric: val/loss
        params:
          text: "[1.0, 0.9][trial] if step < 3 else [0.5, 0.7][trial] if step < 9 else 0.8"
          x: {{grid: [0, 1]}}
        {ASHA}
        log_every: 1
    """
    lab("sweep", lab.sweep_file(text, name), "--inline")
    assert states(lab, name) == ["finished", "stopped"]
    said = lab("best", name).out
    assert "judged by its last report" in said
    assert "1 of the 2 runs were stopped before their end and count with what they reported" in said
    assert "this one was stopped at step 3; the best that finished is trial 0 with val/loss 0.8" in said


def test_an_objective_of_none_fails_its_trial_by_name_and_the_other_finishes(lab: Orch, name: str) -> None:
    text = f"""
        workload: lab_decisions:Said
        metric: val/loss
        params: {{text: "None if trial == 0 and step == 3 else 1.0", x: {{grid: [0, 1]}}}}
        {ASHA}
        log_every: 1
    """
    lab("sweep", lab.sweep_file(text, name), "--inline", expect=1)
    assert states(lab, name) == ["failed", "finished"]
    [failed] = lab.rows(f"select reason from runs where sweep = '{name}' and trial = 0")
    assert "'val/loss' is None" in failed["reason"]


def test_optuna_knows_stopped_trials_as_pruned_and_none_as_running(lab: Orch, name: str, server_url: str) -> None:
    text = f"""
        workload: lab_decisions:Said
        metric: val/loss
        params: {{text: "[1.0, 2, 3, 0.5, 4, 5, 0.25, 6, 7][trial]", x: {{uniform: [0, 1]}}}}
        search: {{algorithm: optuna, samples: 9}}
        {ASHA}
        log_every: 1
    """
    lab("sweep", lab.sweep_file(text, name), "--inline")
    query = """
        select json_object_agg(state, count) from (
            select trial.state, count(*) from optuna.trials as trial
            join optuna.studies as study using (study_id) where study.study_name = %s group by 1
        ) as counted
    """
    assert value_of(server_url, query, name) == {"COMPLETE": 3, "PRUNED": 6}


def test_a_killed_trial_that_goes_on_knows_what_it_reported_and_ends_at_max_steps_without_another_word(
    lab: Orch, name: str
) -> None:
    """It reports its height at step 10 alone, dies at 13, goes on from the state of 12 and is complete at 15."""
    text = f"""
        workload: lab_decisions:Climber
        metric: {{name: height, mode: max}}
        params: {{heard_every: 10, steps: 19, die: 0/13/{lab.folder / name}}}
        scheduler: {{algorithm: asha, grace_steps: 4, max_steps: 15}}
        log_every: 1
        checkpoint_every: 4
    """
    command = ("sweep", lab.sweep_file(text, name), "--inline")
    lab(*command, expect=-signal.SIGKILL)
    lab(*command, "--resume")
    [row] = lab.rows(f"select state, objective, last_step, reason from runs where sweep = '{name}'")
    assert row == {"state": "stopped", "objective": 10, "last_step": 15, "reason": "complete: max_steps 15 is reached"}
    assert series(lab, name, "rate")[0].keys() == set(range(1, 16))


def test_a_trial_is_finished_at_its_own_last_step_however_bad_it_is_there(lab: Orch, name: str) -> None:
    text = """
        workload: lab_decisions:Said
        metric: val/loss
        params: {text: "x * step", x: {grid: [1, 2]}, steps: {grid: [3, 9]}}
        scheduler: {algorithm: asha, grace_steps: 3, reduction_factor: 3}
        log_every: 1
    """
    lab("sweep", lab.sweep_file(text, name), "--inline")
    rows = lab.rows(f"select state, last_step from runs where sweep = '{name}' order by trial")
    assert [(row["state"], row["last_step"]) for row in rows] == [
        ("finished", 3),
        ("finished", 9),
        ("finished", 3),
        ("stopped", 3),
    ]


# A population


@pytest.fixture(scope="module")
def population(lab: Orch) -> str:
    """The name of a population of five that ran to its end, undisturbed."""
    lab("sweep", lab.sweep_file(POPULATION % "", "population"), "--inline")
    return "population"


def test_members_report_each_step_once_and_go_on_from_the_state_they_copied(lab: Orch, population: str) -> None:
    assert states(lab, population) == ["finished"] * 5
    heights = series(lab, population, "height")
    assert {tuple(steps) for steps in heights.values()} == {tuple(range(5, 45, 5))}
    copies = lab.rows(DECIDED % population + " and action = 'exploit'")
    assert copies
    for copy in copies:
        start, rate = heights[copy["source"]][copy["step"]], copy["params"]["rate"]
        assert heights[copy["trial"]][copy["step"] + 5] == pytest.approx(start + 5 * rate, rel=1e-12)  # five additions


def test_a_population_goes_on_evenly_on_one_worker(lab: Orch, population: str) -> None:
    rows = lab.rows(DECIDED % population + " order by decided_at")
    places = dict.fromkeys((row["trial"], row["step"]) for row in rows)  # a pause and what came of it are one
    assert [step for _, step in places] == [10] * 5 + [20] * 5 + [30] * 5


def test_copies_are_tags_of_their_runs_and_best_shows_the_parameters_at_the_end(
    lab: Orch, population: str, server_url: str
) -> None:
    copies = lab.rows(DECIDED % population + " and action = 'exploit' order by step")
    for copy in copies:
        tag = """
            select tag.value from public.tags as tag join orch_ledger.trials as trial on trial.run_id = tag.run_uuid
            join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
            where sweep.name = %s and trial.number = %s and tag.key = %s
        """
        value = value_of(server_url, tag, population, copy["trial"], f"orch.exploit.step-{copy['step']}")
        assert value == f"trial {copy['source']}, rate={copy['params']['rate']}"
    best = json.loads(lab("best", population, "--format", "json").out)[0]
    assert best["rate"] == series(lab, population, "rate")[best["trial"]][40]


def test_no_state_is_left_of_a_population_that_is_over(lab: Orch, population: str) -> None:
    left = Path(lab.env["ORCH_HOME"]).glob(f"artifacts/{population}-*/population")
    assert list(left) == []


def test_a_population_whose_command_was_killed_decides_and_ends_as_one_that_was_not(
    lab: Orch, population: str, name: str
) -> None:
    killed = f", die: 3/17/{lab.folder / name}"
    command = ("sweep", lab.sweep_file(POPULATION % killed, name), "--inline")
    lab(*command, expect=-signal.SIGKILL)
    half = lab.rows(DECIDED % name)
    lab(*command, "--resume")
    order = " order by step, trial, action"
    whole = lab.rows(DECIDED % name + order)
    assert 5 <= len(half) < len(whole)
    assert whole == lab.rows(DECIDED % population + order)
    assert series(lab, name, "height") == series(lab, population, "height")


def test_members_that_pause_and_copy_keep_what_they_reported_to_their_end(lab: Orch, name: str) -> None:
    text = POPULATION.replace("steps: 40", "steps: 15, heard_every: 10")
    done = lab("sweep", lab.sweep_file(text % "", name), "--inline")
    rows = lab.rows(f"select state, objective, last_step from runs where sweep = '{name}' order by trial")
    assert [(row["state"], row["last_step"]) for row in rows] == [("finished", 15)] * 5
    heights = series(lab, name, "height")
    sources = {row["trial"]: row["source"] for row in lab.rows(DECIDED % name + " and action = 'exploit'")}
    assert len(sources) == 2
    assert [row["objective"] for row in rows] == [heights[sources.get(trial, trial)][10] for trial in range(5)]
    assert "2 trials changed parameters on the way; above are the first ones: orch sql" in done.out


def test_a_member_that_diverged_copies_another_at_the_next_milestone(lab: Orch, name: str) -> None:
    lab("sweep", lab.sweep_file(POPULATION % ", nan_below: 0.55", name), "--inline")
    assert states(lab, name) == ["finished"] * 5
    heights = series(lab, name, "height")[2]  # the slowest
    assert [step for step, height in heights.items() if math.isnan(height)] == [5, 10]


def test_a_workload_that_saves_no_state_cannot_be_a_population(lab: Orch, name: str) -> None:
    done = lab("sweep", lab.sweep_file(POPULATION % ", saves: false", name), "--inline", expect=1)
    assert done.out.count("its workload saved no state after step 10, and this scheduler goes on from states") == 1
    assert "can go on without a saved state: see trial 0 above" in done.out
    assert set(states(lab, name)) == {"failed", "waiting"}


def test_a_population_needs_a_folder_for_its_states(lab: Orch, name: str) -> None:
    there = Orch({**lab.env, "ORCH_ARTIFACT_ROOT": "s3://bucket/orch"}, lab.folder)
    done = there("sweep", there.sweep_file(POPULATION % "", name), "--inline", expect=2)
    assert "pbt copies states between trials, and s3://bucket/orch is no folder" in done.err


def test_a_population_on_workers_outlives_a_signal_and_its_judge_and_loses_nothing(
    ray_lab: Orch, name: str, server_url: str
) -> None:
    command = ("sweep", ray_lab.sweep_file(POPULATION % ", sleep_s: 0.02", name))
    count = """
        select count(*) from orch_ledger.decisions as decision
        join orch_ledger.sweeps as sweep on sweep.id = decision.sweep_id where sweep.name = %s
    """
    process = ray_lab.start_warm(*command)
    wait_until(lambda: value_of(server_url, count, name) >= 5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "running" not in states(ray_lab, name)
    num_decided = value_of(server_url, count, name)
    process = ray_lab.start_warm(*command, "--resume")
    wait_until(lambda: value_of(server_url, count, name) > num_decided)
    kill_judge(ray_lab)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert states(ray_lab, name) == ["finished"] * 5
    heights = series(ray_lab, name, "height")
    assert {tuple(steps) for steps in heights.values()} == {tuple(range(5, 45, 5))}
    decisions = ray_lab.rows(DECIDED % name)
    places = [(row["trial"], row["step"], row["action"]) for row in decisions]
    assert len(set(places)) == len(places)
    assert {row["step"] for row in decisions} == {10, 20, 30}
    for copy in (row for row in decisions if row["action"] == "exploit"):
        start = heights[copy["source"]][copy["step"]]
        rate = series(ray_lab, name, "rate")[copy["trial"]][copy["step"] + 5]
        assert heights[copy["trial"]][copy["step"] + 5] == pytest.approx(start + 5 * rate, rel=1e-12)


def kill_judge(orch: Orch) -> None:
    judges = [one for one in psutil.process_iter(["cmdline"]) if "ArbiterActor" in " ".join(one.info["cmdline"] or [])]
    ours = [one for one in judges if one.environ().get("RAY_AUTH_TOKEN_PATH") == orch.env["RAY_AUTH_TOKEN_PATH"]]
    assert len(ours) == 1
    ours[0].kill()


# Budget


def test_a_time_budget_saves_what_runs_ends_well_and_a_larger_one_goes_on(lab: Orch, name: str) -> None:
    text = """
        workload: lab_decisions:Climber
        metric: {name: height, mode: max}
        params: {rate: {grid: [1, 2, 3]}, sleep_s: {grid: [0, 0.05, 0]}, steps: 40}
        zip: [[rate, sleep_s]]
        budget: {time: %ss}
        log_every: 1
    """
    command = ("sweep", lab.sweep_file(text % 1, name), "--inline")  # the second trial takes two: it is cut short
    done = lab(*command)
    last_line = done.out.strip().splitlines()[-1]
    assert "--resume" in last_line
    assert "budget reached (time: 1 s)" in last_line
    assert states(lab, name) == ["finished", "waiting", "waiting"]
    again = lab(*command, "--resume")  # used up is used up: nothing is started
    assert "budget reached" in again.out
    assert states(lab, name) == ["finished", "waiting", "waiting"]
    lab.sweep_file(text % 60, name)
    lab(*command, "--resume")
    assert states(lab, name) == ["finished"] * 3
    rows = lab.rows(f"select trial, attempts from runs where sweep = '{name}' order by trial")
    assert [row["attempts"] for row in rows] == [1, 2, 1]
    assert {tuple(steps) for steps in series(lab, name, "height").values()} == {tuple(range(1, 41))}


# Several objectives


def test_best_of_two_metrics_are_all_runs_that_no_other_beats_in_both(lab: Orch, name: str) -> None:
    text = """
        workload: lab_decisions:Said
        metric: [{name: val/loss, mode: min}, {name: size, mode: min}]
        params: {text: "[3.0, 2.0, 2.5, nan, 1.0][int(x)]", x: {grid: [0, 1, 2, 3, 4]}}
        log_every: 3
    """
    lab("sweep", lab.sweep_file(text, name), "--inline")
    front = json.loads(lab("best", name, "--format", "json").out)
    assert [(row["val/loss"], row["size"]) for row in front] == [(1.0, 4.0), (2.0, 1.0), (3.0, 0.0)]
    assert json.loads(lab("best", name, "--metric", "size", "--format", "json").out)[0]["size"] == 0.0
    assert "name one of the metrics" in lab("best", name, "--scope", "best", expect=2).err
    assert {"val/loss", "size"} <= set(json.loads(lab("compare", name, "--format", "json").out)[0])
    told: list[Any] = lab.rows(f"select more_objectives from runs where sweep = '{name}' order by trial")
    assert [row["more_objectives"] for row in told] == [[0], [1], [2], [3], [4]]


def test_a_front_holds_equal_points_and_no_dominated_one() -> None:
    points = [(1, 5), (1, 5), (2, 4), (2, 5), (0, 6), (3, 3), (3, 9)]
    brute = [
        place
        for place, point in enumerate(points)
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    ]
    assert sorted(pareto_front(points, ["min", "min"])) == brute == [0, 1, 2, 4, 5]
    assert pareto_front([(1.0, 1.0), (2.0, 2.0)], ["max", "min"]) == [1, 0]
    assert pareto_front([], ["min"]) == []


def test_a_front_of_thousands_takes_no_time_to_speak_of() -> None:
    started = time.process_time()
    assert len(pareto_front([(place, -place % 97) for place in range(5_000)], ["min", "min"])) <= 97
    assert time.process_time() - started < 5
