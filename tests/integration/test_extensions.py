"""A sweep whose file has changed: what only adds trials goes on with it, anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from orchestrator.extension import extension_of, with_kept_points
from orchestrator.ledger.models import SweepState
from orchestrator.ledger.rows import SweepRow, TrialRow
from orchestrator.search import make_searcher
from orchestrator.spec import SweepSpec, to_json
from orchestrator.trial import TrialState, config_hash, jsonable
from orchestrator.workload import describe, flatten

HEAD = "workload: orch_lab:Trivial\nmetric: val/loss\n"
BEGUN = "params: {steps: 2, x: {grid: [0, 1]}, seed: {grid: [0, 1]}}\n"
RANDOM = "params: {steps: 2, x: {uniform: [0, 1]}, seed: {grid: [0]}}\nsearch: {algorithm: random, samples: 3}\n"


def stored(spec: SweepSpec, drawn: SweepSpec | None = None) -> tuple[SweepRow, list[TrialRow]]:
    """What the ledger holds of a finished sweep; of a search that learns, with the points of `drawn`."""
    workload = describe(spec.workload)
    sweep: dict[str, Any] = dict.fromkeys(SweepRow.__dataclass_fields__)
    row: dict[str, Any] = dict.fromkeys(TrialRow.__dataclass_fields__)
    trials = [
        TrialRow(
            **{
                **row,
                "id": 100 + number,
                "number": number,
                "params": dict(one.params),
                "config": flatten(workload.resolve(one.params)),
                "config_hash": config_hash(one.params),
                "cell": dict(one.cell),
                "sample": one.sample,
                "state": TrialState.FINISHED,
            }
        )
        for number, one in enumerate(make_searcher(drawn or spec).ask([]) or ())
    ]
    return SweepRow(
        **{**sweep, "spec": json.loads(json.dumps(jsonable(to_json(spec)))), "state": SweepState.FINISHED}
    ), trials


def places(spec_of: Any, before: str, after: str) -> Any:
    """What the file `after` makes of a finished sweep of the file `before`."""
    spec = spec_of(after)
    return extension_of(*stored(spec_of(before)), spec, describe(spec.workload))


@pytest.mark.parametrize(
    ("after", "num_new"),
    [
        ("params: {steps: 2, x: {grid: [0, 1]}, seed: {grid: [0, 1, 2]}}\n", 2),
        ("params: {steps: 2, x: {grid: [2, 1, 0]}}\nseeds: 2\n", 2),
        ("params: {steps: 2, x: {grid: [0, 1]}, k: {grid: [1, 2]}, seed: {grid: [0, 1]}}\n", 4),  # k was its default, 1
        ("params: {steps: {grid: [2, 4]}, x: {grid: [0, 1]}, seed: {grid: [0, 1]}}\n", 4),  # steps was fixed
        ("params: {steps: 2, k: 1, x: {grid: [0, 1]}, seed: {grid: [0, 1]}}\n", 0),  # the default, spelled out
        ("params: {steps: 2, x: {uniform: [0, 1]}}\nseeds: 2\nsearch: {algorithm: random, samples: 5}\n", 6),
    ],
    ids=["more seeds", "more values", "a default becomes an axis", "a fixed one does", "spelled out", "sampled now"],
)
def test_a_file_that_only_adds_trials_keeps_the_existing_ones(spec_of: Any, after: str, num_new: int) -> None:
    found = places(spec_of, BEGUN, after)
    assert (found.is_possible, len(found.places), found.num_new) == (True, 4, num_new)
    for one in found.places:  # same training, in the words of the new file
        workload = describe("orch_lab:Trivial")
        assert flatten(workload.resolve(one.candidate.params)) == one.trial.config
        assert list(one.candidate.params) == list(found.places[0].candidate.params)


@pytest.mark.parametrize(
    ("after", "lines"),
    [
        (BEGUN.replace("[0, 1]}, s", "[1]}, s"), ["params.x: grid [0, 1] -> 1", "2 of 4 trials: 0 (x=0, seed=0), 2"]),
        (BEGUN + "exclude: [{x: 1, seed: 1}]\n", ["it leaves out 1 of 4 trials: 3 (x=1, seed=1)"]),
        (BEGUN.replace("steps: 2", "steps: 3"), ["params.steps: 2 -> 3", "it leaves out 4 of 4 trials"]),
        (BEGUN + "log_every: 5\n", ["log_every: 10 -> 5", "only what adds trials may change, not log_every"]),
        (BEGUN + "scheduler: {algorithm: asha, max_steps: 2}\n", ["only what adds trials may change, not scheduler"]),
    ],
    ids=["a value less", "excluded now", "another constant", "a setting", "a scheduler"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_difference_and_the_trials_it_leaves_out(
    spec_of: Any, after: str, lines: list[str]
) -> None:
    found = places(spec_of, BEGUN, after)
    assert not found.is_possible
    refusal = "\n".join(found.refusal())
    assert all(line in refusal for line in lines), refusal


def test_an_exclusion_that_no_trial_matches_or_a_condition_that_all_meet_is_an_extension(spec_of: Any) -> None:
    assert (
        places(
            spec_of, BEGUN, BEGUN.replace("[0, 1]}, seed", "[0, 1, 2]}, seed") + "exclude: [{x: 2, seed: 1}]\n"
        ).num_new
        == 1
    )
    wider = "params: {steps: 2, x: {grid: [0, 1]}, k: {grid: [1, 2, 3]}, seed: {grid: [0, 1]}}\nwhen: {k: {x: 1}}\n"
    found = places(spec_of, BEGUN, wider)
    assert (found.is_possible, found.num_new) == (True, 4)
    assert {config["k"] for config in (one.candidate.params for one in found.places)} == {1}


def test_points_of_a_narrower_range_count_among_the_samples_and_get_the_new_seeds(spec_of: Any) -> None:
    wider = RANDOM.replace("[0, 1]", "[0, 100]").replace("samples: 3", "samples: 5").replace("[0]", "[0, 1]")
    found = places(spec_of, RANDOM, wider)
    assert (found.is_possible, len(found.places), found.num_new) == (True, 3, 7)
    assert sorted(one.candidate.sample for one in found.places) == [0, 1, 2]
    assert not places(
        spec_of, RANDOM, RANDOM.replace("[0, 1]", "[0, 100]").replace("samples: 3", "samples: 2")
    ).is_possible
    assert "not search.seed" in places(spec_of, RANDOM, RANDOM.replace("samples", "seed: 1, samples")).refusal()[-1]


def points_by_cell(spec_of: Any, before: str, after: str) -> dict[Any, set[Any]]:
    """The values of x and sleep_s in each k of the extended sweep, old trials and new ones; all old ones are there."""
    found = places(spec_of, before, after)
    assert found.is_possible, found.refusal()
    searcher = make_searcher(with_kept_points(found.spec, found.known))
    cells: dict[Any, set[Any]] = {}
    for one in searcher.ask([]) or ():
        cells.setdefault(one.params.get("k"), set()).add((one.params["x"], one.params.get("sleep_s")))
    assert all((known["x"], known.get("sleep_s")) in cells[known.get("k")] for known in found.known)
    return cells


def test_with_a_wider_range_and_a_new_cell_all_cells_get_the_same_draws(spec_of: Any) -> None:
    wider = RANDOM.replace("[0, 1]", "[0, 10]").replace("steps: 2", "steps: 2, k: {grid: [1, 2]}")
    cells = points_by_cell(spec_of, RANDOM, wider)
    assert cells[1] == cells[2]
    assert all(x <= 1 for x, _ in cells[1])  # three samples: none was drawn from the new part
    more = points_by_cell(spec_of, RANDOM, wider.replace("samples: 3", "samples: 5"))
    assert more[1] == more[2] > cells[1]
    assert len(more[1]) == 5


def test_no_cell_loses_a_point_to_those_of_another(spec_of: Any) -> None:
    narrow = (
        "params: {x: {choice: [1, 2, 3, 4]}, sleep_s: {choice: [0, 1, 2]}, k: {grid: [1, 2]}}\n"
        "search: {algorithm: random, samples: 4}\n%s\n"
    )
    wider = narrow.replace("2, 3, 4]", "2, 3, 4, 5, 6]")
    for rule in ("exclude: [{k: 1, x: [1, 2]}]", "when: {sleep_s: {k: 2}}", ""):
        points_by_cell(spec_of, narrow % rule, wider % rule)
    cells = points_by_cell(spec_of, narrow % rule, wider.replace("grid: [1, 2]", "grid: [1, 2, 3]") % rule)
    assert cells[1] == cells[2] == cells[3]
    ranges = narrow.replace("choice: [1, 2, 3, 4]", "uniform: [1, 4]") % "when: {sleep_s: {k: 2}}"
    cells = points_by_cell(spec_of, ranges, ranges.replace("[1, 4]", "[1, 9]").replace("samples: 4", "samples: 6"))
    assert {x for x, _ in cells[1]} == {x for x, _ in cells[2]}


@pytest.mark.parametrize("samples", [3, 4])
def test_an_entry_to_try_first_that_was_tried_takes_no_place_of_others(spec_of: Any, samples: int) -> None:
    narrow = (
        "params: {steps: 2, k: {int: [1, 3]}, x: {uniform: [0, 1]}}\n"
        "search: {algorithm: random, samples: 3, enqueue: [{k: 2}]}\n"
    )
    wider = narrow.replace("[0, 1]", "[0, 2]").replace("samples: 3", f"samples: {samples}")
    found = places(spec_of, narrow, wider)
    assert (found.is_possible, found.num_new) == (True, samples - 3)


def test_a_point_to_try_first_may_leave_the_file_once_it_was_tried(spec_of: Any) -> None:
    found = places(spec_of, RANDOM.replace("samples: 3", "samples: 3, enqueue: [{x: 0.5}]"), RANDOM)
    assert (found.is_possible, len(found.places), found.num_new) == (True, 3, 0)


def test_an_optuna_search_goes_on_with_the_points_it_has(spec_of: Any) -> None:
    optuna = RANDOM.replace("random", "optuna")
    wider = spec_of(optuna.replace("[0, 1]", "[0, 100]").replace("samples: 3", "samples: 5").replace("[0]", "[0, 1]"))
    found = extension_of(*stored(spec_of(optuna), spec_of(RANDOM)), wider, describe(wider.workload))
    assert (found.is_possible, len(found.places), found.num_new) == (True, 3, 7)
    narrower = spec_of(optuna.replace("[0, 1]", "[2, 3]"))
    assert len(extension_of(*stored(spec_of(optuna), spec_of(RANDOM)), narrower, describe(wider.workload)).outside) == 3


def test_a_larger_budget_has_room_for_more_trials_and_a_smaller_one_leaves_some_out(spec_of: Any) -> None:
    found = places(spec_of, RANDOM + "budget: {trials: 2}\n", RANDOM)
    assert (found.is_possible, found.num_new) == (True, 1)
    refusal = places(spec_of, RANDOM, RANDOM + "budget: {trials: 2}\n").refusal()
    assert refusal[0] == "budget.trials: not set -> 2"
    assert refusal[1].startswith("it leaves out 1 of 3 trials: ")


def test_a_trained_population_takes_no_new_members(spec_of: Any) -> None:
    rest = "scheduler: {algorithm: pbt, max_steps: 2, interval_steps: 1, perturb: [x]}\nlog_every: 1\n"
    found = places(spec_of, RANDOM + rest, RANDOM.replace("samples: 3", "samples: 5") + rest)
    assert "a population that has been trained takes no new members" in found.refusal()[-1]


def test_an_extended_sweep_trains_only_what_is_new_and_every_view_knows_all_of_it(
    orch: Any, name: str, server_url: str
) -> None:
    file = orch.sweep_file(HEAD + BEGUN + "unstable: {metric: val/loss, above: 1.5, relative_to: {x: 1}}\n", name)
    trials = "select trial, run_id, started_at from orch.runs where sweep = %s order by trial"
    cells = "select cell ->> 'x', cell ->> 'k', n, unstable from orch.stability where sweep = %s order by 1, 2"
    rows = (
        "select count(*), count(distinct params), count(distinct config_hash) from orch_ledger.trials where sweep_id ="
    )
    orch("sweep", file, "--inline")
    with psycopg.connect(server_url, autocommit=True) as connection:
        begun = connection.execute(trials, (name,)).fetchall()
        file.write_text(file.read_text().replace("seed: {grid: [0, 1]}", "seed: {grid: [0, 1, 2]}, k: {grid: [1, 2]}"))
        done = orch("sweep", file, "--inline", "--resume")
        assert f"extends {name}: 4 trials are there, 8 are new" in done.out + done.err
        assert f"{name}: 12/12 finished" in done.out
        assert "6/6 -> 0/6" in done.out  # unstable, x 0 -> 1
        assert connection.execute(trials, (name,)).fetchall()[:4] == begun
        shares = [("0.0", "1", 3, 3), ("0.0", "2", 3, 3), ("1.0", "1", 3, 0), ("1.0", "2", 3, 0)]
        assert connection.execute(cells, (name,)).fetchall() == shares
        counts = connection.execute(f"{rows} (select id from orch_ledger.sweeps where name = %s)", (name,)).fetchone()
        assert counts == (12, 12, 12)  # none doubled
    shorter = orch("sweep", file, "--inline", "--resume", "--set", "params.seed={grid: [0, 2]}", expect=2)
    assert "it leaves out 4 of 12 trials: 2 (" in shorter.err
    foretold = json.loads(orch("plan", file, "--json", "--from-history").out)["estimate"]
    assert 0 < foretold["minutes"] < 1
    assert foretold["basis"].startswith("from ")


def test_only_new_structures_are_checked_and_an_error_there_leaves_the_sweep_as_it_was(
    orch: Any, name: str, server_url: str
) -> None:
    text = "workload: orch_lab:Checked\nmetric: loss\nparams: {bug: {grid: [none%s]}, k: {grid: [1, 2]}}\n"
    file = orch.sweep_file(text % "", name)
    orch("sweep", file, "--inline", "--set", "preflight=false")
    file.write_text(text % ", factor")
    refused = orch("sweep", file, "--inline", "--resume", expect=2)
    assert "checking 2 structures" in refused.out + refused.err  # of 4
    assert "loss_factor" in refused.err
    with psycopg.connect(server_url) as connection:
        sweep = connection.execute("select trials, state from orch.sweeps where sweep = %s", (name,)).fetchone()
    assert sweep == (2, "finished")
    file.write_text(text % ", tied")
    orch("sweep", file, "--inline", "--resume")
    query = "select check_name, message from orch.findings where sweep = %s and run_id is null"
    with psycopg.connect(server_url) as connection:
        assert connection.execute(query, (name,)).fetchall() == [
            ("router_ties", "in all 2 structures: every second token")
        ]
