"""`orch logs`: what a sweep's command said, or what one of its trials printed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from orchestrator.cli.output import format_option, print_table
from orchestrator.reports.table import Format

if TYPE_CHECKING:
    from orchestrator.reports.logs import Line, Log

POLL_S = 0.5
LAST_WORD_S = 8.0  # so long a command may need for it when its trials are over: Ray comes down first
REAP_AFTER_S = 10.0


@click.command(name="logs")
@click.argument("sweep")
@click.option("--trial", type=click.IntRange(min=0), help="What this trial printed, and its traceback.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the sweep (or the trial) has ended.")
@click.option("-n", "--limit", type=click.IntRange(min=0), help="Only the last lines.")
@format_option
@click.pass_context
def command(ctx: click.Context, sweep: str, trial: int | None, follow: bool, limit: int | None, fmt: Format) -> None:
    """What the command that runs SWEEP said; with --trial, what that trial printed."""
    from orchestrator.reports.logs import open_log
    from orchestrator.workspace import open_workspace

    workspace = open_workspace(ctx.obj)
    log = open_log(workspace.query, sweep, trial)
    if fmt != "table":
        if follow:
            raise click.UsageError("-f  prints lines; leave out --format")
        print_table(log.table(limit), fmt)
        return
    is_over = log.is_over()
    lines = log.newest(limit)
    show(log, lines)
    if follow and not is_over:
        follow_up(log, lines[-1].place if lines else (-1, -1), workspace.reap)
        is_over = True
    if follow:
        click.echo(log.state_in_words())
    if is_over:
        for text in log.end():
            click.echo(text)


def follow_up(log: Log, last: tuple[int, int], reap: Callable[[], None]) -> None:
    """Shows what comes, until nothing more will: also when the command has died, which `reap` finds out."""
    reaped_at, give_up_at, is_over, has_ended = time.monotonic(), math.inf, False, False
    while not (is_over and has_ended) and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
        if time.monotonic() - reaped_at > REAP_AFTER_S:
            reap()
            reaped_at = time.monotonic()
        if not is_over and log.is_over():
            is_over, give_up_at = True, time.monotonic() + (LAST_WORD_S if log.trial is None else 2 * POLL_S)
        lines = log.after(last)
        show(log, lines)
        last = lines[-1].place if lines else last
        has_ended = has_ended or log.has_ended(lines)


def show(log: Log, lines: list[Line]) -> None:
    """A trial's lines as they were printed; a command's with the time, in this machine's zone."""
    for line in lines:
        when = f"{line.written_at.astimezone():%Y-%m-%d %H:%M:%S}  " if log.trial is None else ""
        click.echo(when + line.text)
