"""What the operator accepts. Everything is checked before any launch, and told in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flashgen.expr import COUNT_LIMIT, POSITION_LIMIT
from flashgen.ops.captures import captured_of, check_captured, check_traced_captured
from flashgen.ops.numbers import dropout_of, offset_of, refuse, scalars_of, scale_of
from flashgen.ops.packed import entries_of
from flashgen.ops.symbols import known
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor
Number = int | float | bool

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """The sizes and numbers of one call, checked.

    Attributes:
        batch: batch entries, or packed sequences; then seq_q and seq_k are of all of them.
    """

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
    dropout_p: float = 0.0

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
    tensors: Mapping[str, object] | None = None,
    dropout_p: float | Tensor = 0.0,
    rng: Tensor | None = None,
) -> Problem:
    """The problem that a call states.

    Raises:
        InputError: for the first thing that is wrong; it names the argument.
    """
    operands = {"q": q, "k": k, "v": v}
    for name, value in operands.items():
        _check_kind(spec, name, value)
        _check_memory(name, value)
    _check_together(spec, q, k, v)
    for name, value in operands.items():
        _check_limits(name, value)
    captured = captured_of(spec, tensors or {}) if tensors or spec.tensors else ()
    problem = Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        scale=scale_of(spec, scale),
        scalars=scalars_of(spec, scalars),
        dropout_p=dropout_of(spec, dropout_p, rng, q.device),
        q_offset=offset_of("q_offset", q_offset, q.shape[2]),
        k_offset=offset_of("k_offset", k_offset, k.shape[2]),
    )
    if captured:
        ends = problem.q_offset + problem.seq_q, problem.k_offset + problem.seq_k
        check_captured(spec, captured, q, k, ends)
    return replace(problem, batch=entries_of(spec, q, captured)) if spec.packed else problem


def check_traced(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, captured: Sequence[object] = ()
) -> None:
    """What can be said of operands whose sizes are symbols and whose numbers are unknown.

    Sizes are compared only where they must be equal, so that a traced graph keeps serving other
    lengths. The rest is checked when the graph runs.

    Raises:
        InputError: for the first thing that is wrong; it names the argument.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check_kind(spec, name, value)
    _check_together(spec, q, k, v)
    if captured:
        check_traced_captured(spec, captured, q, k)


