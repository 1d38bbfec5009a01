"""Sweep files: what they mean, and that every mistake is told at its line before anything starts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, model_validator

from orchestrator.errors import NotFound, SpecError
from orchestrator.spec import (
    Choice,
    Grid,
    Int,
    SweepSpec,
    Uniform,
    Unstable,
    from_json,
    legal_name,
    parse_sweep,
    spec_difference,
    to_json,
)
from orchestrator.workload import Description, FieldConflict, WorkloadConfig, describe
from workloads.probes.catalogue import NEVER, THRESHOLDS

HEAD = "workload: toy\nmetric: val/mse\n"


class Opt(WorkloadConfig):
    lr: float = 0.1
    wd: float = 0.01


class Config(WorkloadConfig):
    steps: int = Field(800, ge=1)
    c_z: float = Field(0.0, ge=0)
    k: int = Field(1, ge=1)
    num_experts: int = 8
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    lr: float = Field(1e-3, gt=0)
    clip_norm: float | None = None
    checkpointing: bool = False
    accumulation_steps: int = Field(1, ge=1)
    lr_sched: str = "cosine"
    note: str = ""
    hidden: list[int] = Field([300])
    extra: dict[str, float] = Field({})
    opt: Opt = Opt()
    seed: int = 0

    @model_validator(mode="after")
    def _routing(self) -> Config:
        if self.k > self.num_experts:
            raise FieldConflict("k", f"k={self.k} experts per token, but num_experts={self.num_experts}")
        return self


class Bare(BaseModel):
    """A user's own config: no seed, infinities allowed, one required field."""

    width: int
    scale: float = 1.0


def description(name: str, config: type[BaseModel]) -> Description:
    def load() -> Any:
        raise AssertionError("parsing must not load the implementation")

    metrics = ("train/loss", "val/mse", "router/load/*")
    checks = ("loss_spike", "router_collapsed") if config is Config else ()
    thresholds = {"spike_sigmas": 6.0, "tie_share": 0.02} if config is Config else {}
    return Description(name, "", config, metrics, load, "tests", name, checks, thresholds)


def workload_of(name: str) -> Description:
    known = {"toy": Config, "bare": Bare}
    if name not in known:
        raise NotFound(f"unknown workload {name!r}; did you mean toy?")
    return description(name, known[name])


def parse(text: str, *overrides: str, name: str | None = None, file: str = "t.yaml") -> SweepSpec:
    return parse_sweep(text, file, workload_of, overrides, name)


def complaints(text: str, *overrides: str, name: str | None = None, file: str = "t.yaml") -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(text, *overrides, name=name, file=file)
    return str(caught.value).splitlines()


def only(text: str, *overrides: str) -> str:
    """The one complaint there is."""
    lines = complaints(text, *overrides)
    assert len(lines) == 1, lines
    return lines[0]


def param(line: str) -> str:
    return f"{HEAD}params:\n  {line}\n"


# --- values ---------------------------------------------------------------------------------------------------------


def test_bare_exponents_are_floats_and_one_value_in_two_spellings_is_reported_as_one():
    spec = parse(param("lr: {grid: [1e-3, 1.0e-3]}"))
    assert spec.axes["lr"] == Grid((0.001,))
    assert spec.notes == ("params.lr: 0.001 is listed more than once in grid; it counts once",)
    assert parse(param("lr: {loguniform: [1e-5, 1e-2]}") + "search: {algorithm: random, samples: 1}").axes["lr"] == (
        Uniform(1e-5, 1e-2, log=True)
    )


def test_an_integer_for_a_float_field_becomes_a_float():
    values = parse(param("c_z: {grid: [0, 1e-4, 1]}")).axes["c_z"].values
    assert [type(value) for value in values] == [float] * 3


def test_off_stays_text_in_a_text_field_and_is_refused_for_a_bool_field():
    assert parse(param("lr_sched: {grid: [cosine, off, linear]}")).axes["lr_sched"] == Grid(("cosine", "off", "linear"))
    assert only(param("checkpointing: on")).endswith("write true or false")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("clip_norm: {grid: [None, 1.0]}", "did you mean null?"),
        ("steps: 1e3", "write 1000"),
        ("steps: 1_000", "write 1000 without quotes"),
        ("lr: '1e-3'", "write 0.001 without quotes"),
        ("k: [1, 2]", "{grid: [1, 2]}"),
        ("note: 3", "put it in quotes"),
        ("precision: bf61", "did you mean bf16?"),
        ("steps:", "null is not allowed"),
        ("lr: .nan", "NaN"),
        ("hidden: [1, .nan]", "NaN"),
        ("lr: .inf", "finite"),
        ("opt: 3", "holds the fields opt.lr, opt.wd"),
        ("k: {}", "is no domain"),
    ],
)
def test_a_wrong_value_says_what_would_be_right(line, hint):
    message = only(param(line))
    assert message.startswith("t.yaml:4  params.")
    assert hint in message


def test_each_wrong_value_of_a_list_is_told():
    lines = complaints(param("accumulation_steps: {grid: [0, -1, 2.5, 1]}"))
    assert [line.split("  ")[2].split(":")[0] for line in lines] == ["0", "-1", "2.5"]


