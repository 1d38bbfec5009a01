"""The training loop: which rows an update sees, how the learning rate runs, and that a resumed run is the same run."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestrator.trial import Report
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt
from workloads.engine.optimizers import build_optimizer, build_schedules, decay_groups
from workloads.engine.training import TrainingWorkload
from workloads.engine.training_config import TRAINING_METRICS, TrainingConfig
from workloads.engine.windows import Windows
from workloads.moe_gpt.config import Config as MoeGptConfig
from workloads.moe_gpt.train import MoeGpt
from workloads.moe_router.config import Config as MoeConfig
from workloads.moe_router.train import MoeRouter

TINY: dict[str, Any] = {
    "depth": 1, "heads": 2, "width": 8, "context": 8, "batch_size": 2, "steps": 6, "num_held_out_windows": 4,
}  # fmt: skip


class Rows:
    """Rows 0, 1, 2 ...; a batch is its indices."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def batch(self, indices_B: Tensor, noise: int) -> Pack:
        return Pack(indices_B)

    def to(self, device: str) -> Rows:
        return self


class Pack:
    def __init__(self, rows_B: Tensor) -> None:
        self.rows_B = rows_B
        self.num_valid = len(rows_B)


class Slide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        return self.weight


class Descent(TrainingWorkload):
    """A weight whose gradient is 1 for each row: an update lowers it by lr."""

    Config = TrainingConfig
    metrics = (*TRAINING_METRICS, "weight")

    def __init__(self, num_rows: int = 3) -> None:
        self.num_rows = num_rows
        self.windows: list[list[int]] = []

    def data(self, config: Any, context: Any) -> Rows:
        return Rows(self.num_rows)

    def build(self, config: Any, data: Any, source: torch.Generator) -> nn.Module:
        self.model = Slide()
        return self.model

    def blocks(self, model: nn.Module) -> Any:
        return {"all": list(model.parameters())}

    def loss(self, call: Any, batch: Pack, hyper: Any) -> tuple[Tensor, Any]:
        return call(), batch.num_valid

    def observe(self, config: Any, update: Any) -> dict[str, float]:
        self.windows.append([size for _, size in update.seen])
        return {"weight": self.model.weight.item()}


class Noisy(Descent):
    """Draws from every global generator, as a user's model may."""

    def build(self, config: Any, data: Any, source: torch.Generator) -> nn.Module:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        return self.model

    def blocks(self, model: nn.Module) -> Any:
        return TrainingWorkload.blocks(self, model)

    def loss(self, call: Any, batch: Pack, hyper: Any) -> tuple[Tensor, Any]:
        scale = random.random() + float(np.random.rand())
        return scale * call(torch.randn(batch.num_valid, 4)).square().mean(), None

    def observe(self, config: Any, update: Any) -> dict[str, float]:
        return {"weight": next(self.model.parameters()).sum().item()}


def plain(report: Report) -> dict[str, float]:
    return {name: value for name, value in report.metrics.items() if not name.startswith("time/")}


def test_an_epoch_shorter_than_a_window_is_one_update(lonely: Any):
    workload = Descent(num_rows=3)
    config = TrainingConfig(steps=4, batch_size=1, accumulation_steps=8, order="epochs", optimizer="sgd", lr=1.0)
    reports = list(workload.run(config, lonely(log_every=1)))
    assert [report.metrics["weight"] for report in reports] == [-1.0, -2.0, -3.0, -4.0]
    assert workload.windows == [[1, 1, 1]] * 4


def test_the_last_smaller_window_of_an_epoch_counts_as_a_whole_update(lonely: Any):
    workload = Descent(num_rows=3)
    config = TrainingConfig(steps=2, batch_size=1, accumulation_steps=2, order="epochs", optimizer="sgd", lr=1.0)
    assert list(workload.run(config, lonely()))[-1].metrics["weight"] == -2.0


def test_an_epoch_gives_every_row_once_whatever_the_split():
    def epoch(batch_size: int, accumulation_steps: int) -> list[list[list[int]]]:
        source = torch.Generator().manual_seed(1)
        windows = Windows(26, batch_size, accumulation_steps, "epochs", source)
        return [[part.tolist() for part in windows.draw()] for _ in range(2)]

    first, last = epoch(8, 2)
    assert [len(part) for part in (*first, *last)] == [8, 8, 8, 2]
    assert sorted(row for window in (first, last) for part in window for row in part) == list(range(26))
    assert [window[0] for window in epoch(16, 1)] == [[*first[0], *first[1]], [*last[0], *last[1]]]


