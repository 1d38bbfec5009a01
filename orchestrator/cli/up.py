"""`orch up`: start the database, the web pages and, if wanted, a warm Ray; say how to reach them."""

from __future__ import annotations

import click


@click.command(name="up")
@click.option("--ray", "with_ray", is_flag=True, help="Also keep a local Ray warm: sweeps start sooner.")
@click.option("--ui/--no-ui", "with_ui", default=True, help="MLflow's UI and the dashboards, on loopback only.")
@click.option(
    "--port",
    type=click.IntRange(1, 65534),
    help="MLflow's; the dashboards take the next (default: the first free pair from 5000 on).",
)
@click.pass_context
def command(ctx: click.Context, with_ray: bool, with_ui: bool, port: int | None) -> None:
    """Start what is not up yet, in the background; `orch down` stops it."""
    from orchestrator.services import up

    for line in up(ctx.obj, port, with_ui, with_ray):
        click.echo(line)
