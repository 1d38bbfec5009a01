"""A text as training rows and held-out windows. Draws row lengths once; which rows are trained on is the loop's to say.

Axes: B rows of a micro-batch, N places in a text or held-out windows, T time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orchestrator.workload import Context
from workloads.char_gpt.config import Config
from workloads.data.corpus import Corpus, load_corpus
from workloads.data.tokens import TokenBatch, held_out_windows, num_starts, shifted
from workloads.engine.random import generator

STRETCH = 64  # characters: shorter ones recur in any text, longer ones take longer to compare


@dataclass(frozen=True)
class Text:
    """A row is named by the character it starts at. `lengths_N` are the rows' lengths, None where none is padded."""

    corpus: Corpus
    context: int
    lengths_N: Tensor | None
    held_out_NT: Tensor

    @property
    def num_rows(self) -> int:
        return num_starts(self.corpus.training_N, self.context)

    def batch(self, indices_B: Tensor, noise: int) -> TokenBatch:
        lengths_B = None if self.lengths_N is None else self.lengths_N[indices_B]
        return shifted(self.corpus.training_N, indices_B, self.context, lengths_B, noise)

    def to(self, device: str) -> Text:
        corpus = replace(self.corpus, training_N=self.corpus.training_N.to(device))
        return replace(self, corpus=corpus, held_out_NT=self.held_out_NT.to(device))

    def split_rows(self) -> tuple[Tensor, Tensor]:
        """Stretches of the training text, and the held-out windows or their beginnings: [N, up to STRETCH] each."""
        beginnings = self.held_out_NT[:, :STRETCH]
        return self.corpus.training_N.unfold(0, beginnings.shape[1], 1), beginnings

    def shortened(self) -> Text:
        return replace(self, held_out_NT=self.held_out_NT[:4])

    def sizes(self) -> dict[str, float]:
        return {
            "data/train_characters": float(self.corpus.num_train),
            "data/held_out_characters": float(self.corpus.num_held_out),
            "data/symbols": float(self.corpus.num_symbols),
            "data/uniform_loss": self.corpus.uniform_nats,
            "data/unigram_loss": self.corpus.unigram_nats,
        }


def load_text(config: Config, context: Context) -> Text:
    """The text and, with `padding`, a length for each row: the same whatever the batch it falls into."""
    corpus = load_corpus(config.text)
    held_out_NT = held_out_windows(corpus, config.context, config.num_held_out_windows)
    return Text(corpus, config.context, _draw_lengths(config, corpus, context), held_out_NT)


def _draw_lengths(config: Config, corpus: Corpus, context: Context) -> Tensor | None:
    if config.padding == 0:
        return None
    shortest = max(1, config.context - int(config.context * config.padding))
    shape = (num_starts(corpus.training_N, config.context),)
    return torch.randint(shortest, config.context + 1, shape, generator=generator(context, "lengths"))
