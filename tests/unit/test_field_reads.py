"""Which swept fields a trial read: every way to read one is noticed, and the config stays what it was meanwhile."""

from __future__ import annotations

import copy
import operator
import pickle
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, PrivateAttr, TypeAdapter, model_validator

from orchestrator.execution.field_reads import Unwatchable, acts_through_others, values_by_axis, watch
from orchestrator.execution.job import Job
from orchestrator.execution.trial_run import run_trial
from orchestrator.search import make_searcher
from orchestrator.spec import SweepSpec, parse_sweep, read_sweep_file
from orchestrator.trial import Finding, Params
from orchestrator.workload import WorkloadConfig, describe

NAMES = ("lr", "dropout", "hidden", "opt.beta", "opt.eps")


class Opt(WorkloadConfig):
    beta: float = 0.9
    eps: float = 1e-8


class Config(WorkloadConfig):
    lr: float = 0.1
    dropout: float = 0.0
    hidden: tuple[int, ...] = (3,)
    opt: Opt = Opt()
    seed: int = 0

    @property
    def twice(self) -> float:
        return 2 * self.lr

    @cached_property
    def width(self) -> int:
        return self.hidden[0]


class Open(BaseModel):
    """Neither frozen nor hashable."""

    lr: float = 0.1
    dropout: float = 0.0


def reads(act: Callable[[Any], object], config: BaseModel | None = None) -> set[str]:
    """What `act` reads of a config."""
    config = config or Config(opt=Opt())
    plain, read = type(config), set[str]()
    end = watch(config, [name for name in NAMES if name.split(".")[0] in plain.model_fields], read)
    try:
        act(config)
    finally:
        end()
    assert type(config) is plain
    return read


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda config: None, set()),
        (lambda config: config.lr, {"lr"}),
        (lambda config: config.lr + config.lr, {"lr"}),
        (lambda config: config.seed, set()),
        (lambda config: config.opt, set()),
        (lambda config: config.opt.beta, {"opt.beta"}),
        (lambda config: getattr(config, "dropout", None), {"dropout"}),
        (operator.attrgetter("opt.eps"), {"opt.eps"}),
        (lambda config: config.twice, {"lr"}),
        (lambda config: config.width, {"hidden"}),
        (lambda config: (type(config).model_fields, config.model_fields_set, isinstance(config, Config)), set()),
        (lambda config: dict(config.opt), {"opt.beta", "opt.eps"}),
    ],
)
def test_reading_a_field_is_noticed_and_nothing_else_is(act: Callable[[Any], object], expected: set[str]) -> None:
    assert reads(act) == expected


def matches(config: Config) -> bool:
    match config:
        case Config(lr=0.1):
            return True
    return False


def test_a_pattern_that_matches_a_field_reads_it() -> None:
    assert reads(matches) == {"lr"}


@pytest.mark.parametrize(
    "act",
    [
        dict,
        list,
        vars,
        hash,
        repr,
        str,
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda config: config.model_dump(),
        lambda config: config.model_dump(include={"lr"}),
        lambda config: config.model_dump_json(),
        lambda config: TypeAdapter(Config).dump_python(config),
        lambda config: config.model_copy(update={"seed": 1}),
        lambda config: config == Config(),
        lambda config: Config() == config,
        lambda config: config != 3,
        lambda config: config in [Config(seed=1)],
        lambda config: config.__dict__["lr"],
        lambda config: type(config)(**{**vars(config), "seed": 1}),
    ],
)
def test_taking_the_config_as_a_whole_reads_everything(act: Callable[[Any], object]) -> None:
    assert reads(act) == set(NAMES)


def test_a_watched_config_is_an_instance_of_its_class_in_every_way() -> None:
    @lru_cache
    def remembered(config: Config) -> object:
        return object()

    def behaves(config: Config) -> None:
        assert isinstance(config, Config)
        assert config.__class__ is Config
        assert (type(config).__name__, type(config).__module__) == ("Config", __name__)
        assert config.model_fields_set == {"opt", "lr"}
        assert weakref.ref(config)() is config
        with pytest.raises(ValueError, match="frozen"):
            config.lr = 3
        with pytest.raises(AttributeError):
            _ = config.nothing  # type: ignore[attr-defined]

    def is_equal(config: Config) -> None:
        assert config == Config(lr=0.2)
        assert Config(lr=0.2) == config
        assert config != Config(lr=0.3)

    def is_the_same_key(config: Config) -> None:
        assert remembered(config) is remembered(Config(lr=0.2))

    def travels(config: Config) -> None:
        for again in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
            assert type(again) is Config
            assert again == Config(lr=0.2)

    for act in (behaves, is_equal, is_the_same_key, travels):
        reads(act, Config(lr=0.2, opt=Opt()))


def test_two_parts_that_are_both_watched_can_be_compared() -> None:
    class Pair(BaseModel):
        left: Opt
        right: Opt

    config, read = Pair(left=Opt(), right=Opt()), set[str]()
    end = watch(config, ["left.beta", "right.beta"], read)
    assert config.left == config.right
    end()
    assert read == {"left.beta", "right.beta"}


