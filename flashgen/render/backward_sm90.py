"""The backward kernels for Hopper: what their templates are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.analysis import Analysis
from flashgen.plan import Plan
from flashgen.plan.model_backward_sm90 import panels_of_kernel, queries_of_sums
from flashgen.render.exponential import Exponential
from flashgen.render.functions import KEYS, QUERIES, SpecFunctions
from flashgen.render.kernel import kernel
from flashgen.render.source import ELEMENTS, Source
from flashgen.render.walk import ScoreCode, Walk, walk_of
from flashgen.render.wgmma import Results
from flashgen.spec import AttentionSpec

_ELEMENT = "s[n][e]"  # of Q K^T, in these templates


@dataclass(frozen=True)
class Product:
    """One form of wgmma that a kernel uses, as a device function.

    Attributes:
        name, what: of the function.
        results: its accumulators.
        shape: the instruction's, with types.
        majors: the instruction's last arguments: which operands are transposed.
        from_registers: A is in registers, four of them, rather than in shared memory.
    """

    name: str
    what: str
    results: Results
    shape: str
    majors: str
    from_registers: bool = False

    @property
    def a(self) -> str:
        """The operand as the function takes it."""
        return "const unsigned (&a)[4]" if self.from_registers else "unsigned long long a"

    @property
    def inputs(self) -> str:
        """The same as the assembly takes it."""
        if not self.from_registers:
            return '"l"(a)'
        return ", ".join(f'"r"(a[{i}])' for i in range(4))

    @property
    def _of_a(self) -> int:
        return 4 if self.from_registers else 1

    @property
    def operands(self) -> str:
        """A and B, as the assembly names them."""
        a = ", ".join(self.results.operand(i) for i in range(self._of_a))
        b = self.results.operand(self._of_a)
        return f"{{{a}}}, {b}" if self.from_registers else f"{a}, {b}"

    @property
    def adds(self) -> str:
        """The operand that says whether the sums go on."""
        return self.results.operand(self._of_a + 1)


def backward_sm90(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The kernel of ``plan``: "dkdv", "fused" or "dq".

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    by_keys = plan.owns_keys
    functions = SpecFunctions(spec, analysis, QUERIES if by_keys else KEYS)
    score = ScoreCode.of(functions, slope=True, element=_ELEMENT)
    walk = walk_of(functions, **({"h": "next_h", "tile": "next_tile"} if by_keys else {}))
    row = "e % 2" if by_keys else "e / 2"
    panels = panels_of_plan(plan)
    fields: dict[str, Any] = panels | {
        "exponential": Exponential.of(plan, score, row, element=_ELEMENT),
        "slope_note": ", times the score function's slope" if score.call else "",
        "transposed": by_keys,
        # P waits for dP where it takes both to know what to keep of it, or what the slope is.
        "one_pass": bool(score.call or spec.dropout),
        "fused": plan.kernel == "fused",
    }
    if by_keys:
        halves = (
            panels["panel"] * panels["panels"] // 2,
            panels["panel_v"] * panels["panels_v"] // 2,
        )
        fields |= _of_keys(spec, plan, functions, walk, score, halves)
    else:
        shapes = {("multiply_rows", plan.block_k), ("multiply_columns", plan.head_dim)}
        fields |= {"products": products_of(plan, shapes), "exchanges": None}
        fields |= {"row_keep": _keep(walk, has_hi=True)}
    template = "backward_sm90.cu.j2" if by_keys else "backward_dq_sm90.cu.j2"
    return kernel(template, spec, plan, functions, walk, score, **fields)


def panels_of_plan(plan: Plan) -> dict[str, int]:
    """Fields that say in which panels the tiles of a kernel lie."""
    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, panels), (panel_v, panels_v) = panels_of_kernel(plan.kernel, *sizes)
    return {"panel": panel, "panels": panels, "panel_v": panel_v, "panels_v": panels_v}


def _of_keys(
    spec: AttentionSpec,
    plan: Plan,
    functions: SpecFunctions,
    walk: Walk,
    score: ScoreCode,
    halves: tuple[int, int],
) -> dict[str, Any]:
    """Fields of a kernel that owns keys.

    Args:
        halves: of the columns of dK and dV, where warpgroups share them.
    """
    shares, fused = plan.column_warps > 1, plan.kernel == "fused"
    together = queries_of_sums(plan)
    columns = halves if shares else (plan.head_dim, plan.head_dim_v)
    queries = plan.block_q // plan.score_warps
    shapes = {("multiply_rows", queries), *(("multiply_columns", each) for each in columns)}
    if fused:
        shapes.add(("multiply_queries", together))
    # Past the last query P and dP - delta are 0 by themselves, unless the score function makes them
    # something else; past the last key they are not.
    row = functions.mask.row
    has_hi = not walk.row_has_lo or bool(score.call) or (row is not None and row.hi is not None)
    keeps = spec.dropout
    return {
        "products": products_of(plan, shapes),
        "shares_scores": shares,
        "dq_shares_queries": together < plan.block_q,
        "uses_h": fused or keeps or score.uses_h or walk.uses_h,
        "exchanges": "P and dS" if shares else "dS" if fused else None,
        "shift": "first_query + " if shares else "",
        "shift_rows": "first_query * 2 * PANEL + " if shares else "",
        "shift_rows_v": "first_query * 2 * PANEL_V + " if shares else "",
        "key_shift": "" if shares else "first_key * 2 * PANEL + ",
        "key_shift_v": "" if shares else "first_key * 2 * PANEL_V + ",
        "scores_shift": "first_query * 2 * PANEL_S" if shares else "warpgroup * S_PANEL",
        "row_has_hi": has_hi,
        "hi": "queries.hi - column"
        if walk.row_has_lo
        else "key < p.seq_k ? queries.hi - column : 0",
        "row_keep": _keep(walk, has_hi=has_hi),
        "dp_adds": "c > 0" if keeps else "true",
        "dp_note": "dP^T = V dO^T"
        if keeps
        else "(dP - delta)^T = V dO^T - delta, a sum that begins at -delta",
        "stage_column": "column" if shares else "n",
        "dv_scale": " * p.dropout_scale" if keeps else "",
    }


def _keep(walk: Walk, *, has_hi: bool) -> str:
    """Which of two neighbouring elements of a row the mask keeps."""
    return " & ".join(["pair_from(lo, n)"] * walk.row_has_lo + ["~pair_from(hi, n)"] * has_hi)


_WHAT = {
    "multiply_rows": "D (+)= A B^T, 16 columns of each: row-wise both, from shared memory.",
    "multiply_queries": "D (+)= A^T B^T, 16 rows of A and columns of B, from shared memory.",
    "multiply_columns": "D (+)= A^T B, 16 rows of each, from shared memory.",
}
_MAJORS = {"multiply_rows": "0, 0", "multiply_queries": "1, 0", "multiply_columns": "1, 1"}


def products_of(plan: Plan, shapes: set[tuple[str, int]]) -> list[Product]:
    """The forms of wgmma of a kernel: one for each name and number of columns in ``shapes``."""
    operand = ELEMENTS[plan.dtype].mma
    found = []
    for name, columns in sorted(shapes):
        shape = f"m64n{columns}k16.f32.{operand}.{operand}"
        what, majors = _WHAT[name], _MAJORS[name]
        in_registers = name == "multiply_columns" and plan.column_warps == 1
        if in_registers:
            what = "D (+)= A B, 16 columns of A, from registers, and rows of B, from shared memory."
            majors = "1"
        found.append(Product(name, what, Results.of(columns), shape, majors, in_registers))
    return found
