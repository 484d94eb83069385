"""Attention sinks: a logit for each head that is added to the softmax's denominator."""

from __future__ import annotations

from flashgen.dtypes import FLOAT_DTYPES
from flashgen.language.refusal import refuse
from flashgen.language.tensor import Tensor

DIMS = (("heads",), (1,), ())
"""The dims that a sink may have: one logit per head, or one for all heads."""


def sink_of(given: object) -> Tensor | None:
    """The sink tensor of a spec's option ``sink``; None for no sink.

    Raises:
        SpecError: the option is not a Tensor of floats with one of `DIMS`.
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
    if given.dtype not in FLOAT_DTYPES:
        refuse(
            f"the sink {given.name!r} does not have the dtype of a logit",
            numbers=f"dtype {given.dtype!r}; available: {', '.join(FLOAT_DTYPES)}",
            way_out=f"fg.Tensor({given.name!r}, {given.dims!r}, 'float32', grad=True)",
        )
    if given.dims not in DIMS:
        refuse(
            f"the sink {given.name!r} has other dims than the heads",
            numbers=f"dims {given.dims!r}; available: {', '.join(map(str, DIMS))}",
            way_out=f'fg.Tensor({given.name!r}, ("heads",), {given.dtype!r}, grad={given.grad})',
        )
    return given
