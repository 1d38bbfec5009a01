"""The ledger on a real PostgreSQL: one row a configuration, one driver a sweep, one winner a claim."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from orchestrator import ledger as ledger_package
from orchestrator.database.borrow import borrowed
from orchestrator.errors import AlreadyExists, DatabaseUnavailable, NotFound
from orchestrator.ledger import Ledger, SweepRow, SweepState, upgrade
from orchestrator.ledger.models import SCHEMA, Base
from orchestrator.tracking.bulk import write_decisions
from orchestrator.tracking.records import DecisionRow
from orchestrator.trial import (
    Action,
    Candidate,
    Decision,
    Failure,
    Finding,
    Outcome,
    Severity,
    TrialState,
    config_hash,
)

COLUMNS = {"lr": "double precision", "c_z": "double precision", "k": "bigint", "seed": "bigint", "note": "text"}


def new_engine(url: str, pool_size: int = 2) -> Engine:
    full = make_url(url).set(drivername="postgresql+psycopg")
    return create_engine(
        full, pool_size=pool_size, max_overflow=0, pool_pre_ping=True, connect_args={"options": "-csearch_path=public"}
    )


def item(**params: object) -> tuple[Candidate, dict[str, object], str]:
    cell = {name: value for name, value in params.items() if name != "seed"}
    return Candidate(params, cell), {"lr": 0.003, "note": "", **params}, config_hash(params)


def new_sweep(ledger: Ledger, name: str = "t") -> SweepRow:
    return ledger.create_sweep(
        name=name, workload="moe_router", spec={"params": {}}, metric="val/mse", mode="min", columns=COLUMNS
    )


@pytest.fixture
def engine(empty_database_url: str) -> Iterator[Engine]:
    engine = new_engine(empty_database_url)
    with engine.connect() as connection:
        upgrade(connection)
    yield engine
    engine.dispose()


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine)


@pytest.fixture
def sweep(ledger: Ledger) -> SweepRow:
    return new_sweep(ledger)


# Schema


def test_the_migrations_make_the_tables_that_the_models_describe(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "include_schemas": True,
                "include_name": lambda name, kind, parents: kind != "schema" or name == SCHEMA,
                "version_table_schema": SCHEMA,
                "compare_type": True,
                "compare_server_default": True,
            },
        )
        assert compare_metadata(context, Base.metadata) == []


def test_head_names_the_newest_migration() -> None:
    assert ScriptDirectory(str(ledger_package.MIGRATIONS)).get_current_head() == ledger_package.HEAD


def test_a_second_upgrade_is_one_short_look(engine: Engine) -> None:
    with engine.connect() as connection:
        upgrade(connection)
        started = time.perf_counter()
        upgrade(connection)
    assert time.perf_counter() - started < 0.1  # a few ms; Alembic's import alone takes longer


def test_upgrades_at_once_make_the_tables_once(empty_database_url: str) -> None:
    program = (
        "import sys; from sqlalchemy import create_engine; from orchestrator.ledger import upgrade\n"
        "with create_engine(sys.argv[1]).connect() as connection: upgrade(connection)"
    )
    url = make_url(empty_database_url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    starts = [subprocess.Popen([sys.executable, "-c", program, url]) for _ in range(4)]
    assert [start.wait(60) for start in starts] == [0, 0, 0, 0]
    with new_engine(empty_database_url).connect() as connection:
        assert ledger_package.revision(connection) == ledger_package.HEAD


def test_tables_of_a_newer_orch_are_refused_and_left_alone(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"update {SCHEMA}.alembic_version set version_num = '9999'"))
    with engine.connect() as connection, pytest.raises(DatabaseUnavailable, match="revision 9999"):
        upgrade(connection)
    with engine.connect() as connection:
        assert ledger_package.revision(connection) == "9999"


def test_a_ledger_of_an_older_orch_is_upgraded_with_its_trials(empty_database_url: str) -> None:
    engine = new_engine(empty_database_url)
    with engine.connect() as connection:
        connection.execute(text(f"create schema {SCHEMA}"))
        config = Config()
        config.set_main_option("script_location", str(ledger_package.MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        connection.execute(text(OLD_ROWS))
        connection.commit()
        upgrade(connection)
        assert ledger_package.revision(connection) == ledger_package.HEAD
    ledger = Ledger(engine)
    [sweep] = [ledger.find_sweep("old")]
    assert sweep is not None
    assert [(trial.objective, trial.more_objectives) for trial in ledger.trials(sweep.id)] == [(0.5, [])]
    assert ledger.decisions(sweep.id) == []
    engine.dispose()


OLD_ROWS = f"""
    insert into {SCHEMA}.sweeps (name, workload, spec, metric, mode) values ('old', 'toy', '{{}}', 'loss', 'min');
    insert into {SCHEMA}.trials (sweep_id, number, params, config, config_hash, cell, state, objective)
    select id, 0, '{{}}', '{{}}', 'hash', '{{}}', 'finished', 0.5 from {SCHEMA}.sweeps
