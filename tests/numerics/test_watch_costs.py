"""What `watch` says of time and memory, and of arguments that make no sense."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.trial import Finding
from tests.numerics.watched_loop import Loop, Net, adamw, nothing
from workloads.probes.watch import watch


def test_time_and_tokens_are_counted_from_look_to_look():
    model = Net()
    optimizer = adamw(model)
    began = 0.0
    with watch(model, optimizer, every=4) as health:
        for step in range(1, 9):
            if step == 5:
                began = time.perf_counter()
                assert health.metrics()["time/step_seconds"] > 0  # of two updates, from the second look
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            health.loss(loss, tokens=torch.tensor(25) if step % 2 else 25)
            health.loss(loss, tokens=25)
            loss.backward()
            time.sleep(0.005)
            optimizer.step()
        seconds, metrics = time.perf_counter() - began, health.metrics()
    assert {type(value) for value in metrics.values()} == {float}
    # The look itself ends a little before our clock is read, and began a little before it was.
    assert metrics["time/step_seconds"] == pytest.approx(seconds / 4, rel=0.2)
    assert metrics["time/tokens_per_second"] == pytest.approx(50 / metrics["time/step_seconds"], rel=1e-6)


class Stack(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.layers, self.recomputes = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), recomputes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            act = lambda values, layer=layer: torch.tanh(layer(values))  # noqa: E731
            rows = checkpoint(act, rows, use_reentrant=False) if self.recomputes else act(rows)
        return rows


def saved_by(model: nn.Module, **watching: Any) -> dict[str, float]:
    optimizer = adamw(model)
    with watch(model, optimizer, memory=True, on_finding=nothing, **watching) as health:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):  # the loop's own
                loss = F.mse_loss(model(torch.randn(32, 16)), torch.zeros(32, 16))
            loss.backward()
            optimizer.step()
    assert health.findings == []
    assert not model._forward_pre_hooks
    return {name: size for name, size in health.metrics().items() if "saved" in name}


def test_saved_bytes_are_those_that_autograd_keeps_by_block():
    kept = 32 * 16 * 4  # a layer keeps its input, which the tanh before keeps too, and the last tanh its result
    assert saved_by(Stack()) == {
        "memory/saved_bytes": 4.0 * kept,
        "memory/saved_bytes/layers.0": 1.0 * kept,
        "memory/saved_bytes/layers.1": 1.0 * kept,
        "memory/saved_bytes/layers.2": 2.0 * kept,
    }
    assert saved_by(Stack(recomputes=True))["memory/saved_bytes"] < 4 * kept


def test_a_copy_of_a_model_whose_memory_is_measured_is_not_measured_and_it_can_be_saved():
    model = Stack()
    with watch(model, adamw(model), memory=True, on_finding=Locked().tell) as health:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(torch.zeros(1, 16))
        assert model._forward_pre_hooks  # it has not been called yet
        assert health.findings == []


class Locked:
    """Somebody who is told of findings, and can neither be copied nor saved."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def tell(self, finding: Finding) -> None:
        """Nothing is expected."""


