"""The extension point: what a workload is, how its name becomes a class, which fields a sweep may set.

Knows nothing of Ray, MLflow or the database. Importing a shipped workload's description does not import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import importlib
import importlib.util
import keyword
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import starmap
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.errors import NotFound, OrchError, WorkloadBroken
from orchestrator.masking import mask
from orchestrator.trial import Finding, Report, jsonable

if TYPE_CHECKING:  # commands that train nothing need not load it
    import numpy as np

SHIPPED_PACKAGE = "workloads"
ENTRY_POINT_GROUP = "orch.workloads"


class WorkloadConfig(BaseModel):
    """Base of the shipped configs: frozen, strict, no unknown fields, no infinities unless a field allows them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def refuse_idle(self, used: Collection[str], choice: str) -> None:
        """Raises FieldConflict for a field that differs from its default and is not `used` with this `choice`.

        An axis without effect would look like a finding. The seed is a replicate and may always be set.
        """
        fields, unused = type(self).model_fields, self.model_fields_set - {*used, choice, "seed"}
        idle = {name for name in unused if getattr(self, name) != fields[name].get_default(call_default_factory=True)}
        if idle:
            name, value = min(idle), getattr(self, choice)
            raise FieldConflict(name, f"{name} does nothing with {choice}: {value}; leave it out or change {choice}")


def fusible(default: Any, **constraints: Any) -> Any:
    """A scalar field that may differ between trials which train together as one model (c_z, lr, seed, ...)."""
    return Field(default, json_schema_extra={"fusible": True}, **constraints)


def size(default: Any, **constraints: Any) -> Any:
    """A structural field that only says how much or how long: trials that differ in it alone are checked as one."""
    return Field(default, json_schema_extra={"size": True}, **constraints)


class FieldConflict(ValueError):
    """Raised in a config's model validator when fields do not fit together; `name` is the field to point at."""

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(message)


class Checkpoint(Protocol):
    """The saved states of a trial: whatever bytes its workload needs to go on from a step.

    The last two are kept and the one with the best objective. `is_kept`: the sweep keeps states beyond the trial's
    result, so that the last step's is worth saving too.
    """

    is_kept: bool

    def load(self) -> bytes | None:
        """The newest state that this trial saved, in this attempt or an earlier one; None: begin at the start."""

    def due(self, step: int) -> bool:
        """True at every `checkpoint_every`-th step."""

    def save(self, step: int, state: bytes) -> None:
        """Keeps the state after `step`, once everything reported so far is safe: report the step first.

        The next attempt goes on at the step after it, so a workload that saves must load. A trial that has a result
        needs no state: unless `is_kept`, there is none to save at the last step.
        """


