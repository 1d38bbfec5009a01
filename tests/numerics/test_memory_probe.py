"""The memory probe counts what autograd keeps, against a formula and against the allocations themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from orchestrator.trial import Severity
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt, mean_cross_entropy
from workloads.engine.alone import Alone
from workloads.engine.precision import POLICIES
from workloads.layers.transformer import GPT, GPTShape
from workloads.memory.formula import predict_saved_bytes
from workloads.memory.saved import sections_of
from workloads.moe_gpt.config import Config as MoeConfig
from workloads.moe_gpt.train import MoeGpt
from workloads.probes.catalogue import Thresholds
from workloads.probes.memory import MemoryProbe, unexplained

SMALL: dict[str, Any] = {"vocabulary": 50, "context": 16, "depth": 2, "heads": 4, "width": 32, "tied": True}


def saved_by(probe: MemoryProbe, update: Callable[[], Any]) -> dict[str, int]:
    """By section; `total` over all."""
    with probe.around(1):
        update()
    list(probe.updated(SimpleNamespace(step=1)))
    return {
        name.removeprefix("memory/saved_bytes").lstrip("/") or "total": int(count)
        for name, count in probe.measured().items()
    }


def update_of(model: GPT, padded: bool = False, num_rows: int = 3) -> Callable[[], None]:
    tokens_BT = torch.randint(0, 50, (num_rows, 16), generator=torch.Generator().manual_seed(0))
    valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool) if padded else None

    def update() -> None:
        logits_BTV, _ = model(tokens_BT, valid_BT)
        mean_cross_entropy(logits_BTV, tokens_BT.clone(), valid_BT).backward()

    return update


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("settings", "padded"),
    [
        ({}, False),
        ({}, True),
        ({"tied": False}, False),
        ({"dropout": 0.1}, False),
        ({"checkpointing": True}, True),
        ({"checkpointing": True, "dropout": 0.1}, False),
        ({"residual": False}, False),
        ({"depth": 1, "heads": 1, "width": 48}, False),
    ],
)
def test_a_dense_model_keeps_what_the_formula_says_to_the_byte(settings: dict[str, Any], padded: bool, precision: str):
    shape = GPTShape(**SMALL | settings)
    model = GPT(shape, POLICIES[precision], torch.Generator().manual_seed(0))
    predicted = predict_saved_bytes(shape, POLICIES[precision], 3, 16, padded)
    measured = saved_by(MemoryProbe(Thresholds(), model, sections_of(model)), update_of(model, padded))
    assert measured.pop("total") == sum(predicted.values())
    if not (padded and shape.checkpointing):  # there the mask counts as the last block's, which is handed it
        assert measured == predicted


class Blocks(nn.Module):
    """Six layers, each run by `run`."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = self.run(layer, rows)
        return rows


def test_a_storage_counts_once_and_a_parameter_never():
    model = Blocks()
    rows = torch.randn(5, 8)
    measured = saved_by(MemoryProbe(Thresholds(), model), lambda: model(rows).sum().backward())
    # Each layer keeps what it reads, which the one before has written; the last one keeps its own output too.
    assert measured == {**{f"layers.{layer}": 160 for layer in range(5)}, "layers.5": 320, "total": 7 * 5 * 8 * 4}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_that_is_recomputed_keeps_its_input_only(use_reentrant: bool):
    model, rows = Blocks(partial(checkpoint, use_reentrant=use_reentrant)), torch.randn(5, 8, requires_grad=True)
    measured = saved_by(MemoryProbe(Thresholds(), model), lambda: model(rows).sum().backward())
    assert measured == {"total": 6 * 160, **{f"layers.{layer}": 160 for layer in range(6)}}


def test_of_an_updates_micro_batches_the_largest_counts():
    model = Blocks()

    def update() -> None:
        for num_rows in (2, 5, 3):
            model(torch.randn(num_rows, 8)).sum().backward()

    assert saved_by(MemoryProbe(Thresholds(), model), update)["total"] == 7 * 5 * 8 * 4


