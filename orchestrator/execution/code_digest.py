"""Names the source code of a workload, so that a state can say under which it was saved. Runs none of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from orchestrator.tracking.facts import folder_of
from orchestrator.workload import SHIPPED_PACKAGE

NUM_DIGITS = 12


@functools.cache
def code_digest(package: str, workload: type) -> str:
    """A digest of the Python files of a workload's top-level package, and of the engine's where it derives from that.

    Once a process: what is imported stays as it was, whatever happens to the files.
    """
    bases = {base.__module__.partition(".")[0] for base in workload.__mro__}
    digest = hashlib.sha256()
    for name in sorted({package, *({SHIPPED_PACKAGE} & bases)}):
        for path in sorted(_sources(name)):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:NUM_DIGITS]


def _sources(package: str) -> Iterator[Path]:
    """The files of a package, or the one file that it is. A folder below that is no package may hold anything."""
    folder = folder_of(package)
    if folder is None:
        return
    if folder.name != package and (single := folder / f"{package}.py").is_file():
        yield single
        return
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        yield from place.glob("*.py")
        waiting += [path.parent for path in place.glob("*/__init__.py")]
