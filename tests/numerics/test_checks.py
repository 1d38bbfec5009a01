"""The active checks name each planted bug before it trains, and say nothing of its healthy twin."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orchestrator.trial import Finding, Severity
from workloads.char_gpt.text import Text
from workloads.char_gpt.train import CharGpt
from workloads.checks.subject import Subject, dense, distance
from workloads.checks.training import CHECKS
from workloads.data.tokens import TokenBatch
from workloads.engine.random import global_states
from workloads.engine.training import TrainingWorkload
from workloads.engine.training_config import TRAINING_METRICS, TrainingConfig
from workloads.engine.update import Trainer, weighted
from workloads.layers.attention import CausalAttention
from workloads.layers.router import balance, router_z_loss
from workloads.moe_gpt.language import MoeLanguageModel
from workloads.moe_gpt.train import MoeGpt
from workloads.moe_router.train import MoeRouter
from workloads.probes.catalogue import CHECKS as NAMES
from workloads.residual_stack.train import ResidualStack

SHORT_TEXT = f"file:{argparse.__file__}"  # any text of 10^5 characters: the default one has four times as many
TINY = {"text": SHORT_TEXT, "width": 8, "context": 12, "depth": 1, "heads": 2, "num_held_out_windows": 8}
TINY_MOE = {**TINY, "num_experts": 4, "expert_hidden": 8}
SPLIT = {"accumulation_steps": 2}

NAMED = {  # bug -> the check that must name it, and what the bug needs to show itself
    "no_zero_grad": ("gradients_not_cleared", {}),
    "unshifted_targets": ("targets_not_shifted", {}),
    "loss_times_40": ("loss_factor", {}),
    "detached_positions": ("no_gradient", {}),
    "clip_before_unscale": ("clip_order", {"precision": "fp16"}),
    "unscaled_accumulation": ("accumulation_weights", SPLIT),
    "mean_of_means": ("accumulation_weights", {**SPLIT, "padding": 0.5}),
    "scheduler_per_micro_batch": ("schedule_pace", {**SPLIT, "warmup_steps": 10}),
    "bf16_router": ("router_dtype", {}),
    "renormalized_top1": ("dead_router", {"k": 1}),
    "double_counted_load": ("load_count", {}),
    "padding_in_z": ("padding_counts", {"padding": 0.5, "c_z": 1e-3}),
}
OF_ROUTERS = list(NAMED)[8:]


def check(workload: TrainingWorkload, context: Any, /, **settings: Any) -> list[Finding]:
    return list(workload.check(workload.Config(**settings), context))


def alarms(findings: list[Finding]) -> list[tuple[str, Severity]]:
    """Everything above info, by name."""
    return [(one.check_name, one.severity) for one in findings if one.severity != Severity.INFO]


@pytest.mark.parametrize("bug", NAMED)
@pytest.mark.parametrize("workload", [CharGpt, MoeGpt])
def test_each_planted_bug_is_one_error_of_the_right_name(workload: Any, bug: str, lonely: Any):
    if workload is CharGpt and bug in OF_ROUTERS:
        return
    name, needed = NAMED[bug]
    shape, seed = (TINY, 0) if workload is CharGpt else (TINY_MOE, 1)
    found = check(workload(), lonely(seed), seed=seed, bug=bug, **{**shape, **needed})
    assert alarms(found) == [(name, Severity.ERROR)]


HEALTHY = [
    *[(MoeGpt, {"precision": one}) for one in ("fp32", "bf16", "bf16-selective", "bf16-softmax", "fp16")],
    (CharGpt, {"padding": 0.5, "tied": True, "accumulation_steps": 2, "warmup_steps": 10}),
    (CharGpt, {"optimizer": "sgd", "clip_norm": None, "residual": False, "schedule": "cosine"}),
    (MoeGpt, {"k": 1, "c_z": 1e-3, "padding": 0.5, "checkpointing": True}),
    (MoeGpt, {"k": 1, "precision": "bf16", "padding": 0.5, "c_z": 1e-3, "num_experts": 3}),
    (MoeGpt, {"dropout": 0.1, "capacity_factor": 1.0, "accumulation_steps": 3}),
    (MoeGpt, {"k": 1, "num_experts": 1}),
    (MoeGpt, {"k": 4}),
    (MoeRouter, {"router_offset": 300.0, "precision": "bf16", "num_experts": 6, "accumulation_steps": 2}),
    (MoeRouter, {"offset_learnable": True, "offset_drift": 1.2, "k": 1}),
    (MoeRouter, {"k": 1, "renormalize": True, "allow_dead_router": True}),
    (ResidualStack, {"task": "train", "width": 16, "depth": 60}),
    (ResidualStack, {"task": "train", "width": 16, "depth": 30, "scale": 2.0, "precision": "bf16"}),
]


@pytest.mark.parametrize(("workload", "settings"), HEALTHY)
def test_nothing_above_info_is_said_of_a_healthy_workload(workload: Any, settings: dict[str, Any], lonely: Any):
    shape = {CharGpt: TINY, MoeGpt: TINY_MOE}.get(workload, {})
    assert alarms(check(workload(), lonely(3), seed=3, **{**shape, **settings})) == []


def test_dropout_and_capacity_are_named_as_what_makes_the_split_matter(lonely: Any):
    found = check(MoeGpt(), lonely(0), **TINY_MOE, **SPLIT, dropout=0.1, capacity_factor=1.0)
    (coupling,) = [one for one in found if one.check_name == "batch_coupling"]
    assert coupling.severity == Severity.INFO
    assert coupling.message.startswith("dropout, capacity_factor ")


def test_a_measurement_that_trains_nothing_is_not_checked(lonely: Any):
    assert check(ResidualStack(), lonely(0)) == []


class Rows(NamedTuple):
    inputs: Tensor
    targets: Tensor

    @property
    def num_valid(self) -> int:
        return len(self.inputs)


def draw(seed: int) -> Tensor:
    return torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))


@dataclass
class Line:
    """64 rows of y = sum x, and 64 others held out."""

    num_rows: int = 64
    training: Tensor = field(default_factory=lambda: draw(0))
    held_out: Tensor = field(default_factory=lambda: draw(1))

    def batch(self, indices_B: Tensor, noise: int) -> Rows:
        return rows(self.training[indices_B])

    def split_rows(self) -> tuple[Tensor, Tensor]:
        return self.training, self.held_out

    def to(self, device: str) -> Line:
        return self


def rows(inputs: Tensor) -> Rows:
    return Rows(inputs, inputs.sum(-1, keepdim=True))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Own(TrainingWorkload):
    """Somebody's own: a plain module, no tokens, no router."""

    Config = TrainingConfig
    metrics = TRAINING_METRICS

    def __init__(self, make: Callable[[], nn.Module] = net) -> None:
        self.make = make

    def data(self, config: Any, context: Any) -> Line:
        return Line()

    def build(self, config: Any, data: Any, source: torch.Generator) -> nn.Module:
        return self.make()

    def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
        return F.mse_loss(call(batch.inputs), batch.targets), None

    def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Any) -> dict[str, float]:
        return {"val/mse": float(self.loss(model, rows(data.held_out), hyper)[0])}


