"""Writes everything a workspace holds into one file and makes a workspace of such a file. Changes nothing it reads.

A backup is taken while sweeps run. What a trial's state stands for is safe in the journal before the state is written,
so states are copied first, then journals, then the database at one moment, then artifacts: whatever a copied state has
behind it is in the copied journal or in the dump, and every artifact that the dump knows is there. A point that is in
both is written once. The manifest comes last: a file without it is torn.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from orchestrator import __version__, ledger
from orchestrator.database import dump, schema
from orchestrator.database.connection import Database, open_database
from orchestrator.errors import OrchError
from orchestrator.ledger.leftovers import strike_all
from orchestrator.settings import Home, Settings, artifact_root
from orchestrator.tracking import relocation
from orchestrator.tracking.artifacts import local_folder
from orchestrator.tracking.standing import mark_runs
from orchestrator.workspace import Workspace, find_home, open_workspace

FORMAT = 1
MANIFEST, SEAL, DUMP = "manifest.json", "manifest.sha256", "database.dump"
STATES, ARTIFACTS = "states", "artifacts"
JOURNALS = ("journal", "node-journal")  # of this host's sweeps, and of the cluster whose node it is
DRAFT = re.compile(r"\.step-\d+\.attempt-\d+|\..+\.part")  # of `tracking.shelf` and `tracking.artifacts`
CHUNK_BYTES = 1 << 20
DRAIN_TIMEOUT_S = 600.0
COUNTED = (
    *("orch_ledger.sweeps", "orch_ledger.trials", "orch_ledger.attempts", "orch_ledger.findings"),
    *("orch_ledger.decisions", "orch_ledger.logs", "public.runs", "public.metrics"),
)


class BackupUnusable(OrchError):
    """A file that is no whole backup, or none for this program; nothing was restored."""


@dataclass(frozen=True)
class Manifest:
    """What a backup holds. `files` maps each member to its SHA-256; `counts` each table to its rows."""

    format: int
    made_at: str
    orch: str
    mlflow: str
    mlflow_revision: str
    ledger_revision: str
    postgres: int
    identity: str
    artifact_root: str
    has_artifacts: bool
    longest_address: int  # characters behind the root
    counts: dict[str, int]
    files: dict[str, str]

    @property
    def contents(self) -> str:
        runs, points = self.counts["public.runs"], self.counts["public.metrics"]
        return f"{self.counts['orch_ledger.sweeps']} sweeps, {runs} runs, {points} points"


class _Packer:
    """A tar file that remembers what went into it."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.files: dict[str, str] = {}

    def add(self, path: Path, name: str) -> None:
        """Raises OSError, also when the file gets shorter as it is read."""
        with path.open("rb") as file:
            described = self._tar.gettarinfo(arcname=name, fileobj=file)
            described.uid = described.gid = 0
            described.uname = described.gname = ""
            reading = _Hashing(file)
            self._tar.addfile(described, reading)  # type: ignore[arg-type]
        self.files[name] = reading.digest.hexdigest()

    def add_folder(self, folder: Path, name: str, wanted: Callable[[Path], bool] = lambda _: True) -> None:
        """Every whole file below whose relative path is `wanted`."""
        for path in _whole_files(folder):
            relative = path.relative_to(folder)
            if wanted(relative):
                with contextlib.suppress(FileNotFoundError):  # a state that a newer one has just replaced
                    self.add(path, f"{name}/{relative.as_posix()}")


class _Hashing:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        self.digest.update(data)
        return data


def back_up(home: Path | None, target: Path, with_artifacts: bool) -> list[str]:
    """Writes the file and returns what to say about it. Raises OrchError, with no file made, where that fails."""
    if os.path.lexists(target):
        raise _taken(target)
    workspace = open_workspace(home)
    try:
        with _new_file(target) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            packer = _Packer(tar)
            manifest, remarks = _pack(workspace, packer, target.absolute().parent, with_artifacts)
            _seal(tar, manifest)
    except FileExistsError as error:
        raise _taken(target) from error
    except OSError as error:
        raise BackupUnusable(
            f"{error.filename or target}  {error.strerror or error}; no backup was made, mend that and run it again"
        ) from error
    kept = f"{target}  {manifest.contents}, {len(manifest.files)} files, {target.stat().st_size / 1e6:.1f} MB"
    return [kept, *remarks, f"restore it: orch --home NEW_FOLDER restore {target}"]


