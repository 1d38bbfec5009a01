"""The callback for Hugging Face's trainer measures what that trainer measures, and names diseases."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.trial import Severity
from workloads.probes.huggingface import HealthCallback

with pytest.MonkeyPatch.context() as hidden:  # transformers takes a loaded marimo for a notebook, and asks for IPython
    hidden.delitem(sys.modules, "marimo", raising=False)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SIZE = {
    "vocab_size": 17,
    "n_positions": 8,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROWS = torch.randint(0, 17, (64, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., tuple[Trainer, HealthCallback]]:
    def run(
        spoil: Callable[[nn.Module], Any] = nn.Module.train, watches: bool = True, runs: bool = True, **settings: Any
    ) -> Any:
        rows = [{"input_ids": row, "labels": row} for row in ROWS]
        data = {"train_dataset": rows} | {name: settings.pop(name) for name in list(settings) if "dataset" in name}
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**SIZE))
        spoil(model)
        arguments = {
            "max_steps": 22, "logging_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        }  # fmt: skip
        callback = HealthCallback(on_finding=lambda finding: None)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(tmp_path), **{**arguments, **settings}),
            **data,
            callbacks=[callback] if watches else [],
        )
        if runs:
            trainer.train()
        return trainer, callback

    return run


def test_a_healthy_training_is_measured_and_told_nothing_and_changes_no_number(trained: Callable[..., Any]):
    trainer, callback = trained()
    plain, _ = trained(watches=False)
    assert callback.findings == []
    assert callback.health.step == 22
    logged, expected = trainer.state.log_history[:2], plain.state.log_history[:2]
    assert [one["loss"] for one in logged] == [one["loss"] for one in expected]
    for one in logged:
        assert one["grad/preclip/total"] == pytest.approx(one["grad_norm"], rel=1e-5)  # the trainer's own, in float32
        assert one["grad/applied/total"] == pytest.approx(0.5, rel=1e-4)
        assert {"grad/preclip/transformer.wte", "grad/preclip/transformer.h.1"} <= one.keys()
        assert one["time/tokens_per_second"] * one["time/step_seconds"] == pytest.approx(
            2 * 2 * 8
        )  # rows, micro, tokens
    assert not callback.health.optimizer._optimizer_step_pre_hooks


def test_a_part_that_is_cut_off_is_named(trained: Callable[..., Any]):
    def cut_off(model: Any) -> None:
        model.transformer.h[1].register_forward_hook(lambda block, inputs, output: output.detach())

    _, callback = trained(cut_off)
    (finding,) = callback.findings
    assert (finding.check_name, finding.severity, finding.step) == ("no_gradient", Severity.WARNING, 20)


def test_a_loss_that_is_not_finite_is_told_although_the_trainer_hides_it(trained: Callable[..., Any]):
    def overflow(model: Any) -> None:
        model.lm_head.register_forward_hook(lambda head, inputs, logits: logits * torch.inf)

    trainer, callback = trained(overflow, max_steps=10)
    assert trainer.state.log_history[0]["loss"] == 0.0  # this trainer's word for NaN
    assert {(one.check_name, one.severity) for one in callback.findings} >= {
        ("nonfinite_update", Severity.ERROR),
    }


def test_a_model_that_learns_its_rows_by_heart_is_named_by_the_trainers_own_evaluation(trained: Callable[..., Any]):
    held_out = [{"input_ids": row, "labels": row} for row in ROWS.flip(1)[:8]]
    learns = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "train_dataset": [
        {"input_ids": ROWS[0], "labels": ROWS[0]} for _ in range(64)
    ]}  # fmt: skip
    _, callback = trained(eval_strategy="steps", eval_steps=22, eval_dataset=held_out, **learns)
    assert "loss_too_good" in [one.check_name for one in callback.findings]
    _, healthy = trained(eval_strategy="steps", eval_steps=22, eval_dataset=held_out)
    assert healthy.findings == []
    assert healthy.health.metrics()["val/loss"] > 0


RAGGED = [
    {"input_ids": row, "labels": row.masked_fill(torch.arange(8) > place % 8, -100)} for place, row in enumerate(ROWS)
]
WINDOWS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "logging_steps": 1}


@pytest.mark.parametrize("max_steps", [8, 9])  # the ninth window is of one row, the end of the data
def test_the_loss_of_an_update_is_the_trainers_own_however_its_micro_batches_count(
    trained: Callable[..., Any], max_steps: int
):
    trainer, callback = trained(max_steps=max_steps, train_dataset=[*RAGGED, RAGGED[7]], **WINDOWS)
    own = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert callback.health.metrics()["train/loss"] == pytest.approx(own[-1], rel=1e-5)  # float32, summed otherwise


def test_losses_of_many_micro_batches_are_not_too_good(trained: Callable[..., Any]):
    settings = {**WINDOWS, "gradient_accumulation_steps": 12, "max_steps": 3}  # a part is a twelfth of the loss
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": RAGGED[:8]}
    _, callback = trained(**settings, **evaluation)
    assert callback.findings == []


def test_a_callback_that_is_used_again_after_a_training_that_raised_counts_once(trained: Callable[..., Any]):
    calls = iter(range(10**6))

    def break_once(model: Any) -> None:
        def count(head: Any, inputs: Any, logits: Any) -> None:
            if next(calls) == 7:
                raise RuntimeError("no such kernel")

        model.lm_head.register_forward_hook(count)

    trainer, callback = trained(break_once, runs=False)
    with pytest.raises(RuntimeError, match="no such kernel"):
        trainer.train()
    trainer.train()
    measured = callback.health.metrics()
    assert measured["time/tokens_per_second"] * measured["time/step_seconds"] == pytest.approx(2 * 2 * 8)
    assert not trainer.model._forward_hooks


def test_without_the_library_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "workloads.probes.huggingface")
    with pytest.raises(ImportError, match="pip install 'transformers"):
        importlib.import_module("workloads.probes.huggingface")