class Unusual(nn.Module):
    """One matrix in two places, complex weights, a table, a bare parameter, dropout, one part frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.ones(4))
        self.first, self.again, self.frozen, self.last = (nn.Linear(4, width) for width in (4, 4, 4, 1))
        self.again.weight = self.first.weight
        self.table = nn.Embedding(3, 4)
        self.wave = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) / 4)
        self.drop = nn.Dropout(0.3)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.again(torch.tanh(self.first(inputs * self.bare)))) + self.frozen(inputs)
        hidden = hidden + self.table((inputs[:, 0] > 0).long())
        return self.last(hidden + (hidden.to(torch.complex64) @ self.wave).abs())


class IdleExperts(nn.Module):
    """Forty experts, of which the first alone is ever called; their output starts from zero, as some do."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(40))
        self.last = nn.Linear(4, 1)
        nn.init.zeros_(self.last.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(inputs + self.experts[0](inputs))


class Reentrant(nn.Module):
    """Its first layer is recomputed in the backward pass, in the way that knows `backward()` only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(checkpoint(self.hidden, inputs.requires_grad_(), use_reentrant=True))

    def hidden(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.first(inputs))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


@pytest.mark.parametrize("make", [net, Unusual, IdleExperts, Reentrant, with_batch_norm])
def test_an_own_model_gets_the_checks_that_apply_and_passes_them(make: Any, lonely: Any):
    settings = {"batch_size": 8, "clip_norm": 1.0, "schedule": "linear", "optimizer": "sgd"}
    assert alarms(check(Own(make), lonely(0), **settings)) == []


def test_a_trainer_that_clears_after_its_step_and_an_evaluation_that_is_timed_are_right(lonely: Any):
    class ClearsAfter(Trainer):
        def clear_gradients(self) -> None:
            pass

        def step(self) -> None:
            super().step()
            self.optimizer.zero_grad()

    class Timed(Own):
        def trainer(self, config: Any, **parts: Any) -> Trainer:
            return ClearsAfter(**parts)

        def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Any) -> dict[str, float]:
            return {**super().evaluate(config, model, data, hyper), "time/evaluated_at": time.perf_counter()}

    assert check(Timed(), lonely(0), clip_norm=1.0, schedule="linear", **SPLIT) == []


def test_batch_norm_is_named_with_its_module_where_the_batch_is_split(lonely: Any):
    (found,) = check(Own(with_batch_norm), lonely(0), **SPLIT)
    assert (found.check_name, found.severity) == ("batch_coupling", Severity.WARNING)
    assert found.message.startswith("batch norm in 1 ")


def test_a_loss_that_is_no_mean_over_rows_couples_them(lonely: Any):
    class Standardised(Own):
        def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
            predicted = call(batch.inputs)
            return F.mse_loss(predicted / predicted.std().clamp(min=0.1), batch.targets), None

    assert alarms(check(Standardised(), lonely(0), **SPLIT)) == [("batch_coupling", Severity.WARNING)]


def test_a_sum_over_rows_in_place_of_a_mean_is_named_where_the_batch_is_split(lonely: Any):
    class Summed(Own):
        def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
            return F.mse_loss(call(batch.inputs), batch.targets, reduction="sum"), None

    assert check(Summed(), lonely(0)) == []
    (found,) = check(Summed(), lonely(0), **SPLIT)
    assert (found.check_name, found.severity) == ("accumulation_weights", Severity.ERROR)
    assert found.message.startswith("the loss is a sum")


class HalfGradient(torch.autograd.Function):
    """A backward pass of one's own that forgot a factor of 2."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return 2 * inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_backward_of_ones_own_is_seen_by_steps_along_the_gradient(precision: str, lonely: Any):
    class Halved(Own):
        def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
            loss, seen = super().loss(call, batch, hyper)
            return HalfGradient.apply(loss), seen

    (found,) = check(Halved(), lonely(0), precision=precision)
    assert (found.check_name, found.severity) == ("loss_factor", Severity.WARNING)
    assert found.value == pytest.approx(2.0, rel=0.01)  # second order in a step of a thousandth of the loss


def test_a_straight_through_estimator_is_a_note_at_most(lonely: Any):
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(inputs))
            return self.last(hidden + (hidden.round() - hidden).detach())

    (found,) = check(Own(Rounded), lonely(0))
    assert (found.check_name, found.severity) == ("loss_factor", Severity.INFO)


