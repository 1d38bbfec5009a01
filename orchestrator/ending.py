"""How a sweep ended, put together for whoever prints it: exit code, comparison, remarks, the next commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.planning import SweepRequest
from orchestrator.reports.compare import compare, effects
from orchestrator.reports.health import Found, found_in
from orchestrator.reports.source import Query
from orchestrator.reports.status import state_counts
from orchestrator.reports.table import Table, counted
from orchestrator.tracking.artifacts import checkpoint_folder
from orchestrator.trial import TrialState

if TYPE_CHECKING:
    from orchestrator.execution.sweep_run import SweepRun
    from orchestrator.tracking.recorder import Gone, Remainder

INTERRUPTED = 130
MAX_NUMBERS = 20  # of trials, that a remark names


@dataclass(frozen=True)
class SweepEnding:
    """What `orch sweep` prints last."""

    sweep: str
    exit_code: int
    counts: Mapping[str, int]
    comparison: Table
    effects: Table
    found: Sequence[Found]
    remarks: Sequence[str]
    next_commands: Sequence[tuple[str, str]]

    @property
    def num_trials(self) -> int:
        return sum(self.counts.values())

    @property
    def num_results(self) -> int:
        return sum(count for state, count in self.counts.items() if TrialState(state).is_result)


def exit_code(counts: Mapping[TrialState, int]) -> int:
    """0 when every trial reached a result; a diverged run is one."""
    return 0 if all(state.is_result for state, count in counts.items() if count) else 1


def remarks_on(run: SweepRun, remainders: Sequence[Remainder]) -> list[str]:
    from orchestrator.tracking.recorder import Gone, Unwritten

    told = [one for one in remainders if isinstance(one, Unwritten)]
    remarks = [run.abort_reason] if run.abort_reason else []
    if run.cancelled and run.trials.is_left:
        remarks.append(f"cancelled by `orch cancel`; go on with what is left: orch resume {run.sweep.name}")
    if run.without_record:
        numbers = ", ".join(str(number) for number in sorted(run.without_record)[:MAX_NUMBERS])
        first = next(iter(run.without_record.values()))
        remarks.append(f"trials without a record in MLflow: {numbers} ({first})")
    unwritten = sorted({run_id for one in told for run_id in one.run_ids})
    if unwritten:
        points = sum(one.points for one in told)
        remarks.append(
            f"{points} points of {len(unwritten)} runs could not be written; they are safe in the journal and are"
            f" written by the next command that records here: {', '.join(unwritten[:5])}"
        )
    remarks += _about_states(run)
    for one in told:
        if one.num_rejected:
            remarks.append(f"{one.num_rejected} rows that PostgreSQL refused are kept in rejected.jsonl of the journal")
        if one.num_damaged:
            remarks.append(f"{one.num_damaged} lines of the journal could not be read back")
        if one.reason:
            remarks.append(one.reason)
    return remarks + [about_gone(one, run.sweep.name) for one in remainders if isinstance(one, Gone)]


def about_gone(gone: Gone, sweep: str) -> str:
    """What may be missing where a recorder went away, and what to do."""
    some = gone.trials[:MAX_NUMBERS]
    numbers = ", ".join(map(str, some)) + (", ..." if len(some) < len(gone.trials) else "")
    whose = f"{'trial' if len(gone.trials) == 1 else 'trials'} {numbers}"
    again = " ".join(f"--trial {number}" for number in some)
    return (
        f"the recorder on {gone.host} is gone; points of {whose} may lie there unwritten, in {gone.journal}\n"
        f"when {gone.host} is back, the next sweep that uses it writes them; or type there: orch resume {sweep}\n"
        f"if that folder is lost, train them again: orch resume {sweep} {again}"
    )


def _about_states(run: SweepRun) -> list[str]:
    """What saved states are good for now, and where they lie."""
    remarks = []
    if failed := _with_states(run, lambda state: state is TrialState.FAILED):
        whose = f"{counted(len(failed), 'failed trial')} kept {'its' if len(failed) == 1 else 'their'} last states"
        remarks.append(f"{whose}; orch resume {run.sweep.name} --failed goes on from there ({_place(failed)})")
    if run.spec.keep_checkpoints and (kept := _with_states(run, lambda state: state.is_result)):
        remarks.append(f"the last and the best state of {counted(len(kept), 'trial')} are kept ({_place(kept)})")
    return remarks


def _with_states(run: SweepRun, wanted: Callable[[TrialState], bool]) -> list[Path]:
    """The folders with saved states of such trials."""
    uris = (
        run.runs.artifact_uri(run.sweep.experiment_id or "", row.run_id)
        for row in run.trials.values()
        if row.run_id is not None and wanted(row.state)
    )
    return [folder for uri in uris if (folder := checkpoint_folder(uri)) is not None and folder.is_dir()]


def _place(folders: Sequence[Path]) -> str:
    return f"in {folders[0]}" if len(folders) == 1 else f"the first in {folders[0]}"


def changed_in_words(query: Query, sweep: str) -> list[str]:
    """That trials went on with other parameters than those they began with, which tables show."""
    text = """
        select count(distinct trial) from orch.decisions
        where sweep = %s and action = 'exploit' and params <> '{}'
    """
    _, [(count,)] = query(text, (sweep,))
    if not count:
        return []
    trials = "1 trial" if count == 1 else f"{count} trials"
    asked = f"select trial, step, params from decisions where sweep = '{sweep}' and action = 'exploit'"
    return [f'{trials} changed parameters on the way; above are the first ones: orch sql "{asked}"']


def ending_of(query: Query, sweep: str, request: SweepRequest, code: int) -> SweepEnding:
    orch, counts = " ".join(request.orch), state_counts(query, sweep)
    if code == INTERRUPTED:
        next_commands = [(request.command(resume=True), "go on with what is left")]
    else:
        next_commands = [
            (f"{orch} runs {sweep}", "one line a trial"),
            (f"{orch} best {sweep}", "the best finite run"),
            (f"{orch} health {sweep}", "findings, worst first, and what to do"),
            (f'{orch} sql "select * from sweep_{sweep} limit 5"', "SQL"),
            (f"{orch} report {sweep}", "one page with the answer, to send"),
            (f"{orch} ui", "MLflow's UI and the dashboards"),
        ]
    if counts.get(TrialState.FAILED):
        next_commands.append((f"{orch} resume {sweep} --failed", "run the failed ones again"))
    return SweepEnding(
        sweep=sweep,
        exit_code=code,
        counts=counts,
        comparison=compare(query, [sweep], None, None),
        effects=effects(query, sweep),
        found=found_in(query, sweep),
        remarks=changed_in_words(query, sweep),
        next_commands=next_commands,
    )