"""

# Sweeps


def test_a_sweep_is_made_with_what_its_preflight_found_or_not_at_all(ledger: Ledger) -> None:
    whole = Finding("router_ties", Severity.WARNING, "ties", "cast", value=0.5)
    broken = replace(whole)
    object.__setattr__(broken, "step", 2**70)  # no bigint; a finding that is made so is refused
    settings = {"workload": "w", "spec": {}, "metric": "loss", "mode": "min", "columns": COLUMNS}
    with pytest.raises(DBAPIError):
        ledger.create_sweep(name="t", findings=[whole, broken], **settings)
    assert ledger.find_sweep("t") is None
    made = ledger.create_sweep(name="t", findings=[whole], **settings)
    assert ledger.add_findings(made.id, [(None, None, whole)]) == 0  # it is there


def test_a_sweep_comes_back_as_it_was_made(ledger: Ledger) -> None:
    made = ledger.create_sweep(
        name="zloss",
        workload="moe_router",
        spec={"params": {"c_z": [0.0, math.inf]}},
        metric="val/mse",
        mode="min",
        columns=COLUMNS,
        description="why",
        source="name: zloss",
        tags={"team": "router"},
    )
    assert ledger.find_sweep("zloss") == made == ledger.sweep(made.id)
    assert list(made.columns) == list(COLUMNS)  # in the Config's order, which jsonb objects would lose
    assert made.spec == {"params": {"c_z": [0.0, "Infinity"]}}
    assert (made.state, made.experiment_id, made.tags) == (SweepState.CREATED, None, {"team": "router"})


def test_a_taken_name_is_refused(ledger: Ledger, sweep: SweepRow) -> None:
    with pytest.raises(AlreadyExists, match="called t"):
        new_sweep(ledger)


def test_archiving_frees_the_name_and_purging_takes_everything(ledger: Ledger, engine: Engine, sweep: SweepRow) -> None:
    [trial] = ledger.add_trials(sweep.id, [item(seed=0)])
    ledger.begin_attempt(trial.id, "host")
    ledger.add_findings(sweep.id, [(trial.id, 1, Finding("leak", Severity.ERROR, "leaks"))])
    assert ledger.archive(sweep.id) == f"t~{sweep.id}"
    assert ledger.find_sweep("t") is None
    assert ledger.sweep_names() == []
    again = new_sweep(ledger)
    assert ledger.sweep_names() == ["t"]
    ledger.purge(sweep.id)
    with engine.connect() as connection:
        tables = ("trials", "attempts", "findings")
        left = [connection.scalar(text(f"select count(*) from {SCHEMA}.{table}")) for table in tables]
    assert left == [0, 0, 0]
    with pytest.raises(NotFound):
        ledger.purge(sweep.id)
    assert ledger.find_sweep("t") == again


def test_a_sweep_remembers_its_first_start_and_its_last_end(ledger: Ledger, sweep: SweepRow) -> None:
    ledger.set_sweep_state(sweep.id, SweepState.RUNNING)
    first = ledger.sweep(sweep.id)
    assert first.started_at is not None
    assert first.ended_at is None
    ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED)
    assert ledger.sweep(sweep.id).ended_at is not None
    ledger.set_sweep_state(sweep.id, SweepState.RUNNING)
    again = ledger.sweep(sweep.id)
    assert (again.started_at, again.ended_at) == (first.started_at, None)


# Trials


def test_a_configuration_is_added_once_and_numbers_go_on(ledger: Ledger, sweep: SweepRow) -> None:
    first = ledger.add_trials(sweep.id, [item(seed=1), item(seed=0), item(seed=1)])
    assert [(trial.number, trial.params["seed"]) for trial in first] == [(0, 1), (1, 0)]
    second = ledger.add_trials(sweep.id, [item(seed=0), item(seed=2)])
    assert [(trial.number, trial.params["seed"]) for trial in second] == [(2, 2)]
    assert ledger.add_trials(sweep.id, []) == []
    assert [trial.number for trial in ledger.trials(sweep.id)] == [0, 1, 2]
    other = new_sweep(ledger, "other")
    assert [trial.number for trial in ledger.add_trials(other.id, [item(seed=0)])] == [0]


def test_parameters_come_back_with_their_values_and_types(ledger: Ledger, sweep: SweepRow) -> None:
    params = {"lr": 1e-05, "c_z": math.inf, "k": 2, "seed": 2**62, "note": "Infinity", "hidden": [200, 100]}
    ledger.add_trials(sweep.id, [item(**params), item(lr=1e22, c_z=1.0)])
    back, large = ledger.trials(sweep.id)
    assert back.params == params
    assert {name: type(value) for name, value in back.config.items()} == {n: type(v) for n, v in params.items()}
    assert (large.params["lr"], type(large.params["lr"]), type(large.params["c_z"])) == (1e22, float, float)
    assert back.candidate == Candidate(params, back.cell)


def test_eight_threads_claim_every_trial_once(empty_database_url: str, engine: Engine) -> None:
    ledger = Ledger(new_engine(empty_database_url, pool_size=8))
    sweep = new_sweep(ledger)
    ledger.add_trials(sweep.id, [item(seed=seed) for seed in range(80)])
    claimed: list[int] = []

    def work() -> None:
        while (trial := ledger.claim(sweep.id)) is not None:
            claimed.append(trial.number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(claimed) == list(range(80))
    assert ledger.counts(sweep.id)[TrialState.RUNNING] == 80


def test_a_trial_goes_from_waiting_to_finished(ledger: Ledger, sweep: SweepRow) -> None:
    ledger.add_trials(sweep.id, [item(seed=0), item(seed=1)])
    trial = ledger.claim(sweep.id)
    assert trial is not None
    assert (trial.number, trial.state) == (0, TrialState.RUNNING)
    ledger.set_run(trial.id, "a" * 32)
    attempt = ledger.begin_attempt(trial.id, "host", pid=7, git_commit="abc")
    assert (attempt.number, attempt.first_step, attempt.pid, attempt.state) == (1, 0, 7, TrialState.RUNNING)
    outcome = Outcome(TrialState.DIVERGED, objective=math.inf, last_step=40, diverged_at=40, reason="val/mse is inf")
    assert ledger.finish(trial.id, attempt.number, outcome, host="host", device="cpu")
    done = ledger.trials(sweep.id)[0]
    assert (done.state, done.objective, done.last_step, done.diverged_at) == (TrialState.DIVERGED, math.inf, 40, 40)
    assert (done.run_id, done.attempts, done.host, done.device, done.git_commit) == ("a" * 32, 1, "host", "cpu", "abc")
    assert done.started_at is not None
    assert done.ended_at is not None
    assert done.started_at <= attempt.started_at <= done.ended_at
    counts = ledger.counts(sweep.id)
    assert counts[TrialState.WAITING] == counts[TrialState.DIVERGED] == 1
    assert sum(counts.values()) == 2


def test_claim_begin_finish_take_a_few_milliseconds(ledger: Ledger, sweep: SweepRow) -> None:
    ledger.add_trials(sweep.id, [item(seed=seed) for seed in range(100)])
    started = time.perf_counter()
    while (trial := ledger.claim(sweep.id)) is not None:
        attempt = ledger.begin_attempt(trial.id, "host")
        ledger.finish(trial.id, attempt.number, Outcome(TrialState.FINISHED, objective=1.0))
    assert (time.perf_counter() - started) / 100 < 0.05  # measured: 5 ms on a busy machine


def test_a_late_worker_cannot_overwrite_the_attempt_that_replaced_its_own(ledger: Ledger, sweep: SweepRow) -> None:
    [trial] = ledger.add_trials(sweep.id, [item(seed=0)])
    old = ledger.begin_attempt(trial.id, "host")
    [released] = ledger.release_unfinished(sweep.id)
    assert released.state is TrialState.WAITING
    assert not ledger.finish(trial.id, old.number, Outcome(TrialState.FINISHED, objective=9.0))
    new = ledger.begin_attempt(trial.id, "host", first_step=30)
    assert not ledger.finish(trial.id, old.number, Outcome(TrialState.FINISHED, objective=9.0))
    assert ledger.finish(trial.id, new.number, Outcome(TrialState.FINISHED, objective=1.0))
    assert ledger.finish(trial.id, new.number, Outcome(TrialState.FINISHED, objective=1.0))  # a repeated call
    assert [(a.number, a.state, a.first_step) for a in ledger.attempts(trial.id)] == [
        (1, TrialState.LOST, 0),
        (2, TrialState.FINISHED, 30),
    ]
    assert ledger.trials(sweep.id)[0].objective == 1.0


def test_an_attempt_starts_after_its_predecessor_and_after_the_last_point(ledger: Ledger, sweep: SweepRow) -> None:
    [trial] = ledger.add_trials(sweep.id, [item(seed=0)])
    ahead = datetime.now(UTC) + timedelta(hours=1)  # the first attempt's host had a clock that is ahead
    first = ledger.begin_attempt(trial.id, "host", not_before=ahead)
    second = ledger.begin_attempt(trial.id, "host")
    assert first.started_at == ahead
    assert second.started_at == ahead + timedelta(milliseconds=1)


def test_a_requeued_trial_waits_again_and_keeps_the_failed_attempt(ledger: Ledger, sweep: SweepRow) -> None:
    [trial] = ledger.add_trials(sweep.id, [item(seed=0)])
    attempt = ledger.begin_attempt(trial.id, "host")
    died = Outcome(TrialState.FAILED, reason="worker died", error="SIGKILL", failure=Failure.WORKER_DEATH)
    assert ledger.requeue(trial.id, attempt.number, died)
    assert not ledger.requeue(trial.id, attempt.number + 1, died)
    waiting = ledger.trials(sweep.id)[0]
    assert (waiting.state, waiting.reason, waiting.error, waiting.attempts) == (
        TrialState.WAITING,
        "worker died",
        "",
        1,
    )
    [kept] = ledger.attempts(trial.id)
    assert (kept.state, kept.failure, kept.error) == (TrialState.FAILED, "worker_death", "SIGKILL")
    assert ledger.begin_attempt(trial.id, "host").number == 2


def test_an_attempt_that_said_nothing_takes_back_nothing_unless_it_began_anew(ledger: Ledger, sweep: SweepRow) -> None:
    [trial] = ledger.add_trials(sweep.id, [item(seed=0)])
    silent = Outcome(TrialState.FAILED, more_objectives=(None, None), failure=Failure.WORKER_DEATH)

    def known_after(outcome: Outcome, first_step: int) -> tuple[float | None, list[float | None], int | None]:
        attempt = ledger.begin_attempt(trial.id, "host", first_step=first_step)
        if outcome.state is TrialState.WAITING:
            assert ledger.requeue(trial.id, attempt.number, outcome)
        else:
            assert ledger.finish(trial.id, attempt.number, outcome)
        [row] = ledger.trials(sweep.id)
        return row.objective, row.more_objectives, row.last_step

    said = Outcome(TrialState.WAITING, objective=math.inf, last_step=20, more_objectives=(0.5, None))
    assert known_after(said, first_step=0) == (math.inf, [0.5, None], 20)
    assert known_after(replace(silent, state=TrialState.WAITING), first_step=21) == (math.inf, [0.5, None], 20)
    assert known_after(silent, first_step=21) == (math.inf, [0.5, None], 20)
    assert known_after(silent, first_step=0) == (None, [], None)


def test_a_claim_takes_the_trial_that_is_least_far_and_of_these_the_first(ledger: Ledger, sweep: SweepRow) -> None:
    trials = ledger.add_trials(sweep.id, [item(seed=seed) for seed in range(5)])
    for trial, last_step in zip(trials, (20, 10, 10, 5), strict=False):
        attempt = ledger.begin_attempt(trial.id, "host")
        paused = Outcome(TrialState.WAITING, objective=0.5, last_step=last_step, more_objectives=(math.inf, None))
        assert ledger.requeue(trial.id, attempt.number, paused)
    failed = ledger.begin_attempt(trials[3].id, "host")
    died = Outcome(TrialState.FAILED, last_step=15, failure=Failure.WORKER_DEATH)
    ledger.requeue(trials[3].id, failed.number, died)  # it may have to begin anew: nobody is less far
    claimed = [ledger.claim(sweep.id) for _ in range(5)]
    assert [trial.number for trial in claimed if trial] == [3, 4, 1, 2, 0]
    assert claimed[4] is not None
    assert (claimed[4].objective, claimed[4].more_objectives) == (0.5, [math.inf, None])
    assert ledger.attempts(trials[0].id)[0].state is TrialState.WAITING


def test_decisions_come_back_once_and_in_their_order(ledger: Ledger, sweep: SweepRow) -> None:
    first, second = ledger.add_trials(sweep.id, [item(seed=seed) for seed in range(2)])
    made = [
        Decision(1, 10, 0.5, Action.CONTINUE, "first here"),
        Decision(0, 10, math.inf, Action.PAUSE, "bad \ud800 \0 text"),
        Decision(0, 10, math.inf, Action.EXPLOIT, "copies", source=1, params={"lr": 1e22, "k": 2}),
    ]
    rows = [DecisionRow(sweep.id, (first, second)[decision.trial].id, 1, decision) for decision in made]
    with borrowed(ledger.engine) as connection:
        write_decisions(connection, [*rows, *rows])
    assert ledger.decisions(sweep.id) == made
    assert ledger.decisions(new_sweep(ledger, "other").id) == []


def test_an_interrupted_sweep_is_marked_and_released(ledger: Ledger, sweep: SweepRow) -> None:
    trials = ledger.add_trials(sweep.id, [item(seed=seed) for seed in range(5)])
    for trial, state in zip(trials, (TrialState.FINISHED, TrialState.FAILED, TrialState.DIVERGED), strict=False):
        attempt = ledger.begin_attempt(trial.id, "host")
        ledger.finish(trial.id, attempt.number, Outcome(state, objective=1.0))
    running = ledger.begin_attempt(trials[3].id, "host")
    ledger.abandon(sweep.id, "interrupted")
    assert [trial.number for trial in ledger.trials(sweep.id) if trial.state is TrialState.KILLED] == [3]
    # the worker was told to drain and still says how far it came
    assert ledger.finish(trials[3].id, running.number, Outcome(TrialState.KILLED, last_step=35, reason="interrupted"))
    assert ledger.trials(sweep.id)[3].last_step == 35
    assert [trial.number for trial in ledger.release_unfinished(sweep.id)] == [3]
    assert not ledger.finish(trials[3].id, running.number, Outcome(TrialState.KILLED))  # it waits for the next one
    assert [trial.number for trial in ledger.release_unfinished(sweep.id, also=[TrialState.FAILED])] == [1]
    assert [trial.number for trial in ledger.release_unfinished(sweep.id, numbers=[2])] == [2]
    released = ledger.trials(sweep.id)[2]
    assert (released.state, released.objective, released.ended_at) == (TrialState.WAITING, None, None)


def test_findings_are_stored_once_however_often_they_are_replayed(ledger: Ledger, sweep: SweepRow) -> None:
    [trial] = ledger.add_trials(sweep.id, [item(seed=0)])
    seen = [
        (trial.id, 1, Finding("dead_expert", Severity.WARNING, "expert 3 is dead", step=10, value=math.nan)),
        (trial.id, 1, Finding("dead_expert", Severity.WARNING, "expert 5 is dead", step=10)),
        (trial.id, 2, Finding("dead_expert", Severity.WARNING, "expert 3 is dead", step=10)),
        (None, None, Finding("leakage", Severity.ERROR, "the future leaks")),
    ]
    assert ledger.add_findings(sweep.id, seen) == 4
    assert ledger.add_findings(sweep.id, seen) == 0
    assert ledger.add_findings(sweep.id, []) == 0


def test_a_trial_that_is_gone_is_said_to_be_gone(ledger: Ledger) -> None:
    with pytest.raises(NotFound, match="removed"):
        ledger.begin_attempt(404, "host")


# One driver


def test_a_second_holder_is_refused_and_told_who_holds(ledger: Ledger, sweep: SweepRow) -> None:
    other = new_sweep(ledger, "other")
    with ledger.hold(sweep.id) as hold:
        with pytest.raises(AlreadyExists, match=rf"run by {os.getpid()}@\S+ since 20\d\d-"), ledger.hold(sweep.id):
            pass
        with ledger.hold(other.id):
            assert hold.still_held()
    with ledger.hold(sweep.id):
        pass


def test_a_killed_holder_frees_its_sweep(empty_database_url: str, ledger: Ledger, sweep: SweepRow) -> None:
    program = (
        "import sys, time; from sqlalchemy import create_engine; from orchestrator.ledger import Ledger\n"
        "with Ledger(create_engine(sys.argv[1])).hold(int(sys.argv[2])):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    url = make_url(empty_database_url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    command = [sys.executable, "-c", program, url, str(sweep.id)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(AlreadyExists, match=f"{holder.pid}@"), ledger.hold(sweep.id):
            pass
        holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while True:
        try:
            with ledger.hold(sweep.id):
                return
        except AlreadyExists:  # the server has not noticed yet
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_hold_whose_connection_is_cut_says_so(engine: Engine, ledger: Ledger, sweep: SweepRow) -> None:
    with ledger.hold(sweep.id) as hold:
        with engine.begin() as connection:
            cut = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'orch sweep %'"
            connection.execute(text(cut))
        time.sleep(0.2)
        assert not hold.still_held()
