"""Counts what autograd keeps for the backward pass of a GPT, section by section. Changes nothing it watches.

Axes: B rows, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn

from workloads.layers.transformer import GPT


def watch_forward(model: GPT, tokens_BT: Tensor, targets_BT: Tensor) -> Kept:
    """What one forward pass and its mean cross-entropy keep: sections embed, block0 .., readout, loss."""
    kept = Kept({parameter.untyped_storage() for parameter in model.parameters()})
    with ExitStack() as hooks:
        for name, module in sections_of(model).items():
            hooks.callback(module.register_forward_pre_hook(kept.enter_before(name)).remove)
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda saved: saved))
        logits_BTV, _ = model(tokens_BT)
        kept.enter("loss")
        F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    return kept


def sections_of(model: GPT) -> Mapping[str, nn.Module]:
    """Where each section begins: a module that is about to be called."""
    blocks = {f"block{layer}": block for layer, block in enumerate(model.layers)}
    return {"embed": model, **blocks, "readout": model.norm}


@dataclass
class Kept:
    """Storages by the section that keeps them; one that several tensors share is in it once, parameters never."""

    parameters: set[UntypedStorage]
    section: str = "embed"
    sections: dict[UntypedStorage, str] = field(default_factory=dict)

    def keep(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage not in self.parameters:
            self.sections.setdefault(storage, self.section)
        return saved

    def enter(self, section: str, *inputs: Any) -> None:
        """What follows belongs to `section`, and so do its inputs: a checkpoint keeps them before its block starts."""
        self.section = section
        storages = {value.untyped_storage() for value in inputs if isinstance(value, Tensor)}
        self.sections.update(dict.fromkeys(storages & self.sections.keys(), section))

    def enter_before(self, section: str) -> Any:
        return lambda module, inputs: self.enter(section, *inputs)

    def num_bytes(self) -> Mapping[str, int]:
        """Bytes by section, in the order of the forward pass."""
        counts: dict[str, int] = {}
        for storage, section in self.sections.items():
            counts[section] = counts.get(section, 0) + storage.nbytes()
        return counts

    def largest(self, section: str) -> int:
        """Bytes of the largest storage of a section."""
        return max(storage.nbytes() for storage, name in self.sections.items() if name == section)
