"""`flashgen.append_kv`, an operator that writes new keys and values to a paged cache in place."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.calls.ops.autograd import are_plain, is_plain
from flashgen.calls.runtime import backends
from flashgen.calls.runtime.append_kv import append, codes_of
from flashgen.calls.runtime.arguments.pages import (
    AppendOperands,
    check_append,
    check_coded,
    is_coded,
)
from flashgen.calls.runtime.arguments.refusals import refuse, refuse_jit_trace
from flashgen.shared import config
from flashgen.shared.errors import called_by_users

Tensor = torch.Tensor

_C = torch._C
_NAME = "append_kv"
_TENSORS = AppendOperands._fields


@called_by_users()
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    arch: str | None = None,
) -> None:
    """Writes new keys and values to the pages of a cache, in place.

    The places of the new rows are given in one of two ways. With ``page_table`` and
    ``cache_seqlens``, they are the last positions of their sequence: row i of n of sequence b is
    written to position p = cache_seqlens[b] - n + i, which is slot p % page_size of page
    page_table[b, p // page_size]. With ``slot_mapping``, token t is written to slot
    slot_mapping[t] % page_size of page slot_mapping[t] // page_size.

    The operator is also ``torch.ops.flashgen.append_kv``. A call is one launch on the current
    stream, waits for nothing, copies no cache and can be captured in a CUDA graph: a replay reads
    tables and lengths anew. It copies 16 bytes at once where all addresses and strides are
    multiples of 16 bytes; else 8, 4 or 2 bytes. torch.compile traces it in a full graph.

    On the CPU, tables, lengths and slots are checked before anything is written. On a GPU, a token
    whose place is impossible is skipped: no call writes outside the caches. Where several tokens
    have the same place, it is undefined which of them stays there. The caches do not overlap k
    and v.

    Args:
        k: [batch, heads_kv, rows, d], the new keys; or [1, heads_kv, total rows, d] with
            ``cu_seqlens``. float16, bfloat16 or float32; d is a multiple of 8.
        v: the new values, likewise with head dim d_v, which may differ from d.
        k_cache: [pages, heads_kv, page_size, d], of the dtype of k. Any strides with a contiguous
            last dimension: NHD caches [pages, page_size, heads_kv, d] as ``.transpose(1, 2)``, and
            K and V that share a tensor as views of it.
        v_cache: [pages, heads_kv, page_size, d_v], likewise.
        page_table: int32 [sequences, max_pages], the pages of each sequence in order.
        cache_seqlens: int32 [sequences], the keys of each sequence, the new ones included.
        slot_mapping: int64 [tokens], in the order of batch and rows; -1 skips a token.
        cu_seqlens: int32 [sequences + 1], the first row of each packed sequence and one beyond the
            last. Rows behind the last sequence are not written.
        k_scale: for caches of codes (torch.float8_e4m3fn, float8_e5m2 or int8), float32 of
            shape (), [heads_kv], [pages, heads_kv] or [pages, heads_kv, page_size]. A code is that
            of the number nearest to x / scale, in float32 and to even, saturated at the largest
            finite number of the codes; an infinity is saturated too. Rows that are codes already
            are copied without scales. NaN becomes the NaN of 8-bit
            floats and 0 in int8. With a scale of 0 all codes are 0. The rows are made codes by
            operations of torch, before the launch that writes them.
        v_scale: the same for the values.
        backend: "gpu", "emulator" or "tiled", as in `flashgen.attention`.
        arch: the architecture of the kernel, as in `flashgen.attention`.

    Raises:
        InputError: an argument is wrong, or a tensor requires a gradient; nothing has been written
            then.
        FlashgenError: compiling or launching failed.

    Source:
        Page tables as in FlashAttention-3 (page_table, cache_seqlens); slots as in vLLM
        (slot_mapping).
    """
    if k_scale is not None or v_scale is not None or (is_coded(k_cache) and not is_coded(k)):
        k_scale, v_scale = check_coded(k, v, k_cache, v_cache, k_scale, v_scale)
        tables = page_table, cache_seqlens, slot_mapping, cu_seqlens
        k, v = codes_of(AppendOperands(k, v, k_cache, v_cache, *tables), k_scale, v_scale)
    operands = AppendOperands(
        k, v, k_cache, v_cache, page_table, cache_seqlens, slot_mapping, cu_seqlens
    )
    keywords = dict(zip(_TENSORS[4:], operands[4:], strict=True), backend=backend, arch=arch)
    if torch.compiler.is_compiling():
        torch.ops.flashgen.append_kv.default(*operands[:4], **keywords)
        return
    index = tuple(tensor for tensor in operands[4:] if tensor is not None)
    if is_plain(k, v, k_cache) and are_plain((v_cache, *index)) and not k.is_meta:
        _refuse_gradients(operands)
        append(operands, backend, arch)
        # What torch does for an operator that changes a tensor, so that autograd notices it.
        torch.autograd.graph.increment_version(
            [cache for cache in (k_cache, v_cache) if not cache.is_inference()]
        )
        return
    refuse_jit_trace()
    check_append(operands)
    _check_choice(backend, arch)
    _overload(*operands[:4], **keywords)


def _check_choice(backend: object, arch: object) -> None:
    """Raises InputError for what torch's schema would refuse without an explanation."""
    if backend is not None and config.split_backend(backend) is None:
        backends.choose(backend, torch.device("cpu"))  # type: ignore[arg-type]
    if arch is not None and not isinstance(arch, str):
        backends.arch_of(arch, "tiled", torch.device("cpu"))  # type: ignore[arg-type]


def _refuse_gradients(operands: AppendOperands) -> None:
    if not torch.is_grad_enabled():
        return
    named = zip(_TENSORS, operands, strict=True)
    needing = [name for name, tensor in named if tensor is not None and tensor.requires_grad]
    if needing:
        refuse(
            "a cache that is written in place has no gradients",
            f"argument {needing[0]} of append_kv",
            f"requires_grad is True for {', '.join(needing)}",
            "torch.no_grad() around the call, or .detach(); to train, flashgen.attention(spec) on "
            "the keys and values themselves",
        )


def _operands(tensors: tuple[Any, ...], named: dict[str, Any]) -> AppendOperands:
    """The tensors from the arguments of the operator, without those that have their defaults."""
    rest = [named.get(name) for name in _TENSORS[len(tensors) :]]
    return AppendOperands(*tensors, *rest)


def _compute(*tensors: Any, **named: Any) -> None:
    append(_operands(tensors, named), named.get("backend"), named.get("arch"))


def _fake(*tensors: Any, **named: Any) -> None:
    check_append(_operands(tensors, named))


def _autograd(keyset: Any, *tensors: Any, **named: Any) -> None:
    _refuse_gradients(_operands(tensors, named))
    _overload.redispatch(keyset & _C._after_autograd_keyset, *tensors, **named)


def _in_place(keyset: Any, *tensors: Any, **named: Any) -> None:
    operands = _operands(tensors, named)
    torch.autograd.graph.increment_version([operands.k_cache, operands.v_cache])
    _overload.redispatch(keyset & _C._after_ADInplaceOrView_keyset, *tensors, **named)


def _mapped(*_: Any, **__: Any) -> None:
    refuse(
        "torch.vmap cannot map a call that writes in place",
        "append_kv inside of torch.vmap",
        "one cache serves all sequences",
        "one call for all of them: k and v [batch, heads, rows, head dim]",
    )


def _register() -> Any:
    library: Any = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
    index = ", ".join(f"Tensor? {name}=None" for name in _TENSORS[4:])
    library.define(
        f"{_NAME}(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, *, {index}, "
        "str? backend=None, str? arch=None) -> ()",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    for device in ("CPU", "CUDA"):
        library.impl(_NAME, _compute, device)
    library.impl(_NAME, _mapped, "FuncTorchBatched")
    library.impl(_NAME, _autograd, "Autograd", with_keyset=True)
    library.impl(_NAME, _in_place, "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"flashgen::{_NAME}", _fake, lib=library)
    return library


# Registered with the import, and not by the first call, which torch.compile may be tracing.
_library = _register()
_overload = torch.ops.flashgen.append_kv.default
