"""Problems for the tests of tests/gpu, and the comparison of results with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.spec.language.spec import AttentionSpec
from tests.support import gpu_builds
from tests.support import gpu_device as gpu
from tests.support.examples import SPECS, fitted, values_of
from tests.support.shapes import HEADS, LAYOUTS, Case

Tensor = torch.Tensor

RNG = (0x0123456789ABCDEF, 42)  # seed and offset
MOST_ELEMENTS = 1 << 22  # of an operand: comparing takes its time
NAMES = ("out", "lse", "dq", "dk", "dv")


def path_of(name: str) -> Path:
    return next(path for path in SPECS if path.stem == name)


@dataclass(frozen=True)
class Mode:
    """The options of a case: dropout's probability, and whether gradients are deterministic."""

    dropout_p: float = 0.0
    deterministic: bool = False

    def __str__(self) -> str:
        return f"p={self.dropout_p} {'deterministic' if self.deterministic else 'free'}"


MODES = (Mode(), Mode(0.17, True), Mode(0.17, False), Mode(0.0, True))


@dataclass(frozen=True)
class Problem:
    """Operands, gradients of the results, and the numbers that go with them.

    Attributes:
        dlse: the gradient of lse; None for zeros.
        numbers: scalars, offsets, dropout_p and rng, for the kernels and for the oracle.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    numbers: Mapping[str, Any]
    deterministic: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the results: `NAMES`, and the gradients of learned tensors."""
        return (*NAMES, *(f"d{tensor.name}" for tensor in self.spec.tensors if tensor.grad))

    def forward(self, turn: int = 0, **more: Any) -> ForwardRun:
        given = {**self.numbers, **gpu.options(turn), **more}
        return run_forward(self.spec, self.q, self.k, self.v, **given)

    def backward(self, forward: ForwardRun, turn: int = 0, **more: Any) -> BackwardRun:
        given = {"deterministic": self.deterministic, **self.numbers, **gpu.options(turn), **more}
        operands = (self.q, self.k, self.v, forward.out, forward.lse, self.dout, self.dlse)
        return run_backward(self.spec, *operands, **given)

    def results(self, turn: int = 0, **more: Any) -> tuple[Tensor, ...]:
        """The results of the kernels, in the order of `names`."""
        forward = self.forward(turn, **more)
        run = self.backward(forward, turn, **more)
        return forward.out, forward.lse, run.dq, run.dk, run.dv, *run.captured

    def operator(self, **more: Any) -> Callable[[], tuple[Tensor, ...]]:
        """A call of the operator and of autograd that returns these results, without checks."""
        attend = fg.attention(self.spec)
        leaves = [tensor.detach().requires_grad_() for tensor in (self.q, self.k, self.v)]
        given = {
            "deterministic": self.deterministic,
            "backend": gpu.BACKEND,
            **self.numbers,
            **more,
        }
        tensors = dict(given.pop("tensors", {}))
        for tensor in self.spec.tensors:
            if tensor.grad:
                tensors[tensor.name] = tensors[tensor.name].detach().requires_grad_()
                leaves.append(tensors[tensor.name])
        values = {**given.pop("scalars", {}), **tensors}

        def call() -> tuple[Tensor, ...]:
            out, lse = attend(*leaves[:3], return_lse=True, **given, **values)
            if self.dlse is None:
                gradients = torch.autograd.grad(out, leaves, self.dout)
            else:
                gradients = torch.autograd.grad((out, lse), leaves, (self.dout, self.dlse))
            return (out.detach(), lse.detach(), *gradients)

        return call

    def exact(self) -> tuple[Tensor, ...]:
        """The results of the oracle, in float64."""
        operands = (self.spec, self.q, self.k, self.v)
        return (
            *reference.attention(*operands, **self.numbers),
            *reference.gradients(*operands, self.dout, self.dlse, **self.numbers),
        )

    def ordinary(self) -> tuple[Tensor, ...]:
        """The results of PyTorch in the operands' dtype, the reference of the error rule."""
        operands = (self.spec, self.q, self.k, self.v)
        return (
            *reference.same_dtype(*operands, **self.numbers),
            *reference.same_dtype_gradients(*operands, self.dout, self.dlse, **self.numbers),
        )

    def wrong(self, results: tuple[Tensor, ...] | None = None) -> list[str]:
        """The violations of the error rule, a line for each result; empty without violations.

        Args:
            results: the values of `results`, which is called for None.
        """
        found = results or self.results()
        operands = (self.spec, self.q, self.k, self.v)
        verdicts = [
            reference.compare(*three)
            for three in zip(
                found[:2],
                reference.attention(*operands, **self.numbers),
                reference.same_dtype(*operands, **self.numbers),
                strict=True,
            )
        ]
        gradients = reference.judge_gradients(
            found[2:], *operands, self.dout, self.dlse, **self.numbers
        )
        lines = []
        for place, (got, verdict) in enumerate(
            zip(found, [*verdicts, *gradients.values()], strict=True)
        ):
            name = self.names[place]
            if not verdict.ok:
                lines.append(f"{name} {verdict}")
            dtype = self.q.dtype if place < len(NAMES) and name != "lse" else torch.float32
            if got.dtype != dtype or got.device != self.q.device:
                lines.append(f"{name} is {got.dtype} on {got.device}")
        return lines

    def to(self, device: torch.device) -> Problem:
        """The problem on another device, every tensor with its strides."""
        moved = {n: laid_on(getattr(self, n), device) for n in ("q", "k", "v", "dout")}
        dlse = None if self.dlse is None else self.dlse.to(device)
        numbers = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.numbers.items()
        }
        captured = self.numbers.get("tensors", {}).items()
        numbers["tensors"] = {name: tensor.to(device) for name, tensor in captured}
        return replace(self, **moved, dlse=dlse, numbers=numbers)


