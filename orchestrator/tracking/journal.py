"""The append-only file queue in front of the database. Knows neither points nor Postgres, only JSON records.

One folder per recorder, held by a lock for as long as its process lives; inside it numbered segments, one record a
line: eight hexadecimal digits of CRC-32, a space, the JSON. A record counts as safe when the `append` that wrote it
has returned. Records are read back from where they were last known to be stored; a crash in between repeats some,
so whoever stores them must tolerate that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.settings import Settings
from orchestrator.tracking.power_cut import make_folder, sync_folder

SEGMENT_BYTES = 8 * 1024 * 1024
READ_BYTES = 512 * 1024
_SEGMENT_NAME = re.compile(r"(\d{10})\.journal")
_CURSOR = re.compile(rb"(\d{10}) (\d{15})\n")


def encode(record: Any) -> bytes:
    """One line of a segment. NaN and infinities are kept in Python's JSON dialect."""
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def decode(line: bytes) -> Any:
    """The record of a line. Raises ValueError for a line that was not written whole."""
    checksum, _, text = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or len(checksum) != 8 or int(checksum, 16) != zlib.crc32(text):
        raise ValueError("a damaged journal line")
    return json.loads(text)


def orphans(journal_dir: Path) -> list[Path]:
    """Folders of recorders of this host whose process is gone, oldest first.

    Another host's folders are left alone: a shared file system may not carry the lock between hosts.
    """
    if not journal_dir.is_dir():
        return []
    folders = [path for path in journal_dir.glob(f"{_host()}~*~*") if path.is_dir() and _is_free(path)]
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def is_abandoned(folder: Path) -> bool:
    """True for the folder of a recorder of this host whose process is gone."""
    return folder.name.startswith(f"{_host()}~") and _is_free(folder)


def abandoned_name() -> str:
    """A name under which a recorder of this host finds a journal that was brought here."""
    return f"{_host()}~0~{secrets.token_hex(4)}"


def backlog_of(folder: Path) -> int:
    """Bytes of a journal that are not known to be stored, looked at from outside: its recorder may be alive."""
    try:
        segments = _segments_in(folder)
    except FileNotFoundError:  # all of it is stored: whoever did that is removing it, or has
        return 0
    try:
        cursor = (folder / "cursor").read_bytes()
    except FileNotFoundError:  # it is just being made, or removed
        cursor = b""
    match = _CURSOR.fullmatch(cursor)
    number, offset = (int(match[1]), int(match[2])) if match else (0, 0)
    return sum(
        max(0, one.safe_bytes - (offset if one.number == number else 0)) for one in segments if one.number >= number
    )


def others_with_backlog(folder: Path) -> list[str]:
    """The names of the journals beside this one that hold something which is not known to be stored."""
    others = (path for path in folder.parent.glob("*~*~*") if path != folder)
    return [path.name for path in others if backlog_of(path)]


@dataclass
class _Segment:
    number: int
    path: Path
    safe_bytes: int = 0  # how much of it has been synced


@dataclass(frozen=True)
class _Position:
    segment: int
    offset: int


