"""SQL over the views that gives one number a trial or a pair of trials; NaN for one that diverged or has not ended."""

from __future__ import annotations


def last(sweep: str, metric: str, where: str) -> str:
    """The last value of `metric` in the trials where `where` holds."""
    return f"select value from ({_trials(sweep, metric, where)}) as trial"


def ratio(sweep: str, metric: str, of: str, to: str, same: str = "seed") -> str:
    """The last `metric` where `of` holds over that where `to` holds, of each pair alike in the columns `same`."""
    mine, other = _trials(sweep, metric, of), _trials(sweep, metric, to)
    return f"select mine.value / nullif(other.value, 0) from ({mine}) as mine join ({other}) as other using ({same})"


def distance(query: str) -> str:
    """How far the query's numbers, called `value`, are from 1."""
    return f"select abs(value - 1) from ({query}) as answer(value)"


def mean(query: str) -> str:
    """The mean of the query's numbers, called `value`; NaN if one of them is."""
    return f"select avg(value) from ({query}) as answer(value)"


def unstable_share(sweep: str, **cell: object) -> str:
    """The share of unstable trials in the cell, by the sweep's own rule; one number."""
    where = " and ".join(f"cell -> '{axis}' = to_jsonb({_literal(value)})" for axis, value in cell.items())
    return f"select share from stability where sweep = '{sweep}' and {where}"


def over_steps(sweep: str, metric: str, where: str, aggregate: str) -> str:
    """`aggregate` of each trial's curve, an expression over the columns `value` and `step`."""
    return (
        f"select {_if_it_ended(aggregate)} from metrics as point join sweep_{sweep} as trial using (run_id)"
        f" where point.sweep = '{sweep}' and point.key = '{metric}' and ({where}) group by run_id, trial.state"
    )


def share(query: str, condition: str) -> str:
    """The share of the query's numbers, called `value`, for which `condition` holds."""
    return f"select avg(({condition})::int) from ({query}) as answer(value)"


def _trials(sweep: str, metric: str, where: str) -> str:
    quoted = f'"{metric}"'
    return f"select *, {_if_it_ended(quoted)} as value from sweep_{sweep} as trial where {where}"


def _if_it_ended(value: str) -> str:
    return f"case when trial.state in ('finished', 'stopped') then {value} else 'NaN' end"


def _literal(value: object) -> str:
    return f"text '{value}'" if isinstance(value, str) else str(value)