def test_infinity_is_allowed_where_the_field_allows_it():
    spec = parse("workload: bare\nmetric: val/mse\nparams: {width: 3, scale: {grid: [1, .inf, -.inf]}}\n")
    assert spec.axes["scale"] == Grid((1.0, math.inf, -math.inf))


def test_lists_keep_their_type_in_grids_and_choices():
    assert parse(param("hidden: {grid: [[300], [200, 100]]}")).axes["hidden"] == Grid(([300], [200, 100]))
    chosen = parse(param("hidden: {choice: [[300], [200, 100]]}") + "search: {algorithm: random, samples: 1}")
    assert chosen.axes["hidden"] == Choice(([300], [200, 100]))


def test_a_mapping_field_takes_a_mapping():
    assert parse(param("extra: {a: 1}")).fixed["extra"] == {"a": 1.0}


def test_a_required_field_that_is_missing_is_named():
    assert only("workload: bare\nmetric: val/mse\nparams: {scale: 2}\n") == (
        "t.yaml:3  params.width  is required (int) and has no default"
    )


# --- names ----------------------------------------------------------------------------------------------------------


def test_misspelt_keys_name_the_nearest_at_every_level():
    lines = complaints(
        HEAD
        + "params: {acumulation_steps: 4}\nserach: {algorithm: random}\nresources: {cpus: 2}\nstop: {divergd: true}\n"
    )
    text = "\n".join(lines)
    assert "unknown key params.acumulation_steps, did you mean accumulation_steps?" in text
    assert "unknown key serach, did you mean search?" in text
    assert "unknown key resources.cpus, did you mean cpu?" in text
    assert "unknown key stop.divergd, did you mean diverged?" in text


def test_an_axis_the_workload_never_reads_is_refused():
    assert "toy does not use dropout" in only(param("dropout: {grid: [0.0, 0.9]}"))


def test_three_mistyped_domain_words_are_three_problems_with_the_allowed_words():
    for names in ("abc", ("lr", "c_z", "k")):
        a, b, c = names
        lines = complaints(HEAD + f'params: {{{a}: {{"choice:": [1]}}, {b}: {{choise: [1]}}, {c}: {{values: [1]}}}}\n')
        for name in names:
            assert any(
                f"params.{name} " in line and "grid, choice, uniform, loguniform, int, logint" in line for line in lines
            )


def test_nesting_and_dots_are_one_and_overriding_one_keeps_the_sibling():
    nested, dotted = parse(param("opt: {lr: {grid: [0.2]}}")), parse(param("opt.lr: {grid: [0.2]}"))
    assert nested.axes == dotted.axes == {"opt.lr": Grid((0.2,))}
    assert workload_of("toy").resolve({"opt.lr": 0.2}).opt == Opt(lr=0.2, wd=0.01)


def test_one_field_in_two_spellings_is_given_twice():
    assert "given twice: t.yaml:4 and t.yaml:5" in only(HEAD + "params:\n  opt.lr: 1\n  opt: {lr: 2}\n")


def test_unknown_workloads_and_undeclared_objectives_carry_a_hint():
    assert only("workload: tyo\nmetric: val/mse\n") == "t.yaml:1  workload  unknown workload 'tyo'; did you mean toy?"
    assert (
        only("workload: toy\nmetric: val/mes\n")
        == "t.yaml:2  metric  toy does not report val/mes; did you mean val/mse?"
    )
    assert "it reports train/loss" in only("workload: toy\nmetric: {name: zzz}\n")
    assert parse("workload: toy\nmetric: {name: router/load/3, mode: max}\n").metric.mode == "max"


def test_an_illegal_metric_name_is_refused():
    for name in ("acc@1", "load[e0]", "a//b", "/x", "time(s)", "a" * 251):
        assert "t.yaml:2  metric.name" in only(f'workload: toy\nmetric: {{name: "{name}"}}\n'), name


def test_a_field_name_the_database_would_cut_is_refused():
    long = type("Long", (BaseModel,), {"__annotations__": {"x" * 64: int}, "x" * 64: 1})
    with pytest.raises(SpecError, match="over 63 bytes"):
        parse_sweep(HEAD, "t.yaml", lambda name: description(name, long))


def test_the_name_comes_from_the_option_then_the_file_then_its_stem():
    assert parse(HEAD, file="a/My-Sweep 2.yaml").name == "my_sweep_2"
    assert parse(HEAD, file="7b.yaml").name == "s_7b"
    assert parse("name: x1\n" + HEAD).name == "x1"
    assert parse("name: x1\n" + HEAD, name="y").name == "y"
    assert legal_name("ÄB.c") == "s_b_c"


@pytest.mark.parametrize("name", ["A-b", "", "1x", "x" * 41, "x;drop"])
def test_an_illegal_explicit_name_is_refused_with_a_legal_one(name):
    lines = complaints(HEAD, name=name)
    assert lines[0].startswith("--name  name")
    assert "; write " in lines[0]


def test_a_stem_that_is_too_long_is_refused():
    assert "40 characters" in complaints(HEAD, file="x" * 41 + ".yaml")[0]


