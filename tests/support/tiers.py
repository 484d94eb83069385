"""The tiers: cases of `make test`, and those of the slow tier, which `.ci/run` runs in shares."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: object, id: str | None = None) -> Any:
    """A parameter of the slow tier."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def one_in(number: int, cases: Iterable[Any], first: int = 0) -> list[Any]:
    """The cases, each a value or a tuple; all but every ``number``-th are in the slow tier."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=[] if place % number == first else pytest.mark.slow)
        for place, each in enumerate(values)
    ]


SHARES = 12


def share_of_commit(nodeids: Iterable[str], commit: int) -> list[str]:
    """The tests that `.ci/run` runs for the commit of this number, in their order.

    A hash of its name determines the share of a test. The order in a share changes with every round
    of `SHARES` commits, so that tests for which the time of one round was too short come earlier in
    other rounds.
    """

    def number(text: str) -> int:
        return int(hashlib.sha256(text.encode()).hexdigest(), 16)

    kept = [nodeid for nodeid in nodeids if number(nodeid) % SHARES == commit % SHARES]
    return sorted(kept, key=lambda nodeid: number(f"{commit // SHARES} {nodeid}"))
