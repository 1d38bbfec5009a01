"""The Optuna storage beside a sweep: what optuna-dashboard would read there."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import optuna
import psycopg
import pytest

from orchestrator.search import make_searcher
from orchestrator.search.mirror import mirror, study_name, unmirror
from orchestrator.spec import Metric, SweepSpec
from orchestrator.spec.domains import Choice, Grid, Uniform
from orchestrator.spec.sweep_spec import Search, When
from orchestrator.trial import Told, TrialState

SPEC = SweepSpec(
    name="lab",
    workload="toy",
    metric=Metric("val/mse"),
    fixed={},
    axes={
        "k": Grid((1, 2)),
        "lr": Uniform(1e-4, 1.0, log=True),
        "optimizer": Choice(("sgd", "adam", [1, 2])),
        "beta": Uniform(0.5, 1.0),
        "seed": Grid((0, 1)),
    },
    search=Search("optuna", samples=4),
    when={"beta": When({"optimizer": ("adam",)}, 0.9)},
)
ENDINGS = [
    (TrialState.FINISHED, 1.5, None),
    (TrialState.DIVERGED, math.nan, None),
    (TrialState.STOPPED, 2.5, 30),
    (TrialState.RUNNING, None, None),
]


@pytest.fixture(scope="module")
def history() -> list[Told]:
    """Four configurations of each cell, with both seeds: finished, diverged, stopped and running."""
    searcher, history = make_searcher(SPEC), []
    while batch := searcher.ask(history):
        for candidate in batch:
            state, value, step = ENDINGS[candidate.sample]
            history.append(Told(candidate, state, value, (), step))
    return history


def studies(url: str) -> dict[str, optuna.Study]:
    """As `optuna-dashboard` finds them."""
    storage = url.replace("postgresql://", "postgresql+psycopg://") + ("&" if "?" in url else "?")
    storage += "options=-csearch_path%3Doptuna"
    return {name: optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)}


def test_each_cell_is_a_study_of_the_configurations_that_are_over(empty_database_url, history):
    mirror(empty_database_url, SPEC, history)
    found = studies(empty_database_url)
    assert set(found) == {"lab/k=1", "lab/k=2"}
    for k in (1, 2):
        trials = found[f"lab/k={k}"].trials
        assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "PRUNED"]
        assert [trial.value for trial in trials] == [1.5, None, 2.5]
        assert trials[2].intermediate_values == {30: 2.5}
        points = {t.candidate.sample: t.candidate.params for t in history if t.candidate.cell == {"k": k}}
        for trial in trials:
            point = points[trial.number]
            shown = "[1,2]" if point["optimizer"] == [1, 2] else point["optimizer"]
            beta = {"beta": point["beta"]} if shown == "adam" else {}
            assert trial.params == {"lr": point["lr"], "optimizer": shown, **beta}


def test_said_again_it_adds_what_is_new_and_makes_anew_what_is_no_longer_so(empty_database_url, history):
    mirror(empty_database_url, SPEC, history[:4])
    mirror(empty_database_url, SPEC, history)
    mirror(empty_database_url, SPEC, history)
    assert [len(study.trials) for study in studies(empty_database_url).values()] == [3, 3]
    again = [replace(told, state=TrialState.FINISHED, objective=0.5, last_step=None) for told in history]
    mirror(empty_database_url, SPEC, again)
    assert [[t.value for t in study.trials] for study in studies(empty_database_url).values()] == [[0.5] * 4] * 2
    wider = replace(SPEC, axes={**SPEC.axes, "optimizer": Choice(("sgd", "adam", [1, 2], "lion"))})
    mirror(empty_database_url, wider, again)  # Optuna itself refuses other choices in the same study
    assert [len(study.trials) for study in studies(empty_database_url).values()] == [4, 4]


def test_two_first_mirrors_at_once_and_their_removal(empty_database_url, history):
    other = replace(SPEC, name="lab_2", axes={name: axis for name, axis in SPEC.axes.items() if name != "k"})
    told = [replace(t, candidate=replace(t.candidate, cell={})) for t in history if t.candidate.params["k"] == 1]
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(mirror, empty_database_url, SPEC, history)
        two = pool.submit(mirror, empty_database_url, other, told)
        assert (one.result(), two.result()) == (None, None)
    assert set(studies(empty_database_url)) == {"lab/k=1", "lab/k=2", "lab_2"}
    with psycopg.connect(empty_database_url) as connection:
        schemas = connection.execute("select distinct schemaname from pg_tables where tablename = 'studies'").fetchall()
    assert schemas == [("optuna",)]
    unmirror(empty_database_url, "lab")
    assert set(studies(empty_database_url)) == {"lab_2"}


def test_where_nothing_was_mirrored_nothing_is_made_for_a_removal_or_another_search(empty_database_url, history):
    unmirror(empty_database_url, "lab")
    mirror(empty_database_url, replace(SPEC, search=Search("random", samples=4)), history)
    with psycopg.connect(empty_database_url) as connection:
        assert connection.execute("select to_regnamespace('optuna')").fetchone() == (None,)


def test_the_name_of_a_study_fits_its_column_and_stays_one_of_a_kind():
    names = {study_name("lab", {"text": "x" * 600 + end}) for end in "ab"}
    assert len(names) == 2
    assert {len(name) for name in names} == {512}
