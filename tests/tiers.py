"""Which cases are in `make test`, and which are in the slow tier alone."""

from __future__ import annotations

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
