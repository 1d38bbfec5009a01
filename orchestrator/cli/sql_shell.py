"""The interactive half of `orch sql`: a line editor around the same read-only query."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from orchestrator.cli.output import print_table
from orchestrator.errors import QueryError
from orchestrator.reports.source import Query
from orchestrator.reports.table import Format, Table
from orchestrator.trial import shown

VIEWS = "select table_name as view from information_schema.views where table_schema = 'orch' order by 1"
COLUMNS = """
    select column_name as column, data_type as type
    from information_schema.columns where table_schema = 'orch' and table_name = %s order by ordinal_position
"""
DESCRIBE = re.compile(r"\\d(?:\s+(?:orch\.)?\"?(\w+)\"?)?\s*;?")


def shell(run: Query, fmt: Format) -> None:
    """Reads statements that end with `;`, and `\\d`, until end of file, `exit` or `\\q`."""
    import readline  # noqa: F401  importing it gives input() history and editing

    click.echo(
        "Read-only SQL on the views. End a statement with ; . \\d lists the views, \\d VIEW their columns, \\q leaves."
    )
    for statement in _statements():
        try:
            print_table(answer(run, statement), fmt)
        except QueryError as error:
            click.echo(shown(str(error)), err=True)


def answer(run: Query, statement: str) -> Table:
    """What a statement gives, or `\\d` or `\\d VIEW`. Raises QueryError, also for other commands of psql."""
    if match := DESCRIBE.fullmatch(statement.strip()):
        table = Table(*(run(COLUMNS, (match[1],)) if match[1] else run(VIEWS)))
        if not table.rows:
            raise QueryError(f"there is no view {match[1]}; \\d lists them")
        return table
    if statement.lstrip().startswith("\\"):
        raise QueryError("of psql's commands there are \\d and \\d VIEW; orch up prints how to use psql itself")
    return Table(*run(statement))


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
        if not lines and line.lstrip().startswith("\\"):
            yield line
            continue
        lines.append(line)
        if line.rstrip().endswith(";"):
            yield "\n".join(lines)
            lines = []
