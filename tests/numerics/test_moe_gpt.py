"""`moe_gpt`: its losses are means over the window's valid tokens, its load is counted once, its bugs do one thing each.

Axes: B rows, T time, N tokens of a micro-batch (B * T), E experts, V symbols.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from orchestrator.trial import Report
from orchestrator.workload import FieldConflict, describe, flatten
from workloads.char_gpt.bugs import PLANTED as PLANTED_PARTS
from workloads.char_gpt.train import Seen
from workloads.data.tokens import TokenBatch
from workloads.engine.precision import POLICIES, Precision
from workloads.engine.training import Training, build_trainer
from workloads.engine.update import Call, Hyper, Trainer, Update
from workloads.layers.router import Routing, load_balance_loss
from workloads.layers.transformer import INIT_STD
from workloads.moe_gpt.bugs import PLANTED
from workloads.moe_gpt.config import METRICS, Bug, Config
from workloads.moe_gpt.language import MoeLanguageModel
from workloads.moe_gpt.train import MoeGpt

EXACT = Precision(torch.float64, torch.float64, torch.float64)
TINY: dict[str, Any] = {
    "steps": 3, "batch_size": 4, "depth": 2, "heads": 2, "width": 8, "context": 8, "num_held_out_windows": 4,
    "num_experts": 4, "expert_hidden": 8, "clip_norm": None,
}  # fmt: skip
LOSSES: dict[str, float] = {"alpha": 0.1, "c_z": 0.01}

# Each bug with the settings under which it matters.
BUGS: dict[str, dict[str, Any]] = {
    "no_zero_grad": {},
    "unshifted_targets": {},
    "loss_times_40": {"optimizer": "sgd"},
    "detached_positions": {},
    "clip_before_unscale": {"precision": "fp16", "clip_norm": 0.1, "optimizer": "sgd"},
    "unscaled_accumulation": {"accumulation_steps": 3, "optimizer": "sgd"},
    "mean_of_means": {"accumulation_steps": 3, "padding": 0.9, "optimizer": "sgd"},
    "scheduler_per_micro_batch": {"accumulation_steps": 3, "schedule": "linear"},
    "bf16_router": {"precision": "bf16-selective"},
    "renormalized_top1": {"k": 1},
    "double_counted_load": {},
    "padding_in_z": {"padding": 0.9, "c_z": 0.1},
}


class Exact(MoeLanguageModel):
    """Computes in float64."""

    def precision(self, config: Config) -> Precision:
        return EXACT


class WithoutZ(MoeGpt):
    """The loss as it would be written if nobody had thought of the z-loss."""

    def loss(self, call: Call, batch: TokenBatch, hyper: Hyper) -> Any:
        logits_BTV, routings = call(batch.tokens_BT, batch.valid_BT, batch.noise)
        cross_entropy = F.cross_entropy(logits_BTV.flatten(0, 1), batch.targets_BT.flatten())
        balance = sum(load_balance_loss(routing.probabilities_BE, routing.experts_BK) for routing in routings)
        return cross_entropy + hyper["alpha"] * balance, Seen(cross_entropy.detach(), routings)


def config_of(**settings: Any) -> Config:
    return Config(**TINY | settings)


def begin(context: Any, /, **settings: Any) -> Training:
    config = config_of(**settings)
    return Training.begin(PLANTED.get(config.bug, MoeGpt)(), config, context)


def run(context: Any, /, workload: MoeLanguageModel | None = None, **settings: Any) -> list[Report]:
    return list((workload or MoeGpt()).run(config_of(**settings), context))


def timeless(reports: Sequence[Report]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in report.metrics.items() if not name.startswith(("time/", "memory/"))}
        for report in reports
    ]


def exact_trainer(context: Any, /, **settings: Any) -> Trainer:
    workload, config = Exact(), config_of(**settings)
    model = workload.build(config, workload.data(config, context), torch.Generator().manual_seed(3)).double()
    for name, parameter in model.named_parameters():
        if "router" in name:
            parameter.data *= 30  # initial logits are so small that no token is sure of its expert
    return build_trainer(workload, config, model, "cpu")


def observe(training: Training, update: Update) -> dict[str, float]:
    return dict(training.workload.observe(training.config, update))


def gradient(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in trainer.parameters])


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.parameters]).clone()


def joined(window: Sequence[TokenBatch]) -> TokenBatch:
    return TokenBatch(*(torch.cat([micro[axis] for micro in window]) for axis in range(3)))


def valid(values: Tensor, batch: TokenBatch) -> Tensor:
    """The entries of valid tokens, of one entry a token."""
    return values if batch.valid_BT is None else values[batch.valid_BT.flatten()]


def balance_by_hand(routings: Sequence[Routing], batch: TokenBatch) -> Tensor:
    """E sum f P of each layer, from the logits of valid tokens alone; summed over the layers."""
    total = torch.zeros(())
    for routing in routings:
        logits_NE = valid(routing.logits_BE, batch)
        num_experts, k = logits_NE.shape[-1], routing.experts_BK.shape[-1]
        chosen_NE = logits_NE >= logits_NE.sort(-1, descending=True).values[:, k - 1 : k]
        share_E = chosen_NE.to(logits_NE.dtype).sum(0) / (k * len(logits_NE))
        total = total + num_experts * (share_E * logits_NE.softmax(-1).mean(0)).sum()
    return total


def z_by_hand(routings: Sequence[Routing], batch: TokenBatch) -> Tensor:
    """The mean over valid tokens of each layer's squared log-sum-exp; summed over the layers."""
    return sum(valid(r.logits_BE, batch).exp().sum(-1).log().square().mean() for r in routings)


