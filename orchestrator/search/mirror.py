"""Copies what is known of an Optuna search one way into an Optuna storage, so that `optuna-dashboard` can show it.

The storage lies in the schema `optuna` of the same database. Nothing is ever read back: the ledger is the truth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
import psycopg
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial
from optuna.trial import TrialState as StudyState
from sqlalchemy import StaticPool

from orchestrator.search.configurations import Configuration, Grouping, Result
from orchestrator.search.optuna_samplers import directions_of
from orchestrator.search.optuna_space import Encoded, encode_point
from orchestrator.spec.domains import Choice, value_key
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Params, Told, canonical_json

SCHEMA = "optuna"
LOCK = "hashtext('orch optuna mirror')"
KEY = "orch.result"  # a user attribute: which configuration with which result this is
MAX_NAME = 512  # of Optuna's column
CONNECT_TIMEOUT_S = 10


def mirror(url: str, spec: SweepSpec, history: Sequence[Told]) -> None:
    """Adds the configurations that are over and not yet there; said again, it adds nothing.

    One study a cell, named `<sweep>`, or `<sweep>/k=1, precision=bf16` where there are grid axes. A study that holds
    what this history does not is made anew: a deleted sweep had its name, or a trial was trained again. `url` is
    libpq's. Raises psycopg.OperationalError, or SQLAlchemy's, when the database is away.
    """
    if spec.search.algorithm != "optuna":
        return
    grouping = Grouping(spec)
    with _storage(url) as storage:
        for cell, known in grouping.known(history).items():
            trials = dict(_trials(spec, known.values()))
            if trials:
                _copy(storage, study_name(spec.name, grouping.cells[cell]), directions_of(spec), trials)


def unmirror(url: str, sweep: str) -> None:
    """Deletes the studies of a sweep, if there are any."""
    with psycopg.connect(url, connect_timeout=CONNECT_TIMEOUT_S) as connection:
        row = connection.execute("select to_regclass('optuna.studies')").fetchone()
    if row is None or row[0] is None:
        return
    with _storage(url) as storage:
        for name in optuna.get_all_study_names(storage):
            if name == sweep or name.startswith(f"{sweep}/"):
                optuna.delete_study(study_name=name, storage=storage)


def study_name(sweep: str, cell: Params) -> str:
    if not cell:
        return sweep
    name = f"{sweep}/{', '.join(f'{axis}={_label(value)}' for axis, value in cell.items())}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 17]}~{digest}"


@contextmanager
def _storage(url: str) -> Iterator[optuna.storages.RDBStorage]:
    """On a single connection: where Optuna nests a second transaction, both only read."""
    path = f"-csearch_path={SCHEMA}"
    with psycopg.connect(
        url, options=path, application_name="orch mirror", connect_timeout=CONNECT_TIMEOUT_S
    ) as connection:
        connection.execute(f"select pg_advisory_lock({LOCK})")  # two first mirrors would create the tables twice
        connection.execute(f"create schema if not exists {SCHEMA}")
        connection.commit()
        alone = {"creator": lambda: connection, "poolclass": StaticPool}
        storage = optuna.storages.RDBStorage("postgresql+psycopg://", engine_kwargs=alone)
        connection.execute(f"select pg_advisory_unlock({LOCK})")
        connection.commit()
        try:
            yield storage
        finally:
            storage.remove_session()


def _copy(
    storage: optuna.storages.RDBStorage, name: str, directions: Sequence[str], trials: Mapping[str, FrozenTrial]
) -> None:
    study = optuna.create_study(study_name=name, storage=storage, directions=directions, load_if_exists=True)
    there = {trial.user_attrs.get(KEY) for trial in study.get_trials(deepcopy=False)}
    if not there <= set(trials):
        optuna.delete_study(study_name=name, storage=storage)
        study, there = optuna.create_study(study_name=name, storage=storage, directions=directions), set()
    study.add_trials(trial for key, trial in trials.items() if key not in there)


def _trials(spec: SweepSpec, configurations: Iterable[Configuration]) -> Iterator[tuple[str, FrozenTrial]]:
    """The configurations that are over, by what identifies them with their results and the ranges they lie in."""
    for number, configuration in enumerate(configurations):
        result = configuration.result(len(spec.objectives))
        shown = _shown(spec, configuration)
        if result.state is StudyState.RUNNING or shown is None:
            continue
        params, distributions = shown
        forms = {name: str(form) for name, form in distributions.items()}
        what = [params, forms, result.state.name, result.values, result.step, result.value_at_step]
        key = hashlib.sha256(value_key(what).encode()).hexdigest()[:32]
        yield key, _frozen(result, params, distributions, {KEY: key, "orch.sample": number})


def _frozen(result: Result, params: dict[str, Any], distributions: Any, attributes: dict[str, Any]) -> FrozenTrial:
    is_stopped = result.value_at_step is not None and result.step is not None
    return optuna.trial.create_trial(
        state=result.state,
        values=[result.value_at_step] if is_stopped else result.values,  # as `study.tell` keeps it
        params=params,
        distributions=distributions,
        intermediate_values={result.step: result.value_at_step} if is_stopped else {},
        user_attrs=attributes,
    )


def _shown(spec: SweepSpec, configuration: Configuration) -> Encoded | None:
    """The values of the axes that exist, choices by what they are called; None if they lie outside the ranges."""
    encoded = encode_point(spec, configuration.params)
    if encoded is None:
        return None
    params, distributions = encoded
    for name, axis in spec.sampled_axes.items():
        if isinstance(axis, Choice) and name in params:
            labels = [_label(option) for option in axis.options]
            params[name], distributions[name] = labels[params[name]], CategoricalDistribution(labels)
    return params, distributions


def _label(value: Any) -> Any:
    """What a study holds for a value: plain ones as they are, the rest as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return canonical_json(value) if isinstance(value, list | tuple | dict) else str(value)
