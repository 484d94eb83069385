"""What calls need of a spec: its signature as plain values, and variants of the spec.

A variant has another dtype, no dropout, fewer gradients, offsets that are tensors, or an output in
float32, with the same traced expressions; or its calls are inside a whole, or split the keys.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from flashgen.shared.errors import SpecError
from flashgen.shared.signature import (
    AXES,
    KEY_HEADS,
    LAYOUT_NAMES,
    LISTS,
    OWNED,
    PAGE_NAMES,
    PART_HEADS,
    ROWS,
    SCALE_NAMES,
    SPLIT,
    WHOLE,
    CallSignature,
    ScalarArgument,
    TensorArgument,
    ZeroDivision,
)
from flashgen.shared.signature import BOUNDARIES as BOUNDARY_NAMES
from flashgen.shared.split_choice import ALL_SPLITS
from flashgen.spec.language.divisors import divisions_by_zero
from flashgen.spec.language.lets import Let, nodes_of, substituted
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.spec import BOUNDARIES, AttentionSpec
from flashgen.spec.language.symbols import BATCH, HEADS, SEQ_K, SEQ_Q, B, H
from flashgen.spec.language.sympy_functions import FloorDiv
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element, TensorSymbol


@functools.lru_cache(maxsize=1024)
def signature_of(spec: AttentionSpec) -> CallSignature:
    """The signature of calls of ``spec``: sizes, options, scalars and tensors, without sympy."""
    assert spec.name is not None, "set when a spec is made"
    assert spec.head_dim_v is not None, "set when a spec is made"
    divisible = _divisible(spec)
    return CallSignature(
        name=f"{spec.name}_max_scores" if spec.returns_maxima else spec.name,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=spec.dtype,
        out_dtype=spec.out_dtype,
        scale=spec.scale,
        dropout=spec.dropout,
        packed=spec.packed,
        scalars=tuple(ScalarArgument(*x.key) for x in spec.scalars),
        tensors=tuple(TensorArgument(*x.key) for x in spec.tensors),
        sink=None if spec.sink is None else TensorArgument(*spec.sink.key),
        block_sparse=spec.block_sparse,
        reads_batch=bool({B, BATCH} & (spec.mask.free_symbols | spec.score.free_symbols)),
        zero_divisions=_zero_divisions(spec),
        offsets=tuple(tensor.name for tensor in spec.offsets),
        split=spec.split,
        folds=spec.folds,
        returns_maxima=spec.returns_maxima,
        paged=spec.paged,
        kv_dtype=spec.kv_dtype,
        shared_kv=spec.shared_kv,
        normalize=spec.normalizer,
        divisible=tuple(divisible),
        group=divisible.get(AXES[1], 0),
    )


def _divisible(spec: AttentionSpec) -> dict[str, int]:
    """`CallSignature.divisible`, and for heads `CallSignature.group`."""
    sparse = spec.block_sparse
    if sparse is not None and sparse.is_static and sparse.by_head:
        return {}
    dims = {tensor.symbol: tensor.dims for tensor in spec.tensors}
    divisors = {}
    for axis, index, size in zip(AXES, (B, H), (BATCH, HEADS), strict=True):
        groups = _groups_read(spec, dims, axis, index, size)
        if groups is not None and len(groups) < 2:
            divisors[axis] = next(iter(groups), 0)
    return divisors


def _groups_read(
    spec: AttentionSpec,
    dims: Mapping[TensorSymbol, tuple[str | int, ...]],
    axis: str,
    index: sympy.Symbol,
    size: sympy.Symbol,
) -> set[int] | None:
    """The groups by which mask and score read the dimensions of an axis; None if they use its index
    otherwise.

    Returns:
        For heads, the divisors that turn the index of a query head into the index of a key head.
    """
    waiting: list[sympy.Basic] = [spec.mask, spec.score]
    seen: set[sympy.Basic] = set()
    groups: set[int] = set()
    while waiting:
        expr = waiting.pop()
        if expr in (index, size):
            return None
        if expr in seen:
            continue
        seen.add(expr)
        if not isinstance(expr, Element):
            waiting += (expr.value,) if isinstance(expr, Let) else expr.args
            continue
        for dim, by in zip(dims[expr.tensor], expr.indices, strict=True):
            if dim == axis and by != index:
                return None
            if axis == AXES[1] and dim == KEY_HEADS:
                divided, divisor = by.args if isinstance(by, FloorDiv) else (by, sympy.S.One)
                if divided != index or not (divisor.is_Integer and divisor.is_positive):
                    return None
                groups.add(int(divisor))
            elif dim != axis:
                waiting.append(by)
    return groups


def _zero_divisions(spec: AttentionSpec) -> tuple[ZeroDivision, ...]:
    divisions = (pair for expr in (spec.mask, spec.score) for pair in divisions_by_zero(expr))
    return tuple(
        ZeroDivision(
            python_text(division).strip("()"),
            tuple(sorted(symbol.name for symbol in division.args[1].free_symbols)),
            _plain(reached),
        )
        for division, reached in divisions
        # The lengths of packed and of paged sequences are data.
        if not ((spec.packed or spec.paged) and {SEQ_Q, SEQ_K} & reached.free_symbols)
    )


def _plain(expr: sympy.Basic) -> object:
    if isinstance(expr, Let):
        return _plain(expr.value)
    if expr.args:
        return (expr.func.__name__, *map(_plain, expr.args))
    if isinstance(expr, sympy.Symbol):
        return str(expr.name)
    return bool(expr) if expr in (sympy.true, sympy.false) else int(expr)


@functools.lru_cache(maxsize=1024)
def with_dtype(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    """``spec`` for operands of another dtype, under autocast or where it has no dtype."""
    return _changed(spec, "dtype", dtype)


@functools.lru_cache(maxsize=1024)
def without_dropout(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` with kernels that drop nothing, for calls whose dropout_p is 0."""
    return _changed(spec, "dropout", False)


