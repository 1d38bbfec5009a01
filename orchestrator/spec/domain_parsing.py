"""One axis: a node of `params` to a value or a domain, each value in the field's declared type. Tells every mistake."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from orchestrator.spec.document import Node, plain_scalar
from orchestrator.spec.domains import (
    Choice,
    Domain,
    Grid,
    Int,
    Uniform,
    is_number,
    last_value,
    lattice_count,
    lattice_value,
    value_key,
)
from orchestrator.spec.faces import FieldFace, accepts
from orchestrator.spec.overrides import DOMAIN_KEYS, is_domain
from orchestrator.spec.problems import Problems, nearest

MAX_STEPS = 1e15  # floats tell no more values of a range apart
SHORT_LATTICE = 256  # a range of at most so many values is checked value by value
BOOLEAN_WORDS = frozenset({"on", "off", "yes", "no", "y", "n", "true", "false"})
NULL_WORDS = frozenset({"none", "null", "nil", "~"})


def mistyped_domain(node: Node) -> str:
    """What is wrong with a mapping that is neither a domain nor nested fields."""
    keys = list(node.entries)
    near = next((near for key in keys if (near := nearest(key, DOMAIN_KEYS))), None)
    hint = f"did you mean {near}? " if near else ""
    return f"{{{', '.join(keys)}: ...}} is no domain; {hint}Allowed: {', '.join(DOMAIN_KEYS)}"


@dataclass
class AxisReader:
    """Reads the node of one field. `failed` is True once a problem was added."""

    path: str
    face: FieldFace
    problems: Problems
    notes: list[str] = field(default_factory=list)
    repeats: bool = False  # whether a grid may hold a value twice
    failed: bool = False

    def read(self, node: Node) -> Any:
        """A `Domain`, or the fixed value in its declared type; None (with `failed`) after a mistake."""
        return self._domain(node, nested=False) if is_domain(node) else self._value(node)

    def _refuse(self, node: Node, message: str) -> None:
        self.failed = True
        self.problems.add(node.where, self.path, message)

    def _value(self, node: Node) -> Any:
        raw = node.plain()
        try:
            if _holds_nan(raw):
                raise ValueError("NaN is no parameter: it equals nothing, not even itself")
            return self.face.check(raw)
        except ValueError as error:
            if node.is_mapping:
                self._refuse(node, mistyped_domain(node))
            else:
                self._refuse(node, f"{_short(raw)}: {mend(raw, self.face, str(error))}")
        return None

    def _domain(self, node: Node, nested: bool) -> Domain | None:
        kinds = [key for key in node.entries if key in DOMAIN_KEYS]
        for key, child in node.entries.items():
            if key not in (*DOMAIN_KEYS, "step"):
                near = nearest(key, (*DOMAIN_KEYS, "step"))
                self._refuse(child, f"unknown key {key}" + (f", did you mean {near}?" if near else ""))
        if len(kinds) > 1:
            self._refuse(node, f"{' and '.join(kinds)}: an axis has one domain")
            return None
        kind, body = kinds[0], node.entries[kinds[0]]
        if kind in ("grid", "choice"):
            return self._listed(kind, node, body, nested)
        return self._range(kind, node, body)

    def _listed(self, kind: str, node: Node, body: Node, nested: bool) -> Domain | None:
        if "step" in node.entries:
            self._refuse(node.entries["step"], f"step belongs to a range of numbers, not to {kind}")
        if kind == "grid" and nested:
            self._refuse(body, "a grid cannot stand inside a choice; list the values in the choice")
        if not body.is_list or not body.items:
            self._refuse(body, f"{kind} needs a list of at least one value, such as {kind}: [1, 2]")
            return None
        options = [self._option(kind, item) for item in body.items]
        if self.failed:
            return None
        if kind == "grid" and self.repeats:
            return Grid(tuple(options))
        unique = distinct_options(options)
        self._note_duplicates(kind, options, unique)
        return Grid(unique) if kind == "grid" else Choice(unique)

    def _option(self, kind: str, item: Node) -> Any:
        if not is_domain(item):
            return self._value(item)
        if kind == "grid":
            self._refuse(item, "a grid holds values; to mix values and ranges write choice: [...] and a search")
            return None
        return self._domain(item, nested=True)

    def _note_duplicates(self, kind: str, options: list[Any], unique: tuple[Any, ...]) -> None:
        if len(unique) < len(options):
            counts = Counter(_option_key(option) for option in options)
            repeated = [_short(option) for option in unique if counts[_option_key(option)] > 1]
            self.notes.append(f"{self.path}: {', '.join(repeated)} is listed more than once in {kind}; it counts once")

    def _range(self, kind: str, node: Node, body: Node) -> Domain | None:
        ends = self._ends(kind, body)
        step = self._step(kind, node)
        if ends is None or self.failed:
            return None
        low, high = ends
        if step is not None and step > high - low:
            self._refuse(node.entries["step"], f"step {step} is larger than the range from {low} to {high}")
            return None
        if step is not None and (high - low) / step > MAX_STEPS:
            self._refuse(
                node.entries["step"], f"step {step} is too fine for the range from {low} to {high}; leave it out"
            )
            return None
        domain = _range_of(kind, low, high, step)
        self._check_range(kind, body, domain)
        if step is not None and last_value(domain) != high:
            self.notes.append(f"{self.path}: steps of {step} from {low} end at {last_value(domain)}, not at {high}")
        return None if self.failed else domain

    def _ends(self, kind: str, body: Node) -> tuple[float, float] | None:
        """Both ends as ints or floats, as the kind says; None after a problem."""
        numbers = [item.value for item in body.items if _is_finite_number(item.value)]
        if len(body.items) != 2 or len(numbers) != 2:
            self._refuse(body, f"{kind} needs two finite numbers: {kind}: [low, high]")
            return None
        low, high = numbers
        if kind.endswith("int") and not all(isinstance(end, int) for end in numbers):
            self._refuse(body, f"{kind} needs whole numbers; for fractions write {kind.replace('int', 'uniform')}")
        elif kind.startswith("log") and low <= 0:  # type: ignore[operator]
            self._refuse(body, _zero_in_log(kind, low, high))
        elif not math.isfinite(float(high) - float(low)):  # type: ignore[arg-type]
            self._refuse(body, f"{kind}: [{low}, {high}] is wider than a float can hold")
        elif low >= high:  # type: ignore[operator]
            self._refuse(body, f"{kind}: [{low}, {high}]: the lower end comes first and must be smaller")
        else:
            return (low, high) if kind.endswith("int") else (float(low), float(high))  # type: ignore[arg-type,return-value]
        return None

    def _step(self, kind: str, node: Node) -> float | int | None:
        child = node.entries.get("step")
        if child is None:
            return None
        value = child.value
        whole_only = kind.endswith("int")
        if not _is_finite_number(value) or value <= 0 or (whole_only and not isinstance(value, int)):  # type: ignore[operator]
            self._refuse(
                child, f"step {_short(child.plain())}: a {'whole ' if whole_only else ''}number above 0 is needed"
            )
            return None
        return value if whole_only else float(value)  # type: ignore[arg-type,return-value]

    def _check_range(self, kind: str, body: Node, domain: Uniform | Int) -> None:
        """Both ends, and every value of a short range, must be values of the field and keep their type."""
        for value in _samples(domain):
            try:
                checked = self.face.check(value)
            except ValueError as error:
                self._refuse(body, f"{_short(value)}: {self._mend_range(kind, domain, str(error))}")
                return
            if type(checked) is not type(value):
                self._refuse(body, self._mend_range(kind, domain, f"is {type(checked).__name__} here"))
                return

    def _mend_range(self, kind: str, domain: Uniform | Int, error: str) -> str:
        low, high = float(domain.low), float(domain.high)
        log = "log" if domain.log else ""
        if isinstance(domain, Uniform) and low.is_integer() and high.is_integer() and accepts(self.face, int(low)):
            return f"takes whole numbers; write {log}int: [{int(low)}, {int(high)}]"
        if isinstance(domain, Int) and accepts(self.face, low):
            return f"takes fractions; write {log}uniform: [{low}, {high}], with step: 1 for whole ones"
        return error


def _range_of(kind: str, low: float, high: float, step: float | None) -> Uniform | Int:
    log = kind.startswith("log")
    if kind.endswith("int"):
        return Int(int(low), int(high), log, None if step is None else int(step))
    return Uniform(low, high, log, step)


def distinct_options(options: list[Any]) -> tuple[Any, ...]:
    """The options of a list in order, each once; nested domains are compared as such."""
    unique: dict[str, Any] = {}
    for option in options:
        unique.setdefault(_option_key(option), option)
    return tuple(unique.values())


def _option_key(option: Any) -> str:
    return repr(option) if isinstance(option, Choice | Uniform | Int) else value_key(option)


def mend(raw: Any, face: FieldFace, error: str) -> str:
    """The library's message, or a better one where we can tell what was meant."""
    if isinstance(raw, str):
        return _mend_text(raw, face) or error
    if isinstance(raw, float) and raw.is_integer() and accepts(face, int(raw)):
        return f"a whole number is needed; write {int(raw)}"
    if isinstance(raw, list) and raw and all(accepts(face, item) for item in raw):
        return f"one value is needed; to try each write {{grid: {_short(raw)}}}"
    if isinstance(raw, bool | int | float) and accepts(face, str(raw)):
        return "text is needed; put it in quotes"
    return error if raw is not None else f"null is not allowed: {error}"


