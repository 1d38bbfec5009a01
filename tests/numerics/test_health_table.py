"""Every planted bug is named, by a probe and by a check, on every seed; its healthy twin makes no alarm."""

from __future__ import annotations

import pytest

from benchmarks.health_table import BEGIN, CASES, DOCUMENT, END, NAMED_BY, SEEDS, TWIN_STEPS, row
from workloads.char_gpt.bugs import PLANTED as CHAR_BUGS
from workloads.moe_gpt.bugs import PLANTED as ROUTER_BUGS
from workloads.probes.catalogue import Thresholds


def test_all_twelve_bugs_are_in_the_table_over_five_seeds_beside_twins_in_which_patience_can_end():
    assert set(NAMED_BY) == {*CHAR_BUGS, *ROUTER_BUGS}
    assert len(NAMED_BY) == 12
    assert len(CASES) == 8 + 12
    assert len(SEEDS) == 5
    limits = Thresholds()
    longest = max(limits.router_patience, limits.clip_always_updates, limits.spike_window + limits.spike_new_level)
    assert longest < TWIN_STEPS


@pytest.mark.parametrize(("workload", "bug"), CASES)
def test_a_probe_and_a_check_name_the_bug_on_every_seed_and_its_twin_makes_no_alarm(workload: str, bug: str):
    found = row(workload, bug)
    assert [seed for seed, verdict in zip(SEEDS, found.probes, strict=True) if not verdict.names(bug)] == []
    assert [seed for seed, verdict in zip(SEEDS, found.checks, strict=True) if not verdict.names(bug)] == []
    assert [dict(verdict.alarms) for verdict in found.twins if verdict.alarms] == []
    assert "| " + " | ".join(found.cells()) + " |" in documented()  # else: make health-table


def test_the_document_holds_the_whole_table():
    assert {tuple(line.strip("| ").split(" | ")[:2]) for line in documented()} == {(bug, name) for name, bug in CASES}


def documented() -> list[str]:
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
