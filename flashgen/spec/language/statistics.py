"""Statistics: what a call returns beside its output, by sums or maxima over keys or queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from flashgen.spec.language.capture_names import MOST_LETTERS, is_part_of_names
from flashgen.spec.language.traced import Capture
from flashgen.spec.language.tracing import PickledMod, TracedMod, trace_statistic
from flashgen.spec.language.user_source import in_specs, refuse

Mod = Callable[..., object]


@in_specs
@dataclass(frozen=True)
class Statistic:
    """A sum or a maximum of a function of scores, over the keys of a row or over the queries.

    Attributes:
        over: "keys" for a number for each query, or "queries" for a number for each key.
        takes: "sum" or "max".
        expr: the function, an expression over SCORE, the modified score, and WEIGHT.
        captures: the scalars and tensors that it reads.
    """

    over: str
    takes: str
    expr: sympy.Expr
    captures: tuple[Capture, ...]
    trace: TracedMod

    @staticmethod
    def from_mod(over: str, takes: str, mod: Mod) -> Statistic:
        trace = mod.trace if isinstance(mod, PickledMod) else trace_statistic(mod)
        return Statistic(over, takes, trace.expr, trace.captures, trace)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that determines the values of the statistic."""
        return self.over, self.takes, self.expr, tuple(capture.key for capture in self.captures)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statistic) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[object, ...]:
        return Statistic.from_mod, (self.over, self.takes, PickledMod(self.trace))


@in_specs
def sum_over_keys(function: Mod) -> Statistic:
    """For each query, the sum of ``function`` over the keys that it keeps: [batch, heads, seq_q].

    Args:
        function: ``function(score, weight, b, h, q, k)``, traced like a score_mod. ``score`` is
            that after score_mod. ``weight`` is the share of the key in the output before dropout:
            P of the softmax, or with a weight_mod the weight, divided by the row's sum or divisor
            where the spec divides by it. The function is not evaluated where a score is removed,
            which adds nothing. A row without keys has the sum 0.

    Returns:
        A value of ``AttentionSpec(statistics={"name": ...})``. Calls return the float32 results,
        without gradients, in ``AuxOutput.statistics["name"]``.

    Raises:
        SpecError: the function cannot be traced.
    """
    return Statistic.from_mod("keys", "sum", function)


@in_specs
def max_over_keys(function: Mod) -> Statistic:
    """For each query, the largest value of ``function`` over the keys that it keeps.

    A row without keys has -inf. The arguments and the result are those of `sum_over_keys`.

    Raises:
        SpecError: the function cannot be traced.
    """
    return Statistic.from_mod("keys", "max", function)


@in_specs
def sum_over_queries(function: Mod) -> Statistic:
    """For each key and query head, the sum of ``function`` over the queries that keep the key.

    The result is [batch, heads_q, seq_k]: query heads that share a key head are not added up. The
    sum has a fixed order. The arguments are those of `sum_over_keys`.

    Raises:
        SpecError: the function cannot be traced.
    """
    return Statistic.from_mod("queries", "sum", function)


def statistics_of(option: object) -> tuple[tuple[str, Statistic], ...]:
    """The pairs of a spec's option ``statistics``.

    Raises:
        SpecError: the option is not a mapping of names to statistics.
    """
    if option is None:
        return ()
    pairs: Any = tuple(option.items()) if isinstance(option, Mapping) else option
    if not isinstance(pairs, tuple) or not all(map(_is_named, pairs)):
        kinds = type(option).__name__
        if isinstance(option, Mapping):
            kinds = ", ".join(f"{name!r}: {type(x).__name__}" for name, x in option.items())
        refuse(
            "statistics are named sums or maxima of functions",
            numbers=f"given {kinds:.100}; names have at most {MOST_LETTERS} letters of ASCII, "
            "digits and underscores",
            way_out='statistics={"spread": fg.sum_over_keys(lambda score, weight, *_: ...)}',
        )
    return tuple(pairs)


def _is_named(pair: Any) -> bool:
    name, statistic = pair
    return is_part_of_names(name) and isinstance(statistic, Statistic)
