"""SIGINT, SIGTERM and SIGHUP, in every phase of a command: a clean end, the right code, nothing left running."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.database.keeper import wait_for
from tests.conftest import LAB, Orch
from tests.faults.conftest import value_of, wait_until
from tests.warm import WarmProcess

COUNTER = """
    workload: orch_lab:Counter
    metric: train/loss
    params: {steps: 100, sleep_s: 0.04}
    log_every: 1
    checkpoint_every: 10
"""
HANGS = """
    workload: orch_lab:Checked
    metric: loss
    params: {bug: hang, pid_file: %s}
"""
NUM_SWEEPS = "select count(*) from orch_ledger.sweeps where name = %s"
STATES = """
    select string_agg(trial.state, ' ' order by trial.number) from orch_ledger.trials as trial
    join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id where sweep.name = %s
"""
SPANS = """
    select string_agg(format('%%s: %%s to %%s, %%s', attempt, low, high, n), '; ' order by attempt) from (
        select attempt, min(step) as low, max(step) as high, count(*) as n from orch.metrics
        where sweep = %s and key = 'count' and value = step group by attempt
    ) as by_attempt
"""


def family_of(process: WarmProcess | subprocess.Popen[str]) -> list[psutil.Process]:
    family: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    return family


def are_gone(family: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)


def last_step_saved(orch: Orch, name: str) -> int:
    files = Path(orch.env["ORCH_HOME"]).glob(f"artifacts/{name}-*/*/artifacts-checkpoints/step-*")
    return max([0, *(int(path.stem.removeprefix("step-")) for path in files)])


def read_until(process: WarmProcess, text: str) -> None:
    assert any(text in line for line in process.stdout), f"ended without {text!r}"


# Training


def test_a_batch_systems_sigterm_to_the_whole_group_saves_the_step_and_resume_goes_on_behind_it(
    orch: Orch, prepared_url: str, name: str
) -> None:
    command = ("sweep", orch.sweep_file(COUNTER, name))
    process = orch.start_warm(*command)
    wait_until(lambda: last_step_saved(orch, name) >= 30)
    family = family_of(process)
    process.send_signal(signal.SIGTERM)  # as `timeout` does it: the command, then its group
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)  # what a spot instance has
    assert process.returncode == 130, output
    assert f"{name}.yaml --resume" in output
    assert wait_for(lambda: are_gone(family), 10)
    stopped = last_step_saved(orch, name)
    assert value_of(prepared_url, STATES, name) == "killed"
    orch(*command, "--resume", "--inline")
    assert stopped >= 30
    assert (
        value_of(prepared_url, SPANS, name) == f"1: 1 to {stopped}, {stopped}; 2: {stopped + 1} to 100, {100 - stopped}"
    )


@pytest.mark.slow
def test_a_second_signal_ends_the_command_and_all_its_processes_within_two_seconds(
    orch: Orch, prepared_url: str, name: str
) -> None:
    file = orch.sweep_file(COUNTER.replace("0.04", "60"), name)  # a trial that does not hear of the first one
    process = orch.start_warm("sweep", file)
    wait_until(lambda: any("TrialWorker" in one.name() or ".train" in one.name() for one in family_of(process)))
    wait_until(lambda: value_of(prepared_url, STATES, name) == "running")
    family = family_of(process)
    process.send_signal(signal.SIGINT)
    read_until(process, "once more stops at once")
    assert not wait_for(lambda: process.poll() is not None, 0.5), "the first waits for the trial"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=2) == 130
    assert wait_for(lambda: are_gone(family), 2)
    assert orch.rows(f"select state from runs where sweep = '{name}'") == [{"state": "lost"}]


SLEEPS = """
    workload: orch_lab:Odd
    metric: val/loss
    params: {sleep_s: 600}
    preflight: false
