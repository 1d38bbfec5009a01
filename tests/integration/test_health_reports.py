"""What `orch health`, `orch compare` and docs/sql.md tell of findings, against a small known database."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from orchestrator.errors import NotFound
from orchestrator.ledger import TrialRow
from orchestrator.reports.compare import compare
from orchestrator.reports.health import Found, found_in, found_in_words, health, telling
from orchestrator.trial import Finding, Severity, TrialState
from tests.conftest import ROOT
from tests.integration.test_views import Lab

INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
COLUMNS = {"bug": "text", "k": "bigint", "precision": "text", "seed": "bigint"}
AXES = ["bug", "k", "seed"]
DEAD = ("dead_router", ERROR)


@pytest.fixture(scope="module")
def lab(server_url: str, database_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The sweep `bugs`: bug x k x seed, eight trials; the wrong ones have an error, one of them diverged."""
    with database_on(server_url) as url:
        lab = Lab(url, tmp_path_factory.mktemp("artifacts"))
        spec = {"axes": AXES, "params": {axis: {"grid": []} for axis in AXES}, "show": []}
        sweep = lab.sweep("bugs", COLUMNS, "loss", **spec)
        lab.ledger.add_findings(sweep.id, [(None, None, Finding("router_ties", WARNING, "k=2: ties", "cast"))])
        for number in range(8):
            params = {"bug": ("none", "late")[number // 4], "k": 1 + number // 2 % 2, "seed": number % 2}
            trial = lab.begin(sweep, params, bug=params["bug"], k=params["k"])
            lab.log(trial, "loss", {0: 2.0, 10: 1.0})
            if params["bug"] == "late":
                found(lab, trial, ("loss_factor", ERROR), 7)
                found(lab, trial, ("loss_factor", ERROR), 3)
            if number in (1, 2):
                found(lab, trial, ("loss_spike", WARNING), 5)
            if number == 0:
                found(lab, trial, ("data_read", INFO), None)
            lab.end(trial, TrialState.DIVERGED if number == 7 else TrialState.FINISHED)
        lab.sweep("clean", COLUMNS, "loss", **spec)
        yield lab
        lab.connection.close()
        lab.engine.dispose()


def found(lab: Lab, trial: TrialRow, what: tuple[str, Severity], step: int | None) -> None:
    finding = Finding(*what, f"{what[0]} at {step}", "mend it", step, 40.0, 0.01)
    lab.ledger.add_findings(trial.sweep_id, [(trial.id, 1, finding)])


def asking(lab: Lab) -> Any:
    def query(text: str, values: Sequence[Any] = ()) -> tuple[list[str], list[tuple[Any, ...]]]:
        cursor = lab.connection.execute(text, values)
        return [column.name for column in cursor.description or ()], cursor.fetchall()

    return query


def rows(lab: Lab, name: str, at_least: Severity = INFO) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in health(asking(lab), name, at_least).rows]


# A sweep


def test_a_sweep_shows_each_check_once_worst_first_with_its_first_finding_and_its_cells(lab: Lab) -> None:
    table = health(asking(lab), "bugs")
    assert table.title == "bugs: 2 of 8 trials are healthy, 2 warning, 3 suspect, 1 diverged"
    assert rows(lab, "bugs") == [
        ("error", "loss_factor", "4/8", 4, 3, "all with bug=late", "loss_factor at 3", "mend it"),
        ("warning", "loss_spike", "2/8", 1, 5, None, "loss_spike at 5", "mend it"),
        ("warning", "router_ties", "preflight", None, None, None, "k=2: ties", "cast"),
        ("info", "data_read", "1/8", 0, None, None, "data_read at None", "mend it"),
    ]


def test_milder_findings_can_be_left_out(lab: Lab) -> None:
    assert [row[1] for row in rows(lab, "bugs", ERROR)] == ["loss_factor"]


def test_a_sweep_without_findings_says_so_in_a_sentence(lab: Lab) -> None:
    table = health(asking(lab), "clean")
    assert table.rows == []
    assert table.title == "clean: 0 of 0 trials are healthy; nothing was found"


def test_the_end_of_a_sweep_counts_checks_and_trials_by_severity(lab: Lab) -> None:
    everything = found_in(asking(lab), "bugs")
    assert found_in_words(everything) == (
        "1 error in 4 trials (loss_factor 4), "
        "2 warnings in 2 trials (loss_spike 2, router_ties in the preflight), 1 info in 1 trial (data_read 1)"
    )
    shared = [Found(ERROR, "no_gradient", (0, 1, 2)), Found(ERROR, "loss_factor", (2, 3))]
    assert found_in_words(shared) == "2 errors in 4 trials (no_gradient 3, loss_factor 2)"
    assert found_in_words([]) == ""


@pytest.mark.parametrize(
    ("affected", "others", "expected"),
    [
        ([{"a": 1, "b": 1}, {"a": 1, "b": 2}], [{"a": 2, "b": 1}], {"a": [1]}),
        ([{"a": 1, "b": 1}, {"a": 2, "b": 2}], [{"a": 3, "b": 1}], {"a": [1, 2]}),
        ([{"a": 1, "b": 1}], [{"a": 1, "b": 2}, {"a": 2, "b": 1}], {"a": [1], "b": [1]}),
        ([{"a": 1, "b": 1}], [{"a": 1, "b": 1}, {"a": 2, "b": 1}], {}),
        ([{"a": 1, "b": 1}, {"a": 2, "b": 2}], [{"a": 1, "b": 2}, {"a": 2, "b": 1}], {}),
        ([{"a": True, "b": 0}], [{"a": 1, "b": 0}], {"a": [True]}),
        ([{"a": 1, "b": 1}], [], {}),
    ],
)
def test_what_tells_the_affected_trials_from_the_others(
    affected: list[Mapping[str, Any]], others: list[Mapping[str, Any]], expected: Mapping[str, Any]
) -> None:
    assert telling(affected, others, ["a", "b"]) == expected


# A run


def test_a_run_shows_every_finding_in_the_order_of_steps_with_its_figures(lab: Lab) -> None:
    table = health(asking(lab), "bugs/6")
    assert [tuple(row) for row in table.rows] == [
        (step, "error", "loss_factor", 40.0, 0.01, f"loss_factor at {step}", "mend it") for step in (3, 7)
    ]
    assert table.title.startswith("bugs/6  bug=late k=2 seed=0  run ")
    assert table.title.endswith(": suspect")
    assert health(asking(lab), "bugs/3").title.endswith(": healthy; nothing was found")


def test_a_run_is_found_by_its_id_and_by_the_first_eight_characters_of_it(lab: Lab) -> None:
    [(run_id,)] = lab.ask("select run_id from orch.runs where sweep = 'bugs' and trial = 6")
    assert rows(lab, run_id) == rows(lab, run_id[:8]) == rows(lab, "bugs/6")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("bug", "did you mean bugs?"), ("bugs/8", "its 8 trials count from 0"), ("0123456789abcdef", "known: ")],
)
def test_an_unknown_name_gets_a_hint(lab: Lab, name: str, hint: str) -> None:
    with pytest.raises(NotFound, match=re.escape(hint)):
        health(asking(lab), name)


