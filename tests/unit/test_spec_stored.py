"""The stored form of a sweep: all of it, as JSON and as a file that can be run again. Opens no database."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from orchestrator.spec import SweepSpec, from_json, parse_sweep, spec_difference, to_json
from orchestrator.spec.document import parse_document
from orchestrator.spec.problems import Problems
from orchestrator.spec.sweep_spec import Budget, Schedule, When
from orchestrator.spec.yaml_text import flow
from orchestrator.workload import describe

SWEEPS = sorted((Path(__file__).parents[2] / "sweeps").glob("*.yaml"))

# The example of the interface, word for word.
DOCUMENTED = """\
# Does the router z-loss keep the logits small without hurting the loss?   (the head comment becomes the description)
name: zloss                      # default: the file's stem; [a-z][a-z0-9_]{0,39}, other characters become _
workload: moe_router             # a name from `orch workloads`, or package.module:Class
metric: {name: val/mse, mode: min}
params:                          # one namespace: the fields of the workload's Config. A plain value is fixed.
  steps: 800
  c_z: {grid: [0, 1e-4, 1e-3, 1e-2]}
  k: {grid: [1, 2]}
  precision: {grid: [fp32, bf16]}
  lr: {loguniform: [1e-3, 1e-2]}
  router_offset: {grid: [0, 300]}
  batch_size: {grid: [128, 256]}
  accumulation_steps: {grid: [2, 1]}
  seed: {grid: [0, 1, 2]}        # or  seeds: 3
when:                            # this axis exists only where the condition holds; elsewhere its default
  router_offset: {precision: bf16}
zip:                             # axes that move together
  - [batch_size, accumulation_steps]
exclude:                         # points that make no sense
  - {k: 1, c_z: 1e-2}
search: {algorithm: random, samples: 2, seed: 0}    # grid (default) | random | optuna {sampler: tpe|gp|cmaes|qmc}
scheduler: {algorithm: asha, max_steps: 800, grace_steps: 100, reduction_factor: 3}   # default: none
unstable: {metric: val/mse, above: 2.0, relative_to: {precision: fp32}}   # a ratio to the trial that differs only there; without relative_to, absolute
resources: {cpu: 1, gpu: 0, max_concurrent: 2, trial_time: 30m}      # max_concurrent counts worker processes
fuse: auto                       # auto | off | a largest group size
retries: 0                       # worker death, out of memory, timeout; `retry_on: any` adds exceptions
budget: {trials: 500, time: 2h}  # smaller than a full grid: refused; with samples: caps them
stop: {diverged: true}
log_every: 10                    # steps between reports; the last step and findings are always reported
checkpoint_every: 100            # steps; also on a signal
preflight: true
tags: {team: router}
"""  # noqa: E501

OPTUNA = """\
workload: moe_gpt
metric: [val/loss, {name: router/load_max_over_mean, mode: max}]
params:
  lr: {loguniform: [1e-4, 1e-2]}
  c_z: {choice: [0, {loguniform: [1e-5, 1e-1]}]}
  dropout: {uniform: [0, 0.5], step: 0.1}
  precision: {grid: [fp32, bf16, fp16]}
