"""The recorder on a real PostgreSQL: every point arrives exactly once, whatever the database and the process do."""

from __future__ import annotations

import functools
import math
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from orchestrator import ledger
from orchestrator.database import embedded
from orchestrator.database.connection import Database
from orchestrator.settings import Home
from orchestrator.tracking import mlflow_schema
from orchestrator.tracking import recorder as recorder_module
from orchestrator.tracking.bulk import rows_of, write_rows
from orchestrator.tracking.journal import Journal, orphans, others_with_backlog
from orchestrator.tracking.recorder import (
    FindingRow,
    JournalUnwritable,
    MetricError,
    Points,
    Recorder,
    connect_by_url,
)
from orchestrator.trial import Finding, Severity

# After ours: orchestrator.tracking sets MLflow's switches before MLflow loads.
from mlflow.entities import Metric  # isort: skip
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # isort: skip

DatabaseOn = Callable[..., AbstractContextManager[str]]
NOW_MS = int(time.time() * 1000)


class Place:
    """A database with MLflow's tables, and what a test wants of it."""

    def __init__(self, url: str, artifacts: Path) -> None:
        self.url = url
        mlflow_schema.create(url)
        self.store = SqlAlchemyStore(mlflow_schema.mlflow_uri(url), artifacts.as_uri())
        with self.store.engine.connect() as connection:
            ledger.upgrade(connection)
        self.experiment_id = self.store.create_experiment("sweep")

    def new_run(self) -> str:
        return str(self.store.create_run(self.experiment_id, "user", NOW_MS, [], "run").info.run_id)

    def connect(self) -> psycopg.Connection[Any]:
        return connect_by_url(self.url)

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query, values).fetchall()  # type: ignore[call-overload,no-any-return]

    def metrics(self, run_id: str) -> list[tuple[Any, ...]]:
        columns = "key, value, timestamp, step, is_nan"
        return self.ask(f"select {columns} from public.metrics where run_uuid = %s order by {columns}", run_id)

    def latest(self, run_id: str) -> list[tuple[Any, ...]]:
        columns = "key, value, timestamp, step, is_nan"
        return self.ask(f"select {columns} from public.latest_metrics where run_uuid = %s order by key", run_id)


