"""A JSON Schema (draft 2020-12) of sweep files, so that editors complete and check them. Decides nothing.

`parse.py` is the judge: what names, lengths and rules between fields are right, no schema says. A file that parses is
valid here too, as long as every key in it has a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from orchestrator.spec.faces import FieldFace, WorkloadFace
from orchestrator.spec.overrides import DOMAIN_KEYS
from orchestrator.spec.scheduling import KEYS as SCHEDULE_KEYS
from orchestrator.spec.scheduling import SETTINGS
from orchestrator.spec.sections import ALGORITHMS, SAMPLERS
from orchestrator.spec.sweep_spec import SAME_ERROR, SEED
from orchestrator.trial import OWN_CHECKS, jsonable

Json = dict[str, Any]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
ABOVE_0: Json = {"type": "number", "exclusiveMinimum": 0}
AT_LEAST_0: Json = {"type": "number", "minimum": 0}
ANY_NUMBER: Json = {"type": "number"}
COUNT: Json = {"type": "integer", "minimum": 1}
SEED_NUMBER: Json = {"type": "integer", "minimum": 0}
TEXT: Json = {"type": "string", "minLength": 1}
METRIC: Json = {"$ref": "#/$defs/metric"}
DURATION: Json = {
    "anyOf": [ABOVE_0, {"type": "string", "pattern": "^(?=.)([0-9.]+d)?([0-9.]+h)?([0-9.]+m)?([0-9.]+s)?$"}]
}
PLAIN_VALUE: Json = {"not": {"type": "object"}}

DOMAIN_HELP = {
    "grid": "every value is crossed with those of the other grids",
    "choice": "one of these, equally likely; an option may be a range",
    "uniform": "a number between both ends",
    "loguniform": "a number between both ends, even in the logarithm",
    "int": "a whole number, both ends included",
    "logint": "a whole number, both ends included, even in the logarithm",
}


def sweep_schema(workload: WorkloadFace | None, config: type[BaseModel] | None) -> Json:
    """The schema of any sweep file; of a workload's, given it and its Config: its fields are then the `params`."""
    fields = _FieldSchemas(workload.fields(), config) if workload and config else None
    definitions = fields.definitions if fields else {"field": ANY_FIELD}
    return {
        "$schema": DRAFT,
        "title": f"orch sweep of {workload.name}" if workload else "orch sweep",
        "type": "object",
        "required": ["workload", "metric"],
        "additionalProperties": False,
        "properties": {
            **_asked(workload),
            **(_params_of(fields) if fields else ANY_PARAMS),
            **_method(fields),
            **_judged(workload, fields),
            **RUNNING,
        },
        "$defs": {**definitions, "metric": _metric_name(workload)},
    }


def _object(properties: Json, required: tuple[str, ...] = (), help: str = "") -> Json:
    return _helped({"type": "object", "properties": properties, "additionalProperties": False}, help) | (
        {"required": list(required)} if required else {}
    )


def _helped(schema: Json, help: str) -> Json:
    return {"description": help, **schema} if help else schema


def _list(items: Json, help: str = "") -> Json:
    return _helped({"type": "array", "items": items}, help)


def _either(*schemas: Json, help: str = "") -> Json:
    return _helped({"anyOf": list(schemas)}, help)


# --- the parts of the file ------------------------------------------------------------------------------------------


def _asked(workload: WorkloadFace | None) -> Json:
    mode = {"enum": ["min", "max"], "default": "min", "description": "whether small or large values are wanted"}
    one = _either(METRIC, _object({"name": METRIC, "mode": mode}, ("name",)))
    return {
        "name": _helped({"type": "string", "pattern": "^[a-z][a-z0-9_]{0,39}$"}, "default: the file's name"),
        "workload": _helped({"const": workload.name} if workload else TEXT, "see `orch workloads`; or module:Class"),
        "metric": _either(one, {**_list(one), "minItems": 1}, help="the objective; in a list the first is sorted by"),
        "show": _list(METRIC, "metrics that comparisons show beside the objective"),
    }


