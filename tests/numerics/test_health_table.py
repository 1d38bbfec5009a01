"""Every planted bug is named, by a probe and by a check, on every seed; its healthy twin makes no alarm."""

from __future__ import annotations

import pytest

from benchmarks.health_table import (
    BEGIN,
    CASES,
    DOCUMENT,
    END,
    FEW_STEPS,
    NAMED_BY,
    SEEDS,
    STEPS,
    checked,
    settings_of,
    steps_of,
    trained,
)
from workloads.char_gpt.bugs import PLANTED as CHAR_BUGS
from workloads.moe_gpt.bugs import PLANTED as ROUTER_BUGS

CHECKED_SEEDS = SEEDS[:1]  # `make health-table` goes through all five


def test_all_twelve_bugs_are_in_the_table():
    assert set(NAMED_BY) == {*CHAR_BUGS, *ROUTER_BUGS}
    assert len(NAMED_BY) == 12
    assert len(CASES) == 8 + 12


@pytest.mark.parametrize(("workload", "bug"), CASES)
def test_a_probe_names_the_bug_on_every_seed_and_its_twin_makes_no_alarm(workload: str, bug: str):
    needs = settings_of(bug)
    twin_steps = FEW_STEPS if needs else STEPS  # the common twin is trained once for all
    for seed in SEEDS:
        assert trained(workload, bug, needs, seed, steps_of(bug)).names(bug), f"seed {seed}"
        assert trained(workload, "none", needs, seed, twin_steps).alarms == {}, f"seed {seed}"


@pytest.mark.parametrize(("workload", "bug"), CASES)
def test_a_check_names_the_bug_before_it_trains_and_its_twin_makes_no_alarm(workload: str, bug: str):
    needs = settings_of(bug)
    for seed in CHECKED_SEEDS:
        assert checked(workload, bug, needs, seed).names(bug), f"seed {seed}"
        assert checked(workload, "none", needs, seed).alarms == {}, f"seed {seed}"


def test_the_document_holds_the_whole_table_and_no_miss():
    rows = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    found = {tuple(row.strip("| ").split(" | ")[:2]) for row in rows}
    assert found == {(bug, workload) for workload, bug in CASES}
    assert all(row.count("(5/5)") == 2 and row.endswith("| nothing |") for row in rows)
