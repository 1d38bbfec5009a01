"""A backup that is taken while a sweep runs becomes a workspace elsewhere, whole or not at all."""

from __future__ import annotations

import shutil
import stat
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from orchestrator import backup
from orchestrator.database.connection import Database
from orchestrator.database.dump import _reason, programs
from orchestrator.errors import DatabaseUnavailable
from orchestrator.settings import Settings, remote_journal_folder
from orchestrator.tracking.journal import Journal
from orchestrator.tracking.records import Points, to_json
from tests.conftest import DatabaseOn, Done, Orch

WORKLOAD = """
    import time
    from pathlib import Path
    from orch_lab import Counter

    class Noted(Counter):
        def run(self, config, context):
            note = Path(__file__).with_name(f"note-{config.seed}-{context.attempt}")
            note.write_text(f"seed {config.seed}")
            context.artifact(note, "notes/seed.txt")
            for report in super().run(config, context):
                yield report
                deadline = time.monotonic() + 120
                while report.step == 12 and config.seed == 1 and context.attempt == 1:
                    Path(__file__).with_name("waits").touch()
                    if Path(__file__).with_name("go").exists() or time.monotonic() > deadline:
                        break
                    time.sleep(0.01)
"""
SWEEP = """
    workload: lab_backup:Noted
    metric: train/loss
    params: {steps: 20}
    seeds: 3
    log_every: 1
    checkpoint_every: 5
    preflight: false
"""
STEPS = """
    select run.trial, array_agg(point.step order by point.step), bool_and(point.step = point.value)
    from orch.metrics as point join orch.runs as run on run.run_id = point.run_id
    where point.key = 'count' group by run.trial order by run.trial
"""


