"""Runs the probes of one training run. A probe that fails becomes a finding; training goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.trial import Finding, Severity
from workloads.probes.probe import Look, Probe

PROBE_FAILED = "probe_failed"


@dataclass
class Health:
    """The probes, and what was said already: a run says each thing once.

    `say` stores a finding. `news` is True from a finding on until somebody has
    reported the step and set it back.
    """

    probes: Sequence[Probe]
    say: Callable[[Finding], None]
    said: dict[str, int] = field(default_factory=dict)  # check -> rank of the worst severity said
    failed: list[str] = field(default_factory=list)  # probes that are no longer asked
    news: bool = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """What the probes put around an update that is looked at thoroughly; what that raises itself passes through."""
        with ExitStack() as stack:
            for probe in self._working():
                if type(probe).around is not Probe.around:  # most put nothing around it
                    stack.enter_context(self._around(probe, step))
            yield

    @contextmanager
    def _around(self, probe: Probe, step: int) -> Iterator[None]:
        """The probe's context, in which only what the probe itself does is guarded."""
        own = ExitStack()
        self._try(probe, step, lambda: own.enter_context(probe.around(step)))
        try:
            yield
        finally:
            self._try(probe, step, own.close)

    def updated(self, look: Look) -> None:
        for probe in self._working():
            try:  # plain, since this is done at every update
                for finding in probe.updated(look):
                    self.found(finding)
            except Exception as error:
                self._failed(probe, look.step, error)

    def reported(self, step: int, metrics: Mapping[str, float]) -> None:
        for probe in self._working():
            self._try(probe, step, partial(self._hear, probe, step, metrics))

    def measured(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for probe in self._working():
            self._try(probe, step, partial(self._gather, probe, metrics))
        return metrics

    def _hear(self, probe: Probe, step: int, metrics: Mapping[str, float]) -> None:
        for finding in probe.reported(step, metrics):
            self.found(finding)

    def _gather(self, probe: Probe, metrics: dict[str, float]) -> None:
        metrics.update(probe.measured())

    def found(self, finding: Finding) -> None:
        """Says a finding unless its check has said as much before: once a severity, worse things again."""
        subject = finding.message if finding.check_name == PROBE_FAILED else finding.check_name  # each probe may fail
        if finding.severity.rank <= self.said.get(subject, -1):
            return
        self.said[subject] = finding.severity.rank
        self.news = True
        self.say(finding)

    def state_dict(self) -> dict[str, Any]:
        probes = {_name(probe): probe.state_dict() for probe in self.probes}
        return {"said": dict(self.said), "failed": list(self.failed), "probes": probes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.said, self.failed = dict(state["said"]), list(state["failed"])
        for probe in self.probes:
            probe.load_state_dict(state["probes"].get(_name(probe), {}))

    def _working(self) -> Sequence[Probe]:
        return [probe for probe in self.probes if _name(probe) not in self.failed] if self.failed else self.probes

    def _try(self, probe: Probe, step: int, ask: Callable[[], Any]) -> None:
        try:
            ask()
        except Exception as error:
            self._failed(probe, step, error)

    def _failed(self, probe: Probe, step: int, error: Exception) -> None:
        """Whatever a probe raises ends the probe and not the run: it came to watch."""
        self.failed.append(_name(probe))
        message = f"{_name(probe)} failed and watches no more: {type(error).__name__}: {error}"
        self.found(Finding(PROBE_FAILED, Severity.WARNING, message, "training went on; please report it", step))


def _name(probe: Probe) -> str:
    return type(probe).__name__
