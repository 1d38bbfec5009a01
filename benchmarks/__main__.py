"""Runs every benchmark and prints its ratios: `make bench`, or `python -m benchmarks NAME...` for some."""

from __future__ import annotations

import importlib
import sys

NAMES = [
    "startup",
    "planning",
    "search",
    "bulk_writes",
    "orchestration",
    "driver_memory",
    "moe_layer",
    "char_gpt",
    "probes",
    "preflight",
    "load",
]


def main(names: list[str]) -> int:
    failed = []
    for name in names or NAMES:
        print(f"\n{name}", flush=True)
        for label, value, unit, target, met in importlib.import_module(f"benchmarks.{name}").run():
            mark = "" if met is None else ("ok" if met else "MISSED")
            print(f"  {label:<64} {value:>9.3f} {unit:<10} {target:<16} {mark}", flush=True)
            if met is False:
                failed.append(f"{name}: {label}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
