"""`char_gpt`: what it reports, what it trains on, and that each planted bug does its one thing and nothing else.

Axes: B rows, T time, V symbols.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from orchestrator.trial import Report
from orchestrator.workload import FieldConflict, describe
from workloads.char_gpt.bugs import PLANTED, plant
from workloads.char_gpt.config import METRICS, Bug, Config
from workloads.char_gpt.text import Text, load_text
from workloads.char_gpt.train import CharGpt, shape_of
from workloads.data.tokens import TokenBatch
from workloads.engine.precision import POLICIES, Precision, loss_scaler
from workloads.engine.training import Training, build_trainer
from workloads.engine.update import Trainer
from workloads.layers.transformer import GPT

EXACT = Precision(torch.float64, torch.float64, torch.float64)
TINY: dict[str, Any] = {
    "steps": 4, "batch_size": 4, "depth": 2, "heads": 2, "width": 8, "context": 8, "num_held_out_windows": 4,
}  # fmt: skip
LEARNING: dict[str, Any] = TINY | {"width": 16, "context": 16, "batch_size": 8, "lr": 1e-2, "num_held_out_windows": 32}

# Each bug with the settings under which it matters.
BUGS: dict[str, dict[str, Any]] = {
    "no_zero_grad": {},
    "unshifted_targets": {},
    "loss_times_40": {"optimizer": "sgd", "clip_norm": None},
    "detached_positions": {},
    "clip_before_unscale": {"precision": "fp16", "clip_norm": 0.1, "optimizer": "sgd"},
    "unscaled_accumulation": {"accumulation_steps": 3, "optimizer": "sgd", "clip_norm": None},
    "mean_of_means": {"accumulation_steps": 3, "padding": 0.9, "optimizer": "sgd", "clip_norm": None},
    "scheduler_per_micro_batch": {"accumulation_steps": 3, "schedule": "linear", "steps": 12},
}
UNMOVED: dict[str, Any] = {"bug": "scheduler_per_micro_batch", "accumulation_steps": 2, "min_lr_share": 1}


def run(config: Config, context: Any) -> list[Report]:
    return list(CharGpt().run(config, context))


def timeless(reports: list[Report]) -> list[dict[str, float]]:
    return [
        {name: value for name, value in report.metrics.items() if not name.startswith(("time/", "memory/"))}
        for report in reports
    ]


def begin(context: Any, /, **settings: Any) -> Training:
    return Training.begin(CharGpt(), Config(**TINY | settings), context)


def exact_trainer(context: Any, /, **settings: Any) -> Trainer:
    """The trainer of a config whose model computes in float64."""
    config = Config(**TINY | settings)
    model = GPT(shape_of(config, load_text(config, context)), EXACT, torch.Generator().manual_seed(3)).double()
    return build_trainer(CharGpt(), config, model, "cpu")


def gradient(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in trainer.parameters])


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in trainer.parameters]).clone()


def gradient_by_torch(trainer: Trainer, batch: TokenBatch) -> Tensor:
    """The gradient of torch's own mean over targets that are not ignored, all rows at once."""
    logits_BTV, _ = trainer.call(batch.tokens_BT)
    targets_BT = batch.targets_BT if batch.valid_BT is None else batch.targets_BT.where(batch.valid_BT, -100)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)
    return torch.cat([gradient.reshape(-1) for gradient in torch.autograd.grad(loss, trainer.parameters)])


def joined(window: list[TokenBatch]) -> TokenBatch:
    return TokenBatch(*(torch.cat([micro[axis] for micro in window]) for axis in range(3)))


def conflict(error: ValidationError) -> FieldConflict:
    (item,) = error.errors()
    cause = item["ctx"]["error"]
    assert isinstance(cause, FieldConflict)
    return cause


def test_every_metric_it_reports_is_declared_and_every_declared_one_is_reported(lonely: Any):
    workload = describe("char_gpt")
    reported = run(Config(**TINY, precision="fp16"), lonely())[-1].metrics
    assert [name for name in reported if not workload.declares(name)] == []
    missing = [name for name in METRICS if name not in reported and not name.endswith("*")]
    assert missing == ["memory/peak_bytes"]  # of a GPU
    assert {"grad/preclip/block0", "grad/preclip/block1"} <= set(reported)
    assert run(Config(**TINY), lonely())[-1].metrics.keys() == reported.keys() - {
        "scaler/scale", "scaler/skipped_steps", "grad/underflow_share", "grad/overflow_share",
    }  # fmt: skip