class Journal:
    """A locked folder of segments. One thread may append while another reads."""

    def __init__(self, folder: Path, lock: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder = folder
        self.num_damaged = 0  # lines that could not be read although others follow them
        self._num_damaged_unmarked = 0  # of these, the ones read since the last `mark_stored`
        self._lock = lock
        self._segment_bytes = segment_bytes
        self._guard = threading.Lock()  # for _segments and their safe_bytes
        self._segments = _segments_in(folder)
        self._next_number = self._segments[-1].number + 1 if self._segments else 1
        self._writing: int | None = None  # the descriptor of the last segment
        self._cursor_file = os.open(folder / "cursor", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._stored = self._saved_cursor()
        self._read_to = self._stored

    @classmethod
    def create(cls, journal_dir: Path, segment_bytes: int = SEGMENT_BYTES) -> Journal:
        """A new, empty journal of this process. Raises OSError when the folder cannot be written."""
        make_folder(journal_dir)
        folder = journal_dir / f"{_host()}~{os.getpid()}~{secrets.token_hex(4)}"
        draft = journal_dir / f".{folder.name}"  # nobody may see the folder before it is locked
        draft.mkdir(mode=0o700, parents=True)  # `orch gc` may have removed the empty parent in this very moment
        lock = _try_lock(draft)
        assert lock is not None, "a folder with a random name is ours alone"
        draft.rename(folder)
        sync_folder(journal_dir)
        return cls(folder, lock, segment_bytes)

    @classmethod
    def adopt(cls, folder: Path) -> Journal | None:
        """The journal of a dead recorder, or None if it is alive after all or somebody else adopted it first."""
        lock = _try_lock(folder)
        return None if lock is None else cls(folder, lock)

    def append(self, records: Sequence[Any]) -> None:
        """Writes the records and waits until they are on the disk.

        Raises OSError (no space, ...). Then all of them count as not written, and a later call may try them again.
        """
        if not records:
            return
        data = b"".join(map(encode, records))
        try:
            file = self._file_for_writing()
            _write_all(file, data)
            os.fdatasync(file)
        except OSError:
            self._abandon_segment()
            raise
        with self._guard:
            self._segments[-1].safe_bytes += len(data)

    def read(self, max_bytes: int = READ_BYTES) -> list[Any]:
        """The next records after those already read, about `max_bytes` of them; an empty list when there are none."""
        records, self._read_to, num_damaged = self._read_from(self._read_to, max_bytes)
        self._num_damaged_unmarked += num_damaged
        return records

    def rewind(self) -> None:
        """What was read since the last `mark_stored` will be read again."""
        self._read_to = self._stored
        self._num_damaged_unmarked = 0

    def mark_stored(self) -> None:
        """Everything read so far is in the database: forget it, and delete the segments it filled."""
        self._stored = self._read_to
        self.num_damaged += self._num_damaged_unmarked
        self._num_damaged_unmarked = 0
        self._save_cursor()
        with self._guard:
            done = [segment for segment in self._segments if segment.number < self._stored.segment]
            self._segments = self._segments[len(done) :]
        for segment in done:
            segment.path.unlink(missing_ok=True)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are safe on disk and not known to be stored yet."""
        with self._guard:
            sizes = {segment.number: segment.safe_bytes for segment in self._segments}
        return sum(sizes.values()) - (self._stored.offset if self._stored.segment in sizes else 0)

    def remaining(self) -> Iterator[Any]:
        """Every record not yet stored, without holding them all in memory and without moving what `read` gives next."""
        place = self._stored
        while self._segment_after(place) is not None:
            records, place, _ = self._read_from(place, READ_BYTES)
            yield from records

    def close(self) -> None:
        """Frees the lock. The folder goes when everything in it is stored; else it stays for the next recorder."""
        if self._writing is not None:
            os.close(self._writing)
        os.close(self._cursor_file)
        if self.backlog_bytes == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    # Writing

    def _file_for_writing(self) -> int:
        if self._writing is not None and self._segments[-1].safe_bytes >= self._segment_bytes:
            os.close(self._writing)
            self._writing = None
        if self._writing is None:
            segment = _Segment(self._next_number, self.folder / f"{self._next_number:010d}.journal")
            self._next_number += 1
            self._writing = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            sync_folder(self.folder)
            with self._guard:
                self._segments.append(segment)
        return self._writing

    def _abandon_segment(self) -> None:
        """After a failed write the segment's end is unknown: go on in a new one. Its safe part is still read."""
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
        with self._guard:
            if self._segments and self._segments[-1].safe_bytes == 0:
                self._segments.pop().path.unlink(missing_ok=True)

    # Reading

    def _read_from(self, place: _Position, max_bytes: int) -> tuple[list[Any], _Position, int]:
        """Records from `place` on, the place after them, and how many damaged lines lay among them."""
        records: list[Any] = []
        left, num_damaged = max_bytes, 0
        while left > 0 and (segment := self._segment_after(place)) is not None:
            offset = place.offset if place.segment == segment.number else 0
            lines = _whole_lines(segment, offset, left)
            place = _Position(segment.number, offset + sum(map(len, lines)))
            num_damaged += _decode_into(records, lines[:-1])
            if _decode_into(records, lines[-1:]) and place.offset < segment.safe_bytes:
                num_damaged += 1  # a killed writer's very last line may be torn: nobody was promised it
            left -= place.offset - offset
        return records, place, num_damaged

    def _segment_after(self, place: _Position) -> _Segment | None:
        """The segment that holds the first safe byte at or after `place`."""
        with self._guard:
            for segment in self._segments:
                start = place.offset if segment.number == place.segment else 0
                if segment.number >= place.segment and start < segment.safe_bytes:
                    return segment
        return None

    def _save_cursor(self) -> None:
        line = b"%010d %015d\n" % (self._stored.segment, self._stored.offset)
        with contextlib.suppress(OSError):  # it only spares the next recorder a repetition; a full disk may refuse it
            os.pwrite(self._cursor_file, line, 0)

    def _saved_cursor(self) -> _Position:
        match = _CURSOR.fullmatch(os.pread(self._cursor_file, 64, 0))
        first = self._segments[0].number if self._segments else self._next_number
        if match is None or int(match[1]) < first:
            return _Position(first, 0)
        return _Position(int(match[1]), int(match[2]))


def _segments_in(folder: Path) -> list[_Segment]:
    found = [(match, path) for path in folder.iterdir() if (match := _SEGMENT_NAME.fullmatch(path.name))]
    return sorted((_Segment(int(match[1]), path, path.stat().st_size) for match, path in found), key=lambda s: s.number)


def _whole_lines(segment: _Segment, offset: int, max_bytes: int) -> list[bytes]:
    """The lines from `offset` on; the one that `max_bytes` would cut is read to its end."""
    with open(segment.path, "rb") as file:
        file.seek(offset)
        data = file.read(min(max_bytes, segment.safe_bytes - offset))
        if not data.endswith(b"\n") and offset + len(data) < segment.safe_bytes:
            data += file.readline()
    lines = [line + b"\n" for line in data.split(b"\n")]  # not splitlines, which also cuts at a stray "\r"
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _decode_into(records: list[Any], lines: Sequence[bytes]) -> int:
    """Appends what the lines hold; returns how many could not be read."""
    num_damaged = 0
    for line in lines:
        try:
            records.append(decode(line))
        except ValueError:
            num_damaged += 1
    return num_damaged


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _host() -> str:
    return (Settings().journal_host or socket.gethostname()).replace("~", "-").replace("/", "-")


def _try_lock(folder: Path) -> int | None:
    """Holds the folder until the descriptor is closed or the process dies; None if somebody else holds it."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, PermissionError):  # just drained and deleted by another recorder, or another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if not (folder / "lock").exists():  # deleted between opening and locking
        os.close(descriptor)
        return None
    return descriptor


def _is_free(folder: Path) -> bool:
    lock = _try_lock(folder)
    if lock is None:
        return False
    os.close(lock)
    return True
