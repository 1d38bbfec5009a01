"""The last words of `orch sweep`: the comparison that answers the question, what went wrong, what to type next."""

from __future__ import annotations

import json

import click

from orchestrator.cli.output import print_table
from orchestrator.ending import SweepEnding
from orchestrator.reports.health import found_in_words
from orchestrator.reports.table import Format
from orchestrator.trial import jsonable, shown


def print_end(ending: SweepEnding, fmt: Format) -> None:
    if fmt == "json":
        _print_json(ending)
        return
    click.echo()
    print_table(ending.comparison)
    if ending.effects.rows:
        click.echo()
        print_table(ending.effects)
    click.echo()
    click.echo(summary(ending))
    if ending.found:
        click.echo(f"findings: {found_in_words(ending.found)}; orch health {ending.sweep}")
    for remark in ending.remarks:
        click.echo(shown(remark))
    click.echo()
    for command, meaning in ending.next_commands:
        click.echo(f"  {command:<60}  {meaning}")


def summary(ending: SweepEnding) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in ending.counts.items() if count and state != "finished")
    return f"{ending.sweep}: {ending.num_results}/{ending.num_trials} finished" + (f" ({counts})" if counts else "")


def _print_json(ending: SweepEnding) -> None:
    record = {
        "event": "end",
        "sweep": ending.sweep,
        "exit_code": ending.exit_code,
        "counts": dict(ending.counts),
        "findings": [
            {"severity": one.severity, "check": one.check_name, "trials": len(one.trials)} for one in ending.found
        ],
        "remarks": list(ending.remarks),
        "comparison": ending.comparison.records(),
        "effects": ending.effects.records(),
    }
    click.echo(json.dumps(jsonable(record)))