# --- domains --------------------------------------------------------------------------------------------------------

RANDOM = "search: {algorithm: random, samples: 2}\n"


def test_all_domains_are_read():
    spec = parse(
        HEAD
        + """params:
  lr: {loguniform: [1e-3, 1e-2]}
  c_z: {choice: [0, {loguniform: [1e-4, 1e-1]}]}
  k: {int: [1, 4]}
  steps: {logint: [8, 64], step: 8}
  opt.wd: {uniform: [0, 1], step: 0.1}
  precision: {choice: [fp32, bf16]}
"""
        + RANDOM
    )
    assert dict(spec.axes) == {
        "lr": Uniform(1e-3, 1e-2, log=True),
        "c_z": Choice((0.0, Uniform(1e-4, 1e-1, log=True))),
        "k": Int(1, 4),
        "steps": Int(8, 64, log=True, step=8),
        "opt.wd": Uniform(0.0, 1.0, step=0.1),
        "precision": Choice(("fp32", "bf16")),
    }
    assert list(spec.axes)[:2] == ["lr", "c_z"]


def test_a_zero_in_a_log_range_shows_the_form_to_write():
    message = only(param("c_z: {loguniform: [0, 0.1]}") + RANDOM)
    assert "params.c_z" in message
    assert "choice: [0, {loguniform: [0.0001, 0.1]}]" in message


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("c_z: {loguniform: [-1, 1]}", "above 0"),
        ("c_z: {loguniform: [0.1, 0.1]}", "smaller"),
        ("c_z: {loguniform: [0.1, 0.01]}", "smaller"),
        ("c_z: {uniform: [0.1]}", "two finite numbers"),
        ("c_z: {uniform: [0, .inf]}", "two finite numbers"),
        ("c_z: {uniform: [a, b]}", "two finite numbers"),
        ("c_z: {uniform: [0, 1], step: 0}", "above 0"),
        ("c_z: {uniform: [0, 1], step: 2}", "larger than the range"),
        ("c_z: {uniform: [0, 1], step: 1e-300}", "step 1e-300 is too fine for"),
        ("c_z: {uniform: [-1e308, 1e308]}", "is wider than a float can hold"),
        ("c_z: {uniform: [0, 1], stpe: 0.1}", "did you mean step?"),
        ("c_z: {grid: [0, 1], step: 0.1}", "step belongs"),
        ("c_z: {grid: [0], choice: [0]}", "one domain"),
        ("c_z: {grid: []}", "at least one value"),
        ("c_z: {grid: 3}", "needs a list"),
        ("c_z: {choice: []}", "at least one value"),
        ("c_z: {grid: [{uniform: [0, 1]}]}", "a grid holds values"),
        ("c_z: {choice: [0, {grid: [1]}]}", "inside a choice"),
        ("c_z: {uniform: [-1, 1]}", "greater than or equal to 0"),
        ("c_z: {int: [0, 3]}", "write uniform: [0.0, 3.0]"),
        ("k: {uniform: [1, 4]}", "write int: [1, 4]"),
        ("k: {int: [1.5, 4]}", "whole numbers"),
        ("k: {int: [0, 4]}", "greater than or equal to 1"),
        ("lr_sched: {uniform: [0, 1]}", "string"),
        ("seed: {int: [0, 9]}", "replicate"),
    ],
)
def test_a_wrong_domain_is_refused_at_its_field(line, word):
    lines = complaints(param(line) + RANDOM)
    assert f"params.{line.split(':')[0]}" in lines[0]
    assert word in lines[0]


def test_a_step_that_misses_the_upper_end_is_noted():
    spec = parse(param("opt.wd: {uniform: [0, 1], step: 0.3}") + RANDOM)
    assert spec.notes == ("params.opt.wd: steps of 0.3 from 0.0 end at 0.9, not at 1.0",)


# --- seeds, search, combinations ------------------------------------------------------------------------------------


def test_seeds_are_a_seed_grid_wherever_they_stand():
    for text in (HEAD + "seeds: 3\n", param("seeds: 3"), param("seed: {grid: [0, 1, 2]}")):
        assert parse(text).axes == {"seed": Grid((0, 1, 2))}


def test_seeds_beside_a_seed_or_without_such_a_field_are_refused():
    assert "keep one of them" in only(param("seed: 3") + "seeds: 2\n")
    assert "does not use seed" in only("workload: bare\nmetric: val/mse\nparams: {width: 1}\nseeds: 2\n")
    assert "at least 1" in only(HEAD + "seeds: 0\n")
    assert "at most 1000000" in only(HEAD + "seeds: 1000000000\n")


def test_the_command_line_replaces_seeds_and_seed_alike():
    assert parse(HEAD + "seeds: 3\n", "params.seed=7").fixed == {"seed": 7}
    assert parse(param("seed: 7"), "seeds=2").axes == {"seed": Grid((0, 1))}