def _taken(target: Path) -> BackupUnusable:
    return BackupUnusable(f"{target}  exists already, and a backup overwrites nothing; choose a new name")


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[IO[bytes]]:
    """A file for our eyes only, under its name, whole and on the disk, when the block has ended, never otherwise.

    Raises FileExistsError where that name is somebody else's by then.
    """
    draft = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o600))  # it is ours now. No hard link: a stick has none
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _pack(workspace: Workspace, packer: _Packer, scratch: Path, with_artifacts: bool) -> tuple[Manifest, list[str]]:
    root = artifact_root(workspace.settings, workspace.home).rstrip("/")
    folders, remarks = _artifact_folders(workspace, root) if with_artifacts else ([], ["artifacts were left out"])
    base = local_folder(root)
    for folder in folders:
        packer.add_folder(folder, f"{STATES}/{folder.relative_to(base or folder)}", _is_state)
    for folder, name in zip(workspace.journals, JOURNALS, strict=False):  # one where both are the same
        packer.add_folder(folder, name)
    with dump.snapshot(workspace.database) as (connection, moment), tempfile.TemporaryDirectory(dir=scratch) as draft:
        dump.dump(workspace.database, connection, moment, Path(draft, DUMP))
        packer.add(Path(draft, DUMP), DUMP)
        found = schema.look_quickly(connection)
        counts = {table: dump.count_rows(connection, table) for table in COUNTED}
        longest = relocation.longest_below(connection, root)
        postgres = connection.info.server_version // 10_000
    if with_artifacts:
        for folder in _artifact_folders(workspace, root)[0]:  # asked again: what the dump knows
            place = f"{ARTIFACTS}/{folder.relative_to(base or folder)}"
            packer.add_folder(folder, place, lambda path: not _is_state(path))
    manifest = Manifest(
        format=FORMAT,
        made_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        orch=__version__,
        mlflow=version("mlflow"),
        mlflow_revision=str(found.revision),
        ledger_revision=ledger.HEAD,
        postgres=postgres,
        identity=workspace.identity,
        artifact_root=root,
        has_artifacts=with_artifacts and base is not None,
        longest_address=longest,
        counts=counts,
        files=packer.files,
    )
    return manifest, remarks


def _artifact_folders(workspace: Workspace, root: str) -> tuple[list[Path], list[str]]:
    """The folder of each experiment below the root, and remarks on artifacts that lie elsewhere."""
    with workspace.database.connect("orch backup") as connection:
        known = relocation.locations(connection)
    if local_folder(root) is None:
        return [], [f"artifacts lie in {root} and are not in the file: back that store up by its own means"]
    ours = [location for location in known if location.startswith(f"{root}/")]
    elsewhere = sorted(set(known) - set(ours))
    remarks = [f"not below {root} and not in the file: {', '.join(elsewhere)}"] if elsewhere else []
    return [folder for one in ours if (folder := local_folder(one)) is not None and folder.is_dir()], remarks


def _is_state(path: Path) -> bool:
    """Whether a file below an experiment's folder is a state of a trial, by its relative path."""
    return path.parts[0] == "population" or any(part.endswith("-checkpoints") for part in path.parts[:2])


def _whole_files(folder: Path) -> Iterator[Path]:
    """Regular files, links not followed; drafts of states and artifacts are left out."""
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(place, name)
            if not path.is_symlink() and path.is_file() and not DRAFT.fullmatch(name):
                yield path


def _seal(tar: tarfile.TarFile, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), indent=1).encode()
    for name, data in ((MANIFEST, text), (SEAL, hashlib.sha256(text).hexdigest().encode())):
        with tempfile.TemporaryFile() as file:
            described = tarfile.TarInfo(name)
            described.size, described.mode = len(data), 0o600
            file.write(data)
            file.seek(0)
            tar.addfile(described, file)


