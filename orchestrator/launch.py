"""The composition root of a sweep: puts the parts together in order. Holds no rule of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from orchestrator.errors import AlreadyExists, DatabaseLost, NotFound, ResourceError
from orchestrator.reports.table import Table, short
from orchestrator.search import make_searcher, plan_count, plan_notes
from orchestrator.settings import artifact_root
from orchestrator.spec import SweepSpec, parse_sweep, read_sweep_file, spec_difference, to_json
from orchestrator.spec.domains import Domain, Grid
from orchestrator.trial import TrialState
from orchestrator.workload import Description, describe

if TYPE_CHECKING:  # heavy or needing a database: imported where a sweep really starts
    from orchestrator.database.borrow import Engine
    from orchestrator.execution.sweep_run import Observer, SweepRun
    from orchestrator.ledger.store import Ledger, SweepRow
    from orchestrator.reports.source import Query
    from orchestrator.tracking.recorder import Remainder
    from orchestrator.tracking.runs import Runs
    from orchestrator.workspace import Workspace

VIEW_REFRESH_S = 10.0
INTERRUPTED = 130


@dataclass(frozen=True)
class SweepRequest:
    """What the person typed."""

    spec: Path
    resume: bool = False
    overrides: Sequence[str] = ()
    name: str | None = None
    max_concurrent: int | None = None
    address: str | None = None
    inline: bool = False
    home: Path | None = None

    @property
    def all_overrides(self) -> Sequence[str]:
        if self.max_concurrent is None:
            return self.overrides
        return [*self.overrides, f"resources.max_concurrent={self.max_concurrent}"]

    @property
    def orch(self) -> list[str]:
        """How to call `orch` so that it finds the same home."""
        return ["orch"] if self.home is None else ["orch", "--home", _shell(str(self.home))]

    def command(self, *, resume: bool) -> str:
        """The command line that would do the same."""
        parts = [*self.orch, "sweep", _shell(str(self.spec)), *(f"--set {_shell(one)}" for one in self.overrides)]
        parts += [f"--name {self.name}"] if self.name else []
        parts += [f"--address {self.address}"] if self.address else []
        parts += [f"--max-concurrent {self.max_concurrent}"] if self.max_concurrent else []
        parts += ["--inline"] if self.inline else []
        parts += ["--resume"] if resume else []
        return " ".join(parts)


@dataclass(frozen=True)
class SweepEnding:
    """What `orch sweep` prints last."""

    sweep: str
    exit_code: int
    counts: Mapping[str, int]
    comparison: Table
    effects: Table
    remarks: Sequence[str]
    next_commands: Sequence[tuple[str, str]]

    @property
    def num_trials(self) -> int:
        return sum(self.counts.values())

    @property
    def num_results(self) -> int:
        return sum(count for state, count in self.counts.items() if TrialState(state).is_result)


# Planning


def read_spec(path: Path, overrides: Sequence[str], name: str | None) -> SweepSpec:
    """The sweep file as a spec. Raises SpecError with every mistake in it."""
    return parse_sweep(read_sweep_file(path), str(path), describe, overrides, name)


def plan_sweep(path: Path, overrides: Sequence[str], name: str | None) -> Table:
    """What would run. Opens no database and starts nothing."""
    spec = read_spec(path, overrides, name)
    rows = [[axis, *_described(domain)] for axis, domain in spec.axes.items()]
    rows += [[field, "fixed", short(value)] for field, value in spec.fixed.items()]
    total = plan_count(spec)
    wanted = spec.resources.max_concurrent
    notes = [
        f"{total} trials of {spec.workload}, {spec.search.algorithm} search, {spec.metric.mode} {spec.metric.name}",
        f"each {spec.resources.cpu:g} CPU, {spec.resources.gpu:g} GPU; {wanted or 'as many as fit'} at once",
        *plan_notes(spec),
    ]
    return Table(["parameter", "kind", "values"], rows, title=spec.description or spec.name, notes=notes)


def _described(domain: Domain) -> tuple[str, str]:
    if isinstance(domain, Grid):
        return "grid", ", ".join(short(value) for value in domain.values)
    return "sampled", str(domain)


# Running


def run_sweep(request: SweepRequest, observer: Observer) -> SweepEnding:
    """Runs what is new or left of a sweep. Raises OrchError, with nothing started, when it cannot."""
    spec = read_spec(request.spec, request.all_overrides, request.name)
    workload = describe(spec.workload)
    from orchestrator.ledger.store import Ledger
    from orchestrator.tracking.experiments import check_experiment_name
    from orchestrator.workspace import open_workspace

    workspace = open_workspace(request.home)
    engine = workspace.database.engine("orch sweep")
    ledger = Ledger(engine)
    found = ledger.find_sweep(spec.name)
    is_over = found is not None and _nothing_left(ledger, found)
    if not (is_over and request.resume):
        with workspace.database.connect("orch sweep") as connection:
            check_experiment_name(connection, spec.name, workspace.database.masked_mlflow_uri)
    existing = _existing_sweep(found, spec, request)
    if existing is not None and is_over:
        _write_what_is_left(workspace)
        return _ending(workspace.query, existing.name, request, exit_code(ledger.counts(existing.id)))
    return _start(workspace, engine, spec, workload, request, observer, existing)


def _existing_sweep(existing: SweepRow | None, spec: SweepSpec, request: SweepRequest) -> SweepRow | None:
    """The sweep to continue, or None to create one. Raises AlreadyExists when the file asks for something else."""
    if existing is None:
        return None
    if not request.resume:
        raise AlreadyExists(
            f"sweep {spec.name!r} exists already ({existing.state})\n"
            f"  {request.command(resume=True):<60}  continue it\n"
            f"  {replace(request, name='NEW_NAME').command(resume=False):<60}  start another"
        )
    if differences := spec_difference(existing.spec, to_json(spec)):
        raise AlreadyExists(
            "\n".join([f"{request.spec}  spec differs from sweep {spec.name!r}:", *(f"  {one}" for one in differences)])
            + f"\n  give the changed sweep a name of its own: {replace(request, name='NEW_NAME').command(resume=False)}"
        )
    return existing


def _write_what_is_left(workspace: Workspace) -> None:
    """Brings into the database what an earlier command had to leave in the journal."""
    from orchestrator.execution.inline import CLOSE_TIMEOUT_S
    from orchestrator.tracking.journal import orphans
    from orchestrator.tracking.recorder import Recorder

    folder = workspace.journal
    if orphans(folder):
        recorder = Recorder(workspace.database.connect, folder)
        recorder.drain(CLOSE_TIMEOUT_S)
        recorder.close(CLOSE_TIMEOUT_S)


def _nothing_left(ledger: Ledger, sweep: SweepRow) -> bool:
    counts = ledger.counts(sweep.id)
    unfinished = (TrialState.WAITING, TrialState.RUNNING, TrialState.KILLED, TrialState.LOST)
    return sweep.state == "finished" and not any(counts.get(state) for state in unfinished)


def _start(
    workspace: Workspace,
    engine: Engine,
    spec: SweepSpec,
    workload: Description,
    request: SweepRequest,
    observer: Observer,
    existing: SweepRow | None,
) -> SweepEnding:
    from orchestrator.ledger.store import Ledger
    from orchestrator.places import check_places

    ledger = Ledger(engine)
    if existing is not None:
        with ledger.hold(existing.id):
            pass  # somebody else's sweep is refused before Ray is started; it is taken for good below
    check_places(workspace.settings, workspace.home)
    mlflow_import = threading.Thread(target=_import_mlflow, daemon=True)
    with Signals() as signals, _backend(workspace, spec, workload, request, mlflow_import) as backend:
        mlflow_import.join()
        from orchestrator.tracking.runs import Runs

        runs = Runs(workspace.database.url, artifact_root(workspace.settings, workspace.home))
        sweep = existing or create_sweep(ledger, runs, spec, workload)
        with ledger.hold(sweep.id) as hold, _abandoned_on_error(ledger, sweep.id):
            refresh_views = view_refresher(engine, sweep.name)
            run = open_run(ledger, runs, spec, workload, sweep, observer, backend, refresh_views, hold.renew)
            signals.arm(run.interrupt)
            observer.opened(run, max(plan_count(spec), len(run.trials)), backend.num_workers)
            remainders = backend.run(run)
            if run.lost_to is not None:
                raise run.lost_to
            code = run.patiently(lambda: settle(ledger, sweep, run, remainders))
    ending = _ending(workspace.query, sweep.name, request, code)
    return replace(ending, remarks=[*_remarks(run, remainders), *ending.remarks])


@contextlib.contextmanager
def _abandoned_on_error(ledger: Ledger, sweep_id: int) -> Iterator[None]:
    """An error that ends the command leaves no trial `running`, as far as the database still listens."""
    from orchestrator.database.connection import is_away, why_away

    try:
        yield
    except AlreadyExists:
        raise  # another command drives the sweep now: what runs is its
    except DatabaseLost:
        raise
    except Exception as error:
        try:
            ledger.abandon(sweep_id, f"the command ended: {str(error).splitlines()[0] if str(error) else error!r}")
        except Exception as second:
            if not is_away(second):
                raise
        if is_away(error):
            raise DatabaseLost(f"the database went away ({why_away(error)}); continue it with --resume") from error
        raise


@dataclass(frozen=True)
class Backend:
    """Where the trials train: a running local Ray, a cluster, or this process."""

    num_workers: int
    device: str
    run: Callable[[SweepRun], Sequence[Remainder]]


@contextlib.contextmanager
def _backend(
    workspace: Workspace, spec: SweepSpec, workload: Description, request: SweepRequest, beside: threading.Thread
) -> Iterator[Backend]:
    """Starts or reaches the backend and makes sure the request fits, before any row is written.

    `beside` is started as soon as ray is imported: what it imports then loads while Ray's processes come up.
    """
    journal = workspace.journal
    if request.inline:
        beside.start()
        yield _inline_backend(workspace, journal, spec)
        return
    from orchestrator.execution.ray_tune import environment

    address = request.address or workspace.settings.ray_address
    token_file = workspace.home.secret_file("ray_token")
    environment.prepare(None if address else token_file)
    from orchestrator.execution.ray_tune.cluster import attached_cluster, local_cluster
    from orchestrator.execution.ray_tune.driver import run_on_ray
    from orchestrator.execution.ray_tune.reachable import refuse_more_than_this_machine, refuse_silent_address

    if address:
        refuse_silent_address(address)
    else:
        refuse_more_than_this_machine(spec.resources.cpu, spec.resources.gpu)
    beside.start()
    scratch = workspace.home.scratch()
    packages = sorted({"orchestrator", "workloads", workload.package})
    opened = attached_cluster(address, scratch, packages) if address else local_cluster(scratch, token_file)
    with opened as cluster:
        resources = spec.resources
        fits = cluster.capacity(resources.cpu, resources.gpu)
        if cluster.has_remote_nodes:
            _refuse_local_storage(workspace)
        num_workers = min(fits, resources.max_concurrent or fits, plan_count(spec))

        def run(feed: SweepRun) -> Sequence[Remainder]:
            return run_on_ray(
                feed,
                cluster,
                num_workers=num_workers,
                cpu=resources.cpu,
                gpu=resources.gpu,
                database_url=workspace.database.url,
                journal_folder=str(journal if cluster.is_local else workspace.remote_journal),
            )

        yield Backend(num_workers, "cuda" if resources.gpu else "cpu", run)


def _inline_backend(workspace: Workspace, journal: Path, spec: SweepSpec) -> Backend:
    from orchestrator.execution.inline import run_inline

    if spec.resources.gpu:
        raise ResourceError("resources.gpu  --inline trains on this process's CPU; leave out --inline, or set gpu: 0")
    return Backend(1, "cpu", lambda feed: [run_inline(feed, workspace.database.url, journal)])


def _refuse_local_storage(workspace: Workspace) -> None:
    if workspace.is_embedded:
        raise ResourceError(
            "the cluster has nodes beyond this host, which cannot reach the embedded database; "
            "set ORCH_DATABASE_URL to a PostgreSQL that all nodes reach"
        )
    if workspace.settings.artifact_root is None:
        raise ResourceError(
            "the cluster has nodes beyond this host, which cannot reach .orch/artifacts; "
            "set ORCH_ARTIFACT_ROOT to a folder or bucket that all nodes reach"
        )


def _import_mlflow() -> None:
    importlib.import_module("orchestrator.tracking.runs")


def create_sweep(ledger: Ledger, runs: Runs, spec: SweepSpec, workload: Description) -> SweepRow:
    """The sweep's experiment, then its row; a crash between the two leaves an experiment that is ours to take."""
    experiment_id = runs.get_or_create_experiment(spec.name, {"orch.sweep": spec.name, "orch.workload": spec.workload})
    return ledger.create_sweep(
        name=spec.name,
        workload=spec.workload,
        description=spec.description,
        spec=to_json(spec),
        source=spec.source,
        columns={name: one.sql_type for name, one in workload.fields().items()},
        metric=spec.metric.name,
        mode=spec.metric.mode,
        tags=dict(spec.tags),
        experiment_id=experiment_id,
    )