def test_a_model_that_fails_within_its_forward_pass_leaves_no_hook_behind():
    class Broken(Stack):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no such shape")

    model = Broken()
    watch(model, adamw(model), memory=True)
    with pytest.raises(RuntimeError, match="no such shape"):
        model(torch.zeros(1, 16))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "every": ({"every": 0}, ValueError, "every=0"),
    "every, a float": ({"every": 2.5}, ValueError, "whole number"),
    "clip_norm, NaN": ({"clip_norm": math.nan}, ValueError, "clip_norm=nan"),
    "clip_norm, negative": ({"clip_norm": -1.0}, ValueError, "clip_norm=-1"),
    "clip_norm, zero": ({"clip_norm": 0}, ValueError, "infinity if the loop does not clip"),
    "clip_norm, text": ({"clip_norm": "1"}, TypeError, "a number is due"),
    "a threshold's name": ({"thresholds": {"spike_sigma": 1}}, ValueError, "did you mean 'spike_sigmas'"),
    "a threshold, NaN": ({"thresholds": {"spike_sigmas": math.nan}}, ValueError, "the default is 6"),
    "a threshold, negative": ({"thresholds": {"spike_sigmas": -1}}, ValueError, "spike_sigmas=-1"),
    "a threshold, text": ({"thresholds": {"spike_sigmas": "6"}}, TypeError, "a number is due"),
    "scaler": ({"scaler": 65536.0}, TypeError, "a GradScaler is due"),
    "on_finding": ({"on_finding": None}, TypeError, "on_finding"),
    "blocks": ({"blocks": {"head": nn.Linear(1, 1)}}, TypeError, "parameters by name"),
    "routers": ({"routers": [nn.Linear(1, 1)], "k": 1}, TypeError, "modules by name"),
    "routers without k": ({"routers": {"gate": nn.Linear(1, 1)}}, ValueError, "k= is due too"),
    "k": ({"k": 0}, ValueError, "k=0"),
    "k, True": ({"k": True}, ValueError, "k=True"),
    "every, True": ({"every": True}, ValueError, "every=True"),
    "clip_norm, True": ({"clip_norm": True}, TypeError, "clip_norm=True"),
    "memory": ({"memory": "yes"}, TypeError, "True or False is due"),
    "a threshold, True": ({"thresholds": {"spike_sigmas": True}}, TypeError, "a number is due"),
    "a threshold's name, a number": ({"thresholds": {5: 1}}, ValueError, "there is no 5"),
    "thresholds, a list": ({"thresholds": ["spike_sigmas"]}, TypeError, "limits by name"),
    "blocks, none": ({"blocks": {}}, ValueError, "leave blocks= out"),
    "blocks, an empty one": ({"blocks": {"head": []}}, ValueError, "'head' has no parameters"),
    "blocks, of names": ({"blocks": {"head": ["last.weight"]}}, TypeError, "holds 'last.weight'"),
    "blocks, of strangers": ({"blocks": {"head": [torch.ones(2)]}}, ValueError, "neither model nor optimiser"),
    "blocks, one tensor": ({"blocks": {"head": torch.ones(2)}}, TypeError, "parameters by name"),
    "blocks, a number": ({"blocks": {"head": 5}}, TypeError, "parameters by name"),
    "blocks, by number": ({"blocks": {5: [torch.ones(2)]}}, ValueError, "text is due"),
    "routers of another model": ({"routers": {"gate": Net()}, "k": 1}, ValueError, "'gate' is no part of the model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_that_makes_no_sense_is_refused_with_what_would(name: str):
    settings, error, words = WRONG[name]
    model = Net()
    with pytest.raises(error, match=words):
        watch(model, adamw(model), **settings)


def test_blocks_and_routers_that_do_not_fit_the_model_are_refused():
    model = Net()
    head = list(model.last.parameters())
    with pytest.raises(ValueError, match="twice, in 'head' and 'tail'"):
        watch(model, adamw(model), blocks={"head": head, "tail": head})
    with pytest.raises(ValueError, match="the optimiser has none"):
        watch(model, adamw(model.first), blocks={"head": head})
    with pytest.raises(ValueError, match="k=9 experts per token, but 'gate' has 8"):
        watch(model, adamw(model), routers={"gate": model.first}, k=9)
    watch(model, adamw(model), blocks={"head": model.last.parameters()}).close()  # an iterator goes once


def test_a_model_or_an_optimiser_that_is_none_is_refused():
    model = Net()
    with pytest.raises(TypeError, match="optimizer: Optimizer is due"):
        watch(model, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="this is a function"):
        watch(nothing, adamw(model))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compiled"):
        watch(torch.compile(model, backend="aot_eager"), adamw(model), memory=True)


def test_a_loss_that_is_no_scalar_is_refused_and_an_infinite_threshold_switches_a_limit_off():
    loop = Loop().watched(thresholds={"spike_sigmas": math.inf})
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        loop.health.loss(torch.zeros(4))
    assert loop.health.findings == []


def test_numbers_of_other_libraries_are_numbers():
    loop = Loop().watched(
        every=np.int64(1), clip_norm=np.float32(0.1), thresholds={"spike_sigmas": np.float32(8)}, memory=False
    )
    loop.health.loss(np.float32(0.25), tokens=np.int64(3))
    loop.run(3)
    assert loop.health.findings == []
    assert json.dumps(loop.health.metrics())


def test_all_that_is_wrong_with_the_arguments_is_said_at_once():
    model = Net()
    with pytest.raises(ValueError, match=r"every=0.*\n.*clip_norm=True.*\n.*'gate' is no part.*\n.*memory='yes'"):
        watch(model, adamw(model), every=0, clip_norm=True, memory="yes", routers={"gate": Net()}, k=1)  # type: ignore[arg-type]


NOT_LOSSES: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (None, TypeError, "this is None, a NoneType"),
    "a list": ([1.0, 2.0], TypeError, "a real number is due"),
    "text": ("1", TypeError, "a str"),
    "complex": (1 + 2j, TypeError, "a complex"),
    "a complex tensor": (torch.tensor(1 + 2j), TypeError, "a real number is due"),
    "several": (torch.ones(2), ValueError, r"shape \(2,\)"),
}


@pytest.mark.parametrize("name", NOT_LOSSES)
def test_what_is_no_loss_is_refused_and_does_not_end_the_watch(name: str):
    value, error, words = NOT_LOSSES[name]
    loop = Loop().watched(every=1)
    for what, hand in (("loss", loop.health.loss), ("held_out", loop.health.held_out)):
        with pytest.raises(error, match=f"{what}: .*{words}"):
            hand(value)
    with pytest.raises(error, match=f"tokens: .*{words}"):
        loop.health.loss(0.1, tokens=value)
    loop.run(3)
    assert loop.health.step == 3
    assert loop.health.findings == []
