"""The mixture-of-experts layer against plain Python loops: outputs, gradients, capacity, the dead router."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from workloads.engine.precision import Precision
from workloads.layers.moe import Dispatch, MoE
from workloads.layers.router import expert_capacity, queue_places, route

EXACT = Precision(torch.float64, torch.float64, torch.float64)  # so that 1e-12 means equal
NUM_EXPERTS, WIDTH = 4, 6


def layer(k: int, renormalize: bool, capacity_factor: float | None = None, dispatch: Dispatch = "padded") -> MoE:
    source = torch.Generator().manual_seed(1)
    return MoE(WIDTH, 5, NUM_EXPERTS, k, renormalize, EXACT, source, capacity_factor, dispatch=dispatch).double()


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def slow_moe(moe: MoE, inputs: torch.Tensor, capacity: float) -> tuple[torch.Tensor, int]:
    """Token by token, choice by choice. Returns the outputs and how many assignments found their expert full."""
    queues, dropped, outputs = [0] * NUM_EXPERTS, 0, []
    for token in inputs:
        logits = moe.router.weight @ token
        order = sorted(range(NUM_EXPERTS), key=lambda expert: -logits[expert].item())[: moe.k]
        chosen = logits[order].softmax(0) if moe.renormalize else logits.softmax(0)[order]
        output = torch.zeros(WIDTH, dtype=torch.float64)
        for weight, expert in zip(chosen, order, strict=True):
            if queues[expert] >= capacity:
                dropped += 1
                continue
            queues[expert] += 1
            experts = moe.experts
            hidden = F.gelu(token @ experts.weight_in[expert] + experts.bias_in[expert, 0])
            output = output + weight * (hidden @ experts.weight_out[expert] + experts.bias_out[expert, 0])
        outputs.append(output)
    return torch.stack(outputs), dropped


def gradients(moe: MoE, outputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(outputs.pow(3).sum(), list(moe.parameters())))


@pytest.mark.parametrize("dispatch", ["padded", "dense"])
@pytest.mark.parametrize("capacity_factor", [None, 0.5, 1.0, 1.25])
@pytest.mark.parametrize(("k", "renormalize"), [(1, False), (2, True), (2, False), (4, True)])
def test_outputs_gradients_and_drops_are_those_of_a_loop_over_tokens(
    k: int, renormalize: bool, capacity_factor: float | None, dispatch: Dispatch
):
    moe, inputs = layer(k, renormalize, capacity_factor, dispatch), tokens()
    capacity = expert_capacity(len(inputs), k, NUM_EXPERTS, capacity_factor)
    expected, dropped = slow_moe(moe, inputs, math.inf if capacity is None else capacity)
    outputs, routing = moe(inputs)
    assert (outputs - expected).abs().max() < 1e-12
    assert routing.kept_BK.logical_not().sum().item() == dropped
    assert dropped > 0 if capacity_factor == 0.5 else dropped == 0 or capacity_factor is not None  # not vacuous
    pairs = zip(gradients(moe, outputs), gradients(moe, expected), strict=True)
    assert max((ours - theirs).abs().max().item() for ours, theirs in pairs) < 1e-12


def test_capacity_is_rounded_up_and_no_factor_means_no_limit():
    assert expert_capacity(256, 1, 8, 1.0) == 32
    assert expert_capacity(10, 2, 8, 1.0) == 3
    assert expert_capacity(10, 2, 8, None) is None


def test_places_in_a_queue_follow_the_order_of_the_tokens():
    assert queue_places(torch.tensor([[0, 1], [0, 2], [1, 0]]), 3).tolist() == [[0, 0], [1, 0], [1, 2]]


def test_a_token_that_is_dropped_everywhere_gives_zeros():
    moe = layer(1, False, capacity_factor=0.01)
    same = tokens(1).expand(8, WIDTH)
    outputs, routing = moe(same)
    assert routing.kept_BK[:, 0].tolist() == [True] + [False] * 7
    assert (outputs[1:] == 0).all()


def test_evaluation_drops_no_token():
    moe = layer(2, True, capacity_factor=0.25).eval()
    assert moe(tokens())[1].kept_BK.all()


def test_an_expert_that_nobody_asks_for_gets_a_gradient_of_zero():
    moe = layer(1, False)
    outputs, routing = moe(tokens(1))
    outputs.sum().backward()
    idle = [expert for expert in range(NUM_EXPERTS) if expert != routing.experts_BK.item()]
    assert (moe.experts.weight_in.grad[idle] == 0).all()


@pytest.mark.parametrize("num_tokens", [8, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_renormalised_top_one_kills_the_routers_gradient_exactly(num_tokens: int, dtype: torch.dtype):
    norms = {}
    for renormalize in (True, False):
        policy, source = Precision(dtype, dtype, dtype), torch.Generator().manual_seed(1)
        moe = MoE(16, 32, 8, 1, renormalize, policy, source).to(dtype)
        inputs = torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        moe(inputs)[0].square().mean().backward()
        norms[renormalize] = moe.router.weight.grad.norm().item()
    assert norms[True] == 0.0
    assert norms[False] > 1e-4


def test_without_renormalising_the_task_reaches_the_router_by_the_known_amount():
    weight = torch.tensor([[1.0, 0], [0, 1], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor([[1.0, 2], [3, -1]], dtype=torch.float64)
    outputs = torch.tensor([1.0, -2, 3], dtype=torch.float64)
    norms = {}
    for renormalize in (True, False):
        routing = route(inputs @ weight.t(), 1, renormalize, torch.float64)
        (routing.weights_BK * outputs[routing.experts_BK]).sum().backward()
        norms[renormalize], weight.grad = weight.grad.norm().item(), None
    assert norms == {True: 0.0, False: pytest.approx(1.4644, abs=1e-4)}


def test_a_learnable_offset_is_seen_by_z_and_by_no_routing_decision():
    source = torch.Generator().manual_seed(1)
    moe = MoE(WIDTH, 5, NUM_EXPERTS, 2, True, EXACT, source, learnable_offset=True).double()
    plain, stressed = moe(tokens(), 0.0), moe(tokens(), 7.0)
    assert (stressed[1].logits_BE - plain[1].logits_BE - 7).abs().max() < 1e-12
    assert (stressed[0] - plain[0]).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(stressed[1].logits_BE.sum(), [moe.router.offset])
    assert gradient.item() == 40 * NUM_EXPERTS