@pytest.fixture(scope="module")
def place(server_url: str, database_on: DatabaseOn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One database for all these tests: each works on runs of its own, and MLflow's migrations take a second."""
    with database_on(server_url) as url:
        place = Place(url, tmp_path_factory.mktemp("artifacts"))
        yield place
        place.store.engine.dispose()


@pytest.fixture
def open_recorder(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    """Recorders of this test; those left open are closed at its end."""
    opened: list[Recorder] = []

    def open_one(connect: Callable[[], psycopg.Connection[Any]], **options: Any) -> Recorder:
        opened.append(Recorder(connect, options.pop("journal_dir", tmp_path / "journal"), **options))
        return opened[-1]

    yield open_one
    for recorder in opened:
        recorder._disk_error = None
        recorder.close(0.0)


def points(run_id: str, step: int, **metrics: float) -> Points:
    return Points(run_id, 1, 1, step, NOW_MS + step, metrics)


def awkward_points() -> list[tuple[str, float, int, int]]:
    """(key, value, timestamp, step): non-finite values, repeats, equal steps, steps out of order."""
    random.seed(3)
    values = [math.nan, math.inf, -math.inf, 0.0, -1.5, 2.5, 1e-320, 1.7e308]
    given = [
        (random.choice("abc"), random.choice(values), NOW_MS + random.randrange(4), random.randrange(-1, 5))
        for _ in range(300)
    ]
    ties = [("d", math.nan, NOW_MS, 7), ("d", 0.0, NOW_MS, 7), ("e", 0.0, 1, 1), ("e", math.nan, 1, 1)]
    return [*given, *given[:50], *ties]


def test_our_rows_equal_those_of_mlflows_own_log_batch(place: Place) -> None:
    theirs, ours = place.new_run(), place.new_run()
    given = awkward_points()
    for start in range(0, len(given), 60):
        batch = given[start : start + 60]
        place.store.log_batch(theirs, [Metric(key, value, at, step) for key, value, at, step in batch], [], [])
        rows = rows_of(Points(ours, 1, 1, step, at, {key: value}) for key, value, at, step in batch)
        with place.connect() as connection:
            assert write_rows(connection, rows) == frozenset()
    assert len(place.metrics(theirs)) > 150
    assert place.metrics(ours) == place.metrics(theirs)
    assert place.latest(ours) == place.latest(theirs)


def test_all_columns_of_mlflows_tables_are_written(place: Place) -> None:
    """A new not-null column in a later MLflow would need a value from us."""
    columns = place.ask(
        "select table_name, column_name from information_schema.columns"
        " where table_schema = 'public' and table_name in ('metrics', 'latest_metrics')"
    )
    expected = {"run_uuid", "key", "value", "timestamp", "step", "is_nan"}
    for table in ("metrics", "latest_metrics"):
        assert {column for name, column in columns if name == table} == expected


def test_the_same_batch_twice_leaves_five_rows_through_our_writer_and_through_mlflows(place: Place) -> None:
    theirs, ours = place.new_run(), place.new_run()
    values = [0.1, 0.2, math.nan, 0.4, 0.5]
    metrics = [Metric("loss", value, NOW_MS, step) for step, value in enumerate(values)]
    rows = rows_of(Points(ours, 1, 1, step, NOW_MS, {"loss": value}) for step, value in enumerate(values))
    for repeated in ([], [0]):
        for _ in range(2):
            place.store.log_batch(theirs, metrics + [metrics[index] for index in repeated], [], [])
            with place.connect() as connection:
                write_rows(connection, rows + [rows[index] for index in repeated])
    assert len(place.metrics(ours)) == len(place.metrics(theirs)) == 5
    assert place.latest(ours) == place.latest(theirs)


def test_a_late_older_point_does_not_become_the_latest(place: Place) -> None:
    run_id = place.new_run()
    with place.connect() as connection:
        write_rows(connection, rows_of([points(run_id, 9, loss=1.0)]))
        write_rows(connection, rows_of([points(run_id, 3, loss=7.0)]))
    assert place.latest(run_id) == [("loss", 1.0, NOW_MS + 9, 9, False)]
    assert len(place.metrics(run_id)) == 2


def test_four_writers_of_the_same_runs_neither_deadlock_nor_double(place: Place) -> None:
    run_ids = [place.new_run() for _ in range(4)]
    given = rows_of(points(run_id, step, a=step, b=-step, c=0.5) for run_id in run_ids for step in range(50))
    failures: list[BaseException] = []

    def write(seed: int) -> None:
        rows = random.Random(seed).sample(given, len(given))
        try:
            with place.connect() as connection:
                for start in range(0, len(rows), 75):
                    write_rows(connection, rows[start : start + 75])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [len(place.metrics(run_id)) for run_id in run_ids] == [150] * 4


def test_what_is_recorded_arrives_and_the_journal_is_empty_afterwards(
    place: Place, open_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    recorder = open_recorder(place.connect)
    run_ids = [place.new_run() for _ in range(3)]
    for step in range(20):
        recorder.record([points(run_id, step, loss=step / 2, norm=math.nan) for run_id in run_ids])
    assert recorder.drain(20)
    assert recorder.pending() == 0
    assert [len(place.metrics(run_id)) for run_id in run_ids] == [40] * 3
    remainder = recorder.close(5)
    assert (remainder.points, remainder.run_ids, remainder.reason) == (0, (), "")
    assert list((tmp_path / "journal").iterdir()) == []


def test_recording_returns_at_once(place: Place, open_recorder: Callable[..., Recorder]) -> None:
    recorder = open_recorder(place.connect)
    run_id = place.new_run()
    reports = [points(run_id, step, a=1.0, b=2.0, c=3.0, d=4.0, e=5.0) for step in range(500)]
    spent_s = []
    for report in reports:
        started = time.perf_counter()
        recorder.record([report])
        spent_s.append(time.perf_counter() - started)
    assert sorted(spent_s)[len(spent_s) // 2] < 100e-6  # about 10 us here; another thread may hold the interpreter


def test_a_killed_process_loses_nothing_that_was_synced_and_the_next_recorder_doubles_nothing(
    place: Place, open_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    run_id = place.new_run()
    code = (
        "import functools, os, signal, sys\n"
        "from pathlib import Path\n"
        "from orchestrator.tracking.recorder import Points, Recorder, connect_by_url\n"
        "recorder = Recorder(functools.partial(connect_by_url, sys.argv[1]), Path(sys.argv[2]), flush_after_s=0.01)\n"
        "for step in range(3000):\n"
        "    recorder.record([Points(sys.argv[3], 1, 1, step, 1_000 + step, {'loss': step, 'norm': float('nan')})])\n"
        "    if step % 100 == 99:\n"
        "        recorder.sync()\n"
        "        print(step + 1, flush=True)\n"
        "    if step == 2050:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    journal_dir = tmp_path / "journal"
    command = [sys.executable, "-c", code, place.url, str(journal_dir), run_id]
    died = subprocess.run(command, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    num_synced = int(died.stdout.split()[-1])
    assert num_synced == 2000
    [dead] = orphans(journal_dir)
    recorder = open_recorder(place.connect)
    assert recorder.drain(30)
    assert recorder.is_clear
    assert recorder.brought == (dead.name,)
    rows = place.metrics(run_id)
    steps = [step for key, _, _, step, _ in rows if key == "loss"]
    assert sorted(steps) == sorted(set(steps))
    assert set(range(num_synced)) <= set(steps) <= set(range(2051))
    assert len(rows) == 2 * len(steps)
    recorder.close(5)
    assert list(journal_dir.iterdir()) == []


def test_a_recorder_outlives_a_database_that_stops_for_seconds(
    open_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    home = Home(tmp_path / ".orch").ensure()
    url = embedded.ensure_running(home)
    try:
        place = Place(url, tmp_path / "artifacts")
        run_id = place.new_run()
        place.store.engine.dispose()
        recorder = open_recorder(functools.partial(connect_by_url, url))
        for step in range(300):
            recorder.record([points(run_id, step, loss=step)])
            if step == 100:
                assert recorder.drain(10)
                embedded.stop(home)
            if step == 200:
                recorder.sync(5)  # safe on disk although no database answers
                assert not recorder.drain(1.5)
                assert "password" not in recorder.database_error.replace("password authentication", "")
                assert recorder.database_error
                assert embedded.ensure_running(home) == url
        assert recorder.drain(20)
        assert recorder.database_error == ""
        assert [step for _, _, _, step, _ in place.metrics(run_id)] == list(range(300))
        assert recorder.close(5).points == 0
    finally:
        embedded.stop(home)


def test_without_any_database_close_names_what_is_left_and_a_later_recorder_brings_it(
    place: Place, open_recorder: Callable[..., Recorder]
) -> None:
    def nowhere() -> psycopg.Connection[Any]:
        return connect_by_url("postgresql://nobody@127.0.0.1:1/none")

    run_id = place.new_run()
    blind = open_recorder(nowhere)
    blind.record([points(run_id, step, loss=1.0, norm=2.0) for step in range(5)])
    blind.sync(5)
    assert not blind.is_clear
    beside = open_recorder(place.connect)
    assert beside.close(5).is_empty
    assert others_with_backlog(beside.journal) == [blind.journal.name]
    started = time.monotonic()
    remainder = blind.close(0.5)
    assert time.monotonic() - started < 2.0
    assert (remainder.points, remainder.run_ids) == (10, (run_id,))
    assert "refused" in remainder.reason
    assert open_recorder(place.connect).drain(10)
    assert len(place.metrics(run_id)) == 10


def test_a_read_only_database_is_waited_for(place: Place, open_recorder: Callable[..., Recorder]) -> None:
    run_id = place.new_run()
    is_read_only = True

    def connect() -> psycopg.Connection[Any]:
        connection = place.connect()
        connection.execute(f"set default_transaction_read_only = {'on' if is_read_only else 'off'}")
        return connection

    recorder = open_recorder(connect)
    recorder.record([points(run_id, 0, loss=1.0)])
    assert not recorder.drain(0.6)
    assert "read-only" in recorder.database_error
    is_read_only = False
    assert recorder.drain(10)
    assert len(place.metrics(run_id)) == 1


def test_a_hanging_statement_delays_neither_the_disk_nor_the_end(
    place: Place, open_recorder: Callable[..., Recorder]
) -> None:
    run_id = place.new_run()
    recorder = open_recorder(place.connect)
    with place.connect() as blocker, blocker.transaction():
        blocker.execute("lock table public.metrics in access exclusive mode")
        recorder.record([points(run_id, 0, loss=1.0)])
        recorder.sync(5)
        assert not recorder.drain(0.3)
        recorder.record([points(run_id, 1, loss=1.0)])
        recorder.sync(5)
        started = time.monotonic()
        remainder = recorder.close(0.5)
        assert time.monotonic() - started < 3.0
    assert remainder.points == 2
    assert open_recorder(place.connect).drain(10)
    assert len(place.metrics(run_id)) == 2


def test_rows_that_postgres_refuses_do_not_hold_up_the_others(
    place: Place, open_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    """They cannot come from `record`, which checks; a journal of an older version may hold them."""
    run_id = place.new_run()
    journal = Journal.create(tmp_path / "journal")
    good = [["points", run_id, 1, 1, step, NOW_MS, {"loss": 1.0, "norm": 2.0}] for step in range(20)]
    bad = [
        ["points", run_id, 1, 1, 3, NOW_MS, {"k" * 251: 1.0, "fine": 1.0}],
        ["points", run_id, 1, 1, 2**70, NOW_MS, {"loss": 1.0}],
        ["points", run_id, 1, 1, 4, NOW_MS, {"nul\0": 1.0}],
        ["points", run_id, 1, 1, 5, NOW_MS, {"\ud800": 1.0}],
    ]
    journal.append([*good[:10], *bad, *good[10:]])
    journal.close()
    recorder = open_recorder(place.connect)
    assert recorder.drain(10)
    assert len(place.metrics(run_id)) == 41
    assert not recorder.is_clear
    remainder = recorder.close(5)
    assert (remainder.num_rejected, recorder.brought) == (4, ())  # not whole
    rejected = (tmp_path / "journal" / "rejected.jsonl").read_text().splitlines()
    assert len(rejected) == 4
    assert "too long" in rejected[0] + rejected[1] + rejected[2] + rejected[3]


def test_points_of_deleted_runs_stay_in_the_journal_until_the_run_is_back(
    place: Place, open_recorder: Callable[..., Recorder], tmp_path: Path
) -> None:
    deleted, kept, other_database = place.new_run(), place.new_run(), "f" * 32
    place.store.delete_run(deleted)
    recorder = open_recorder(place.connect)
    for step in range(5):
        recorder.record([points(run_id, step, loss=step) for run_id in (deleted, kept, other_database)])
    assert recorder.drain(10)
    assert recorder.unknown_runs == {deleted, other_database}
    assert len(place.metrics(kept)) == 5
    remainder = recorder.close(5)
    assert (remainder.points, remainder.run_ids) == (10, tuple(sorted((deleted, other_database))))

    place.store.restore_run(deleted)
    second = open_recorder(place.connect)
    assert second.drain(10)
    assert len(place.metrics(deleted)) == 5
    left = second.close(5)
    assert (left.points, left.run_ids) == (0, ())  # what was inherited is not this recorder's failure
    assert second.brought == ()
    assert not second.is_clear
    (folder,) = orphans(tmp_path / "journal")
    journal = Journal.adopt(folder)
    assert journal is not None
    assert {record[1] for record in journal.remaining()} == {other_database}
    journal.close()


def test_what_a_replaced_attempt_measures_after_its_successor_began_is_not_written(
    place: Place, open_recorder: Callable[..., Recorder]
) -> None:
    run_id = place.new_run()
    [(began_ms, trial_id)] = place.ask(
        """
        with sweep as (
            insert into orch_ledger.sweeps (name, workload, spec, metric, mode)
            values ('late', 'w', '{}', 'loss', 'min')
            returning id
        ),
        trial as (
            insert into orch_ledger.trials (id, sweep_id, number, params, config, config_hash, cell)
            select 1000000, id, 0, '{}', '{}', 'h', '{}' from sweep
            returning id
        )
        insert into orch_ledger.attempts (trial_id, number, first_step, started_at)
        select trial.id, attempt.*
        from trial, (values (1, 0, to_timestamp(1000)), (2, 31, to_timestamp(2000)))
            as attempt (number, first_step, started_at)
        returning (extract(epoch from started_at) * 1000)::int8, trial_id
        """
    )[1:]
    recorder = open_recorder(place.connect)

    def measured(attempt: int, step: int, timestamp_ms: int) -> Points:
        return Points(run_id, trial_id, attempt, step, timestamp_ms, {"loss": float(attempt)})

    early = [measured(1, step, began_ms - 100 + step) for step in (29, 30, 31, 32)]  # hidden, but they were there
    recorder.record([*early, measured(1, 33, began_ms), measured(1, 34, began_ms + 50), measured(2, 31, began_ms + 60)])
    recorder.record([measured(1, 12, began_ms + 70)])  # its clock was ahead: nothing supersedes this step
    assert recorder.drain(20)
    assert recorder.close(10.0).is_empty
    written = [(step, value) for _, value, _, step, _ in place.metrics(run_id)]
    assert sorted(written) == [(12, 1.0), (29, 1.0), (30, 1.0), (31, 1.0), (31, 2.0), (32, 1.0)]


def test_findings_arrive_once_and_survive_text_that_postgres_has_no_room_for(
    place: Place, open_recorder: Callable[..., Recorder]
) -> None:
    engine = Database.from_url(place.url).engine()
    with engine.connect() as connection:
        ledger.upgrade(connection)
    sweep = ledger.Ledger(engine).create_sweep(
        name="t", workload="w", spec={}, metric="loss", mode="min", columns={}, description=""
    )
    engine.dispose()
    recorder = open_recorder(place.connect)
    finding = Finding("leak", Severity.ERROR, "a\0b \ud800", "look at it", step=3, value=math.nan, threshold=2.0)
    for _ in range(2):
        recorder.notes([FindingRow(sweep.id, None, None, finding)])
        assert recorder.drain(10)
    found = place.ask("select check_name, severity, step, value, threshold, message, advice from orch_ledger.findings")
    assert str(found) == str([("leak", "error", 3, math.nan, 2.0, r"a\x00b \ud800", "look at it")])


def test_none_as_a_metric_is_refused_by_name_and_the_recorder_goes_on(
    place: Place, open_recorder: Callable[..., Recorder]
) -> None:
    run_id = place.new_run()
    recorder = open_recorder(place.connect)
    with pytest.raises(MetricError, match="val/loss"):
        recorder.record([points(run_id, 3, **{"val/loss": None})])  # type: ignore[arg-type]
    recorder.record([points(run_id, 4, **{"val/loss": 1.0, "acc@1": 0.5})])
    assert recorder.drain(10)
    assert len(place.metrics(run_id)) == 2


def test_a_full_disk_reaches_the_caller_and_what_was_given_is_written_when_there_is_room(
    place: Place, open_recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = place.new_run()
    recorder = open_recorder(place.connect)
    monkeypatch.setattr(recorder._journal, "append", functools.partial(_no_space))
    recorder.record([points(run_id, 0, loss=1.0)])
    with pytest.raises(TimeoutError):  # a disk may become free again
        recorder.sync(0.3)
    assert "No space left" in recorder.disk_error
    monkeypatch.setattr(recorder_module, "DISK_PATIENCE_S", 0.0)
    with pytest.raises(JournalUnwritable, match="No space left"):
        recorder.sync(5)
    with pytest.raises(JournalUnwritable, match="ORCH_JOURNAL_DIR"):
        recorder.record([points(run_id, 1, loss=1.0)])
    monkeypatch.undo()
    deadline = time.monotonic() + 5
    while recorder._disk_error is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert recorder.drain(10)
    assert len(place.metrics(run_id)) == 1
    assert recorder.disk_error == ""


def _no_space(_records: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_inside_a_recording_thread_reaches_the_next_caller(open_recorder: Callable[..., Recorder]) -> None:
    def broken() -> psycopg.Connection[Any]:
        raise ZeroDivisionError("a bug")

    recorder = open_recorder(broken)
    recorder.record([points("0" * 32, 0, loss=1.0)])
    with pytest.raises(RuntimeError, match="a bug"):
        recorder.drain(10)
    with pytest.raises(RuntimeError, match="a bug"):
        recorder.record([points("0" * 32, 1, loss=1.0)])
    with pytest.raises(RuntimeError, match="a bug"):
        recorder.close(1)
    recorder._failure = None  # for the fixture's own closing


def test_an_unwritable_journal_folder_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnwritable, match="ORCH_JOURNAL_DIR"):
        Recorder(lambda: connect_by_url(""), tmp_path / "file" / "journal")


def test_one_connection_serves_a_recorder_whatever_many_trials_it_has(
    place: Place, open_recorder: Callable[..., Recorder]
) -> None:
    run_ids = [place.new_run() for _ in range(16)]
    recorder = open_recorder(place.connect)
    threads = [
        threading.Thread(target=lambda run_id=run_id: [recorder.record([points(run_id, n, a=n)]) for n in range(50)])
        for run_id in run_ids
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.drain(20)
    count = "select count(*) from pg_stat_activity where application_name = 'orch recorder' and pid <> pg_backend_pid()"
    assert place.ask(count + " and datname = current_database()") == [(1,)]
    assert [len(place.metrics(run_id)) for run_id in run_ids] == [50] * 16


@pytest.mark.parametrize("has_database", [True, False])
def test_ten_thousand_reports_do_not_grow_the_process(place: Place, has_database: bool, tmp_path: Path) -> None:
    code = (
        "import functools, resource, sys\n"
        "from pathlib import Path\n"
        "from orchestrator.tracking.recorder import Points, Recorder, connect_by_url\n"
        "recorder = Recorder(functools.partial(connect_by_url, sys.argv[1]), Path(sys.argv[2]))\n"
        "def report(step):\n"
        "    metrics = {f'metric/{k}': k * step for k in range(10)}\n"
        "    recorder.record([Points(sys.argv[3], 1, 1, step, step, metrics)])\n"
        "for step in range(200): report(step)\n"
        "recorder.sync()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for step in range(200, 10_200): report(step)\n"
        "recorder.sync()\n"
        "if sys.argv[4] == 'True': assert recorder.drain(60)\n"
        "left = recorder.close(0.5).points\n"
        "print(left, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    url = place.url if has_database else "postgresql://nobody@127.0.0.1:1/none"
    arguments = [url, str(tmp_path / "journal"), place.new_run(), str(has_database)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left, growth_mib = done.stdout.split()
    assert int(left) == (0 if has_database else 102_000)
    assert float(growth_mib) < 50
