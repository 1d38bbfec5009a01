"""Keeps an Optuna storage in step with a sweep beside its work. Holds up no trial, and its failure ends nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Told

EVERY_S = 60.0
WAIT_S = 60.0  # at the end, for a copy that is under way


class Mirroring:
    """Copies the history of an Optuna search now and then, in a thread of its own, and at the end."""

    def __init__(self, url: str, spec: SweepSpec) -> None:
        self._url, self._spec = url, spec
        self._copied_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self.failure = ""  # why the last copy failed

    def tick(self, history: Callable[[], Sequence[Told]]) -> None:
        """Begins a copy if one is due and none is under way."""
        if self._spec.search.algorithm != "optuna" or time.monotonic() - self._copied_at < EVERY_S:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._copied_at = time.monotonic()
        self._thread = threading.Thread(target=self._copy, args=(history(),), daemon=True, name="orch-mirror")
        self._thread.start()

    def finish(self, history: Sequence[Told]) -> str:
        """Copies what there is now; returns why it could not, or nothing."""
        if self._spec.search.algorithm != "optuna":
            return ""
        if self._thread is not None:
            self._thread.join(WAIT_S)
        self._copy(history)
        return self.failure and f"optuna-dashboard does not show the newest trials: {self.failure}"

    def _copy(self, history: Sequence[Told]) -> None:
        from orchestrator.search.mirror import mirror

        try:
            mirror(self._url, self._spec, history)
        except Exception as error:  # for show only: whatever is wrong there, the sweep's own record is whole
            self.failure = (str(error) or repr(error)).strip().splitlines()[0]
        else:
            self.failure = ""
