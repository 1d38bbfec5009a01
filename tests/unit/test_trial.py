"""Values that cross module boundaries: a finding is plain once it is made, or its maker hears what is wrong with it."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.tracking.records import FindingRow, from_json, to_json
from orchestrator.trial import MAX_TEXT, Finding, Severity, bounded, told


def made(**fields: Any) -> Finding:
    return Finding(**{"check_name": "mine", "severity": Severity.WARNING, "message": "m", **fields})


@pytest.mark.parametrize(
    ("step", "value"),
    [
        (np.int64(3), np.float32(0.5)),
        (torch.tensor(3), torch.tensor(0.5)),
        (np.array(3), torch.tensor([0.5], dtype=torch.bfloat16)),  # 0.5 is exact in every format
    ],
)
def test_numbers_of_numpy_and_torch_are_kept_as_pythons_own(step: Any, value: Any) -> None:
    finding = made(severity="error", step=step, value=value, threshold=value)
    assert finding == made(severity=Severity.ERROR, step=3, value=0.5, threshold=0.5)
    assert [type(one) for one in astuple(finding)] == [str, Severity, str, str, int, float, float]
    row = FindingRow(1, 2, 1, finding)
    assert from_json(json.loads(json.dumps(to_json(row)))) == row
    assert b"torch" not in pickle.dumps(finding)  # else it would be imported where it is only read


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"step": 2.5}, TypeError, "a finding's step is 2.5, not a whole number"),
        ({"step": "3"}, TypeError, "a finding's step is '3', not a whole number"),
        ({"step": torch.tensor([1, 2])}, TypeError, "a finding's step is tensor"),
        ({"step": 10**30}, ValueError, "a finding's step does not fit into 64 bits"),
        ({"step": 10**5000}, ValueError, "a finding's step does not fit into 64 bits"),
        ({"value": "high"}, TypeError, "a finding's value is 'high', not a number"),
        ({"value": torch.zeros(2)}, TypeError, "a finding's value is not a number: only one element"),
        ({"threshold": 10**400}, TypeError, "a finding's threshold is not a number: int too large"),
        ({"threshold": 1j}, TypeError, "a finding's threshold is 1j, not a number"),
        ({"severity": "fatal"}, ValueError, "a finding's severity is 'fatal', not one of info, warning, error"),
        ({"message": None}, TypeError, "a finding's message is None, not a text"),
        ({"advice": b"do"}, TypeError, "a finding's advice is b'do', not a text"),
        ({"check_name": 5}, TypeError, "a finding's check_name is 5, not a text"),
    ],
)
def test_what_cannot_be_stored_is_refused_where_it_is_made(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        made(**fields)
    assert str(refused.value).startswith(message)


def test_what_a_terminal_would_obey_is_spelled_out_and_lines_stay() -> None:
    finding = made(message="\x1b[2J\0 a\tb\nc\r\x9b1m", advice="\x7f")
    assert (finding.message, finding.advice) == ("\\x1b[2J\\x00 a\tb\nc\\x0d\\x9b1m", "\\x7f")
    assert made(message="a\u202eb\u2066c\u200fd").message == "a\\u202eb\\u2066c\u200fd"  # a mark reverses nothing
    assert made(message=finding.message) == made(message=finding.message)
    assert math.isnan(made(value=math.nan).value or 0.0)  # non-finite is news


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_is_told_with_its_place_whatever_it_can_say_itself() -> None:
    def raised(make: Any) -> BaseException:
        try:
            make()
        except Exception as error:
            return error
        raise AssertionError

    def mute() -> None:
        raise Mute

    here = made.__code__.co_firstlineno + 1
    assert told(raised(lambda: made(step=2.5))).endswith(f"not a whole number (test_trial.py:{here})")  # not trial.py
    assert told(raised(mute)).startswith("Mute, whose own text fails with RuntimeError (test_trial.py:")
    assert told(ValueError("never raised")) == "ValueError: never raised"


def test_a_long_text_keeps_its_beginning_and_its_end_and_no_half_of_a_password() -> None:
    half = MAX_TEXT // 2
    secret = "password=" + "s" * 50 + " "
    whole = "a" * (half - 20) + secret + "b" * 5 * MAX_TEXT + secret + "c" * (half - 20)
    kept = bounded(whole)
    assert kept.startswith("a" * (half - 20) + "password=***")
    assert kept.endswith("password=*** " + "c" * (half - 20))
    assert "sss" not in kept
    assert len(kept) < MAX_TEXT + 100
    assert bounded("short") == "short"
