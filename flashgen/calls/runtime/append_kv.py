"""New keys and values, written to the pages of a cache: by the kernel, or by torch on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashgen.calls.runtime.arguments.pages import (
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
from flashgen.shared.dtypes import CACHE_DTYPES, dtype_name
from flashgen.shared.paged import expanded_scale

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
        tensors = operands._asdict()
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
        if target.settled and key is not None:
            if len(_prepared) >= _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared


def codes_of(operands: AppendOperands, k_scale: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The new rows as codes of their caches, by operations that wait for no device.

    Args:
        operands: with rows of floats; their scales were checked, other arguments were not.
    """
    k, v, k_cache, v_cache = operands[:4]
    k_codes, v_codes = (torch.empty_like(x, dtype=k_cache.dtype) for x in (k, v))
    check_append(operands._replace(k=k_codes, v=v_codes))
    by_place = max(k_scale.dim(), v_scale.dim()) > 1
    pages, slots = _places(operands) if by_place and not operands.is_empty else (None, None)
    found = []
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale.dim() > 1 and pages is not None:
            scale = expanded_scale(scale, cache)[pages, :, slots]  # [tokens, heads]
            scale = scale.view(rows.shape[0], rows.shape[2], rows.shape[1]).transpose(1, 2)
        elif scale.dim() == 1:
            scale = scale[:, None]
        elif scale.dim() > 1:  # nothing is written
            scale = scale.new_ones(())
        found.append(quantised(rows, scale, cache.dtype))
    return found[0], found[1]


def quantised(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of rows [..., head dim] with scales that broadcast to [...]."""
    kind = CACHE_DTYPES[dtype_name(dtype)]
    scale = scale[..., None]
    numbers = (rows.float() / scale).clamp(-kind.most, kind.most)  # keeps NaN
    numbers = numbers.masked_fill(scale == 0, 0.0)
    if not kind.is_float:
        numbers = numbers.round().nan_to_num(0.0)
    return numbers.to(dtype)


def _places(operands: AppendOperands) -> tuple[Tensor, Tensor]:
    """The page and the slot of each token, int64 [tokens]; any place for a token without one."""
    pages, _, page_size, _ = operands.k_cache.shape
    if operands.slot_mapping is not None:
        slots = operands.slot_mapping.clamp(0, pages * page_size - 1)
        return slots // page_size, slots % page_size
    table, lengths = operands.page_table, operands.cache_seqlens
    assert table is not None, "slots or a page table are given"
    assert lengths is not None, "a page table has lengths"
    token = torch.arange(operands.tokens, device=table.device)
    if operands.cu_seqlens is None:
        ends = torch.arange(operands.sequences + 1, device=table.device) * operands.k.shape[2]
    else:
        ends = operands.cu_seqlens.long()
    sequence = torch.searchsorted(ends, token, right=True) - 1
    sequence = sequence.clamp(0, operands.sequences - 1)
    position = (lengths.long()[sequence] - ends[sequence + 1] + token).clamp(min=0)
    entry = (position // page_size).clamp(max=table.shape[1] - 1)
    return table[sequence, entry].long().clamp(0, pages - 1), position % page_size


def access_bytes(operands: AppendOperands) -> int:
    """The bytes that the kernel copies at once in this call: 16, 8, 4, 2 or 1.

    The largest number that divides all addresses, and all strides that are used, in bytes. Rows
    are whole vectors, since head dims are multiples of 8.
    """
    bits = 16
    for tensor in operands[:2]:
        bits |= tensor.shape[3] * tensor.element_size()
    for tensor in operands[:4]:
        bits |= tensor.data_ptr()
        for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False):
            if size > 1:
                bits |= step * tensor.element_size()
    return bits & -bits


def _key(operands: AppendOperands, backend: str | None, arch: str | None) -> Any:
    """The values on which checks and choices depend; None for tensors without strides."""
    try:
        addresses = 0
        for tensor in operands[:4]:
            addresses |= tensor.data_ptr()
        return (
            tuple(
                [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in operands]
            ),
            addresses & 15,
            backend,
            arch,
            config.backend() if backend is None else None,
            config.arch() if arch is None else None,
            None if config.override() is None else override.state(),
        )
    except RuntimeError:
        return None


def _bound(operands: AppendOperands, arch: str) -> BoundKernel:
    from flashgen.kernels.append_pipeline import build_append_kv
    from flashgen.kernels.planner.streaming_kernels import lane_bits_of_append

    width = access_bytes(operands)
    k, v, k_cache, _, table = operands[:5]
    vector = width // k.element_size()  # elements at once
    numbers: dict[str, int] = {}
    for name, tensor in zip(operands._fields[:4], operands[:4], strict=True):
        for axis, size, step in zip(_AXES, tensor.shape, tensor.stride(), strict=False):
            numbers[f"{name}_stride_{axis}"] = step // vector if size > 1 else 0
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
        "vectors_k": k.shape[3] // vector,
        "vectors_v": v.shape[3] // vector,
    }
    numbers["lane_bits"] = lane_bits_of_append(numbers["vectors_k"] + numbers["vectors_v"])
    build = build_append_kv(width, arch)
    rows_per_block = build.plan.threads >> numbers["lane_bits"]
    blocks = -(-operands.tokens * heads // rows_per_block)
    return BoundKernel(build, KernelArguments(build.source.params, numbers), (blocks, 1, 1))


def _on_cpu(operands: AppendOperands, slots: Tensor) -> None:
    if operands.is_empty:
        return
    page = operands.k_cache.shape[2]
    written = slots >= 0
    slots = slots[written]
    for new, cache in ((operands.k, operands.k_cache), (operands.v, operands.v_cache)):
        rows = new.transpose(1, 2).flatten(0, 1)  # [tokens, heads, head dim]
        rows = rows[written]
        if rows.dtype.itemsize == 1:  # torch indexes no 8-bit floats on the CPU, but their bytes
            rows, cache = rows.view(torch.uint8), cache.view(torch.uint8)
        cache[slots // page, :, slots % page] = rows
