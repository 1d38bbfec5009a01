"""Lays `--set path=value` over a parsed file. Knows no key: paths are judged later, with the file's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.spec.document import Node, parse_value
from orchestrator.spec.problems import Problems

WHERE = "--set"
DOMAIN_KEYS = ("grid", "choice", "uniform", "loguniform", "int", "logint")


def apply_overrides(root: Node, overrides: Sequence[str], problems: Problems) -> None:
    """Changes `root` in place. A later override wins; an axis is replaced whole, other mappings are merged."""
    for text in overrides:
        path, equals, value = text.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            problems.add(WHERE, path, f"{text!r}: write --set path.of.key=value")
            continue
        _put(root.entries, path, parse_value(value, WHERE, path, problems))


def is_domain(node: Node) -> bool:
    """True for a mapping such as `{grid: [...]}`."""
    return any(key in DOMAIN_KEYS for key in node.entries)


def _put(entries: dict[str, Node], path: str, new: Node) -> None:
    """Finds the place of a dotted path whether the file writes it with dots, nested or not at all."""
    if path in entries:
        entries[path] = _merged(entries[path], new)
        return
    for head, rest in _splits(path):
        if head in entries and entries[head].is_mapping:
            _put(entries[head].entries, rest, new)
            return
    head, _, rest = path.partition(".")
    if rest and (head not in entries or entries[head].value is None):
        entries[head] = _nested(rest, new)
    else:
        entries[path] = new


def _splits(path: str) -> Iterable[tuple[str, str]]:
    """`a.b.c` as (`a.b`, `c`), then (`a`, `b.c`)."""
    parts = path.split(".")
    return ((".".join(parts[:n]), ".".join(parts[n:])) for n in range(len(parts) - 1, 0, -1))


def _nested(path: str, new: Node) -> Node:
    """`new` below the keys of `path`."""
    for key in reversed(path.split(".")):
        new = Node({key: new}, WHERE)
    return new


def _merged(old: Node, new: Node) -> Node:
    if not (old.is_mapping and new.is_mapping) or is_domain(old) or is_domain(new):
        return new
    merged = dict(old.entries)
    for key, child in new.entries.items():
        merged[key] = _merged(merged[key], child) if key in merged else child
    return Node(merged, old.where)
