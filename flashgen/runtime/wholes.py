"""h_offset, the sizes of the whole of which a call computes a part, and split_size.

Such a call is a call of a variant of its spec, which has them as scalars
(`flashgen.language.signature.in_whole` and `split`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from flashgen.runtime.check_basics import known, refuse
from flashgen.runtime.split_size import scalar_of
from flashgen.signature import PAGE_NAMES, WHOLE

Tensor = torch.Tensor

SIZES = ("heads", "seq_q", "seq_k")
"""The sizes that the argument ``whole`` of a call may have, as mods name them."""


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
    size = scalar_of(split_size)
    if not size and whole is None and type(h_offset) is int and h_offset == 0:
        return {}
    table = captures.get(PAGE_NAMES[0])
    pages = table.shape[1] if isinstance(table, Tensor) and table.dim() == 2 else 1
    return scalars_of(h_offset, whole, q, k, pages) | size


def scalars_of(
    h_offset: object, whole: object, q: Tensor, k: Tensor, pages: int = 1
) -> dict[str, int]:
    """The values of `flashgen.signature.WHOLE`; sizes that are not given are those of the call.

    Args:
        h_offset: the number of the first query head.
        whole: {"heads": ..., "seq_q": ..., "seq_k": ...}, each of them optional; None for {}.
        pages: the pages of a sequence, each with the keys of an entry of k.

    Raises:
        InputError: a value is not a whole number, or the part is not inside the whole.
    """
    given = {} if whole is None else whole
    if not isinstance(given, Mapping) or not set(given) <= set(SIZES):
        refuse(
            "whole is a mapping of sizes",
            "argument whole",
            f"given {given!r:.200}; sizes: {', '.join(SIZES)}",
            'whole={"heads": 32}, with the sizes in which the whole is larger than the call',
        )
    first = _integer("h_offset", h_offset)
    of_q, of_k = (tuple(getattr(x, "shape", ())) for x in (q, k))
    if len(of_q) != 4 or len(of_k) != 4:  # the checks of operands name the mistake
        return dict.fromkeys(WHOLE, 0)
    own = dict(zip(SIZES, (of_q[1], of_q[2], of_k[2] * pages), strict=True))
    sizes = {name: _integer(f"whole[{name!r}]", given.get(name, own[name])) for name in SIZES}
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
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or isinstance(value, bool | Tensor):
        refuse(
            f"{name} is not a whole number",
            f"argument {name.partition('[')[0]}",
            f"given {value!r:.200}",
            "a Python int",
        )
    return found
