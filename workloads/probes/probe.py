"""What a probe is, and what it gets to see. A probe changes nothing it looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from orchestrator.trial import Finding

if TYPE_CHECKING:  # the engine imports the probes
    from workloads.engine.update import Batch, Hyper, Trainer, Update


@dataclass(frozen=True)
class Look:
    """One update, after it was made. Gradients lie where the optimiser found them: unscaled and clipped.

    `thorough` is True where dear measurements are welcome: at reports, at the first two updates and at the last.
    """

    step: int
    update: Update
    window: Sequence[Batch]
    hyper: Hyper
    trainer: Trainer
    thorough: bool


@dataclass
class Probe:
    """Watches one thing. What a subclass declares with `field(init=False)` is its state, in plain values."""

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Entered before the update of `step` where it is looked at thoroughly, left after it; a `nullcontext` not."""
        return nullcontext()

    def updated(self, look: Look) -> Iterable[Finding]:
        """Called after every update."""
        return ()

    def measured(self) -> Mapping[str, float]:
        """What the probe adds to a report."""
        return {}

    def reported(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        """Called with everything that is about to be reported."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self) if not one.init}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for the state of another probe, or of this one in another version; nothing is taken."""
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"a state of {', '.join(state) or 'nothing'}, not of {', '.join(self.state_dict())}")
        for name, value in state.items():
            setattr(self, name, value)


def listed_numbers(values: Sequence[float]) -> str:
    """The first few, to four digits."""
    return ", ".join(f"{value:.4g}" for value in values[:6]) + (", ..." if len(values) > 6 else "")


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
