"""What ties the axes of a sweep file together: when, zip, exclude, enqueue and the budget. Trains nothing."""

from __future__ import annotations

import itertools
import time
from typing import Literal

import pytest
from pydantic import Field, model_validator

from orchestrator.errors import SpecError
from orchestrator.search import plan_notes, search_problems
from orchestrator.spec import Grid, Search, SweepSpec, parse_sweep
from orchestrator.spec.points import factors_of, num_grid_points, pairs_of, points_of
from orchestrator.spec.relations import conditions_first, excluded, holds, is_active, settled
from orchestrator.spec.sweep_spec import Budget, When, keys_of
from orchestrator.workload import Description, FieldConflict, WorkloadConfig, fusible


class Config(WorkloadConfig):
    steps: int = 800
    c_z: float = fusible(0.0, ge=0)
    k: int = Field(1, ge=1)
    num_experts: int = 4
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    router_offset: float = fusible(0.0)
    lr: float = fusible(1e-3, gt=0)
    batch_size: int = 256
    accumulation_steps: int = 1
    hidden: list[int] = Field([300])
    width: int = Field(...)
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.k > self.num_experts:
            raise FieldConflict("k", f"k={self.k} experts per token, but num_experts={self.num_experts}")
        if self.router_offset and self.precision != "bf16":
            raise FieldConflict("router_offset", f"an offset in {self.precision}")
        return self


def workload_of(name: str) -> Description:
    return Description(name, "", Config, ("val/mse", "val/loss"), lambda: None, "tests", name)  # type: ignore[arg-type, return-value]


HEAD = "workload: toy\nmetric: val/mse\nparams:\n  width: 3\n"
AXES = """  k: {grid: [1, 2, 4]}
  precision: {grid: [fp32, bf16]}
  c_z: {grid: [0, 1e-2]}
  hidden: {grid: [[300], [200, 100]]}
  lr: 1e-3
  batch_size: {grid: [128, 256, 256]}
  accumulation_steps: {grid: [2, 1, 2]}
  seed: {grid: [0, 1]}
"""
SAMPLED = """  k: {grid: [1, 2]}
  c_z: {choice: [0, {uniform: [1, 2]}]}
  lr: {loguniform: [1e-4, 1e-2]}
  num_experts: {int: [4, 9]}
search: {algorithm: random, samples: 3}
"""


def parse(text: str, *overrides: str) -> SweepSpec:
    return parse_sweep(HEAD + text, "t.yaml", workload_of, overrides)


