"""Reads a sweep from the views: what it asked, and one record a trial. Every query runs as the read-only role."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from orchestrator.errors import NotFound, QueryError
from orchestrator.reports.table import short

if TYPE_CHECKING:
    from orchestrator.ledger.rows import SweepRow
    from orchestrator.ledger.store import Ledger

Query = Callable[..., tuple[Sequence[str], Sequence[Sequence[Any]]]]  # (sql, parameters=()) -> columns, rows


@dataclass(frozen=True)
class SweepFacts:
    """What the `sweeps` view says about one sweep."""

    name: str
    workload: str
    description: str
    question: str  # the description's first line
    metric: str
    mode: str
    more_objectives: tuple[tuple[str, str], ...]  # name and mode of the sweep's further metrics
    scheduler: str  # the algorithm, or `none`
    state: str
    axes: tuple[str, ...]  # all swept parameters, seed included, in the order of the file
    cell_axes: tuple[str, ...]  # the grid axes without seed
    zipped: tuple[tuple[str, ...], ...]  # those of them that move together
    show: tuple[str, ...]  # metrics shown beside the objective
    unstable: Mapping[str, Any] | None  # what counts as unstable besides diverged trials, as the file writes it

    @property
    def shown(self) -> tuple[str, ...]:
        """The metrics that comparisons show: the objectives, and what the file wants to see beside them."""
        return tuple(dict.fromkeys((self.metric, *(name for name, _ in self.more_objectives), *self.show)))

    def mode_of(self, metric: str) -> str:
        """That of an objective; of any other metric that of the first."""
        return dict(self.more_objectives).get(metric, self.mode)


def quoted(identifier: str) -> str:
    """An SQL identifier in double quotes."""
    return '"' + identifier.replace('"', '""') + '"'


def view_of(sweep: str) -> str:
    return f"orch.{quoted('sweep_' + sweep)}"


def stored_sweep(ledger: Ledger, query: Query, name: str, archived: bool = False) -> SweepRow:
    """The ledger's row of a sweep, of an archived one only where asked for. Raises NotFound with the nearest name."""
    sweep = ledger.find_sweep(name)
    if sweep is None or (sweep.archived_at is not None and not archived):
        raise _unknown(query, name)
    return sweep


def sweep_facts(query: Query, name: str) -> SweepFacts:
    """Raises NotFound with the nearest name."""
    columns, rows = query(
        "select sweep, workload, description, metric, mode, state, spec from orch.sweeps where sweep = %s", (name,)
    )
    if not rows:
        raise _unknown(query, name)
    row = dict(zip(columns, rows[0], strict=True))
    spec: Mapping[str, Any] = row["spec"]
    axes: Sequence[str] = spec["axes"]
    return SweepFacts(
        name=row["sweep"],
        workload=row["workload"],
        description=row["description"] or "",
        question=(row["description"] or "").split("\n")[0],
        metric=row["metric"],
        mode=row["mode"],
        more_objectives=tuple((one["name"], one["mode"]) for one in spec.get("more_metrics", ())),
        scheduler=spec.get("scheduler", {}).get("algorithm", "none"),
        state=row["state"],
        axes=tuple(axes),
        cell_axes=tuple(axis for axis in axes if "grid" in spec["params"][axis] and axis != "seed"),
        zipped=tuple(map(tuple, spec.get("zip", ()))),
        show=tuple(spec["show"]),
        unstable=spec.get("unstable"),
    )


def unstable_in_words(rule: Mapping[str, Any]) -> str:
    """`unstable: val/mse above 2 x that of the trial with precision=fp32, all else equal; diverged trials always`."""
    side = "above" if "above" in rule else "below"
    reference = ", ".join(f"{axis}={short(value)}" for axis, value in rule["relative_to"].items())
    times = f" x that of the trial with {reference}, all else equal" if reference else ""
    return f"unstable: {rule['metric']} {side} {rule[side]:.15g}{times}; diverged trials always"


def sweep_names(query: Query) -> list[str]:
    _, rows = query("select sweep from orch.sweeps order by started_at desc nulls last")
    return [row[0] for row in rows]


def check_metrics(query: Query, sweeps: Sequence[str], metrics: Sequence[str]) -> None:
    """Raises QueryError for a metric that no run of the sweeps reports, with the nearest; before any report it cannot
    know."""
    _, rows = query("select distinct key from orch.final_metrics where sweep = any(%s) order by 1", (list(sweeps),))
    known = [key for (key,) in rows]
    for metric in metrics:
        if known and metric not in known:
            raise QueryError(f"--metric  no run of {', '.join(sweeps)} reports {metric!r}; {nearest(metric, known)}")


def nearest(name: str, known: Sequence[str]) -> str:
    """What the person may have meant: the nearest of the known names, or a dozen of them."""
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(known[:12])}" + (f" and {len(known) - 12} more" if len(known) > 12 else "")


def trial_records(query: Query, sweep: str, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """One record a trial: number, state, whether unstable, params, seconds, and the last value of each of `metrics`."""
    columns, rows = query(
        """
        select r.trial, r.run_id, r.state, r.unstable, r.params, r.config, r.seconds, r.diverged_at,
               coalesce(jsonb_object_agg(f.key, f.last::text) filter (where f.key is not null), '{}') as metrics
        from orch.runs r
        left join orch.final_metrics f on f.run_id = r.run_id and f.sweep = r.sweep and f.key = any(%s)
        where r.sweep = %s
        group by r.trial, r.run_id, r.state, r.unstable, r.params, r.config, r.seconds, r.diverged_at
        order by r.trial
        """,
        (list(metrics), sweep),
    )
    records = [dict(zip(columns, row, strict=True)) for row in rows]
    for record in records:
        record["metrics"] = {key: float(text) for key, text in record["metrics"].items() if text is not None}
    return records


def _unknown(query: Query, name: str) -> NotFound:
    _, archived = query(
        "select archived_as, archived_at::date from orch.archived where sweep = %s or archived_as = %s order by 2",
        (name, name),
    )
    if archived:
        return NotFound("\n".join(_archived_in_words(name, *row) for row in archived))
    names = sweep_names(query)
    return NotFound(f"unknown sweep {name!r}; " + (nearest(name, names) if names else "there is none yet"))


def _archived_in_words(name: str, archived_as: str, day: date) -> str:
    """How to see it, and how to be rid of it."""
    return (
        f"unknown sweep {name!r}: it was archived on {day}, is in no view and cannot go on\n"
        f"  orch ui{'':<32}  its runs, in MLflow, are those of {archived_as}\n"
        f"  orch rm {archived_as + ' --purge':<31}  delete it for good"
    )
