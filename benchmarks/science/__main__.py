"""Runs sweeps and writes docs/science.md: `make science`, or `python -m benchmarks.science NAME...` for some.

Sweeps that have run cost nothing again; Ctrl-C ends it after a sweep's own clean end, and the same command goes on.
Exits 1 if a figure that ought to agree differs or a sweep has not come to its end, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.science import runs
from benchmarks.science.document import Measured, Versions, document, kept_sections, question_of, section
from benchmarks.science.figure import Figure, is_failure, judge
from benchmarks.science.figures import FIGURES, LIMITS, SHOWN_BY_TESTS

DOCUMENT = runs.ROOT / "docs" / "science.md"
SWEEPS = list(dict.fromkeys(figure.sweep for figure in FIGURES if figure.sweep))
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    sections = kept_sections(asked.output.read_text()) if asked.output.exists() else {}
    failed: list[str] = []
    for sweep in asked.names or SWEEPS:
        print(f"\n{sweep}", flush=True)
        code = runs.run_sweep(sweep, *(["--inline"] if asked.inline else []))
        if code == INTERRUPTED:
            return INTERRUPTED
        if code:
            failed.append(f"{sweep}: orch sweep exits {code}")
        if code != 2:  # something has been trained
            sections[sweep], differing = read(sweep)
            failed += [f"{sweep}: {claim} differs" for claim in differing]
            write(asked.output, sections)
    write(asked.output, sections)
    print(f"\n{asked.output} is written", *failed, sep="\n")
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.science", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which sweeps: {', '.join(SWEEPS)}; default: all")
    parser.add_argument("--inline", action="store_true", help="train in one process, without Ray")
    parser.add_argument("-o", "--output", type=Path, default=DOCUMENT, help="the document; other sweeps' parts stay")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.names) - set(SWEEPS):
        parser.error(f"no published figure for {', '.join(sorted(unknown))}; there are: {', '.join(SWEEPS)}")
    return asked


def read(sweep: str) -> tuple[str, list[str]]:
    """Its section and the claims that ought to agree and do not."""
    figures = figures_of(sweep)
    measured = Measured(runs.describe_run(sweep), versions(), runs.measure(figures))
    judged = zip(figures, measured.values, strict=True)
    differing = [figure.claim for figure, values in judged if is_failure(figure, judge(figure, values))]
    return section(sweep, question_of(runs.sweep_file(sweep)), figures, measured), differing


def figures_of(sweep: str) -> list[Figure]:
    return [figure for figure in FIGURES if figure.sweep == sweep]


def write(path: Path, sections: dict[str, str]) -> None:
    """Every sweep has its part; the others say that they have not run."""
    whole = {sweep: sections.get(sweep) or _not_run(sweep) for sweep in SWEEPS}
    text = document(whole, SHOWN_BY_TESTS, figures_of(""), LIMITS)
    draft = path.with_suffix(".new")
    draft.write_text(text)
    os.replace(draft, path)


def _not_run(sweep: str) -> str:
    return section(sweep, question_of(runs.sweep_file(sweep)), figures_of(sweep), None)


def versions() -> Versions:
    return Versions(platform.python_version(), version("torch"), cpu_model())


def cpu_model() -> str:
    """As Linux names it; elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