def complaints(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(text, *overrides)
    return str(caught.value).splitlines()


def only(text: str, *overrides: str) -> str:
    lines = complaints(text, *overrides)
    assert len(lines) == 1, lines
    return lines[0]


# --- when -----------------------------------------------------------------------------------------------------------


def test_an_axis_with_a_condition_stands_at_its_default_elsewhere():
    spec = parse(AXES + "  router_offset: {grid: [100, 300]}\nwhen: {router_offset: {precision: bf16, k: [1, 2]}}\n")
    assert spec.when == {"router_offset": When({"precision": ("bf16",), "k": (1, 2)}, 0.0)}
    assert settled(spec, {"precision": "bf16", "k": 2, "router_offset": 300.0})["router_offset"] == 300.0
    assert settled(spec, {"precision": "bf16", "k": 4, "router_offset": 300.0})["router_offset"] == 0.0
    assert settled(spec, {"precision": "fp32", "k": 2})["router_offset"] == 0.0


def test_conditions_may_name_sampled_axes_fixed_fields_and_conditional_axes():
    spec = parse(
        SAMPLED + "when: {c_z: {lr: 1e-3}, lr: {num_experts: [5, 6], width: 3}}\n",
    )
    assert list(spec.when) == ["lr", "c_z"]  # each after those that its condition names
    assert settled(spec, {"num_experts": 7, "lr": 0.005, "c_z": 1.5}) == {"num_experts": 7, "lr": 1e-3, "c_z": 1.5}
    assert settled(spec, {"num_experts": 5, "lr": 0.005, "c_z": 1.5}) == {"num_experts": 5, "lr": 0.005, "c_z": 0.0}
    assert is_active(spec, "lr", {"num_experts": 5})
    assert not is_active(spec, "lr", {"num_experts": 9})


def test_a_part_of_a_point_settles_only_what_it_decides():
    spec = parse(SAMPLED + "when: {c_z: {k: 2}, lr: {c_z: 0}}\n")
    assert settled(spec, {"k": 1}) == {"k": 1, "c_z": 0.0}
    assert settled(spec, {"k": 2, "lr": 0.005}) == {"k": 2, "lr": 0.005}
    undecided = parse(AXES + "when: {c_z: {k: 2}, lr: {c_z: 1e-2}}\n")
    assert settled(undecided, {"c_z": 0.0, "lr": 1e-2}) == {"c_z": 0.0, "lr": 1e-2}  # c_z may yet be switched off


def test_one_fixed_value_under_a_condition_is_an_axis_of_one():
    spec = parse(AXES + "  router_offset: 300\nwhen: {router_offset: {precision: bf16}}\n")
    assert spec.axes["router_offset"] == Grid((300.0,))
    assert "router_offset" not in spec.fixed


def test_a_ring_of_conditions_is_refused_and_shown():
    assert only(AXES + "when: {c_z: {k: 1}, k: {precision: bf16}, precision: {c_z: 0}}\n") == (
        "t.yaml:13  when.c_z  depends on itself: c_z -> k -> precision -> c_z"
    )
    with pytest.raises(ValueError, match="a -> a"):
        conditions_first("a", {"a": When({"a": (1,)}, 0)})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("when: {c_z: {precision: bf61}}", "when.c_z.precision  'bf61': did you mean bf16?"),
        ("when: {c_z: {precision: fp16}}", "'fp16' is not on its axis, which has fp32, bf16; did you mean bf16?"),
        ("when: {c_z: {k: 3}}", "3 is not on its axis, which has 1, 2, 4; did you mean 2?"),
        ("when: {c_z: {k: one}}", "when.c_z.k  'one': Input should be a valid integer"),
        ("when: {c_z: {kk: 1}}", "when.c_z.kk  is not in params; did you mean k?"),
        ("when: {cz: {k: 1}}", "when.cz  is not in params; did you mean c_z?"),
        ("when: {c_z: {steps: 800}}", "is not in params; name it there (its default is 800)"),
        ("when: {seed: {k: 1}}", "seed  is a replicate"),
        ("when: {c_z: {seed: 1}}", "names seed, which is a replicate"),
        ("when: {c_z: {k: []}}", "lists no value"),
        ("when: {c_z: {}}", "names no axis"),
        ("when: {c_z: 3}", "names no axis"),
        ("when: [c_z]", "is no mapping; write when: {router_offset: {precision: bf16}}"),
        ("when: {width: {k: 1}}", "has no default to be where the condition does not hold"),
        ("zip: [k, c_z]", "in a list of their own"),
        ("zip: [[k]]", "name two axes or more"),
        ("zip: k", "is no list"),
        ("zip: [[k, batch_size, precision]]", "k has 3 values, batch_size has 3 values, precision has 2 values; axes"),
        ("zip: [[k, lr]]", "lr is fixed at 0.001; only grids move together"),
        ("zip: [[k, seed]]", "seed is a replicate"),
        ("zip: [[k, batch_sise]]", "batch_sise is not in params; did you mean batch_size?"),
        ("zip: [[precision, c_z], [hidden, c_z]]", "c_z is named twice"),
        ("exclude: [{k: 3}]", "exclude.k  3 is not on its axis"),
        ("exclude: [{kk: 1}]", "exclude.kk  is not in params; did you mean k?"),
        ("exclude: [{}]", "names no axis"),
        ("exclude: {k: 1}", "is no list; write exclude: [{k: 1, c_z: 1e-2}]"),
        ("search: {enqueue: [{k: 1}]}", "search.enqueue  belongs to algorithm: random or optuna"),
        ("budget: {trials: 143}", "143 is less than the 144 trials of the grid"),
        ("budget: {trials: 0}", "at least 1"),
        ("budget: {time: soon}", "write a duration"),
        ("budget: {tirals: 200}", "did you mean trials?"),
    ],
)
def test_a_mistake_is_told_at_its_line_with_what_would_be_right(section, message):
    said = complaints(AXES + (section if "zip" in section else f"zip: [[batch_size, accumulation_steps]]\n{section}"))
    line = 13 if "zip" in section else 14
    assert all(one.startswith(f"t.yaml:{line}  ") for one in said)
    assert message in "\n".join(said)


