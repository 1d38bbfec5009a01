"""Planted bugs of the update: each a trainer whose one line is wrong, so that one can see what a silent bug looks like.

Nothing here is used unless a sweep asks for it by name (`bug: ...`). The loss that is reported stays the right one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workloads.engine.update import Batch, Hyper, Trainer, Update, clip_gradients, gradient_norms


class NoZeroGrad(Trainer):
    """Every gradient ever seen is applied again at each update.

    A resumed run begins the sum anew, and so does the count of clipped updates in a row: checkpoints hold no gradients,
    since no right loop needs any from the update before, and under Adam they would be a third larger for it.
    """

    def clear_gradients(self) -> None:
        pass


class LossTimes40(Trainer):
    """Adam does not mind; SGD takes steps 40 times too long, and the clip always acts."""

    def backward(self, loss: Tensor, share: float) -> None:
        super().backward(loss * 40, share)


class UnscaledAccumulation(Trainer):
    """The window's gradient is a sum: it grows with the number of micro-batches. A clip that always acts hides it."""

    def gradient_shares(self, shares: Sequence[float]) -> Sequence[float]:
        return [1.0] * len(shares)


class MeanOfMeans(Trainer):
    """A micro-batch with few valid targets counts as much as a full one."""

    def gradient_shares(self, shares: Sequence[float]) -> Sequence[float]:
        return [1.0 / len(shares)] * len(shares)


class ClipBeforeUnscale(Trainer):
    """The clip sees gradients 65536 times too large and leaves next to nothing of them; Adam does not mind."""

    def unscale_and_clip(self) -> tuple[dict[str, float], bool]:
        scaled = gradient_norms(self.blocks)
        clipped = clip_gradients(self.parameters, scaled["total"], self.clip_norm)
        self.scaler.unscale_(self.optimizer)
        scale = self.scaler.get_scale()
        return {name: norm / scale for name, norm in scaled.items()}, clipped


class SchedulerPerMicroBatch(Trainer):
    """The learning rate runs through its schedule too early."""

    def update(self, window: Sequence[Batch], hyper: Hyper) -> Update:
        update = super().update(window, hyper)
        for _ in window[1:]:
            self.step_schedules()
        return update


TRAINERS: dict[str, type[Trainer]] = {
    "no_zero_grad": NoZeroGrad,
    "loss_times_40": LossTimes40,
    "clip_before_unscale": ClipBeforeUnscale,
    "unscaled_accumulation": UnscaledAccumulation,
    "mean_of_means": MeanOfMeans,
    "scheduler_per_micro_batch": SchedulerPerMicroBatch,
}
