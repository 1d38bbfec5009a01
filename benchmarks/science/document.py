"""Writes figures, agreements and what was run as Markdown. Measures nothing and judges nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.science.figure import Agreement, Figure, ShownByTest, judge
from benchmarks.science.runs import SweepRun

HEAD = """\
# Do the published figures hold here?

Written by `make science` from real runs: it runs the sweeps, reads them with `orch sql` and fills in this page. Nothing
in the column "here" is written by hand. Claims, sources, bounds and reasons stand in `benchmarks/science/`.

{summary}

- **exact**: arithmetic or determinism, held tightly.
- **fitted**: the publication leaves the task or the measuring convention open, and one that gives its figures was
  searched for. A fit after a search is weaker than a reproduction.
- **open**: a claim that may well fail here, for the reason given; compared, and neither outcome is an error.
- **own**: found by a sweep here and published nowhere; held, so that a change is noticed.
- **cannot**: needs what is not here; where something comparable can be measured, it is shown.

Several values are shown as mean [lowest, highest]; what is accepted must hold for each of them.
CPU minutes are the training times of all trials added up, each on one core; a machine that does other things beside
makes them longer.
"""
NOT_RUN = "Not run yet."
TABLE = ["| claim | published | here | accepted | kind | agreement |", "|---|---|---|---|---|---|"]


@dataclass(frozen=True)
class Versions:
    """Of the machine that reads the figures, which for a sweep that ran earlier need not be the one that trained."""

    python: str
    torch: str
    cpu: str


@dataclass(frozen=True)
class Measured:
    run: SweepRun
    versions: Versions
    values: Sequence[Sequence[float]]  # in the order of the sweep's figures


def section(sweep: str, question: str, figures: Sequence[Figure], measured: Measured | None) -> str:
    """The part of one sweep, from its heading on."""
    found = measured.values if measured else [None] * len(figures)
    rows = [figure_row(figure, values) for figure, values in zip(figures, found, strict=True)]
    return "\n".join([f"## {question}", "", f"{link(sweep)} {_say_run(measured)}", "", *TABLE, *rows, ""])


def link(sweep: str) -> str:
    return f"[`sweeps/{sweep}.yaml`](../sweeps/{sweep}.yaml)"


def _say_run(measured: Measured | None) -> str:
    if measured is None:
        return f"- {NOT_RUN}"
    run, versions = measured.run, measured.versions
    fates = f"{run.trials} trials"
    fates += f", {run.diverged} of them diverged" if run.diverged else ""
    fates += f", {run.without_result} without a result" if run.without_result else ""
    read = f"read under Python {versions.python}, torch {versions.torch}, {versions.cpu}"
    return f"- {fates}; {number(run.cpu_minutes)} CPU minutes; ended {run.date} (UTC); {read}."


def figure_row(figure: Figure, values: Sequence[float] | None) -> str:
    agreement = judge(figure, values)
    said = f"{agreement}. {figure.note}" if figure.note else str(agreement)
    here = "" if values is None or not figure.query else spread(values, exactly=is_equality(figure))
    published = f"{figure.published} ({figure.source})" if figure.source else figure.published
    return _row(figure.claim, published, here, accepted(figure), figure.kind, said)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def spread(values: Sequence[float], exactly: bool = False) -> str:
    """Mean and range of the finite values, and how many are not."""
    finite = [value for value in values if math.isfinite(value)]
    lost = f"{len(values) - len(finite)} of {len(values)} not finite" if len(finite) < len(values) else ""
    if not finite:
        return lost or "no value"
    if min(finite) == max(finite):
        shown = number(finite[0], exactly)
    else:
        shown = f"{number(fmean(finite))} [{number(min(finite))}, {number(max(finite))}]"
    shown += f", n = {len(finite)}" if len(finite) > 1 else ""
    return f"{shown}; {lost}" if lost else shown


def is_equality(figure: Figure) -> bool:
    return figure.low is not None and figure.low == figure.high


def accepted(figure: Figure) -> str:
    if figure.low is None and figure.high is None:
        return "not asserted"
    low, high = ("" if bound is None else number(bound, exactly=True) for bound in (figure.low, figure.high))
    if low == high:
        return low
    return f"{low} to {high}" if low and high else f">= {low}" if low else f"<= {high}"


def number(value: float, exactly: bool = False) -> str:
    """Four significant digits; whole numbers, and all numbers with `exactly`, as they are."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    text = f"{value if exactly else float(f'{value:.4g}'):.10g}"
    return re.sub(r"e([+-])0?", lambda sign: "e-" if sign[1] == "-" else "e", text)


def kept_sections(text: str) -> dict[str, str]:
    """Sweep -> its section in an earlier document."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    found = [(re.match(r"## .*\n\n\[`sweeps/(\w+)\.yaml`\]", part), part) for part in parts]
    return {match[1]: f"{part.rstrip()}\n" for match, part in found if match}


def document(sections: Mapping[str, str], tested: Sequence[ShownByTest], beyond: Sequence[Figure], limits: str) -> str:
    """`beyond` are the figures that no sweep here could show."""
    counts = count_agreements(sections.values())
    counts[Agreement.CANNOT] += len(beyond)
    last = [
        "## What a test shows, since it is arithmetic on a few numbers",
        "",
        *("| claim | published | accepted | test |", "|---|---|---|---|"),
        *(_row(one.claim, f"{one.published} ({one.source})", one.accepted, f"`{one.test}`") for one in tested),
        "",
        "## What cannot be reproduced here, and why",
        "",
        limits.strip(),
        "",
        *("| claim | published | why not |", "|---|---|---|"),
        *(_row(one.claim, f"{one.published} ({one.source})", one.note) for one in beyond),
        "",
    ]
    return "\n".join([HEAD.format(summary=summary(counts)), *sections.values(), *last])


def count_agreements(sections: Iterable[str]) -> Counter[Agreement]:
    pattern = re.compile(rf"^\|.*\| ({'|'.join(Agreement)})(?:\. [^|]*)? \|$", re.MULTILINE)
    return Counter(Agreement(said) for text in sections for said in pattern.findall(text))


def summary(counts: Counter[Agreement]) -> str:
    parts = [f"{agreement}: {counts[agreement]}" for agreement in Agreement if counts[agreement]]
    return f"{counts.total()} figures. {'; '.join(parts)}."


def question_of(sweep_file: Path) -> str:
    """The first line of its head comment."""
    return sweep_file.read_text().split("\n", 1)[0].lstrip("# ")