def test_mistakes_in_params_and_in_what_names_them_are_told_at_once():
    text = (
        AXES.replace("[1, 2, 4]", "[1, x]")
        + "when: {c_z: {k: 2, precison: bf16}}\nzip: [[c_z, k]]\nexclude: [{kay: 1}]\n"
    )
    assert [one.split("  ")[0] for one in complaints(text)] == [f"t.yaml:{n}" for n in (5, 13, 15)]


def test_a_sweep_that_was_narrowed_by_hand_keeps_conditions_on_what_is_gone_and_says_so():
    text = AXES.replace("[128, 256, 256]", "[128, 256]").replace("[2, 1, 2]", "[2, 1]")
    text += "when: {c_z: {precision: bf16}}\nexclude: [{k: 4, precision: bf16}, {k: 2, precision: bf16}]\n"
    assert parse(text).notes == ()
    assert parse(text, "params.precision=fp32", "params.k={grid: [1, 2]}").notes == (
        "when.c_z: {precision: bf16} never holds; c_z stays at 0.0",
        "exclude: {k: 4, precision: bf16} matches no point",
        "exclude: {k: 2, precision: bf16} matches no point",
    )
    assert parse(text, "params.precision=bf16").notes == ("when.c_z: {precision: bf16} always holds",)


def test_a_value_of_an_axis_that_was_set_alone_narrows_the_sweep_as_the_whole_axis_does():
    text = AXES.replace("[128, 256, 256]", "[128, 256]").replace("[2, 1, 2]", "[2, 1]") + "when: {c_z: {k: 2}}\n"
    part, whole = (parse(text, f"params.k{path}[1, 4]{end}") for path, end in ((".grid=", ""), ("={grid: ", "}")))
    assert part.notes == whole.notes == ("when.c_z: {k: 2} never holds; c_z stays at 0.0",)


def test_a_condition_that_no_draw_will_meet_is_noted():
    why = "is drawn from a range, and no draw meets one value of it; give it a step, or a choice"
    spec = parse(
        SAMPLED + "when: {c_z: {lr: 1e-3}, num_experts: {k: 2}}\nexclude: [{c_z: 1.5, k: 1}, {lr: [2e-3, 5e-3]}]\n"
    )
    assert spec.notes == (
        f"when.c_z: {{lr: 0.001}} practically never holds: lr {why}",
        f"exclude: {{c_z: 1.5, k: 1}} practically never holds: c_z {why}",
        f"exclude: {{lr: [0.002, 0.005]}} practically never holds: lr {why}",
    )
    met = ("when: {lr: {c_z: 0}}", "when: {k: {num_experts: 5}}", "when: {c_z: {lr: 1e-3}, lr: {k: 2}}")
    assert [parse(f"{SAMPLED}{section}\n").notes for section in met] == [(), (), ()]  # the default of lr is 1e-3
    enqueued = SAMPLED.replace("samples: 3", "samples: 3, enqueue: [{lr: 1e-3}]")
    assert parse(enqueued + "when: {c_z: {lr: 1e-3}}\n").notes == ()


def test_a_condition_and_all_exclusions_are_taken_away_by_hand():
    text = AXES + "when: {c_z: {k: 2}, lr: {k: 1}}\nexclude: [{k: 4}]\n"
    spec = parse(text, "when.c_z=null", "exclude=[]")
    assert (list(spec.when), spec.exclude) == (["lr"], ())
    assert parse(text, "when={c_z: {precision: bf16}}").when == {"c_z": When({"precision": ("bf16",)}, 0.0)}


# --- zip and exclude ------------------------------------------------------------------------------------------------


def test_axes_that_move_together_keep_a_value_that_comes_twice():
    spec = parse(AXES + "zip: [[batch_size, accumulation_steps]]\n")
    assert spec.zipped == (("batch_size", "accumulation_steps"),)
    assert spec.axes["batch_size"] == Grid((128, 256, 256))
    assert spec.axes["accumulation_steps"] == Grid((2, 1, 2))
    assert parse(AXES).axes["batch_size"] == Grid((128, 256))


