"""The router's formulas against published figures, closed forms and bit patterns."""

from __future__ import annotations

import inspect
import math
import struct

import pytest
import torch

from workloads.engine.precision import POLICIES
from workloads.layers.router import (
    expert_load,
    load_balance_loss,
    masked_mean,
    one_hot,
    route,
    router_logits,
    router_z_loss,
    tie_share,
)

PUBLISHED = [[4.0, 1.0, 0.5, -1.0], [2.0, 2.0, 0.0, 0.0]]


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(PUBLISHED, dtype=dtype)


def test_z_loss_of_the_published_logits_in_float32():
    rows = [router_z_loss(row.unsqueeze(0)).sqrt().item() for row in logits()]
    assert rows == pytest.approx([4.083166, 2.820075], abs=1e-5)
    assert router_z_loss(logits()).item() == pytest.approx(12.312534, abs=1e-5)


def test_z_loss_of_the_published_logits_in_float64():
    rows = [router_z_loss(row.unsqueeze(0)).sqrt().item() for row in logits(torch.float64)]
    assert rows == pytest.approx([4.0831661926, 2.8200751916], abs=1e-9)
    assert router_z_loss(logits(torch.float64)).item() == pytest.approx(12.3125351214, abs=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_gradient_of_the_z_loss_is_its_formula(dtype: torch.dtype, tolerance: float):
    values = logits(dtype).requires_grad_()
    router_z_loss(values).backward()
    formula = 2 / len(values) * values.logsumexp(-1, keepdim=True) * values.softmax(-1)
    assert (values.grad - formula).abs().max() < tolerance
    assert values.grad[0].tolist() == pytest.approx([3.75732, 0.18707, 0.11346, 0.02532], abs=1e-4)


def test_a_common_shift_changes_z_but_no_routing_decision():
    shifted = logits() - 3
    assert router_z_loss(shifted).item() == pytest.approx(0.602811, abs=1e-5)
    assert torch.allclose(shifted.softmax(-1), logits().softmax(-1), rtol=0, atol=1e-7)
    before, after = (route(values, 2, True, torch.float32) for values in (logits()[:1], shifted[:1]))
    assert torch.equal(before.experts_BK, after.experts_BK)


def test_z_is_taken_from_raw_logits_not_from_probabilities():
    one, even = torch.tensor([[2.0, 0, 0, 0]]), torch.zeros(1, 4)
    assert router_z_loss(one).item() == pytest.approx(5.4791, abs=1e-4)
    assert router_z_loss(even).item() == pytest.approx(math.log(4) ** 2, abs=1e-6)
    assert router_z_loss(even + 10).item() == pytest.approx(129.6477, abs=1e-3)


def test_z_of_float16_logits_does_not_overflow():
    z = router_z_loss(torch.full((1, 4), 300.0, dtype=torch.float16))
    assert z.dtype == torch.float32
    assert z.item() == pytest.approx(90833.7, abs=0.1)


def test_padding_tokens_do_not_count_in_z_or_load():
    values = torch.tensor([[2.0, 0, 0, 0], [0, 0, 0, 0]])
    mask = torch.tensor([1, 0])
    assert router_z_loss(values, mask).item() == pytest.approx(5.4791, abs=1e-4)
    assert (1e-3 * router_z_loss(values, mask)).item() == pytest.approx(0.0054791, abs=1e-7)
    assert router_z_loss(values).item() == pytest.approx(3.7005, abs=1e-4)
    assert expert_load(route(values, 1, False, torch.float32).experts_BK, 4, mask).tolist() == [1, 0, 0, 0]


def test_what_a_padding_token_holds_does_not_matter_even_if_it_is_not_a_number():
    values = torch.tensor([[2.0, 0, 0, 0], [math.nan] * 4], requires_grad=True)
    loss = router_z_loss(values, torch.tensor([True, False]))
    loss.backward()
    assert loss.item() == pytest.approx(5.4791, abs=1e-4)
    assert values.grad[0].isfinite().all()


def test_balance_is_one_for_an_even_load_and_padding_does_not_count():
    values = torch.tensor([[10.0, 0], [0, 10], [10, 0], [10, 0], [10, 0], [10, 0]])
    routing = route(values, 1, False, torch.float32)
    mask = torch.tensor([1, 1, 0, 0, 0, 0])
    masked = load_balance_loss(routing.probabilities_BE, routing.experts_BK, mask)
    assert masked.item() == pytest.approx(1.0, abs=1e-4)
    assert load_balance_loss(routing.probabilities_BE, routing.experts_BK).item() == pytest.approx(1.4444, abs=1e-4)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_counts_load_shares_that_sum_to_one_for_every_k(k: int):
    values = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    routing = route(values, k, k > 1, torch.float64)
    shares = [(routing.experts_BK == expert).sum().item() / (64 * k) for expert in range(8)]
    expected = 8 * sum(share * values.softmax(-1)[:, expert].mean().item() for expert, share in enumerate(shares))
    assert sum(shares) == pytest.approx(1.0)
    assert load_balance_loss(routing.probabilities_BE, routing.experts_BK).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("sizes", [(16, 16), (8, 8, 8, 2), (1, 30)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_with_the_load_of_the_window_micro_batches_give_the_balance_loss_of_the_joined_batch(
    sizes: tuple[int, ...], masked: bool, k: int
):
    source = torch.Generator().manual_seed(sum(sizes))
    values = torch.randn(sum(sizes), 8, dtype=torch.float64, generator=source)
    valid = torch.rand(sum(sizes), generator=source) > (0.4 if masked else 0.0)

    def terms(load_E: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the window, made of its micro-batches, and its gradient."""
        leaf, total = values.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
        for part, mask in zip(leaf.split(sizes), valid.split(sizes), strict=True):
            routing = route(part, k, k > 1, torch.float64, valid_B=mask)
            loss = load_balance_loss(routing.probabilities_BE, routing.experts_BK, mask, load_E)
            total = total + mask.sum().item() / valid.sum().item() * loss
        return total, torch.autograd.grad(total, [leaf])[0]

    load_E = expert_load(route(values, k, k > 1, torch.float64).experts_BK, 8, valid)
    share_E = load_E.double() / load_E.sum()
    whole = values.clone().requires_grad_()
    probabilities = whole[valid].softmax(-1)
    joined = 8 * (share_E * probabilities.mean(0)).sum()
    loss, gradient = terms(load_E)
    assert loss.item() == pytest.approx(joined.item(), abs=1e-12)
    assert (gradient - torch.autograd.grad(joined, [whole])[0]).abs().max() < 1e-12
    assert terms(load_E.double())[0].item() == loss.item()
    assert abs(terms(None)[0].item() - joined.item()) > 1e-4  # each with its own load: another number


def test_padding_does_not_count_as_a_tie():
    values = torch.tensor([[2.0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]])
    valid = torch.tensor([True, True, False, False])
    assert tie_share(values, 1).item() == 0.75
    assert tie_share(values, 1, valid).item() == 0.5
    assert tie_share(values, 3, valid).item() == 0


def test_padding_takes_no_place():
    values = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    valid = torch.tensor([False, True, True, True])
    assert route(values, 1, False, torch.float32, 1).kept_BK[:, 0].tolist() == [True, False, False, True]
    assert route(values, 1, False, torch.float32, 1, valid).kept_BK[:, 0].tolist() == [False, True, False, True]


def test_the_mean_over_no_valid_token_is_zero_and_not_nan():
    assert masked_mean(torch.ones(3, 2), torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0]


def test_one_hot_agrees_with_torch():
    indices = torch.tensor([[0, 3], [2, 2]])
    assert torch.equal(one_hot(indices, 4), torch.nn.functional.one_hot(indices, 4))


def test_bfloat16_rounds_as_published():
    assert torch.tensor([3.14159, 40.3, 1500.7]).bfloat16().tolist() == [3.140625, 40.25, 1504.0]


@pytest.mark.parametrize(("top", "second", "gate"), [(0.3, 0.1, 0.550), (40.3, 40.1, 0.562), (300.3, 300.1, 0.500)])
def test_gates_of_rounded_logits_with_a_float_softmax(top: float, second: float, gate: float):
    rounded = torch.tensor([[top, second]]).bfloat16()
    weights = route(rounded, 2, True, torch.float32).weights_BK[0]
    assert weights.max().item() == pytest.approx(gate, abs=5e-4)
    assert tie_share(rounded, 1).item() == (1.0 if gate == 0.5 else 0.0)


@pytest.mark.parametrize("exponent", range(-10, 16))
def test_bfloat16_numbers_are_spaced_by_two_to_the_exponent_minus_seven(exponent: int):
    value = torch.tensor(2.0**exponent).bfloat16()
    following = (value.view(torch.int16) + 1).view(torch.bfloat16)
    assert following.item() - value.item() == 2.0 ** (exponent - 7)


def test_between_32_and_64_bfloat16_steps_by_a_quarter_and_float32_by_two_to_the_minus_eighteen():
    following = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", 32.0))[0] + 1))[0]
    assert following - 32.0 == 2.0**-18
    assert (torch.tensor(32.0).bfloat16().view(torch.int16) + 1).view(torch.bfloat16).item() - 32.0 == 0.25


def test_rounding_to_bfloat16_moves_a_number_by_half_a_step_at_most():
    values = torch.empty(100_000).uniform_(-2000, 2000, generator=torch.Generator().manual_seed(0)).double()
    step = torch.exp2(values.abs().log2().floor() - 7)
    assert ((values.bfloat16().double() - values).abs() <= step / 2).all()


def test_top_one_weights_are_one_when_renormalised_and_the_published_probabilities_when_not():
    torch.manual_seed(0)
    tokens = torch.randn(8, 16)
    torch.manual_seed(1)
    weight = torch.nn.Linear(16, 8, bias=False).weight
    values = router_logits(tokens, weight, 0.0, POLICIES["fp32"])
    assert route(values, 1, True, torch.float32).weights_BK[:3, 0].tolist() == [1.0, 1.0, 1.0]
    honest = route(values, 1, False, torch.float32).weights_BK[:3, 0]
    assert honest.tolist() == pytest.approx([0.234, 0.307, 0.232], abs=1e-3)


def test_granite_rounds_the_logits_and_protects_only_the_softmax():
    granite = pytest.importorskip("transformers.models.granitemoe.modeling_granitemoe")
    source = inspect.getsource(granite)
    assert "F.linear(hidden_states, self.weight).float()" in source
    assert "torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)" in source
