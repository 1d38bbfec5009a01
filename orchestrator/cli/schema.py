"""`orch schema`: what an editor needs to complete and check sweep files. Opens no database."""

from __future__ import annotations

import json

import click

from orchestrator.spec.json_schema import sweep_schema
from orchestrator.workload import describe


@click.command(name="schema")
@click.argument("workload", required=False)
def command(workload: str | None) -> None:
    """Print a JSON Schema of sweep files; with WORKLOAD, of those that train it: its fields, types and bounds.

    Write it to a file and name that in the sweep file's first line: # yaml-language-server: $schema=FILE
    """
    described = describe(workload) if workload else None
    schema = sweep_schema(described, described.config if described else None)
    click.echo(json.dumps(schema, indent=2, ensure_ascii=False, allow_nan=False))
