"""A text as numbered characters, split by position into training and held-out text. Draws nothing, downloads nothing.

Axes: N characters of a text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor

from workloads.data.sources import files_of


@dataclass(frozen=True)
class Corpus:
    """The first nine tenths of a text for training, the rest held out. A number is a character's place in `symbols`."""

    symbols: str  # of the whole text, sorted
    training_N: Tensor
    held_out_N: Tensor

    @property
    def num_symbols(self) -> int:
        return len(self.symbols)

    @property
    def num_train(self) -> int:
        return len(self.training_N)

    @property
    def num_held_out(self) -> int:
        return len(self.held_out_N)

    @property
    def uniform_nats(self) -> float:
        """The loss of giving every symbol the same probability."""
        return math.log(self.num_symbols)

    @property
    def unigram_nats(self) -> float:
        """The held-out loss of the training text's symbol frequencies.

        One is added to every count: a symbol that only the held-out text has would make the loss infinite.
        """
        counts = torch.bincount(self.training_N, minlength=self.num_symbols).double() + 1.0
        return float(-(counts / counts.sum()).log()[self.held_out_N].mean())


def load_corpus(text: str) -> Corpus:
    """The corpus of `pydoc`, `shakespeare` or `file:/absolute/path`. Raises ValueError, which says what is missing."""
    characters = read_text(text)
    if len(characters) < 2:
        raise ValueError(f"text: {text} holds {len(characters)} characters; there is nothing to predict")
    codes_N = torch.frombuffer(bytearray(characters.encode("utf-32-le")), dtype=torch.int32)
    symbols, numbers_N = torch.unique(codes_N, sorted=True, return_inverse=True)
    num_train = len(characters) * 9 // 10
    return Corpus("".join(map(chr, symbols.tolist())), numbers_N[:num_train], numbers_N[num_train:])


def read_text(text: str) -> str:
    """The characters behind a name. Raises ValueError if there is no such text."""
    if text == "pydoc":
        return "\n".join(topics.topics[topic] for topic in sorted(topics.topics))
    return "\n".join(_read_file(path) for path in files_of(text))


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"text: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8 at byte {error.start}; convert it first") from error
