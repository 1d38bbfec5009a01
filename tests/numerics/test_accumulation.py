"""One accumulated update against one combined update: the right way, and how far each wrong way is from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from orchestrator.workload import describe
from workloads.accumulation.compare import EXACT, Accumulation, start
from workloads.accumulation.config import METRICS, Config
from workloads.accumulation.deviations import trainer_class
from workloads.accumulation.network import Examples, Network, cross_entropy, draw_windows
from workloads.engine.precision import POLICIES
from workloads.engine.random import generator
from workloads.engine.update import Trainer

EQUAL = [8, 8, 8, 8]
UNEVEN_CLASSES = [0.2, 0.5, 1.0, 2.0, 4.0]
# Of a weight after an update of about 0.1: sums in another order differ by an ulp of the weights, 3e-8 and 6e-17.
TOLERANCES = {"fp32": 1e-6, "fp64": 1e-14}


@pytest.fixture
def measured(lonely: Any) -> Any:
    """The metrics after the last window."""
    return lambda seed=0, **settings: list(Accumulation().run(Config(**settings), lonely(seed)))[-1].metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(
    "settings",
    [
        {"window_sizes": EQUAL},
        {"window_sizes": EQUAL, "weighting": "mean_of_means"},  # right where all micro-batches count alike
        {"window_sizes": [8, 8, 8, 2]},
        {"window_sizes": [1, 30]},
        {"window_sizes": EQUAL, "num_examples": 82},
        {"window_sizes": EQUAL, "mask_rate": 0.5},
        {"window_sizes": [2] * 8, "mask_rate": 0.8},  # some micro-batches have no valid target at all
        {"window_sizes": EQUAL, "class_weights": UNEVEN_CLASSES, "weighting": "weight_sum"},
        {"window_sizes": EQUAL, "clip_norm": 0.2},
        {"window_sizes": EQUAL, "norm_layer": "frozen_batchnorm"},
        {"window_sizes": EQUAL, "num_examples": 128, "overflow_at": 1},
    ],
    ids=str,
)
def test_an_accumulated_update_is_the_combined_one(measured: Any, settings: dict[str, Any], precision: str, seed: int):
    metrics = measured(seed, precision=precision, **settings)
    assert metrics["max_abs_diff"] < TOLERANCES[precision]
    assert metrics["change_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["pending_gradient"] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("least", "settings"),
    [
        (0.05, {"weighting": "mean_of_means"}),
        (0.05, {"window_sizes": EQUAL, "mask_rate": 0.5, "weighting": "mean_of_means"}),
        (0.05, {"window_sizes": EQUAL, "mask_rate": 0.5, "weighting": "rows"}),
        (0.05, {"window_sizes": EQUAL, "class_weights": UNEVEN_CLASSES, "weighting": "tokens"}),
        (0.05, {"window_sizes": EQUAL, "num_examples": 82, "weighting": "fixed"}),
        (0.05, {"window_sizes": EQUAL, "num_examples": 82, "weighting": "mean_of_means"}),
        (0.05, {"window_sizes": EQUAL, "clip_norm": 0.2, "clip_at": "micro"}),
        (0.05, {"window_sizes": EQUAL, "clip_norm": 0.2, "clip_at": "buffer"}),
        (0.01, {"window_sizes": EQUAL, "norm_layer": "batchnorm"}),
    ],
    ids=str,
)
def test_each_wrong_way_is_another_update(measured: Any, least: float, settings: dict[str, Any], seed: int):
    assert measured(seed, precision="fp64", **settings)["relative_diff"] > least


def plain_gradients(config: Config, context: Any) -> Tensor:
    """The gradient of the first window's mean loss by torch's own functions, float64."""
    network = Network("none", EXACT, generator(context, "init")).double()
    values = [parameter.detach().clone().requires_grad_() for parameter in network.parameters()]
    window = draw_windows(config, context)[0]
    inputs = torch.cat([micro.inputs_NI for micro in window]).double()
    targets = torch.cat([micro.targets_N for micro in window])
    masked = torch.cat([micro.weights_N for micro in window]) == 0
    weight = None if config.class_weights is None else torch.tensor(config.class_weights, dtype=torch.float64)
    hidden_weight, hidden_bias, out_weight, out_bias = values
    logits = F.linear(F.linear(inputs, hidden_weight, hidden_bias).tanh(), out_weight, out_bias)
    F.cross_entropy(logits, targets.masked_fill(masked, -100), weight=weight, ignore_index=-100).backward()
    return torch.cat([value.grad.reshape(-1) for value in values])


@pytest.mark.parametrize(
    "settings",
    [{}, {"mask_rate": 0.5}, {"mask_rate": 0.5, "class_weights": UNEVEN_CLASSES, "weighting": "weight_sum"}],
    ids=str,
)
def test_the_update_is_the_gradient_that_torch_gives_for_the_whole_window(lonely: Any, settings: dict[str, Any]):
    config, context = Config(precision="fp64", **settings), lonely()
    run = start(config, context, "fp64", Trainer)
    run.apply(draw_windows(config, context)[0])
    assert (run.change() + plain_gradients(config, context)).abs().max() < 1e-14  # float64, weights below 1


def test_a_sum_in_place_of_a_mean_is_as_many_times_too_large_as_there_are_micro_batches(measured: Any):
    metrics = measured(precision="fp64", window_sizes=EQUAL, weighting="none")
    assert metrics["change_ratio"] == pytest.approx(4, abs=1e-4)
    ratio = metrics["grad/preclip/total"] / metrics["combined/grad/preclip/total"]
    assert ratio == pytest.approx(4, abs=1e-4)


def test_in_a_mean_of_means_an_example_of_the_short_micro_batch_weighs_more_than_three_times_as_much(lonely: Any):
    shares = {}
    for weighting in ("tokens", "mean_of_means"):
        config = Config(weighting=weighting)
        window = draw_windows(config, lonely())[0]
        trainer = start(config, lonely(), "fp32", trainer_class(config)).trainer
        counts = [micro.num_valid for micro in window]
        shares[weighting] = trainer.gradient_shares([count / sum(counts) for count in counts])[-1] / 2
    assert shares["mean_of_means"] / shares["tokens"] == pytest.approx(26 / 8)


def test_a_short_last_window_is_an_update_of_its_own_or_a_gradient_left_behind(measured: Any):
    settings = {"window_sizes": EQUAL, "num_examples": 82, "precision": "fp64"}
    flushed, dropped = measured(**settings), measured(**settings, last_window="drop")
    assert (flushed["num_updates"], flushed["pending_gradient"]) == (3, 0)
    assert dropped["num_updates"] == 2
    assert dropped["pending_gradient"] == pytest.approx(flushed["grad/preclip/total"], rel=1e-12)
    assert dropped["relative_diff"] > 0.05


def test_a_window_longer_than_the_data_is_one_update_and_none_at_all_when_it_is_dropped(measured: Any):
    settings = {"window_sizes": [8] * 8, "num_examples": 24, "precision": "fp64"}
    flushed, dropped = measured(**settings), measured(**settings, last_window="drop")
    assert flushed["num_updates"] == 1
    assert flushed["max_abs_diff"] < TOLERANCES["fp64"]
    assert dropped["num_updates"] == dropped["change_ratio"] == 0


def test_batch_norm_sees_four_small_batches_where_there_was_one_large_one(measured: Any):
    training = measured(window_sizes=EQUAL, norm_layer="batchnorm", precision="fp64")
    frozen = measured(window_sizes=EQUAL, norm_layer="frozen_batchnorm", precision="fp64")
    assert training["norm/num_batches_tracked"] == 4
    assert training["norm/running_var_diff"] > 0.05
    assert frozen["norm/num_batches_tracked"] == frozen["norm/running_var_diff"] == 0


@pytest.mark.parametrize("clip_norm", [None, 0.2])
def test_fp16_gives_the_update_of_fp32_to_its_own_precision(measured: Any, clip_norm: float | None):
    metrics = measured(window_sizes=EQUAL, precision="fp16", clip_norm=clip_norm)
    assert metrics["relative_diff"] < 5e-3  # float16 has an epsilon of 1e-3
    assert metrics["scaler/scale"] == 65536


def test_a_clip_before_the_unscaling_shrinks_the_update_by_the_loss_scale_without_an_error(measured: Any):
    metrics = measured(window_sizes=EQUAL, precision="fp16", clip_norm=0.2, clip_at="before_unscale")
    assert metrics["change_ratio"] == pytest.approx(1 / 65536, rel=0.01)
    assert metrics["num_updates"] == 1


def test_torch_refuses_to_unscale_a_window_twice(lonely: Any):
    # A fact of torch that ours relies on: an update that measured its gradient twice would fail, not shrink in silence.
    config, context = Config(precision="fp16"), lonely()
    trainer = start(config, context, "fp16", Trainer).trainer
    trainer.accumulate(draw_windows(config, context)[0], {})
    trainer.unscale_and_clip()
    with pytest.raises(RuntimeError, match="unscale_"):
        trainer.unscale_and_clip()


def test_a_scale_that_changes_within_a_window_spoils_the_update(lonely: Any):
    class DoublesTheScale(Trainer):
        def accumulate(self, window: Any, hyper: Any) -> Any:
            first, rest = window[:2], window[2:]
            super().accumulate(first, hyper)
            self.scaler.update(self.scaler.get_scale() * 2)
            return super().accumulate(rest, hyper)

        def gradient_shares(self, shares: Any) -> Any:
            return [1 / 4] * len(shares)

    config, context = Config(precision="fp16", window_sizes=EQUAL), lonely()
    window = draw_windows(config, context)[0]
    right, wrong = (start(config, context, "fp16", kind) for kind in (Trainer, DoublesTheScale))
    right.apply(window)
    wrong.apply(window)
    assert (wrong.change() - right.change()).norm() / right.change().norm() > 0.05


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch notices a first step of the schedule that comes too soon
@pytest.mark.parametrize(("scheduler_on", "num_steps"), [("real", 3), ("always", 4), ("micro", 3 * 4 + 3)])
def test_a_skipped_update_is_no_step_of_the_schedule(measured: Any, scheduler_on: str, num_steps: int):
    settings = {"window_sizes": EQUAL, "num_examples": 128, "overflow_at": 1, "precision": "fp16"}
    metrics = measured(**settings, scheduler_on=scheduler_on)
    assert metrics["num_scheduler_steps"] == num_steps
    assert (metrics["num_updates"], metrics["update/skipped_steps"]) == (3, 1)
    assert metrics["scaler/scale"] == 32768
    assert (metrics["relative_diff"] < 5e-3) == (scheduler_on == "real")


def test_nothing_is_compared_before_the_first_update(lonely: Any):
    config = Config(window_sizes=EQUAL, num_examples=64, overflow_at=1)
    first, last = Accumulation().run(config, lonely(log_every=1))
    assert {"relative_diff", "change_ratio", "cosine"} & first.metrics.keys() == set()
    assert (first.metrics["max_abs_diff"], first.metrics["num_updates"]) == (0, 0)
    assert last.metrics["relative_diff"] < 1e-5


def test_the_loss_of_masked_examples_alone_is_zero_and_not_a_quotient_of_zeros():
    masked = Examples(torch.randn(2, 12), torch.tensor([0, 1]), torch.zeros(2), 0)
    network = Network("none", POLICIES["fp32"], torch.Generator().manual_seed(0))
    loss, _ = cross_entropy(network, masked, {})
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in network.parameters())


def test_deviations_can_be_combined(measured: Any):
    metrics = measured(window_sizes=EQUAL, precision="fp64", weighting="none", clip_norm=1e9, clip_at="micro")
    assert metrics["change_ratio"] == pytest.approx(4, abs=1e-4)  # a clip that never acts changes nothing


def test_it_reports_each_asked_window_and_the_last_one(lonely: Any):
    config = Config(window_sizes=[2], num_examples=7)
    assert config.windows == [[2], [2], [2], [1]]
    reports = list(Accumulation().run(config, lonely(log_every=3)))
    assert [report.step for report in reports] == [3, 4]
    assert list(Accumulation().run(config, lonely(stop_after=0))) == []


def test_every_metric_it_reports_is_declared_and_every_declared_one_is_reported(measured: Any):
    reported = measured(precision="fp16", norm_layer="batchnorm")
    assert [name for name in reported if not describe("accumulation").declares(name)] == []
    assert [name for name in METRICS if name not in reported and not name.endswith("*")] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_at": "micro"}, "set clip_norm"),
        ({"clip_at": "before_unscale", "clip_norm": 0.2}, "set precision: fp16"),
        ({"scheduler_on": "always"}, "set overflow_at"),
        ({"last_window": "drop"}, "set num_examples"),
        ({"last_window": "drop", "num_examples": 25}, "set num_examples"),  # four micro-batches, the last one of 1
        ({"norm_layer": "batchnorm", "num_examples": 25}, "micro-batch of 1"),
        ({"overflow_at": 1}, "num_examples makes 1"),
        ({"overflow_at": 3, "num_examples": 52}, "num_examples makes 2"),
        ({"window_sizes": []}, "at least 1 item"),
        ({"window_sizes": [8, 0]}, "greater than or equal to 1"),
        ({"class_weights": [1.0]}, "at least 5 items"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused_with_the_reason(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Config(**settings)
