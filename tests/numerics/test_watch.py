"""`watch` measures what a plain loop would measure by hand, changes no number, names diseases and no healthy loop."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.trial import Finding, Severity
from tests.numerics.watched_loop import (
    UPDATES,
    Loop,
    Net,
    Odd,
    adamw,
    checkpointed,
    fill_with_noise,
    findings_of,
    names,
    sgd,
)
from workloads.probes.applied import hidden_scale
from workloads.probes.blocks import named_blocks
from workloads.probes.watch import watch

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "no clip": {"clip_norm": None},
    "cleared after the step": {"clears": "step"},
    "cleared to zeros": {"to_none": False},
    "cleared after the forward pass": {"clears": "after"},
    "scaled": {"scale": 2.0**16},
    "scaled, never unscaled by hand": {"scale": 2.0**16, "unscales": False, "clip_norm": None},
    "scaled and accumulated": {"scale": 2.0**10, "micro_batches": 3},
    "accumulated": {"micro_batches": 3},
    "fused": {"optimize": lambda model: adamw(model, fused=True)},
    "fused and scaled": {"optimize": lambda model: adamw(model, fused=True), "scale": 2.0**16},
    "fused, scaled, never unscaled by hand": {
        "optimize": lambda model: adamw(model, fused=True),
        "scale": 2.0**16,
        "unscales": False,
        "clip_norm": None,
    },
    "checkpointed": {"make": checkpointed(False)},
    "checkpointed, reentrant": {"make": checkpointed(True), "micro_batches": 2},
    "shared, sparse, complex, frozen, bare": {"make": Odd, "optimize": sgd, "clip_norm": None, "micro_batches": 2},
    "compiled": {"compiled": True},
    "with a closure": {"closure": True},
}


# No gradient's norm is near a rounding limit; float32 absolute values of complex numbers are good to 1e-7.
SAME = 1e-6


def norms_by_hand(loop: Loop) -> dict[str, float]:
    """Blocks are the model's children, and parameters of its own."""
    scale = 1.0 if loop.scaler is None else loop.scaler.get_scale()
    squares: dict[str, float] = {}
    for name, parameter in loop.model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad.clone().to_dense().abs().double() / scale
            block = name.partition(".")[0]
            squares[block] = squares.get(block, 0.0) + float(gradient.square().sum())
    squares["total"] = sum(squares.values())
    return {f"grad/preclip/{block}": math.sqrt(square) for block, square in squares.items()}


@pytest.mark.parametrize("name", HEALTHY)
def test_norms_are_those_a_plain_loop_takes_by_hand_and_no_number_changes(name: str):
    by_hand: list[dict[str, float]] = []
    seen: list[dict[str, float]] = []
    plain = Loop(**HEALTHY[name]).run(12, before_clip=lambda loop: by_hand.append(norms_by_hand(loop)))
    loop = Loop(**HEALTHY[name]).watched(every=1).run(12, after=lambda loop: seen.append(loop.health.metrics()))
    assert loop.losses == plain.losses  # bit for bit
    for metrics, expected in zip(seen, by_hand, strict=True):
        assert {key: metrics[key] for key in metrics if "/preclip/" in key} == pytest.approx(expected, rel=SAME)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_is_told_nothing(name: str):
    loop = Loop(**HEALTHY[name])
    assert findings_of(loop, clip_norm=loop.clip_norm or math.inf) == []
    assert findings_of(Loop(**HEALTHY[name])) == []
    assert findings_of(Loop(**HEALTHY[name], hands="before", raw=True), every=1) == []


def test_what_is_applied_and_how_often_it_was_clipped_is_seen():
    loop = Loop(scale=2.0**16, clip_norm=0.1).watched(every=1)
    applied = []
    loop.run(12, after=lambda loop: applied.append(loop.health.metrics()["grad/applied/total"]))
    assert applied == pytest.approx([0.1] * 12, rel=1e-4)  # torch divides by the norm plus 1e-6
    assert loop.health.metrics()["grad/clipped_share"] == 1.0
    loose = Loop(clip_norm=1e3).watched(every=1).run(12)
    assert loose.health.metrics()["grad/clipped_share"] == 0.0


def test_the_update_ratio_is_that_of_a_blocks_largest_matrix():
    before = Loop().model.first.weight.detach()  # the same seed
    loop = Loop().watched(every=1).run(1)
    ratio = float((loop.model.first.weight.detach() - before).norm() / before.norm())
    assert loop.health.metrics()["update/ratio/first"] == pytest.approx(ratio, rel=1e-5)  # float32