def open_run(
    ledger: Ledger,
    runs: Runs,
    spec: SweepSpec,
    workload: Description,
    sweep: SweepRow,
    observer: Observer,
    backend: Backend,
    refresh_views: Callable[[bool], None],
    keep_hold: Callable[[], None] = lambda: None,
) -> SweepRun:
    """Frees what a dead command left running, adopts its runs, and expands the search as far as it goes."""
    from orchestrator.execution.sweep_run import Placement, SweepRun, this_host
    from orchestrator.ledger.models import SweepState
    from orchestrator.tracking.facts import system_facts

    ledger.release_unfinished(sweep.id)
    orphans = {f"{sweep.id}/{row.number}": row for row in ledger.trials(sweep.id) if row.run_id is None}
    if orphans and sweep.experiment_id:
        for key, run_id in runs.adopt(orphans).items():
            runs.log_params(run_id, orphans[key].config)  # the crash may have come before them
            ledger.set_run(orphans[key].id, run_id)
    run = SweepRun(
        sweep=sweep,
        spec=spec,
        workload=workload,
        searcher=make_searcher(spec),
        ledger=ledger,
        runs=runs,
        observer=observer,
        placement=Placement(backend.device, this_host()),
        run_tags=system_facts(workload.package),
        refresh_views=refresh_views,
        keep_hold=keep_hold,
    )
    run.expand()
    ledger.set_sweep_state(sweep.id, SweepState.RUNNING)
    run.refresh_views(True)
    return run


