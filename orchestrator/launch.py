"""The composition root of a sweep: puts the parts together in order."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.backends import Backend, open_backend
from orchestrator.ending import INTERRUPTED, SweepEnding, ending_of, exit_code, remarks_on
from orchestrator.errors import AlreadyExists, DatabaseLost
from orchestrator.planning import SweepRequest, read_spec
from orchestrator.preflight import preflight
from orchestrator.search import make_searcher, plan_count
from orchestrator.settings import artifact_root
from orchestrator.signals import Signals
from orchestrator.spec import SweepSpec, spec_difference, to_json
from orchestrator.trial import Finding, TrialState
from orchestrator.workload import Description, describe

if TYPE_CHECKING:  # heavy or needing a database: imported where a sweep really starts
    from orchestrator.database.borrow import Engine
    from orchestrator.execution.sweep_run import Observer, SweepRun
    from orchestrator.ledger.rows import SweepRow
    from orchestrator.ledger.store import Ledger
    from orchestrator.tracking.recorder import Remainder
    from orchestrator.tracking.runs import Runs
    from orchestrator.workspace import Workspace

VIEW_REFRESH_S = 10.0


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
        _restate(ledger, existing, spec)
        _write_what_is_left(workspace)
        return ending_of(workspace.query, existing.name, request, exit_code(ledger.counts(existing.id)))
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


def _restate(ledger: Ledger, sweep: SweepRow, spec: SweepSpec) -> None:
    """Stores the file as it is now: what changes no trial (`unstable`, `show`, ...) may change between two calls."""
    if sweep.spec != (stated := to_json(spec)):
        ledger.extend_sweep(
            sweep.id, spec=stated, source=spec.source, columns=sweep.columns, description=spec.description
        )


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
    findings: list[Finding] = []
    if existing is not None:
        with ledger.hold(existing.id):
            pass  # somebody else's sweep is refused before Ray is started; it is taken for good below
    check_places(workspace.settings, workspace.home)
    if existing is None:
        findings = _checked(spec, observer)
    mlflow_import = threading.Thread(target=_import_mlflow, daemon=True)
    with Signals() as signals, open_backend(workspace, spec, workload, request, mlflow_import) as backend:
        mlflow_import.join()
        from orchestrator.tracking.runs import Runs

        runs = Runs(workspace.database.url, artifact_root(workspace.settings, workspace.home))
        sweep = existing or create_sweep(ledger, runs, spec, workload, findings)
        with ledger.hold(sweep.id) as hold, _abandoned_on_error(ledger, sweep.id):
            _restate(ledger, sweep, spec)
            refresh_views = view_refresher(engine, sweep.name)
            run = open_run(ledger, runs, spec, workload, sweep, observer, backend, refresh_views, hold.renew)
            signals.arm(run.interrupt)
            observer.opened(run, max(plan_count(spec), len(run.trials)), backend.num_workers)
            remainders = backend.run(run)
            if run.lost_to is not None:
                raise run.lost_to
            code = run.patiently(lambda: settle(ledger, sweep, run, remainders))
    ending = ending_of(workspace.query, sweep.name, request, code)
    return replace(ending, remarks=[*remarks_on(run, remainders), *ending.remarks])


def _checked(spec: SweepSpec, observer: Observer) -> list[Finding]:
    """What the preflight of a new sweep found. Raises SpecError for an error.

    Only of a new one: its file may not change in what is trained, so that later calls have the same structures.
    """
    if not spec.preflight:
        return []
    try:
        result = preflight(spec, observer.said)
    except KeyboardInterrupt:
        observer.said("preflight: interrupted; nothing was started")
        raise
    if not result.answers:
        return []
    for line in result.remarks():
        observer.said(line)
    if result.has_error:
        raise result.refusal()
    return result.findings()


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


def _import_mlflow() -> None:
    importlib.import_module("orchestrator.tracking.runs")


def create_sweep(
    ledger: Ledger, runs: Runs, spec: SweepSpec, workload: Description, findings: Sequence[Finding] = ()
) -> SweepRow:
    """The sweep's experiment, then its row with what its preflight found; a crash between the two leaves an experiment
    that is ours to take.
    """
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
        findings=findings,
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