def test_a_trainer_that_does_not_clip_or_counts_skipped_updates_is_named(lonely: Any):
    class NoClip(Trainer):
        def unscale_and_clip(self) -> Any:
            self.clip_norm = None
            return super().unscale_and_clip()

    class CountsSkipped(Trainer):
        def update(self, window: Any, hyper: Any) -> Any:
            update = super().update(window, hyper)
            if not update.applied:
                self.step_schedules()
            return update

    for kind, name in ((NoClip, "clip_order"), (CountsSkipped, "schedule_pace")):
        workload = Own()
        workload.trainer = lambda config, kind=kind, **parts: kind(**parts)  # type: ignore[method-assign]
        found = check(workload, lonely(0), clip_norm=1.0, schedule="linear")
        assert alarms(found) == [(name, Severity.ERROR)]


def test_a_part_that_is_cut_off_is_named_and_so_is_one_that_is_never_called(lonely: Any):
    class CutOff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(self.layers[0](inputs) + self.layers[1](inputs).detach() + self.layers[2](inputs))

    (found,) = check(Own(CutOff), lonely(0))
    assert (found.check_name, found.value) == ("no_gradient", 4.0)
    assert found.message.startswith("layers.1.bias, layers.1.weight, spare.bias, spare.weight:")


def test_held_out_rows_among_the_training_rows_are_counted(lonely: Any):
    class Leaky(Own):
        num_leaked: int

        def data(self, config: Any, context: Any) -> Line:
            line = Line()
            line.held_out[: self.num_leaked] = line.training[: self.num_leaked]
            return line

    for num_leaked, severity in ((64, Severity.ERROR), (2, Severity.WARNING)):
        workload = Leaky()
        workload.num_leaked = num_leaked
        (found,) = check(workload, lonely(0))
        assert (found.check_name, found.severity) == ("evaluation_data", severity)
        assert found.value == num_leaked / 64