def loss_by_hand(trainer: Trainer, batch: TokenBatch, alpha: float, c_z: float) -> Tensor:
    """The loss of one batch, from its definition and torch's own cross-entropy."""
    logits_BTV, routings = trainer.call(batch.tokens_BT, batch.valid_BT)
    targets_BT = batch.targets_BT.where(batch.valid_BT, -100)
    cross_entropy = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)
    return cross_entropy + alpha * balance_by_hand(routings, batch) + c_z * z_by_hand(routings, batch)


def gradient_by_hand(trainer: Trainer, batch: TokenBatch, **losses: float) -> Tensor:
    gradients = torch.autograd.grad(loss_by_hand(trainer, batch, **losses), trainer.parameters)
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def test_every_metric_it_reports_is_declared_and_every_declared_one_is_reported(lonely: Any):
    workload = describe("moe_gpt")
    reported = run(lonely(), precision="fp16")[-1].metrics
    assert [name for name in reported if not workload.declares(name)] == []
    missing = {name for name in METRICS if name not in reported and "*" not in name}
    # No form predicts what experts keep, and the peak is a GPU's.
    assert missing == {"memory/predicted_bytes", "memory/unexplained_bytes", "memory/peak_bytes"}
    by_layer = ["z", "max_logit", "abs_max_logit", "load_max_over_mean", "dropped_share", "tie_share"]
    assert {f"router/{name}/layer{layer}" for name in by_layer for layer in (0, 1)} <= set(reported)
    assert {f"grad/preclip/{part}{layer}" for part in ("block", "router", "experts") for layer in (0, 1)} <= set(
        reported
    )


