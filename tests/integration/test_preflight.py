"""What is checked before a sweep trains, and what becomes of it. The checks are those of small workloads of the lab."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checking import Answer, run_checks
from orchestrator.preflight import Preflight, has_checks, preflight, structures_of, undrawn_axes
from orchestrator.spec import SweepSpec, parse_sweep, read_sweep_file
from orchestrator.trial import Finding, Severity
from orchestrator.workload import describe
from tests.conftest import LAB, ROOT, Orch

BUGS = """
    # Which bug?
    workload: orch_lab:Checked
    metric: loss
    params:
      bug: {grid: [%s]}
      k: {grid: [1, 2]}
      rows: {grid: [4, 8]}
"""
ROUTER = "workload: moe_router\nmetric: val/mse\nparams:\n"


@pytest.fixture(autouse=True)
def _the_lab_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LAB)


def parsed(text: str) -> SweepSpec:
    return parse_sweep(text, "x.yaml", describe)


def varied(spec: SweepSpec) -> list[dict[str, Any]]:
    return [dict(one.varied) for one in structures_of(spec, describe(spec.workload))]


# Which trials stand for all


def test_trials_that_differ_in_scalars_or_seeds_share_a_structure_of_which_the_first_is_checked() -> None:
    path = ROOT / "sweeps" / "zloss.yaml"
    spec = parse_sweep(read_sweep_file(path), str(path), describe)
    structures = structures_of(spec, describe(spec.workload))
    assert [str(one) for one in structures] == [
        "k=1, precision=fp32", "k=1, precision=bf16-selective", "k=2, precision=fp32", "k=2, precision=bf16-selective",
    ]  # fmt: skip
    assert [(one.params["c_z"], one.params["seed"]) for one in structures] == [(0.0, 0)] * 4


def test_sizes_and_a_grid_of_one_value_set_no_structures_apart() -> None:
    assert varied(parsed(ROUTER + "  steps: {grid: [10, 20]}\n  k: {grid: [2]}\n")) == [{}]


def test_random_draws_are_known_beforehand_and_optunas_choices_are_all_tried() -> None:
    axes = "  k: {grid: [1, 2]}\n  precision: {choice: [fp32, bf16]}\n  lr: {loguniform: [1e-3, 1e-2]}\n"
    drawn = parsed(ROUTER + axes + "search: {algorithm: random, samples: 1, seed: 0}\n")
    assert len(varied(drawn)) == 2
    asked = parsed(ROUTER + axes + "search: {algorithm: optuna, samples: 1}\n")
    assert [tuple(one.values()) for one in varied(asked)] == [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")]
    assert undrawn_axes(asked, describe("moe_router")) == []


def test_a_structure_that_only_optuna_will_draw_is_named_as_not_checked() -> None:
    spec = parsed(ROUTER + "  clip_norm: {uniform: [0.5, 2]}\nsearch: {algorithm: optuna, samples: 3}\n")
    workload = describe("moe_router")
    assert len(varied(spec)) == 1
    assert undrawn_axes(spec, workload) == ["clip_norm"]
    [finding] = Preflight(spec, [], undrawn_axes(spec, workload), 0.0, 60.0).findings()
    assert (finding.check_name, finding.severity) == ("not_checked", Severity.INFO)
    assert "clip_norm" in finding.message


def test_a_shipped_workload_says_whether_it_has_checks_without_being_imported() -> None:
    assert has_checks(describe("moe_router"))
    assert not has_checks(describe("memory"))
    assert has_checks(describe("orch_lab:Checked"))
    assert not has_checks(describe("orch_lab:Trivial"))


# The processes


def test_a_check_that_dies_or_hangs_is_named_and_the_others_answer() -> None:
    configs = [{"bug": bug} for bug in ("none", "die", "hang", "raise", "tied", "none", "far", "text")]
    told: list[tuple[int, str]] = []
    # An answer takes a millisecond; to start a process takes some hundred.
    answers = run_checks(
        "orch_lab:Checked",
        configs,
        {},
        budget_s=60.0,
        limit_s=3.0,
        slow=lambda index, where: told.append((index, where)),
        slow_s=1.0,
    )
    messages = [[one.message for one in answer.findings] for answer in answers if answer]
    assert [len(some) for some in messages] == [0, 1, 1, 1, 1, 0, 1, 1]
    assert "SIGKILL" in messages[1][0]
    assert "had not ended after 3 s, in check (orch_lab.py:" in messages[2][0]
    assert [index for index, _ in told] == [2]
    assert told[0][1].startswith("check (orch_lab.py:")
    assert [answer.failed for answer in answers if answer] == [False, True, True, True, False, False, True, True]
    assert "RuntimeError: a planted failure (orch_lab.py:" in messages[3][0]
    assert "ValueError: a finding's step does not fit into 64 bits (orch_lab.py:" in messages[6][0]
    assert "TypeError: a Finding is due, this is 'a bug'" in messages[7][0]
    assert {one.severity for answer in answers if answer for one in answer.findings} == {Severity.WARNING}
    tied = answers[4]
    assert tied is not None
    assert type(tied.findings[0].value) is float  # unpickling a number of numpy's or torch's would import them here


def test_structures_that_were_not_begun_in_time_are_listed() -> None:
    spec = parsed("workload: orch_lab:Checked\nmetric: loss\nparams: {bug: {grid: [none, tied]}, k: {grid: [1, 2]}}\n")
    result = preflight(spec, lambda text: None, budget_s=0.0)
    [finding] = result.findings()
    assert (finding.check_name, finding.severity, finding.value) == ("not_checked", Severity.INFO, 4)
    assert "bug=none, k=1; bug=none, k=2; bug=tied, k=1; bug=tied, k=2" in finding.message
    assert [row[2] for row in result.table().rows] == ["not_checked"] * 4


def test_structures_whose_checks_failed_themselves_are_told_from_those_that_passed() -> None:
    spec = parsed("workload: orch_lab:Checked\nmetric: loss\nparams: {bug: {grid: [none, raise]}, k: {grid: [1, 2]}}\n")
    result = preflight(spec, lambda text: None)
    assert not result.is_whole
    assert not result.has_error
    assert result.remarks()[0].startswith("preflight: 2 of 4 structures checked in ")
    failed, unchecked = result.findings()
    assert failed.message.startswith("in 2 of 4 structures (all with bug=raise): the check itself failed: it raised")
    assert (unchecked.check_name, unchecked.severity, unchecked.value) == ("not_checked", Severity.WARNING, 2)
    assert unchecked.message.endswith("; the checks failed themselves of bug=raise, k=1; bug=raise, k=2")


def test_a_finding_that_nothing_sets_apart_names_its_structures() -> None:
    spec = parsed("workload: orch_lab:Checked\nmetric: loss\nparams: {bug: {grid: [none, tied]}, k: {grid: [1, 2]}}\n")
    first, *middle, last = structures_of(spec, describe(spec.workload))
    ties = Finding("router_ties", Severity.WARNING, "ties", "do")
    answers = [(first, Answer((ties,), 0.1)), *((one, Answer((), 0.1)) for one in middle), (last, Answer((ties,), 0.1))]
    [finding] = Preflight(spec, answers, [], 1.0, 60.0).findings()
    assert finding.message == "in 2 of 4 structures (bug=none, k=1; bug=tied, k=2): ties"


def test_a_finding_of_every_structure_or_of_two_values_is_said_once() -> None:
    spec = parsed(
        "workload: orch_lab:Checked\nmetric: loss\nparams: {bug: {grid: [none, tied, die]}, k: {grid: [1, 2]}}"
    )
    structures = structures_of(spec, describe(spec.workload))
    ties = Finding("router_ties", Severity.WARNING, "ties", "do")

    def remarks(*bugs: str) -> list[str]:
        answers = [(one, Answer((ties,) if one.varied["bug"] in bugs else (), 0.1)) for one in structures]
        return Preflight(spec, answers, [], 1.0, 60.0).remarks()[1:]

    assert remarks("tied", "die") == ["warning  router_ties: in 4 of 6 structures (all with bug=tied or die): ties  do"]
    assert remarks("none", "tied", "die") == ["warning  router_ties: in all 6 structures: ties  do"]


# The commands


def test_check_exits_1_where_nothing_could_be_checked_and_a_sweep_says_so_and_starts(orch: Orch, name: str) -> None:
    done = orch("check", "orch_lab:Checked", "--set", "params.bug=raise", expect=1)
    assert "0 of 1 structures checked" in done.out
    file = orch.sweep_file("workload: orch_lab:Checked\nmetric: loss\nparams: {bug: raise}\n", name)
    assert "0 of 1 structures checked" in orch("sweep", file, "--inline").out
    shown = orch("health", name).out
    assert "0 of 1 structures checked" in shown
    assert "a planted failure" in shown


def test_check_lists_each_structure_and_exits_1_on_an_error(orch: Orch, name: str) -> None:
    done = orch("check", orch.sweep_file(BUGS % "none, factor", name), "--format", "json", expect=1)
    rows = [(row["bug"], row["k"], row["check"], row["severity"]) for row in json.loads(done.out)]
    error = ("loss_factor", "error")
    assert rows == [("none", 1, "ok", None), ("none", 2, "ok", None), ("factor", 1, *error), ("factor", 2, *error)]
    assert "a workload may say something" in done.err


def test_check_takes_a_workload_too_and_says_when_there_is_nothing_to_check(orch: Orch) -> None:
    assert "ok" in orch("check", "orch_lab:Checked").out
    assert "40 times" in orch("check", "orch_lab:Checked", "--set", "params.bug=factor", expect=1).out
    assert orch("check", "orch_lab:Trivial").out == "orch_lab:Trivial has no checks to run before training\n"
    assert "did you mean moe_router?" in orch("check", "moe_routr", expect=2).err


def test_plan_says_how_many_structures_will_be_checked(orch: Orch, name: str) -> None:
    file = orch.sweep_file(BUGS % "none, tied", name)
    assert "preflight: 4 structures of orch_lab:Checked (bug, k) checked before" in orch("plan", file).out
    assert "nothing of orch_lab:Checked is checked" in orch("plan", file, "--set", "preflight=false").out


def test_an_error_keeps_a_sweep_from_starting_unless_the_bug_is_the_question(orch: Orch, name: str) -> None:
    file = orch.sweep_file(BUGS % "none, factor", name)
    refused = orch("sweep", file, "--inline", expect=2)
    where = "in 2 of 4 structures (all with bug=factor)"
    assert refused.err.splitlines()[-2:] == [
        f"{file}:6  preflight  loss_factor: {where}: the gradient is 40 times as long  divide",
        "nothing was started; where the bug is the question, write preflight: false (or --set preflight=false)",
    ]
    assert orch.rows(f"select sweep from sweeps where sweep = '{name}'") == []
    orch("sweep", file, "--inline", "--set", "preflight=false")
    assert orch.rows(f"select count(*) as n from findings where sweep = '{name}' and trial is null") == [{"n": 0}]


def test_warnings_are_said_and_stored_once_and_json_stays_json(orch: Orch, name: str) -> None:
    file = orch.sweep_file(BUGS % "none, tied", name)
    done = orch("sweep", file, "--inline", "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert notes[0] == "preflight: checking 4 structures of orch_lab:Checked ..."
    assert "ties" in notes[2]
    assert "all with bug=tied" in notes[2]
    assert events[-1]["findings"] == [{"severity": "warning", "check": "router_ties", "trials": 0}]
    stored = orch.rows(f"select message, trial, run_id, value from findings where sweep = '{name}' order by message")
    told = "in 2 of 4 structures (all with bug=tied): every second token"
    assert stored == [{"message": told, "trial": None, "run_id": None, "value": 0.5}]
    assert told in orch("health", name).out
    again = orch("sweep", file, "--inline", "--resume")
    assert "preflight:" not in again.out
    assert "findings: 1 warning (router_ties in the preflight)" in again.out


def test_a_continued_sweep_is_not_checked_again(orch: Orch, name: str) -> None:
    text = "workload: orch_lab:Checked\nmetric: loss\nparams: {bug: tied, pid_file: %s}\n"
    pid_file = orch.folder / f"{name}.pid"
    file = orch.sweep_file(text % pid_file, name)
    orch("sweep", file, "--inline")
    pid_file.unlink()
    orch.rows(f"select 1 from sweeps where sweep = '{name}'")
    orch("sweep", file, "--inline", "--resume")
    assert not pid_file.exists()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_preflight_ends_its_processes_and_leaves_nothing(orch: Orch, name: str, times: int) -> None:
    text = "workload: orch_lab:Checked\nmetric: loss\nparams: {bug: hang, pid_file: %s}\n"
    pid_file = orch.folder / f"{name}.pid"
    process = orch.start_warm("sweep", orch.sweep_file(text % pid_file, name), "--inline")
    pid = _pid_from(pid_file)
    for _ in range(times):  # the second comes while the first is being obeyed
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode in (130, -signal.SIGINT)[:times], output
    assert "Traceback" not in output
    assert times == 2 or "preflight: interrupted; nothing was started\n" in output
    assert _has_ended(pid)
    assert orch.rows(f"select sweep from sweeps where sweep = '{name}'") == []


def test_a_check_ends_with_the_command_that_was_killed_and_leaves_nothing(
    orch: Orch, name: str, tmp_path: Path
) -> None:
    pid_file = orch.folder / f"{name}.pid"
    here = replace(orch, env={**orch.env, "TMPDIR": str(tmp_path)})
    process = here.start_warm(
        "check", "orch_lab:Checked", "--set", "params.bug=hang", "--set", f"params.pid_file={pid_file}"
    )
    pid = _pid_from(pid_file)
    process.kill()
    process.communicate(timeout=30)
    assert _has_ended(pid)
    assert list(tmp_path.iterdir()) == []


def _pid_from(file: Path) -> int:
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(file.read_text())


def _has_ended(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with suppress(ChildProcessError, FileNotFoundError):
            if "Z (zombie)" in Path(f"/proc/{pid}/status").read_text():  # nobody reaps in a container without an init
                return True
        time.sleep(0.02)
    return False
