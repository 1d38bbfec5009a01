"""Wrong ways to accumulate: trainers that differ from the right one in one method each. They can be combined."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workloads.accumulation.config import Config
from workloads.engine.bugs import ClipBeforeUnscale, MeanOfMeans, SchedulerPerMicroBatch, UnscaledAccumulation
from workloads.engine.update import Batch, Hyper, Trainer, Update, clip_gradients, gradient_norms


def trainer_class(config: Config) -> type[Trainer]:
    """The engine's own trainer with the deviations of `config`, if there are any."""
    found = [weighting(config), CLIPS.get(config.clip_at), SCHEDULERS.get(config.scheduler_on)]
    return type("Deviating", (*filter(None, found), Trainer), {})


def weighting(config: Config) -> type[Trainer] | None:
    """The other three weightings differ in what a batch says it counts, not in the trainer."""
    if config.weighting == "fixed":
        return fixed_count(len(config.window_sizes))
    return {"mean_of_means": MeanOfMeans, "none": UnscaledAccumulation}.get(config.weighting)


def fixed_count(num_micro_batches: int) -> type[Trainer]:
    class FixedCount(Trainer):
        """A last window of fewer micro-batches is divided by the number of a full one, so its update is too small."""

        def gradient_shares(self, shares: Sequence[float]) -> Sequence[float]:
            return [1.0 / num_micro_batches] * len(shares)

    return FixedCount


class ClipsMicroBatches(Trainer):
    """Each micro-batch's gradient is clipped before it is added: large ones lose their say."""

    def backward(self, loss: Tensor, share: float) -> None:
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        super().backward(loss, 1.0)
        clip_scaled(self)
        for parameter, sum_so_far in zip(self.parameters, before, strict=True):
            assert parameter.grad is not None
            clipped = parameter.grad * share
            parameter.grad = clipped if sum_so_far is None else sum_so_far + clipped


class ClipsBuffer(Trainer):
    """The running sum is clipped after each micro-batch: early ones are shrunk again and again."""

    def backward(self, loss: Tensor, share: float) -> None:
        super().backward(loss, share)
        clip_scaled(self)


def clip_scaled(trainer: Trainer) -> None:
    """Clips gradients that still carry the loss scale, to the limit times that scale."""
    assert trainer.clip_norm is not None
    norm = gradient_norms(trainer.blocks)["total"]
    clip_gradients(trainer.parameters, norm, trainer.clip_norm * trainer.scaler.get_scale())


class SchedulerAlways(Trainer):
    """The rate falls although the update was skipped."""

    def update(self, window: Sequence[Batch], hyper: Hyper) -> Update:
        update = super().update(window, hyper)
        if not update.applied:
            self.step_schedules()
        return update


CLIPS: dict[str, type[Trainer]] = {
    "micro": ClipsMicroBatches,
    "buffer": ClipsBuffer,
    "before_unscale": ClipBeforeUnscale,
}
SCHEDULERS: dict[str, type[Trainer]] = {"always": SchedulerAlways, "micro": SchedulerPerMicroBatch}
