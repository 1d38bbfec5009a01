"""What a GPT keeps for its backward pass: published figures, a closed form by the byte, and a real forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from orchestrator.workload import describe, flatten
from workloads.memory.config import PRESETS, Config
from workloads.memory.measure import Memory, attention_kernel, measure, metrics_of, run_forward

SMALL: dict[str, Any] = {"depth": 3, "heads": 2, "width": 32, "vocabulary": 50, "context": 16, "batch_size": 2}


def saved(**settings: Any) -> float:
    return measure(Config(**settings))["memory/saved_bytes"]


def test_gpt2_small_has_the_published_weights():
    metrics = measure(Config())
    assert metrics["memory/num_parameters"] == 124_439_808
    assert metrics["memory/weight_bytes"] == 4 * 124_439_808
    assert round(metrics["memory/weight_megabytes"], 1) == 497.8


@pytest.mark.parametrize(
    ("settings", "megabytes"),
    [
        ({}, 816.9),
        ({"checkpointing": True}, 249.9),
        ({"batch_size": 8}, 6540),
        ({"batch_size": 8, "checkpointing": True}, 2000),
    ],
)
def test_gpt2_small_keeps_what_was_published(settings: dict[str, Any], megabytes: float):
    assert measure(Config(**settings))["memory/saved_megabytes"] == pytest.approx(megabytes, rel=0.02)


def test_most_of_what_a_checkpointed_model_keeps_are_log_probabilities():
    metrics = measure(Config(batch_size=8, checkpointing=True))
    kept = metrics["memory/log_probabilities_share"] * metrics["memory/saved_bytes"]
    assert kept == pytest.approx(8 * 1024 * 50257 * 4, rel=1e-12)  # 1.647 of 2.0 GB; the share is a rounded quotient
    assert 0.8 < metrics["memory/log_probabilities_share"] < 0.85


@pytest.mark.parametrize("settings", [{}, {"batch_size": 4, "context": 128}, {**SMALL, "tied": False}])
def test_every_section_keeps_exactly_what_its_operations_need(settings: dict[str, Any]):
    config = Config(**settings)
    assert config.width
    tokens, width, heads = config.batch_size * config.context, config.width, config.heads
    # Floats of a block, in widths: stream, norm, qkv 3, attention's output, then stream, norm, up 4, gelu 4; apart from
    # them two numbers per norm, and the log-sum-exp of each head.
    block = 4 * tokens * (width * (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) + 2 + 2 + heads)
    expected = {
        "embed": 8 * tokens,  # the tokens themselves
        **{f"block{layer}": block for layer in range(config.depth)},
        "readout": 4 * tokens * (2 * width + 2),
        "loss": 4 * tokens * config.vocabulary + 8 * tokens + 4,  # log-probabilities, targets, and their number
    }
    metrics = measure(config)
    assert {name: metrics[f"memory/saved_bytes/{name}"] for name in expected} == expected
    assert metrics["memory/saved_bytes"] == sum(expected.values())


def test_a_checkpointed_block_keeps_its_input_only():
    plain, checkpointed = (measure(Config(checkpointing=checkpointing)) for checkpointing in (False, True))
    for layer in range(12):
        assert checkpointed[f"memory/saved_bytes/block{layer}"] == 4 * 1024 * 768
    for section in ("embed", "readout", "loss"):
        assert checkpointed[f"memory/saved_bytes/{section}"] == plain[f"memory/saved_bytes/{section}"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"checkpointing": True},
        {"attention": "math"},
        {"attention": "math", "batch_size": 1},  # torch multiplies views where several rows need copies
        {"dropout": 0.2},
        {"dropout": 0.2, "checkpointing": True},
        {"tied": False},
    ],
)
def test_without_values_the_count_is_that_of_a_real_forward_pass(settings: dict[str, Any], precision: Any):
    config = Config(**SMALL | settings, precision=precision)
    with attention_kernel(config.attention):
        model, kept = run_forward(config)
    assert all(storage.data_ptr() for storage in kept.sections)  # this one is real
    assert measure(config) == metrics_of(model, kept)


def test_a_model_far_larger_than_any_memory_is_measured():
    assert saved(preset="gpt2-xl", batch_size=1000) > 5e12


def test_attention_that_is_written_out_keeps_its_matrix():
    more = saved(attention="math") - saved()
    matrix, log_sum_exp, scaled_query_and_key = 12 * 1024 * 1024 * 4, 12 * 1024 * 4, 2 * 1024 * 768 * 4
    assert more == 12 * (matrix + scaled_query_and_key - log_sum_exp)


def test_bfloat16_halves_a_block_but_keeps_copies_of_the_weights():
    exact, rounded = (measure(Config(precision=precision)) for precision in ("fp32", "bf16"))
    copied = 2 * (12 * 768**2 + 9 * 768)  # of a block's four matrices ...
    halved = (exact["memory/saved_bytes/block0"] - 4 * 1024 * 16) / 2
    assert rounded["memory/saved_bytes/block0"] == pytest.approx(halved + copied, rel=0.01)
    assert rounded["memory/weight_bytes"] == exact["memory/weight_bytes"]  # the masters stay float32


def test_nothing_is_drawn_from_the_global_generator_and_no_setting_stays():
    before = torch.get_rng_state()
    measure(Config(**SMALL, attention="math", dropout=0.5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_logged_as_what_it_means_and_a_set_field_wins(preset: Any):
    resolved = flatten(Config(preset=preset))
    assert (resolved["depth"], resolved["heads"], resolved["width"]) == PRESETS[preset]
    assert Config(**resolved) == Config(preset=preset)
    assert Config(preset=preset, depth=2).depth == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide width=768"),
        ({"preset": "gpt3"}, "gpt2-medium"),
        ({"depth": 0}, "greater than or equal to 1"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused_with_the_reason(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Config(**settings)


def test_there_is_one_report_and_all_it_reports_is_declared(lonely: Any):
    (report,) = Memory().run(Config(**SMALL), lonely())
    assert all(describe("memory").declares(name) for name in report.metrics)
    blocks = [value for name, value in report.metrics.items() if name.startswith("memory/weight_bytes/")]
    assert sum(blocks) == report.metrics["memory/weight_bytes"]
