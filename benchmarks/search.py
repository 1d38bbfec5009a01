"""What our search finds beside `study.optimize` with the same sampler and beside random draws; what it costs to ask.

Three standard functions, 64 trials, ten seeds, all in one run: the median of the ten regrets (distance of the best
configuration from the true minimum). "Not worse" is a one-sided Mann-Whitney test of the ten against the ten: two runs
of one and the same algorithm with other seeds differ, too.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import optuna
from scipy.stats import mannwhitneyu

from orchestrator.search import make_searcher, plan_count
from orchestrator.search.optuna_samplers import experimental, make_sampler
from orchestrator.search.optuna_space import suggest
from orchestrator.spec import Metric, SweepSpec
from orchestrator.spec.domains import Choice, Domain, Grid, Uniform
from orchestrator.spec.sweep_spec import Search
from orchestrator.trial import Told, TrialState

Line = tuple[str, float, str, str, bool | None]
Point = Mapping[str, Any]

NUM_TRIALS, NUM_SEEDS = 64, 10
NUM_PLANNED = 10_000
CHANCE = 0.05  # a difference that two like algorithms show in so many comparisons is none


@dataclass(frozen=True)
class Function:
    axes: Mapping[str, Domain]
    value: Callable[[Point], float]
    minimum: float
    noise: float = 0.0


def branin(point: Point) -> float:
    """Source: Dixon and Szego (1978); three minima of 0.397887."""
    x, y = point["x"], point["y"]
    bend = y - 5.1 * x**2 / (4 * math.pi**2) + 5 * x / math.pi - 6
    return bend**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


HARTMANN_SCALES = [
    (10, 3, 17, 3.5, 1.7, 8),
    (0.05, 10, 17, 0.1, 8, 14),
    (3, 3.5, 1.7, 10, 17, 8),
    (17, 8, 0.05, 10, 0.1, 14),
]
HARTMANN_CENTRES = [
    (0.1312, 0.1696, 0.5569, 0.0124, 0.8283, 0.5886),
    (0.2329, 0.4135, 0.8307, 0.3736, 0.1004, 0.9991),
    (0.2348, 0.1451, 0.3522, 0.2883, 0.3047, 0.6650),
    (0.4047, 0.8828, 0.8732, 0.5743, 0.1091, 0.0381),
]


def hartmann6(point: Point) -> float:
    """Source: Hartmann (1973), as in Dixon and Szego (1978); the minimum is -3.32237."""
    values = [point[f"x{number}"] for number in range(6)]
    heights = (1.0, 1.2, 3.0, 3.2)
    return -sum(
        height * math.exp(-sum(a * (x - p) ** 2 for a, x, p in zip(scales, values, centres, strict=True)))
        for height, scales, centres in zip(heights, HARTMANN_SCALES, HARTMANN_CENTRES, strict=True)
    )


def quadratic(point: Point) -> float:
    """A bowl whose middle and height depend on a category; the minimum is 0, in category b."""
    middle, height = {"a": (0.6, 0.3), "b": (-0.3, 0.0), "c": (0.0, 0.6)}[point["category"]]
    return (point["x"] - middle) ** 2 + (point["y"] + middle) ** 2 + height


FUNCTIONS = {
    "branin": Function({"x": Uniform(-5, 10), "y": Uniform(0, 15)}, branin, 0.397887),
    "hartmann6": Function({f"x{number}": Uniform(0, 1) for number in range(6)}, hartmann6, -3.32237),
    "noisy quadratic": Function(
        {"x": Uniform(-1, 1), "y": Uniform(-1, 1), "category": Choice(("a", "b", "c"))}, quadratic, 0.0, noise=0.1
    ),
}


def spec_of(function: Function, sampler: str, seed: int, num_trials: int) -> SweepSpec:
    """`sampler: random` is no sampler of Optuna's but our own random search."""
    chosen: dict[str, Any] = {"algorithm": "random"} if sampler == "random" else {"sampler": sampler}
    search = Search(**{"algorithm": "optuna", "samples": num_trials, "seed": seed, **chosen})
    return SweepSpec("bench", "toy", Metric("value"), {}, function.axes, search)


def observed(function: Function, point: Point, seed: int, number: int) -> float:
    return function.value(point) + function.noise * random.Random(f"{seed}/{number}").gauss(0, 1)


def our_regret(function: Function, sampler: str, seed: int, num_trials: int) -> float:
    """One trial at a time through ask and tell, as a sweep with one worker."""
    searcher, history = make_searcher(spec_of(function, sampler, seed, num_trials)), list[Told]()
    while batch := searcher.ask(history):
        for one in batch:
            value = observed(function, one.params, seed, len(history))
            history.append(Told(one, TrialState.FINISHED, value))
    best = min(history, key=lambda told: told.objective or 0.0)
    return function.value(best.candidate.params) - function.minimum


