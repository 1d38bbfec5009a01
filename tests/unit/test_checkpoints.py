"""The files in which a trial's states are kept: whole or not there, and of this trial or not used."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from orchestrator.execution import checkpoints
from orchestrator.execution.checkpoints import RunCheckpoint, Unusable, first_step_of, forget, keep_two, owner_of
from orchestrator.execution.job import Job
from orchestrator.execution.verdict import Verdict
from orchestrator.tracking.artifacts import checkpoint_folder
from orchestrator.tracking.shelf import LocalShelf
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

    def attempt(self, owner: str = OWNER, code: str = "") -> RunCheckpoint:
        first_step = first_step_of(self.job.artifact_uri, owner)
        self.job = replace(self.job, attempt=self.job.attempt + 1, first_step=first_step)
        self.verdict = Verdict(self.job)
        self.notes.calls.clear()
        return RunCheckpoint(self.job, owner, self.notes, self.verdict, lambda: code)

    def reported(self, checkpoint: RunCheckpoint, *losses: float) -> None:
        """Says a loss and saves, every ten steps from the attempt's first one on."""
        for number, loss in enumerate(losses, 1):
            step = self.job.first_step // 10 * 10 + 10 * number
            self.verdict.see(step, {"val/loss": loss})
            checkpoint.save(step, b"state %d" % step)

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


def misspell(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"reported"', b'"rfported"'))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason", "is_seen_at_once"),
    [
        (cut, "it was not written to its end", True),
        (flip, "its content is not what was written", False),
        (misspell, "its first line is not what was written", True),
        (empty, "it is no checkpoint of this version of orch", True),
        (swap, "it cannot be read (Is a directory)", True),
    ],
)
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(
    shelf: Shelf, damage: Callable[[Path], None], reason: str, is_seen_at_once: bool
) -> None:
    shelf.save(10, 20)
    damage(shelf.folder / "step-20.attempt-1")
    assert first_step_of(shelf.job.artifact_uri, OWNER) == (11 if is_seen_at_once else 21)
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


