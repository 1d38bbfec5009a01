"""The transformer against an implementation that shares no code with it: loops, explicit masks, float64.

Axes: B rows, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.engine.precision import POLICIES, Precision
from workloads.layers.attention import CausalAttention
from workloads.layers.dropout import Seed, dropout
from workloads.layers.moe import MoE
from workloads.layers.router import Routing, expert_load
from workloads.layers.transformer import GPT, GPTShape, PositionEmbedding

EXACT = Precision(torch.float64, torch.float64, torch.float64)
FP32 = POLICIES["fp32"]
SHAPE = GPTShape(vocabulary=11, context=7, depth=2, heads=3, width=12, tied=False)
GPT2_SMALL = GPTShape(vocabulary=50257, context=1024, depth=12, heads=12, width=768, tied=True)


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shaped(**changes: Any) -> GPTShape:
    return dataclasses.replace(SHAPE, **changes)


def gpt(precision: Precision = EXACT, **changes: Any) -> GPT:
    """A model whose parameters are all far from their initial 0, 1 or 0.02, so that none can be left out unnoticed."""
    model = GPT(shaped(**changes), precision, source())
    noise = source(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=noise)
    return model


def tokens(num_rows: int = 3, length: int = 7, seed: int = 2) -> Tensor:
    return torch.randint(11, (num_rows, length), generator=source(seed))


def naive_logits(model: GPT, tokens_BT: Tensor) -> Tensor:
    return torch.stack([naive_row(model, row_T.tolist()) for row_T in tokens_BT])


def naive_row(model: GPT, row: list[int]) -> Tensor:
    hidden = torch.stack([model.embed[token] for token in row]).double()
    hidden = hidden + torch.stack([model.positions.weight[place] for place in range(len(row))]).double()
    for block in model.layers:
        attended = naive_attention(block.attention, naive_norm(block.norm_attention, hidden))
        hidden = hidden + attended if model.shape.residual else attended
        inner = naive_linear(block.feed_forward.up, naive_norm(block.norm_feed_forward, hidden))
        mixed = naive_linear(block.feed_forward.down, 0.5 * inner * (1 + torch.erf(inner / math.sqrt(2))))
        hidden = hidden + mixed if model.shape.residual else mixed
    readout = model.embed if model.shape.tied else model.readout
    return naive_norm(model.norm, hidden) @ readout.double().T


def naive_norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    centred = hidden - hidden.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double() + norm.bias.double()


def naive_linear(linear: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ linear.weight.double().T + linear.bias.double()


def naive_attention(attention: CausalAttention, hidden: Tensor) -> Tensor:
    length, width = hidden.shape
    size = width // attention.heads
    query, key, value = naive_linear(attention.qkv, hidden).split(width, -1)
    mixed = torch.zeros(length, width, dtype=torch.float64)
    for head in range(attention.heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed[:, part] = scores.masked_fill(future, -math.inf).softmax(-1) @ value[:, part]
    return naive_linear(attention.out, mixed)


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def backward(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_logits_and_gradients_equal_those_of_a_naive_implementation(tied: bool, residual: bool):
    model = gpt(tied=tied, residual=residual).double()
    logits_BTV, routings = model(tokens())
    reference_BTV = naive_logits(model, tokens())
    assert logits_BTV.dtype == torch.float64
    assert routings == []
    assert (logits_BTV - reference_BTV).abs().max() < 1e-12
    targets = tokens(seed=3).flatten()
    ours = backward(model, F.cross_entropy(logits_BTV.flatten(0, 1), targets))
    theirs = backward(model, F.cross_entropy(reference_BTV.flatten(0, 1), targets))
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).abs().max() < 1e-12, name


def test_a_changed_token_leaves_all_earlier_logits_as_they_were():
    model, before_BT = gpt(FP32), tokens()
    after_BT = before_BT.clone()
    after_BT[:, 4] = (before_BT[:, 4] + 1) % 11
    before_BTV, after_BTV = model(before_BT)[0], model(after_BT)[0]
    assert torch.equal(before_BTV[:, :4], after_BTV[:, :4])
    assert (before_BTV[:, 4:] - after_BTV[:, 4:]).abs().amax(-1).min() > 1e-3


def test_gpt2_small_has_124_439_808_parameters_and_needs_no_memory_for_them():
    with torch.device("meta"):
        model = GPT(GPT2_SMALL, FP32, source())
    width, tables = 768, (50257 + 1024) * 768
    block = 2 * (2 * width) + (3 * width + 1) * width + 2 * width + (width + 1) * width + 8 * width * width + 5 * width
    assert sum(parameter.numel() for parameter in model.parameters()) == tables + 12 * block + 2 * width == 124_439_808
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_tied_readout_is_the_token_embedding_and_all_else_starts_alike():
    tied, untied = GPT(shaped(tied=True), FP32, source()), GPT(SHAPE, FP32, source())
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"readout"}
    assert all(torch.equal(value, untied.state_dict()[name]) for name, value in tied.state_dict().items())
    loss = tied(tokens().clamp(max=9))[0].logsumexp(-1).sum()
    assert backward(tied, loss)["embed"][10].abs().max() > 0  # no input holds token 10: this came from the readout


def test_weights_start_as_gpt2s_do():
    model = GPT(dataclasses.replace(GPT2_SMALL, vocabulary=997, context=64, depth=3), FP32, source())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            std = 0.02 / math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 0.02
            # 5 standard errors of the estimate
            assert float(parameter.detach().std()) == pytest.approx(std, rel=5 / math.sqrt(2 * parameter.numel())), name
            assert abs(float(parameter.detach().mean())) < 5 * std / math.sqrt(parameter.numel()), name


def test_a_source_decides_all_weights_and_the_global_generator_none():
    before = torch.get_rng_state()
    first, second = GPT(SHAPE, FP32, source()), GPT(SHAPE, FP32, source())
    first(tokens(), noise=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed, GPT(SHAPE, FP32, source(1)).embed)


def test_padding_at_the_end_does_not_change_the_logits_of_valid_tokens():
    model, rows_BT, lengths = gpt(), tokens(), [7, 4, 1]
    valid_BT = torch.arange(7) < torch.tensor(lengths).unsqueeze(-1)
    padded_BTV = model(rows_BT.where(valid_BT, 0), valid_BT)[0]
    for row, length in enumerate(lengths):
        alone_TV = model(rows_BT[row : row + 1, :length])[0][0]
        assert (padded_BTV[row, :length] - alone_TV).abs().max() < 1e-12
        other_TV = model(rows_BT.where(valid_BT, 9), valid_BT)[0][row]
        assert torch.equal(padded_BTV[row, :length], other_TV[:length])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_stream_is_in_the_policys_dtype_and_logits_and_gradients_in_float32(policy: str):
    model, streams = gpt(POLICIES[policy]), []
    for block in model.layers:
        block.register_forward_hook(lambda _module, _inputs, outputs: streams.append(outputs[0].dtype))
    logits_BTV, _ = model(tokens())
    assert streams == [POLICIES[policy].compute] * 2
    assert logits_BTV.dtype == torch.float32
    grads = backward(model, F.cross_entropy(logits_BTV.flatten(0, 1), tokens(seed=3).flatten()))
    assert {gradient.dtype for gradient in grads.values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    reference_BTV = gpt(EXACT)(tokens())[0]
    # Logits reach 5; bfloat16 keeps 8 bits of each of the dozen roundings on the way.
    assert (logits_BTV - reference_BTV).abs().max() < {torch.float32: 1e-5, torch.float16: 0.05}.get(
        POLICIES[policy].compute, 0.4
    )


class Mixture(nn.Module):
    """A mixture of experts for each token, as a model would put in place of a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(12, 8, 4, 1, False, FP32, source(5))
        self.moe.router.weight.data[1] = self.moe.router.weight.data[0]  # an exact tie wherever these two win

    def forward(self, hidden_BTD: Tensor, valid_BT: Tensor | None) -> tuple[Tensor, Routing]:
        output, routing = self.moe(hidden_BTD.flatten(0, 1))
        return output.view_as(hidden_BTD), routing

    def blocks(self) -> dict[str, list[nn.Parameter]]:
        return {"router": list(self.moe.router.parameters()), "experts": list(self.moe.experts.parameters())}


