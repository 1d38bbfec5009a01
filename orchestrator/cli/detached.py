"""What `--detach` prints: where the sweep runs, and how to see it, follow it and stop it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from orchestrator.reports.table import Format

if TYPE_CHECKING:
    from orchestrator.planning import SweepRequest


def leave_running(request: SweepRequest, sweep: str, workload: str | None, fmt: Format) -> int:
    """Starts the command that was typed and leaves it alone. 0 once it runs, else the exit code it ended with."""
    from orchestrator.detaching import detach, typed

    def say(text: str, is_error: bool) -> None:
        click.echo(text, nl=False, err=is_error)

    detached = detach(request, sweep, workload, typed(), say)
    if detached.code is not None:
        return detached.code
    if fmt == "json":
        click.echo(json.dumps({"event": "detached", "sweep": sweep, "where": detached.where}))
        return 0
    click.echo(f"{sweep} runs on without this terminal: {detached.where}\n")
    orch = " ".join(request.orch)
    for command, meaning in (
        (f"{orch} status {sweep}", "how far it is"),
        (f"{orch} logs {sweep} -f", "follow what it says"),
        (f"{orch} cancel {sweep}", "stop it; orch resume goes on"),
    ):
        click.echo(f"  {command:<60}  {meaning}")
    return 0
