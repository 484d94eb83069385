"""The check of a result before anything is timed, at the size that is timed.

One batch entry and one key head with its query heads are computed again in float64, with every row
and key, and by the same function in the operands' dtype, whose error is the reference. The rest of
the tensors is compared with the result of a peer that passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.suite.cases import Case
from flashgen.reference import ABSOLUTE, GRADIENT_FACTOR, OUTPUT_FACTOR, RMS_FACTOR

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
"""Results by name: out, and after a backward pass dq, dk, dv."""

ELEMENTS_AT_ONCE = 1 << 25
PEER_LIMIT = {torch.bfloat16: 3e-2, torch.float16: 6e-3, torch.float32: 1e-3}
"""The limit of ||a - b|| / ||b|| between two computations in one dtype."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one contender.

    Attributes:
        error, allowed: error and limit of the tensor that is nearest to its limit or furthest
            beyond it.
        text: the name of that tensor, and the violation.
        share: its error divided by its limit.
    """

    ok: bool
    error: float
    allowed: float
    text: str
    share: float


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, all standard normal."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def learnt(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def make_inputs(case: Case, device: torch.device, seed: int, *, learnt: bool = True) -> Inputs:
    """Fresh random operands; ``learnt``: whether they require gradients."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(heads: int, seq: int, dim: int) -> Tensor:
        shape = (case.batch, heads, seq, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    q, k, v = (
        normal(case.heads_q, case.seq_q, case.head_dim),
        normal(case.heads_kv, case.seq_k, case.head_dim),
        normal(case.heads_kv, case.seq_k, case.head_dim_v),
    )
    dout = normal(case.heads_q, case.seq_q, case.head_dim_v)
    return Inputs(*(t.requires_grad_(learnt) for t in (q, k, v)), dout)


class Oracle:
    """The slice of one case in float64 and in the operands' dtype.

    Args:
        batch, group: which batch entry and which key head; the last ones by default, where an
            offset that overflowed would show.
        backward: gradients too.
    """

    def __init__(self, case: Case, inputs: Inputs, *, backward: bool = True) -> None:
        self.batch, self.group = case.batch - 1, case.heads_kv - 1
        share = case.heads_q // case.heads_kv
        self.heads = slice(self.group * share, (self.group + 1) * share)
        with full_precision():
            self._exact = self._computed(case, inputs, torch.float64, backward)
            self._same = self._computed(case, inputs, inputs.q.dtype, backward)

    def _computed(self, case: Case, inputs: Inputs, dtype: torch.dtype, backward: bool) -> Tensors:
        parts = (
            inputs.q.detach()[self.batch, self.heads],
            inputs.k.detach()[self.batch, self.group],
            inputs.v.detach()[self.batch, self.group],
            inputs.dout[self.batch, self.heads],
        )
        q, k, v, dout = (tensor.to(dtype) for tensor in parts)
        return attend(case, q, k, v, dout, self.batch, self.heads.start, backward)

    def sliced(self, results: Tensors) -> Tensors:
        """The slice of whole results."""
        return {
            name: tensor.detach()[self.batch, self.heads if name in ("out", "dq") else self.group]
            for name, tensor in results.items()
            if name in ("out", "dq", "dk", "dv")
        }

    def verdict(self, results: Tensors, *, ours: bool) -> Verdict:
        """Whether the slice of ``results`` is right; gradients of learned tensors have no slice.

        flashgen's kernels must meet the error rule of this project. For peers the limit is that
        between two computations in one dtype, which only a different computation exceeds.
        """
        return worst_of(
            by_rule(name, got, self._exact[name], self._same[name])
            if ours
            else distance(name, got, self._exact[name])
            for name, got in self.sliced(results).items()
        )


def dropped_at_random(attend: Any, inputs: Inputs, p: float) -> Verdict:
    """Whether a call drops elements of P, and scales the other elements by 1 / (1 - p).

    With ones for v an output is the sum of a row of P, whose mean is 1 with or without dropout,
    and which differs from 1 with dropout alone.
    """
    with torch.no_grad():
        out = attend(inputs.q, inputs.k, torch.ones_like(inputs.v)).double()
    apart, spread = abs(float(out.mean()) - 1), float(out.std())
    limit = 4 * (p / (1 - p) / (out.numel() / out.shape[-1])) ** 0.5 + 4e-3
    text = f"the mean of a row of P is {apart:.3g} of {limit:.3g} from 1, its spread {spread:.3g}"
    return Verdict(apart <= limit and spread > 1e-2, apart, limit, text, apart / limit)


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """One that is not ok, else the one nearest to its limit."""
    return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.share))