def noisy_step(checkpointing: bool, mixture: bool) -> tuple[Tensor, list[Routing], dict[str, Tensor]]:
    feed_forward = (lambda _layer: Mixture()) if mixture else None
    model = GPT(shaped(dropout=0.5, checkpointing=checkpointing), FP32, source(), feed_forward)
    logits_BTV, routings = model(tokens(), noise=7)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens(seed=3).flatten())
    loss = loss + sum(routing.logits_BE.logsumexp(-1).square().mean() for routing in routings)
    return logits_BTV, routings, backward(model, loss)


@pytest.mark.parametrize("mixture", [False, True])
def test_checkpointing_changes_no_bit_of_loss_gradients_or_routing_under_dropout(mixture: bool):
    plain_BTV, plain_routings, plain = noisy_step(False, mixture)
    again_BTV, again_routings, again = noisy_step(True, mixture)
    assert torch.equal(plain_BTV, again_BTV)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(bool(gradient.any()) for gradient in plain.values())
    assert len(plain_routings) == len(again_routings) == (2 if mixture else 0)
    for before, after in zip(plain_routings, again_routings, strict=True):
        assert all(torch.equal(*pair) for pair in zip(before[:6], after[:6], strict=True))
        assert expert_load(after.experts_BK, 4).sum() == tokens().numel()


def test_checkpointing_keeps_the_input_of_each_block_instead_of_what_is_inside():
    def saved_bytes(checkpointing: bool) -> int:
        storages = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = GPT(shaped(depth=6, width=48, checkpointing=checkpointing), FP32, source())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits_BTV, _ = model(tokens(64))  # held, as the graph holds what was saved
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        assert logits_BTV.requires_grad
        return sum(size for pointer, size in storages.items() if pointer not in weights)

    assert saved_bytes(True) < 0.25 * saved_bytes(False)