def test_a_trial_gives_the_same_numbers_when_it_is_run_again_and_others_with_another_seed(lonely: Any):
    settings: dict[str, Any] = {"dropout": 0.5, "padding": 0.5, "accumulation_steps": 2, **LOSSES}
    first, again = (timeless(run(lonely(0, log_every=1), **settings)) for _ in range(2))
    assert first == again
    other = timeless(run(lonely(1, log_every=1), **settings, seed=1))
    assert all(ours["train/loss"] != theirs["train/loss"] for ours, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_ragged_masked_micro_batches_give_the_gradient_of_one_batch(lonely: Any, k: int, checkpointing: bool):
    settings: dict[str, Any] = {"accumulation_steps": 4, "padding": 0.9, "k": k, "checkpointing": checkpointing}
    window = begin(lonely(), **settings).draw_window()
    trainer, twin = (exact_trainer(lonely(), **settings) for _ in range(2))
    reference = gradient_by_hand(trainer, joined(window), **LOSSES)
    loss = loss_by_hand(trainer, joined(window), **LOSSES).item()
    split, whole = trainer.update(window, LOSSES), twin.update([joined(window)], LOSSES)
    assert len({micro.num_valid for micro in window}) > 1
    assert (gradient(trainer) - reference).abs().max() < 1e-12  # float64: equal but for the order of the sums
    assert (gradient(twin) - reference).abs().max() < 1e-12
    assert float(split.loss) == pytest.approx(loss, abs=1e-12)
    assert float(whole.loss) == pytest.approx(loss, abs=1e-12)


def test_the_balance_loss_is_not_the_mean_of_those_of_the_micro_batches(lonely: Any):
    window = begin(lonely(), accumulation_steps=4, padding=0.9).draw_window()
    trainer, naive = (exact_trainer(lonely(), accumulation_steps=4) for _ in range(2))
    naive.prepare = lambda call, window, hyper: hyper
    trainer.update(window, LOSSES)
    naive.update(window, LOSSES)
    assert (gradient(trainer) - gradient(naive)).abs().max() > 1e-4


def test_the_window_is_read_ahead_only_where_its_balance_needs_it(lonely: Any):
    window = begin(lonely(), accumulation_steps=2).draw_window()
    trainer = exact_trainer(lonely())
    for batches, hyper, expected in (
        (window, LOSSES, True),
        (window, {"alpha": 0.0, "c_z": 0.1}, False),
        (window[:1], LOSSES, False),
    ):
        assert ("share_LE" in trainer.prepare(trainer.call, batches, hyper)) is expected


def test_what_is_read_ahead_meets_the_dropout_and_the_capacity_that_training_meets(lonely: Any):
    training = begin(lonely(), accumulation_steps=3, padding=0.5, dropout=0.5, capacity_factor=1.0, **LOSSES)
    window, trainer = training.draw_window(), training.trainer
    read_LE = trainer.prepare(trainer.call, window, LOSSES)["share_LE"] * 2 * sum(micro.num_valid for micro in window)
    seen = [observed.routings for _, observed in trainer.update(window, LOSSES).seen]
    for layer in (0, 1):
        chosen = [valid(routings[layer].experts_BK, micro) for routings, micro in zip(seen, window, strict=True)]
        assert torch.equal(read_LE[layer].round(decimals=9), torch.cat(chosen).flatten().bincount(minlength=4).double())


def test_a_coefficient_of_zero_is_the_same_bits_as_no_z_loss(lonely: Any):
    with_term = timeless(run(lonely(log_every=1), c_z=0.0, steps=5))
    without = timeless(run(lonely(log_every=1), WithoutZ(), steps=5))
    assert with_term == without
    assert timeless(run(lonely(log_every=1), c_z=1e-3, steps=5))[-1] != without[-1]


def test_the_z_losss_gradient_is_linear_in_c_z_and_absent_at_zero(lonely: Any):
    window = begin(lonely(), padding=0.5).draw_window()
    gradients = {}
    for c_z in (0.0, 0.01, 0.02):
        trainer = exact_trainer(lonely())
        trainer.update(window, {"alpha": 0.0, "c_z": c_z})
        gradients[c_z] = gradient(trainer)
    reference = gradient_by_hand(exact_trainer(lonely()), window[0], alpha=0.0, c_z=0.0)
    assert (gradients[0.0] - reference).abs().max() < 1e-14
    small, large = gradients[0.01] - gradients[0.0], gradients[0.02] - gradients[0.0]
    assert (large - 2 * small).abs().max() < 1e-14
    assert small.norm() > 1e-2


def test_checkpointing_changes_no_bit_and_counts_the_load_once(lonely: Any):
    settings: dict[str, Any] = {
        "batch_size": 1, "context": 6, "k": 1, "depth": 1, "dropout": 0.5, "optimizer": "sgd", **LOSSES,
    }  # fmt: skip
    trainings = [begin(lonely(), **settings, checkpointing=checkpointing) for checkpointing in (False, True)]
    observed = []
    for training in trainings:
        router = training.trainer.blocks["router0"][0]
        router.data[1] = router.data[0]  # where one of these two wins, the other is exactly as good
        update, _ = training.advance()
        observed.append((float(update.loss), observe(training, update)))
    assert observed[0] == observed[1]
    assert torch.equal(*(gradient(training.trainer) for training in trainings))
    metrics = observed[1][1]
    assert metrics["router/tie_share"] == pytest.approx(1 / 6)
    assert metrics["router/assignments"] == 6  # once for the loss; the recomputation does not count
    assert sum(metrics[f"router/load/{expert}"] for expert in range(4)) == pytest.approx(1)


def test_checkpointing_changes_no_bit_of_a_training_run(lonely: Any):
    settings: dict[str, Any] = {"dropout": 0.5, "accumulation_steps": 2, "padding": 0.5, "capacity_factor": 1.0}
    plain, again = (
        timeless(run(lonely(log_every=1), **settings, **LOSSES, checkpointing=checkpointing))
        for checkpointing in (False, True)
    )
    assert plain == again
    assert plain[0]["router/dropped_share"] > 0


def test_padding_counts_nowhere(lonely: Any):
    settings: dict[str, Any] = {"padding": 0.9, "capacity_factor": 1.0, **LOSSES}
    (batch,) = begin(lonely(), **settings).draw_window()
    other = torch.randint(103, batch.tokens_BT.shape, generator=torch.Generator().manual_seed(1))
    filled = batch._replace(tokens_BT=batch.tokens_BT.where(batch.valid_BT, other))
    assert not torch.equal(filled.tokens_BT, batch.tokens_BT)
    seen = []
    for rows in (batch, filled):
        training = begin(lonely(), **settings)
        update = training.trainer.update([rows], LOSSES)
        seen.append((float(update.loss), gradient(training.trainer).tolist(), observe(training, update)))
    assert seen[0] == seen[1]


def test_what_is_said_of_the_routers_is_said_of_valid_tokens(lonely: Any):
    training = begin(lonely(), padding=0.9, accumulation_steps=3)
    window = training.draw_window()
    num_valid = sum(micro.num_valid for micro in window)
    with torch.no_grad():
        routed = [training.model(micro.tokens_BT, micro.valid_BT, micro.noise)[1] for micro in window]
    metrics = observe(training, training.trainer.update(window, LOSSES))
    layers = [
        torch.cat([valid(routings[layer].logits_BE, micro) for routings, micro in zip(routed, window, strict=True)])
        for layer in (0, 1)
    ]
    assert [len(layer) for layer in layers] == [num_valid] * 2
    assert num_valid < 3 * 4 * 8
    for layer, logits_NE in enumerate(layers):
        z = float(logits_NE.double().logsumexp(-1).square().mean())
        assert metrics[f"router/z/layer{layer}"] == pytest.approx(z, rel=1e-6)
        assert metrics[f"router/abs_max_logit/layer{layer}"] == float(logits_NE.abs().max())
        load_E = logits_NE.topk(2).indices.flatten().bincount(minlength=4).double()
        assert metrics[f"router/load_max_over_mean/layer{layer}"] == pytest.approx(float(load_E.max() / load_E.mean()))
    assert metrics["router/z"] == pytest.approx((metrics["router/z/layer0"] + metrics["router/z/layer1"]) / 2, rel=1e-6)
    assert metrics["router/assignments"] == num_valid * 2 * 2  # k = 2, two layers
    assert sum(metrics[f"router/load/{expert}"] for expert in range(4)) == pytest.approx(1)
    assert metrics["router/load_max_over_mean"] == max(
        metrics[f"router/load_max_over_mean/layer{layer}"] for layer in (0, 1)
    )


def test_a_capacity_drops_assignments_in_training_and_none_in_evaluation(lonely: Any):
    tight = run(lonely(), capacity_factor=0.5)[-1].metrics
    assert 0.5 <= tight["router/dropped_share"] < 1
    assert tight["router/assignments"] == pytest.approx(4 * 8 * 2 * 2 * (1 - tight["router/dropped_share"]))
    training = begin(lonely(), capacity_factor=0.5)
    training.model.eval()
    _, routings = training.model(training.data.held_out_NT[:, :-1])
    assert all(bool(routing.kept_BK.all()) for routing in routings)


@pytest.mark.parametrize("precision", POLICIES)
def test_every_precision_trains_float32_weights(lonely: Any, precision: str):
    training = begin(lonely(), precision=precision, **LOSSES)
    update, _ = training.advance()
    assert update.applied
    (_, seen), *_ = update.seen
    assert {routing.logits_BE.dtype for routing in seen.routings} == {POLICIES[precision].router_logits}
    assert {routing.probabilities_BE.dtype for routing in seen.routings} == {POLICIES[precision].router_softmax}
    assert {value.dtype for parameter in training.trainer.parameters for value in (parameter, parameter.grad)} == {
        torch.float32
    }
    assert float(update.loss) == pytest.approx(math.log(103) + 2 * (0.1 + 0.01 * math.log(4) ** 2), rel=0.02)


def test_experts_and_routers_start_like_the_dense_feed_forward(lonely: Any):
    blocks = begin(lonely(), width=64, expert_hidden=256, num_experts=8).trainer.blocks
    weight_in, bias_in, weight_out, bias_out = blocks["experts1"]
    for weight, std in (
        (blocks["router0"][0], INIT_STD), (weight_in, INIT_STD), (weight_out, INIT_STD / math.sqrt(4)),
    ):  # fmt: skip
        five_errors = 5 / math.sqrt(2 * weight.numel())
        assert float(weight.detach().std()) == pytest.approx(std, rel=five_errors)
    assert not bias_in.any()
    assert not bias_out.any()


@pytest.mark.parametrize(("k", "resolved"), [(1, False), (2, True)])
def test_renormalize_auto_is_logged_as_what_it_means(k: int, resolved: bool):
    assert flatten(Config(k=k))["renormalize"] is resolved
    assert Config(**flatten(Config(k=k))) == Config(k=k)


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"k": 1, "renormalize": True}, "renormalize", "exactly 0"),
        ({"k": 8, "num_experts": 4}, "k", "k=8 experts per token"),
        ({"bug": "bf16_router", "precision": "bf16-softmax"}, "bug", "a float32 router"),
        ({"bug": "renormalized_top1"}, "bug", "k: 1"),
        (
            {"bug": "renormalized_top1", "k": 1, "renormalize": True, "allow_dead_router": True},
            "bug",
            "renormalize: auto",
        ),
        ({"bug": "padding_in_z", "c_z": 0.1}, "bug", "padding"),
        ({"bug": "padding_in_z", "padding": 0.5}, "bug", "c_z above 0"),
        ({"bug": "double_counted_load", "alpha": 0}, "bug", "alpha above 0"),
        *(
            ({"bug": bug, "k": 1, "num_experts": 1, "padding": 0.5, "c_z": 0.1}, "bug", "num_experts above 1")
            for bug in ("bf16_router", "renormalized_top1", "double_counted_load", "padding_in_z")
        ),
        ({"bug": "no_zero_grad", "precision": "fp16"}, "bug", "needs fp32 or bf16"),
        ({"bug": "unscaled_accumulation"}, "bug", "accumulation_steps above 1"),
    ],
)
def test_what_makes_no_sense_is_refused_at_its_field(settings: dict[str, Any], field: str, message: str):
    with pytest.raises(ValidationError, match=message) as caught:
        Config(**settings)
    (item,) = caught.value.errors()
    cause = item["ctx"]["error"]
    assert isinstance(cause, FieldConflict)
    assert cause.name == field