class FromTrainingText(CharGpt):
    """Its held-out windows are cut from the text that is trained on."""

    def data(self, config: Any, context: Any) -> Text:
        text = super().data(config, context)
        windows = text.corpus.training_N.unfold(0, config.context + 1, config.context)
        return replace(text, held_out_NT=windows[: config.num_held_out_windows])


def test_windows_of_the_training_text_are_named_and_what_text_repeats_by_itself_is_not(lonely: Any, tmp_path: Path):
    settings = {**TINY, "context": 32, "text": "pydoc"}
    (found,) = check(FromTrainingText(), lonely(0), **settings)
    assert (found.check_name, found.severity, found.value) == ("evaluation_data", Severity.ERROR, 1.0)
    assert check(CharGpt(), lonely(0), **settings) == []
    (tmp_path / "two.txt").write_text("b" * 900 + "a" + "b" * 99)  # in most rows every token is the next one, too
    assert alarms(check(CharGpt(), lonely(0), **{**settings, "text": f"file:{tmp_path}/two.txt", "padding": 0.9})) == []


def asking(for_what: Callable[[TokenBatch], Tensor], kind: type[CharGpt] = CharGpt) -> CharGpt:
    """A model of text that is asked for something else than the next tokens."""

    class Others(Text):
        def batch(self, indices_B: Tensor, noise: int) -> TokenBatch:
            batch = super().batch(indices_B, noise)
            return batch._replace(targets_BT=for_what(batch))

    class Asking(kind):  # type: ignore[valid-type, misc]
        def data(self, config: Any, context: Any) -> Text:
            return Others(**vars(super().data(config, context)))

    return Asking()


@pytest.mark.parametrize(
    ("places", "severity", "words"),
    [
        (-1, Severity.ERROR, "the tokens 2 places ahead"),
        (1, Severity.ERROR, "the very tokens that the model reads there"),
        (2, Severity.WARNING, "tokens that came before, 1 places back"),
        (-3, Severity.INFO, "of the targets are the next tokens"),
    ],
)
def test_targets_that_are_shifted_wrongly_are_named_and_those_far_away_are_a_note(
    places: int, severity: Severity, words: str, lonely: Any
):
    wrong = asking(lambda batch: batch.targets_BT.roll(places, dims=1))
    (found,) = [one for one in check(wrong, lonely(0), **TINY) if one.check_name == "targets_not_shifted"]
    assert found.severity == severity
    assert words in found.message


class Training(Own):
    """Leaves eval mode."""

    def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Any) -> dict[str, float]:
        model.train()
        return super().evaluate(config, model, data, hyper)


class Learning(Own):
    """Learns from the held-out rows."""

    def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Any) -> dict[str, float]:
        with torch.enable_grad():
            self.loss(model, rows(data.held_out), hyper)[0].backward()
        return super().evaluate(config, model, data, hyper)


