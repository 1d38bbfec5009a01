"""The mixture-of-experts layer against the blocks of `transformers`: forward and backward, float32, one thread.

2,048 tokens of width 256, experts of hidden width 1024, no token dropped; new tokens in every repeat, the same tokens
and the same router for all. The peers, in their eager implementation:

- Mixtral (all experts in one tensor), for k = 1 and 2. Its experts are gated, three matrices in place of two; a hidden
  width of 672 gives it 1.6 % fewer multiplications a token than ours.
- Switch (one module an expert, k = 1). It computes the same function as ours, but for our biases: two matrices of
  hidden width 1024, exact GELU, y = p E(x).

At 64 experts the factor to Mixtral is the cost of its gradients: for each expert one as large as all experts together
is filled. Switch has no such waste, so there both sides do little but the same matrix products: shown, not judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from workloads.engine.precision import POLICIES
from workloads.layers.moe import MoE

WIDTH, HIDDEN, HIDDEN_GATED = 256, 1024, 672
NUM_TOKENS = 2048
NUM_ROUNDS = {8: 15, 64: 5}  # by the number of experts, as the next
LEAST_RATIO = {8: 0.9, 64: 8.0}

Line = tuple[str, float, str, str, bool | None]
Contender = tuple[nn.Module, Callable[[Tensor], Tensor]]


def run() -> Iterator[Line]:
    if find_spec("transformers") is None:
        yield "NOT RUN: needs transformers (make bench, or pip install '.[bench]')", float("nan"), "", "", None
        return
    for num_experts, num_rounds in NUM_ROUNDS.items():
        for k in (1, 2):
            times = compare(num_experts, k, num_rounds)
            ours, setting = times.pop("ours"), f"{num_experts} experts, k = {k}"
            yield f"{setting}: ours", ours * 1e3, "ms", "", None
            for peer, seconds in times.items():
                least = None if (peer, num_experts) == ("Switch", 64) else LEAST_RATIO[num_experts]
                target, met = ("", None) if least is None else (f">= {least} x", seconds / ours >= least)
                yield f"{setting}: {peer} / ours", seconds / ours, "x", target, met


def compare(num_experts: int, k: int, num_rounds: int, num_tokens: int = NUM_TOKENS) -> dict[str, float]:
    """Median CPU seconds of a pass forward and backward. The contenders take turns; their first turn does not count."""
    everyone = contenders(num_experts, k, num_tokens)
    times: dict[str, list[float]] = {name: [] for name in everyone}
    source = torch.Generator().manual_seed(1)
    with one_thread():
        for _ in range(num_rounds + 1):
            tokens_BD = torch.randn(num_tokens, WIDTH, generator=source)
            for name, contender in everyone.items():
                times[name].append(time_pass(contender, tokens_BD))
    return {name: median(measured[1:]) for name, measured in times.items()}


def contenders(num_experts: int, k: int, num_tokens: int) -> dict[str, Contender]:
    source = torch.Generator().manual_seed(0)
    ours = MoE(WIDTH, HIDDEN, num_experts, k, k > 1, POLICIES["fp32"], source)
    mixtral = mixtral_like(ours)
    everyone: dict[str, Contender] = {
        "ours": (ours, lambda tokens_BD: ours(tokens_BD)[0]),
        "Mixtral": (mixtral, lambda tokens_BD: mixtral(tokens_BD.unsqueeze(0))),
    }
    if k == 1:
        switch = switch_like(ours, num_tokens)
        everyone["Switch"] = switch, lambda tokens_BD: switch(tokens_BD.unsqueeze(0))
    return everyone


@torch.no_grad()
def mixtral_like(ours: MoE) -> Any:
    """A Mixtral block with our router, and experts of about our size."""
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN_GATED,
        num_local_experts=ours.num_experts,
        num_experts_per_tok=ours.k,
        experts_implementation="eager",
    )
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    block.gate.weight.copy_(ours.router.weight)
    return block


@torch.no_grad()
def switch_like(ours: MoE, num_tokens: int) -> Any:
    """A Switch block with our weights; every expert could take every token."""
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersConfig,
        SwitchTransformersSparseMLP,
    )

    config = SwitchTransformersConfig(
        d_model=WIDTH,
        d_ff=HIDDEN,
        num_experts=ours.num_experts,
        expert_capacity=num_tokens,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
        dense_act_fn="gelu",
    )
    block = SwitchTransformersSparseMLP(config)
    block.router.classifier.weight.copy_(ours.router.weight)
    for expert in range(ours.num_experts):
        block.experts[f"expert_{expert}"].wi.weight.copy_(ours.experts.weight_in[expert].t())
        block.experts[f"expert_{expert}"].wo.weight.copy_(ours.experts.weight_out[expert].t())
    return block


def time_pass(contender: Contender, tokens_BD: Tensor) -> float:
    """CPU seconds, which other programs disturb less. As inside a model, the input gets a gradient too."""
    module, layer = contender
    module.zero_grad(set_to_none=True)
    inputs_BD = tokens_BD.clone().requires_grad_()
    started = time.process_time()
    outputs = layer(inputs_BD)
    torch.autograd.backward(outputs, tokens_BD.view_as(outputs))
    return time.process_time() - started


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