def test_draws_with_replacement_do_not_depend_on_the_split():
    drawn = [
        torch.cat(Windows(100, *split, "replacement", torch.Generator().manual_seed(1)).draw())
        for split in ((8, 1), (4, 2), (1, 8))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "linear", "steps": 4}, [1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine", "steps": 4}, [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]),
        ({"schedule": "constant", "warmup_steps": 2, "steps": 4}, [0.5, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_steps": 2, "steps": 4, "min_lr_share": 0.5}, [0.5, 1.0, 1.0, 0.75]),
        ({"schedule": "constant", "steps": 4}, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_learning_rate_follows_its_closed_form(lonely: Any, settings: dict[str, Any], expected: list[float]):
    config = TrainingConfig(optimizer="sgd", lr=1.0, batch_size=1, **settings)
    reports = list(Descent().run(config, lonely(log_every=1)))
    assert [report.metrics["train/lr"] for report in reports] == pytest.approx(expected, abs=1e-12)
    assert reports[-1].metrics["weight"] == pytest.approx(-sum(expected), abs=1e-6)


def test_cosine_equals_torchs_own_annealing():
    config = TrainingConfig(schedule="cosine", steps=50, lr=0.3, optimizer="sgd", min_lr_share=0.1)
    ours, theirs = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3) for _ in range(2))
    (schedule,) = build_schedules(config, ours)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=50, eta_min=0.03)
    for _ in range(50):
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9)
        for optimizer, course in ((ours, schedule), (theirs, reference)):
            optimizer.step()
            course.step()


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adam", lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.95))),
        ("adamw", lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95))),
        ("sgd", lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.7)),
    ],
)
def test_optimisers_are_torchs_own_and_decay_matrices_only(name: str, reference: Any):
    config = TrainingConfig(optimizer=name, lr=0.01, beta1=0.8, beta2=0.95, momentum=0.7, weight_decay=0.1)
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = build_optimizer(config, decay_groups(models[0].named_parameters(), 0.1))
    theirs = reference(
        [{"params": [models[1].weight], "weight_decay": 0.1}, {"params": [models[1].bias], "weight_decay": 0.0}]
    )
    for step in range(5):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)  # the fused kernel sums in another order


RESUMABLE = [
    (CharGpt, CharConfig(**TINY, dropout=0.5, accumulation_steps=2, schedule="cosine", padding=0.5)),
    (CharGpt, CharConfig(**TINY, order="epochs", text="pydoc", precision="fp16", optimizer="sgd", momentum=0.9)),
    (MoeGpt, MoeGptConfig(**TINY, precision="bf16-selective", accumulation_steps=2, c_z=1e-3, checkpointing=True)),
    (MoeRouter, MoeConfig(steps=6, batch_size=16, d_hidden=8, schedule="linear")),
    (Noisy, TrainingConfig(steps=6, batch_size=4)),
]


@pytest.mark.parametrize(("workload", "config"), RESUMABLE, ids=lambda value: getattr(value, "__name__", ""))
def test_three_updates_and_three_after_a_restart_are_bit_for_bit_six_updates(lonely: Any, workload: Any, config: Any):
    straight = [plain(report) for report in workload().run(config, lonely(log_every=1))]
    interrupted = lonely(log_every=1, stop_after=3)
    first = [plain(report) for report in workload().run(config, interrupted)]
    torch.rand(7)  # what happens in between does not matter
    again = lonely(log_every=1, checkpoint=interrupted.checkpoint)
    second = [plain(report) for report in workload().run(config, again)]
    assert interrupted.checkpoint.steps == [3]
    assert [*first, *second] == straight


def test_checkpoints_are_written_when_due_and_when_told_to_stop(lonely: Any):
    context = lonely(stop_after=5)
    context.checkpoint.every = 2
    list(CharGpt().run(CharConfig(**TINY), context))
    assert context.checkpoint.steps == [2, 4, 5]


@pytest.mark.parametrize(("is_kept", "steps"), [(False, [3]), (True, [3, 6])])
def test_the_last_step_is_saved_only_for_a_person_since_nothing_is_left_to_resume(
    lonely: Any, is_kept: bool, steps: list[int]
):
    context = lonely()
    context.checkpoint.every, context.checkpoint.is_kept = 3, is_kept
    list(CharGpt().run(CharConfig(**TINY), context))
    assert context.checkpoint.steps == steps


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_checkpoint_loads_with_and_without_compile(
    lonely: Any, monkeypatch: pytest.MonkeyPatch, compiled_first: bool
):
    # torch's own wrapper with its prefixed names; generating code is not what is shown here
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_model(model, backend="eager"))
    straight = [plain(report) for report in CharGpt().run(CharConfig(**TINY), lonely(log_every=1))]
    interrupted = lonely(log_every=1, stop_after=3)
    list(CharGpt().run(CharConfig(**TINY, compile=compiled_first), interrupted))
    again = lonely(log_every=1, checkpoint=interrupted.checkpoint)
    second = [plain(report) for report in CharGpt().run(CharConfig(**TINY, compile=not compiled_first), again)]
    assert [report["train/loss"] for report in second] == pytest.approx(
        [report["train/loss"] for report in straight[3:]], rel=1e-6
    )


