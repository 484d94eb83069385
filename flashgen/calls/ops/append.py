"""`flashgen.append_kv`, an operator that writes new keys and values to a paged cache in place."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.calls.ops.autograd import are_plain, is_plain
from flashgen.calls.runtime import backends
from flashgen.calls.runtime.append_kv import append
from flashgen.calls.runtime.arguments.new_rows import AppendOperands, check_append
from flashgen.calls.runtime.arguments.refusals import refuse, refuse_jit_trace
from flashgen.shared import config
from flashgen.shared.errors import called_by_users

Tensor = torch.Tensor

_C = torch._C
_NAMES = {False: "append_kv", True: "append_kv_writing_scales"}
"""The operators, by whether they write scales."""

_TENSORS = AppendOperands._fields[:-1]


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
    write_scales: bool = False,
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
    have the same place, it is undefined which of them stays there. What is written has no element
    in common with another argument.

    Args:
        k: [batch, heads_kv, rows, d], the new keys; or [1, heads_kv, total rows, d] with
            ``cu_seqlens``. float16, bfloat16 or float32; d is a multiple of 8.
        v: the new values, likewise with head dim d_v, which may differ from d.
        k_cache: [pages, heads_kv, page_size, d], of the dtype of k. Any strides with a contiguous
            last dimension: NHD caches [pages, page_size, heads_kv, d] as ``.transpose(1, 2)``, and
            K and V that share a tensor as views of it.
        v_cache: [pages, heads_kv, page_size, d_v], likewise. Where v is k[..., :d_v] and v_cache
            k_cache[..., :d_v], the values are columns of the keys and are written once.
        page_table: int32 [sequences, max_pages], the pages of each sequence in order.
        cache_seqlens: int32 [sequences], the keys of each sequence, the new ones included.
        slot_mapping: int64 [tokens], in the order of batch and rows; -1 skips a token.
        cu_seqlens: int32 [sequences + 1], the first row of each packed sequence and one beyond the
            last. Rows behind the last sequence are not written.
        k_scale: for caches of codes (torch.float8_e4m3fn, float8_e5m2 or int8), float32 of
            shape (), [heads_kv], [pages, heads_kv] or [pages, heads_kv, page_size]. A code is that
            of the number nearest to x / scale, in float32 and to even, saturated at the largest
            finite number of the codes; an infinity is saturated too. Rows that are codes already
            are copied without scales. NaN becomes the NaN of 8-bit floats and 0 in int8. With a
            scale of 0 all codes are 0.
        v_scale: the same for the values.
        write_scales: whether the call writes k_scale and v_scale, of shape [pages, heads_kv,
            page_size], at the places of the new rows, and their codes with these scales. The scale
            of a row is its largest |x|, divided in float32 by the largest finite number of the
            codes. It is infinite or NaN where the row has an infinity or NaN, and attention
            reads NaN for its elements then.
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
    operands = AppendOperands(
        *(k, v, k_cache, v_cache, page_table, cache_seqlens, slot_mapping, cu_seqlens),
        *(k_scale, v_scale, write_scales),
    )
    keywords = dict(zip(_TENSORS[4:], operands[4:-1], strict=True), backend=backend, arch=arch)
    if torch.compiler.is_compiling():
        if write_scales and (k_scale is None or v_scale is None):
            check_append(operands)  # raises what torch's schema would refuse without an explanation
        _overloads[bool(write_scales)](*operands[:4], **keywords)
        return
    optional = tuple(tensor for tensor in operands[4:-1] if tensor is not None)
    if is_plain(k, v, k_cache) and are_plain((v_cache, *optional)) and not k.is_meta:
        _refuse_gradients(operands)
        append(operands, backend, arch)
        _count_changes(operands)
        return
    refuse_jit_trace()
    check_append(operands)
    _check_choice(backend, arch)
    _overloads[write_scales](*operands[:4], **keywords)


def _check_choice(backend: object, arch: object) -> None:
    """Raises InputError for what torch's schema would refuse without an explanation."""
    if backend is not None and config.split_backend(backend) is None:
        backends.choose(backend, torch.device("cpu"))  # type: ignore[arg-type]
    if arch is not None and not isinstance(arch, str):
        backends.arch_of(arch, "tiled", torch.device("cpu"))  # type: ignore[arg-type]


