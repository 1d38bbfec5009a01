"""Runs the probes of one training run. A probe that fails becomes a finding; training goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from orchestrator.trial import Finding, Severity, real, told
from workloads.probes.probe import Look, Probe

PROBE_FAILED = "probe_failed"
FAILURES = (Exception, SystemExit)  # whatever a probe raises; Ctrl-C is none of them
PLAIN = (bool, int, float, str, type(None))


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

    def build(self, *makers: Callable[[], Iterable[Probe]]) -> None:
        """The probes are those of the first maker that does not fail."""
        for make in makers:
            try:
                self.probes = [one for one in make() if self._is_probe(one)]
                return
            except FAILURES as error:
                advice = "training goes on, under the standard probes at most; look at `probes` of the workload"
                self._note(f"the probes could not be built: {told(error)}", advice)

    def _is_probe(self, made: Any) -> bool:
        if isinstance(made, Probe):
            return True
        what = f"the class {made.__name__} itself" if isinstance(made, type) else f"one of {type(made).__name__}"
        advice = "training goes on without it; `probes` gives instances of subclasses of Probe"
        self._note(f"{what} is among the probes, and no Probe", advice)
        return False

    def around(self, step: int) -> AbstractContextManager[Any]:
        """What the probes put around an update that is looked at thoroughly; what that raises itself passes through."""
        stack = ExitStack()
        for probe in self._working():
            if type(probe).around is not Probe.around:  # most put nothing around it
                self._enter(stack, probe, step)
        return stack

    def _enter(self, stack: ExitStack, probe: Probe, step: int) -> None:
        """Enters the probe's context, in which only what the probe itself does is guarded."""
        try:
            context = probe.around(step)
            if not isinstance(context, nullcontext):
                own = ExitStack()
                own.enter_context(context)
                stack.callback(self._leave, own, probe, step)
        except FAILURES as error:
            self._failed(probe, step, error)

    def _leave(self, own: ExitStack, probe: Probe, step: int) -> None:
        try:
            own.close()
        except FAILURES as error:
            self._failed(probe, step, error)

    def updated(self, look: Look) -> None:
        for probe in self._working():
            try:
                for finding in probe.updated(look):
                    self.found(finding, probe)
            except FAILURES as error:
                self._failed(probe, look.step, error)

    def reported(self, step: int, metrics: Mapping[str, float]) -> None:
        for probe in self._working():
            try:
                for finding in probe.reported(step, metrics):
                    self.found(finding, probe)
            except FAILURES as error:
                self._failed(probe, step, error)

    def measured(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for probe in self._working():
            try:
                metrics |= as_metrics(probe.measured())
            except FAILURES as error:
                self._failed(probe, step, error)
        return metrics

    def found(self, finding: Finding, probe: Probe | None = None) -> None:
        """Says a finding unless its check has said as much before: once a severity, worse things again.

        Of two probes of a class, which look at different things, each says its own; and each probe may fail.
        """
        subject = finding.message if finding.check_name == PROBE_FAILED else finding.check_name
        if probe is not None and (place := self._place(probe)) > 1:
            subject = f"{subject} {place}"
        if finding.severity.rank <= self.said.get(subject, -1):
            return
        self.said[subject] = finding.severity.rank
        self.news = True
        self.say(finding)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What to go on with after `step`, in plain values; of a probe that has others nothing is kept."""
        probes = {}
        for probe in self._working():
            try:
                probes[self._name(probe)] = plain(probe.state_dict())
            except FAILURES as error:
                self._failed(probe, step, error)
        return {"said": dict(self.said), "failed": list(self.failed), "probes": probes}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """A probe whose state does not fit begins anew."""
        self.said, self.failed = {**self.said, **state["said"]}, list(state["failed"])
        for probe in self._working():
            try:
                self._load(probe, state["probes"].get(self._name(probe), {}), step)
            except FAILURES as error:
                self._failed(probe, step, error)

    def _load(self, probe: Probe, state: Mapping[str, Any], step: int) -> None:
        fresh = plain(probe.state_dict())
        try:
            probe.load_state_dict(state)
        except FAILURES as error:
            message = f"what {self._name(probe)} knew at the checkpoint does not fit: {told(error)}"
            self._note(message, "it began anew there; was its code changed?", step)
            probe.load_state_dict(fresh)

    def _working(self) -> Sequence[Probe]:
        return [probe for probe in self.probes if self._name(probe) not in self.failed] if self.failed else self.probes

    def _failed(self, probe: Probe, step: int, error: BaseException) -> None:
        """Whatever a probe raises ends the probe and not the run: it came to watch."""
        name = self._name(probe)
        self.failed.append(name)
        self._note(f"{name} failed and watches no more: {told(error)}", "training went on; please report it", step)

    def _note(self, message: str, advice: str, step: int | None = None) -> None:
        self.found(Finding(PROBE_FAILED, Severity.WARNING, message, advice, step))

    def _name(self, probe: Probe) -> str:
        """Its class, and of several of a class which one: `RouterProbe`, `RouterProbe 2`."""
        place = self._place(probe)
        return type(probe).__name__ + f" {place}" * (place > 1)

    def _place(self, probe: Probe) -> int:
        """Among the probes of its class's name, from 1 on."""
        kin = [one for one in self.probes if type(one).__name__ == type(probe).__name__]
        return next((place for place, one in enumerate(kin, 1) if one is probe), 1)


def as_metrics(measured: Any) -> dict[str, float]:
    """What a probe measured, in Python's own numbers. Raises TypeError for anything but numbers by name."""
    if not isinstance(measured, Mapping):
        raise TypeError(f"measured() gave {measured!r:.100}; numbers by name are due")
    for name in measured:
        if not isinstance(name, str):
            raise TypeError(f"measured() has a metric {name!r:.100}, whose name is no text")
    return {name: real(f"metric {name!r}", value) for name, value in measured.items()}


def plain(value: Any) -> Any:
    """A copy of `value`. Raises TypeError for what is no plain value, which no checkpoint gives back."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    raise TypeError(f"a state holds {type(value).__name__}; plain values can be kept")
