"""Tangents of standard attention: those of the oracle, by torch's forward mode."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from flashgen.reference.oracle import attention
from flashgen.reference.problem import OracleArguments
from flashgen.spec.language.spec import AttentionSpec

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor


def tangents(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    along: Mapping[str, Tensor],
    *,
    exact: bool = True,
    **call: Unpack[OracleArguments],
) -> tuple[Tensor, Tensor]:
    """The tangents of `attention`'s results, in float64: the reference of all tangent passes.

    Args:
        spec, q, k, v, call: as in `attention`.
        along: the tangents of q, k, v and of learned tensors, by name, those that are not 0.
        exact: as in `attention`.

    Returns:
        The tangents of out and lse, 0 for rows without a key.

    Raises:
        InputError: as in `attention`.
    """
    with forward_ad.dual_level():

        def moving(name: str, value: Tensor) -> Tensor:
            if exact and value.is_floating_point():
                value = value.double()
            if name not in along:
                return value
            made: Tensor = forward_ad.make_dual(value, along[name].to(value.dtype))  # type: ignore[no-untyped-call]
            return made

        operands = [moving(name, value) for name, value in zip("qkv", (q, k, v), strict=True)]
        given = call.get("tensors") or {}
        call["tensors"] = {
            name: moving(name, value) if name in along else value for name, value in given.items()
        }
        found = map(forward_ad.unpack_dual, attention(spec, *operands, exact=exact, **call))
        out, lse = (torch.zeros_like(x) if tangent is None else tangent for x, tangent in found)
        return out, lse


same_dtype_tangents = functools.partial(tangents, exact=False)
