"""The mixture-of-experts layer against plain Python loops: outputs, gradients, capacity, padding, the dead router."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from workloads.engine.precision import POLICIES, Precision
from workloads.layers import moe as moe_module
from workloads.layers.moe import MoE, queue_lengths
from workloads.layers.router import (
    Routing,
    expert_capacity,
    load_balance_loss,
    queue_places,
    route,
    router_z_loss,
)

EXACT = Precision(torch.float64, torch.float64, torch.float64)  # so that 1e-12 means equal
NUM_EXPERTS, WIDTH = 4, 6


@pytest.fixture(params=["padded", "one by one", "dense"])
def dispatch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which tokens can reach experts; "one by one" is what uneven loads choose by themselves."""
    if request.param == "one by one":
        monkeypatch.setattr(moe_module, "EMPTY_PLACES_WORTH_PADDING", -1)
    return request.param


def layer(k: int, renormalize: bool, capacity_factor: float | None = None, dispatch: str = "padded") -> MoE:
    source, way = torch.Generator().manual_seed(1), "dense" if dispatch == "dense" else "queues"
    return MoE(WIDTH, 5, NUM_EXPERTS, k, renormalize, EXACT, source, capacity_factor, dispatch=way).double()


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def padding(count: int = 40) -> torch.Tensor:
    """False for 11 of 40 tokens, some of them at the start."""
    return torch.rand(count, generator=torch.Generator().manual_seed(4)) > 0.3


def slow_moe(moe: MoE, inputs: torch.Tensor, valid: torch.Tensor, capacity: float) -> tuple[torch.Tensor, int]:
    """Token by token, choice by choice. Returns the outputs and how many assignments found their expert full."""
    queues, dropped, outputs = [0] * NUM_EXPERTS, 0, []
    for token, is_valid in zip(inputs, valid.tolist(), strict=True):
        output = torch.zeros(WIDTH, dtype=torch.float64)
        logits = moe.router.weight @ token
        order = sorted(range(NUM_EXPERTS), key=lambda expert: -logits[expert].item())[: moe.k]
        chosen = logits[order].softmax(0) if moe.renormalize else logits.softmax(0)[order]
        for weight, expert in zip(chosen, order, strict=True) if is_valid else ():
            if queues[expert] >= capacity:
                dropped += 1
                continue
            queues[expert] += 1
            experts = moe.experts
            hidden = F.gelu(token @ experts.weight_in[expert] + experts.bias_in[expert, 0])
            output = output + weight * (hidden @ experts.weight_out[expert] + experts.bias_out[expert, 0])
        outputs.append(output)
    return torch.stack(outputs), dropped


def gradients(moe: MoE, inputs: torch.Tensor, outputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(outputs.pow(3).sum(), [inputs, *moe.parameters()]))


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("capacity_factor", [None, 0.5, 1.0, 1.25])
@pytest.mark.parametrize(("k", "renormalize"), [(1, False), (2, True), (2, False), (4, True)])
def test_outputs_gradients_and_drops_are_those_of_a_loop_over_tokens(
    k: int, renormalize: bool, capacity_factor: float | None, masked: bool, dispatch: str
):
    moe, inputs = layer(k, renormalize, capacity_factor, dispatch), tokens().requires_grad_()
    valid = padding() if masked else torch.ones(40, dtype=torch.bool)
    capacity = expert_capacity(int(valid.sum()), k, NUM_EXPERTS, capacity_factor)
    expected, dropped = slow_moe(moe, inputs, valid, math.inf if capacity is None else capacity)
    outputs, routing = moe(inputs, 0.0, valid if masked else None)
    assert (outputs - expected).abs().max() < 1e-12
    assert count_dropped(routing) == dropped
    assert dropped > 0 if capacity_factor == 0.5 else dropped == 0 or capacity_factor is not None  # not vacuous
    assert largest_difference(gradients(moe, inputs, outputs), gradients(moe, inputs, expected)) < 1e-12


def test_padding_changes_nothing_whatever_it_holds(dispatch: str):
    moe, valid = layer(2, True, 0.75, dispatch), padding()
    alone = tokens()[valid].requires_grad_()
    expected, routing = moe(alone)
    reference = [expected, *gradients(moe, alone, expected)[1:], *losses(routing)]
    num_dropped = count_dropped(routing)
    assert num_dropped > 0  # the capacity is felt, and padding would change it
    for content in (0.0, 1e30, math.nan):
        inputs = tokens().where(valid.unsqueeze(-1), content).requires_grad_()
        outputs, routing = moe(inputs, 0.0, valid)
        to_inputs, *to_parameters = gradients(moe, inputs, outputs)
        assert largest_difference([outputs[valid], *to_parameters, *losses(routing)], reference) < 1e-12
        assert (outputs[~valid] == 0).all()
        assert (to_inputs[~valid] == 0).all()
        assert not routing.kept_BK[~valid].any()
        assert count_dropped(routing) == num_dropped


def count_dropped(routing: Routing) -> int:
    """Assignments of valid tokens that found their expert full."""
    return int((~routing.kept_BK[routing.valid_B]).sum())


def losses(routing: Routing) -> list[torch.Tensor]:
    balance = load_balance_loss(routing.probabilities_BE, routing.experts_BK, routing.valid_B)
    return [balance, router_z_loss(routing.logits_BE, routing.valid_B)]


def test_a_micro_batch_of_padding_only_gives_zeros_and_no_gradient(dispatch: str):
    moe, inputs = layer(2, True, 1.0, dispatch), tokens().requires_grad_()
    outputs, routing = moe(inputs, 0.0, torch.zeros(40, dtype=torch.bool))
    assert (outputs == 0).all()
    assert [loss.item() for loss in losses(routing)] == [0, 0]
    total = outputs.sum() + sum(losses(routing))
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, [inputs, *moe.parameters()]))


