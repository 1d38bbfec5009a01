"""The ledger on a real PostgreSQL: one row a configuration, one driver a sweep, one winner a claim."""

from __future__ import annotations

import math
import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from orchestrator import ledger as ledger_package
from orchestrator.database.borrow import borrowed
from orchestrator.database.keeper import wait_for
from orchestrator.errors import AlreadyExists, DatabaseUnavailable, NotFound
from orchestrator.ledger import Ledger, SweepRow, SweepState, upgrade
from orchestrator.ledger import lease as lease_module
from orchestrator.ledger import process as process_module
from orchestrator.ledger import store as store_module
from orchestrator.ledger.models import SCHEMA, Base, Wish
from orchestrator.ledger.process import is_gone, this_process
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
        spent_s = []
        for _ in range(5):
            started = time.perf_counter()
            upgrade(connection)
            spent_s.append(time.perf_counter() - started)
    assert min(spent_s) < 0.1  # a few ms; Alembic's import alone takes longer


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
    with ledger.hold(sweep.id) as lease:
        lease.strike(TrialState.KILLED, SweepState.INTERRUPTED, "interrupted")
    assert [trial.number for trial in ledger.trials(sweep.id) if trial.state is TrialState.KILLED] == [3]
    # the worker was told to drain and still says how far it came
    assert ledger.finish(trials[3].id, running.number, Outcome(TrialState.KILLED, last_step=35, reason="interrupted"))
    assert ledger.trials(sweep.id)[3].last_step == 35
    assert [trial.number for trial in ledger.release_unfinished(sweep.id)] == [3]
    assert not ledger.finish(trials[3].id, running.number, Outcome(TrialState.KILLED))  # it waits for the next one
    assert [trial.number for trial in ledger.release_unfinished(sweep.id, numbers=[1, 2])] == [1, 2]
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


def silent_for(engine: Engine, sweep: SweepRow, seconds: float) -> None:
    """Makes the holder's last word so old."""
    with engine.begin() as connection:
        ago = f"clock_timestamp() - interval '{seconds} s'"
        connection.execute(text(f"update {SCHEMA}.sweeps set heartbeat_at = {ago} where id = {sweep.id}"))


def other_machine(engine: Engine, sweep: SweepRow) -> None:
    """Lets the holder be a process of a machine that nobody here can look into."""
    with engine.begin() as connection:
        connection.execute(
            text(f"update {SCHEMA}.sweeps set holder_process = 'boot pid:[1] 7 9' where id = {sweep.id}")
        )


@pytest.fixture
def slow_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a lease says nothing by itself while the test runs."""
    monkeypatch.setattr(lease_module, "BEAT_S", 3600.0)


@pytest.fixture
def long_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a server that was started days ago: this one may be younger than a lease."""
    for name in ("LOOK", "HELD"):
        statement = getattr(lease_module, name).replace("pg_postmaster_start_time()", "to_timestamp(0)")
        monkeypatch.setattr(lease_module, name, statement)
    monkeypatch.setattr(store_module, "LOOK", lease_module.LOOK)


def test_a_second_holder_is_refused_and_told_who_holds(ledger: Ledger, sweep: SweepRow) -> None:
    other = new_sweep(ledger, "other")
    with ledger.hold(sweep.id) as lease:
        said = rf"run by {os.getpid()}@\S+, last heard of 0 s ago: t\n  orch status t .*\n  orch cancel t"
        with pytest.raises(AlreadyExists, match=said), ledger.hold(sweep.id):
            pass
        with ledger.hold(other.id):
            lease.check()
        assert ledger.holder(sweep.id).fence == lease.fence == 1
    assert ledger.holder(sweep.id).name == ""
    with ledger.hold(sweep.id) as lease:
        assert lease.fence == 2


@pytest.mark.usefixtures("slow_beat", "long_up")
def test_a_holder_of_another_machine_has_a_minute_from_its_last_word(
    ledger: Ledger, engine: Engine, sweep: SweepRow
) -> None:
    with ledger.hold(sweep.id):
        other_machine(engine, sweep)
        silent_for(engine, sweep, 50)
        with pytest.raises(AlreadyExists, match=r"if that command is dead, the sweep is free in \d+ s"):
            ledger.hold(sweep.id).__enter__()
        silent_for(engine, sweep, 61)
        with ledger.hold(sweep.id) as second:
            assert second.fence == 2


