"""`orch cancel`: stop a sweep, from wherever its database is reached."""

from __future__ import annotations

import click


@click.command(name="cancel")
@click.argument("sweep")
@click.option("--now", is_flag=True, help="Kill running trials; they do not save their state first.")
@click.pass_context
def command(ctx: click.Context, sweep: str, now: bool) -> int:
    """Stop SWEEP: its running trials save their state and end, nothing new starts. A second call ends them at once."""
    from orchestrator.cancelling import cancel_sweep

    return cancel_sweep(ctx.obj, sweep, now, click.echo)
