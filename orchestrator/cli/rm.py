"""`orch rm`: archive a sweep, so that its name is free again, or delete it for good."""

from __future__ import annotations

import click


@click.command(name="rm")
@click.argument("sweep")
@click.option("--purge", is_flag=True, help="Delete rows, runs and artifacts for good.")
@click.pass_context
def command(ctx: click.Context, sweep: str, purge: bool) -> None:
    """Archive SWEEP: its runs stay in the database under another name, and its own name is free again."""
    from orchestrator.removal import remove_sweep

    click.echo(remove_sweep(ctx.obj, sweep, purge))