# Elsewhere


def test_compare_counts_suspect_trials_where_there_are_any(lab: Lab) -> None:
    table = compare(asking(lab), ["bugs"], ["bug"], None)
    assert [record["suspect"] for record in table.records()] == [0, 3]  # the fourth has diverged and is in no mean
    assert any("suspect" in note for note in table.notes)
    quiet = compare(asking(lab), ["clean"], None, None)
    assert "suspect" not in quiet.columns
    assert not any("suspect" in note for note in quiet.notes)


def test_the_question_about_routers_that_died_first_has_its_answer_in_one_query(lab: Lab) -> None:
    sweep = lab.sweep("routers", COLUMNS, "train/loss")
    losses = {0: 4.0, 10: 3.9, 20: 3.7, 30: math.nan}  # moved at 20: below 3.8
    for precision, dead_at, curve in (
        ("bf16", 10, losses),
        ("bf16", 20, losses),
        ("bf16-softmax", 30, losses),  # it had moved before
        ("bf16", 30, {0: math.inf, 10: 4.0, 30: -math.inf}),  # never moved: what is not finite is no movement
        ("fp32", 10, losses),
        ("bf16", None, losses),  # its router lives
    ):
        trial = lab.begin(sweep, {"precision": precision, "seed": len(lab.ledger.trials(sweep.id))})
        lab.log(trial, "train/loss", curve)
        if dead_at is not None:
            found(lab, trial, DEAD, dead_at)
            found(lab, trial, DEAD, dead_at + 1)
        lab.end(trial)
    text = (ROOT / "docs" / "sql.md").read_text()
    [query] = [one for one in re.findall(r"```sql\n(.*?)```", text, re.DOTALL) if "had a router that died" in one]
    lab.connection.execute("set search_path = orch")
    answer = lab.ask(query)
    lab.connection.execute("set search_path = public")
    assert [(sweep_name, trial, dead, moved) for sweep_name, trial, _, _, _, dead, moved in answer] == [
        ("routers", 0, 10, 20), ("routers", 1, 20, 20), ("routers", 3, 30, None),
    ]  # fmt: skip