def view_refresher(engine: Engine, sweep: str) -> Callable[[bool], None]:
    """Rebuilds the sweep's view when new metric keys have appeared, at most every ten seconds, or when told to."""
    from orchestrator.database.borrow import borrowed
    from orchestrator.database.view_catalog import rebuild_sweep_view, sweep_view_is_stale

    looked_at = time.monotonic()

    def refresh(now: bool = False) -> None:
        nonlocal looked_at
        if not now and time.monotonic() - looked_at < VIEW_REFRESH_S:
            return
        looked_at = time.monotonic()
        with borrowed(engine) as connection:
            if now or sweep_view_is_stale(connection, sweep):
                rebuild_sweep_view(connection, sweep, lock_wait_s=30.0 if now else 2.0)

    return refresh


def settle(ledger: Ledger, sweep: SweepRow, run: SweepRun, remainders: Sequence[Remainder]) -> int:
    """Writes how the sweep ended and returns the command's exit code."""
    from orchestrator.ledger.models import SweepState

    run.refresh_views(True)
    if run.interrupted:
        ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED)
        return INTERRUPTED
    if run.abort_reason:
        ledger.set_sweep_state(sweep.id, SweepState.FAILED)
        return 1
    ledger.set_sweep_state(sweep.id, SweepState.FINISHED)
    is_whole = not run.without_record and all(one.is_empty for one in remainders)
    return exit_code(run.counts()) if is_whole else 1