def test_a_list_is_one_value_of_a_list_field_and_several_of_any_other():
    spec = parse(AXES + "exclude: [{hidden: [200, 100], k: [1, 2]}, {hidden: [[300], [200, 100]], k: 4}]\n")
    assert spec.exclude[0] == {"hidden": ([200, 100],), "k": (1, 2)}
    assert spec.exclude[1] == {"hidden": ([300], [200, 100]), "k": (4,)}


def test_a_point_is_excluded_by_all_of_one_entry_and_only_once_it_has_these_values():
    spec = parse(AXES + "exclude: [{k: [1, 2], c_z: 1e-2}, {seed: 1, lr: 1e-3, precision: bf16}]\n")
    assert excluded(spec, {"k": 1, "c_z": 0.01})
    assert not excluded(spec, {"k": 4, "c_z": 0.01})
    assert not excluded(spec, {"k": 1})
    assert excluded(spec, {"precision": "bf16", "seed": 1})
    assert not excluded(spec, {"precision": "bf16"})


def test_a_condition_keeps_true_and_one_apart_and_one_and_one_point_nought_together():
    one = keys_of({"a": (1,)})
    assert holds(one, {"a": 1.0})
    assert not holds(one, {"a": True})
    assert holds(keys_of({"a": ([1],)}), {"a": [1.0]})
    assert not holds(one, {})
    assert holds({}, {})


def test_the_grid_points_are_those_of_a_plain_search_over_all_combinations():
    text = AXES + (
        "  router_offset: {grid: [100, 300]}\nzip: [[batch_size, accumulation_steps]]\n"
        "when: {router_offset: {precision: bf16}}\nexclude: [{k: 1, c_z: 1e-2}, {seed: 1, batch_size: 128}]\n"
    )
    spec = parse(text)
    rows = ((128, 2), (256, 1), (256, 2))
    product = itertools.product((1, 2, 4), ("fp32", "bf16"), (0.0, 0.01), "ab", rows, (0, 1), (100.0, 300.0))
    wanted = {
        (k, precision, c_z, hidden, row, seed, offset if precision == "bf16" else 0.0)
        for k, precision, c_z, hidden, row, seed, offset in product
        if not (k == 1 and c_z == 0.01) and not (seed == 1 and row[0] == 128)
    }
    assert num_grid_points(spec) == len(wanted)
    assert sum(1 for _ in points_of(spec, factors_of(spec, spec.axes))) == len(wanted)
    assert f"less than the {len(wanted)} trials" in only(text + f"budget: {{trials: {len(wanted) - 1}}}\n")
    assert parse(text + f"budget: {{trials: {len(wanted)}, time: 2h}}\n").budget == Budget(len(wanted), 7200.0)


def numbers(count: int) -> str:
    return f"[{', '.join(map(str, range(1, count + 1)))}]"


@pytest.mark.parametrize(
    "text",
    [
        AXES + "exclude: [{k: [1, 2, 4]}]\n",
        AXES + "exclude: [{k: 1}, {k: [2, 4]}]\n",
        AXES + "exclude: [{seed: 0}, {seed: 1, c_z: 0}, {seed: 1, c_z: 1e-2}]\n",
        SAMPLED.replace("[4, 9]", "[4, 5]") + "exclude: [{num_experts: 4}, {num_experts: 5}]\n",
        f"  steps: {{grid: {numbers(230)}}}\n  batch_size: {{grid: {numbers(230)}}}\n"
        "  precision: {grid: [fp32, bf16]}\n"
        "exclude: [{precision: fp32}, {precision: bf16}, {steps: 1, batch_size: 1}]\n",
    ],
)
def test_a_sweep_that_excludes_everything_is_refused_however_large(text):
    for algorithm in ("random", "optuna") if "search" in text else ("grid",):
        spec = parse(text, f"search.algorithm={algorithm}")
        assert search_problems(spec) == [("exclude", "its entries match every point; nothing would be trained")]


def test_both_ends_of_a_range_may_be_excluded():
    spec = parse(SAMPLED + "exclude: [{lr: [1e-4, 1e-2]}]\n")
    assert search_problems(spec) == []


