"""What a scheduler is. It judges trials by what they report and remembers nothing that its decisions do not tell.

A scheduler of the same spec that was shown the same trials and replayed the same decisions, in their order, decides the
same: so a resumed sweep goes on as an uninterrupted one would, and an actor that died is rebuilt from rows.
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.trial import Decision, Params


class Scheduler(Protocol):
    """Judges at its milestones; between them it has nothing to say."""

    def begin(self, trial: int, params: Params) -> None:
        """A trial that will report; said again for each attempt, with the same parameters.

        Said before anything about the trial is replayed.
        """

    def report(self, trial: int, step: int, value: float | None) -> Decision | None:
        """The decision due at this report, None if none is.

        `value` is the sweep's metric as reported, maybe not finite; None if the report lacks it. A step that was
        decided before (an attempt that goes on from an older state) gets the same decision; it is not counted again.
        """

    def replay(self, decision: Decision) -> None:
        """Takes in a decision of earlier, `continue` included, as if it had just been made."""

    def resume(self, trial: int) -> Decision | None:
        """The trial paused and is taken up again, before its next attempt begins: may tell it to EXPLOIT first.

        Its milestone is judged here, when others have come by. Such a decision has the step at which the trial paused,
        is recorded like any other, and is carried out before the attempt trains. None: it goes on from its own state.
        """

    def end(self, trial: int) -> None:
        """The trial is over, however it ended: nobody waits for it. Said too for those that were over before a rebuild.

        What it reported stays in the comparison.
        """
