"""Findings on their way: from a trial to the ledger, MLflow's tags, the screen, and the end of the trial itself."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from orchestrator.database.connection import Database
from orchestrator.execution.checkpoints import first_step_of, owner_of
from orchestrator.execution.job import Job
from orchestrator.execution.news import News
from orchestrator.execution.trial_run import run_trial
from orchestrator.ledger import Ledger
from orchestrator.tracking.bulk import write_findings
from orchestrator.tracking.mlflow_schema import mlflow_uri
from orchestrator.tracking.recorder import FindingRow
from orchestrator.trial import Finding, Outcome, Report, Severity, TrialState
from orchestrator.workload import Context, describe
from tests.conftest import LAB, Orch

from mlflow import MlflowClient  # isort: skip  (after ours: orchestrator.tracking sets MLflow's switches)

REASON = "router_collapsed at step 2: seen with limit 0.5"


# One trial, without a sweep around it


@dataclass
class Notes:
    """A sink that remembers what it was told, and breaks down at the report of a step when asked to."""

    dies_at: int | None = None
    stopping: bool = False
    steps: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        if step == self.dies_at:
            raise OSError("the node is gone")
        self.steps.append(step)

    def finding(self, job: Job, finding: Finding) -> None:
        self.findings.append(finding)

    def sync(self) -> None:
        """Everything is safe here."""

    @property
    def checks(self) -> list[str]:
        return [finding.check_name for finding in self.findings]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LAB))


def watched_job(folder: Path, axes: Mapping[str, Any] | None = None, **params: Any) -> Job:
    return Job(
        *(
            1,
            1,
            0,
            1,
            "run",
            "orch_lab:Watched",
            params,
            "train/loss",
            True,
            2,
            3,
            0,
            (folder / "run/artifacts").as_uri(),
        ),
        stop_on=["router_collapsed", "metric_name"],
        axes=axes or {},
    )


def next_attempt(job: Job) -> Job:
    owner = owner_of(job.workload, describe(job.workload).resolve(job.params))
    return replace(job, attempt=job.attempt + 1, first_step=first_step_of(job.artifact_uri, owner))


@pytest.mark.usefixtures("lab")
def test_a_finding_that_the_sweep_stops_on_ends_the_trial_at_its_next_report(tmp_path: Path) -> None:
    for at, last_step in ((2, 2), (3, 4)):
        notes = Notes()
        outcome = run_trial(watched_job(tmp_path, find="router_collapsed", at=at), notes)
        reason = REASON.replace("2", str(at), 1)
        assert (outcome.state, outcome.last_step, outcome.reason) == (TrialState.STOPPED, last_step, reason)
        assert outcome.objective == 1 / last_step


@pytest.mark.usefixtures("lab")
def test_other_findings_and_one_behind_the_last_report_end_nothing(tmp_path: Path) -> None:
    for params in ({"find": "loss_spike"}, {"find": "router_collapsed", "at": 99}):
        outcome = run_trial(watched_job(tmp_path, **params), Notes())
        assert (outcome.state, outcome.last_step) == (TrialState.FINISHED, 6)


@pytest.mark.usefixtures("lab")
def test_a_divergence_at_the_same_report_wins(tmp_path: Path) -> None:
    job = watched_job(tmp_path, find="router_collapsed", nan_at=2)
    for stop_diverged in (True, False):
        outcome = run_trial(replace(job, stop_diverged=stop_diverged), Notes())
        assert (outcome.state, outcome.last_step, outcome.diverged_at) == (TrialState.DIVERGED, 2, 2)


@pytest.mark.usefixtures("lab")
def test_orchs_own_findings_end_a_trial_too(tmp_path: Path) -> None:
    job = replace(watched_job(tmp_path), workload="orch_lab:Odd", metric="val/loss", params={"do": "odd_names"})
    outcome = run_trial(job, Notes())
    assert outcome.state is TrialState.STOPPED
    assert outcome.reason.startswith("metric_name: metric 'load[e0]' is stored as 'load_e0_-")


@pytest.mark.usefixtures("lab")
def test_an_attempt_that_goes_on_behind_a_finding_stops_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    job = replace(watched_job(tmp_path, find="router_collapsed", steps=20), log_every=10)
    whole = run_trial(replace(job, artifact_uri=(tmp_path / "whole/artifacts").as_uri()), Notes())
    assert (whole.state, whole.last_step, whole.reason) == (TrialState.STOPPED, 10, REASON)
    run_trial(job, Notes(dies_at=10))
    again = next_attempt(job)
    assert again.first_step == 10  # the finding lies behind
    notes = Notes()
    outcome = run_trial(replace(again, log_every=1), notes)
    assert (outcome.state, outcome.reason, notes.findings) == (TrialState.STOPPED, REASON, [])
    assert notes.steps == [10]


AXES = {"factor": [1.0, 2.0], "seed": [0, 1], "idle": [0, 1]}


@pytest.mark.usefixtures("lab")
def test_a_swept_field_that_the_trial_never_read_is_an_error_and_the_others_are_none(tmp_path: Path) -> None:
    notes = Notes()
    outcome = run_trial(watched_job(tmp_path, AXES, idle=1), notes)
    assert outcome.state is TrialState.FINISHED
    (finding,) = notes.findings
    assert (finding.check_name, finding.severity) == ("unread_field", Severity.ERROR)
    assert finding.message.startswith("idle was swept but this trial never read it: its values are the same training")


@pytest.mark.usefixtures("lab")
def test_only_a_trial_with_a_result_is_asked_what_it_read(tmp_path: Path) -> None:
    late, early = {"find": "router_collapsed", "at": 3}, {"find": "router_collapsed", "at": 2}
    assert run_with_idle(tmp_path / "late", Notes(), **late) == ["router_collapsed", "unread_field"]
    assert run_with_idle(tmp_path / "early", Notes(), **early) == ["router_collapsed"]  # stopped at its first report
    assert run_with_idle(tmp_path / "diverged", Notes(), nan_at=2) == []
    assert run_with_idle(tmp_path / "dead", Notes(dies_at=4), steps=4) == []


def run_with_idle(folder: Path, notes: Notes, **params: Any) -> list[str]:
    run_trial(watched_job(folder, {"idle": [0, 1]}, **params), notes)
    return notes.checks


@pytest.mark.usefixtures("lab")
def test_what_was_read_before_a_checkpoint_counts_as_read_behind_it(tmp_path: Path) -> None:
    job = watched_job(tmp_path, {"late": [0, 1]}, late=1, steps=12)  # `late` is read where the first attempt begins
    run_trial(job, Notes(dies_at=8))
    again = next_attempt(job)
    assert again.first_step == 7
    notes = Notes()
    assert run_trial(again, notes).state is TrialState.FINISHED
    assert (notes.steps, notes.findings) == ([8, 10, 12], [])


class Heirless(BaseModel):
    x: float = 1.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("no heirs")


class Unwatchable:
    """A workload whose config cannot be watched."""

    Config = Heirless
    metrics = ("train/loss",)

    def run(self, config: Heirless, context: Context) -> Iterator[Report]:
        yield Report(1, {"train/loss": config.x})


def test_a_config_that_cannot_be_watched_is_a_warning_and_its_fields_count_as_read(tmp_path: Path) -> None:
    notes = Notes()
    job = replace(watched_job(tmp_path, {"x": [1.0, 2.0]}), workload=f"{__name__}:Unwatchable")
    assert run_trial(job, notes).state is TrialState.FINISHED
    (finding,) = notes.findings
    assert (finding.check_name, finding.severity) == ("probe_failed", Severity.WARNING)
    assert finding.message == "whether the trial reads x is not watched: TypeError: no heirs"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Careless:
    """Hands over what is no finding, or cannot be stored, or raises what cannot be told."""

    class Config(BaseModel):
        what: str

    metrics = ("train/loss",)

    def run(self, config: Config, context: Context) -> Iterator[Report]:
        if config.what == "value":
            context.finding(Finding("mine", Severity.WARNING, "m", value=[1.0, 2.0]))  # type: ignore[arg-type]
        if config.what == "text":
            context.finding("mine")  # type: ignore[arg-type]
        yield Report(1, {"train/loss": 1.0})
        raise Mute


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("value", "TypeError: a finding's value is [1.0, 2.0], not a number"),
        ("text", "TypeError: a Finding is due, this is 'mine'"),
        ("mute", "Mute, whose own text fails with RuntimeError"),
    ],
)
def test_what_is_no_finding_fails_the_trial_that_said_it_and_nothing_else(
    tmp_path: Path, what: str, reason: str
) -> None:
    notes = Notes()
    job = replace(watched_job(tmp_path), workload=f"{__name__}:Careless", params={"what": what})
    outcome = run_trial(job, notes)
    assert (outcome.state, outcome.reason, notes.findings) == (TrialState.FAILED, reason, [])


# A sweep with all of it

STOPS = """
    workload: orch_lab:Watched
    metric: train/loss
    params:
      find: {grid: ["", router_collapsed, loss_spike]}
      nan_at: {grid: [0, 3]}
      severity: warning
    stop: {on: [router_collapsed]}
    health: {thresholds: {limit: 0.7}}
    log_every: 3
