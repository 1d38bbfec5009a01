"""Starts one embedded PostgreSQL process and stops it when nobody has used it for a while.

Runs as `python -m orchestrator.database.keeper` in its own session, so that it and the server outlive the command that
needed them first. Decides neither where the data lie nor as whom the server runs, and creates nothing: `embedded` does.
Imports no more than it must before the server is up, since a person waits for that.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.locks import try_lock, wait_for_lock

SUPERUSER = "orchestrator"
PORT = 5432  # names the socket file; nothing listens on TCP
IDLE_STOP_S = 15 * 60.0
POLL_S = 15.0
START_TIMEOUT_S = 60.0  # recovery after a crash replays at most `max_wal_size`
STOP_TIMEOUT_S = 30.0
ORPHAN_WAIT_S = 5.0
READY = "ready"


@dataclass(frozen=True)
class EmbeddedServer:
    """A running server. `started_at` is in seconds since the epoch; `version` is PostgreSQL's major version."""

    pid: int
    version: str
    socket_folder: Path
    data_folder: Path
    started_at: float


@dataclass(frozen=True)
class Locks:
    """The files through which processes agree; a lock of a dead process is free again, whatever became of its pid.

    `start` is held while somebody starts or stops the server, `keeper` by the keeper for its lifetime, and `server` by
    every process of PostgreSQL (they inherit it), also in another container on this folder. `used` carries the time at
    which a command last asked for the server.
    """

    home: Path

    @property
    def start(self) -> Path:
        return self.home / "postgres.lock"

    @property
    def keeper(self) -> Path:
        return self.home / "postgres.keeper"

    @property
    def server(self) -> Path:
        return self.home / "postgres.server"

    @property
    def used(self) -> Path:
        return self.home / "postgres.used"


