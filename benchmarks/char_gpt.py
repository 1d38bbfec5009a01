"""Tokens per second of `char_gpt`'s loop against a plain training loop of the same shape, written as nanoGPT's is.

The peer has torch's own modules, AdamW(fused), clip_grad_norm_ and nothing else: no block norms, no finiteness check,
no reports. Both train in this process on one thread, in turns of a few steps; compared is CPU time, which a busy
machine disturbs less than the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import STEPS_PER_TURN, cpu_seconds, turn_of
from workloads.char_gpt.config import Config
from workloads.char_gpt.train import CharGpt
from workloads.data.corpus import load_corpus
from workloads.engine.alone import Alone
from workloads.engine.training import Training

Line = tuple[str, float, str, str, bool | None]

NUM_TURNS = 15
CONFIG = Config(steps=10**9, eval_every=10**9)  # depth 4, heads 4, width 64, context 64, batch 32, clip 1.0


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).contiguous().view(rows, length, width))
        out: Tensor = x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))
        return out


class PlainGpt(nn.Module):
    def __init__(self, config: Config, num_symbols: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(num_symbols, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(PlainBlock(config.width, config.heads) for _ in range(config.depth))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, num_symbols, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                std = 0.02 / math.sqrt(2 * config.depth) if name.endswith("proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def plain_loop() -> Callable[[], None]:
    """One turn of the peer's training."""
    config, corpus = CONFIG, load_corpus(CONFIG.text)
    model, data = PlainGpt(config, corpus.num_symbols), corpus.training_N
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    kept = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)

    def turn() -> None:
        for step in range(STEPS_PER_TURN):
            starts = torch.randint(len(data) - config.context, (config.batch_size,))
            tokens = torch.stack([data[start : start + config.context] for start in starts])
            targets = torch.stack([data[start + 1 : start + 1 + config.context] for start in starts])
            loss = model(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                loss.item()  # nanoGPT's log line

    return turn


def begin() -> Training:
    return Training.begin(CharGpt(), CONFIG, Alone(log_every=10**9))


def run(num_turns: int = NUM_TURNS) -> Iterator[Line]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = {
            "plain": plain_loop(),
            "without reports": turn_of(begin(), reporting=False),
            "log_every: 10": turn_of(begin()),
        }
        times: dict[str, list[float]] = {name: [] for name in turns}
        for turn in turns.values():
            turn()
        for _ in range(num_turns):
            for name, turn in turns.items():
                times[name].append(cpu_seconds(turn))
    finally:
        torch.set_num_threads(threads)
    tokens = STEPS_PER_TURN * CONFIG.batch_size * CONFIG.context
    yield "plain loop, tokens per CPU second", tokens / median(times["plain"]), "tokens/s", "", None
    for name, floor in (("without reports", 0.98), ("log_every: 10", 0.95)):
        ratio = median(plain / ours for plain, ours in zip(times["plain"], times[name], strict=True))
        yield f"char_gpt {name} / plain loop", ratio, "x", f">= {floor} x", ratio >= floor
