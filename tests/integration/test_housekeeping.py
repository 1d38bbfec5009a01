"""`orch gc` takes what is dead and old, says what it kept and why, and touches nothing else."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from orchestrator import background
from orchestrator.cli import gc
from orchestrator.database import embedded
from orchestrator.errors import NotFound
from orchestrator.housekeeping import Housekeeper, Pile, Wishes
from orchestrator.ledger import Ledger
from orchestrator.ledger.process import this_process
from orchestrator.locks import try_lock, try_lock_folder
from orchestrator.removal import remove_sweep
from orchestrator.settings import Home
from orchestrator.tracking.journal import Journal
from orchestrator.workspace import Workspace, open_workspace
from tests.conftest import DatabaseOn, Orch

DEADLINE_S = 30.0
DAY_S = 86_400
FATES = """
    workload: orch_lab:Odd
    metric: val/loss
    params: {do: {grid: [nothing, raise, nan]}}
    preflight: false
"""
PLAIN = """
    workload: orch_lab:Trivial
    metric: val/loss
    params: {steps: 2}
    preflight: false
"""
AGO = "extract(epoch from now() - interval '30 days') * 1000"


def make(path: Path, age_days: float = 30, text: str = "x" * 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for one in (path, path.parent):
        os.utime(one, times=(time.time() - age_days * DAY_S,) * 2)
    return path


class Untidy:
    """A workspace with one thing of each kind that is dead and old, one that is young, and one that is not ours."""

    def __init__(self, orch: Orch, url: str, folder: Path, runtime: Path) -> None:
        self.url, self.home, self.runtime = url, folder / ".orch", runtime
        env = {**orch.env, "ORCH_HOME": str(self.home), "ORCH_DATABASE_URL": url, "XDG_RUNTIME_DIR": str(runtime)}
        self.orch = Orch(env, folder)
        self.orch("sweep", self.orch.sweep_file(FATES, "fates"), "--inline", expect=1)
        for name in ("gone", "archived", "busy"):
            self.orch(
                "sweep", self.orch.sweep_file(PLAIN, name), "--inline", "--set", f"keep_checkpoints={name == 'busy'}"
            )
        self.orch("rm", "archived")
        self.runs = {
            state: Path(uri.removeprefix("file://"))
            for state, uri in self.ask(
                "select trial.state, run.artifact_uri from orch_ledger.trials as trial join public.runs as run "
                "on run.run_uuid = trial.run_id where trial.number <= 2 order by trial.id desc"
            )
        }
        self.location = self.runs["failed"].parents[1]

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description else []

    def tidy(self, *flags: str) -> dict[str, dict[str, Any]]:
        """The lines of `orch gc`, by kind."""
        return {line["kind"]: line for line in json.loads(self.orch("gc", "--json", *flags).out)}

    def everything(self) -> tuple[list[Path], list[tuple[Any, ...]]]:
        counts = self.ask("select count(*), (select count(*) from orch_ledger.trials) from public.runs")
        return sorted(path for top in (self.home, self.runtime) for path in top.rglob("*")), counts


@pytest.fixture(scope="module")
def untidy(
    orch: Orch, server_url: str, database_on: DatabaseOn, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Untidy]:
    runtime = Path(tempfile.mkdtemp(prefix="orch-gc-", dir="/tmp"))  # its name must be short
    with database_on(server_url) as url:
        yield Untidy(orch, url, tmp_path_factory.mktemp("untidy"), runtime)
    shutil.rmtree(runtime)


def test_gc_takes_what_is_dead_and_old_and_says_what_it_kept(untidy: Untidy) -> None:
    identity = untidy.ask("select value from orch_ledger.meta where key = 'identity'")[0][0]
    untidy.ask(
        f"update public.experiments set lifecycle_stage = 'deleted', last_update_time = {AGO} where name = 'gone'"
    )
    ran = "where run_uuid in (select run_id from orch_ledger.trials where state = 'diverged')"
    untidy.ask(f"update public.runs set lifecycle_stage = 'deleted', deleted_time = {AGO} {ran}")
    untidy.ask("update orch_ledger.sweeps set archived_at = now() - interval '30 days' where archived_at is not null")
    old_logs, new_logs = make(untidy.home / "logs" / "ui.log.1"), make(untidy.home / "logs" / "ui.log", age_days=0)
    orphan, young = untidy.location / ("a" * 32), untidy.location / ("b" * 32)
    make(orphan / "artifacts" / "model.bin")
    os.utime(orphan, times=(1, 1))
    make(young / "artifacts" / "model.bin", age_days=1)
    strangers = make(untidy.location / "my_notes" / "note.txt")
    elsewhere = make(untidy.home / "artifacts" / "other-abcdef" / "note.txt")
    finished = make(untidy.runs["finished"].with_name("artifacts-checkpoints") / "step-4.attempt-1")
    [(uri,)] = untidy.ask(
        "select artifact_uri from public.runs join orch_ledger.trials on run_id = run_uuid where sweep_id = 4"
    )
    asked_for = make(Path(uri.removeprefix("file://")).with_name("artifacts-checkpoints") / "step-2.attempt-1")
    failed = make(untidy.runs["failed"].with_name("artifacts-checkpoints") / "step-2.attempt-1")
    refused = make(untidy.home / "journal" / identity / "rejected.jsonl")
    drained = make(untidy.home / "journal" / identity / f"{socket.gethostname()}~4194303~00c0ffee" / "lock", text="")
    foreign = journal_with_a_point(untidy.home / "journal" / "00000000-0000-4000-8000-000000000000")
    dead_session = make(untidy.runtime / "orch-0123456789-ray" / str(os.getpid()) / "socket")
    for run in untidy.runs.values():  # written long ago, and known: no orphan
        for path in (run.parent, *run.parent.rglob("*")):
            os.utime(path, times=(1, 1))
    live_session = make(untidy.runtime / "orch-0123456789-ray" / "4194303" / "socket")
    held = try_lock_folder(live_session.parent)
    assert held is not None
    quiet_log = untidy.home / "logs" / "toy.log"
    service, _ = background.spawn(["sleep", "600"], quiet_log, os.environ)
    make(quiet_log)

    before = untidy.everything()
    shown = untidy.tidy("--dry-run")
    after = untidy.everything()
    assert after == before, "a dry run only shows"
    numbers = {kind: line["number"] for kind, line in shown.items() if line["number"]}
    assert numbers == {
        "sweeps deleted in MLflow": 1,
        "runs deleted in MLflow": 1,
        "artifacts of no run": 1,
        "checkpoints of trials that are over": 1,
        "journals": 1,
        "rows that the database refused": 1,
        "folders of dead commands": 1,
        "old logs": 1,
    }

    done = untidy.tidy()
    assert {kind: line["number"] for kind, line in done.items() if line["number"]} == numbers
    assert untidy.ask("select name from orch_ledger.sweeps order by id") == [("fates",), ("archived~3",), ("busy",)]
    assert untidy.ask("select count(*) from public.experiments where name = 'gone'") == [(0,)]
    assert untidy.ask("select state, run_id is null from orch_ledger.trials where sweep_id = 1 order by number") == [
        ("finished", False),
        ("failed", False),
        ("diverged", True),
    ]
    for gone in (old_logs, orphan, finished, refused, drained.parent, dead_session.parent, untidy.runs["diverged"]):
        assert not gone.exists(), gone
    for kept in (new_logs, young, strangers, elsewhere, failed, asked_for, foreign, live_session, quiet_log):
        assert kept.exists(), kept
    assert not untidy.runs["diverged"].parent.exists(), "nor does an empty folder of a run stay"
    assert untidy.runs["failed"].exists()
    assert "1 (0.0 MB) of what runs in the background" in done["old logs"]["kept"]
    service.kill()
    service.wait()
    os.close(held)
    assert "younger than 7 days" in done["artifacts of no run"]["kept"]
    assert "may belong to another database" in done["artifacts of no run"]["kept"]
    states_kept = done["checkpoints of trials that are over"]["kept"]
    assert "of failed trials, which go on from them; removed only with --checkpoints" in states_kept
    assert "kept on request (keep_checkpoints: true); removed only with --checkpoints" in states_kept
    assert "for another database; --foreign-journals" in done["journals"]["kept"]
    assert "removed only with --archived" in done["archived sweeps"]["kept"]

    flagged = untidy.tidy("--archived", "--checkpoints", "--foreign-journals")
    assert {kind: line["number"] for kind, line in flagged.items() if line["number"]} == {
        "archived sweeps": 1,
        "checkpoints of trials that are over": 2,
        "journals": 1,
        "folders of dead commands": 1,
        "old logs": 1,
    }
    assert not failed.exists()
    assert not asked_for.exists()
    assert not foreign.exists()
    assert untidy.ask("select name from orch_ledger.sweeps order by id") == [("fates",), ("busy",)]
    assert untidy.orch("status").out.count("fates") == 1


def journal_with_a_point(folder: Path) -> Path:
    journal = Journal.create(folder)
    journal.append([{"a": "point"}])
    journal.close()
    for path in journal.folder.iterdir():
        os.utime(path, times=(1, 1))
    os.utime(journal.folder, times=(1, 1))
    return journal.folder


def test_what_cannot_go_says_why_and_holds_up_nothing_else(untidy: Untidy, tmp_path: Path) -> None:
    def missing() -> None:
        raise NotFound("somebody was faster\nand more")

    pile, file = Pile("things"), make(tmp_path / "old")
    for remove in (missing, lambda: untidy.ask("select 1 / 0"), file.unlink, file.unlink):
        pile.add(1_000, remove)
    pile.clear()
    assert not file.exists()
    assert pile.line(dry_run=False)[1] == 2, "what somebody else has removed meanwhile is gone"
    assert list(pile.kept) == ["somebody was faster", "division by zero"]


def test_a_scratch_folder_goes_with_the_process_that_holds_it_whatever_has_its_number_now(tmp_path: Path) -> None:
    home = Home(tmp_path / ".orch")
    code = f"from orchestrator.settings import Home, Path; print(Home(Path({str(home.path)!r})).scratch())"
    dead = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    assert dead.is_dir()
    ours, other = home.scratch(), home.scratch()
    assert ours.is_dir()
    assert other.is_dir()
    assert ours != other
    assert not dead.exists()
    shutil.rmtree(ours.parent)


class Race:
    """A look, and then what others do before anything is removed. The sweep is `fates`, of three trials."""

    def __init__(self, untidy: Untidy, patch: pytest.MonkeyPatch) -> None:
        patch.setenv("ORCH_DATABASE_URL", untidy.url)
        patch.setenv("XDG_RUNTIME_DIR", str(untidy.runtime))
        self.untidy = untidy
        self.workspace: Workspace = open_workspace(untidy.home)
        self.ledger = Ledger(self.workspace.database.engine("orch-tests"))
        self.states = make(untidy.runs["failed"].with_name("artifacts-checkpoints") / "step-2.attempt-1")
        self.orphan = untidy.location / ("d" * 32)
        make(self.orphan / "artifacts" / "model.bin")
        os.utime(self.orphan, times=(1, 1))

    def look(self) -> dict[str, Pile]:
        wishes = Wishes(7.0 * DAY_S, checkpoints=True, foreign_journals=True)
        return {pile.kind: pile for pile in Housekeeper(self.workspace, self.untidy.home, wishes).piles()}

    @property
    def deleted_run(self) -> str:
        [(run_id,)] = self.untidy.ask("select run_id from orch_ledger.trials where sweep_id = 1 and state = 'finished'")
        return str(run_id)

    def set_run(self, stage: str) -> None:
        deleted = f"lifecycle_stage = '{stage}', deleted_time = {AGO}"
        self.untidy.ask(f"update public.runs set {deleted} where run_uuid = '{self.deleted_run}'")


@pytest.fixture
def race(untidy: Untidy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Race]:
    race = Race(untidy, monkeypatch)
    yield race
    race.set_run("active")
    shutil.rmtree(race.orphan, ignore_errors=True)
    race.ledger.engine.dispose()


def test_nothing_goes_of_a_sweep_that_was_taken_after_the_look(race: Race) -> None:
    race.set_run("deleted")
    piles = race.look()
    with race.ledger.hold(1):
        for kind in ("runs deleted in MLflow", "artifacts of no run", "checkpoints of trials that are over"):
            pile = piles[kind]
            assert pile.things, pile.kind
            pile.clear()
            assert not pile.things, pile.kind
            assert "in use by a command" in pile.kept
    assert race.states.exists()
    assert race.orphan.exists()
    assert race.untidy.runs["finished"].exists()


def test_whoever_takes_a_sweep_waits_while_its_states_are_being_removed(
    race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: a resume begins between the last look and the removal."""
    seen: list[bool] = []

    def resume() -> None:
        with race.ledger.hold(1):
            seen.append(race.states.exists())

    resuming, remove = threading.Thread(target=resume), shutil.rmtree
    waits = "select pid from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"

    def remove_late(folder: Path) -> None:
        resuming.start()
        deadline = time.monotonic() + DEADLINE_S
        while not race.untidy.ask(waits):
            assert resuming.is_alive(), "it did not wait"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        remove(folder)

    pile = race.look()["checkpoints of trials that are over"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_late)
        pile.clear()
    resuming.join(DEADLINE_S)
    assert seen == [False], "it began when they were gone: at the start, not from half a state"
    assert len(pile.things) == 1


