"""The scalar engine against closed forms, torch's tensors and micrograd, and what `=` for `+=` does to it."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from workloads.engine.random import generator
from workloads.scalar_autograd.check import ScalarAutograd, by_us
from workloads.scalar_autograd.config import METRICS, Config
from workloads.scalar_autograd.engine import Value, gradients, topological_order
from workloads.scalar_autograd.expressions import expression_of

SEEDS = range(20)


def metrics_of(context: Any, **settings: Any) -> dict[str, float]:
    (report,) = ScalarAutograd().run(Config(**settings), context)
    return dict(report.metrics)


@pytest.mark.parametrize(("accumulate", "gradient"), [("add", -2.0), ("assign", -6.0)])
def test_a_number_used_twice_keeps_both_contributions_only_if_they_are_added(
    lonely: Any, accumulate: str, gradient: float
):
    metrics = metrics_of(lonely(), accumulate=accumulate)
    assert metrics["num_nodes"] == 7
    assert metrics["output"] == 8
    assert metrics["gradient/a"] == gradient  # whole numbers: exact in every dtype
    assert (metrics["gradient/b"], metrics["gradient/c"]) == (4, 2)
    assert metrics["max_abs_diff"] == -2 - gradient


def test_an_assigned_gradient_is_found_and_an_added_one_raises_no_alarm(lonely: Any):
    right, wrong = lonely(), lonely()
    metrics_of(right)
    metrics_of(wrong, accumulate="assign")
    assert right.findings == []
    assert [finding.check_name for finding in wrong.findings] == ["wrong_gradient"]


def test_a_small_network_has_the_published_size(lonely: Any):
    metrics = metrics_of(lonely(), expression="mlp")
    assert (metrics["num_parameters"], metrics["num_nodes"]) == (41, 394)


def tensor_gradients(config: Config, context: Any, dtype: torch.dtype) -> list[float]:
    """The same network as matrices, written apart: one linear map a layer, one squared error over all rows."""
    numbers = torch.tensor(expression_of(config, context).leaves, dtype=dtype)
    source = generator(context, "data")
    hidden = torch.randn(config.num_examples, config.num_inputs, dtype=torch.float64, generator=source).to(dtype)
    layers = []
    for width in config.layers:
        own, numbers = numbers.split([width * (hidden.shape[-1] + 1), len(numbers) - width * (hidden.shape[-1] + 1)])
        layers.append(own.view(width, -1).clone().requires_grad_())
        hidden = F.linear(hidden, layers[-1][:, :-1], layers[-1][:, -1])
        hidden = hidden.relu() if len(layers) < len(config.layers) else hidden
    targets = torch.tensor([1.0, -1.0] * config.num_examples, dtype=dtype)[: config.num_examples]
    F.mse_loss(hidden.squeeze(-1), targets, reduction="sum").backward()
    return torch.cat([layer.grad.reshape(-1) for layer in layers]).tolist()


# Our numbers are float64. The published bound for float32 is 1e-6 of the seed's largest gradient (seen: 3e-7).
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_a_network_are_those_of_matrices(lonely: Any, seed: int, dtype: torch.dtype, bound: float):
    config, context = Config(expression="mlp"), lonely(seed)
    ours = by_us(expression_of(config, context), "add").gradients
    theirs = tensor_gradients(config, context, dtype)
    largest = max(map(abs, theirs))
    assert largest > 0  # or any engine would pass
    assert max(abs(mine - other) for mine, other in zip(ours, theirs, strict=True)) < bound * largest


@pytest.mark.parametrize(("reference", "bound"), [("torch32", 1e-6), ("torch64", 1e-12), ("micrograd", 1e-12)])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_workload_agrees_with_each_reference(lonely: Any, seed: int, reference: str, bound: float):
    context = lonely(seed)
    metrics = metrics_of(context, expression="mlp", reference=reference)
    assert metrics["grad/max_abs"] > 0
    assert metrics["relative_diff"] < bound
    assert context.findings == []


def test_both_scalar_engines_build_the_same_number_of_nodes(lonely: Any):
    engine = pytest.importorskip("micrograd.engine")
    expression = expression_of(Config(expression="mlp"), lonely())
    seen, ahead = set(), [expression.build([engine.Value(number) for number in expression.leaves])]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead.extend(node._prev)
    assert len(seen) == by_us(expression, "add").num_nodes


def test_a_comparison_of_nothing_but_zeros_is_told(lonely: Any):
    context = lonely()
    metrics = metrics_of(context, c=-100.0)  # relu is off: no gradient reaches anything
    assert metrics["grad/max_abs"] == metrics["max_abs_diff"] == 0
    assert math.isnan(metrics["relative_diff"])
    assert [finding.check_name for finding in context.findings] == ["vacuous_comparison"]


def test_a_missing_package_is_named_with_its_command(lonely: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "micrograd.engine", None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps micrograd"):
        metrics_of(lonely(), reference="micrograd")


def test_a_chain_longer_than_pythons_recursion_limit_is_walked():
    leaf = Value(1.0)
    total = sum((leaf for _ in range(5000)), Value(0.0))
    assert gradients(total)[leaf] == 5000


def test_every_number_comes_after_its_inputs_and_once():
    a, b = Value(2.0), Value(-3.0)
    output = (a * b + a).relu() ** 2 - b
    order = topological_order(output)
    assert len(order) == len(set(order))
    assert all(order.index(source) < order.index(node) for node in order for source in node.inputs)


def test_derivatives_of_powers_and_differences_are_the_textbooks():
    x = Value(3.0)
    gradient = gradients(x**3 - 2 * x + (-x) ** 2)
    assert gradient[x] == 3 * 3**2 - 2 + 2 * 3


def test_a_nan_is_not_lost_in_a_relu():
    assert math.isnan(Value(math.nan).relu().data)


def test_every_declared_metric_is_reported(lonely: Any):
    assert set(metrics_of(lonely())) == set(METRICS)
    assert set(metrics_of(lonely(), expression="mlp")) == {name for name in METRICS if not name.startswith("gradient/")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expression": "mlp", "layers": []}, "at least 1 item"),
        ({"expression": "mlp", "layers": [4, 0, 1]}, "greater than or equal to 1"),
        ({"expression": "mlp", "num_examples": 0}, "greater than or equal to 1"),
        ({"a": math.nan}, "finite"),
        ({"accumulate": "add_up"}, "'add' or 'assign'"),
        ({"layers": [8, 1]}, "layers does nothing with expression: product"),
        ({"expression": "mlp", "a": 3.0}, "a does nothing with expression: mlp"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused_with_the_reason(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Config(**settings)