def check_gradients(
    q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> None:
    """What a backward call needs beyond operands that `check` has accepted.

    Raises:
        InputError: a tensor of another shape, dtype or device; it names the argument.
    """
    rows = tuple(q.shape[:3])
    shape = (*rows, v.shape[3])
    for name, tensor, wanted, dtype in (
        ("out", out, shape, q.dtype),
        ("lse", lse, rows, torch.float32),
        ("dout", dout, shape, q.dtype),
        ("dlse", dlse, rows, torch.float32),
    ):
        if tensor is None and name == "dlse":
            continue
        if not isinstance(tensor, Tensor):
            refuse(
                f"{name} is not a torch tensor",
                f"argument {name}",
                f"given a {type(tensor).__name__}",
                f"a tensor of shape {wanted}",
            )
        dense = tensor.layout == torch.strided and not tensor.is_nested
        shape_of = tuple(tensor.shape) if dense else None
        if shape_of != wanted or tensor.dtype != dtype or tensor.device != q.device:
            refuse(
                f"{name} does not belong to q, k and v",
                f"argument {name}",
                f"shape {shape_of or tensor.layout}, {tensor.dtype}, on {tensor.device}; "
                f"expected {wanted}, {dtype}, on {q.device}",
                "out and lse of the forward call, and gradients of the same shapes",
            )


def _check_kind(spec: AttentionSpec, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        refuse(
            f"{name} is not a torch tensor",
            f"argument {name}",
            f"given a {type(value).__name__}",
            "torch.as_tensor(...)",
        )
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        refuse(
            f"{name} is not an ordinary dense tensor",
            f"argument {name}",
            f"layout {value.layout}, dtype {value.dtype}",
            f"{name}.to_padded_tensor(0.0)" if value.is_nested else f"{name}.to_dense()",
        )
    shape = tuple(value.shape)
    if value.dim() != 4:
        axes = "[batch, heads, seq, head_dim]"
        refuse(
            f"{name} has {value.dim()} dimensions, not 4",
            f"argument {name}",
            f"shape {shape}; expected {axes}",
            f"{name}.unsqueeze(0) for a missing batch; q.unflatten(2, (heads, -1)).transpose(1, 2) "
            "for [batch, seq, heads * head_dim]",
        )
    if _short(value.dtype) != spec.dtype:
        refuse(
            f"{name} does not have the dtype of the spec",
            f"argument {name}",
            f"{name} is {value.dtype}; spec {spec.name} is for torch.{spec.dtype}",
            f"{name}.to(torch.{spec.dtype}), or a spec with dtype={_short(value.dtype)!r}",
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_memory(name: str, value: Tensor) -> None:
    if value.is_meta:
        refuse(
            f"{name} has no data: it is a meta tensor",
            f"argument {name}",
            f"shape {tuple(value.shape)}, device {value.device}",
            "tensors on the CPU or on a CUDA device",
        )
    if value.device.type not in ("cpu", "cuda"):
        refuse(
            f"{name} is on a device that kernels are not made for",
            f"argument {name}",
            f"device {value.device}",
            f"{name}.cuda(), or {name}.cpu() for the tiled algorithms and the emulator",
        )
    if value.numel() and value.stride(3) != 1:
        refuse(
            f"the last dimension of {name} is not contiguous",
            f"argument {name}",
            f"shape {tuple(value.shape)}, strides {value.stride()}; expected a last stride of 1",
            f"{name}.contiguous()",
        )


def _check_together(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Sizes may be symbols: one that cannot be decided yet passes."""

    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    if not q.device == k.device == v.device:
        refuse(
            "q, k and v are on different devices",
            "arguments q, k and v",
            f"q on {q.device}, k on {k.device}, v on {v.device}",
            f"k.to({str(q.device)!r}) and v.to({str(q.device)!r})",
        )
    wanted = {"q": spec.head_dim, "k": spec.head_dim, "v": spec.head_dim_v}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if known(tensor.shape[3] != wanted[name]):
            option = "head_dim_v" if name == "v" else "head_dim"
            refuse(
                f"the last dimension of {name} is not the spec's {option}",
                f"argument {name}",
                f"{shapes()}; spec {spec.name} has {option} {wanted[name]}",
                f"spec.replace({option}={tensor.shape[3]})",
            )
    for name, tensor in (("k", k), ("v", v)):
        if known(tensor.shape[0] != q.shape[0]):
            refuse(
                f"{name} does not have the batch of q",
                f"argument {name}",
                shapes(),
                f"{name}.expand({q.shape[0]}, -1, -1, -1) to share one entry; it copies nothing",
            )
    for axis, what in ((1, "number of heads"), (2, "length")):
        if known(k.shape[axis] != v.shape[axis]):
            refuse(
                f"k and v differ in {what}",
                "argument v",
                shapes(),
                "k [batch, heads_kv, seq_k, head_dim] and v [batch, heads_kv, seq_k, head_dim_v]",
            )
    heads_q, heads_kv = q.shape[1], k.shape[1]
    no_keys = known(heads_kv == 0)
    if known(heads_q != 0) and (no_keys or known(heads_q % heads_kv != 0)):
        refuse(
            "the heads of q cannot be shared out over those of k and v",
            "argument q",
            f"{heads_q} heads in q, {heads_kv} in k and v; {shapes()}",
            "a number of query heads that is a multiple of the number of key heads",
        )


def _check_limits(name: str, tensor: Tensor) -> None:
    """Kernels count positions and rows' distances in 32 bits; everything else in 64."""
    axes = (("batch", 0, COUNT_LIMIT), ("number of heads", 1, COUNT_LIMIT))
    for what, axis, limit in (*axes, ("length", 2, POSITION_LIMIT)):
        if tensor.shape[axis] > limit:
            refuse(
                f"the {what} of {name} is beyond what kernels count to",
                f"argument {name}",
                f"shape {tuple(tensor.shape)}; at most {limit:,}",
                "several calls, each with a part",
            )
    row_bytes = tensor.stride(2) * tensor.element_size()
    if tensor.shape[2] > 1 and row_bytes > _INT32_MAX:
        refuse(
            f"the rows of {name} are too far apart",
            f"argument {name}",
            f"row stride {tensor.stride(2):,} elements, {row_bytes:,} B; at most {_INT32_MAX:,} B",
            f"{name}.contiguous()",
        )
