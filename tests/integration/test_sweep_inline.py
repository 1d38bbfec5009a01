"""A sweep from the file to the answer, with everything real but Ray: `orch sweep --inline` and what reads it."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import mlflow
import psycopg
import pytest

from orchestrator.settings import Home
from orchestrator.tracking.journal import Journal
from orchestrator.tracking.mlflow_schema import mlflow_uri
from orchestrator.tracking.records import Points, to_json
from orchestrator.workspace import open_workspace
from tests.conftest import Orch

GRID = """
    # Does x matter?
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params:
      x: {grid: [0, 1.0, 2.0]}
      k: {grid: [1, 2]}
    seeds: 2
    log_every: 1
"""

ODD = """
    workload: orch_lab:Odd
    metric: {name: val/loss, mode: min}
    params:
      do: {grid: [%s]}
    log_every: 1
"""


THREADS = """
import os
from orchestrator.trial import Report
from orchestrator.workload import WorkloadConfig

AT_IMPORT = float(os.environ.get("OMP_NUM_THREADS") or "nan")  # torch looks once, when it is imported


class Counted:
    class Config(WorkloadConfig):
        seed: int = 0

    metrics = ("threads",)

    def run(self, config, context):
        yield Report(1, {"threads": AT_IMPORT})
"""


@pytest.mark.parametrize(("typed", "counted"), [("", 2), ("5", 5)])
def test_a_workload_that_imports_torch_at_its_top_gets_the_threads_of_its_cpus(
    orch: Orch, name: str, tmp_path: Path, typed: str, counted: int
) -> None:
    (tmp_path / f"lab_{name}.py").write_text(THREADS)
    spec = f"workload: lab_{name}:Counted\nmetric: {{name: threads, mode: max}}\nresources: {{cpu: 2}}\n"
    typing = replace(orch, env={**orch.env, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": typed})
    typing("sweep", orch.sweep_file(spec, name), "--inline", "--set", "preflight=false")
    assert orch.rows(f"select threads from sweep_{name}") == [{"threads": counted}]


def test_a_grid_is_trained_and_answers_its_question(orch: Orch, name: str) -> None:
    file = orch.sweep_file(GRID, name)
    done = orch("sweep", file, "--inline")
    assert "Does x matter?" in done.out
    assert f"{name}: 12/12 finished" in done.out
    rows = orch.rows(f'select k, count(*) as n, avg("val/loss") as mean from sweep_{name} group by 1 order by 1')
    assert [row["n"] for row in rows] == [6, 6]
    assert rows[1]["mean"] - rows[0]["mean"] == pytest.approx(0.01)  # the workload adds k / 100
    best = json.loads(orch("best", name, "--format", "json").out)[0]
    assert (best["x"], best["k"]) == (1.0, 1)
    assert best["val/loss"] == pytest.approx(0.11)


def test_every_point_is_in_mlflows_tables_once(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(GRID, name), "--inline")
    rows = orch.rows(
        f"select count(*) as n, count(distinct (run_id, key, step)) as d from metrics where sweep = '{name}'"
    )
    assert rows == [{"n": 12 * 10 * 5, "d": 12 * 10 * 5}]


def test_a_finished_sweep_prints_its_comparison_again_and_an_existing_name_is_refused(
    orch: Orch, name: str, home: Home, server_url: str
) -> None:
    file = orch.sweep_file(GRID, name)
    orch("sweep", file, "--inline")
    with psycopg.connect(server_url) as connection:
        names = f"select id from orch_ledger.sweeps where name = '{name}'"
        trial = connection.execute(f"select run_id, id from orch_ledger.trials where sweep_id = ({names})").fetchone()
    assert trial is not None
    journal = Journal.create(open_workspace(home.path).remote_journal)  # as a cluster's recorder on this host does
    journal.append([to_json(Points(*trial, 1, 77, int(time.time() * 1000), {"late": 4.0}))])
    journal.close()
    assert f"{name}: 12/12 finished" in orch("sweep", file, "--resume").out
    assert orch.rows(f"select step, value from metrics where sweep = '{name}' and key = 'late'") == [
        {"step": 77, "value": 4.0}
    ]
    journal.folder.parent.rmdir()
    refused = orch("sweep", file, expect=2)
    assert f"orch sweep {file} --resume" in refused.err
    assert "--name NEW_NAME" in refused.err
    assert orch.rows(f"select trials from sweeps where sweep = '{name}'") == [{"trials": 12}]


def test_another_spelling_continues_and_another_value_is_refused(orch: Orch, name: str) -> None:
    text = "workload: orch_lab:Trivial\nmetric: val/loss\nparams: {x: %s}\n"
    file = orch.sweep_file(text % "1e-3", name)
    orch("sweep", file, "--inline")
    file.write_text(text % "0.001")
    orch("sweep", file, "--resume")
    file.write_text(text % "0.002")
    refused = orch("sweep", file, "--resume", expect=2)
    assert "spec differs" in refused.err
    assert "params.x: 0.001 -> 0.002" in refused.err
    assert orch.rows(f"select count(*) as n from runs where sweep = '{name}'") == [{"n": 1}]


def test_a_trial_that_raises_fails_with_its_traceback_and_the_rest_goes_on(orch: Orch, name: str) -> None:
    done = orch("sweep", orch.sweep_file(ODD % "nothing, raise", name), "--inline", expect=1)
    assert "a planted failure" in done.out
    assert 'File "' in done.out  # the first traceback is shown at once
    assert f"{name}: 1/2 finished (1 failed)" in done.out
    rows = orch.rows(f"select state, error, reason from runs where sweep = '{name}' order by trial")
    assert [row["state"] for row in rows] == ["finished", "failed"]
    assert "RuntimeError: a planted failure" in rows[1]["error"]


def test_all_trials_failing_is_exit_1_and_two_failed_runs(orch: Orch, name: str) -> None:
    text = ODD % "raise" + "    seeds: 2\n"
    done = orch("sweep", orch.sweep_file(text, name), "--inline", expect=1)
    assert f"{name}: 0/2 finished (2 failed)" in done.out


@pytest.mark.parametrize(("value", "meaning"), [("nan", "NaN"), ("inf", "Infinity")])
def test_a_diverged_run_is_a_result_that_is_never_best(orch: Orch, name: str, value: str, meaning: str) -> None:
    orch("sweep", orch.sweep_file(ODD % f"nothing, {value}", name), "--inline")
    rows = orch.rows(f"select state, verdict, diverged_at, reason from runs where sweep = '{name}' order by trial")
    assert (rows[1]["state"], rows[1]["verdict"], rows[1]["diverged_at"]) == ("diverged", "diverged", 2)
    assert rows[1]["reason"] == f"val/loss is {value} at step 2"
    last = orch.rows(f"select last from final_metrics where sweep = '{name}' and key = 'val/loss' order by trial")
    assert last == [{"last": 0.25}, {"last": meaning}]
    assert json.loads(orch("best", name, "--format", "json").out)[0]["trial"] == 0
    below = json.loads(orch("runs", name, "--where", '"val/loss" < 1', "--format", "json").out)
    assert [row["trial"] for row in below] == [0]
    assert orch.rows(f"select min(last) as m from final_metrics where sweep = '{name}' and last < 1") == [{"m": 0.25}]


def test_no_finite_run_means_best_exits_1(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "nan", name), "--inline")
    assert "no finite run" in orch("best", name, expect=1).err


def test_stop_diverged_false_trains_on_but_stays_diverged(orch: Orch, name: str) -> None:
    text = ODD % "nan" + "    stop: {diverged: false}\n"
    orch("sweep", orch.sweep_file(text, name), "--inline")
    row = orch.rows(f"select state, diverged_at, last_step from runs where sweep = '{name}'")
    assert row == [{"state": "diverged", "diverged_at": 2, "last_step": 4}]


def test_a_metric_that_is_no_number_fails_the_trial_and_is_named(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "none, nothing", name), "--inline", expect=1)
    rows = orch.rows(f"select state, reason from runs where sweep = '{name}' order by trial")
    assert [row["state"] for row in rows] == ["failed", "finished"]
    assert "'val/loss'" in rows[0]["reason"]


def test_illegal_and_undeclared_metric_names_are_kept_with_a_warning(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "odd_names", name), "--inline")
    findings = orch.rows(f"select severity, message from findings where sweep = '{name}'")
    assert len(findings) == 5
    assert {row["severity"] for row in findings} == {"warning"}
    assert orch.rows(f"select verdict from runs where sweep = '{name}'") == [{"verdict": "warning"}]
    values = orch.rows(f"select max(last) as m from final_metrics where sweep = '{name}' and key not like '%loss'")
    assert values == [{"m": 5.0}]


def test_a_sweep_whose_first_trial_never_reports_the_objective_stops(orch: Orch, name: str) -> None:
    text = (ODD % "silent").replace("val/loss", "load/1") + "    seeds: 5\n"
    done = orch("sweep", orch.sweep_file(text, name), "--inline", expect=1)
    assert "never reported 'load/1'; it reported other, train/loss" in done.out
    rows = orch.rows(f"select state, count(*) as n from runs where sweep = '{name}' group by 1 order by 1")
    assert rows == [{"state": "failed", "n": 1}, {"state": "waiting", "n": 4}]


def test_an_artifact_of_a_diverged_run_can_be_loaded(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "artifact", name), "--inline")
    run_id = orch.rows(f"select run_id from runs where sweep = '{name}'")[0]["run_id"]
    stored = list(Path(orch.env["ORCH_HOME"]).glob(f"artifacts/*/{run_id}*/**/last.bin"))
    assert [file.read_bytes() for file in stored] == [b"weights"]


def test_a_finding_with_nan_is_stored_and_makes_the_run_suspect(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "finding", name), "--inline")
    found = orch.rows(f"select check_name, severity, step, value, advice from findings where sweep = '{name}'")
    expected = {"check_name": "planted", "severity": "error", "step": 2, "value": "NaN", "advice": "do something"}
    assert found == [expected]
    assert orch.rows(f"select verdict from runs where sweep = '{name}'") == [{"verdict": "suspect"}]


def test_typed_nested_and_long_parameters_are_kept_whole(orch: Orch, name: str) -> None:
    note = "a,b " + "x" * 6001
    text = """
        workload: orch_lab:Odd
        metric: val/loss
        params:
          opt: {lr: {grid: [0.2]}}
          hidden: {grid: [[300], [200, 100]]}
    """
    orch("sweep", orch.sweep_file(text, name), "--inline", "--set", f"params.note={note}")
    rows = orch.rows(f'select "opt.lr", "opt.wd", hidden, length(note) as n from sweep_{name} order by trial')
    assert rows[0] == {"opt.lr": 0.2, "opt.wd": 0.01, "hidden": [300], "n": 6005}
    assert rows[1]["hidden"] == [200, 100]
    where = orch("runs", name, "--where", "\"opt.lr\" = 0.2 and hidden = '[300]'", "--format", "json").out
    assert len(json.loads(where)) == 1


def test_numbers_in_exponent_form_sort_as_numbers(orch: Orch, name: str) -> None:
    text = "workload: orch_lab:Odd\nmetric: val/loss\nparams: {x: {grid: [1.0e-3, 1.0e-5, 1.0e-4]}}\n"
    orch("sweep", orch.sweep_file(text, name), "--inline")
    rows = json.loads(orch("runs", name, "--sort", "x", "--format", "json").out)
    assert [row["x"] for row in rows] == [1e-5, 1e-4, 1e-3]


def test_an_optuna_search_runs_on_the_same_path(orch: Orch, name: str) -> None:
    text = """
        workload: orch_lab:Trivial
        metric: val/loss
        params: {x: {uniform: [-4, 4]}}
        seeds: 2
        search: {algorithm: optuna, samples: 8, seed: 1}
    """
    orch("sweep", orch.sweep_file(text, name), "--inline")
    rows = orch.rows(f"select x, count(*) as n from sweep_{name} group by 1")
    assert len(rows) == 8
    assert {row["n"] for row in rows} == {2}


def test_the_first_ctrl_c_marks_killed_and_resume_starts_a_second_attempt(orch: Orch, name: str) -> None:
    file = orch.sweep_file(GRID, name)
    slow = ("--set", "params.sleep_s=0.03", "--set", "params.steps=30", "--set", "params.k=1", "--set", "seeds=1")
    process = orch.start_warm("sweep", file, "--inline", *slow)
    _wait_for_points(orch, name)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"orch sweep {file}" in output
    assert "--resume" in output
    before = orch.rows(f"select state, run_id from runs where sweep = '{name}' and state <> 'waiting'")
    assert [row["state"] for row in before].count("killed") == 1
    # Resuming needs the same question; the values that make it slow are part of it.
    orch("sweep", file, "--inline", *slow, "--resume", timeout_s=300)
    killed = next(row["run_id"] for row in before if row["state"] == "killed")
    after = orch.rows(f"select state, attempts from runs where run_id = '{killed}'")
    assert after == [{"state": "finished", "attempts": 2}]
    points = orch.rows(
        f"select count(*) as n, count(distinct step) as steps, min(attempt) as a from metrics"
        f" where run_id = '{killed}' and key = 'val/loss'"
    )
    assert points == [{"n": 30, "steps": 30, "a": 2}]


def _wait_for_points(orch: Orch, name: str) -> None:
    for _ in range(100):
        done = orch("sql", f"select count(*) as n from metrics where sweep = '{name}'", "--format", "json", expect=None)
        if done.code == 0 and json.loads(done.out)[0]["n"] > 20:
            return
        time.sleep(0.1)
    pytest.fail("no points arrived")


def test_rm_frees_the_name_and_purge_leaves_nothing(orch: Orch, name: str) -> None:
    file = orch.sweep_file(GRID, name)
    orch("sweep", file, "--inline")
    assert "is free again" in orch("rm", name).out
    assert "unknown sweep" in orch("runs", name, expect=2).err
    orch("sweep", file, "--inline")
    orch("rm", name, "--purge")
    orch("sweep", file, "--inline")
    assert orch.rows(f"select trials from sweeps where sweep = '{name}'") == [{"trials": 12}]


def test_compare_shows_finite_means_only(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "nothing, inf", name), "--inline", "--set", "seeds=2")
    rows = json.loads(orch("compare", name, "--format", "json").out)
    by_cell = {row["do"]: row for row in rows}
    assert by_cell["nothing"]["val/loss"] == 0.25
    assert by_cell["inf"]["val/loss"] is None
    assert by_cell["inf"]["diverged"] == "2/2"
    assert not any(isinstance(value, float) and not math.isfinite(value) for row in rows for value in row.values())


def test_what_a_sweep_calls_unstable_is_planned_counted_and_may_change_between_two_calls(orch: Orch, name: str) -> None:
    text = """
        workload: orch_lab:Odd
        metric: val/loss
        params: {do: {grid: [nothing, nan]}, x: {grid: [1, 3]}}
        unstable: {metric: val/loss, above: 2, relative_to: {x: 1}}
        log_every: 1
    """
    file = orch.sweep_file(text, name)
    words = "unstable: val/loss above 2 x that of the trial with x=1, all else equal; diverged trials always"
    assert words in orch("plan", file).out
    done = orch("sweep", file, "--inline")
    assert words in done.out

    def shares() -> list[tuple[str, str, str]]:
        rows = json.loads(orch("compare", name, "--format", "json").out)
        return [(row["diverged"], row["unstable"], row["unstable 95 %"]) for row in rows]

    stable, always = ("0/1", "0/1", "0.00-0.79"), ("1/1", "1/1", "0.21-1.00")
    assert shares() == [stable, ("0/1", "1/1", "0.21-1.00"), always, always]
    orch("sweep", file, "--inline", "--resume", "--set", "unstable.above=4")
    assert shares() == [stable, stable, always, always]
    assert json.loads(orch("runs", name, "--format", "json").out)[1]["val/loss"] == 0.75
    orch("sweep", orch.sweep_file(text.replace("unstable:", "# unstable:"), name), "--inline", "--resume")
    assert "unstable" not in orch("compare", name).out


def test_a_run_that_a_crash_left_without_a_ledger_row_is_adopted(orch: Orch, name: str, server_url: str) -> None:
    file = orch.sweep_file(GRID, name)
    orch("sweep", file, "--inline")
    with psycopg.connect(server_url) as connection:  # what a kill -9 between MLflow's write and ours leaves
        connection.execute(
            "update orch_ledger.trials set run_id = null, state = 'running', attempts = 0 where number = 3"
            " and sweep_id = (select id from orch_ledger.sweeps where name = %s)",
            (name,),
        )
        connection.execute(
            "delete from orch_ledger.attempts using orch_ledger.trials as trial, orch_ledger.sweeps as sweep"
            " where trial.id = trial_id and sweep.id = sweep_id and sweep.name = %s and trial.number = 3",
            (name,),
        )
        connection.execute("update orch_ledger.sweeps set state = 'running' where name = %s", (name,))
    assert f"{name}: 12/12 finished" in orch("sweep", file, "--inline", "--resume").out
    with psycopg.connect(server_url) as connection:
        row = connection.execute(
            "select count(*), count(*) filter (where status = 'RUNNING') from public.runs join public.experiments"
            " using (experiment_id) where experiments.name = %s",
            (name,),
        ).fetchone()
    assert row == (12, 0)


def test_mlflow_shows_parameters_tags_and_the_resolved_spec(orch: Orch, name: str, server_url: str) -> None:
    text = "workload: orch_lab:Trivial\nmetric: val/loss\nparams: {x: 1e-3}\ntags: {team: router}\n"
    orch("sweep", orch.sweep_file(text, name), "--inline")
    client = mlflow.MlflowClient(tracking_uri=mlflow_uri(server_url))
    experiment = client.get_experiment_by_name(name)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"x": "0.001", "k": "1", "steps": "10", "seed": "0", "sleep_s": "0.0", "hold": ""}
    tags = run.data.tags
    assert (tags["orch.sweep"], tags["orch.state"], tags["team"]) == (name, "finished", "router")
    assert tags["orch.trial"].endswith("/0")
    assert {"orch.host", "orch.version.torch", "orch.version.ray", "orch.version.mlflow"} <= set(tags)
    assert run.data.metrics["val/loss"] == pytest.approx((1e-3 - 1) ** 2 + 0.1 + 0.01)
    spec = json.loads(Path(client.download_artifacts(run.info.run_id, "sweep.json")).read_text())
    assert spec["params"] == {"x": 0.001}
    assert "x: 1e-3" in spec["source"]["text"]


def test_whatever_a_workload_raises_or_closes_fails_its_trial_at_most_and_not_the_sweep(orch: Orch, name: str) -> None:
    does = "exit, interrupt, generator_exit, base, speechless, endless, close_stdout, nothing"
    done = orch("sweep", orch.sweep_file(ODD % does, name), "--inline", expect=1)
    assert f"{name}: 2/8 finished (6 failed)" in done.out
    assert "said by the deaf" in done.out
    rows = orch.rows(f"select reason, error from runs where sweep = '{name}' and state = 'failed' order by trial")
    told = ["SystemExit: 0", "KeyboardInterrupt: ", "GeneratorExit: ", "BaseException: of its own"]
    assert [row["reason"] for row in rows[:4]] == told
    assert rows[4]["reason"] == "Speechless, whose own text fails with BaseException"
    assert rows[5]["reason"].startswith("ValueError: begin xxx")
    assert len(rows[5]["error"]) < 21_000
    assert "characters are left out]" in rows[5]["error"]
    assert rows[5]["error"].endswith("xxx end\n")


def test_a_trial_whose_run_cannot_be_opened_is_failed_in_the_ledger_too(orch: Orch, name: str, server_url: str) -> None:
    file = orch.sweep_file(GRID, name)
    orch("sweep", file, "--inline")
    with psycopg.connect(server_url) as connection:  # one trial waits again, and its run is gone for good
        connection.execute(
            "update orch_ledger.trials set state = 'waiting', run_id = 'gone' where number = 3"
            " and sweep_id = (select id from orch_ledger.sweeps where name = %s)",
            (name,),
        )
    done = orch("sweep", file, "--inline", "--resume", expect=1)
    assert "trials without a record in MLflow: 3" in done.out
    row = orch.rows(f"select state, attempts, reason from runs where sweep = '{name}' and trial = 3")[0]
    assert (row["state"], row["attempts"]) == ("failed", 2)
    assert row["reason"].startswith("no MLflow run")


def test_a_second_driver_that_took_the_sweep_stops_the_first(orch: Orch, name: str, server_url: str) -> None:
    file = orch.sweep_file(GRID, name)
    slow = ("--set", "params.sleep_s=0.2", "--set", "params.steps=100")
    process = orch.start_warm("sweep", file, "--inline", *slow)
    _wait_for_points(orch, name)
    with psycopg.connect(server_url, autocommit=True) as connection:
        taken = "fence = fence + 1, holder = '7@elsewhere', holder_process = ''"  # as another command does
        connection.execute(f"update orch_ledger.sweeps set {taken} where name = %s", (name,))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "this sweep is being run by 7@elsewhere" in output


def test_a_nul_in_an_exception_and_a_huge_step_fail_their_trials_only(orch: Orch, name: str) -> None:
    done = orch("sweep", orch.sweep_file(ODD % "nul, huge_step, nothing", name), "--inline", expect=1)
    assert f"{name}: 1/3 finished (2 failed)" in done.out
    rows = orch.rows(f"select reason from runs where sweep = '{name}' and state = 'failed' order by trial")
    assert rows[0]["reason"] == "ValueError: bad \\x00 byte"
    assert "does not fit into 64 bits" in rows[1]["reason"]


def test_a_step_said_again_counts_as_said_last(orch: Orch, name: str) -> None:
    orch("sweep", orch.sweep_file(ODD % "again", name), "--inline")
    rows = orch.rows(f'select objective, "val/loss" from runs join sweep_{name} using (run_id)')
    assert rows == [{"objective": 0.1, "val/loss": 0.1}]


def test_an_archived_sweep_can_be_purged_by_the_name_it_was_given_and_takes_its_study_along(
    orch: Orch, name: str, server_url: str
) -> None:
    sampled = ODD.replace("{grid: [%s]}", "{choice: [nothing]}") + "    search: {algorithm: optuna, samples: 1}\n"
    orch("sweep", orch.sweep_file(sampled, name), "--inline")
    archived = orch("rm", name).out.split("archived as ")[1].split(";")[0]
    for command in (("status", name), ("logs", archived), ("resume", archived)):
        said = orch(*command, expect=2).err
        assert f"unknown sweep {command[1]!r}: it was archived on" in said
        assert f"orch rm {archived} --purge" in said
    studies = f"select count(*) from optuna.studies where study_name = '{name}'"
    with psycopg.connect(server_url, autocommit=True) as connection:
        assert connection.execute(studies).fetchone() == (1,)
        orch("rm", archived, "--purge")
        assert connection.execute(studies).fetchone() == (0,)
    assert "unknown sweep" in orch("rm", archived, "--purge", expect=2).err


def test_a_home_that_somebody_else_could_have_filled_is_refused(orch: Orch, tmp_path: Path) -> None:
    home = tmp_path / ".orch"
    home.mkdir()
    home.chmod(0o777)
    assert "others may write into it" in orch("--home", home, "status", expect=2).err
    if os.getuid() == 0:
        home.chmod(0o700)
        os.chown(home, 65534, 65534)
        assert "belongs to another user" in orch("--home", home, "status", expect=2).err
