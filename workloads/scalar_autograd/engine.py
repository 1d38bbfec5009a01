"""Derivatives by walking a graph backwards, on single numbers. Knows no tensor and keeps no state between two walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Accumulate = Literal["add", "assign"]


def _of_leaf(upstream: float) -> tuple[float, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class Value:
    """A number that remembers what it was computed from.

    `pull` takes the derivative of the output by this number and returns what that contributes to each of `inputs`.
    """

    data: float
    inputs: tuple[Value, ...] = ()
    pull: Callable[[float], tuple[float, ...]] = _of_leaf

    def __add__(self, other: Value | float) -> Value:
        right = as_value(other)
        return Value(self.data + right.data, (self, right), lambda upstream: (upstream, upstream))

    def __mul__(self, other: Value | float) -> Value:
        right = as_value(other)

        def pull(upstream: float) -> tuple[float, ...]:
            return upstream * right.data, upstream * self.data

        return Value(self.data * right.data, (self, right), pull)

    def __pow__(self, exponent: float) -> Value:
        def pull(upstream: float) -> tuple[float, ...]:
            return (upstream * exponent * self.data ** (exponent - 1),)

        return Value(self.data**exponent, (self,), pull)

    def relu(self) -> Value:
        """max(0, x); its derivative at 0 is taken as 0, as torch does."""
        kept = 0.0 if self.data < 0 else self.data  # keeps a NaN, which max(0, x) would lose
        return Value(kept, (self,), lambda upstream: (upstream * (self.data > 0),))

    def __neg__(self) -> Value:
        return self * -1

    def __sub__(self, other: Value | float) -> Value:
        return self + (-other)

    __radd__, __rmul__ = __add__, __mul__


def as_value(number: Value | float) -> Value:
    return number if isinstance(number, Value) else Value(number)


def gradients(output: Value, accumulate: Accumulate = "add") -> dict[Value, float]:
    """The derivative of `output` by every number it was computed from, itself included.

    A number that is used twice receives two contributions. "assign" keeps the later one only: a silent bug, on purpose.
    """
    order = topological_order(output)
    gradient = dict.fromkeys(order, 0.0)
    gradient[output] = 1.0
    for node in reversed(order):
        for source, contribution in zip(node.inputs, node.pull(gradient[node]), strict=True):
            gradient[source] = contribution + (gradient[source] if accumulate == "add" else 0.0)
    return gradient


def topological_order(output: Value) -> list[Value]:
    """Every number once, each after all its inputs. Depth first; no recursion, since sums make long chains."""
    order: list[Value] = []
    seen = {output}
    path: list[tuple[Value, Iterator[Value]]] = [(output, iter(output.inputs))]
    while path:
        node, inputs = path[-1]
        fresh = next((source for source in inputs if source not in seen), None)
        if fresh is None:
            order.append(node)
            path.pop()
        else:
            seen.add(fresh)
            path.append((fresh, iter(fresh.inputs)))
    return order