@functools.lru_cache(maxsize=1024)
def at_offsets(spec: AttentionSpec, dtypes: tuple[tuple[str, str], ...]) -> AttentionSpec:
    """``spec`` with captured tensors in place of the numbers q_offset and k_offset.

    Args:
        dtypes: the name and the dtype, int32 or int64, of each tensor that calls give.
    """
    if not dtypes:
        return spec
    offsets = tuple(Tensor.reserved(name, ("batch",), dtype) for name, dtype in dtypes)
    name = "_".join((spec.name or "", *(tensor.name for tensor in offsets)))
    return with_options(spec, tensors=before_layout(spec, offsets), name=name)


@functools.lru_cache(maxsize=1024)
def packed_queries(spec: AttentionSpec) -> AttentionSpec:
    """A spec with a paged cache for calls with the queries of all sequences one after another."""
    tensors = before_layout(spec, BOUNDARIES[:1])
    return with_options(spec, packed=True, tensors=tensors, name=f"{spec.name}_packed")


@functools.lru_cache(maxsize=1024)
def without_codes(spec: AttentionSpec) -> AttentionSpec:
    """A spec whose cache has codes as a spec whose cache has elements of the dtype of q."""
    if spec.kv_dtype is None:
        return spec
    tensors = tuple(tensor for tensor in spec.tensors if tensor.name not in SCALE_NAMES)
    return with_options(spec, kv_dtype=None, tensors=tensors)


@functools.lru_cache(maxsize=1024)
def contiguous(spec: AttentionSpec) -> AttentionSpec:
    """A spec with a paged cache as one with packed sequences, whose keys are copied from pages.

    The CPU path and the reference compute it (`flashgen.shared.paged`). If the keys of the spec are
    split, the keys of the result are not.
    """
    spec = without_codes(spec)
    paged = (*PAGE_NAMES, *BOUNDARY_NAMES)  # statistics read the positions of queries too
    others = tuple(tensor for tensor in spec.tensors if tensor.name not in paged)
    changed = substituted_options(spec, {Scalar.reserved(WHOLE[3]).expr: SEQ_K})  # split keys
    unsplit = dict.fromkeys(("split", "folds", "runs"), False)
    if not spec.paged:
        return with_options(spec, **unsplit, **changed)
    whole = with_options(spec, paged=False, packed=True, **unsplit, tensors=others, **changed)
    tensors = before_layout(whole, BOUNDARIES)
    return with_options(whole, tensors=tensors, name=f"{spec.name}_contiguous")