def test_a_trial_gives_the_same_numbers_when_it_is_run_again_and_others_with_another_seed(lonely: Any):
    settings: dict[str, Any] = {**TINY, "dropout": 0.5, "padding": 0.5, "accumulation_steps": 2}
    first, again = (timeless(run(Config(**settings), lonely(0, log_every=1))) for _ in range(2))
    assert first == again
    other = timeless(run(Config(**settings, seed=1), lonely(1, log_every=1)))
    assert all(ours["train/loss"] != theirs["train/loss"] for ours, theirs in zip(first, other, strict=True))


def test_no_training_row_holds_a_held_out_character_and_the_reverse(lonely: Any, tmp_path: Path):
    (tmp_path / "text").write_text("abcdefghi" * 100 + "ABCDEFGHIJ" * 10)  # split by position: nine tenths are small
    config = Config(**TINY, text=f"file:{tmp_path}/text")
    text = load_text(config, lonely())
    every = text.batch(torch.arange(text.num_rows), 0)
    symbols = text.corpus.symbols
    assert {symbols[token] for token in torch.cat([every.tokens_BT, every.targets_BT]).unique()} == set("abcdefghi")
    assert {symbols[token] for token in text.held_out_NT.unique()} <= set("ABCDEFGHIJ")
    assert torch.equal(load_text(config, lonely(1)).held_out_NT, text.held_out_NT)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ragged_micro_batches_give_the_gradient_of_one_batch(lonely: Any, optimizer: str):
    settings: dict[str, Any] = {"accumulation_steps": 4, "padding": 0.9, "clip_norm": None, "optimizer": optimizer}
    window = begin(lonely(), **settings).draw_window()
    trainer = exact_trainer(lonely(), **settings)
    whole = joined(window)
    assert len({micro.num_valid for micro in window}) > 1
    assert sum(micro.num_valid for micro in window) == whole.num_valid == int(whole.valid_BT.sum()) < 4 * 4 * 8
    reference = gradient_by_torch(trainer, whole)
    update = trainer.update(window, {})
    assert (gradient(trainer) - reference).abs().max() < 1e-12  # float64: equal but for the order of the sums
    twin = exact_trainer(lonely(), **settings)
    assert float(update.loss) == pytest.approx(float(twin.update([whole], {}).loss), abs=1e-12)
    assert (gradient(twin) - reference).abs().max() < 1e-12


def test_what_stands_in_the_padding_changes_no_bit_of_loss_or_gradient(lonely: Any):
    training = begin(lonely(), padding=0.9)
    (batch,) = training.draw_window()
    other = torch.randint(103, batch.tokens_BT.shape, generator=torch.Generator().manual_seed(1))
    filled = batch._replace(
        tokens_BT=batch.tokens_BT.where(batch.valid_BT, other), targets_BT=batch.targets_BT.where(batch.valid_BT, other)
    )
    assert not torch.equal(filled.tokens_BT, batch.tokens_BT)
    losses, gradients = [], []
    for rows in (batch, filled):
        update = begin(lonely(), padding=0.9).trainer
        losses.append(update.update([rows], {}).loss)
        gradients.append(gradient(update))
    assert torch.equal(*losses)
    assert torch.equal(*gradients)


def test_a_micro_batch_without_a_valid_target_adds_nothing_to_its_window(lonely: Any):
    (batch,) = begin(lonely(), padding=0.9).draw_window()
    empty = batch._replace(valid_BT=torch.zeros_like(batch.valid_BT))
    alone, beside = (begin(lonely()).trainer for _ in range(2))
    assert float(alone.update([batch], {}).loss) == float(beside.update([batch, empty], {}).loss)
    assert torch.equal(gradient(alone), gradient(beside))


def test_checkpointing_changes_no_bit_of_a_training_run_under_dropout(lonely: Any):
    settings: dict[str, Any] = {"dropout": 0.5, "accumulation_steps": 2, "padding": 0.5}
    trainings = [begin(lonely(), **settings, checkpointing=checkpointing) for checkpointing in (False, True)]
    for _ in range(3):
        plain, again = (training.advance()[0] for training in trainings)
        assert torch.equal(plain.loss, again.loss)
        assert torch.equal(*(gradient(training.trainer) for training in trainings))
    assert torch.equal(*(weights(training.trainer) for training in trainings))
    assert not torch.equal(plain.loss, begin(lonely(), **settings | {"dropout": 0.0}).advance()[0].loss)


