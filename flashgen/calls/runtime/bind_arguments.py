"""Binds a kernel to a call: its arguments by name, its tensor maps, its grid and its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from flashgen.calls.runtime.bound_kernel import BoundKernel, Grid, Tensors
from flashgen.calls.runtime.kernel_arguments import KernelArguments, numbers_of
from flashgen.shared.call import CallRanges, CheckedCall
from flashgen.shared.errors import PlanError
from flashgen.shared.fast_division import multiplier_of
from flashgen.shared.launch_facts import CONVERT_KERNELS, HeadsPerTile, LaunchFacts, LaunchRules
from flashgen.shared.signature import LAYOUT, SPLIT, CallSignature
from flashgen.shared.tensormap import TensorMapSpec

if TYPE_CHECKING:
    from flashgen.calls.runtime.programs import LaunchableKernel
    from flashgen.kernels.planner import Plan
    from flashgen.kernels.planner.schedule import DerivedBlocks
    from flashgen.spec.language.spec import AttentionSpec

MOST_ALONG_Y_AND_Z = 65_535
"""Thread blocks along y and z of a grid, by the CUDA programming guide."""

NO_NUMBERS: Mapping[str, int | float] = MappingProxyType({})
NO_BOXES: Mapping[str, int] = MappingProxyType({})

LEAST_BOX_ROWS = 8
"""Rows that repeat a swizzle in shared memory: TMA copies at least that many rows of a page."""


def bind(
    build: LaunchableKernel,
    call: CheckedCall,
    tensors: Tensors,
    captured: Mapping[str, torch.Tensor] | None = None,
    *,
    numbers: Mapping[str, int | float] = NO_NUMBERS,
    packed: bool = False,
    sms: int | None = None,
    blocks: int | None = None,
    part_heads: int = 0,
) -> BoundKernel:
    """The kernel bound to a call.

    Args:
        tensors: the tensors by the names that kernels use; only sizes and strides are read.
        captured: the captured tensors by name.
        numbers: values of fields that do not follow from the call.
        packed: whether the call has packed sequences.
        sms: multiprocessors of the GPU; None for the number in the plan's architecture.
        blocks: the blocks of a persistent kernel, instead of the plan's number.
        part_heads: query heads of each part of a group, from `part_heads_of`; 0: all of a group.

    Raises:
        PlanError: the number of blocks is impossible, or the kernel is not persistent.
    """
    facts, params = build.facts, build.facts.params
    names = {param.name for param in params}
    part_heads = part_heads or max(1, call.group)
    parts = max(1, -(-call.group // part_heads))
    bits = facts.head_bits(*call.sizes[1:], part_heads) if "head_bits" in names else 0
    part_numbers = {"head_bits": bits, "part_heads": part_heads, "parts": parts}
    numbers = {**numbers_of(call, tensors, captured), **numbers, **part_numbers}
    if facts.kernel == "convert_dv":  # dV has no scale but that of dropout
        numbers["scale"] = numbers["dropout_scale"]
    boxes: Mapping[str, int] = NO_BOXES
    if "box_rows" in names:
        rows = box_rows_of(facts.block_k, call, int(numbers.get("page_size", 0)))
        numbers["box_rows"] = rows
        # Maps that the kernel leaves unused have boxes too.
        boxes = dict.fromkeys(("k", "v"), max(rows, 1))
    splits = call.splits if "o_stride_s" in names else 1  # a block may have all of its rows' splits
    grid = facts.grid(*call.sizes, packed=packed, head_bits=bits, splits=splits, parts=parts)
    vectors = elements_of_sums(facts, call, packed=packed) // 4
    numbers |= {"sum_vectors": vectors, "block_vectors": -(-vectors // math.prod(grid))}
    chosen = None
    if facts.is_persistent:
        chosen = build.blocks(math.prod(grid), sms, blocks)
        tiles, groups, _ = grid
        numbers |= {
            "tiles_per_group": tiles,
            "head_groups": groups,
            "work_tiles": chosen.work_tiles,
        }
        grid = (chosen.count, 1, 1)
    elif blocks is not None:
        raise PlanError(
            "this kernel has one block per work tile",
            where="argument blocks",
            numbers=f"given {blocks!r} for {facts.name} on path {facts.path}",
            way_out="no blocks (one per tile); or arch='sm_90a' and 16-bit operands",
        )
    maps = maps_of(facts, tensors, packed=packed, boxes_of=boxes)
    bound = None
    for first_head, first_batch, part in reversed(list(_parts(grid))):
        firsts = {"first_head_group": first_head, "first_batch": first_batch}
        arguments = KernelArguments(params, numbers | firsts, maps)
        bound = BoundKernel(build, arguments, part, chosen, bound)
    assert bound is not None, "a grid has blocks"
    return bound


def numbers_of_pages(k: torch.Tensor) -> dict[str, int]:
    """The fields of a kernel that describe the pages of the caches."""
    page_size = k.shape[2]
    return {
        "pages": k.shape[0],
        "page_size": page_size,
        "page_divisor": multiplier_of(page_size),
    }


def box_rows_of(block_k: int, call: CheckedCall, page_size: int) -> int:
    """The keys that TMA copies at once; 0 where that would be so few that lanes copy every key.

    It is the largest number that divides a tile of keys, a split and a page. Tiles begin at the
    borders of splits: boxes of these rows lie in one split and one page each.

    Args:
        page_size: keys of a page; 0 for contiguous keys.
    """
    rows = math.gcd(page_size, block_k, int(call.scalars.get(SPLIT, 0)))
    return rows if rows >= LEAST_BOX_ROWS else 0


def ranges_of(call: CheckedCall, signature: CallSignature) -> CallRanges:
    """The values that the integers of a call's mask and score are made of.

    An offset that is a tensor may have any value: reading it would wait for the device.
    """
    offsets = {"q_offset": call.q_offset, "k_offset": call.k_offset}
    data = ("q_offset", *signature.offsets) if signature.paged else signature.offsets
    known_offsets = {name: None if name in data else x for name, x in offsets.items()}
    return CallRanges.from_call(
        call.named_sizes, known_offsets, call.scalars, signature.packed or signature.paged
    )


def part_heads_of(facts: LaunchFacts, call: CheckedCall) -> int:
    """Query heads of each part of a group in a call; all of a group where blocks own whole ones."""
    if any(param.name == "part_heads" for param in facts.params):
        return facts.part_heads(*call.sizes)
    return max(1, call.group)


def elements_of_sums(
    plan: LaunchRules, call: CheckedCall, *, packed: bool = False, part_heads: int = 0
) -> int:
    """Elements of the float32 sums that a kernel converts, or of the sums of dQ, to which "fused"
    adds and which "delta" fills with zeros; 0 for none.

    Arguments are as in `bind`.
    """
    rows = (call.heads_q, call.seq_q)
    if CONVERT_KERNELS.get(plan.kernel, "dq") != "dq":
        rows = (call.heads_kv * -(-call.group // (part_heads or call.group)), call.seq_k)
    return plan.elements_of_sums(call.batch, *rows, packed=packed)


def _parts(grid: Grid) -> Iterator[tuple[int, int, Grid]]:
    """The launches of a grid, each within the limit along y and z, with their first y and z."""
    (tiles, heads, entries), most = grid, MOST_ALONG_Y_AND_Z
    for z in range(0, entries, most):
        for y in range(0, heads, most):
            yield y, z, (tiles, min(heads - y, most), min(entries - z, most))


def blocks_of_call(plan: Plan, call: CheckedCall, *, packed: bool = False) -> DerivedBlocks:
    """The number of blocks of a persistent kernel, with the reason."""
    from flashgen.kernels.planner.schedule import blocks_of

    grid = plan.grid(*call.sizes, packed=packed, splits=call.splits)
    return blocks_of(plan, math.prod(grid))


def heads_of_call(
    spec: AttentionSpec, plan: Plan, call: CheckedCall, captured: Mapping[str, torch.Tensor]
) -> HeadsPerTile:
    """The number of query heads that share a tile of the forward kernel in such a call.

    Args:
        plan: a plan with the rows of one head in each tile.
        captured: the captured tensors by name, including the tensors of a block layout.
    """
    from flashgen.kernels.planner import choose_heads, few_rows_of, is_unpaired

    # A layout that a function makes is the same for all heads of a call.
    gives = spec.block_sparse is not None and LAYOUT in captured
    layout_heads = captured[LAYOUT].shape[1] if gives else 1
    choice = choose_heads(spec, plan, *call.sizes[:4], layout_heads=layout_heads)
    queries = call.queries_of_each(packed=spec.packed)
    return replace(
        choice,
        few_rows=few_rows_of(spec, plan, choice.heads, queries),
        unpaired=is_unpaired(plan, choice.heads, queries, call.group),
    )


def maps_of(
    facts: LaunchFacts,
    tensors: Tensors,
    *,
    packed: bool,
    boxes_of: Mapping[str, int],
) -> dict[str, TensorMapSpec]:
    """The tensor maps by the names of their tensors; empty on a path without TMA.

    Args:
        tensors: q, k, v, and do in a backward kernel, with 4 dimensions, a contiguous last axis and
            strides of multiples of 16 B.
        packed: whether boxes must end where a packed sequence ends. Rows of the next sequence could
            hold NaN, which would enter the products as 0 * NaN. See `TensorMapSpec.ragged`.
        boxes_of: by operand, the rows of its boxes where a tile has more rows.
    """
    maps = {}
    for name, (columns, rows, heads) in facts.boxes:
        tensor = tensors[name]
        assert tensor is not None, "operands of a kernel are never null"
        size, width = tensor.shape, tensor.element_size()
        rows = boxes_of.get(name, rows)
        steps = (
            tensor.stride(axis) * width if size[axis] > 1 else columns * width for axis in (2, 1, 0)
        )
        tensor_map = TensorMapSpec(
            facts.dtype,
            (size[3], size[2], size[1], size[0]),
            tuple(steps),
            (columns, rows, heads, 1),
            columns * width,
        )
        maps[name] = tensor_map.ragged() if packed and name not in boxes_of else tensor_map
    return maps
