"""The sampled axes in Optuna's terms, and values back in ours. Names `lr`, and `c_z[1]` for a range inside a choice.

A choice is a categorical of positions, so that lists and nulls keep their type and a range may stand among its options.
"""

from __future__ import annotations

from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from orchestrator.spec.domains import Choice, Int, Uniform, contains, last_value, nearest_value
from orchestrator.spec.relations import is_active
from orchestrator.spec.sweep_spec import SweepSpec
from orchestrator.trial import Params

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


def flat_distributions(name: str, domain: Any) -> dict[str, BaseDistribution]:
    """The distributions of an axis and of every range inside its choices, as if all of them always existed."""
    if not isinstance(domain, Choice | Uniform | Int):
        return {}
    forms = {name: distribution(domain)}
    for index, option in enumerate(domain.options if isinstance(domain, Choice) else ()):
        forms |= flat_distributions(f"{name}[{index}]", option)
    return forms


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


def encode_point(spec: SweepSpec, params: Params) -> Encoded | None:
    """The sampled axes that exist in a trial with these parameters; None if its ranges do not hold one of the values.

    The latter is from before the file's ranges were changed.
    """
    values: dict[str, Any] = {}
    forms: dict[str, BaseDistribution] = {}
    for name, axis in spec.sampled_axes.items():
        if not is_active(spec, name, params):
            continue
        encoded = encode(name, axis, params.get(name))
        if encoded is None:
            return None
        values |= encoded[0]
        forms |= encoded[1]
    return values, forms