def _refuse_gradients(operands: AppendOperands) -> None:
    if not torch.is_grad_enabled():
        return
    tensors = operands.tensors.items()
    needing = [name for name, tensor in tensors if tensor is not None and tensor.requires_grad]
    if needing:
        refuse(
            "a cache that is written in place has no gradients",
            f"argument {needing[0]} of append_kv",
            f"requires_grad is True for {', '.join(needing)}",
            "torch.no_grad() around the call, or .detach(); to train, flashgen.attention(spec) on "
            "the keys and values themselves",
        )


def _count_changes(operands: AppendOperands) -> None:
    """What torch does for an operator that changes tensors, so that autograd notices it."""
    changed = [operands.k_cache, operands.v_cache]
    if operands.write_scales:
        changed += [x for x in (operands.k_scale, operands.v_scale) if x is not None]
    torch.autograd.graph.increment_version([x for x in changed if not x.is_inference()])


def _mapped(*_: Any, **__: Any) -> None:
    refuse(
        "torch.vmap cannot map a call that writes in place",
        "append_kv inside of torch.vmap",
        "one cache serves all sequences",
        "one call for all of them: k and v [batch, heads, rows, head dim]",
    )


def _register(library: Any, write_scales: bool) -> Any:
    """Defines the operator, and returns its overload."""
    name = _NAMES[write_scales]
    scales = [f"Tensor? {tensor_name}=None" for tensor_name in _TENSORS[8:]]
    if write_scales:
        scales = [
            f"Tensor({a}!) {tensor_name}" for a, tensor_name in zip("cd", _TENSORS[8:], strict=True)
        ]
    index = [f"Tensor? {tensor_name}=None" for tensor_name in _TENSORS[4:8]]
    library.define(
        f"{name}(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, *, "
        f"{', '.join((*scales, *index))}, str? backend=None, str? arch=None) -> ()",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )

    def operands_of(tensors: tuple[Any, ...], named: dict[str, Any]) -> AppendOperands:
        """The tensors from the arguments, without those that have their defaults."""
        remaining = (named.get(tensor_name) for tensor_name in _TENSORS[len(tensors) :])
        return AppendOperands._make((*tensors, *remaining, write_scales))

    def compute(*tensors: Any, **named: Any) -> None:
        append(operands_of(tensors, named), named.get("backend"), named.get("arch"))

    def fake(*tensors: Any, **named: Any) -> None:
        check_append(operands_of(tensors, named))

    def autograd(keyset: Any, *tensors: Any, **named: Any) -> None:
        _refuse_gradients(operands_of(tensors, named))
        overload.redispatch(keyset & _C._after_autograd_keyset, *tensors, **named)

    def in_place(keyset: Any, *tensors: Any, **named: Any) -> None:
        _count_changes(operands_of(tensors, named))
        overload.redispatch(keyset & _C._after_ADInplaceOrView_keyset, *tensors, **named)

    for device in ("CPU", "CUDA"):
        library.impl(name, compute, device)
    library.impl(name, _mapped, "FuncTorchBatched")
    library.impl(name, autograd, "Autograd", with_keyset=True)
    library.impl(name, in_place, "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"flashgen::{name}", fake, lib=library)
    overload = getattr(torch.ops.flashgen, name).default
    return overload


# Registered with the import, and not by the first call, which torch.compile may be tracing.
_library: Any = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
_overloads = {write_scales: _register(_library, write_scales) for write_scales in _NAMES}
