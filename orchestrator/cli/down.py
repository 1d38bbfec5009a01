"""`orch down`: stop what runs in the background."""

from __future__ import annotations

import click


@click.command(name="down")
@click.option("--force", is_flag=True, help="Also while a sweep needs it.")
@click.pass_context
def command(ctx: click.Context, force: bool) -> None:
    """Stop what `up` and other commands started here. Data stays. Refuses while a sweep runs on it."""
    from orchestrator.services import down

    for line in down(ctx.obj, force):
        click.echo(line)
