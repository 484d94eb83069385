"""Calls on a slice of a larger attention: checks `h_offset` and `whole`, returns the scalars that
kernels get. Checks `split_size` too.

Such a call is a call of a variant of its spec, which has them as scalars
(`flashgen.spec.language.signature.in_whole` and `split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from flashgen.calls.runtime.arguments.refusals import is_known, refuse, whole_number
from flashgen.shared.call import INVARIANT, CheckedCall
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
    q: Tensor,
    k: Tensor,
    captures: Mapping[str, Any],
) -> dict[str, int]:
    """The scalars of a call on a part of a whole; else empty.

    Args:
        captures: the captures of the call; a page table decides how many keys a paged cache has.
    """
    if whole is None and type(h_offset) is int and h_offset == 0:
        return {}
    table = captures.get(PAGE_NAMES[0])
    pages = table.shape[1] if isinstance(table, Tensor) and table.dim() == 2 else 1
    return scalars_of(h_offset, whole, q, k, pages)


def scalars_of(
    h_offset: object, whole: object, q: Tensor, k: Tensor, pages: int = 1
) -> dict[str, int]:
    """The values of `shared.signature.WHOLE`; the call replaces sizes that are not given.

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
    q_shape, k_shape = (tuple(getattr(x, "shape", ())) for x in (q, k))
    if len(q_shape) != 4 or len(k_shape) != 4:  # the checks of operands name the mistake
        return dict.fromkeys(WHOLE, 0)
    call_sizes = dict(zip(SIZES, (q_shape[1], q_shape[2], k_shape[2] * pages), strict=True))
    sizes = {x: _integer(f"whole[{x!r}]", given_sizes.get(x, call_sizes[x])) for x in SIZES}
    if is_known(first < 0) or is_known(first + call_sizes["heads"] > sizes["heads"]):
        refuse(
            "the heads of the call are not among those of the whole",
            "argument h_offset",
            f"heads {first} to {first + call_sizes['heads'] - 1} of {sizes['heads']}",
            'whole={"heads": ...} with the number of all query heads, and h_offset with the number '
            "of the first one",
        )
    for name in SIZES[1:]:
        if is_known(sizes[name] < call_sizes[name]):
            refuse(
                f"the whole has fewer positions than the call: {name}",
                "argument whole",
                f"whole {sizes[name]:,}, call {call_sizes[name]:,}",
                f'whole={{"{name}": {call_sizes[name]}}} or more',
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


def split_number(split_size: object) -> int:
    """The number of keys of a split that a call gives; 0 where it gives none.

    Raises:
        InputError: the argument is neither None nor 0, nor `INVARIANT`, nor a multiple of 16.
    """
    if split_size is None or (type(split_size) is int and split_size in (0, INVARIANT)):
        return 0
    number = whole_number(split_size)
    if number is None or number % STEP or not STEP <= number <= POSITION_LIMIT:
        refuse_split(split_size)
    return number


def refuse_split(split_size: object) -> NoReturn:
    """Raises InputError for a split_size that is none."""
    refuse(
        "split_size is not a number of keys that kernels can split",
        "argument split_size",
        f"given {split_size!r:.200}; a multiple of {STEP} from {STEP} to {POSITION_LIMIT:,}",
        "split_size=512, or 0 for one thread block with all keys of a row",
    )


def splits_of(signature: CallSignature, call: CheckedCall) -> int:
    """The splits in which a batch entry can have keys."""
    size, first = int(call.scalars[SPLIT]), call.k_offset
    if OFFSETS[1] in signature.offsets:  # the host does not know where the keys begin
        first = size - 1
    return (first + max(call.seq_k, 1) - 1) // size - first // size + 1
