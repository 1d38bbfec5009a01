"""`orch sweep --simulate`: what a sweep would come to with its scheduler and without. Trains and stores nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.errors import NotFound, OrchError
from orchestrator.planning import SweepRequest, read_spec
from orchestrator.reports.source import Query, sweep_facts
from orchestrator.reports.table import Table, short
from orchestrator.schedulers import make_scheduler
from orchestrator.schedulers.make import steps_asked
from orchestrator.search import make_searcher, plan_count
from orchestrator.simulation import Curves, Landscape, Recorded, Simulated, SimulatedTrial, simulate
from orchestrator.simulation.recorded import curves_of, read_curves
from orchestrator.spec import SweepSpec
from orchestrator.spec.domains import value_key
from orchestrator.spec.sweep_spec import Schedule
from orchestrator.trial import Action, Candidate, TrialState, jsonable
from orchestrator.workload import describe, flatten

DEFAULT_WORKERS = 8
NUM_DECISIONS_SHOWN = 10
RECORDED = """
    select r.trial::text, r.config, r.seconds, m.step, m.value, r.state in ('finished', 'diverged') as is_whole
    from orch.runs r join orch.metrics m on m.run_id = r.run_id
    where r.sweep = %s and m.sweep = %s and m.key = %s
    order by r.trial, m.step
"""


def simulate_sweep(request: SweepRequest, curves: str | None) -> list[Table]:
    """What came out, and the first decisions. `curves`: a CSV file, or a sweep of the database; None: made-up ones."""
    spec = read_spec(request.spec, request.all_overrides, request.name)
    if spec.more_metrics:
        raise OrchError(f"{request.spec}  metric  a simulation has curves of one metric, and metric lists several")
    source, known = _curves(spec, curves, request.home)
    num_workers = spec.resources.max_concurrent or DEFAULT_WORKERS
    result = _run(spec, known, num_workers)
    if not result.trials:
        raise NotFound(f"--curves  none of {result.num_without_curve} trials is among the {source}")
    whole = (
        result if spec.schedule.algorithm == "none" else _run(replace(spec, schedule=Schedule()), known, num_workers)
    )
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    summary = _summary(spec, result, whole, f"{workers}, {source}")
    return [summary, _decisions(result)] if result.decisions else [summary]


def _run(spec: SweepSpec, curves: Curves, num_workers: int) -> Simulated:
    return simulate(spec, make_searcher(spec), make_scheduler(spec, plan_count(spec)), curves, num_workers)


def _curves(spec: SweepSpec, curves: str | None, home: Path | None) -> tuple[str, Curves]:
    """The curves, and where they come from in words."""
    if curves is None:
        num_steps = spec.schedule.max_steps or steps_asked(spec)
        return "made-up curves", Landscape(spec, num_steps)
    if Path(curves).suffix == ".csv" or Path(curves).is_file():
        return f"curves of {curves}", read_curves(Path(curves))
    from orchestrator.workspace import open_for_reading

    try:
        recorded, num_cut_short = recorded_curves(open_for_reading(home), spec, curves)
    except NotFound as error:
        raise NotFound(f"--curves  {curves} is no file, and as a sweep: {error}") from None
    left_out = f"; {num_cut_short} of its trials did not train to their end and are left out" if num_cut_short else ""
    return f"curves of sweep {curves}{left_out}", recorded


def recorded_curves(query: Query, spec: SweepSpec, sweep: str) -> tuple[Recorded, int]:
    """What the trials of a sweep reported of this spec's metric, by their whole config. Raises NotFound.

    And how many trials are left out because they were stopped, failed or still run: their curves say where they were
    cut, not where they would have ended. One that diverged is whole.
    """
    if sweep_facts(query, sweep).workload != spec.workload:
        raise OrchError(f"--curves  sweep {sweep} trained {sweep_facts(query, sweep).workload}, not {spec.workload}")
    _, rows = query(RECORDED, (sweep, sweep, spec.metric.name))
    num_cut_short = len({trial for trial, *_, is_whole in rows if not is_whole})
    whole = [
        (value_key(config), seconds, step, value) for _, config, seconds, step, value, is_whole in rows if is_whole
    ]
    times_s = {key: seconds for key, seconds, _, _ in whole if seconds}
    curves = curves_of([(key, step, value) for key, _, step, value in whole], times_s)
    resolve = describe(spec.workload).resolve

    def key_of(number: int, candidate: Candidate) -> str:
        return value_key({name: jsonable(value) for name, value in flatten(resolve(candidate.params)).items()})

    return Recorded(curves, key_of), num_cut_short


def _summary(spec: SweepSpec, result: Simulated, whole: Simulated, where: str) -> Table:
    columns = [("figure", ""), (spec.schedule.algorithm, result)]
    columns += [("no scheduler", whole)] if whole is not result else []
    names = [str(name) for name, _ in columns]
    figures = [_figures(spec, one) for _, one in columns if isinstance(one, Simulated)]
    rows = [[label, *(one[label] for one in figures)] for label in figures[0]]
    title = f"{spec.name}, simulated: {len(result.trials)} trials on {where}"
    return Table(names, rows, title=title, notes=_notes(spec, result, whole))


def _figures(spec: SweepSpec, result: Simulated) -> dict[str, Any]:
    counts, best = result.counts(), result.best(spec)
    states = (TrialState.FINISHED, TrialState.STOPPED, TrialState.DIVERGED, TrialState.WAITING)
    return {
        **{state.value: counts[state] for state in states},
        "steps trained": result.num_steps_trained,
        "share of steps asked": round(result.num_steps_trained / result.num_steps_asked, 4),
        "simulated hours": result.seconds / 3600,
        f"best {spec.metric.name}": None if best is None else best.final,
        "best trial": None if best is None else best.number,
    }


def _notes(spec: SweepSpec, result: Simulated, whole: Simulated) -> list[str]:
    notes = ["a step takes about a second where no time was recorded; last values count, those of stopped trials too"]
    if result.num_without_curve:
        notes.append(f"{result.num_without_curve} trials have no curve and are left out")
    if whole is not result and (winner := whole.best(spec)) is not None:
        notes.append(_fate_of_winner(winner, result))
    return notes


def _fate_of_winner(winner: SimulatedTrial, result: Simulated) -> str:
    """What the scheduler did to the trial that is the best when all are trained to their end."""
    fate = next((trial for trial in result.trials if trial.number == winner.number), None)
    what = f"without a scheduler the best is trial {winner.number} ({short(winner.final)})"
    if fate is None or fate.candidate.params != winner.candidate.params:
        return f"{what}; with it the search never came to that point"
    return f"{what}; here it is {fate.state} at step {fate.step}" + (f": {fate.reason}" if fate.reason else "")


def _decisions(result: Simulated) -> Table:
    shown = result.decisions[:NUM_DECISIONS_SHOWN]
    rows = [[one.trial, one.step, one.value, one.action.value, one.reason] for one in shown]
    return Table(
        ["trial", "step", "value", "action", "reason"], rows, title="The first decisions", notes=[_counted(result)]
    )


def _counted(result: Simulated) -> str:
    counts = {action: sum(one.action is action for one in result.decisions) for action in Action}
    return f"{len(result.decisions)} decisions: " + ", ".join(
        f"{count} {name}" for name, count in counts.items() if count
    )
