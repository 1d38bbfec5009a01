"""What `watch` makes of the losses a loop hands over: whose update they are, what they count, what they lose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.trial import Finding, Severity
from tests.numerics.watched_loop import Loop, Net, adamw, findings_of, names, nothing, sgd
from workloads.probes.watch import watch

ORDERS = ("before", "after", "step")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_counts_for_the_update_of_its_backward_pass_whenever_it_is_handed_over(order: str, micro_batches: int):
    heard: dict[int, float] = {}
    loop = Loop(hands=order, micro_batches=micro_batches).watched(every=3)
    see = loop.health._looks._loss_probe.see

    def note(step: int, loss: float) -> Any:
        heard[step] = loss
        return see(step, loss)

    loop.health._looks._loss_probe.see = note
    loop.run(12)
    loop.health.close()
    due = [
        sum(loop.losses[at : at + micro_batches]) / micro_batches for at in range(0, 12 * micro_batches, micro_batches)
    ]
    first = 2  # how a loop hands over is seen at the first update, whose loss may then have been taken too early
    assert [heard[step] for step in range(first, 13)] == pytest.approx(due[first - 1 :], rel=1e-6)  # float32
    assert loop.health.metrics()["train/loss"] == pytest.approx(due[-1], rel=1e-6)


@pytest.mark.parametrize("settings", [
    {}, {"raw": True, "micro_batches": 3}, {"micro_batches": 3}, {"scale": 2.0**16}, {"micro_batches": 2, "scale": 8.0},
    {"scale": 2.0**127}, {"closure": True, "micro_batches": 2}, {"hands": "after", "factor": 40.0},
])  # fmt: skip
def test_losses_that_count_1_each_or_1_together_are_told_nothing(settings: dict[str, Any]):
    assert findings_of(Loop(**{"hands": "before", **settings}), every=1) == []


def test_the_scale_of_a_scaler_that_is_not_handed_over_is_a_note_and_no_factor():
    for clip_norm in (None, 0.1):
        findings = findings_of(Loop(hands="before", scale=2.0**16, clip_norm=clip_norm), every=1, scaler=None)
        assert [(one.check_name, one.severity) for one in findings] == [("loss_factor", Severity.INFO)]


FACTORS: dict[str, tuple[dict[str, Any], Severity, float]] = {
    "times 40": ({"factor": 40.0}, Severity.ERROR, 40.0),
    "times 40, scaled": ({"factor": 40.0, "scale": 2.0**16}, Severity.ERROR, 40.0),
    "times 40, accumulated": ({"factor": 40.0, "micro_batches": 2}, Severity.ERROR, 40.0),
    "divided twice": ({"factor": 1 / 3, "micro_batches": 3, "raw": True}, Severity.WARNING, 1 / 3),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_loss_that_counts_a_multiple_of_itself_is_named_at_the_second_look(name: str):
    settings, severity, factor = FACTORS[name]
    (finding,) = findings_of(Loop(hands="before", **settings))
    assert (finding.check_name, finding.severity, finding.step) == ("loss_factor", severity, 2)
    assert finding.value == pytest.approx(factor, rel=1e-6)  # float32


def test_gradients_cleared_between_micro_batches_are_named_and_a_batch_that_is_thrown_away_is_not():
    (finding,) = findings_of(Loop(hands="before", micro_batches=2, clears_each=True), every=3)
    assert (finding.check_name, finding.severity) == ("accumulation_weights", Severity.ERROR)
    assert finding.step == 3  # of looks at 1, 2 and 3; the first one finds out whom to ask, and it takes two

    loop = Loop(hands="before").watched(every=3)
    for step in range(30):
        if step == 8:  # the loop's own skip: a backward pass without a step
            loop.backward(step, nothing)
        loop.update(step, nothing)
    assert loop.health.findings == []


def trained_by_hand(step: Callable[[Net, Callable[[], Tensor]], None], clears_to_none: bool = True) -> list[Finding]:
    """Findings of 12 updates; `step` leaves a gradient, of losses that are handed over before their backward pass."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    with watch(model, optimizer, every=1, on_finding=nothing) as health:
        for _ in range(12):
            rows = torch.randn(8, 4)

            def loss(rows: Tensor = rows) -> Tensor:
                optimizer.zero_grad(set_to_none=clears_to_none)
                value = (model(rows) - rows.sum(-1, keepdim=True)).square().mean()
                health.loss(value)
                return value

            step(model, loss)
            optimizer.step()
    return health.findings


def climb_first(model: Net, loss: Callable[[], Tensor]) -> None:
    """Sharpness-aware minimisation (Foret et al., 2021): the gradient at the worst place nearby."""
    loss().backward()
    climbs = [0.05 * one.grad for one in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), climbs)
    loss().backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), climbs)