@pytest.mark.parametrize(
    ("params", "search", "word"),
    [
        ("lr: {uniform: [1, 2]}", "", "search: {algorithm: random, samples: 20}"),
        ("lr: {uniform: [1, 2]}", "search: {algorithm: random}", "samples: 20"),
        ("lr: {uniform: [1, 2]}", "search: random", "samples: 20"),
        ("lr: {grid: [1, 2]}", "search: {algorithm: random, samples: 3}", "nothing to sample"),
        ("lr: {grid: [1, 2]}", "search: {algorithm: optuna, samples: 3}", "nothing to sample"),
        ("lr: {grid: [1, 2]}", "search: {samples: 3}", "belongs to"),
        ("lr: {uniform: [1, 2]}", "search: {algorithm: random, samples: 0}", "at least 1"),
        ("lr: {uniform: [1, 2]}", "search: {algorithm: optuna, samples: 1, sampler: gpp}", "did you mean gp?"),
        ("lr: {uniform: [1, 2]}", "search: {algorithm: rndom, samples: 1}", "did you mean random?"),
        ("k: 1", "search: {algorithm: grid, sampler: tpe}", "belongs to algorithm: optuna"),
    ],
)
def test_a_search_that_does_not_fit_the_axes_says_what_to_write(params, search, word):
    assert any(word in line for line in complaints(param(params) + search + "\n"))


def test_fields_that_do_not_fit_together_are_told_once_at_their_line():
    text = HEAD + "params:\n  num_experts: {grid: [4, 8]}\n  k: {grid: [1, 8]}\n  seed: {grid: [0, 1, 2]}\n"
    assert only(text) == "t.yaml:5  params.k  k=8 experts per token, but num_experts=4"


def test_the_ends_of_a_sampled_range_are_tried_too():
    text = HEAD + "params:\n  k: {int: [1, 9]}\nsearch: {algorithm: random, samples: 1}\n"
    assert only(text) == "t.yaml:4  params.k  k=9 experts per token, but num_experts=8"


def test_rules_between_fields_are_tried_even_in_a_grid_too_large_to_try_whole():
    grid = "{grid: [" + ", ".join(str(number) for number in range(1, 101)) + "]}"
    assert any(
        "k=100 experts" in line for line in complaints(HEAD + f"params: {{steps: {grid}, seed: {grid}, k: {grid}}}\n")
    )


@pytest.mark.parametrize("line", ["device: cuda", "device: {grid: [cpu, cuda]}"])
def test_a_gpu_that_no_trial_is_given_is_refused_at_the_line_that_wants_it(line):
    assert only(param(line)).startswith("t.yaml:4  params.device  cuda, but a trial is given no GPU")
    assert parse(param(line) + "resources: {gpu: 0.5}").resources.gpu == 0.5


def test_fp16_on_a_cpu_is_said_to_be_slow():
    (note,) = parse(param("precision: {grid: [fp32, fp16]}")).notes
    assert note.startswith("params.precision: fp16 on a CPU is 12-20 x slower")
    assert parse(param("precision: fp16") + "resources: {gpu: 1}").notes == ()
    assert parse(param("precision: bf16")).notes == ()


def test_a_number_of_trials_that_no_ledger_wants_is_refused():
    grid = "{grid: [" + ", ".join(str(number) for number in range(1, 1002)) + "]}"
    assert "1,002,001 trials" in only(HEAD + f"params: {{steps: {grid}, seed: {grid}}}\n")


# --- the other sections ---------------------------------------------------------------------------------------------


def test_every_section_is_read():
    spec = parse(
        """# Does it work?
name: zloss
workload: toy
metric: {name: val/mse, mode: min}
params:
  steps: 800
  c_z: {grid: [0, 1e-4, 1e-3, 1e-2]}
  lr: {loguniform: [1e-3, 1e-2]}
  seed: {grid: [0, 1, 2]}
search: {algorithm: random, samples: 2, seed: 0}
resources: {cpu: 1, gpu: 0, max_concurrent: 2, trial_time: 30m}
fuse: auto
retries: 1
retry_on: any
stop: {diverged: true}
log_every: 10
checkpoint_every: 100
preflight: true
tags: {team: router, year: 2024}
"""
    )
    assert spec.description == "Does it work?"
    assert spec.resources.trial_time_s == 1800.0
    assert (spec.retries.count, spec.retries.any_error) == (1, True)
    assert spec.tags == {"team": "router", "year": "2024"}
    assert spec.fixed == {"steps": 800}
    assert spec.where("params.c_z.grid") == "t.yaml:7"


def test_what_is_said_to_an_editor_is_no_part_of_the_description():
    assert parse("# yaml-language-server: $schema=sweep.json\n# Does it work?\n" + HEAD).description == "Does it work?"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("resources: {cpu: 0}", "above 0"),
        ("resources: {gpu: -1}", "at least 0"),
        ("resources: {gpu: 1.5}", "whole number"),
        ("resources: {max_concurrent: 0}", "at least 1"),
        ("resources: {max_concurrent: true}", "at least 1"),
        ("resources: {trial_time: 1:30}", "30m"),
        ("resources: {trial_time: 0}", "30m"),
        ("resources: {trial_time: .inf}", "30m"),
        ("resources: 3", "is no mapping"),
        ("retries: -1", "at least 0"),
        ("retry_on: some", "any"),
        ("stop: {diverged: no}", "true or false"),
        ("log_every: 0", "at least 1"),
        ("log_every: 2.5", "at least 1"),
        ("checkpoint_every: 0", "at least 1"),
        ("fuse: 0", "auto, off"),
        ("fuse: false", "auto, off"),
        ("preflight: off", "true or false"),
        ("tags: [a]", "is no mapping"),
        ("tags: {orch.state: x}", "no free tag name"),
        ("tags: {a: [1]}", "one text"),
        ("params: 3", "is no mapping"),
    ],
)
def test_a_wrong_setting_is_refused_at_its_line(line, word):
    message = only(HEAD + line + "\n")
    assert message.startswith("t.yaml:3  ")
    assert word in message