def _metric_name(workload: WorkloadFace | None) -> Json:
    if workload is None:
        return TEXT
    exact = [name for name in workload.metrics if "*" not in name]
    patterns = [name for name in workload.metrics if "*" in name]
    return _either({"enum": exact}, *({"type": "string", "pattern": _pattern(name)} for name in patterns))


def _pattern(name: str) -> str:
    return f"^{name.replace('.', '[.]').replace('*', '.*')}$"


def _params_of(fields: _FieldSchemas) -> Json:
    seeds = {"seeds": SEEDS} if SEED in fields.faces and "seeds" not in fields.faces else {}
    params = fields.mapping(fields.field)
    params["properties"] |= seeds
    return {
        "params": _helped(params, "the fields of the workload; a plain value is fixed"),
        "when": _helped(
            fields.mapping(lambda face: {"$ref": "#/$defs/condition"}),
            "an axis, and the values of others with which it exists; elsewhere it has its default",
        ),
        "zip": ZIP,
        "exclude": _list({"$ref": "#/$defs/condition"}, EXCLUDE_HELP),
        **seeds,
    }


def _method(fields: _FieldSchemas | None) -> Json:
    point = fields.mapping(fields.value) if fields else {"type": "object"}
    perturb = {"enum": [name for name, face in fields.faces.items() if face.fusible]} if fields else TEXT
    schedules = [_schedule(algorithm, keys or SETTINGS, perturb) for algorithm, keys in SCHEDULE_KEYS.items()]
    return {
        "search": _either({"enum": list(ALGORITHMS)}, *_searches(point), help="what is tried"),
        "scheduler": _either({"enum": list(SCHEDULE_KEYS)}, *schedules, help="which trials are stopped early"),
        "budget": _object(
            {
                "trials": _helped(COUNT, "caps sampled configurations; a grid must fit"),
                "time": _helped(DURATION, "during which trials run; then they wait for a larger budget and --resume"),
            }
        ),
    }


def _searches(point: Json) -> list[Json]:
    """One schema an algorithm, as each has its own keys."""
    seed: Json = {"seed": _helped({**SEED_NUMBER, "default": 0}, "of the search alone")}
    sampled: Json = {
        "samples": _helped(COUNT, "configurations of each grid cell, each trained with every seed"),
        **seed,
        "enqueue": _list({**point, "minProperties": 1}, "points to try first; axes they do not name are sampled"),
    }
    sampler: Json = {"enum": list(SAMPLERS), "default": "tpe", "description": "optuna's method"}
    return [
        _object({"algorithm": {"const": "grid", "default": "grid"}, **seed}),
        _object({"algorithm": {"const": "random"}, **sampled}, ("algorithm", "samples")),
        _object({"algorithm": {"const": "optuna"}, **sampled, "sampler": sampler}, ("algorithm", "samples")),
    ]


def _schedule(algorithm: str, keys: tuple[str, ...], perturb: Json) -> Json:
    known: Json = {
        "max_steps": _helped(COUNT, "where a trial is complete; default: the field steps"),
        "grace_steps": _helped(COUNT, "nobody is judged before"),
        "reduction_factor": _helped({"type": "number", "exclusiveMinimum": 1}, "one in so many goes on from a rung"),
        "interval_steps": _helped(COUNT, "steps between two looks at the population"),
        "quantile": _helped({**ABOVE_0, "maximum": 0.5}, "the worst share copies the best share"),
        "perturb": {**_list(perturb, "sampled axes that a copy changes; fusible ones"), "minItems": 1},
        "seed": SEED_NUMBER,
    }
    required = ("algorithm", "interval_steps", "perturb") if algorithm == "pbt" else ("algorithm",)
    return _object({"algorithm": {"const": algorithm}, **{key: known[key] for key in keys}}, required)


