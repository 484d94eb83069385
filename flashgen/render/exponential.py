"""How backward kernels compute P from a score and LSE."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan import Plan
from flashgen.render.walk import ScoreCode


@dataclass(frozen=True)
class Exponential:
    """How P comes from a score and LSE: in base 2 for 16-bit operands, not so for float32."""

    scale: str
    scale_note: str
    probability: str

    @staticmethod
    def of(
        plan: Plan,
        score: ScoreCode,
        row: str,
        *,
        value: str = "scored.value",
        element: str = "s[g][n][e]",
    ) -> Exponential:
        """How the kernel of ``plan`` computes P.

        Args:
            row: the index of an element's query among those that a lane knows the LSE of.
            value: what the score function gave.
            element: of Q K^T.
        """
        if plan.dtype == "float32":
            scale, note = "p.scale", "of Q K^T"
            formula = "exp_minus({value}, 1.0f, lse[{row}])"
            if not score.call:
                formula = "exp_minus({element}, exp_scale, lse[{row}])"
        else:
            scale, note = "p.scale * LOG2E", "and the change to base 2; LSE comes in base 2"
            formula = "exp2_approx(fmaf({value}, LOG2E, -lse[{row}]))"
            if not score.call:
                formula = "exp2_approx(fmaf({element}, exp_scale, -lse[{row}]))"
        return Exponential(scale, note, formula.format(row=row, value=value, element=element))
