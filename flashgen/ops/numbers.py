"""The numbers among an operator's arguments: offsets, scale, run-time scalars, dropout."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
import torch

from flashgen import expr
from flashgen.dropout import kept_levels
from flashgen.errors import InputError
from flashgen.expr import POSITION_LIMIT, SCALAR_LIMIT, Scalar
from flashgen.sparse import COMPRESSED
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor
Number = int | float | bool

_KINDS: dict[type, str] = {Scalar: "scalar", expr.Tensor: "tensor"}
_FLOAT32_MAX = torch.finfo(torch.float32).max


def refuse(what: str, where: str, numbers: str, way_out: str) -> NoReturn:
    raise InputError(what, where=where, numbers=numbers, way_out=way_out)


# What torch.compiler.disable does, without importing all of torch._dynamo: torch.compile leaves the
# error to Python, or gives this reason where it must not.
refuse._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "an argument of a flashgen operator is wrong: the same call without torch.compile names it"
)


def offset_of(name: str, value: object, length: int) -> int:
    """The global position of row 0 of ``length`` rows.

    Raises:
        InputError: it is no whole number, or positions leave what kernels count to.
    """
    try:
        offset = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        offset = None
    if offset is None or isinstance(value, bool | Tensor):
        refuse(
            f"{name} is not a whole number",
            f"argument {name}",
            f"given {value!r}",
            f"a Python int, the global position of the first row: {name}=0",
        )
    last = offset + max(length, 1) - 1
    if max(abs(offset), abs(last)) > POSITION_LIMIT:
        refuse(
            f"{name} puts positions beyond what kernels count to",
            f"argument {name}",
            f"positions {offset:,} to {last:,}; the limit is +-{POSITION_LIMIT:,}",
            "positions relative to a nearer origin: mods that use q - k only do not change",
        )
    return offset


def scale_of(spec: AttentionSpec, given: object) -> float:
    """The factor on q.k: the call's, else the spec's, else 1 / sqrt(head_dim).

    Raises:
        InputError: it is no positive, finite number.
    """
    value = given if given is not None else spec.scale
    if value is None:
        return 1 / math.sqrt(spec.head_dim)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < float(value) <= _FLOAT32_MAX:  # type: ignore[arg-type]
        refuse(
            "scale is not a positive, finite number",
            "argument scale",
            f"given {value!r}; a float32 above 0",
            "scale=None for 1 / sqrt(head_dim); a factor of any sign belongs in score_mod",
        )
    return float(value)  # type: ignore[arg-type]


def scalars_of(spec: AttentionSpec, given: Mapping[str, object]) -> dict[str, Number]:
    """A number for each of the spec's scalars, in their order.

    Raises:
        InputError: one is missing, superfluous, or cannot take its value.
    """
    check_names(spec, given, spec.scalars)
    return {scalar.name: scalar_value(scalar, given[scalar.name]) for scalar in spec.scalars}


def check_names(
    spec: AttentionSpec,
    given: Mapping[str, object],
    captures: Sequence[Scalar | expr.Tensor] | None = None,
) -> None:
    """Raises InputError when ``given`` does not have the names of ``captures``, each once.

    Args:
        captures: some of the spec's; all of its tensors and scalars when None.
    """
    if captures is None:
        captures = (*spec.tensors, *spec.scalars)
    kinds = {capture.name: _KINDS[type(capture)] for capture in captures}
    missing = [name for name in kinds if name not in given]
    extra = [name for name in given if name not in kinds]
    if missing or extra:
        accepted = sorted(set(kinds.values())) or ["scalar"]
        what = (
            f"the {kinds[missing[0]]} {missing[0]!r} of the spec is missing"
            if missing
            else f"{extra[0]!r} is not a {' or '.join(accepted)} of the spec"
        )
        own = COMPRESSED if spec.block_sparse is not None else ()  # made of what is given
        asked = [name for name in kinds if name not in own]
        call = "".join(f", {name}=..." for name in asked)
        refuse(
            what,
            f"argument {(missing or extra)[0]}",
            f"spec {spec.name} takes: {', '.join(asked) or 'none'}; "
            f"given: {', '.join(name for name in given if name not in own) or 'none'}",
            f"op(q, k, v{call})",
        )


def scalar_value(scalar: Scalar, given: object) -> Number:
    """A number given for a scalar, as the kernel takes it.

    Raises:
        InputError: it is of another type, out of range or below the scalar's minimum.
    """
    is_bool = isinstance(given, bool) or type(given).__name__ in ("bool_", "bool")
    value: Number | None = None
    if scalar.dtype == "bool":
        value = bool(given) if is_bool else None
        expected = "True or False"
    elif scalar.dtype == "int32":
        expected = f"a whole number within +-{SCALAR_LIMIT:,}"
        if hasattr(given, "__index__") and not is_bool and not isinstance(given, Tensor):
            value = operator.index(given)
            value = value if abs(value) <= SCALAR_LIMIT else None
    else:
        expected = f"a finite number within float32's +-{_FLOAT32_MAX:.3g}"
        if hasattr(given, "__float__") and not is_bool and not isinstance(given, Tensor):
            value = float(given)
            value = value if abs(value) <= _FLOAT32_MAX else None
    if value is None:
        way_out = f"{scalar.name}={_example(scalar)}"
        if isinstance(given, Tensor):
            way_out = (
                f"{scalar.name}.item(), a Python number; or fg.Tensor({scalar.name!r}, ()) in the "
                "spec, a number in a tensor"
            )
        refuse(
            f"the scalar {scalar.name!r} cannot take this value",
            f"argument {scalar.name}",
            f"given {given!r}; {scalar.dtype}: {expected}",
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


def _example(scalar: Scalar) -> str:
    low = scalar.minimum if scalar.minimum is not None else 1
    return {"bool": "True", "int32": str(int(low))}.get(scalar.dtype, str(float(low)))


def dropout_of(spec: AttentionSpec, p: object, rng: object, device: torch.device) -> float:
    """The probability of dropping, with its random state checked where it can be.

    The two numbers of the state are not looked at: on a GPU that would wait for them.

    Args:
        p: a number in [0, 1), or a CPU tensor of one such number.
        rng: int64 [2] on ``device``, seed and offset; None when nothing is dropped.

    Raises:
        InputError: p or rng is wrong, or the spec was made without dropout.
    """
    probability = probability_of(p)
    if not spec.dropout and (probability or rng is not None):
        refuse_dropout(spec, "dropout_p" if probability else "rng", probability)
    check_rng(rng, device)
    if probability and rng is None:
        refuse_no_rng(probability)
    return probability


def refuse_dropout(spec: AttentionSpec, argument: str, p: object) -> NoReturn:
    refuse(
        "the spec was made without dropout",
        f"argument {argument}",
        f"dropout_p {p}; spec {spec.name} has dropout=False",
        "spec.replace(dropout=True), or leave dropout_p and rng out",
    )


def refuse_no_rng(p: object) -> NoReturn:
    refuse(
        "dropout needs a random state",
        "argument rng",
        f"dropout_p {p}, rng None",
        "rng=torch.tensor([seed, offset]); fg.attention(spec) draws one by itself",
    )


def probability_of(p: object) -> float:
    """``dropout_p`` as a float: numbers of numpy and CPU tensors of one number are fine.

    Raises:
        InputError: it is no number in [0, 1).
    """
    if type(p) is not float:
        if isinstance(p, Tensor):
            p = _number_in(p)
        if hasattr(p, "__float__") and not isinstance(p, bool | np.bool_):
            p = float(p)
    kept_levels(p)  # type: ignore[arg-type]
    return p  # type: ignore[return-value]


def _number_in(p: Tensor) -> object:
    if p.dim() == 0 and p.device.type == "cpu" and p.is_floating_point():
        return p.item()
    refuse(
        "dropout_p is not a number",
        "argument dropout_p",
        f"given a tensor of shape {tuple(p.shape)}, {p.dtype}, on {p.device}",
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
            f"shape {tuple(rng.shape)}, {rng.dtype}, on {rng.device}; expected shape (2,), "
            f"torch.int64, on {device}",
            way_out,
        )
