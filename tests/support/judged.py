"""A call of a spec in the emulator, compared with the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.calls.runtime.calls import run_tangent
from flashgen.calls.runtime.reports import TangentRun
from flashgen.kernels.pipeline import Build
from flashgen.kernels.planner import tangents_of
from flashgen.reference import Verdict
from flashgen.shared.call import Tangents
from tests.support.examples import fitted, values_of
from tests.support.shapes import Case

Tensor = torch.Tensor

RNG = (0x0123456789ABCDEF, 42)  # seed and offset of dropout


FEW_BYTES = 48
"""What a thread may spill in calls with split keys or pages, which all have one tile. The most is
44 bytes, before the loop over the keys: the split kernel of longformer at d 256 on sm_90a."""


def check_gates(built: Build) -> None:
    """No spills, no warning; registers and shared memory within the plan. No stack but that of
    kernels that set results of splits aside."""
    resources, plan = built.binary.resources, built.plan
    assert built.binary.warnings == ()
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.stack_bytes == 0 or plan.joins
    assert resources.registers <= plan.registers
    assert resources.static_smem_bytes == 0, "all shared memory is the plan's dynamic part"


def check_few_spills(built: Build) -> None:
    """Registers within the plan, and at most `FEW_BYTES` of them spilled."""
    assert built.binary.resources.spill_store_bytes <= FEW_BYTES
    assert built.binary.resources.registers <= built.plan.registers


def equal(found: ForwardRun, expected: ForwardRun) -> bool:
    return torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


def normal(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def like(tensor: Tensor, seed: int) -> Tensor:
    return normal(tensor.shape, tensor.dtype, seed)


def sized(spec: fg.AttentionSpec, case: Case, dropout_p: float = 0.0) -> fg.AttentionSpec:
    """The spec for the dtype and the head dims of a case."""
    return spec.replace(
        dtype=case.dtype,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v or case.head_dim,
        dropout=dropout_p > 0,
    )


def forward_verdicts(
    found: Sequence[Tensor],
    spec: fg.AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **numbers: Any,
) -> dict[str, Verdict]:
    """Of out and lse; ``numbers``: those of `flashgen.reference.attention`."""
    exact = reference.attention(spec, q, k, v, **numbers)
    same = reference.same_dtype(spec, q, k, v, **numbers)
    if not spec.is_softmax:
        # Sums of weights, which may be rounded, and which the rule for log-sum-exps does not bound.
        error = max(1e-4, torch.finfo(q.dtype).eps) * float(exact[1].abs().max())
        torch.testing.assert_close(found[1].double(), exact[1], rtol=0.0, atol=error)
        found, exact, same = found[:1], exact[:1], same[:1]
    of = zip(("out", "lse"), found, exact, same, strict=False)
    return {name: reference.compare(*three) for name, *three in of}


def judge_forward(
    found: Sequence[Tensor], spec: fg.AttentionSpec, *qkv: Tensor, **numbers: Any
) -> None:
    """Holds out and lse to the error rule; arguments as of `forward_verdicts`."""
    verdicts = forward_verdicts(found, spec, *qkv, **numbers)
    assert all(verdicts.values()), verdicts


def dropping(dropout_p: float) -> dict[str, Any]:
    """The arguments of a call with this probability of dropout."""
    return {"dropout_p": dropout_p, "rng": torch.tensor(RNG)} if dropout_p else {}


class Call:
    """A call of a spec, with random gradients of both results.

    Attributes:
        numbers: what the kernels and the oracle take by keyword: captured tensors, scalars,
            offsets, dropout.
        how: what only the kernels take: the backend, the architecture, tiles.
        gradients: of out and of lse.
    """

    def __init__(
        self,
        spec: fg.AttentionSpec,
        qkv: tuple[Tensor, Tensor, Tensor],
        numbers: dict[str, Any] | None = None,
        **how: Any,
    ) -> None:
        self.spec, self.qkv, self.numbers = spec, qkv, numbers or {}
        self.how = {"backend": "emulator", **how}
        q, _, v = qkv
        dout = normal((*q.shape[:3], v.shape[3]), q.dtype, 1)
        dlse = normal(q.shape[:3], torch.float32, 2) if spec.is_softmax else None
        self.gradients: tuple[Tensor, Tensor | None] = dout, dlse

    def forward(self, **how: Any) -> ForwardRun:
        return run_forward(self.spec, *self.qkv, **self.numbers, **self.how | how)

    @cached_property
    def results(self) -> tuple[Tensor, Tensor]:
        """Out and lse by the tiled algorithm on the CPU, for a test of backward kernels only.

        In float32 by the forward kernel, because the errors of two LSE show in the gradients.
        """
        own = {"backend": "emulator", "arch": self.how.get("arch")}
        how = own if self.spec.dtype == "float32" else {}
        run = run_forward(self.spec, *self.qkv, **self.numbers, **how)
        return run.out, run.lse

    def backward(self, forward: ForwardRun | None = None, **how: Any) -> BackwardRun:
        """The gradients, from the results of ``forward`` or else from `results`."""
        results = (forward.out, forward.lse) if forward else self.results
        given = (*self.qkv, *results, *self.gradients)
        return run_backward(self.spec, *given, **self.numbers, **self.how | how)

    @property
    def movable(self) -> tuple[str, ...]:
        """The names of all operands that can have a tangent."""
        return tangents_of(self.spec)

    def moving(self, names: Sequence[str] | None = None) -> Tangents:
        """Random tangents of these operands; of all for None."""
        given = dict(zip("qkv", self.qkv, strict=True)) | (self.numbers.get("tensors") or {})
        q, k, v, *learned = (
            like(given[name], 1_000 + n) if names is None or name in names else None
            for n, name in enumerate(self.movable)
        )
        return Tangents(q, k, v, tuple(learned))

    def judged_tangent(
        self, forward: ForwardRun | None = None, names: Sequence[str] | None = None, **how: Any
    ) -> TangentRun:
        """The tangents of the results along random ones of these operands, of all for None."""
        results = (forward.out, forward.lse) if forward else self.results
        given = self.spec, *self.qkv
        moving = self.moving(names)
        run = run_tangent(*given, *results, moving, **self.numbers, **self.how | how)
        verdicts = reference.judge_tangents((run.out, run.lse), *given, moving, **self.numbers)
        wrong = {name: verdict for name, verdict in verdicts.items() if not verdict.ok}
        assert not wrong, f"{self.spec.name}: " + "\n".join(f"{n}: {v}" for n, v in wrong.items())
        return run

    def verdicts(self, run: ForwardRun | BackwardRun) -> dict[str, Verdict]:
        """By the names of the results, or of the gradients."""
        if isinstance(run, BackwardRun):
            found = (run.dq, run.dk, run.dv, *run.captured)
            of = (self.spec, *self.qkv, *self.gradients)
            return reference.judge_gradients(found, *of, **self.numbers)
        return forward_verdicts((run.out, run.lse), self.spec, *self.qkv, **self.numbers)

    def check(self, run: ForwardRun | BackwardRun) -> None:
        """Holds everything that a run gave against the oracle."""
        wrong = {name: verdict for name, verdict in self.verdicts(run).items() if not verdict.ok}
        assert not wrong, f"{self.spec.name}: " + "\n".join(f"{n}: {v}" for n, v in wrong.items())

    def judged_forward(self, **how: Any) -> ForwardRun:
        run = self.forward(**how)
        self.check(run)
        return run

    def judged_backward(self, forward: ForwardRun | None = None, **how: Any) -> BackwardRun:
        run = self.backward(forward, **how)
        self.check(run)
        return run


def example(
    path: Path,
    case: Case,
    dropout_p: float = 0.0,
    offsets: dict[str, int] | None = None,
    **how: Any,
) -> Call:
    """A call of the spec of a file, with the file's own values of captured tensors and scalars."""
    spec = sized(fg.load(path), case, dropout_p)
    case, offsets = fitted(spec, case), offsets or {}
    numbers = values_of(path, case, **offsets) | offsets | dropping(dropout_p)
    return Call(spec, case.tensors(seed=case.scores % 1000), numbers, **how)


def plain(spec: fg.AttentionSpec, seq_q: int, seq_k: int, heads: int = 1, **how: Any) -> Call:
    """A call of a spec without captured tensors, of one batch entry."""
    case = Case(seq_q, seq_k, 1, heads, heads, spec.dtype, spec.head_dim, spec.head_dim_v)
    return Call(spec, case.tensors(seq_q + seq_k), **how)