def _judged(workload: WorkloadFace | None, fields: _FieldSchemas | None) -> Json:
    checks = {"enum": [*workload.checks, *OWN_CHECKS]} if workload else TEXT
    limits: Json = {"additionalProperties": AT_LEAST_0}
    if workload:
        limits = {"properties": {name: {**AT_LEAST_0, "default": value} for name, value in workload.thresholds.items()}}
        limits["additionalProperties"] = False
    reference = fields.mapping(fields.value) if fields else {"type": "object"}
    unstable = _object(
        {
            "metric": METRIC,
            "above": _helped(ANY_NUMBER, "unstable beyond"),
            "below": _helped(ANY_NUMBER, "unstable beneath"),
            "relative_to": _helped(
                {**reference, "minProperties": 1}, "grid axes and their values: the bound is a ratio to that trial"
            ),
        },
        ("metric",),
        "which results count as unstable besides the diverged ones",
    )
    return {
        "unstable": {**unstable, "oneOf": [{"required": ["above"]}, {"required": ["below"]}]},
        "stop": _object(
            {
                "diverged": {"type": "boolean", "default": True},
                "on": _list(checks, "findings of these checks end a trial"),
                "same_error": {
                    **_either(COUNT, {"enum": ["off", None]}, help="trials in a row that fail alike end the sweep"),
                    "default": SAME_ERROR,
                },
            }
        ),
        "health": _object({"thresholds": {"type": "object", **limits, "description": "limits of the checks"}}),
    }


ZIP: Json = _list({**_list(TEXT), "minItems": 2}, "grid axes of equal length that move together")
EXCLUDE_HELP = "points that are left out: those that match all of one entry"
SEEDS: Json = _helped(COUNT, "3 is short for seed: {grid: [0, 1, 2]}")
RUNNING: Json = {
    "resources": _object(
        {
            "cpu": {**ABOVE_0, "default": 1},
            "gpu": {**AT_LEAST_0, "default": 0, "description": "a share of one, or whole ones"},
            "max_concurrent": _helped(COUNT, "worker processes at once"),
            "trial_time": _helped(DURATION, "of one attempt"),
        },
        help="of each trial",
    ),
    "retries": {"type": "integer", "minimum": 0, "default": 0, "description": "after worker death, memory, timeout"},
    "retry_on": {"const": "any", "description": "after exceptions too"},
    "fuse": _either({"enum": ["auto", "off"]}, COUNT, help="auto, off or a largest group size"),
    "preflight": {"type": "boolean", "default": True, "description": "check each structure before anything trains"},
    "log_every": {**COUNT, "default": 10, "description": "steps between reports"},
    "checkpoint_every": {**COUNT, "default": 100, "description": "steps between saved states"},
    "keep_checkpoints": {"type": "boolean", "default": False, "description": "keep a trial's last and best state"},
    "tags": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
}


# --- values and domains ---------------------------------------------------------------------------------------------


def _domains(value: Json, numbers: Json | None, whole: Json | None) -> list[Json]:
    """What may stand in place of a value: lists of it, and ranges of its numbers."""
    ranges = [*_ranges("uniform", numbers, ABOVE_0), *_ranges("int", whole, COUNT)]
    options = {"grid": value, "choice": _either(value, *ranges) if ranges else value}
    lists = [_object({kind: _listed(kind, items)}, (kind,)) for kind, items in options.items()]
    return [*lists, *ranges]


def _listed(kind: str, items: Json) -> Json:
    return {**_list(items, DOMAIN_HELP[kind]), "minItems": 1}


def _ranges(kind: str, number: Json | None, step: Json) -> list[Json]:
    if number is None:
        return []
    ends = {kind: number, f"log{kind}": {"allOf": [number, {"exclusiveMinimum": 0}]}}
    return [_object({word: _two(word, end), "step": step}, (word,)) for word, end in ends.items()]