def test_dropout_differs_between_micro_batches_and_between_updates(lonely: Any):
    training = begin(lonely(), dropout=0.5, accumulation_steps=2)
    first, second = training.draw_window()
    training.step += 1
    third, _ = training.draw_window()
    losses = []
    for noise in (first.noise, second.noise, third.noise):
        twin = begin(lonely(), dropout=0.5).trainer  # the same rows and weights
        losses.append(float(twin.update([first._replace(noise=noise)], {}).loss))
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    "settings", [{}, {"tied": True}, {"residual": False}, {"padding": 0.5}, {"precision": "bf16"}], ids=str
)
def test_every_kind_of_model_learns_more_than_nothing(lonely: Any, settings: dict[str, Any]):
    reports = run(Config(**LEARNING | {"steps": 40} | settings), lonely())
    assert reports[-1].metrics["val/loss"] < 3.75  # measured 3.0 to 3.4; knowing nothing is ln 103 = 4.63


def test_the_switches_reach_the_model(lonely: Any):
    plain, tied, broken = (
        begin(lonely(), **settings) for settings in ({}, {"tied": True}, {"residual": False})
    )  # the same seed, so the same weights
    assert plain.model.readout is not None
    assert tied.model.readout is None
    assert torch.equal(weights(plain.trainer), weights(broken.trainer))
    assert not torch.equal(plain.advance()[0].loss, broken.advance()[0].loss)


def test_held_out_figures_agree_with_torchs_cross_entropy(lonely: Any):
    training = begin(lonely(), eval_every=1)
    update, hyper = training.advance()
    metrics = training.report(update, hyper).metrics
    with torch.no_grad():
        logits_BTV, _ = training.model(training.data.held_out_NT[:, :-1])
        loss = F.cross_entropy(logits_BTV.double().flatten(0, 1), training.data.held_out_NT[:, 1:].flatten())
    assert metrics["val/loss"] == pytest.approx(float(loss), rel=1e-12)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-12)
    assert metrics["train/cross_entropy"] == metrics["train/loss"]


# The planted bugs


def test_every_bug_that_can_be_asked_for_is_planted_and_only_where_it_is():
    assert {"none", *PLANTED} == {"none", *BUGS} == set(get_args(Bug))
    assert [bug for bug in get_args(Bug) if plant(bug, Text) is not Text] == ["unshifted_targets"]
    assert plant("none", Trainer) is plant("unshifted_targets", Trainer) is Trainer
    assert plant("no_zero_grad", Trainer) is PLANTED["no_zero_grad"]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_training_and_nothing_before_it(lonely: Any, bug: str):
    healthy, planted = (begin(lonely(), **BUGS[bug], bug=name) for name in ("none", bug))
    assert torch.equal(weights(healthy.trainer), weights(planted.trainer))
    assert torch.equal(healthy.data.held_out_NT, planted.data.held_out_NT)
    for _ in range(2):  # the second update is the first that clears something, or is behind in its schedule
        healthy.advance()
        planted.advance()
    assert not torch.equal(weights(healthy.trainer), weights(planted.trainer))


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != "unshifted_targets"])
def test_under_a_bug_of_the_update_the_reported_loss_is_still_the_right_one(lonely: Any, bug: str):
    healthy, planted = (begin(lonely(), **BUGS[bug], bug=name).advance()[0] for name in ("none", bug))
    assert torch.equal(healthy.loss, planted.loss)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"bug": "no_zero_grad", "precision": "fp16"}, "needs fp32 or bf16"),
        ({"bug": "clip_before_unscale"}, "precision: fp16"),
        ({"bug": "clip_before_unscale", "precision": "fp16", "clip_norm": None}, "a clip_norm"),
        ({"bug": "unscaled_accumulation"}, "accumulation_steps above 1"),
        ({"bug": "mean_of_means", "padding": 0.5}, "accumulation_steps above 1"),
        ({"bug": "mean_of_means", "accumulation_steps": 2}, "padding above 0"),
        ({"bug": "mean_of_means", "accumulation_steps": 2, "order": "epochs"}, "padding above 0"),
        ({"bug": "scheduler_per_micro_batch", "accumulation_steps": 2}, "a learning rate that moves"),
        ({**UNMOVED, "schedule": "cosine"}, "min_lr_share below 1"),
        ({**UNMOVED, "schedule": "linear", "warmup_steps": 1}, "warmup_steps above 1"),  # that one is already at lr
        ({"bug": "scheduler_per_micro_batch", "schedule": "cosine"}, "accumulation_steps above 1"),
    ],
)
def test_a_bug_that_would_change_nothing_is_refused_at_its_field(settings: dict[str, Any], needed: str):
    with pytest.raises(ValidationError, match=needed) as caught:
        Config(**settings)
    assert conflict(caught.value).name == "bug"


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_warm_up_alone_moves_the_schedule_that_a_bug_can_run_through(schedule: str):
    assert Config(**UNMOVED, schedule=schedule, warmup_steps=2).bug == "scheduler_per_micro_batch"


