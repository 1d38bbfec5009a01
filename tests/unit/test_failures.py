"""Which failures are tried again, which are one error all over, and when a machine is to blame."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.errors import SpecError
from orchestrator.execution.failures import (
    BAD_NODE_TRIALS,
    Aftermath,
    Again,
    Machines,
    Streak,
    blames_device,
    explained,
    kind_of,
    signature,
    verdict_on,
)
from orchestrator.execution.job import Job
from orchestrator.execution.ray_tune.memory_kills import num_memory_kills
from orchestrator.execution.trials import Trials
from orchestrator.ledger.rows import TrialRow
from orchestrator.spec import parse_sweep
from orchestrator.spec.resolved import resolved_text
from orchestrator.spec.sweep_spec import Retries
from orchestrator.trial import Failure, Outcome, TrialState, in_words
from orchestrator.workload import describe
from workloads.engine.alone import Alone
from workloads.engine.devices import choose_device

DONE = Outcome(TrialState.FINISHED)
DEAD = Outcome(TrialState.FAILED, reason="the worker process died (killed, or a crash)", failure=Failure.WORKER_DEATH)
NO_MEMORY = Outcome(TrialState.FAILED, reason="MemoryError: ", failure=Failure.OUT_OF_MEMORY)


def job(number: int = 0, **more: Any) -> Job:
    settings: dict[str, Any] = {
        **{"sweep_id": 1, "trial_id": number, "number": number, "attempt": 1, "run_id": "", "workload": "w"},
        **{"params": {}, "metric": "loss", "stop_diverged": True, "log_every": 1, "checkpoint_every": 1},
        **{"started_at_ms": 0, "artifact_uri": ""},
    }
    return Job(**{**settings, **more})


def failed(error: BaseException) -> Outcome:
    """What `run_trial` makes of an exception."""
    text = "".join(traceback.format_exception(error))
    return Outcome(TrialState.FAILED, reason=in_words(error).split("\n")[0], error=text, failure=kind_of(error))


def raised(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except Exception as error:
        return failed(error)
    raise AssertionError("it was to fail")


def rows_missing(expected: int, found: int, path: str) -> None:
    raise ValueError(f"expected {expected} rows, found {found} in {path} at 0x{id(path):x}")


# --- out of memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(2**56, dtype=torch.uint8), lambda: bytearray(2**62)],  # no machine has 64 PB
    ids=["torch", "python"],
)
def test_a_real_allocation_that_is_too_large_is_out_of_memory(allocate: Callable[[], object]) -> None:
    outcome = raised(allocate)
    assert outcome.failure is Failure.OUT_OF_MEMORY, outcome.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Failure.OUT_OF_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            Failure.OUT_OF_MEMORY,
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Failure.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "No space left on device"), Failure.EXCEPTION),
        (ValueError("the memory of a CUDA out of memory"), Failure.EXCEPTION),  # words in somebody else's mouth
    ],
)
def test_memory_is_told_from_other_errors(error: BaseException, kind: Failure) -> None:
    assert kind_of(error) == kind


def test_out_of_memory_is_tried_again_once_alone_and_beyond_retries() -> None:
    assert verdict_on(NO_MEMORY, job(), 0, Retries(0)) is Again.ALONE
    assert verdict_on(NO_MEMORY, job(), 3, Retries(2)) is Again.ALONE
    assert verdict_on(NO_MEMORY, job(alone=True), 0, Retries(0)) is Again.NO
    assert verdict_on(NO_MEMORY, job(alone=True), 0, Retries(1)) is Again.RETRY


def test_the_last_word_of_a_trial_without_room_says_what_needs_less() -> None:
    said = explained(NO_MEMORY, job(alone=True, gpu_share=0.5)).reason
    assert said.startswith("out of memory, also with no other trial beside it; try a smaller batch_size")
    assert "larger resources.gpu" in said
    assert "resources.gpu" not in explained(NO_MEMORY, job(alone=True)).reason
    assert explained(NO_MEMORY, job()) == NO_MEMORY


@pytest.mark.parametrize(
    ("failure", "any_error", "again"),
    [
        (Failure.WORKER_DEATH, False, Again.RETRY),
        (Failure.TIMEOUT, False, Again.RETRY),
        (Failure.EXCEPTION, False, Again.NO),
        (Failure.EXCEPTION, True, Again.RETRY),
        (Failure.WORKER_START, False, Again.NO),
        (Failure.NO_OBJECTIVE, True, Again.NO),  # it will not report it the next time either
    ],
)
def test_retries_are_for_what_may_go_better(failure: Failure, any_error: bool, again: Again) -> None:
    outcome = Outcome(TrialState.FAILED, failure=failure)
    assert verdict_on(outcome, job(), 0, Retries(1, any_error)) is again
    assert verdict_on(outcome, job(), 1, Retries(1, any_error)) is Again.NO


def test_a_worker_that_dies_while_the_sweep_stops_leaves_its_trial_to_whoever_resumes_it() -> None:
    """A spot machine has two minutes: SIGTERM to the command, then its processes end one by one."""
    assert verdict_on(DEAD, job(), 0, Retries(0)) is Again.NO
    assert verdict_on(DEAD, job(), 0, Retries(0), stopping=True) is Again.RETRY
    assert verdict_on(NO_MEMORY, job(alone=True), 0, Retries(0), stopping=True) is Again.RETRY
    mistake = Outcome(TrialState.FAILED, failure=Failure.EXCEPTION)
    assert verdict_on(mistake, job(), 0, Retries(0), stopping=True) is Again.NO


def test_results_and_interruptions_are_not_tried_again() -> None:
    for state in (TrialState.FINISHED, TrialState.DIVERGED, TrialState.KILLED):
        assert verdict_on(Outcome(state), job(), 0, Retries(3, any_error=True)) is Again.NO


def test_the_kernels_count_of_memory_kills_is_read_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/box\n1:name=systemd:/\n0::/user/box\n")
    assert num_memory_kills(groups, tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert num_memory_kills(groups, tmp_path) == 4  # the root of the mount, as a container has it
    (tmp_path / "user" / "box").mkdir(parents=True)
    (tmp_path / "user" / "box" / "memory.events").write_text("oom 9\noom_kill 7\noom_group_kill 0\n")
    assert num_memory_kills(groups, tmp_path) == 7


# --- the same error all over ----------------------------------------------------------------------------------------


def test_an_error_keeps_its_signature_whatever_differs_between_trials() -> None:
    first = raised(lambda: rows_missing(128, 127, "/data/shard-0001/a.npy"))
    second = raised(lambda: rows_missing(64, -3, "/mnt/other/b.npy"))
    assert signature(first) == signature(second)
    assert signature(first) == (
        "ValueError: expected <n> rows, found <n> in <path> at <hex> (in test_failures.py, rows_missing)"
    )


@pytest.mark.parametrize(
    ("left", "right", "are_alike"),
    [
        ("lr=1e-3 at step 12", "lr=0.5 at step 900", True),
        ("see https://a.b/c?d=1", "see http://10.0.0.1:80/x", True),
        ("run 550e8400-e29b-41d4-a716-446655440000", "run 650e8400-e29b-41d4-a716-446655440001", True),
        ("hash deadbeef01", "hash 00c0ffee99", True),
        ("no val/loss", "no val/mse", False),  # a metric's name is no path
        ("layer3 has no gradient", "layer7 has no gradient", False),  # nor is a name's number a value
        ("mat1 and mat2", "mat1 and mat2 shapes", False),
    ],
)
def test_messages_are_alike_up_to_numbers_addresses_and_paths(left: str, right: str, are_alike: bool) -> None:
    one, other = (signature(Outcome(TrialState.FAILED, reason=text)) for text in (left, right))
    assert (one == other) is are_alike


def test_an_error_raised_elsewhere_is_another_one() -> None:
    def elsewhere() -> None:
        raise ValueError("expected 1 rows, found 1 in /a/b at 0x1")

    assert signature(raised(elsewhere)) != signature(raised(lambda: rows_missing(1, 1, "/a/b")))


def test_dead_workers_are_alike_whatever_ray_says_of_their_processes() -> None:
    other = replace(DEAD, error='The actor died: pid: 7\n  File "x.py", line 3, in f\nip: 10.0.0.1')
    assert signature(DEAD) == signature(other)


def test_a_streak_counts_each_trial_once_and_ends_with_any_other_ending() -> None:
    streak = Streak()
    for number in (3, 1, 1, 7):  # trial 1 failed, was resumed, and failed again
        streak = streak.after(number, DEAD)
    assert streak.trials == (3, 1, 7)
    assert streak.without([1]).trials == (3, 7)
    assert streak.after(8, NO_MEMORY).trials == (8,)
    for state in (TrialState.FINISHED, TrialState.DIVERGED, TrialState.STOPPED, TrialState.KILLED):
        assert streak.after(8, Outcome(state)).trials == ()


FILE = """
name: t
workload: moe_router
metric: val/mse
stop: {same_error: %s}
"""


@pytest.mark.parametrize(("written", "meant"), [("3", 3), ("off", None), ("null", None), ("1", 1)])
def test_a_file_says_how_many_trials_may_fail_alike(written: str, meant: int | None) -> None:
    spec = parse_sweep(FILE % written, "t.yaml", describe)
    assert spec.same_error == meant
    assert parse_sweep(resolved_text(spec), "t.yaml", describe).same_error == meant
    assert parse_sweep("name: t\nworkload: moe_router\nmetric: val/mse\n", "t.yaml", describe).same_error == 10


@pytest.mark.parametrize("written", ["0", "never", "1.5", "true", "[3]", "{trials: 3}"])
def test_what_is_no_number_of_trials_is_refused_at_its_line(written: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_sweep(FILE % written, "t.yaml", describe)
    assert re.search(r"t.yaml:5 +stop.same_error .*a whole number, at least 1, is needed; or off", str(refused.value))


# --- a machine on which trials die ----------------------------------------------------------------------------------


def on(node: str, outcome: Outcome = DEAD) -> Outcome:
    return replace(outcome, node=node)


def machines(*nodes: str) -> Machines:
    return Machines({node: f"10.0.0.{place}" for place, node in enumerate(nodes)})


def test_a_node_where_trials_die_in_a_row_is_avoided_and_gets_the_blame_for_all_of_them() -> None:
    seen = machines("a", "b")
    assert seen.blamed(job(0), on("a")) == []
    assert seen.blamed(job(1), on("a")) == []
    assert seen.blamed(job(1), on("a")) == []  # a retry: still two different trials
    assert seen.blamed(job(2), on("b", DONE)) == []
    blamed = seen.blamed(job(3), on("a"))
    assert [one.number for one, _ in blamed] == [0, 1, 1, 3]
    assert seen.avoided == {"a"}
    assert "node 10.0.0.0 (a) takes no more trials of this sweep: trials 0, 1, 3 failed" in seen.remark(blamed)
    assert [one.number for one, _ in seen.blamed(job(4), on("a"))] == [4]  # it was placed there before


def test_a_node_is_not_avoided_for_what_happens_everywhere_or_to_the_last_one() -> None:
    for nodes in (("a",), ("a", "b")):
        seen = machines(*nodes)
        for number in range(3 * BAD_NODE_TRIALS):
            assert seen.blamed(job(number), on(nodes[number % len(nodes)])) == []
    seen = machines("a", "b")
    for number in range(BAD_NODE_TRIALS):
        seen.blamed(job(number), on("a"))
    for number in range(3 * BAD_NODE_TRIALS):
        assert seen.blamed(job(number), on("b")) == []  # the last one left


def test_an_ending_of_the_trials_own_doing_acquits_its_node() -> None:
    seen = machines("a", "b")
    mistake = Outcome(TrialState.FAILED, reason="ValueError: x", failure=Failure.EXCEPTION)
    for number in range(4 * BAD_NODE_TRIALS):
        assert seen.blamed(job(number), on("a", mistake if number % BAD_NODE_TRIALS == 0 else DEAD)) == []


# --- what follows for the sweep -------------------------------------------------------------------------------------


def waiting(*numbers: int) -> Trials:
    empty: dict[str, Any] = dict.fromkeys(field.name for field in fields(TrialRow))
    known = {"state": TrialState.WAITING, "attempts": 0, "more_objectives": [], "alone": False}
    return Trials([TrialRow(**{**empty, **known, "number": number}) for number in numbers], num_planned=len(numbers))


def test_a_bad_node_gives_back_what_it_took_and_no_retry_is_lost_to_it() -> None:
    spec = parse_sweep(FILE % 2 + "retries: 1\n", "t.yaml", describe)
    trials = waiting(0, 1, 2)
    aftermath = Aftermath("t", spec, trials)
    aftermath.machines.hosts = {"a": "10.0.0.1", "b": "10.0.0.2"}

    def die(number: int, attempt: int) -> tuple[list[int], str]:
        """Which trials wait again, and why the sweep must end."""
        one = job(number, attempt=attempt)
        trials.begun(one)
        repeat = aftermath.repeat(one, on("a"), stopping=False)
        if repeat is None:
            trials.ended(number, DEAD, TrialState.FAILED)
            return [], aftermath.why_hopeless(one, on("a"))
        for other, outcome in repeat.attempts:
            trials.ended(other.number, outcome, TrialState.WAITING)
        return [other.number for other, _ in repeat.attempts], ""

    assert die(0, 1) == ([0], "")  # a retry, its only one
    assert die(0, 2) == ([], "")  # failed for good
    assert die(1, 1) == ([1], "")
    trials.begun(job(1, attempt=2))  # elsewhere; it goes on there
    assert die(2, 1) == ([0, 2], ""), "what has failed and what has just died, not what runs already"
    assert aftermath.machines.avoided == {"a"}
    for number in (0, 1):
        one = job(number, attempt=3)
        trials.begun(one)
        assert aftermath.repeat(one, on("b"), stopping=False) is not None, "a retry is left"


@pytest.mark.parametrize(
    ("words", "is_device"),
    [
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("AcceleratorError: CUDA error: device-side assert triggered", False),  # an index of the program's own
        ("RuntimeError: the metric CUDA/error is missing", False),
    ],
)
def test_a_device_that_gave_up_is_told_from_a_mistake_of_the_program(words: str, is_device: bool) -> None:
    assert blames_device(Outcome(TrialState.FAILED, reason=words, failure=Failure.EXCEPTION)) is is_device


# --- a share of a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "device", "fractions"),
    [(0.4, "cuda", [0.4]), (1.0, "cuda", []), (2.0, "cuda", []), (0.4, "cpu", []), (0.0, "cpu", [])],
)
def test_a_share_of_a_gpu_is_a_share_of_its_memory(
    share: float, device: str, fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for torch.cuda: there is no GPU here.

    One would still have to show that an allocation beyond the share raises torch.OutOfMemoryError, and that it is not
    undone by what the process did before.
    """
    asked: list[float] = []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(set_per_process_memory_fraction=asked.append))
    assert choose_device("auto", Alone(device=device, gpu_share=share)) == device
    assert asked == fractions


def test_the_training_loop_claims_its_share_before_it_has_data_or_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for torch.cuda, and a workload that ends as soon as it is asked for data."""
    from workloads.engine.training import Training

    order: list[Any] = []
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(set_per_process_memory_fraction=order.append))

    def data(config: Any, context: Any) -> None:
        order.append("data")
        raise StopIteration

    with pytest.raises(StopIteration):
        Training.begin(SimpleNamespace(data=data), SimpleNamespace(device="auto"), Alone(device="cuda", gpu_share=0.25))  # type: ignore[arg-type]
    assert order == [0.25, "data"]
