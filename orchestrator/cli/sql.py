"""`orch sql`: read-only SQL on the views; without a query, an interactive shell."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format


@click.command(name="sql")
@click.argument("query", required=False)
@click.option(
    "-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read the query from a file."
)
@format_option
@click.pass_context
def command(ctx: click.Context, query: str | None, file: Path | None, fmt: Format) -> None:
    """Run QUERY on the views (sweeps, runs, metrics, final_metrics, findings, stability, sweep_<name>).

    '\\d' lists them, '\\d VIEW' their columns.
    """
    from orchestrator.errors import QueryError
    from orchestrator.workspace import open_for_reading

    if query and file:
        raise click.UsageError("give a query or -f FILE, not both")
    text = query
    try:
        if file:
            text = file.read_text(encoding="utf-8")
        elif text is None and not sys.stdin.isatty():
            text = sys.stdin.read()
    except UnicodeDecodeError as error:
        place = f"{file or 'standard input'}  byte {error.start}"
        raise QueryError(f"{place} is not UTF-8: save the query as UTF-8 and run it again") from None
    if text is not None and not text.strip():
        raise QueryError("the query is empty; write for example: orch sql 'select sweep, state from sweeps'")
    run = open_for_reading(ctx.obj)
    from orchestrator.cli.sql_shell import answer, shell

    if text is not None:
        print_table(answer(run, text), fmt)
        return
    shell(run, fmt)