SICK: dict[str, tuple[dict[str, Any], dict[str, Any], str, Severity, int]] = {
    "gradients never cleared": ({"clears": "never"}, {}, "gradients_not_cleared", Severity.ERROR, 2),
    "never cleared, accumulated": (
        {"clears": "never", "micro_batches": 3}, {}, "gradients_not_cleared", Severity.ERROR, 2,
    ),
    "never cleared, with a closure": (
        {"clears": "never", "closure": True}, {}, "gradients_not_cleared", Severity.ERROR, 2,
    ),
    "clipped before it is unscaled": (
        {"scale": 2.0**16, "clips_first": True}, {"clip_norm": 0.1}, "clip_order", Severity.ERROR, 1,
    ),
    "clipped before it is unscaled, at an unknown norm": (
        {"scale": 2.0**16, "clips_first": True}, {}, "clip_order", Severity.WARNING, 2,
    ),
    "never clipped": ({"clip_norm": None}, {"clip_norm": 0.1}, "clip_order", Severity.ERROR, 1),
    "cut off by detach": (
        {"make": lambda: Net(lambda layer, hidden: layer(hidden).detach()), "clip_norm": None},
        {"thresholds": {"no_gradient_updates": 5}}, "no_gradient", Severity.ERROR, 25,
    ),
    "multiplied by zero": (
        {"make": lambda: Net(lambda layer, hidden: hidden + 0 * layer(hidden))},
        {}, "zero_gradient", Severity.WARNING, 20,
    ),
    "part not in the optimiser": (
        {"optimize": lambda model: adamw(model.last)}, {}, "not_optimized", Severity.WARNING, 0,
    ),
    "gradient not finite": (
        {"spoil": lambda step, model: model.last.weight.grad.fill_(math.nan) if step == 9 else None},
        {}, "nonfinite_update", Severity.ERROR, 10,
    ),
    "updates as long as the weights": (
        {"optimize": lambda model: sgd(model, lr=1.0, weight_decay=1.0), "spoil": fill_with_noise},
        {}, "update_too_large", Severity.WARNING, 30,
    ),
    "scaler not handed over": (
        {"scale": 2.0**16, "clip_norm": 1e3}, {"scaler": None, "clip_norm": 1e3}, "loss_factor", Severity.INFO, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SICK)
def test_a_disease_is_named_as_what_it_is(name: str):
    settings, watching, check, severity, step = SICK[name]
    findings = findings_of(Loop(**settings), **watching)
    *_, finding = [one for one in findings if one.check_name == check]
    assert (finding.severity, finding.step) == (severity, step)
    assert {one for one in names(findings)} <= {check, "nonfinite_update", "update_too_large"}
    assert finding.message
    assert finding.advice


def test_a_gradient_that_is_zero_only_now_and_then_is_no_disease():
    class Turns(nn.Module):
        """Ten tasks, one at a time: whoever looks at every tenth update sees one of them only."""

        def __init__(self) -> None:
            super().__init__()
            self.heads, self.turn = nn.ModuleList(nn.Linear(4, 1) for _ in range(10)), -1

        def forward(self, rows: Tensor) -> Tensor:
            self.turn += 1
            return self.heads[self.turn % 10](rows)

    assert findings_of(Loop(make=Turns, to_none=False)) == []
    assert findings_of(Loop(make=Turns)) == []  # a gradient of None comes back in time


def test_an_adversary_whose_gradients_pass_through_between_two_steps_is_healthy():
    """As the usual GAN loop has it: the generator's loss leaves gradients in the critic, who clears them in time."""
    torch.manual_seed(0)
    critic, generator = Net(), nn.Linear(4, 4)
    judging, making = adamw(critic), adamw(generator)
    with watch(critic, judging, every=1) as one, watch(generator, making, every=1) as other:
        for _ in range(25):
            rows = torch.randn(8, 4)
            critic.zero_grad()
            F.softplus(-critic(rows)).mean().backward()
            F.softplus(critic(generator(rows).detach())).mean().backward()
            judging.step()
            generator.zero_grad()
            F.softplus(-critic(generator(rows))).mean().backward()
            making.step()
    assert one.findings + other.findings == []


def test_a_loop_that_skips_an_overflow_is_healthy_whoever_does_the_skipping():
    for settings in ({}, {"unscales": False, "clip_norm": None, "optimize": lambda model: adamw(model, fused=True)}):
        loop = Loop(scale=2.0**127, **settings)
        assert findings_of(loop, every=1) == []
        assert loop.scaler.get_scale() < 2.0**127  # there was one
        assert 0 < loop.health.step <= UPDATES
        assert math.isfinite(loop.health.metrics()["grad/preclip/total"])


def test_losses_are_heard_and_one_that_is_not_finite_is_told():
    loop = Loop(micro_batches=2).watched()
    loop.run(25)
    assert loop.health.metrics()["train/loss"] == pytest.approx(sum(loop.losses[38:40]) / 2)  # of update 20
    loop.health.loss(math.nan)
    loop.run(6)
    assert [(one.check_name, one.severity, one.step) for one in loop.health.findings] == [
        ("nonfinite_update", Severity.WARNING, 25)  # no backward pass since that step
    ]


def test_a_part_that_is_frozen_or_added_while_training_goes_on_is_noticed():
    loop = Loop().watched(every=5).run(12)
    loop.model.second.requires_grad_(False)
    loop.run(30)
    assert loop.health.findings == []
    assert "grad/preclip/second" not in loop.health.metrics()
    loop.model.extra = nn.Linear(2, 2)
    loop.run(5)
    assert names(loop.health.findings) == ["not_optimized"]
    assert "extra.weight" in loop.health.findings[0].message


def test_an_optimiser_of_another_model_is_told():
    old, new = Net(), Net()
    findings: list[Finding] = []
    optimizer = adamw(old)
    with watch(new, optimizer, on_finding=findings.append) as health:
        for _ in range(20):
            optimizer.zero_grad()
            new(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert names(findings) == ["not_optimized", "no_gradient"]
    assert findings == health.findings
    assert "6 of the model's parameters" in findings[0].message
    assert "which the model does not have" in findings[1].message


def test_blocks_restrict_the_watch_and_name_its_parts():
    loop = Loop(optimize=lambda model: adamw(model.last))
    loop.watched(blocks={"head": list(loop.model.last.parameters())}, every=1).run(3)
    assert loop.health.findings == []
    assert {name for name in loop.health.metrics() if "preclip" in name} == {"grad/preclip/head", "grad/preclip/total"}


def test_a_watch_that_fails_ends_itself_and_not_the_loop(monkeypatch: pytest.MonkeyPatch):
    plain = Loop().run()

    def broken(self: Any, *seen: Any, **named: Any) -> None:
        raise RuntimeError("no such kernel")

    for where in ("arrivals.Arrivals._note", "arrivals.Arrivals.block_norms", "looks.Looks.before", "looks.survey"):
        with monkeypatch.context() as patch:
            patch.setattr(f"workloads.probes.{where}", broken)
            loop = Loop().watched().run()
        assert names(loop.health.findings) == ["probe_failed"], where
        assert "no such kernel" in loop.health.findings[0].message
        assert loop.losses == plain.losses


def test_who_is_told_may_fail_without_harm_to_the_loop_and_may_end_the_watch(caplog: pytest.LogCaptureFixture):
    def fail(finding: Finding) -> None:
        raise OSError("no space left on device")

    plain = Loop(clears="never").run()
    loop = Loop(clears="never").watched(on_finding=fail)
    loop.model.extra = nn.Linear(2, 2)
    loop.run()
    assert loop.losses == plain.losses
    assert names(loop.health.findings) == ["not_optimized", "gradients_not_cleared"]
    assert caplog.text.count("on_finding failed") == 1
    ended = Loop(clears="never").watched(on_finding=lambda finding: ended.health.close())
    ended.run()
    assert ended.health.step == 2


def test_where_somebody_removes_a_hook_no_look_takes_an_old_gradient_for_its_own():
    loop = Loop(clip_norm=None).watched(every=1, clip_norm=math.inf).run(5)
    loop.optimizer._optimizer_step_pre_hooks.clear()
    loop.run(5)
    metrics = loop.health.metrics()
    assert metrics["grad/applied/total"] == metrics["grad/preclip/total"]  # nothing stands between them
    assert loop.health.findings == []


def test_closing_removes_every_hook():
    loop = Loop().watched(every=1).run(3)
    loop.health.close()
    assert not loop.optimizer._optimizer_step_pre_hooks
    assert not loop.optimizer._optimizer_step_post_hooks
    assert all(not one._backward_hooks and not one._post_accumulate_grad_hooks for one in loop.model.parameters())


def test_nothing_of_a_watched_update_is_kept():
    loop = Loop(clears="step").watched(every=1)
    kept: list[weakref.ref[Tensor]] = []
    loop.run(2, before_clip=lambda loop: kept.append(weakref.ref(loop.model.first.weight.grad)))
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_where_processes_share_the_training_norms_are_those_of_the_averaged_gradient():
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        loop = Loop(clip_norm=0.1).watched(clip_norm=0.1, every=1).run(3)
    finally:
        distributed.destroy_process_group()
    metrics = loop.health.metrics()
    assert metrics["grad/applied/total"] == pytest.approx(0.1, rel=1e-4)  # torch divides by the norm plus 1e-6
    assert not any("preclip" in name for name in metrics)
    assert loop.health.findings == []


def test_a_scale_is_told_from_a_clip():
    assert hidden_scale(65536.0 * 0.3, 0.3) == 65536.0
    assert hidden_scale(4 * 0.3, 0.3) is None  # a mean over four processes, or a clip
    assert hidden_scale(65000.0 * 0.3, 0.3) is None
    assert hidden_scale(math.inf, 0.3) is None


class Deep(nn.Module):
    """A body of listed layers inside a shell, as in Hugging Face's models, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(3, 4), "h": nn.ModuleList(Net() for _ in range(2))})
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.transformer["wte"].weight


def test_blocks_are_the_parts_a_person_would_name():
    shell = nn.Module()
    shell.model = Deep()
    assert list(named_blocks(Net())) == ["first", "second", "last"]
    assert set(named_blocks(Deep())) == {"transformer.wte", "transformer.h.0", "transformer.h.1", "scale"}
    assert set(named_blocks(shell)) == {f"model.{name}" for name in named_blocks(Deep())}
    assert list(named_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)))) == ["0", "2"]
    assert list(named_blocks(nn.Linear(2, 2))) == ["weight", "bias"]
    assert named_blocks(nn.ReLU()) == {}
