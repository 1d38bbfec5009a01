"""The section `scheduler`: each algorithm takes its own settings, and those that fit the sweep. Trains nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.errors import SpecError
from orchestrator.spec import SweepSpec, parse_sweep
from orchestrator.spec.sweep_spec import Schedule
from orchestrator.workload import describe

HEAD = "workload: moe_router\nmetric: val/mse\nparams:\n"
SAMPLED = """  k: {grid: [1, 2]}
  lr: {loguniform: [1e-4, 1e-2]}
  c_z: {choice: [0, 1e-4, 1e-3]}
  optimizer: {choice: [adam, sgd]}
  weight_decay: {uniform: [0, 1]}
  d_hidden: {int: [8, 64]}
search: {algorithm: random, samples: 3}
"""
PBT = "scheduler: {algorithm: pbt, interval_steps: 100, perturb: [lr, c_z], quantile: 0.2, seed: 3}\n"


def parse(text: str, *overrides: str) -> SweepSpec:
    return parse_sweep(HEAD + text, "t.yaml", describe, overrides)


def only(text: str, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(text, *overrides)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("section", "schedule"),
    [
        ("asha", Schedule("asha")),
        ("{algorithm: asha, max_steps: 800, grace_steps: 100, reduction_factor: 3}", Schedule("asha", 800, 100, 3.0)),
        ("{algorithm: median, grace_steps: 100}", Schedule("median", None, 100)),
        ("{algorithm: hyperband, max_steps: 800, reduction_factor: 2}", Schedule("hyperband", 800, 1, 2.0)),
        ("none", Schedule()),
        ("{}", Schedule()),
        ("{algorithm: none, max_steps: 9, perturb: [lr]}", Schedule()),
    ],
)
def test_a_scheduler_is_read_with_its_settings(section, schedule):
    assert parse(f"  k: {{grid: [1, 2]}}\nscheduler: {section}\n").schedule == schedule


def test_a_population_explores_sampled_numbers_that_may_change_while_a_trial_trains():
    schedule = parse(SAMPLED + PBT).schedule
    assert schedule == Schedule("pbt", interval_steps=100, perturb=("lr", "c_z"), quantile=0.2, seed=3)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{max_steps: 9}", "scheduler  needs an algorithm: none, asha, median, hyperband, pbt"),
        ("ahsa", "scheduler.algorithm  'ahsa': did you mean asha?"),
        ("{algorithm: asha, max_step: 9}", "unknown key scheduler.max_step, did you mean max_steps?"),
        (
            "{algorithm: asha, quantile: 0.2}",
            "asha does not use quantile; it has max_steps, grace_steps, reduction_fac",
        ),
        ("{algorithm: median, reduction_factor: 3}", "median does not use reduction_factor"),
        ("{algorithm: pbt, interval_steps: 10, perturb: [lr], grace_steps: 3}", "pbt does not use grace_steps"),
        ("{algorithm: asha, reduction_factor: 1}", "above 1"),
        ("{algorithm: asha, max_steps: 0}", "at least 1"),
        ("{algorithm: asha, max_steps: 9, grace_steps: 10}", "judged before step 10, but trials end at step 9"),
        ("{algorithm: asha, grace_steps: 801}", "nobody is judged before step 801, but trials end at step 800"),
        ("{algorithm: pbt, interval_steps: 10, perturb: lr}", "is no list of names; write perturb: [lr]"),
        ("{algorithm: pbt, interval_steps: 10, perturb: []}", "is no list of names; write perturb: [lr]"),
        ("{algorithm: pbt, interval_steps: 10}", "is missing; name the axes that pbt may change, such as [lr, c_z, w"),
        ("{algorithm: pbt, perturb: [lr]}", "interval_steps  is missing; pbt looks at the population every so often"),
        ("{algorithm: pbt, perturb: [lr], interval_steps: 800}", "nobody looks before step 800, but tria"),
        ("{algorithm: pbt, perturb: [lr], interval_steps: 15}", "every log_every = 10 steps only; write 20"),
        ("{algorithm: pbt, perturb: [lr], interval_steps: 10, quantile: 0.6}", "above 0 and at most 0.5"),
        ("{algorithm: pbt, perturb: [lrr], interval_steps: 10}", "lrr is no axis of this sweep; did you mean lr?"),
        ("{algorithm: pbt, perturb: [k], interval_steps: 10}", "k is a grid axis, by which trials are compared"),
        ("{algorithm: pbt, perturb: [d_hidden], interval_steps: 10}", "d_hidden is structural"),
        (
            "{algorithm: pbt, perturb: [lr], interval_steps: 10}\nwhen: {lr: {optimizer: adam}}",
            "is tied to others by when",
        ),
        (
            "{algorithm: pbt, perturb: [c_z], interval_steps: 10}\nexclude: [{c_z: 0, k: 1}]",
            "is tied to others by when",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_what_would(section, message):
    said = only(f"{SAMPLED}scheduler: {section}\n")
    assert said.startswith("t.yaml:11  scheduler")
    assert message in said


def test_a_population_has_more_than_one_member_and_all_of_them_from_the_start():
    one = SAMPLED.replace("samples: 3", "samples: 1")
    assert "the trials of a cell are a population, and here each has one" in only(one + PBT)
    parse(one + "seeds: 2\n" + PBT)
    assert "optuna waits for results" in only(SAMPLED + PBT, "search.algorithm=optuna")


def test_a_scheduler_and_the_number_of_steps_that_trials_ask_for_are_held_against_each_other():
    asha = "scheduler: {algorithm: asha, max_steps: 200, grace_steps: 20}\n"
    assert parse("  steps: 200\n" + asha).notes == ()
    assert parse("  steps: {grid: [100, 200]}\n" + asha).notes == ()
    assert parse("  steps: 100\n" + asha).notes == (
        "scheduler.max_steps is 200, params.steps is 100: trials end after 100 steps",
    )
    assert parse("  steps: 400\n" + asha).notes == (
        "scheduler.max_steps is 200, params.steps is 400: trials end at step 200 of 400, by the scheduler",
    )
    assert "trials end at step 10" in only("  steps: 10\n" + asha)


def test_trials_that_report_nothing_on_which_they_could_be_stopped_are_noted():
    def notes(section: str, *overrides: str) -> tuple[str, ...]:
        return parse(f"  steps: 100\nscheduler: {section}\n", *overrides).notes

    nobody = "scheduler: nobody can be stopped: trials report every log_every = "
    for section in ("asha", "median", "hyperband"):
        assert notes(section, "log_every=99") == ()
        (note,) = notes(section, "log_every=100")
        assert note == f"{nobody}100 steps and end at step 100, so that none is judged before"
    graced = "{algorithm: asha, grace_steps: 85}"
    assert notes(graced) == ()
    assert notes(graced, "log_every=50")[0].endswith("end at step 100, so that none is judged from step 85 on before")


def test_a_workload_without_a_field_for_its_steps_needs_max_steps():
    text = "workload: memory\nmetric: memory/saved_bytes\nparams: {batch_size: {grid: [1, 2]}}\nscheduler: asha\n"
    with pytest.raises(SpecError, match="max_steps  is missing, and memory has no field steps"):
        parse_sweep(text, "t.yaml", describe)


def test_a_scheduler_judges_one_metric():
    with pytest.raises(SpecError, match="asha judges by one metric, and metric lists 2"):
        parse("  k: 1\nscheduler: asha\n", "metric=[val/mse, train/mse]")


def test_a_scheduler_is_changed_switched_off_and_replaced_from_the_command_line():
    text = "  k: 1\nscheduler: {algorithm: asha, max_steps: 800, reduction_factor: 2}\n"
    spec = parse(text)
    assert parse(text, "scheduler.grace_steps=50").schedule == replace(spec.schedule, grace_steps=50)
    assert parse(text, "scheduler.algorithm=none").schedule == Schedule()
    assert parse(text, "scheduler=none").schedule == Schedule()
    assert parse(text, "scheduler=asha", "scheduler.algorithm=none").schedule == Schedule()
    assert parse(text, "scheduler=asha", "scheduler.max_steps=80").schedule == Schedule("asha", 80)
    assert parse(text, "scheduler=median").schedule == Schedule("median")
    assert parse(text, "scheduler={algorithm: median, max_steps: 80}").schedule == Schedule("median", 80)