def test_a_dead_router_can_be_asked_for_and_learns_from_the_balance_loss_alone(lonely: Any):
    dead: dict[str, Any] = {"k": 1, "renormalize": True, "allow_dead_router": True}
    for alpha in (0.0, 0.01):
        for report in run(lonely(log_every=1), **dead, alpha=alpha):
            norms = [report.metrics[f"grad/preclip/router{layer}"] for layer in (0, 1)]
            assert all(norm > 0 for norm in norms) if alpha else norms == [0.0, 0.0]


# The planted bugs


def test_every_bug_that_can_be_asked_for_is_planted():
    assert {"none", *PLANTED_PARTS, *PLANTED} == {"none", *BUGS} == set(get_args(Bug))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_training_and_nothing_before_it(lonely: Any, bug: str):
    trainings = [begin(lonely(), **LOSSES | BUGS[bug], bug=name) for name in ("none", bug)]
    assert torch.equal(*(weights(training.trainer) for training in trainings))
    healthy, planted = (
        timeless(run(lonely(log_every=1), **LOSSES | BUGS[bug], bug=name))[-1] for name in ("none", bug)
    )
    assert healthy["val/loss"] != planted["val/loss"]


def test_the_bf16_router_is_the_policy_that_was_not_asked_for(lonely: Any):
    planted = timeless(run(lonely(log_every=1), precision="bf16-selective", bug="bf16_router"))
    assert planted == timeless(run(lonely(log_every=1), precision="bf16-softmax"))
    assert planted != timeless(run(lonely(log_every=1), precision="bf16-selective"))


