"""Figures of the loss, of gradients through depth, of memory and float16, and of bugs that raise no error."""

from __future__ import annotations

from benchmarks.science.figure import Figure, ShownByTest
from benchmarks.science.queries import distance, last, over_steps, ratio
from benchmarks.science.sources import GPT2, GRADIENTS, MIXED_PRECISION

MICROGRAD = "micrograd, Karpathy, 2020"
NETWORK = "expression = 'mlp' and accumulate = 'add'"


def exactly(sweep: str, claim: str, published: str, source: str, query: str, value: float) -> Figure:
    return Figure(sweep, claim, published, source, "exact", query, low=value, high=value)


def of_product(metric: str, accumulate: str) -> str:
    return last("autograd", metric, f"expression = 'product' and accumulate = '{accumulate}'")


AUTOGRAD = [
    exactly("autograd", "Nodes of relu(a b + c) a", "7", GRADIENTS, of_product("num_nodes", "add"), 7),
    exactly("autograd", "Its gradient of a, with +=", "-2", GRADIENTS, of_product("gradient/a", "add"), -2),
    exactly("autograd", "Its gradient of a, with =", "-6", GRADIENTS, of_product("gradient/a", "assign"), -6),
    exactly(
        "autograd",
        "Parameters of a network 3-4-4-1",
        "41",
        f"{GRADIENTS}; {MICROGRAD}",
        last("autograd", "num_parameters", NETWORK),
        41,
    ),
    exactly(
        "autograd",
        "Its nodes on four examples",
        "394",
        GRADIENTS,
        last("autograd", "num_nodes", NETWORK),
        394,
    ),
    Figure(
        "autograd",
        "Its gradients against torch's: largest difference over the largest gradient",
        "at most 7e-6, not divided",
        GRADIENTS,
        "exact",
        last("autograd", "relative_diff", NETWORK),
        high=1e-6,
        note="Divided, since the difference grows with the gradient: undivided it is 7e-6 in the worst of 20 seeds.",
    ),
    Figure(
        "autograd",
        "That comparison is of something: largest gradient",
        "-",
        GRADIENTS,
        "exact",
        last("autograd", "grad/max_abs", NETWORK),
        low=1e-3,
        note="A network whose units are all dead has zero gradients and agrees with anything: 1 in 20 seeds.",
    ),
]


def first_over_last(residual: bool, scale: float, depth: int) -> str:
    """Gradient norm of the first layer over that of the last, with respect to their inputs."""
    return last("depth", "grad/input_ratio", f"residual = {residual} and scale = {scale} and depth = {depth}")


# Bands: the spread of an independent reproduction over six seeds.
DEPTH = [
    Figure(
        "depth",
        "Gradient of the first layer over the last's: plain, scale 0.5, 30 layers",
        "7e-9",
        GRADIENTS,
        "fitted",
        first_over_last(residual=False, scale=0.5, depth=30),
        low=2e-9,
        high=2e-8,
        note="Norms with respect to layers' inputs; those of the weights do not vanish.",
    ),
    Figure(
        "depth",
        "The same with 60 layers",
        "about 1e-17",
        GRADIENTS,
        "fitted",
        first_over_last(residual=False, scale=0.5, depth=60),
        low=2e-18,
        high=5e-17,
        note="In float64; its squares are 0 in float32.",
    ),
    Figure(
        "depth",
        "Plain, scale 2, 60 layers",
        "about 7700",
        GRADIENTS,
        "fitted",
        first_over_last(residual=False, scale=2, depth=60),
        low=3e3,
        high=1.5e4,
    ),
    Figure(
        "depth",
        "Residual, scale 2, 60 layers",
        "992",
        GRADIENTS,
        "fitted",
        first_over_last(residual=True, scale=2, depth=60),
        low=600,
        high=1500,
    ),
    Figure(
        "depth",
        "Residual, all scales and depths: never less than 1",
        "never",
        GRADIENTS,
        "fitted",
        last("depth", "grad/input_ratio", "residual"),
        low=1,
    ),
]

ROW = "attention = 'sdpa' and context = 1024"
CHECKPOINTED = "preset = 'gpt2-small' and checkpointing"

MEMORY = [
    Figure(
        "memory",
        "Weights of GPT-2 small, decimal MB",
        "498",
        f"{GRADIENTS}; {GPT2}",
        "exact",
        last("memory", "memory/weight_megabytes", f"{ROW} and batch_size = 1"),
        low=497.759232,
        high=497.759232,
    ),
    Figure(
        "memory",
        "Kept for the backward pass of 1024 tokens, MB",
        "about 820",
        GRADIENTS,
        "fitted",
        last("memory", "memory/saved_megabytes", f"{ROW} and batch_size = 1"),
        low=800.6,
        high=833.2,
        note="With attention and GELU as single operations; what is kept depends on the implementation.",
    ),
    Figure(
        "memory",
        "The same for a batch of 8, MB",
        "6500",
        GRADIENTS,
        "fitted",
        last("memory", "memory/saved_megabytes", f"{ROW} and batch_size = 8"),
        low=6405,
        high=6666,
    ),
]

