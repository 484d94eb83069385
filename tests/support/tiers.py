"""The tiers: cases of `make test`, and those of the slow tier, which `.ci/run` runs in shares."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Container, Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """A parameter of the slow tier."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def one_in(number: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """The cases, each a value or a tuple; all but one in ``number`` are in the slow tier.

    Of every ``number`` cases from ``first`` on, the fast tier has the first, or the next one whose
    values it has less often: so it has each value of every axis as evenly as its number allows.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    names = [[(axis, _name(value)) for axis, value in enumerate(each)] for each in values]
    seen: Counter[tuple[int, object]] = Counter()
    fast: list[int] = []
    for place in range(first, len(values), number):
        rest = [other for other in [*range(place, len(values)), *range(place)] if other not in fast]
        fast.append(min(rest, key=lambda other: sum(seen[name] for name in names[other])))
        seen.update(names[fast[-1]])
    return [
        pytest.param(*each, marks=[] if place in fast else pytest.mark.slow)
        for place, each in enumerate(values)
    ]


def _name(value: object) -> object:
    """What tells a value from others of its axis."""
    return value if isinstance(value, Hashable) else id(value)


every_share = pytest.mark.every_share
"""A test of the slow tier whose expectation is a choice of the planner: a part of every share, so
that the commit that changes the choice meets it."""


def take_turns(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The product of all axes but the last, each combination with one value of the last.

    The values of the last axis take turns, so that each occurs with each value of every other axis.
    It is for factors that do not act on each other, such as the spec and the alignment of tensors.
    """
    *first, last = (list(axis) for axis in axes)
    made = itertools.product(*(enumerate(axis) for axis in first))
    return [
        (*(value for _, value in each), last[sum(place for place, _ in each) % len(last)])
        for each in made
    ]


def case_id(value: object) -> str | None:
    """The name of a spec's file; pytest's own id of any other value."""
    return value.stem if isinstance(value, Path) else None


SHARES = 6


def share_of_commit(nodeids: Iterable[str], commit: int, always: Container[str] = ()) -> list[str]:
    """The tests that `.ci/run` runs for the commit of this number, in their order.

    Args:
        always: those of every share, `every_share`.

    A hash of its name determines the share of a test. The order in a share changes with every round
    of `SHARES` commits, so that tests for which the time of one round was too short come earlier in
    other rounds. Those of every share come first in each: none is left out for want of time.
    """

    def number(text: str) -> int:
        return int(hashlib.sha256(text.encode()).hexdigest(), 16)

    kept = [
        nodeid
        for nodeid in nodeids
        if nodeid in always or number(nodeid) % SHARES == commit % SHARES
    ]
    return sorted(
        kept, key=lambda nodeid: (nodeid not in always, number(f"{commit // SHARES} {nodeid}"))
    )
