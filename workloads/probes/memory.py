"""Measures, at the first update, what the backward pass keeps, by section of the model. Keeps nothing itself.

A micro-batch's saved bytes are those of the storages autograd holds when its backward pass begins: each storage once,
parameters apart. The update's largest micro-batch counts. What a checkpointed block recomputes is not among them. The
peak is the device allocator's, up to the first report; a CPU has no such count of one trial's tensors, and none is
reported there. Models that are compiled, or that call torch.func's gradients, cannot be looked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.trial import Finding, Severity
from workloads.memory.saved import Kept
from workloads.probes.blocks import block_modules
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Look, Probe

MEGABYTE = 1e6


def memory_probes(config: Any, *arguments: Any) -> list[Probe]:
    """A `MemoryProbe` of these arguments; none for a compiled model, which hooks would make another program.

    A workload asks for it: under the hooks of saved tensors torch refuses the gradients of torch.func.
    """
    return [] if config.compile else [MemoryProbe(*arguments)]


def default_sections(model: nn.Module) -> Mapping[str, nn.Module]:
    return {"input": model, **dict(block_modules(model))}


@dataclass
class MemoryProbe(Probe):
    """`sections` are modules in the order of the forward pass, the model itself first: each begins where it is called.

    What follows the model's own forward pass is the section `loss`. `predicted` are bytes, by section.
    """

    thresholds: Thresholds
    model: nn.Module
    sections: Mapping[str, nn.Module] | None = None
    predicted: Mapping[str, int] | None = None
    is_over: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._kept = Kept(set())
        self._largest: Mapping[str, int] = {}
        self._metrics: dict[str, float] = {}

    def around(self, step: int) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_over else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Keeps an account of an update."""
        reset_peak(self.model)
        self._kept = self._begin()
        with ExitStack() as hooks:
            for name, module in (self.sections or default_sections(self.model)).items():
                hooks.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
            hooks.callback(self.model.register_forward_hook(lambda *seen: self._enter("loss", self.model, ())).remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, self._give_back))
            yield
        self._end_micro_batch()
        self._kept = Kept(set())

    def _begin(self) -> Kept:
        return Kept({parameter.untyped_storage() for parameter in self.model.parameters()})

    def _enter(self, section: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not is_backward():  # or a block that is recomputed
            self._kept.enter(section, *inputs)

    def _keep(self, saved: Tensor) -> Tensor:
        return saved if is_backward() else self._kept.keep(saved)

    def _give_back(self, saved: Tensor) -> Tensor:
        self._end_micro_batch()
        return saved

    def _end_micro_batch(self) -> None:
        """Counts what was kept and lets go of it, before the backward pass frees anything."""
        if self._kept.sections:
            kept, self._kept = self._kept.num_bytes(), self._begin()
            self._largest = max(self._largest, kept, key=lambda sections: sum(sections.values()))

    def updated(self, look: Look) -> Iterator[Finding]:
        if self.is_over or not self._largest:
            return
        self.is_over = True
        saved = sum(self._largest.values())
        self._metrics = {
            "memory/saved_bytes": float(saved),
            **{f"memory/saved_bytes/{name}": float(count) for name, count in self._largest.items()},
        }
        if self.predicted:
            predicted = sum(self.predicted.values())
            self._metrics |= {
                "memory/predicted_bytes": float(predicted),
                "memory/unexplained_bytes": float(saved - predicted),
            }
            yield from unexplained(self._largest, self.predicted, self.thresholds.unexplained_memory_share, look.step)

    def measured(self) -> Mapping[str, float]:
        """At the first report; the numbers of later ones would be the same."""
        peak = peak_bytes(self.model) if self._metrics else None
        return self._metrics if peak is None else {**self._metrics, "memory/peak_bytes": float(peak)}

    def reported(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        self._metrics = {}
        return ()


def unexplained(
    measured: Mapping[str, int], predicted: Mapping[str, int], share: float, step: int | None
) -> Iterator[Finding]:
    """A total that is off by more than a share of the prediction, with the section that is off most."""
    saved, due = sum(measured.values()), sum(predicted.values())
    if abs(saved - due) <= share * due:
        return
    worst = max({**measured, **predicted}, key=lambda name: abs(measured.get(name, 0) - predicted.get(name, 0)))
    have, want = measured.get(worst, 0) / MEGABYTE, predicted.get(worst, 0) / MEGABYTE
    message = (
        f"the backward pass keeps {saved / MEGABYTE:.3g} MB of a micro-batch, {due / MEGABYTE:.3g} were predicted;"
    )
    message += f" of {worst} it keeps {have:.3g} instead of {want:.3g}"
    advice = (
        f"see what {worst} computes: a copy in another dtype, attention that is written out, a graph that is kept on"
    )
    yield Finding("memory_unexplained", Severity.INFO, message, advice, step, float(saved), float(due))


def is_backward() -> bool:
    """True within a backward pass, where a checkpointed block runs forward again."""
    return torch._C._current_graph_task_id() != -1


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def reset_peak(model: nn.Module) -> None:
    if (device := device_of(model)).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of earlier trials in this process


def peak_bytes(model: nn.Module) -> int | None:
    device = device_of(model)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
