"""A folder of whole files beside a run's artifacts, on a disk or in a bucket. Knows nothing of what is in them.

A file is whole or not there. On a disk it is written under another name, flushed and renamed; a bucket shows an object
only when all of it has arrived. Buckets are reached through pyarrow, which Ray Tune brings; it takes the credentials
that boto3 or Google's libraries would take.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol
from urllib.parse import quote, urlsplit

from orchestrator.settings import Settings
from orchestrator.tracking.artifacts import checkpoint_folder
from orchestrator.tracking.power_cut import make_folder, sync_folder

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

BUCKETS = ("s3", "gs")


class Shelf(Protocol):
    """Where one run's states lie; `str(shelf)` names the place. Every method may raise OSError."""

    def names(self) -> list[str]:
        """Of the files there, drafts included; none where nothing was ever written."""

    def opened(self, name: str) -> contextlib.AbstractContextManager[tuple[BinaryIO, int]]:
        """The file for reading, and its size in bytes."""

    def write(self, name: str, content: list[bytes]) -> None:
        """Writes the parts as one file, whole or not at all, that outlives a power cut."""

    def remove(self, name: str) -> None:
        """Removes the file if it is there."""

    def clear(self) -> None:
        """Removes everything. What cannot be removed costs space, no more."""


def keeps_states(root: str) -> bool:
    """Whether trials with artifacts below `root` can keep checkpoints there."""
    return urlsplit(root).scheme in ("", "file", *BUCKETS)


def shelf_of(artifact_uri: str) -> Shelf | None:
    """The shelf beside a run's artifacts; None where the store is neither a disk nor a bucket that is known here."""
    if (folder := checkpoint_folder(artifact_uri)) is not None:
        return LocalShelf(folder)
    return BucketShelf(f"{artifact_uri.rstrip('/')}-checkpoints") if keeps_states(artifact_uri) else None


class LocalShelf:
    """A folder, made with the first file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        with (self.folder / name).open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size

    def write(self, name: str, content: list[bytes]) -> None:
        make_folder(self.folder)
        draft = self.folder / f".{name}"
        try:
            with draft.open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.folder / name)
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(self.folder)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class BucketShelf:
    """A common prefix of objects in a bucket."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._prefix = uri.partition("://")[2]  # as it stands: MLflow decodes nothing either

    @cached_property
    def _system(self) -> FileSystem:
        """Reached when first needed. MLflow's name for another S3 server than Amazon's counts here too."""
        from pyarrow.fs import FileSystem

        parts, endpoint = urlsplit(self._uri), urlsplit(Settings().s3_endpoint or "")
        other = f"?scheme={endpoint.scheme}&endpoint_override={quote(endpoint.netloc)}" if endpoint.netloc else ""
        return FileSystem.from_uri(f"{parts.scheme}://{parts.netloc}{other if parts.scheme == 's3' else ''}")[0]

    def __str__(self) -> str:
        return self._uri

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        found = self._system.get_file_info(FileSelector(self._prefix, allow_not_found=True))
        return [one.base_name for one in found if one.is_file]

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        with self._system.open_input_file(f"{self._prefix}/{name}") as file:
            yield BufferedReader(file), file.size()

    def write(self, name: str, content: list[bytes]) -> None:
        # One upload: were it cut short, the first line would say so, as it does for a torn file on a disk.
        with self._system.open_output_stream(f"{self._prefix}/{name}") as stream:
            for part in content:
                stream.write(part)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.delete_file(f"{self._prefix}/{name}")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._system.delete_dir(self._prefix)  # its content only would leave an empty object of that name