def test_a_checkpoint_of_another_model_is_refused(lonely: Any):
    context = lonely(stop_after=2)
    list(CharGpt().run(CharConfig(**TINY), context))
    with pytest.raises(ValueError, match=r"does not fit this model"):
        list(CharGpt().run(CharConfig(**TINY | {"width": 16}), lonely(checkpoint=context.checkpoint)))


def test_global_generators_belong_to_the_trial_and_are_given_back(lonely: Any):
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    runs = [list(Noisy().run(TrainingConfig(steps=3, batch_size=4), lonely(log_every=1))) for _ in range(2)]
    assert [plain(report) for report in runs[0]] == [plain(report) for report in runs[1]]
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_evaluation_happens_at_the_first_report_at_or_after_each_due_step_and_at_the_last_step(lonely: Any):
    config = CharConfig(**TINY | {"steps": 13}, eval_every=4)
    reports = list(CharGpt().run(config, lonely(log_every=3)))
    assert [(report.step, "val/loss" in report.metrics) for report in reports] == [
        (3, False), (6, True), (9, True), (12, True), (13, True),
    ]  # fmt: skip


def test_two_trials_in_turns_draw_what_each_draws_alone(lonely: Any):
    config = TrainingConfig(steps=3, batch_size=4)
    alone = [[plain(report) for report in Noisy().run(config, lonely(seed, log_every=1))] for seed in (0, 1)]
    turns = zip(*(Noisy().run(config, lonely(seed, log_every=1)) for seed in (0, 1)), strict=True)
    assert [list(column) for column in zip(*([plain(one) for one in turn] for turn in turns), strict=True)] == alone


def test_a_gradient_that_overflows_at_every_loss_scale_is_trouble_and_not_business_as_usual(lonely: Any):
    class Overflowing(Descent):
        def loss(self, call: Any, batch: Pack, hyper: Any) -> tuple[Tensor, Any]:
            return call().sqrt(), batch.num_valid  # at 0: the loss is 0 and its slope infinite

    context = lonely(log_every=10)
    config = TrainingConfig(steps=30, batch_size=1, precision="fp16")
    reports = list(Overflowing().run(config, context))
    (finding,) = context.findings
    assert finding.step == 17  # 65536 halved seventeen times is below 1
    assert [math.isnan(report.metrics["train/loss"]) for report in reports] == [False, True, True, True]


def test_under_fp16_a_loss_that_is_not_finite_is_trouble_at_its_own_step(lonely: Any):
    class Broken(Descent):
        def loss(self, call: Any, batch: Pack, hyper: Any) -> tuple[Tensor, Any]:
            return call() * math.nan, batch.num_valid

    context = lonely(log_every=10)
    reports = list(Broken().run(TrainingConfig(steps=3, batch_size=1, precision="fp16"), context))
    assert [report.step for report in reports] == [1, 3]
    assert [finding.step for finding in context.findings] == [1]


def test_evaluation_does_not_change_training(lonely: Any):
    rare, often = (
        list(CharGpt().run(CharConfig(**TINY, dropout=0.5, eval_every=every), lonely(log_every=1)))
        for every in (None, 6)
    )
    assert [report.metrics["train/loss"] for report in rare] == [report.metrics["train/loss"] for report in often]


GOLDEN: list[tuple[Any, Any, dict[str, Any], str, float]] = [
    (CharGpt, CharConfig, TINY | {"steps": 40, "lr": 0.02}, "val/loss", 1.6453411),
    (MoeGpt, MoeGptConfig, TINY | {"steps": 40, "lr": 0.02, "c_z": 1e-3, "k": 1}, "val/loss", 1.4894203),
    (MoeRouter, MoeConfig, {"steps": 40, "batch_size": 64, "lr": 0.01}, "val/mse", 1.0094662),
]


@pytest.mark.parametrize(("workload", "config", "settings", "metric", "golden"), GOLDEN)
def test_forty_updates_end_at_the_loss_they_always_ended_at(
    lonely: Any, tmp_path: Path, workload: Any, config: Any, settings: dict[str, Any], metric: str, golden: float
):
    """A refactor that changes a number shows here. The text is made here: Python's own changes with its version."""
    if config is not MoeConfig:
        words = random.Random(0).choices(["tensor", "router", "expert", "loss", "of", "the", "a"], k=2000)
        (tmp_path / "words.txt").write_text(" ".join(words))
        settings = {**settings, "text": f"file:{tmp_path}/words.txt"}
    final = list(workload().run(config(**settings), lonely()))[-1]
    assert final.metrics[metric] == pytest.approx(
        golden, rel=1e-5
    )  # measured: other kernels (AVX2, none) differ by 1e-7
