"""`orch up`: start the database and say how to reach it."""

from __future__ import annotations

import click


@click.command(name="up")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Start the database with its schema; print a ready psql line."""
    from orchestrator.workspace import start_services

    for line in start_services(ctx.obj):
        click.echo(line)
