"""`orch ui`: MLflow's UI and the dashboards, until Ctrl-C."""

from __future__ import annotations

import click


@click.command(name="ui")
@click.option(
    "--port", type=click.IntRange(1, 65534), help="MLflow's port (default: 5000); the dashboards take the next."
)
@click.option("--host", default="127.0.0.1", help="Where to listen; anything but loopback has no password.")
@click.pass_context
def command(ctx: click.Context, port: int | None, host: str) -> int:
    """Serve MLflow's UI and the dashboards; prints both addresses."""
    from orchestrator.serve import serve_ui

    return serve_ui(ctx.obj, host, port, say=click.echo)
