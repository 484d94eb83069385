"""New keys and values, written to the pages of a cache: by the kernel, or by torch on the CPU."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashgen.calls.runtime.arguments.new_rows import (
    AppendOperands,
    check_append,
    check_limits,
    slots_of,
)
from flashgen.calls.runtime.backends import Target, target_of
from flashgen.calls.runtime.bound_kernel import BoundKernel
from flashgen.calls.runtime.kernel_arguments import KernelArguments
from flashgen.kernels.compile import override
from flashgen.shared import config
from flashgen.shared.call import DEFAULT_LAUNCH, LaunchOptions
from flashgen.shared.dtypes import CACHE_DTYPES, HEAD_DIM_STEP, dtype_name
from flashgen.shared.paged import expanded_scale
from flashgen.shared.signature import SCALE_NAMES

Tensor = torch.Tensor

_AXES = "bhn"
_MOST_PREPARED = 512
_prepared: dict[Any, PreparedAppend] = {}


@dataclass(frozen=True)
class PreparedAppend:
    """A checked call, with all choices that do not depend on the contents of tensors.

    Attributes:
        bound: the kernel; None on the CPU path, and where there is nothing to write.
    """

    target: Target
    bound: BoundKernel | None

    def run(self, operands: AppendOperands, launch: LaunchOptions = DEFAULT_LAUNCH) -> Any:
        """Writes the rows. Returns the emulator's counters, or None.

        The contents of tensors are not checked: the kernel skips tokens without a place.
        """
        if self.bound is None:
            return None
        tensors = operands.tensors
        if operands.page_table is not None and not operands.page_table.numel():
            tensors["page_table"] = None  # no position lies in a table without columns
        return self.bound.run(self.target, tensors, launch)


def append(operands: AppendOperands, backend: str | None = None, arch: str | None = None) -> None:
    """Writes the new rows of a call; on the CPU, contents are checked before.

    Raises:
        InputError: an argument is wrong; nothing has been written then.
        FlashgenError: planning, compiling or launching failed.
    """
    prepared = prepare(operands, backend, arch)
    if operands.k.device.type == "cpu":
        slots = slots_of(operands)
        if prepared.target.backend == "tiled":
            _on_cpu(operands, slots)
            return
    prepared.run(operands)


def prepare(operands: AppendOperands, backend: str | None, arch: str | None) -> PreparedAppend:
    """The checked call of these tensors; equal shapes, strides, dtypes and alignments share one.

    Raises:
        InputError: an argument is wrong.
        FlashgenError: planning or compiling failed.
    """
    key = _key(operands, backend, arch)
    prepared = _prepared.get(key)
    if prepared is None:
        check_append(operands)
        check_limits(operands)
        target = target_of(backend, arch, operands.k.device)
        kernel = target.backend != "tiled" and not operands.is_empty
        prepared = PreparedAppend(target, _bound(operands, target.arch) if kernel else None)
        if target.is_final and key is not None:
            if len(_prepared) >= _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def quantised(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of rows [..., head dim] with scales [...]."""
    kind = CACHE_DTYPES[dtype_name(dtype)]
    scale = scale[..., None]
    numbers = (rows.float() / scale).clamp(-kind.most, kind.most)  # keeps NaN
    numbers = numbers.masked_fill(numbers.isnan(), math.nan).masked_fill(scale == 0, 0.0)
    if not kind.is_float:
        numbers = numbers.round().nan_to_num(0.0)
    return numbers.to(dtype)