def _mend_text(raw: str, face: FieldFace) -> str | None:
    word = raw.strip().lower()
    if word in NULL_WORDS and accepts(face, None):
        return "is text here; did you mean null?"
    if word in BOOLEAN_WORDS and accepts(face, True):
        return "is text in YAML 1.2; write true or false"
    if face.choices:
        near = nearest(raw, [str(choice) for choice in face.choices])
        known = ", ".join(str(choice) for choice in face.choices)
        return f"did you mean {near}? ({known})" if near else f"one of {known} is needed"
    meant = _number_meant(word)
    if meant is not None and accepts(face, meant):
        return f"is text, not a number; write {meant!r} without quotes"
    return None


def _number_meant(word: str) -> int | float | None:
    try:
        value = plain_scalar(word.replace("_", "").replace(",", "."))
    except ValueError:
        return None
    return value if _is_finite_number(value) else None  # type: ignore[return-value]


def _samples(domain: Uniform | Int) -> Iterator[float | int]:
    count = lattice_count(domain)
    if count is not None and count <= SHORT_LATTICE:
        yield from (lattice_value(domain, index) for index in range(count))
    else:
        yield from (domain.low, last_value(domain))


def _zero_in_log(kind: str, low: Any, high: Any) -> str:
    message = f"{kind}: [{low}, {high}]: a logarithmic range lies above 0"
    if low == 0 and high > 0:
        start = f"{float(high) / 1000:g}" if kind == "loguniform" else "1"
        message += f"; for zero or a range write choice: [0, {{{kind}: [{start}, {high}]}}]"
    return message


def _is_finite_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _holds_nan(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_nan(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_nan(item) for item in value.values())
    return isinstance(value, float) and math.isnan(value)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