def test_masks_of_their_own_for_each_member_work_under_vmap_with_a_capacity():
    moe, inputs, masks = layer(2, True, 0.75, "dense"), tokens(), torch.stack([padding(), ~padding()])
    together = torch.vmap(lambda valid: moe(inputs, 0.0, valid)[0])(masks)
    apart = torch.stack([moe(inputs, 0.0, valid)[0] for valid in masks])
    assert (together - apart).abs().max() < 1e-12


def test_uneven_queues_are_not_padded_and_in_16_bits_padded_lengths_recur():
    assert queue_lengths([60, 65, 57, 62], torch.float32) == [65] * 4
    assert queue_lengths([60, 65, 57, 62], torch.bfloat16) == [72] * 4
    assert queue_lengths([2048] + [0] * 63, torch.float32) == [2048] + [0] * 63
    assert queue_lengths([2048] + [0] * 63, torch.bfloat16) == [2048] + [0] * 63
    assert queue_lengths([9, 30, 0, 1], torch.float32, "cuda") == [30] * 4


def test_a_capacity_that_is_a_whole_number_is_not_rounded_up_by_float_noise():
    assert expert_capacity(400, 1, 8, 1.1) == 55
    assert int(expert_capacity(torch.tensor(400), 1, 8, 1.1)) == 55
    assert expert_capacity(401, 1, 8, 1.1) == 56


def test_a_router_that_has_collapsed_gives_the_same_numbers():
    moe, inputs = layer(1, False), tokens(100).requires_grad_()
    with torch.no_grad():
        moe.router.weight.zero_()[2, 0] = 1.0
        inputs[:, 0] = 5.0
    outputs, routing = moe(inputs)
    assert (routing.experts_BK == 2).all()
    assert queue_lengths([0, 0, 100, 0], torch.float64) == [0, 0, 100, 0]
    expected, _ = slow_moe(moe, inputs, torch.ones(100), math.inf)
    assert (outputs - expected).abs().max() < 1e-12
    assert largest_difference(gradients(moe, inputs, outputs), gradients(moe, inputs, expected)) < 1e-11  # sums of 100


@pytest.mark.parametrize("precision", ["fp32", "bf16-selective", "fp16"])
def test_autocast_changes_no_bit_of_the_layer(precision: str):
    moe = MoE(WIDTH, 5, NUM_EXPERTS, 2, True, POLICIES[precision], torch.Generator().manual_seed(1))
    inputs = tokens().float().requires_grad_()

    def forward() -> tuple[list[torch.Tensor], torch.Tensor]:
        outputs, routing = moe(inputs)
        return [outputs, *routing], outputs.float().square().mean() + router_z_loss(routing.logits_BE)

    plain, loss = forward()
    expected = torch.autograd.grad(loss, [inputs, *moe.parameters()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(inputs, moe.router.weight).dtype == torch.bfloat16  # what would happen to the router
        wrapped, loss = forward()
        (inside,) = torch.autograd.grad(loss, [moe.router.weight], retain_graph=True)
    assert [value.dtype for value in wrapped] == [value.dtype for value in plain]
    assert all(torch.equal(one, other) for one, other in zip(wrapped, plain, strict=True))
    after = torch.autograd.grad(loss, [inputs, *moe.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(after, expected, strict=True))
    assert torch.equal(inside, after[1])  # also where backward is called inside, against torch's advice


def test_the_layer_agrees_with_the_switch_block_of_transformers():
    pytest.importorskip("transformers")
    from benchmarks.moe_layer import contenders

    everyone = contenders(num_experts=8, k=1, num_tokens=64)
    (ours, ours_of), (switch, switch_of) = everyone["ours"], everyone["Switch"]
    with torch.no_grad():
        ours.experts.bias_in.zero_()
        ours.experts.bias_out.zero_()
    inputs = torch.randn(64, ours.router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    expected = switch_of(inputs)[0]
    assert expected.abs().mean() > 1e-3
    assert (ours_of(inputs) - expected).abs().max() < 1e-5 * expected.abs().max()  # float32, sums of 1024 terms
    ours_of(inputs).sum().backward()
    switch_of(inputs).sum().backward()
    difference = ours.router.weight.grad - switch.router.classifier.weight.grad
    assert difference.abs().max() < 1e-5 * ours.router.weight.grad.abs().max()


def test_capacity_is_rounded_up_and_no_factor_means_no_limit():
    assert expert_capacity(256, 1, 8, 1.0) == 32
    assert expert_capacity(10, 2, 8, 1.0) == 3
    assert expert_capacity(10, 2, 8, None) is None


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.1, 1.25])
def test_capacity_for_a_number_of_tokens_that_is_not_read_is_the_same(factor: float):
    for num_tokens in range(1, 200):
        assert expert_capacity(torch.tensor(num_tokens), 2, 8, factor) == expert_capacity(num_tokens, 2, 8, factor)


def test_places_in_a_queue_follow_the_order_of_the_tokens():
    assert queue_places(torch.tensor([[0, 1], [0, 2], [1, 0]]), 3).tolist() == [[0, 0], [1, 0], [1, 2]]


def test_padding_stands_in_no_queue():
    experts, valid = torch.tensor([[0, 1], [0, 2], [1, 0]]), torch.tensor([True, False, True])
    assert queue_places(experts, 3, valid)[valid].tolist() == [[0, 0], [1, 1]]


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