UNSTABLE = HEAD + "params: {precision: {grid: [fp32, bf16]}, opt: {lr: {grid: [0.5, 1]}}, c_z: 0, k: 1}\n"


def test_unstable_is_a_bound_or_a_ratio_to_values_of_grid_axes():
    assert parse(UNSTABLE).unstable is None
    absolute = parse(UNSTABLE + "unstable: {metric: train/loss, below: -3}\n").unstable
    assert absolute == Unstable("train/loss", "below", -3.0)
    rule = "{metric: val/mse, above: 2, relative_to: {precision: fp32, opt: {lr: 1.0}}}"
    spec = parse(UNSTABLE + f"unstable: {rule}\n")
    assert spec.unstable == Unstable("val/mse", "above", 2.0, {"precision": "fp32", "opt.lr": 1.0})
    stored = to_json(spec)
    assert stored["unstable"] == {
        "metric": "val/mse", "above": 2.0, "relative_to": {"precision": "fp32", "opt.lr": 1.0},
    }  # fmt: skip
    assert from_json(stored, workload_of).unstable == spec.unstable
    assert parse(UNSTABLE + f"unstable: {rule}\n", "unstable.above=3").unstable.bound == 3.0
    assert parse(UNSTABLE + f"unstable: {rule}\n", "unstable=null").unstable is None


def test_what_is_called_unstable_changes_no_trial():
    changed = parse(UNSTABLE + "unstable: {metric: val/mse, above: 2}\n")
    assert spec_difference(to_json(parse(UNSTABLE)), to_json(changed)) == []


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        ("3", "is no mapping"),
        ("{above: 2}", "needs a metric"),
        ("{metric: val/mes, above: 2}", "did you mean val/mse?"),
        ("{metric: a//b, above: 2}", "doubled"),
        ("{metric: val/mse}", "needs one bound, either above or below"),
        ("{metric: val/mse, above: 2, below: 1}", "needs one bound, either above or below"),
        ("{metric: val/mse, above: .inf}", "a finite number is needed"),
        ("{metric: val/mse, above: true}", "a finite number is needed"),
        ("{metric: val/mse, above: 0.5, relative_to: {precision: fp32}}", "at least 1"),
        ("{metric: val/mse, below: 0, relative_to: {precision: fp32}}", "above 0 and at most 1"),
        ("{metric: val/mse, above: 2, relative_to: {precison: fp32}}", "no grid axis of this sweep; did you mean pre"),
        ("{metric: val/mse, above: 2, relative_to: {k: 1}}", "no grid axis of this sweep; it has precision, opt.lr"),
        ("{metric: val/mse, above: 2, relative_to: {precision: fp16}}", "not on its axis, which has fp32, bf16"),
        ("{metric: val/mse, above: 2, relative_to: fp32}", "write relative_to: {precision: fp32}"),
        ("{metric: val/mse, over: 2}", "unknown key unstable.over"),
    ],
)
def test_a_wrong_unstable_is_refused_at_its_line(rule, word):
    lines = complaints(UNSTABLE + f"unstable: {rule}\n")
    assert all(line.startswith("t.yaml:4  unstable") for line in lines)
    assert word in " ".join(lines)


def test_all_mistakes_of_unstable_are_told_at_once():
    text = "unstable:\n  metric: val/mes\n  above: .nan\n  relative_to:\n    k: 1\n    precision: fp16\n"
    assert [line.split("  ")[0] for line in complaints(UNSTABLE + text)] == [f"t.yaml:{n}" for n in (5, 6, 8, 9)]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("45", 45), ("0.5", 0.5)]
)
def test_trial_time_is_a_duration_or_seconds(text, seconds):
    assert parse(HEAD + f"resources: {{trial_time: {text}}}\n").resources.trial_time_s == seconds


def test_all_mistakes_of_a_file_come_in_one_answer_in_the_order_of_its_lines():
    lines = complaints(
        "name: A\nworkload: toy\nmetric: nope\nparams:\n  drp: 1\n  lr: {grid: []}\n  k: x\nlog_every: 0\nwhen: 3\n",
        "x=1",
    )
    numbers = [line.split("  ")[0] for line in lines]
    assert numbers == [f"t.yaml:{n}" for n in (1, 3, 5, 6, 7, 8, 9)] + ["--set"]


# --- --set ----------------------------------------------------------------------------------------------------------


