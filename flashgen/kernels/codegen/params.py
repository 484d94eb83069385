"""The fields of ``struct Params`` for each kernel. Launchers fill them in by name."""

from __future__ import annotations

from dataclasses import replace

from flashgen.kernels.codegen.source import Param
from flashgen.shared.dtypes import SCALAR_DTYPES
from flashgen.shared.launch_facts import CONVERT_KERNELS, PAGED_KERNELS, STREAMING_KERNELS
from flashgen.shared.paths import CodePath
from flashgen.shared.signature import WHOLE
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import H

_SHAPES = {
    "q": "[batch, heads_q, seq_q, HEAD_DIM]",
    "k": "[batch, heads_kv, seq_k, HEAD_DIM]",
    "v": "[batch, heads_kv, seq_k, HEAD_DIM_V]",
    "o": "[batch, heads_q, seq_q, HEAD_DIM_V]",
    "k_cache": "[pages, heads_kv, page_size, HEAD_DIM]",
    "v_cache": "[pages, heads_kv, page_size, HEAD_DIM_V]",
}
_CACHES = {"k": "k_cache", "v": "v_cache"}
"""The names of keys and values in memory, where tensors have pages instead of batch entries."""

_AXES = {"b": "batch entry", "h": "head", "n": "row"}
_PAGES = (
    Param("pages", "int", "pages of a cache"),
    Param("page_size", "int", "keys of a page"),
    Param("page_divisor", "long long", "multiplier and shift of a division by page_size"),
    Param("box_rows", "int", "rows of a page that TMA copies at once; 0: TMA copies no keys"),
)
_BOX_ROWS = Param("box_rows", "int", "rows of K and of V that TMA copies at once")
_NUMBERS = (
    Param("batch", "int"),
    Param("heads_q", "int"),
    Param("heads_kv", "int", "divides heads_q"),
    Param("seq_q", "int"),
    Param("seq_k", "int"),
    Param("q_offset", "int", "position of query row 0"),
    Param("k_offset", "int", "position of key 0"),
    Param("scale", "float", "factor on Q K^T"),
)
_DROPOUT = (
    Param("rng", "const long long*", "[2]: seed and offset of dropout"),
    Param(
        "dropout_limit",
        "int",
        "an element is kept when its 16 bits, as a high half, are at most this",
    ),
    Param("dropout_scale", "float", "1 / keep probability"),
)
WORK_TILES = (
    Param("first_head_group", "int", "of this launch: a grid has 65,535 along y and z"),
    Param("first_batch", "int", "of this launch"),
    Param("head_bits", "int", "2^head_bits heads alternate, tile by tile"),
    Param("parts", "int", "of each group of query heads, which blocks share"),
    Param("part_heads", "int", "query heads of a part; the last one may have fewer"),
    Param("tiles_per_group", "int", "work tiles of a head group"),
    Param("head_groups", "int", "heads, or sets of heads, per batch entry"),
    Param("work_tiles", "int", "all work tiles of the launch"),
    Param(
        "tile_counter",
        "int*",
        "work tiles drawn after each block's first; null: one tile per block",
    ),
)
"""Fields by which blocks find their work tiles; each kernel has those that it reads."""

SINK_SUMS = Param(
    "sink_sums", "float*", "[batch, heads_q, row tiles, WARPS]: sums over the rows of a warp"
)
"""The buffer to which each warp of the delta kernel writes its sink gradient."""

