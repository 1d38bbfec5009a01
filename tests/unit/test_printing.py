"""What is kept of a trial's prints: whole lines in their order, bounded, whoever prints and however."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

import pytest

from orchestrator.execution import printing
from orchestrator.execution.job import Job
from orchestrator.execution.printing import captured
from orchestrator.tracking.records import LogLine


def job(attempt: int = 1) -> Job:
    return Job(1, 2, 3, attempt, "run", "w", {}, "loss", True, 1, 1, 0, "file:///nowhere")


class Lines:
    """Takes lines as a recorder does."""

    def __init__(self) -> None:
        self.rows: list[LogLine] = []
        self.num_syncs = 0

    def take(self, rows: Sequence[LogLine]) -> None:
        self.rows += rows

    def sync(self) -> None:
        self.num_syncs += 1

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows]


def test_lines_are_whole_and_numbered_over_both_streams_in_the_order_of_writing() -> None:
    lines = Lines()
    with captured(job(7), lines.take, lines.sync):
        print("a", end="")
        print("b\nc")
        print("d", file=sys.stderr)
        print("e", end="")
    assert [(row.stream, row.number, row.text) for row in lines.rows] == [
        ("stdout", 0, "ab"),
        ("stdout", 1, "c"),
        ("stderr", 2, "d"),
        ("stdout", 3, "e"),
    ]
    assert {(row.sweep_id, row.trial_id, row.attempt) for row in lines.rows} == {(1, 2, 7)}
    assert lines.num_syncs == 1


def test_a_workload_that_closes_its_streams_closes_nobody_elses() -> None:
    lines, behind = Lines(), sys.stdout
    with captured(job(), lines.take, lines.sync):
        sys.stdout.close()
        print("still here")
    assert not behind.closed
    assert lines.texts == ["still here"]


def test_an_attempt_that_prints_nothing_starts_no_thread_and_waits_for_no_disk() -> None:
    lines = Lines()
    with captured(job(), lines.take, lines.sync):
        names = {thread.name for thread in threading.enumerate()}
    assert "orch-prints" not in names
    assert (lines.rows, lines.num_syncs) == ([], 0)


def test_a_line_arrives_while_its_attempt_goes_on() -> None:
    lines = Lines()
    with captured(job(), lines.take, lines.sync):
        print("loading")
        deadline = time.monotonic() + 10
        while not lines.rows:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert lines.texts == ["loading"]


def test_a_progress_bar_keeps_the_last_state_of_its_line() -> None:
    lines = Lines()
    with captured(job(), lines.take, lines.sync):
        for percent in range(101):
            sys.stderr.write(f"\r{percent} %")
        sys.stderr.write("\rdone\r\n\n")
    assert lines.texts == ["done", ""]


def test_what_would_fill_the_disk_is_cut_with_one_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printing, "MAX_LINES", 3)
    lines = Lines()
    with captured(job(), lines.take, lines.sync):
        print("x" * 4_010)
        for number in range(10):
            print(number)
    bounds = "an attempt keeps 3 lines and 1 MB"
    assert lines.texts == [
        "x" * 4_000 + " [orch: 10 more characters]",
        "0",
        "1",
        f"[orch] 8 more lines were left out: {bounds}",
    ]
    lines = Lines()
    monkeypatch.setattr(printing, "MAX_LINES", 2_000)
    with captured(job(), lines.take, lines.sync):
        for _ in range(1_000):
            print("\N{SNOWMAN}" * 1_000)  # three bytes each
    assert len(lines.rows) == 334 + 1


def test_a_logging_handler_of_an_earlier_trial_writes_into_the_present_one() -> None:
    first, second = Lines(), Lines()
    with captured(job(1), first.take, first.sync):
        handler = logging.StreamHandler()
        logging.getLogger("mine").addHandler(handler)
        logging.getLogger("mine").warning("one")
    try:
        with captured(job(2), second.take, second.sync):
            logging.getLogger("mine").warning("two")
    finally:
        logging.getLogger("mine").removeHandler(handler)
    assert (first.texts, second.texts) == (["one"], ["two"])


def test_roots_handler_of_before_is_heard_during_a_trial_and_is_itself_again_afterwards() -> None:
    handler, lines = logging.StreamHandler(sys.stderr), Lines()
    logging.root.addHandler(handler)
    try:
        with captured(job(), lines.take, lines.sync):
            logging.root.warning("heard")
        assert handler.stream is sys.stderr
    finally:
        logging.root.removeHandler(handler)
    assert "heard" in lines.texts


def test_shown_prints_reach_the_terminal_and_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    with captured(job(), lines.take, lines.sync, is_shown=True):
        print("seen")
    with captured(job(), lines.take, lines.sync):
        print("unseen")
    assert capsys.readouterr().out == "seen\n"
    assert lines.texts == ["seen", "unseen"]


def test_a_forked_child_prints_where_its_parent_did_before_and_hangs_on_no_lock() -> None:
    lines = Lines()
    with captured(job(), lines.take, lines.sync):
        print("parent")
        child = os.fork()
        if child == 0:
            print("child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert lines.texts == ["parent"]


def test_lines_that_could_not_be_delivered_are_an_error_of_ours_at_the_end() -> None:
    def refuse(rows: Sequence[LogLine]) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"), captured(job(), refuse, lambda: None):
        print("lost")
