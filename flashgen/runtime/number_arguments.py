"""Checks of the arguments of a call that are numbers: offsets, scale, scalars and dropout."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from flashgen.call import CheckedCall
from flashgen.dropout import BLOCK, kept_levels
from flashgen.dtypes import (
    FLOAT32_MAX,
    POSITION_LIMIT,
    SCALAR_DTYPES,
    SCALAR_LIMIT,
    Number,
)
from flashgen.runtime.check_basics import refuse, runs_while_traced, shown
from flashgen.signature import (
    OFFSETS,
    CallSignature,
    ScalarArgument,
)

if TYPE_CHECKING:
    from flashgen.language import Scalar

Tensor = torch.Tensor


def offset_of(name: str, value: object, length: int) -> int:
    """The global position of row 0 of ``length`` rows.

    Raises:
        InputError: the value is not an integer, or positions exceed `POSITION_LIMIT`.
    """
    try:
        offset = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        offset = None
    if offset is None or isinstance(value, bool):
        refuse(
            f"{name} is not a whole number",
            f"argument {name}",
            f"given {shown(value)}",
            f"a Python int, the global position of the first row: {name}=0; or a tensor of int32 "
            "or int64 with one for each batch entry",
        )
    last = offset + max(length, 1) - 1
    if max(abs(offset), abs(last)) > POSITION_LIMIT:
        refuse(
            f"{name} makes positions larger than kernels support",
            f"argument {name}",
            f"positions {offset:,} to {last:,}; the limit is +-{POSITION_LIMIT:,}",
            "positions relative to a nearer origin, for mods that only use q - k",
        )
    return offset


def scale_of(signature: CallSignature, given: object) -> float:
    """The factor on q.k: the call's, else the spec's, else 1 / sqrt(head_dim).

    Raises:
        InputError: the value is not a positive, finite number.
    """
    value = given if given is not None else signature.scale
    if value is None:
        return 1 / math.sqrt(signature.head_dim)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= FLOAT32_MAX:  # type: ignore[operator]
        refuse(
            "scale is not a positive, finite number",
            "argument scale",
            f"given {shown(value)}; a float32 above 0",
            "scale=None for 1 / sqrt(head_dim); a factor of any sign belongs in score_mod",
        )
    return float(value)  # type: ignore[arg-type]


def scalar_value(scalar: Scalar | ScalarArgument, given: object) -> Number:
    """The Python number for a value that is given for a scalar.

    Raises:
        InputError: the value has another type, is out of range or below the scalar's minimum.
    """
    dtype = SCALAR_DTYPES[scalar.dtype]
    value = None if isinstance(given, Tensor) else dtype.convert(given)
    if value is None:
        way_out = f"{scalar.name}={_example(scalar)}"
        if scalar.dtype == "int32" and isinstance(given, int) and not isinstance(given, bool):
            nearest = SCALAR_LIMIT if given > 0 else -SCALAR_LIMIT
            way_out = f"{scalar.name}={nearest}, the nearest number that kernels hold"
        if isinstance(given, Tensor):
            way_out = (
                f"{scalar.name}.item(), a Python number; or fg.Tensor({scalar.name!r}, ()) in the "
                "spec, a number in a tensor"
            )
        refuse(
            f"the scalar {scalar.name!r} cannot take this value",
            f"argument {scalar.name}",
            f"given {shown(given)}; {scalar.dtype}: {dtype.accepted}",
            way_out,
        )
    if scalar.minimum is not None and value < scalar.minimum:
        refuse(
            f"the scalar {scalar.name!r} is below the minimum that its spec promises",
            f"argument {scalar.name}",
            f"given {given!r}; minimum {scalar.minimum}",
            f"{scalar.name}={scalar.minimum} or more, or fg.Scalar without this minimum",
        )
    return value


def _example(scalar: Scalar | ScalarArgument) -> str:
    low = scalar.minimum if scalar.minimum is not None else 1
    return {"bool": "True", "int32": str(int(low))}.get(scalar.dtype, str(float(low)))


def dropout_of(signature: CallSignature, p: object, rng: object, device: torch.device) -> float:
    """The probability of dropping an element, with its random state checked.

    The seed and the offset are not read, which on a GPU would need a device synchronisation.

    Args:
        p: a number in [0, 1), or a CPU tensor of one such number.
        rng: int64 [2] on ``device``, seed and offset; None when nothing is dropped.

    Raises:
        InputError: p or rng is wrong, or the spec has no dropout.
    """
    probability = probability_of(p)
    if not signature.dropout and (probability or rng is not None):
        refuse_dropout(signature, "dropout_p" if probability else "rng", probability)
    check_rng(rng, device)
    if probability and rng is None:
        refuse_no_rng(probability)
    return probability


def check_dropout_positions(signature: CallSignature, call: CheckedCall) -> None:
    """Raises InputError where a call with dropout does not begin at a block of random bits."""
    for name in OFFSETS if call.dropout_p else ():
        offset = getattr(call, name)
        below = offset // BLOCK * BLOCK
        given, way_out = f"{offset:,}", f"{name}={below} or {below + BLOCK}"
        if name in signature.offsets:
            given, way_out = "a tensor, whose values the host does not know", f"{name} as an int"
        elif offset == below:
            continue
        refuse(
            f"dropout needs a {name} that is a multiple of {BLOCK}",
            f"argument {name}",
            f"given {given}; dropout_p {call.dropout_p}; random bits are made for blocks of "
            f"{BLOCK} x {BLOCK} positions",
            f"{way_out}, or dropout_p=0",
        )


def refuse_dropout(signature: CallSignature, argument: str, p: object) -> NoReturn:
    refuse(
        "the spec was made without dropout",
        f"argument {argument}",
        f"dropout_p {p}; spec {signature.name} has dropout=False",
        "spec.replace(dropout=True), or leave dropout_p and rng out",
    )


def refuse_no_rng(p: object) -> NoReturn:
    refuse(
        "dropout needs a random state",
        "argument rng",
        f"dropout_p {p}, rng None",
        "rng=torch.tensor([seed, offset]); fg.attention(spec) draws one where rng is None",
    )


def probability_of(p: object) -> float:
    """``dropout_p`` as a float, from a number, a NumPy number or a CPU tensor of one number.

    Raises:
        InputError: the value is not a number in [0, 1).
    """
    if type(p) is not float:
        if isinstance(p, Tensor):
            p = number_in("dropout_p", p)
        if hasattr(p, "__float__") and not isinstance(p, bool | np.bool_):
            p = float(p)
    kept_levels(p)  # type: ignore[arg-type]
    return p  # type: ignore[return-value]


def number_in(name: str, value: Tensor) -> float:
    """The number in a float tensor of no dimensions on the CPU."""
    if value.dim() == 0 and value.device.type == "cpu" and value.is_floating_point():
        return float(value)
    refuse(
        f"{name} is not a number",
        f"argument {name}",
        f"given {shown(value)}",
        "a Python number, or a floating-point tensor of no dimensions on the CPU",
    )


def check_rng(rng: object, device: torch.device) -> None:
    """Raises InputError when ``rng`` is neither None nor an int64 [2] on ``device``."""
    if rng is None:
        return
    way_out = f"torch.tensor([seed, offset], device={str(device)!r})"
    if not isinstance(rng, Tensor):
        refuse("rng is not a torch tensor", "argument rng", f"given {rng!r}", way_out)
    if rng.dtype != torch.int64 or rng.dim() != 1 or rng.shape[0] != 2 or rng.device != device:
        refuse(
            "rng is not the seed and offset of dropout",
            "argument rng",
            f"given {shown(rng)}; expected shape (2,), torch.int64, on {device}",
            way_out,
        )


def draw_rng(dropout_p: object, device: torch.device) -> Tensor | None:
    """A seed and an offset from torch's generator of the device; None when nothing is dropped.

    They stay on the device: a call needs no device synchronisation, and a CUDA graph draws new
    ones at every replay.

    Returns:
        int64 [2], from 0 to below 2^63 - 1.

    Raises:
        InputError: dropout_p is not a number in [0, 1).
    """
    if not isinstance(dropout_p, Tensor) and probability_of(dropout_p) == 0:
        return None
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def refuse_return_lse(given: object) -> NoReturn:
    refuse(
        "return_lse is neither True nor False",
        "argument return_lse",
        f"given {shown(given)}",
        "return_lse=True for a tuple (out, lse)",
    )


check_probability = runs_while_traced(probability_of)


def settled(deterministic: bool | None) -> bool:
    """Whether gradients must have the same bits in every run; None follows torch's switch.

    Raises:
        InputError: the argument is neither None nor a bool.
    """
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if isinstance(deterministic, bool):
        return deterministic
    refuse(
        "deterministic is neither True, False nor None",
        "argument deterministic",
        f"given {deterministic!r}",
        "None, to follow torch.use_deterministic_algorithms",
    )