def test_a_config_that_may_be_changed_can_be_changed_and_then_reads_as_changed() -> None:
    def change(config: Open) -> None:
        config.lr = 0.7
        object.__setattr__(config, "dropout", 0.5)
        assert (config.lr, config.dropout) == (0.7, 0.5)
        with pytest.raises(TypeError, match="unhashable"):
            hash(config)

    reads(change, Open())


def test_a_config_made_of_a_watched_ones_type_is_sound() -> None:
    def make(config: Open) -> None:
        again = type(config)(lr=0.3)
        assert (again.lr, again.dropout, again) == (0.3, 0.0, Open(lr=0.3))
        assert type(again) is Open

    reads(make, Open())


def test_a_class_that_cannot_be_derived_from_is_said_to_be_so_and_left_alone() -> None:
    class Final(BaseModel):
        lr: float = 0.1

        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise TypeError("no heirs")

    config, read = Final(), set[str]()
    with pytest.raises(Unwatchable, match="TypeError: no heirs"):
        watch(config, ["lr"], read)
    assert type(config) is Final
    assert (config.lr, read) == (0.1, set())


def test_a_slot_in_the_users_class_is_no_hindrance() -> None:
    class Slotted(BaseModel):
        __slots__ = ("cache",)
        lr: float = 0.1

    assert reads(lambda config: config.lr, Slotted()) == {"lr"}


# What only a validator reads


class Preset(BaseModel):
    size: str = "small"
    width: int | None = None
    unused: int = 0
    factor: int = 1
    opt: Opt = Opt()
    _depth: int = PrivateAttr(0)

    @cached_property
    def area(self) -> int:
        return self.factor * 2

    @model_validator(mode="after")
    def _fill(self) -> Preset:
        if self.unused == 9:
            raise ValueError("never nine")
        self.width = self.width or {"small": 8, "large": 16}[self.size]
        assert self.area
        self._depth = int(self.opt.beta > 0.5)
        return self


def resolve(params: Mapping[str, Any]) -> Preset:
    nested = {"opt": {name.removeprefix("opt."): value for name, value in params.items() if "." in name}}
    return Preset.model_validate({**{name: value for name, value in params.items() if "." not in name}, **nested})


@pytest.mark.parametrize(
    ("params", "name", "values", "expected"),
    [
        ({"size": "small"}, "size", ["small", "large"], True),
        ({"size": "small"}, "size", ["small", "unheard of"], False),  # it does not go with the rest: says nothing
        ({"size": "small", "width": 4}, "size", ["small", "large"], False),  # the width is given: the preset is idle
        ({"unused": 1}, "unused", [1, 2, 9], False),
        ({"opt.beta": 0.9}, "opt.beta", [0.9, 0.1], True),  # through a private attribute
        ({"factor": 1}, "factor", [1, 2], True),  # through a cached property
        ({"opt.eps": 0.9}, "opt.eps", [0.9, 0.1], False),
    ],
)
def test_a_field_acts_through_others_if_another_value_changes_more_than_itself(
    params: dict[str, Any], name: str, values: list[Any], expected: bool
) -> None:
    try:
        assert acts_through_others(resolve, params, name, values) is expected
    except KeyError:
        assert "unheard of" in values


# The shipped sweeps

SWEEPS = sorted((Path(__file__).parents[2] / "sweeps").glob("*.yaml"))
TOY = {"steps": 2, "train_steps": 1, "num_held_out_windows": 4, "num_tokens": 100}
"""Sizes at which a trial takes a moment; they change nothing about which fields are read."""


class Findings:
    """A sink that keeps findings only."""

    stopping = False

    def __init__(self) -> None:
        self.seen: list[Finding] = []

    def record(self, job: Job, step: int, timestamp_ms: int, metrics: Mapping[str, float]) -> None:
        """Nobody asks for the metrics."""

    def finding(self, job: Job, finding: Finding) -> None:
        self.seen.append(finding)

    def sync(self) -> None:
        """Nothing to wait for."""


def corners(spec: SweepSpec) -> list[Params]:
    """The sweep's first trial and those that differ from it in one axis: every value of every axis."""
    candidates = make_searcher(spec).ask([])
    assert candidates is not None
    first = candidates[0].params
    near = [one.params for one in candidates if sum(one.params[axis] != first[axis] for axis in spec.axes) <= 1]
    return [params for params in near if params.get("seed") == first.get("seed")]


def shrunk(spec: SweepSpec, params: Params) -> Params:
    """The same with the toy sizes that the workload has a use for."""
    for name, value in TOY.items():
        try:
            describe(spec.workload).resolve({**params, name: value})
        except ValueError:
            continue
        params = {**params, name: value}
    return params


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_axis_of_a_shipped_sweep_is_read_by_every_trial(path: Path) -> None:
    spec = parse_sweep(read_sweep_file(path), str(path), describe)
    for params in corners(spec):
        sink = Findings()
        nowhere = "hdfs://none"  # keeps no states, and is not asked
        job = Job(
            *(1, 1, 0, 1, "run", spec.workload, shrunk(spec, params), spec.metric.name, False, 10, 100, 0, nowhere),
            axes=values_by_axis(spec),
        )
        outcome = run_trial(job, sink)
        assert outcome.state.is_result, outcome.error
        found = [finding.message for finding in sink.seen if finding.check_name in ("unread_field", "probe_failed")]
        assert found == [], params