def test_overrides_replace_values_and_whole_axes_and_keep_siblings():
    text = (
        HEAD
        + "params:\n  lr: {loguniform: [1e-3, 1]}\n  opt: {lr: 1, wd: 2}\nsearch: {algorithm: random, samples: 1}\n"
    )
    spec = parse(
        text,
        "params.lr=3e-3",
        "params.c_z={grid: [0, 1e-3]}",
        "search={algorithm: grid}",
        "params.opt={lr: 3}",
    )
    assert spec.fixed == {"lr": 0.003, "opt.lr": 3.0, "opt.wd": 2.0}
    assert spec.axes == {"c_z": Grid((0.0, 0.001))}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("a,b", "a,b"),
        ("a: b # c", "a: b # c"),
        (" a b ", "a b"),
        ("' a '", " a "),
        ('"{a}, [b]"', "{a}, [b]"),
        ("it's", "it's"),
        ("a=b", "a=b"),
        ("*x & !y | z", "*x & !y | z"),
        ("'3'", "3"),
    ],
)
def test_commas_spaces_and_signs_in_an_overridden_text_stay_one_text(written, text):
    assert parse(HEAD, f"params.note={written}").fixed == {"note": text}


def test_an_override_may_be_a_list_a_mapping_or_a_whole_axis_at_any_depth():
    sets = ("params.hidden=[3, 4]", "params.extra={a: 1, b: 2.5}", "params.opt.lr={grid: [1e-3, '1e-2']}")
    assert "write 0.01 without quotes" in only(HEAD, *sets)
    spec = parse(
        HEAD, *sets[:2], "params.opt={lr: {grid: [1e-3, 1e-2]}, wd: 1}", "exclude=[{opt.lr: 1e-3, hidden: [3, 4]}]"
    )
    assert spec.fixed == {"hidden": [3, 4], "extra": {"a": 1.0, "b": 2.5}, "opt.wd": 1.0}
    assert spec.axes == {"opt.lr": Grid((0.001, 0.01))}
    assert spec.exclude == ({"opt.lr": (0.001,), "hidden": ([3, 4],)},)


def test_an_override_takes_the_place_of_a_section_and_a_longer_path_changes_a_part_of_it():
    text = (
        UNSTABLE
        + "unstable: {metric: val/mse, above: 2}\ntags: {team: a, year: 1}\nmetric: {name: val/mse, mode: max}\n"
    )
    text = text.replace("metric: val/mse\n", "", 1)
    spec = parse(text, "unstable={metric: val/mse, below: 0.5}", "tags={}", "metric=train/loss")
    assert spec.unstable == Unstable("val/mse", "below", 0.5)
    assert spec.tags == {}
    assert (spec.metric.name, spec.metric.mode) == ("train/loss", "min")
    spec = parse(text, "unstable.above=3", "tags.team=b", "metric.name=train/loss")
    assert spec.unstable == Unstable("val/mse", "above", 3.0)
    assert spec.tags == {"team": "b", "year": "1"}
    assert (spec.metric.name, spec.metric.mode) == ("train/loss", "max")


def test_overrides_reach_sections_that_are_missing_short_or_empty():
    spec = parse(HEAD + "params:\n", "resources.max_concurrent=1", "metric.mode=max", "tags.team=x", "params.opt.lr=1")
    assert spec.resources.max_concurrent == 1
    assert spec.metric.mode == "max"
    assert spec.tags == {"team": "x"}
    assert spec.fixed == {"opt.lr": 1.0}


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("params.acumulation_steps=2", "did you mean accumulation_steps?"),
        ("resources.cpus=2", "did you mean cpu?"),
        ("log_every.x=2", "unknown key log_every.x"),
        ("params.lr", "write --set path.of.key=value"),
        ("=3", "write --set path.of.key=value"),
        ("params..lr=3", "write --set path.of.key=value"),
        ("params.lr={grid: [1", "not valid YAML"),
        ("params.lr=abc", "valid number"),
        ("params.lr=1e999", "beyond the range of a float"),
        ("metric={mode: max}", "metric  is missing; write metric: {name: val/mse, mode: min}"),
        ("show.0=val/loss", "show.0  show is a list, which is replaced whole: --set 'show=[...]'"),
        ("params.k.grid.0=2", "params.k.grid is a list, which is replaced whole"),
    ],
)
def test_a_wrong_override_is_a_problem_of_the_command_line(override, word):
    message = only(HEAD + "log_every: 3\nshow: [val/mse]\nparams: {k: {grid: [1, 2]}}\n", override)
    assert message.startswith("--set")
    assert word in message


# --- the stored form ------------------------------------------------------------------------------------------------

FULL = (
    param("lr: {grid: [1e-3, 2e-3]}")
    + "  c_z: {choice: [0, {loguniform: [1e-4, 1e-1]}]}\nsearch: {algorithm: random, samples: 2}\n"
)


def test_the_stored_form_is_json_and_reads_back_as_the_same_spec():

    spec = parse(FULL, "params.k=2", name="other")
    document = json.loads(json.dumps(to_json(spec), allow_nan=False))
    assert from_json(document, workload_of) == spec
    assert document["params"]["c_z"] == {"choice": [0.0, {"loguniform": [0.0001, 0.1]}]}