@pytest.mark.parametrize(
    ("settings", "field"), [({"heads": 3, "width": 8}, "heads"), ({"padding": 0.1, "context": 8}, "padding")]
)
def test_fields_that_do_not_fit_together_are_refused(settings: dict[str, Any], field: str):
    with pytest.raises(ValidationError) as caught:
        Config(**settings)
    assert conflict(caught.value).name == field


def test_loss_times_40_makes_every_gradient_40_times_as_large(lonely: Any):
    trainers = [begin(lonely(), clip_norm=None, bug=bug) for bug in ("none", "loss_times_40")]
    norms = [training.advance()[0].norms for training in trainers]
    for plain, loud in zip(*(training.trainer.parameters for training in trainers), strict=True):
        assert float(loud.grad.norm() / plain.grad.norm()) == pytest.approx(40, abs=5e-5)  # 40.0000
    assert {name: norm / norms[0][name] for name, norm in norms[1].items()} == pytest.approx(
        dict.fromkeys(norms[0], 40.0), abs=5e-5
    )


def test_under_sgd_a_loss_times_40_is_a_learning_rate_times_40(lonely: Any):
    sgd: dict[str, Any] = {"optimizer": "sgd", "clip_norm": None, "weight_decay": 0, "steps": 30}
    begun = weights(begin(lonely(), **LEARNING | sgd).trainer)
    loud, fast = (
        begin(lonely(), **LEARNING | sgd | settings)
        for settings in ({"lr": 2e-3, "bug": "loss_times_40"}, {"lr": 8e-2})
    )
    losses = [[float(training.advance()[0].loss) for _ in range(30)] for training in (loud, fast)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # 40 g rounds differently from g, 6e-8 each time
    moved = (weights(fast.trainer) - begun).norm()
    assert moved > 0.1 * begun.norm()
    assert (weights(loud.trainer) - weights(fast.trainer)).norm() < 1e-4 * moved


def test_detached_positions_have_a_gradient_of_zero_and_stay_as_they_were(lonely: Any):
    healthy, planted = (run(Config(**TINY, bug=bug), lonely(log_every=1)) for bug in ("none", "detached_positions"))
    assert [report.metrics["grad/preclip/positions"] for report in planted] == [0.0] * 4
    assert all(report.metrics["grad/preclip/positions"] > 0 for report in healthy)
    first, broken = healthy[0].metrics, planted[0].metrics
    others = ["train/loss", *(f"grad/preclip/{name}" for name in ("embed", "block0", "block1", "readout"))]
    assert [broken[name] for name in others] == [first[name] for name in others]
    training = begin(lonely(), bug="detached_positions")
    (table,) = training.trainer.blocks["positions"]
    before = table.detach().clone()
    training.advance()
    assert torch.equal(table, before)


def test_unshifted_targets_drive_the_training_loss_to_nothing_and_the_true_one_up(lonely: Any):
    config = Config(**LEARNING | {"steps": 120, "eval_every": 40}, bug="unshifted_targets")
    reports = [report.metrics for report in run(config, lonely(log_every=40))]
    assert reports[-1]["train/loss"] < 0.5  # measured .15 to .3, from 4.6
    true = [metrics["val/loss"] for metrics in reports if "val/loss" in metrics]
    assert true == sorted(true)
    assert true[-1] > reports[-1]["data/uniform_loss"] + 1  # measured 8: far above knowing nothing
    (batch,) = begin(lonely(), bug="unshifted_targets").draw_window()
    assert torch.equal(batch.tokens_BT, batch.targets_BT)


def test_without_zero_grad_the_second_update_applies_the_sum_of_both_gradients(lonely: Any):
    first, second = (begin(lonely(), clip_norm=None).draw_window() for _ in range(2))
    trainer = exact_trainer(lonely(), clip_norm=None, bug="no_zero_grad")
    trainer.update(first, {})
    before = gradient(trainer)
    fresh = gradient_by_torch(trainer, *second)
    trainer.update(second, {})
    assert (gradient(trainer) - (before + fresh)).abs().max() < 1e-12


def test_a_clip_before_unscaling_leaves_a_65536th_of_the_update(lonely: Any):
    trainings = [begin(lonely(), **BUGS["clip_before_unscale"], bug=bug) for bug in ("none", "clip_before_unscale")]
    healthy, planted = (training.advance()[0] for training in trainings)
    assert healthy.clipped
    assert planted.clipped
    assert planted.applied
    applied = [gradient(training.trainer) for training in trainings]
    assert float(applied[0].norm()) == pytest.approx(0.1, rel=1e-5)
    assert float(applied[0].norm() / applied[1].norm()) == pytest.approx(65536, rel=1e-4)
    assert float(torch.cosine_similarity(*applied, dim=0)) == pytest.approx(1, abs=1e-6)
    assert planted.norms == healthy.norms  # a bug of the update, not of what is said about it; 65536 rounds nothing


def test_unscaled_accumulation_multiplies_the_gradient_by_the_number_of_micro_batches(lonely: Any):
    healthy, planted = (
        begin(lonely(), **BUGS["unscaled_accumulation"], bug=bug) for bug in ("none", "unscaled_accumulation")
    )
    plain, loud = healthy.advance()[0], planted.advance()[0]
    assert {name: norm / plain.norms[name] for name, norm in loud.norms.items()} == pytest.approx(
        dict.fromkeys(plain.norms, 3.0), abs=1e-4
    )
    assert torch.allclose(gradient(planted.trainer), 3 * gradient(healthy.trainer), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("bug", "expected"), [("none", 3.25), ("mean_of_means", 2.5)])
def test_two_targets_of_loss_1_and_six_of_loss_4_have_the_mean_of_eight_targets(bug: str, expected: float):
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def call(tokens_BT: Tensor, valid_BT: Tensor, noise: int) -> tuple[Tensor, list[Any]]:
        """Logits of two symbols that make the first one's surprise `weight` times the token that was read."""
        other_BT = torch.log(torch.expm1(weight * tokens_BT))
        return torch.stack([torch.zeros_like(other_BT), other_BT], -1), []

    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), loss_scaler(POLICIES["fp32"], "cpu")
    trainer = plant(bug, Trainer)(call, CharGpt().loss, {"all": [weight]}, optimizer, scaler)
    targets_BT = torch.zeros(1, 6, dtype=torch.int64)
    short = TokenBatch(torch.tensor([[1, 1, 9, 9, 9, 9]]), targets_BT, torch.arange(6)[None] < 2)
    full = TokenBatch(torch.full((1, 6), 4), targets_BT, torch.arange(6)[None] < 6)
    assert float(trainer.update([short, full], {}).loss) == pytest.approx(3.25, abs=1e-12)  # said right under the bug
    assert float(gradient(trainer)) == pytest.approx(expected, abs=1e-12)


