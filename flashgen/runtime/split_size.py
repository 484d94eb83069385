"""The argument split_size of a call: its checks, and the scalar that it becomes.

A call with split_size is a call of a variant of its spec (`flashgen.language.signature.split`).
"""

from __future__ import annotations

import operator

import torch

from flashgen.call import CheckedCall
from flashgen.dtypes import POSITION_LIMIT
from flashgen.runtime.check_basics import refuse
from flashgen.signature import OFFSETS, SPLIT, CallSignature

Tensor = torch.Tensor

STEP = 16
"""split_size is a multiple of the keys of one matrix product."""


def scalar_of(split_size: object) -> dict[str, int]:
    """The value of `flashgen.signature.SPLIT`; empty where the keys are not split.

    Raises:
        InputError: the argument is neither None nor a multiple of 16. While a graph is traced, a
            number may be a symbol: it is checked when the graph runs.
    """
    if split_size is None or (type(split_size) is int and split_size == 0):
        return {}
    if isinstance(split_size, torch.SymInt):
        return {SPLIT: split_size}  # type: ignore[dict-item]
    try:
        found = operator.index(split_size)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if isinstance(split_size, bool | Tensor):
        found = -1
    if not torch.compiler.is_compiling():
        _check(found, split_size)
    return {SPLIT: found}


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


def _check(found: int, given: object) -> None:
    if found % STEP or not STEP <= found <= POSITION_LIMIT:
        refuse(
            "split_size is not a number of keys that kernels can split",
            "argument split_size",
            f"given {given!r:.200}; a multiple of {STEP} from {STEP} to {POSITION_LIMIT:,}",
            "split_size=512, or None for one part with all keys",
        )
