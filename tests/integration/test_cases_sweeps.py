"""Whole sweeps that other tools get wrong: cut grids, split texts, lost suggestions, the best of a thousand."""

from __future__ import annotations

import json
import signal

import psycopg
import pytest

from tests.conftest import Orch

THREE_AXES = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params:
      x: {grid: [1, 2, 3]}
      k: {grid: [1, 2, 3]}
      steps: {grid: [1, 2, 3]}
    resources: {max_concurrent: 2}
"""

SEARCH = """
    workload: orch_lab:Trivial
    metric: {name: val/loss, mode: min}
    params: {x: {uniform: [-4, 4]}, steps: 8, sleep_s: 0.05}
    search: {algorithm: optuna, samples: 6, seed: 0}
    resources: {max_concurrent: 1}
    log_every: 1
"""


def test_three_axes_of_three_values_are_27_planned_and_27_trained(orch: Orch, name: str) -> None:
    file = orch.sweep_file(THREE_AXES, name)
    assert "27 trials of orch_lab:Trivial" in orch("plan", file).out
    orch("sweep", file, "--inline")
    triples = f"select count(*) as n, count(distinct (x, k, steps)) as d from sweep_{name}"
    assert orch.rows(triples) == [{"n": 27, "d": 27}]
    sampled = ("--set", "params.sleep_s={uniform: [0, 1]}", "--set", "search={algorithm: random, samples: 2}")
    assert "54 trials" in orch("plan", file, *sampled).out
    assert orch("plan", file, *sampled).out == orch("sweep", file, *sampled, "--dry-run").out


def test_a_comma_in_a_text_makes_no_second_run(orch: Orch, name: str) -> None:
    text = "workload: orch_lab:Odd\nmetric: val/loss\nparams: {steps: 1}\n"
    orch("sweep", orch.sweep_file(text, name), "--inline", "--set", "params.note=a,b")
    assert orch.rows(f"select note from sweep_{name}") == [{"note": "a,b"}]


@pytest.mark.parametrize("algorithm", ["random", "optuna"])
def test_sampled_lists_and_nested_ranges_reach_the_workload_as_what_they_are(
    orch: Orch, name: str, algorithm: str
) -> None:
    text = f"""
        workload: orch_lab:Odd
        metric: val/loss
        params:
          hidden: {{choice: [[300], [200, 100]]}}
          x: {{choice: [0, {{loguniform: [1e-4, 1e-1]}}]}}
          steps: 1
        search: {{algorithm: {algorithm}, samples: 12}}
    """
    orch("sweep", orch.sweep_file(text, name), "--inline")
    rows = orch.rows(f"select hidden, x from sweep_{name}")
    assert {str(row["hidden"]) for row in rows} == {"[300]", "[200, 100]"}
    assert all(row["x"] == 0 or 1e-4 <= row["x"] <= 1e-1 for row in rows)
    assert {row["x"] == 0 for row in rows} == {True, False}


def test_a_search_interrupted_and_resumed_suggests_what_an_uninterrupted_one_does(orch: Orch, name: str) -> None:
    whole = orch.sweep_file(SEARCH.replace("sleep_s: 0.05", "sleep_s: 0"), f"{name}_whole")
    orch("sweep", whole, "--inline")
    file = orch.sweep_file(SEARCH, name)
    process = orch.start_warm("sweep", file, "--inline")
    for line in process.stdout:
        if line.startswith("2/6"):
            break
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "6/6 finished" in orch("sweep", file, "--inline", "--resume").out
    values = [orch.rows(f"select x from sweep_{one} order by trial") for one in (name, f"{name}_whole")]
    assert values[0] == values[1]
    assert len(values[0]) == 6


def test_a_nan_in_a_search_is_a_result_and_the_search_goes_on(orch: Orch, name: str) -> None:
    text = """
        workload: orch_lab:Odd
        metric: val/loss
        params: {do: {choice: [nan, nothing]}, x: {uniform: [1, 2]}}
        search: {algorithm: optuna, samples: 6, seed: 0}
    """
    orch("sweep", orch.sweep_file(text, name), "--inline")
    counts = {row["state"]: row["n"] for row in orch.rows(f"select state, count(*) as n from sweep_{name} group by 1")}
    assert set(counts) == {"finished", "diverged"}
    assert sum(counts.values()) == 6
    assert json.loads(orch("best", name, "--format", "json").out)[0]["do"] == "nothing"


def test_plus_and_minus_infinity_come_last_and_are_in_no_mean(orch: Orch, name: str) -> None:
    text = """
        workload: orch_lab:Odd
        metric: {name: val/loss, mode: min}
        params: {do: {grid: [nothing, inf, "-inf", nan]}, steps: 4}
    """
    orch("sweep", orch.sweep_file(text, name), "--inline")
    rows = json.loads(orch("runs", name, "--sort", "val/loss", "--format", "json").out)
    assert rows[0]["do"] == "nothing"
    assert {row["val/loss"] for row in rows[1:]} == {"Infinity", "-Infinity", "NaN"}
    assert json.loads(orch("best", name, "--format", "json").out)[0]["do"] == "nothing"
    by_seed = json.loads(orch("compare", name, "--by", "steps", "--format", "json").out)
    assert [(row["val/loss"], row["diverged"]) for row in by_seed] == [(0.25, "3/4")]
    mean = f'select avg("val/loss") as m, count(*) filter (where diverged) as d from sweep_{name}'
    assert orch.rows(mean + " where not diverged") == [{"m": 0.25, "d": 0}]


# Copies one trial of a sweep, with its run and its points, as the trials 5 to 1004: a row's other columns stay.
COPIES = """
    insert into public.{0} select copy.* from public.{0} as one join orch_ledger.trials as trial on run_id = run_uuid
    join orch_ledger.sweeps as sweep on sweep.id = sweep_id, generate_series(5, 1004) as n,
    jsonb_populate_record(one, jsonb_build_object('run_uuid', md5(run_uuid || n))) as copy
    where sweep.name = %(sweep)s and number = 4
"""
TRIAL_COPIES = """
    insert into orch_ledger.trials select copy.* from orch_ledger.trials as one
    join orch_ledger.sweeps as sweep on sweep.id = sweep_id, generate_series(5, 1004) as n,
    jsonb_populate_record(one, jsonb_build_object('id', nextval(pg_get_serial_sequence('orch_ledger.trials', 'id')),
        'number', n, 'run_id', md5(one.run_id || n), 'config_hash', md5(one.config_hash || n))) as copy
    where sweep.name = %(sweep)s and one.number = 4
"""


def test_the_best_of_1005_runs_is_found_where_a_client_page_ends_at_1000(
    orch: Orch, name: str, server_url: str
) -> None:
    text = """
        workload: orch_lab:Trivial
        metric: {name: val/loss, mode: min}
        params: {x: {grid: [1, 2, 3, 4, 5]}, steps: 1}
    """  # (x - 1)^2: the first is the best
    orch("sweep", orch.sweep_file(text, name), "--inline")
    with psycopg.connect(server_url) as connection:
        for table in ("runs", "params", "tags", "metrics", "latest_metrics"):
            connection.execute(COPIES.format(table), {"sweep": name})
        connection.execute(TRIAL_COPIES, {"sweep": name})
    best = json.loads(orch("best", name, "--format", "json").out)[0]
    assert (best["trial"], best["x"]) == (0, 1.0)
    assert orch.rows(f"select trials from sweeps where sweep = '{name}'") == [{"trials": 1005}]
    assert len(orch("runs", name, "--format", "csv").out.splitlines()) == 1 + 1005