@functools.lru_cache(maxsize=1024)
def in_whole(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` for calls on a part of a whole: mods see the heads and the lengths of the whole.

    Packed and paged sequences keep lengths of their own, and so do the tensors `ROWS`, which are
    made of results of the part. The scalars of `shared.signature.WHOLE` come last.
    """
    whole = tuple(map(Scalar.reserved, WHOLE))
    first, *sizes = (scalar.expr for scalar in whole)
    seen: dict[sympy.Basic, sympy.Basic] = {
        H: H + first,
        **dict(zip((HEADS, SEQ_Q, SEQ_K), sizes, strict=True)),
    }
    if spec.packed or spec.paged:  # each sequence has lengths of its own
        del seen[SEQ_Q], seen[SEQ_K]
    row_tensors = {
        x.symbol: Tensor.reserved(x.name, (x.dims[0], PART_HEADS, *x.dims[2:]), x.dtype)
        for x in spec.tensors
        if x.name in ROWS
    }
    if row_tensors:
        read = nodes_of(spec.score, spec.modified, spec.divided_weight)
        seen |= {x: x for x in read if isinstance(x, Element) and x.tensor in row_tensors}
    return with_options(
        spec,
        tensors=tuple(row_tensors.get(x.symbol, x) for x in spec.tensors),
        scalars=(*spec.scalars, *whole),
        name=f"{spec.name}_in_whole",
        **substituted_options(spec, seen),
    )


@functools.lru_cache(maxsize=1024)
def partial(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` with an output in float32, for calls over some of a row's keys.

    `calls.runtime.merge.merge` merges such results before they are rounded. The kernel has the
    tile and the accumulators of the ordinary one. There is no backward pass: the ordinary one takes
    the merged out and LSE. A float32 spec is its own variant, unless its weights have a divisor
    that is not the softmax's.
    """
    if spec.partial or (spec.out_dtype == "float32" and spec.is_softmax):
        return spec
    return with_options(spec, partial=True, name=f"{spec.name}_partial")


@functools.lru_cache(maxsize=1024)
def split(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` for calls whose keys are split at the global positions 0, S, 2S, and so on.

    A thread block computes the result over the keys of one split, in float32 and without the sink;
    `calls.runtime.merge` merges these results. The calls are inside a whole, because mods see the
    length of the sequence, not of a split. S is the last scalar, `shared.signature.SPLIT`. The
    backward pass of ``spec`` reads the merged results. Kernels set the length of the whole for each
    sequence that has a length of its own.
    """
    inside = WHOLE[0] in (scalar.name for scalar in spec.scalars)
    whole = spec if inside else in_whole(spec)
    if spec.paged or spec.packed:
        whole = with_options(
            whole, **substituted_options(whole, {SEQ_K: Scalar.reserved(WHOLE[3]).expr})
        )
    scalars = (*whole.scalars, Scalar.reserved(SPLIT))
    return with_options(whole, scalars=scalars, split=True, name=f"{spec.name}_split")


@functools.lru_cache(maxsize=1024)
def with_columns(spec: AttentionSpec, columns: int) -> AttentionSpec:
    """``spec`` for another number of columns of V, which is a tensor of its own."""
    return with_options(spec, head_dim_v=columns, shared_kv=False)


@functools.lru_cache(maxsize=1024)
def folded(spec: AttentionSpec) -> AttentionSpec:
    """`split` for calls with so many rows that each thread block has all splits of its rows.

    It joins their results in the order, and with the arithmetic, of the kernel that merges parts:
    the bits are the same, in one launch and without memory for parts.
    """
    parts = spec if spec.split else split(spec)
    return with_options(parts, folds=True, name=f"{str(parts.name).removesuffix('_split')}_folded")


@functools.lru_cache(maxsize=1024)
def in_runs(spec: AttentionSpec) -> AttentionSpec:
    """`split` for calls whose thread blocks have a run of neighbouring splits of their rows each.

    A thread block joins the results over its run as the kernel that merges parts would, and writes
    one part.
    """
    parts = spec if spec.split else split(spec)
    return with_options(parts, runs=True, name=f"{str(parts.name).removesuffix('_split')}_runs")


def joining(spec: AttentionSpec, run: int) -> AttentionSpec:
    """The variant with split keys in which a thread block has so many neighbouring splits of its
    rows: one, a longer run, or `ALL_SPLITS`.
    """
    if run == ALL_SPLITS:
        return folded(spec)
    return spec if run == 1 else in_runs(spec)


@functools.lru_cache(maxsize=1024)
def returning_maxima(spec: AttentionSpec, returned: bool = True) -> AttentionSpec:
    """``spec`` for calls whose third result is the largest score of each row, float32.

    These are scores after score_mod; -inf stands for rows without keys. Only the forward kernel
    differs, and not in its first two results. The weights of ``spec`` are a softmax.
    """
    return _changed(spec, "returns_maxima", returned)


def refuse_backward(spec: AttentionSpec, *, alone: str = "") -> None:
    """Raises SpecError for a variant that has no backward pass.

    Args:
        alone: "queries" where only the gradient of q is computed, for which the keys of a sequence
            need not lie one after another; "keys" where only the gradients of k and v are.
    """
    if alone == "" and any(tensor.name == OWNED for tensor in spec.tensors):
        raise SpecError(
            "the gradients of a call with lists of blocks are those of several other calls",
            where=f"spec {spec.name}",
            numbers="sequences are groups of queries for dQ, for dK and dV blocks or listed keys",
            way_out="fg.attention(spec) and flashgen run --backward compute all of them, except "
            "over a paged cache; flashgen plan and emit show the kernel of O",
        )
    if spec.paged and alone != "queries":
        raise SpecError(
            "a call with a paged cache has no backward pass",
            where="argument page_table",
            numbers=f"spec {spec.name}: kernels with paged caches are for inference",
            way_out="torch.no_grad(), or a spec with packed=True and contiguous keys for training",
        )
    if spec.kv_dtype is not None:
        raise SpecError(
            "a cache of codes has no backward pass",
            where=f"spec {spec.name}",
            numbers=f"kv_dtype {spec.kv_dtype!r}",
            way_out="kv_dtype=None, with a cache of elements of the dtype of q",
        )
    if spec.split:
        raise SpecError(
            "a variant with split keys has no backward pass of its own",
            where=f"spec {spec.name}",
            numbers="split=True",
            way_out="the backward pass of the spec that was split, from the merged out and LSE",
        )
    if spec.partial:
        raise SpecError(
            "a partial result has no backward pass",
            where=f"spec {spec.name}",
            numbers=f"out is {spec.out_dtype}, q, k and v are {spec.dtype}",
            way_out="the ordinary spec's backward pass for each part, from the merged out and LSE",
        )


@functools.lru_cache(maxsize=1024)
def learning(spec: AttentionSpec, names: frozenset[str]) -> AttentionSpec:
    """``spec`` with kernels that compute the gradients of these captured tensors only."""
    if all(tensor.grad == (tensor.name in names) for tensor in spec.tensors):
        return spec
    tensors = {
        tensor.name: Tensor(tensor.name, tensor.dims, tensor.dtype, grad=tensor.name in names)
        if tensor.grad != (tensor.name in names)
        else tensor
        for tensor in spec.tensors
    }
    sink = None if spec.sink is None else tensors[spec.sink.name]
    return with_options(spec, tensors=tuple(tensors.values()), sink=sink)


def substituted_options(
    spec: AttentionSpec, values: Mapping[Any, sympy.Basic]
) -> dict[str, object]:
    """The expressions of a spec with ``values`` for symbols, as options of `with_options`."""
    names = ("mask", "score", "modified", "divided_weight")
    options: dict[str, object] = {x: substituted(getattr(spec, x), values) for x in names}
    statistics = (
        (name, replace(statistic, expr=substituted(statistic.expr, values)))
        for name, statistic in spec.statistics
    )
    return options | {"statistics": tuple(statistics)}


def before_layout(spec: AttentionSpec, added: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of a spec with more of them; the tensors of a block layout come last."""
    last = (*LAYOUT_NAMES, *LISTS)
    layout = tuple(tensor for tensor in spec.tensors if tensor.name in last)
    others = tuple(tensor for tensor in spec.tensors if tensor.name not in last)
    return (*others, *added, *layout)


def _changed(spec: AttentionSpec, option: str, value: object) -> AttentionSpec:
    return spec if getattr(spec, option) == value else with_options(spec, **{option: value})


def with_options(spec: AttentionSpec, **options: object) -> AttentionSpec:
    """A copy with other options, on which the traced expressions do not depend."""
    changed = copy.copy(spec)
    for option, value in options.items():
        object.__setattr__(changed, option, value)
    return changed
