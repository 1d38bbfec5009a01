"""What sweeps here have found and nobody published, so that a change of it is noticed."""

from __future__ import annotations

from benchmarks.science.figure import Figure
from benchmarks.science.queries import last, mean, ratio, unstable_share

GRADIENT_NOISE = [
    Figure(
        "gradient_noise",
        "An instability that nothing imposes, SGD with momentum on 64 characters at lr 0.4: share of unstable seeds",
        "-",
        "",
        "own",
        unstable_share("gradient_noise", accumulation_steps=1),
        low=0.83,
        note="Unstable: diverged, or no better at the end than guessing by the letters' frequencies.",
    ),
    Figure(
        "gradient_noise",
        "Accumulating 4 micro-batches or more cures it (share of unstable seeds)",
        "-",
        "",
        "own",
        "select share from stability where sweep = 'gradient_noise' and (cell ->> 'accumulation_steps')::int >= 4",
        high=0.17,
    ),
]


def held_out_error(residual: bool, depth: int) -> str:
    """Held-out error in units of the targets' variance: 1 is knowing nothing."""
    return last("depth_training", "val/mse", f"residual = {residual} and depth = {depth} and precision = 'fp32'")


DEPTH_TRAINING = [
    Figure(
        "depth_training",
        "A plain tanh stack of 60 layers learns nothing (held-out error; 1 is knowing nothing)",
        "-",
        "",
        "own",
        held_out_error(residual=False, depth=60),
        low=0.85,
    ),
    Figure(
        "depth_training",
        "A residual one learns",
        "-",
        "",
        "own",
        held_out_error(residual=True, depth=60),
        high=0.2,
    ),
]


def unsteady(num_micro_batches: int) -> str:
    """The share of unstable runs of `five_knobs` over all settings of the other four knobs."""
    where = f"sweep = 'five_knobs' and (cell ->> 'accumulation_steps')::int = {num_micro_batches}"
    return f"select sum(unstable) / sum(n) from stability where {where}"


FIVE_KNOBS = [
    Figure(
        "five_knobs",
        "Small batches under SGD, no accumulation: share of unstable runs over the other four knobs",
        "-",
        "",
        "own",
        unsteady(num_micro_batches=1),
        low=0.4,
    ),
    Figure(
        "five_knobs",
        "The same with 4 micro-batches: of the five knobs the one that steadies",
        "-",
        "",
        "own",
        unsteady(num_micro_batches=4),
        high=0.05,
    ),
    Figure(
        "five_knobs",
        "and the one that buys loss (held-out loss of 4 micro-batches over 1, mean of all pairs)",
        "-",
        "",
        "own",
        mean(
            ratio(
                "five_knobs",
                "val/loss",
                "accumulation_steps = 4",
                "accumulation_steps = 1",
                "seed, c_z, k, precision, depth",
            )
        ),
        high=0.9,
        note="It costs four times the training text and time.",
    ),
]

OWN_FIGURES = [*FIVE_KNOBS, *GRADIENT_NOISE, *DEPTH_TRAINING]
