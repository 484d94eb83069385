"""mma.sync instructions of a segment whose products are computed together.

An mma.sync with float32 accumulators is not executed at its place in the code: it is pending until
one of the results of any pending product is read, or the segment ends. By then, chains that
accumulate into the same registers and tiles that share operands have become one matrix product.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

Form = tuple[str, str, int]
"""The types of A and of B, and k of one instruction."""


class PendingProduct(NamedTuple):
    """An mma whose code has not been written yet; ``a`` to ``d`` are names of locals.

    Attributes:
        depth: 16-byte chunks along k.
    """

    form: Form
    depth: int
    a: tuple[str, ...]
    b: tuple[str, ...]
    c: tuple[str, ...]
    d: tuple[str, ...]


class PendingProducts:
    """The pending products of one segment.

    Attributes:
        names: locals that hold results of pending products.
    """

    def __init__(self) -> None:
        self._pending: list[PendingProduct] = []
        self.names: set[str] = set()

    def add(self, product: PendingProduct) -> None:
        """Appends a product."""
        self._pending.append(product)
        self.names.update(product.d)

    def flush(self, needed: set[str]) -> list[str]:
        """The statements of all pending products, which are pending no more.

        Args:
            needed: locals that are read later; the others need no value.
        """
        pending, self._pending = self._pending, []
        self.names = set()
        # An accumulator that several products start from must not be hidden inside a chain.
        uses = Counter(name for product in pending for name in product.c)
        needed = needed | {name for name, count in uses.items() if count > 1}
        chains: list[list[PendingProduct]] = []
        tail: dict[tuple[str, ...], int] = {}  # accumulator names -> chain that ends in them
        level_of_name: dict[str, int] = {}
        levels: list[int] = []
        for product in pending:
            index = tail.pop(product.c, None)
            joins = index is not None and not needed.intersection(product.c)
            if joins and index is not None and chains[index][0].form == product.form:
                chains[index].append(product)
            else:
                chains.append([product])
                below = max((level_of_name.get(name, -1) for name in product.c), default=-1)
                levels.append(1 + below)
                index = len(chains) - 1
            tail[product.d] = index
            for name in product.d:
                level_of_name[name] = levels[index]
        groups: dict[tuple[int, Form, int], list[list[PendingProduct]]] = {}
        for chain, level in zip(chains, levels, strict=True):
            key = (level, chain[0].form, sum(p.depth for p in chain))
            groups.setdefault(key, []).append(chain)
        lines = []
        for (_, form, depth), members in sorted(groups.items()):
            for grid in _grids(members):
                lines.append(_grid_statement(form, depth, grid))
        return lines


def tuple_of(names: list[str] | tuple[str, ...]) -> str:
    return "(" + ", ".join(names) + ",)"


def _sequence(chain: list[PendingProduct], side: str) -> tuple[str, ...]:
    return tuple(name for p in chain for name in (p.a if side == "a" else p.b))


def _grids(chains: list[list[PendingProduct]]) -> list[list[list[list[PendingProduct]]]]:
    """Splits chains into grids [m][n] in which rows share A and columns share B."""
    rows: dict[tuple[str, ...], dict[tuple[str, ...], list[PendingProduct]]] = {}
    extra = []
    for chain in chains:
        row = rows.setdefault(_sequence(chain, "a"), {})
        column = _sequence(chain, "b")
        if column in row:
            extra.append([[chain]])
        else:
            row[column] = chain
    by_columns: dict[tuple[tuple[str, ...], ...], list[list[list[PendingProduct]]]] = {}
    for row in rows.values():
        columns = tuple(sorted(row))
        by_columns.setdefault(columns, []).append([row[c] for c in columns])
    return [*by_columns.values(), *extra]


def _grid_statement(form: Form, depth: int, grid: list[list[list[PendingProduct]]]) -> str:
    a = [name for row in grid for name in _sequence(row[0], "a")]
    b = [name for chain in grid[0] for name in _sequence(chain, "b")]
    c = [name for row in grid for chain in row for name in chain[0].c]
    d = [name for row in grid for chain in row for name in chain[-1].d]
    tiles = (len(grid), len(grid[0]), depth)
    args = f"{tuple_of(a)}, {tuple_of(b)}, {tuple_of(c)}"
    return f"{', '.join(d)}, = mma_group(E, C, {form}, {tiles}, {args})"
