"""Hears from autograd what gradients arrive at parameters. Reads them, keeps none and changes none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from workloads.engine.update import Blocks, dense_real

SAMPLE = 64  # values of a gradient that nearly always tell that it is not zero throughout


@dataclass
class Arrivals:
    """The gradients of one update. What a backward pass leaves last, before the step, is the whole update's.

    `had_gradient` are the parameters whose gradient the update before has left; one that a backward pass finds cleared
    is taken out. `witness` is the parameter that the update before reached first: it tells backward passes apart.
    Whatever a hook does goes through `guarded`.
    """

    parameters: Sequence[nn.Parameter]
    had_gradient: set[nn.Parameter]
    witness: nn.Parameter | None
    guarded: Callable[[Callable[[], None]], None]
    norms: dict[Tensor, Tensor] = field(init=False, default_factory=dict)  # as they arrive: scaled; float64
    passes: list[int] = field(init=False, default_factory=list)  # backward passes whose gradients are there
    lost: list[int] = field(init=False, default_factory=list)  # those whose gradients were cleared, and did nothing
    handles: list[RemovableHandle] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._left: Tensor | None = None  # the witness's gradient as the last pass left it
        self._version = 0  # of the witness at that time
        for parameter in self.parameters:
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._after))  # type: ignore[no-untyped-call]
        for parameter in self.had_gradient | ({self.witness} if self.witness is not None else set()):
            self.handles.append(parameter.register_hook(self._before(parameter)))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        return lambda gradient: self.guarded(lambda: self._check_cleared(parameter))

    def _check_cleared(self, parameter: nn.Parameter) -> None:
        has_left, is_witness = parameter in self.had_gradient, parameter is self.witness
        if not (has_left or (is_witness and self.passes)) or not is_cleared(parameter):
            return
        self.had_gradient.discard(parameter)
        if is_witness and bool(self.norms.get(parameter, torch.zeros(())) > 0):  # one of zeros looks cleared always
            is_unused = parameter._version == self._version  # else it has moved the weights before it was cleared
            self.lost, self.passes = self.lost + self.passes * is_unused, []

    def _after(self, parameter: Tensor) -> None:
        self.guarded(lambda: self._note(parameter))

    def _note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.norms[parameter] = torch.linalg.vector_norm(dense_real(parameter.grad), dtype=torch.float64)
        if parameter is self.witness:
            self.passes.append(torch._C._current_graph_task_id())
            self._left, self._version = parameter.grad, parameter._version

    @property
    def is_replaced(self) -> bool:
        """True if the loop has put another gradient in the witness's place: it may be made of those it has cleared."""
        return self.witness is not None and self.witness.grad is not self._left

    @property
    def left_over(self) -> bool:
        """True if a gradient of the update before is part of this one's."""
        return any(parameter in self.norms for parameter in self.had_gradient)

    def block_norms(self, blocks: Blocks, scale: float) -> dict[str, float]:
        """By block and in `total`, divided by the loss scale. A gradient that was taken away again counts as 0."""
        arrived = [parameter for parameter in self.norms if parameter.grad is not None]
        norms: dict[Tensor, float] = {}
        if arrived:
            parts = [self.norms[parameter] for parameter in arrived]
            if len({part.device for part in parts}) > 1:
                parts = [part.to(parts[0].device) for part in parts]
            values = torch.stack(parts).tolist()  # one transfer
            norms = {parameter: value / scale for parameter, value in zip(arrived, values, strict=True)}
        by_block = {name: math.hypot(*(norms.get(one, 0.0) for one in block)) for name, block in blocks.items()}
        return {**by_block, "total": math.hypot(*by_block.values())}


@dataclass
class Witness:
    """The parameter that a backward pass has reached first. Its hook tells at every update that a pass has run."""

    parameter: nn.Parameter | None = None
    ran_back: bool = False  # since somebody has set it back
    handle: RemovableHandle | None = None

    def choose(self, arrivals: Arrivals) -> None:
        first = next(iter(arrivals.norms))
        if first is not self.parameter and isinstance(first, nn.Parameter):
            self.close()
            self.parameter = first
            self.handle = first.register_post_accumulate_grad_hook(self._heard)  # type: ignore[no-untyped-call]

    def _heard(self, parameter: Tensor) -> None:
        self.ran_back = True

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()


def is_cleared(parameter: nn.Parameter) -> bool:
    """True if no gradient is there, or one of zeros."""
    if parameter.grad is None:
        return True
    values = dense_real(parameter.grad).flatten()
    return not bool(values[:SAMPLE].any()) and not bool(values.any())


def is_shared() -> bool:
    """True where several processes train one model: its gradients arrive before they are averaged."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