def stream_seed(trial_seed: int, stream: str) -> int:
    """The 63-bit seed of a stream of random numbers: a function of the trial's seed and the stream's name alone."""
    digest = hashlib.sha256(f"{trial_seed}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Context(Protocol):
    """What a workload may ask of whoever runs it."""

    trial: int
    attempt: int
    device: str  # "cpu" or "cuda"
    gpu_share: float  # of one GPU, or a number of whole ones; 0 without

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def stopping(self) -> bool:
        """True after the first signal: finish the step, save its state and return."""

    def should_report(self, step: int) -> bool:
        """True at every `log_every`-th step. Step 0 counts; the last step is for the workload to report always."""

    def seed(self, stream: str) -> int:
        """A 63-bit seed derived from (the trial's `seed`, the stream's name) and nothing else."""

    def generator(self, stream: str) -> np.random.Generator:
        """A generator seeded by `seed(stream)`; for torch write `torch.Generator().manual_seed(context.seed(...))`."""

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The limits of checks that the sweep's `health` changes, by name; defaults are the workload's."""

    def finding(self, finding: Finding) -> None:
        """Stores what a probe or check saw; one that the sweep stops on ends the trial at its next report."""

    def artifact(self, path: Path, name: str | None = None) -> None:
        """Stores a file with the run."""


class Workload(Protocol):
    """A class whose `run` turns a config into reports. Closing the iterator stops the work.

    It may also have `check(config, context) -> Iterator[Finding]`: small experiments that are made once for each
    distinct structure before a sweep trains; an error among the findings keeps the sweep from starting. And `checks`,
    the names of what it may find, for `stop: {on: [...]}`; and `thresholds`, default limits by name, for `health`.
    """

    Config: type[BaseModel]
    metrics: tuple[str, ...]

    def run(self, config: Any, context: Context) -> Iterator[Report]: ...


@dataclass(frozen=True)
class SweepField:
    """One field a sweep may set. `check` returns the value in its declared type or raises ValueError: what is right."""

    name: str  # dotted for nested models
    type_name: str
    default: Any
    required: bool
    fusible: bool
    size: bool  # how much or how long only, see `size`
    description: str
    check: Callable[[Any], Any]
    choices: tuple[Any, ...] = ()
    sql_type: str = "jsonb"  # of its column in the view `sweep_<name>`


@dataclass(frozen=True)
class Description:
    """What is known of a workload without running it."""

    name: str
    summary: str
    config: type[BaseModel]
    metrics: tuple[str, ...]
    load: Callable[[], Workload]
    package: str  # the top-level package, shipped to remote workers
    address: str  # how a worker finds it: a shipped name, or `package.module:Class`
    checks: tuple[str, ...] = ()  # names of what its probes and checks may find
    thresholds: Mapping[str, float] = field(default_factory=dict)  # their limits by name, with the defaults
    early_checks: tuple[str, ...] = ()  # those of `checks` that are found before training or not at all

    def fields(self) -> Mapping[str, SweepField]:
        return dict(_fields_of(self.config))

    def declares(self, metric: str) -> bool:
        """True if the workload reports `metric`; patterns such as `router/load/*` count."""
        return any(fnmatch.fnmatchcase(metric, pattern) for pattern in self.metrics)

    def resolve(self, params: Mapping[str, Any]) -> BaseModel:
        """The frozen config of dotted `params`; defaults fill the rest. Raises pydantic's ValidationError."""
        nested: dict[str, Any] = {}
        for name, value in params.items():
            *parents, leaf = name.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[leaf] = value
        return self.config.model_validate(nested)


def flatten(config: BaseModel) -> dict[str, Any]:
    """The config's values by dotted name, in plain types."""

    def walk(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, item in value.items():
            if isinstance(item, BaseModel):
                yield from walk(dict(item), f"{prefix}{name}.")
            else:
                yield prefix + name, item

    return dict(walk(dict(config), ""))


def shipped_names() -> list[str]:
    """The workloads that come with orch, in alphabetical order."""
    spec = importlib.util.find_spec(SHIPPED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    return sorted(path.parent.name for path in root.glob("*/config.py"))


def describe(name: str) -> Description:
    """The workload of that name: a shipped one, an entry point, or `package.module:Class`.

    Raises NotFound with the nearest name. A class the user named that fails to import raises its own error.
    """
    if ":" in name:
        _refuse_no_address(name)
        return _describe_class(name, name)
    if name in shipped_names():
        module = importlib.import_module(f"{SHIPPED_PACKAGE}.{name}.config")
        return Description(
            name=name,
            summary=(module.__doc__ or "").strip().split("\n")[0],
            config=module.Config,
            metrics=tuple(module.METRICS),
            load=lambda: _load_class(module.IMPLEMENTATION),
            package=SHIPPED_PACKAGE,
            address=name,
            checks=tuple(getattr(module, "CHECKS", ())),
            early_checks=tuple(getattr(module, "EARLY_CHECKS", ())),
            thresholds=dict(getattr(module, "THRESHOLDS", {})),
        )
    registered = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in registered:
        return _describe_class(name, registered[name])
    known = [*shipped_names(), *registered]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}, or package.module:Class"
    raise NotFound(f"unknown workload {name!r}; {hint}")


def _refuse_no_address(name: str) -> None:
    """Raises NotFound, before anything is imported, for what names no class: a file, a dunder, an expression."""
    parts = [*name.partition(":")[0].split("."), name.partition(":")[2]]
    if not all(part.isidentifier() and not keyword.iskeyword(part) and part[:2] != "__" for part in parts):
        raise NotFound(
            f"workload {name!r:.200} names no class; write package.module:Class, where the package lies in the working "
            "directory or on PYTHONPATH"
        )


def _describe_class(name: str, target: str) -> Description:
    workload = _import_class(target)
    is_class = isinstance(workload, type)
    if not is_class:
        raise WorkloadBroken(f"workload {target!r} is no class but {workload!r:.100} (see docs/workloads.md)")
    missing = [part for part in ("Config", "metrics", "run") if not hasattr(workload, part)]
    if missing:
        raise WorkloadBroken(
            f"workload {target!r} has no {', no '.join(missing)}; it must be a class with a pydantic Config, the names "
            "of its metrics, and run (see docs/workloads.md)"
        )
    thresholds = getattr(workload, "thresholds", {})
    if not isinstance(thresholds, Mapping) or not all(starmap(_is_limit, thresholds.items())):
        raise WorkloadBroken(
            f"workload {target!r} has thresholds = {thresholds!r:.200}; numbers by name are due, such as "
            "{'my_limit': 3.0} (see docs/health.md)"
        )
    return Description(
        name=name,
        summary=(workload.__doc__ or "").strip().split("\n")[0],
        config=workload.Config,
        metrics=tuple(workload.metrics),
        load=lambda: _load_class(target),
        package=target.split(":")[0].split(".")[0],
        address=target,
        checks=tuple(getattr(workload, "checks", ())),
        early_checks=tuple(getattr(workload, "early_checks", ())),
        thresholds=dict(thresholds),
    )


def _is_limit(name: Any, limit: Any) -> bool:
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    return isinstance(name, str) and is_number and not math.isnan(limit)


def _load_class(target: str) -> Workload:
    instance: Workload = _import_class(target)()
    return instance


def _import_class(target: str) -> Any:
    module_name, _, class_name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise NotFound(f"workload {target!r}: no module {error.name!r} on the path or in {here}") from error
        raise WorkloadBroken(_import_failure(module_name, error)) from error
    except Exception as error:
        raise WorkloadBroken(_import_failure(module_name, error)) from error
    try:
        return getattr(module, class_name)
    except AttributeError:
        raise NotFound(f"workload {target!r}: {module_name} has no class {class_name!r}") from None


def _import_failure(module_name: str, error: Exception) -> str:
    """The original traceback, from the user's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"importing {module_name} failed:\n{mask(text)}"


def _is_machinery(file_name: str) -> bool:
    return file_name == __file__ or file_name == importlib.__file__ or file_name.startswith("<frozen importlib")


def _fields_of(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, SweepField]]:
    for name, info in config.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _fields_of(annotation, f"{prefix}{name}.")
            continue
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        default = info.get_default(call_default_factory=True) if not info.is_required() else None
        _refuse_unstorable(prefix + name, default)
        yield (
            prefix + name,
            SweepField(
                name=prefix + name,
                type_name=_type_name(annotation),
                default=None if default is PydanticUndefined else default,
                required=info.is_required(),
                fusible=bool(extra.get("fusible")),
                size=bool(extra.get("size")),
                description=info.description or "",
                check=_checker(config, info),
                choices=get_args(annotation) if get_origin(annotation) is Literal else (),
                sql_type=_sql_type(annotation),
            ),
        )


def _refuse_unstorable(name: str, default: Any) -> None:
    try:
        jsonable(None if default is PydanticUndefined else default)
    except TypeError as error:
        raise OrchError(f"the workload's field {name}: {error}; give it a type that JSON knows") from None


def _sql_type(annotation: Any) -> str:
    """The column type that holds every value of the field; a union of kinds falls back to text, a list to jsonb."""
    kind = get_origin(annotation)
    if kind is Literal:
        members = {type(choice) for choice in get_args(annotation)}
    elif kind in (Union, UnionType):
        members = set(get_args(annotation)) - {type(None)}
    else:
        members = {annotation}
    if members == {float} or members == {float, int}:
        return "double precision"
    if len(members) > 1 and all(
        member in (str, bool, int, float) or get_origin(member) is Literal for member in members
    ):
        return "text"
    return {bool: "boolean", int: "bigint", str: "text"}.get(next(iter(members)), "jsonb")


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:  # its constraints are checked, and too long to read
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return f"list[{', '.join(map(_type_name, get_args(annotation)))}]"
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _checker(config: type[BaseModel], info: FieldInfo) -> Callable[[Any], Any]:
    @lru_cache(maxsize=1)
    def adapter() -> TypeAdapter[Any]:
        annotated: Any = info.annotation
        for constraint in info.metadata:
            annotated = Annotated[annotated, constraint]
        allow_inf_nan = config.model_config.get("allow_inf_nan", True)
        return TypeAdapter(annotated, config=ConfigDict(strict=True, allow_inf_nan=allow_inf_nan))

    def check(value: Any) -> Any:
        try:
            checked = adapter().validate_python(value)
            jsonable(checked)
            return checked
        except TypeError as error:
            raise ValueError(f"{error}; give the field a type that JSON knows") from None
        except ValidationError as error:
            raise ValueError("; ".join(item["msg"] for item in error.errors())) from None

    return check