def ask(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def workspace(orch: Orch, folder: Path, url: str) -> Orch:
    env = {**orch.env, "ORCH_HOME": str(folder / ".orch"), "ORCH_DATABASE_URL": url, "PYTHONPATH": str(folder.parent)}
    return Orch(env, folder.parent)


class Source:
    """A workspace with a sweep that was backed up while its second trial stood at step 12, and finished afterwards."""

    def __init__(self, orch: Orch, url: str, folder: Path) -> None:
        self.url, self.file = url, folder / "backup.tar"
        (folder / "lab_backup.py").write_text(textwrap.dedent(WORKLOAD))
        self.orch = workspace(orch, folder / "source", url)
        self.sweep = self.orch.sweep_file(SWEEP, "kept")
        with ThreadPoolExecutor(1) as beside:
            sweeping = beside.submit(self.orch, "sweep", self.sweep, "--inline")
            while not (folder / "waits").exists():
                assert not sweeping.done(), sweeping.result()
                time.sleep(0.01)
            [(identity,)] = ask(self.url, "select value from orch_ledger.meta where key = 'identity'")
            of_a_node = remote_journal_folder(Settings()) / identity
            self.leave_a_point_in_a_journal(folder / "source" / ".orch" / "journal" / identity, 42.0)
            self.leave_a_point_in_a_journal(of_a_node, 43.0)
            self.said = self.orch("backup", self.file).out
            shutil.rmtree(of_a_node)
            (folder / "go").touch()

    def leave_a_point_in_a_journal(self, folder: Path, value: float) -> None:
        """As a recorder does that died before the database took it."""
        [(run_id, trial_id)] = ask(self.url, "select run_id, id from orch_ledger.trials where state = 'finished'")
        journal = Journal.create(folder)
        journal.append([to_json(Points(run_id, trial_id, 1, 20, int(time.time() * 1000), {"late": value}))])
        journal.close()


@pytest.fixture(scope="module")
def source(
    orch: Orch, server_url: str, database_on: DatabaseOn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Source]:
    with database_on(server_url) as url:
        yield Source(orch, url, tmp_path_factory.mktemp("backup"))


def test_a_sweep_backed_up_in_its_middle_goes_on_in_another_server_with_the_same_runs_and_every_step_once(
    source: Source, orch: Orch, debian_postgres_url: str, database_on: DatabaseOn
) -> None:
    with database_on(debian_postgres_url) as url:  # PostgreSQL 15, from 18
        there = workspace(orch, source.file.with_name("target"), url)
        del there.env["ORCH_DATABASE_URL"]
        said = there("restore", source.file, "--into", url).out
        assert "restored 1 sweeps, 2 runs, " in said
        assert Database.from_url(url).url not in said
        there.env["ORCH_DATABASE_URL"] = url
        states = ask(url, "select state, reason from orch_ledger.trials order by number")
        assert [state for state, _ in states] == ["finished", "lost", "waiting"]
        assert states[1][1].startswith("it ran when the backup of ")
        assert ask(url, "select status from public.runs where status = 'RUNNING'") == []
        late = ask(url, "select value from public.metrics where key = 'late' order by value")
        assert late == [(42.0,), (43.0,)], "they were in journals only"
        there("sweep", source.sweep, "--inline", "--resume")
        assert ask(url, STEPS) == [(trial, list(range(1, 21)), True) for trial in range(3)]
        runs = "select run_id, trial from orch.runs where trial < 2 order by trial"
        assert ask(url, runs) == ask(source.url, runs)
        assert ask(url, "select count(*) from public.runs where status = 'FINISHED'") == [(3,)]
        assert loaded_notes(url, there.env["ORCH_HOME"]) == ["seed 0", "seed 1", "seed 2"]


def loaded_notes(url: str, home: str) -> list[str]:
    """What MLflow finds where it was told that the artifacts are."""
    from mlflow.artifacts import load_text

    import orchestrator.tracking  # noqa: F401  (sets MLflow's switches before MLflow loads)

    addresses = [str(uri) for (uri,) in ask(url, "select artifact_uri from public.runs order by start_time")]
    assert all(address.startswith(f"file://{home}/artifacts/kept-") for address in addresses)
    return [load_text(f"{address}/notes/seed.txt") for address in addresses]


def test_a_backup_is_for_its_owners_eyes_and_never_takes_anothers_place(source: Source) -> None:
    assert stat.S_IMODE(source.file.stat().st_mode) == 0o600
    assert f"{source.file}  1 sweeps, " in source.said
    before = source.file.read_bytes()
    refusal = source.orch("backup", source.file, expect=2).err
    assert "exists already" in refusal
    assert source.file.read_bytes() == before
    password = dict(Database.from_url(source.url).parameters)["password"]
    assert password.encode() not in before


@contextmanager
def half_way(source: Source, file: Path) -> Iterator[Future[Done]]:
    """A backup, to be refused, that comes no further than its pg_dump until the block ends."""
    waits = "application_name = 'pg_dump' and wait_event_type = 'Lock' and datname = current_database()"
    with ThreadPoolExecutor(1) as beside:
        with psycopg.connect(source.url) as connection:
            connection.execute("lock table public.metrics in access exclusive mode")
            running = beside.submit(source.orch, "backup", file, expect=2)
            while ask(source.url, f"select count(*) from pg_stat_activity where {waits}") == [(0,)]:
                assert not running.done(), running.result()
                time.sleep(0.01)
            yield running


def test_a_backup_neither_replaces_nor_removes_what_somebody_made_while_it_ran(source: Source, tmp_path: Path) -> None:
    mine = {name: f"my {name}" for name in ("b.tar", "b.tar.part")}
    with half_way(source, tmp_path / "b.tar") as running:
        for name, text in mine.items():
            (tmp_path / name).write_text(text)
    refusal = "exists already, and a backup overwrites nothing; choose a new name"
    assert running.result().err == f"{tmp_path / 'b.tar'}  {refusal}\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == mine


def test_of_two_backups_to_one_name_the_first_that_is_whole_stays(tmp_path: Path) -> None:
    target = tmp_path / "b.tar"
    with ExitStack() as slower:
        slower.enter_context(backup._new_file(target)).write(b"slower")
        with backup._new_file(target) as faster:
            faster.write(b"faster")
        with pytest.raises(FileExistsError):
            slower.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"b.tar": b"faster"}


