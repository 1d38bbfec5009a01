"""Gradients of deep stacks against a backward pass by hand and published figures; what a dtype loses; who can learn.

The bands are those of an independent reference over six seeds, widened for other seeds; beside them what seeds 0, 1, 2
gave here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from orchestrator.workload import describe
from workloads.engine.random import generator
from workloads.residual_stack.config import Config
from workloads.residual_stack.stack import TanhStack
from workloads.residual_stack.train import ResidualStack, draw_regression

SEEDS = (0, 1, 2)
SMALL: dict[str, Any] = {"task": "train", "width": 32}

Metrics = dict[str, float]


@pytest.fixture
def outcome(lonely: Any) -> Callable[..., Metrics]:
    """The last report's metrics of a config."""

    def final(**settings: Any) -> Metrics:
        config = Config(**settings)
        *_, last = ResidualStack().run(config, lonely(config.seed))
        return dict(last.metrics)

    return final


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({"scale": 0.5, "depth": 30}, 2e-9, 2e-8),  # 5.2e-9 to 6.0e-9
        ({"scale": 0.5, "depth": 60}, 2e-18, 5e-17),  # 7.1e-18 to 1.0e-17
        ({"scale": 2.0, "depth": 60}, 3e3, 1.5e4),  # 6.0e3 to 8.6e3
        ({"scale": 2.0, "depth": 60, "residual": True}, 600, 1500),  # 930 to 1070
    ],
)
def test_the_gradient_vanishes_or_explodes_with_depth_as_published(
    outcome: Callable[..., Metrics], settings: dict[str, Any], low: float, high: float, seed: int
):
    assert low < outcome(**settings, seed=seed)["grad/input_ratio"] < high


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("depth", [2, 10, 30, 60])
def test_in_a_residual_stack_the_first_layer_never_gets_less_than_the_last(
    outcome: Callable[..., Metrics], scale: float, depth: int
):
    assert outcome(scale=scale, depth=depth, residual=True)["grad/input_ratio"] >= 1


@pytest.mark.parametrize("loss", ["mean_square", "sum", "target"])
def test_weights_gradients_do_not_show_the_vanishing(outcome: Callable[..., Metrics], loss: str):
    metrics = outcome(loss=loss, depth=30)
    assert metrics["grad/input_ratio"] < 2e-8
    assert (
        0.5 < metrics["grad/weight_ratio"] < 4
    )  # the last layers' inputs have shrunk as much as the first's gradients


@pytest.mark.parametrize("loss", ["sum", "target"])
def test_another_loss_moves_the_ratio_by_less_than_an_order(outcome: Callable[..., Metrics], loss: str):
    assert 5e-10 < outcome(loss=loss, depth=30)["grad/input_ratio"] < 5e-9  # published for both: 1e-9 to 2e-9


@pytest.mark.parametrize("residual", [False, True])
def test_every_norm_is_that_of_a_backward_pass_written_by_hand(
    lonely: Any, outcome: Callable[..., Metrics], residual: bool
):
    metrics = outcome(depth=5, width=16, scale=1.5, residual=residual, batch_size=8)
    weights = TanhStack(16, 5, 1.5, residual, generator(lonely(), "init")).double().weights
    inputs = torch.randn((2, 8, 16), generator=generator(lonely(), "data"))[0].double()
    expected = backward_by_hand(inputs.numpy(), [weight.detach().numpy() for weight in weights], residual)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)  # float64 on both sides


def backward_by_hand(state: Any, weights: list[Any], residual: bool) -> Metrics:
    """Norms of d mean(h_L^2) by numpy: dh_i = (dh_(i+1) (1 - tanh^2)) W^T, and dh_(i+1) beside it if residual."""
    states, changes = [state], []
    for weight in weights:
        changes.append(np.tanh(states[-1] @ weight))
        states.append(changes[-1] + residual * states[-1])
    gradient = 2 * states[-1] / states[-1].size
    norms = {}
    for layer in reversed(range(len(weights))):
        inner = gradient * (1 - changes[layer] ** 2)
        norms[f"grad/weight/layer{layer}"] = float(np.linalg.norm(states[layer].T @ inner))
        gradient = inner @ weights[layer].T + residual * gradient
        norms[f"grad/input/layer{layer}"] = float(np.linalg.norm(gradient))
    return norms


def test_initial_weights_have_the_asked_variance():
    stack = TanhStack(256, 8, 0.5, False, torch.Generator().manual_seed(0))
    values = torch.cat([weight.detach().flatten() for weight in stack.weights]).double()
    assert values.std() * 16 == pytest.approx(0.5, rel=0.005)  # 5 standard errors of 524,288 draws


