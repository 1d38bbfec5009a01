"""What `watch` sees of loss scales and clips: skips, series, gradients applied while scaled, clips of every kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.trial import Finding, Severity
from tests.numerics.watched_loop import Loop, adamw, findings_of, names, nothing, sgd
from workloads.probes.watch import watch

FUSED: dict[str, Any] = {"optimize": lambda model: adamw(model, fused=True), "unscales": False, "clip_norm": None}


def overflow(step: int, model: nn.Module) -> None:
    """Two infinite gradients in a row, once the scale has settled."""
    if step in (24, 25):
        model.last.weight.grad.fill_(math.inf)


def lone_overflow(step: int, model: nn.Module) -> None:
    if step == 24:
        model.last.weight.grad.fill_(math.inf)


@pytest.mark.parametrize("settings", [{"unscales": False, "clip_norm": None}, FUSED])
def test_two_updates_skipped_in_a_row_are_named_and_a_lone_one_is_counted(settings: dict[str, Any]):
    sick, healthy = (Loop(scale=1024.0, spoil=spoil, **settings) for spoil in (overflow, lone_overflow))
    (finding,) = findings_of(sick)
    assert (finding.check_name, finding.severity, finding.step) == ("scaler_skips", Severity.WARNING, 26)
    assert finding.value == 2.0
    assert findings_of(healthy) == []
    assert sick.health.step == healthy.health.step == 30  # skipped updates count
    for loop, num_skipped in ((sick, 2.0), (healthy, 1.0)):
        metrics = loop.health.metrics()
        assert metrics["scaler/skipped_steps"] == num_skipped
        assert metrics["scaler/scale"] == loop.scaler.get_scale() == 1024.0 / 2**num_skipped
        assert metrics["grad/overflow_share"] == 0.0


def test_skips_are_told_from_a_scale_that_grows_at_the_same_time():
    loop = Loop(unscales=False, clip_norm=None, scale=64.0, spoil=overflow)
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=6)  # 24 applied: it grows and is halved
    assert names(findings_of(loop)) == ["scaler_skips"]
    assert loop.health.metrics()["scaler/skipped_steps"] == 2.0


def test_a_training_that_gets_no_update_through_any_more_is_told_without_a_step():
    loop = Loop(unscales=False, clip_norm=None, scale=2.0**16, spoil=lambda step, model: (
        model.last.weight.grad.fill_(math.inf) if step >= 22 else None
    ))  # fmt: skip
    loop.watched()
    for step in range(100):
        loop.update(min(step, 29), nothing)
    assert names(loop.health.findings) == ["scaler_skips"]


def test_a_gradient_that_float16_loses_is_named_and_one_that_a_scale_has_saved_is_not():
    faint: dict[str, Any] = {"factor": 1e-5, "clip_norm": None}
    (finding,) = findings_of(Loop(scale=1.0, **faint), every=1)
    assert (finding.check_name, finding.severity) == ("gradient_underflow", Severity.WARNING)
    assert finding.value > 0.2
    for settings in ({}, {"clip_norm": 1e-7}, {"unscales": False}, {**FUSED, "clip_norm": None}):
        loop = Loop(scale=2.0**16, **{**faint, **settings})
        assert findings_of(loop, every=1) == []
        assert loop.health.metrics()["grad/underflow_share"] < 0.05


@pytest.mark.parametrize("watching", [{}, {"clip_norm": 1e9}, {"clip_norm": math.inf}])
def test_gradients_that_are_applied_while_still_scaled_are_named(watching: dict[str, Any]):
    (finding,) = findings_of(Loop(scale=64.0, steps_plainly=True, unscales=False, clip_norm=None), **watching)
    assert (finding.check_name, finding.severity, finding.step) == ("loss_factor", Severity.ERROR, 1)
    assert finding.value == pytest.approx(64.0, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [0.01, 10.0])  # below the true norm, so that the applied one is right, and above
def test_a_clip_of_scaled_gradients_that_are_applied_as_they_are_is_named(clip_norm: float):
    loop = Loop(scale=2.0**16, steps_plainly=True, unscales=False, clip_norm=clip_norm)
    (finding,) = findings_of(loop, clip_norm=clip_norm)
    assert (finding.check_name, finding.severity, finding.step) == ("clip_order", Severity.ERROR, 1)


def test_unscaling_by_hand_is_healthy():
    def divide(step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad /= 64.0

    loop = Loop(scale=64.0, steps_plainly=True, unscales=False, clip_norm=None, spoil=divide, hands="before")
    assert findings_of(loop, every=1) == []


@pytest.mark.parametrize("clip_norm", [1e-3, 1e-5, 0.3])
@pytest.mark.parametrize("told", [True, False])
def test_a_tight_clip_after_unscaling_is_healthy(clip_norm: float, told: bool):
    loop = Loop(scale=2.0**16, clip_norm=clip_norm)
    # torch divides by the norm plus 1e-6
    assert findings_of(loop, every=1, clip_norm=clip_norm if told else None) == []


def test_clips_of_parts_and_divisions_by_hand_are_notes_that_name_no_scaler_as_the_cause():
    def each(step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.01)

    def divide(step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad /= 8

    def told(spoil: Any, clip_norm: float | None) -> Finding:
        (finding,) = findings_of(Loop(clip_norm=None, spoil=spoil), clip_norm=clip_norm)
        assert finding.severity == Severity.INFO
        return finding

    assert "each layer by itself" in told(each, clip_norm=0.1).advice
    assert "number of micro-batches" in told(divide, clip_norm=None).advice
    assert findings_of(Loop(clip_norm=None, spoil=each)) == []


def test_noise_after_the_clip_is_a_note_and_a_missing_clip_an_error():
    def make_private(step: int, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad += 0.3 * torch.randn_like(parameter)

    (finding,) = findings_of(Loop(clip_norm=0.1, spoil=make_private), clip_norm=0.1)
    assert (finding.check_name, finding.severity) == ("clip_order", Severity.INFO)
    assert finding.value > finding.threshold
    assert "noise" in finding.advice
    (finding,) = findings_of(Loop(clip_norm=None), clip_norm=0.1)
    assert (finding.check_name, finding.severity) == ("clip_order", Severity.ERROR)


@pytest.mark.parametrize("clip_norm", [7.8125, 0.09766])  # times the scale 8000 and 100, to which nobody clips
def test_a_clip_that_is_round_only_by_chance_when_it_is_scaled_is_healthy(clip_norm: float):
    loop = Loop(scale=1024.0, clip_norm=clip_norm, factor=1e4)
    assert findings_of(loop, every=1) == []
    assert loop.health.metrics()["grad/clipped_share"] == 1.0


def test_a_clip_before_a_scaler_that_was_not_handed_over_is_named_all_the_same():
    findings = findings_of(Loop(scale=2.0**16, clips_first=True, clip_norm=0.1), scaler=None, clip_norm=0.1)
    assert [(one.check_name, one.severity) for one in findings] == [("clip_order", Severity.ERROR)]
    assert "65536" in findings[0].message


@pytest.mark.parametrize("steps_first", [0, 1])
def test_one_scaler_of_two_optimisers_skips_for_the_one_whose_gradient_is_infinite(steps_first: int):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
    optimizers = [sgd(part) for part in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watches = [
        watch(model, optimizer, scaler=scaler, blocks={"part": list(part.parameters())}, every=1)
        for optimizer, part in zip(optimizers, model, strict=True)
    ]
    for step in range(30):
        for optimizer, part in zip(optimizers, model, strict=True):
            optimizer.zero_grad()
            scaler.scale(part(torch.randn(8, 4)).square().mean()).backward()
        if step in (25, 26):
            model[0].weight.grad.fill_(math.inf)
        for optimizer in optimizers if steps_first == 0 else reversed(optimizers):
            scaler.step(optimizer)
        scaler.update()
    assert names(watches[0].findings) == ["scaler_skips"]
    assert watches[1].findings == []
    assert [one.metrics()["scaler/skipped_steps"] for one in watches] == [2.0, 0.0]
    assert [one.step for one in watches] == [30, 30]