_PER_ROW = "[batch, heads_q, seq_q]"
_LOG = "natural log"
_LSE = f"{_PER_ROW}, {_LOG}"
_ROWS = "[batch, heads_q, seq_q, 2]: base of P, and delta = rowsum(dO * O) - dLSE"
_MAX_SCORES = Param("max_scores", "float*", f"{_PER_ROW}, the largest score of each row")
_FORWARD_ROWS = (Param("lse", "float*", _LSE), _MAX_SCORES)
_DELTA_ROWS = (
    Param("lse", "const float*", _LSE),
    Param("dlse", "const float*", f"{_PER_ROW}; null: zeros"),
    Param("rows", "float*", _ROWS),
)
_TANGENT_ROWS = (
    Param("lse", "const float*", _LSE),
    Param("lse_tangent", "float*", f"{_PER_ROW}, that of LSE"),
)
_ZEROS = (
    Param("dq_sum", "float*", "the sums of dQ, filled with zeros"),
    Param("sum_vectors", "long long", "16-byte vectors of these sums; 0: there are no sums"),
    Param("block_vectors", "int", "16-byte vectors of these sums per block"),
)
_MERGE_ROWS = (
    *_FORWARD_ROWS,
    Param("parts_o", "const float*", f"[splits, {_SHAPES['o'][1:]}"),
    Param("parts_lse", "const float*", "[splits, batch, heads_q, seq_q]; -inf: no keys"),
    Param("merged_o", "const float*", f"{_SHAPES['o']}: an earlier result"),
    Param("merged_lse", "const float*", f"{_PER_ROW}; null: there is none"),
    Param("sink", "const float*", "[heads_q], logits; null: there are none"),
    Param("splits", "int", "parts"),
    Param("parts_of_group", "int", "parts that are joined in pairs, a power of two"),
    Param("sink_stride", "int", "elements to the logit of the next head"),
    Param("parts_o_stride_s", "long long", "elements to the next part"),
)
_SPLITS = (
    Param("splits", "int", "splits of the keys"),
    Param("o_stride_s", "long long", "elements to the next split"),
    Param("lse_stride_s", "long long", "elements to the next split"),
)
_RUN = Param("run", "int", "splits of a block, whose results are one of these")
_OF_SPLITS = "[splits, {}"
_KEY_SUMS = {
    "dk": "[batch, heads_kv, parts, rows / 16, HEAD_DIM / 8, 4, 32], unscaled",
    "dv": "[batch, heads_kv, parts, rows / 16, HEAD_DIM_V / 8, 4, 32]",
}
_BACKWARD_ROWS = (Param("rows", "const float*", _ROWS), Param("lse", "const float*", _LSE))
# The first tensors of a kernel, operands and O, and its fields with a value per row.
_FIRST = {
    "forward": (("q", "k", "v", "o"), _FORWARD_ROWS),
    "delta": (("o", "do"), (*_DELTA_ROWS, *_ZEROS)),
    **dict.fromkeys(CONVERT_KERNELS, ((), ())),
    "merge": (("o",), _MERGE_ROWS),
    "tangent": (("q", "k", "v", "o", "o_tangent"), _TANGENT_ROWS),
}
_BACKWARD = (("q", "k", "v", "do"), _BACKWARD_ROWS)
_GRADIENTS = {
    "dkdv": ("dk", "dv"),
    "fused": ("dk", "dv"),
    **{kernel: (gradient,) for kernel, gradient in CONVERT_KERNELS.items()},
    "dq": ("dq",),
}


def params_of(
    spec: AttentionSpec,
    role: str,
    path: CodePath,
    *,
    in_parts: bool = False,
    moving: tuple[str, ...] = (),
) -> tuple[Param, ...]:
    """The fields that a kernel of this role may use, in order: tensors, strides, numbers.

    Operands that TMA copies are tensor maps, which have their strides in them. ``in_parts`` and
    ``moving`` are as in `flashgen.kernels.planner.Plan`.
    """
    by_tma = path.copies_by_tma and role not in STREAMING_KERNELS
    first, rows = _FIRST.get(role, _BACKWARD)
    first = (*first[:3], *map(tangent_field, moving), *first[3:]) if moving else first
    gradients = () if in_parts else _GRADIENTS.get(role, ())
    written = ("o", *gradients) if role in ("forward", "merge") else (*gradients, "o_tangent")
    in_rows = (*written, "o") if role == "tangent" else written  # read or written row by row
    mapped = {name for name in first if by_tma and name not in in_rows}
    params = [
        _map(name) if name in mapped else _tensor(name, written=name in written) for name in first
    ]
    paged = spec.paged and role in PAGED_KERNELS
    if paged:
        # TMA cannot copy all rows: a kernel for Hopper has the addresses of the caches too.
        params = [_for_pages(param) for param in params if by_tma or param.name not in _CACHES]
        caches = [_tensor(name, written=False) for name in _CACHES.values()]
        if spec.kv_dtype is not None:
            caches = [replace(param, cpp_type="const Code*") for param in caches]
        before = ("q", *mapped)  # tensor maps are the first fields
        end = next((i for i, param in enumerate(params) if param.name not in before), len(params))
        params[end:end] = caches
    if role == "forward" and spec.partial:
        params[-1] = Param("o", "float*", _SHAPES["o"])
    if role == "forward" and spec.split and not spec.folds:
        params[-1] = Param("o", "float*", _OF_SPLITS.format(_SHAPES["o"][1:]))
        split_rows = (
            replace(param, meaning=_OF_SPLITS.format(param.meaning[1:])) for param in rows
        )
        rows = (*split_rows, *_SPLITS, *((_RUN,) if spec.runs else ()))
    params += [*rows, *(_tensor(name, written=True) for name in gradients)]
    if role in ("fused", "convert_dq"):
        params.append(Param("dq_sum", "float*", path.dq_sums))
    for gradient in ("dk", "dv"):
        if in_parts or role == f"convert_{gradient}":
            params.append(Param(f"{gradient}_sum", "float*", _KEY_SUMS[gradient]))
    in_memory = [name for name in (*first, *gradients) if name not in mapped]
    if paged:
        in_memory = [*(name for name in in_memory if name not in _CACHES), *_CACHES.values()]
    params += _strides(*in_memory)
    if role == "merge":
        params += _strides("parts_o", "merged_o")
    params += [*_NUMBERS, *(_PAGES if paged else ())]
    if role == "forward" and spec.split and by_tma and not (paged or spec.packed):
        params.append(_BOX_ROWS)
    params += _DROPOUT if spec.dropout else ()
    for scalar in spec.scalars:
        c_type = SCALAR_DTYPES[scalar.dtype].c_type
        params.append(Param(f"s_{scalar.name}", c_type, f"the spec's {scalar.name}"))
        if scalar.dtype == "int32" and not is_set_by_kernel(spec, scalar):
            meaning = f"multiplier and shift of a division by {scalar.name}"
            params.append(Param(multiplier_field(scalar), "long long", meaning))
            meaning = f"inverse and limit by which {scalar.name} is found to divide a number"
            params.append(Param(inverse_field(scalar), "long long", meaning))
    if not spec.is_softmax:
        params = [_for_weights(param) for param in params]
    if spec.packed and role != "delta":
        params = [_for_all_sequences(param) for param in params]
    return tuple(params)


