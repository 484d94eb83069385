"""From the arguments of `visualize` to a checked call: specs, mask_mods and BlockMasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch

from flashgen.calls.ops import check
from flashgen.calls.runtime.arguments.call import check_contents
from flashgen.calls.runtime.arguments.options import state_of
from flashgen.calls.runtime.arguments.positions import dtypes_of, offset_tensors
from flashgen.calls.runtime.block_layouts import Layout, with_layout
from flashgen.calls.runtime.chosen_keys import live_blocks
from flashgen.frontends.flex.block_masks import has_blocks, layout_beside_mask
from flashgen.frontends.flex.checks import mask_mod_of
from flashgen.frontends.flex.known_mods import read
from flashgen.frontends.flex.recorded_mods import record
from flashgen.frontends.flex.traced_mods import CallSizes
from flashgen.kernels.codegen import walk_of_kernel
from flashgen.kernels.pipeline import analysed
from flashgen.kernels.planner import plan, plan_backward
from flashgen.shared.dtypes import POSITION_LIMIT, number_of_digits
from flashgen.shared.errors import FlashgenError, InputError, SpecError
from flashgen.shared.launch_facts import KEY_KERNELS, Sizes
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import BOUNDARIES, CHOICE, LAYOUT_NAMES, LISTS, PAGE_NAMES
from flashgen.spec.language.chosen_specs import with_layout as in_blocks
from flashgen.spec.language.signature import at_offsets, signature_of
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.views.mask_call import KernelTile, MaskCall

_NO_SCORES: dict[str, Any] = {
    "score_mod": None,
    "weight_mod": None,
    "normalize": "softmax",
    "statistics": None,
}
"""A spec without what reads scalars and tensors of no mask."""

_FORMS = "(B, H, N), (B, Hq, Hkv, Nq, Nk), (Nq, Nk) or N"


def call_of(
    mask: Any,
    shape: Any,
    captures: Mapping[str, Any],
    offsets: Mapping[str, Any],
    *,
    arch: str,
    tile: Any,
    kernel: str,
) -> tuple[str, MaskCall]:
    """The name of a mask, and its checked call. Arguments as in `flashgen.visualize`.

    Raises:
        FlashgenError: as `flashgen.visualize`.
    """
    captures = {name: _on_cpu(value) for name, value in captures.items()}
    mask_captures: dict[str, Any] = {}
    if isinstance(mask, AttentionSpec):
        spec, sizes = mask, _sizes_of(shape, captures, mask.packed)
    elif hasattr(mask, "kv_num_blocks"):
        batch, heads, seq_q, seq_k = mask.shape
        sizes = (batch, heads, heads, seq_q, seq_k) if shape is None else sizes_of(shape)
        spec, mask_captures = _block_mask_spec(mask, sizes)
    elif callable(mask):
        sizes = _sizes_of(shape, captures, BOUNDARIES[0] in captures)
        spec, mask_captures = _mask_mod_spec(mask, sizes, packed=BOUNDARIES[0] in captures)
    else:
        raise InputError(
            "this is nothing with a mask",
            where="argument mask",
            numbers=f"given a {type(mask).__name__}; expected a flashgen.AttentionSpec, a mask_mod "
            "or a PyTorch BlockMask",
            way_out="fg.visualize(lambda b, h, q, k: k <= q, (1, 1, 1024))",
        )
    kernel_tile = _kernel_tile(spec, arch, tile, kernel)
    return spec.name or "mask", _checked(
        spec, sizes, mask_captures | captures, offsets, kernel_tile
    )


def _checked(
    spec: AttentionSpec,
    sizes: Sizes,
    captures: Mapping[str, Any],
    offsets: Mapping[str, Any],
    tile: KernelTile,
) -> MaskCall:
    """The call with checked sizes and values; its operands are expanded and need no memory."""
    q_offset, k_offset = offsets["q_offset"], offsets["k_offset"]
    if q_offset is None:
        q_offset = sizes[4] - sizes[3] if spec.paged else 0
    _refuse_pages(spec, captures)
    all_names = {capture.name for capture in (*spec.scalars, *spec.tensors)}
    spec = spec.replace(**_NO_SCORES, sink=None, dropout=False, paged=False, kv_dtype=None)
    read_names = {capture.name for capture in (*spec.scalars, *spec.tensors)}
    captures = {name: x for name, x in captures.items() if name not in all_names - read_names}
    named = {scalar.name for scalar in spec.scalars}
    scalars = {n: x for n, x in captures.items() if n in named}
    tensors: dict[str, Any] = {n: x for n, x in captures.items() if n not in named}
    layout = with_layout(signature_of(spec), tensors)
    tensors = {name: _on_cpu(value) for name, value in layout.items()}
    batch, heads_q, heads_kv, seq_q, seq_k = sizes
    choice = signature_of(spec).choice
    if choice is not None:  # the blocks, as a layout whose rows begin with the call's
        lists = [tensors.pop(name) for name in LISTS]
        live = live_blocks(choice, lists, seq_k, heads_q // max(heads_kv, 1))
        tensors |= zip(LAYOUT_NAMES, Layout.of(live), strict=True)
        scalars[CHOICE[0]], q_offset = q_offset, 0
        spec = in_blocks(spec)
    row = torch.empty(spec.head_dim, dtype=getattr(torch, spec.dtype))
    q = row.expand(batch, heads_q, seq_q, -1)
    k = row.expand(batch, heads_kv, seq_k, -1)
    v = row.new_empty(spec.head_dim_v or spec.head_dim).expand(batch, heads_kv, seq_k, -1)
    q_offset, k_offset = _on_cpu(q_offset), _on_cpu(k_offset)
    random_state: dict[str, Any] = {}
    options = {"scalars": scalars, "q_offset": q_offset, "k_offset": k_offset}
    if signature_of(spec).draws:
        rng = _on_cpu(tensors.pop("rng", torch.zeros(2, dtype=torch.int64)))
        options["rng"], random_state = rng, {RANDOM_STATE: state_of(rng, q)}
    try:
        problem = check(spec, q, k, v, tensors=tensors, **options)
    except InputError as error:
        call = f"fg.visualize(spec, ({', '.join(map(str, sizes))})"
        way_out = error.way_out.replace("op(q, k, v", call).replace("op(q, kv", call)
        raise InputError(
            error.what, where=error.where, numbers=error.numbers, way_out=way_out
        ) from None
    offset_values = offset_tensors(q_offset, k_offset)
    spec = at_offsets(spec, dtypes_of(offset_values))
    tensors |= offset_values | random_state
    check_contents(signature_of(spec), tensors, problem, k)
    mask = analysed(spec, walk_of_kernel(tile.kernel)).mask
    return MaskCall(spec, mask, problem, tensors, tile)


def _refuse_pages(spec: AttentionSpec, captures: Mapping[str, Any]) -> None:
    names = [name for name in (*PAGE_NAMES, *BOUNDARIES) if name in captures]
    if spec.paged and names:
        raise InputError(
            "a tile map of a paged cache shows one length, which is that of its shape",
            where=f"argument {names[0]}",
            numbers=f"spec {spec.name} has paged=True; given: {', '.join(names)}",
            way_out="fg.visualize(spec, (1, Hq, Hkv, Nq, Nk)) with the keys of one sequence as Nk",
        )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _mask_mod_spec(
    mask_mod: Callable[..., Any], sizes: Sizes, *, packed: bool
) -> tuple[AttentionSpec, dict[str, Any]]:
    """The spec of a mask_mod of flashgen or of torch, and the values that torch's captures."""
    try:
        tensors = record(mask_mod, None, torch.device("cpu")).tensors
    except FlashgenError:  # a mod of flashgen captures no tensors of torch
        tensors = ()
    if not tensors:
        try:
            return AttentionSpec(mask_mod=mask_mod, packed=packed), {}
        except SpecError as error:
            try:
                return _torch_spec(mask_mod, sizes, torch.device("cpu"), packed=packed)
            except FlashgenError:
                raise error from None
    return _torch_spec(mask_mod, sizes, tensors[0].device, packed=packed)