"""
COLLAPSED = "router_collapsed at step 2: seen with limit 0.7"


def tags_of(client: MlflowClient, name: str, query: str = "") -> dict[int, dict[str, str]]:
    """The tags of a sweep's runs by trial number."""
    experiment = client.get_experiment_by_name(name)
    runs = client.search_runs([experiment.experiment_id], query)
    assert {run.info.status for run in runs} <= {"FINISHED"}
    return {int(run.data.tags["orch.number"]): run.data.tags for run in runs}


def test_a_sweep_stops_shows_tags_and_judges_its_trials_by_findings(orch: Orch, name: str, server_url: str) -> None:
    file = orch.sweep_file(STOPS, name)
    done = orch("sweep", file, "--inline")  # a stopped trial is a result: exit 0
    assert f"trial 2: warning {COLLAPSED}" in done.out
    assert f"trial 4: warning {COLLAPSED.replace('router_collapsed', 'loss_spike')}" in done.out
    query = f"select state, verdict, last_step, reason from runs where sweep = '{name}' order by trial"
    rows = orch.rows(query)
    assert [row["state"] for row in rows] == ["finished", "diverged", "stopped", "diverged", "finished", "diverged"]
    assert (rows[2]["last_step"], rows[2]["reason"]) == (3, COLLAPSED)
    client = MlflowClient(mlflow_uri(server_url))
    tags = tags_of(client, name)
    assert [tags[number]["orch.verdict"] for number in range(6)] == [row["verdict"] for row in rows]
    assert [row["verdict"] for row in rows] == ["healthy", "diverged", "warning", "diverged", "warning", "diverged"]
    assert tags[2]["orch.finding.router_collapsed"] == "warning at step 2: seen\nwith limit 0.7"
    assert set(tags_of(client, name, "tags.\"orch.finding.loss_spike\" LIKE 'warning%'")) == {4, 5}
    assert tags_of(client, name, "tags.\"orch.finding.loss_spike\" LIKE 'error%'") == {}
    assert f"{name}: 6/6 finished" in orch("sweep", file, "--inline", "--resume").out
    assert orch.rows(query) == rows, "a stopped trial is over"


