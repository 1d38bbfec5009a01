"""The probes of gradients and updates see the planted fault and stay quiet on its healthy twin."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.trial import Finding, Severity
from workloads.char_gpt.config import Config as CharConfig
from workloads.char_gpt.train import CharGpt
from workloads.engine import checkpoint
from workloads.engine.training import Training, TrainingWorkload
from workloads.engine.training_config import TRAINING_METRICS, TrainingConfig
from workloads.engine.update import Trainer, gradient_norms, total_norm
from workloads.probes.catalogue import THRESHOLDS
from workloads.probes.gradients import misweighed, update_ratios, wrongly_clipped
from workloads.probes.probe import Probe

TINY = {"steps": 30, "batch_size": 8, "lr": 0.01}


class Rows(NamedTuple):
    inputs: Tensor
    targets: Tensor

    @property
    def num_valid(self) -> int:
        return len(self.inputs)


@dataclass
class Line:
    """64 rows of y = sum x."""

    num_rows: int = 64
    rows: Tensor = field(default_factory=lambda: torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def batch(self, indices_B: Tensor, noise: int) -> Rows:
        inputs = self.rows[indices_B]
        return Rows(inputs, inputs.sum(-1, keepdim=True))

    def to(self, device: str) -> Line:
        return self


class Regression(TrainingWorkload):
    """Any module from 4 inputs to 1 output."""

    Config = TrainingConfig
    metrics = TRAINING_METRICS

    def __init__(self, make: Callable[[], nn.Module], extra: Iterable[Probe] = ()) -> None:
        self.make, self.extra = make, extra

    def data(self, config: Any, context: Any) -> Line:
        return Line()

    def build(self, config: Any, data: Any, source: torch.Generator) -> nn.Module:
        torch.manual_seed(0)  # the trial's own global generator while it trains
        return self.make()

    def loss(self, call: Any, batch: Any, hyper: Any) -> tuple[Tensor, None]:
        return F.mse_loss(call(batch.inputs), batch.targets), None

    def probes(self, config: Any, model: nn.Module, thresholds: Any) -> list[Probe]:
        return [*super().probes(config, model, thresholds), *self.extra]


class Net(nn.Module):
    """Two layers, the second seen through `look`: the identity, or what cuts it off."""

    def __init__(self, look: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 1)
        self.look = look

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)) + self.look(self.second(inputs)))


def findings_of(context: Any, workload: TrainingWorkload, **settings: Any) -> list[Finding]:
    list(workload.run(TrainingConfig(**{**TINY, **settings}), context))
    return context.findings


def names(findings: Iterable[Finding]) -> list[str]:
    return [finding.check_name for finding in findings]


def test_a_healthy_run_says_nothing(lonely: Any):
    assert findings_of(lonely(0), Regression(Net)) == []


def test_a_part_that_never_receives_a_gradient_is_told_from_one_whose_gradient_is_zero(lonely: Any):
    (never,) = findings_of(lonely(0), Regression(lambda: Net(Tensor.detach)))
    assert (never.check_name, never.severity, never.step) == ("no_gradient", Severity.ERROR, 20)
    assert "second.weight" in never.message
    (zero,) = findings_of(lonely(0), Regression(lambda: Net(lambda values: values * 0)))
    assert (zero.check_name, zero.severity, zero.step) == ("zero_gradient", Severity.WARNING, 20)
    assert zero.message.startswith("second:")


def test_a_small_gradient_is_neither(lonely: Any):
    assert findings_of(lonely(0), Regression(lambda: Net(lambda values: values * 1e-20))) == []


def test_a_frozen_part_is_meant_to_have_no_gradient(lonely: Any):
    def frozen() -> nn.Module:
        net = Net()
        net.second.requires_grad_(False)
        return net

    assert findings_of(lonely(0), Regression(frozen)) == []


class Shared(nn.Module):
    """One matrix in two places, a table, complex weights, a bare parameter: all of them train."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.table = nn.Embedding(3, 4, sparse=sparse)
        self.wave = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) / 4)
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        looked_up = self.table((inputs[:, 0] > 0).long())
        hidden = self.again(torch.tanh(self.first(inputs * self.bare))) + looked_up
        return self.last(hidden + (hidden.to(torch.complex64) @ self.wave).abs())


def test_shared_sparse_complex_and_bare_parameters_are_measured_as_torch_measures_them(lonely: Any):
    workload, net = Regression(Shared), Shared(sparse=True)
    assert sum(len(block) for block in workload.blocks(net).values()) == len(list(net.parameters()))
    net(torch.randn(8, 4)).square().mean().backward()
    norms = gradient_norms(workload.blocks(net))
    for name, parameter in (("wave", net.wave), ("table", net.table.weight), ("bare", net.bare)):
        dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        assert norms[name] == pytest.approx(float(torch.linalg.vector_norm(dense)), rel=1e-6)  # of float32
    for optimizer in ("adam", "sgd"):
        assert findings_of(lonely(0), workload, optimizer=optimizer, lr=0.001, clip_norm=1.0) == []


