"""Runs the probes of one training run. A probe that fails becomes a finding; training goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.trial import Finding, Severity
from workloads.probes.probe import Look, Probe


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
    def around(self, step: int, thorough: bool) -> Iterator[None]:
        """What the probes put around an update; what the update itself raises passes through."""
        with ExitStack() as stack:
            for probe in self._working():
                stack.enter_context(self._around(probe, step, thorough))
            yield

    @contextmanager
    def _around(self, probe: Probe, step: int, thorough: bool) -> Iterator[None]:
        """The probe's context, in which only what the probe itself does is guarded."""
        own = ExitStack()
        with self._guarded(probe, step):
            own.enter_context(probe.around(step, thorough))
        try:
            yield
        finally:
            with self._guarded(probe, step):
                own.close()

    def updated(self, look: Look) -> None:
        self._ask(look.step, lambda probe: probe.updated(look))

    def reported(self, step: int, metrics: Mapping[str, float]) -> None:
        self._ask(step, lambda probe: probe.reported(step, metrics))

    def measured(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for probe in self._working():
            with self._guarded(probe, step):
                metrics.update(probe.measured())
        return metrics

    def found(self, finding: Finding) -> None:
        """Says a finding unless its check has said as much before: once a severity, worse things again."""
        if finding.severity.rank <= self.said.get(finding.check_name, -1):
            return
        self.said[finding.check_name] = finding.severity.rank
        self.news = True
        self.say(finding)

    def state_dict(self) -> dict[str, Any]:
        probes = {_name(probe): probe.state_dict() for probe in self.probes}
        return {"said": dict(self.said), "failed": list(self.failed), "probes": probes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.said, self.failed = dict(state["said"]), list(state["failed"])
        for probe in self.probes:
            probe.load_state_dict(state["probes"].get(_name(probe), {}))

    def _working(self) -> list[Probe]:
        return [probe for probe in self.probes if _name(probe) not in self.failed]

    def _ask(self, step: int, question: Callable[[Probe], Iterable[Finding]]) -> None:
        for probe in self._working():
            with self._guarded(probe, step):
                for finding in question(probe):
                    self.found(finding)

    @contextmanager
    def _guarded(self, probe: Probe, step: int) -> Iterator[None]:
        """Whatever a probe raises ends the probe and not the run: it came to watch."""
        try:
            yield
        except Exception as error:
            self.failed.append(_name(probe))
            message = f"{_name(probe)} failed and watches no more: {type(error).__name__}: {error}"
            self.found(Finding("probe_failed", Severity.WARNING, message, "training went on; please report it", step))


def _name(probe: Probe) -> str:
    return type(probe).__name__
