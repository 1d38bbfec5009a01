"""Whether anything may be missing when a recorder went away, told by the names of journals; and how it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.ending import about_gone
from orchestrator.execution.job import Job
from orchestrator.execution.ray_tune.accounts import Accounts, Standing
from orchestrator.tracking.recorder import Gone, Remainder

WHOLE = Remainder(0, ())


def job(number: int, attempt: int = 1, first_step: int = 0) -> Job:
    named = {"run_id": "", "workload": "", "params": {}, "metric": "", "artifact_uri": ""}
    numbers = {"sweep_id": 1, "trial_id": 1, "log_every": 1, "checkpoint_every": 1, "started_at_ms": 0}
    return Job(number=number, attempt=attempt, first_step=first_step, stop_diverged=False, **named, **numbers)  # type: ignore[arg-type]


def standing(journal: str, *brought: str, is_clear: bool = False) -> Standing:
    return Standing(f"host of {journal}", f"/journals/{journal}", brought, is_clear, "", "")


@pytest.fixture
def accounts() -> Accounts:
    """Trial 3 was tried on the node `a`, whose recorder is silent since; `b` is well."""
    accounts = Accounts()
    accounts.heard("a", standing("a1"))
    accounts.heard("b", standing("b1"))
    accounts.ended(job(3), "a")
    return accounts


def test_a_silent_recorder_is_named_with_its_place_and_the_trials_it_may_not_have_written(accounts: Accounts) -> None:
    accounts.ended(job(5), "a")
    accounts.ended(job(4), "b")
    accounts.closed("b", WHOLE)
    assert accounts.missing("ab") == ["a"]
    [whole, lost] = accounts.remainders("ab")
    assert whole.is_empty
    assert lost == Remainder(0, (), gone=Gone("host of a1", "/journals/a1", (3, 5)))
    assert not lost.is_empty


def test_a_journal_that_any_recorder_brought_over_is_not_missed(accounts: Accounts) -> None:
    accounts.heard("c", standing("c1", "x", "a1"))  # the node is back: told while the sweep runs
    assert accounts.missing("abc") == []
    fresh = Accounts()
    fresh.heard("a", standing("a1"))
    fresh.ended(job(3), "a")
    fresh.closed("b", replace(WHOLE, brought=("a1",)))  # or at the end
    assert fresh.missing("ab") == []


def test_of_several_lives_of_a_recorder_the_last_ones_journal_must_have_been_brought_over(accounts: Accounts) -> None:
    accounts.heard("a", standing("a2", "a1"))
    assert accounts.missing("ab") == ["a"]
    accounts.brought_by_others(["a2"])
    assert accounts.missing("ab") == []


def test_an_earlier_lifes_journal_that_still_holds_something_is_said(accounts: Accounts) -> None:
    accounts.heard("a", standing("a2"))
    accounts.closed("a", replace(WHOLE, journal="a2", left=("a1", "b1", "of another command")))
    accounts.closed("b", replace(WHOLE, journal="b1", left=("a2",)))
    [*_, lost] = accounts.remainders("ab")
    assert lost.reason.endswith("the next sweep there writes them: a1")


def test_where_nothing_can_be_missing_nothing_is_said(accounts: Accounts) -> None:
    accounts.heard("a", standing("a1", is_clear=True))  # asked before trial 3 had ended
    assert accounts.missing("ab") == ["a"]
    accounts.heard("a", standing("a1", is_clear=True), ended=accounts.unstored("a"))
    assert accounts.missing("ab") == []
    accounts.ended(job(3, attempt=2), "a")
    accounts.began(job(3, attempt=3))  # from the start: all that is missing is measured anew
    assert accounts.missing("ab") == []
    accounts.ended(job(3, attempt=3), "a")
    accounts.began(job(3, attempt=4, first_step=20))  # from a state: what came before it is not
    assert accounts.missing("ab") == ["a"]
    assert accounts.missing("b") == []  # no attempt ended there


def test_an_attempt_that_ended_nobody_knows_where_may_have_ended_on_any_node(accounts: Accounts) -> None:
    accounts.ended(job(7), "")
    [first, second] = accounts.remainders("ab")
    assert first.gone is not None
    assert second.gone is not None
    assert (first.gone.trials, second.gone.trials) == ((3, 7), (7,))


def test_the_remark_says_where_whose_and_what_to_do() -> None:
    assert about_gone(Gone("node7", "/var/tmp/journal/node7~1~ab", (3, 5)), "zloss").splitlines() == [
        "the recorder on node7 is gone; points of trials 3, 5 may lie there unwritten, in /var/tmp/journal/node7~1~ab",
        "when node7 is back, the next sweep that uses it writes them; or type there: orch resume zloss",
        "if that folder is lost, train them again: orch resume zloss --trial 3 --trial 5",
    ]