def test_a_window_that_is_summed_a_mean_of_means_and_a_factor_are_three_diseases():
    assert list(misweighed([0.25, 0.75], [0.25, 0.75], 0.01, 1)) == []
    assert list(misweighed([0.0, 1.0], [0.0, 1.0], 0.01, 1)) == []  # a micro-batch of padding counts nothing
    (summed,) = misweighed([1.0, 1.0], [0.5, 0.5], 0.01, 1)
    (means,) = misweighed([0.5, 0.5], [0.25, 0.75], 0.01, 1)
    (factor,) = misweighed([10.0, 30.0], [0.25, 0.75], 0.01, 1)
    (alone,) = misweighed([40.0], [1.0], 0.01, 1)
    assert names([summed, means]) == ["accumulation_weights"] * 2
    assert names([factor, alone]) == ["loss_factor"] * 2
    assert (alone.value, alone.threshold) == (40.0, 1.0)


def test_the_applied_gradient_is_held_against_the_clipped_one():
    assert list(wrongly_clipped(5.0, 1.0, 1.0, 0.01, 1)) == []
    assert list(wrongly_clipped(0.5, 0.5, 1.0, 0.01, 1)) == []
    assert list(wrongly_clipped(5.0, 5.0, None, 0.01, 1)) == []
    assert list(wrongly_clipped(math.inf, 1.0, 1.0, 0.01, 1)) == []  # not applied: another finding's matter
    assert names(wrongly_clipped(5.0, 1.0 / 65536, 1.0, 0.01, 1)) == ["clip_order"]
    assert names(wrongly_clipped(5.0, 5.0, 1.0, 0.01, 1)) == ["clip_order"]


def test_the_update_ratio_is_that_of_the_lengths():
    before, after = torch.full((3, 4), 2.0), torch.full((3, 4), 2.5)
    ratios = update_ratios({"a": before, "zero": torch.zeros(2)}, {"a": after, "zero": torch.ones(2)})
    assert ratios["a"] == 0.25
    assert "zero" not in ratios  # it had no length
    assert ratios["total"] == pytest.approx(math.sqrt((12 * 0.25 + 2) / (12 * 4)), rel=1e-12)  # float64


def test_updates_as_long_as_the_weights_are_told_and_ordinary_ones_are_not(lonely: Any):
    def told(**limits: float) -> list[str]:
        context = lonely(0, log_every=5, thresholds=limits)
        return names(findings_of(context, Regression(Net), lr=30.0, optimizer="sgd", clip_norm=1.0))

    assert "update_too_large" in told()
    assert "update_too_large" not in told(update_ratio_grace=30.0)


def test_a_probe_that_fails_becomes_a_finding_and_changes_no_number(lonely: Any):
    @dataclass
    class Broken(Probe):
        def updated(self, look: Any) -> Iterable[Finding]:
            raise RuntimeError("no such block")

    @dataclass
    class BrokenBehind(Probe):
        @contextmanager
        def around(self, step: int) -> Any:
            yield
            raise RuntimeError("on the way out")

    reports = {}
    for extra in ((), (Broken(), BrokenBehind())):
        context = lonely(0, log_every=10)
        config = TrainingConfig(**TINY)
        reports[len(extra)] = [one.metrics["train/loss"] for one in Regression(Net, extra).run(config, context)]
        assert names(context.findings) == ["probe_failed"] * len(extra)
    assert reports[2][-1] == reports[0][-1]
    assert "no such block (test_update_probes.py:" in context.findings[1].message


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@dataclass
class Unruly(Probe):
    """Measures `measures`, and raises `raises` wherever it is asked `at`."""

    measures: Any = field(default_factory=dict)
    raises: BaseException | None = None
    at: str = ""

    def around(self, step: int) -> Any:
        return nullcontext()

    def measured(self) -> Any:
        return self.measures

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "at"):
            raise object.__getattribute__(self, "raises")
        return super().__getattribute__(name)


def finds(**fields: Any) -> Probe:
    @dataclass
    class Finds(Probe):
        def updated(self, look: Any) -> Iterable[Finding]:
            yield Finding("mine", Severity.INFO, "seen", "", **{"step": look.step, **fields})

    return Finds()


