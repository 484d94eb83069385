"""The error rule: the allowed difference of a result from the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.reference.gradients import (
    errors_of_summands,
    gradients,
    kept_gradients,
    same_dtype_gradients,
    with_kv_gradient,
)
from flashgen.reference.problem import OracleArguments
from flashgen.reference.tangents import kept_tangents, tangents
from flashgen.shared.call import Tangents
from flashgen.shared.errors import InputError
from flashgen.spec.language.spec import AttentionSpec

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
ABSOLUTE = 1e-5
RMS_FACTOR = 1.2
KEPT_FACTOR = 2.0
"""Factor on the error of gradients that start from rounded O and LSE. LSE is computed in float32
from a float32 sum, so that its error exceeds one rounding. At float32 with 5 to 60 keys one
rounding of LSE alone gives 0.3 to 1.0 times the RMS error of PyTorch's gradients, which start from
P itself; from 256 keys on it is negligible."""
RMS_ELEMENTS = 256
"""The RMS rule applies to this number of elements and more. With fewer, the RMS errors of two
equally accurate computations differ by a factor of 1.2 with a probability above 1/1000 (F
distribution)."""


@dataclass(frozen=True)
class Verdict:
    """The comparison of one result with the oracle.

    The rule: max|out - ref64| <= factor * max|same - ref64| + 1e-5, where same is the ordinary
    computation in the operands' dtype; RMS error at most 1.2 times that of same, for
    `RMS_ELEMENTS` and more; no NaN; -inf (the lse of an empty row) exactly where the oracle has it.

    Attributes:
        max_error, max_allowed: maximum error over all elements that are finite in the oracle.
        rms_error, rms_allowed: root mean square error over the same elements.
        nans: number of NaN in the result.
        infinities: elements that are infinite in only one of the two, or have opposite signs.
        elements: number of compared elements.
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
    from_rounded: Tensor | None = None,
    summands: Tensor | None = None,
) -> Verdict:
    """Compares ``out`` with the oracle by the error rule.

    Args:
        out: the result, in the dtype of its computation.
        ref64: the result of the oracle, float64, of the same shape.
        same: the result of `same_dtype`, of the same shape.
        factor: `OUTPUT_FACTOR`, or `GRADIENT_FACTOR` for gradients.
        from_rounded: for gradients, the result of `kept_gradients`, whose error every backward pass
            from O and LSE has: `KEPT_FACTOR` times its RMS is added to that of ``same`` as an
            independent error, and its maximum replaces that of ``same`` where it is larger.
        summands: for gradients of learned tensors, the result of `errors_of_summands`: it
            replaces the error of ``same`` where it is larger.

    The RMS error of the ordinary computation can be 0: with one key, softmax is exactly 1 and O is
    V itself. The allowed RMS is therefore at least 1.2 times the unit roundoff (half the spacing of
    numbers just above 1) of ``out.dtype`` times the RMS of the exact result: the largest error of
    one rounding. The error of one rounding also stands for that of an element which the ordinary
    computation does not find: float16 scores beyond 65504 are infinite, and their rows are NaN.

    Raises:
        InputError: the shapes differ; nothing is broadcast.
    """
    if not out.shape == ref64.shape == same.shape:
        raise InputError(
            "only results of one shape can be compared",
            where="reference.compare",
            numbers=f"out {tuple(out.shape)}, ref64 {tuple(ref64.shape)}, same {tuple(same.shape)}",
            way_out="the oracle and the same-dtype computation of the same operands",
        )
    result, exact, ordinary = (tensor.detach().double() for tensor in (out, ref64, same))
    mismatched = (result.isinf() | exact.isinf()) & (result != exact) & ~result.isnan()
    finite = exact.isfinite() & result.isfinite()
    error = (result - exact)[finite].abs()
    rounding = torch.finfo(out.dtype).eps / 2
    ordinary_error = torch.where(
        ordinary.isfinite(), (ordinary - exact).abs(), exact.abs() * rounding
    )
    baseline = ordinary_error[exact.isfinite()]
    ordinary_rms, ordinary_max = _rms(baseline), _max(baseline)
    if from_rounded is not None:
        rounded_error = (from_rounded.double() - exact)[exact.isfinite()].abs()
        ordinary_rms = math.hypot(ordinary_rms, KEPT_FACTOR * _rms(rounded_error))
        ordinary_max = max(ordinary_max, _max(rounded_error))
    if summands is not None:
        ordinary_rms = max(ordinary_rms, _rms(summands))
        ordinary_max = max(ordinary_max, _max(summands))
    once = rounding * _rms(exact[exact.isfinite()])
    return Verdict(
        max_error=_max(error),
        max_allowed=factor * ordinary_max + ABSOLUTE,
        rms_error=_rms(error),
        rms_allowed=RMS_FACTOR * max(ordinary_rms, once),
        nans=int(result.isnan().sum()),
        infinities=int(mismatched.sum()),
        elements=result.numel(),
    )


