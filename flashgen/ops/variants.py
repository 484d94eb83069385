"""The operator that computes a call: that of the spec, or of a variant of it.

Arguments of a call such as `split_size` or offsets in tensors change the kernels. The call is then
one of a variant of the spec (`flashgen.language.signature`), with more scalars and tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from flashgen.ops.operator import Operator
from flashgen.ops.registration import operator_of
from flashgen.runtime.backends import TAKES
from flashgen.runtime.check_basics import refuse
from flashgen.runtime.programs import Program, Variant, program_of
from flashgen.signature import BOUNDARIES

if TYPE_CHECKING:
    from flashgen.language.spec import AttentionSpec

Tensor = torch.Tensor


def operator_of_variant(spec: AttentionSpec | Program, variant: Variant) -> Operator:
    return operator_of(program_of(spec).variant(variant))


@functools.lru_cache(maxsize=1024)
def planned_split(
    spec: AttentionSpec | Program,
    device: str,
    heads_kv: int,
    backend: str | None,
    arch: str | None,
    dtype: torch.dtype,
) -> int:
    """The split_size of a call with a paged cache that gives none.

    It depends on the spec, the dtype, the architecture, its number of SMs and the number of key
    heads alone, so that the bits of a row depend on nothing else of the call.
    """
    program = program_of(spec).of_dtype(dtype)
    if torch.device(device).type not in TAKES.values() or program.signature.dtype is None:
        return 0  # a meta tensor; or the checks of operands name the mistake
    return program.planned_split(program.target(backend, arch, torch.device(device)), heads_kv)


def check_positions_of_pages(q_offset: object, k_offset: object) -> None:
    """Checks the offsets of a call with a paged cache.

    Raises:
        InputError: q_offset is a number, or k_offset is given.
    """
    if q_offset is not None and not isinstance(q_offset, Tensor):
        refuse(
            "the queries of a call with a paged cache have no common position",
            "argument q_offset",
            f"given {q_offset!r:.200}; queries without it are the last positions of their sequence",
            "no q_offset, or an int32 tensor with the first position of each sequence",
        )
    if isinstance(k_offset, Tensor) or k_offset != 0:
        refuse(
            "the keys of a paged cache are counted from 0 in each sequence",
            "argument k_offset",
            f"given {k_offset!r:.200}",
            "no k_offset",
        )


def packs_queries(captures: Mapping[str, Any]) -> bool:
    """Whether the captures of a call with a paged cache have the boundaries of its queries."""
    return BOUNDARIES[0] in captures