FAILED = "Unruly failed and watches no more: "
UNRULY: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: Counting, "the class Counting itself is among the probes, and no Probe"),
    "no probe": (object, "one of object is among the probes, and no Probe"),
    "a text": (lambda: Unruly("loss"), f"{FAILED}TypeError: measured() gave 'loss'; numbers by name are due"),
    "nothing": (lambda: Unruly(None), f"{FAILED}TypeError: measured() gave None; numbers by name are due"),
    "two numbers": (lambda: Unruly({"x": torch.zeros(2)}), f"{FAILED}TypeError: metric 'x' is not a number"),
    "no name": (lambda: Unruly({5: 1.0}), f"{FAILED}TypeError: measured() has a metric 5, whose name is no text"),
    "mute": (lambda: Unruly({}, Mute(), "updated"), f"{FAILED}Mute, whose own text fails with RuntimeError"),
    "two values": (lambda: finds(value=torch.zeros(2)), "Finds failed and watches no more: TypeError: a finding's v"),
} | {
    f"leaves when asked {at}": (lambda at=at: Unruly({}, SystemExit(3), at), f"{FAILED}SystemExit: 3")
    for at in ("around", "updated", "reported", "measured", "state_dict")
}


@pytest.mark.parametrize(("made", "said"), UNRULY.values(), ids=UNRULY)
def test_whatever_stands_among_the_probes_ends_no_run(lonely: Any, made: Callable[[], Any], said: str):
    context = lonely(0, log_every=2)
    context.checkpoint.every = 2
    reports = list(Regression(Net, [made()]).run(TrainingConfig(**{**TINY, "steps": 4}), context))
    assert [one.step for one in reports][-1] == 4
    (failed,) = context.findings
    assert (failed.check_name, failed.severity) == ("probe_failed", Severity.WARNING)
    assert failed.message.startswith(said)
    json.dumps([dict(one.metrics) for one in reports])


def test_what_a_probe_finds_and_measures_may_be_tensors(lonely: Any):
    context = lonely(0)
    extra = [finds(value=torch.tensor(3.0)), Unruly({"mine": torch.tensor(0.5)})]
    (*_, last) = Regression(Net, extra).run(TrainingConfig(**{**TINY, "steps": 2}), context)
    assert [(one.check_name, type(one.value), one.value) for one in context.findings] == [("mine", float, 3.0)]
    assert (type(last.metrics["mine"]), last.metrics["mine"]) == (float, 0.5)


def test_a_limit_of_ones_own_reaches_ones_own_probe_and_so_does_another_default(lonely: Any):
    class Own(Regression):
        thresholds = {**THRESHOLDS, "mine": 3.0, "no_gradient_updates": 7.0}  # noqa: RUF012

        def probes(self, config: Any, model: nn.Module, thresholds: Any) -> list[Probe]:
            return [*super().probes(config, model, thresholds), Counting(step=int(thresholds.own["mine"]))]

    for changed, steps in (({}, [3, 7]), ({"mine": 5.0, "no_gradient_updates": 4.0}, [4, 5])):
        found = findings_of(lonely(0, thresholds=changed), Own(lambda: Net(Tensor.detach)))
        assert [one.step for one in found] == steps


@dataclass
class Counting(Probe):
    """Counts updates; fails at `at` in what it is asked there."""

    at: str = ""
    step: int = 0
    num_updates: Any = field(init=False, default=0)

    def updated(self, look: Any) -> Iterable[Finding]:
        self.num_updates += 1
        if self.num_updates == self.step:
            yield Finding("mine", Severity.INFO, f"{self.num_updates} updates", step=look.step)

    def state_dict(self) -> dict[str, Any]:
        if self.at == "state_dict":
            raise RuntimeError("not now")
        return {"num_updates": torch.tensor(1) if self.at == "tensor" else self.num_updates}


def test_probes_that_cannot_be_built_leave_the_standard_ones(lonely: Any):
    class Unbuilt(Regression):
        def probes(self, config: Any, model: nn.Module, thresholds: Any) -> list[Probe]:
            raise LookupError("no such layer")

    failed, dead = findings_of(lonely(0), Unbuilt(lambda: Net(Tensor.detach)))
    assert (failed.check_name, failed.severity) == ("probe_failed", Severity.WARNING)
    assert "LookupError: no such layer" in failed.message
    assert dead.check_name == "no_gradient"


@pytest.mark.parametrize("at", ["state_dict", "tensor"])
def test_a_probe_whose_state_cannot_be_kept_ends_and_the_run_goes_on_behind_a_checkpoint(lonely: Any, at: str):
    def workload() -> Regression:
        return Regression(Net, [Counting(at, step=25)])

    first = lonely(0, stop_after=10)
    (failed,) = findings_of(first, workload())
    assert failed.message.startswith("Counting failed")
    later = lonely(0, checkpoint=first.checkpoint)
    assert findings_of(later, workload()) == []  # it is not asked again
    whole = lonely(0)
    assert names(findings_of(whole, workload())) == ["mine"]


