"""Lays `--set path=value` over a parsed file. Knows no key but `params`: paths are judged later, with the file's.

A value takes the place of what stood at its path, whole; a longer path changes a part. `params` alone is one space of
fields, written nested or with dots: a mapping there gives the fields it names and leaves the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.spec.document import Node, parse_value
from orchestrator.spec.problems import Problems

WHERE = "--set"
FIELDS = "params"
DOMAIN_KEYS = ("grid", "choice", "uniform", "loguniform", "int", "logint")


def apply_override(root: Node, text: str, problems: Problems) -> None:
    """Changes `root` in place."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not all(path.split(".")):
        problems.add(WHERE, path, f"{text!r}: write --set path.of.key=value")
    elif inside := _list_on_the_way(root, path):
        problems.add(WHERE, path, f"{inside} is a list, which is replaced whole: --set '{inside}=[...]'")
    else:
        new = parse_value(value, WHERE, path, problems)
        put_together = _merged if path.split(".")[0] == FIELDS else _replaced
        _put(root.entries, path, new, put_together)


def is_domain(node: Node) -> bool:
    """True for a mapping such as `{grid: [...]}`."""
    return any(key in DOMAIN_KEYS for key in node.entries)


def is_overridden(node: Node) -> bool:
    """True if `--set` gave the value or a part of it."""
    return node.where == WHERE or any(map(is_overridden, node.entries.values()))


def _list_on_the_way(node: Node, path: str) -> str:
    """The part of the path that leads to a list; empty where there is none before its end."""
    for head, rest in _splits(path):
        if (child := node.entries.get(head)) is not None:
            if child.is_list:
                return head
            inside = _list_on_the_way(child, rest)
            return f"{head}.{inside}" if inside else ""
    return ""


def _put(entries: dict[str, Node], path: str, new: Node, put_together: Callable[[Node, Node], Node]) -> None:
    """Finds the place of a dotted path whether the file writes it with dots, nested or not at all."""
    if path in entries:
        entries[path] = put_together(entries[path], new)
        return
    for head, rest in _splits(path):
        if head in entries and entries[head].is_mapping:
            _put(entries[head].entries, rest, new, put_together)
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


def _replaced(old: Node, new: Node) -> Node:
    return new


def _merged(old: Node, new: Node) -> Node:
    """Fields by name; a domain is one value."""
    if not (old.is_mapping and new.is_mapping) or is_domain(old) or is_domain(new):
        return new
    merged = dict(old.entries)
    for key, child in new.entries.items():
        merged[key] = _merged(merged[key], child) if key in merged else child
    return Node(merged, old.where)