def test_infinity_can_be_stored():

    spec = parse("workload: bare\nmetric: val/mse\nparams: {width: 3, scale: .inf}\n")
    assert from_json(json.loads(json.dumps(to_json(spec), allow_nan=False)), workload_of) == spec


def test_another_spelling_is_no_difference():
    old = to_json(parse(param("lr: 1e-3") + "seeds: 2\n"))
    new = to_json(
        parse(
            "# hi\nmetric: {mode: min, name: val/mse}\nworkload: toy\nlog_every: 10\n"
            "params: {seed: {grid: [1, 0]}, lr: 0.001}\n"
        )
    )
    assert spec_difference(old, new) == []
    assert spec_difference(old, to_json(parse(param("lr: {grid: [0.001]}") + "seeds: 2\nresources: {cpu: 2}\n"))) == []


def test_a_difference_names_the_path_and_both_values():
    old = to_json(parse(param("lr: 1e-3")))
    assert spec_difference(old, to_json(parse(param("lr: 0.002")))) == ["params.lr: 0.001 -> 0.002"]
    assert spec_difference(old, to_json(parse(param("lr: 0.001") + "  k: 2\n"))) == ["params.k: not set -> 2"]
    assert spec_difference(old, to_json(parse(param("lr: 0.001") + "log_every: 5\n"))) == ["log_every: 10 -> 5"]


# --- health and stop ------------------------------------------------------------------------------------------------


HEALTH = param("lr: 1e-3") + "health: {thresholds: {spike_sigmas: 8}}\nstop: {on: [router_collapsed, loss_spike]}\n"


def test_limits_and_what_ends_a_trial_are_read_and_said_in_the_plan():
    spec = parse(HEALTH, "health.thresholds.tie_share=0")
    assert dict(spec.thresholds) == {"spike_sigmas": 8.0, "tie_share": 0.0}
    assert (spec.stop_on, spec.stop_diverged) == (("router_collapsed", "loss_spike"), True)
    assert spec.notes == (
        "a trial ends as stopped on router_collapsed, loss_spike",
        "threshold spike_sigmas: 8, not 6",
        "threshold tie_share: 0, not 0.02",
    )
    assert from_json(json.loads(json.dumps(to_json(spec), allow_nan=False)), workload_of) == spec


def test_a_check_that_only_the_preflight_makes_stops_no_trial_and_the_plan_says_so():
    text = "workload: char_gpt\nmetric: train/loss\nparams: {steps: 4}\nstop: {on: [future_leaks, loss_spike]}\n"
    ends, idle = parse_sweep(text, "t.yaml", describe).notes
    assert ends.endswith("on loss_spike")
    assert idle == "stop.on: future_leaks is found before training or not at all; it stops none"


def test_orchs_own_findings_are_known_for_every_workload():
    text = "workload: bare\nmetric: val/mse\nparams: {width: 1}\nstop: {on: [%s]}\n"
    assert parse(text % "checkpoint, metric_name, metric_name").stop_on == ("checkpoint", "metric_name")
    for check in ("unread_field", "check_failed", "not_checked"):
        assert parse(text % check).notes[0].startswith(f"stop.on: {check} is found ")
        assert "it stops none" in parse(text % check).notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "health: {thresholds: {tie_shar: 8}}",
            "health.thresholds.tie_shar  unknown key health.thresholds.tie_shar, did",
        ),
        (
            "health: {thresholds: {spike_sigmas: -1}}",
            "health.thresholds.spike_sigmas  got -1; a finite number, at least 0",
        ),
        (
            "health: {thresholds: {spike_sigmas: .nan}}",
            "health.thresholds.spike_sigmas  got .nan; a finite number, at least 0",
        ),
        (
            "health: {thresholds: {spike_sigmas: .inf}}",
            "health.thresholds.spike_sigmas  got .inf; a finite number, at least 0",
        ),
        (
            'health: {thresholds: {spike_sigmas: "8"}}',
            'health.thresholds.spike_sigmas  got "8", a text; write 8, a number',
        ),
        ("health: {thresholds: {spike_sigmas: high}}", "health.thresholds.spike_sigmas  got high; a number is needed"),
        ("health: {thresholds: [8]}", "health.thresholds  is no mapping; write thresholds: {name: number}"),
        ("health: {limits: {}}", "health.limits  unknown key health.limits, known: thresholds"),
        ("stop: {on: [loss_spikes]}", "stop.on  unknown check loss_spikes, did you mean loss_spike?"),
        ("stop: {on: [xyz]}", "stop.on  unknown check xyz; toy declares loss_spike, router_collapsed"),
        ("stop: {on: loss_spike}", "stop.on  is no list; write on: [loss_spike]"),
        ("stop: {on: [3]}", "stop.on  3: text is needed"),
        ("stop: {in: [loss_spike]}", "stop.in  unknown key stop.in, known: diverged, on"),
    ],
)
def test_a_wrong_limit_or_check_is_told_at_its_line(line, message):
    (said,) = complaints(param("lr: 1e-3") + line + "\n")
    assert said.startswith(f"t.yaml:5  {message}")


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("no_gradient_updates: 0", "got 0; a count of updates, at least 1, or .inf for never"),
        ("router_patience: 2.5", "got 2.5; a count of updates, at least 0, or .inf for never"),
        ("tie_share: 2", "got 2; a share, from 0 to 1 (1 for never)"),
        ("weight_tolerance: 0", "got 0; a share, from 0.001 to 1"),  # rounding alone would trip it
        ("spike_window: .inf", "got .inf; a count of updates, from 8 to 1000000"),
        ("spike_excess: .inf", "got .inf; a finite number, at least 0"),
        ("spike_excess: inf", "got inf; a finite number, at least 0"),
        ("spike_sigmas: nan", "got nan; a number, at least 0, or .inf for never"),
        ('spike_sigmas: ".nan"', "got .nan; a number, at least 0, or .inf for never"),
        ("spike_sigmas: six", "got six; a number is needed"),
    ],
)
def test_a_shipped_limit_says_which_values_make_sense(limit, message):
    name = limit.partition(":")[0]
    text = "workload: char_gpt\nmetric: train/loss\nparams: {steps: 4}\nhealth:\n  thresholds:\n    %s\n"
    with pytest.raises(SpecError) as refused:
        parse_sweep(text % limit, "t.yaml", describe)
    assert f"t.yaml:6  health.thresholds.{name}  {message}" in str(refused.value)