def peer_regret(function: Function, sampler: str, seed: int, num_trials: int) -> float:
    """The same sampler in Optuna's own loop."""
    spec = spec_of(function, sampler, seed, num_trials)
    with experimental():
        chosen = (
            optuna.samplers.QMCSampler(seed=seed, scramble=True)
            if sampler == "qmc"
            else make_sampler(spec, seed, num_trials)
        )

    def objective(trial: optuna.Trial) -> float:
        point = {name: suggest(trial, name, axis) for name, axis in function.axes.items()}
        trial.set_user_attr("regret", function.value(point) - function.minimum)
        return observed(function, point, seed, trial.number)

    study = optuna.create_study(sampler=chosen)
    study.optimize(objective, n_trials=num_trials)
    return float(study.best_trial.user_attrs["regret"])


def worse_by_chance(ours: list[float], theirs: list[float]) -> float:
    """The probability of regrets at least so much larger than theirs if both are of one kind."""
    return float(mannwhitneyu(ours, theirs, alternative="greater").pvalue)


def quality(name: str, sampler: str, num_trials: int = NUM_TRIALS, num_seeds: int = NUM_SEEDS) -> Iterator[Line]:
    function, seeds = FUNCTIONS[name], range(num_seeds)
    ours, theirs, blind = (
        [regret(function, which, seed, num_trials) for seed in seeds]
        for regret, which in ((our_regret, sampler), (peer_regret, sampler), (our_regret, "random"))
    )
    chance = worse_by_chance(ours, theirs)
    label = f"{name}, {sampler}: median regret"
    yield f"{label}, ours", median(ours), "", "", None
    yield f"{label}, study.optimize", median(theirs), "", f"p {chance:.2f} >= {CHANCE}", chance >= CHANCE
    chance = worse_by_chance(ours, blind)
    yield f"{label}, random", median(blind), "", f"p {chance:.2f} >= {CHANCE}", chance >= CHANCE


def cost(algorithm: str) -> Iterator[Line]:
    """Seconds to plan 10,000 trivial trials and to give and take them, the last one with 9,999 known."""
    axes: dict[str, Domain] = {"k": Grid(tuple(range(20))), "seed": Grid(tuple(range(5)))}
    axes["lr"] = Grid(tuple(range(100))) if algorithm == "grid" else Uniform(1e-4, 1.0, log=True)
    search = Search() if algorithm == "grid" else Search("random", samples=100)
    spec = replace(spec_of(FUNCTIONS["branin"], "random", 0, 1), axes=axes, search=search)
    started = time.perf_counter()
    assert plan_count(spec) == NUM_PLANNED
    planned = time.perf_counter()
    batch = make_searcher(spec).ask([]) or ()
    told = [Told(one, TrialState.FINISHED, 0.0) for one in batch]
    assert len(make_searcher(spec).ask(told[:-1]) or ()) == 1
    each_ms = (time.perf_counter() - planned) * 1000 / NUM_PLANNED
    yield (
        f"{algorithm}: {NUM_PLANNED} trials counted for a plan",
        planned - started,
        "s",
        "<= 2 s",
        planned - started <= 2,
    )
    yield f"{algorithm}: ask and tell, a trial of {NUM_PLANNED}", each_ms, "ms", "<= 2 ms", each_ms <= 2


def optuna_cost(sampler: str, num_known: int) -> Line:
    """One more ask of a searcher that has seen the history before."""
    spec = spec_of(FUNCTIONS["hartmann6"], "random", 0, num_known + 2)
    told = [Told(one, TrialState.FINISHED, hartmann6(one.params)) for one in make_searcher(spec).ask([]) or ()]
    searcher = make_searcher(replace(spec, search=replace(spec.search, algorithm="optuna", sampler=sampler)))  # type: ignore[arg-type]
    [candidate] = searcher.ask(told[:-2]) or ()
    started = time.perf_counter()
    searcher.ask([*told[:-2], Told(candidate, TrialState.FINISHED, hartmann6(candidate.params))])
    return f"{sampler}: ask with {num_known} known", (time.perf_counter() - started) * 1000, "ms", "", None


def run() -> Iterator[Line]:
    for name in FUNCTIONS:
        yield from quality(name, "tpe")
    for sampler in ("cmaes", "nsga2", "qmc"):
        yield from quality("hartmann6", sampler)
    yield from quality("branin", "gp", num_trials=24, num_seeds=5)  # a fit and a search of 0.1 s and more at each ask
    for algorithm in ("grid", "random"):
        yield from cost(algorithm)
    for sampler in ("tpe", "cmaes", "nsga2"):
        for num_known in (100, 1000):
            yield optuna_cost(sampler, num_known)
