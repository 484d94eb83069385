"""Block-sparse layouts: which blocks of scores a spec computes, in addition to its mask.

FlashAttention's Algorithm 5 (Dao et al., 2022, section 3.3): kernels skip the blocks that the
layout leaves out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import sympy

from flashgen.shared.dtypes import POSITION_LIMIT, is_bool
from flashgen.shared.errors import SpecError
from flashgen.shared.signature import LAYOUT, LAYOUT_LISTS, LAYOUT_NAMES, LISTS
from flashgen.spec.language.function_identity import (
    bound,
    from_parts,
    identity_of,
    is_the_same_everywhere,
    outside,
    to_parts,
)
from flashgen.spec.language.symbols import B, K, Q
from flashgen.spec.language.sympy_functions import FloorDiv
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element
from flashgen.spec.language.user_source import in_specs, lines_of, user_location

_LINES = ("batch", "heads")
TENSORS = (
    Tensor(LAYOUT, (*_LINES, "blocks_q", "blocks_k"), "bool"),
    Tensor(LAYOUT_LISTS[0], (*_LINES, "blocks_q"), "int32"),
    Tensor(LAYOUT_LISTS[1], (*_LINES, "blocks_q", "blocks_k"), "int32"),
    Tensor(LAYOUT_LISTS[2], (*_LINES, "blocks_k"), "int32"),
    Tensor(LAYOUT_LISTS[3], (*_LINES, "blocks_k", "blocks_q"), "int32"),
)
"""The tensors of a block layout that kernels read: the live blocks as a matrix, and as lists with
counts, in ascending order, for each row and for each column of blocks."""

CHOSEN = (
    Tensor(LISTS[0], ("batch", "heads_kv", "groups"), "int32"),
    Tensor(LISTS[1], ("batch", "heads_kv", "groups", "most"), "int32"),
)
"""The tensors of calls whose queries choose their keys."""

HEADS = ("q", "kv")
"""Whose heads have lines of a layout: query heads; or key heads, with lists for all query heads of
one."""


@in_specs
@dataclass(frozen=True, eq=False)
class BlockSparse:
    """A block layout: which blocks of block_q x block_k scores are computed.

    Scores of all other blocks are masked out and cost nothing (Algorithm 5 of FlashAttention, Dao
    et al., 2022). Block (i, j) holds the queries q and keys k with ``q // block_q == i`` and
    ``k // block_k == j``, where q and k are global positions. A position outside the layout belongs
    to the nearest block. The block size is independent of the kernels' tiles, and the mask applies
    inside live blocks.

    Args:
        layout: ``layout(i, j)`` or ``layout(b, h, i, j)`` of ints, true where the block is live: a
            pure function, called once per block when a length is first used, with the values that
            it could reach when the BlockSparse was made. A copy of it is called for some blocks
            then and at each new length, with indices up to 127: a result that differs is an error.
            To choose tiles it is called for the blocks of up to 8,192 positions too, and may raise
            for those that no call has: random blocks then take the place of all.
            If None, each call gives the layout: ``op(q, k, v, layout=...)``.
        block_q: number of queries in a block, at least 1.
        block_k: number of keys in a block, at least 1.
        heads: "kv" where queries choose their keys: each call lists the blocks of keys for every
            group of block_q queries, which all query heads of a key head share:
            ``op(q, k, v, layout=fg.Layout.from_lists(kv_num_blocks, kv_indices))``. The rows of a
            tile are then the queries of one group in all of these heads, so that a tile computes
            what was listed. Groups and blocks are counted from the first row of q and of k; mask
            and score see positions as ever. Else "q".

    Raises:
        SpecError: layout is not such a function, a block size is not a positive integer, or heads
            is another word; lists and a function are given together.
    """

    layout: Callable[..., object] | None = None
    block_q: int = 64
    block_k: int = 64
    heads: str = HEADS[0]
    _arguments: int = field(init=False, repr=False, default=0)
    _bound: Any = field(init=False, repr=False, default=None)
    _outside: Hashable = field(init=False, repr=False, default=None)
    _sample: bytes = field(init=False, repr=False, default=b"")
    _key: Hashable = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for option, size in (("block_q", self.block_q), ("block_k", self.block_k)):
            number = isinstance(size, Integral) and not isinstance(size, bool)
            if not number or not 0 < size <= POSITION_LIMIT:
                raise SpecError(
                    f"{option} of a layout is the number of positions of a block",
                    where=user_location(),
                    numbers=f"{option} {size!r}; from 1 to {POSITION_LIMIT:,}",
                    way_out=f"{option}=64",
                )
            object.__setattr__(self, option, int(size))
        if (
            not isinstance(self.heads, str)
            or self.heads not in HEADS
            or (self.chooses and self.layout is not None)
        ):
            raise SpecError(
                'heads of a layout is "q", or "kv" where each call lists the blocks of its queries',
                where=user_location(),
                numbers=f"heads {self.heads!r}, layout {self.layout!r:.80}",
                way_out='heads="kv" without a function, and op(..., '
                "layout=fg.Layout.from_lists(kv_num_blocks, kv_indices))",
            )
        if self.layout is not None and not callable(self.layout):
            raise SpecError(
                "a layout is a function of block coordinates",
                where=user_location(),
                numbers=f"given a {type(self.layout).__name__}",
                way_out="layout=None, and the tensor with each call: op(q, k, v, layout=live)",
            )
        if self.layout is not None:
            object.__setattr__(self, "_arguments", _arguments(self.layout))
            object.__setattr__(self, "_bound", bound(self.layout))
            object.__setattr__(self, "_outside", outside(self.layout))
            object.__setattr__(self, "_sample", _sample(self))
        state = self._outside, self._sample
        key = identity_of(self.layout), state, self.block_q, self.block_k, self.heads
        object.__setattr__(self, "_key", key)

    @property
    def is_static(self) -> bool:
        """True if the layout is a function, which is known before any call."""
        return self.layout is not None

    @property
    def chooses(self) -> bool:
        """True if each call lists the blocks of keys for groups of queries."""
        return self.heads == HEADS[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that each call gives."""
        return () if self.is_static else CHOSEN if self.chooses else TENSORS

    @property
    def by_head(self) -> bool:
        """True if the function gives a layout for each batch entry and head."""
        return self._arguments == 4

    @property
    def where(self) -> str:
        """The ``file:line`` of the function."""
        assert self.layout is not None, "only a layout that is a function has a place in the source"
        return str(lines_of(self.layout, ""))

    @property
    def described(self) -> str:
        """The block layout in words, for the printed plan."""
        if self.chooses:
            return f"lists of blocks of {self.block_k} keys for groups of {self.block_q} queries"
        origin = "given with the call" if self.layout is None else self._origin
        return f"{origin}, blocks of {self.block_q} queries x {self.block_k} keys"

    @property
    def _origin(self) -> str:
        name = getattr(self.layout, "__name__", type(self.layout).__name__)
        return f"{name} at {self.where}"

    def live_at(self, head: sympy.Expr) -> sympy.Basic:
        """The condition on b, q, k and the query head that the score's block is live."""
        assert not self.chooses, "calls with lists are computed by those of other specs"
        row, column = FloorDiv(Q, self.block_q), FloorDiv(K, self.block_k)
        return sympy.Ne(Element(TENSORS[0].symbol, B, head, row, column), 0)

    def blocks(self, q_end: int, k_end: int) -> tuple[int, int]:
        """Rows and columns of blocks for global positions below the ends; at least 1 each."""
        return max(1, -(-q_end // self.block_q)), max(1, -(-k_end // self.block_k))

    def shape(self, batch: int, heads: int, q_end: int, k_end: int) -> tuple[int, int, int, int]:
        """The shape of a static layout's table; batch and heads are 1 unless `by_head`."""
        lines = (batch, heads) if self.by_head else (1, 1)
        return *lines, *self.blocks(q_end, k_end)

    def table(self, batch: int, heads: int, rows: int, columns: int) -> bytes:
        """The table of a static layout: a byte for each block, 1 where it is live.

        Returns:
            [batch, heads, rows, columns] where it is `by_head`, else [1, 1, rows, columns].

        Raises:
            SpecError: the function raises an exception or returns something other than a bool.
        """
        lines = (batch, heads) if self.by_head else (1, 1)
        return _table(self, *lines, rows, columns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSparse) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        sizes = f"block_q={self.block_q}, block_k={self.block_k}"
        sizes += f", heads={self.heads!r}" if self.chooses else ""
        if self.layout is None:
            return f"BlockSparse({sizes})"
        return f"BlockSparse({self._origin}, {sizes})"

    def __deepcopy__(self, memo: object) -> BlockSparse:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the code of the function, so that lambdas and local functions can be pickled."""
        function = self.layout if is_the_same_everywhere(self.layout) else to_parts(self._bound)
        return _restored, (function, self.block_q, self.block_k, self.heads)


def _restored(layout: Any, block_q: int, block_k: int, heads: str) -> BlockSparse:
    return BlockSparse(from_parts(layout), block_q, block_k, heads)


def check_names(names: list[str], where: str) -> None:
    """Raises SpecError if a capture has the name of a tensor of the block layout."""
    clashes = sorted(set(names) & {*LAYOUT_NAMES, *LISTS})
    if clashes:
        raise SpecError(
            f"the name {clashes[0]!r} belongs to the block-sparse layout of the spec",
            where=where,
            numbers=f"captured: {', '.join(names)}; in use: {', '.join(LAYOUT_NAMES)}",
            way_out=f"another name for the captured tensor or scalar, as in 'my_{clashes[0]}'",
        )


def _arguments(layout: Callable[..., object]) -> int:
    """The number of arguments of the function: 2 for (i, j) or 4 for (b, h, i, j)."""
    try:
        signature = unwrapped = inspect.signature(layout)
    except (TypeError, ValueError):  # a builtin function without a signature
        return 2
    with contextlib.suppress(ValueError):  # functools.lru_cache has none of its own
        unwrapped = inspect.signature(layout, follow_wrapped=False)
    accepted = [count for count in (2, 4) if _takes(unwrapped, count)]
    if len(accepted) == 2:  # such as *args of a decorator
        accepted = [count for count in accepted if _takes(signature, count)]
    if accepted:
        return accepted[0]
    raise SpecError(
        "a layout takes 2 or 4 arguments by position",
        where=str(lines_of(layout, "")),
        numbers=f"it takes {signature}; it is called with (i, j) or (b, h, i, j)",
        way_out="def layout(i, j): ...",
    )


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _table(sparse: BlockSparse, batch: int, heads: int, rows: int, columns: int) -> bytes:
    assert sparse.layout is not None, "a layout that is an argument of the call is not a function"
    if outside(sparse.layout) != sparse._outside or _sample(sparse) != sparse._sample:
        raise SpecError(
            "a value that a layout reads has changed since the spec was made, and the spec has no "
            "copy of it: an attribute of a class or a module, a file, the environment",
            where=sparse.where,
            numbers=f"at a call with {rows} x {columns} blocks",
            way_out="a number in a variable, a default or an object, which the spec keeps; or a "
            "new spec",
        )
    table = bytearray()
    for line in range(batch * heads):
        lead = divmod(line, heads) if sparse.by_head else ()
        for i in range(rows):
            table += bytes([_is_live(sparse, (*lead, i, j)) for j in range(columns)])
    return bytes(table)


_SAMPLED = (
    *((i, j) for i in range(8) for j in range(8)),
    *((i, 0) for i in range(8, 128)),
    *((0, j) for j in range(8, 128)),
)
"""Blocks for which a layout is compared with what it was when the spec was made."""


def _sample(sparse: BlockSparse) -> bytes:
    """What a layout returns for some blocks, whether a call has them or not.

    No inspection of a function tells all that it reads, such as files and the environment.
    """
    layout, sample = bound(sparse._bound), bytearray()
    for lead in ((0, 0), (0, 1), (1, 0)) if sparse.by_head else ((),):
        for indices in _SAMPLED:
            try:
                live = layout(*lead, *indices)
                sample.append(bool(live) if is_bool(live) else 2)
            except Exception:
                sample.append(3)
    return bytes(sample)


def _is_live(sparse: BlockSparse, indices: tuple[int, ...]) -> bool:
    assert sparse.layout is not None
    wrong, cause = "", None
    try:
        live: Any = sparse._bound(*indices)
        if is_bool(live):
            return bool(live)
        wrong = f"returned {live!r}"[:80]
    except Exception as error:
        wrong, cause = f"raised {type(error).__name__}: {error}", error
    raise SpecError(
        f"a layout returns for each block whether it is live, but this one {wrong}",
        where=sparse.where,
        numbers=f"called with {indices}",
        way_out="return True or False, as in return j <= i",
    ) from cause
