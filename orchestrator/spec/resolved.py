"""A spec as plain JSON for the ledger, and the difference between two of them. Reads no file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.spec.domains import Choice, Domain, Grid, Int, Uniform, value_key
from orchestrator.spec.faces import WorkloadOf
from orchestrator.spec.parse import parse_sweep
from orchestrator.spec.scheduling import KEYS as SCHEDULE_KEYS
from orchestrator.spec.sweep_spec import Condition, SweepSpec, Unstable
from orchestrator.spec.yaml_text import as_written, sweep_file
from orchestrator.trial import jsonable

Json = dict[str, Any]

MEANING = (
    *("workload", "metric", "more_metrics", "params", "when", "zip", "exclude", "search", "scheduler", "log_every"),
    *("stop.diverged", "stop.on", "health.thresholds"),
)
"""The parts that decide which trials exist, what they compute or how they are judged; the rest may change between two
calls, the budget among it. Thresholds are here without `stop.on` too: a trial is held against them while it trains and
cannot be again afterwards, so one sweep would count verdicts of two kinds."""

UNSAID: Json = {
    **{"stop.on": [], "health.thresholds": {}},
    **{"more_metrics": [], "when": {}, "zip": [], "exclude": [], "scheduler": {}},
}
"""What a stored sweep means that is older than these settings."""

UNSET: tuple[Any, ...] = (None, {}, [])  # what a file leaves out


def to_json(spec: SweepSpec) -> Json:
    """Everything the sweep says, defaults included, in JSON types; infinity is the text `Infinity` or `-Infinity`.

    `resolved` is the same as a sweep file. Only there is a float of 1e300 sure to stay one: the database keeps JSON's
    numbers by their value.
    """
    settings = _settings_of(spec)
    metrics = [{"name": metric.name, "mode": metric.mode} for metric in spec.objectives]
    document: Json = {
        **jsonable(settings),
        "metric": metrics[0],
        "more_metrics": metrics[1:],
        "otherwise": {axis: jsonable(when.otherwise) for axis, when in spec.when.items()},
        "axes": list(spec.axes),
        "search": {"sampler": spec.search.sampler, **jsonable(settings["search"])},
        "unstable": jsonable({"relative_to": {}, **settings["unstable"]}) if spec.unstable else None,
        "description": spec.description,
        "source": {"file": spec.file_name, "text": spec.source, "set": list(spec.overrides)},
        "resolved": resolved_text(spec),
    }
    return document


def resolved_text(spec: SweepSpec) -> str:
    """The sweep as a file that says the same with nothing left open: overrides laid over, defaults written out."""
    settings = _settings_of(spec)
    for section in ("resources", "budget", "stop", "health"):
        settings[section] = {key: value for key, value in settings[section].items() if value not in UNSET}
    return sweep_file({key: value for key, value in settings.items() if value not in UNSET}, spec.description)


def _settings_of(spec: SweepSpec) -> Json:
    """By key of a sweep file, in its words and with the workload's types; None is what a file would leave out."""
    metrics = [{"name": metric.name, "mode": metric.mode} for metric in spec.objectives]
    resources = spec.resources
    return {
        "name": spec.name,
        "workload": spec.workload,
        "metric": metrics[0] if len(metrics) == 1 else metrics,
        "show": list(spec.show),
        "params": {**spec.fixed, **{name: domain_json(axis) for name, axis in spec.axes.items()}},
        "when": {axis: _condition(when.condition) for axis, when in spec.when.items()},
        "zip": sorted(sorted(group) for group in spec.zipped),
        "exclude": sorted((_condition(one) for one in spec.exclude), key=value_key),
        "search": _search(spec),
        "scheduler": _schedule(spec),
        "budget": {"trials": spec.budget.trials, "time": spec.budget.time_s},
        "unstable": _unstable(spec.unstable),
        "resources": {
            "cpu": resources.cpu,
            "gpu": resources.gpu,
            "max_concurrent": resources.max_concurrent,
            "trial_time": resources.trial_time_s,
        },
        "retries": spec.retries.count,
        "retry_on": "any" if spec.retries.any_error else None,
        "stop": {"diverged": spec.stop_diverged, "on": sorted(spec.stop_on), "same_error": spec.same_error or "off"},
        "health": {"thresholds": dict(spec.thresholds)},
        "log_every": spec.log_every,
        "checkpoint_every": spec.checkpoint_every,
        "keep_checkpoints": spec.keep_checkpoints,
        "fuse": spec.fuse,
        "preflight": spec.preflight,
        "tags": dict(spec.tags),
    }


def _search(spec: SweepSpec) -> Json:
    """What the algorithm reads; a sampler of Optuna's says nothing of a grid."""
    search: Json = {"algorithm": spec.search.algorithm, "seed": spec.search.seed}
    if spec.search.samples is not None:
        search["samples"] = spec.search.samples
    if spec.search.algorithm == "optuna":
        search["sampler"] = spec.search.sampler
    return search | ({"enqueue": [dict(point) for point in spec.search.enqueue]} if spec.search.enqueue else {})


def _schedule(spec: SweepSpec) -> Json:
    """What the algorithm reads; empty without one."""
    algorithm = spec.schedule.algorithm
    if algorithm == "none":
        return {}
    settings = {key: getattr(spec.schedule, key) for key in SCHEDULE_KEYS[algorithm]}
    return {"algorithm": algorithm, **{key: value for key, value in settings.items() if value is not None}}


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


def _condition(condition: Condition) -> Json:
    """As a file has it, with names and values sorted."""
    return as_written({name: sorted(values, key=value_key) for name, values in sorted(condition.items())})


def _unstable(unstable: Unstable | None) -> Json | None:
    if unstable is None:
        return None
    reference = {"relative_to": dict(unstable.relative_to)} if unstable.relative_to else {}
    return {"metric": unstable.metric, unstable.side: unstable.bound, **reference}


def domain_json(domain: Any) -> Any:
    """A domain as a sweep file writes it; what is none is itself."""
    if isinstance(domain, Grid):
        return {"grid": list(domain.values)}
    if isinstance(domain, Choice):
        return {"choice": [domain_json(option) for option in domain.options]}
    if not isinstance(domain, Uniform | Int):
        return domain
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
