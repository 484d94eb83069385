"""Decoding calls of `run`, `profile` and `plan`: few queries at the last positions of many keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashgen.shared import config
from flashgen.shared.call import INVARIANT
from flashgen.shared.errors import InputError
from flashgen.shared.signature import PAGE_NAMES, SCALE_NAMES
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.cli.arguments import (
    CallArguments,
    DecodingArguments,
    PlanArguments,
    RunArguments,
)
from flashgen.tools.cli.call import RandomCall
from flashgen.tools.cli.inputs import Shape, parse_shape

if TYPE_CHECKING:
    import torch
    from torch import Generator, Tensor

    from flashgen.tools.profile.decoding import DecodingPlan

OTHER_PAGES = 3
"""Pages of a cache that hold no key of the call."""


def sizes_of(arguments: DecodingArguments, shape: str, *specs: AttentionSpec) -> Shape:
    """The sizes of a call; with --decode, B,H,N has one query in each sequence.

    Raises:
        InputError: the shape has another form, or the options and the specs do not go together.
    """
    sizes = parse_shape(shape)
    paged = next((spec for spec in specs if spec.paged), None)
    if paged is not None and (arguments.decode or isinstance(arguments, CallArguments)):
        raise InputError(
            "a spec with a paged cache is called with pages of a size",
            where="option --page",
            numbers=f"spec {paged.name} has paged=True, and no --page is given",
            way_out="--decode --page 16; or the spec without paged=True",
        )
    if not arguments.decode:
        return sizes
    _check_options(arguments)
    if shape.count(",") == 2:
        sizes = replace(sizes, seq_q=1)
    group, rest = divmod(sizes.heads_q, max(sizes.heads_kv, 1))
    if 0 in (sizes.batch, sizes.seq_q, group) or rest or sizes.seq_q > sizes.seq_k:
        raise InputError(
            "this is not the shape of a decoding call",
            where="options --decode and --shape",
            numbers=f"{sizes}",
            way_out="sizes from 1 on, query heads a multiple of key heads, no more queries than "
            "keys: --shape B,H,N as in 2,8,256, or B,Hq,Hkv,Nq,Nk as in 1,32,8,1,131072",
        )
    return sizes


def _check_options(arguments: DecodingArguments) -> None:
    """Raises InputError for an option of calls that are not decoding calls."""
    values_by_option: dict[str, Any] = {}
    if isinstance(arguments, RunArguments):
        values_by_option |= {"--q-offset": arguments.q_offset, "--k-offset": arguments.k_offset}
    if isinstance(arguments, CallArguments | PlanArguments):
        values_by_option |= {"--backward": arguments.backward, "--tangent": arguments.tangent}
    if isinstance(arguments, PlanArguments):
        values_by_option |= {"--world": arguments.world, "--policy": arguments.policy != "derived"}
        values_by_option |= {"--certify": arguments.certify}
    wrong = [option for option, value in values_by_option.items() if value]
    if wrong:
        raise InputError(
            "a decoding call has its queries at the last positions, a derived plan and a forward "
            "pass alone",
            where=f"option {wrong[0]}",
            numbers=f"--decode with {' and '.join(wrong)}",
            way_out=f"leave {wrong[0]} or --decode out",
        )


@dataclass(frozen=True)
class ServedCall:
    """A call as the kernels compute it.

    Attributes:
        spec: the spec, with ``paged=True`` where the keys are in pages.
        operands: q, and keys and values or caches.
        options: as for `flashgen.calls.ops.run_forward`, with split_size.
        contiguous: the same call with contiguous keys and values, which codes stand for.
        pages: the pages of the caches; 0 for contiguous keys.
    """

    spec: AttentionSpec
    operands: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    contiguous: RandomCall
    pages: int = 0


def capacity_of(arguments: DecodingArguments, sizes: Shape) -> int:
    """The key positions of a sequence, up to the end of its last page."""
    page = arguments.page or 1
    return -(-sizes.seq_k // page) * page


def served_call(spec: AttentionSpec, call: RandomCall, arguments: DecodingArguments) -> ServedCall:
    """A call with contiguous keys as an operator makes it, for --decode as a server does.

    It has the splits of batch-invariant calls where `batch_invariant_mode` is on. With --page, keys
    and values are copied to shuffled pages of caches whose other slots are NaN, with --kv-dtype as
    codes with a scale for each page and key head.

    Raises:
        SpecError: the spec cannot have a paged cache.
    """
    q, k, v = call.operands
    codes = arguments.kv_dtype
    served_spec = spec.replace(paged=True, kv_dtype=codes) if arguments.page else spec
    size = arguments.split_size
    if size is None and config.batch_invariant():
        size = INVARIANT
    options = {**call.options, "split_size": size}
    if not arguments.page:
        return ServedCall(served_spec, call.operands, options, call)
    import torch

    from flashgen.shared.paged import contiguous_call

    seed = arguments.seed if isinstance(arguments, CallArguments) else 0
    generator = torch.Generator().manual_seed(seed)
    k_cache, table = _in_pages(k, arguments.page, generator)
    v_cache, _ = _in_pages(v, arguments.page, generator.manual_seed(seed))
    lengths = torch.full((len(k),), k.shape[2], dtype=torch.int32, device=k.device)
    tables = dict(zip(PAGE_NAMES, (table, lengths), strict=True))
    if codes is not None:
        (k_cache, tables[SCALE_NAMES[0]]), (v_cache, tables[SCALE_NAMES[1]]) = (
            _in_codes(cache, getattr(torch, codes)) for cache in (k_cache, v_cache)
        )
        _, *rows, _ = contiguous_call(q, k_cache, v_cache, tables)
        k, v = (x[0].view(x.shape[1], *lengths.shape, -1, x.shape[3]).transpose(0, 1) for x in rows)
        call = replace(call, operands=(q, k, v))
    options |= {"tensors": {**call.options["tensors"], **tables}, "q_offset": 0}
    return ServedCall(served_spec, (q, k_cache, v_cache), options, call, len(k_cache))


def decoding_plan(
    spec: AttentionSpec,
    arguments: DecodingArguments,
    sizes: Shape,
    options: Mapping[str, Any],
    arch: str,
) -> DecodingPlan:
    """The plan of a call and the predictions for it.

    Args:
        options: the scalars and captured tensors of the call, as `RandomCall.options`.

    Raises:
        InputError: split_size is not a number of keys that kernels can split.
        PlanError: the architecture is unknown, or no tile fits.
        SpecError: the spec cannot have a paged cache, or split keys.
    """
    from flashgen.calls.cpu.problem import array
    from flashgen.kernels.planner.traffic import LaunchSizes
    from flashgen.tools.profile.decoding import plan_decoding

    return plan_decoding(
        spec,
        arch,
        LaunchSizes(sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.seq_q, sizes.seq_k),
        page_size=arguments.page or 0,
        kv_dtype=arguments.kv_dtype,
        split_size=arguments.split_size,
        sram=arguments.sram,
        scalars=options["scalars"],
        captured={name: array(tensor) for name, tensor in options["tensors"].items()},
    )


def _in_pages(rows: Tensor, page: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """A cache [pages, heads, page, dim] of rows [batch, heads, keys, dim], and the page table."""
    import torch

    batch, heads, keys, dim = rows.shape
    width = -(-keys // page)
    numbers = torch.randperm(batch * width + OTHER_PAGES, generator=generator)[: batch * width]
    numbers = numbers.to(rows.device)
    padded = rows.new_full((batch, heads, width * page, dim), torch.nan)
    padded[:, :, :keys] = rows
    cache = rows.new_full((batch * width + OTHER_PAGES, heads, page, dim), torch.nan)
    cache[numbers] = padded.view(batch, heads, width, page, dim).transpose(1, 2).flatten(0, 1)
    return cache, numbers.view(batch, width).int()


def _in_codes(cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes of a cache and their scales [pages, heads]; those of NaN are NaN where codes have
    it, and scales of pages without keys are NaN."""
    import torch

    from flashgen.calls.runtime.append_kv import quantised, scales_of

    rows = cache.float().nan_to_num(0.0).flatten(2)
    scale = scales_of(rows, dtype)
    codes = quantised(cache, scale[..., None].expand(cache.shape[:3]), dtype)
    return codes, scale.masked_fill(cache.isnan().flatten(2).all(2), torch.nan)
