"""A decoder-only transformer in nanoGPT's layout. Holds no data, no loss and no optimiser.

Axes: B rows, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workloads.engine.precision import Precision, at_least_float32
from workloads.layers.attention import CausalAttention
from workloads.layers.dropout import Seed, dropout
from workloads.layers.linear import LayerNorm, Linear, normal_parameter
from workloads.layers.router import Routing

INIT_STD = 0.02  # of every weight; projections into the residual stream start smaller

MakeFeedForward = Callable[[int], nn.Module]  # from the layer's number


@dataclass(frozen=True)
class GPTShape:
    """What a GPT is made of.

    `context` is the longest row. Without `residual` a block's parts replace the stream instead of adding to it.
    `checkpointing` recomputes each block in the backward pass: equal gradients, less memory, more time.
    """

    vocabulary: int
    context: int
    depth: int
    heads: int
    width: int
    tied: bool
    residual: bool = True
    dropout: float = 0.0
    checkpointing: bool = False

    @property
    def std_out(self) -> float:
        """Initial std of the projections into the residual stream, so that 2 * depth of them add up to INIT_STD.

        Source: GPT-2 (Radford et al., 2019), section 2.3; nanoGPT.
        """
        return INIT_STD / math.sqrt(2 * self.depth)


@runtime_checkable
class NamesItsBlocks(Protocol):
    """A feed-forward whose parts are reported apart: a mixture of experts has `router` and `experts`."""

    def blocks(self) -> Mapping[str, list[nn.Parameter]]: ...


class FeedForward(nn.Module):
    """Linear-GELU-Linear of four times the width, exact GELU. What replaces it gives a routing as second value."""

    def __init__(self, shape: GPTShape, precision: Precision, source: torch.Generator) -> None:
        super().__init__()
        self.compute = precision.compute
        self.up = Linear(shape.width, 4 * shape.width, source, INIT_STD)
        self.down = Linear(4 * shape.width, shape.width, source, shape.std_out)

    def forward(self, hidden_BTD: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, None]:
        return self.down(F.gelu(self.up(hidden_BTD, self.compute)), self.compute), None


class PositionEmbedding(nn.Module):
    """One learned vector for each place of a row."""

    def __init__(self, context: int, width: int, source: torch.Generator) -> None:
        super().__init__()
        self.weight = normal_parameter((context, width), INIT_STD, source)

    def forward(self, num_positions: int) -> Tensor:
        """The table [T, D] of the first places. Raises ValueError for a row longer than the context."""
        if num_positions > len(self.weight):
            raise ValueError(f"a row of {num_positions} tokens, but the model's context is {len(self.weight)}")
        return self.weight[:num_positions]


class Block(nn.Module):
    """Attention, then feed-forward; each reads the normalised stream and adds to it."""

    def __init__(
        self, shape: GPTShape, layer: int, precision: Precision, source: torch.Generator, feed_forward: MakeFeedForward
    ) -> None:
        super().__init__()
        self.shape, self.layer, self.compute = shape, layer, precision.compute
        self.norm_attention = LayerNorm(shape.width)
        self.attention = CausalAttention(shape.width, shape.heads, INIT_STD, shape.std_out, source)
        self.norm_feed_forward = LayerNorm(shape.width)
        self.feed_forward = feed_forward(layer)

    def forward(self, hidden_BTD: Tensor, valid_BT: Tensor | None, noise: int) -> tuple[Tensor, Routing | None]:
        normed_BTD = self.norm_attention(hidden_BTD, self.compute)
        hidden_BTD = self._join(hidden_BTD, self.attention(normed_BTD, self.compute), (noise, self.layer, "attention"))
        normed_BTD = self.norm_feed_forward(hidden_BTD, self.compute)
        output_BTD, routing = self.feed_forward(normed_BTD, valid_BT)
        return self._join(hidden_BTD, output_BTD, (noise, self.layer, "feed_forward")), routing

    def _join(self, hidden_BTD: Tensor, output_BTD: Tensor, seed: Seed) -> Tensor:
        output_BTD = dropout(output_BTD, self.shape.dropout if self.training else 0.0, seed)
        return hidden_BTD + output_BTD if self.shape.residual else output_BTD

    def parts(self) -> Mapping[str, list[nn.Parameter]]:
        """Every parameter once: what the feed-forward names under its names, the rest under `block`."""
        named = self.feed_forward.blocks() if isinstance(self.feed_forward, NamesItsBlocks) else {}
        apart = {id(parameter) for parameters in named.values() for parameter in parameters}
        return {"block": [parameter for parameter in self.parameters() if id(parameter) not in apart], **named}


class GPT(nn.Module):
    """Token and position embeddings, blocks, a last norm, a readout without bias (`tied`: the token embedding itself).

    `feed_forward(layer)` makes the network that replaces a block's dense one: called with hidden [B, T, D] and
    `valid_BT`, it returns its output and a Routing. Weights start from N(0, 0.02^2), residual projections smaller.
    Dropout falls on the embedding and on what each part adds to the stream, in training only.
    """

    def __init__(
        self,
        shape: GPTShape,
        precision: Precision,
        source: torch.Generator,
        feed_forward: MakeFeedForward | None = None,
        positions: Callable[[int, int, torch.Generator], nn.Module] = PositionEmbedding,
    ) -> None:
        super().__init__()
        self.shape, self.precision = shape, precision
        self.embed = normal_parameter((shape.vocabulary, shape.width), INIT_STD, source)
        self.positions = positions(shape.context, shape.width, source)
        make = feed_forward or (lambda layer: FeedForward(shape, precision, source))
        self.layers: Iterable[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(shape, layer, precision, source, make) for layer in range(shape.depth)
        )
        self.norm = LayerNorm(shape.width)
        # Last, so that all else starts alike with and without it.
        self.readout = None if shape.tied else normal_parameter((shape.vocabulary, shape.width), INIT_STD, source)

    def forward(
        self, tokens_BT: Tensor, valid_BT: Tensor | None = None, noise: int = 0
    ) -> tuple[Tensor, list[Routing]]:
        """Logits [B, T, V] in float32 or better, and the routing of each mixture of experts, first layer first.

        `valid_BT` is False on padding, which only follows a row's tokens. `noise` seeds the dropout masks.
        """
        hidden_BTD = self._embed(tokens_BT, noise)
        routings: list[Routing] = []
        for block in self.layers:
            hidden_BTD, routing = self._run(block, hidden_BTD, valid_BT, noise)
            if routing is not None:
                routings.append(routing)
        return self._read(hidden_BTD), routings

    def _embed(self, tokens_BT: Tensor, noise: int) -> Tensor:
        compute = self.precision.compute
        table_TD = self.positions(tokens_BT.shape[-1]).to(compute)
        hidden_BTD = F.embedding(tokens_BT, self.embed).to(compute) + table_TD
        return dropout(hidden_BTD, self.shape.dropout if self.training else 0.0, (noise, "embedding"))

    def _run(
        self, block: Block, hidden_BTD: Tensor, valid_BT: Tensor | None, noise: int
    ) -> tuple[Tensor, Routing | None]:
        if not (self.shape.checkpointing and torch.is_grad_enabled()):
            return block(hidden_BTD, valid_BT, noise)  # type: ignore[no-any-return]
        # The states of the global generators are kept for the recomputation: a feed-forward may draw from them.
        return checkpoint(block, hidden_BTD, valid_BT, noise, use_reentrant=False)  # type: ignore[no-any-return]

    def _read(self, hidden_BTD: Tensor) -> Tensor:
        compute = self.precision.compute
        weight_VD = self.embed if self.readout is None else self.readout
        return at_least_float32(F.linear(self.norm(hidden_BTD, compute), weight_VD.to(compute)))

    def blocks(self) -> Mapping[str, list[nn.Parameter]]:
        """Every parameter once, under the name its gradient norm is reported by; a part of layer 0 ends in 0."""
        blocks = {"embed": [self.embed], "positions": list(self.positions.parameters())}
        for layer, block in enumerate(self.layers):
            blocks.update({f"{name}{layer}": parameters for name, parameters in block.parts().items()})
        return {**blocks, "readout": [*self.norm.parameters(), *([] if self.readout is None else [self.readout])]}
