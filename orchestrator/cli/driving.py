"""The options of the commands that drive a sweep. Runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

OPTIONS = (
    click.option("--max-concurrent", type=click.IntRange(min=1), help="Worker processes at once."),
    click.option(
        "--address", help="A running Ray cluster (default: RAY_ADDRESS, else a local Ray for the sweep's time)."
    ),
    click.option("--inline", is_flag=True, help="Train in this process, one trial after another; no Ray."),
    click.option("--detach", is_flag=True, help="Return once it runs; `orch logs NAME -f` follows it."),
    click.option("--ready-fd", type=int, hidden=True),
    click.option("--json", "as_json", is_flag=True, help="One JSON object a line: state changes, then the comparison."),
)


def driving_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds them in this order."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
