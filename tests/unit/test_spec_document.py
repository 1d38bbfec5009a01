"""The YAML layer: what a scalar means, which lines are remembered, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from orchestrator.errors import SpecError
from orchestrator.spec import parse_sweep
from orchestrator.spec.document import head_comment, parse_document, parse_value, plain_scalar, read_sweep_file
from orchestrator.spec.problems import Problems
from orchestrator.workload import describe


def parse(text: str):
    problems = Problems()
    root = parse_document(text, "t.yaml", problems)
    problems.raise_if_any()
    return root


def complaints(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        ("12e03", 12000.0),
        ("1.0e-3", 0.001),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("no", "no"),
        ("off", "off"),
        ("on", "on"),
        ("y", "y"),
        ("None", "None"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("null", None),
        ("-.inf", -math.inf),
        ("٣", "٣"),
    ],
)
def test_plain_scalars_follow_the_core_schema_of_yaml_1_2(spelling, meaning):
    value = plain_scalar(spelling)
    assert value == meaning
    assert type(value) is type(meaning)


def test_a_quoted_number_stays_text():
    assert parse("a: '1e-3'\nb: \"010\"\nc: |\n  12\n").plain() == {"a": "1e-3", "b": "010", "c": "12\n"}


@pytest.mark.parametrize("text", ["9" * 5000, str(2**63), "1e999", "0x" + "f" * 40])
def test_a_number_that_nothing_can_hold_is_refused(text):
    assert "t.yaml:1  a" in complaints(f"a: {text}")


def test_a_key_given_twice_names_both_lines_at_any_level():
    message = complaints("params: {steps: 4}\nx:\n  c_z: 1\n  c_z: 2\nparams: {seed: 1}\n")
    assert "t.yaml:5  params  key params is given twice: first on line 1, again on line 5" in message
    assert "t.yaml:4  x.c_z  key c_z is given twice: first on line 3, again on line 4" in message


def test_aliases_anchors_tags_and_merge_keys_are_refused_together():
    message = complaints("a: &x 1\nb: *x\nc: !!python/object/apply:os.system [ls]\nd: {<<: {}}\ne: !!int '3'\n")
    for line, word in ((1, "anchor &x"), (2, "alias *x"), (3, "tag !!python"), (4, "merge keys"), (5, "tag !!int")):
        assert any(row.startswith(f"t.yaml:{line} ") and word in row for row in message.splitlines()), word


def test_what_cannot_be_read_is_told_once():
    text = "workload: moe_router\nmetric: *m\nparams: {lr: *a, c_z: {grid: [0, 1e999]}, k: *b}\n"
    with pytest.raises(SpecError) as caught:
        parse_sweep(text, "t.yaml", describe)
    places = [(problem.where, problem.path) for problem in caught.value.problems]
    paths = ("metric", "params.lr", "params.c_z.grid", "params.k")
    assert places == list(zip(("t.yaml:2", *["t.yaml:3"] * 3), paths, strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("---\n", "the file is empty"),
        ("- 1\n- 2\n", "is a mapping"),
        ("just text\n", "is a mapping"),
        ("a: 1\n---\nb: 2\n", "t.yaml:2    a second document"),
        ("a:\n\t- 1\n", "t.yaml:2    not valid YAML"),
        ("a: [1, 2\nb: 3\n", "not valid YAML"),
        ("a: \x01\n", "t.yaml:1    not valid YAML"),
        ('a: "\\0"\n', "no database text can hold"),
        ("a: " + "[" * 3000, "nested more than 32 levels"),
        ("a: " + "{b: " * 3000, "nested more than 32 levels"),
        ("%YAML 1.1\n---\na: no\n", "YAML 1.2"),
        ("? [1]\n: 2\n", "a key must be a plain word"),
    ],
)
def test_what_cannot_be_read_is_one_clear_problem(text, expected):
    assert expected.replace("    ", "  ") in complaints(text)


def test_nodes_remember_the_line_of_their_key_and_items_their_own():
    root = parse("a:\n  b:\n    - 1\n    - 2\n")
    assert root.entries["a"].entries["b"].where == "t.yaml:2"
    assert [item.where for item in root.entries["a"].entries["b"].items] == ["t.yaml:3", "t.yaml:4"]


def test_a_byte_order_mark_and_crlf_do_no_harm(tmp_path: Path):
    path = tmp_path / "t.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert parse(read_sweep_file(path)).plain() == {"a": 1, "b": "x"}
    assert parse("\ufeffa: 1").plain() == {"a": 1}


def test_a_file_that_is_missing_a_folder_not_text_or_huge_is_one_problem(tmp_path: Path):
    latin, huge = tmp_path / "latin.yaml", tmp_path / "huge.yaml"
    latin.write_bytes(b"a: 1\nb: caf\xe9\n")
    huge.write_bytes(b"#" * (5 * 2**20))
    cases = ((tmp_path / "x.yaml", "no such file"), (tmp_path, "folder"), (latin, "latin.yaml:2"), (huge, "larger"))
    for path, word in cases:
        with pytest.raises(SpecError, match=word):
            read_sweep_file(path)


def test_the_head_comment_is_the_description():
    assert head_comment("\n# One?\n#   indented\n#\n# Two.\nname: x\n# not this\n") == "One?\n  indented\n\nTwo."
    assert head_comment("name: x\n# late\n") == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a,b", "a,b"),
        ("a: b # c", "a: b # c"),
        ("3e-3", 0.003),
        ("", None),
        ("'1e-3'", "1e-3"),
        ("{grid: [0, 1e-3]}", {"grid": [0, 0.001]}),
        ("[fp32, off]", ["fp32", "off"]),
        ("off", "off"),
    ],
)
def test_a_command_line_value_is_a_scalar_or_a_flow_value(text, value):
    problems = Problems()
    assert parse_value(text, "--set", "a", problems).plain() == value
    assert len(problems) == 0


def test_a_broken_flow_value_is_a_problem_of_the_command_line():
    with pytest.raises(SpecError, match=r"^--set  a  not valid YAML"):
        parse_value("{grid: [1", "--set", "a", Problems())
