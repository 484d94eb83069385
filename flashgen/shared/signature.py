"""The signature of a spec's calls as plain values: names, dtypes, dimensions and options.

`flashgen.spec.language.signature.signature_of` makes a signature from an AttentionSpec. It holds no
expressions, so that running a call needs no sympy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from flashgen.shared.random_numbers import RANDOM_STATE

BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_k")
"""Captured tensors of a spec with packed sequences: the first row of each sequence, and the row
after the last one."""

PAGE_NAMES = ("page_table", "cache_seqlens")
"""Captured tensors of a spec with a paged cache: int32 [batch, max_pages], the pages of each
sequence, and int32 [batch], its number of keys."""

SCALE_NAMES = ("k_scale", "v_scale")
"""Captured tensors of a spec whose cache has codes: float32, the factors of the codes of K and V.
Calls give them by any of `SCALE_DIMS`; kernels see them expanded to [pages, heads_kv, page_size].
"""

SCALE_DIMS = ("pages", "cache_heads", "page_size")
"""The dimensions of these tensors. The heads belong to the caches of a call, not of a whole."""

OFFSETS = ("q_offset", "k_offset")
"""Arguments of every operator: the global positions of the first query and of the first key. Where
a call gives a tensor, its spec has a captured tensor of that name, of dims (batch)."""

WHOLE = ("h_offset", "whole_heads", "whole_seq_q", "whole_seq_k")
"""Run-time scalars of a spec whose calls compute a part of a whole: the number of the first query
head, and the numbers of query heads, queries and keys of the whole, which mods see."""

SPLIT = "split_size"
"""Run-time scalar of a spec whose calls split the keys: the number of keys between the global
positions at which splits begin."""


FIRST_ROW = "first_row"
ROWS = ("row_lse", "row_slope")
"""The further arguments of kernels of statistics: the position of the first query, a run-time
scalar, and captured tensors with a number for each row of queries: the normaliser that divides
weights, and the part of the derivative of a statistic that all scores of a row share."""


AXES = ("batch", "heads")
"""The first two dimensions of q by the names that they have in dims of captured tensors."""

KEY_HEADS = "heads_kv"
"""The second dimension of k and v, by that name."""

PART_HEADS = "row_heads"
"""The second dimension of `ROWS` in calls on a part of a whole: "heads" belong to the whole."""


def heads_of(scalars: Mapping[str, Any], heads: int) -> tuple[int, int]:
    """The number of a call's first query head, and the number of query heads, of its whole.

    Args:
        scalars: the scalars of the call, by name.
        heads: the query heads of the call.
    """
    return int(scalars.get(WHOLE[0], 0)), int(scalars.get(WHOLE[1], heads))


LAYOUT = "layout"
LAYOUT_NAMES = (
    LAYOUT,
    "layout_row_counts",
    "layout_row_blocks",
    "layout_column_counts",
    "layout_column_blocks",
)
"""Captured tensors of a block layout: the live blocks, and lists of them by row and by column."""

LAYOUT_LISTS = LAYOUT_NAMES[1:]
"""The lists are computed from the live blocks; calls do not give them."""


LISTS = ("kv_num_blocks", "kv_indices")
"""Captured tensors of a spec whose queries choose their keys: int32 [batch, heads_kv or 1, groups
of queries], the listed blocks of each group, and int32 [..., most], the blocks."""

OWNED, LISTED = "owned_block", "listed_blocks"
CHOICE = (
    *("choice_first", "choice_batch", "choice_heads", "choice_seq_q", "choice_seq_k"),
    *("choice_group", "choice_rows"),
)
"""The arguments of the calls that compute a call with chosen keys: int32 [batch, 4], the batch
entry, the first query head, the own block and the key head, counted over all batch entries, of each
owner of a list; int32 [batch, most], the blocks in its list; and run-time scalars, the position of
the first query of the call that is computed, its sizes, the query heads of a key head, and the rows
of a group of queries."""

LENGTHS, FIRST_QUERIES, ROW_SINK = "choice_lengths", "choice_q_offset", "choice_sink"
LSE_OF_LISTS = "choice_lse"
"""Of these calls too: the lengths of the sequences and the positions of the first queries, where
they are tensors, the logit of the sink of each row, and the normaliser of each row of the groups,
beside which the spec may have `ROWS` of its own."""


def tangent_names(learned: Iterable[str], captures: Iterable[str]) -> dict[str, str]:
    """The name of the tangent of each learned tensor, which no other capture of its spec has.

    It is "<name>_tangent", with underscores after it where that name is taken.
    """
    used_names, names = set(captures), {}
    for name in learned:
        tangent = f"{name}_tangent"
        while tangent in used_names:
            tangent += "_"
        used_names.add(tangent)
        names[name] = tangent
    return names


_LIKE_A_FIELD = re.compile(r"_(?:size|stride)_[0-9]+_*\Z")


def field_stem(tensor: str) -> str:
    """The name of a captured tensor in fields of kernels: ``c_<stem>``, ``c_<stem>_size_0``.

    A tensor "ids_size_0" has another stem than its name, so that no two tensors share a field.
    """
    return f"{tensor}_" if _LIKE_A_FIELD.search(tensor) else tensor


def is_by_row(dims: tuple[str | int, ...]) -> bool:
    """Whether a sink of these dims differs between the rows of a head, or between batch entries."""
    return not {"batch", "seq_q"}.isdisjoint(dims)


@dataclass(frozen=True)
class ScalarArgument:
    """A run-time scalar: the facts of an `fg.Scalar`."""

    name: str
    dtype: str
    minimum: float | None


@dataclass(frozen=True)
class TensorArgument:
    """A captured tensor: the facts of an `fg.Tensor`."""

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    grad: bool

    @property
    def by_row(self) -> bool:
        """Whether a sink of these dims has its logits by row."""
        return is_by_row(self.dims)

    def __str__(self) -> str:
        learned = ", grad=True" if self.grad else ""
        return f"Tensor({self.name!r}, {self.dims!r}, {self.dtype!r}{learned})"


class BlockLayoutFacts(Protocol):
    """The block layout of a spec: the facts of an `fg.BlockSparse` that the runtime uses."""

    def __hash__(self) -> int: ...
    @property
    def block_q(self) -> int: ...
    @property
    def block_k(self) -> int: ...
    @property
    def is_static(self) -> bool:
        """Whether the layout is a function, so that calls give no blocks."""

    @property
    def chooses(self) -> bool:
        """Whether each call lists the blocks of keys for groups of queries."""

    @property
    def by_head(self) -> bool:
        """Whether the function depends on the batch entry and the head."""

    def shape(self, batch: int, heads: int, q_end: int, k_end: int) -> tuple[int, int, int, int]:
        """Batch entries, heads, rows and columns of blocks of a layout that is a function."""

    def table(self, batch: int, heads: int, rows: int, columns: int) -> bytes:
        """The values of the function: a byte for each block, 1 where the block is computed."""


@dataclass(frozen=True)
class ZeroDivision:
    """A division of integers whose divisor the scalars and sizes of a call can make 0.

    Attributes:
        text: the division as Python text.
        names: the scalars and sizes that decide.
        reached: the condition under which it divides by 0: a name, a number, or the name of a
            sympy class followed by its arguments.
    """

    text: str
    names: tuple[str, ...]
    reached: object


@dataclass(frozen=True)
class CallSignature:
    """The arguments that a call of a spec has, and the facts that its checks use.

    Attributes:
        name: the name of the spec.
        head_dim, head_dim_v: lengths of q and k vectors, and of v vectors.
        dtype: the dtype of q, k and v; None where k and v have that of q.
        out_dtype: the dtype of the output; None for that of q.
        scale: factor on q.k; None for 1 / sqrt(head_dim).
        dropout: whether kernels can drop elements of P.
        packed: whether a call has several sequences in one batch entry.
        scalars, tensors: run-time scalars and captured tensors, in the order of their arguments.
        sink: the captured tensor that is the sink; None without a sink.
        block_sparse: the block layout; None where all blocks are computed.
        reads_batch: whether the mask or the score depends on the batch index or the batch size.
        zero_divisions: divisions that a call must not make divisions by 0.
        offsets: the names in `OFFSETS` of captured tensors.
        split: whether the keys are split, by the scalar `SPLIT`.
        folds: whether one kernel joins the results over the splits, so that none merges them.
        returns_maxima: whether a call has a third result, the largest score of each row.
        paged: whether keys and values are in the pages of a cache. Where packed is true too, only
            the queries are packed.
        kv_dtype: the dtype of the codes in the caches, one of `shared.dtypes.CACHE_DTYPES`; None
            where keys and values have the dtype of q.
        shared_kv: whether the values are the first columns of the keys: calls have one tensor, and
            operators get these columns of k as v.
        normalize: the divisor of the weighted sums of v: "softmax"; "sum" for the sum of the
            weights, or "none". The second result of a call is then that sum, or 0. Statistics have
            "total" and "max", with which it is the sum or the largest of the weights, not rounded,
            and the first has no meaning.
        divisible: the axes in `AXES` whose parts can be computed like calls of their own, with
            the same part of captured tensors: mask, score and block layout use the index only to
            read the dimensions of that name, and read each of them by the index.
        group: the number of query heads of a key head with which heads are divisible, because
            dimensions "heads_kv" are read by h // group; 0 where all numbers will do.
    """

    name: str
    head_dim: int
    head_dim_v: int
    dtype: str | None
    out_dtype: str | None
    scale: float | None
    dropout: bool
    packed: bool
    scalars: tuple[ScalarArgument, ...]
    tensors: tuple[TensorArgument, ...]
    sink: TensorArgument | None
    block_sparse: BlockLayoutFacts | None
    reads_batch: bool
    zero_divisions: tuple[ZeroDivision, ...] = ()
    offsets: tuple[str, ...] = ()
    split: bool = False
    folds: bool = False
    returns_maxima: bool = False
    paged: bool = False
    kv_dtype: str | None = None
    shared_kv: bool = False
    normalize: str = "softmax"
    divisible: tuple[str, ...] = ()
    group: int = 0

    @property
    def lse_of_nothing(self) -> float:
        """The second result of a row without keys, where there is no sink."""
        return -math.inf if self.normalize in ("softmax", "max") else 0.0

    @property
    def boundaries(self) -> tuple[str, ...]:
        """The names in `BOUNDARIES` that calls give."""
        return BOUNDARIES[: 1 if self.paged else 2] if self.packed else ()

    @cached_property
    def learned(self) -> tuple[TensorArgument, ...]:
        """The captured tensors that have a gradient."""
        return tuple(tensor for tensor in self.tensors if tensor.grad)

    @cached_property
    def tangent_names(self) -> dict[str, str]:
        """The names of the tangents of learned tensors, by the names of the tensors."""
        captures = [*(x.name for x in self.tensors), *(x.name for x in self.scalars)]
        return tangent_names((x.name for x in self.learned), captures)

    @property
    def draws(self) -> bool:
        """Whether the mods call fg.rand."""
        return any(tensor.name == RANDOM_STATE for tensor in self.tensors)

    @property
    def static_layout(self) -> BlockLayoutFacts | None:
        """The block layout where it is a function, else None."""
        sparse = self.block_sparse
        return sparse if sparse is not None and sparse.is_static else None

    @property
    def call_layout(self) -> BlockLayoutFacts | None:
        """The block layout where each call gives its blocks, else None."""
        sparse = self.block_sparse
        return sparse if sparse is not None and not (sparse.is_static or sparse.chooses) else None

    @property
    def choice(self) -> BlockLayoutFacts | None:
        """The blocks where each call lists those that groups of queries choose, else None."""
        sparse = self.block_sparse
        return sparse if sparse is not None and sparse.chooses else None


@dataclass(frozen=True)
class GradientTerm:
    """An element of a learned tensor that the score function reads.

    Attributes:
        tensor: name of the learned tensor.
        summed_over: the scores whose contributions a kernel adds before it writes to memory:
            "element" for one score, "row", "column", or "block" for all scores of a block.
        indices: for each dimension of the tensor the index "b", "h", "q" or "k" that addresses it,
            or None where another expression addresses it.
    """

    tensor: str
    summed_over: str
    indices: tuple[str | None, ...]
