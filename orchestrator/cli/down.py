"""`orch down`: stop what runs in the background."""

from __future__ import annotations

import click


@click.command(name="down")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Stop what `up` and other commands started here. Data stays."""
    from orchestrator.services import down

    for line in down(ctx.obj):
        click.echo(line)
