"""Creates, re-opens and ends MLflow's runs and experiments, through MLflow's client straight on Postgres.

Carries no metrics: those are the recorder's. One call at a time, on one connection: parameters are written straight
into MLflow's table, since its `log_batch` nests one transaction in another. Importing this imports MLflow (1.5 s).
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow.environment_variables as mlflow_settings
import sqlalchemy
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlParam, SqlRun, SqlTag
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_TAG_VAL_LENGTH
from sqlalchemy import event
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from orchestrator.errors import NotFound, OrchError
from orchestrator.tracking.artifacts import checkpoint_folder, local_folder, store_file, store_text
from orchestrator.tracking.bulk import LOCK_TRIALS, MIRROR_FINDINGS
from orchestrator.tracking.experiments import SWEEP_TAG, refuse_unusable
from orchestrator.tracking.mlflow_schema import mlflow_uri
from orchestrator.tracking.shelf import shelf_of
from orchestrator.tracking.standing import Standing
from orchestrator.trial import TrialState, canonical_json, jsonable

TRIAL_TAG = "orch.trial"  # <sweep id>/<trial number>
PARAMS_FILE = "params.json"
MAX_URI_LENGTH = 200  # the width of MLflow's column `runs.artifact_uri`
NUM_CONNECTIONS = 1
KEYS_PER_QUERY = 5_000
DISCARD = sqlalchemy.text(
    """
    update public.runs set lifecycle_stage = 'deleted', status = 'KILLED', end_time = :now_ms, deleted_time = :now_ms
    where run_uuid = :run_id and not exists (select from orch_ledger.trials where run_id = :run_id)
    """
)


def param_text(value: Any) -> str:
    """A parameter as MLflow shows it: spelled as in a sweep file. The typed value is in the ledger.

    Numbers as Python prints them (`0.001`), `true`, `false`, `null`, text as it is, lists and mappings as JSON.
    """
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | list | tuple | Mapping):
        return canonical_json(value)
    return str(value)


def short_param(text: str) -> str:
    """The text itself, or, where MLflow would cut it, a marker that says where the whole of it is."""
    if len(text) <= MAX_PARAM_VAL_LENGTH:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"({len(text)} characters, sha256 {digest}: whole in the artifact {PARAMS_FILE})"


def run_artifact_uri(location: str, run_id: str) -> str:
    """Where a run's artifacts lie below its experiment's location: as MLflow has it, shorter where it cannot hold that.

    Raises OrchError if even the short form does not fit.
    """
    for address in (f"{location}/{run_id}/artifacts", f"{location}/{run_id[:12]}"):
        if len(address) <= MAX_URI_LENGTH:
            return address
    raise OrchError(
        f"the artifact root makes addresses of {len(location) + 13} characters, and MLflow holds {MAX_URI_LENGTH}:\n"
        f"{location}\nset ORCH_ARTIFACT_ROOT to a shorter folder"
    )


class Runs:
    """MLflow's runs and experiments in one database. Safe for threads."""

    def __init__(self, url: str, artifact_root: str) -> None:
        """`url` is a postgresql:// address whose MLflow tables exist; `artifact_root` a URI or an absolute folder."""
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what is told in a line
        self._uri = mlflow_uri(url)
        self._masked_uri = sqlalchemy.make_url(url).set(drivername="postgresql+psycopg").render_as_string()
        self._artifact_root = artifact_root.rstrip("/")
        self._one_at_a_time = threading.RLock()
        self._locations: dict[str, str] = {}
        self.guard: Callable[[sqlalchemy.Connection], None] = lambda connection: None
        """Called in every transaction that begins or ends an attempt; raises where another command has the sweep."""
        with _small_pool():
            self._client = MlflowClient(tracking_uri=self._uri)
        self._store = self._client._tracking_client.store
        if not event.contains(SqlRun, "before_insert", _shorten_artifact_uri):
            event.listen(SqlRun, "before_insert", _shorten_artifact_uri)

    # Experiments

    def get_or_create_experiment(self, name: str, tags: Mapping[str, str] | None = None) -> str:
        """The id of the sweep's experiment, the same for all who ask at the same moment.

        Raises AlreadyExists if the name is taken by an experiment of somebody else, or by a deleted one.
        """
        with self._one_at_a_time:
            experiment = self._client.get_experiment_by_name(name) or self._created(name, tags or {})
        refuse_unusable(
            name,
            experiment.experiment_id,
            is_deleted=experiment.lifecycle_stage != LifecycleStage.ACTIVE,
            is_ours=SWEEP_TAG in experiment.tags,
            masked_uri=self._masked_uri,
        )
        return str(experiment.experiment_id)

    def _created(self, name: str, tags: Mapping[str, str]) -> Any:
        location = f"{self._artifact_root}/{name}-{secrets.token_hex(3)}"
        if len(location) + len(f"/{'0' * 32}/artifacts") > MAX_URI_LENGTH:
            location = f"{self._artifact_root}/{secrets.token_hex(4)}"
        run_artifact_uri(location, "0" * 32)
        try:
            self._client.create_experiment(name, location, {SWEEP_TAG: name, **tags})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return self._client.get_experiment_by_name(name)  # ours, or that of whoever was faster

    def archive_experiment(self, experiment_id: str, new_name: str) -> None:
        """Frees the experiment's name by renaming it. Raises NotFound if it does not exist."""
        with self._one_at_a_time:
            experiment = self._experiment(experiment_id)
            was_deleted = experiment.lifecycle_stage != LifecycleStage.ACTIVE
            if was_deleted:  # MLflow renames only active ones
                self._client.restore_experiment(experiment_id)
            self._client.rename_experiment(experiment_id, new_name)
            if was_deleted:
                self._client.delete_experiment(experiment_id)

    def purge_experiment(self, experiment_id: str) -> None:
        """Deletes the experiment, its runs, artifacts and checkpoints for good, as `mlflow gc` does. Can be repeated.

        Raises NotFound if it does not exist or is not ours.
        """
        with self._one_at_a_time:
            experiment = self._experiment(experiment_id)
            if SWEEP_TAG not in experiment.tags:
                raise NotFound(f"MLflow's experiment {experiment_id} is not a sweep of orch (no tag {SWEEP_TAG})")
            if experiment.lifecycle_stage == LifecycleStage.ACTIVE:
                self._client.delete_experiment(experiment_id)
            for run_id, artifact_uri in self._runs_in(experiment_id):
                _delete_artifacts(artifact_uri)
                _delete_states(artifact_uri)
                self._store._hard_delete_run(run_id)
            if experiment.artifact_location.startswith(f"{self._artifact_root}/"):
                _delete_artifacts(experiment.artifact_location)
            self._store._hard_delete_experiment(experiment_id)
            self._locations.pop(experiment_id, None)

    def purge_run(self, run_id: str) -> None:
        """Deletes a run that was deleted in MLflow, with its artifacts and checkpoints, for good. Can be repeated."""
        with self._one_at_a_time:
            with Session(self._store.engine) as session:
                run = session.get(SqlRun, run_id)
            if run is None or run.lifecycle_stage == LifecycleStage.ACTIVE:
                return  # somebody restored it, or was faster
            _delete_artifacts(run.artifact_uri)
            _delete_states(run.artifact_uri)
            self._store._hard_delete_run(run_id)

    def _experiment(self, experiment_id: str) -> Any:
        try:
            return self._client.get_experiment(experiment_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                raise NotFound(f"MLflow has no experiment {experiment_id}") from error
            raise

    def _runs_in(self, experiment_id: str) -> list[tuple[str, str]]:
        with Session(self._store.engine) as session:
            query = session.query(SqlRun.run_uuid, SqlRun.artifact_uri)
            return [tuple(row) for row in query.filter(SqlRun.experiment_id == int(experiment_id))]

    # Runs

    def create(
        self, experiment_id: str, trial_key: str, run_name: str, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        """A new run with its parameters and tags; returns its id. `trial_key` is `<sweep id>/<trial number>`.

        A parameter longer than MLflow keeps is shown as a marker, and all parameters then lie in `params.json` too.
        """
        begun = Standing(TrialState.RUNNING, attempt=1)
        all_tags = {"mlflow.user": _user(), **begun.tags, **tags, TRIAL_TAG: trial_key}
        with self._one_at_a_time:
            run = self._client.create_run(
                experiment_id, tags={name: _short_tag(text) for name, text in all_tags.items()}, run_name=run_name
            )
            run_id = str(run.info.run_id)
        self.log_params(run_id, params)
        return run_id

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Writes the run's parameters; the same ones may be written again."""
        texts = {name: param_text(value) for name, value in params.items()}
        rows = [{"run_uuid": run_id, "key": name, "value": short_param(text)} for name, text in texts.items()]
        if rows:
            with self._one_at_a_time, self._store.engine.begin() as connection:
                connection.execute(insert(SqlParam).on_conflict_do_nothing(), rows)
        if any(len(text) > MAX_PARAM_VAL_LENGTH for text in texts.values()):
            values = {name: jsonable(value) for name, value in params.items()}
            self.log_text(run_id, json.dumps(values, indent=2, ensure_ascii=False), PARAMS_FILE)

    def discard(self, run_id: str) -> None:
        """Deletes a run, as `mlflow runs delete` does, unless a trial has it meanwhile."""
        with self._one_at_a_time, self._store.engine.begin() as connection:
            connection.execute(DISCARD, {"run_id": run_id, "now_ms": int(time.time() * 1000)})

    def adopt(self, trial_keys: Iterable[str]) -> dict[str, str]:
        """The runs that already exist for these trials, by trial key: what a crash left without a row in the ledger."""
        keys = sorted(set(trial_keys))
        found: dict[str, str] = {}
        with self._one_at_a_time, Session(self._store.engine) as session:
            for start in range(0, len(keys), KEYS_PER_QUERY):
                query = (
                    session.query(SqlTag.value, SqlTag.run_uuid)
                    .join(SqlRun, SqlRun.run_uuid == SqlTag.run_uuid)
                    .filter(SqlTag.key == TRIAL_TAG, SqlTag.value.in_(keys[start : start + KEYS_PER_QUERY]))
                    .filter(SqlRun.lifecycle_stage == LifecycleStage.ACTIVE)
                    .order_by(
                        SqlRun.start_time.desc(), SqlRun.run_uuid.desc()
                    )  # so that the oldest comes last and wins
                )
                found.update((key, run_id) for key, run_id in query)
        return found

    def reopen(
        self, run_id: str, attempt: int, first_step: int = 0, tags: Mapping[str, str] | None = None
    ) -> dt.datetime | None:
        """Makes the run RUNNING again for another attempt, whose steps supersede older ones from `first_step` on.

        MLflow's latest values of superseded steps are removed, so that its pages show the new attempt; the history
        stays. Returns the moment after the newest point of the run: the new attempt must not start earlier, or its
        points could not be told from the old ones (clocks differ between hosts). None without points.
        Raises NotFound if the run does not exist or is deleted.
        """
        begun = Standing(TrialState.RUNNING, attempt=attempt)
        with self._editing(run_id, {**begun.tags, **(tags or {})}, begun.unsaid) as (session, run):
            run.status, run.end_time = begun.status, None
            superseded = session.query(SqlLatestMetric).filter(SqlLatestMetric.run_uuid == run_id)
            superseded.filter(SqlLatestMetric.step >= first_step).delete(synchronize_session=False)
            newest_ms = (
                session.query(sqlalchemy.func.max(SqlMetric.timestamp)).filter(SqlMetric.run_uuid == run_id).scalar()
            )
        if newest_ms is None:
            return None
        return dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(milliseconds=int(newest_ms) + 1)

    def terminate(
        self,
        run_id: str,
        state: TrialState,
        reason: str = "",
        diverged_at: int | None = None,
        tags: Mapping[str, str] | None = None,
        trial_id: int | None = None,
    ) -> None:
        """Ends the run in one transaction, and with `trial_id` brings its tags in line with what was found.

        Raises NotFound if the run does not exist or is deleted.
        """
        ended = Standing(state, reason, diverged_at)
        with self._editing(run_id, {**ended.tags, **(tags or {})}) as (session, run):
            run.status, run.end_time = ended.status, int(time.time() * 1000)
            if trial_id is not None:
                _mirror_findings(session.connection(), trial_id)

    def mirror_findings(self, trial_id: int) -> None:
        """Brings the tags `orch.finding.*` and `orch.verdict` of a trial's run in line with the ledger."""
        with self._one_at_a_time, self._store.engine.begin() as connection:
            _mirror_findings(connection, trial_id)

    @contextlib.contextmanager
    def _editing(
        self, run_id: str, tags: Mapping[str, str], dropped_tags: Sequence[str] = ()
    ) -> Iterator[tuple[Any, SqlRun]]:
        """A transaction on one active run, by MLflow's own tables, which also sets and drops tags."""
        with self._one_at_a_time, Session(self._store.engine) as session, session.begin():
            self.guard(session.connection())
            run = session.get(SqlRun, run_id)
            if run is None or run.lifecycle_stage != LifecycleStage.ACTIVE:
                raise NotFound(f"MLflow has no run {run_id}" + ("; it was deleted" if run is not None else ""))
            if dropped_tags:
                dropped = session.query(SqlTag).filter(SqlTag.run_uuid == run_id, SqlTag.key.in_(dropped_tags))
                dropped.delete(synchronize_session=False)
            rows = [{"run_uuid": run_id, "key": name, "value": _short_tag(text)} for name, text in sorted(tags.items())]
            upsert = insert(SqlTag).values(rows)
            session.execute(
                upsert.on_conflict_do_update(index_elements=["key", "run_uuid"], set_={"value": upsert.excluded.value})
            )
            yield session, run

    # Artifacts

    def artifact_uri(self, experiment_id: str, run_id: str) -> str:
        """Where the run's artifacts lie."""
        with self._one_at_a_time:
            if experiment_id not in self._locations:
                self._locations[experiment_id] = str(self._experiment(experiment_id).artifact_location)
        return run_artifact_uri(self._locations[experiment_id], run_id)

    def log_file(self, run_id: str, path: Path, name: str | None = None) -> None:
        """Stores a file with the run, under its own name or `name`, which may contain folders. Raises OSError."""
        store_file(self._stored_artifact_uri(run_id), path, name)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Stores a text as the run's artifact `name`, in UTF-8. Raises OSError."""
        store_text(self._stored_artifact_uri(run_id), text, name)

    def _stored_artifact_uri(self, run_id: str) -> str:
        with self._one_at_a_time, Session(self._store.engine) as session:
            address = session.query(SqlRun.artifact_uri).filter(SqlRun.run_uuid == run_id).scalar()
        if address is None:
            raise NotFound(f"MLflow has no run {run_id}")
        return str(address)

    def close(self) -> None:
        """Gives the connections back. The object can be used again afterwards."""
        with self._one_at_a_time:
            self._store.engine.dispose()


@contextlib.contextmanager
def _small_pool() -> Iterator[None]:
    """MLflow reads its pool's size from the environment when it makes the engine; its default would keep five open.

    `MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW=0` is ignored by MLflow 3.17 (it tests for truth), so what bounds the
    connections is our lock.
    """
    setting = mlflow_settings.MLFLOW_SQLALCHEMYSTORE_POOL_SIZE
    before = os.environ.get(setting.name)
    setting.set(NUM_CONNECTIONS)
    try:
        yield
    finally:
        if before is None:
            setting.unset()
        else:
            os.environ[setting.name] = before


def _mirror_findings(connection: sqlalchemy.Connection, trial_id: int) -> None:
    for statement in (LOCK_TRIALS, MIRROR_FINDINGS):
        connection.exec_driver_sql(statement, {"trial_ids": [trial_id]})


def _shorten_artifact_uri(_mapper: Any, _connection: Any, run: SqlRun) -> None:
    """Called by SQLAlchemy before a run is inserted: Postgres would refuse an address longer than the column."""
    if run.artifact_uri and len(run.artifact_uri) > MAX_URI_LENGTH:
        location = run.artifact_uri.removesuffix(f"/{run.run_uuid}/artifacts")
        run.artifact_uri = run_artifact_uri(location, run.run_uuid)


def _short_tag(text: str) -> str:
    return (
        text if len(text) <= MAX_TAG_VAL_LENGTH else f"{text[: MAX_TAG_VAL_LENGTH - 40]} ... ({len(text)} characters)"
    )


def _delete_artifacts(artifact_uri: str) -> None:
    folder = local_folder(artifact_uri)
    if folder is None:
        get_artifact_repository(artifact_uri).delete_artifacts()
    elif folder.exists():
        shutil.rmtree(folder)


def _delete_states(artifact_uri: str) -> None:
    if (folder := checkpoint_folder(artifact_uri)) is not None:
        _delete_artifacts(str(folder))
    elif (shelf := shelf_of(artifact_uri)) is not None:
        shelf.clear()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        return str(os.getuid())
