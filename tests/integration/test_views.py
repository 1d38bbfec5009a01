"""Each view against a small known database. MLflow's own store makes the tables and writes the points, NaN included."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import NormalDist
from typing import Any

import psycopg
import pytest
from mlflow.entities import Metric
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from psycopg.types.json import Jsonb

from orchestrator.database import view_catalog
from orchestrator.database.connection import Database
from orchestrator.errors import NotFound
from orchestrator.ledger import Ledger, SweepRow, TrialRow, upgrade
from orchestrator.tracking.bulk import write_decisions, write_logs
from orchestrator.tracking.records import DecisionRow, LogLine
from orchestrator.trial import Action, Candidate, Decision, Failure, Finding, Outcome, Severity, TrialState, config_hash

COLUMNS = {"c_z": "double precision", "k": "bigint", "seed": "bigint"}
CORE = ("sweeps", "runs", "metrics", "final_metrics", "findings", "decisions", "logs", "stability")
NOON = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)  # attempts start when a test says, not now
NAN, INF = math.nan, math.inf


class Lab:
    """A database whose rows the tests know, because they write them one by one."""

    def __init__(self, url: str, artifacts: Path) -> None:
        database = Database.from_url(url)
        self.url = url
        self.store = SqlAlchemyStore(database.mlflow_uri, artifacts.as_uri())
        self.engine = database.engine()
        with self.engine.connect() as connection:
            upgrade(connection)
        self.ledger = Ledger(self.engine)
        self.connection = database.connect(autocommit=True)
        view_catalog.apply(self.connection)

    def sweep(self, name: str, columns: Mapping[str, str] = COLUMNS, metric: str = "val/loss", **spec: Any) -> SweepRow:
        return self.ledger.create_sweep(
            name=name, workload="moe_router", spec=spec, metric=metric, mode="min", columns=columns
        )

    def trial(self, sweep: SweepRow, config: Mapping[str, Any], **cell: Any) -> TrialRow:
        """A waiting trial without a run."""
        [trial] = self.ledger.add_trials(sweep.id, [(Candidate(config, cell), config, config_hash(config))])
        return trial

    def begin(self, sweep: SweepRow, config: Mapping[str, Any], **cell: Any) -> TrialRow:
        """A trial with a run, whose first attempt began at noon."""
        trial = self.trial(sweep, config, **cell)
        experiment = self.store.get_experiment_by_name("lab")
        experiment_id = experiment.experiment_id if experiment else self.store.create_experiment("lab")
        run = self.store.create_run(experiment_id, "me", 0, [], f"{sweep.name}/{trial.number}")
        self.ledger.set_run(trial.id, run.info.run_id)
        self.ledger.begin_attempt(trial.id, "host", not_before=NOON)
        return self.ledger.trials(sweep.id)[trial.number]

    def decide(self, trial: TrialRow, decision: Decision) -> None:
        write_decisions(self.connection, [DecisionRow(trial.sweep_id, trial.id, 1, decision)])

    def rewrite(self, sweep: SweepRow, column: str, value: Any) -> None:
        """What an extension, or another version of the workload, makes of a sweep's words."""
        statement = f"update orch_ledger.sweeps set {column} = %s where id = %s"
        self.connection.execute(statement, (Jsonb(value), sweep.id))

    def log(self, trial: TrialRow, key: str, points: Mapping[int, float], after_s: float = 1.0) -> None:
        """Points of one key, measured `after_s` seconds after noon, as MLflow stores them."""
        when_ms = round((NOON.timestamp() + after_s) * 1000)
        metrics = [Metric(key, value, when_ms, step) for step, value in points.items()]
        self.store.log_batch(trial.run_id, metrics, [], [])

    def end(self, trial: TrialRow, state: TrialState = TrialState.FINISHED, **outcome: Any) -> None:
        attempts = len(self.ledger.attempts(trial.id))
        assert self.ledger.finish(trial.id, attempts, Outcome(state, **outcome), host="host", device="cpu")

    def ask(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, values or None).fetchall()

    def columns_of(self, view: str) -> list[str]:
        cursor = self.connection.execute(f"select * from {view} limit 0")
        return [column.name for column in cursor.description or ()]


