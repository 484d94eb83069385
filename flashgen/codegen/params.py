"""The fields of ``struct Params`` for each kernel. Launchers fill them in by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flashgen.codegen.readers import SUMS, param_of_table, params_of_gradient, params_of_tensor
from flashgen.codegen.sink import sums_of_sink
from flashgen.codegen.source import Param
from flashgen.dtypes import SCALAR_DTYPES
from flashgen.language import Tensor
from flashgen.language.spec import AttentionSpec

# Tensors of operands: shape, and the C++ name where the plain one is a keyword.
_SHAPES = {
    "q": "[batch, heads_q, seq_q, HEAD_DIM]",
    "k": "[batch, heads_kv, seq_k, HEAD_DIM]",
    "v": "[batch, heads_kv, seq_k, HEAD_DIM_V]",
    "o": "[batch, heads_q, seq_q, HEAD_DIM_V]",
}
_CPP_NAMES = {"do": "dout"}
_ROWS = "[batch, heads_q, seq_q, 2]: LSE, and delta = rowsum(dO * O) - dLSE"
_TRANSPOSED_SUMS = "[batch, heads_q, rows / DQ_QUERIES, DQ_STRIPS, DQ_QUERIES / 8, 128], unscaled"
_HEAD_BITS = "2^head_bits heads alternate, tile by tile"
_AXES = {"b": "batch entry", "h": "head", "n": "row"}
_SIZES = {
    "batch": "",
    "heads_q": "",
    "heads_kv": "divides heads_q",
    "seq_q": "",
    "seq_k": "",
    "q_offset": "position of query row 0",
    "k_offset": "position of key 0",
}


def params_of(
    spec: AttentionSpec,
    role: str,
    path: str = "sm_80",
    read: Sequence[Tensor] = (),
    tables: Sequence[tuple[Tensor, int]] = (),
    *,
    uneven: bool = False,
) -> tuple[Param, ...]:
    """The fields of one kernel, in order: tensors, strides, sizes, numbers, captured tensors.

    Args:
        path: the code path; on "sm_90a" operands are tensor maps, which have their strides in them.
        read: the captured tensors that its code reads.
        tables: the min/max tables that it reads, each a tensor and an axis.
        uneven: whether tiles have different amounts of work, so that heads alternate tile by tile.
    """
    captures = [param for tensor in read for param in params_of_tensor(tensor)]
    captures += [param_of_table(tensor, axis) for tensor, axis in tables]
    if role == "delta" and read:
        captures.append(sums_of_sink())  # it reads nothing but the sink
    if role in SUMS:
        learned = (tensor for tensor in read if tensor.grad)
        captures += [param for t in learned for param in params_of_gradient(t, SUMS[role])]
    counter = _work_tiles() if path == "sm_90a" and role == "forward" else []
    order = [Param("head_bits", "int32", "int head_bits;", _HEAD_BITS)] if uneven else []
    params = _with_maps(spec, role) if path == "sm_90a" else _of_role(spec, role)
    if spec.packed and role != "delta":
        params = [_of_all_sequences(param) for param in params]
    return (*params, *order, *counter, *captures)


def _of_role(spec: AttentionSpec, role: str) -> list[Param]:
    """The fields that every kernel of this role has."""
    if role == "forward":
        return _forward(spec)
    if role == "delta":
        return _delta()
    return _backward(spec, _gradients_of(role), summed=role == "fused")


def _gradients_of(role: str) -> tuple[str, ...]:
    """The gradients that a backward kernel stores row by row."""
    return () if role in SUMS else ("dq",) if role == "dq" else ("dk", "dv")


def _of_all_sequences(param: Param) -> Param:
    """The field with the comment that it has where sequences are packed in one batch entry."""
    sizes = {"batch": "sequences", "seq_q": "rows of all sequences", "seq_k": "keys of all"}
    what = sizes.get(param.name, param.what.replace("[batch, ", "[1, "))
    if param.ctype == "tensormap":
        what += ", in stretches"
    return dataclasses.replace(param, what=what)


def _forward(spec: AttentionSpec) -> list[Param]:
    lse = Param("lse", "pointer", "float* lse;", "[batch, heads_q, seq_q], natural log")
    return [
        *(_tensor(name) for name in "qkv"),
        _tensor("o", written=True),
        lse,
        *_strides("q", "k", "v", "o"),
        *_numbers(spec),
    ]


def _with_maps(spec: AttentionSpec, role: str) -> list[Param]:
    if role != "forward":
        gradients = _gradients_of(role)
        return [
            *(_map(name) for name in ("q", "k", "v", "do")),
            Param("rows", "pointer", "const float* rows;", _ROWS),
            *(_tensor(name, written=True) for name in gradients),
            *([_sums(_TRANSPOSED_SUMS)] if role == "fused" else []),
            *_strides(*gradients),
            *_numbers(spec),
        ]
    lse = Param("lse", "pointer", "float* lse;", "[batch, heads_q, seq_q], natural log")
    return [*(_map(name) for name in "qkvo"), lse, *_numbers(spec)]


def _work_tiles() -> list[Param]:
    tile_counter = "work tiles drawn after each block's first; null: one tile per block"
    return [
        Param("tiles_per_group", "int32", "int tiles_per_group;", "work tiles of a head group"),
        Param(
            "head_groups", "int32", "int head_groups;", "heads, or sets of heads, per batch entry"
        ),
        Param("work_tiles", "int32", "int work_tiles;", "all work tiles of the launch"),
        Param("tile_counter", "pointer", "int* tile_counter;", tile_counter),
    ]


def _map(name: str) -> Param:
    what = f"{_SHAPES[name.removeprefix('d')]}, {'written' if name == 'o' else 'read'} by TMA"
    return Param(name, "tensormap", f"TensorMap {name}_map;", what)


def _delta() -> list[Param]:
    per_row = "[batch, heads_q, seq_q]"
    return [
        _tensor("o"),
        _tensor("do"),
        Param("lse", "pointer", "const float* lse;", f"{per_row}, natural log"),
        Param("dlse", "pointer", "const float* dlse;", f"{per_row}; null: zeros"),
        Param("rows", "pointer", "float* rows;", _ROWS),
        *_strides("o", "do"),
        *_sizes("batch", "heads_q", "seq_q"),
    ]


def _backward(spec: AttentionSpec, gradients: tuple[str, ...], *, summed: bool) -> list[Param]:
    operands = ("q", "k", "v", "do")
    params = [_tensor(name) for name in operands]
    params.append(Param("rows", "pointer", "const float* rows;", _ROWS))
    params += [_tensor(name, written=True) for name in gradients]
    if summed:
        params.append(
            _sums("[batch, heads_q, rows / 16, HEAD_DIM / 8, 4, 32], whole tiles of rows")
        )
    return [*params, *_strides(*operands, *gradients), *_numbers(spec)]


def _sums(what: str) -> Param:
    return Param("dq_sum", "pointer", "float* dq_sum;", what)


def _tensor(name: str, *, written: bool = False) -> Param:
    of = name.removeprefix("d")
    cpp = _CPP_NAMES.get(name, name)
    const = "" if written else "const "
    return Param(name, "pointer", f"{const}Element* {cpp};", _SHAPES[of])


def _strides(*tensors: str) -> list[Param]:
    return [
        Param(
            f"{tensor}_stride_{axis}",
            "int64",
            f"long long {_CPP_NAMES.get(tensor, tensor)}_stride_{axis};",
            f"elements to the next {what}",
        )
        for tensor in tensors
        for axis, what in _AXES.items()
    ]


def _sizes(*names: str) -> list[Param]:
    return [Param(name, "int32", f"int {name};", _SIZES[name]) for name in names]


def _numbers(spec: AttentionSpec) -> list[Param]:
    params = [*_sizes(*_SIZES), Param("scale", "float32", "float scale;", "factor on Q K^T")]
    if spec.dropout:
        limit = "an element is kept when its 16 bits, as a high half, are at most this"
        params += [
            Param("rng", "pointer", "const long long* rng;", "[2]: seed and offset of dropout"),
            Param("dropout_limit", "int32", "int dropout_limit;", limit),
            Param("dropout_scale", "float32", "float dropout_scale;", "1 / keep probability"),
        ]
    for scalar in spec.scalars:
        dtype = SCALAR_DTYPES[scalar.dtype]
        ctype, cpp = dtype.field, dtype.c_type
        params.append(
            Param(f"s_{scalar.name}", ctype, f"{cpp} s_{scalar.name};", f"the spec's {scalar.name}")
        )
    return params
