"""Whether anything may be missing when a recorder went away, told by the names of journals; and how it is said."""

from __future__ import annotations

import pytest

from orchestrator.ending import about_gone
from orchestrator.execution.job import Job
from orchestrator.execution.ray_tune.accounts import Account, Accounts
from orchestrator.tracking.recorder import Gone, Unwritten

WHOLE = Unwritten(0, ())


def job(number: int, attempt: int = 1, first_step: int = 0) -> Job:
    named = {"run_id": "", "workload": "", "params": {}, "metric": "", "artifact_uri": ""}
    numbers = {"sweep_id": 1, "trial_id": 1, "log_every": 1, "checkpoint_every": 1, "started_at_ms": 0}
    return Job(number=number, attempt=attempt, first_step=first_step, stop_diverged=False, **named, **numbers)  # type: ignore[arg-type]


def account(journal: str, *brought: str, is_clear: bool = False) -> Account:
    return Account(f"host of {journal}", f"/journals/{journal}", brought, is_clear)


@pytest.fixture
def accounts() -> Accounts:
    """Trial 3 was tried on the node `a`, whose recorder is silent since; `b` is well."""
    accounts = Accounts()
    accounts.heard("a", account("a1"))
    accounts.heard("b", account("b1"))
    accounts.ended(job(3), "a")
    return accounts


def test_a_silent_recorder_is_named_with_its_place_and_the_trials_it_may_not_have_written(accounts: Accounts) -> None:
    accounts.ended(job(5), "a")
    accounts.ended(job(4), "b")
    accounts.closed("b", WHOLE)
    assert accounts.missing("ab") == ["a"]
    assert accounts.remainders("ab") == [WHOLE, Gone("host of a1", "/journals/a1", (3, 5))]
    assert [one.is_empty for one in accounts.remainders("ab")] == [True, False]


def test_a_journal_that_any_recorder_brought_over_is_not_missed(accounts: Accounts) -> None:
    accounts.heard("c", account("c1", "x", "a1"))  # the node is back: told while the sweep runs
    assert accounts.missing("abc") == []
    fresh = Accounts()
    fresh.heard("a", account("a1"))
    fresh.ended(job(3), "a")
    fresh.brought_by_others(["a1"])  # or by another command
    assert fresh.missing("ab") == []


def test_of_several_lives_of_a_recorder_that_is_gone_each_ones_journal_must_have_been_brought_over(
    accounts: Accounts,
) -> None:
    accounts.heard("a", account("a2"))
    accounts.brought_by_others(["a2"])
    assert accounts.remainders("a") == [Gone("host of a1", "/journals/a1", (3,))]
    accounts.heard("c", account("c1", "a1"))
    assert accounts.missing("abc") == []


def test_an_earlier_lifes_journal_that_still_holds_something_is_said_once(accounts: Accounts) -> None:
    accounts.heard("a", account("a2"))
    accounts.closed("a", WHOLE, left=["a1", "b1", "of another command"])
    accounts.closed("b", WHOLE, left=["a1", "a2"])  # in the same folder; `a` tells of its last journal itself
    [_, _, lost] = accounts.remainders("ab")
    assert isinstance(lost, Unwritten)
    assert lost.reason.endswith("the next sweep there writes them: a1")
    accounts.heard("b", account("b1", "a1"))  # it was at it when `a` looked
    assert accounts.remainders("ab") == [WHOLE, WHOLE]


def test_a_flawed_journal_that_a_later_life_emptied_is_told_by_its_numbers_only(accounts: Accounts) -> None:
    accounts.heard("a", account("a2"))  # not "brought": not all of it is in the database
    flawed = Unwritten(0, (), num_rejected=2)
    accounts.closed("a", flawed)
    assert accounts.remainders("a") == [flawed]


def test_a_silent_recorders_journal_that_another_one_sees_is_told_once_with_its_trials(accounts: Accounts) -> None:
    accounts.closed("b", WHOLE, left=["a1"])
    assert accounts.remainders("ab") == [WHOLE, Gone("host of a1", "/journals/a1", (3,))]


def test_where_nothing_can_be_missing_nothing_is_said(accounts: Accounts) -> None:
    accounts.heard("a", account("a1", is_clear=True))  # asked before trial 3 had ended
    assert accounts.missing("ab") == ["a"]
    accounts.heard("a", account("a1", is_clear=True), ended=accounts.unstored("a"))
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
    assert isinstance(first, Gone)
    assert isinstance(second, Gone)
    assert (first.trials, second.trials) == ((3, 7), (7,))


def test_a_recorder_that_never_answered_is_named_by_its_node(accounts: Accounts) -> None:
    accounts.ended(job(4), "0123456789")
    assert accounts.remainders(["0123456789"]) == [Gone("Ray's node 01234567", "its journal", (4,))]


def test_the_remark_says_where_whose_and_what_to_do() -> None:
    assert about_gone(Gone("node7", "/var/tmp/journal/node7~1~ab", (3, 5)), "zloss").splitlines() == [
        "the recorder on node7 is gone; points of trials 3, 5 may lie there unwritten, in /var/tmp/journal/node7~1~ab",
        "when node7 is back, the next sweep that uses it writes them; or type there: orch resume zloss",
        "if that folder is lost, train them again: orch resume zloss --trial 3 --trial 5",
    ]
