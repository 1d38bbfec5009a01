"""Locks that end with the process that holds them, whatever becomes of its number. Waits for nobody unless asked to.

They are the kernel's (flock): also between containers of one machine, and free again after a reboot.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """A file descriptor that holds the lock until it is closed, or None if somebody else holds it."""
    return _if_free(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def try_lock_folder(path: Path) -> int | None:
    """The same for a folder that is there; None as well when it is gone, or another user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    lock = _if_free(descriptor)
    if lock is not None and not path.exists():  # removed between opening and locking
        os.close(lock)
        return None
    return lock


def is_free(path: Path) -> bool:
    """True for a file or folder that nobody holds."""
    lock = try_lock_folder(path) if path.is_dir() else try_lock(path)
    if lock is not None:
        os.close(lock)
    return lock is not None


def wait_for_lock(path: Path, timeout_s: float, unless: Callable[[], bool] = lambda: False) -> int | None:
    """Like `try_lock`, again and again until `timeout_s` went by or `unless` comes true."""
    deadline = time.monotonic() + timeout_s
    while (descriptor := try_lock(path)) is None:
        if unless() or time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Waits for the lock and holds it. Yields its descriptor, for children that must hold it as well."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _if_free(descriptor: int) -> int | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
