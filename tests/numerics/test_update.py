"""One optimiser update: accumulation, unscaling, norms, the clip, steps that must not be taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workloads.engine.precision import POLICIES, Precision, loss_scaler
from workloads.engine.training import build_trainer
from workloads.engine.update import Trainer, Update, clip_gradients, gradient_norms, weighted
from workloads.layers.router import router_z_loss
from workloads.moe_router.config import Config
from workloads.moe_router.model import MoeRegression, moe_loss
from workloads.moe_router.task import Batch, draw_task
from workloads.moe_router.train import MoeRouter

PRECISIONS = list(POLICIES)
EXACT = Precision(torch.float64, torch.float64, torch.float64)


@dataclass
class Slope:
    """A batch whose gradient is `slope` itself, times the number of `rows` it stands for."""

    slope: Tensor
    num_valid: int = 1


def slope_loss(call: Callable[..., Any], batch: Slope, hyper: Any) -> tuple[Tensor, None]:
    return (call() * batch.slope).sum(), None


def slope_trainer(
    size: int, precision: str = "fp32", clip_norm: float | None = None, lr: float = 1.0, initial_scale: float = 65536.0
) -> Trainer:
    weight = nn.Parameter(torch.zeros(size))
    scaler = loss_scaler(POLICIES[precision], "cpu", initial_scale)
    return Trainer(lambda: weight, slope_loss, {"all": [weight]}, torch.optim.SGD([weight], lr=lr), scaler, clip_norm)


def weight_of(trainer: Trainer) -> list[float]:
    return trainer.parameters[0].detach().tolist()


def step(trainer: Trainer, *slopes: Sequence[float]) -> Update:
    return trainer.update([Slope(torch.tensor(slope)) for slope in slopes], {})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_nonfinite_gradient_is_not_applied_and_is_told(precision: str):
    trainer = slope_trainer(2, precision, clip_norm=1.0)
    update = step(trainer, [math.inf, 1.0])
    assert not update.applied
    assert update.norms["total"] == math.inf
    assert weight_of(trainer) == [0, 0]


def test_under_fp16_a_nonfinite_gradient_halves_the_scale_and_leaves_the_weights():
    trainer = slope_trainer(2, "fp16", clip_norm=1.0)
    assert not step(trainer, [math.inf, 1.0]).applied
    assert weight_of(trainer) == [0, 0]
    assert trainer.scaler.get_scale() == 32768
    assert step(trainer, [3.0, 4.0]).applied
    assert weight_of(trainer) == pytest.approx([-0.6, -0.8], abs=1e-6)


def test_a_huge_finite_gradient_is_clipped_to_its_direction_not_to_zero():
    trainer = slope_trainer(2, clip_norm=1.0)
    update = step(trainer, [3e38, 3e38])
    assert update.applied
    assert update.norms["total"] == pytest.approx(math.hypot(3e38, 3e38))
    assert weight_of(trainer) == pytest.approx([-(0.5**0.5)] * 2, abs=1e-6)


def test_the_clip_sees_unscaled_gradients():
    trainer = slope_trainer(2, "fp16", clip_norm=1.0, initial_scale=1024)
    update = step(trainer, [3.0, 4.0])
    assert update.norms["total"] == pytest.approx(5.0, abs=1e-6)
    assert update.clipped
    assert weight_of(trainer) == pytest.approx([-0.6, -0.8], abs=1e-6)


def test_a_gradient_within_the_limit_is_left_alone():
    trainer = slope_trainer(2, clip_norm=5.0)
    assert not step(trainer, [3.0, 4.0]).clipped
    assert weight_of(trainer) == [-3, -4]


def test_clipping_keeps_the_direction_and_gives_the_limit():
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = parameter.grad.clone()
    assert clip_gradients([parameter], gradient_norms({"all": [parameter]})["total"], 1.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.cosine_similarity(before, parameter.grad, dim=0).item() == pytest.approx(1.0, abs=1e-6)


def test_accumulation_under_fp16_unscales_once_an_update():
    trainer = slope_trainer(2, "fp16", clip_norm=1.0)
    updates = [step(trainer, [3.0, 4.0], [3.0, 4.0]) for _ in range(2)]  # 4 micro-batches, 2 updates, no RuntimeError
    assert [update.applied for update in updates] == [True, True]
    assert weight_of(trainer) == pytest.approx([-1.2, -1.6], abs=1e-6)


def test_a_schedule_waits_for_the_update_that_was_skipped():
    trainer = slope_trainer(1, "fp16")
    rates = [1.0, 0.75, 0.5, 0.25]
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda count: rates[count])
    trainer.schedules = [schedule]
    applied = [step(trainer, [slope]).applied for slope in (math.inf, 1.0, 1.0, 1.0)]
    assert applied == [False, True, True, True]
    assert weight_of(trainer) == [-(1.0 + 0.75 + 0.5)]
    assert schedule.last_epoch == 3
    assert trainer.scaler.get_scale() == 32768


def test_norms_are_taken_per_block_in_float64_and_a_missing_gradient_is_zero():
    first, second, idle = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([1e25, 0.0])  # 1e50 overflows float32
    assert gradient_norms({"small": [first], "idle": [idle], "large": [second]}) == {
        "small": 5.0,
        "idle": 0.0,
        "large": pytest.approx(1e25),
        "total": pytest.approx(1e25),
    }


def test_a_parameter_that_stops_being_finite_is_counted():
    trainer = slope_trainer(2, lr=3e38)
    update = step(trainer, [10.0, 0.0])
    assert update.applied
    assert update.num_nonfinite_parameters == 1


def batch(num_rows: int) -> Batch:
    rows = draw_task(0, 0.6, 2.0, 0.42).draw(num_rows, torch.Generator().manual_seed(5))
    return Batch(rows.inputs_NI.double(), rows.targets_NO.double())


def gradient_of(window: Sequence[Batch], hyper: dict[str, float]) -> tuple[Tensor, Update]:
    config = Config(lr=1e-3)
    model = MoeRegression(config, torch.Generator().manual_seed(3), EXACT).double()
    update = build_trainer(MoeRouter(), config, model, "cpu").update(window, hyper)
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]), update


@pytest.mark.parametrize("sizes", [(16, 16), (8, 8, 8, 8), (8, 8, 8, 2), (1, 30)])
def test_micro_batches_of_any_size_give_the_gradient_of_one_batch(sizes: tuple[int, ...]):
    whole, hyper = batch(sum(sizes)), {"alpha": 0.1, "c_z": 0.01, "offset": 0.0}
    parts = [whole.rows(indices) for indices in torch.split(torch.arange(sum(sizes)), list(sizes))]
    joined, one = gradient_of([whole], hyper)
    split, many = gradient_of(parts, hyper)
    assert (split - joined).abs().max() < 1e-12
    assert float(many.loss) == pytest.approx(float(one.loss), abs=1e-12)
    assert many.norms["router"] > 0


def test_the_routers_term_does_not_grow_with_the_number_of_micro_batches():
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    norms = {}
    for count in (1, 4):
        optimizer = torch.optim.SGD([weight], lr=0.0)
        seen: list[float] = []

        def loss(call: Callable[..., Any], micro: Slope, hyper: Any, seen: list[float] = seen) -> tuple[Tensor, None]:
            z = router_z_loss(call().expand(8, 4))
            seen.append(z.item())
            return 0.1 * z, None

        trainer = Trainer(lambda: weight, loss, {"router": [weight]}, optimizer, loss_scaler(POLICIES["fp32"], "cpu"))
        update = trainer.update([Slope(torch.zeros(1), 8)] * count, {})
        norms[count] = update.norms["router"]
        assert seen == pytest.approx([1.9218] * count, abs=1e-4)
        assert float(update.loss) == pytest.approx(0.19218, abs=1e-5)
    assert norms[4] == pytest.approx(norms[1], rel=1e-12)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_gradients_and_optimiser_state_are_float32_under_every_precision(precision: str):
    config = Config(precision=precision, clip_norm=1.0, d_hidden=8)
    model = MoeRegression(config, torch.Generator().manual_seed(3))
    trainer = build_trainer(MoeRouter(), config, model, "cpu")
    rows = draw_task(0, 0.6, 2.0, 0.42).draw(32, torch.Generator().manual_seed(5))
    prediction, routing = model(rows.inputs_NI)
    assert prediction.dtype == torch.float32
    assert routing.logits_BE.dtype == POLICIES[precision].router_logits
    assert routing.probabilities_BE.dtype == POLICIES[precision].router_softmax
    assert trainer.update([rows], {"alpha": 0.01, "c_z": 0.001, "offset": 0.0}).applied
    for parameter in model.parameters():
        state = trainer.optimizer.state[parameter]
        dtypes = {parameter.dtype, parameter.grad.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype}
        assert dtypes == {torch.float32}


def test_the_same_loss_trains_several_trials_at_once_under_vmap():
    config, members = Config(), 3
    model = MoeRegression(config, torch.Generator().manual_seed(3), EXACT, dispatch="dense").double()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    rows = batch(64)
    hypers = {"alpha": [0.0, 0.01, 0.02], "c_z": [0.0, 1e-3, 1e-2], "offset": [0.0, 3.0, 300.0]}

    def loss_of(values: dict[str, Tensor], hyper: dict[str, Tensor]) -> Tensor:
        return moe_loss(lambda *inputs: torch.func.functional_call(model, values, inputs), rows, hyper)[0]

    stacked = {name: value.expand(members, *value.shape).clone().requires_grad_() for name, value in parameters.items()}
    scalars = {name: torch.tensor(values, dtype=torch.float64) for name, values in hypers.items()}
    torch.vmap(loss_of)(stacked, scalars).sum().backward()
    for member in range(members):
        alone = MoeRegression(config, torch.Generator().manual_seed(3), EXACT).double()
        moe_loss(alone, rows, {name: values[member] for name, values in hypers.items()})[0].backward()
        for name, parameter in alone.named_parameters():
            assert (stacked[name].grad[member] - parameter.grad).abs().max() < 1e-11  # offset 300 rounds to 6e-14


def test_what_is_off_is_off_also_where_it_is_not_finite():
    assert weighted(0.0, lambda: torch.tensor(math.inf)) == 0.0
    assert math.isnan(weighted(torch.tensor(0.0), lambda: torch.tensor(math.inf)))  # under vmap nobody looks
    assert weighted(2.0, lambda: torch.tensor(3.0)) == 6.0