def verdict_of(name: str, got: Tensor, exact: Tensor, ordinary: Tensor) -> str | None:
    """The violation of the error rule by a result, or None.

    Args:
        name: the name of the result, as in `Problem.names`.
    """
    gradient = name.startswith("d")
    factor = reference.GRADIENT_FACTOR if gradient else reference.OUTPUT_FACTOR
    verdict = reference.compare(got, exact, ordinary, factor=factor)
    return None if verdict.ok else f"{name} {verdict}"


def problem(path: Path, case: Case, mode: Mode = MODES[0], **offsets: int) -> Problem:
    """A case of a spec on the device under test, of standard normal numbers."""
    dim_v = case.head_dim_v or case.head_dim
    spec = fg.load(path).replace(
        dtype=case.dtype,
        head_dim=case.head_dim,
        head_dim_v=dim_v,
        dropout=mode.dropout_p > 0,
    )
    case = fitted(spec, case)
    generator = torch.Generator(gpu.DEVICE).manual_seed(case.scores % 1000 + case.head_dim)
    dtype = getattr(torch, case.dtype)

    def normal(heads: int, seq: int, dim: int, layout: str) -> Tensor:
        shape = (case.batch, heads, seq, dim)
        values = torch.randn(shape, generator=generator, device=gpu.DEVICE).to(dtype)
        return laid_out(values, layout)

    numbers: dict[str, Any] = values_of(path, case, device=gpu.DEVICE, **offsets) | offsets
    if mode.dropout_p:
        numbers["dropout_p"] = mode.dropout_p
        numbers["rng"] = torch.tensor(RNG, device=gpu.DEVICE)
    return Problem(
        spec,
        normal(case.heads_q, case.seq_q, case.head_dim, case.layout),
        normal(case.heads_kv, case.seq_k, case.head_dim, case.layout),
        normal(case.heads_kv, case.seq_k, dim_v, case.layout),
        normal(case.heads_q, case.seq_q, dim_v, "contiguous"),
        normal(case.heads_q, case.seq_q, 1, "contiguous")[..., 0].float(),
        numbers,
        mode.deterministic,
    )