def test_exclusions_of_hundreds_of_values_take_a_second():
    some, others = numbers(300), f"[{', '.join(map(str, range(201, 301)))}]"
    text = f"  steps: {{grid: {some}}}\n  batch_size: {{grid: {some}}}\n"
    text += f"exclude: [{{steps: {numbers(200)}}}, {{steps: {others}, batch_size: {others}}}]\n"
    started = time.process_time()  # of this process alone: others may be busy
    spec = parse(text + "budget: {trials: 20000}\n")
    assert search_problems(spec) == []
    assert num_grid_points(spec) == 100 * 200
    assert time.process_time() - started < 3  # 90,000 points looked at four times; looked for in lists: 20 s


# --- rules between fields -------------------------------------------------------------------------------------------

ILLEGAL = "  k: {grid: [1, 8]}\n  num_experts: {grid: [4, 8]}\n"


def test_a_point_that_is_not_trained_may_be_illegal():
    assert only(ILLEGAL) == "t.yaml:5  params.k  k=8 experts per token, but num_experts=4"
    parse(ILLEGAL + "exclude: [{k: 8, num_experts: 4}]\n")
    parse(ILLEGAL + "zip: [[k, num_experts]]\n")
    parse(ILLEGAL + "when: {k: {num_experts: 8}}\n")
    assert "k=8" in only(ILLEGAL + "exclude: [{k: 8, num_experts: 4, seed: 0}]\n", "params.seed={grid: [0, 1]}")


def test_a_condition_that_lets_an_illegal_point_through_is_not_enough():
    text = AXES + "  router_offset: {grid: [100, 300]}\nwhen: {router_offset: {k: 1}}\n"
    assert only(text) == "t.yaml:13  params.router_offset  an offset in fp32"
    parse(text + "exclude: [{k: 1, precision: fp32}]\n")


def test_values_that_conditions_name_are_tried_inside_a_range_too():
    text = (
        "  num_experts: {int: [5, 9]}\n  k: 6\nsearch: {algorithm: random, samples: 3}\nwhen: {k: {num_experts: 7}}\n"
    )
    parse(text)
    assert "k=6 experts per token, but num_experts=5" in only(text.replace("num_experts: 7}", "num_experts: [5, 7]}"))


TIED = """  k: {grid: [1, 8]}
  num_experts: {grid: [9, 10]}
  precision: {grid: [fp32, bf16]}
  router_offset: {grid: [100, 300]}
  batch_size: {grid: [128, 256]}
  accumulation_steps: {grid: [2, 1]}
zip: [[batch_size, accumulation_steps]]
when: {k: {precision: bf16}, router_offset: {k: 8, precision: bf16}}
exclude: [{router_offset: 100, num_experts: 9}, {batch_size: 128, k: 8}]
"""


def test_pairs_hold_every_two_values_that_stand_in_some_point():
    spec = parse(TIED)
    factors = factors_of(spec, spec.axes)

    def standing(points):
        pairs = set()
        for point in points:
            active = sorted((axis, value) for axis, value in point.items() if is_active(spec, axis, point))
            pairs |= set(itertools.combinations(active, 2))
        return pairs

    assert standing(pairs_of(spec, factors)) == standing(points_of(spec, factors))


def test_a_pair_is_tried_where_both_axes_exist_in_a_grid_too_large_to_list():
    many = f"  lr: {{grid: {numbers(130)}}}\n  steps: {{grid: {numbers(50)}}}\n"
    axes = many + ILLEGAL.replace("[4, 8]", "[9, 4]") + "  precision: {grid: [fp32, bf16]}\n"
    said = "params.k  k=8 experts per token, but num_experts=4"
    assert said in only(axes)
    assert said in only(axes + "when: {k: {precision: bf16}}\n")
    assert said in only(axes + "exclude: [{k: 8, precision: fp32}]\n")
    parse(axes + "when: {k: {num_experts: 9}}\n")
    parse(axes + "exclude: [{k: 8, num_experts: 4}]\n")


def test_ten_thousand_trials_under_conditions_are_checked_in_seconds():
    grid = "{grid: [" + ", ".join(f"{number}e-3" for number in range(1, 101)) + "]}"
    text = (
        f"  lr: {grid}\n  c_z: {grid}\n  k: {{grid: [1, 2]}}\nwhen: {{c_z: {{k: 1}}}}\nexclude: [{{k: 2, lr: 5e-3}}]\n"
    )
    started = time.process_time()
    assert num_grid_points(parse(text + "budget: {trials: 20000}\n")) == 100 * 100 + 99
    assert time.process_time() - started < 10  # CPU: half a second; a square of the trials would take minutes