"""
IMPATIENT = "from orchestrator.execution import stopping; stopping.REMARK_S, stopping.ANSWER_S = 0.5, 1.0"
IN_VAIN = "it did not stop within 1 s; its worker was ended"


@pytest.mark.parametrize("flags", [(), ("--inline",)])
def test_a_trial_that_does_not_stop_holds_the_command_for_a_minute_and_can_be_resumed(
    ray_orch: Orch, prepared_url: str, name: str, flags: Sequence[str]
) -> None:
    orch = replace(ray_orch, before=IMPATIENT)
    process = orch.start("sweep", orch.sweep_file(SLEEPS, name), *flags)
    wait_until(lambda: value_of(prepared_url, STATES, name) == "running")
    family = family_of(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "still waiting for trial 0;" in output
    assert f"orch resume {name}" in output or f"{name}.yaml --resume" in output
    assert value_of(prepared_url, STATES, name) == "killed"
    [row] = orch.rows(f"select reason from runs where sweep = '{name}'")
    assert row["reason"] == ("trial 0 did not stop within 1 s" if flags else IN_VAIN)
    assert wait_for(lambda: are_gone(family), 10)


def test_a_closed_terminal_stops_the_sweep_as_the_first_ctrl_c_does(orch: Orch, prepared_url: str, name: str) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        orch.command("sweep", orch.sweep_file(COUNTER, name), "--inline"),
        cwd=LAB,
        env=orch.env,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    wait_until(lambda: last_step_saved(orch, name) >= 10)
    os.close(master)
    assert process.wait(timeout=60) == 130
    assert value_of(prepared_url, STATES, name) == "killed"
    assert value_of(prepared_url, SPANS, name).startswith(f"1: 1 to {last_step_saved(orch, name)},")


def test_a_sweep_whose_output_nobody_reads_any_more_stops_instead_of_breaking(
    orch: Orch, prepared_url: str, name: str
) -> None:
    text = COUNTER.replace("steps: 100", "steps: 5, seed: {grid: [0, 1, 2]}")
    process = orch.start_warm("sweep", orch.sweep_file(text, name), "--inline")
    read_until(process, "0 done")
    process.stdout.close()  # as a `tee` that the same Ctrl-C has ended
    assert process.wait(timeout=60) == 130
    assert value_of(prepared_url, STATES, name) == "finished waiting waiting"


# Before and after


def catches_sigterm(process: subprocess.Popen[str]) -> bool:
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def starts_ray(process: subprocess.Popen[str]) -> bool:
    return any("gcs_server" in one.name() for one in family_of(process))


@pytest.mark.parametrize(
    ("is_reached", "arguments"), [(catches_sigterm, ["--inline"]), (starts_ray, [])], ids=["before all else", "Ray"]
)
def test_a_signal_before_the_sweep_is_open_leaves_nothing_of_it(
    orch: Orch, prepared_url: str, name: str, is_reached: Callable[[subprocess.Popen[str]], bool], arguments: list[str]
) -> None:
    process = orch.start("sweep", orch.sweep_file(COUNTER, name), *arguments)
    wait_until(lambda: is_reached(process))
    family = family_of(process)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert wait_for(lambda: are_gone(family), 10)
    assert value_of(prepared_url, NUM_SWEEPS, name) == 0


def test_a_sigterm_during_the_preflight_ends_its_checks_and_starts_nothing(
    orch: Orch, prepared_url: str, name: str, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    process = orch.start_warm("sweep", orch.sweep_file(HANGS % pid_file, name), "--inline")
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    check = psutil.Process(int(pid_file.read_text()))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "nothing was started" in output
    assert wait_for(lambda: are_gone([check]), 10)
    assert value_of(prepared_url, NUM_SWEEPS, name) == 0


def test_a_wish_to_cancel_that_comes_when_all_is_trained_leaves_a_finished_sweep(
    orch: Orch, prepared_url: str, name: str
) -> None:
    one_step = COUNTER.replace("steps: 100, sleep_s: 0.04", "steps: 1, sleep_s: 4")  # a wish is heard within 2 s
    process = orch.start_warm("sweep", orch.sweep_file(one_step, name), "--inline")
    wait_until(lambda: value_of(prepared_url, STATES, name) == "running")
    value_of(prepared_url, "update orch_ledger.sweeps set wanted = 'cancel' where name = %s", name)
    output, _ = process.communicate(timeout=60)
    assert "cancelled by `orch cancel`" in output  # it was heard
    assert process.returncode == 0, output
    assert "go on with what is left" not in output
    assert value_of(prepared_url, "select state from orch_ledger.sweeps where name = %s", name) == "finished"


def test_a_signal_that_comes_when_all_is_trained_leaves_a_finished_sweep(
    orch: Orch, prepared_url: str, name: str
) -> None:
    process = orch.start_warm("sweep", orch.sweep_file(COUNTER.replace("steps: 100", "steps: 3"), name), "--inline")
    read_until(process, "1/1")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode in (0, 130), output  # the command may have ended just before
    assert "Traceback" not in output
    query = "select state from orch_ledger.sweeps where name = %s"
    assert value_of(prepared_url, query, name) == "finished"
    assert value_of(prepared_url, STATES, name) == "finished"
