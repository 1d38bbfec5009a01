"""The interactive half of `orch sql`: a line editor around the same read-only query."""

from __future__ import annotations

from collections.abc import Iterator

import click

from orchestrator.cli.output import print_table
from orchestrator.errors import QueryError
from orchestrator.reports.source import Query
from orchestrator.reports.table import Format, Table
from orchestrator.trial import shown

VIEWS = "select table_name as view from information_schema.views where table_schema = 'orch' order by 1"


def shell(run: Query, fmt: Format) -> None:
    """Reads statements that end with `;` until end of file, `exit` or `\\q`. `\\d` lists the views."""
    import readline  # noqa: F401  importing it gives input() history and editing

    click.echo("Read-only SQL on the views. End a statement with ; . \\d lists the views, \\q leaves.")
    for statement in _statements():
        try:
            print_table(Table(*run(VIEWS if statement == "\\d" else statement)), fmt)
        except QueryError as error:
            click.echo(shown(str(error)), err=True)


def _statements() -> Iterator[str]:
    lines: list[str] = []
    while True:
        try:
            line = input("orch> " if not lines else "  ... ")
        except EOFError:
            return
        except KeyboardInterrupt:
            lines = []
            click.echo()
            continue
        if not lines and line.strip() in ("\\q", "exit", "quit"):
            return
        if not lines and line.strip() == "\\d":
            yield "\\d"
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(lines)
            lines = []