seeds: 2
when: {c_z: {precision: [fp32, fp16]}}
exclude: [{precision: fp32, dropout: [0.1, 0.3], seed: 1}, {dropout: 0}]
search: {algorithm: optuna, samples: 4, sampler: nsga2, enqueue: [{lr: 1e-3, c_z: 0}]}
stop: {on: [loss_spike]}
health: {thresholds: {spike_sigmas: 8}}
tags: {note: 'no: "yes" #\\u00e9', year: '2024'}
"""


def parse(text: str, *overrides: str) -> SweepSpec:
    return parse_sweep(text, "t.yaml", describe, overrides)


def stored(spec: SweepSpec) -> dict[str, object]:
    """As the ledger gives it back."""
    document: dict[str, object] = json.loads(json.dumps(to_json(spec), allow_nan=False))
    return document


def test_the_documented_example_is_read_in_full():
    spec = parse(DOCUMENTED)
    assert spec.when == {"router_offset": When({"precision": ("bf16",)}, 0.0)}
    assert spec.zipped == (("batch_size", "accumulation_steps"),)
    assert spec.exclude == ({"k": (1,), "c_z": (0.01,)},)
    assert spec.schedule == Schedule("asha", 800, 100, 3.0)
    assert spec.budget == Budget(500, 7200.0)
    assert (spec.name, spec.search.samples, spec.resources.trial_time_s) == ("zloss", 2, 1800.0)
    assert spec.description.startswith("Does the router z-loss keep the logits small")


@pytest.mark.parametrize("text", [DOCUMENTED, OPTUNA, *(path.read_text() for path in SWEEPS)])
def test_the_resolved_file_says_the_same_and_resolves_to_itself(text):
    spec = parse(text)
    assert from_json(stored(spec), describe) == spec
    again = parse(str(to_json(spec)["resolved"]))
    assert spec_difference(to_json(spec), to_json(again)) == []
    assert {**to_json(again), "source": None} == {**to_json(spec), "source": None}


def test_the_example_of_the_documentation_is_read_as_that_of_the_interface():
    page = (SWEEPS[0].parents[1] / "docs" / "sweeps.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    assert spec_difference(to_json(parse(example)), to_json(parse(DOCUMENTED))) == []


def test_the_resolved_file_holds_what_the_command_line_changed():
    spec = parse(DOCUMENTED, "params.c_z={grid: [0, 1e-3]}", "search.samples=5", "scheduler=none", "budget.trials=null")
    lines = str(to_json(spec)["resolved"]).splitlines()
    assert "  c_z: {grid: [0.0, 0.001]}" in lines
    assert "search: {algorithm: random, seed: 0, samples: 5}" in lines
    assert "budget: {time: 7200.0}" in lines
    assert not any(line.startswith("scheduler") for line in lines)
    assert lines[0].startswith("# Does the router z-loss keep")


TEXTS = [
    "off",
    "1e-3",
    "null",
    "~",
    "",
    " a ",
    "a: b",
    "a #b",
    "x:y",
    "[1",
    "é\n\t\x85\u2028😀",
    "\U000e0001",
    '"',
    "010",
]
NUMBERS = [1e300, 5e-324, 1e16, 0.1, -0.0, math.inf, -math.inf, 2**62]


@pytest.mark.parametrize("value", [*TEXTS, *NUMBERS, True, None, [], {}, [[1], {"a": [None]}], {"1": "2"}])
def test_a_value_is_written_so_that_it_reads_back_as_itself(value):
    problems = Problems()
    read = parse_document(f"key: {flow(value)}", "t.yaml", problems).plain()["key"]
    problems.raise_if_any()
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("when={c_z: {precision: fp32}}", "when.c_z"),
        ("exclude=[{dropout: 0}]", "exclude"),
        ("search.sampler=tpe", "search.sampler"),
        ("search.enqueue=null", "search.enqueue"),
        ("metric=val/loss", "more_metrics"),
    ],
)
def test_a_change_of_what_is_trained_or_told_is_a_difference(override, path):
    (line,) = spec_difference(to_json(parse(OPTUNA)), to_json(parse(OPTUNA, override)))
    assert line.startswith(path)


def test_another_scheduler_or_zip_is_a_difference_and_a_larger_budget_is_none():
    old = to_json(parse(DOCUMENTED))
    assert spec_difference(old, to_json(parse(DOCUMENTED, "budget={trials: 600}"))) == []
    assert spec_difference(old, to_json(parse(DOCUMENTED, "scheduler.grace_steps=50"))) == [
        "scheduler.grace_steps: 100 -> 50"
    ]
    assert spec_difference(old, to_json(parse(DOCUMENTED, "zip=null"))) != []


def test_another_order_or_spelling_of_what_ties_axes_together_is_no_difference():
    other = (
        DOCUMENTED.replace("[batch_size, accumulation_steps]", "[accumulation_steps, batch_size]")
        .replace("{k: 1, c_z: 1e-2}", "{c_z: [0.01], k: 1}")
        .replace("{precision: bf16}\n", "{precision: [bf16]}\n")
        .replace("scheduler: {algorithm: asha, max_steps: 800,", "scheduler: {max_steps: 800, algorithm: asha,")
    )
    assert spec_difference(to_json(parse(DOCUMENTED)), to_json(parse(other))) == []


def test_a_sweep_from_before_these_settings_is_no_different():
    new = to_json(parse("workload: moe_router\nmetric: val/mse\nparams: {k: {grid: [1, 2]}}\n"))
    later = ("more_metrics", "when", "zip", "exclude", "scheduler", "budget", "resolved")
    old = {key: value for key, value in new.items() if key not in later}
    old["search"] = {"algorithm": "grid", "seed": 0, "sampler": "tpe"}
    assert spec_difference(old, new) == spec_difference(new, old) == []