def test_a_store_that_does_not_list_its_files_is_asked_again_and_then_named(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket or a file server that is away for a moment: no trial is begun anew for that."""
    shelf.save(10)
    checkpoint, answers = shelf.attempt(), list[bool]()
    names = LocalShelf.names

    def sometimes(self: LocalShelf) -> list[str]:
        if not answers or answers.pop():
            return names(self)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints, "ASK_AGAIN_AFTER_S", (0.0, 0.0))
    monkeypatch.setattr(LocalShelf, "names", sometimes)
    answers[:] = [True, False, False]
    assert first_step_of(shelf.job.artifact_uri, OWNER) == 11
    answers[:] = [False] * 20
    with pytest.raises(Unusable, match=r"the states in .* cannot be listed \(Input/output error\)"):
        first_step_of(shelf.job.artifact_uri, OWNER)
    with pytest.raises(OSError, match="Input/output"):
        keep_two(shelf.job.artifact_uri, "min")
    assert checkpoint.load() is None
    assert shelf.notes.calls == [f"the states in {shelf.folder} cannot be listed (Input/output error)"]


def test_a_checkpoint_is_due_at_every_nth_step(shelf: Shelf) -> None:
    checkpoint = shelf.attempt()
    assert [step for step in range(31) if checkpoint.due(step)] == [10, 20, 30]


def test_a_store_that_is_neither_a_disk_nor_a_bucket_keeps_none(shelf: Shelf) -> None:
    uri = "wasbs://container@account/lab/run/artifacts"
    remote = Shelf(replace(shelf.job, artifact_uri=uri, keep_checkpoints=True)).attempt()
    assert not remote.due(10)
    assert not remote.is_kept
    remote.save(10, b"state")
    assert remote.load() is None
    assert first_step_of(uri, OWNER) == 0
    forget(uri)
    keep_two(uri, "min")


def test_forgetting_removes_the_states_and_not_the_artifacts(shelf: Shelf) -> None:
    shelf.save(10, 20)
    artifacts = shelf.folder.with_name(shelf.folder.name.removesuffix("-checkpoints"))
    artifacts.mkdir()
    forget(shelf.job.artifact_uri)
    assert not shelf.folder.exists()
    assert artifacts.exists()
    forget(shelf.job.artifact_uri)


# The best state is kept besides


@pytest.mark.parametrize(
    ("mode", "losses", "kept"),
    [
        ("min", [0.9, 0.2, 0.5, 0.4], [20, 30, 40]),
        ("max", [0.9, 0.2, 0.5, 0.4], [10, 30, 40]),
        ("min", [0.9, 0.5, 0.4, 0.3], [30, 40]),  # the best is one of the last two
        ("min", [math.nan, 0.5, -math.inf, 0.6, 0.5], [20, 40, 50]),  # no number is no best; of equal ones the first
        ("min", [math.nan, math.nan, math.nan], [20, 30]),
    ],
)
def test_the_state_with_the_best_finite_objective_is_kept_besides_the_last_two(
    shelf: Shelf, mode: str, losses: list[float], kept: list[int]
) -> None:
    shelf.job = replace(shelf.job, mode=mode)
    checkpoint = shelf.attempt()
    shelf.reported(checkpoint, *losses)
    assert shelf.files == [f"step-{step}.attempt-1" for step in kept]
    assert shelf.attempt().load() == b"state %d" % (10 * len(losses)), "the best is never taken for the newest"


def test_the_next_attempt_knows_the_best_state_of_the_one_before(shelf: Shelf) -> None:
    shelf.reported(shelf.attempt(), 0.9, 0.2, 0.5, 0.4)
    again = shelf.attempt()
    again.load()
    shelf.reported(again, 0.3, 0.3, 0.3)
    assert shelf.files == ["step-20.attempt-1", "step-60.attempt-2", "step-70.attempt-2"]


def test_a_best_state_of_steps_that_are_trained_again_is_no_best(shelf: Shelf) -> None:
    shelf.reported(shelf.attempt(), 0.9, 0.5, 0.1)
    flip(shelf.folder / "step-30.attempt-1")
    again = shelf.attempt()
    assert again.load() == b"state 20"
    for step, loss in ((30, 0.8), (40, 0.7), (50, 0.6)):
        shelf.verdict.see(step, {"val/loss": loss})
        again.save(step, b"")
    assert shelf.files == ["step-20.attempt-1", "step-40.attempt-2", "step-50.attempt-2"]


@pytest.mark.parametrize(("losses", "kept"), [([0.9, 0.2, 0.5, 0.4], [20, 40]), ([0.9, 0.2], [20])])
def test_a_trial_with_a_result_keeps_the_last_state_and_the_best_one_where_they_are_kept(
    shelf: Shelf, losses: list[float], kept: list[int]
) -> None:
    shelf.reported(shelf.attempt(), *losses)
    keep_two(shelf.job.artifact_uri, "min")
    assert shelf.files == [f"step-{step}.attempt-1" for step in kept]
    path = shelf.folder / f"step-{kept[-1]}.attempt-1"
    assert path.read_bytes().split(b"\n", 1)[1] == b"state %d" % kept[-1], "as docs/workloads.md says"


def test_a_trial_that_was_cut_short_behind_the_state_of_its_last_step_has_its_result(shelf: Shelf) -> None:
    shelf.job = replace(shelf.job, keep_checkpoints=True)
    assert shelf.attempt().is_kept
    checkpoint = shelf.attempt()
    shelf.reported(checkpoint, 0.9, 0.5)
    assert shelf.attempt().load() == b"state 20"
    outcome = shelf.verdict.outcome(stopped=False)  # nothing was left to report
    assert (outcome.state, outcome.objective, outcome.last_step) == (TrialState.FINISHED, 0.5, 20)


# Code that changed in between


@pytest.mark.parametrize(
    ("commits", "said"),
    [
        (("a" * 40, "b" * 40), "aaaaaaaaaa, now bbbbbbbbbb"),
        (("a" * 40, "a" * 40), "sources 0ld, now sources n3w"),  # not committed
        (("", ""), "sources 0ld, now sources n3w"),
    ],
)
def test_a_state_saved_under_other_code_is_used_with_a_warning_that_names_both(
    shelf: Shelf, commits: tuple[str, str], said: str
) -> None:
    shelf.job = replace(shelf.job, git_commit=commits[0])
    shelf.attempt(code="0ld").save(10, b"state")
    shelf.job = replace(shelf.job, git_commit=commits[1])
    assert shelf.attempt(code="n3w").load() == b"state"
    assert shelf.notes.calls == [f"the workload's code changed after the state of step 10 was saved: {said}"]


def test_a_state_saved_under_the_same_code_is_used_without_a_word(shelf: Shelf) -> None:
    shelf.job = replace(shelf.job, git_commit="a" * 40)
    shelf.attempt(code="one").save(10, b"state")
    shelf.job = replace(shelf.job, git_commit="b" * 40)  # another commit, which changed nothing of the workload
    assert shelf.attempt(code="one").load() == b"state"
    assert shelf.notes.calls == []


# The power goes off


@dataclass
class Disk:
    """What a power cut leaves of a folder: the recorded operations, of which only the synced ones are sure to be there.

    Names reach the disk in order (file systems with a journal), content with its own fsync only.
    """

    folder: Path
    events: list[tuple[str, str, bytes]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fsync, replace_, unlink = os.fsync, os.replace, os.unlink

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path == self.folder:
                self.events.append(("sync folder", "", b""))
            elif path.parent == self.folder:
                self.events.append(("sync file", path.name, path.read_bytes()))

        def renamed(source: Path, target: Path) -> None:
            replace_(source, target)
            self.events.append(("rename", f"{Path(source).name}>{Path(target).name}", b""))

        def removed(path: Path) -> None:
            unlink(path)
            self.events.append(("remove", Path(path).name, b""))

        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(os, "replace", renamed)
        monkeypatch.setattr(os, "unlink", removed)

    def note(self, what: str, step: int) -> None:
        self.events.append((what, str(step), b""))

    def step_of(self, what: str, num_events: int) -> int:
        """The last one noted before the power went off; 0 if there is none."""
        return max([0, *(int(name) for kind, name, _ in self.events[:num_events] if kind == what)])

    def images(self, num_events: int) -> Iterator[dict[str, bytes]]:
        """Every content of the folder after a cut behind so many operations."""
        past = self.events[:num_events]
        content = {name: data for kind, name, data in past if kind == "sync file"}
        names = [number for number, (kind, *_) in enumerate(past) if kind in ("sync file", "rename", "remove")]
        sure = max([0, *(number + 1 for number, (kind, *_) in enumerate(past) if kind == "sync folder")])
        for last in [sure, *(number + 1 for number in names if number >= sure)]:
            yield self._names_after(past[:last], content)

    def _names_after(self, past: Sequence[tuple[str, str, bytes]], content: Mapping[str, bytes]) -> dict[str, bytes]:
        there: dict[str, bytes] = {}
        for kind, name, _ in past:
            if kind == "sync file":
                there[name] = content[name]
            elif kind == "rename":
                source, target = name.split(">")
                there[target] = there.pop(source, b"")  # renamed before it was synced: a name without content
            elif kind == "remove":
                there.pop(name, None)
        return there


def test_wherever_the_power_goes_off_the_next_attempt_goes_on_from_a_whole_state_whose_reports_are_safe(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = Disk(shelf.folder)

    class Journal(Notes):
        def sync(self) -> None:
            disk.note("reports safe", said)

    with monkeypatch.context() as patch:
        disk.watch(patch)
        checkpoint = RunCheckpoint(replace(shelf.job, attempt=1), OWNER, Journal(), verdict := Verdict(shelf.job))
        for said, loss in ((10, 0.1), (20, 0.5), (30, 0.4), (40, 0.3), (50, 0.2)):
            verdict.see(said, {"val/loss": loss})
            checkpoint.save(said, b"state %d" % said)
            disk.note("saved", said)
    seen = set()
    for num_events in range(len(disk.events) + 1):
        for number, image in enumerate(disk.images(num_events)):
            left = Shelf(replace(shelf.job, attempt=1, artifact_uri=(tmp_path / f"{num_events}-{number}").as_uri()))
            left.folder.mkdir()
            for name, content in image.items():
                (left.folder / name).write_bytes(content)
            state = left.attempt().load()
            step = int(state.split()[1]) if state else 0
            seen.add(step)
            assert disk.step_of("saved", num_events) <= step <= disk.step_of("reports safe", num_events)
            assert left.job.first_step == (step + 1 if step else 0)
            assert left.notes.calls == [], "no torn file under a state's name"
    assert seen == {0, 10, 20, 30, 40, 50}


def test_the_folders_made_for_the_first_state_outlive_a_power_cut_too(
    shelf: Shelf, synced: set[Path], tmp_path: Path
) -> None:
    synced.clear()
    shelf.save(10)
    below = [folder for folder in shelf.folder.parents if folder.is_relative_to(tmp_path)]
    assert {shelf.folder, *below} <= synced