CHECKPOINTING = [
    Figure(
        "checkpointing",
        "Kept for a batch of 8 with activation checkpointing, MB",
        "2000",
        GRADIENTS,
        "fitted",
        last("checkpointing", "memory/saved_megabytes", CHECKPOINTED),
        low=1959,
        high=2039,
        note="What is held between the passes; recomputing needs one block's tensors more.",
    ),
    Figure(
        "checkpointing",
        "Log-probabilities among them, MB",
        "1650",
        GRADIENTS,
        "exact",
        'select "memory/log_probabilities_share" * "memory/saved_megabytes" from sweep_checkpointing'
        f" where {CHECKPOINTED}",
        low=1646.8,
        high=1646.9,
    ),
    Figure(
        "checkpointing",
        "Price in time",
        "17 %",
        GRADIENTS,
        "cannot",
        note="A time on one laptop's CPU; the price is one more forward pass of the blocks.",
    ),
]

UNDERFLOW = [
    Figure(
        "underflow",
        "Share of gradient values that bfloat16 rounds to 0",
        "0",
        GRADIENTS,
        "exact",
        last("underflow", "grad/underflow_share", "dtype = 'bfloat16'"),
        low=0,
        high=0,
    ),
    Figure(
        "underflow",
        "float16 loses some (number of values)",
        "9.3 % of GPT-2's gradient",
        GRADIENTS,
        "fitted",
        last("underflow", "grad/num_underflow", "dtype = 'float16' and loss_scale = 1"),
        low=1,
    ),
    Figure(
        "underflow",
        "How large that share is",
        "9.3 %",
        GRADIENTS,
        "cannot",
        last("underflow", "grad/underflow_share", "dtype = 'float16' and loss_scale = 1 and train_steps > 0"),
        note="Of GPT-2's trained weights; ours are those of a small model after 400 updates.",
    ),
    Figure(
        "underflow",
        "A loss scale of 65536 rescues (values lost with it over without it)",
        "1743 of 11.6 million stay lost",
        f"{GRADIENTS}; {MIXED_PRECISION}",
        "fitted",
        ratio(
            "underflow",
            "grad/num_underflow",
            "dtype = 'float16' and loss_scale = 65536",
            "dtype = 'float16' and loss_scale = 1",
            "seed, train_steps",
        ),
        high=0.5,
    ),
    Figure(
        "underflow",
        "Of a trained model, nearly all",
        "all but 0.015 %",
        GRADIENTS,
        "fitted",
        ratio(
            "underflow",
            "grad/num_underflow",
            "dtype = 'float16' and loss_scale = 65536 and train_steps > 0",
            "dtype = 'float16' and loss_scale = 1 and train_steps > 0",
        ),
        high=0.02,
    ),
    Figure(
        "underflow",
        "It pushes some of the largest beyond 65504 (number of values)",
        "11",
        GRADIENTS,
        "cannot",
        last("underflow", "grad/num_overflow", "dtype = 'float16' and loss_scale = 65536 and train_steps > 0"),
        note="How many depends on the largest gradients, here of another model.",
    ),
]


def bug(name: str) -> str:
    return f"bug = '{name}'"


RIGHT = bug("none")