@pytest.mark.parametrize(
    ("settings", "check_name"),
    [
        ({"dtype": "float64"}, None),
        ({"dtype": "float32", "depth": 30}, None),
        ({"dtype": "float32"}, "gradient_underflow"),
        ({"dtype": "bfloat16"}, "gradient_underflow"),
        ({"dtype": "float16", "depth": 30}, "gradient_underflow"),
        ({"dtype": "float16", "depth": 30, "scale": 20.0, "loss": "sum", "residual": True}, "gradient_overflow"),
    ],
)
def test_a_ratio_that_the_dtype_spoils_comes_with_a_warning_and_a_sound_one_without(
    lonely: Any, settings: dict[str, Any], check_name: str | None
):
    context = lonely()
    list(ResidualStack().run(Config(**settings), context))
    assert [finding.check_name for finding in context.findings] == ([check_name] if check_name else [])


def test_an_underflow_is_reported_as_what_is_left_and_never_filled_in(outcome: Callable[..., Metrics]):
    float32, bfloat16, float16 = (outcome(dtype=dtype) for dtype in ("float32", "bfloat16", "float16"))
    exact = outcome()
    assert exact["grad/underflow_share"] == 0
    # Norms in float64 still see the denormal numbers, whose squares are 0 in float32.
    assert float32["grad/input_ratio"] == pytest.approx(exact["grad/input_ratio"], rel=1e-3)
    assert float32["grad/underflow_share"] > 0.01
    assert bfloat16["grad/input_ratio"] == 0  # the first layer's gradient is gone,
    assert math.isnan(float16["grad/input_ratio"])  # here the last layer's too
    assert float16["grad/underflow_share"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1}, "lr does nothing with task: gradients"),
        ({"precision": "bf16"}, "precision does nothing with task: gradients"),
        ({"task": "train", "dtype": "float32"}, "dtype does nothing with task: train"),
        ({"depth": 0}, "greater than or equal to 1"),
        ({"task": "train", "precision": "bf16-softmax"}, "'fp32', 'bf16' or 'fp16'"),
    ],
)
def test_a_field_without_effect_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Config(**settings)


@pytest.mark.parametrize("settings", [{"depth": 2}, {**SMALL, "depth": 2, "steps": 2, "precision": "fp16"}])
def test_every_metric_it_reports_is_declared(outcome: Callable[..., Metrics], settings: dict[str, Any]):
    workload = describe("residual_stack")
    assert all(workload.declares(name) for name in outcome(**settings))


def test_the_task_has_unit_variance_and_a_linear_map_explains_little_of_it(lonely: Any):
    data = draw_regression(lonely())
    inputs, targets = (tensor.double() for tensor in data.training)
    assert targets.var() == pytest.approx(1, abs=0.05)
    linear = torch.linalg.lstsq(inputs, targets).solution
    left = (data.held_out.targets_NO.double() - data.held_out.inputs_NI.double() @ linear).square().mean()
    explained = 4 * 2 * math.exp(-4) / (1 - math.exp(-8))  # E[z sin 2z]^2 / var(sin 2z), z ~ N(0, 1)
    assert left == pytest.approx(1 - explained, abs=0.05)
    assert torch.cdist(data.held_out.inputs_NI, data.training.inputs_NI).min() > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_sixty_layers_learn_only_if_they_are_residual(outcome: Callable[..., Metrics], seed: int):
    plain, residual = (outcome(**SMALL, steps=200, residual=residual, seed=seed) for residual in (False, True))
    assert plain["val/mse"] > 0.9  # 1 is the variance of the targets
    assert residual["val/mse"] < 0.4  # 0.08 to 0.12


def test_a_shallow_plain_stack_learns_as_well_as_a_residual_one(outcome: Callable[..., Metrics]):
    errors = [outcome(**SMALL, depth=4, residual=residual)["val/mse"] for residual in (False, True)]
    assert max(errors) < 0.1


def test_in_training_every_layer_has_its_gradient_norm_and_the_plain_one_is_flat_at_nothing(
    outcome: Callable[..., Metrics],
):
    metrics = outcome(**SMALL, depth=30, steps=1)
    norms = [metrics[f"grad/preclip/layer{layer}"] for layer in range(30)]
    assert max(norms) < 1e-6 < 1e-2 < metrics["grad/preclip/readout"]
    squares = [value**2 for name, value in metrics.items() if name.startswith("grad/preclip/") and "total" not in name]
    assert math.sqrt(sum(squares)) == pytest.approx(metrics["grad/preclip/total"], rel=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_a_residual_stack_as_float32_does(outcome: Callable[..., Metrics], precision: str):
    settings: dict[str, Any] = {**SMALL, "depth": 8, "residual": True, "steps": 200}
    rounded, exact = outcome(**settings, precision=precision)["val/mse"], outcome(**settings)["val/mse"]
    assert rounded < 1.5 * exact < 0.1  # x 1.02 to 1.26 of 0.02 to 0.04 over three seeds


def test_a_whole_batch_and_its_halves_accumulated_train_alike(outcome: Callable[..., Metrics]):
    settings: dict[str, Any] = {**SMALL, "depth": 4, "residual": True, "steps": 20}
    whole, halves = outcome(**settings), outcome(**settings, batch_size=16, accumulation_steps=2)
    assert halves["val/mse"] == pytest.approx(whole["val/mse"], rel=1e-4)  # float32 sums in another order