class Sampling(Own):
    """Draws other held-out rows each time."""

    def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Any) -> dict[str, float]:
        return {"val/mse": float(self.loss(model, rows(torch.randn(8, 4)), hyper)[0])}


def test_an_evaluation_that_trains_learns_or_draws_anew_is_named(lonely: Any):
    expected = {Training: Severity.ERROR, Learning: Severity.ERROR, Sampling: Severity.WARNING}
    for workload, severity in expected.items():
        assert alarms(check(workload(), lonely(0))) == [("evaluation_mode", severity)]


class LooksAhead(CharGpt):
    """Attention without its causal mask."""

    def build(self, config: Any, data: Any, source: torch.Generator) -> Any:
        model = super().build(config, data, source)
        for module in model.modules():
            if isinstance(module, CausalAttention):
                module.forward = lambda hidden, compute, own=module: see_all(own, hidden, compute)  # type: ignore
        return model


def see_all(own: CausalAttention, hidden: Tensor, compute: torch.dtype) -> Tensor:
    parts = own.qkv(hidden, compute).chunk(3, dim=-1)
    heads = [part.unflatten(-1, (own.heads, -1)).transpose(1, 2) for part in parts]
    return own.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2), compute)


def test_a_tagger_may_look_ahead_and_is_no_language_model(lonely: Any):
    def tagged(batch: TokenBatch) -> Tensor:
        return batch.tokens_BT.roll(-1, dims=1) * 7 % 5  # what it is asked for depends on what comes after

    found = check(asking(tagged, LooksAhead), lonely(0), **TINY)
    assert [(one.check_name, one.severity) for one in found] == [("targets_not_shifted", Severity.INFO)]
    of_two_symbols = asking(lambda batch: (batch.tokens_BT % 3 == 0).long(), LooksAhead)  # half are right by chance
    assert alarms(check(of_two_symbols, lonely(0), **TINY)) == []


def test_an_autoencoder_that_says_it_is_not_causal_is_left_alone_by_checks_and_probes(lonely: Any):
    autoencoder = asking(lambda batch: batch.tokens_BT, LooksAhead)
    assert ("targets_not_shifted", Severity.ERROR) in alarms(check(autoencoder, lonely(0), **TINY))
    type(autoencoder).causal = False
    assert check(autoencoder, lonely(0), **TINY) == []
    context = lonely(0)
    list(autoencoder.run(autoencoder.Config(**TINY, steps=2), context))
    assert alarms(context.findings) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_model_that_looks_ahead_is_named(precision: str, lonely: Any):
    found = alarms(check(LooksAhead(), lonely(0), **TINY, precision=precision))
    assert found[0] == ("future_leaks", Severity.ERROR)
    assert {name for name, _ in found} <= {"future_leaks", "padding_counts"}  # padding comes later, too


class PaddingInLoss(CharGpt):
    """The mean over all places, padded ones too."""

    def loss(self, call: Any, batch: Any, hyper: Any) -> Any:
        return super().loss(call, batch._replace(valid_BT=None), hyper)


def test_a_loss_that_counts_padding_is_named_also_where_the_config_pads_nothing(lonely: Any):
    for padding in (0.0, 0.5):
        names = {name for name, _ in alarms(check(PaddingInLoss(), lonely(0), **TINY, padding=padding))}
        assert "padding_counts" in names


class OfProbabilities(MoeLanguageModel):
    Config = MoeGpt.Config

    def z_loss(self, routing: Any) -> Tensor:
        return router_z_loss(routing.probabilities_BE, routing.valid_B)


class DetachedZ(MoeLanguageModel):
    Config = MoeGpt.Config

    def z_loss(self, routing: Any) -> Tensor:
        return router_z_loss(routing.logits_BE.detach(), routing.valid_B)


class SquaredCoefficient(MoeLanguageModel):
    Config = MoeGpt.Config

    def loss(self, call: Any, batch: Any, hyper: Any) -> Any:
        return super().loss(call, batch, {**hyper, "c_z": hyper["c_z"] ** 2})