def test_what_changed_after_the_look_stays(race: Race) -> None:
    untidy = race.untidy
    race.set_run("deleted")
    foreign = journal_with_a_point(untidy.home / "journal" / "00000000-0000-4000-8000-000000000001")
    log = make(untidy.home / "logs" / "quiet.log")
    piles = race.look()
    race.set_run("active")  # restored in MLflow's UI
    untidy.ask("update orch_ledger.trials set state = 'waiting' where sweep_id = 1 and state = 'failed'")
    untidy.ask(f"update orch_ledger.trials set run_id = '{race.orphan.name}' where sweep_id = 1 and state = 'diverged'")
    journal, writing = Journal.adopt(foreign), try_lock(log)
    assert journal is not None
    assert writing is not None
    for pile in piles.values():
        pile.clear()
    untidy.ask("update orch_ledger.trials set state = 'failed' where sweep_id = 1 and state = 'waiting'")
    untidy.ask("update orch_ledger.trials set run_id = null where sweep_id = 1 and state = 'diverged'")
    journal.close()
    os.close(writing)
    for kept in (race.states, race.orphan, untidy.runs["finished"], foreign, log):
        assert kept.exists(), kept
    reasons = {
        "runs deleted in MLflow": "restored, or removed, meanwhile",
        "checkpoints of trials that are over": "of trials that went on meanwhile",
        "artifacts of no run": "of a run that has come up meanwhile",
        "journals": "of a recorder that has come up meanwhile",
        "old logs": "of what runs in the background",
    }
    assert {kind: reason for kind, reason in reasons.items() if reason not in piles[kind].kept} == {}
    shutil.rmtree(foreign.parent)
    log.unlink()


