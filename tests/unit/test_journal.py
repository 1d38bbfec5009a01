"""The journal: what was appended is read back whole, after a crash too, and goes only when it is stored."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.tracking import journal as journal_module
from orchestrator.tracking.journal import Journal, encode, orphans
from orchestrator.tracking.records import MetricError, Points, checked, legal_key


def drained(journal: Journal) -> list[object]:
    records = []
    while batch := journal.read():
        records.extend(batch)
    return records


def segments(journal: Journal) -> list[Path]:
    return sorted(journal.folder.glob("*.journal"))


def left_behind(journal_dir: Path, *appends: list[object]) -> Path:
    """The folder of a recorder that was killed after these appends."""
    code = (
        "import sys, json, os\n"
        "from pathlib import Path\n"
        "from orchestrator.tracking.journal import Journal\n"
        "journal = Journal.create(Path(sys.argv[1]))\n"
        "for records in json.loads(sys.argv[2]): journal.append(records)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(journal_dir), str(list(appends)).replace("'", '"')], check=False)
    (folder,) = orphans(journal_dir)
    return folder


def test_records_come_back_in_order_over_many_segments_and_no_read_holds_more_than_asked(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, segment_bytes=300)
    records = [["points", index, {"loss": index / 3}] for index in range(100)]
    for start in range(0, 100, 10):
        journal.append(records[start : start + 10])
    assert len(segments(journal)) > 3
    first = journal.read(max_bytes=120)
    assert 1 <= len(first) <= 5
    assert first + drained(journal) == records


def test_nan_and_infinities_survive(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.append([[float("nan"), float("inf"), float("-inf"), 5e-324]])
    assert str(drained(journal)) == "[[nan, inf, -inf, 5e-324]]"


def test_a_segment_is_deleted_only_after_all_of_it_is_stored(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, segment_bytes=1)
    for index in range(3):
        journal.append([index])
    drained(journal)
    assert len(segments(journal)) == 3
    journal.rewind()
    assert drained(journal) == [0, 1, 2]
    journal.mark_stored()
    assert len(segments(journal)) == 1  # the one still written to
    assert journal.backlog_bytes == 0
    journal.append([3])
    assert drained(journal) == [3]


def test_a_closed_journal_leaves_a_folder_only_if_something_is_not_stored(tmp_path: Path) -> None:
    empty, full = Journal.create(tmp_path), Journal.create(tmp_path)
    empty.append([1])
    full.append([2])
    empty.read()
    empty.mark_stored()
    empty.close()
    full.close()
    assert [path.name for path in tmp_path.iterdir()] == [full.folder.name]


def test_the_next_recorder_finds_the_folder_of_a_killed_one_but_not_of_a_living_one(tmp_path: Path) -> None:
    living = Journal.create(tmp_path)
    folder = left_behind(tmp_path, [1, 2], [3])
    assert folder != living.folder
    adopted = Journal.adopt(folder)
    assert adopted is not None
    assert drained(adopted) == [1, 2, 3]
    assert orphans(tmp_path) == []  # held now
    assert Journal.adopt(folder) is None
    adopted.mark_stored()
    adopted.close()
    assert not folder.exists()


def test_an_adopted_journal_starts_where_its_writer_had_stored(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.append(list(range(10)))
    journal.read()
    journal.mark_stored()
    journal.append([10, 11])
    journal.close()
    adopted = Journal.adopt(journal.folder)
    assert adopted is not None
    assert drained(adopted) == [10, 11]


def test_the_folders_made_for_a_journal_outlive_a_power_cut_too(tmp_path: Path, synced: set[Path]) -> None:
    journal = Journal.create(tmp_path / "home" / "journal" / "identity")
    journal.append([1])
    folders = [folder for folder in (journal.folder, *journal.folder.parents) if folder.is_relative_to(tmp_path)]
    assert set(folders) <= synced


def test_a_torn_last_line_is_ignored_and_a_damaged_middle_line_is_counted(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, [1], [2], [3])
    (segment,) = folder.glob("*.journal")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(lines[0] + lines[1].replace(b" 2", b" 7") + lines[2] + encode([4])[:-3])
    adopted = Journal.adopt(folder)
    assert adopted is not None
    assert drained(adopted) == [1, 3]
    adopted.mark_stored()
    assert adopted.num_damaged == 1
    assert adopted.backlog_bytes == 0


def test_zeros_left_by_a_power_loss_are_no_records(tmp_path: Path) -> None:
    folder = left_behind(tmp_path, [1])
    (segment,) = folder.glob("*.journal")
    segment.write_bytes(segment.read_bytes() + bytes(4096))
    adopted = Journal.adopt(folder)
    assert adopted is not None
    assert drained(adopted) == [1]
    assert adopted.backlog_bytes == len(bytes(4096)) + len(encode(1))
    adopted.mark_stored()
    assert (adopted.num_damaged, adopted.backlog_bytes) == (0, 0)


def test_a_full_disk_raises_and_the_same_records_can_be_appended_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.create(tmp_path)
    journal.append(["before"])
    real_write = os.write

    def half_a_write(file: int, data: memoryview) -> int:
        real_write(file, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module.os, "write", half_a_write)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            journal.append(["a" * 50, "b" * 50])
    monkeypatch.undo()
    journal.append(["a" * 50, "b" * 50])
    assert drained(journal) == ["before", "a" * 50, "b" * 50]
    assert len(segments(journal)) == 2  # failed tries leave no files


def test_remaining_records_can_be_looked_at_without_moving_the_reader(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path, segment_bytes=10)
    for index in range(5):
        journal.append([index])
    journal.read(max_bytes=12)
    assert list(journal.remaining()) == [0, 1, 2, 3, 4]
    assert drained(journal)[-1] == 4


@pytest.mark.parametrize("name", ["val/loss", "router/load/3", "a b:c.d-e_f", "Verlust/größe", "grad/preclip/total"])
def test_a_legal_metric_name_is_kept(name: str) -> None:
    assert legal_key(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "load[e0]",
        "time(s)",
        "acc@1",
        "a//b",
        "/x",
        "x/",
        "",
        ".",
        "..",
        "../a",
        "..a",
        "a/./b",
        "a\n",
        "\ud800",
        "k" * 251,
    ],
)
def test_an_illegal_metric_name_is_mapped_to_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    mapped = legal_key(name)
    _validate_metric_name(mapped)
    assert 1 <= len(mapped) <= 250
    assert legal_key(mapped) == mapped


def test_names_that_look_alike_after_mapping_stay_two_series() -> None:
    assert len({legal_key(name) for name in ("load[0]", "load(0)", "load@0@", "load_0_", "k" * 251, "k" * 252)}) == 6


@pytest.mark.parametrize("value", [None, "0.5", b"1", 1j, [1.0, 2.0], object(), 10**400])
def test_a_value_that_is_no_real_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(MetricError, match="val/loss"):
        checked(Points("r", 1, 1, 0, 0, {"val/loss": value}))  # type: ignore[dict-item]


def test_numpy_and_torch_scalars_count_as_numbers() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    values = {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": torch.tensor(0.25), "d": True, "e": float("nan")}
    metrics = checked(Points("r", 1, 1, numpy.int64(7), 5, values)).metrics
    assert {type(value) for value in metrics.values()} == {float}
    assert [metrics[name] for name in "abcd"] == [0.5, 3.0, 0.25, 1.0]


def test_containers_that_share_a_machine_find_each_others_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCH_JOURNAL_HOST", "compose")
    monkeypatch.setattr(socket, "gethostname", lambda: "f9ad481bc036")
    dead = Journal.create(tmp_path)
    dead.append([{"point": 1}])
    os.close(dead._lock)  # as when its process dies
    monkeypatch.setattr(socket, "gethostname", lambda: "60dbc7814580")
    assert orphans(tmp_path) == [dead.folder]
    monkeypatch.delenv("ORCH_JOURNAL_HOST")
    assert orphans(tmp_path) == [], "another machine's, as far as one can tell"