def by_rule(name: str, got: Tensor, exact: Tensor, same: Tensor) -> Verdict:
    """The error rule: the error of `same`, computed in the dtype of ``got``, is the yardstick."""
    factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
    error = got.double() - exact
    yardstick = same.double() - exact
    largest, allowed = _max(error), factor * _max(yardstick) + ABSOLUTE
    rms, once = _rms(error), torch.finfo(got.dtype).eps / 2 * _rms(exact)
    rms_allowed = RMS_FACTOR * max(_rms(yardstick), once)
    text = f"{name} max {largest:.3g} of {allowed:.3g}, rms {rms:.3g} of {rms_allowed:.3g}"
    ok = largest <= allowed and rms <= rms_allowed  # false for NaN
    return Verdict(ok, largest, allowed, text, largest / allowed)


def distance(
    name: str, got: Tensor, other: Tensor, layers: int = 1, dtype: torch.dtype | None = None
) -> Verdict:
    """Whether two computations agree, by their relative distance.

    Args:
        layers: the number of computations that follow each other; their errors add up as
            independent ones.
        dtype: the dtype of the computations; by default the dtype of ``got``.
    """
    limit = PEER_LIMIT[dtype or got.dtype] * math.sqrt(layers)
    scale = float(torch.linalg.vector_norm(other.float()))
    apart = float(torch.linalg.vector_norm(got.float() - other.float())) / max(scale, 1e-30)
    largest = _max(got.float() - other.float())
    text = f"{name} is {apart:.3g} away of {limit:.3g}, relative to a peer or the oracle"
    share = apart / limit
    return Verdict(apart <= limit, largest, largest / max(share, 1e-30), text, share)


def compare_peers(got: Tensors, trusted: Tensors) -> Verdict:
    """Compares whole results with the results of a peer that is right on the slice."""
    return worst_of(
        distance(name, tensor.detach(), trusted[name].detach(), dtype=got["out"].dtype)
        for name, tensor in got.items()
        if name in trusted
    )


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of torch with sums in float32: the yardstick is torch at its best."""
    switches = torch.backends.cuda.matmul
    names = (
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    )
    before = {name: getattr(switches, name) for name in names}
    for name in names:
        setattr(switches, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(switches, name, value)


def attend(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    batch: int,
    first_head: int,
    backward: bool,
) -> Tensors:
    """Standard attention of one key head, forward and backward written out, in the dtype of q.

    Args:
        q: [heads, seq_q, d]; k, v: [seq_k, d]; dout as q.
        batch, first_head: the values of b and, for q[0], of h in the mask and the score.
    """
    scale, dtype = q.shape[-1] ** -0.5, q.dtype
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    captured = {name: tensor.detach() for name, tensor in case.tensors(q.device).items()}
    # Sums over parts: their rounding is not the dtype's own, which has one sum per element.
    wide = torch.promote_types(dtype, torch.float32)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    rows = max(1, ELEMENTS_AT_ONCE // max(1, k.shape[0]))
    mods = case.mods_of({**dict(case.scalars), **captured})
    index_options: dict[str, Any] = {"dtype": torch.int64, "device": q.device}
    b = torch.tensor(batch, **index_options)
    keys = torch.arange(k.shape[0], **index_options)[None, :]
    for head in range(q.shape[0]):
        h = torch.tensor(first_head + head, **index_options)
        for first in range(0, q.shape[1], rows):
            part = slice(first, first + rows)
            positions = torch.arange(q.shape[1], **index_options)[part, None]
            qs, do = q[head, part], dout[head, part]
            with torch.enable_grad():
                raw = ((qs @ k.T) * scale).requires_grad_(mods.score is not None)
                scored = (
                    raw if mods.score is None else mods.score(raw, b, h, positions, keys).to(dtype)
                )
            keeps = None if mods.mask is None else mods.mask(b, h, positions, keys)
            seen = scored.detach()
            seen = seen if keeps is None else seen.masked_fill(~keeps, -math.inf)
            if mods.sink is not None:
                column = mods.sink[h].to(dtype).expand(seen.shape[0], 1)
                seen = torch.cat((seen, column), dim=-1)
            weights = torch.softmax(seen, dim=-1).nan_to_num_(0.0)  # rows without a key
            weights = weights[:, : k.shape[0]]
            out[head, part] = weights @ v
            if not backward:
                continue
            dv += (weights.T @ do).to(wide)
            inner = (do * out[head, part]).sum(-1, keepdim=True)
            ds = weights * (do @ v.T - inner)
            if mods.score is not None:
                (ds,) = torch.autograd.grad(scored, raw, ds)
                ds = ds if keeps is None else ds.masked_fill(~keeps, 0.0)
            dq[head, part] = (ds @ k) * scale
            dk += ((ds.T @ qs) * scale).to(wide)
    if not backward:
        return {"out": out}
    return {"out": out, "dq": dq, "dk": dk.to(dtype), "dv": dv.to(dtype)}


def poison(like: Tensor, copies: int = 4) -> None:
    """Leaves NaN in memory that the next results are likely to occupy."""
    junk: list[Any] = [torch.full_like(like, math.nan, requires_grad=False) for _ in range(copies)]
    junk.clear()


def _max(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().mean())) if tensor.numel() else 0.0
