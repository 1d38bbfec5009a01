"""The sampled axes in Optuna's terms, and values back in ours. Names `lr`, and `c_z[1]` for a range inside a choice.

A choice is a categorical of positions, so that lists and nulls keep their type and a range may stand among its options.
"""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from orchestrator.spec.domains import Choice, Int, Uniform, contains, last_value, nearest_value

Encoded = tuple[dict[str, Any], dict[str, BaseDistribution]]


def distribution(domain: Choice | Uniform | Int) -> BaseDistribution:
    """Optuna's form of one domain. Optuna has no logarithmic steps: those are drawn freely and rounded by `suggest`."""
    if isinstance(domain, Choice):
        return CategoricalDistribution(range(len(domain.options)))
    high = last_value(domain)
    if isinstance(domain, Int) and not (domain.log and (domain.step or 1) > 1):
        return IntDistribution(domain.low, high, log=domain.log, step=domain.step or 1)
    return FloatDistribution(domain.low, high, log=domain.log, step=None if domain.log else domain.step)


def suggest(trial: Any, name: str, domain: Any) -> Any:
    """The value of one axis in a trial that Optuna was asked for."""
    if isinstance(domain, Choice):
        index = trial.suggest_categorical(name, range(len(domain.options)))
        return suggest(trial, f"{name}[{index}]", domain.options[index])
    if not isinstance(domain, Uniform | Int):
        return domain
    form = distribution(domain)
    draw = trial.suggest_int if isinstance(form, IntDistribution) else trial.suggest_float
    return nearest_value(domain, draw(name, form.low, form.high, step=form.step, log=form.log))


def has_nested_domain(domain: Any) -> bool:
    return isinstance(domain, Choice) and any(isinstance(option, Choice | Uniform | Int) for option in domain.options)


def encode(name: str, domain: Any, value: Any) -> Encoded | None:
    """The parameters and distributions under which `suggest` would have given `value`; None if it never would."""
    if not contains(domain, value):
        return None
    if isinstance(domain, Choice):
        index = next(index for index, option in enumerate(domain.options) if contains(option, value))
        params, forms = encode(f"{name}[{index}]", domain.options[index], value) or ({}, {})
        return {name: index, **params}, {name: distribution(domain), **forms}
    if not isinstance(domain, Uniform | Int):
        return {}, {}
    return {name: value}, {name: distribution(domain)}