def _torch_spec(
    mask_mod: Callable[..., Any] | None,
    sizes: Sizes,
    device: torch.device,
    *,
    packed: bool = False,
    block_mask: Any = None,
) -> tuple[AttentionSpec, dict[str, Any]]:
    batch, heads_q, _, seq_q, seq_k = sizes
    traced, call_record = read(mask_mod, None, CallSizes(batch, heads_q, seq_q, seq_k, device))
    captures = traced.captures(call_record, device)
    lengths, blocks = (batch, heads_q, seq_q, seq_k), None
    if has_blocks(block_mask):
        blocks = layout_beside_mask(block_mask, traced, call_record, lengths)
    if blocks is not None:
        captures["layout"] = blocks.layout.live
    spec = AttentionSpec(
        mask_mod=traced.mask,
        name=traced.name,
        packed=packed,
        block_sparse=None if blocks is None else blocks.sparse,
    )
    return spec, {name: _on_cpu(value) for name, value in captures.items()}


def _block_mask_spec(block_mask: Any, sizes: Sizes) -> tuple[AttentionSpec, dict[str, Any]]:
    device = block_mask.kv_num_blocks.device
    batch, heads_q, heads_kv, seq_q, seq_k = sizes
    row = torch.empty(1, device=device)
    q, k = row.expand(batch, heads_q, seq_q, 1), row.expand(batch, heads_kv, seq_k, 1)
    return _torch_spec(mask_mod_of(block_mask, q, k), sizes, device, block_mask=block_mask)


