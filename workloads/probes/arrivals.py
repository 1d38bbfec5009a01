"""Hears from autograd what gradients arrive at parameters. Reads them, keeps none and changes none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workloads.engine.update import Blocks, dense_real


@dataclass
class Arrivals:
    """The gradients of one update. What a backward pass leaves last, before the step, is the whole update's.

    `had_gradient` are the parameters whose gradient the update before has left; one that a backward pass finds cleared
    is taken out. Whatever a hook does goes through `guarded`.
    """

    parameters: Sequence[nn.Parameter]
    had_gradient: set[nn.Parameter]
    guarded: Callable[[Callable[[], None]], None]
    norms: dict[Tensor, Tensor] = field(init=False, default_factory=dict)  # as they arrive: scaled; float64
    handles: list[RemovableHandle] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        for parameter in self.parameters:
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._after))  # type: ignore[no-untyped-call]
        for parameter in self.had_gradient:
            self.handles.append(parameter.register_hook(self._before(parameter)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        return lambda gradient: self.guarded(lambda: self._check_cleared(parameter))

    def _check_cleared(self, parameter: nn.Parameter) -> None:
        if parameter in self.had_gradient and (parameter.grad is None or not bool(dense_real(parameter.grad).any())):
            self.had_gradient.remove(parameter)

    def _after(self, parameter: Tensor) -> None:
        self.guarded(lambda: self._note(parameter))

    def _note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.norms[parameter] = torch.linalg.vector_norm(dense_real(parameter.grad), dtype=torch.float64)

    @property
    def left_over(self) -> bool:
        """True if a gradient of the update before is part of this one's."""
        return any(parameter in self.norms for parameter in self.had_gradient)

    def block_norms(self, blocks: Blocks, scale: float) -> dict[str, float]:
        """By block and in `total`, divided by the loss scale. A gradient that was taken away again counts as 0."""
        arrived = [parameter for parameter in self.norms if parameter.grad is not None]
        norms: dict[Tensor, float] = {}
        if arrived:
            device = self.norms[arrived[0]].device
            values = torch.stack([self.norms[parameter].to(device) for parameter in arrived]).tolist()  # one transfer
            norms = {parameter: value / scale for parameter, value in zip(arrived, values, strict=True)}
        by_block = {name: math.hypot(*(norms.get(one, 0.0) for one in block)) for name, block in blocks.items()}
        return {**by_block, "total": math.hypot(*by_block.values())}
