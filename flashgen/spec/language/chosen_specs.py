"""The specs whose calls compute a call in which queries choose their keys.

A group of queries, in all query heads of a key head, lists the blocks of keys that it attends to.
Each group is a sequence of its own to the kernels: its rows are the queries of one head, ordered by
query and then by head, and its keys are the pages of a cache that its list names. The gradients of
keys and values are the same with exchanged roles: each block of keys is a sequence of rows, whose
list names the groups that chose it. Where blocks have few keys, the keys of each group are copied
one after another instead, for the kernel of dK and dV. All of it is in the expressions of mask and
score: positions and heads are read from the lists, and kernels are those of any call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import sympy

from flashgen.shared.signature import (
    CHOICE,
    FIRST_QUERIES,
    LENGTHS,
    LISTED,
    LSE_OF_LISTS,
    OFFSETS,
    OWNED,
    PAGE_NAMES,
    ROW_SINK,
)
from flashgen.spec.language.block_layout import CHOSEN, BlockSparse
from flashgen.spec.language.block_layout import TENSORS as LAYOUT_TENSORS
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.signature import partial, substituted_options, with_options
from flashgen.spec.language.spec import PAGES, AttentionSpec
from flashgen.spec.language.statistic_specs import share_of, without_sink
from flashgen.spec.language.symbols import BATCH, HEADS, SCORE, SEQ_K, SEQ_Q, B, H, K, Q
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from flashgen.spec.language.tensor import SIZES, Tensor
from flashgen.spec.language.tensor_elements import Element
from flashgen.spec.language.tracing import weighed

FIRST, WHOLE_BATCH, WHOLE_HEADS, WHOLE_SEQ_Q, WHOLE_SEQ_K, GROUP, ROWS_OF_GROUP = SCALARS = tuple(
    Scalar.reserved(name) for name in CHOICE
)

DIM_OF_CALL = "choice_"
"""What the names of the sizes of the computed call begin with, among those of the calls that
compute it."""

_OWNED = Tensor.reserved(OWNED, ("batch", 4), "int32")
_LISTED = Tensor.reserved(LISTED, ("batch", "listed"), "int32")
_LSE = Tensor.reserved(LSE_OF_LISTS, ("lines", "groups", "rows"), "float32")
_FIRST_ROW = Tensor.reserved(OFFSETS[0], ("batch",), "int32")
_SINK = Tensor.reserved(ROW_SINK, ("batch", "seq_q"), "float32")


@functools.lru_cache(maxsize=1024)
def with_layout(spec: AttentionSpec) -> AttentionSpec:
    """The spec with a block layout in place of lists, whose blocks are counted from query 0.

    The position of the first query is the scalar `CHOICE[0]`, or an element for each batch entry.
    """
    sparse = _lists(spec)
    hidden = {tensor.name for tensor in CHOSEN}
    tensors = tuple(x for x in spec.tensors if x.name not in (*hidden, OFFSETS[0]))
    # Queries of paged caches would come last.
    own_first = (_FIRST_ROW,) if spec.paged else ()
    return with_options(
        spec,
        tensors=(*tensors, *_first_of_entries(spec), *own_first, *LAYOUT_TENSORS),
        scalars=(*spec.scalars, FIRST),
        block_sparse=BlockSparse(None, sparse.block_q, sparse.block_k),
        name=f"{spec.name}_in_blocks",
        **substituted_options(spec, {Q: Q + _first_query(spec, B), **_renamed_first(spec)}),
    )


@functools.lru_cache(maxsize=1024)
def by_groups(spec: AttentionSpec, ragged: tuple[bool, bool]) -> AttentionSpec:
    """The spec of calls in which each group of queries is a sequence.

    Args:
        ragged: whether the last group lacks queries, and the last block lacks keys.
    """
    inner = by_listed_keys(spec, ragged)
    sink = None if spec.sink is None else _SINK
    extra = () if sink is None else (sink,)
    return with_options(
        inner,
        tensors=(*inner.tensors, *PAGES, *extra, _FIRST_ROW),
        paged=True,
        shared_kv=spec.shared_kv,
        sink=sink,
        name=f"{spec.name}_by_groups",
    )


@functools.lru_cache(maxsize=1024)
def by_listed_keys(spec: AttentionSpec, ragged: tuple[bool, bool]) -> AttentionSpec:
    """The spec of calls in which each group of queries is a sequence, and the keys of its list are
    copied one after another. Gradients are computed as in a call without lists.

    Args:
        ragged: whether the last group lacks queries, and whether some copied keys are no keys, such
            as the rest of a list.
    """
    sparse = _lists(spec)
    group, block = _owned(2), _listed(sparse.block_k)
    query = group * sparse.block_q + FloorDiv(Q, GROUP.expr)
    key = block * sparse.block_k + FloorMod(K, sparse.block_k)
    options = _options_in_call(spec, query, key, FloorMod(Q, GROUP.expr), ragged)
    tensors: Any = options.pop("tensors")
    return with_options(
        spec,
        **options,
        tensors=(*tensors, _OWNED, _LISTED),
        shared_kv=False,
        sink=None,
        name=f"{spec.name}_by_listed_keys",
    )


@functools.lru_cache(maxsize=1024)
def by_keys(spec: AttentionSpec, ragged: tuple[bool, bool]) -> AttentionSpec:
    """The spec of calls in which a block of keys is a sequence of rows. Its keys are the queries of
    the groups that chose the block: the output for dO in place of V is dV, and dQ for dO and V
    exchanged is dK.

    Weights are divided by the normaliser of the spec's rows, which is read. dQ of such a call takes
    dP for the derivative of a weight: delta is subtracted by further columns of dO and V.
    """
    sparse = _lists(spec)
    rows = ROWS_OF_GROUP.expr
    row, group = FloorMod(K, rows), _listed(rows)
    key = _owned(2) * sparse.block_k + Q
    query = group * sparse.block_q + FloorDiv(row, GROUP.expr)
    options = _options_in_call(spec, query, key, FloorMod(row, GROUP.expr), ragged)
    tensors: Any = options.pop("tensors")
    inner = with_options(spec, **options)
    lse = Element(_LSE.symbol, _owned(3), group, row)
    score = weighed(inner.modified, share_of(inner, lse, divides=True))
    read_lse = (_LSE,) if _LSE.symbol in score.free_symbols else ()
    return with_options(
        inner,
        score=score,
        modified=score,
        weight=SCORE,
        weight_line=None,
        normalize="none",
        tensors=(*tensors, _OWNED, _LISTED, *read_lse, *PAGES, _FIRST_ROW),
        paged=True,
        shared_kv=False,
        sink=None,
        name=f"{spec.name}_by_keys",
    )


@functools.lru_cache(maxsize=1024)
def value_gradients(spec: AttentionSpec, ragged: tuple[bool, bool]) -> AttentionSpec:
    """`by_keys` with an output in float32: parts of dV, which are added."""
    return partial(by_keys(spec, ragged))


def spec_of_kernels(spec: AttentionSpec) -> AttentionSpec:
    """The spec whose forward kernel, and whose kernel of dQ, compute calls of ``spec``."""
    return by_groups(spec, (False, False)) if spec.chooses else spec


def _lists(spec: AttentionSpec) -> BlockSparse:
    sparse = spec.block_sparse
    assert sparse is not None, "a spec whose queries choose their keys"
    assert sparse.chooses, "a spec whose queries choose their keys"
    return sparse


def _owned(column: int) -> sympy.Expr:
    return Element(_OWNED.symbol, B, sympy.Integer(column))


def _listed(rows: sympy.Expr | int) -> sympy.Expr:
    return Element(_LISTED.symbol, B, FloorDiv(K, rows))


def _first_query(spec: AttentionSpec, entry: sympy.Expr) -> sympy.Expr:
    """The position of the first query of a batch entry of the spec's call."""
    if any(tensor.name == OFFSETS[0] for tensor in spec.tensors):
        return Element(_first_of_entries(spec)[0].symbol, entry)
    return SEQ_K - SEQ_Q if spec.paged else FIRST.expr