def test_a_sweep_whose_axis_no_trial_reads_fails_and_names_it_each_time(orch: Orch, name: str) -> None:
    text = "workload: orch_lab:Watched\nmetric: train/loss\nparams: {idle: {grid: [0, 1, 2, 3, 4]}}\nseeds: 1\n"
    file = orch.sweep_file(text, name)
    remark = "no finished trial read idle: all values are the same training under other labels"
    done = orch("sweep", file, "--inline", expect=1)
    assert remark in done.out
    lines = re.findall(r"^trial (\d): error unread_field: idle was swept but", done.out, re.MULTILINE)
    assert lines == ["0", "1", "2"]
    assert done.out.count(f"unread_field in more trials: orch health {name}") == 1
    again = orch("sweep", file, "--inline", "--resume", expect=1)
    assert remark in again.out
    assert "error unread_field" not in again.out, "an earlier command has shown it"


def test_a_machine_hears_of_every_finding_while_the_trial_runs(orch: Orch, name: str) -> None:
    params = "params: {find: x, severity: info, sleep_s: 0.45}\nlog_every: 1\n"
    text = f"workload: orch_lab:Watched\nmetric: train/loss\n{params}"
    done = orch("sweep", orch.sweep_file(text, name), "--inline", "--json")
    events = {event["event"]: event for event in map(json.loads, done.out.splitlines())}
    assert list(events) == ["sweep", "started", "finding", "ended", "end"]
    assert events["finding"]["trial"] == 0
    told = {key: events["finding"][key] for key in ("check_name", "severity", "step", "value", "threshold", "advice")}
    assert told == {
        "check_name": "x", "severity": "info", "step": 2, "value": 1.0, "threshold": 0.5, "advice": "look"
    }  # fmt: skip


