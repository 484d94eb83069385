"""The specs whose calls compute statistics: weights that are not divided, and their sums.

A statistic over the keys of a row is the sum, or the maximum, of a row's weights, where the weight
of a score is the statistic's function of it. The kernels of weights compute it with the walk, mask
and score code of any other call. V is 0: what they return beside the output is the statistic. One
over the queries is the same for the transposed problem, with keys in place of queries.

The normaliser of a row, which P needs, is a captured tensor. So is, for a gradient, the part of the
derivative that all scores of a row share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy

from flashgen.shared.signature import BOUNDARIES, FIRST_ROW, OFFSETS, PART_HEADS, ROWS, WHOLE
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.float_operations import FloatQuotient
from flashgen.spec.language.lets import Let, substituted
from flashgen.spec.language.mod_functions import exp, where
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.signature import before_layout, with_options
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE, SEQ_K, SEQ_Q, WEIGHT, B, H, K, Q
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element, TensorSymbol
from flashgen.spec.language.traced import Value
from flashgen.spec.language.tracing import weighed

COLUMNS = 8
"""Columns of the V of calls that compute statistics, the fewest of a kernel."""

# Functions of the score and the weight, as for `sum_over_keys`, and the normaliser of the row.
_FUNCTIONS: dict[str, tuple[str, str, Callable[..., Value]]] = {
    "max_scores": ("keys", "max", lambda score, weight, lse: score),
    "entropy": ("keys", "sum", lambda score, weight, lse: -weight * (score - lse)),
    "key_mass": ("queries", "sum", lambda score, weight, lse: weight),
}


@functools.lru_cache(maxsize=1024)
def statistic_spec(spec: AttentionSpec, name: str) -> AttentionSpec:
    """The spec whose calls compute a statistic of ``spec``.

    Args:
        name: "max_scores", "entropy", "key_mass" or "sums", the sums of the weights of rows;
            "block_mass", whose output is the product of the weights with V; "entropy_slope", whose
            output has the gradients of the entropy; or, after a dot, one of the spec's own.
    """
    named_statistic = dict(spec.statistics).get(name[1:]) if name.startswith(".") else None
    rows, dims, row_scalars = _reads_of_rows(spec)
    lse_tensor, slope_tensor = (Tensor.reserved(x, dims, "float32") for x in ROWS)
    lse = lse_tensor[rows].expr
    weight: sympy.Expr = WEIGHT
    over, normalize = "keys", "none"
    if named_statistic is not None:
        over, normalize, weight = named_statistic.over, named_statistic.takes, named_statistic.expr
    elif name in _FUNCTIONS:
        over, normalize, function = _FUNCTIONS[name]
        weight = function(Value(SCORE), Value(WEIGHT), Value(lse)).expr
    elif name == "entropy_slope":
        # u with du/ds = -P (log P + H), the derivative of the entropy H, where LSE is constant.
        slope = Value(slope_tensor[rows].expr)
        weight = (-Value(WEIGHT) * (Value(SCORE) - Value(lse) + slope)).expr
    share = share_of(spec, lse, divides=name != "sums")
    if normalize == "sum" or name == "sums":
        normalize = "total"
    removed = -sympy.oo if normalize == "max" else sympy.S.Zero
    score = weighed(spec.modified, substituted(weight, {WEIGHT: share}), removed)
    read = score.free_symbols
    result = with_options(
        without_sink(spec),
        score=score,
        modified=score,
        weight=SCORE,
        weight_line=None,
        sink=None,
        normalize=normalize,
        dropout=False,
        partial=name == "block_mass",
        head_dim_v=COLUMNS,
        shared_kv=False,  # V has other columns, which say what is summed
        statistics=(),
        name=f"{spec.name}_{name.removeprefix('.')}",
    )
    tensors = tuple(x for x in (lse_tensor, slope_tensor) if x.symbol in read)
    if tensors:
        result = with_options(
            result,
            tensors=before_layout(result, tensors),
            scalars=(*result.scalars, *row_scalars),
        )
    return _transposed(result) if over == "queries" else result


def without_statistics(spec: AttentionSpec) -> AttentionSpec:
    """The spec that computes the output of ``spec``: statistics do not change it."""
    return with_options(spec, statistics=()) if spec.statistics else spec


def share_of(spec: AttentionSpec, lse: sympy.Expr, *, divides: bool) -> sympy.Expr:
    """The weight of a score, over SCORE in place of the modified score.

    Weights that are divided by their sum are 0 in a row whose sum is 0.
    """
    if spec.is_softmax:
        return exp(Value(SCORE) - Value(lse)).expr
    weight = spec.divided_weight
    weight = Let(weight) if weight.args else weight
    if spec.normalizer == "sum" and divides:
        # By a name, because sympy would fold the choice into a comparison of the weight.
        return Let(where(Value(lse) == 0, 0.0, Value(FloatQuotient(weight, lse))).expr)
    return weight


def _reads_of_rows(
    spec: AttentionSpec,
) -> tuple[tuple[Value, ...], tuple[str, ...], tuple[Scalar, ...]]:
    """The indices of a score's row in tensors [batch, heads, seq_q], the dims of these tensors, and
    the scalars in the indices."""
    offsets = {tensor.name: tensor.symbol for tensor in spec.offsets}
    scalars: tuple[Scalar, ...] = ()
    if OFFSETS[0] in offsets:
        first = Element(offsets[OFFSETS[0]], B)
    elif spec.paged:
        first = SEQ_K - SEQ_Q
    else:
        scalars = (Scalar.reserved(FIRST_ROW),)
        first = scalars[0].expr
    row, entry = Q - first, B
    if spec.packed:
        row, entry = row + Element(TensorSymbol(BOUNDARIES[0], "int32"), B), sympy.S.Zero
    # Calls on a part of a whole have some of its heads, and packed sequences one batch entry.
    inside = WHOLE[0] in (scalar.name for scalar in spec.scalars)
    batch, heads = "row_batch" if spec.packed else "batch", PART_HEADS if inside else "heads"
    return (Value(entry), Value(H), Value(row)), (batch, heads, "rows"), scalars


def without_sink(spec: AttentionSpec) -> AttentionSpec:
    """The spec without the tensor of its sink, unless mods read it too."""
    sink = spec.sink
    if sink is None or sink.symbol in spec.mask.free_symbols | spec.modified.free_symbols:
        return spec
    tensors = tuple(tensor for tensor in spec.tensors if tensor.name != sink.name)
    return with_options(spec, tensors=tensors)


_PAIRS = ((Q, K), (SEQ_Q, SEQ_K))
_SIZES = {"seq_q": "seq_k", "seq_k": "seq_q", "heads_kv": "key_heads"}
_NAMES = dict(zip((*BOUNDARIES, *OFFSETS), (*BOUNDARIES[::-1], *OFFSETS[::-1]), strict=True))


def _transposed(spec: AttentionSpec) -> AttentionSpec:
    """The spec with keys in place of queries: each key of each query head is a row."""

    def exchanged(tensor: Tensor) -> Tensor:
        if tensor.name in _NAMES:
            return Tensor.reserved(_NAMES[tensor.name], tensor.dims, tensor.dtype)
        dims = tuple(_SIZES.get(dim, dim) if isinstance(dim, str) else dim for dim in tensor.dims)
        if dims == tensor.dims:
            return tensor
        return Tensor(tensor.name, dims, tensor.dtype, tensor.grad)

    symbols = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
    for tensor in spec.tensors:
        if tensor.name in _NAMES:
            symbols[tensor.symbol] = TensorSymbol(_NAMES[tensor.name], tensor.dtype)
    sparse = spec.block_sparse
    if sparse is not None:
        sparse = BlockSparse(_turned(sparse), sparse.block_k, sparse.block_q)
    return with_options(
        spec,
        mask=substituted(spec.mask, symbols),
        score=substituted(spec.score, symbols),
        modified=substituted(spec.modified, symbols),
        tensors=tuple(map(exchanged, spec.tensors)),
        block_sparse=sparse,
    )


def _turned(sparse: BlockSparse) -> Callable[..., object] | None:
    layout = sparse.layout
    if layout is None:
        return None
    if sparse.by_head:
        return lambda b, h, i, j: layout(b, h, j, i)
    return lambda i, j: layout(j, i)
