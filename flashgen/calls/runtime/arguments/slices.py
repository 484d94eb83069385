"""Calls on a slice of a larger attention: checks `h_offset` and `whole`, returns the scalars that
kernels get. The same for `split_size`.

Such a call is a call of a variant of its spec, which has them as scalars
(`flashgen.spec.language.signature.in_whole` and `split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashgen.calls.runtime.arguments.refusals import known, refuse, whole_number
from flashgen.shared.call import CheckedCall
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.signature import OFFSETS, PAGE_NAMES, SPLIT, WHOLE, CallSignature

Tensor = torch.Tensor

SIZES = ("heads", "seq_q", "seq_k")
"""The sizes that the argument ``whole`` of a call may have, as mods name them."""

STEP = 16
"""split_size is a multiple of the keys of one matrix product."""


def scalars_of_part(
    h_offset: int,
    whole: Mapping[str, int] | None,
    split_size: int | None,
    q: Tensor,
    k: Tensor,
    captures: Mapping[str, Any],
) -> dict[str, int]:
    """The scalars of a call on a part of a whole, and of one with split keys; else empty.

    Args:
        captures: the captures of the call; the keys of a paged cache are those of its page table.
    """
    size = {} if split_size is None else split_scalar(split_size)
    if not size and whole is None and type(h_offset) is int and h_offset == 0:
        return {}
    table = captures.get(PAGE_NAMES[0])
    pages = table.shape[1] if isinstance(table, Tensor) and table.dim() == 2 else 1
    return scalars_of(h_offset, whole, q, k, pages) | size


def scalars_of(
    h_offset: object, whole: object, q: Tensor, k: Tensor, pages: int = 1
) -> dict[str, int]:
    """The values of `shared.signature.WHOLE`; sizes that are not given are those of the call.

    Args:
        h_offset: the number of the first query head.
        whole: {"heads": ..., "seq_q": ..., "seq_k": ...}, each of them optional; None for {}.
        pages: the pages of a sequence, each with the keys of an entry of k.

    Raises:
        InputError: a value is not a whole number, or the part is not inside the whole.
    """
    given_sizes = {} if whole is None else whole
    if not isinstance(given_sizes, Mapping) or not set(given_sizes) <= set(SIZES):
        refuse(
            "whole is a mapping of sizes",
            "argument whole",
            f"given {given_sizes!r:.200}; sizes: {', '.join(SIZES)}",
            'whole={"heads": 32}, with the sizes in which the whole is larger than the call',
        )
    first = _integer("h_offset", h_offset)
    of_q, of_k = (tuple(getattr(x, "shape", ())) for x in (q, k))
    if len(of_q) != 4 or len(of_k) != 4:  # the checks of operands name the mistake
        return dict.fromkeys(WHOLE, 0)
    own = dict(zip(SIZES, (of_q[1], of_q[2], of_k[2] * pages), strict=True))
    sizes = {name: _integer(f"whole[{name!r}]", given_sizes.get(name, own[name])) for name in SIZES}
    if known(first < 0) or known(first + own["heads"] > sizes["heads"]):
        refuse(
            "the heads of the call are not among those of the whole",
            "argument h_offset",
            f"heads {first} to {first + own['heads'] - 1} of {sizes['heads']}",
            'whole={"heads": ...} with the number of all query heads, and h_offset with the number '
            "of the first one",
        )
    for name in SIZES[1:]:
        if known(sizes[name] < own[name]):
            refuse(
                f"the whole has fewer positions than the call: {name}",
                "argument whole",
                f"whole {sizes[name]:,}, call {own[name]:,}",
                f'whole={{"{name}": {own[name]}}} or more',
            )
    return dict(zip(WHOLE, (first, *sizes.values()), strict=True))


def _integer(name: str, value: object) -> int:
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    number = whole_number(value)
    if number is None:
        refuse(
            f"{name} is not a whole number",
            f"argument {name.partition('[')[0]}",
            f"given {value!r:.200}",
            "a Python int",
        )
    return number


def split_scalar(split_size: object) -> dict[str, int]:
    """The value of `flashgen.shared.signature.SPLIT`; empty where the keys are not split.

    Raises:
        InputError: the argument is neither None nor a multiple of 16. While a graph is traced, a
            number may be a symbol: it is checked when the graph runs.
    """
    if split_size is None or (type(split_size) is int and split_size == 0):
        return {}
    if isinstance(split_size, torch.SymInt):
        return {SPLIT: split_size}  # type: ignore[dict-item]
    number = whole_number(split_size)
    size = -1 if number is None else number
    if not torch.compiler.is_compiling():
        _check(size, split_size)
    return {SPLIT: size}


def splits_of(signature: CallSignature, call: CheckedCall) -> int:
    """The splits in which a batch entry can have keys.

    Raises:
        InputError: split_size is not a number of keys that kernels can split.
    """
    size, first = int(call.scalars[SPLIT]), call.k_offset
    _check(size, size)
    if OFFSETS[1] in signature.offsets:  # the host does not know where the keys begin
        first = size - 1
    return (first + max(call.seq_k, 1) - 1) // size - first // size + 1


def _check(size: int, given: object) -> None:
    if size % STEP or not STEP <= size <= POSITION_LIMIT:
        refuse(
            "split_size is not a number of keys that kernels can split",
            "argument split_size",
            f"given {given!r:.200}; a multiple of {STEP} from {STEP} to {POSITION_LIMIT:,}",
            "split_size=512, or None for one part with all keys",
        )
