"""Every file in sweeps/ against its workload, and its head against what it runs. Trains nothing, opens no database."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.search import make_searcher
from orchestrator.spec import SweepSpec, parse_sweep, read_sweep_file
from orchestrator.workload import describe

FOLDER = Path(__file__).parents[2] / "sweeps"
FILES = sorted(FOLDER.glob("*.yaml"))
STABILITY = re.compile(r"\b(un)?stable\b|steadi|\bdiverge", re.IGNORECASE)
MIN_SEEDS = 5
"""The 95 % intervals of 0/3 and 3/3 overlap (to .56, from .44); those of 0/5 and 5/5 are apart (to .43, from .57)."""


def test_there_are_sweeps() -> None:
    assert FILES


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def spec(request: pytest.FixtureRequest) -> SweepSpec:
    path: Path = request.param
    return parse_sweep(read_sweep_file(path), str(path), describe)


def test_a_sweep_is_named_as_its_file(spec: SweepSpec) -> None:
    assert spec.name == Path(spec.file_name).stem


def test_it_runs_as_many_trials_as_its_head_says(spec: SweepSpec) -> None:
    said = re.search(r"^(\d+) trials\b", spec.description, re.MULTILINE)
    assert said, "no line begins with `N trials`"
    candidates = make_searcher(spec).ask([])
    assert candidates is not None
    assert len(candidates) == int(said[1])


def test_its_head_is_a_question_with_an_expected_answer_a_source_and_a_cost(spec: SweepSpec) -> None:
    question, *rest = spec.description.splitlines()
    assert question.endswith("?")
    for part in ("Expected", "Source: ", "Cost: "):
        assert any(line.startswith(part) for line in rest), f"no line begins with {part}"
    assert re.search(r"^Cost: .*\bCPU (seconds|minutes?)\b", spec.description, re.MULTILINE)


def test_a_claim_about_stability_has_a_rule_and_enough_seeds(spec: SweepSpec) -> None:
    if not STABILITY.search(spec.description):
        assert spec.unstable is None, "the head does not say which results are unstable"
        return
    assert spec.unstable is not None
    assert spec.seeds is not None
    assert len(spec.seeds) >= MIN_SEEDS
