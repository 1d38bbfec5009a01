"""What of this host a sweep needs: disks, limits, sockets, GPUs, packages. Looks only, and opens no database."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from orchestrator.places import why_unwritable
from orchestrator.settings import Home

FREE_BYTES_NEEDED = 1_000_000_000  # one sweep's journal, artifacts and WAL with room to spare
OPEN_FILES_NEEDED = 4096  # Ray's processes on this host: sockets, logs, shared memory
SHARED_BYTES_NEEDED = 200 * 1024 * 1024  # the object store of a local Ray
SOCKET_NAME_BYTES = 107
RAY_SOCKET = "/9999999/session_2026-01-01_00-00-00_000000_9999999/sockets/plasma_store"
DISTRIBUTION = "orch-sweeps"


class Line(NamedTuple):
    """One check. `state` is ok, note (works, but worth knowing) or wrong."""

    check: str
    state: str
    what: str
    remedy: str = ""


def disk_line(name: str, place: Path) -> Line:
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    if reason := why_unwritable(existing):
        return Line(name, "wrong", f"{existing} cannot be written: {reason}", "mend that, or name another folder")
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES_NEEDED:
        needed = f"a sweep wants {FREE_BYTES_NEEDED / 1e9:.0f} GB"
        return Line(name, "wrong", f"{free / 1e9:.2f} GB free at {existing}; {needed}", "orch gc --dry-run")
    return Line(name, "ok", f"{free / 1e9:.0f} GB free at {existing}")


def limit_lines(home: Home) -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_NEEDED
    yield Line(
        "open files",
        "ok" if is_enough else "note",
        f"{soft} allowed; Ray asks for {OPEN_FILES_NEEDED} or more",
        "" if is_enough else f"ulimit -n {OPEN_FILES_NEEDED if hard < 0 else min(hard, 65_536)}",
    )
    if (shared := Path("/dev/shm")).is_dir():
        free = shutil.disk_usage(shared).free
        remedy = "" if free >= SHARED_BYTES_NEEDED else "in a container: --shm-size=1g; Ray uses the disk until then"
        yield Line("/dev/shm", "note" if remedy else "ok", f"{free / 1e6:.0f} MB free; Ray wants 210 MB", remedy)
    longest = max(len(f"{home.short_folder}/.s.PGSQL.5432"), len(f"{home.short_folder}-ray{RAY_SOCKET}"))
    is_short = longest <= SOCKET_NAME_BYTES
    yield Line(
        "sockets",
        "ok" if is_short else "wrong",
        f"the longest name below {home.short_folder} has {longest} of {SOCKET_NAME_BYTES} bytes",
        "" if is_short else "set TMPDIR and XDG_RUNTIME_DIR to shorter folders",
    )


def device_line() -> Line:
    """The GPUs that the kernel shows, against what torch was built for. Imports no torch."""
    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Line("devices", "wrong", "torch is not installed", "pip install torch")
    text = (Path(spec.origin).parent / "version.py").read_text()
    built = re.search(r"^(?:cuda|hip|rocm)\b[^=]*= '([^']+)'", text, re.MULTILINE)
    torch = f"torch {version('torch')} built for {'GPUs (' + built[1] + ')' if built else 'CPUs only'}"
    if num_gpus and not built:
        remedy = "pip install a torch for GPUs; until then set resources.gpu: 0"
        return Line("devices", "note", f"{num_gpus} GPUs here, but {torch}", remedy)
    limit = "" if num_gpus else "; resources.gpu must be 0 on this host"
    return Line("devices", "ok", f"{num_gpus} GPUs, {os.cpu_count()} CPUs, {torch}{limit}")


def package_line() -> Line:
    """Versions of what we import, against what this distribution asks for."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return Line("packages", "note", f"{DISTRIBUTION} runs without being installed", "pip install .")
    wrong = []
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            if not one.specifier.contains(version(one.name), prereleases=True):
                wrong.append(f"{one.name} {version(one.name)} (wanted {one.specifier})")
        except PackageNotFoundError:
            wrong.append(f"{one.name} is missing")
    if wrong:
        return Line("packages", "note", ", ".join(wrong), "pip install --upgrade orch-sweeps")
    versions = ", ".join(f"{name} {version(name)}" for name in ("ray", "mlflow", "optuna", "torch"))
    return Line("packages", "ok", versions)
