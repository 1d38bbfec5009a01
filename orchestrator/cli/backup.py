"""`orch backup`: everything a workspace holds, in one file, while sweeps run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--no-artifacts", is_flag=True, help="Leave out artifacts and checkpoints.")
@click.pass_context
def command(ctx: click.Context, file: Path, no_artifacts: bool) -> None:
    """Write database, journals, checkpoints and artifacts into FILE (a tar). Sweeps may go on meanwhile."""
    try:
        from orchestrator.backup import back_up

        lines = back_up(ctx.obj, file, not no_artifacts)
    except KeyboardInterrupt:
        click.echo(f"{file}  interrupted: no backup was made, and nothing of it is left", err=True)
        raise
    for line in lines:
        click.echo(line)