def _two(kind: str, end: Json) -> Json:
    return {**_list(end, DOMAIN_HELP[kind]), "minItems": 2, "maxItems": 2}


ANY_FIELD: Json = _either(
    PLAIN_VALUE,
    *_domains(PLAIN_VALUE, ANY_NUMBER, {"type": "integer"}),
    {
        "type": "object",
        "propertyNames": {"not": {"enum": list(DOMAIN_KEYS)}},
        "additionalProperties": {"$ref": "#/$defs/field"},
    },
)
"""Without the workload nobody knows whether a mapping is a group of fields, or which ranges a field takes."""

ANY_PARAMS: Json = {
    "params": {"type": "object", "additionalProperties": {"$ref": "#/$defs/field"}},
    "seeds": SEEDS,
    "when": {"type": "object", "additionalProperties": {"type": "object", "minProperties": 1}},
    "zip": ZIP,
    "exclude": _list({"type": "object", "minProperties": 1}, EXCLUDE_HELP),
}


class _AnyType(GenerateJsonSchema):
    """A field of a type that JSON Schema has no word for takes anything."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Json:
        return {}


class _FieldSchemas:
    """The schemas of a workload's fields, by dotted name, from the JSON Schema that pydantic makes of its Config."""

    def __init__(self, faces: Mapping[str, FieldFace], config: type[BaseModel]) -> None:
        self.faces = faces
        whole = config.model_json_schema(by_alias=False, schema_generator=_AnyType)
        self._models: Json = whole.get("$defs", {})
        self._own = {name: self._find(whole, name.split(".")) for name in faces}
        values = {f"value.{name}": _bare(schema) for name, schema in self._own.items()}
        self.definitions = {**self._models, **values}
        self.definitions["condition"] = {**self.mapping(self._options), "minProperties": 1}

    def _find(self, schema: Json, path: list[str]) -> Json:
        for name in path:
            reference = schema.get("$ref", "")
            schema = self._models[reference.rpartition("/")[2]] if reference else schema
            schema = schema["properties"][name]
        return schema

    def mapping(self, schema_of: Callable[[FieldFace], Json]) -> Json:
        """A mapping of fields, each written with dots or nested."""
        properties: Json = {}
        for name, face in self.faces.items():
            *groups, leaf = name.split(".")
            schema, place = schema_of(face), properties
            for group in groups:
                place = place.setdefault(group, _object({}))["properties"]
            place[leaf] = schema
            properties[name] = schema
        return _object(properties)

    def value(self, face: FieldFace) -> Json:
        return {"$ref": f"#/$defs/value.{face.name}"}

    def field(self, face: FieldFace) -> Json:
        """A value or a domain; with the description, and the default unless JSON cannot hold it."""
        schema, value = self._own[face.name], self.value(face)
        whole, numbers = (_branch(schema, kind) for kind in ("integer", "number"))
        domains = _domains(value, numbers, whole)
        if face.name == SEED:
            domains = domains[:1]  # a replicate is not sampled
        kind = f"{face.type_name}, {'fusible' if face.fusible else 'structural'}"
        said = _helped(_either(value, *domains), f"{schema.get('description', '')} ({kind})".lstrip())
        return said if face.required or not _is_finite(face.default) else {**said, "default": jsonable(face.default)}

    def _options(self, face: FieldFace) -> Json:
        return _either(self.value(face), {**_list(self.value(face)), "minItems": 1})


def _bare(schema: Json) -> Json:
    """What limits the value: types and bounds."""
    return {key: part for key, part in schema.items() if key not in ("title", "default", "description", *EXTRA)}


EXTRA = ("fusible", "size")  # what `orchestrator.workload` adds to a field's schema


def _branch(schema: Json, kind: str) -> Json | None:
    """The part of a schema that describes its numbers of this kind; None if it has none."""
    branches = [_bare(schema), *schema.get("anyOf", ())]
    return next((part for part in branches if part.get("type") == kind and "enum" not in part), None)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
