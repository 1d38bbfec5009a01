"""Reads what the user set in the environment: where `.orch` lies, which database, which cluster."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from orchestrator.errors import PlaceUnusable
from orchestrator.locks import is_free, try_lock_folder

HOME_NAME = ".orch"
# With these libpq notices within half a minute that a database across a network has vanished; local sockets need none.
LIVENESS: Mapping[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,  # milliseconds
}


class Settings(BaseSettings):
    """What the environment says. Secrets print as `***`."""

    model_config = SettingsConfigDict(env_prefix="ORCH_", env_ignore_empty=True, extra="ignore", frozen=True)

    home: Path | None = None
    database_url: SecretStr | None = None
    reader_url: SecretStr | None = None
    artifact_root: str | None = None
    journal_dir: Path | None = None
    journal_host: str | None = None  # containers that share one machine's journal folder, under changing names
    expected_database: str | None = None  # set by `orch ... --detach` for the job it submits
    ray_address: str | None = Field(None, validation_alias="RAY_ADDRESS")
    mlflow_tracking_uri: str | None = Field(None, validation_alias="MLFLOW_TRACKING_URI")
    s3_endpoint: str | None = Field(None, validation_alias="MLFLOW_S3_ENDPOINT_URL")


class Home:
    """The folder `.orch`: embedded database, artifacts, journal, logs, secrets. Created 0700 when first needed.

    Whatever makes or reads a folder or file of it raises PlaceUnusable when that is not possible.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def find(cls, settings: Settings, start: Path | None = None) -> Home:
        """The folder named by `--home` or ORCH_HOME, else the nearest `.orch` at or above `start`, else one to be."""
        if settings.home is not None:
            return cls(settings.home.expanduser().absolute())
        start = (start or Path.cwd()).absolute()
        for folder in (start, *start.parents):
            if (folder / HOME_NAME).is_dir():
                return cls(folder / HOME_NAME)
        return cls(start / HOME_NAME)

    def ensure(self) -> Home:
        """Makes the folder. One that others own or may write into is refused: they could have planted its secrets."""
        with _usable(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(self.path)
        return self

    def folder(self, name: str) -> Path:
        path = self.ensure().path / name
        with _usable(path):
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    def secret(self, name: str) -> str:
        """A password generated once and kept in `.orch/secrets/<name>` (0600)."""
        path = self.secret_file(name)
        with _usable(path):
            return path.read_text().strip()

    def secret_file(self, name: str) -> Path:
        """The file of a secret, made when it is missing. Safe for concurrent first calls."""
        path = self.folder("secrets") / name
        with _usable(path):
            _refuse_foreign(path.parent)
            if not path.exists():
                _write_secret(path)
            _refuse_foreign(path)
        return path

    def scratch(self) -> Path:
        """A private folder of this process with a short path; what dead processes left beside it is removed."""
        parent = self.short_folder.with_name(f"{self.short_folder.name}-ray")
        with _usable(parent):
            parent.mkdir(mode=0o700, exist_ok=True)
            seen = parent.lstat()  # the name can be guessed: a link, or somebody else's folder, is not followed
            if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "belongs to another user")
        for old in parent.iterdir():
            if old.name.isdigit() and is_free(old):
                shutil.rmtree(old, ignore_errors=True)
        mine = _new_folder(parent)
        while try_lock_folder(mine) is None:  # held until this process ends; another has just taken it for a dead one's
            mine = _new_folder(parent)
        return mine

    @cached_property
    def short_folder(self) -> Path:
        """A private folder with a short path for sockets, whose names may have at most 107 bytes."""
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:10]
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime and len(runtime) < 40 and os.path.isdir(runtime) and os.access(runtime, os.W_OK):
            return Path(runtime) / f"orch-{digest}"
        return (
            Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp") / f"orch-{os.getuid()}-{digest}"
        )


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlaceUnusable(
            f"{path}  cannot be used: {error.strerror}; mend that, or choose another folder with --home or ORCH_HOME"
        ) from error


def _new_folder(parent: Path) -> Path:
    path = parent / f"{secrets.randbelow(10**7)}"  # no process id: containers that share /tmp have the same ones
    path.mkdir(mode=0o700, parents=True)  # the last command to leave may have removed the parent
    return path


def _write_secret(path: Path) -> None:
    """A new random secret at `path`, whole or not at all, unless somebody else was faster."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # the first to link wins; nobody overwrites
            os.link(draft, path)
    finally:
        draft.unlink()


def _refuse_foreign(path: Path) -> None:
    seen = path.stat()
    if seen.st_uid != os.getuid():
        raise PermissionError(errno.EACCES, "belongs to another user; name a home of your own with --home or ORCH_HOME")
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EACCES, f"others may write into it; close it: chmod go-w {path}")


def artifact_root(settings: Settings, home: Home) -> str:
    """Where MLflow keeps artifacts: a URI, or a folder below `.orch`."""
    return settings.artifact_root or (home.ensure().path / "artifacts").as_uri()


def remote_journal_folder(settings: Settings) -> Path:
    """The journal on a node of a cluster, where no `.orch` need be."""
    return settings.journal_dir or Path(f"/var/tmp/orch-{os.getuid()}/journal")


def journal_folder(settings: Settings, home: Home) -> Path:
    return settings.journal_dir or home.ensure().path / "journal"
