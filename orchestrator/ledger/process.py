"""Names a process so that nobody on its machine mistakes it for another. Asks no other machine, and ends no process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/pid")


def this_process() -> str:
    """`<boot id> <pid namespace> <pid> <start time>` of this process; empty on a system without /proc."""
    try:
        return f"{_machine()} {os.getpid()} {_start_time(os.getpid())}"
    except OSError:  # documented answer: nobody can tell it from another one, so only time tells whether it lives
        return ""


def is_gone(identity: str) -> bool:
    """True when the process ran where this one runs and does so no more. False also means: nobody here can know.

    Another container's process ids mean nothing here, nor do those from before a reboot of an unknown machine.
    """
    try:
        machine, pid, start_time = identity.rsplit(" ", 2)
        if machine != _machine():
            return False
        os.kill(int(pid), 0)
        return _start_time(int(pid)) not in (start_time, None)
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # another user's process; no /proc; an identity of an unknown kind
        return False


def process_name() -> str:
    """`<pid>@<host>`: what people see of a process."""
    return f"{os.getpid()}@{socket.gethostname()}"


def _machine() -> str:
    """The same text for all processes that see each other's ids, until the next boot."""
    return f"{BOOT_ID.read_text().strip()} {NAMESPACE.readlink()}"


def _start_time(pid: int) -> str | None:
    """In clock ticks since boot; `dead` for one that only waits to be buried, None where /proc hides it.

    Source: proc(5), fields 3 and 22 of /proc/<pid>/stat, counted behind the name, which may hold spaces and brackets.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return "dead" if fields[0] in "ZX" else fields[19]