def _for_weights(param: Param) -> Param:
    """The parameter of a kernel whose weights are no exponentials."""
    return replace(param, meaning=param.meaning.replace(_LOG, "sums of weights"))


def head_in_whole(spec: AttentionSpec, head: str) -> str:
    """C++ of a query head's number among the heads of the whole, made of its number in the call."""
    return head if spec.head == H else f"{head} + p.s_{WHOLE[0]}"


def heads_of_whole(spec: AttentionSpec) -> str:
    """C++ of the number of query heads of the whole."""
    return "p.heads_q" if spec.head == H else f"p.s_{WHOLE[1]}"


def is_set_by_kernel(spec: AttentionSpec, scalar: Scalar) -> bool:
    """Whether kernels set a scalar for each sequence: its length, where keys are split."""
    return (spec.paged or spec.packed) and spec.split and scalar.name == WHOLE[3]


def multiplier_field(scalar: Scalar) -> str:
    """The field by which kernels divide by a scalar; `runtime.kernel_arguments` makes its value."""
    return f"d_{scalar.name}"


def inverse_field(scalar: Scalar) -> str:
    """The field by which kernels test for multiples of a scalar; see `multiplier_field`."""
    return f"i_{scalar.name}"


def _for_all_sequences(param: Param) -> Param:
    """The field with the comment that it has where sequences are packed in one batch entry."""
    sizes = {"batch": "sequences", "seq_q": "rows of all sequences", "seq_k": "keys of all"}
    meaning = sizes.get(param.name, param.meaning.replace("[batch, ", "[1, "))
    if param.ctype == "tensormap":
        meaning += ", with ragged rows"
    return replace(param, meaning=meaning)


def _for_pages(param: Param) -> Param:
    """The field with the comment that it has where keys and values are in pages."""
    if param.name not in _CACHES:
        return param
    return replace(param, meaning=f"{_SHAPES[_CACHES[param.name]]}, read by TMA")


def tangent_field(name: str) -> str:
    """The name of the field with the tangent of an operand or a result."""
    return f"{name}_tangent"


def _shape(name: str) -> str:
    return _SHAPES[name.removeprefix("d").removesuffix(tangent_field(""))]


def _map(name: str) -> Param:
    meaning = f"{_shape(name)}, read by TMA"
    return Param(name, "TensorMap", meaning, f"{name}_map")


def _tensor(name: str, *, written: bool) -> Param:
    cpp_type = "Element*" if written else "const Element*"
    return Param(name, cpp_type, _shape(name), _cpp_name(name))


def _strides(*tensors: str) -> list[Param]:
    return [
        Param(
            f"{tensor}_stride_{axis}",
            "long long",
            f"elements to the next {unit}",
            f"{_cpp_name(tensor)}_stride_{axis}",
        )
        for tensor in tensors
        for axis, unit in (_AXES | ({"b": "page"} if tensor in _CACHES.values() else {})).items()
    ]


def _cpp_name(tensor: str) -> str:
    return "dout" if tensor == "do" else tensor  # `do` is a keyword of C++