# --- search ---------------------------------------------------------------------------------------------------------


def test_points_to_try_first_are_typed_and_lie_in_their_domains():
    spec = parse(SAMPLED.replace("samples: 3", "samples: 3, enqueue: [{lr: 1e-3}, {k: 2, c_z: 1}, {num_experts: 5}]"))
    assert spec.search == Search("random", 3, enqueue=({"lr": 0.001}, {"k": 2, "c_z": 1.0}, {"num_experts": 5}))
    assert type(spec.search.enqueue[1]["c_z"]) is float


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("{lr: 1}", "search.enqueue.lr  1.0 is not on its axis, which goes from 0.0001 to 0.01"),
        ("{k: 3}", "3 is not on its axis, which has 1, 2; did you mean 2?"),
        ("{c_z: [1, 1.5]}", "one value is needed"),
        ("{width: 3}", "is fixed at 3; a point names axes"),
        ("{lrr: 3}", "is not in params; did you mean lr?"),
        ("{k: 1, c_z: 0}", "search.enqueue  {k: 1, c_z: 0.0} is excluded"),
    ],
)
def test_a_point_that_can_never_be_tried_is_refused(point, message):
    text = SAMPLED.replace("samples: 3", f"samples: 3, enqueue: [{point}]") + "exclude: [{k: 1, c_z: 0}]\n"
    assert message in only(text)


def test_points_to_try_first_that_no_cell_tries_are_noted():
    text = SAMPLED.replace("samples: 3", "samples: 1, enqueue: [{c_z: 0}, {lr: 1e-3}, {k: 2, precision: fp32}]")
    text = text.replace("search:", "  precision: {grid: [fp32, bf16]}\nsearch:") + "when: {k: {precision: bf16}}\n"
    assert plan_notes(parse(text)) == (
        "search.enqueue: {k: 2, precision: fp32} fits no cell and is not tried",
        "search.enqueue: 2 of its points fit one cell, which takes the first 1 (samples)",
    )
    assert plan_notes(parse(text, "search.samples=2", "search.enqueue=[{k: 2}]")) == ()


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "qmc", "nsga2"])
def test_each_sampler_of_optuna_can_be_asked_for(sampler):
    text = SAMPLED.replace("algorithm: random", f"algorithm: optuna, sampler: {sampler}")
    assert parse(text).search.sampler == sampler


def test_several_metrics_are_objectives_and_the_first_is_the_metric():
    text = HEAD.replace("metric: val/mse", "metric: [val/mse, {name: val/loss, mode: max}]") + SAMPLED
    spec = parse_sweep(text, "t.yaml", workload_of)
    assert [(one.name, one.mode) for one in spec.objectives] == [("val/mse", "min"), ("val/loss", "max")]
    assert spec.metric == spec.objectives[0]
    for metric, message in (
        ("[]", "lists no metric"),
        ("[val/mse, val/mse]", "val/mse is listed twice"),
        ("[val/mse, {name: val/los}]", "did you mean val/loss?"),
        ("[val/mse, {mode: max}]", "is missing"),
    ):
        with pytest.raises(SpecError, match=message.replace("?", r"\?")):
            parse_sweep(text, "t.yaml", workload_of, [f"metric={metric}"])
    with pytest.raises(SpecError, match="cmaes knows one metric, not 2"):
        parse_sweep(text, "t.yaml", workload_of, ["search={algorithm: optuna, samples: 3, sampler: cmaes}"])


# --- unstable -------------------------------------------------------------------------------------------------------


def test_a_reference_on_one_zipped_axis_names_the_whole_place():
    zipped = AXES + "zip: [[batch_size, accumulation_steps, k]]\n"
    rule = "unstable: {{metric: val/mse, above: 2, relative_to: {}}}\n"
    unstable = parse(zipped + rule.format("{batch_size: 128}")).unstable
    assert unstable is not None
    assert unstable.relative_to == {"k": 1, "batch_size": 128, "accumulation_steps": 2}
    message = only(zipped + rule.format("{batch_size: 256}"))
    assert "unstable.relative_to  fits 2 places of its zip; name accumulation_steps, k too" in message
    assert "fits 0 places" in only(zipped + rule.format("{batch_size: 128, k: 4}"))
