"""A resolved spec as a sweep file that says the same and can be run again. Reads nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.spec.document import plain_scalar

PLAIN = re.compile(r"[A-Za-z_][\w./-]*(:\w[\w./-]*)*", re.ASCII)


def sweep_file(settings: Mapping[str, Any], description: str) -> str:
    """YAML 1.2 of a sweep's settings, one a line, those of `params` too; the description is its head comment."""
    lines = [f"# {line}".rstrip() for line in description.splitlines()]
    for key, value in settings.items():
        if key == "params":
            lines += [f"{key}:", *(f"  {_scalar(name)}: {flow(item)}" for name, item in value.items())]
        else:
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"


def as_written(condition: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """A condition as a file has it: the one value of a name stands bare, unless it is a list itself."""
    is_bare = {name: len(values) == 1 and not isinstance(values[0], list) for name, values in condition.items()}
    return {name: values[0] if is_bare[name] else list(values) for name, values in condition.items()}


def flow(value: Any) -> str:
    """One value in flow style, which reads back as itself by the rules of `document.py`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str):
        return _scalar(value)
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)


def _scalar(text: str) -> str:
    """The text bare where it would be read as itself, else in double quotes."""
    if PLAIN.fullmatch(text) and plain_scalar(text) == text:
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in json.dumps(text, ensure_ascii=False))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
