"""The composition root of a sweep: puts the parts together in order."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.backends import Backend, open_backend
from orchestrator.ending import INTERRUPTED, SweepEnding, ending_of, exit_code, remarks_on
from orchestrator.errors import AlreadyExists, DatabaseLost, PlaceUnusable, SpecError
from orchestrator.extension import Extension, extension_of, with_kept_points
from orchestrator.planning import SweepRequest, read_spec
from orchestrator.preflight import preflight
from orchestrator.reports.source import sweep_facts
from orchestrator.resuming import UNFINISHED, Again, stored_spec, where_it_goes_on
from orchestrator.search import make_searcher, plan_count
from orchestrator.settings import artifact_root
from orchestrator.signals import Signals, end_at_once
from orchestrator.spec import SweepSpec, to_json
from orchestrator.tracking.artifacts import local_folder
from orchestrator.trial import Finding, Params, TrialState
from orchestrator.workload import Description, describe

if TYPE_CHECKING:  # heavy or needing a database: imported where a sweep really starts
    from orchestrator.database.borrow import Engine
    from orchestrator.execution.mirroring import Mirroring
    from orchestrator.execution.sweep_run import Observer, SweepRun
    from orchestrator.ledger.lease import Lease, Unheld
    from orchestrator.ledger.rows import SweepRow
    from orchestrator.ledger.store import Ledger
    from orchestrator.tracking.recorder import Remainder
    from orchestrator.tracking.runs import Runs
    from orchestrator.workspace import Workspace

VIEW_REFRESH_S = 10.0


@dataclass(frozen=True)
class Task:
    """What a command is to run, and with what."""

    workspace: Workspace
    engine: Engine
    spec: SweepSpec
    workload: Description
    request: SweepRequest
    observer: Observer
    again: Again = field(default_factory=Again)

    @property
    def ledger(self) -> Ledger:
        from orchestrator.ledger.store import Ledger

        return Ledger(self.engine)

    @property
    def artifact_root(self) -> str:
        return artifact_root(self.workspace.settings, self.workspace.home)


def run_sweep(request: SweepRequest, observer: Observer) -> SweepEnding:
    """Runs what is new or left of a sweep. Raises OrchError, with nothing started, when it cannot."""
    spec = read_spec(request.spec, request.all_overrides, request.name)
    workload = describe(spec.workload)
    from orchestrator.workspace import open_workspace

    workspace = open_workspace(request.home)
    task = Task(workspace, workspace.database.engine("orch sweep"), spec, workload, request, observer)
    return _run(task, task.ledger.find_sweep(spec.name))


def resume_sweep(request: SweepRequest, again: Again, observer: Observer) -> SweepEnding:
    """Runs what is left of the sweep `request.stored`, and of its other trials those of `again`. Needs no file.

    Raises OrchError, with nothing started, when it cannot.
    """
    from orchestrator.ledger.store import Ledger
    from orchestrator.workspace import open_workspace

    workspace = open_workspace(request.home)
    engine = workspace.database.engine("orch sweep")
    found = Ledger(engine).find_sweep(request.stored)
    if found is None or found.archived_at is not None:
        sweep_facts(workspace.query, request.stored)  # says which names there are
    assert found is not None, "the view has just shown it"
    spec = stored_spec(found, request.all_overrides)
    return _run(Task(workspace, engine, spec, describe(spec.workload), request, observer, again), found)


def _run(task: Task, found: SweepRow | None) -> SweepEnding:
    """Starts what there is to run, or says how it has ended."""
    from orchestrator.tracking.experiments import check_experiment_name

    workspace, spec, request, ledger = task.workspace, task.spec, task.request, task.ledger

    def check_experiment() -> None:
        with workspace.database.connect("orch sweep") as connection:
            check_experiment_name(connection, spec.name, workspace.database.masked_mlflow_uri)

    remarks = task.again.unmatched(found.name, ledger.trials(found.id)) if found else []
    nothing_left = found is not None and _nothing_left(task, found)
    if not (nothing_left and request.resume):
        check_experiment()
    extension = _extension(task, found)
    is_over = nothing_left and not (extension and extension.num_new)
    if nothing_left and not is_over:
        check_experiment()  # a finished sweep that grows needs it again
    if found is None or extension is None or not (is_over or _time_is_up(ledger, found, spec)):
        ending = _start(task, found, extension)
    else:
        _restate(ledger, found, extension)
        _write_what_is_left(workspace)
        code = (exit_code if is_over else _code_of_what_is_over)(ledger.counts(found.id))
        ending = ending_of(workspace.query, found.name, request, code)
        ending = ending if is_over else _with_budget(ending, request, spec)
    return replace(ending, remarks=[*remarks, *ending.remarks])


def _extension(task: Task, existing: SweepRow | None) -> Extension | None:
    """What the file makes of the sweep there is, or None to create one. Raises AlreadyExists when it is another one."""
    if existing is None:
        return None
    spec, request = task.spec, task.request
    if not request.resume:
        raise AlreadyExists(
            f"sweep {spec.name!r} exists already ({existing.state})\n"
            f"  {request.command(resume=True):<60}  continue it\n"
            f"  {replace(request, name='NEW_NAME').command(resume=False):<60}  start another"
        )
    extension = extension_of(existing, task.ledger.trials(existing.id), spec, task.workload)
    if not extension.is_possible:
        why = "".join(f"\n  {line}" for line in extension.refusal())
        if request.stored:
            raise AlreadyExists(f"sweep {spec.name!r} cannot go on: its workload means something else by now{why}")
        raise AlreadyExists(
            f"{request.spec}  spec differs from sweep {spec.name!r}:{why}"
            f"\n  give the changed sweep a name of its own: {replace(request, name='NEW_NAME').command(resume=False)}"
        )
    return extension


def _restate(ledger: Ledger, sweep: SweepRow, extension: Extension) -> None:
    """Stores the file as it is now: what changes no trial (`unstable`, `show`, ...) may change between two calls, and
    an extension gives existing trials their places in it.
    """
    spec, stated = extension.spec, to_json(extension.spec)
    moved = [(one.trial.id, one.candidate, one.config_hash) for one in extension.places if one.is_news]
    if sweep.spec != stated or moved:
        source, description = spec.source, spec.description
        reopened = extension.num_new > 0
        ledger.restate(sweep.id, moved, spec=stated, source=source, description=description, reopened=reopened)


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


def _nothing_left(task: Task, sweep: SweepRow) -> bool:
    trials = task.ledger.trials(sweep.id)
    is_left = any(trial.state in UNFINISHED for trial in trials) or task.again.chosen(sweep.name, trials)
    return sweep.state == "finished" and not is_left


def _start(task: Task, existing: SweepRow | None, extension: Extension | None) -> SweepEnding:
    """Refuses what cannot run, opens what it needs, runs the sweep and says how it ended."""
    from orchestrator.database.connection import refuse_read_only
    from orchestrator.places import check_places

    workspace, spec, observer = task.workspace, task.spec, task.observer
    if existing is not None:
        task.ledger.refuse_held(existing.id)  # before Ray is started; it is taken below
    check_places(workspace.settings, workspace.home)
    refuse_read_only(workspace.database)
    _refuse_lost_states(spec, task.artifact_root)
    findings: list[Finding] = []
    if extension is None or extension.num_new:
        findings = _checked(spec, observer, extension.known if extension else ())
    if extension and extension.num_new:
        observer.said(f"extends {spec.name}: {len(extension.places)} trials are there, {extension.num_new} are new")
    mlflow_import = threading.Thread(target=_import_mlflow, daemon=True)
    with Signals() as signals, open_backend(workspace, spec, task.workload, task.request, mlflow_import) as backend:
        mlflow_import.join()
        run, remainders, code, unmirrored = _drive(task, signals, backend, existing, findings)
    ending = ending_of(workspace.query, run.sweep.name, task.request, code)
    if code == 0 and run.counts()[TrialState.WAITING]:
        ending = _with_budget(ending, task.request, spec)
    return replace(ending, remarks=[*remarks_on(run, remainders), *filter(None, [unmirrored]), *ending.remarks])


def _drive(
    task: Task, signals: Signals, backend: Backend, existing: SweepRow | None, findings: Sequence[Finding]
) -> tuple[SweepRun, Sequence[Remainder], int, str]:
    """Takes the sweep and runs it: the run, what was not recorded, the exit code, what Optuna's mirror lacks."""
    from orchestrator.execution.mirroring import Mirroring
    from orchestrator.tracking.runs import Runs
    from orchestrator.tracking.standing import mark_runs

    runs = Runs(task.workspace.database.url, task.artifact_root)
    sweep = existing or create_sweep(task.ledger, runs, task.spec, task.workload, findings)
    mirroring = Mirroring(task.workspace.database.url, task.spec)
    with task.ledger.hold(sweep.id, mark_runs) as lease, _abandoned_on_error(task.ledger, lease):
        ledger = task.ledger.under(lease)
        runs.guard = lease.guard
        lease.cancel_now = lambda: _end_at_once(lease)
        if existing is not None and (now := _extension(task, existing)) is not None:
            ledger.add_findings(existing.id, [(None, None, one) for one in findings])  # before what they are about
            _restate(ledger, existing, now)  # looked at again: another command may have added trials meanwhile
        run = open_run(
            ledger=ledger,
            runs=runs,
            spec=task.spec,
            workload=task.workload,
            sweep=sweep,
            observer=task.observer,
            backend=backend,
            refresh_views=view_refresher(task.engine, sweep.name),
            lease=lease,
            mirroring=mirroring,
            again=task.again.chosen(sweep.name, ledger.trials(sweep.id)),
        )
        signals.arm(run.interrupt)
        task.observer.opened(run, max(plan_count(task.spec), len(run.trials)), backend.num_workers)
        if backend.remark:
            task.observer.said(backend.remark)
        remainders = backend.run(run)
        if run.lost_to is not None:
            raise run.lost_to
        run.patiently(lease.renew)  # what a reaper marked while we were silent is ours again before it is counted
        code = run.patiently(lambda: settle(ledger, sweep, run, remainders))
    return run, remainders, code, mirroring.finish(run.history())


