"""The kernels that compute no scores: they read each byte once, and are the same on every path."""

from __future__ import annotations

from flashgen.kernels.codegen.kernel import kernel, rendered
from flashgen.kernels.codegen.readers import param_of_table, params_of_tensor
from flashgen.kernels.codegen.source import Param, Source
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.panels_sm90 import queries_of_sums
from flashgen.kernels.planner.streaming_kernels import lanes_of_row
from flashgen.shared.dtypes import CACHE_DTYPES, ELEMENTS, OPERANDS
from flashgen.shared.launch_facts import CONVERT_KERNELS, SPAN
from flashgen.shared.split_choice import PARTS_IN_FLIGHT
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor import Tensor

_VECTORS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}
"""The types of CUDA that a lane copies at once, by their bytes."""


def _strides(tensor: str, first: str, third: str, unit: str = "vectors") -> tuple[Param, ...]:
    axes = {"b": first, "h": "head", "n": third}
    return tuple(
        Param(f"{tensor}_stride_{axis}", "long long", f"{unit} to the next {unit_name}")
        for axis, unit_name in axes.items()
    )


def _append_params(row: str, cached: str, unit: str, *more: Param) -> tuple[Param, ...]:
    """The fields of the kernels that append.

    Args:
        row, cached: the types of the elements of a row and of a cache.
        unit: the unit of the strides of rows and of caches.
        more: the fields for scales.
    """
    size = "head_dim" if more else "vectors"
    return (
        Param("k", f"const {row}*", f"[batch, heads, rows, {size}_k], the new keys"),
        Param("v", f"const {row}*", f"[batch, heads, rows, {size}_v], the new values"),
        Param("k_cache", f"{cached}*", f"[pages, heads, page_size, {size}_k]"),
        Param("v_cache", f"{cached}*", f"[pages, heads, page_size, {size}_v]"),
        *more,
        Param("page_table", "const int*", "[sequences, max_pages]"),
        Param("cache_seqlens", "const int*", "[sequences]: keys, with the new ones"),
        Param("slot_mapping", "const long long*", "[tokens], -1: skip; null: by the page table"),
        Param("cu_seqlens", "const int*", "[sequences + 1], first rows; null: `rows` each"),
        *_strides("k", "batch entry", "row", unit),
        *_strides("v", "batch entry", "row", unit),
        *_strides("k_cache", "page", "slot", unit),
        *_strides("v_cache", "page", "slot", unit),
        Param("page_table_stride_b", "long long", "elements to the next sequence"),
        Param("page_table_stride_n", "long long", "elements to the next page"),
        Param("cache_seqlens_stride", "long long"),
        Param("slot_mapping_stride", "long long"),
        Param("cu_seqlens_stride", "long long"),
        Param("tokens", "int", "batch * rows"),
        Param("heads", "int", "of keys and values"),
        Param("rows", "int", "of a batch entry of k and v"),
        Param("sequences", "int", "of the page table"),
        Param("pages", "int", "of the caches"),
        Param("page_size", "int", "slots of a page"),
        Param("max_pages", "int", "of a sequence, in the page table"),
        Param("vectors_k", "int", "of a row" + ", each of 8 elements" * bool(more)),
        Param("vectors_v", "int", "of a row" + ", each of 8 elements" * bool(more)),
        Param(
            "lane_bits", "int", "2^lane_bits lanes for a row" + " of K and one of V" * (not more)
        ),
    )


def merge(spec: AttentionSpec, plan: Plan) -> Source:
    """The source of the merge kernel.

    Args:
        spec: only its head_dim_v and its dtype, the dtype of the merged output, are read.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    lanes, loads = (int(plan.quantities[name]) for name in ("lanes", "loads"))
    splits = plan.merges_splits
    vectors = plan.head_dim_v if splits else plan.head_dim_v // 4
    return kernel(
        "common/merge.cu.j2",
        spec,
        plan,
        None,
        lanes=lanes,
        splits=splits,
        early_parts=plan.quantities.get("early_parts"),
        parts_at_once=PARTS_IN_FLIGHT if splits else loads // -(-vectors // lanes),
        uneven=vectors % lanes != 0,
    )


def minmax_table(spec: AttentionSpec, tensor: Tensor, axis: int, plan: Plan) -> Source:
    """The source of the min/max table kernel of ``tensor`` along ``axis``.

    It runs before the kernels of ``spec`` that skip tiles by the table.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    element = ELEMENTS[tensor.dtype]
    stored, value = element.stored, element.value
    return rendered(
        "common/minmax_table.cu.j2",
        spec,
        plan,
        f"{spec.name}_minmax_{tensor.name}_{axis}",
        (*params_of_tensor(tensor), param_of_table(tensor, axis, written=True)),
        tensor=tensor,
        axis=axis,
        span=SPAN,
        stored=stored,
        value=value,
    )