def test_a_name_that_another_sweep_has_by_now_is_not_purged(race: Race) -> None:
    with pytest.raises(NotFound, match="another sweep is called fates by now"):
        remove_sweep(race.untidy.home, "fates", purge=True, experiment_id="0")


def test_gc_keeps_what_a_command_works_on(untidy: Untidy) -> None:
    untidy.ask(
        f"update public.experiments set lifecycle_stage = 'deleted', last_update_time = {AGO} where name = 'busy'"
    )
    untidy.ask(
        "update orch_ledger.sweeps set holder = 'somebody', heartbeat_at = clock_timestamp(), "
        f"holder_process = '{this_process()}' where name = 'busy'"
    )
    [(location,)] = untidy.ask("select artifact_location from public.experiments where name = 'busy'")
    just_made = make(Path(location.removeprefix("file://")) / ("c" * 32) / "artifacts" / "sweep.json")
    os.utime(just_made.parents[1], times=(1, 1))
    starting = untidy.runtime / f"orch-{os.getuid()}-0123456789"
    starting.mkdir()
    lines = untidy.tidy("--older-than", "0s")
    assert just_made.exists(), "its row may be on its way"
    assert starting.exists(), "another home's database may be about to put its socket there"
    line = lines["sweeps deleted in MLflow"]
    assert line["number"] == 0
    assert "in use by a command" in line["kept"]
    assert untidy.ask("select count(*) from public.experiments where name = 'busy'") == [(1,)]


@pytest.mark.parametrize("age", ["36501d", "99999999999999999999d", "1e999"])
def test_an_age_before_all_history_is_refused_with_what_can_be_written(age: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write (at most 36500d|a duration such as)"):
        gc.command.make_context("gc", ["--dry-run", "--older-than", age])
    assert gc.command.make_context("gc", ["--older-than", "36500d"]).params["older_than"] == 36_500 * DAY_S


def test_a_stopped_server_leaves_no_folder_for_its_socket(tmp_path: Path) -> None:
    home = Home(tmp_path / ".orch")
    embedded.ensure_running(home)
    folder = home.short_folder
    assert folder.is_dir()
    embedded.stop(home)
    assert not folder.exists()