def test_a_terminal_shows_findings_above_and_counts_them_in_the_live_table(orch: Orch, name: str) -> None:
    text = "workload: orch_lab:Watched\nmetric: train/loss\nparams: {find: x}\nseeds: 2\n"
    screen, child = pty.openpty()
    command = orch.command("sweep", orch.sweep_file(text, name), "--inline")
    process = subprocess.Popen(command, cwd=LAB, env={**orch.env, "TERM": "xterm"}, stdout=child, stderr=child)
    os.close(child)
    shown = read_to_the_end(screen)
    assert process.wait(timeout=60) == 0, shown
    assert "trial 1: error x at step 2: seen with limit 0.5" in shown
    assert re.search(r"findings +best", shown)
    assert re.search(r"2 errors +0\.1", shown)


def read_to_the_end(screen: int) -> str:
    """What a pseudo-terminal shows; Linux ends it with an error."""
    shown = b""
    try:
        while piece := os.read(screen, 65536):
            shown += piece
    except OSError:
        pass
    os.close(screen)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())  # without colours and movements


def test_ray_workers_stop_on_findings_as_well(ray_orch: Orch, name: str, server_url: str) -> None:
    text = STOPS.replace("nan_at: {grid: [0, 3]}", "idle: {grid: [0, 1]}")
    done = ray_orch("sweep", ray_orch.sweep_file(text, name), "--json", expect=1)
    events = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    found = sorted((event["trial"], event["check_name"]) for event in events if event["event"] == "finding")
    collapsed, spiked = (
        [(number, "router_collapsed") for number in (2, 3)],
        [(number, "loss_spike") for number in (4, 5)],
    )
    idle = [(number, "unread_field") for number in (0, 1, 4, 5)]  # 2 and 3 stop at their first report
    assert found == sorted([*idle, *collapsed, *spiked])
    rows = ray_orch.rows(f"select state, reason from runs where sweep = '{name}' order by trial")
    assert [row["state"] for row in rows] == ["finished", "finished", "stopped", "stopped", "finished", "finished"]
    assert rows[3]["reason"] == COLLAPSED
    tags = tags_of(MlflowClient(mlflow_uri(server_url)), name)
    verdicts = [tags[number]["orch.verdict"] for number in range(6)]
    assert verdicts == ["suspect", "suspect", "warning", "warning", "suspect", "suspect"]


# Tags, row by row


@dataclass
class Shelf:
    """A trial with a result and nothing found so far, on the real tables."""

    connection: psycopg.Connection[Any]
    ledger: Ledger
    sweep_id: int
    trial_id: int
    run_id: str

    def find(self, *findings: Finding, attempt: int = 1) -> None:
        write_findings(self.connection, [FindingRow(self.sweep_id, self.trial_id, attempt, one) for one in findings])

    @property
    def tags(self) -> dict[str, str]:
        rows = self.connection.execute("select key, value from public.tags where run_uuid = %s", (self.run_id,))
        return {key: value for key, value in rows if key.startswith("orch.finding") or key == "orch.verdict"}

    @property
    def verdict(self) -> str | None:
        """As the view has it."""
        row = self.connection.execute("select verdict from orch.runs where run_id = %s", (self.run_id,)).fetchone()
        assert row is not None
        return row[0]


