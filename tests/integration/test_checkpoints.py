"""Trials that were cut short go on where they were: after a signal, a dead worker, a killed command, a torn file."""

from __future__ import annotations

import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.conftest import Orch

COUNTER = """
    workload: orch_lab:Counter
    metric: train/loss
    params: {steps: 60, sleep_s: 0.04, die_at: %d}
    log_every: 1
    checkpoint_every: 10
    retries: 1
"""
KILLED = -signal.SIGKILL  # inline, the worker that dies is the whole command


def steps_saved(orch: Orch, name: str) -> list[int]:
    files = Path(orch.env["ORCH_HOME"]).glob(f"artifacts/{name}-*/*/artifacts-checkpoints/step-*")
    return sorted(int(path.stem.removeprefix("step-")) for path in files)


def newest_file(orch: Orch, name: str) -> Path:
    step = steps_saved(orch, name)[-1]
    (path,) = Path(orch.env["ORCH_HOME"]).glob(f"artifacts/{name}-*/*/artifacts-checkpoints/step-{step}.*")
    return path


def interrupt_at_step(orch: Orch, name: str, step: int, *command: object) -> None:
    process = orch.start_warm(*command)
    deadline = time.monotonic() + 120
    while step not in steps_saved(orch, name):
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output


def ask(url: str, query: str, name: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query, {"sweep": name}).fetchall()


def spans(url: str, name: str) -> list[tuple[int, int, int, int]]:
    """(attempt, number of points that count, first step, last step); a point that is not its step's own is left out."""
    query = """
        select attempt, count(*), min(step), max(step) from orch.metrics
        where sweep = %(sweep)s and key = 'count' and value = step group by 1 order by 1
    """
    return ask(url, query, name)


def ends(url: str, name: str) -> list[tuple[str, int, int]]:
    return ask(url, "select state, attempts, last_step from orch.runs where sweep = %(sweep)s", name)


def test_ctrl_c_saves_the_step_it_stopped_at_and_resume_goes_on_behind_it(
    orch: Orch, name: str, server_url: str
) -> None:
    command = ("sweep", orch.sweep_file(COUNTER % 0, name), "--inline")
    interrupt_at_step(orch, name, 30, *command)
    before, stopped = steps_saved(orch, name)
    assert 20 <= before < stopped < 60
    assert stopped >= 30
    assert ends(server_url, name) == [("killed", 1, stopped)]
    orch(*command, "--resume")
    assert spans(server_url, name) == [(1, stopped, 1, stopped), (2, 60 - stopped, stopped + 1, 60)]
    assert ends(server_url, name) == [("finished", 2, 60)]
    assert steps_saved(orch, name) == [], "a finished trial needs no state"


def test_a_killed_command_is_resumed_at_the_last_checkpoint_and_the_best_one_is_kept(
    orch: Orch, name: str, server_url: str
) -> None:
    text = COUNTER.replace("train/loss", "{name: train/loss, mode: max}")  # so that it is best at the first one
    command = ("sweep", orch.sweep_file(text % 37, name), "--inline")
    orch(*command, expect=KILLED)
    assert steps_saved(orch, name) == [10, 20, 30]
    done = orch(*command, "--resume", "--set", "keep_checkpoints=true")
    assert steps_saved(orch, name) == [10, 50]
    assert f"the last and the best state of 1 trial are kept (in {newest_file(orch, name).parent})" in done.out
    assert spans(server_url, name) == [(1, 30, 1, 30), (2, 30, 31, 60)]


STUMBLES = """
    import math
    from orch_lab import Counter
    from orchestrator.trial import Report

    class Stumbles(Counter):
        def run(self, config, context):
            for report in super().run(config, context):
                yield Report(report.step, {"train/loss": math.nan}) if report.step == 12 else report
"""


def test_a_loss_that_was_nan_before_the_checkpoint_is_not_forgotten_by_the_next_attempt(
    orch: Orch, name: str, server_url: str
) -> None:
    (orch.folder / f"lab_{name}.py").write_text(textwrap.dedent(STUMBLES))
    there = Orch({**orch.env, "PYTHONPATH": str(orch.folder)}, orch.folder)
    text = (COUNTER % 37).replace("orch_lab:Counter", f"lab_{name}:Stumbles") + "    stop: {diverged: false}\n"
    command = ("sweep", there.sweep_file(text, name), "--inline")
    there(*command, expect=KILLED)
    there(*command, "--resume")
    query = "select state, attempts, diverged_at, last_step, reason from orch.runs where sweep = %(sweep)s"
    assert ask(server_url, query, name) == [("diverged", 2, 12, 60, "train/loss is nan at step 12")]


def test_a_torn_checkpoint_falls_back_to_the_one_before_with_a_warning(orch: Orch, name: str, server_url: str) -> None:
    command = ("sweep", orch.sweep_file(COUNTER % 37, name), "--inline")
    orch(*command, expect=KILLED)
    torn = newest_file(orch, name)
    torn.write_bytes(torn.read_bytes()[:-1] + b"?")  # of the right size: only the worker, who reads it all, can tell
    orch(*command, "--resume")
    assert spans(server_url, name) == [(1, 20, 1, 20), (2, 40, 21, 60)]
    query = "select severity, message from orch.findings where sweep = %(sweep)s"
    message = "the checkpoint of step 30 is not used: its content is not what was written"
    assert ask(server_url, query, name) == [("warning", message)]


def test_rm_purge_takes_the_checkpoints_of_unfinished_trials_along(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(COUNTER % 37, name), "--inline", expect=KILLED)
    folder = newest_file(orch, name).parent
    orch("rm", name, "--purge")
    assert not folder.exists()


def test_a_dead_worker_costs_one_attempt_that_goes_on_at_the_last_checkpoint_and_the_sweep_goes_on(
    ray_orch: Orch, name: str, server_url: str
) -> None:
    text = (COUNTER % 37).replace("steps: 60", "steps: {grid: [60, 30]}").replace("0.04", "0.02")
    ray_orch("sweep", ray_orch.sweep_file(text, name), "--max-concurrent", 1)
    assert spans(server_url, name) == [(1, 60, 1, 30), (2, 30, 31, 60)]  # both trials' first attempts
    assert sorted(ends(server_url, name)) == [("finished", 1, 30), ("finished", 2, 60)]


STORES = [("wasbs://box@account/orch", True), ("s3://bucket/orch", False), ("/tmp/orch", False), ("", False)]


@pytest.mark.parametrize(("root", "is_said"), STORES)
def test_a_plan_says_when_states_cannot_be_kept(orch: Orch, name: str, root: str, is_said: bool) -> None:
    there = Orch({**orch.env, "ORCH_ARTIFACT_ROOT": root}, orch.folder)
    note = f"no checkpoints in {root}: an interrupted trial starts again at step 0"
    assert (note in there("plan", there.sweep_file(COUNTER % 0, name)).out) == is_said
