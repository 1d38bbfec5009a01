"""The probes of the loss and of its scale see spikes, plateaus, leaks and overflow, and stay quiet otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from orchestrator.trial import Finding, Severity
from workloads.char_gpt.config import Config
from workloads.char_gpt.train import CharGpt
from workloads.engine.training import Training
from workloads.probes.catalogue import NEVER, Thresholds
from workloads.probes.loss import LossProbe
from workloads.probes.loss_scale import LossScaleProbe, lost_shares

TINY = {"width": 16, "context": 16, "depth": 1, "heads": 2, "batch_size": 4, "num_held_out_windows": 8}


def normal(num: int, mean: float = 2.0, sigma: float = 0.05, seed: int = 0) -> list[float]:
    drawn: list[float] = (mean + sigma * torch.randn(num, generator=torch.Generator().manual_seed(seed))).tolist()
    return drawn


def told(losses: Iterable[float], probe: LossProbe | None = None) -> list[Finding]:
    probe = probe or LossProbe(Thresholds())
    return [finding for step, loss in enumerate(losses, 1) for finding in probe.see(step, loss)]


def spikes(findings: Sequence[Finding]) -> list[tuple[int | None, Severity]]:
    return [(one.step, one.severity) for one in findings if one.check_name == "loss_spike"]


def test_a_spike_is_told_at_its_step_and_noise_is_not():
    assert spikes(told([*normal(60), 3.0, *normal(5)])) == [(61, Severity.WARNING)]
    assert all(spikes(told(normal(2000, seed=seed))) == [] for seed in range(10))


def test_the_long_tails_of_losses_of_few_rows_are_at_most_worth_a_note():
    exponential = torch.distributions.Exponential(1.0)
    torch.manual_seed(0)
    found = [spikes(told(exponential.sample((1500,)).tolist())) for _ in range(10)]
    assert not any(severity is Severity.WARNING for run in found for _, severity in run)


def test_one_odd_batch_is_a_note_and_two_in_a_row_are_a_warning():
    quiet = normal(60)
    assert [severity for _, severity in spikes(told([*quiet, 2.4]))] == [Severity.INFO]
    assert [severity for _, severity in spikes(told([*quiet, 2.4, 2.4]))] == [Severity.INFO, Severity.WARNING]


@pytest.mark.parametrize("blinding", [math.nan, math.inf, -math.inf, 1e30])
def test_neither_a_spike_nor_what_is_not_finite_blinds_the_watch(blinding: float):
    probe = LossProbe(Thresholds())
    told([*normal(60), *[blinding] * 3, *normal(3)], probe)
    assert all(math.isfinite(value) and value < 3 for value in probe.recent)
    assert spikes(told([3.0], probe))


def test_a_level_that_lasts_becomes_the_new_normal():
    found = spikes(told([*normal(60), *normal(100, mean=4.0)]))
    assert [step for step, _ in found] == list(range(61, 77))  # sixteen updates, then it is believed
    # After that a spike is measured from there.
    assert (161, Severity.WARNING) in spikes(told([*normal(60), *normal(100, mean=4.0), 9.0]))


def test_losses_of_zero_and_below_are_watched_as_others():
    assert spikes(told([*[0.0] * 60, 0.5]))
    assert spikes(told([*normal(60, mean=-3.0), -1.0]))
    assert spikes(told([-5.0] * 200)) == []


@pytest.mark.parametrize("throws_out", [False, True])
def test_an_update_that_throws_the_model_out_is_a_spike_of_the_run(lonely: Any, throws_out: bool):
    context = lonely(0)
    training = Training.begin(CharGpt(), Config(**TINY, steps=60, optimizer="sgd", clip_norm=None, lr=0.05), context)
    for step in range(1, 55):
        training.trainer.optimizer.param_groups[0]["lr"] = 20.0 if throws_out and step == 50 else 0.05
        training.advance()
    told_of = [(one.step, one.severity) for one in context.findings if one.check_name == "loss_spike"]
    assert told_of == ([(51, Severity.WARNING)] if throws_out else [])


def test_the_limits_can_be_changed():
    short = LossProbe(Thresholds(spike_window=8.0))
    assert spikes(told([*normal(9), 3.0], short))
    assert len(short.recent) == 8
    assert spikes(told([*normal(60), 3.0], LossProbe(Thresholds(spike_sigmas=1000.0)))) == []
    assert spikes(told([*[2.0] * 60, 9.0], LossProbe(Thresholds(spike_sigmas=NEVER)))) == []
    assert told([2.0] * 600, LossProbe(Thresholds(plateau_updates=NEVER))) == []
    early = told([*normal(60), *normal(8, mean=4.0)], LossProbe(Thresholds(spike_new_level=4.0)))
    assert [step for step, _ in spikes(early)] == [61, 62, 63, 64]


def test_a_loss_that_has_stopped_falling_is_worth_a_note_and_a_falling_one_is_not():
    falling = [4.0 - 0.002 * step for step in range(600)]
    assert not told(falling)
    (plateau, *again) = told(normal(600, sigma=0.001))
    assert (plateau.check_name, plateau.severity, plateau.step) == ("loss_plateau", Severity.INFO, 500)
    assert {one.check_name for one in again} <= {"loss_plateau"}


def held_out(*pairs: tuple[float, float]) -> list[Finding]:
    probe = LossProbe(Thresholds())
    return [one for step, (train, val) in enumerate(pairs, 1) for one in probe.held_out(step, train, val)]


def test_a_training_loss_far_below_the_held_out_one_is_a_warning_also_when_that_rises():
    assert held_out((2.0, 2.1), (1.0, 1.2), (0.5, 0.8)) == []
    learned_by_heart = held_out((2.0, 2.1), (0.01, 1.2), (0.01, 1.2))
    assert [one.severity for one in learned_by_heart] == [Severity.WARNING]  # the median of three reports
    (overfitted,) = held_out((2.0, 4.7), (0.01, 8.0), (0.01, 10.0))
    assert overfitted.severity is Severity.WARNING  # so small data are learned; a leak has an error of its own
    assert "that has risen from 4.7" in overfitted.message
    assert held_out((math.nan, 1.0), (2.0, math.nan), (-1.0, 1.0)) == []  # not finite, or no loss that ends at 0


def test_targets_that_are_not_shifted_make_the_loss_too_good(lonely: Any):
    found = {}
    for bug in ("none", "unshifted_targets"):
        context = lonely(0, log_every=10)
        list(CharGpt().run(Config(**TINY | {"steps": 120}, lr=2e-2, bug=bug, eval_every=10), context))
        found[bug] = {one.check_name: one.severity for one in context.findings if one.check_name == "loss_too_good"}
    assert found == {"none": {}, "unshifted_targets": {"loss_too_good": Severity.WARNING}}


def skips(applied: Sequence[bool]) -> list[int | None]:
    probe = LossScaleProbe(Thresholds())
    return [one.step for step, ok in enumerate(applied, 1) for one in probe.see(step, 1024.0, ok)]


def test_two_skips_in_a_row_are_told_once_the_scale_has_settled():
    settled = [True] * 20
    assert skips([False, False, False, *settled]) == []  # the scale starts too high on purpose
    assert skips([*settled, False, True, False, True]) == []  # how a scaler finds its limit
    assert skips([*settled, False, False]) == [22]


def test_the_share_that_was_lost_is_counted_within_rows_and_columns_that_live():
    gradient = torch.ones(3, 4)
    gradient[1], gradient[:, 3] = 0.0, 0.0  # a symbol that was not in the batch, a unit that no ReLU lets through
    assert lost_shares([gradient], 1.0) == (0.0, 0.0)
    gradient[2, :3] = torch.tensor([0.0, 2.0**-15, -(2.0**-14)])
    assert lost_shares([gradient], 1.0) == (2 / 6, 0.0)  # 2^-14 is float16's smallest number with all its digits
    assert lost_shares([gradient], 2.0) == (1 / 6, 0.0)
    assert lost_shares([gradient, torch.tensor(0.0), torch.zeros(0, 3)], 1.0) == (2 / 6, 0.0)
    assert lost_shares([torch.tensor([math.inf, 1.0]), torch.tensor([math.nan, 1.0])], 1.0) == (0.0, 0.5)
    assert lost_shares([], 1.0) == (0.0, 0.0)
    assert lost_shares([torch.ones(2)], 0.0) == (1.0, 0.0)  # what is left of a scale after a NaN in every loss


def test_a_relu_network_loses_nothing_to_units_that_are_off():
    torch.manual_seed(0)
    inputs, up, down = torch.randn(64, 8), torch.randn(8, 32, requires_grad=True), torch.randn(4, 32).requires_grad_()
    hidden = (inputs @ up - 6.0).relu()  # 13 of 32 units are off for all 64 rows
    gradients = torch.autograd.grad((hidden @ down.t()).square().mean(), [up, down])
    assert (gradients[1] == 0).float().mean() > 0.2  # the limit
    assert lost_shares(gradients, 65536.0)[0] < 0.01


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_run_whose_gradient_overflows_again_and_again_is_told(lonely: Any, is_eager: bool):
    context = lonely(0, log_every=10)
    training = Training.begin(CharGpt(), Config(**TINY, steps=40, precision="fp16"), context)
    if is_eager:  # after 25 updates the scale is far too large, and halving it does not help soon
        training.trainer.scaler = torch.amp.GradScaler("cpu", growth_factor=2.0**16, growth_interval=25)
    for _ in range(40):
        training.advance()
    assert [(one.check_name, one.step) for one in context.findings] == ([("scaler_skips", 27)] if is_eager else [])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_fp16_run_raises_no_alarm_and_reports_what_it_lost(lonely: Any, seed: int):
    context = lonely(seed, log_every=10)
    reports = list(CharGpt().run(Config(**TINY, steps=100, precision="fp16", seed=seed, eval_every=100), context))
    assert [one for one in context.findings if one.severity is not Severity.INFO] == []
    assert all(report.metrics["grad/underflow_share"] < 0.01 for report in reports)  # 0.2 is the limit
    assert all(report.metrics["grad/overflow_share"] == 0 for report in reports)


def test_the_shares_of_an_earlier_update_are_not_reported_as_this_ones(lonely: Any):
    training = Training.begin(CharGpt(), Config(**TINY, steps=9, precision="fp16"), lonely(0))
    for is_thorough in (True, True, False):
        update, hyper = training.advance()
        assert ("grad/underflow_share" in training.report(update, hyper).metrics) == is_thorough


@pytest.mark.parametrize(("scale", "is_lost"), [(65536.0, False), (2.0**-9, True)])
def test_a_scale_that_is_too_small_loses_the_gradient(lonely: Any, scale: float, is_lost: bool):
    context = lonely(0, log_every=1)
    training = Training.begin(CharGpt(), Config(**TINY, steps=6, precision="fp16"), context)
    training.trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(6):
        update, hyper = training.advance()
    share = training.report(update, hyper).metrics["grad/underflow_share"]
    assert (share > Thresholds().underflow_share) == is_lost
    assert [one.check_name for one in context.findings] == (["gradient_underflow"] if is_lost else [])
