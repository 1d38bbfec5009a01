"""The callback for Lightning's trainer measures what a module's own hook sees, and names diseases."""

from __future__ import annotations

import csv
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestrator.trial import Severity
from workloads.probes.lightning import HealthCallback

ROWS = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))


class Net(pl.LightningModule):
    """Two layers; `look` sees the first one's output."""

    def __init__(self, look: Any = lambda hidden: hidden) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.look = nn.Linear(4, 8), nn.Linear(8, 1), look
        self.norms: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], place: int) -> Tensor:
        (rows,) = batch
        loss = (self.last(torch.tanh(self.look(self.first(rows)))) - rows.sum(-1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = [one.grad.double().square().sum() for one in self.parameters() if one.grad is not None]
        self.norms.append(math.sqrt(sum(squares)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Forgetful(Net):
    def optimizer_zero_grad(self, *seen: Any) -> None:
        """The disease: nothing is cleared."""


class OwnClip(Net):
    def configure_gradient_clipping(self, *seen: Any, **settings: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Pair(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], place: int) -> None:
        """Trains nothing."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters()) for part in (self.first, self.last)]


def trained(module: Net, *callbacks: HealthCallback, **settings: Any) -> pl.Trainer:
    trainer = pl.Trainer(**{
        "max_steps": 22, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "callbacks": list(callbacks), "log_every_n_steps": 10, **settings,
    })  # fmt: skip
    rows = DataLoader(TensorDataset(ROWS), batch_size=2)
    trainer.fit(module, rows, DataLoader(TensorDataset(ROWS[:2])) if "val_check_interval" in settings else None)
    return trainer


def quiet(**settings: Any) -> HealthCallback:
    return HealthCallback(on_finding=lambda finding: None, **settings)


def test_a_healthy_training_is_measured_logged_and_told_nothing_and_changes_no_number(tmp_path: Path):
    callback, module, plain = quiet(), Net(), Net()
    trainer = trained(module, callback, logger=pl.loggers.CSVLogger(tmp_path))
    trained(plain)
    assert callback.findings == []
    assert callback.health.step == 22
    assert module.losses == plain.losses
    with Path(trainer.logger.log_dir, "metrics.csv").open() as table:
        logged = [float(row["grad/preclip/total"]) for row in csv.DictReader(table)]
    assert logged == pytest.approx([module.norms[9], module.norms[19]], rel=1e-6)  # the logger's are float32
    assert callback.health.metrics()["grad/clipped_share"] == 1.0
    assert not callback.health.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("module", "check", "severity", "step"),
    [
        (Forgetful(), "gradients_not_cleared", Severity.ERROR, 2),
        (Net(Tensor.detach), "no_gradient", Severity.WARNING, 20),
    ],
)
def test_a_disease_is_named(module: Net, check: str, severity: Severity, step: int):
    callback = quiet()
    trained(module, callback, gradient_clip_val=None)
    (finding,) = callback.findings
    assert (finding.check_name, finding.severity, finding.step) == (check, severity, step)


def test_the_losses_of_an_update_are_its_own_and_the_validation_loss_is_held_against_them():
    class Validated(Net):
        def validation_step(self, batch: list[Tensor], place: int) -> None:
            self.log("val_loss", 50.0 * self.losses[-1] if self.losses else 0.0)

    callback, module = quiet(), Validated()
    trained(module, callback, num_sanity_val_steps=1, val_check_interval=22)
    assert callback.health.metrics()["train/loss"] == pytest.approx(sum(module.losses[-2:]) / 2)
    assert [one.check_name for one in callback.findings] == ["loss_too_good"]


def test_a_module_with_its_own_clip_is_not_held_against_the_trainers():
    callback = quiet()
    trained(OwnClip(), callback)
    assert callback.findings == []


def test_of_several_optimisers_the_callback_says_that_it_watches_none(caplog: pytest.LogCaptureFixture):
    callback = quiet()
    trained(Pair(), callback, max_steps=-1, max_epochs=1, accumulate_grad_batches=1, gradient_clip_val=None)
    assert callback.health is None
    assert "2 optimisers" in caplog.text


def test_without_the_library_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "workloads.probes.lightning")
    with pytest.raises(ImportError, match="pip install lightning, or pytorch-lightning"):
        importlib.import_module("workloads.probes.lightning")