def _end_at_once(lease: Lease) -> None:
    """`orch cancel --now`, heard by the lease's thread: the workers end with this process."""
    from orchestrator.ledger.models import SweepState

    print("cancelled by `orch cancel --now`: this command and its workers end now", file=sys.stderr, flush=True)
    lease.strike(TrialState.KILLED, SweepState.CANCELLED, "cancelled")
    lease.release()
    end_at_once(exit_code=1)


def _with_budget(ending: SweepEnding, request: SweepRequest, spec: SweepSpec) -> SweepEnding:
    """The ending of a sweep whose time is used up; its last line says so and how to go on."""
    assert spec.budget.time_s is not None
    meaning = f"budget reached (time: {spec.budget.time_s:g} s); go on with a larger one"
    command = request.command(resume=True)
    if request.stored:  # a stored sweep says its budget itself
        orch, file = " ".join(request.orch), f"{request.stored}.yaml"
        command = f"{orch} status {request.stored} --spec > {file}; {orch} sweep {file} --resume"
    return replace(ending, next_commands=[*ending.next_commands, (command, meaning)])


def _refuse_lost_states(spec: SweepSpec, root: str) -> None:
    """Raises PlaceUnusable for a population whose members could not find each other's states."""
    if spec.schedule.algorithm == "pbt" and local_folder(root) is None:
        raise PlaceUnusable(
            f"scheduler.algorithm  pbt copies states between trials, and {root} is no folder; "
            "set ORCH_ARTIFACT_ROOT to a folder that all nodes reach, or choose another scheduler"
        )