class AlwaysZ(MoeLanguageModel):
    """A little of the z-loss is there whatever c_z."""

    Config = MoeGpt.Config

    def loss(self, call: Any, batch: Any, hyper: Any) -> Any:
        return super().loss(call, batch, {**hyper, "c_z": hyper["c_z"] + 0.01})


class DetachedBalance(MoeLanguageModel):
    """The gradient of the balance loss stops before the router."""

    Config = MoeGpt.Config

    def loss(self, call: Any, batch: Any, hyper: Any) -> Any:
        loss, seen = super().loss(call, batch, {**hyper, "alpha": 0.0})
        share_LE = self.shares([seen.routings])
        pairs = zip(seen.routings, share_LE, strict=True)
        term = lambda: sum(balance(one.probabilities_BE.detach(), share_E, one.valid_B) for one, share_E in pairs)  # noqa: E731
        return loss + weighted(hyper["alpha"], term), seen


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        (OfProbabilities, "z_loss"),
        (DetachedZ, "z_loss"),
        (SquaredCoefficient, "z_loss"),
        (AlwaysZ, "z_loss"),
        (DetachedBalance, "balance_loss"),
    ],
)
def test_an_auxiliary_loss_that_is_another_or_does_not_reach_the_router_is_named(workload: Any, name: str, lonely: Any):
    found = alarms(check(workload(), lonely(0), **TINY_MOE))
    assert found
    assert set(found) == {(name, Severity.ERROR)}


def test_a_balance_loss_of_each_micro_batchs_own_load_is_named_where_the_batch_is_split(lonely: Any):
    class OwnLoad(MoeLanguageModel):
        Config = MoeGpt.Config

        def prepare(self, call: Any, window: Any, hyper: Any) -> Any:
            return hyper

    for precision in ("fp32", "bf16"):
        found = check(OwnLoad(), lonely(0), **TINY_MOE, **SPLIT, alpha=0.01, precision=precision)
        assert alarms(found) == [("balance_loss", Severity.WARNING)]


def test_experts_whose_output_starts_from_zero_do_not_make_a_dead_router(lonely: Any):
    class FromZero(MoeRouter):
        def build(self, config: Any, data: Any, source: torch.Generator) -> Any:
            model = super().build(config, data, source)
            nn.init.zeros_(model.moe.experts.weight_out)
            nn.init.zeros_(model.moe.experts.bias_out)
            return model

    assert alarms(check(FromZero(), lonely(0))) == []


def test_a_check_that_fails_is_a_warning_and_the_others_go_on(lonely: Any):
    class Broken(Training):
        def data(self, config: Any, context: Any) -> Line:
            line = Line()
            line.split_rows = lambda: 1 / 0  # type: ignore[method-assign]
            return line

    failed, mode = check(Broken(), lonely(0))
    assert (failed.check_name, failed.severity) == ("check_failed", Severity.WARNING)
    assert failed.message.startswith("check_held_out failed: ZeroDivisionError")
    assert mode.check_name == "evaluation_mode"


def test_a_workload_that_cannot_train_is_not_checked_at_all(lonely: Any):
    class NoModel(Own):
        def build(self, config: Any, data: Any, source: Any) -> nn.Module:
            raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        check(NoModel(), lonely(0))


def test_checks_of_ones_own_are_made_beside_the_standard_ones(lonely: Any):
    class More(Training):
        def own_checks(self, config: Any, context: Any) -> Iterator[Finding]:
            yield Finding("too_few_rows", Severity.WARNING, "64 rows")
            raise RuntimeError("no more rows")

    found = check(More(), lonely(0))
    assert [one.check_name for one in found] == ["evaluation_mode", "too_few_rows", "check_failed"]
    assert found[-1].message.startswith("own_checks failed: RuntimeError: no more rows (test_checks.py:")


def test_a_check_that_leaves_the_process_fails_alone(lonely: Any):
    class Leaving(Training):
        def own_checks(self, config: Any, context: Any) -> Iterator[Finding]:
            raise SystemExit(3)

    assert [one.check_name for one in check(Leaving(), lonely(0))] == ["evaluation_mode", "check_failed"]


