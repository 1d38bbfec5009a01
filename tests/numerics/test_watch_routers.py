"""What `watch` sees of the routers of somebody else's mixture of experts, and of ours. Tests no routing.

Axes: B tokens, D width, E experts.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from orchestrator.trial import Finding, Severity
from tests.numerics.watched_loop import names, nothing
from workloads.engine.precision import POLICIES
from workloads.layers.moe import MoE
from workloads.layers.router import router_z_loss, tie_share
from workloads.layers.router_metrics import entropy, spacing
from workloads.probes.watch import Watch, watch

NUM_EXPERTS, WIDTH, NUM_TOKENS = 4, 8, 128
QUICK = {"router_patience": 10, "dead_router_updates": 5}


def same(hidden: Tensor) -> Tensor:
    return hidden


class Mixture(nn.Module):
    """Linear experts behind a gate. `change` is done to its logits, `weigh` to the weights of the chosen experts."""

    def __init__(self, change: Callable[[Tensor], Tensor] = same, weigh: Callable[[Tensor], Tensor] = same) -> None:
        super().__init__()
        self.gate, self.change, self.weigh = Gate(change), change, weigh
        self.experts = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden_BD: Tensor) -> Tensor:
        logits_BE, _ = self.gate(hidden_BD)
        top = logits_BE.float().softmax(-1).max(-1)
        outputs_BD = torch.einsum("bd,bde->be", hidden_BD, self.experts[top.indices])
        return hidden_BD + self.weigh(top.values).unsqueeze(-1) * outputs_BD


class Gate(nn.Module):
    """Returns logits, and something beside them."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, NUM_EXPERTS, bias=False), change

    def forward(self, hidden_BD: Tensor) -> tuple[Tensor, str]:
        return self.change(self.linear(hidden_BD)), "beside"