def _first_of_entries(spec: AttentionSpec) -> tuple[Tensor, ...]:
    """The positions of the first queries of batch entries, by another name."""
    return tuple(
        Tensor.reserved(FIRST_QUERIES, ("entries",), x.dtype)
        for x in spec.tensors
        if x.name == OFFSETS[0]
    )


def _renamed_first(spec: AttentionSpec) -> dict[sympy.Basic, sympy.Basic]:
    """The tensor that statistics read to find the row of a query, by its other name."""
    offsets = [tensor.symbol for tensor in spec.tensors if tensor.name == OFFSETS[0]]
    return {one: other.symbol for one, other in zip(offsets, _first_of_entries(spec), strict=True)}


def _options_in_call(
    spec: AttentionSpec,
    query: sympy.Expr,
    key: sympy.Expr,
    head: sympy.Expr,
    ragged: tuple[bool, bool],
) -> dict[str, object]:
    """The options of a spec whose mods see the positions of the call that is computed.

    Args:
        query, key: the row of q and of k.
        head: the query head, counted from the first one of the key head.
    """
    entry = _owned(0)
    seq_k: sympy.Expr = WHOLE_SEQ_K.expr
    lengths: tuple[Tensor, ...] = ()
    if spec.paged:
        lengths = (Tensor.reserved(LENGTHS, ("entries",), "int32"),)
        seq_k = Element(lengths[0].symbol, entry)
    first = _first_query(spec, entry).xreplace({SEQ_K: seq_k, SEQ_Q: WHOLE_SEQ_Q.expr})
    seen: Mapping[sympy.Basic, sympy.Basic] = {
        B: entry,
        H: _owned(1) + head,
        Q: first + query,
        K: key,
        BATCH: WHOLE_BATCH.expr,
        HEADS: WHOLE_HEADS.expr,
        SEQ_Q: WHOLE_SEQ_Q.expr,
        SEQ_K: seq_k,
        **_renamed_first(spec),
    }
    options = substituted_options(spec, seen)
    bounds = [query < WHOLE_SEQ_Q.expr] if ragged[0] else []
    bounds += [key < seq_k] if ragged[1] or spec.paged else []
    # A block that is no block of the call has no keys.
    mask = sympy.And(*bounds, options["mask"])
    hidden = {*(tensor.name for tensor in CHOSEN), *PAGE_NAMES, *OFFSETS}
    tensors = (_renamed(x) for x in without_sink(spec).tensors if x.name not in hidden)
    return options | {
        "mask": mask,
        "block_sparse": None,
        "statistics": (),
        "scalars": (*spec.scalars, *SCALARS),
        "tensors": (*tensors, *_first_of_entries(spec), *lengths),
    }


def _renamed(tensor: Tensor) -> Tensor:
    """The tensor without a gradient, with sizes of its own in the call that reads it."""
    dims = tuple(f"{DIM_OF_CALL}{dim}" if dim in SIZES else dim for dim in tensor.dims)
    return Tensor.reserved(tensor.name, dims, tensor.dtype)  # calls may have such names