class Judged(NamedTuple):
    """A verdict with the two results that it rests on: the oracle's and PyTorch's own."""

    verdict: Verdict
    exact: Tensor
    same: Tensor


def judge_gradients(*arguments: Any, **call: Any) -> dict[str, Verdict]:
    """The verdicts of `judged_gradients`, with the same arguments and errors."""
    return {name: judged.verdict for name, judged in judged_gradients(*arguments, **call).items()}


def judged_gradients(
    results: Sequence[Tensor],
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None = None,
    **call: Unpack[OracleArguments],
) -> dict[str, Judged]:
    """The verdicts on dq, dk, dv and the gradients of learned tensors, with what they rest on.

    Args:
        results: dq, dk, dv, then the gradients of learned tensors in the order of spec.tensors.
        v: None with shared_kv=True, where dkv is in place of dk and dv.
        other arguments: as in `gradients`, whose errors this function also raises.

    Raises:
        ValueError: ``results`` has another number of gradients.
    """
    shares = v is None
    operands = (spec, q, k, k[..., : spec.head_dim_v] if v is None else v, dout, dlse)
    learned = [f"d{tensor.name}" for tensor in spec.tensors if tensor.grad]
    names = ("dq", "dkv") if shares else ("dq", "dk", "dv")
    summands: list[Tensor | None] = [None] * len(names)
    if learned:
        summands += errors_of_summands(*operands, **call)
    functions = gradients, same_dtype_gradients, kept_gradients
    references = [function(*operands, **call) for function in functions]
    if shares:
        references = [with_kv_gradient(reference) for reference in references]
    rows = zip((*names, *learned), results, *references, summands, strict=True)
    judged = {}
    for name, result, exact, same, rounded, errors in rows:
        verdict = compare(
            result, exact, same, factor=GRADIENT_FACTOR, from_rounded=rounded, summands=errors
        )
        judged[name] = Judged(verdict, exact, same)
    return judged


def judge_tangents(*arguments: Any, **call: Any) -> dict[str, Verdict]:
    """The verdicts of `judged_tangents`, with the same arguments and errors."""
    return {name: judged.verdict for name, judged in judged_tangents(*arguments, **call).items()}


def judged_tangents(
    results: Sequence[Tensor],
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    moving: Tangents,
    **call: Unpack[OracleArguments],
) -> dict[str, Judged]:
    """The verdicts on the tangents of out and lse; of out alone without a softmax.

    Args:
        results: the tangents.
        other arguments: as in `tangents`, whose errors this function also raises.
    """
    operands = (spec, q, k, v, moving)
    names = ("out", "lse") if spec.is_softmax else ("out",)
    rows = zip(
        names,
        results,
        tangents(*operands, **call),
        tangents(*operands, exact=False, **call),
        kept_tangents(*operands, **call),
        strict=False,
    )
    return {
        name: Judged(
            compare(result, exact, same, factor=GRADIENT_FACTOR, from_rounded=rounded), exact, same
        )
        for name, result, exact, same, rounded in rows
    }


def _max(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0
