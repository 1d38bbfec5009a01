"""Batches of a language model, and its held-out loss. Evaluation shares no code with training, on purpose.

Axes: B rows of a micro-batch, N held-out windows or characters of a text, T time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workloads.data.corpus import Corpus

PADDING = 0  # the token in place of what lies behind a row's end; valid rows hold it too


class TokenBatch(NamedTuple):
    """One micro-batch: what the model reads and what it should say next, int64 [B, T].

    Where `valid_BT` is False there is padding; None means there is none. `noise` seeds the dropout masks.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    valid_BT: Tensor | None = None
    noise: int = 0

    @property
    def num_valid(self) -> int:
        """How many targets count."""
        return self.targets_BT.numel() if self.valid_BT is None else int(self.valid_BT.sum())


def num_starts(stream_N: Tensor, context: int) -> int:
    """At how many places a row of `context` tokens and one more may start. Raises ValueError if there is none."""
    if len(stream_N) <= context:
        raise ValueError(
            f"text: one of its parts, the first nine tenths or the last tenth, has {len(stream_N)} characters; rows of "
            f"context={context} need {context + 1} at least"
        )
    return len(stream_N) - context


def shifted(
    stream_N: Tensor, starts_B: Tensor, context: int, lengths_B: Tensor | None = None, noise: int = 0
) -> TokenBatch:
    """Rows of the stream from their starts on; each target is the token that follows.

    With `lengths_B` a row ends after that many tokens and targets, and padding fills it up to the context. Tensors lie
    where the stream lies.
    """
    rows_BT1 = stream_N.unfold(0, context + 1, 1)[starts_B.to(stream_N.device)]
    tokens_BT, targets_BT = rows_BT1[:, :-1], rows_BT1[:, 1:]
    if lengths_B is None:
        return TokenBatch(tokens_BT, targets_BT, noise=noise)
    valid_BT = torch.arange(context, device=stream_N.device) < lengths_B.to(stream_N.device).unsqueeze(-1)
    return TokenBatch(tokens_BT.where(valid_BT, PADDING), targets_BT.where(valid_BT, PADDING), valid_BT, noise)


def held_out_windows(corpus: Corpus, context: int, num_windows: int) -> Tensor:
    """Rows of context + 1 held-out tokens, [N, T+1], evenly spaced from the first character to the last.

    The same for every trial. They overlap one another where the held-out text is short, the training text never.
    """
    last = num_starts(corpus.held_out_N, context) - 1
    starts_N = torch.arange(num_windows) * last // max(num_windows - 1, 1)
    return corpus.held_out_N.unfold(0, context + 1, 1)[starts_N.to(corpus.held_out_N.device)]


@torch.no_grad()
def token_surprise(model: nn.Module, windows_NT: Tensor, batch_size: int = 64) -> Tensor:
    """-log p of every token but a window's first, given those before it: nats, float64, [N, T-1].

    `model(tokens)` gives logits first. It is asked in evaluation mode and left in the mode it was in.
    """
    was_training = model.training
    model.eval()
    try:
        return torch.cat([_surprise(model, rows_BT) for rows_BT in torch.split(windows_NT, batch_size)])
    finally:
        model.train(was_training)


def _surprise(model: nn.Module, rows_BT: Tensor) -> Tensor:
    logits_BTV, *_ = model(rows_BT[:, :-1])
    log_probabilities_BTV: Tensor = logits_BTV.double().log_softmax(-1)
    return -log_probabilities_BTV.gather(-1, rows_BT[:, 1:].unsqueeze(-1)).squeeze(-1)


def describe_surprise(nats: Tensor) -> dict[str, float]:
    """What a loss hides: its perplexity, the share of it that the worst tenth of tokens carries, the median token.

    `nats` has any shape. A NaN makes all four NaN.
    """
    sorted_N = nats.double().flatten().sort(descending=True).values
    worst_N = sorted_N[: -(-len(sorted_N) // 10)]
    figures = {
        "loss": sorted_N.mean(),
        "perplexity": sorted_N.mean().exp(),
        "worst_tenth_share": worst_N.sum() / sorted_N.sum(),
        "median_surprise": sorted_N.median(),
    }
    return {name: float(value) for name, value in figures.items()}
