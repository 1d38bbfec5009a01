"""Notices which swept fields of a config trials read. Changes no value, and does not care what becomes of it.

A watched config is for a while an instance of a class derived for it, whose swept fields note that they are read.
Whatever takes a config as a whole (unpacking, dumping, copying, pickling, comparing, hashing) counts as reading all of
it and ends the watch: what is copied, pickled or kept is an instance of the workload's own class.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from pydantic import BaseModel

from orchestrator.spec.domains import distinct, ends
from orchestrator.spec.relations import is_active
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Finding, Params, Severity

VALUES = vars(BaseModel)["__dict__"]  # the slot where pydantic keeps a model's fields; the derived class covers it
CLASS: Any = vars(object)["__class__"]
TAKES_ALL = ("__hash__", "__copy__", "__deepcopy__", "__reduce_ex__")
"""What looks at the class before it takes the values; the rest of pydantic's methods begin with `__dict__`."""


UNREAD_FIELD = "unread_field"
UNREAD = " was swept but this trial never read it: its values are the same training under other labels"
UNREAD_ADVICE = "make the workload use it, or sweep it only where it is used"
MAX_TRIED_VALUES = 8  # of an axis, to see whether it acts through other fields


class Unwatchable(Exception):
    """A config whose class no class can be derived from; says why."""


def watch(config: BaseModel, names: Collection[str], read: set[str]) -> Callable[[], None]:
    """From here on adds to `read` each of the dotted `names` that is read, until the function it returns is called.

    Raises Unwatchable, and leaves the config as it was.
    """
    watched: list[tuple[BaseModel, type[BaseModel]]] = []

    def end() -> None:
        for model, plain in watched:
            CLASS.__set__(model, plain)

    try:
        for prefix, model in _models(config, names).items():
            plain = type(model)
            below = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
            CLASS.__set__(model, _derived(plain, below, read))
            watched.append((model, plain))
    except Exception as error:  # a metaclass or __init_subclass__ of the user's may raise anything
        end()
        raise Unwatchable(f"{type(error).__name__}: {error}") from error
    return end


def unread_finding(name: str) -> Finding:
    return Finding(UNREAD_FIELD, Severity.ERROR, name + UNREAD, UNREAD_ADVICE)


def field_of(message: str) -> str:
    """The field that an `unread_field` is about."""
    return message.removesuffix(UNREAD)


def values_by_axis(spec: SweepSpec) -> dict[str, Sequence[Any]]:
    """What the sweep varies, and some of the values; an axis with one value varies nothing."""
    elsewhere = {name: (when.otherwise,) for name, when in spec.when.items()}
    values = {name: distinct([*ends(axis), *elsewhere.get(name, ())]) for name, axis in spec.axes.items()}
    return {name: several[:MAX_TRIED_VALUES] for name, several in values.items() if len(several) > 1}


def never_read(spec: SweepSpec, counts: Mapping[str, int], finished: Sequence[Params]) -> list[str]:
    """The axes that acted in no finished trial. `counts`: of how many each `unread_field` was said, by message."""
    unread = {field_of(message): count for message, count in counts.items()}

    def num_with(axis: str) -> int:
        return sum(is_active(spec, axis, params) for params in finished)

    return [axis for axis in values_by_axis(spec) if unread.get(axis) == num_with(axis) > 0]


def acts_through_others(
    resolve: Callable[[Mapping[str, Any]], BaseModel], params: Mapping[str, Any], name: str, values: Iterable[Any]
) -> bool:
    """True if one of these `values` of a field makes other fields different: a preset that only a validator reads."""
    ours = resolve(params)
    for value in values:
        try:
            theirs = resolve({**params, name: value})
        except Exception:  # it does not go with the trial's other values, or so the user's validators say: no answer
            continue
        if _differ(_with(theirs, name, ours), ours):
            return True
    return False


def _models(config: BaseModel, names: Collection[str]) -> dict[str, BaseModel]:
    """The config and the models nested in it that hold one of the names, by prefix: the empty one and `opt.`."""
    models = {"": config} if names else {}
    for name in names:
        model, prefix = config, ""
        for parent in name.split(".")[:-1]:
            model, prefix = getattr(model, parent), f"{prefix}{parent}."
            models[prefix] = model
    return models


class _Field:
    """In place of a field: its value, and a note that it was read."""

    def __init__(self, name: str, note: Callable[[], None]) -> None:
        self._name, self._note = name, note

    def __get__(self, model: BaseModel | None, owner: type) -> Any:
        if model is None:
            raise AttributeError(self._name)
        self._note()
        return VALUES.__get__(model)[self._name]

    def __set__(self, model: BaseModel, value: Any) -> None:
        VALUES.__get__(model)[self._name] = value


def _derived(plain: type[BaseModel], names: Mapping[str, str], read: set[str]) -> type[BaseModel]:
    """A class like `plain` that adds to `read`. `names`: those at and below this model, with what to note for each."""

    def release(model: BaseModel) -> None:
        read.update(names.values())
        CLASS.__set__(model, plain)

    def take_all(method: str, model: BaseModel, *arguments: Any) -> Any:
        release(model)
        return getattr(plain, method)(model, *arguments)

    def equals(model: BaseModel, other: object) -> bool:
        release(model)
        return model == other

    def values(model: BaseModel) -> dict[str, Any]:
        release(model)
        return vars(model)

    def set_values(model: BaseModel, values: dict[str, Any]) -> None:
        release(model)
        VALUES.__set__(model, values)

    fields = {field: _Field(field, partial(read.add, name)) for field, name in names.items() if "." not in field}
    namespace: dict[str, Any] = {
        **{method: _method(take_all, method) for method in TAKES_ALL if getattr(plain, method, None) is not None},
        **fields,
        **{name: _cached(member) for name, member in _cached_properties(plain).items()},
        "__eq__": equals,
        "__dict__": property(values, set_values),
        "__class__": property(lambda model: plain),
        "__slots__": (),  # the memory of an instance stays laid out as it is
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
    }
    # Past pydantic's metaclass, which would build a schema: that takes milliseconds, and there is nothing new in it.
    derived: type[BaseModel] = ABCMeta.__new__(type(plain), plain.__name__, (plain,), namespace)
    return derived


def _method(take_all: Callable[..., Any], method: str) -> Callable[..., Any]:
    def call(model: BaseModel, *arguments: Any) -> Any:
        return take_all(method, model, *arguments)

    return call


def _cached_properties(plain: type) -> dict[str, cached_property[Any]]:
    members = {name: member for one in reversed(plain.__mro__) for name, member in vars(one).items()}
    return {name: member for name, member in members.items() if isinstance(member, cached_property)}


def _cached(member: cached_property[Any]) -> property:
    """The same without `__dict__`: reading one is no reading of all."""

    def value(model: BaseModel) -> Any:
        kept = VALUES.__get__(model)
        if member.attrname not in kept:
            kept[member.attrname] = member.func(model)
        return kept[member.attrname]

    return property(value)


def _with(model: BaseModel, name: str, source: BaseModel) -> BaseModel:
    """`model` with the dotted field as `source` has it."""
    head, _, rest = name.partition(".")
    value = getattr(source, head)
    return model.model_copy(update={head: _with(getattr(model, head), rest, value) if rest else value})


def _differ(left: BaseModel, right: BaseModel) -> bool:
    """By fields, private attributes and what a validator cached. True where these cannot be compared: nobody knows."""
    try:
        return bool(left != right or vars(left) != vars(right))
    except (ValueError, TypeError, RuntimeError):  # arrays and tensors among private attributes
        return True
