"""What the operator accepts. Everything is checked before any launch, and told in one error."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from flashgen.errors import InputError
from flashgen.expr import COUNT_LIMIT, POSITION_LIMIT, SCALAR_LIMIT, Scalar
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor
Number = int | float | bool

_FLOAT32_MAX = torch.finfo(torch.float32).max
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """The sizes and numbers of one call, checked."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int
    q_offset: int
    k_offset: int
    scale: float
    scalars: Mapping[str, Number]

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to compute: no output, or no key."""
        return 0 in (self.batch, self.heads_q, self.seq_q, self.seq_k)


def check(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    q_offset: int,
    k_offset: int,
    scalars: Mapping[str, object],
) -> Problem:
    """The problem that a call states.

    Raises:
        InputError: for the first thing that is wrong; it names the argument.
    """
    operands = {"q": q, "k": k, "v": v}
    for name, value in operands.items():
        _check_tensor(spec, name, value)
    _check_together(spec, q, k, v)
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    lengths = {"q_offset": q.shape[2], "k_offset": k.shape[2]}
    return Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        scale=_scale_of(spec, scale),
        scalars=_scalars_of(spec, scalars),
        **{name: _offset(name, value, lengths[name]) for name, value in offsets.items()},
    )


def _refuse(what: str, where: str, numbers: str, way_out: str) -> NoReturn:
    raise InputError(what, where=where, numbers=numbers, way_out=way_out)


def _check_tensor(spec: AttentionSpec, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        _refuse(
            f"{name} is not a torch tensor",
            f"argument {name}",
            f"given a {type(value).__name__}",
            "torch.as_tensor(...)",
        )
    shape = tuple(value.shape)
    if value.layout != torch.strided or value.is_quantized:
        _refuse(
            f"{name} is not an ordinary dense tensor",
            f"argument {name}",
            f"layout {value.layout}, dtype {value.dtype}",
            f"{name}.to_dense()",
        )
    if value.is_meta:
        _refuse(
            f"{name} has no data: it is a meta tensor",
            f"argument {name}",
            f"shape {shape}, device {value.device}",
            "tensors on the CPU or on a CUDA device",
        )
    if value.device.type not in ("cpu", "cuda"):
        _refuse(
            f"{name} is on a device that kernels are not made for",
            f"argument {name}",
            f"device {value.device}",
            f"{name}.cuda(), or {name}.cpu() for the emulator",
        )
    if value.dim() != 4:
        axes = "[batch, heads, seq, head_dim]"
        _refuse(
            f"{name} has {value.dim()} dimensions, not 4",
            f"argument {name}",
            f"shape {shape}; expected {axes}",
            f"{name}.unsqueeze(0) for a missing batch; q.unflatten(2, (heads, -1)).transpose(1, 2) "
            "for [batch, seq, heads * head_dim]",
        )
    if str(value.dtype) != f"torch.{spec.dtype}":
        _refuse(
            f"{name} does not have the dtype of the spec",
            f"argument {name}",
            f"{name} is {value.dtype}; spec {spec.name} is for torch.{spec.dtype}",
            f"{name}.to(torch.{spec.dtype}), or a spec with dtype={_short(value.dtype)!r}",
        )
    if value.requires_grad and torch.is_grad_enabled():
        _refuse(
            f"{name} requires a gradient, and the backward pass is not part of this version",
            f"argument {name}",
            f"{name}.requires_grad is True, shape {shape}",
            "call within torch.no_grad(), or pass " + f"{name}.detach()",
        )
    if value.numel() and value.stride(3) != 1:
        _refuse(
            f"the last dimension of {name} is not contiguous",
            f"argument {name}",
            f"shape {shape}, strides {value.stride()}; expected a last stride of 1",
            f"{name}.contiguous()",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_together(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if len({tensor.device for tensor in (q, k, v)}) > 1:
        _refuse(
            "q, k and v are on different devices",
            "arguments q, k and v",
            f"q on {q.device}, k on {k.device}, v on {v.device}",
            f"k.to({str(q.device)!r}) and v.to({str(q.device)!r})",
        )
    wanted = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.head_dim_v}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[3] != wanted[name]:
            option = "head_dim_v" if name == "v" else "head_dim"
            _refuse(
                f"the last dimension of {name} is not the spec's {option}",
                f"argument {name}",
                f"{shapes}; spec {spec.name} has {option} {wanted[name]}",
                f"spec.replace({option}={tensor.shape[3]})",
            )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != q.shape[0]:
            _refuse(
                f"{name} does not have the batch of q",
                f"argument {name}",
                shapes,
                f"{name}.expand({q.shape[0]}, -1, -1, -1) to share one entry; it copies nothing",
            )
    for axis, what in ((1, "number of heads"), (2, "length")):
        if k.shape[axis] != v.shape[axis]:
            _refuse(
                f"k and v differ in {what}",
                "argument v",
                shapes,
                "k [batch, heads_kv, seq_k, head_dim] and v [batch, heads_kv, seq_k, head_dim_v]",
            )
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        _refuse(
            "the heads of q cannot be shared out over those of k and v",
            "argument q",
            f"{heads_q} heads in q, {heads_kv} in k and v; {shapes}",
            "a number of query heads that is a multiple of the number of key heads",
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_limits(name, tensor)


def _check_limits(name: str, tensor: Tensor) -> None:
    """Kernels count positions and rows' distances in 32 bits; everything else in 64."""
    axes = (("batch", 0, COUNT_LIMIT), ("number of heads", 1, COUNT_LIMIT))
    for what, axis, limit in (*axes, ("length", 2, POSITION_LIMIT)):
        if tensor.shape[axis] > limit:
            _refuse(
                f"the {what} of {name} is beyond what kernels count to",
                f"argument {name}",
                f"shape {tuple(tensor.shape)}; at most {limit:,}",
                "several calls, each with a part",
            )
    row_bytes = tensor.stride(2) * tensor.element_size()
    if tensor.shape[2] > 1 and row_bytes > _INT32_MAX:
        _refuse(
            f"the rows of {name} are too far apart",
            f"argument {name}",
            f"row stride {tensor.stride(2):,} elements, {row_bytes:,} B; at most {_INT32_MAX:,} B",
            f"{name}.contiguous()",
        )


