"""How much rounding harms routing, by size and kind of the logits: scale does little, a common offset a lot."""

from __future__ import annotations

import pytest
import torch

from workloads.engine.precision import POLICIES
from workloads.layers.router import route, router_logits

NUM_TOKENS, WIDTH, NUM_EXPERTS = 20_000, 32, 8


def flips(precision: str, scale: float = 1.0, offset: float = 0.0) -> float:
    """The share of tokens sent to another expert than float64 sends them to; tokens and weights are exact in bf16."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randn(NUM_TOKENS, WIDTH, generator=source).bfloat16()
    weight = (torch.randn(NUM_EXPERTS, WIDTH, generator=source) / WIDTH**0.5).bfloat16().float() * scale
    reference = tokens.double() @ weight.double().t() + offset
    policy = POLICIES[precision]
    routing = route(router_logits(tokens, weight, offset, policy), 1, False, policy.router_softmax)
    return (routing.experts_BK[:, 0] != reference.argmax(-1)).float().mean().item()


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (40, 0), (300, 0), (1, 40), (1, 300), (1, 1000)])
def test_a_router_whose_input_is_cast_to_float32_never_changes_its_mind(scale: float, offset: float):
    assert flips("bf16-selective", scale, offset) == 0


@pytest.mark.parametrize("precision", ["bf16-softmax", "bf16"])
def test_a_common_offset_of_300_reroutes_nearly_half_of_the_tokens(precision: str):
    assert 0.40 <= flips(precision, offset=300) <= 0.50


def test_growth_by_scale_does_not_raise_the_share_of_rerouted_tokens():
    small, large = flips("bf16-softmax", scale=1), flips("bf16-softmax", scale=300)
    assert small > 0
    assert 1 / 1.5 < large / small < 1.5