@pytest.mark.parametrize(
    ("limit", "message", "write"),
    [
        ("inf", "got inf, which YAML takes for a text", ".inf"),
        ("Infinity", "got Infinity, which YAML takes for a text", ".inf"),
        ("1_0", "got 1_0, which YAML takes for a text", "10"),
        ("1_0.5", "got 1_0.5, which YAML takes for a text", "10.5"),
        ('"8"', 'got "8", a text', "8, a number without quotes"),
        ('".inf"', 'got ".inf", a text', ".inf, a number without quotes"),
    ],
)
def test_a_number_that_is_a_text_to_yaml_is_refused_with_a_spelling_that_is_none(limit, message, write):
    text = "workload: char_gpt\nmetric: train/loss\nparams: {steps: 4}\nhealth:\n  thresholds:\n    spike_sigmas: %s\n"
    with pytest.raises(SpecError) as refused:
        parse_sweep(text % limit, "t.yaml", describe)
    assert str(refused.value) == f"t.yaml:6  health.thresholds.spike_sigmas  {message}; write {write}"
    parse_sweep(text % write.partition(",")[0], "t.yaml", describe)  # what is advised is taken


def test_infinity_stands_for_never_and_survives_json():
    text = "workload: char_gpt\nmetric: train/loss\nparams: {steps: 4}\nhealth: {thresholds: {update_ratio: .inf}}\n"
    spec = parse_sweep(text, "t.yaml", describe)
    assert "threshold update_ratio: never, not 0.3" in spec.notes
    (kept,) = json.loads(json.dumps(to_json(spec), allow_nan=False))["health"]["thresholds"].values()
    assert kept == NEVER


def test_every_default_is_one_of_the_values_that_it_admits():
    assert [name for name, limit in THRESHOLDS.items() if limit.refusal(limit)] == []


def test_a_workload_without_limits_or_checks_says_so():
    text = "workload: bare\nmetric: val/mse\nparams: {width: 1}\n"
    assert "bare has no thresholds" in only(text + "health: {thresholds: {spike_sigmas: 8}}\n")
    assert "bare declares none" in only(text + "stop: {on: [loss_spike]}\n")


def test_a_limit_or_a_stop_that_differs_is_a_difference_and_its_spelling_is_not():
    old = to_json(parse(HEALTH))
    again = param("lr: 1e-3") + "stop: {on: [loss_spike, router_collapsed]}\nhealth: {thresholds: {%s}}\n"
    assert spec_difference(old, to_json(parse(again % "spike_sigmas: 8.0, tie_share: 0.02"))) == []
    assert spec_difference(old, to_json(parse(again % ""))) == ["health.thresholds.spike_sigmas: 8 -> not set"]
    plain = to_json(parse(param("lr: 1e-3") + "health: {thresholds: {spike_sigmas: 8}}\n"))
    assert spec_difference(old, plain) == ['stop.on: ["loss_spike","router_collapsed"] -> []']


def test_a_stored_sweep_that_is_older_than_limits_and_stop_on_is_no_different():
    new = to_json(parse(param("lr: 1e-3")))
    old = {**new, "stop": {"diverged": True}}
    del old["health"]
    assert spec_difference(old, new) == spec_difference(new, old) == []
    assert spec_difference(old, to_json(parse(HEALTH))) != []


# --- cost -----------------------------------------------------------------------------------------------------------


def test_a_file_of_ten_thousand_trials_is_read_and_checked_in_seconds():
    grid = "{grid: [" + ", ".join(f"{number}e-3" for number in range(1, 101)) + "]}"
    started = time.process_time()
    parse(HEAD + f"params: {{lr: {grid}, c_z: {grid}}}\n")
    assert time.process_time() - started < 10  # CPU: half a second; a square of the trials would take minutes


def test_reading_a_spec_imports_nothing_heavy():
    code = (
        "import sys, orchestrator.spec, orchestrator.search\n"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'sqlalchemy', 'numpy', 'pandas'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
