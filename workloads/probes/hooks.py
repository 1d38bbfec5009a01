"""Hooks on somebody else's modules that stay with those modules. What is done in them is the caller's own matter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Hook:
    """Calls `act`. In a copy of the module, or one that was saved, it does nothing: nobody has asked to watch that.

    What it becomes there is of Python's own library, so that a saved module loads where this package is not.
    """

    act: Callable[..., Any]

    def __call__(self, *seen: Any) -> Any:
        return self.act(*seen)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes whatever it is given, and returns None