# Restoring


def restore(home: Path | None, source: Path) -> list[str]:
    """Fills the empty workspace of `home` (or the empty database of ORCH_DATABASE_URL) from a backup.

    Returns what to say about it. Raises OrchError, with nothing restored, for a file that is damaged or too new, for
    a database that holds something, and where artifacts are in the way.
    """
    with _opened(source) as tar:
        manifest = verified(tar, source)
        settings, place = find_home(home)
        new_root = _new_root(manifest, settings, place)
        database = open_database(settings, place)
        _refuse_filled(database)
        with tempfile.TemporaryDirectory(dir=place.ensure().path, prefix="restoring-") as scratch:
            draft = Path(scratch)
            _unpack(tar, draft)
            afterwards = relocation.moved(manifest.artifact_root, new_root) if manifest.has_artifacts else ""
            with _put_in_place(draft, local_folder(new_root) if manifest.has_artifacts else None):
                dump.load(database, draft / DUMP, afterwards)
            with database.connect("orch restore") as connection:  # before any command takes it for a sweep that runs
                strike_all(connection, f"it ran when the backup of {manifest.made_at} was taken", mark_runs)
            workspace = open_workspace(home)
            left = [line for name in JOURNALS for line in _write_journals(workspace, draft / name)]
    return [*_told(manifest, workspace, new_root), *left]


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source, mode="r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise BackupUnusable(f"{source}  is no whole backup of orch ({error}); nothing was restored") from error
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        if error.filename is None or Path(error.filename) != source:
            raise
        raise BackupUnusable(f"{source}  cannot be read: {error.strerror}") from error


def verified(tar: tarfile.TarFile, source: Path) -> Manifest:
    """The manifest, once every byte of the file has been held against it. Raises BackupUnusable."""
    members = {member.name: member for member in tar.getmembers()}
    for name in (MANIFEST, SEAL):
        if name not in members:
            raise BackupUnusable(f"{source}  is torn: its end is missing; nothing was restored, take another backup")
    text = _content(tar, members[MANIFEST])
    if hashlib.sha256(text).hexdigest().encode() != _content(tar, members[SEAL]):
        raise BackupUnusable(f"{source}  is damaged: its manifest is not what was written; nothing was restored")
    stated: dict[str, Any] = json.loads(text)
    if stated["format"] != FORMAT:
        raise BackupUnusable(
            f"{source}  was written by orch {stated['orch']} in format {stated['format']}, this orch reads {FORMAT}; "
            "install that version"
        )
    manifest = Manifest(**stated)
    _refuse_damaged(tar, members, manifest, source)
    _refuse_other_schema(manifest, source)
    return manifest


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read() if file else b""


def _refuse_damaged(
    tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], manifest: Manifest, source: Path
) -> None:
    strange = sorted((set(members) - {MANIFEST, SEAL}) ^ set(manifest.files))
    damaged = [
        name for name, digest in manifest.files.items() if name not in strange and _digest_of(tar, name) != digest
    ]
    if strange or damaged:
        names = [*strange, *damaged]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise BackupUnusable(f"{source}  is damaged: {', '.join(names[:3])}{more} not as written; nothing was restored")


def _digest_of(tar: tarfile.TarFile, name: str) -> str:
    file = tar.extractfile(name)
    digest = hashlib.sha256()
    while file and (data := file.read(CHUNK_BYTES)):
        digest.update(data)
    return digest.hexdigest()


def _refuse_other_schema(manifest: Manifest, source: Path) -> None:
    from orchestrator.tracking import mlflow_schema  # imports MLflow

    expected = mlflow_schema.expected_revision()
    if manifest.mlflow_revision != expected:
        raise BackupUnusable(
            f"{source}  holds MLflow's tables at revision {manifest.mlflow_revision}, the installed MLflow "
            f"{version('mlflow')} works with {expected}; nothing was restored\n"
            f"  pip install mlflow=={manifest.mlflow}, restore, then upgrade as docs/housekeeping.md says"
        )
    if manifest.ledger_revision > ledger.HEAD:
        raise BackupUnusable(
            f"{source}  was made by a newer orch ({manifest.orch}, ledger {manifest.ledger_revision}; this one knows "
            f"{ledger.HEAD}); install that version"
        )


