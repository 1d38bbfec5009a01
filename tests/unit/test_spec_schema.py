"""The JSON Schema of sweep files against the files themselves, judged by the jsonschema library."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from orchestrator.cli import cli
from orchestrator.errors import SpecError
from orchestrator.spec import parse_sweep, to_json
from orchestrator.spec.document import parse_document
from orchestrator.spec.json_schema import sweep_schema
from orchestrator.spec.parse import KEYS
from orchestrator.spec.problems import Problems
from orchestrator.workload import Description, describe, shipped_names

SWEEPS = sorted((Path(__file__).parents[2] / "sweeps").glob("*.yaml"))
EVERYTHING = """\
name: all
workload: moe_router
metric: [val/mse, {name: router/load/3, mode: max}]
show: [val/router/z]
params:
  steps: 800
  c_z: {choice: [0, {loguniform: [1e-5, 1e-1]}]}
  lr: {loguniform: [1e-3, 1e-2], step: 1e-3}
  d_hidden: {int: [8, 64], step: 8}
  clip_norm: {grid: [null, 1]}
  k: {grid: [1, 2]}
  precision: {choice: [fp32, bf16]}
  batch_size: {grid: [128, 256]}
  accumulation_steps: {grid: [2, 1]}
seeds: 3
when: {c_z: {precision: [bf16, fp32]}}
zip: [[batch_size, accumulation_steps]]
exclude: [{k: 1, c_z: 0}]
search: {algorithm: optuna, samples: 2, seed: 0, sampler: nsga2, enqueue: [{lr: 1e-3}]}
budget: {trials: 500, time: 1h30m}
unstable: {metric: val/mse, below: 0.5, relative_to: {k: 1}}
resources: {cpu: 1, gpu: 0.5, max_concurrent: 2, trial_time: 90}
fuse: 4
retries: 1
retry_on: any
stop: {diverged: false, on: [loss_spike]}
health: {thresholds: {spike_sigmas: 8}}
log_every: 10
checkpoint_every: 100
keep_checkpoints: true
preflight: false
tags: {team: router, year: 2024}
"""


def plain(text: str) -> Any:
    return parse_document(text, "t.yaml", Problems()).plain()


@cache
def validator(workload: str | None) -> Draft202012Validator:
    described = describe(workload) if workload else None
    schema = sweep_schema(described, described.config if described else None)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def errors(text: str, workload: str | None) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator(workload).iter_errors(plain(text))]


@pytest.mark.parametrize("text", [EVERYTHING, *(path.read_text() for path in SWEEPS)])
def test_a_file_that_parses_is_valid_as_written_and_as_resolved(text):
    spec = parse_sweep(text, "t.yaml", describe)
    for version in (text, str(to_json(spec)["resolved"])):
        assert errors(version, spec.workload) == []
        assert errors(version, None) == []


def test_the_schema_has_every_key_of_the_language():
    assert set(validator(None).schema["properties"]) == set(validator("moe_router").schema["properties"]) == set(KEYS)
    assert set(plain(EVERYTHING)) | {"scheduler"} == set(KEYS)


@pytest.mark.parametrize(
    "scheduler",
    [
        "asha",
        "{algorithm: asha, max_steps: 800, grace_steps: 100, reduction_factor: 3}",
        "{algorithm: median, grace_steps: 10}",
        "none",
        "{algorithm: none}",
        "{algorithm: none, max_steps: 800, perturb: [lr], quantile: 0.25}",
        "{algorithm: pbt, interval_steps: 100, perturb: [lr], quantile: 0.25, seed: 1}",
    ],
)
def test_every_scheduler_is_valid(scheduler):
    text = "workload: moe_router\nmetric: val/mse\nparams: {lr: {uniform: [1e-3, 1e-2]}}\nsearch: {algorithm: random, "
    text += f"samples: 3}}\nscheduler: {scheduler}\n"
    parse_sweep(text, "t.yaml", describe)
    assert errors(text, "moe_router") == errors(text, None) == []


ANYWHERE = [
    "serach: {algorithm: random}",
    "search: {algorithm: rndom}",
    "search: {algorithm: random, samples: 0}",
    "search: {algorithm: optuna, samples: 2, sampler: gpp}",
    "search: {algorithm: grid, samples: 3}",
    "search: {samples: 3}",
    "search: {algorithm: optuna}",
    "search: {algorithm: random, samples: 3, sampler: tpe}",
    "resources: {cpus: 2}",
    "resources: {gpu: -1}",
    "resources: {trial_time: soon}",
    "stop: {diverged: no}",
    "stop: {on: loss_spike}",
    "retries: -1",
    "retry_on: some",
    "fuse: false",
    "log_every: 2.5",
    "name: A-b",
    "seeds: 0",
    "zip: [lr, c_z]",
    "exclude: {k: 1}",
    "budget: {trials: 0}",
    "scheduler: ahsa",
    "scheduler: {max_steps: 9}",
    "scheduler: {algorithm: asha, max_step: 9}",
    "scheduler: {algorithm: asha, quantile: 0.2}",
    "scheduler: {algorithm: pbt, perturb: [lr]}",
    "unstable: {metric: val/mse}",
    "unstable: {metric: val/mse, above: 2, below: 1}",
    "tags: [a]",
    "params: {lr: {loguniform: [0, 1]}}",
    "params: {lr: {uniform: [1]}}",
    "params: {lr: {grid: []}}",
    "params: {lr: {grid: 3}}",
    "params: {lr: {grid: [1], choice: [1]}}",
    "params: {lr: {grid: [1], step: 1}}",
    "params: {k: {int: [1.5, 4]}}",
]
OF_THE_WORKLOAD = [
    "params: {acumulation_steps: 4}",
    "params: {accumulation_steps: {grid: [0, 1]}}",
    "params: {lr: {choise: [1]}}",
    "params: {lr: abc}",
    "params: {precision: bf61}",
    "params: {precision: {grid: [fp32, bf61]}}",
    "params: {offset_learnable: on}",
    "params: {clip_norm: None}",
    "params: {lr: {loguniform: [-1, 1]}}",
    "params: {c_z: {uniform: [-1, 1]}}",
    "params: {k: {uniform: [1, 4]}}",
    "params: {seed: {int: [0, 9]}}",
    "params: {k: 1, c_z: {grid: [0, 1]}}\nwhen: {c_z: {precison: fp32}}",
    "params: {k: {grid: [1, 2]}}\nexclude: [{kk: 1}]",
    "params: {lr: {uniform: [1, 2]}}\nsearch: {algorithm: random, samples: 1, enqueue: [{lrr: 1}]}",
    "params: {lr: {uniform: [1, 2]}}\nscheduler: {algorithm: pbt, interval_steps: 10, perturb: [precision]}",
    "stop: {on: [loss_spikes]}",
    "health: {thresholds: {spike_sigma: 8}}",
    "show: [val/mes]",
]


@pytest.mark.parametrize("line", [*ANYWHERE, *OF_THE_WORKLOAD])
def test_a_typical_mistake_is_invalid_here_as_it_is_when_the_file_is_read(line):
    text = f"workload: moe_router\nmetric: val/mse\n{line}\n"
    with pytest.raises(SpecError):
        parse_sweep(text, "t.yaml", describe)
    assert errors(text, "moe_router")
    assert errors(text, None) or line in OF_THE_WORKLOAD


def test_a_missing_workload_or_metric_is_invalid():
    for text in ("workload: moe_router\n", "metric: val/mse\n", "workload: char_gpt\nmetric: val/loss\n"):
        assert errors(text, "moe_router")


@pytest.mark.parametrize("name", shipped_names())
def test_every_field_of_a_shipped_workload_is_described_with_its_default(name):
    fields = describe(name).fields()
    properties = validator(name).schema["properties"]["params"]["properties"]
    assert set(fields) <= set(properties)
    for field in fields.values():
        assert properties[field.name]["description"].startswith(field.description)
        assert field.required or properties[field.name]["default"] == field.default


class Nested(BaseModel):
    lr: float = Field(0.1, gt=0)


class Odd(BaseModel):
    """Types that JSON Schema has no word for, an infinite default, a group of fields."""

    opt: Nested = Nested()
    bound: float = float("inf")
    anything: Any = None
    method: type[int] | None = None


def test_nested_fields_are_written_either_way_and_odd_types_take_anything():
    described = Description("odd", "", Odd, ("loss",), lambda: None, "tests", "odd")  # type: ignore[arg-type, return-value]
    schema = sweep_schema(described, Odd)
    Draft202012Validator.check_schema(schema)
    assert "default" not in schema["properties"]["params"]["properties"]["bound"]
    json.dumps(schema, allow_nan=False)

    def invalid(params: str) -> bool:
        text = f"workload: odd\nmetric: loss\nparams: {params}\n"
        return not Draft202012Validator(schema).is_valid(plain(text))

    assert not invalid("{opt: {lr: 1}, method: x, anything: {a: 1}}")
    assert not invalid("{opt.lr: {grid: [1, 2]}}")
    assert invalid("{opt: {lr: 0}}")
    assert invalid("{opt.lr: 0}")
    assert invalid("{opt: {lrr: 1}}")


def test_the_command_prints_the_schema_of_all_sweeps_and_of_one_workload():
    runner = CliRunner()
    whole, one = runner.invoke(cli, ["schema"]), runner.invoke(cli, ["schema", "moe_router"])
    assert json.loads(whole.output) == validator(None).schema
    assert json.loads(one.output) == validator("moe_router").schema
