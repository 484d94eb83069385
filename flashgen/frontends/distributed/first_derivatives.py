"""Refusals of derivatives that calls over ranks do not have, of which torch would make zeros."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from flashgen.frontends.distributed.exchange import WHERE
from flashgen.shared.errors import InputError

Tensor = torch.Tensor


class FirstDerivative(torch.autograd.Function):
    """The base of functions that have first derivatives in reverse mode alone."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse("forward mode: torch.func.jvp or torch.autograd.forward_ad")


def first_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose results depend on what they are made of, but raise an error when they
    are differentiated."""

    @functools.wraps(backward)
    def last(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        sources = [x for x in (*gradients, *ctx.saved_tensors) if isinstance(x, Tensor)]
        return tuple(
            _Last.apply(x, *sources) if isinstance(x, Tensor) else x  # type: ignore[no-untyped-call]
            for x in results
        )

    return last


class _Last(FirstDerivative):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *sources: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        _refuse("a gradient of a gradient: create_graph=True, torch.func.grad of grad and the like")


def _refuse(numbers: str) -> NoReturn:
    raise InputError(
        "calls over the ranks of a group have first derivatives in reverse mode alone",
        where=WHERE,
        numbers=numbers,
        way_out="the operator on one rank, which has forward mode and second derivatives",
    )