def find_server(data: Path) -> EmbeddedServer | None:
    """The server that has opened its socket on these data, from its pid file; None if there is none.

    A pid alone proves nothing after a reboot, and a copied folder brings a pid file that is not its own: the process
    must be called postgres and stand in exactly this folder.
    """
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        version = (data / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        return None
    if len(lines) < 8:  # it has just been created: the server is about to start, or died on the way
        return None
    pid, socket_folder = int(lines[0]), Path(lines[4])
    if not stands_in(pid, data):
        return None
    return EmbeddedServer(pid, version, socket_folder, data, float(lines[2]))


def is_ready(data: Path) -> bool:
    """True when the running server accepts connections, by the last line of its pid file."""
    if find_server(data) is None:
        return False
    try:
        return (data / "postmaster.pid").read_text().splitlines()[7].strip() == READY
    except (FileNotFoundError, IndexError):  # it stopped in between
        return False


def stands_in(pid: int, folder: Path) -> bool:
    """True if that process is a postgres whose working directory is `folder`, and not a deleted folder of that name."""
    try:
        process = psutil.Process(pid)
        place = f"/proc/{pid}/cwd" if sys.platform == "linux" else process.cwd()  # psutil hides that it was deleted
        return process.name().startswith("postgres") and os.path.samefile(place, folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied, PermissionError, FileNotFoundError):  # gone, or somebody else's
        return False


def displaced_servers(data: Path, socket_folder: Path) -> list[psutil.Process]:
    """Servers started on this path or socket whose folder was deleted or replaced under them, as by `rm -rf .orch`.

    Such a server holds the socket's name, and what it still writes may land in the new folder of the same path.
    Processes that see other file systems (containers) are not meant, whatever their command line says.
    """
    marks = (str(data), f'unix_socket_directories="{socket_folder}"')
    is_whole = (data / "PG_VERSION").exists()
    found = []
    for process in psutil.process_iter():
        try:
            meant = process.name().startswith("postgres") and any(mark in process.cmdline() for mark in marks)
            if meant and _sees_our_files(process.pid) and not (is_whole and stands_in(process.pid, data)):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended as we looked, or is somebody else's
            continue
    return found


def _sees_our_files(pid: int) -> bool:
    if sys.platform != "linux":
        return True
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except (FileNotFoundError, PermissionError):
        return False


def end_displaced(data: Path, socket_folder: Path, timeout_s: float = 10.0) -> bool:
    """Ends displaced servers with all their processes, without a last checkpoint. False if one survives."""
    family = [one for server in displaced_servers(data, socket_folder) for one in (server, *_children(server))]
    for ask in (signal.SIGQUIT, signal.SIGKILL):
        for process in family:
            with suppress(psutil.NoSuchProcess):  # the first to go takes others along
                process.send_signal(ask)
        _, family = psutil.wait_procs(family, timeout=timeout_s)
    return not family


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def stop_server(server: EmbeddedServer, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Ends all sessions and stops the server cleanly. False if it is still there after `timeout_s`."""
    if not stands_in(server.pid, server.data_folder):
        return True
    os.kill(server.pid, signal.SIGINT)
    return wait_for(lambda: not stands_in(server.pid, server.data_folder), timeout_s)


def remove_socket_folder(socket_folder: Path) -> None:
    """Removes the folder of a stopped server's socket. Hold the start lock: whoever starts a server makes it anew."""
    with suppress(OSError):  # a server that does not stop still has its socket there
        socket_folder.rmdir()


def wait_for(condition: Callable[[], bool], timeout_s: float, poll_s: float = 0.01) -> bool:
    """Asks until the answer is yes; False when `timeout_s` went by."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


class Keeper:
    """Watches one server for as long as it lives."""

    def __init__(self, home: Path, data: Path, idle_stop_s: float) -> None:
        self.locks = Locks(home)
        self.data = data
        self.secret = home / "secrets" / "postgres"
        self.idle_stop_s = idle_stop_s
        self.poll_s = min(POLL_S, idle_stop_s / 4)
        self.last_client_at = time.time()
        self.process: subprocess.Popen[bytes] | None = None
        self.home = home.stat() if home.exists() else None

    def start(self, command: Sequence[str], uid: int | None) -> str:
        """Starts the server unless it runs. Returns READY, or a line on what went wrong."""
        if find_server(self.data) is None:
            lock = self._lock_of_the_dead()
            if lock is None:
                return "another machine or container runs a server on this folder"
            _remove_marks_of_the_dead(self.data)
            self.process = _spawn(command, uid, lock)
            os.close(lock)  # from here on the lock lives and dies with PostgreSQL's processes
        wait_for(lambda: is_ready(self.data) or self._has_died(), START_TIMEOUT_S)
        if self._has_died():
            return "it ended at once"
        return READY if is_ready(self.data) else f"it is not ready after {START_TIMEOUT_S:.0f} s, but goes on starting"

    def watch(self) -> None:
        """Returns when the server has ended, by itself, by `orch down` or by us."""
        while (server := self._server()) is not None:
            try:
                psutil.Process(server.pid).wait(timeout=self.poll_s)
            except psutil.TimeoutExpired:
                self._stop_if_idle(server)
            except psutil.NoSuchProcess:
                return

    def stop(self) -> None:
        """Stops the server if it runs, even where its folder has been deleted under it."""
        server = self._server()
        if server is not None:
            stopped = stop_server(server)
        elif self.process is not None and not self._has_died():
            self.process.send_signal(signal.SIGQUIT)  # without its folder it cannot write a last checkpoint
            stopped = wait_for(self._has_died, STOP_TIMEOUT_S)
        else:
            return
        say("the server has stopped" if stopped else f"the server does not stop within {STOP_TIMEOUT_S:.0f} s")

    def _server(self) -> EmbeddedServer | None:
        """The server of our folder; None as well when another folder has taken our folder's place."""
        try:
            is_ours = self.home is not None and os.path.samestat(self.locks.home.stat(), self.home)
        except FileNotFoundError:
            return None
        return find_server(self.data) if is_ours else None

    def _stop_if_idle(self, server: EmbeddedServer) -> None:
        if self._is_in_use(server):
            self.last_client_at = time.time()
        if not self._idle_too_long():
            return
        lock = try_lock(self.locks.start)
        if lock is None:  # a command is asking for the server right now
            return
        try:
            if self._idle_too_long() and not self._is_in_use(server):
                say(f"no client for {self.idle_stop_s:.0f} s: stopping")
                self.stop()
                remove_socket_folder(server.socket_folder)
        finally:
            os.close(lock)

    def _idle_too_long(self) -> bool:
        asked_at = self.locks.used.stat().st_mtime if self.locks.used.exists() else 0.0
        return time.time() - max(self.last_client_at, asked_at) > self.idle_stop_s

    def _is_in_use(self, server: EmbeddedServer) -> bool:
        """True if a client other than ourselves is connected, or if nobody can tell."""
        import psycopg

        query = "select 1 from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
        try:
            with psycopg.connect(**login(server, self.secret, "postgres", "orch-keeper")) as connection:
                return connection.execute(query).fetchone() is not None
        except psycopg.OperationalError as error:  # full, restarting or stopping: certainly not idle
            say(f"cannot look for clients: {error}")
            return True

    def _has_died(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def _lock_of_the_dead(self) -> int | None:
        """The server lock, once the backends of a killed server have gone; they notice, but not inside a long query."""
        lock = wait_for_lock(self.locks.server, ORPHAN_WAIT_S)
        if lock is None:
            _end_orphans(self.data)
            lock = wait_for_lock(self.locks.server, ORPHAN_WAIT_S)
        return lock


def _remove_marks_of_the_dead(data: Path) -> None:
    """The pid file, and beside the socket the file that names the same pid. Hold the server lock: their owner is dead.

    PostgreSQL would take a killed server that nobody has reaped yet for a living one; some containers reap nobody.
    """
    pid_file = data / "postmaster.pid"
    lines = pid_file.read_text().splitlines() if pid_file.exists() else []
    if len(lines) > 4 and lines[4]:
        (Path(lines[4]) / f".s.PGSQL.{PORT}.lock").unlink(missing_ok=True)
    pid_file.unlink(missing_ok=True)


def login(server: EmbeddedServer, secret: Path, database: str, application_name: str) -> dict[str, Any]:
    """psycopg's arguments for the superuser; nothing is left to the PG* variables of the environment."""
    return {
        "host": str(server.socket_folder),
        "port": str(PORT),
        "user": SUPERUSER,
        "password": secret.read_text().strip(),
        "dbname": database,
        "application_name": application_name,
        "options": "-csearch_path=public",
        "connect_timeout": "10",
    }


def say(message: str) -> None:
    """Writes a line into the server's log, which is our standard error."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')} keeper [{os.getpid()}] {message}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Detaches, starts or finds the server, answers one line on `--ready-fd`, and watches until the server ends."""
    options = _parse(arguments)
    if os.fork():
        os._exit(0)  # our parent must not have us as a child: it would keep a zombie, or count us among its workers
    os.umask(0o077)
    keeper = Keeper(options.home, options.data, options.idle_stop_s)
    lock = wait_for_lock(keeper.locks.keeper, START_TIMEOUT_S, unless=lambda: is_ready(options.data))
    if lock is None:  # a command that died meanwhile had started another keeper
        _answer(options.ready_fd, READY if is_ready(options.data) else "another keeper is busy with it")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _answer(options.ready_fd, keeper.start(options.command, options.uid))
        keeper.watch()
    finally:
        keeper.stop()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="keeper")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--idle-stop-s", type=float, default=IDLE_STOP_S)
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--uid", type=int, default=None)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _answer(descriptor: int, line: str) -> None:
    try:
        os.write(descriptor, line.encode())
    except BrokenPipeError:  # whoever wanted the server has died; the next one will find it
        say("nobody waits for the answer any more")
    os.close(descriptor)


def become(uid: int | None) -> dict[str, Any]:
    """Arguments of `subprocess.Popen` for a child that runs as that user, or as ours."""
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def environment(**more: str) -> dict[str, str]:
    """Ours without libpq's variables, which PostgreSQL's programs would obey."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PG")} | more


def _spawn(command: Sequence[str], uid: int | None, lock: int) -> subprocess.Popen[bytes]:
    """PostgreSQL, in a session of its own and with the server lock in its hands."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=[lock],
        start_new_session=True,
        cwd="/",
        env=environment(),
        **become(uid),
    )


def _end_orphans(data: Path) -> None:
    """Ends the backends that a killed server left behind in the middle of a query."""
    for process in psutil.process_iter():
        if stands_in(process.pid, data):
            say(f"ending an orphaned backend, pid {process.pid}")
            os.kill(process.pid, signal.SIGQUIT)


if __name__ == "__main__":
    main()