def test_the_renormalised_top_one_is_the_dead_router(lonely: Any):
    planted = timeless(run(lonely(log_every=1), k=1, alpha=0.0, bug="renormalized_top1"))
    dead = timeless(run(lonely(log_every=1), k=1, alpha=0.0, renormalize=True, allow_dead_router=True))
    assert planted == dead
    assert [metrics["grad/preclip/router0"] for metrics in planted] == [0.0] * 3
    assert all(metrics["grad/preclip/router0"] > 0 for metrics in timeless(run(lonely(log_every=1), k=1, alpha=0.0)))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_load_counted_twice_doubles_every_count_and_alpha_and_nothing_else(lonely: Any, accumulation_steps: int):
    settings: dict[str, Any] = {"accumulation_steps": accumulation_steps, "padding": 0.5, "checkpointing": True}
    planted, healthy = (begin(lonely(), **settings, bug=bug) for bug in ("double_counted_load", "none"))
    window = planted.draw_window()
    ours, theirs = planted.trainer.update(window, LOSSES), healthy.trainer.update(window, LOSSES | {"alpha": 0.2})
    assert torch.equal(ours.loss, theirs.loss)  # a factor of 2 rounds nothing
    assert torch.equal(gradient(planted.trainer), gradient(healthy.trainer))
    wrong, right = observe(planted, ours), observe(healthy, theirs)
    counts = ["router/assignments", *(f"router/load/{expert}" for expert in range(4))]
    assert [wrong.pop(name) for name in counts] == [2 * right.pop(name) for name in counts]
    assert wrong == right