@pytest.fixture(scope="module")
def lab(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Database.from_url(server_url).beside("postgres")
    with server.connect(autocommit=True) as admin:
        admin.execute("create database views_lab")
        lab = Lab(server.beside("views_lab").url, tmp_path_factory.mktemp("artifacts"))
        yield lab
        lab.connection.close()
        lab.engine.dispose()
        admin.execute("drop database views_lab with (force)")


@pytest.fixture(scope="module")
def four(lab: Lab) -> SweepRow:
    """Four runs that end in NaN, infinity, 0.5 and 0.05."""
    sweep = lab.sweep("four")
    for seed, last in enumerate((NAN, INF, 0.5, 0.05)):
        trial = lab.begin(sweep, {"c_z": 10.0 ** -(5 - seed), "k": 2, "seed": seed})
        lab.log(trial, "val/loss", {0: 2.0, 10: last})
        finite = math.isfinite(last)
        state = TrialState.FINISHED if finite else TrialState.DIVERGED
        lab.end(trial, state, objective=last, last_step=10, diverged_at=None if finite else 10)
    view_catalog.rebuild_sweep_view(lab.connection, "four")
    return sweep


# Truth: NaN and infinity


def test_a_diverged_run_is_not_below_a_bound(lab: Lab, four: SweepRow) -> None:
    query = "select trial from orch.final_metrics where sweep = 'four' and key = 'val/loss' and last < 0.1"
    assert lab.ask(query) == [(3,)]
    assert lab.ask("""select trial from orch.sweep_four where "val/loss" < 0.1""") == [(3,)]
    assert lab.ask("select trial from orch.runs where sweep = 'four' and objective < 0.1") == [(3,)]
    assert lab.ask("select min(last) from orch.final_metrics where sweep = 'four'") == [(0.05,)]
    # the same question to MLflow's raw table crowns the run that ended in NaN
    assert lab.ask("select min(value) from public.latest_metrics where key = 'val/loss'")[0][0] <= 0.0


def test_points_come_back_as_they_were_logged(lab: Lab, four: SweepRow) -> None:
    query = "select trial, value, attempt, measured_at from orch.metrics where sweep = 'four' and step = 10 order by 1"
    values = lab.ask(query)
    assert math.isnan(values[0][1])
    assert [value for _, value, _, _ in values[1:]] == [INF, 0.5, 0.05]
    assert {(attempt, at) for _, _, attempt, at in values} == {(1, NOON + timedelta(seconds=1))}


def test_both_infinities_are_infinite_and_no_average_hides_them(lab: Lab) -> None:
    sweep = lab.sweep("infinities")
    for seed, last in enumerate((INF, -INF, 1.0, 3.0, 1.7e308)):
        lab.log(lab.begin(sweep, {"seed": seed}), "m", {0: last})
    rows = lab.ask("select last, min, max, last_finite, nonfinite from orch.final_metrics where sweep = 'infinities'")
    assert sorted(rows, key=str) == [
        (-INF, None, None, None, 1),
        (1.0, 1.0, 1.0, 1.0, 0),
        (1.7e308, 1.7e308, 1.7e308, 1.7e308, 0),
        (3.0, 3.0, 3.0, 3.0, 0),
        (INF, None, None, None, 1),
    ]
    query = "select avg(last_finite) from orch.final_metrics where sweep = 'infinities' and last_finite < 1e9"
    assert lab.ask(query) == [(2.0,)]


def test_final_metrics_tell_the_last_from_the_last_finite_value(lab: Lab) -> None:
    trial = lab.begin(lab.sweep("finals"), {"seed": 0})
    lab.log(trial, "loss", {0: 3.0, 10: 1.0, 20: 2.0, 30: NAN, 40: INF, 50: NAN})
    [row] = lab.ask("select * from orch.final_metrics where run_id = %s", trial.run_id)
    assert math.isnan(row[3])
    assert row[:3] + row[4:] == (trial.run_id, "finals", "loss", 50, 1.0, 3.0, 2.0, 3, 6, 0)


def test_numbers_in_exponent_form_sort_as_numbers(lab: Lab, four: SweepRow) -> None:
    assert [value for (value,) in lab.ask("select c_z from orch.sweep_four order by c_z")] == [1e-5, 1e-4, 1e-3, 1e-2]


# Attempts


def test_an_attempt_hides_what_earlier_ones_measured_from_its_first_step_on(lab: Lab) -> None:
    trial = lab.begin(lab.sweep("resumed"), {"seed": 0})
    lab.log(trial, "loss", {step: 1.0 for step in range(0, 60, 10)}, after_s=1)
    lab.log(trial, "only_at_first", {50: 7.0}, after_s=1)
    lab.ledger.begin_attempt(trial.id, "host", first_step=30, not_before=NOON + timedelta(seconds=60))
    query = "select step, value, attempt from orch.metrics where run_id = %s and key = 'loss' order by step"
    assert lab.ask(query, trial.run_id) == [(0, 1.0, 1), (10, 1.0, 1), (20, 1.0, 1)]
    lab.log(trial, "loss", {30: 2.0, 40: 2.0}, after_s=60)  # in the very millisecond in which the attempt began
    assert lab.ask(query, trial.run_id) == [(0, 1.0, 1), (10, 1.0, 1), (20, 1.0, 1), (30, 2.0, 2), (40, 2.0, 2)]
    assert lab.ask("select key, last, last_step from orch.final_metrics where run_id = %s", trial.run_id) == [
        ("loss", 2.0, 40)
    ]
    lab.log(trial, "early_step", {5: 4.0}, after_s=61)  # by the second attempt, as the time says
    assert lab.ask("select attempt from orch.metrics where run_id = %s and step = 5", trial.run_id) == [(2,)]
    lab.ledger.begin_attempt(trial.id, "host", first_step=0, not_before=NOON + timedelta(seconds=120))
    assert lab.ask(query, trial.run_id) == []
    lab.log(trial, "loss", {0: 3.0}, after_s=121)
    assert lab.ask(query, trial.run_id) == [(0, 3.0, 3)]


def test_points_older_than_the_first_attempt_are_its_own(lab: Lab) -> None:
    trial = lab.begin(lab.sweep("slow_clock"), {"seed": 0})
    lab.log(trial, "loss", {0: 1.0}, after_s=-3600)
    assert lab.ask("select value, attempt from orch.metrics where run_id = %s", trial.run_id) == [(1.0, 1)]


def test_of_two_values_of_one_step_the_last_measured_counts(lab: Lab) -> None:
    trial = lab.begin(lab.sweep("twice"), {"seed": 0})
    lab.log(trial, "loss", {0: 1.0, 10: 9.0}, after_s=1)
    lab.log(trial, "loss", {0: 2.0}, after_s=2)
    lab.log(trial, "loss", {0: 9.0}, after_s=0.5)
    lab.log(trial, "loss", {10: NAN}, after_s=1)  # in the same millisecond: the bad news counts
    [(first,), (second,)] = lab.ask("select value from orch.metrics where run_id = %s order by step", trial.run_id)
    assert first == 2.0
    assert math.isnan(second)


# Runs, findings, sweeps


def test_the_verdict_is_the_worst_that_is_known_of_a_result(lab: Lab) -> None:
    sweep = lab.sweep("verdicts")
    warning = Finding("dead_expert", Severity.WARNING, "expert 3 is dead", "raise alpha", step=10, value=NAN)
    error = Finding("leakage", Severity.ERROR, "the future leaks")
    info = Finding("speed", Severity.INFO, "slow")
    cases = [
        (TrialState.FINISHED, [info], "healthy"),
        (TrialState.FINISHED, [info, warning], "warning"),
        (TrialState.STOPPED, [warning, error], "suspect"),
        (TrialState.DIVERGED, [error], "diverged"),
        (TrialState.FAILED, [error], None),
        (TrialState.KILLED, [], None),
        (TrialState.LOST, [], None),
    ]
    for seed, (state, findings, _) in enumerate(cases):
        trial = lab.begin(sweep, {"seed": seed})
        lab.ledger.add_findings(sweep.id, [(trial.id, 1, finding) for finding in findings])
        lab.end(trial, state)
    lab.begin(sweep, {"seed": 100})
    lab.trial(sweep, {"seed": 101})
    verdicts = [
        verdict for (verdict,) in lab.ask("select verdict from orch.runs where sweep='verdicts' order by trial")
    ]
    assert verdicts == [verdict for _, _, verdict in cases] + [None, None]


def test_findings_show_where_they_belong_and_preflight_has_no_run(lab: Lab) -> None:
    sweep = lab.sweep("findings")
    trial = lab.begin(sweep, {"seed": 0})
    seen = Finding("spike", Severity.WARNING, "loss jumped", "lower lr", step=20, value=INF, threshold=2.0)
    lab.ledger.add_findings(
        sweep.id, [(trial.id, 1, seen), (None, None, Finding("leakage", Severity.ERROR, "the future leaks"))]
    )
    rows = lab.ask("select * from orch.findings where sweep = 'findings' order by check_name")
    assert rows[0][:10] == ("findings", None, None, "leakage", "error", None, None, None, "the future leaks", "")
    assert rows[1][:11] == (
        "findings", 0, trial.run_id, "spike", "warning", 20, INF, 2.0, "loss jumped", "lower lr", 1,
    )  # fmt: skip


def test_a_redone_step_takes_its_finding_along(lab: Lab) -> None:
    sweep = lab.sweep("redone")
    trial = lab.begin(sweep, {"seed": 0})
    early, late = (Finding("spike", Severity.ERROR, "loss jumped", step=step) for step in (10, 40))
    whole = Finding("speed", Severity.WARNING, "slow")
    lab.ledger.add_findings(sweep.id, [(trial.id, 1, finding) for finding in (early, late, whole)])
    lab.ledger.begin_attempt(trial.id, "host", first_step=30)
    assert lab.ask("select step from orch.findings where sweep = 'redone' order by 1") == [(10,), (None,)]
    lab.ledger.begin_attempt(trial.id, "host", first_step=0)
    lab.end(trial)
    assert lab.ask("select verdict from orch.runs where sweep = 'redone'") == [("healthy",)]


def test_runs_hold_what_is_known_of_a_trial(lab: Lab, four: SweepRow) -> None:
    [row] = lab.ask(
        """
        select run_id, state, workload, params, diverged_at, attempts, host, device, error, started_at <= ended_at,
            seconds >= 0, objective, last_step
        from orch.runs where sweep = 'four' and trial = 1
        """
    )
    run_id = lab.ledger.trials(four.id)[1].run_id
    params = {"c_z": 1e-4, "k": 2, "seed": 1}
    assert row[:4] == (run_id, "diverged", "moe_router", params)
    assert row[4:9] == (10, 1, "host", "cpu", "")
    assert row[11:] == (INF, 10)


def test_the_last_step_of_a_running_or_lost_trial_is_that_of_its_newest_report(lab: Lab) -> None:
    sweep = lab.sweep("how_far")
    trial, silent = lab.begin(sweep, {"seed": 0}), lab.begin(sweep, {"seed": 1})
    lab.trial(sweep, {"seed": 2})
    query = "select last_step from orch.runs where sweep = 'how_far' order by trial"
    assert lab.ask(query) == [(None,)] * 3
    lab.log(trial, "loss", {10: 1.0, 20: NAN})
    lab.log(trial, "val/loss", {10: 1.0})
    assert lab.ask(query) == [(20,), (None,), (None,)]
    for one in (trial, silent):
        lab.connection.execute("update orch_ledger.trials set state = 'lost' where id = %s", (one.id,))
    assert lab.ask(query) == [(20,), (None,), (None,)]
    later = NOON + timedelta(seconds=10)  # from the state of step 10: 11 to 20 are done again
    lab.ledger.begin_attempt(trial.id, "host", first_step=11, not_before=later)
    assert lab.ask(query)[0] == (10,)
    lab.end(trial, TrialState.FAILED, failure=Failure.WORKER_DEATH)  # it reported nothing new
    assert lab.ask(query)[0] == (10,)


def test_seconds_are_the_time_of_all_attempts_but_lost_ones(lab: Lab) -> None:
    sweep = lab.sweep("seconds")
    trial = lab.begin(sweep, {"seed": 0})
    lab.trial(sweep, {"seed": 1})
    lab.ledger.begin_attempt(trial.id, "host")
    past = "update orch_ledger.attempts set started_at = now() - interval '90 s', ended_at = %s where trial_id = %s"
    lab.connection.execute(past + " and number = 1", (datetime.now(UTC) - timedelta(seconds=80), trial.id))
    lab.connection.execute(past + " and number = 2", (None, trial.id))
    [(seconds,), (waiting,)] = lab.ask("select seconds from orch.runs where sweep = 'seconds' order by trial")
    assert seconds == pytest.approx(90, abs=2)  # the second still runs; the first is lost: nobody knows when it stopped
    assert waiting is None
    assert lab.ask("select seconds from orch.sweeps where sweep = 'seconds'")[0][0] == pytest.approx(90, abs=2)


def test_decisions_show_what_a_trial_was_judged_by_and_what_it_copied(lab: Lab) -> None:
    sweep = lab.sweep("decided")
    trials = [lab.begin(sweep, {"seed": seed}) for seed in range(3)]
    copy = Decision(2, 20, INF, Action.EXPLOIT, "goes on from trial 0", source=0, params={"c_z": INF})
    for decision in (
        Decision(0, 10, 0.5, Action.CONTINUE, "rung 10: 0.5 is the first here"),
        Decision(1, 10, NAN, Action.STOP, "rung 10: nan is worse than any number"),
        Decision(2, 20, INF, Action.PAUSE, "2 have not come so far"),
        copy,
        copy,  # said again by a journal that is read twice
    ):
        lab.decide(trials[decision.trial], decision)
    columns = "trial, run_id, attempt, step, value, action, reason, source, params"
    rows = lab.ask(f"select {columns} from orch.decisions where sweep = 'decided' order by trial, decided_at")
    runs = [trial.run_id for trial in trials]
    assert rows[0] == (0, runs[0], 1, 10, 0.5, "continue", "rung 10: 0.5 is the first here", None, {})
    assert math.isnan(rows[1][4])
    assert rows[1][5:] == ("stop", "rung 10: nan is worse than any number", None, {})
    paused, copied = rows[2:]
    assert paused[3:6] == (20, INF, "pause")
    assert copied == (2, runs[2], 1, 20, INF, "exploit", "goes on from trial 0", 0, {"c_z": "Infinity"})
    assert lab.ledger.decisions(sweep.id)[-1] == copy  # in our own types
    best = "select min(value) from orch.decisions where sweep = 'decided' and value < 'Infinity'"
    assert lab.ask(best) == [(0.5,)]


def test_runs_hold_further_objectives_nan_and_infinity_as_such(lab: Lab) -> None:
    sweep = lab.sweep("objectives")
    lab.end(lab.begin(sweep, {"seed": 0}), objective=1.0, more_objectives=(INF, None, 2.0))
    lab.end(lab.begin(sweep, {"seed": 1}), objective=1.0)
    told = lab.ask("select more_objectives from orch.runs where sweep = 'objectives' order by trial")
    assert told == [([INF, None, 2.0],), ([],)]


def test_a_sweep_is_busy_while_any_of_its_attempts_runs_and_a_lost_one_until_its_last_point(lab: Lab) -> None:
    sweep = lab.sweep("busy_time")
    spans = [(0, 10), (5, 12), (6, 7), (20, 25), (100, None)]  # seconds: 12 + 5, and one attempt that was lost
    for number, (begun, ended) in enumerate(spans):
        trial = lab.begin(sweep, {"seed": number})
        moments = [None if second is None else NOON + timedelta(seconds=second) for second in (begun, ended)]
        update = "update orch_ledger.attempts set started_at = %s, ended_at = %s, state = %s where trial_id = %s"
        lab.connection.execute(update, (*moments, "finished" if ended else "lost", trial.id))
    lab.log(trial, "loss", {1: 1.0}, after_s=103)
    assert lab.ledger.busy_seconds(sweep.id) == pytest.approx(12 + 5 + 3, abs=1e-3)  # points are kept to the ms
    assert lab.ledger.busy_seconds(lab.sweep("never_begun").id) == 0


def test_sweeps_count_their_trials_by_state(lab: Lab) -> None:
    sweep = lab.sweep("counted")
    lab.sweep("empty")
    for seed, state in enumerate(TrialState):
        trial = lab.begin(sweep, {"seed": seed})
        lab.connection.execute("update orch_ledger.trials set state = %s where id = %s", (state.value, trial.id))
    states = ", ".join(state.value for state in TrialState)
    query = f"select sweep, workload, state, trials, {states} from orch.sweeps where sweep in ('counted', 'empty')"
    assert lab.ask(query + " order by sweep") == [
        ("counted", "moe_router", "created", 8, *[1] * 8),
        ("empty", "moe_router", "created", 0, *[0] * 8),
    ]


def test_an_archived_sweep_is_in_no_view(lab: Lab) -> None:
    sweep = lab.sweep("old")
    trial = lab.begin(sweep, {"seed": 0})
    lab.log(trial, "loss", {0: 1.0})
    lab.ledger.add_findings(sweep.id, [(trial.id, 1, Finding("spike", Severity.INFO, "up"))])
    lab.decide(trial, Decision(0, 1, 1.0, Action.STOP, "rung 1"))
    write_logs(lab.connection, [LogLine(sweep.id, trial.id, 1, "stdout", 0, "hello", 0)])
    view_catalog.rebuild_sweep_view(lab.connection, "old")
    counts = [lab.ask(f"select count(*) from orch.{view} where sweep like 'old%'")[0][0] for view in CORE]
    assert counts == [1] * len(CORE)
    name = lab.ledger.archive(sweep.id)
    view_catalog.drop_sweep_view(lab.connection, "old")
    counts = [lab.ask(f"select count(*) from orch.{view} where sweep like 'old%'")[0][0] for view in CORE]
    assert counts == [0] * len(CORE)
    assert lab.ask("select to_regclass('orch.sweep_old')") == [(None,)]
    assert lab.ask("select sweep, archived_as, workload, trials from orch.archived") == [("old", name, "moe_router", 1)]
    with pytest.raises(NotFound):
        view_catalog.rebuild_sweep_view(lab.connection, name)


def test_the_views_have_the_promised_columns_in_the_promised_order(lab: Lab) -> None:
    promised = {
        "sweeps": "sweep, workload, state, trials, finished, diverged, failed, started_at, ended_at",
        "runs": "run_id, sweep, trial, state, workload, params, verdict, diverged_at, attempts, started_at, ended_at, "
        "seconds, host, device, git_commit, error",
        "metrics": "run_id, sweep, key, step, value, measured_at, attempt",
        "final_metrics": "run_id, sweep, key, last, last_step, min, max, last_finite, nonfinite",
        "findings": "sweep, trial, run_id, check_name, severity, step, value, threshold, message, advice",
        "decisions": "sweep, trial, run_id, attempt, step, value, action, reason, source, params, decided_at",
        "logs": "sweep, trial, attempt, stream, line_number, line, written_at",
        "stability": "sweep, cell, n, diverged, unstable, share, low, high",
        "archived": "sweep, archived_as, workload, trials, archived_at",
    }
    for view, columns in promised.items():
        names = columns.split(", ")
        assert lab.columns_of(f"orch.{view}")[: len(names)] == names


# Stability


def wilson(count: int, n: int) -> tuple[float, float]:
    """The roots p of |share - p| = z sqrt(p (1 - p) / n): Wilson's interval by its definition, as a quadratic."""
    z2, share = NormalDist().inv_cdf(0.975) ** 2, count / n
    a, b, c = 1 + z2 / n, -(2 * share + z2 / n), share**2
    root = math.sqrt(b * b - 4 * a * c)
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def test_stability_is_the_share_of_results_with_wilsons_interval(lab: Lab) -> None:
    sweep = lab.sweep("stable")
    diverged_of_3 = {0.0: 0, 1e-3: 1, 1e-2: 3}
    for c_z, diverged in diverged_of_3.items():
        for seed in range(3):
            trial = lab.begin(sweep, {"c_z": c_z, "seed": seed}, c_z=c_z)
            state = TrialState.DIVERGED if seed < diverged else (TrialState.STOPPED, TrialState.FINISHED)[seed % 2]
            lab.end(trial, state)
        failed = lab.begin(sweep, {"c_z": c_z, "seed": 9}, c_z=c_z)  # says nothing about the cell
        lab.end(failed, TrialState.FAILED)
    lab.trial(sweep, {"c_z": 1.0, "seed": 0}, c_z=1.0)
    rows = lab.ask(
        """
        select (cell ->> 'c_z')::float8, n, diverged, unstable, share, low, high
        from orch.stability where sweep = 'stable' order by 1
        """
    )
    for (c_z, diverged), row in zip(diverged_of_3.items(), rows, strict=False):
        assert row[:5] == (c_z, 3, diverged, diverged, diverged / 3)
        assert row[5:] == pytest.approx(wilson(diverged, 3), abs=1e-12)  # float64 and few operations
        assert 0 <= row[5] <= row[4] <= row[6] <= 1
    assert rows[0][5] == 0
    assert rows[2][6] == 1
    assert rows[3] == (1.0, 0, 0, 0, None, None, None)


def unstable_of(lab: Lab, sweep: str) -> list[bool | None]:
    return [flag for (flag,) in lab.ask("select unstable from orch.runs where sweep = %s order by trial", sweep)]


@pytest.mark.parametrize(("side", "beyond"), [("above", 2.5), ("below", 1.5)])
def test_an_absolute_bound_makes_finite_results_unstable_too(lab: Lab, side: str, beyond: float) -> None:
    rule = {"metric": "val/top", side: 2.0, "relative_to": {}}
    sweep = lab.sweep(f"absolute_{side}", unstable=rule)
    for seed, last in enumerate((beyond, 2.0, NAN, INF, -INF)):  # finished: the loss itself stayed finite
        trial = lab.begin(sweep, {"seed": seed})
        lab.log(trial, "val/top", {0: 2.0, 10: beyond, 20: last})
        lab.end(trial)
    lab.end(lab.begin(sweep, {"seed": 5}), TrialState.DIVERGED)
    lab.end(lab.begin(sweep, {"seed": 6}))  # never reported it
    lab.end(lab.begin(sweep, {"seed": 7}), TrialState.FAILED)
    lab.trial(sweep, {"seed": 8})
    assert unstable_of(lab, sweep.name) == [True, False, True, True, True, True, None, None, None]
    assert lab.ask("select n, diverged, unstable, unknown from orch.stability where sweep = %s", sweep.name) == [
        (6, 1, 5, 1)
    ]


def test_a_ratio_is_taken_to_the_trial_that_differs_only_there(lab: Lab) -> None:
    rule = {"metric": "val/loss", "above": 2.0, "relative_to": {"precision": "fp32"}}
    sweep = lab.sweep("relative", unstable=rule)
    fp32 = (1.0, 3.0, NAN, 1.0, 1.0, 0.0, 1e308)
    bf16 = (2.5, 5.0, 1.0, NAN, INF, 1.0, 1.5e308)  # held against the same seed; the last product overflows a float
    for precision, values in (("bf16", bf16), ("fp32", fp32)):
        for seed, last in enumerate(values):
            trial = lab.begin(sweep, {"precision": precision, "seed": seed, "k": 1.0}, precision=precision)
            lab.log(trial, "val/loss", {0: 100.0, 10: last})
            lab.end(trial, TrialState.FINISHED if math.isfinite(last) else TrialState.DIVERGED)
    known = [True, False, None, True, True, None, False]
    assert unstable_of(lab, "relative") == [*known, False, False, True, False, False, None, False]
    rows = lab.ask(
        """
        select cell ->> 'precision', n, diverged, unstable, unknown, share, low, high
        from orch.stability where sweep = 'relative' order by 1
        """
    )
    assert [row[:6] for row in rows] == [("bf16", 5, 2, 3, 2, 0.6), ("fp32", 6, 1, 1, 1, 1 / 6)]
    assert rows[0][6:] == pytest.approx(wilson(3, 5), abs=1e-12)


def test_an_axis_that_does_not_exist_there_has_its_default_in_the_reference(lab: Lab) -> None:
    rule = {"metric": "val/loss", "above": 2.0, "relative_to": {"precision": "fp32"}}
    when = {"offset": {"precision": "bf16", "k": [1, 2]}, "depth": {"k": 2}}
    sweep = lab.sweep("when", unstable=rule, when=when, otherwise={"offset": 0, "depth": 1})
    for precision, offset, depth, last in (
        ("fp32", 0, 1, 1.0),
        ("fp32", 0, 7, 4.0),
        ("bf16", 0, 1, 1.5),
        ("bf16", 300, 1, 2.5),
        ("bf16", 300, 7, 2.5),
    ):
        k = 2 if depth == 7 else 1
        trial = lab.begin(sweep, {"precision": precision, "offset": offset, "depth": depth, "k": k})
        lab.log(trial, "val/loss", {0: last})
        lab.end(trial)
    assert unstable_of(lab, "when") == [False, False, False, True, False]


def test_a_condition_on_a_list_holds_for_that_list(lab: Lab) -> None:
    rule = {"metric": "val/loss", "above": 1.2, "relative_to": {"c": "p"}}
    sweep = lab.sweep("lists", unstable=rule, when={"a": {"hidden": [[1]]}}, otherwise={"a": 0})
    for hidden, a, last in (([1], 0, 1.0), ([1], 4, 2.0), ([2], 0, 1.0)):
        for c in "pq":
            trial = lab.begin(sweep, {"hidden": hidden, "a": a, "c": c})
            lab.log(trial, "val/loss", {0: last})
            lab.end(trial)
    assert unstable_of(lab, "lists") == [False] * 6


def test_a_reference_that_failed_or_is_not_there_leaves_it_unknown(lab: Lab) -> None:
    rule = {"metric": "val/loss", "below": 0.5, "relative_to": {"k": 1}}
    sweep = lab.sweep("lonely", unstable=rule)
    for seed, state in enumerate((TrialState.FINISHED, TrialState.FAILED, TrialState.STOPPED)):
        for k in (2, 1):
            trial = lab.begin(sweep, {"k": k, "seed": seed})
            lab.log(trial, "val/loss", {0: 1.0 / k**2})
            lab.end(trial, state if k == 1 else TrialState.FINISHED)
    lab.end(lab.begin(sweep, {"k": 2, "seed": 9}))
    for seed, last in enumerate((NAN, -INF, 1.0), 10):  # none of them has a partner, but two need none
        trial = lab.begin(sweep, {"k": 2, "seed": seed})
        lab.log(trial, "val/loss", {0: last})
        lab.end(trial)
    assert unstable_of(lab, "lonely") == [True, False, None, None, True, False, None, True, True, None]


def test_a_changed_rule_judges_the_trials_that_are_there(lab: Lab) -> None:
    rule = {"metric": "val/loss", "above": 2.0, "relative_to": {}}
    sweep = lab.sweep("rejudged", unstable=None)
    trial = lab.begin(sweep, {"seed": 0})
    lab.log(trial, "val/loss", {0: 3.0})
    lab.end(trial)
    assert unstable_of(lab, "rejudged") == [False]
    lab.rewrite(sweep, "spec", {"unstable": rule})
    assert unstable_of(lab, "rejudged") == [True]


def test_references_are_found_by_an_index(lab: Lab) -> None:
    with lab.connection.transaction():
        lab.connection.execute("set local enable_seqscan = off")  # the tables of a test are too small to need one
        rows = lab.ask("explain select unstable from orch.runs where sweep = 'relative'")
    assert any("trials_params" in line for (line,) in rows)


# The table of one sweep


def test_a_sweep_has_a_table_with_typed_columns(lab: Lab) -> None:
    types = {
        "opt.lr": "double precision",
        "k": "bigint",
        "renormalize": "boolean",
        "precision": "text",
        "layers": "jsonb",
        "clip_norm": "double precision",
        "We\"ird": "text",
    }  # fmt: skip
    sweep = lab.sweep("typed", types)
    config = {"opt.lr": 1e-5, "k": 2, "renormalize": True, "precision": "bf16", "layers": [1, 2], "clip_norm": INF}
    trial = lab.begin(sweep, {**config, 'We"ird': "x"})
    lab.log(trial, "val/loss", {0: 1.0, 10: NAN})
    lab.end(trial, TrialState.DIVERGED)
    lab.trial(sweep, {**config, "k": 3, "clip_norm": None})
    assert view_catalog.rebuild_sweep_view(lab.connection, "typed")
    assert lab.columns_of("orch.sweep_typed") == [*view_catalog.FIXED_COLUMNS, *types, "val/loss"]
    done, waiting = lab.ask("select * from orch.sweep_typed order by trial")
    assert done[:-1] == (trial.run_id, 0, "diverged", True, "diverged", 1e-5, 2, True, "bf16", [1, 2], INF, "x")
    assert math.isnan(done[-1])
    assert waiting == (None, 1, "waiting", False, None, 1e-5, 3, True, "bf16", [1, 2], None, None, None)
    query = """select k, avg("val/loss") from orch.sweep_typed where not diverged and "opt.lr" < 1 group by 1"""
    assert lab.ask(query) == [(3, None)]


def test_a_metric_called_like_a_field_or_a_fixed_column_gets_a_suffix(lab: Lab) -> None:
    sweep = lab.sweep("clash", {"loss": "text", "diverged": "bigint"})
    trial = lab.begin(sweep, {"loss": "mse", "diverged": 5})
    for key, value in {"loss": 1.0, "state": 2.0, "diverged": 3.0}.items():
        lab.log(trial, key, {0: value})
    view_catalog.rebuild_sweep_view(lab.connection, "clash")
    query = "select loss, diverged_param, loss_metric, state_metric, diverged_metric, diverged from orch.sweep_clash"
    assert lab.ask(query) == [("mse", 5, 1.0, 2.0, 3.0, False)]


def test_indexed_metrics_and_norms_of_blocks_stay_in_final_metrics() -> None:
    shown = ["grad/preclip/total", "router/z", "val/top5", "router/load_max_over_mean", "x" * 63, "a b", "loss-9"]
    hidden = [
        "grad/preclip/router",
        "update/ratio/embed",
        "grad/preclip/h.0.attn",
        "router/load/3",
        "router/z/layer0",
        "load/layer1/2",
    ]
    assert [metric for metric in [*shown, *hidden, "x" * 64, "é" * 32] if view_catalog.is_shown(metric)] == shown


def test_a_table_has_at_most_500_columns_and_always_the_objective() -> None:
    metrics = [f"m{number}a" for number in range(600)] + ["z/objective"]
    columns = view_catalog.plan_columns([("lr", "double precision")], metrics, "z/objective")
    assert len(columns) + len(view_catalog.FIXED_COLUMNS) == 500
    assert [column.name for column in columns[:3]] == ["lr", "z/objective", "m0a"]


def test_a_field_that_cannot_become_a_column_is_refused() -> None:
    with pytest.raises(ValueError, match="'int' is none of"):
        view_catalog.plan_columns([("k", "int")], [], "loss")
    with pytest.raises(ValueError, match="63 bytes"):
        view_catalog.plan_columns([("k" * 64, "bigint")], [], "loss")


def test_new_metrics_make_the_table_stale_and_are_appended(lab: Lab) -> None:
    sweep = lab.sweep("growing")
    trial = lab.begin(sweep, {"seed": 0})
    assert view_catalog.sweep_view_is_stale(lab.connection, "growing")
    view_catalog.rebuild_sweep_view(lab.connection, "growing")
    lab.connection.execute("create view public.on_top as select trial, seed from orch.sweep_growing")
    lab.log(trial, "b", {0: 1.0})
    assert view_catalog.sweep_view_is_stale(lab.connection, "growing")
    view_catalog.rebuild_sweep_view(lab.connection, "growing")
    lab.log(trial, "a", {0: 2.0})
    lab.log(trial, "router/load/0", {0: 2.0})
    view_catalog.rebuild_sweep_view(lab.connection, "growing")
    assert not view_catalog.sweep_view_is_stale(lab.connection, "growing")
    # b stays before a: the table was extended, so the view on top of it lives
    assert lab.columns_of("orch.sweep_growing") == [*view_catalog.FIXED_COLUMNS, *COLUMNS, "b", "a"]
    assert lab.ask("select trial, seed from public.on_top") == [(0, 0)]


def test_a_changed_field_makes_the_table_anew(lab: Lab) -> None:
    sweep = lab.sweep("changed", {"k": "bigint", "seed": "bigint"})
    lab.trial(sweep, {"k": 1, "seed": 0})
    view_catalog.rebuild_sweep_view(lab.connection, "changed")
    lab.rewrite(sweep, "columns", [["k", "text"], ["alpha", "text"]])
    view_catalog.rebuild_sweep_view(lab.connection, "changed")
    assert lab.columns_of("orch.sweep_changed")[5:] == ["k", "alpha"]
    assert lab.ask("select k, alpha from orch.sweep_changed") == [("1", None)]


def test_a_long_reader_does_not_make_others_wait_for_the_new_table(lab: Lab) -> None:
    trial = lab.begin(lab.sweep("busy"), {"seed": 0})
    view_catalog.rebuild_sweep_view(lab.connection, "busy")
    lab.log(trial, "loss", {0: 1.0})
    with psycopg.connect(lab.url) as reader:
        reader.execute("select * from orch.sweep_busy")
        assert not view_catalog.rebuild_sweep_view(lab.connection, "busy", lock_wait_s=0.05)
        assert view_catalog.sweep_view_is_stale(lab.connection, "busy")
    assert view_catalog.rebuild_sweep_view(lab.connection, "busy")
    assert lab.ask("select loss from orch.sweep_busy") == [(1.0,)]


def test_the_catalog_is_applied_once_and_again_after_the_schema_is_dropped(lab: Lab, four: SweepRow) -> None:
    assert not view_catalog.apply(lab.connection)
    lab.connection.execute("drop schema orch cascade")
    assert not view_catalog.is_current(lab.connection)
    assert view_catalog.apply(lab.connection)
    assert lab.ask("select count(*) from orch.sweep_four") == [(4,)]


def test_every_view_says_what_it_holds_and_names_its_columns() -> None:
    for path in sorted(view_catalog.FOLDER.glob("*.sql")):
        text = path.read_text()
        assert text.startswith(f"-- orch.{path.stem}"), path
        assert "one row a" in text.splitlines()[0], path
        code = "\n".join(line for line in text.splitlines() if not line.strip().startswith("--"))
        assert "select *" not in code, path


def test_the_queries_of_the_documentation_answer(lab: Lab) -> None:
    sweep = lab.sweep("zloss", COLUMNS)
    for seed, c_z in enumerate((0.0, 0.0, 1e-3)):
        trial = lab.begin(sweep, {"c_z": c_z, "k": 2, "seed": seed}, c_z=c_z, precision="bf16")
        last = NAN if seed == 2 else 1.0 + seed
        lab.log(trial, "val/mse", {0: 3.0, 10: last})
        lab.log(trial, "router/load/0", {10: 0.5})
        lab.ledger.add_findings(sweep.id, [(trial.id, 1, Finding("dead_expert", Severity.WARNING, "one is dead"))])
        lab.decide(trial, Decision(seed, 10, last, Action.CONTINUE, "rung 10"))
        write_logs(lab.connection, [LogLine(sweep.id, trial.id, 1, "stderr", 0, "UserWarning: beware", 0)])
        lab.end(trial, TrialState.DIVERGED if seed == 2 else TrialState.FINISHED)
    view_catalog.rebuild_sweep_view(lab.connection, "zloss")
    lab.connection.execute("set search_path = orch")
    text = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
    answers = [lab.ask(query) for query in re.findall(r"```sql\n(.*?)```", text, re.DOTALL)]
    lab.connection.execute("set search_path = public")
    assert len(answers) == 13
    assert answers[0] == []  # the only query about running sweeps
    assert answers[7] == []  # routers that died: tests/integration/test_health_reports.py
    assert all(answers[1:7] + answers[8:10] + answers[11:])
    mean, best = answers[-2:]
    assert mean == [(0.0, 1.5, pytest.approx(math.sqrt(0.5)), 0), (1e-3, None, None, 1)]
    assert [row[-1] for row in best] == [1.0, 2.0]