def test_a_mask_is_a_function_of_its_seed_alone():
    values, before = torch.ones(1000, 100), torch.get_rng_state()
    mask = dropout(values, 0.25, (3, 0, "attention"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(mask, dropout(values, 0.25, (3, 0, "attention")))
    assert torch.equal(mask.unique(), torch.tensor([0.0, 4 / 3]))
    assert float((mask == 0).float().mean()) == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 1e5))  # 5 sigma
    for seed in ((3, 1, "attention"), (3, 0, "feed_forward"), (4, 0, "attention"), (3 + 2**32, 0, "attention")):
        other = dropout(values, 0.25, seed)
        both = float(((mask == 0) & (other == 0)).float().mean())
        assert both == pytest.approx(0.0625, abs=5 * math.sqrt(0.0625 * 0.9375 / 1e5)), seed  # independent


def test_dropout_passes_the_gradient_of_what_it_kept_and_hides_no_nan():
    values = torch.tensor([1.0, 2.0, math.nan] * 30, requires_grad=True)
    dropped = dropout(values, 0.5, (1,))
    (gradient,) = torch.autograd.grad(dropped.sum(), values)
    kept = gradient != 0
    assert 0 < kept.sum() < 90
    assert torch.equal(gradient[kept], torch.full_like(gradient[kept], 2.0))
    assert dropped.isnan().sum() == 30


def test_no_dropout_costs_nothing_and_evaluation_has_none():
    values = torch.ones(3)
    assert dropout(values, 0.0, (1,)) is values
    noisy, plain = gpt(FP32, dropout=0.5), gpt(FP32)
    assert not torch.equal(noisy(tokens(), noise=1)[0], noisy(tokens(), noise=2)[0])
    assert torch.equal(noisy(tokens(), noise=1)[0], noisy(tokens(), noise=1)[0])
    assert torch.equal(noisy.eval()(tokens(), noise=1)[0], plain(tokens())[0])


def test_each_block_and_the_embedding_meet_dropout_of_their_own(monkeypatch: pytest.MonkeyPatch):
    seeds: list[tuple[Any, ...]] = []

    def watched(values: Tensor, p: float, seed: Seed) -> Tensor:
        seeds.append((p, *seed))
        return dropout(values, p, seed)

    monkeypatch.setattr("workloads.layers.transformer.dropout", watched)
    gpt(FP32, dropout=0.1)(tokens(), noise=5)
    places = ["attention", "feed_forward"]
    assert seeds == [(0.1, 5, "embedding"), *((0.1, 5, layer, place) for layer in (0, 1) for place in places)]


def names(model: GPT) -> Iterator[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return (by_id[id(parameter)] for block in model.blocks().values() for parameter in block)


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_hold_every_parameter_once(tied: bool):
    dense = gpt(tied=tied)
    mixed = GPT(shaped(tied=tied), FP32, source(), lambda _layer: Mixture())
    for model in (dense, mixed):
        assert sorted(names(model)) == sorted(name for name, _ in model.named_parameters())
    assert list(dense.blocks()) == ["embed", "positions", "block0", "block1", "readout"]
    assert set(mixed.blocks()) == {*dense.blocks(), "router0", "experts0", "router1", "experts1"}
    assert [len(mixed.blocks()[name]) for name in ("router1", "experts1", "block1")] == [1, 4, 8]
    assert len(dense.blocks()["readout"]) == (2 if tied else 3)


class DetachedPositions(PositionEmbedding):
    def forward(self, num_positions: int) -> Tensor:
        return super().forward(num_positions).detach()


def test_a_variant_of_the_position_embedding_can_be_put_in():
    healthy, broken = (GPT(SHAPE, FP32, source(), positions=kind) for kind in (PositionEmbedding, DetachedPositions))
    assert torch.equal(healthy(tokens())[0], broken(tokens())[0])
    for model in (healthy, broken):
        model(tokens())[0].square().sum().backward()
    assert healthy.positions.weight.grad.abs().min() > 0
    assert broken.positions.weight.grad is None


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="a row of 8 tokens, but the model's context is 7"):
        gpt()(tokens(length=8))
    with pytest.raises(ValueError, match="heads=5 does not divide width=12"):
        gpt(heads=5)


def test_a_feed_forward_that_draws_from_the_global_generator_draws_the_same_again_under_checkpointing():
    class Drops(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = torch.nn.Linear(8, 8)

        def forward(self, hidden_BTD: torch.Tensor, valid_BT: torch.Tensor | None) -> tuple[torch.Tensor, None]:
            return torch.nn.functional.dropout(self.map(hidden_BTD), 0.5), None

    def gradients(checkpointing: bool) -> list[torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shape = GPTShape(5, 4, 2, 2, 8, tied=False, checkpointing=checkpointing)
            model = GPT(shape, POLICIES["fp32"], torch.Generator().manual_seed(1), lambda layer: Drops())
            model(torch.zeros(3, 4, dtype=torch.int64))[0].logsumexp(-1).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(gradients(False), gradients(True), strict=True))