def _offset(name: str, value: object, length: int) -> int:
    try:
        offset = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        offset = None
    if offset is None or isinstance(value, bool | Tensor):
        _refuse(
            f"{name} is not a whole number",
            f"argument {name}",
            f"given {value!r}",
            f"a Python int, the global position of the first row: {name}=0",
        )
    last = offset + max(length, 1) - 1
    if max(abs(offset), abs(last)) > POSITION_LIMIT:
        _refuse(
            f"{name} puts positions beyond what kernels count to",
            f"argument {name}",
            f"positions {offset:,} to {last:,}; the limit is +-{POSITION_LIMIT:,}",
            "positions relative to a nearer origin: mods that use q - k only do not change",
        )
    return offset


def _scale_of(spec: AttentionSpec, given: object) -> float:
    value = given if given is not None else spec.scale
    if value is None:
        return 1 / math.sqrt(spec.head_dim)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < float(value) <= _FLOAT32_MAX:  # type: ignore[arg-type]
        _refuse(
            "scale is not a positive, finite number",
            "argument scale",
            f"given {value!r}; a float32 above 0",
            "scale=None for 1 / sqrt(head_dim); a factor of any sign belongs in score_mod",
        )
    return float(value)  # type: ignore[arg-type]


def _scalars_of(spec: AttentionSpec, given: Mapping[str, object]) -> dict[str, Number]:
    wanted = [scalar.name for scalar in spec.scalars]
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted]
    if missing or extra:
        what = (
            f"the scalar {missing[0]!r} of the spec is missing"
            if missing
            else f"{extra[0]!r} is not a scalar of the spec"
        )
        call = "".join(f", {name}=..." for name in wanted)
        _refuse(
            what,
            f"argument {(missing or extra)[0]}",
            f"spec {spec.name} takes: {', '.join(wanted) or 'none'}; "
            f"given: {', '.join(given) or 'none'}",
            f"op(q, k, v{call})",
        )
    return {scalar.name: scalar_value(scalar, given[scalar.name]) for scalar in spec.scalars}


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
            way_out = f"{scalar.name}.item(), a Python number; tensors are not captured"
        _refuse(
            f"the scalar {scalar.name!r} cannot take this value",
            f"argument {scalar.name}",
            f"given {given!r}; {scalar.dtype}: {expected}",
            way_out,
        )
    if scalar.minimum is not None and value < scalar.minimum:
        _refuse(
            f"the scalar {scalar.name!r} is below the minimum that its spec promises",
            f"argument {scalar.name}",
            f"given {given!r}; minimum {scalar.minimum}",
            f"{scalar.name}={scalar.minimum} or more, or fg.Scalar without this minimum",
        )
    return value


def _example(scalar: Scalar) -> str:
    low = scalar.minimum if scalar.minimum is not None else 1
    return {"bool": "True", "int32": str(int(low))}.get(scalar.dtype, str(float(low)))