def _sizes_of(shape: Any, captures: Mapping[str, Any], packed: bool) -> Sizes:
    ends = [captures.get(name) for name in BOUNDARIES]
    if shape is None and packed:
        last = [int(x[-1]) for x in ends if isinstance(x, torch.Tensor) and x.dim() == 1 and len(x)]
        if len(last) == 2:
            return 1, 1, 1, last[0], last[1]
    return sizes_of(shape)


def sizes_of(shape: Any) -> Sizes:
    """batch, heads_q, heads_kv, seq_q and seq_k.

    Raises:
        InputError: the shape is none of the known forms.
    """
    parts = shape
    if isinstance(shape, str):
        parts = [number_of_digits(part.strip()) for part in re.split(r"[,x]", shape)]
    elif isinstance(shape, Integral):
        parts = [shape]
    try:
        sizes = [] if parts is None else list(parts)
    except TypeError:
        sizes = []
    if all(isinstance(n, Integral) and not isinstance(n, bool) for n in sizes):
        sizes = [int(n) for n in sizes]
    numbers = all(type(n) is int and 0 <= n <= POSITION_LIMIT for n in sizes)
    if numbers and len(sizes) in (1, 2):
        return 1, 1, 1, sizes[0], sizes[-1]
    if numbers and len(sizes) == 3:
        return sizes[0], sizes[1], sizes[1], sizes[2], sizes[2]
    if numbers and len(sizes) == 5:
        return sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    raise InputError(
        "this is not a shape",
        where="argument shape",
        numbers=f"given {shape!r}"[:80] + f"; expected {_FORMS}, each at most {POSITION_LIMIT:,}",
        way_out="fg.visualize(mask, (1, 8, 4096))",
    )


def _kernel_tile(spec: AttentionSpec, arch: str, tile: Any, kernel: str) -> KernelTile:
    if isinstance(tile, KernelTile):
        return tile
    owns_keys = kernel in KEY_KERNELS
    if kernel not in ("forward", "dkdv", "fused", "dq"):
        raise InputError(
            "this kernel does not walk the tiles of a mask",
            where="argument kernel",
            numbers=f"given {kernel!r}; available: forward, fused, dkdv, dq",
            way_out='kernel="forward"',
        )
    if tile is not None:
        block_q, block_k = _checked_tile(tile)
        return KernelTile(block_q, block_k, owns_keys, kernel, "as given")
    if kernel == "forward":
        chosen = plan(spec, arch)
    else:
        passes = plan_backward(spec, arch, deterministic=kernel != "fused")
        plans = [planned for planned in passes.kernels if planned.kernel == kernel]
        if not plans:
            raise InputError(
                "the backward pass of this spec does not have this kernel",
                where="argument kernel",
                numbers=f"given {kernel!r}; planned for {arch}: "
                f"{', '.join(planned.kernel for planned in passes.kernels)}",
                way_out='kernel="dkdv", or a tile: tile=(64, 64)',
            )
        (chosen,) = plans
    return KernelTile.from_plan(chosen, kernel, f"planned for {chosen.arch}")


def _checked_tile(tile: Any) -> tuple[int, int]:
    try:
        sizes = list(tile)
    except TypeError:
        sizes = []
    numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
    if len(sizes) == 2 and numbers and all(0 < n <= POSITION_LIMIT for n in sizes):
        return sizes[0], sizes[1]
    raise InputError(
        "a tile is the number of its queries and the number of its keys",
        where="argument tile",
        numbers=f"given {tile!r}"[:80] + f"; each from 1 to {POSITION_LIMIT:,}",
        way_out="tile=(128, 64)",
    )
