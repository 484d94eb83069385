"""One call of a spec in the emulator, compared with the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import flashgen as fg
from flashgen import reference
from flashgen.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.pipeline import Build
from tests.support.examples import fitted, values_of
from tests.support.shapes import Case

RNG = (0x0123456789ABCDEF, 42)  # seed and offset of dropout


def check_gates(built: Build) -> None:
    """No spills, no stack, no warning; registers and shared memory within the plan."""
    resources, plan = built.binary.resources, built.plan
    assert built.binary.warnings == ()
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == 0
    assert resources.registers <= plan.registers
    assert resources.static_smem_bytes == 0, "all shared memory is the plan's dynamic part"


def like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


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


def judge_forward(
    found: Sequence[torch.Tensor],
    spec: fg.AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **numbers: Any,
) -> None:
    """Holds out and lse to the error rule; ``numbers``: those of `flashgen.reference.attention`."""
    exact = reference.attention(spec, q, k, v, **numbers)
    same = reference.same_dtype(spec, q, k, v, **numbers)
    for name, got, exactly, yardstick in zip(("out", "lse"), found, exact, same, strict=True):
        verdict = reference.compare(got, exactly, yardstick)
        assert verdict.ok, f"{name}: {verdict}"


def judged_forward(spec: fg.AttentionSpec, seq_q: int, seq_k: int, **how: Any) -> ForwardRun:
    """Runs and judges out and lse; ``how``: keyword arguments of `flashgen.ops.run_forward`."""
    q, k, v, _ = tensors_of(spec, seq_q, seq_k)
    run = run_forward(spec, q, k, v, backend="emulator", **how)
    judge_forward((run.out, run.lse), spec, q, k, v)
    return run


def judged_backward(spec: fg.AttentionSpec, seq_q: int, seq_k: int, **how: Any) -> BackwardRun:
    """Runs and judges the gradients; ``how``: keyword arguments of `flashgen.ops.run_backward`."""
    q, k, v, dout = tensors_of(spec, seq_q, seq_k)
    forward = run_forward(spec, q, k, v, backend="emulator")
    run = run_backward(spec, q, k, v, forward.out, forward.lse, dout, backend="emulator", **how)
    verdicts = reference.judge_gradients((run.dq, run.dk, run.dv), spec, q, k, v, dout)
    assert all(verdicts.values()), verdicts
    return run


def judged_case(
    spec: fg.AttentionSpec,
    path: Path,
    case: Case,
    dropout_p: float = 0.0,
    *,
    offsets: dict[str, int],
    **how: Any,
) -> BackwardRun:
    """Runs and judges the gradients of an example, including those of its captured tensors.

    Args:
        spec: the spec of the file at ``path``, whose example values are used.
        how: keyword arguments of `flashgen.ops.run_backward`.
    """
    case = fitted(spec, case)
    numbers: dict[str, Any] = values_of(path, case, **offsets) | offsets
    if dropout_p:
        numbers |= {"dropout_p": dropout_p, "rng": torch.tensor(RNG)}
    q, k, v = case.tensors(seed=case.scores % 1000)
    forward = run_forward(spec, q, k, v, backend="emulator", **numbers)
    dout, dlse = like(forward.out, 1), like(forward.lse, 2)
    results = (forward.out, forward.lse, dout, dlse)
    run = run_backward(spec, q, k, v, *results, backend="emulator", **how, **numbers)
    found = (run.dq, run.dk, run.dv, *run.captured)
    verdicts = reference.judge_gradients(found, spec, q, k, v, dout, dlse, **numbers)
    for name, verdict in verdicts.items():
        assert verdict.ok, f"{path.stem} {case.id} p={dropout_p} {name}: {verdict}"
    assert run.dq.dtype == run.dk.dtype == run.dv.dtype == q.dtype
    return run