def append_kv(spec: AttentionSpec, plan: Plan) -> Source:
    """The source of the kernel that appends to a paged cache.

    Args:
        spec: only its name is read.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    name = f"append_kv_{plan.access_bytes}_bytes"
    vector, params = _VECTORS[plan.access_bytes], _append_params("Vector", "Vector", "vectors")
    call = f"build_append_kv({plan.access_bytes}"
    return rendered("common/append_kv.cu.j2", spec, plan, name, params, appends=call, vector=vector)


def append_codes(spec: AttentionSpec, plan: Plan, kv_dtype: str, writes_scales: bool) -> Source:
    """The source of the kernel that appends to a paged cache of codes.

    Args:
        spec: only its dtype, the dtype of the new rows, is read.
        kv_dtype: the dtype of the codes.
        writes_scales: whether each row gets a scale by its largest number; else scales are given.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    element, codes = ELEMENTS[spec.dtype], CACHE_DTYPES[kv_dtype]
    name = f"append_codes_{OPERANDS[spec.dtype].short}_{codes.short}"
    aligned = plan.access_bytes == 16
    name += "_scales" * writes_scales + "_unaligned" * (not aligned)
    kind = "float*" if writes_scales else "const float*"
    scales = (
        *(Param(f"{x}_scale", kind, "[pages, heads, page_size]") for x in "kv"),
        *_strides("k_scale", "page", "slot", "elements"),
        *_strides("v_scale", "page", "slot", "elements"),
    )
    return rendered(
        "common/append_codes.cu.j2",
        spec,
        plan,
        name,
        _append_params("Element", "Code", "elements", *scales),
        appends=f'build_append_codes("{spec.dtype}", "{kv_dtype}", {writes_scales}, {aligned}',
        stored=element.stored,
        conversion=element.conversion,
        kv_dtype=kv_dtype,
        codes=codes,
        writes_scales=writes_scales,
    )


def add_rows(spec: AttentionSpec, plan: Plan) -> Source:
    """The source of the kernel that adds rows to sums in float32.

    Args:
        spec: only its dtype, the dtype of the rows, is read.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    params = (
        Param("added", "const Element*", "[blocks, block_k, columns], the rows"),
        Param("sums", "float*", "[keys, columns]"),
        Param("order", "const long long*", "blocks of rows, in the order of those of sums"),
        Param("starts", "const long long*", "[keys / block_k + 1], where those of each begin"),
        Param("added_stride", "long long", "elements to the next row"),
        Param("keys", "int", "rows of sums"),
        Param("block_k", "int", "rows of a block"),
        Param("vectors", "int", "of a row"),
        Param("lane_bits", "int", "2^lane_bits lanes for a row of sums"),
    )
    element = ELEMENTS[spec.dtype]
    return rendered(
        "common/add_rows.cu.j2",
        spec,
        plan,
        f"add_rows_{OPERANDS[spec.dtype].short}",
        params,
        stored=element.stored,
        element=OPERANDS[spec.dtype],
        width=16 // plan.itemsize,
    )


def delta(spec: AttentionSpec, plan: Plan) -> Source:
    """The source of the kernel that computes rowsum(dO * O)."""
    vectors = plan.head_dim_v * plan.itemsize // 16
    lanes = lanes_of_row(vectors)
    return kernel(
        "common/delta.cu.j2",
        spec,
        plan,
        None,
        lanes=lanes,
        uneven=vectors % lanes != 0,
        has_sink=spec.sink is not None,
    )


def convert(spec: AttentionSpec, plan: Plan) -> Source:
    """The source of a kernel that makes a gradient from its float32 sums."""
    gradient = CONVERT_KERNELS[plan.kernel]
    return kernel(
        "common/convert.cu.j2",
        spec,
        plan,
        None,
        gradient=gradient,
        head_dim=plan.head_dim_v if gradient == "dv" else plan.head_dim,
        dq_queries=queries_of_sums(plan.block_q, plan.head_dim) if gradient == "dq" else 0,
    )