SILENT_BUGS = [
    Figure(
        "silent_bugs",
        "The correct run's held-out loss",
        "1.74",
        GRADIENTS,
        "fitted",
        last("silent_bugs", "val/loss", RIGHT),
        high=2.0,
        note="Another text; size and learning rate were not published.",
    ),
    Figure(
        "silent_bugs",
        "Loss times 40 under AdamW: as good as the correct one (held-out loss over the correct run's)",
        "1.735 / 1.74",
        GRADIENTS,
        "fitted",
        ratio("silent_bugs", "val/loss", bug("loss_times_40"), RIGHT),
        low=0.98,
        high=1.02,
    ),
    Figure(
        "silent_bugs",
        "Detached positions: held-out loss over the correct run's",
        "1.95, 12 % worse",
        GRADIENTS,
        "fitted",
        ratio("silent_bugs", "val/loss", bug("detached_positions"), RIGHT),
        low=1.05,
        high=1.2,
    ),
    Figure(
        "silent_bugs",
        "Their gradient is zero from the first step (largest norm in the run)",
        "0",
        GRADIENTS,
        "exact",
        over_steps("silent_bugs", "grad/preclip/positions", bug("detached_positions"), "max(value)"),
        low=0,
        high=0,
    ),
    Figure(
        "silent_bugs",
        "Targets not shifted: training loss",
        "0.001",
        GRADIENTS,
        "fitted",
        last("silent_bugs", "train/loss", bug("unshifted_targets")),
        high=0.01,
    ),
    Figure(
        "silent_bugs",
        "Targets not shifted: true loss",
        "10.7",
        GRADIENTS,
        "fitted",
        last("silent_bugs", "val/loss", bug("unshifted_targets")),
        low=8,
        note="It keeps rising as training goes on.",
    ),
    Figure(
        "silent_bugs",
        "Without zero_grad: the loss falls at first (lowest in the first 100 steps)",
        "3.37 at step 50",
        GRADIENTS,
        "fitted",
        over_steps("silent_bugs", "train/loss", bug("no_zero_grad"), "min(value) filter (where step <= 100)"),
        low=3,
        high=3.9,
    ),
    Figure(
        "silent_bugs",
        "and ends worse than a uniform guess (held-out loss over that of a uniform guess)",
        "7.37 / 4.66",
        GRADIENTS,
        "fitted",
        'select case when diverged then \'NaN\' else "val/loss" / "data/uniform_loss" end from sweep_silent_bugs'
        f" where {bug('no_zero_grad')}",
        low=1,
        note="It takes a learning rate of 2e-3; at 1e-3 it ends at 3.6, above the correct run but below uniform.",
    ),
    Figure(
        "silent_bugs",
        "A uniform guess costs the logarithm of the number of symbols (difference)",
        "ln 106 = 4.66",
        GRADIENTS,
        "exact",
        'select abs("data/uniform_loss" - ln("data/symbols")) from sweep_silent_bugs',
        high=1e-9,
    ),
    Figure(
        "silent_bugs",
        "Guessing by the symbols' frequencies",
        "3.25",
        GRADIENTS,
        "fitted",
        last("silent_bugs", "data/unigram_loss", RIGHT),
        low=3.1,
        high=3.4,
        note="Another text: English prose of Python's own documentation.",
    ),
] + [
    Figure(
        "silent_bugs",
        claim,
        published,
        GRADIENTS,
        "cannot",
        last("silent_bugs", metric, RIGHT),
        note="Of GPT-2's weights on another text, in tokens; ours is of the correct run, in characters.",
    )
    for claim, published, metric in (
        ("The median token's surprise", "2.85", "val/median_surprise"),
        ("Share of the loss that the worst tenth carries", "28 %", "val/worst_tenth_share"),
    )
]

BUG_SGD = [
    Figure(
        "bug_sgd",
        claim,
        published,
        GRADIENTS,
        "fitted",
        distance(ratio("bug_sgd", "val/loss", of, to)),
        high=tolerance,
    )
    for claim, published, of, to, tolerance in (
        (
            "Under SGD, loss times 40 is a learning rate 40 x too large (relative difference of held-out loss)",
            "equivalent",
            f"optimizer = 'sgd' and lr = 0.001 and {bug('loss_times_40')}",
            f"optimizer = 'sgd' and lr = 0.04 and {RIGHT}",
            1e-4,
        ),
        (
            "Under AdamW it changes nothing (the same)",
            "nothing",
            f"optimizer = 'adamw' and lr = 0.001 and {bug('loss_times_40')}",
            f"optimizer = 'adamw' and lr = 0.001 and {RIGHT}",
            5e-3,
        ),
    )
]

GRADIENT_FIGURES = [*AUTOGRAD, *DEPTH, *MEMORY, *CHECKPOINTING, *UNDERFLOW, *SILENT_BUGS, *BUG_SGD]

GRADIENT_TESTS = [
    ShownByTest(
        "The scalar engine agrees with micrograd and, in float64, with torch",
        "at most 7e-6 against float32",
        f"{GRADIENTS}; {MICROGRAD}",
        "1e-12 of the largest gradient, which is not 0",
        "tests/numerics/test_scalar_autograd.py::test_the_workload_agrees_with_each_reference",
    ),
    ShownByTest(
        "On one batch, loss times 40 makes every gradient 40 times as large",
        "check it directly",
        GRADIENTS,
        "40 for each parameter",
        "tests/numerics/test_char_gpt.py::test_loss_times_40_makes_every_gradient_40_times_as_large",
    ),
    ShownByTest(
        "float16 ends at 65504 and 6e-8",
        "65504; about 6e-8",
        f"{GRADIENTS}; {MIXED_PRECISION}",
        "65504 and 2^-24; rounds to 0 at 2^-25, overflows from 65520",
        "tests/numerics/test_rounding.py::test_float16_ends_where_it_is_published_to_end",
    ),
    ShownByTest(
        "The loss scale starts at 65536",
        "65536",
        GRADIENTS,
        "65536",
        "tests/numerics/test_accumulation.py::test_fp16_gives_the_update_of_fp32_to_its_own_precision",
    ),
    ShownByTest(
        "An overflow skips the update and halves the scale",
        "halves it",
        GRADIENTS,
        "32768",
        "tests/numerics/test_accumulation.py::test_a_skipped_update_is_no_step_of_the_schedule",
    ),
]