@pytest.fixture
def shelf(orch: Orch, name: str, server_url: str) -> Iterator[Shelf]:
    text = "workload: orch_lab:Watched\nmetric: train/loss\nparams: {steps: 2}\n"
    orch("sweep", orch.sweep_file(text, name), "--inline")
    engine = Database.from_url(server_url).engine("orch-tests")
    ledger = Ledger(engine)
    sweep = ledger.find_sweep(name)
    assert sweep is not None
    (trial,) = ledger.trials(sweep.id)
    assert trial.run_id is not None
    with psycopg.connect(server_url, autocommit=True) as connection:
        yield Shelf(connection, ledger, sweep.id, trial.id, trial.run_id)
    engine.dispose()


def seen(check: str, severity: str, step: int | None, message: str = "so") -> Finding:
    return Finding(check, Severity(severity), message, step=step)


def test_the_worst_and_of_these_the_first_finding_of_a_check_is_its_tag_however_they_arrive(shelf: Shelf) -> None:
    assert shelf.tags == {"orch.verdict": "healthy"}
    findings = [seen("a", "warning", 5), seen("a", "error", 30), seen("a", "error", 20), seen("b", "info", None)]
    for finding in (*findings, *findings[:2]):
        shelf.find(finding)
    expected = {
        "orch.finding.a": "error at step 20: so",
        "orch.finding.b": "info: so",
        "orch.verdict": "suspect",
    }
    assert shelf.tags == expected
    shelf.find(*reversed(findings))
    assert shelf.tags == expected


def test_a_finding_that_arrives_behind_the_end_changes_the_verdict_that_was_told(shelf: Shelf) -> None:
    for finding, verdict in ((seen("a", "info", 1), "healthy"), (seen("a", "warning", 2), "warning")):
        shelf.find(finding)
        assert shelf.tags["orch.verdict"] == shelf.verdict == verdict


def test_names_and_messages_are_cut_to_what_mlflow_holds(shelf: Shelf) -> None:
    shelf.find(seen("n" * 300, "error", 1, "m" * 9000), seen("n" * 301, "error", 2))
    tags = shelf.tags
    (key,) = tags.keys() - {"orch.verdict"}
    assert (len(key), len(tags[key])) == (250, 8000)
    assert tags[key].startswith("error at step 1: mmm")


def test_another_attempt_takes_back_the_tags_of_what_it_does_again(shelf: Shelf) -> None:
    shelf.find(seen("a", "error", 50), seen("a", "warning", 3), seen("b", "error", 60))
    attempt = shelf.ledger.begin_attempt(shelf.trial_id, "host", first_step=10)
    shelf.find(attempt=2)  # whatever comes next, also nothing, brings the tags in line
    shelf.find(seen("c", "info", 12), attempt=2)
    assert shelf.tags == {"orch.finding.a": "warning at step 3: so", "orch.finding.c": "info at step 12: so"}
    assert shelf.verdict is None
    shelf.find(seen("b", "error", 61), attempt=1)  # a worker that could not be stopped
    assert "orch.finding.b" not in shelf.tags
    shelf.ledger.finish(shelf.trial_id, attempt.number, Outcome(TrialState.FINISHED, 1.0, 20))
    shelf.find(seen("d", "info", 20), attempt=2)
    assert shelf.tags["orch.verdict"] == shelf.verdict == "warning"


def test_news_is_told_once_even_if_a_transaction_is_late_with_a_lower_id(shelf: Shelf, server_url: str) -> None:
    shelf.find(seen("old", "error", 1))
    news = News(shelf.ledger, shelf.sweep_id)
    with psycopg.connect(server_url) as late:
        write_findings(late, [FindingRow(shelf.sweep_id, None, None, seen("of the preflight", "info", None))])
        columns = "sweep_id, trial_id, check_name, severity"
        row = (shelf.sweep_id, shelf.trial_id, "late", "info")
        late.execute(f"insert into orch_ledger.findings ({columns}) values (%s, %s, %s, %s)", row)
        shelf.find(seen("new", "error", 2))
        assert [(row.number, row.finding.check_name) for row in news.take()] == [(0, "new")]
        late.commit()
    assert [row.finding.check_name for row in news.take()] == ["late"]
    assert news.take() == news.take() == []
