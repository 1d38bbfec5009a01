"""What to make of a failed attempt: try it again or not, is it one error all over, is it the machine, what follows.

Pure: starts nothing, stores nothing, and knows no backend.
"""

from __future__ import annotations

import errno
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.execution.job import Job
from orchestrator.spec.sweep_spec import Retries, SweepSpec
from orchestrator.trial import Failure, Outcome, TrialState, in_words

if TYPE_CHECKING:  # a worker tells kinds of failure apart without the ledger
    from orchestrator.execution.trials import Trials

RETRYABLE = (Failure.WORKER_DEATH, Failure.OUT_OF_MEMORY, Failure.TIMEOUT)
OF_A_DYING_MACHINE = (Failure.WORKER_DEATH, Failure.WORKER_START, Failure.OUT_OF_MEMORY)
BAD_NODE_TRIALS = 3  # in a row on one node, while another node goes on
MAX_REASON = 500  # characters

# What the errors of torch (2.13) are called or say when memory was short; the orchestrator does not import torch.
MEMORY_NAMES = ("OutOfMemoryError",)
MEMORY_WORDS = re.compile(
    r"DefaultCPUAllocator: (can't|not enough)|CUDA out of memory|CUDA error: out of memory|"
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
# A failed assertion on the device is the program's own mistake: it fails everywhere alike.
DEVICE_WORDS = re.compile(
    r"CUDA error: (?!device-side assert|out of memory)|CUDA driver (?!version)|uncorrectable (ECC|NVLink) error|"
    r"(CUDNN|CUBLAS)_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR)|No CUDA GPUs are available"
)

FRAME = re.compile(r'^\s*File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)
VARYING = (
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (re.compile(r"\w+://[^\s'\")]+"), "<url>"),
    (re.compile(r"(?<![\w/])(?:~|\.{1,2})?(?:/[^\s/:'\",()]+)+/?"), "<path>"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"[-+]?(?<![a-zA-Z])\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE), "<n>"),
)


def kind_of(error: BaseException) -> Failure:
    """Out of memory is told apart from other exceptions, by type, name or words."""
    is_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ in MEMORY_NAMES
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and MEMORY_WORDS.search(in_words(error)) is not None)
    )
    return Failure.OUT_OF_MEMORY if is_memory else Failure.EXCEPTION


def blames_device(outcome: Outcome) -> bool:
    """True if a GPU gave up, rather than the program; the process that saw it can use it no more."""
    said = f"{outcome.reason}\n{outcome.error}"
    return outcome.failure is Failure.EXCEPTION and DEVICE_WORDS.search(said) is not None


def blames_node(outcome: Outcome) -> bool:
    """True if the machine may be at fault."""
    return outcome.failure in (Failure.WORKER_DEATH, Failure.WORKER_START) or blames_device(outcome)


# --- one more attempt? ----------------------------------------------------------------------------------------------


class Again(Enum):
    """What follows a failed attempt."""

    NO = auto()
    RETRY = auto()
    ALONE = auto()  # after all others, while no other trial trains


def verdict_on(outcome: Outcome, job: Job, num_failures: int, retries: Retries, stopping: bool = False) -> Again:
    """`num_failures`: earlier attempts of this command at the trial that counted as retries.

    `stopping`: the sweep ends, perhaps since its machine is taken away, and with it the workers one by one. That says
    nothing about their trials: whoever resumes the sweep tries them again.
    """
    if outcome.state is not TrialState.FAILED:
        return Again.NO
    if outcome.failure is Failure.OUT_OF_MEMORY and not job.alone:
        return Again.ALONE
    if stopping and outcome.failure in OF_A_DYING_MACHINE:
        return Again.RETRY
    if num_failures >= retries.count or outcome.failure is Failure.NO_OBJECTIVE:
        return Again.NO
    return Again.RETRY if retries.any_error or outcome.failure in RETRYABLE else Again.NO


def explained(outcome: Outcome, job: Job) -> Outcome:
    """The last word on a trial: one that had no room even alone is told what needs less of it."""
    if outcome.failure is not Failure.OUT_OF_MEMORY or not job.alone:
        return outcome
    less = "a smaller batch_size with more accumulation_steps, or checkpointing"
    less += ", or a larger resources.gpu" if 0 < job.gpu_share < 1 else ""
    reason = f"out of memory, also with no other trial beside it; try {less}: {outcome.reason}"
    return replace(outcome, reason=reason[:MAX_REASON])


# --- the same error all over ----------------------------------------------------------------------------------------


def signature(outcome: Outcome) -> str:
    """What tells this error from others: type, message and place, without what differs from trial to trial.

    `RuntimeError: expected <n> rows, found <n> (in data.py, batch)`.
    """
    text = outcome.reason or outcome.failure.value
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    frames = FRAME.findall(outcome.error) if outcome.failure is not Failure.WORKER_DEATH else []
    place = f" (in {Path(frames[-1][0]).name}, {frames[-1][1]})" if frames else ""
    return " ".join(text.split()) + place


@dataclass(frozen=True)
class Streak:
    """Trials that failed alike, in the order in which they ended, with nothing else in between."""

    signature: str = ""
    trials: tuple[int, ...] = ()

    def after(self, number: int, outcome: Outcome) -> Streak:
        """With the trial that has just ended for good."""
        if outcome.state is not TrialState.FAILED:
            return Streak()
        sign = signature(outcome)
        known = self.trials if sign == self.signature else ()
        return Streak(sign, known if number in known else (*known, number))

    def without(self, numbers: Iterable[int]) -> Streak:
        gone = set(numbers)
        return replace(self, trials=tuple(number for number in self.trials if number not in gone))

    def explanation(self, sweep: str, num_waiting: int) -> str:
        """Why the sweep stops here, and how to go on."""
        first = self.trials[0]
        left = f"; {num_waiting} more were not started" if num_waiting else ""
        return (
            f"stopped: {len(self.trials)} trials in a row failed alike{left}\n"
            f"  the error         {self.signature}\n"
            f"  first in          trial {first}; its traceback: orch logs {sweep} --trial {first}\n"
            f"  when it is mended orch resume {sweep} --failed\n"
            "  stop: {same_error: off} in the sweep file goes on whatever fails"
        )


# --- a machine on which trials die ----------------------------------------------------------------------------------

Attempted = tuple[Job, Outcome]


@dataclass
class Machines:
    """Which nodes end trials that other nodes do not. Knows nothing as long as it is told of fewer than two."""

    hosts: Mapping[str, str] = field(default_factory=dict)  # node id -> address, of all that can take a trial
    avoided: frozenset[str] = frozenset()
    _failed: defaultdict[str, list[Attempted]] = field(default_factory=lambda: defaultdict(list))  # since it did well

    def blamed(self, job: Job, outcome: Outcome) -> list[Attempted]:
        """The attempts, this one last, that are the node's fault rather than their trials'; empty: none is.

        A node is avoided once `BAD_NODE_TRIALS` different trials in a row have failed there while another one failed
        none.
        """
        node = outcome.node
        if not blames_node(outcome):
            self._failed[node].clear()
            return []
        if node in self.avoided:
            return [(job, outcome)]
        self._failed[node].append((job, outcome))
        is_bad = len({job.number for job, _ in self._failed[node]}) >= BAD_NODE_TRIALS
        if not is_bad or not any(not self._failed[other] for other in self._others(node)):
            return []
        self.avoided |= {node}
        return self._failed.pop(node)

    def _others(self, node: str) -> set[str]:
        return set(self.hosts) - self.avoided - {node} if node in self.hosts else set()

    def remark(self, blamed: Sequence[Attempted]) -> str:
        """For the person, when a node begins to be avoided."""
        numbers = ", ".join(str(number) for number in sorted({job.number for job, _ in blamed}))
        node, reason = blamed[-1][1].node, blamed[-1][1].reason
        return (
            f"node {self.hosts.get(node, '')} ({node[:8]}) takes no more trials of this sweep: trials {numbers} failed "
            f"there one after another ({reason}) while other nodes went on; they run again elsewhere"
        )


# --- what follows for the sweep -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """Failed attempts whose trials are to be tried again."""

    attempts: Sequence[Attempted]
    alone: bool = False
    remark: str = ""  # for the person


class Aftermath:
    """What follows the ends of a sweep's attempts, as far as one command has seen them."""

    def __init__(self, sweep: str, spec: SweepSpec, trials: Trials) -> None:
        self.machines = Machines()
        self._sweep, self._spec, self._trials = sweep, spec, trials
        self._streak = Streak()
        self._num_failures: Counter[int] = Counter()  # that count as retries, by trial number

    def repeat(self, job: Job, outcome: Outcome, stopping: bool) -> Repeat | None:
        """None where the attempt was its trial's last one."""
        if not stopping and (blamed := self.machines.blamed(job, outcome)):
            return self._elsewhere(blamed)
        again = verdict_on(outcome, job, self._num_failures[job.number], self._spec.retries, stopping)
        if again is Again.NO:
            return None
        self._num_failures[job.number] += again is Again.RETRY
        return Repeat([(job, outcome)], alone=again is Again.ALONE)

    def _elsewhere(self, blamed: Sequence[Attempted]) -> Repeat:
        """What failed through its machine, closed or not; none of it counts as a retry or as one error."""
        stuck = [(job, outcome) for job, outcome in blamed if not self._is_tried_again(job)]
        self._num_failures.subtract(job.number for job, _ in blamed if self._is_tried_again(job))
        self._streak = self._streak.without(job.number for job, _ in blamed)
        return Repeat(stuck, remark=self.machines.remark(blamed) if len(blamed) > 1 else "")

    def _is_tried_again(self, job: Job) -> bool:
        """True if the trial waits already, or runs in a later attempt."""
        row = self._trials[job.number]
        return row.attempts != job.attempt or row.state not in (TrialState.RUNNING, TrialState.FAILED)

    def why_hopeless(self, job: Job, outcome: Outcome) -> str:
        """Why no other trial will do better than this one, which has just ended for good; empty where one may."""
        self._streak = self._streak.after(job.number, outcome)
        if outcome.failure is Failure.NO_OBJECTIVE and not self._trials.has_objective:
            return f"trial {job.number} ended, but it {outcome.reason}; set metric.name to one of these"
        if outcome.failure is Failure.NO_CHECKPOINT:
            return f"no trial of {job.workload} can go on without a saved state: see trial {job.number} above"
        is_common = self._spec.same_error is not None and len(self._streak.trials) >= self._spec.same_error
        if is_common and self._trials.are_to_come:
            return self._streak.explanation(self._sweep, self._trials.counts()[TrialState.WAITING])
        return ""
