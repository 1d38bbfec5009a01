"""Reads the parts of a sweep file that are not `params`: metric, search, resources, retries, tags and the rest.

Each converter takes a node and returns a value or raises ValueError saying what would be right.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.spec.document import Node
from orchestrator.spec.domains import is_number
from orchestrator.spec.faces import WorkloadFace
from orchestrator.spec.problems import Problems, nearest, unknown_key
from orchestrator.spec.sweep_spec import Budget, Metric, Resources, Retries, Search

T = TypeVar("T")
ALGORITHMS = ("grid", "random", "optuna")
SAMPLERS = ("tpe", "gp", "cmaes", "qmc", "nsga2")
MAX_TAG_CHARACTERS = 5000  # MLflow's own server stores as many in one tag
RESERVED_TAGS = ("mlflow.", "orch.")


@dataclass(frozen=True)
class Section:
    """The entries below one path, with the place where problems go."""

    path: str
    entries: dict[str, Node]
    problems: Problems

    @classmethod
    def of(cls, node: Node | None, path: str, known: Iterable[str], problems: Problems) -> Section:
        """The section's entries; unknown keys and a value that is no mapping become problems."""
        if node is None or node.value is None:
            return cls(path, {}, problems)
        if not node.is_mapping:
            problems.add(node.where, path, f"{shown(node)} is no mapping; known keys: {', '.join(known)}")
        for key, child in node.entries.items():
            if key not in known:
                problems.add(child.where, f"{path}.{key}", unknown_key(f"{path}.{key}", known))
        return cls(path, node.entries, problems)

    def read(self, key: str, convert: Callable[[Node], T], default: T) -> T:
        """The converted value of `key`; `default` when it is missing or null, and after a mistake."""
        node = self.entries.get(key)
        if node is None or node.value is None:
            return default
        try:
            return convert(node)
        except ValueError as error:
            self.problems.add(node.where, f"{self.path}.{key}".lstrip("."), str(error))
            return default


def whole(at_least: int, at_most: int | None = None) -> Callable[[Node], int]:
    bounds = f"at least {at_least}" if at_most is None else f"at least {at_least} and at most {at_most}"

    def convert(node: Node) -> int:
        value = node.value
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < at_least or (at_most is not None and value > at_most):  # type: ignore[operator]
            raise ValueError(f"{shown(node)}: a whole number, {bounds}, is needed")
        return value  # type: ignore[return-value]

    return convert


def number(above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf) -> Callable[[Node], float]:
    limits = {"above": above, "at least": at_least, "at most": at_most}
    bounds = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
    needed = f"a number {' and '.join(bounds)}" if bounds else "a finite number"

    def convert(node: Node) -> float:
        value = node.value
        if is_number(value) and math.isfinite(value) and value > above and at_least <= value <= at_most:
            return float(value)
        raise ValueError(f"{shown(node)}: {needed} is needed")

    return convert


