"""Measures what one forward pass of somebody else's loop keeps for its backward pass. Keeps nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workloads.probes.hooks import Hook
from workloads.probes.memory import MemoryProbe, default_sections


@dataclass
class WatchedMemory(MemoryProbe):
    """Measures the first forward pass after it is asked: from the model's call to its return, one micro-batch.

    What a loss outside the model keeps is not among it. Hooks of saved tensors form a stack: they end with the call
    they began in, whatever the loop has around. The allocator's peak stays the loop's own to reset.
    """

    guarded: Callable[[Callable[[], None]], None] = lambda act: act()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hooks = ExitStack()
        self._handles = [
            self.model.register_forward_pre_hook(Hook(self._begin_call), prepend=True),
            self.model.register_forward_hook(Hook(self._end_call), always_call=True),
        ]

    def around(self, step: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def _begin_call(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        if model.training and torch.is_grad_enabled() and not self._kept.sections:
            self.guarded(lambda: self._begin_count(inputs))

    def _begin_count(self, inputs: tuple[Any, ...]) -> None:
        self._kept = self._begin()
        for name, module in default_sections(self.model).items():
            self._hooks.callback(module.register_forward_pre_hook(Hook(partial(self._enter, name))).remove)
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, self._give_back))
        self._enter("input", self.model, inputs)

    def _keep(self, saved: Tensor) -> Tensor:
        self.guarded(lambda: self._count(saved))
        return saved

    def _count(self, saved: Tensor) -> None:
        super()._keep(saved)

    def _end_call(self, *seen: Any) -> None:
        self._hooks.close()
        self.guarded(self._end_micro_batch)
        if self._largest:
            self.close()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
