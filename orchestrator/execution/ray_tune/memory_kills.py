"""How many processes the kernel has killed for want of memory, as this process's control group counts them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def num_memory_kills(groups: Path = GROUPS, mount: Path = MOUNT) -> int:
    """Of this group and, in version 2, of those inside it; 0 where nobody counts. Source: Documentation/cgroup-v2."""
    for file in _counters(groups, mount):
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:  # no such controller, or not for our eyes
            continue
        if found:
            return int(found[1])
    return 0


def _counters(groups: Path, mount: Path) -> Iterator[Path]:
    """The files that may hold the count. A container often sees its own group as the root of the mount."""
    lines = groups.read_text().splitlines() if groups.exists() else []
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    for folder, name, path in (
        (mount, "memory.events", paths.get("", "")),
        (mount / "memory", "memory.oom_control", paths.get("memory", "")),
    ):
        yield folder / path / name
        yield folder / name
