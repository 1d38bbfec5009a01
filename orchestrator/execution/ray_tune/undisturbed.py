"""Starts Ray so that signals reach it through us alone. Private names of Ray 2.60, guarded by tests and the pin.

A terminal, `timeout` and a batch system signal the whole process group. Ray's processes would end at once, and the
trials with them, before they have saved anything; so they get groups of their own. Ray also puts a SIGTERM handler
into this process that exits with a code of its own choosing, at several places while it starts; ours stays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Around `ray.init`."""
    from ray._private import services, utils

    start, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    services.ConsolePopen = functools.partial(start, process_group=0)
    utils.set_sigterm_handler = _keep_ours
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = start, set_handler


def _keep_ours(handler: Callable[..., Any]) -> None:
    """Takes the place of Ray's `set_sigterm_handler`."""
