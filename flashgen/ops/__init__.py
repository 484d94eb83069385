"""Kernels as functions of torch tensors."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from flashgen.errors import SpecError
from flashgen.ops.checks import Problem, check, scalar_value
from flashgen.ops.forward import ForwardRun, Report, run_forward
from flashgen.spec import AttentionSpec

__all__ = [
    "Attention",
    "ForwardRun",
    "Problem",
    "Report",
    "attention",
    "check",
    "run_forward",
    "scalar_value",
]

Tensor = torch.Tensor


def attention(spec: AttentionSpec) -> Attention:
    """The operator that computes ``spec``.

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
    return Attention(spec)


class Attention:
    """A callable that runs the kernels of one spec; each is built when first needed, then kept.

    Attributes:
        spec: what it computes.
        report: how the last call of this object was run (backend, kernel, counters), None before.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.report: Report | None = None

    def __repr__(self) -> str:
        return f"flashgen.attention({self.spec!r})"

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **rest: Any
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **rest: Any
    ) -> Tensor: ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
        return_lse: bool = False,
        backend: str | None = None,
        arch: str | None = None,
        **scalars: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q over k and v. Forward only: inputs that require a gradient are refused.

        Args:
            q: [batch, heads_q, seq_q, head_dim], dtype of the spec, on the CPU or a CUDA device.
                Any strides, with the last dimension contiguous; expanded tensors are fine.
            k: [batch, heads_kv, seq_k, head_dim]; heads_q is a multiple of heads_kv.
            v: [batch, heads_kv, seq_k, head_dim_v].
            scale: factor on q.k; the spec's, else 1 / sqrt(head_dim), when None.
            q_offset, k_offset: global positions of the first query and the first key, for mods.
            return_lse: whether to return the log of the softmax's normaliser too.
            backend: "gpu" (the default for CUDA tensors) launches on torch's current stream;
                "emulator" (the default for CPU tensors in this version) executes the very same
                kernel's PTX, with its memory and race checkers on. FLASHGEN_BACKEND, when set,
                replaces these defaults.
            arch: architecture to compile for; FLASHGEN_ARCH, else the GPU's own, else sm_80.
            scalars: a number for each of the spec's run-time scalars, by name.

        Returns:
            out [batch, heads_q, seq_q, head_dim_v], dtype of q, with its axes ordered in memory as
            q's are; with return_lse also lse [batch, heads_q, seq_q], float32, natural log. A row
            without a kept key has out 0 and lse -inf; so has every row when seq_k is 0.

        Raises:
            InputError: an argument is wrong; nothing has run then.
            PlanError, CompileError, LaunchError, EmulatorError: from the stages that they name.
        """
        run = run_forward(
            self.spec,
            q,
            k,
            v,
            scalars=scalars,
            scale=scale,
            q_offset=q_offset,
            k_offset=k_offset,
            backend=backend,
            arch=arch,
        )
        self.report = run.report
        return (run.out, run.lse) if return_lse else run.out
