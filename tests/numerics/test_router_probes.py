"""The probes of routers and targets see their disease and stay quiet on a healthy twin."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from orchestrator.trial import Finding, Severity
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt
from workloads.engine.precision import POLICIES
from workloads.engine.training import Training
from workloads.engine.update import Update
from workloads.layers.router import Routing, load_balance_loss, route, router_z_loss, tie_share
from workloads.layers.router_metrics import entropy, spacing
from workloads.moe_gpt.bugs import PLANTED
from workloads.moe_gpt.config import Config as MoeGptConfig
from workloads.moe_gpt.language import MoeLanguageModel
from workloads.moe_gpt.train import MoeGpt
from workloads.moe_router.config import Config as RouterConfig
from workloads.moe_router.train import MoeRouter
from workloads.probes.catalogue import Thresholds
from workloads.probes.probe import Look
from workloads.probes.router import RouterProbe, balance_by_definition, choices, coarser_grid, z_by_definition
from workloads.probes.targets import unshifted

LANGUAGE = {"steps": 3, "batch_size": 4, "width": 16, "context": 32, "depth": 2, "heads": 2, "num_held_out_windows": 8}


def routing_of(logits_BE: torch.Tensor, k: int = 1, renormalize: bool = False, **more: Any) -> Routing:
    return route(logits_BE, k, renormalize, logits_BE.dtype, **more)


def probe(k: int = 1, num_experts: int = 4, precision: str = "fp32", **limits: float) -> RouterProbe:
    return RouterProbe(Thresholds(**limits), POLICIES[precision], k, num_experts, lambda seen: seen)


def look_at(step: int, norms: dict[str, float]) -> Look:
    """A passing look at an update."""
    update = Update(torch.tensor(1.0), norms, True, False, 0, [])
    return Look(step, update, [], {}, None, thorough=False)  # type: ignore[arg-type]  # nothing asks the trainer


def chosen_by(watcher: RouterProbe, window: Routing, layer: int, step: int) -> list[Finding]:
    return list(watcher._choices(window, choices(window), layer, step))


def severities(context: Any) -> dict[str, Severity]:
    return {finding.check_name: finding.severity for finding in context.findings}


def test_both_auxiliary_losses_by_definition_are_what_the_layers_compute():
    logits_BE = 3 * torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routing = routing_of(logits_BE, k=2)
    reference = float(load_balance_loss(routing.probabilities_BE, routing.experts_BK))
    assert balance_by_definition(choices(routing)) == pytest.approx(reference, rel=1e-12)  # float64
    assert z_by_definition(logits_BE) == pytest.approx(float(router_z_loss(logits_BE)), rel=1e-12)
    assert z_by_definition(torch.zeros(5, 8)) == pytest.approx(math.log(8) ** 2, rel=1e-12)


def test_entropy_and_spacing_are_those_of_torch_and_of_the_format():
    even = torch.full((3, 8), 1 / 8)
    assert float(entropy(even)) == pytest.approx(1.0, rel=1e-12)
    assert float(entropy(F.one_hot(torch.tensor([0, 1]), 8).double())) == 0.0
    drawn = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    categorical = torch.distributions.Categorical(probs=drawn.double()).entropy().mean()
    assert float(entropy(drawn)) == pytest.approx(float(categorical) / math.log(8), rel=1e-6)  # it renormalises
    assert float(spacing(torch.tensor(40.0, dtype=torch.bfloat16))) == 0.25  # 2^(5-7) in [32, 64)
    assert float(spacing(torch.tensor(40.0))) == 2.0**-18


def test_rounded_logits_are_seen_in_float32_too_and_ordinary_ones_are_not():
    logits_BE = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    assert coarser_grid(logits_BE) is None
    assert coarser_grid(torch.zeros(32, 8)) is None  # a router that starts from zeros
    assert coarser_grid(torch.full((32, 8), 2.0**30)) is None  # all lost in an offset
    assert coarser_grid(logits_BE[:2]) is None  # too few to tell
    assert coarser_grid(logits_BE.bfloat16().float()) == "bfloat16"
    assert coarser_grid(logits_BE.half().float()) == "float16"
    sick = list(probe(num_experts=8)._dtype(routing_of(logits_BE.bfloat16().float()), 0, 1))
    assert [finding.check_name for finding in sick] == ["router_dtype"]
    assert not list(probe(num_experts=8, precision="bf16")._dtype(routing_of(logits_BE.bfloat16()), 0, 1))


def test_a_weight_that_is_always_one_is_dead_and_says_whether_by_renormalising_or_by_certainty():
    logits_BE = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    assert not list(probe()._constant_weights(routing_of(logits_BE), 0, 1))
    assert not list(probe(k=2)._constant_weights(routing_of(logits_BE, k=2, renormalize=True), 0, 1))
    (renormalized,) = probe()._constant_weights(routing_of(logits_BE, renormalize=True), 0, 1)
    assert "renormalised" in renormalized.message
    assert renormalized.severity is Severity.ERROR


def test_a_router_is_dead_of_certainty_when_it_is_certain_of_every_window():
    logits_BE = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    certain, open_minded, watcher = routing_of(1e6 * logits_BE), routing_of(logits_BE), probe(router_patience=20)
    courses = [certain, certain, open_minded, certain, certain, certain]
    told = [list(watcher._constant_weights(one, 0, 10 * look)) for look, one in enumerate(courses)]
    assert [len(findings) for findings in told] == [0, 0, 0, 0, 0, 1]
    assert "saturated" in told[-1][0].message


def test_one_router_without_gradient_among_others_is_told_and_a_skipped_update_is_not():
    watcher = probe()
    updates = [look_at(step, {"router0": 0.0, "router1": 1.0, "total": 1.0}) for step in range(20)]
    assert not [one for look in updates[:19] for one in watcher.updated(look)]
    (dead,) = watcher.updated(updates[19])
    assert (dead.check_name, dead.severity) == ("dead_router", Severity.ERROR)
    assert "router0" in dead.message
    assert "router1" not in dead.message
    assert not list(watcher.updated(look_at(20, {"router0": math.nan, "router1": 1.0, "total": math.nan})))
    patient = probe(dead_router_updates=21.0)
    assert not [one for look in updates for one in patient.updated(look)]
    everyone = probe(k=4)
    assert not [one for look in updates for one in everyone.updated(look)]  # k = num_experts is no choice


def test_a_report_is_held_against_its_own_window_only():
    watcher, metrics = probe(), {"router/load/0": 0.5, "router/load/1": 0.5, "router/assignments": 70.0}
    watcher.assignments = 64.0  # of a shorter window, looked at before
    assert [one.check_name for one in watcher.reported(1, metrics)] == ["load_count"]
    assert not list(watcher.updated(look_at(2, {"total": 1.0})))
    assert not list(watcher.reported(2, metrics))


@pytest.mark.parametrize(
    ("sick", "well", "check"),
    [
        # One expert for all; two experts that nobody asks for; logits that an offset of 300 rounds to steps of 2.
        (torch.eye(4)[[0] * 64], torch.eye(4)[[0, 1, 2, 3] * 16], "router_collapsed"),
        (torch.eye(4)[[0, 1] * 32], torch.eye(4)[[0, 1, 2, 3] * 16], "dead_experts"),
        ((torch.eye(4)[[0, 1, 2, 3] * 16] / 2 + 300).bfloat16(), torch.eye(4)[[0, 1, 2, 3] * 16], "router_ties"),
    ],
)
def test_what_lasts_is_told_and_what_passes_is_not(sick: torch.Tensor, well: torch.Tensor, check: str):
    def told(*logits: torch.Tensor) -> list[str]:
        watcher, looks = probe(router_patience=20), range(0, 10 * len(logits), 10)
        found = [chosen_by(watcher, routing_of(one), 0, step) for step, one in zip(looks, logits, strict=True)]
        return [finding.check_name for findings in found for finding in findings]

    assert check in told(sick, sick, sick)
    assert check not in told(sick, sick, well, sick, sick)
    assert told(well, well, well) == []


def test_ties_of_experts_a_hair_apart_are_no_news():
    """A z-loss pulls the logits of an undecided router to -log E, where bf16 is coarser; the loss does not mind."""
    close_BE = (0.05 * torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) - 2).bfloat16()
    watcher = probe(num_experts=8, precision="bf16", router_patience=0)
    assert tie_share(close_BE, 1) > 4 * Thresholds().tie_share
    assert not chosen_by(watcher, routing_of(close_BE), 0, 1)


def test_experts_that_take_turns_are_not_dead_and_few_tokens_collapse_nothing():
    watcher = probe(router_patience=20)
    for step, absent in enumerate([0, 1, 2, 3] * 3):
        present = [expert for expert in range(4) if expert != absent]
        assert not chosen_by(watcher, routing_of(torch.eye(4)[present * 22]), 0, 10 * step)
    for step in range(0, 60, 10):
        assert not chosen_by(watcher, routing_of(torch.eye(4)[[0, 0]]), 1, step)


def test_dropped_tokens_are_told_when_many_find_their_expert_full():
    watcher = probe(router_patience=0)
    logits_BE = torch.eye(4)[[0, 0, 0, 1] * 16]
    found = {one.check_name: one for one in chosen_by(watcher, routing_of(logits_BE, capacity=16), 0, 1)}
    assert found["tokens_dropped"].value == 0.5  # 32 of 64: expert 0 takes 16 of its 48
    kept = chosen_by(watcher, routing_of(logits_BE, capacity=48), 0, 2)
    assert "tokens_dropped" not in [one.check_name for one in kept]


def test_targets_are_held_against_the_tokens_read_and_those_that_follow():
    text = torch.randint(0, 50, (4, 33), generator=torch.Generator().manual_seed(0))
    tokens, targets = text[:, :-1], text[:, 1:]
    valid = torch.arange(32) < torch.tensor([32, 10, 2, 1]).unsqueeze(-1)
    for mask in (None, valid):
        assert not list(unshifted(tokens, targets, mask, 1))
        assert [one.check_name for one in unshifted(tokens, tokens, mask, 1)] == ["targets_not_shifted"]
    one_symbol = torch.zeros(4, 32, dtype=torch.int64)
    assert not list(unshifted(one_symbol, one_symbol, None, 1))  # nothing can be told
    assert not list(unshifted(tokens, tokens, torch.zeros(4, 32, dtype=torch.bool), 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("bug", "settings", "checks"),
    [
        ("bf16_router", {}, {"router_dtype"}),
        ("renormalized_top1", {"k": 1}, {"dead_router"}),
        ("double_counted_load", {}, {"auxiliary_loss", "load_count"}),
        ("padding_in_z", {}, {"auxiliary_loss"}),
        ("unshifted_targets", {}, {"targets_not_shifted"}),
    ],
)
def test_a_planted_bug_is_named_at_the_first_update(
    lonely: Any, bug: Any, settings: dict[str, Any], checks: set[str], seed: int
):
    context = lonely(seed)
    common = {**LANGUAGE, "padding": 0.5, "accumulation_steps": 2, "c_z": 0.01} | settings
    training = Training.begin(PLANTED.get(bug, MoeLanguageModel)(), MoeGptConfig(**common, bug=bug), context)
    training.report(*training.advance())
    assert set(severities(context)) == checks
    assert {finding.step for finding in context.findings} == {1}
    assert {finding.severity for finding in context.findings} == {Severity.ERROR}


def test_unshifted_targets_of_char_gpt_are_named_at_the_first_update(lonely: Any):
    planted, healthy = lonely(), lonely()
    for context, bug in ((planted, "unshifted_targets"), (healthy, "none")):
        Training.begin(CharGpt(), CharConfig(**LANGUAGE, bug=bug), context).advance()
    assert [(one.check_name, one.step) for one in planted.findings] == [("targets_not_shifted", 1)]
    assert healthy.findings == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-selective"])
@pytest.mark.parametrize("settings", [{"k": 1}, {"k": 2, "capacity_factor": 1.0, "checkpointing": True}])
def test_a_healthy_mixture_of_experts_says_nothing(lonely: Any, precision: str, settings: dict[str, Any]):
    config = MoeGptConfig(**LANGUAGE, **settings, precision=precision, padding=0.5, accumulation_steps=2, c_z=1e-3)
    context = lonely(0, log_every=1)
    list(MoeGpt().run(config, context))
    assert context.findings == []


def test_a_router_that_was_asked_to_be_dead_says_so(lonely: Any):
    context = lonely(0, log_every=10)
    config = RouterConfig(steps=22, batch_size=32, k=1, renormalize=True, allow_dead_router=True, alpha=0.0)
    list(MoeRouter().run(config, context))
    assert severities(context)["dead_router"] is Severity.ERROR


def test_a_common_offset_in_bf16_ties_and_in_float32_does_not(lonely: Any):
    found = {}
    for precision in ("bf16", "bf16-softmax", "bf16-selective"):
        context = lonely(0, log_every=10, thresholds={"router_patience": 20.0})
        config = RouterConfig(steps=40, batch_size=64, k=1, router_offset=300.0, precision=precision)
        list(MoeRouter().run(config, context))
        found[precision] = "router_ties" in severities(context)
    assert found == {"bf16": True, "bf16-softmax": True, "bf16-selective": False}
