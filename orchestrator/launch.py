"""The composition root of a sweep: puts the parts together in order."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.backends import Backend, limit_threads, open_backend
from orchestrator.bookends import code_of_what_is_over, open_run, settle, view_refresher
from orchestrator.ending import INTERRUPTED, SweepEnding, ending_of, exit_code, remarks_on
from orchestrator.errors import AlreadyExists, DatabaseLost, PlaceUnusable, SpecError
from orchestrator.extension import Extension, extension_of
from orchestrator.planning import SweepRequest, read_spec
from orchestrator.preflight import preflight
from orchestrator.reports.source import stored_sweep
from orchestrator.resuming import Again, stored_spec
from orchestrator.search import plan_count
from orchestrator.settings import artifact_root
from orchestrator.signals import Signals, end_at_once
from orchestrator.spec import SweepSpec, cpu_asked, read_sweep_file, to_json
from orchestrator.tracking.artifacts import local_folder
from orchestrator.trial import Finding, Params, TrialState
from orchestrator.workload import Description, describe

if TYPE_CHECKING:  # heavy or needing a database: imported where a sweep really starts
    from orchestrator.database.borrow import Engine
    from orchestrator.execution.sweep_run import Observer, SweepRun
    from orchestrator.ledger.lease import Lease
    from orchestrator.ledger.rows import SweepRow
    from orchestrator.ledger.store import Ledger
    from orchestrator.tracking.recorder import Remainder
    from orchestrator.tracking.runs import Runs
    from orchestrator.workspace import Workspace


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
    if request.inline:
        limit_threads(cpu_asked(read_sweep_file(request.spec), str(request.spec), request.all_overrides))
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
    found = stored_sweep(Ledger(engine), workspace.query, request.stored)
    if request.inline and "resolved" in found.spec:
        limit_threads(cpu_asked(found.spec["resolved"], found.name, request.all_overrides))
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
        code = (exit_code if is_over else code_of_what_is_over)(ledger.counts(found.id))
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

    for folder in filter(orphans, workspace.journals):
        recorder = Recorder(workspace.database.connect, folder)
        recorder.drain(CLOSE_TIMEOUT_S)
        recorder.close(CLOSE_TIMEOUT_S)


def _nothing_left(task: Task, sweep: SweepRow) -> bool:
    trials = task.ledger.trials(sweep.id)
    is_left = any(trial.state.is_unfinished for trial in trials) or task.again.chosen(sweep.name, trials)
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
    if task.request.inline or not (task.request.address or workspace.settings.ray_address):
        _write_what_is_left(workspace)  # also of a cluster that this host was a node of; that has recorders to do it
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
    if code == 0 and run.trials.counts()[TrialState.WAITING]:
        ending = _with_budget(ending, task.request, spec)
    return replace(ending, remarks=[*remarks_on(run, remainders), *filter(None, [unmirrored]), *ending.remarks])


def _drive(
    task: Task, signals: Signals, backend: Backend, existing: SweepRow | None, findings: Sequence[Finding]
) -> tuple[SweepRun, Sequence[Remainder], int, str]:
    """Takes the sweep and runs it: the run, what was not recorded, the exit code, what Optuna's mirror lacks."""
    from orchestrator.execution.mirroring import Mirroring
    from orchestrator.execution.stopping import never_stuck
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
            revive_database=task.workspace.revive_database,
            broken=functools.partial(_end_broken, lease, sweep.name),
        )
        signals.arm(run.interrupt)
        task.observer.opened(run, max(plan_count(task.spec), len(run.trials)), backend.num_workers)
        if backend.remark:
            task.observer.said(backend.remark)
        end_stuck = functools.partial(_end_broken, lease, sweep.name, code=INTERRUPTED)
        with never_stuck(run, task.observer.said, end_stuck, can_end_workers=not task.request.inline):
            remainders = backend.run(run)
        if run.lost_to is not None:
            raise run.lost_to
        run.patiently(lease.renew)  # what a reaper marked while we were silent is ours again before it is counted
        code = run.patiently(lambda: settle(ledger, sweep, run, remainders))
    runs.close()  # for the mirror and what is read after it: the command keeps to three connections
    return run, remainders, code, mirroring.finish(run.trials.history())


def _end_at_once(lease: Lease) -> None:
    """`orch cancel --now`, heard by the lease's thread: the workers end with this process."""
    from orchestrator.ledger.models import SweepState

    print("cancelled by `orch cancel --now`: this command and its workers end now", file=sys.stderr, flush=True)
    lease.strike(TrialState.KILLED, SweepState.CANCELLED, "cancelled")
    lease.release()
    end_at_once(exit_code=1)


def _end_broken(lease: Lease, sweep: str, why: str, code: int = 1) -> None:
    """What would be waited for in vain, such as a Ray that is gone: this command ends, and its trials can go on."""
    from orchestrator.ledger.models import SweepState

    try:
        lease.strike(TrialState.KILLED, SweepState.INTERRUPTED, why)
        lease.release()
        left = "its trials are marked killed"
    except Exception as error:  # whoever looks next marks them, since this process is gone by then
        left = f"the next orch command marks its trials lost ({str(error).splitlines()[0]})"
    print(f"{why}: this command and its workers end now, {left}", file=sys.stderr)
    print(f"  orch resume {sweep:<30}  go on from the saved states", file=sys.stderr, flush=True)
    end_at_once(exit_code=code)


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


def _time_is_up(ledger: Ledger, sweep: SweepRow, spec: SweepSpec) -> bool:
    return spec.budget.time_s is not None and ledger.busy_seconds(sweep.id) >= spec.budget.time_s
