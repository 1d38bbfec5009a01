"""`orch workloads`: what can be swept. Imports no torch for the shipped ones."""

from __future__ import annotations

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format, Table
from orchestrator.workload import describe, shipped_names


@click.command(name="workloads")
@click.argument("name", required=False)
@format_option
def command(name: str | None, fmt: Format) -> None:
    """List the workloads; with NAME, its fields and metrics. NAME may be package.module:Class."""
    if name is None:
        rows = [[one, describe(one).summary] for one in shipped_names()]
        print_table(Table(["workload", "what it trains"], rows, notes=["Details: orch workloads NAME"]), fmt)
        return
    workload = describe(name)
    rows = [
        [one.name, one.type_name, one.default, "fusible" if one.fusible else "structural", one.description]
        for one in workload.fields().values()
    ]
    metrics = "metrics: " + ", ".join(workload.metrics)
    print_table(Table(["field", "type", "default", "kind", "meaning"], rows, workload.summary, [metrics]), fmt)
