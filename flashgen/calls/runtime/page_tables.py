"""Page tables from FlashInfer's form, in which the pages of all sequences are in one list."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.calls.runtime.arguments.refusals import (
    check_ascending,
    check_is_tensor,
    is_known,
    refuse,
)
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.errors import called_by_users

Tensor = torch.Tensor

_WHERE = "argument {} of page_table"


@called_by_users()
def page_table(
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    *,
    max_pages: int | None = None,
) -> tuple[Tensor, Tensor]:
    """A page table and lengths from FlashInfer's form of a paged cache.

    Only torch operations on the device of the tensors. Without ``max_pages``, the width of the
    table is read from the device, which waits for it. With ``max_pages``, no call waits, and calls
    can be captured in CUDA graphs and compiled in a full graph.

    On the CPU the contents are checked, but not while torch.compile traces. On a GPU that would
    need a synchronisation: a ``max_pages`` below the longest list cuts lists off there.

    Args:
        indptr: int32 [batch + 1]; the pages of sequence b are indices[indptr[b]:indptr[b + 1]].
        indices: int32 [total pages] or longer, page numbers.
        last_page_len: int32 [batch], the keys in the last page of each sequence, from 1 to
            page_size; 0 for a sequence without pages.
        page_size: keys per page.
        max_pages: the width of the table; None for the longest list of pages.

    Returns:
        The page table, int32 [batch, max_pages], padded with -1, and the keys of each sequence,
        int32 [batch]: arguments of `flashgen.append_kv`.

    Raises:
        InputError: a tensor has the wrong dtype, shape or device; or, on the CPU, contents that no
            cache has.

    Source:
        The layout of FlashInfer's paged wrappers: paged_kv_indptr, paged_kv_indices and
        paged_kv_last_page_len.
    """
    _check(indptr, indices, last_page_len, page_size, max_pages)
    if indptr.device.type == "cpu" and not _is_traced(indptr):
        _check_contents(indptr.tolist(), indices, last_page_len.tolist(), page_size, max_pages)
    counts = indptr.diff()
    width = max_pages
    if width is None:
        width = int(counts.max()) if counts.shape[0] else 0
    column = torch.arange(width, dtype=torch.int32, device=indptr.device)
    inside = column < counts.unsqueeze(1)
    table = torch.full_like(inside, -1, dtype=torch.int32)
    if indices.shape[0]:
        # In 64 bits: the sums of a padded indptr may be anything.
        first = indptr.narrow(0, 0, counts.shape[0]).unsqueeze(1).long()
        index = (first + column).clamp(0, indices.shape[0] - 1)
        table = torch.where(inside, indices.take(index), table)
    lengths = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0)
    return table, lengths.int()


def _is_traced(tensor: Tensor) -> bool:
    """True for a tensor without contents: torch.compile traces the call, or it is a fake."""
    from torch._subclasses.fake_tensor import is_fake

    return torch.compiler.is_compiling() or is_fake(tensor)


def _check(indptr: Any, indices: Any, last_page_len: Any, page_size: Any, max_pages: Any) -> None:
    tensors = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    for name, tensor in tensors.items():
        way_out = f"torch.tensor({name}, dtype=torch.int32)"
        check_is_tensor(name, tensor, way_out, _WHERE.format(name))
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or tensor.device != indptr.device:
            refuse(
                f"{name} is not an int32 tensor of one dimension on the device of indptr",
                _WHERE.format(name),
                f"{tensor.dtype}, shape {tuple(tensor.shape)}, on {tensor.device}",
                f"{name}.flatten().to(indptr.device, torch.int32)",
            )
    if is_known(indptr.shape[0] != last_page_len.shape[0] + 1):
        refuse(
            "indptr and last_page_len have different numbers of sequences",
            "arguments indptr and last_page_len of page_table",
            f"shapes {tuple(indptr.shape)} and {tuple(last_page_len.shape)}",
            "indptr [batch + 1] and last_page_len [batch]",
        )
    for name, number, least in (("page_size", page_size, 1), ("max_pages", max_pages, 0)):
        none = name == "max_pages" and number is None
        whole = isinstance(number, int | torch.SymInt) and not isinstance(number, bool)
        if not none and (
            not whole or is_known(number < least) or is_known(number > POSITION_LIMIT)
        ):
            refuse(
                f"{name} is not a whole number from {least} to {POSITION_LIMIT:,}",
                _WHERE.format(name),
                f"given {number!r:.200}",
                f"{name}=16" if name == "page_size" else "max_pages=None for the longest list",
            )


def _check_contents(
    ends: list[int], indices: Tensor, last: list[int], page_size: int, max_pages: int | None
) -> None:
    total_text = "the number of pages", f"{len(indices):,} indices"
    counts = check_ascending(
        "indptr", ends, len(indices), total_text, "pages", _WHERE.format("indptr")
    )
    for b, (count, length) in enumerate(zip(counts, last, strict=True)):
        least, most = (1, page_size) if count else (0, 0)
        if not least <= length <= most:
            refuse(
                "a last page holds an impossible number of keys",
                f"argument last_page_len of page_table, sequence {b}",
                f"last_page_len[{b}] is {length:,}; {count:,} pages of {page_size:,}",
                f"from {least:,} to {most:,}",
            )
        keys = (count - 1) * page_size + length
        if keys > POSITION_LIMIT:
            refuse(
                "a sequence has more keys than kernels support",
                f"argument page_size of page_table, sequence {b}",
                f"{count:,} pages of {page_size:,} keys; at most {POSITION_LIMIT:,} keys",
                "smaller pages",
            )
    used = indices[: ends[-1]]
    if used.numel() and int(used.min()) < 0:
        refuse(
            "a page number is negative",
            _WHERE.format("indices"),
            f"the smallest of {used.numel():,} is {int(used.min()):,}",
            "numbers of pages, from 0 on; indptr says which of them a sequence has",
        )
    longest = max(counts, default=0)
    if max_pages is not None and longest > max_pages:
        refuse(
            "a sequence has more pages than the table is wide",
            _WHERE.format("max_pages"),
            f"max_pages {max_pages:,}; the longest list has {longest:,}",
            f"max_pages={longest}, or None",
        )
