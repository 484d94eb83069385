"""The error rule: how far a result may be from the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashgen.errors import InputError

Tensor = torch.Tensor

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
ABSOLUTE = 1e-5
RMS_FACTOR = 1.2
KEPT_FACTOR = 2.0
"""LSE is not the exact number rounded once: it is computed in float32, from a float32 sum. At
float32 with 5 to 60 keys, rounding it once alone makes 0.3 to 1.0 times the RMS error of PyTorch's
gradients, which start from P itself; from 256 keys on it no longer shows."""
RMS_ELEMENTS = 256
"""With fewer, the RMS of two equally good computations differs by more than 1.2 by chance: below
this number, one time in a thousand and more (the F distribution)."""


@dataclass(frozen=True)
class Verdict:
    """One result measured against the oracle.

    The rule: max|out - ref64| <= factor * max|same - ref64| + 1e-5, where same is the ordinary
    computation in the operands' dtype; RMS error at most 1.2 times that of same, where there are
    elements enough to tell; no NaN; -inf (the lse of an empty row) exactly where the oracle has it.

    Attributes:
        max_error, max_allowed: over all elements that are finite in the oracle.
        rms_error, rms_allowed: root mean square over the same elements.
        nans: NaN in the result.
        infinities: elements that are infinite in one and not in the other, or of opposite sign.
        elements: how many were compared.
    """

    max_error: float
    max_allowed: float
    rms_error: float
    rms_allowed: float
    nans: int
    infinities: int
    elements: int

    @property
    def ok(self) -> bool:
        return (
            self.nans == 0
            and self.infinities == 0
            and self.max_error <= self.max_allowed
            and (self.rms_error <= self.rms_allowed or self.elements < RMS_ELEMENTS)
        )

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        words = [
            "pass" if self.ok else "FAIL",
            f"max {self.max_error:.3g} of {self.max_allowed:.3g} allowed",
            f"rms {self.rms_error:.3g} of {self.rms_allowed:.3g}",
        ]
        if self.nans:
            words.append(f"{self.nans} NaN")
        if self.infinities:
            words.append(f"{self.infinities} infinities that do not match")
        return ", ".join([*words, f"{self.elements} elements"])


def compare(
    out: Tensor,
    ref64: Tensor,
    same: Tensor,
    *,
    factor: float = OUTPUT_FACTOR,
    kept: Tensor | None = None,
    summands: Tensor | None = None,
) -> Verdict:
    """Measures ``out`` by the error rule.

    Args:
        out: the result, of the dtype it was computed in.
        ref64: the oracle's, float64, of the same shape.
        same: `same_dtype`'s, of the same shape.
        factor: `OUTPUT_FACTOR`, or `GRADIENT_FACTOR` for gradients.
        kept: for gradients, those of `kept_gradients`, whose error no backward pass avoids that
            starts from O and LSE: `KEPT_FACTOR` times its RMS adds to that of ``same`` as
            independent errors add, and its maximum counts where it is the larger one.
        summands: for gradients of captured tensors, those of `errors_of_summands`: they count as
            the error of ``same`` where they are the larger one.

    The RMS of the ordinary computation can be 0 by luck: with one key, softmax is exactly 1 and O
    is V itself. So the RMS allowed is never below 1.2 times the unit roundoff (half the spacing of
    numbers just above 1) of ``out.dtype`` times the RMS of the exact result: the worst error of
    rounding once.

    Raises:
        InputError: the shapes differ, which no broadcasting may hide.
    """
    if not out.shape == ref64.shape == same.shape:
        raise InputError(
            "only results of one shape can be compared",
            where="reference.compare",
            numbers=f"out {tuple(out.shape)}, ref64 {tuple(ref64.shape)}, same {tuple(same.shape)}",
            way_out="the oracle and the yardstick computed from the same operands",
        )
    got, exact, ordinary = (tensor.detach().double() for tensor in (out, ref64, same))
    mismatched = (got.isinf() | exact.isinf()) & (got != exact) & ~got.isnan()
    finite = exact.isfinite() & got.isfinite()
    error = (got - exact)[finite].abs()
    yardstick = (ordinary - exact)[exact.isfinite() & ordinary.isfinite()].abs()
    ordinary_rms, ordinary_max = _rms(yardstick), _max(yardstick)
    if kept is not None:
        from_kept = (kept.double() - exact).abs()
        ordinary_rms = math.hypot(ordinary_rms, KEPT_FACTOR * _rms(from_kept))
        ordinary_max = max(ordinary_max, _max(from_kept))
    if summands is not None:
        ordinary_rms = max(ordinary_rms, _rms(summands))
        ordinary_max = max(ordinary_max, _max(summands))
    once = torch.finfo(out.dtype).eps / 2 * _rms(exact[exact.isfinite()])
    return Verdict(
        max_error=_max(error),
        max_allowed=factor * ordinary_max + ABSOLUTE,
        rms_error=_rms(error),
        rms_allowed=RMS_FACTOR * max(ordinary_rms, once),
        nans=int(got.isnan().sum()),
        infinities=int(mismatched.sum()),
        elements=got.numel(),
    )


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0
