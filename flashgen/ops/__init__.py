"""Kernels as functions of torch tensors."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad

from flashgen.errors import SpecError
from flashgen.ops import backward, forward
from flashgen.ops.backward import run_backward
from flashgen.ops.block_sparse import Layout, with_layout
from flashgen.ops.captures import check_learned
from flashgen.ops.checks import Problem, check, check_traced
from flashgen.ops.forward import draw_rng, run_forward
from flashgen.ops.functions import Attend, are_plain, attend_plain, is_plain
from flashgen.ops.numbers import (
    check_names,
    check_rng,
    offset_of,
    probability_of,
    refuse_dropout,
    scalar_value,
)
from flashgen.ops.operator import Operator, operator_of
from flashgen.ops.report import BackwardRun, ForwardRun, Report
from flashgen.ops.symbols import is_constant
from flashgen.ops.variants import with_dtype
from flashgen.spec import AttentionSpec

__all__ = [
    "Attention",
    "BackwardRun",
    "ForwardRun",
    "Layout",
    "Problem",
    "Report",
    "attention",
    "check",
    "run_backward",
    "run_forward",
    "scalar_value",
]

Tensor = torch.Tensor

_C = torch._C


def attention(spec: AttentionSpec) -> Attention:
    """The operator that computes ``spec``; the same object for equal specs.

    It is registered as torch.ops.flashgen.<name>, where name is that of the spec, with a short hash
    behind it when another spec was first to have that name.

    Raises:
        SpecError: ``spec`` is not an AttentionSpec.
    """
    if not isinstance(spec, AttentionSpec):
        raise SpecError(
            "an operator is made from an AttentionSpec",
            where="flashgen.attention",
            numbers=f"given a {type(spec).__name__}",
            way_out="fg.attention(fg.AttentionSpec(mask_mod=..., score_mod=...))",
        )
    return _attention(spec)


@functools.cache
def _attention(spec: AttentionSpec) -> Attention:
    return Attention(spec)


class Attention:
    """A callable that computes one spec; its kernels are built when first needed, then kept.

    Can be pickled and copied, also as an attribute of a module; torch.compile and torch.export
    trace it as one node.

    Attributes:
        spec: what it computes.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._operator = operator_of(spec)
        self._used = self._operator

    def __repr__(self) -> str:
        return f"flashgen.attention({self.spec!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return attention, (self.spec,)

    def __copy__(self) -> Attention:
        return self

    def __deepcopy__(self, memo: Any) -> Attention:
        return self

    @property
    def name(self) -> str:
        """Of the operator: torch.ops.flashgen.<name>."""
        return self._operator.name

    @property
    def report(self) -> Report | None:
        """How the last call was run (backend, kernel, counters), None before the first."""
        done = self._used.done
        return None if done is None else forward.report(done)

    @property
    def backward_reports(self) -> tuple[Report, ...]:
        """The same for the kernels of the last backward pass; empty before the first."""
        done = self._used.done_backward
        return () if done is None else backward.reports(done)[0]

    @overload
    def __call__(
        self, /, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **rest: Any
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def __call__(
        self, /, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **rest: Any
    ) -> Tensor: ...

    def __call__(
        self,
        /,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
        return_lse: bool = False,
        dropout_p: float | Tensor = 0.0,
        rng: Tensor | None = None,
        backend: str | None = None,
        arch: str | None = None,
        deterministic: bool | None = None,
        **captures: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q over k and v, differentiable in these and in learned captured tensors.

        Under torch.autocast, q, k and v are cast to its dtype and the kernels of that dtype run, as
        with torch's own attention; captured tensors keep theirs.

        Args:
            q: [batch, heads_q, seq_q, head_dim], dtype of the spec, on the CPU or a CUDA device.
                Any strides, with the last dimension contiguous; expanded tensors are fine.
            k: [batch, heads_kv, seq_k, head_dim]; heads_q is a multiple of heads_kv.
            v: [batch, heads_kv, seq_k, head_dim_v].
            scale: factor on q.k; the spec's, else 1 / sqrt(head_dim), when None.
            q_offset, k_offset: global positions of the first query and the first key, for mods.
            return_lse: whether to return the log of the softmax's normaliser too.
            dropout_p: probability of dropping an element of P, from 0 to below 1, in steps of
                2^-16; a number or a CPU tensor of one number. For a spec with dropout=True.
            rng: int64 [2] on the device of q: seed and offset of dropout. Drawn from torch's
                generator of that device when None.
            backend: "gpu" (the default for CUDA tensors) launches on torch's current stream;
                "tiled" (the default for CPU tensors) computes with torch, tile by tile; "emulator"
                executes the GPU's kernels on CPU tensors, with its memory and race checkers on.
                FLASHGEN_BACKEND, when set, replaces these defaults.
            arch: architecture to compile for; FLASHGEN_ARCH, else the GPU's own, else sm_80.
            deterministic: whether gradients have the same bits in every run; None does as
                torch.use_deterministic_algorithms says.
            captures: by name, a number for each of the spec's run-time scalars and a tensor for
                each of its captured tensors: of the declared rank and dtype, on the device of q,
                with any strides. Where the spec's block_sparse has no function, also layout: a bool
                tensor [batch or 1, heads or 1, rows, columns] of blocks from global position 0 on,
                a flashgen.Layout, which many calls can share, or a torch BlockMask with the
                spec's block size, of which all blocks and not the mask_mod are taken.

        Returns:
            out [batch, heads_q, seq_q, head_dim_v], dtype of q, with its axes ordered in memory as
            q's are; with return_lse also lse [batch, heads_q, seq_q], float32, natural log. A row
            without a kept key has out 0 and lse -inf, or the spec's sink; so has every row when
            seq_k is 0. Gradients flow through both.

        Raises:
            InputError: an argument is wrong; nothing has run then. Also from a second derivative
                and from forward mode, which there are none of.
            PlanError, CompileError, LaunchError, EmulatorError: from the stages that they name.
        """
        options = (scale, q_offset, k_offset, backend, arch, deterministic)
        if torch.compiler.is_compiling():
            result = self._traced(q, k, v, rng, dropout_p, options, captures)
            return result if return_lse else result[0]
        operator = self._operator
        if _C._is_any_autocast_enabled():
            dtype = autocast_dtype(q)
            if dtype is not None:
                q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
                operator = self._of_dtype(dtype)
        self._used = operator
        captured: tuple[Any, ...] = ()
        plain = is_plain(q, k, v)
        if captures or operator.captures:
            if operator.walks:
                captures = {**with_layout(operator.spec, captures)}
            check_names(operator.spec, captures)
            options = (*options, *[captures[name] for name in operator.scalars])
            captured = tuple([captures[name] for name in operator.tensors])
            plain = plain and are_plain(captured)
            if captured and torch.is_grad_enabled():
                check_learned(operator.spec, captured)
        if not plain:
            check_traced(operator.spec, q, k, v, captured)
            options = operator.normal(options)
        if rng is None and operator.dropout:
            rng = draw_rng(dropout_p, q.device)
        if not plain:
            result = Attend.apply(operator, q, k, v, rng, dropout_p, options, *captured)  # type: ignore[no-untyped-call]
        elif (
            torch.is_grad_enabled()
            and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or (captured and any(tensor.requires_grad for tensor in captured))
            )
        ) or forward_ad._current_level >= 0:
            result = attend_plain(operator, q, k, v, rng, dropout_p, options, *captured)
        else:
            result = operator.compute(q, k, v, rng, dropout_p, options, captured)
        return result if return_lse else result[0]

    def _of_dtype(self, dtype: torch.dtype) -> Operator:
        return operator_of(with_dtype(self.spec, str(dtype).removeprefix("torch.")))

    def _name_of_dtype(self, dtype: torch.dtype) -> str:
        return self._of_dtype(dtype).name

    # What torch.compiler.assume_constant_result does, without importing all of torch._dynamo.
    _name_of_dtype._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _traced(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        dropout_p: float | Tensor,
        options: tuple[Any, ...],
        captures: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The call as torch.compile and torch.export see it: one node, checked when it runs."""
        overload = self._operator.overload
        if self._operator.walks:
            captures = {**with_layout(self.spec, captures)}
        if self._operator.tensors or len(captures) != len(self._operator.scalars):
            check_names(self.spec, captures)
        captured: list[Any] = []
        if self._operator.tensors:
            captured = [captures[name] for name in self._operator.tensors]
            captures = {name: captures[name] for name in self._operator.scalars}
            if torch.is_grad_enabled():
                check_learned(self.spec, captured)
        dtype = autocast_dtype(q)
        if dtype is not None:
            q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
            overload = getattr(torch.ops.flashgen, self._name_of_dtype(dtype)).default
        else:
            check_traced(self.spec, q, k, v, captured)
        p = None
        if isinstance(dropout_p, Tensor):
            p = dropout_p
        elif not self._operator.dropout:
            if dropout_p != 0.0:
                refuse_dropout(self.spec, "dropout_p", dropout_p)
        elif not isinstance(dropout_p, int | float):
            probability_of(dropout_p)
        elif not is_constant(dropout_p == 0.0):
            # A product, because torch.compile can keep the number in it a variable.
            p = torch.ones((), dtype=torch.float64, device="cpu") * dropout_p
        check_rng(rng, q.device)
        if p is not None and rng is None:
            rng = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)
        scale, q_offset, k_offset, backend, arch, deterministic = options
        for name, offset in (("q_offset", q_offset), ("k_offset", k_offset)):
            if not isinstance(offset, int):
                offset_of(name, offset, 0)
        result: tuple[Tensor, Tensor] = overload(
            q,
            k,
            v,
            *captured,
            rng,
            p,
            scale=scale,
            q_offset=q_offset,
            k_offset=k_offset,
            backend=backend,
            arch=arch,
            deterministic=deterministic,
            **captures,
        )
        return result


def autocast_dtype(q: object) -> torch.dtype | None:
    """The dtype that torch.autocast asks for on the device of q; None where it is off."""
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return None
    return torch.get_autocast_dtype(q.device.type)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast casts: float64 and integers stay as they are, and are refused later."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
