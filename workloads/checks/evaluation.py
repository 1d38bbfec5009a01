"""Checks of evaluation: other rows than those trained on, in eval mode, the same twice, and nothing touched.

Axes: N rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.trial import Finding, Severity
from workloads.checks.subject import Subject, called_modules
from workloads.probes.probe import listed

ROWS_AT_ONCE = 2**14  # hashed together: a copy of all rows of a long text would take gigabytes
SOME = 0.001  # of held-out rows of continuous values, which do not coincide by chance
SIGMAS = 3.0  # of a share of few held-out rows
MEASURED = ("time/", "memory/")  # metrics that differ from one call to the next by right


def check_held_out(subject: Subject) -> Iterator[Finding]:
    """No more held-out rows are among the training rows than text repeats itself anyhow.

    Needs `data.split_rows()`, see the package's `subject`.
    """
    if not hasattr(subject.data, "split_rows"):
        return
    training, held_out = subject.data.split_rows()
    marks = fingerprints(training)
    share = float(torch.isin(fingerprints(held_out), marks).double().mean())
    usual = 0.0 if held_out.is_floating_point() else repeated(marks)
    chance = SIGMAS * math.sqrt(usual * (1 - usual) / len(held_out))
    if share - usual <= max(SOME, chance):
        return
    limit = usual + subject.limits.repeated_rows_share * (1 - usual)
    mild = Severity.WARNING if held_out.is_floating_point() else Severity.INFO
    severity = Severity.ERROR if share > limit else mild
    message = f"{share:.1%} of {len(held_out)} held-out rows are among the training rows"
    message += f", of which {usual:.1%} repeat one another" * (usual > 0)
    advice = "split before rows are drawn, by position or by group; what was trained on says nothing about new data"
    if severity == Severity.INFO:
        advice = "text repeats itself: that flatters the held-out loss a little, of all runs alike"
    yield Finding("evaluation_data", severity, message, advice, None, share, limit)


def repeated(marks_N: Tensor) -> float:
    """The share of values that are there more than once."""
    _, counts = torch.unique(marks_N, return_counts=True)
    return float(counts[counts > 1].sum()) / len(marks_N)


def fingerprints(rows: Tensor) -> Tensor:
    """One int64 for each row: equal for equal rows, and for others hardly ever (a random linear hash modulo 2^64)."""
    source = torch.Generator().manual_seed(0)
    weights = torch.randint(-(2**62), 2**62, (math.prod(rows.shape[1:]),), generator=source)
    return torch.cat([_hashed(part, weights) for part in torch.split(rows, ROWS_AT_ONCE)])


def _hashed(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.is_floating_point():  # their lowest bits are all zero: the highest are mixed into them
        bits = rows.double().view(torch.int64)
        rows = bits ^ (bits >> 29)
    return (rows.flatten(1) * weights).sum(-1)


def check_evaluation(subject: Subject) -> Iterator[Finding]:
    """Evaluates twice as the loop does: eval mode, no gradients, training mode afterwards. Times may differ."""
    model, data = subject.model(), subject.data
    data = data.shortened() if hasattr(data, "shortened") else data
    before = {name: value.clone() for name, value in model.state_dict().items()}
    subject.reseed()
    with called_modules(model, only_in_training=True) as in_training:
        first = evaluate(subject, model, data)
    changed = [name for name, value in model.state_dict().items() if not same(value, before[name])]
    if in_training:
        message = f"in training mode during the evaluation: {listed(parts(model, in_training))}"
        advice = "leave the model in eval mode in `evaluate`: dropout, batch norm and capacity act otherwise"
        yield Finding("evaluation_mode", Severity.ERROR, message, advice, None, float(len(in_training)), 0.0)
    if changed or any(one.grad is not None for one in model.parameters()):
        message = f"the evaluation changes {listed(changed) or 'gradients'}"
        advice = "evaluate without backward() and without an optimiser: held-out rows must teach nothing"
        yield Finding("evaluation_mode", Severity.ERROR, message, advice, None, float(len(changed)), 0.0)
    if in_training or changed:
        return
    second = evaluate(subject, model, data)
    if moved := [name for name, value in first.items() if not same_number(value, second.get(name, math.nan))]:
        name = moved[0]
        message = f"two evaluations of one model differ: {name} is {first[name]:.6g}, then {second.get(name):.6g}"
        advice = "draw held-out rows once, from a stream of their own"
        yield Finding("evaluation_mode", Severity.WARNING, message, advice, None, second.get(name), first[name])


def parts(model: nn.Module, names: set[str]) -> list[str]:
    """The outermost of some modules, with their kinds: a name may be but a number."""
    if "" in names:
        return ["the whole model"]
    outermost = {name for name in names if not any(name.startswith(f"{other}.") for other in names)}
    return [f"{name} ({type(model.get_submodule(name)).__name__})" for name in sorted(outermost)]


def evaluate(subject: Subject, model: nn.Module, data: Any) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        metrics = dict(subject.workload.evaluate(subject.config, model, data, subject.hyper))
    model.train()
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, where NaN is NaN."""
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def same_number(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
