"""The files in which a trial's states are kept: whole or not there, and of this trial or not used."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orchestrator.execution.checkpoints import RunCheckpoint, first_step_of, forget, owner_of
from orchestrator.execution.job import Job
from orchestrator.execution.verdict import Verdict
from orchestrator.tracking.artifacts import checkpoint_folder
from orchestrator.trial import Finding, TrialState
from orchestrator.workload import WorkloadConfig


class Config(WorkloadConfig):
    steps: int = 100
    depth: int = 4


OWNER = owner_of("toy", Config())


@dataclass
class Notes:
    """A sink that remembers, in order, what it was asked."""

    stopping: bool = False
    calls: list[str] = field(default_factory=list)

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        raise AssertionError("a checkpoint reports nothing")

    def finding(self, job: Job, finding: Finding) -> None:
        self.calls.append(finding.message)

    def sync(self) -> None:
        self.calls.append("sync")


@dataclass
class Shelf:
    """One run's folder, and the next attempt at it."""

    job: Job
    notes: Notes = field(default_factory=Notes)
    verdict: Verdict = field(init=False)  # of the attempt begun last

    @property
    def folder(self) -> Path:
        folder = checkpoint_folder(self.job.artifact_uri)
        assert folder is not None
        return folder

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def attempt(self, owner: str = OWNER) -> RunCheckpoint:
        first_step = first_step_of(self.job.artifact_uri, owner)
        self.job = replace(self.job, attempt=self.job.attempt + 1, first_step=first_step)
        self.verdict = Verdict(self.job)
        self.notes.calls.clear()
        return RunCheckpoint(self.job, owner, self.notes, self.verdict)

    def save(self, *steps: int) -> None:
        checkpoint = self.attempt()
        for step in steps:
            checkpoint.save(step, b"state %d" % step)


@pytest.fixture(params=["0123456789abcdef0123456789abcdef/artifacts", "0123456789ab"])  # MLflow's way, and when long
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    uri = (tmp_path / "a lab" / str(request.param)).as_uri()
    return Shelf(Job(1, 2, 3, 0, "run", "toy", {}, "val/loss", False, 10, 10, 0, uri))


def test_the_state_saved_last_is_the_one_to_go_on_from(shelf: Shelf) -> None:
    assert shelf.attempt().load() is None
    shelf.save(10, 20, 25)
    assert first_step_of(shelf.job.artifact_uri, OWNER) == 26
    assert shelf.attempt().load() == b"state 25"
    assert shelf.notes.calls == []


def test_the_last_two_states_are_kept_whichever_attempt_wrote_them(shelf: Shelf) -> None:
    shelf.save(80, 90, 100)
    assert shelf.files == ["step-100.attempt-1", "step-90.attempt-1"]
    again = shelf.attempt()
    again.load()
    again.save(110, b"")
    assert shelf.files == ["step-100.attempt-1", "step-110.attempt-2"]
    again.save(110, b"said again")
    assert shelf.files == ["step-100.attempt-1", "step-110.attempt-2"]
    assert again.load() == b"said again"
    assert shelf.attempt().load() == b"said again"


def test_a_state_is_written_after_the_reports_before_it_are_safe(shelf: Shelf) -> None:
    class Watching(Notes):
        def sync(self) -> None:
            assert not shelf.folder.exists()
            super().sync()

    notes = Watching()
    RunCheckpoint(shelf.job, OWNER, notes, Verdict(shelf.job)).save(10, b"state")
    assert notes.calls == ["sync"]
    assert shelf.files == ["step-10.attempt-0"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason", "seen_by_its_size"),
    [
        (cut, "it was not written to its end", True),
        (flip, "its content is not what was written", False),
        (empty, "it is no checkpoint of this version of orch", True),
        (swap, "it cannot be read (Is a directory)", True),
    ],
)
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(
    shelf: Shelf, damage: Callable[[Path], None], reason: str, seen_by_its_size: bool
) -> None:
    shelf.save(10, 20)
    damage(shelf.folder / "step-20.attempt-1")
    assert first_step_of(shelf.job.artifact_uri, OWNER) == (11 if seen_by_its_size else 21)
    assert shelf.attempt().load() == b"state 10"
    assert shelf.notes.calls == [f"the checkpoint of step 20 is not used: {reason}"]


def test_without_a_sound_state_the_trial_begins_at_the_start(shelf: Shelf) -> None:
    shelf.save(10, 20)
    for step in (10, 20):
        cut(shelf.folder / f"step-{step}.attempt-1")
    assert first_step_of(shelf.job.artifact_uri, OWNER) == 0
    assert shelf.attempt().load() is None
    assert len(shelf.notes.calls) == 2