def flag(node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise ValueError(f"{shown(node)}: write true or false")
    return node.value


def text(node: Node) -> str:
    if not isinstance(node.value, str) or not node.value:
        raise ValueError(f"{shown(node)}: text is needed")
    return node.value


def word(*allowed: str) -> Callable[[Node], str]:
    def convert(node: Node) -> str:
        if node.value in allowed and isinstance(node.value, str):
            return node.value
        near = nearest(node.text, allowed)
        hint = f"did you mean {near}?" if near else f"one of {', '.join(allowed)} is needed"
        raise ValueError(f"{shown(node)}: {hint}")

    return convert


def duration_s(node: Node) -> float:
    """Seconds of `30m`, `90s`, `1h30m`, `2h` or a plain number of seconds; above 0."""
    match = re.fullmatch(r"(?:([0-9.]+)d)?(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s)?", node.text.strip())
    try:
        if isinstance(node.value, str) and match:
            parts = zip(match.groups(), (86400, 3600, 60, 1), strict=True)
            seconds = sum(float(part) * unit for part, unit in parts if part)
        else:
            seconds = number(above=0)(node)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{shown(node)}: write a duration such as 30m, 90s, 1h30m, or a number of seconds")
    return float(seconds)


def gpus(node: Node) -> float:
    share = number(at_least=0)(node)
    if share > 1 and not share.is_integer():
        raise ValueError(f"{shown(node)}: a share of one GPU (0.25) or a whole number of them is needed")
    return share


def fuse(node: Node) -> str | int:
    if isinstance(node.value, int) and not isinstance(node.value, bool) and node.value >= 1:
        return node.value
    if node.value in ("auto", "off") and isinstance(node.value, str):
        return node.value
    raise ValueError(f"{shown(node)}: auto, off or a largest group size, at least 1, is needed")


def as_mapping(node: Node | None, key: str) -> Node | None:
    """The long form of a section written short: `metric: val/mse` is `metric: {name: val/mse}`."""
    if node is None or not isinstance(node.value, str):
        return node
    return Node({key: node}, node.where)


def read_metrics(node: Node | None, workload: WorkloadFace | None, where: str, problems: Problems) -> list[Metric]:
    """The objectives, one or a list; the first is shown and sorted by. Never empty."""
    if node is None or not node.is_list:
        return [_read_metric(node, workload, where, problems)]
    if not node.items:
        problems.add(node.where, "metric", "lists no metric; write metric: {name: val/mse, mode: min}")
    metrics = [_read_metric(as_mapping(item, "name"), workload, item.where, problems) for item in node.items]
    for metric, item in zip(metrics, node.items, strict=True):
        if [one.name for one in metrics].count(metric.name) > 1 and metric.name:
            problems.add(item.where, "metric", f"{metric.name} is listed twice")
    return metrics or [Metric("")]


def _read_metric(node: Node | None, workload: WorkloadFace | None, where: str, problems: Problems) -> Metric:
    """An objective. It must be a name MLflow can store and one that the workload declares."""
    section = Section.of(node, "metric", ("name", "mode"), problems)
    mode = section.read("mode", word("min", "max"), "min")
    name = section.read("name", metric_name, "")
    place = section.entries.get("name", node)
    if not name and (place is None or place.value is None or place is node):
        problems.add(node.where if node else where, "metric", "is missing; write metric: {name: val/mse, mode: min}")
    if name and place and workload and not workload.declares(name):
        problems.add(place.where, "metric", _undeclared(name, workload))
    return Metric(name, "max" if mode == "max" else "min")


def metric_name(node: Node) -> str:
    """A name MLflow stores as it is. Source: mlflow.utils.validation (3.17.2)."""
    name = text(node)
    if not re.fullmatch(r"[\w.\- :/]{1,250}", name):
        raise ValueError(f"{shown(node)}: letters, digits and _ - . : / or a space are allowed, 250 at most")
    if posixpath.normpath(name) != name or name.startswith(("..", "/")) or name == ".":
        raise ValueError(f"{shown(node)}: no leading, doubled or trailing slash and no dots as a folder")
    return name


def declared_metric(workload: WorkloadFace | None) -> Callable[[Node], str]:
    """A legal name that the workload declares."""

    def convert(node: Node) -> str:
        name = metric_name(node)
        if workload and not workload.declares(name):
            raise ValueError(_undeclared(name, workload))
        return name

    return convert


def _undeclared(name: str, workload: WorkloadFace) -> str:
    near = nearest(name, workload.metrics)
    hint = f"did you mean {near}?" if near else f"it reports {', '.join(workload.metrics)}"
    return f"{workload.name} does not report {name}; {hint}"


def read_search(node: Node | None, problems: Problems) -> Search:
    """The search as written, without `enqueue`; whether it fits the axes is judged once these are known."""
    section = Section.of(node, "search", ("algorithm", "samples", "seed", "sampler", "enqueue"), problems)
    algorithm = section.read("algorithm", word(*ALGORITHMS), "grid")
    if "sampler" in section.entries and algorithm != "optuna":
        problems.add(section.entries["sampler"].where, "search.sampler", "belongs to algorithm: optuna")
    return Search(
        algorithm=algorithm,  # type: ignore[arg-type]  # `word` lets nothing else through
        samples=section.read("samples", whole(1), None),
        seed=section.read("seed", whole(0), 0),
        sampler=section.read("sampler", word(*SAMPLERS), "tpe"),  # type: ignore[arg-type]
    )


def read_budget(node: Node | None, problems: Problems) -> Budget:
    """`budget: {trials: 500, time: 2h}`; whether a grid fits is judged once the axes are known."""
    section = Section.of(node, "budget", ("trials", "time"), problems)
    return Budget(section.read("trials", whole(1), None), section.read("time", duration_s, None))


def read_resources(node: Node | None, problems: Problems) -> Resources:
    section = Section.of(node, "resources", ("cpu", "gpu", "max_concurrent", "trial_time"), problems)
    return Resources(
        cpu=section.read("cpu", number(above=0), 1.0),
        gpu=section.read("gpu", gpus, 0.0),
        max_concurrent=section.read("max_concurrent", whole(1), None),
        trial_time_s=section.read("trial_time", duration_s, None),
    )


def read_retries(root: Section) -> Retries:
    """`retries: 2` repeats after worker death, out of memory and timeouts; `retry_on: any` after exceptions too."""
    return Retries(root.read("retries", whole(0), 0), root.read("retry_on", word("any"), "") == "any")


def read_show(node: Node | None, workload: WorkloadFace | None, problems: Problems) -> tuple[str, ...]:
    """`show: [val/router/z]`: metrics that comparisons show beside the objective; the workload must declare them."""
    if node is None or node.value is None:
        return ()
    if not node.is_list:
        problems.add(node.where, "show", f"{shown(node)} is no list; write show: [val/loss]")
    names = []
    for item in node.items:
        try:
            names.append(declared_metric(workload)(item))
        except ValueError as error:
            problems.add(item.where, "show", str(error))
    return tuple(names)


def read_tags(node: Node | None, problems: Problems) -> dict[str, str]:
    """Tags as text, spelt as in the file; names that MLflow or orch use themselves are refused."""
    if node is not None and node.value is not None and not node.is_mapping:
        problems.add(node.where, "tags", f"{shown(node)} is no mapping; write tags: {{team: router}}")
    section = Section("tags", dict(node.entries) if node else {}, problems)
    tags: dict[str, str] = {}
    for key, child in section.entries.items():
        if key.startswith(RESERVED_TAGS) or not re.fullmatch(r"[\w.\- :/]{1,250}", key):
            problems.add(
                child.where, f"tags.{key}", "is no free tag name (mlflow. and orch. are taken; no other signs)"
            )
        tags[key] = section.read(key, _tag_value, "")
    return tags


def _tag_value(node: Node) -> str:
    if node.is_mapping or node.is_list or len(node.text) > MAX_TAG_CHARACTERS:
        raise ValueError(f"one text of at most {MAX_TAG_CHARACTERS} characters is needed")
    return node.text


def shown(node: Node) -> str:
    """The value as a person wrote it, short."""
    if node.is_mapping or node.is_list:
        value = str(node.plain())
        return value if len(value) <= 60 else value[:57] + "..."
    return repr(node.value) if isinstance(node.value, str) else node.text or "null"
