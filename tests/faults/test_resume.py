"""`orch resume`: what is left, from the ledger alone, and of the rest exactly what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.database.connection import Database
from orchestrator.launch import create_sweep
from orchestrator.ledger import Ledger
from orchestrator.planning import read_spec
from orchestrator.workload import describe
from tests.conftest import LAB, Orch
from tests.faults.conftest import value_of, wait_until

COUNT = """
    # How far does it count?
    workload: orch_lab:Counter
    metric: {{name: train/loss, mode: min}}
    params:
      raise_at: {{grid: [0, 25]}}
      steps: 40
      cure: {cure}
    log_every: 1
    checkpoint_every: 10
    preflight: false
"""

SEARCH = """
    workload: orch_lab:Trivial
    metric: {{name: val/loss, mode: min}}
    params:
      x: {{uniform: [0, 1]}}
      steps: 4
      hold: "{hold}"
    search: {{algorithm: optuna, samples: 6, seed: 0}}
    preflight: false
"""


TWO = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params: {x: {grid: [0, 1]}, steps: 4}
    preflight: false
"""


def states(orch: Orch, name: str) -> list[tuple[str, int]]:
    rows = orch.rows(f"select state, attempts from runs where sweep = '{name}' order by trial")
    return [(row["state"], row["attempts"]) for row in rows]


def test_failed_trials_run_again_when_asked_for_and_go_on_from_their_checkpoints(
    orch: Orch, name: str, tmp_path: Path
) -> None:
    file = orch.sweep_file(COUNT.format(cure=tmp_path / "cure"), name)
    ended = orch("sweep", file, "--inline", expect=1)
    assert f"orch --home {orch.env['ORCH_HOME']} resume" not in ended.out  # the home was not typed
    assert f"orch resume {name} --failed" in ended.out
    assert f"run the 1 failed again: orch resume {name} --failed" in orch("status", name).out
    file.unlink()  # nothing but the ledger is needed
    assert f"{name}: 1/2 finished (1 failed)" in orch("resume", name, "--inline", expect=1).out
    assert states(orch, name) == [("finished", 1), ("failed", 1)]
    (tmp_path / "cure").touch()
    resumed = orch("resume", name, "--failed", "--inline")
    assert "1 trial goes on where a checkpoint was saved: 1 from step 21" in resumed.out
    assert f"{name}: 2/2 finished" in resumed.out
    assert states(orch, name) == [("finished", 1), ("finished", 2)]
    points = "select trial, count(*) as n, count(distinct step) as d, min(step) as a, max(step) as b from metrics"
    rows = orch.rows(f"{points} where sweep = '{name}' and key = 'count' group by trial order by trial")
    assert rows == [{"trial": trial, "n": 40, "d": 40, "a": 1, "b": 40} for trial in (0, 1)]


def test_a_finished_sweep_is_shown_unless_one_of_its_trials_is_named(orch: Orch, name: str, prepared_url: str) -> None:
    file = orch.sweep_file(SEARCH.format(hold=""), name)
    orch("sweep", file, "--inline")
    text = "select spec::text || source || description from orch_ledger.sweeps where name = %s"
    before = value_of(prepared_url, text, name)
    shown = orch("resume", name, "--failed", "--diverged")  # without Ray, or it would take seconds
    assert f"--failed  no trial of {name} has failed" in shown.out
    assert f"--diverged  no trial of {name} has diverged" in shown.out
    assert states(orch, name) == [("finished", 1)] * 6
    assert f"sweep '{name}' has trials 0 to 5" in orch("resume", name, "--trial", "6", expect=2).err
    assert f"did you mean {name}?" in orch("resume", f"{name}x", expect=2).err
    orch("resume", name, "--trial", "2", "--inline")
    assert states(orch, name) == [("finished", 1)] * 2 + [("finished", 2)] + [("finished", 1)] * 3
    assert value_of(prepared_url, text, name) == before  # its file's words are still its own
    assert value_of(prepared_url, "select count(*) from public.runs where name like %s", f"{name}-%") == 6
    assert "there is nothing to cancel" in orch("cancel", name).out


def test_a_cancelled_search_goes_on_as_if_it_had_not_been(
    orch: Orch, name: str, prepared_url: str, tmp_path: Path
) -> None:
    hold = tmp_path / "go"  # the third trial is still running when the wish to cancel is heard
    process = orch.start_warm("sweep", orch.sweep_file(SEARCH.format(hold=hold), name), "--inline")
    finished = """
        select count(*) from orch_ledger.trials as trial join orch_ledger.sweeps as sweep on sweep.id = trial.sweep_id
        where sweep.name = %s and trial.state = 'finished'
    """
    wait_until(lambda: value_of(prepared_url, finished, name) >= 2)
    cancelled = orch("cancel", name)
    assert f"asked {process.pid}@" in cancelled.out
    assert f"sweep {name} is cancelled: " in cancelled.out
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert f"cancelled by `orch cancel`; go on with what is left: orch resume {name}" in output
    assert {state for state, _ in states(orch, name)} <= {"finished", "killed", "waiting"}
    assert (
        value_of(
            prepared_url, "select count(*) from public.runs where status = 'RUNNING' and name like %s", f"{name}-%"
        )
        == 0
    )
    assert f"sweep {name} is cancelled already" in orch("cancel", name).out
    hold.touch()
    orch("resume", name, "--inline")
    twin = f"{name}_twin"
    orch("sweep", orch.sweep_file(SEARCH.format(hold=""), twin), "--inline")
    drawn = [
        orch.rows(f"select params ->> 'x' as x from runs where sweep = '{one}' order by trial") for one in (name, twin)
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 6


def test_a_sweep_that_never_got_its_trials_is_freed_by_rm_and_started_by_resume(
    orch: Orch, name: str, prepared_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a disk leaves it that fills between the sweep's row and its trials."""
    from orchestrator.tracking.runs import Runs

    monkeypatch.syspath_prepend(str(LAB))
    file = orch.sweep_file(TWO, name)
    spec = read_spec(file, (), None)
    runs, engine = Runs(prepared_url, tmp_path.as_uri()), Database.from_url(prepared_url).engine()

    def begun() -> None:
        create_sweep(Ledger(engine), runs, spec, describe(spec.workload))

    begun()
    refused = orch("sweep", file, "--inline", expect=2)
    assert f"sweep '{name}' exists already (created)" in refused.err
    assert "--resume" in refused.err
    orch("rm", name)
    begun()
    assert f"{name}: 2/2 finished" in orch("sweep", file, "--inline", "--resume").out
    assert states(orch, name) == [("finished", 1)] * 2
    runs.close()
    engine.dispose()