def test_a_parameter_that_no_group_of_the_optimiser_has_is_named(lonely: Any):
    class Forgetful(Own):
        def parameter_groups(self, config: Any, model: Any) -> Any:
            return [{"params": list(model[0].parameters())}]

    (found,) = check(Forgetful(), lonely(0))
    assert (found.check_name, found.severity, found.value) == ("not_optimized", Severity.ERROR, 2.0)
    assert found.message.startswith("2.weight, 2.bias: ")


def test_a_loss_that_no_parameter_is_in_is_one_error(lonely: Any):
    class Detached(Own):
        def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
            return F.mse_loss(call(batch.inputs).detach(), batch.targets), None

    assert alarms(check(Detached(), lonely(0), schedule="linear", **SPLIT)) == [("no_gradient", Severity.ERROR)]


def test_a_loss_that_broadcasts_rows_against_rows_is_told_from_one_that_weighs_them_wrongly(lonely: Any):
    class Broadcasts(Own):
        def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
            return (call(batch.inputs) - batch.targets.squeeze(-1)).square().mean(), None  # [B, 1] - [B] is [B, B]

    (found,) = check(Broadcasts(), lonely(0), **SPLIT)
    assert (found.check_name, found.severity) == ("batch_coupling", Severity.WARNING)
    assert "[B] and [B, 1]" in found.advice


def test_the_part_that_is_left_in_training_mode_is_called_by_its_kind(lonely: Any):
    class Partly(Own):
        def evaluate(self, config: Any, model: Any, data: Any, hyper: Any) -> dict[str, float]:
            model[1].train()
            return super().evaluate(config, model, data, hyper)

    def noisy() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    (found,) = check(Partly(noisy), lonely(0))
    assert found.message == "in training mode during the evaluation: 1 (Dropout)"
    (found,) = check(Training(), lonely(0))
    assert found.message == "in training mode during the evaluation: the whole model"


def test_a_loss_that_is_not_finite_from_the_start_is_told_and_nothing_is_made_of_it(lonely: Any):
    class Infinite(Own):
        def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, Any]:
            return F.mse_loss(call(batch.inputs), batch.targets).exp() / 0.0, None

        def evaluate(self, config: Any, model: nn.Module, data: Any, hyper: Any) -> dict[str, float]:
            return {"val/mse": float("nan")}

    (found,) = check(Infinite(), lonely(0), clip_norm=1.0, schedule="linear")
    assert (found.check_name, found.severity) == ("nonfinite_update", Severity.WARNING)


def test_the_checks_use_up_nothing_of_the_process_generators(lonely: Any):
    before = global_states()["torch"]
    check(Own(Unusual), lonely(0))
    assert torch.equal(before, global_states()["torch"])


def test_the_tolerance_of_a_model_in_16_bits_is_measured(lonely: Any):
    def subject(**settings: Any) -> Subject:
        return Subject(CharGpt(), CharGpt.Config(**TINY, **settings), lonely(0))

    exact, rounded = subject(), subject(precision="bf16")
    assert exact.epsilon == torch.finfo(torch.float32).eps
    assert rounded.epsilon == torch.finfo(torch.bfloat16).eps
    apart = distance(
        rounded.applied(rounded.model(), rounded.window), rounded.applied(rounded.model(), [rounded.combined])
    )
    assert apart < rounded.tolerance / 2  # far from a false alarm
    assert rounded.tolerance < 0.3  # shares that differ by a third are still seen


def test_sparse_and_complex_gradients_are_compared_as_dense_real_ones():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert torch.equal(
        dense(table.weight.grad, table.weight), torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])[:, None].expand(5, 2)
    )
    wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    assert dense(None, wave).shape == (3, 2)


def test_every_check_finds_under_a_name_of_the_catalogue(lonely: Any):
    assert len({one.__name__ for one in CHECKS}) == len(CHECKS)
    assert {name for name, _ in NAMED.values()} <= NAMES.keys()