def exit_code(counts: Mapping[TrialState, int]) -> int:
    """0 when every trial reached a result; a diverged run is one."""
    return 0 if all(state.is_result for state, count in counts.items() if count) else 1


def _remarks(run: SweepRun, remainders: Sequence[Remainder]) -> list[str]:
    remarks = [run.abort_reason] if run.abort_reason else []
    if run.without_record:
        numbers = ", ".join(str(number) for number in sorted(run.without_record)[:20])
        first = next(iter(run.without_record.values()))
        remarks.append(f"trials without a record in MLflow: {numbers} ({first})")
    unwritten = sorted({run_id for one in remainders for run_id in one.run_ids})
    if unwritten:
        points = sum(one.points for one in remainders)
        remarks.append(
            f"{points} points of {len(unwritten)} runs could not be written; they are safe in the journal and are"
            f" written by the next command that records here: {', '.join(unwritten[:5])}"
        )
    for one in remainders:
        if one.num_rejected:
            remarks.append(f"{one.num_rejected} rows that PostgreSQL refused are kept in rejected.jsonl of the journal")
        if one.num_damaged:
            remarks.append(f"{one.num_damaged} lines of the journal could not be read back")
        if one.reason:
            remarks.append(one.reason)
    return remarks


def _ending(query: Query, sweep: str, request: SweepRequest, code: int) -> SweepEnding:
    from orchestrator.reports.compare import compare, effects
    from orchestrator.reports.status import state_counts

    if code == INTERRUPTED:
        next_commands = [(request.command(resume=True), "go on with what is left")]
    else:
        orch = " ".join(request.orch)
        next_commands = [
            (f"{orch} runs {sweep}", "one line a trial"),
            (f"{orch} best {sweep}", "the best finite run"),
            (f'{orch} sql "select * from sweep_{sweep} limit 5"', "SQL"),
            (f"{orch} ui", "MLflow's UI and the dashboards"),
        ]
    return SweepEnding(
        sweep=sweep,
        exit_code=code,
        counts=state_counts(query, sweep),
        comparison=compare(query, [sweep], None, None),
        effects=effects(query, sweep),
        remarks=[],
        next_commands=next_commands,
    )