def add_up_by_hand(model: Net, loss: Callable[[], Tensor]) -> None:
    """As gradient surgery does it: each task's gradient by itself, and what is made of them in their place."""
    parts = []
    for _ in range(2):
        loss().backward()
        parts.append([one.grad.clone() for one in model.parameters()])
    for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
        parameter.grad = sum(gradients) / 2


def forget_the_first(model: Net, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    loss().backward()


@pytest.mark.parametrize("clears_to_none", [True, False])
def test_a_gradient_that_was_used_before_it_was_cleared_is_not_lost(clears_to_none: bool):
    assert trained_by_hand(climb_first, clears_to_none) == []
    assert trained_by_hand(add_up_by_hand, clears_to_none) == []
    (finding,) = trained_by_hand(forget_the_first, clears_to_none)
    assert (finding.check_name, finding.severity) == ("accumulation_weights", Severity.ERROR)


def test_an_adversarys_cleared_gradients_are_not_those_of_the_watchs_own_losses():
    torch.manual_seed(0)
    critic, generator = Net(), nn.Linear(4, 4)
    judging, making = adamw(critic), adamw(generator)
    with watch(critic, judging, every=1) as one, watch(generator, making, every=1) as other:
        for _ in range(8):
            rows = torch.randn(8, 4)
            critic.zero_grad()
            for loss in (F.softplus(-critic(rows)).mean(), F.softplus(critic(generator(rows).detach())).mean()):
                one.loss(loss)
                loss.backward()
            judging.step()
            generator.zero_grad()
            loss = F.softplus(-critic(generator(rows))).mean()
            other.loss(loss)
            loss.backward()
            making.step()
    assert one.findings + other.findings == []


def test_parts_of_one_loss_may_each_be_handed_over():
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    with watch(model, optimizer, every=1) as health:
        for _ in range(5):
            optimizer.zero_grad()
            task, size = model(torch.randn(8, 4)).square().mean(), model.last.weight.square().sum()
            health.loss(task)
            health.loss(size)
            (task + 0.1 * size).backward()
            optimizer.step()
    assert health.findings == []


def test_a_training_loss_far_below_the_held_out_one_is_named_and_one_below_it_is_not():
    def told(held_out: float) -> list[Finding]:
        loop = Loop().watched()
        loop.run(20)
        loop.health.held_out(loop.losses[-1] * held_out)
        assert loop.health.metrics()["val/loss"] == pytest.approx(loop.losses[-1] * held_out, nan_ok=True)
        return loop.health.findings

    assert told(held_out=2.0) == []
    (finding,) = told(held_out=50.0)
    assert (finding.check_name, finding.severity) == ("loss_too_good", Severity.WARNING)
    assert names(told(held_out=math.nan)) == ["nonfinite_update"]


def test_the_end_of_the_watch_hears_the_last_losses_and_looks_at_the_parameters():
    loop = Loop().watched().run(25)
    assert loop.health.metrics()["train/loss"] == pytest.approx(loop.losses[19])
    loop.health.close()
    assert loop.health.metrics()["train/loss"] == pytest.approx(loop.losses[24])
    assert loop.health.findings == []

    broken = Loop(optimize=lambda model: sgd(model, lr=1e-3)).watched().run(24)
    broken.optimizer.param_groups[0]["lr"] = math.inf
    broken.update(24, nothing)  # no look falls on it
    broken.health.close()
    errors = [one for one in broken.health.findings if one.severity == Severity.ERROR]
    assert [(one.check_name, one.step) for one in errors] == [("nonfinite_update", 25)]
    assert "parameter values" in errors[0].message
    assert names(broken.health.findings)[-1:] == ["nonfinite_update"]


def test_a_head_that_is_used_now_and_then_is_no_error_and_one_that_never_is_becomes_one():
    class Heads(nn.Module):
        def __init__(self, every: int) -> None:
            super().__init__()
            self.body, self.rare, self.turn, self.every = Net(), nn.Linear(4, 1), 0, every

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            return self.body(rows) + (0 if self.turn % self.every else self.rare(rows))

    def severities(every: int) -> list[Severity]:
        loop = Loop(make=lambda: Heads(every)).watched()
        for step in range(110):
            loop.update(step % 30, nothing)
        assert set(names(loop.health.findings)) == {"no_gradient"}
        return [one.severity for one in loop.health.findings]

    assert severities(every=50) == [Severity.WARNING]
    assert severities(every=1000) == [Severity.WARNING, Severity.ERROR]
