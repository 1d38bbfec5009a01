"""YAML 1.2 text to plain values that remember their lines. Refuses duplicate keys, aliases and tags.

Built on ruamel's events; the meaning of a plain scalar is decided here (YAML 1.2's core schema), so that `1e-3` is a
number, `no` and `off` are text and `010` is ten, whatever a library's default version is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from orchestrator.errors import Problem, SpecError
from orchestrator.spec.problems import Problems

MAX_DEPTH = 32
MAX_FILE_BYTES = 2**20  # reading them takes up to 8 s
INT_LIMIT = 2**63  # what PostgreSQL's bigint and torch's int64 hold

Scalar = bool | int | float | str | None


@dataclass
class Node:
    """A value with its place (`file:line`). `text` is a scalar's spelling."""

    value: Scalar | list[Node] | dict[str, Node]
    where: str
    text: str = ""

    @property
    def entries(self) -> dict[str, Node]:
        """The children of a mapping; empty for everything else."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[Node]:
        """The items of a list; empty for everything else."""
        return self.value if isinstance(self.value, list) else []

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def read_sweep_file(path: Path) -> str:
    """The text of a sweep file. Raises SpecError when it is missing, unreadable, too large or not UTF-8."""
    try:
        if path.is_dir():
            raise SpecError([Problem(str(path), "", "is a folder; name a YAML file")])
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise SpecError([Problem(str(path), "", f"no such file (looked in {Path.cwd()})")]) from None
    except OSError as error:
        raise SpecError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from None
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError([Problem(str(path), "", f"larger than {MAX_FILE_BYTES // 2**20} MiB; this is no sweep file")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SpecError([Problem(f"{path}:{line}", "", f"byte 0x{raw[error.start]:02x} is not UTF-8 text")]) from None


def parse_document(text: str, file_name: str, problems: Problems) -> Node:
    """The root mapping of a file. Adds what can be skipped to `problems`; raises SpecError when nothing can be read."""
    builder = _Builder(text.removeprefix("\ufeff"), file_name, problems)
    root = builder.document()
    if root is None or root.value is None:
        problems.add(f"{file_name}:1", "", "the file is empty; a sweep needs at least workload, metric and params")
    elif not root.is_mapping:
        problems.add(root.where, "", "a sweep file is a mapping of keys such as workload, metric and params")
    else:
        return root
    problems.raise_if_any()
    raise AssertionError("unreachable: a problem was just added")


def parse_value(text: str, where: str, path: str, problems: Problems) -> Node:
    """The value of `--set path=text`: a flow value or quoted text if it opens like one, else one plain scalar.

    A comma, a colon or a hash does not split a plain scalar: `a,b` is one text.
    """
    text = text.strip()
    if text[:1] in tuple("[{'\""):
        root = _Builder(text, where, problems, line_numbers=False, path=path).document()
        return root or Node(None, where)
    return Node(_checked_scalar(text, False, where, path, problems), where, text)


EDITOR_LINE = re.compile(r"#\s*yaml-language-server\s*:")


def head_comment(text: str) -> str:
    """The comment block on top of the file, without its hashes and without what is said to an editor."""
    lines: list[str] = []
    for line in text.removeprefix("\ufeff").splitlines():
        if EDITOR_LINE.match(line):
            continue
        if line.startswith("#"):
            lines.append(line[1:].removeprefix(" ").rstrip())
        elif lines or line.strip() not in ("", "---"):
            break
    return "\n".join(lines).strip()


def plain_scalar(text: str) -> Scalar:
    """What an unquoted scalar means under YAML 1.2's core schema. Raises ValueError for numbers that cannot be held."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return _integer(text, 10)
    if _OCTAL_OR_HEX.fullmatch(text):
        return _integer(text, 8 if text[1] == "o" else 16)
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"{text} is beyond the range of a float; infinity is written .inf")
        return number
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", ""))
    return text


_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
# Source: YAML 1.2.2, section 10.3.2 (tag resolution of the core schema). [0-9], since \d takes other scripts' digits.
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(inf|Inf|INF)")


def _integer(text: str, base: int) -> int:
    # Python refuses to read more than 4,300 digits; twenty are already beyond 64 bits.
    significant = text.lstrip("+-0")
    number = INT_LIMIT if len(significant) > 25 else int(text, base)
    if not -INT_LIMIT <= number < INT_LIMIT:
        raise ValueError(f"{text[:30]} does not fit into 64 bits")
    return number


