"""`orch restore`: an empty workspace becomes what a backup holds, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import click

from orchestrator.cli.output import print_table


@click.command(name="restore")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--into", help="An empty database (postgresql://...), or a new .orch folder.")
@click.pass_context
def command(ctx: click.Context, file: Path, into: str | None) -> int:
    """Fill an empty workspace from FILE: that of --home or ORCH_DATABASE_URL, or the one --into names."""
    from orchestrator.backup import restore
    from orchestrator.doctor import examine

    home: Path | None = ctx.obj
    if into and "://" in into:
        os.environ["ORCH_DATABASE_URL"] = into  # as if it had been typed in front of the command
    elif into:
        os.environ.pop("ORCH_DATABASE_URL", None)
        home = Path(into)
    for line in restore(home, file):
        click.echo(line)
    table, healthy = examine(home, init=False)
    print_table(table)
    return 0 if healthy else 1