def test_padding_in_z_counts_each_padded_token_as_a_router_that_knows_nothing(lonely: Any):
    settings: dict[str, Any] = {"padding": 0.9, "c_z": 0.1, "alpha": 0.0}
    healthy, planted = (begin(lonely(), **settings, bug=bug) for bug in ("none", "padding_in_z"))
    (batch,) = healthy.draw_window()
    hyper = {"alpha": 0.0, "c_z": 0.1}
    right, wrong = healthy.trainer.update([batch], hyper), planted.trainer.update([batch], hyper)
    metrics = observe(healthy, right)
    share = batch.num_valid / batch.valid_BT.numel()
    z = [metrics[f"router/z/layer{layer}"] for layer in (0, 1)]
    counted = sum(share * value + (1 - share) * math.log(4) ** 2 for value in z)  # a padded token's logits are 0
    assert float(wrong.loss - right.loss) == pytest.approx(0.1 * (counted - sum(z)), abs=2e-6)
    assert observe(planted, wrong) == metrics  # the metric stays the right one
    without = begin(lonely(), **settings | {"c_z": 0.0})
    without.trainer.update([batch], {"alpha": 0.0, "c_z": 0.0})
    plain, diluted = (
        gradient(training.trainer) - gradient(without.trainer) for training in (healthy, planted)
    )  # the z-loss's own gradient: padding adds nothing to the sum, but to the count
    assert torch.allclose(diluted, share * plain, rtol=1e-3, atol=1e-7)
