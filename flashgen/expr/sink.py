"""The sink of an AttentionSpec: a logit for each head that joins the softmax's denominator."""

from __future__ import annotations

from .element import FLOATS
from .tensor import Tensor
from .traced import refuse

DIMS = (("heads",), (1,), ())
"""Dims that a sink may have: a number for each head, or one for all."""


def sink_of(given: object) -> Tensor | None:
    """The sink that a spec's option asks for, None for none.

    Raises:
        SpecError: it is no Tensor of floats with one of `DIMS`.
    """
    if given is None or given is False:
        return None
    if given is True:
        return Tensor("sink", ("heads",), "float32", grad=True)
    if not isinstance(given, Tensor):
        refuse(
            "a sink is a Tensor with a logit for each head",
            numbers=f"sink given as a {type(given).__name__}",
            way_out='sink=True, or sink=fg.Tensor("sink", ("heads",), "float32", grad=True)',
        )
    if given.dtype not in FLOATS:
        refuse(
            f"the sink {given.name!r} does not have the dtype of a logit",
            numbers=f"dtype {given.dtype!r}; available: {', '.join(FLOATS)}",
            way_out=f"fg.Tensor({given.name!r}, {given.dims!r}, 'float32', grad=True)",
        )
    if given.dims not in DIMS:
        refuse(
            f"the sink {given.name!r} has other dims than the heads",
            numbers=f"dims {given.dims!r}; available: {', '.join(map(str, DIMS))}",
            way_out=f'fg.Tensor({given.name!r}, ("heads",), {given.dtype!r}, grad={given.grad})',
        )
    return given