def test_nothing_lives_longer_for_being_counted():
    model, alive = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), []

    def update() -> None:
        hidden = model(torch.randn(5, 8))
        alive.append(weakref.ref(hidden.untyped_storage()))
        hidden.sum().backward()
        del hidden
        alive.append(alive[0]() is not None)

    gc.disable()
    try:
        saved_by(MemoryProbe(Thresholds(), model), update)
        assert alive[1] is False
    finally:
        gc.enable()


def test_a_graph_that_is_kept_on_is_unexplained_and_the_right_amount_is_not():
    predicted = {"block0": 1_000_000, "loss": 500_000}
    assert list(unexplained(predicted, predicted, 0.2, 1)) == []
    assert list(unexplained({"block0": 1_100_000, "loss": 500_000}, predicted, 0.2, 1)) == []
    (more,) = unexplained({"block0": 2_000_000, "loss": 500_000}, predicted, 0.2, 1)
    (less,) = unexplained({"loss": 500_000}, predicted, 0.2, 1)
    assert (more.check_name, more.severity, more.value) == ("memory_unexplained", Severity.INFO, 2_500_000.0)
    assert "of block0 it keeps 2 instead of 1" in more.message
    assert "of block0 it keeps 0 instead of 1" in less.message


TINY: dict[str, Any] = {
    "steps": 4, "batch_size": 2, "accumulation_steps": 2, "depth": 2, "width": 16, "heads": 2, "context": 16,
    "num_held_out_windows": 2, "device": "cpu",
}  # fmt: skip


class Remembering:
    """A workload with the probe beside its own."""

    predicts = False

    def probes(self, config: Any, model: nn.Module, thresholds: Any) -> list[Any]:
        predicted = predict_saved_bytes(
            model.shape, model.precision, config.batch_size, config.context, config.padding > 0
        )
        memory = MemoryProbe(thresholds, model, sections_of(model), predicted if self.predicts else None)
        return [*super().probes(config, model, thresholds), memory]


class RememberingChars(Remembering, CharGpt):
    predicts = True


class RememberingExperts(Remembering, MoeGpt):
    pass


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "fp16", "padding": 0.5, "dropout": 0.1}, {"checkpointing": True}]
)
def test_in_a_run_it_is_measured_once_explained_and_changes_no_number(settings: dict[str, Any]):
    config = CharConfig(**TINY, **settings)
    context = Alone(log_every=2)
    reports = list(RememberingChars().run(config, context))
    plain = list(CharGpt().run(config, Alone(log_every=2)))
    assert [one.metrics["train/loss"] for one in reports] == [one.metrics["train/loss"] for one in plain]
    assert context.findings == []
    first, later = (one.metrics for one in reports)
    # The tokens are a view of rows one token longer, and fp16 keeps the loss scale.
    assert 0 <= first["memory/unexplained_bytes"] <= 8 * config.batch_size + 4
    assert first["memory/saved_bytes"] == sum(
        count for name, count in first.items() if name.startswith("memory/saved_bytes/")
    )
    assert "memory/peak_bytes" not in first  # there is no GPU here
    assert not any(name.startswith("memory/") for name in later)


def test_a_mixture_of_experts_is_counted_too_and_changes_no_number():
    config = MoeConfig(**TINY)
    reports = [list(kind().run(config, Alone(log_every=2))) for kind in (RememberingExperts, MoeGpt)]
    assert len({tuple(one.metrics["train/loss"] for one in run) for run in reports}) == 1
    metrics = reports[0][0].metrics
    assert metrics["memory/saved_bytes/block1"] > metrics["memory/saved_bytes/readout"] > 0


def test_a_run_whose_attention_is_written_out_is_told():
    context = Alone(log_every=2)
    with sdpa_kernel(SDPBackend.MATH):
        list(RememberingChars().run(CharConfig(**{**TINY, "context": 64}), context))
    finding, again = context.findings  # the workload has such a probe too
    assert again.message == finding.message
    assert (finding.check_name, finding.step) == ("memory_unexplained", 1)
    assert "of block" in finding.message
