"""Published figures against sweeps: how agreement is judged, what is written, and that docs/science.md is not stale."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.science import __main__ as science
from benchmarks.science import runs
from benchmarks.science.document import accepted, figure_row, kept_sections, number, question_of, spread
from benchmarks.science.figure import Agreement, Figure, is_failure, judge
from benchmarks.science.figures import FIGURES, SHOWN_BY_TESTS
from tests.conftest import ROOT, Orch

NAN, INFINITY = float("nan"), float("inf")
BAND = Figure("topk", "a claim", "1.5", "somewhere", "exact", query="select 1", low=1, high=2)


@pytest.mark.parametrize(
    ("values", "agreement"),
    [
        ([1.0, 2.0], Agreement.AGREES),
        ([1.5, 2.1], Agreement.DIFFERS),
        ([0.9], Agreement.DIFFERS),
        ([1.5, NAN], Agreement.DIFFERS),  # one seed diverged
        ([INFINITY], Agreement.DIFFERS),
        ([], Agreement.DIFFERS),
        (None, Agreement.NOT_RUN),
    ],
    ids=str,
)
def test_a_figure_agrees_if_every_value_is_within_its_bounds(values: list[float] | None, agreement: Agreement) -> None:
    assert judge(BAND, values) == agreement
    assert is_failure(BAND, agreement) == (agreement == Agreement.DIFFERS)


def test_without_a_bound_infinity_and_nan_still_agree_with_nothing() -> None:
    unbounded = replace(BAND, low=1, high=None)
    assert judge(unbounded, [1e300]) == Agreement.AGREES
    assert {judge(unbounded, [value]) for value in (NAN, INFINITY)} == {Agreement.DIFFERS}


def test_an_open_figure_may_differ_and_one_that_cannot_be_reproduced_never_agrees() -> None:
    assert judge(replace(BAND, kind="open"), [3.0]) == Agreement.DIFFERS
    assert not is_failure(replace(BAND, kind="open"), Agreement.DIFFERS)
    assert judge(replace(BAND, kind="cannot"), [1.5]) == Agreement.CANNOT


def test_a_row_says_claim_source_value_bounds_and_reason() -> None:
    row = figure_row(replace(BAND, note="A reason."), [1.0, 3.0])
    assert row == "| a claim | 1.5 (somewhere) | 2 [1, 3], n = 2 | 1 to 2 | exact | differs. A reason. |"
    assert figure_row(BAND, None) == "| a claim | 1.5 (somewhere) |  | 1 to 2 | exact | not run |"


def test_numbers_have_four_digits_and_equalities_are_written_in_full() -> None:
    written = [number(value) for value in (124439808.0, 0.0, 7301.6, 5.2e-9, 0.21653, 12345.6, 2.5e-17, NAN)]
    assert written == ["124439808", "0", "7302", "5.2e-9", "0.2165", "12350", "2.5e-17", "nan"]
    assert number(497.759232, exactly=True) == "497.759232"
    assert accepted(replace(BAND, low=None)) == "<= 2"
    assert accepted(replace(BAND, high=None)) == ">= 1"
    assert accepted(replace(BAND, low=3.140625, high=3.140625)) == "3.140625"


def test_values_that_are_not_finite_are_counted_beside_the_others() -> None:
    assert spread([1.0, NAN, 3.0]) == "2 [1, 3], n = 2; 1 of 3 not finite"
    assert spread([NAN]) == "1 of 1 not finite"
    assert spread([]) == "no value"


def science_command(orch: Orch, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.science", "--inline", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=orch.env, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def written(orch: Orch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document after one quick sweep was run and read."""
    path = tmp_path_factory.mktemp("science") / "science.md"
    done = science_command(orch, "autograd", "-o", path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_a_sweep_that_ran_has_its_figures_and_the_others_say_that_they_did_not(written: Path) -> None:
    sections = kept_sections(written.read_text())
    assert list(sections) == science.SWEEPS
    own = sections.pop("autograd")
    assert own.startswith("## What does `=` in place of `+=` do")
    assert re.search(r"20 trials; \S+ CPU minutes; ended \d{4}-\d\d-\d\d \(UTC\); read under Python 3\.", own)
    assert "| Its gradient of a, with = | -6 (the essay on loss and gradients) | -6, n = 5 | -6 |" in own
    assert own.count("| agrees") == len(science.figures_of("autograd"))
    rows = [line for section in sections.values() for line in section.splitlines() if line.startswith("| ")]
    said = [line.rsplit(" | ", 1)[1] for line in rows if not line.startswith("| claim")]
    assert all(line.startswith(("not run", "not reproducible here")) for line in said)


def test_the_summary_counts_every_figure_once(written: Path) -> None:
    text = written.read_text()
    total = re.search(r"^(\d+) figures\. (.*)\.$", text, re.MULTILINE)
    assert total is not None
    counts = dict(part.rsplit(": ", 1) for part in total[2].split("; "))
    assert int(total[1]) == len(FIGURES) == sum(map(int, counts.values()))
    assert int(counts["agrees"]) == len(science.figures_of("autograd"))


def test_a_second_sweep_refreshes_its_own_rows_only(orch: Orch, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "science.md"
    path.write_text(written.read_text().replace("20 trials", "kept as it was: 20 trials"))
    done = science_command(orch, "ragged_windows", "-o", path)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = kept_sections(path.read_text())
    assert "kept as it was" in sections["autograd"]
    assert sections["ragged_windows"].count("| agrees") == len(science.figures_of("ragged_windows"))


def test_a_figure_that_ought_to_agree_and_differs_is_told_with_exit_1_and_what_ran_costs_nothing_again(
    orch: Orch, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(science, "FIGURES", [replace(one, low=8, high=None) for one in FIGURES if one.high == 7])
    monkeypatch.delenv("ORCH_DATABASE_URL", raising=False)
    monkeypatch.setenv("ORCH_HOME", orch.env["ORCH_HOME"])
    path = tmp_path / "science.md"
    assert science.main(["autograd", "-o", str(path)]) == 1
    assert "autograd: Nodes of relu(a b + c) a differs" in capfd.readouterr().out
    assert "| 7, n = 5 | >= 8 | exact | differs |" in path.read_text()
    assert orch.rows("select sum(attempts) as n from runs where sweep = 'autograd'") == [{"n": 20}]


def test_a_sweep_without_published_figures_is_refused_with_those_that_have_some(orch: Orch) -> None:
    done = science_command(orch, "autograd", "nonsense")
    assert done.returncode == 2
    assert "no published figure for nonsense; there are: zloss, " in done.stderr


def test_every_figure_names_a_sweep_that_is_there_and_a_query_or_a_reason() -> None:
    for figure in FIGURES:
        assert not figure.sweep or runs.sweep_file(figure.sweep).exists(), figure.sweep
        assert figure.query or figure.note, figure.claim
        assert figure.kind == "cannot" or (figure.low, figure.high) != (None, None), figure.claim
    claims = [(figure.sweep, figure.claim) for figure in FIGURES]
    assert len(set(claims)) == len(claims)


def test_every_test_that_is_said_to_show_a_figure_is_there() -> None:
    for shown in SHOWN_BY_TESTS:
        file, name = shown.test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), shown.test


def test_the_document_has_a_measured_row_for_every_figure() -> None:
    """If not: `make science`, or `python -m benchmarks.science NAME` for the sweep that has changed."""
    text = (ROOT / "docs" / "science.md").read_text()
    for figure in FIGURES:
        if figure.sweep:
            claim, published, _, bounds, kind, _ = figure_row(figure, None).strip("| ").split(" | ")
            pattern = rf"^\| {re.escape(claim)} \| {re.escape(published)} \| .* \| {re.escape(bounds)} \| {kind} \| "
            assert re.search(pattern, text, re.MULTILINE), f"{figure.sweep}: {claim}"
        else:
            assert f"| {figure.claim} | {figure.published} ({figure.source}) | {figure.note} |" in text
    assert Agreement.NOT_RUN not in text
    assert [sweep for sweep in science.SWEEPS if f"## {question_of(runs.sweep_file(sweep))}\n" not in text] == []


def test_make_science_runs_it() -> None:
    assert "science: $(READY)\n\t$(BIN)/python -m benchmarks.science\n" in (ROOT / "Makefile").read_text()
