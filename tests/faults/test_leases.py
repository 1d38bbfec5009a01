"""Who drives a sweep: a command that is silent for too long loses it, and what it still says changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import Orch
from tests.faults.conftest import num_points, value_of, wait_until
from tests.warm import WarmProcess

COUNT = """
    workload: orch_lab:Counter
    metric: {name: train/loss, mode: min}
    params:
      seed: {grid: [0, 1]}
      steps: 40
      sleep_s: 0.05
    log_every: 1
    checkpoint_every: 10
    preflight: false
"""

# As if the holder had died; one that is only suspended has lost its sweep like this after a minute.
DECLARE_DEAD = r"""
    update orch_ledger.sweeps set holder_process = regexp_replace(holder_process, '\d+ \d+$', '999999999 1')
    where name = %s
"""

NUM_RUNNING = "select count(*) from public.runs where status = 'RUNNING' and name like %s"

CONTENTS = """
    select string_agg(line, E'\n' order by line)
    from (
        select trial::text as line from orch_ledger.trials as trial
        union all select attempt::text from orch_ledger.attempts as attempt
        union all select run::text from public.runs as run
        union all select latest::text from public.latest_metrics as latest
        union all select tag::text from public.tags as tag
        union all select point::text from orch.metrics as point
        union all select finding::text from orch.findings as finding
        union all select concat_ws(' ', name, state, fence, holder) from orch_ledger.sweeps
    ) as lines
"""


@contextmanager
def suspended(orch: Orch, file: Path, url: str) -> Iterator[WarmProcess]:
    """A command that trains in its own process and is stopped in mid-sweep."""
    process = orch.start_warm("sweep", file, "--inline")
    try:
        wait_until(lambda: num_points(url, file.stem) > 30)
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


# MLflow shows the same end of a lost trial as the ledger, to its millisecond: the holder's last word.
ENDS_APART = """
    select count(*) from orch_ledger.trials as trial join public.runs as run on run.run_uuid = trial.run_id
    where run.name like %s and trial.state = 'lost'
        and run.end_time is distinct from round(extract(epoch from trial.ended_at) * 1000)::bigint
"""


def test_a_suspended_command_doubles_and_overwrites_nothing_when_it_comes_back(
    orch: Orch, prepared_url: str, name: str
) -> None:
    with suspended(orch, orch.sweep_file(COUNT, name), prepared_url) as process:
        value_of(prepared_url, DECLARE_DEAD, name)
        lost = orch.rows(f"select state, reason from runs where sweep = '{name}' and state = 'lost'")
        [row] = lost
        assert f"its command {process.pid}@" in row["reason"]
        assert "died (last heard of 20" in row["reason"]
        assert value_of(prepared_url, NUM_RUNNING, f"{name}-%") == 0
        assert orch.rows(f"select state, holder from sweeps where sweep = '{name}'") == [
            {"state": "interrupted", "holder": None}
        ]
        assert f"nobody drives it; go on with what is left: orch resume {name}" in orch("status", name).out
        resumed = orch("resume", name, "--inline")
        assert "1 trial goes on where a checkpoint was saved: 0 from step" in resumed.out
        before = value_of(prepared_url, CONTENTS)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
        assert value_of(prepared_url, CONTENTS) == before
    assert process.returncode == 2, output
    assert "this command was silent for too long and has lost it" in output
    assert "Traceback" not in output
    points = "select count(*) as n, count(distinct step) as d, max(attempt) as a from metrics"
    rows = orch.rows(f"{points} where sweep = '{name}' and key = 'count' group by trial order by trial")
    assert rows == [{"n": 40, "d": 40, "a": 2}, {"n": 40, "d": 40, "a": 1}]


def test_a_command_that_comes_back_in_time_takes_its_trials_back(orch: Orch, prepared_url: str, name: str) -> None:
    with suspended(orch, orch.sweep_file(COUNT, name), prepared_url) as process:
        value_of(prepared_url, DECLARE_DEAD, name)
        states = [row["state"] for row in orch.rows(f"select state from runs where sweep = '{name}' order by trial")]
        assert states == ["lost", "waiting"]
        assert value_of(prepared_url, ENDS_APART, f"{name}-%") == 0
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    rows = orch.rows(f"select state, attempts, reason from runs where sweep = '{name}'")
    assert rows == [{"state": "finished", "attempts": 1, "reason": ""}] * 2
    statuses = "select string_agg(status, ',') from public.runs where name like %s"
    assert value_of(prepared_url, statuses, f"{name}-%") == "FINISHED,FINISHED"
    assert orch.rows(f"select state from sweeps where sweep = '{name}'") == [{"state": "finished"}]


def test_others_are_told_who_drives_a_sweep_and_cancelling_twice_ends_its_trials_at_once(
    orch: Orch, prepared_url: str, name: str
) -> None:
    process = orch.start_warm("sweep", orch.sweep_file(COUNT.replace("0.05", "3600"), name), "--inline")
    running = "select count(*) from orch_ledger.trials where state = 'running' and run_id is not null"
    wait_until(lambda: value_of(prepared_url, NUM_RUNNING, f"{name}-%") == 1 and value_of(prepared_url, running) > 0)
    holder = value_of(prepared_url, "select holder from orch_ledger.sweeps where name = %s", name)
    assert holder.startswith(f"{process.pid}@")
    assert f"driven by {holder}, last heard of" in orch("status", name).out
    for refused in ("resume", "rm"):
        said = orch(refused, name, expect=2).err
        assert f"run by {holder}" in said
        assert f"orch cancel {name}" in said
    value_of(prepared_url, "update orch_ledger.sweeps set wanted = 'cancel' where name = %s", name)  # the first time
    cancelled = orch("cancel", name)
    assert "to end at once" in cancelled.out
    assert f"sweep {name} is cancelled: 1 killed, 1 waiting" in cancelled.out
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert value_of(prepared_url, NUM_RUNNING, f"{name}-%") == 0