@pytest.mark.usefixtures("slow_beat")
def test_the_time_in_which_the_database_was_away_is_nobodys_silence(
    ledger: Ledger, engine: Engine, sweep: SweepRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ledger.hold(sweep.id):
        silent_for(engine, sweep, 3600)
        just_started = lease_module.LOOK.replace("pg_postmaster_start_time()", "clock_timestamp() - interval '5 s'")
        monkeypatch.setattr(store_module, "LOOK", just_started)
        assert not ledger.holder(sweep.id).is_stale


def test_a_killed_holder_frees_its_sweep_at_once(empty_database_url: str, ledger: Ledger, sweep: SweepRow) -> None:
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
    with ledger.hold(sweep.id) as lease:
        assert lease.fence == 2


@pytest.mark.usefixtures("slow_beat")
def test_a_lease_outlives_its_connection(empty_database_url: str, ledger: Ledger, sweep: SweepRow) -> None:
    with ledger.hold(sweep.id) as lease:
        with psycopg.connect(empty_database_url) as connection:
            others = "datname = current_database() and pid <> pg_backend_pid()"
            connection.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")
        lease.renew()
        assert ledger.holder(sweep.id).name.startswith(f"{os.getpid()}@")


@pytest.mark.usefixtures("slow_beat", "long_up")
def test_nothing_that_a_former_holder_writes_changes_anything(ledger: Ledger, engine: Engine, sweep: SweepRow) -> None:
    with ledger.hold(sweep.id) as first:
        old = ledger.under(first)
        old.add_trials(sweep.id, [item(seed=seed) for seed in range(3)])
        mine = old.claim(sweep.id)
        assert mine is not None
        attempt = old.begin_attempt(mine.id, "host")
        silent_for(engine, sweep, 61)
        with ledger.hold(sweep.id) as second:
            ledger.under(second).release_unfinished(sweep.id)
            before = contents(engine)
            done = Outcome(TrialState.FINISHED, objective=9.0)
            writes: list[Callable[[], object]] = [
                lambda: old.add_trials(sweep.id, [item(seed=7)]),
                lambda: old.set_run(mine.id, "a" * 32),
                lambda: old.begin_attempt(mine.id, "host"),
                lambda: old.finish(mine.id, attempt.number, done),
                lambda: old.requeue(mine.id, attempt.number, replace(done, state=TrialState.WAITING)),
                lambda: old.set_sweep_state(sweep.id, SweepState.FINISHED),
                lambda: old.restate(sweep.id, [], spec={"a": 1}, source="", description="", reopened=True),
                first.renew,
            ]
            for write in writes:
                with pytest.raises(AlreadyExists, match="lost it"):
                    write()
            with pytest.raises(AlreadyExists, match="lost it"):
                first.check()
            assert old.claim(sweep.id) is None
            assert old.release_unfinished(sweep.id) == []
            first.strike(TrialState.KILLED, SweepState.FAILED, "late")
            with engine.begin() as connection, pytest.raises(AlreadyExists):
                first.guard(connection)
            assert contents(engine) == before
        first.release()
        assert ledger.holder(sweep.id).fence == 2


def contents(engine: Engine) -> list[object]:
    """Every row of the tables that a driver writes, but for the heartbeat."""
    tables = (f"(select id, spec, state, fence, holder from {SCHEMA}.sweeps)", f"{SCHEMA}.trials", f"{SCHEMA}.attempts")
    with engine.connect() as connection:
        return [
            row for table in tables for row in connection.execute(text(f"select t::text from {table} as t order by 1"))
        ]


@pytest.mark.usefixtures("slow_beat", "long_up")
def test_a_reaper_marks_what_a_silent_holder_left_and_the_holder_takes_it_back(
    ledger: Ledger, engine: Engine, sweep: SweepRow
) -> None:
    marked: list[tuple[list[str], str]] = []

    def mark(connection: object, run_ids: Sequence[str], state: str, reason: str) -> None:
        marked.append((list(run_ids), state))

    def reaped() -> list[str]:
        with borrowed(engine) as connection:
            return [holder.name for holder in lease_module.reap(connection, mark)]

    with ledger.hold(sweep.id, mark) as lease:
        held = ledger.under(lease)
        held.set_sweep_state(sweep.id, SweepState.RUNNING)
        held.add_trials(sweep.id, [item(seed=seed) for seed in range(3)])
        trials = [trial for _ in range(2) if (trial := held.claim(sweep.id))]
        attempts = [held.begin_attempt(trial.id, "host") for trial in trials]
        held.set_run(trials[0].id, "a" * 32)
        assert reaped() == []  # it lives
        silent_for(engine, sweep, 61)
        assert reaped() == [ledger.holder(sweep.id).name]
        assert reaped() == []  # once is enough
        assert marked == [(["a" * 32], "lost")]
        lost = ledger.trials(sweep.id)
        assert [trial.state for trial in lost] == [TrialState.LOST, TrialState.LOST, TrialState.WAITING]
        assert re.fullmatch(rf"its command {os.getpid()}@\S+ has been silent since 20\d\d-.*", lost[0].reason)
        assert ledger.sweep(sweep.id).state is SweepState.INTERRUPTED
        # the second trial's worker ends before the holder says its next word
        assert held.finish(trials[1].id, attempts[1].number, Outcome(TrialState.FINISHED, objective=1.0))
        lease.renew()
        assert marked[1:] == [(["a" * 32], "running")]
        back = ledger.trials(sweep.id)
        assert [trial.state for trial in back] == [TrialState.RUNNING, TrialState.FINISHED, TrialState.WAITING]
        assert (back[0].reason, back[0].ended_at) == ("", None)
        assert ledger.sweep(sweep.id).state is SweepState.RUNNING
        assert held.finish(trials[0].id, attempts[0].number, Outcome(TrialState.FINISHED, objective=1.0))


def test_a_reaper_passes_over_a_database_that_takes_no_writes(ledger: Ledger, engine: Engine, sweep: SweepRow) -> None:
    with ledger.hold(sweep.id):
        pass
    with engine.begin() as connection:
        gone = "holder = '7@here', holder_process = :process, heartbeat_at = clock_timestamp()"
        process = re.sub(r"\d+ \d+$", "999999999 1", this_process())
        connection.execute(text(f"update {SCHEMA}.sweeps set {gone}"), {"process": process})
    with borrowed(engine) as connection:
        connection.execute("set transaction read only")
        assert lease_module.reap(connection, lease_module.no_runs) == []
    assert ledger.holder(sweep.id).is_gone
    with borrowed(engine) as connection:
        assert [holder.is_gone for holder in lease_module.holders(connection)] == [True]  # what `orch status` says then
    with borrowed(engine) as connection:
        assert [holder.name for holder in lease_module.reap(connection, lease_module.no_runs)] == ["7@here"]


@pytest.mark.usefixtures("slow_beat")
def test_a_wish_is_heard_once_by_whom_it_was_meant_for(ledger: Ledger, sweep: SweepRow) -> None:
    with ledger.hold(sweep.id) as lease:
        holder = ledger.holder(sweep.id)
        assert ledger.ask_to_cancel(holder, now=False) is Wish.CANCEL
        lease.renew()
        assert lease.wanted is Wish.CANCEL
        assert ledger.ask_to_cancel(holder, now=False) is Wish.CANCEL_NOW
    assert ledger.ask_to_cancel(holder, now=False) is None
    with ledger.hold(sweep.id) as lease:
        assert ledger.ask_to_cancel(holder, now=True) is None  # meant for the one before
        lease.renew()
        assert lease.wanted is Wish.NONE


def test_a_word_that_is_no_wish_is_refused_and_asks_for_nothing(engine: Engine, sweep: SweepRow) -> None:
    with pytest.raises(IntegrityError, match="sweeps_wanted_check"), engine.begin() as connection:
        connection.execute(text(f"update {SCHEMA}.sweeps set wanted = 'stop it'"))
    assert Wish("stop it") is Wish.NONE  # of a database that was made before the constraint


def test_a_heart_goes_on_beating_whatever_went_wrong(
    ledger: Ledger, sweep: SweepRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BEAT_S", 0.02)
    with ledger.hold(sweep.id) as lease:
        lease.cancel_now = lambda: operator.truediv(1, 0)
        ledger.ask_to_cancel(ledger.holder(sweep.id), now=True)
        assert wait_for(lambda: lease.trouble == "division by zero", 30)
        lease.cancel_now = lambda: None
        assert wait_for(lambda: lease.trouble == "", 30)


# Which process that is


def test_a_process_is_told_from_others_and_from_those_that_had_its_number() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    machine = this_process().rsplit(" ", 2)[0]
    started = process_module._start_time(sleeper.pid)
    alive = f"{machine} {sleeper.pid} {started}"
    assert not is_gone(this_process())
    assert not is_gone(alive)
    assert is_gone(f"{machine} {sleeper.pid} 1")  # another process has the number by now
    assert not is_gone(f"another boot {sleeper.pid} 1")
    assert not is_gone("")
    sleeper.kill()
    deadline = time.monotonic() + 10
    while not is_gone(alive):  # dead, though nobody has waited for it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sleeper.wait()
    assert is_gone(alive)