def _checked_scalar(text: str, quoted: bool, where: str, path: str, problems: Problems) -> Scalar:
    try:
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("holds a character that no database text can hold (NUL or half a surrogate pair)")
        return text if quoted else plain_scalar(text)
    except ValueError as error:
        problems.add_unread(where, path, str(error))
        return None


class _Builder:
    """Turns ruamel's events into nodes. What it refuses becomes a problem and a null, so that reading goes on."""

    def __init__(
        self, text: str, file_name: str, problems: Problems, line_numbers: bool = True, path: str = ""
    ) -> None:
        self.text, self.file_name, self.problems = text, file_name, problems
        self.line_numbers, self.path = line_numbers, path
        self.events: Iterator[Any] = YAML(typ="safe", pure=True).parse(text)

    def document(self) -> Node | None:
        """The first document; None for an empty stream. Raises SpecError for a syntax error."""
        root: Node | None = None
        try:
            for event in self.events:
                if isinstance(event, DocumentStartEvent):
                    self._check_version(event)
                    if root is not None:
                        self._refuse(event, self.path, "a second document begins here; a sweep file holds one")
                        break
                    root = self._node(next(self.events), self.path, 0)
        except YAMLError as error:
            self._refuse_syntax(error)
        return root

    def _check_version(self, event: DocumentStartEvent) -> None:
        if event.version and tuple(event.version) != (1, 2):
            self._refuse(event, self.path, "sweep files are YAML 1.2; remove the %YAML line")

    def _refuse_syntax(self, error: YAMLError) -> None:
        line, message = 1, str(error).split("\n")[0]
        if isinstance(error, MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            message = ", ".join(str(part) for part in (error.context, error.problem) if part)
        elif isinstance(error, ReaderError):
            line = self.text.count("\n", 0, error.position) + 1
        if "'\\t'" in message:
            message += "; YAML indents with spaces"
        self.problems.add(self._where(line), self.path, f"not valid YAML: {message}")
        self.problems.raise_if_any()

    def _where(self, line: int) -> str:
        return f"{self.file_name}:{line}" if self.line_numbers else self.file_name

    def _place(self, event: Any) -> str:
        return self._where(event.start_mark.line + 1)

    def _refuse(self, event: Any, path: str, message: str) -> None:
        self.problems.add(self._place(event), path, message)

    def _node(self, event: NodeEvent, path: str, depth: int) -> Node:
        self._check_plainness(event, path)
        if depth > MAX_DEPTH:
            self._refuse(event, path[:60], f"nested more than {MAX_DEPTH} levels deep")
            self.problems.raise_if_any()
        if isinstance(event, MappingStartEvent):
            return Node(self._mapping(path, depth), self._place(event))
        if isinstance(event, SequenceStartEvent):
            return Node(self._sequence(path, depth), self._place(event))
        if isinstance(event, ScalarEvent):
            quoted = not event.implicit[0]
            value = _checked_scalar(event.value, quoted, self._place(event), path, self.problems)
            return Node(value, self._place(event), event.value)
        return Node(None, self._place(event))

    def _check_plainness(self, event: Any, path: str) -> None:
        if isinstance(event, AliasEvent):
            self.problems.add_unread(self._place(event), path, f"alias *{event.anchor}: write the value out")
        elif event.anchor:
            self._refuse(event, path, f"anchor &{event.anchor}: aliases are not supported; write the value out")
        elif event.tag:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, path, f"tag {tag}: a sweep file holds plain values only")

    def _sequence(self, path: str, depth: int) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            items.append(self._node(event, path, depth + 1))
        return items

    def _mapping(self, path: str, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key = self._key(event, path, depth)
            place = self._place(event)
            below = f"{path}.{key}" if path else key
            child = self._node(next(self.events), below, depth + 1)
            if key in entries:
                lines = f"first on {_line(entries[key].where)}, again on {_line(place)}"
                self.problems.add(place, below, f"key {key} is given twice: {lines}")
            elif key:
                entries[key] = Node(child.value, place, child.text)
        return entries

    def _key(self, event: NodeEvent, path: str, depth: int) -> str:
        """The key's spelling: `on` stays `on`, `1` stays `1`. Empty for what cannot be a key."""
        node = self._node(event, path, depth + 1)
        if not isinstance(event, ScalarEvent) or not node.text:
            self._refuse(event, path, "a key must be a plain word")
            return ""
        if node.text == "<<" and event.implicit[0]:
            self._refuse(event, path, "merge keys (<<) are not part of YAML 1.2; write the keys out")
            return ""
        return node.text


def _line(where: str) -> str:
    return f"line {where.rpartition(':')[2]}" if ":" in where else where
