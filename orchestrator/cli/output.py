"""How commands print: rich tables for people, plain text for pipes, JSON for machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import click
from rich.console import Console
from rich.table import Table as RichTable

from orchestrator.errors import PlaceUnusable
from orchestrator.reports.table import Format, Table, as_csv, as_json, short
from orchestrator.spec.domains import is_number
from orchestrator.trial import shown

PIPE_WIDTH = 100_000  # columns when the output is not a terminal: nothing may be cut

format_option = click.option(
    "--format", "fmt", type=click.Choice(["table", "csv", "json"]), default="table", help="How to print."
)


@contextmanager
def standard_output() -> Iterator[BinaryIO]:
    """Standard output for bytes. What was written is there when the block has ended; an OSError says that it is not.

    `sys.stdout.buffer` promises neither: unbuffered (PYTHONUNBUFFERED) it may write a part, else it may fail at exit.
    Raises PlaceUnusable where it is closed.
    """
    if sys.__stdout__ is None:  # closed when we began
        raise PlaceUnusable("-o -  standard output is closed; name a file")
    sys.stdout.flush()
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        yield out


def console() -> Console:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def print_table(table: Table, fmt: Format = "table") -> None:
    if fmt == "csv":
        click.echo(as_csv(table))
    elif fmt == "json":
        click.echo(as_json(table))
    else:
        _print_for_people(table)


def _print_for_people(table: Table) -> None:
    out = console()
    if table.title:
        out.print(shown(table.title), markup=False, style="bold")
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    numeric = [_is_numeric(table, index) for index in range(len(table.columns))]
    for name, right in zip(table.columns, numeric, strict=True):
        drawn.add_column(_escaped(shown(name)), justify="right" if right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(_escaped(shown(short(value))) for value in row))
    out.print(drawn)
    for note in table.notes:
        out.print(shown(note), markup=False, style="dim")


def _is_numeric(table: Table, index: int) -> bool:
    values = [row[index] for row in table.rows if row[index] is not None]
    return bool(values) and all(map(is_number, values))


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
