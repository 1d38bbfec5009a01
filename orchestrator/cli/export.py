"""`orch export`: a sweep's data as a file."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import click

from orchestrator.cli.output import standard_output
from orchestrator.reports.export import FORMS, WHAT, Exported, Form, export
from orchestrator.reports.table import counted
from orchestrator.reports.whole_file import whole_file

if TYPE_CHECKING:
    from orchestrator.database.reader import Snapshot

STANDARD_OUTPUT = "-"


def _form(target: str, chosen: str | None) -> Form:
    form = chosen or Path(target).suffix.lower().removeprefix(".")
    if form in FORMS:
        return cast(Form, form)
    if target == STANDARD_OUTPUT:
        raise click.UsageError(f"-o -  needs --format {', '.join(FORMS)}")
    known = ", ".join(f".{name}" for name in FORMS)
    raise click.UsageError(f"-o {target}  ends in none of {known}; name one of them, or choose a --format")


@click.command(name="export")
@click.argument("sweep")
@click.option(
    "-o", "--output", "target", metavar="FILE", required=True, help="FILE.parquet, .csv or .jsonl; - : stdout."
)
@click.option("--what", type=click.Choice(list(WHAT)), default="runs", help="One row a trial (runs), or another view.")
@click.option("--format", "chosen", type=click.Choice(list(FORMS)), help="Instead of what FILE's name says.")
@click.pass_context
def command(ctx: click.Context, sweep: str, target: str, what: str, chosen: str | None) -> None:
    """Write what SWEEP found into FILE, which it replaces: a row a trial, or --what metrics: every point."""
    form = _form(target, chosen)
    if target == STANDARD_OUTPUT and form == "parquet" and sys.stdout.isatty():
        raise click.UsageError("-o -  Parquet is no text for a terminal: name a file, or send it on with | or >")
    from orchestrator.database.reader import snapshot
    from orchestrator.workspace import open_workspace

    with snapshot(open_workspace(ctx.obj).reader_database) as moment:
        if target == STANDARD_OUTPUT:
            exported = _to_standard_output(moment, sweep, what, form)
        else:
            with whole_file(Path(target)) as file:
                exported = export(moment, sweep, what, form, file)
            size_mb = Path(target).stat().st_size / 1e6
            shape = f"{counted(exported.num_rows, 'row')}, {counted(exported.num_columns, 'column')}"
            click.echo(f"{target}  {shape}, {size_mb:.1f} MB")
    for note in exported.notes:
        click.echo(note, err=True)


def _to_standard_output(moment: Snapshot, sweep: str, what: str, form: Form) -> Exported:
    if form != "parquet":
        with standard_output() as out:
            return export(moment, sweep, what, form, out)
    with tempfile.TemporaryFile() as file:  # whatever breaks off, Parquet's writer ends with a valid file
        exported = export(moment, sweep, what, form, cast(BinaryIO, file))
        file.seek(0)
        with standard_output() as out:
            shutil.copyfileobj(file, out)
    return exported