def _new_root(manifest: Manifest, settings: Settings, home: Home) -> str:
    """Where the artifacts will lie. Raises BackupUnusable where they cannot."""
    new_root = artifact_root(settings, home).rstrip("/")
    if not manifest.has_artifacts:
        return manifest.artifact_root
    if local_folder(new_root) is None:
        raise BackupUnusable(
            f"the backup holds artifacts of a folder, and ORCH_ARTIFACT_ROOT is {new_root}; unset it or name a folder"
        )
    if len(new_root) + manifest.longest_address > relocation.RUN_ADDRESS_LENGTH:
        raise BackupUnusable(
            f"{new_root} makes addresses of {len(new_root) + manifest.longest_address} characters, and MLflow holds "
            f"{relocation.RUN_ADDRESS_LENGTH}; set ORCH_ARTIFACT_ROOT to a shorter folder"
        )
    return new_root


def _refuse_filled(database: Database) -> None:
    with database.connect("orch restore") as connection:
        found = schema.look(connection)
    if found.notes or found.revision or found.num_public_tables or found.foreign_schemas:
        raise BackupUnusable(
            f"{database}: holds tables already, and a backup is restored into an empty database only\n"
            "  an embedded one:  orch --home NEW_FOLDER restore FILE\n"
            f"  a given one:      {schema.createdb(database)}\n"
            "                    ORCH_DATABASE_URL=ITS_URL orch --home NEW_FOLDER restore FILE"
        )


def _unpack(tar: tarfile.TarFile, draft: Path) -> None:
    for member in tar.getmembers():
        tar.extract(member, draft, filter="data")  # no links, no devices, nothing outside


@contextlib.contextmanager
def _put_in_place(draft: Path, root: Path | None) -> Iterator[None]:
    """Moves artifacts and states below the root; takes them away again when the block fails."""
    moved: list[Path] = []
    try:
        for kind in (ARTIFACTS, STATES) if root is not None else ():
            for source in _whole_files(draft / kind):
                target = root / source.relative_to(draft / kind)  # type: ignore[operator]
                experiment = root / target.relative_to(root).parts[0]  # type: ignore[operator, arg-type]
                if experiment not in moved:
                    if experiment.exists():
                        raise BackupUnusable(f"{experiment}  is there already; restore into another home: orch --home")
                    moved.append(experiment)
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.move(source, target)
        yield
    except BaseException:
        for folder in moved:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_journals(workspace: Workspace, folder: Path) -> list[str]:
    """Writes what the copied journals hold; another journal of this host, though of equal name, is left alone."""
    from orchestrator.tracking.journal import abandoned_name
    from orchestrator.tracking.recorder import Recorder

    if not folder.is_dir():
        return []
    for one in [path for path in folder.iterdir() if path.is_dir()]:
        (one / "lock").unlink(missing_ok=True)
        one.rename(one.with_name(abandoned_name()))  # whichever host it was of: it is here now
    recorder = Recorder(workspace.database.connect, folder)
    recorder.drain(DRAIN_TIMEOUT_S)
    left = recorder.close(DRAIN_TIMEOUT_S)
    if left.is_empty:
        return []
    return [f"{left.points} points of the journal have no run here any more, {left.num_rejected} were refused"]


def _told(manifest: Manifest, workspace: Workspace, new_root: str) -> list[str]:
    return [
        f"restored {manifest.contents} of {manifest.made_at} into {workspace.database}",
        f"artifacts: {new_root}" if manifest.has_artifacts else f"artifacts stay in {manifest.artifact_root}",
        f"the database keeps its identity {manifest.identity}: journals of its hosts fit it. Where the old one lives "
        "on, give each ORCH_JOURNAL_DIRs of its own: a recorder writes what it finds there into its own database",
        "continue a sweep: orch resume SWEEP",
    ]
