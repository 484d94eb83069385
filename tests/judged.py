"""One call of a spec without captures, in the emulator, held against the float64 oracle."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg
from flashgen import reference
from flashgen.ops import BackwardRun, ForwardRun, run_backward, run_forward


def tensors_of(spec: fg.AttentionSpec, seq_q: int, seq_k: int, heads: int = 1) -> Any:
    """q, k, v and the gradient of out."""
    generator = torch.Generator().manual_seed(seq_q + seq_k)
    dims = (spec.head_dim, spec.head_dim, spec.head_dim_v, spec.head_dim_v)
    lengths = (seq_q, seq_k, seq_k, seq_q)
    dtype = getattr(torch, spec.dtype)
    return tuple(
        torch.randn(1, heads, seq, dim, generator=generator).to(dtype)
        for seq, dim in zip(lengths, dims, strict=True)
    )


def judged_forward(spec: fg.AttentionSpec, seq_q: int, seq_k: int, **how: Any) -> ForwardRun:
    """Runs and judges out and lse; ``how`` is for `flashgen.ops.run_forward`."""
    q, k, v, _ = tensors_of(spec, seq_q, seq_k)
    run = run_forward(spec, q, k, v, backend="emulator", **how)
    exact = reference.attention(spec, q, k, v)
    same = reference.same_dtype(spec, q, k, v)
    for found, exactly, yardstick in zip((run.out, run.lse), exact, same, strict=True):
        verdict = reference.compare(found, exactly, yardstick)
        assert verdict, verdict
    return run


def judged_backward(spec: fg.AttentionSpec, seq_q: int, seq_k: int, **how: Any) -> BackwardRun:
    """Runs and judges the gradients; ``how`` is for `flashgen.ops.run_backward`."""
    q, k, v, dout = tensors_of(spec, seq_q, seq_k)
    forward = run_forward(spec, q, k, v, backend="emulator")
    run = run_backward(spec, q, k, v, forward.out, forward.lse, dout, backend="emulator", **how)
    verdicts = reference.judge_gradients((run.dq, run.dk, run.dv), spec, q, k, v, dout)
    assert all(verdicts.values()), verdicts
    return run
