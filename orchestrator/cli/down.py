"""`orch down`: stop the embedded database."""

from __future__ import annotations

import click


@click.command(name="down")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Stop what `up` and other commands started here. Data stays."""
    from orchestrator.workspace import stop_services

    for line in stop_services(ctx.obj):
        click.echo(line)