def scales_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales with which the largest number of each row has the largest code, float32 [...].

    Args:
        rows: [..., head dim].
        dtype: the dtype of the codes.
    """
    largest = rows.float().abs().amax(-1) / CACHE_DTYPES[dtype_name(dtype)].most
    return largest.masked_fill(largest.isnan(), math.nan)


def access_bytes(operands: AppendOperands) -> int:
    """The bytes that the kernel copies at once in this call: 16, 8, 4, 2 or 1.

    The largest number that divides all addresses, and all strides that are used, in bytes. Rows
    are whole vectors, since head dims are multiples of 8.
    """
    bits = 16
    for tensor in operands[:2]:
        bits |= tensor.shape[3] * tensor.element_size()
    return _common_divisor(operands[:4], bits)


def is_aligned(operands: AppendOperands) -> bool:
    """Whether the kernel reads 16 bytes of rows at once in this call, and writes 8 codes."""
    return _common_divisor(operands[:2], 16) == 16 and _common_divisor(operands[2:4], 8) == 8


def _common_divisor(tensors: Sequence[Tensor], bits: int) -> int:
    """The largest power of two that divides ``bits`` and the addresses and strides of tensors."""
    for tensor in tensors:
        bits |= tensor.data_ptr()
        for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False):
            if size > 1:
                bits |= step * tensor.element_size()
    return bits & -bits


def _key(operands: AppendOperands, backend: str | None, arch: str | None) -> Any:
    """The values on which checks and choices depend; None for others than they take."""
    if type(operands.write_scales) is not bool:
        return None
    try:
        rows, caches = (
            functools.reduce(operator.or_, (tensor.data_ptr() for tensor in pair)) & 15
            for pair in (operands[:2], operands[2:4])
        )
        return (
            tuple(
                [
                    None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.layout)
                    for t in operands[:-1]
                ]
            ),
            operands.write_scales,
            operands.distances,
            rows,
            caches,
            backend,
            arch,
            config.backend() if backend is None else None,
            config.arch() if arch is None else None,
            None if config.override() is None else override.state(),
        )
    except RuntimeError:
        return None


def _bound(operands: AppendOperands, arch: str) -> BoundKernel:
    from flashgen.kernels.append_pipeline import build_append_codes, build_append_kv
    from flashgen.kernels.planner.streaming_kernels import lane_bits_of_append

    k, v, k_cache, v_cache, table = operands[:5]
    strided = operands.tensors
    lines = operands.tokens * k_cache.shape[1]  # which lanes share
    columns_v = 0 if operands.writes_columns else v.shape[3]  # that keys do not have
    if operands.quantises:
        names = dtype_name(k.dtype), dtype_name(k_cache.dtype)
        build = build_append_codes(*names, operands.write_scales, is_aligned(operands), arch)
        unit, elements_of_vector, lines = 1, HEAD_DIM_STEP, 2 * lines
        for name, cache in zip(SCALE_NAMES, (k_cache, v_cache), strict=True):
            scale = strided[name]
            assert scale is not None, "rows that become codes have scales"
            strided[name] = expanded_scale(scale, cache)
        lane_bits = lane_bits_of_append(max(k.shape[3], v.shape[3]) // elements_of_vector)
    else:
        width = access_bytes(operands)
        build = build_append_kv(width, arch)
        unit = elements_of_vector = width // k.element_size()
        lane_bits = lane_bits_of_append((k.shape[3] + columns_v) // elements_of_vector)
    numbers: dict[str, int] = {}
    for name in (*operands._fields[:4], *SCALE_NAMES):
        tensor = strided[name]
        if tensor is not None:
            for axis, size, step in zip(_AXES, tensor.shape, tensor.stride(), strict=False):
                numbers[f"{name}_stride_{axis}"] = step // unit if size > 1 else 0
    for name in ("cache_seqlens", "slot_mapping", "cu_seqlens"):
        index = getattr(operands, name)
        numbers[f"{name}_stride"] = 0 if index is None else index.stride(0)
    pages, heads, page_size, _ = k_cache.shape
    numbers |= {
        "page_table_stride_b": 0 if table is None else table.stride(0),
        "page_table_stride_n": 0 if table is None else table.stride(1),
        "tokens": operands.tokens,
        "heads": heads,
        "rows": k.shape[2],
        "sequences": operands.sequences,
        "pages": pages,
        "page_size": page_size,
        "max_pages": 0 if table is None else table.shape[1],
        "vectors_k": k.shape[3] // elements_of_vector,
        "vectors_v": columns_v // elements_of_vector,
        "lane_bits": lane_bits,
    }
    blocks = -(-lines // (build.plan.threads >> lane_bits))
    return BoundKernel(build, KernelArguments(build.source.params, numbers), (blocks, 1, 1))


def _on_cpu(operands: AppendOperands, slots: Tensor) -> None:
    if operands.is_empty:
        return
    page = operands.k_cache.shape[2]
    written = slots >= 0
    slots = slots[written]
    slot_indices = slots // page, slice(None), slots % page
    key_tensors = operands.k, operands.k_cache, operands.k_scale
    value_tensors = operands.v, operands.v_cache, operands.v_scale
    for new, cache, scale in (key_tensors, value_tensors)[: 1 if operands.writes_columns else 2]:
        rows = new.transpose(1, 2).flatten(0, 1)  # [tokens, heads, head dim]
        rows = rows[written]
        if scale is not None:
            if operands.write_scales:
                scale[slot_indices] = scales_of(rows, cache.dtype)
            rows = quantised(rows, expanded_scale(scale, cache)[slot_indices], cache.dtype)
        if rows.dtype.itemsize == 1:  # torch indexes no 8-bit floats on the CPU, but their bytes
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
        cache[slot_indices] = rows