def test_a_mean_of_means_weighs_a_micro_batch_of_two_targets_like_one_of_six(lonely: Any):
    trainer = exact_trainer(lonely(), **BUGS["mean_of_means"], bug="mean_of_means")
    stream = torch.arange(9)
    valid_BT = torch.arange(8) < torch.tensor([[2]])
    window = [TokenBatch(stream[None, :8], stream[None, 1:], torch.arange(8)[None] < num_valid) for num_valid in (2, 6)]
    assert torch.equal(window[0].valid_BT, valid_BT)
    means = [gradient_by_torch(trainer, micro) for micro in window]
    update = trainer.update(window, {})
    assert (gradient(trainer) - (means[0] + means[1]) / 2).abs().max() < 1e-12
    assert (gradient(trainer) - (2 * means[0] + 6 * means[1]) / 8).abs().max() > 1e-3
    assert [share for share, _ in update.seen] == [0.25, 0.75]  # of the loss that is reported


def test_a_schedule_per_micro_batch_runs_ahead(lonely: Any):
    settings = {**TINY, **BUGS["scheduler_per_micro_batch"]}
    healthy, planted = (
        [report.metrics["train/lr"] for report in run(Config(**settings, bug=bug), lonely(log_every=1))]
        for bug in ("none", "scheduler_per_micro_batch")
    )
    assert healthy == pytest.approx([2e-3 * (1 - step / 12) for step in range(12)])
    assert planted[:4] == pytest.approx([2e-3 * (1 - step / 12) for step in (0, 3, 6, 9)])
    assert planted[4:] == [0.0] * 8  # two thirds of the run train nothing
