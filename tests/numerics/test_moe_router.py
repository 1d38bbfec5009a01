"""The workload as a sweep sees it: which configs it takes, what it reports, what pairs its trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from orchestrator.workload import describe, flatten
from workloads.engine.precision import POLICIES
from workloads.engine.random import generator
from workloads.engine.windows import Windows
from workloads.layers.router import load_balance_loss
from workloads.moe_router.config import METRICS, Config
from workloads.moe_router.model import MoeRegression, Seen
from workloads.moe_router.task import NUM_TRAIN
from workloads.moe_router.train import MoeRouter

SMALL: dict[str, Any] = {"steps": 6, "batch_size": 32, "d_hidden": 8}


@pytest.mark.parametrize(("k", "resolved"), [(1, False), (2, True), (4, True)])
def test_renormalize_auto_is_logged_as_what_it_means(k: int, resolved: bool):
    assert flatten(Config(k=k))["renormalize"] is resolved
    assert flatten(Config(k=k, renormalize="auto"))["renormalize"] is resolved
    assert Config(**flatten(Config(k=k))) == Config(k=k)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 8, "num_experts": 4}, "k=8 experts per token, but num_experts=4"),
        ({"k": 1, "renormalize": True}, "exactly 0"),
        ({"precision": "fp8"}, "bf16-selective"),
        ({"accumulation_steps": 0}, "greater than or equal to 1"),
        ({"accumulation_steps": 2.5}, "valid integer"),
        ({"clip_norm": "None"}, "valid number"),
        ({"c_z": math.nan}, "finite"),
        ({"c_zz": 1.0}, "not permitted"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_reason(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Config(**settings)


def test_a_dead_router_can_be_asked_for_and_gets_no_gradient_from_the_task(train: Callable[..., dict[str, float]]):
    dead = train(**SMALL, k=1, renormalize=True, allow_dead_router=True, alpha=0.0)
    assert dead["grad/preclip/router"] == 0.0
    assert dead["grad/preclip/experts"] > 0.0


def test_every_metric_it_reports_is_declared_and_every_declared_one_is_reported(
    train: Callable[..., dict[str, float]],
):
    workload = describe("moe_router")
    reported = train(**SMALL, precision="fp16")
    assert [name for name in reported if not workload.declares(name)] == []
    missing = {name for name in METRICS if name not in reported and "*" not in name}
    # No form predicts what experts keep, and the peak is a GPU's.
    assert missing == {"memory/predicted_bytes", "memory/unexplained_bytes", "memory/peak_bytes"}
    assert sum(value for name, value in reported.items() if name.startswith("router/load/")) == pytest.approx(1.0)


def test_it_reports_at_the_asked_steps_and_at_the_last_one(lonely: Any, reports: Any):
    config = Config(**SMALL | {"steps": 7})
    assert [report.step for report in reports(config, lonely(log_every=3))] == [3, 6, 7]


def test_it_stops_after_the_step_in_which_the_signal_came(lonely: Any, reports: Any):
    config = Config(**SMALL)
    assert [report.step for report in reports(config, lonely(log_every=1, stop_after=2))] == [1, 2]


def test_a_trial_gives_the_same_numbers_when_it_is_run_again(lonely: Any, reports: Any):
    runs = [reports(Config(**SMALL, precision="bf16"), lonely(log_every=2)) for _ in range(2)]
    timeless = [
        [{name: value for name, value in report.metrics.items() if not name.startswith("time/")} for report in run]
        for run in runs
    ]
    assert timeless[0] == timeless[1]


def test_a_trial_leaves_torchs_global_generator_alone(lonely: Any, reports: Any):
    before = torch.get_rng_state()
    reports(Config(**SMALL), lonely())
    assert torch.equal(torch.get_rng_state(), before)


def test_trials_that_differ_in_a_scalar_see_the_same_data_order_and_initial_weights(lonely: Any):
    def starts(config: Config) -> list[torch.Tensor]:
        context = lonely(trial_seed=config.seed)
        rows = MoeRouter().data(config, context)
        order = generator(context, "order")
        windows = Windows(rows.num_rows, config.batch_size, config.accumulation_steps, config.order, order)
        parts = [rows.batch(indices, 0) for _ in range(3) for indices in windows.draw()]
        weights = list(MoeRegression(config, generator(context, "init")).parameters())
        return [*weights, *rows.held_out, *[torch.cat([part[i] for part in parts]) for i in (0, 1)]]

    plain, other = starts(Config()), starts(Config(c_z=1e-2, lr=0.1, alpha=0.0, precision="bf16", router_offset=300.0))
    split = starts(Config(batch_size=128, accumulation_steps=2))
    assert all(torch.equal(*pair) for twin in (other, split) for pair in zip(plain, twin, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(plain, starts(Config(seed=1)), strict=True))


def test_held_out_rows_are_none_of_the_training_rows(lonely: Any):
    rows = MoeRouter().data(Config(), lonely())
    assert rows.num_rows == NUM_TRAIN
    assert torch.cdist(rows.held_out.inputs_NI, rows.training.inputs_NI).min() > 0


def test_a_coefficient_of_zero_is_the_same_bits_as_no_z_loss(
    lonely: Any, reports: Any, monkeypatch: pytest.MonkeyPatch
):
    config = Config(**SMALL | {"steps": 40}, c_z=0.0)
    with_term = reports(config, lonely())[-1].metrics

    def without_term(self: Any, call: Any, batch: Any, hyper: Any) -> Any:
        prediction, routing = call(batch.inputs_NI, hyper["offset"])
        mse = torch.nn.functional.mse_loss(prediction, batch.targets_NO)
        balance = load_balance_loss(routing.probabilities_BE, routing.experts_BK)
        return mse + hyper["alpha"] * balance, Seen(mse, routing)

    monkeypatch.setattr(MoeRouter, "loss", without_term)
    without = reports(config, lonely())[-1].metrics
    same = [name for name in with_term if not name.startswith("time/")]
    assert {name: with_term[name] for name in same} == {name: without[name] for name in same}


def test_half_the_batch_accumulated_twice_trains_like_the_whole_batch(train: Callable[..., dict[str, float]]):
    whole = train(**SMALL | {"batch_size": 64}, alpha=0.1)
    halves = train(**SMALL, accumulation_steps=2, alpha=0.1)
    assert halves["router/assignments"] == whole["router/assignments"] == 128
    assert halves["val/mse"] == pytest.approx(whole["val/mse"], rel=1e-4)  # float32 sums in another order


def test_top_two_carries_out_twice_the_assignments_of_top_one(train: Callable[..., dict[str, float]]):
    counts = {k: train(steps=2, k=k)["router/assignments"] for k in (1, 2)}
    assert counts == {1: 256, 2: 512}


def test_a_capacity_drops_assignments_and_counts_them(train: Callable[..., dict[str, float]]):
    tight = train(steps=2, k=2, capacity_factor=0.5)
    assert 0.5 <= tight["router/dropped_share"] < 1
    assert tight["router/assignments"] == pytest.approx(512 * (1 - tight["router/dropped_share"]))
    assert train(steps=2, k=2)["router/dropped_share"] == 0


def test_an_offset_makes_ties_only_where_logits_are_rounded(train: Callable[..., dict[str, float]]):
    stressed = {name: train(steps=1, k=1, precision=name, router_offset=300.0) for name in POLICIES}
    ties = {name: metrics["router/tie_share"] for name, metrics in stressed.items()}
    assert ties["fp32"] == ties["bf16-selective"] == ties["fp16"] == 0
    assert min(ties["bf16"], ties["bf16-softmax"]) > 0.2


def test_the_drift_moves_the_offset_and_a_learnable_one_follows_only_a_z_loss(train: Callable[..., dict[str, float]]):
    drift: dict[str, Any] = {"steps": 60, "k": 1, "offset_drift": 1.2}
    assert 72 < train(**drift)["val/router/max_logit"] < 75
    assert train(**drift, offset_learnable=True, offset_lr=2.0, c_z=1e-3)["val/router/abs_max_logit"] < 30


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_blows_up_says_so_at_once_and_goes_on_reporting(lonely: Any, reports: Any, precision: str):
    context = lonely(log_every=20)
    run = reports(Config(**SMALL | {"steps": 40}, lr=1e30, precision=precision), context)
    first = next(report for report in run if math.isnan(report.metrics["train/loss"]))
    assert first.step < 20  # not an asked step: trouble is reported when it happens
    assert [finding.step for finding in context.findings] == [first.step]
    assert first.metrics["update/skipped_steps"] + first.metrics["params/nonfinite"] > 0
    assert run[-1].step == 40
    assert run[-1].metrics["update/skipped_steps"] > 10


def test_fp16_skips_the_overflow_of_its_first_scale_without_calling_it_divergence(lonely: Any, reports: Any):
    context = lonely(log_every=1)
    run = reports(Config(**SMALL, precision="fp16", task_scale=300.0), context)
    skipped = [report.metrics["scaler/skipped_steps"] for report in run]
    assert skipped[-1] > 0
    assert all(math.isfinite(report.metrics["train/loss"]) for report in run)
    assert run[-1].metrics["scaler/scale"] == 65536 / 2 ** skipped[-1]
    assert context.findings == []


def test_a_gpu_that_the_trial_was_not_given_is_refused(lonely: Any, reports: Any):
    with pytest.raises(ValueError, match=r"resources\.gpu"):
        reports(Config(device="cuda"), lonely())