def laid_out(values: Tensor, layout: str) -> Tensor:
    """``values`` [B, H, N, D] in one of the memory layouts of tests/support/shapes.py."""
    if layout == "contiguous":
        return values
    if layout == "sequence_major":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    batch, heads, seq, dim = values.shape
    padded = values.new_full((batch, heads + 1, seq + 3, dim + 8), math.nan)
    view = padded[:, :heads, :seq, :dim]
    view.copy_(values)
    return view


def laid_on(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device with the same strides and the same elements between its rows."""
    start = tensor.storage_offset()
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((start + extent,), (1,), 0)
    return flat.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), start)


def cases_of(
    turn: int,
    lengths: tuple[tuple[int, int], ...],
    dtype: str,
    head_dim: int,
    most_scores: int,
    rows: int = 256,
) -> list[tuple[Case, Mode]]:
    """A case for each of the lengths; heads, memory layouts and modes alternate.

    Args:
        turn: shifts the values that alternate.
        most_scores: batch and heads are reduced to 1 where a case would have more scores; the
            limit is half of this with dropout, whose oracle is slow.
        rows: the batch is raised until queries and keys have this number of rows, or
            `MOST_ELEMENTS`. The errors of a row are correlated, so that the RMS of few rows varies
            by chance.
    """
    found = []
    for number, (seq_q, seq_k) in enumerate(lengths):
        mode = MODES[(turn + number) % len(MODES)]
        heads_q, heads_kv = HEADS[(turn + number) % len(HEADS)]
        batch = 3 if (turn + number) % 4 == 0 else 1
        most = most_scores // 2 if mode.dropout_p else most_scores
        if batch * heads_q * seq_q * seq_k > most:
            batch = 1
        if heads_q * seq_q * seq_k > most:
            heads_q, heads_kv = 1, 1
        elements = heads_q * max(seq_q, seq_k) * head_dim
        more = min(math.ceil(rows / (heads_q * min(seq_q, seq_k))), MOST_ELEMENTS // elements)
        batch = max(batch, more)
        layout = LAYOUTS[(turn + number // 2) % len(LAYOUTS)]
        case = Case(seq_q, seq_k, batch, heads_q, heads_kv, dtype, head_dim, None, layout)
        found.append((case, mode))
    return found


def wanted(path: Path, case: Case, mode: Mode) -> gpu_builds.Wanted:
    """The kernels that a case needs."""
    dim_v = case.head_dim_v or case.head_dim
    dims = (case.dtype, case.head_dim, dim_v)
    return gpu_builds.Wanted(str(path), gpu.arch(), *dims, mode.dropout_p > 0, mode.deterministic)


def kernels_ahead(cases: Sequence[tuple[Path, Case, Mode]], dry: bool = False) -> Any:
    """An automatic fixture of a module: its kernels are compiled while its first tests run.

    Args:
        dry: whether a dry run compiles too; one module is enough to test this.
    """

    @pytest.fixture(scope="module", autouse=True)
    def compiled_ahead() -> Iterator[None]:
        if gpu.MISSING is not None or (gpu.DRY and not dry):
            yield
            return
        with gpu_builds.ahead([wanted(*case) for case in cases]):
            yield

    return compiled_ahead


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns, so that NaN equals itself and -0 differs from 0."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


def roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff: half the spacing of numbers just above 1."""
    return torch.finfo(dtype).eps / 2


def units(left: Tensor, right: Tensor) -> float:
    """The largest difference, in unit roundoffs of the dtype times the largest magnitude."""
    kept = left.isfinite()
    if not torch.equal(kept, right.isfinite()) or not torch.equal(left[~kept], right[~kept]):
        return math.inf
    if not kept.any():
        return 0.0
    wide = left[kept].double(), right[kept].double()
    largest = float(wide[0].abs().max())
    difference = float((wide[0] - wide[1]).abs().max())
    return difference / (roundoff(left.dtype) * largest) if largest else difference * math.inf
