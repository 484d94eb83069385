"""The figures of two reports beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashgen.views.values import Figure, Side


@dataclass(frozen=True)
class Difference:
    """A figure of two reports; None where one of them lacks it.

    Attributes:
        change: the second divided by the first, less 1; None where that says nothing.
    """

    name: str
    unit: str
    origin: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first - 1

    @property
    def equal(self) -> bool:
        return self.first == self.second


@dataclass(frozen=True)
class Compared:
    """The figures of a kernel of both reports, or of their results."""

    title: str
    rows: tuple[Difference, ...]


def compared(first: Side, second: Side) -> tuple[Compared, ...]:
    """The figures of all kernels of either side, kernels of one role in one table."""
    found = []
    one, two = ({pane.title: pane.figures for pane in side.kernels} for side in (first, second))
    for title in dict.fromkeys([*one, *two]):
        rows = _rows(one.get(title, ()), two.get(title, ()))
        found.append(Compared(title, tuple(rows)))
    ours, theirs = (
        [Figure(f"largest error of {each.name}", each.verdict.max_error) for each in side.errors]
        for side in (first, second)
    )
    results = tuple(_rows(ours, theirs))
    return (*found, Compared("results", results)) if results else tuple(found)


def _rows(ours: Sequence[Figure], theirs: Sequence[Figure]) -> Iterator[Difference]:
    at, other = ({each.name: each for each in figures} for figures in (ours, theirs))
    for name in dict.fromkeys([*at, *other]):
        one, two = at.get(name), other.get(name)
        known = one or two
        assert known is not None, "the name is of one of them"
        yield Difference(
            name,
            known.unit,
            known.origin,
            None if one is None else one.value,
            None if two is None else two.value,
        )
