"""Figures of gradient accumulation. The essay gives rules and weights and ran nothing: tolerances are ours."""

from __future__ import annotations

from benchmarks.science.figure import Figure, ShownByTest
from benchmarks.science.queries import last
from benchmarks.science.sources import ACCUMULATION, GRADIENTS, MIXED_PRECISION

TESTS = "tests/numerics/test_accumulation.py::"
RAGGED = "window_sizes = '[8, 8, 8, 2]'"

EQUAL_WINDOWS = [
    Figure(
        "accumulation",
        "Four micro-batches of 8, each weighing 1/4, give the update of the 32 joined: largest difference, float32",
        "equal",
        ACCUMULATION,
        "exact",
        last("accumulation", "max_abs_diff", "precision = 'fp32' and weighting <> 'none'"),
        high=1e-6,
    ),
    Figure(
        "accumulation",
        "The same in float64",
        "equal",
        ACCUMULATION,
        "exact",
        last("accumulation", "max_abs_diff", "precision = 'fp64' and weighting <> 'none'"),
        high=1e-14,
    ),
    Figure(
        "accumulation",
        "In float16 with a loss scale it is float32's update, to float16's own precision (relative difference)",
        "one unscale after the last backward pass",
        f"{ACCUMULATION}; {MIXED_PRECISION}",
        "exact",
        last("accumulation", "relative_diff", "precision = 'fp16' and weighting <> 'none'"),
        high=5e-3,
    ),
    Figure(
        "accumulation",
        "Without the division the update is as many times too large as there are micro-batches",
        "4 x",
        ACCUMULATION,
        "exact",
        last("accumulation", "change_ratio", "precision = 'fp64' and weighting = 'none'"),
        low=3.9999,
        high=4.0001,
    ),
]

RAGGED_WINDOWS = [
    Figure(
        "ragged_windows",
        "Windows of 8, 8, 8, 2 weighing n/26, the last one short: largest difference from the joined batches, float64",
        "equal",
        ACCUMULATION,
        "exact",
        last("ragged_windows", "max_abs_diff", f"{RAGGED} and weighting = 'tokens'"),
        high=1e-14,
    ),
    Figure(
        "ragged_windows",
        "Averaging the micro-batches' means changes the objective (relative difference of the update)",
        "another objective",
        ACCUMULATION,
        "exact",
        last("ragged_windows", "relative_diff", f"{RAGGED} and weighting = 'mean_of_means'"),
        low=0.05,
        note="An example of the micro-batch of 2 weighs 1/8 instead of 1/26.",
    ),
    Figure(
        "ragged_windows",
        "The short last window is an update of its own: 82 examples in windows of 4 x 8 are 3 updates",
        "treated explicitly",
        ACCUMULATION,
        "exact",
        last("ragged_windows", "num_updates", "window_sizes = '[8, 8, 8, 8]' and weighting = 'tokens'"),
        low=3,
        high=3,
    ),
]

ACCUMULATION_FIGURES = [*EQUAL_WINDOWS, *RAGGED_WINDOWS]

ACCUMULATION_TESTS = [
    ShownByTest(claim, published, ACCUMULATION, accepted, TESTS + test)
    for claim, published, accepted, test in (
        (
            "Token losses are weighted by valid tokens, class weights by their sum; both then give the joined update",
            "another denominator",
            "1e-6 float32, 1e-14 float64",
            "test_an_accumulated_update_is_the_combined_one",
        ),
        (
            "Counting masked tokens, the mean of means, a fixed divisor, a clip per micro-batch and batch norm do not",
            "changes the update",
            "relative difference > 0.05; batch norm > 0.01",
            "test_each_wrong_way_is_another_update",
        ),
        (
            "A last window that is not flushed leaves its gradient behind",
            "treated explicitly",
            "2 updates instead of 3",
            "test_a_short_last_window_is_an_update_of_its_own_or_a_gradient_left_behind",
        ),
        (
            "Batch norm sees each micro-batch apart",
            "not one large batch",
            "4 updates of its statistics instead of 1",
            "test_batch_norm_sees_four_small_batches_where_there_was_one_large_one",
        ),
        (
            "Clipping before the unscaling shrinks the update by the loss scale, and nothing is raised",
            "clip after one unscale",
            "1/65536 within 1 %",
            "test_a_clip_before_the_unscaling_shrinks_the_update_by_the_loss_scale_without_an_error",
        ),
        (
            "Unscaling twice in a window is an error",
            "one unscale",
            "RuntimeError",
            "test_torch_refuses_to_unscale_a_window_twice",
        ),
        (
            "The loss scale stays constant within a window",
            "constant",
            "doubling it: relative difference > 0.05",
            "test_a_scale_that_changes_within_a_window_spoils_the_update",
        ),
        (
            "The schedule advances on real updates only",
            "only then",
            "3 steps for 4 windows, one of them skipped",
            "test_a_skipped_update_is_no_step_of_the_schedule",
        ),
    )
] + [
    ShownByTest(
        "A clip scales the whole gradient to its limit and keeps the direction",
        "9.76 becomes 1.0",
        GRADIENTS,
        "1 within 1e-5",
        "tests/numerics/test_update.py::test_clipping_keeps_the_direction_and_gives_the_limit",
    ),
]