def test_a_database_that_goes_away_under_a_backup_is_told_in_one_line(source: Source, tmp_path: Path) -> None:
    ours = "application_name in ('pg_dump', 'orch backup') and datname = current_database()"
    with half_way(source, tmp_path / "b.tar") as running:
        ask(source.url, f"select pg_terminate_backend(pid) from pg_stat_activity where {ours}")
        said = running.result().err
    assert "terminating connection due to administrator command" in said
    assert said.endswith("no backup was made, mend that and run it again\n")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_the_server_said_is_the_reason_and_not_the_statement_with_which_pg_dump_ends() -> None:
    said = b"""
pg_dump: error: Dumping the contents of table "metrics" failed: PQgetCopyData() failed.
pg_dump: detail: Error message from server: server closed the connection unexpectedly
\tThis probably means the server terminated abnormally
pg_dump: detail: Command was: COPY public.metrics (key, value) TO stdout;
"""
    assert _reason(said) == "server closed the connection unexpectedly"


def test_a_name_that_no_file_can_have_is_told(source: Source, tmp_path: Path) -> None:
    file = tmp_path / ("b" * 253)
    refusal = source.orch("backup", file, expect=2).err
    assert refusal.startswith(str(file))
    assert refusal.endswith("  File name too long; no backup was made, mend that and run it again\n")


@pytest.mark.parametrize("damage", ["first half", "last block", "a bit of the dump", "a bit of the manifest", "text"])
def test_a_damaged_file_is_refused_with_nothing_restored(
    source: Source, orch: Orch, server_url: str, database_on: DatabaseOn, tmp_path: Path, damage: str
) -> None:
    whole = source.file.read_bytes()
    dump, manifest = whole.index(b"PGDMP") + 5000, whole.index(b'"identity": "') + 15
    data = {
        "first half": whole[: len(whole) // 2],
        "last block": whole[: whole.index(b"manifest.sha256")],
        "a bit of the dump": whole[:dump] + bytes([whole[dump] ^ 1]) + whole[dump + 1 :],
        "a bit of the manifest": whole[:manifest] + bytes([whole[manifest] ^ 1]) + whole[manifest + 1 :],
        "text": b"no archive\n" * 200,
    }[damage]
    file = tmp_path / "damaged.tar"
    file.write_bytes(data)
    with database_on(server_url) as url:
        there = workspace(orch, tmp_path / "target", url)
        refusal = there("restore", file, expect=2).err
        assert str(file) in refusal
        assert "nothing was restored" in refusal
        assert ask(url, "select count(*) from pg_tables where schemaname in ('public', 'orch_ledger')") == [(0,)]
    assert not (tmp_path / "target" / ".orch" / "artifacts").exists()


def test_a_backup_is_restored_into_an_empty_database_only(source: Source) -> None:
    refusal = source.orch("restore", source.file, expect=2).err
    assert "into an empty database only" in refusal
    assert "orch --home NEW_FOLDER restore FILE" in refusal
    password = dict(Database.from_url(source.url).parameters)["password"]
    assert password not in refusal


def test_a_dump_that_cannot_be_loaded_leaves_neither_tables_nor_artifacts(
    source: Source, orch: Orch, server_url: str, database_on: DatabaseOn, tmp_path: Path
) -> None:
    with database_on(server_url) as url:
        with psycopg.connect(url, autocommit=True) as connection:  # what the dump creates is in the way, out of sight
            connection.execute("create function public.refuse() returns trigger language plpgsql as 'begin end'")
            connection.execute("create schema orch_ledger")
        there = workspace(orch, tmp_path / "target", url)
        refusal = there("restore", source.file, expect=2).err
        assert "cannot be loaded" in refusal
        assert ask(url, "select count(*) from pg_tables where schemaname in ('public', 'orch_ledger')") == [(0,)]
    assert not list((tmp_path / "target" / ".orch" / "artifacts").glob("*"))


def test_nothing_but_our_own_drafts_is_left_out(tmp_path: Path) -> None:
    for name in (".env", ".config", ".step-5.attempt-1", ".model.bin.part", "step-5.attempt-1", "x.part"):
        (tmp_path / name).touch()
    kept = [path.name for path in backup._whole_files(tmp_path)]
    assert kept == [".config", ".env", "step-5.attempt-1", "x.part"]


def test_a_server_newer_than_every_pg_dump_here_is_told_with_what_to_install() -> None:
    with pytest.raises(DatabaseUnavailable, match=r"PostgreSQL 99 and no pg_dump here is that new .* install"):
        programs(99)