class Signals:
    """The first SIGINT or SIGTERM asks the sweep to stop; the second ends this process at once."""

    def __init__(self) -> None:
        self._before: dict[int, object] = {}
        self._interrupt: Callable[[], None] | None = None

    def arm(self, interrupt: Callable[[], None]) -> None:
        """Call from the main thread, after ray.init, which sets a SIGTERM handler of its own."""
        self._interrupt = interrupt
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self._interrupt is None:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live table hides the cursor
            os._exit(INTERRUPTED)
        interrupt, self._interrupt = self._interrupt, None
        interrupt()

    def __enter__(self) -> Signals:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


# Removing


def remove_sweep(home: Path | None, name: str, purge: bool) -> str:
    """Archives or deletes a sweep; its name is free again. Raises NotFound, or AlreadyExists while it runs."""
    from orchestrator.database.borrow import borrowed
    from orchestrator.database.view_catalog import drop_sweep_view
    from orchestrator.ledger.store import Ledger
    from orchestrator.reports.source import sweep_facts
    from orchestrator.tracking.runs import Runs
    from orchestrator.workspace import open_workspace

    workspace = open_workspace(home)
    sweep_facts(workspace.query, name)
    engine = workspace.database.engine("orch rm")
    ledger = Ledger(engine)
    sweep = ledger.find_sweep(name)
    assert sweep is not None, "the view has just shown it"
    runs = Runs(workspace.database.url, artifact_root(workspace.settings, workspace.home))
    archive_name = f"{name}~{sweep.id}"
    with ledger.hold(sweep.id):  # MLflow first: what fails half-way can be typed again
        if sweep.experiment_id:
            with contextlib.suppress(NotFound):  # somebody deleted it for good
                if purge:
                    runs.purge_experiment(sweep.experiment_id)
                else:
                    runs.archive_experiment(sweep.experiment_id, archive_name)
        if purge:
            ledger.purge(sweep.id)
        else:
            ledger.archive(sweep.id)
        with borrowed(engine) as connection:
            drop_sweep_view(connection, name)
    if purge:
        return f"sweep {name} is deleted with its runs and artifacts"
    return f"sweep {name} is archived as {archive_name}; the name {name} is free again"


def _shell(text: str) -> str:
    return shlex.quote(text)