def rows_of(step: int) -> Tensor:
    """Two micro-batches."""
    return torch.randn(2, NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def trained(model: nn.Module, updates: int = 30, **watching: Any) -> tuple[Watch, list[Finding]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, optimizer, **{"thresholds": QUICK, "on_finding": nothing, "every": 1, **watching}) as health:
        for step in range(updates):
            optimizer.zero_grad()
            for micro_BD in rows_of(step):
                (model(micro_BD) - micro_BD.flip(-1)).square().mean().backward()
            optimizer.step()
    return health, health.findings


def gated(mixture: Mixture, updates: int = 30, k: int = 1, **watching: Any) -> tuple[Watch, list[Finding]]:
    return trained(mixture, updates, routers={"gate 0": mixture.gate}, k=k, **watching)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_the_series_of_a_router_are_those_taken_by_hand():
    mixture = Mixture()
    health, _ = gated(mixture, updates=2, k=2)
    torch.manual_seed(0)
    again = Mixture()
    trained(again, updates=1)
    logits_BE, metrics = again.gate(rows_of(1).flatten(0, 1))[0].detach(), health.metrics()
    load = torch.bincount(logits_BE.topk(2).indices.flatten(), minlength=NUM_EXPERTS) / (2 * len(logits_BE))
    expected = {
        "router/z": router_z_loss(logits_BE),
        "router/max_logit": logits_BE.amax(-1).mean(),
        "router/abs_max_logit": logits_BE.abs().amax(),
        "router/logit_spacing": spacing(logits_BE.abs().amax()),
        "router/entropy": entropy(logits_BE.softmax(-1)),
        "router/tie_share": tie_share(logits_BE, 2),
        **{f"router/load/{expert}": share for expert, share in enumerate(load)},
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-5  # float32
    )  # fmt: skip
    assert not {"router/dropped_share", "router/assignments"} & metrics.keys()  # nobody knows


def test_a_healthy_router_is_told_nothing_also_when_a_checkpoint_runs_it_twice():
    assert gated(Mixture())[1] == []

    class Checkpointed(Mixture):
        def forward(self, hidden_BD: Tensor) -> Tensor:
            return checkpoint(super().forward, hidden_BD, use_reentrant=False)

    health, findings = gated(Checkpointed(), updates=12)
    assert findings == []
    assert sum(health.metrics()[f"router/load/{expert}"] for expert in range(NUM_EXPERTS)) == pytest.approx(1.0)


def one_above_all(logits_BE: Tensor) -> Tensor:
    return logits_BE + torch.tensor([5.0, 0.0, 0.0, 0.0])


def two_never(logits_BE: Tensor) -> Tensor:
    return logits_BE + torch.tensor([0.0, 0.0, -9.0, -9.0])


def rounded(logits_BE: Tensor) -> Tensor:
    return logits_BE.bfloat16().float()


def tied(logits_BE: Tensor) -> Tensor:
    return (logits_BE + 300).bfloat16()


def saturated(logits_BE: Tensor) -> Tensor:
    return logits_BE * 1e7


SICK: dict[str, tuple[dict[str, Any], str, Severity]] = {
    "a gradient of exactly zero": ({"weigh": lambda top: 0 * top + 1}, "dead_router", Severity.ERROR),
    "certain of every token": ({"change": saturated}, "dead_router", Severity.ERROR),
    "one expert above all": ({"change": one_above_all}, "router_collapsed", Severity.WARNING),
    "two experts never": ({"change": two_never}, "dead_experts", Severity.WARNING),
    "rounded and cast back": ({"change": rounded}, "router_dtype", Severity.WARNING),
    "in bf16": ({"change": Tensor.bfloat16}, "router_dtype", Severity.INFO),
    "an offset in bf16": ({"change": tied}, "router_ties", Severity.WARNING),
}


@pytest.mark.parametrize("name", SICK)
def test_a_router_disease_is_named(name: str):
    settings, check, severity = SICK[name]
    findings = [one for one in gated(Mixture(**settings))[1] if one.check_name == check]
    assert [one.severity for one in findings] == [severity]
    assert "gate 0" in findings[0].message
    assert findings[0].step < 30


def test_a_router_without_gradient_is_watched_at_every_update_until_it_is_known():
    (finding, *_) = [
        one
        for one in gated(Mixture(weigh=lambda top: 0 * top + 1), every=25)[1]
        if one.check_name == "dead_router"
    ]  # fmt: skip
    assert finding.step == 5


def test_logits_that_are_not_finite_enter_no_statistic():
    health, findings = gated(Mixture(lambda logits_BE: logits_BE * torch.nan), updates=3)
    assert not any(name.startswith("router/") for name in health.metrics())
    assert "probe_failed" not in names(findings)


def test_a_copy_of_a_watched_model_is_not_watched_and_a_saved_one_loads_without_the_watch():
    def logits_of(copies: Callable[[nn.Module], Any]) -> tuple[dict[str, float], list[Finding]]:
        torch.manual_seed(0)
        mixture = Mixture()
        optimizer = torch.optim.SGD(mixture.parameters(), lr=1e-2)
        with watch(mixture, optimizer, routers={"gate": mixture.gate}, k=1, every=1, on_finding=nothing) as health:
            teacher = copies(mixture)
            for step in range(3):
                optimizer.zero_grad()
                for micro_BD in rows_of(step):
                    teacher(100 * micro_BD)
                    (mixture(micro_BD) - micro_BD.flip(-1)).square().mean().backward()
                optimizer.step()
        return {name: one for name, one in health.metrics().items() if name.startswith("router/")}, health.findings

    alone = logits_of(lambda mixture: same)
    assert alone[1] == []
    assert logits_of(copy.deepcopy) == logits_of(AveragedModel) == logits_of(saved_and_loaded) == alone


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"workloads.probes" not in file.getvalue()
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


UNFIT: dict[str, tuple[Callable[[Tensor], Any], int, str]] = {
    "a dict": (lambda logits_BE: {"logits": logits_BE}, 1, "a dict"),
    "nothing": (lambda logits_BE: None, 1, "a NoneType"),
    "an empty tuple": (lambda logits_BE: (), 1, "a tuple"),
    "one number an expert": (lambda logits_BE: logits_BE[0], 1, r"shape (4,)"),
    "choices": (lambda logits_BE: logits_BE.topk(2).indices, 1, "int64"),
    "too few experts": (same, 5, "k=5 of its 4 experts"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_router_whose_output_is_no_logits_is_named_and_the_watch_goes_on(name: str):
    returns, k, words = UNFIT[name]

    class Odd(nn.Module):
        def forward(self, logits_BE: Tensor) -> Any:
            return returns(logits_BE)

    class Beside(nn.Module):
        """A gate of its own kind beside a healthy mixture."""

        def __init__(self) -> None:
            super().__init__()
            self.mixture, self.odd = Mixture(), Odd()

        def forward(self, hidden_BD: Tensor) -> Tensor:
            self.odd(hidden_BD[:, :NUM_EXPERTS])
            return self.mixture(hidden_BD)

    model = Beside()
    routers = {"odd": model.odd} | ({"gate": model.mixture.gate} if k == 1 else {})
    health, findings = trained(model, updates=6, routers=routers, k=k)
    (finding,) = findings
    assert (finding.check_name, finding.severity, finding.step) == ("probe_failed", Severity.WARNING, 1)
    assert "of odd are not seen" in finding.message
    assert words in finding.message
    assert health.step == 6
    assert ("router/z" in health.metrics()) == (k == 1)  # of the other one


class Ours(nn.Module):
    def __init__(self, renormalize: bool) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        parts = WIDTH, WIDTH, NUM_EXPERTS, 1, renormalize, POLICIES["fp32"], source
        self.layers = nn.ModuleList(MoE(*parts) for _ in range(2))

    def forward(self, hidden_BD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_BD = hidden_BD + layer(hidden_BD)[0]
        return hidden_BD


def test_our_own_routers_are_found_and_each_has_its_series():
    health, findings = trained(Ours(renormalize=False))
    assert findings == []
    assert {"router/z/layers.0.router", "router/z/layers.1.router", "router/z"} <= health.metrics().keys()


def test_renormalised_top_1_weights_leave_our_own_router_without_gradient():
    _, findings = trained(Ours(renormalize=True), updates=8)
    (finding,) = [one for one in findings if one.check_name == "dead_router"][:1]
    assert (finding.severity, finding.step) == (Severity.ERROR, 5)
