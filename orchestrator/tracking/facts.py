"""What a run should say about the machine and the code it ran on. Reads; imports none of the libraries it names."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTIONS = {"torch": "torch", "ray": "ray", "mlflow": "mlflow", "orch": "orch-sweeps"}
GIT_TIMEOUT_S = 5.0


def system_facts(package: str | None = None) -> dict[str, str]:
    """Tags for a run: host, versions, processors, memory, and the git state of the repository that holds `package`.

    `package` is a top-level package or module that can be imported; it is not imported here.
    """
    facts = {
        "orch.host": socket.gethostname(),
        "orch.platform": platform.platform(),
        "orch.cpu_count": str(os.cpu_count() or 0),
        "orch.memory_bytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "orch.version.python": platform.python_version(),
    }
    for name, distribution in DISTRIBUTIONS.items():
        facts[f"orch.version.{name}"] = _version(distribution)
    folder = folder_of(package) if package else None
    return {**facts, **(git_facts(folder) if folder else {})}


def git_facts(folder: Path) -> dict[str, str]:
    """The commit of the repository that tracks `folder`, and whether tracked files differ from it.

    Empty when nothing there is tracked (an installed package inside somebody's repository, say) or git is missing.
    """
    if not _git(folder, "ls-files", "--", "."):
        return {}
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    dirty = "unknown" if status is None else ("true" if status else "false")
    return {"orch.git_commit": commit, "orch.git_dirty": dirty, "mlflow.source.git.commit": commit}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, stripped; None when it fails, is missing or takes longer than a run's start should."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def folder_of(package: str) -> Path | None:
    """Where a package's files lie, or the folder of the one file that a module is. Imports the parents only."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if spec.has_location and spec.origin:
        places.append(Path(spec.origin).parent)
    return next((place for place in places if place.is_dir()), None)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