def _checked(spec: SweepSpec, observer: Observer, known: Sequence[Params]) -> list[Finding]:
    """What the preflight found of the structures that no trial of the sweep has yet. Raises SpecError for an error."""
    if not spec.preflight:
        return []
    try:
        result = preflight(spec, observer.said, known=known)
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
def _abandoned_on_error(ledger: Ledger, lease: Lease) -> Iterator[None]:
    """An error that ends the command leaves no trial `running`, as far as the database still listens.

    A sweep none of whose trials could be made leaves nothing: its name stays free.
    """
    from orchestrator.database.connection import is_away, why_away
    from orchestrator.ledger.models import SweepState

    def abandon(reason: str) -> None:
        lease.strike(TrialState.KILLED, SweepState.INTERRUPTED, reason)

    try:
        yield
    except AlreadyExists:
        raise  # another command drives the sweep now: what runs is its
    except SpecError:
        if not ledger.trials(lease.sweep_id):
            ledger.purge(lease.sweep_id)
        raise
    except DatabaseLost:
        raise
    except KeyboardInterrupt:  # before a signal asks the trials to stop: none has begun
        abandon("the command was interrupted")
        raise
    except Exception as error:
        try:
            abandon(f"the command ended: {str(error).splitlines()[0] if str(error) else error!r}")
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
    lease: Lease | Unheld | None = None,
    mirroring: Mirroring | None = None,
    again: Sequence[int] = (),
) -> SweepRun:
    """Frees what a dead command left running, and the trials of the numbers `again`; adopts runs without a trial, and
    expands the search as far as it goes.
    """
    from orchestrator.execution.checkpoints import forget
    from orchestrator.execution.sweep_run import Placement, SweepRun, this_host
    from orchestrator.ledger.lease import Unheld
    from orchestrator.ledger.models import SweepState
    from orchestrator.tracking.facts import system_facts

    for row in ledger.trials(sweep.id):
        if row.number in again and row.state.is_result and row.run_id and sweep.experiment_id:
            forget(runs.artifact_uri(sweep.experiment_id, row.run_id))  # it runs again, and not on from its end
    released = ledger.release_unfinished(sweep.id, numbers=again)
    orphans = {f"{sweep.id}/{row.number}": row for row in ledger.trials(sweep.id) if row.run_id is None}
    if orphans and sweep.experiment_id:
        for key, run_id in runs.adopt(orphans).items():
            runs.log_params(run_id, orphans[key].config)  # the crash may have come before them
            ledger.set_run(orphans[key].id, run_id)
    run = SweepRun(
        sweep=sweep,
        spec=spec,
        workload=workload,
        searcher=make_searcher(with_kept_points(spec, [row.params for row in ledger.trials(sweep.id)])),
        ledger=ledger,
        runs=runs,
        observer=observer,
        placement=Placement(backend.device, this_host()),
        run_tags=system_facts(workload.package),
        refresh_views=refresh_views,
        lease=lease or Unheld(),
        mirroring=mirroring,
    )
    if line := where_it_goes_on(run, released):
        observer.said(line)
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
    if run.cancelled:
        ledger.set_sweep_state(sweep.id, SweepState.CANCELLED)
        return 1
    if run.interrupted:  # a signal that came too late to stop anything leaves nothing to go on with
        is_left = any(row.state in UNFINISHED for row in run.trials.values()) or len(run.trials) < plan_count(run.spec)
        ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED if is_left else SweepState.FINISHED)
        return INTERRUPTED
    if run.abort_reason:
        ledger.set_sweep_state(sweep.id, SweepState.FAILED)
        return 1
    is_cut_short = run.time.is_up and run.counts()[TrialState.WAITING] > 0
    ledger.set_sweep_state(sweep.id, SweepState.INTERRUPTED if is_cut_short else SweepState.FINISHED)
    is_whole = not run.without_record and all(one.is_empty for one in remainders)
    code_of = _code_of_what_is_over if is_cut_short else exit_code
    return code_of(run.counts()) if is_whole else 1


def _code_of_what_is_over(counts: Mapping[TrialState, int]) -> int:
    """The exit code where time was up, or would have been: trials that still wait are no failure."""
    left = (TrialState.WAITING, TrialState.RUNNING, TrialState.KILLED, TrialState.LOST)
    return exit_code({state: count for state, count in counts.items() if state not in left})


def _time_is_up(ledger: Ledger, sweep: SweepRow, spec: SweepSpec) -> bool:
    return spec.budget.time_s is not None and ledger.busy_seconds(sweep.id) >= spec.budget.time_s
