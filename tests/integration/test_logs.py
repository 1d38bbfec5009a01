"""`orch logs` as a person meets it: what a trial printed and what the command said, while it runs and afterwards."""

from __future__ import annotations

import json
import time
from typing import Any

import psycopg
import pytest

from orchestrator.settings import Home
from orchestrator.tracking.bulk import write_logs
from orchestrator.tracking.records import LogLine, from_json, to_json
from tests.conftest import Orch
from tests.warm import WarmProcess

TALK = """
    workload: orch_lab:Talker
    metric: {name: val/loss, mode: min}
    params: {x: 2, fail: {grid: [false, true]}}
    preflight: false
"""
SLOW = """
    workload: orch_lab:Talker
    metric: {name: val/loss, mode: min}
    params: {x: {grid: [1, 2]}}
    resources: {cpu: 0.5, max_concurrent: 2}
    preflight: false
"""
PRINTED = [
    *("one", "two", "", "three", "WARNING:talker:x is 2"),
    *("\\x1b[31mred\\x1b[0m postgresql://me:***@host/db", "step 2/2"),
]


@pytest.fixture(scope="module")
def talked(orch: Orch) -> tuple[str, str]:
    """A sweep of two trials, the second of which fails; its name, and what its command printed."""
    done = orch("sweep", orch.sweep_file(TALK, "talked"), "--inline", expect=1)
    return "talked", done.out


def test_a_trial_keeps_whole_lines_of_all_its_streams_in_order_without_passwords(
    orch: Orch, talked: tuple[str, str]
) -> None:
    name, _ = talked
    lines = orch("logs", name, "--trial", 0).out.splitlines()
    assert [line for line in lines if line in PRINTED] == PRINTED
    assert any(line.endswith("UserWarning: x=2 is no number of mine") for line in lines)
    assert lines[-1] == "the end"
    assert orch("logs", name, "--trial", 0, "-n", 1).out == "the end\n"
    streams = orch.rows(f"select stream, line from logs where sweep = '{name}' and trial = 0 and attempt = 1")
    assert {"stream": "stderr", "line": "three"} in streams
    assert {"stream": "stdout", "line": "two"} in streams


def test_prints_of_an_inline_sweep_reach_the_terminal_as_well(talked: tuple[str, str]) -> None:
    _, out = talked
    assert "one\ntwo\n\n" in out
    assert "step 2/2" in out


def test_the_log_of_a_failed_trial_ends_with_its_traceback(orch: Orch, talked: tuple[str, str]) -> None:
    lines = orch("logs", talked[0], "--trial", 1).out.splitlines()
    assert lines[-1] == "ValueError: a planted failure"
    assert "Traceback (most recent call last):" in lines


def test_what_the_command_said_is_kept_but_not_what_its_trials_printed(orch: Orch, talked: tuple[str, str]) -> None:
    name, printed = talked
    out = orch("logs", name).out
    for words in (f"sweep {name}: 2 trials", "trial 0 starts", "1/2  trial 0  finished", f"{name}: 1/2 finished"):
        assert words in out
        assert words in printed or "starts" in words
    assert "a planted failure" in out.splitlines()[-1]
    assert "WARNING:talker" not in out
    rows = json.loads(orch("logs", name, "--format", "json").out)
    assert {row["stream"] for row in rows} == {"sweep"}
    assert {row["trial"] for row in rows} == {None}
    assert [row["line_number"] for row in rows] == list(range(len(rows)))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["talkd"], "unknown sweep 'talkd'; did you mean talked?"),
        (["talked", "--trial", "7"], "--trial  sweep 'talked' has trials 0 to 1, not 7"),
    ],
)
def test_an_unknown_sweep_or_trial_is_exit_2_with_the_nearest(
    orch: Orch, talked: tuple[str, str], words: list[str], answer: str
) -> None:
    assert answer in orch("logs", *words, expect=2).err


def test_a_running_workers_prints_are_there_before_it_ends_and_following_ends_with_the_sweep(
    ray_orch: Orch, name: str
) -> None:
    end = ray_orch.folder / f"{name}.end"
    sweep = ray_orch.start_warm("sweep", ray_orch.sweep_file(SLOW, name), "--set", f"params.until={end}")
    view = f"select count(*) as n from logs as l join runs as r using (sweep, trial) where sweep = '{name}'"
    try:
        wait_for_row(ray_orch, f"{view} and line = 'one' and state = 'running'", sweep)
        follower = ray_orch.start_warm("logs", name, "-f")
        assert follower.stdout is not None
        assert f"sweep {name}: 2 trials" in follower.stdout.readline()
        end.touch()
        out, _ = follower.communicate(timeout=120)
        assert follower.returncode == 0, out
        assert out.splitlines()[-1] == f"{name} is finished: 2 finished"
        assert "2/2  trial" in out
    finally:
        end.touch()
        printed, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 0, printed
    assert "WARNING:talker" not in printed  # a worker's prints are its own
    assert ray_orch("logs", name, "--trial", 1).out.endswith("the end\n")


def wait_for_row(orch: Orch, query: str, process: WarmProcess) -> None:
    deadline = time.monotonic() + 120
    while orch.rows(query)[0]["n"] == 0:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_replayed_journal_writes_each_line_once_and_lines_of_a_purged_sweep_nowhere(
    orch: Orch, talked: tuple[str, str], server_url: str
) -> None:
    with psycopg.connect(server_url) as connection:
        query = "select id, fence from orch_ledger.sweeps where name = %s"
        sweep_id, fence = found(connection.execute(query, [talked[0]]).fetchone())
        lines = [
            LogLine(one, None, fence + 1, "sweep", 0, "said\x00twice", 1_700_000_000_500) for one in (sweep_id, -1)
        ]
        replayed = [from_json(json.loads(json.dumps(to_json(line)))) for line in lines]
        assert replayed == lines
        write_logs(connection, lines)
        write_logs(connection, lines)
        query = (
            "select line, extract(epoch from written_at)::float8 from orch_ledger.logs "
            "where trial_id is null and attempt = %s and sweep_id in (%s, -1)"
        )
        stored = connection.execute(query, [fence + 1, sweep_id]).fetchall()
        assert stored == [("said\N{REPLACEMENT CHARACTER}twice", 1_700_000_000.5)]
        connection.rollback()


def found(row: Any) -> Any:
    assert row is not None
    return row


def test_prints_lie_in_the_journal_while_the_database_is_away(home: Home, tmp_path: Any) -> None:
    from orchestrator.tracking.recorder import Recorder

    def away() -> Any:
        raise psycopg.OperationalError("away")

    recorder = Recorder(away, tmp_path / "journal")
    recorder.notes([LogLine(1, 2, 1, "stdout", 0, "kept on disk", 0)])
    recorder.sync()
    assert b"kept on disk" in b"".join(
        path.read_bytes() for path in (tmp_path / "journal").rglob("*") if path.is_file()
    )
    assert recorder.close(0.1).points == 1
