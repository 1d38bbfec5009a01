"""A spec as plain JSON for the ledger, and the difference between two of them. Reads no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.spec.domains import Choice, Domain, Grid, Int, Uniform, value_key
from orchestrator.spec.faces import WorkloadOf
from orchestrator.spec.parse import parse_sweep
from orchestrator.spec.sweep_spec import SweepSpec, Unstable
from orchestrator.trial import jsonable

Json = dict[str, Any]

MEANING = (
    *("workload", "metric", "params", "search", "log_every"),
    *("stop.diverged", "stop.on", "health.thresholds"),
)
"""The parts that decide which trials exist, what they compute or how they are judged; the rest may change between two
calls. Thresholds are among them without `stop.on` too: a trial is held against them while it trains and cannot be again
afterwards, so one sweep would count verdicts of two kinds."""

UNSAID: Json = {"stop.on": [], "health.thresholds": {}}
"""What a stored sweep means that is older than these settings."""


def to_json(spec: SweepSpec) -> Json:
    """Everything the sweep says, defaults included, in JSON types; infinity is the text `Infinity` or `-Infinity`."""
    resources = spec.resources
    return {
        "name": spec.name,
        "workload": spec.workload,
        "metric": {"name": spec.metric.name, "mode": spec.metric.mode},
        "params": {**_fixed_json(spec.fixed), **{name: _domain_json(axis) for name, axis in spec.axes.items()}},
        "axes": list(spec.axes),
        "show": list(spec.show),
        "search": {key: value for key, value in vars(spec.search).items() if value is not None},
        "resources": {
            "cpu": resources.cpu,
            "gpu": resources.gpu,
            "max_concurrent": resources.max_concurrent,
            "trial_time": resources.trial_time_s,
        },
        "retries": spec.retries.count,
        "retry_on": "any" if spec.retries.any_error else None,
        "stop": {"diverged": spec.stop_diverged, "on": sorted(spec.stop_on)},
        "health": {"thresholds": dict(spec.thresholds)},
        "unstable": _unstable_json(spec.unstable),
        "log_every": spec.log_every,
        "checkpoint_every": spec.checkpoint_every,
        "fuse": spec.fuse,
        "preflight": spec.preflight,
        "tags": dict(spec.tags),
        "description": spec.description,
        "source": {"file": spec.file_name, "text": spec.source, "set": list(spec.overrides)},
    }


def from_json(document: Json, workload_of: WorkloadOf) -> SweepSpec:
    """The spec that `to_json` stored, read again from its own text, so that types are those of the workload.

    Raises SpecError when the workload has changed so much that the text is no longer valid.
    """
    source = document["source"]
    return parse_sweep(source["text"], source["file"], workload_of, source["set"], document["name"])


def spec_difference(old: Json, new: Json) -> list[str]:
    """One line for each setting that changes which trials exist or what they compute: `params.lr: 0.001 -> 0.002`.

    Spelling, the order of keys and the order of a grid are no difference, nor is a grid of one value.
    """
    before, after = dict(_settings(old)), dict(_settings(new))
    lines = []
    for path in [*before, *(path for path in after if path not in before)]:
        left, right = before.get(path, "not set"), after.get(path, "not set")
        if left != right:
            lines.append(f"{path}: {left} -> {right}")
    return lines


def _fixed_json(fixed: Mapping[str, Any]) -> Json:
    return {name: jsonable(value) for name, value in fixed.items()}


def _unstable_json(unstable: Unstable | None) -> Json | None:
    """As a file writes it; the views judge by this."""
    if unstable is None:
        return None
    reference = _fixed_json(unstable.relative_to)
    return {"metric": unstable.metric, unstable.side: unstable.bound, "relative_to": reference}


def _domain_json(domain: Any) -> Any:
    if isinstance(domain, Grid):
        return {"grid": jsonable(domain.values)}
    if isinstance(domain, Choice):
        return {"choice": [_domain_json(option) for option in domain.options]}
    if not isinstance(domain, Uniform | Int):
        return jsonable(domain)
    step = {} if domain.step is None else {"step": domain.step}
    return {_range_word(domain): [domain.low, domain.high], **step}


def _range_word(domain: Domain) -> str:
    word = "int" if isinstance(domain, Int) else "uniform"
    return f"log{word}" if getattr(domain, "log", False) else word


def _settings(document: Json) -> Iterator[tuple[str, str]]:
    """(path, comparable text) of each setting that has a meaning for the trials."""
    for part in MEANING:
        value = _at(document, part)
        if isinstance(value, dict):
            for name, item in value.items():
                yield f"{part}.{name}", _comparable(item)
        else:
            yield part, _comparable(value)


def _at(document: Json, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = document
    for key in path.split("."):
        if key not in value:
            return UNSAID.get(path)
        value = value[key]
    return value


def _comparable(value: Any) -> str:
    values = value.get("grid") if isinstance(value, dict) and set(value) == {"grid"} else None
    if not isinstance(values, list):
        return value_key(value)
    keys = sorted((value_key(item) for item in values), key=lambda key: (len(key), key))
    return keys[0] if len(keys) == 1 else f"grid [{', '.join(keys)}]"