def test_a_state_that_does_not_fit_is_forgotten_and_raises_no_other_alarm(lonely: Any):
    sparse = {"schedule": "linear", "warmup_steps": 5}
    first = lonely(0, stop_after=25)
    findings_of(first, Regression(lambda: Net(Tensor.detach)), **sparse)
    saved = checkpoint.from_bytes(first.checkpoint.state)
    saved["health"] |= {"said": {}, "probes": {"GradientProbe": {"never": 3}, "LossProbe": {}}}
    first.checkpoint.state = checkpoint.to_bytes(saved)
    found = findings_of(lonely(0, checkpoint=first.checkpoint), Regression(lambda: Net(Tensor.detach)), **sparse)
    assert names(found) == ["probe_failed"] * 4  # all with a state; five updates are too few to miss a gradient
    assert {finding.severity for finding in found} == {Severity.WARNING}
    assert "GradientProbe" in found[2].message


def test_two_probes_of_a_class_keep_states_of_their_own_and_each_says_what_it_sees(lonely: Any):
    def workload() -> Regression:
        return Regression(Net, [Counting(step=20), Counting(step=22), Counting(step=22)])

    first = lonely(0, stop_after=21)
    assert [(one.check_name, one.step) for one in findings_of(first, workload())] == [("mine", 20)]
    saved = checkpoint.from_bytes(first.checkpoint.state)["health"]["probes"]
    assert [name for name in saved if name.startswith("Count")] == ["Counting", "Counting 2", "Counting 3"]
    later = findings_of(lonely(0, checkpoint=first.checkpoint), workload())
    assert [(one.check_name, one.step) for one in later] == [("mine", 22), ("mine", 22)]


class Nesterov(Regression):
    """Torch's SGD in its `foreach` form adds the momentum to the gradients where they lie."""

    clips = True

    def trainer(self, config: Any, **parts: Any) -> Trainer:
        trained = [one for block in parts["blocks"].values() for one in block]
        own = torch.optim.SGD(trained, lr=0.01, momentum=0.9, nesterov=True, foreach=True)
        trainer = Trainer(**{**parts, "optimizer": own})
        if not self.clips:
            trainer.unscale_and_clip = lambda: (gradient_norms(trainer.blocks), False)  # type: ignore[method-assign]
        return trainer


def test_the_applied_gradient_is_seen_before_the_optimiser_changes_it(lonely: Any):
    nesterov = Nesterov(Net)
    assert findings_of(lonely(0, log_every=5), nesterov, clip_norm=0.1) == []
    training = Training.begin(nesterov, TrainingConfig(**TINY, clip_norm=0.1), lonely(0))
    update, _ = training.advance()
    assert update.applied_norm == pytest.approx(0.1, rel=1e-6)  # of float32
    assert total_norm(training.trainer.parameters) > 0.15  # 1.9 times it: what a look behind the step would see
    nesterov.clips = False
    assert names(findings_of(lonely(0, log_every=5), nesterov, clip_norm=0.1)) == ["clip_order"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_healthy_run_keeps_to_the_smallest_tolerance_that_may_be_asked_for(lonely: Any, precision: str):
    context = lonely(0, log_every=1, thresholds={"weight_tolerance": THRESHOLDS["weight_tolerance"].sense.least})
    sizes = {"width": 16, "context": 16, "depth": 1, "heads": 2, "batch_size": 4, "num_held_out_windows": 2}
    config = CharConfig(**sizes, steps=10, precision=precision, clip_norm=0.1, accumulation_steps=3, padding=0.5)
    list(CharGpt().run(config, context))
    assert context.findings == []


def test_what_was_said_before_a_checkpoint_is_not_said_again_behind_it(lonely: Any):
    sick = Regression(lambda: Net(Tensor.detach))
    first = lonely(0, stop_after=24)
    assert names(findings_of(first, sick)) == ["no_gradient"]
    later = lonely(0, checkpoint=first.checkpoint)
    assert findings_of(later, sick) == []


def test_a_sweep_may_change_a_limit(lonely: Any):
    for look, limit in ((Tensor.detach, "no_gradient_updates"), (lambda values: values * 0, "zero_gradient_updates")):
        (finding,) = findings_of(lonely(0, thresholds={limit: 3.0}), Regression(lambda look=look: Net(look)))
        assert finding.step == 3
    often = findings_of(lonely(0, thresholds={"clip_always_updates": 7.0}), Regression(Net), clip_norm=1e-3)
    assert [(one.check_name, one.step) for one in often] == [("clip_always", 7)]
