"""What is said of a trial by what it reported, in this attempt and the ones before."""

from __future__ import annotations

import math

from orchestrator.execution.job import Job
from orchestrator.execution.verdict import Verdict
from orchestrator.trial import Action, Decision, Failure, TrialState

COMPLETE = Decision(3, 15, None, Action.STOP, "complete: max_steps 15 is reached")
JOB = Job(1, 2, 3, 1, "run", "toy", {}, "loss", False, 1, 10, 0, "", more_metrics=("size",))


def test_an_attempt_that_goes_on_knows_what_was_reported_before_and_its_own_words_count_more() -> None:
    before, after = Verdict(JOB), Verdict(JOB)
    before.see(10, {"loss": math.inf, "size": 2.0})
    before.see(12, {"other": 1.0})
    after.recall(before.memory())
    assert (after.objective, after.more_objectives, after.last_step) == (math.inf, [2.0], 12)
    after.see(13, {"size": 3.0})
    after.recall(before.memory())
    assert (after.objective, after.more_objectives, after.last_step) == (math.inf, [3.0], 13)


def test_a_trial_that_is_complete_without_the_objective_failed_and_says_what_it_reported() -> None:
    verdict = Verdict(JOB)
    verdict.see(15, {"accuracy": 1.0, "size": 1.0})
    verdict.obey(COMPLETE)
    outcome = verdict.outcome(stopped=False)
    assert (outcome.state, outcome.failure) == (TrialState.FAILED, Failure.NO_OBJECTIVE)
    assert outcome.reason == "never reported 'loss'; it reported accuracy, size"


def test_a_trial_that_reported_the_objective_before_max_steps_is_stopped_there() -> None:
    verdict = Verdict(JOB)
    verdict.see(10, {"loss": 0.5})
    verdict.see(15, {})
    verdict.obey(COMPLETE)
    outcome = verdict.outcome(stopped=False)
    assert (outcome.state, outcome.objective, outcome.last_step) == (TrialState.STOPPED, 0.5, 15)


def test_a_reason_of_one_line_is_not_said_again_as_an_error() -> None:
    assert Verdict(JOB).failed("ran too long", Failure.TIMEOUT).error == ""
    assert Verdict(JOB).failed("two\nlines", Failure.TIMEOUT).error == "two\nlines"