def test_a_state_of_another_config_or_workload_is_not_used(shelf: Shelf) -> None:
    shelf.save(10)
    for owner in (owner_of("toy", Config(depth=5)), owner_of("toy", Config(steps=200)), owner_of("tou", Config())):
        assert first_step_of(shelf.job.artifact_uri, owner) == 0
        assert shelf.attempt(owner).load() is None
        assert shelf.notes.calls == ["the checkpoint of step 10 is not used: it belongs to another workload or config"]
    other = shelf.attempt(owner_of("toy", Config(depth=5)))
    other.save(5, b"its own")  # the other config's state must not outlive it as the newer one
    assert shelf.files == ["step-5.attempt-5"]


def test_a_state_that_came_after_the_attempt_began_is_not_used(shelf: Shelf) -> None:
    earlier = shelf.attempt()
    earlier.save(10, b"state 10")
    late = shelf.attempt()
    earlier.save(20, b"state 20")  # its worker could not be reached to stop it
    assert late.load() == b"state 10"


def test_a_worker_that_outlives_its_attempt_leaves_the_states_and_drafts_of_the_next_one_alone(shelf: Shelf) -> None:
    earlier = shelf.attempt()
    earlier.save(10, b"old 10")
    later = shelf.attempt()
    later.save(12, b"new 12")
    draft = shelf.folder / ".step-15.attempt-2"
    draft.write_bytes(b"half")
    for step in (20, 30, 40):
        earlier.save(step, b"old %d" % step)
    assert draft.exists()
    assert first_step_of(shelf.job.artifact_uri, OWNER) == 13, "the later attempt's points go on from there"
    assert shelf.attempt().load() == b"new 12"


def test_what_a_killed_writer_left_is_no_state_and_goes_with_the_next(shelf: Shelf) -> None:
    shelf.save(10)
    (shelf.folder / ".step-20.attempt-1").write_bytes(b"half")
    assert shelf.attempt().load() == b"state 10"
    shelf.save(20)
    assert not [name for name in shelf.files if name.startswith(".")]


@pytest.mark.parametrize("metric", ["train/loss", "val/loss"])
def test_a_state_remembers_that_the_trial_had_diverged_by_then(shelf: Shelf, metric: str) -> None:
    checkpoint = shelf.attempt()
    shelf.verdict.see(9, {"train/loss": 1.0, "val/loss": 1.0})
    checkpoint.save(10, b"sound")
    shelf.verdict.see(12, {metric: math.nan})
    shelf.verdict.see(13, {metric: 1.0})
    checkpoint.save(20, b"diverged")
    shelf.attempt().load()
    shelf.verdict.see(30, {"val/loss": 1.0})
    outcome = shelf.verdict.outcome(stopped=False)
    assert (outcome.state, outcome.diverged_at) == (TrialState.DIVERGED, 12)
    assert outcome.reason == f"{metric} is nan at step 12"


def test_falling_back_to_a_state_before_the_divergence_forgets_it(shelf: Shelf) -> None:
    checkpoint = shelf.attempt()
    checkpoint.save(10, b"sound")
    shelf.verdict.see(12, {"train/loss": math.inf})
    checkpoint.save(20, b"diverged")
    flip(shelf.folder / "step-20.attempt-1")
    assert shelf.attempt().load() == b"sound"  # step 12 comes again
    shelf.verdict.see(12, {"val/loss": 1.0})
    assert shelf.verdict.outcome(stopped=False).state is TrialState.FINISHED


def test_a_full_disk_costs_a_warning_and_neither_the_trial_nor_the_state_before(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(10)
    checkpoint = shelf.attempt()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    checkpoint.save(20, b"state 20")
    assert shelf.notes.calls == ["sync", f"checkpoints cannot be kept in {shelf.folder}: No space left on device"]
    assert shelf.files == ["step-10.attempt-1"]


def test_a_checkpoint_is_due_at_every_nth_step(shelf: Shelf) -> None:
    checkpoint = shelf.attempt()
    assert [step for step in range(31) if checkpoint.due(step)] == [10, 20, 30]


def test_a_remote_store_keeps_none(shelf: Shelf) -> None:
    remote = Shelf(replace(shelf.job, artifact_uri="s3://bucket/lab/run/artifacts")).attempt()
    assert not remote.due(10)
    remote.save(10, b"state")
    assert remote.load() is None
    assert first_step_of("s3://bucket/lab/run/artifacts", OWNER) == 0
    forget("s3://bucket/lab/run/artifacts")


def test_forgetting_removes_the_states_and_not_the_artifacts(shelf: Shelf) -> None:
    shelf.save(10, 20)
    artifacts = shelf.folder.with_name(shelf.folder.name.removesuffix("-checkpoints"))
    artifacts.mkdir()
    forget(shelf.job.artifact_uri)
    assert not shelf.folder.exists()
    assert artifacts.exists()
    forget(shelf.job.artifact_uri)
