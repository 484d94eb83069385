"""The forward kernel: FlashAttention's Algorithm 1 in FlashAttention-2's loop order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from flashgen.analysis import Analysis
from flashgen.expr import LOWEST_SCORE
from flashgen.plan import Plan
from flashgen.plan.model_sm90 import panels_of
from flashgen.render.functions import SpecFunctions
from flashgen.render.kernel import kernel
from flashgen.render.maps import Maps
from flashgen.render.rows import rows_of
from flashgen.render.source import ELEMENTS, Source
from flashgen.render.walk import ScoreCode, Walk, walk_of
from flashgen.render.wgmma import Results
from flashgen.spec import AttentionSpec

# Warpgroups take turns at the tensor cores up to this head dim. Beyond it a tile has so few keys
# that turns cost more than they order: FlashAttention-3 decides alike (its tile table, 2024).
TURNS_UP_TO = 128


@dataclass(frozen=True)
class Softmax:
    """The expressions of the online softmax, which differ in what they round."""

    scale_of_product: str
    scale_of_score: str
    scale_note: str
    unit: str
    tile_max: str
    outgrown: str
    shrink: str
    probability: str
    why: str
    lse: str
    inverse: str | None
    divide: str
    of_sink: str
    lse_with_sink: str

    def with_sink(self) -> Softmax:
        """The same with LSE of keys and sink."""
        return dataclasses.replace(self, lse=self.lse_with_sink)

    def with_dropout(self) -> Softmax:
        """The same, with O divided by the keep probability too."""
        if self.inverse is None:
            return dataclasses.replace(self, divide=f"* p.dropout_scale {self.divide}")
        return dataclasses.replace(self, inverse=f"{self.inverse} * p.dropout_scale")


# One multiply-add per score: exp2(s * scale - max), with the maximum in units of log2.
SOFTMAX_HALF = Softmax(
    scale_of_product="p.scale * LOG2E",
    scale_of_score="LOG2E",
    scale_note="and the change to base 2",
    unit="in units of log2: what exp2 subtracts",
    tile_max="m * exp_scale",
    outgrown="tile_max[g][r] > row_max[g][r] + MAX_LAG",
    shrink="exp2_approx(row_max[g][r] - grown)",
    probability="exp2_approx(fmaf(x[e], exp_scale, -row_max[g][e / 2]))",
    why="One rounding: the product alone may be large, and its error would not cancel.",
    lse="fmaf(row_max[g][r], LN2, log2_approx(sum) * LN2)",
    inverse="rcp(divisor)",
    divide="* inverse",
    of_sink="exp2_approx(fmaf(sink, LOG2E, -row_max[g][r]))",
    lse_with_sink="log_sum(row_max[g][r], key_sum, sink)",
)
# At float32 the last bit shows: the difference is taken first, where it is exact or nearly so, and
# neither the exponential nor the division is an approximation.
SOFTMAX_FLOAT32 = Softmax(
    scale_of_product="p.scale",
    scale_of_score="1.0f",
    scale_note="of Q K^T",
    unit="in units of the score",
    tile_max="m",
    outgrown="(m - row_max[g][r]) * exp_scale * LOG2E > MAX_LAG",
    shrink="expf((row_max[g][r] - grown) * exp_scale)",
    probability="expf((x[e] - row_max[g][e / 2]) * exp_scale)",
    why="The difference first: it is exact near the maximum, where P is largest.",
    lse="log_sum(row_max[g][r], exp_scale, sum)",
    inverse=None,
    divide="/ divisor",
    of_sink="expf(fmaf(-row_max[g][r], exp_scale, sink))",
    lse_with_sink="log_sum(row_max[g][r], exp_scale, key_sum, sink)",
)


def forward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The forward kernel of ``spec`` (FlashAttention, Algorithm 1, with FlashAttention-2's loops).

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    functions = SpecFunctions(spec, analysis)
    precise = plan.dtype == "float32"
    softmax = SOFTMAX_FLOAT32 if precise else SOFTMAX_HALF
    if spec.sink is not None:
        softmax = softmax.with_sink()
    walk = walk_of(functions)
    if plan.path == "sm_80":
        template, fields = _sm80(plan)
    else:
        template, fields = _sm90(plan, walk, packed=spec.packed)
    return kernel(
        template,
        spec,
        plan,
        functions,
        walk,
        ScoreCode.of(functions, head=rows_of(plan).head),
        helpers=frozenset() if precise else frozenset({"rcp"}),
        softmax=softmax.with_dropout() if spec.dropout else softmax,
        transposed=False,
        lowest=f"{LOWEST_SCORE}f".replace("+", ""),
        sink=spec.sink,
        range_bits=_range_bits(walk, plan),
        mask_loop=walk.mask_costly and plan.loops_over_masks,
        mask_outside=_mask_outside(walk),
        **fields,
    )


def _range_bits(walk: Walk, plan: Plan) -> str | None:
    """A word of the columns outside a row's range; None where to compare them costs no more.

    To compare takes an instruction for each column and end of the range. Words take about eight for
    each row, and eight for each end, and the compiler then tests seven of their bits at a time
    (counted by benchmarks/instructions.py). A range that all rows share is compared once for all.
    """
    ends = 1 + walk.row_has_lo
    columns = plan.block_k // 4  # of a row, that one lane has
    if walk.row is None or not walk.uses_q or ends * columns <= 8 * (1 + ends):
        return None
    above = "bits_from(hi - first)"
    return f"{above} | ~bits_from(lo - first)" if walk.row_has_lo else above


def _mask_outside(walk: Walk) -> str:
    """Whether a score is masked, in unrolled code.

    Without a branch around the mask, neighbouring scores share what is of their row or column.
    A costly mask is left behind one: all rows and columns at once would need too many registers.
    """
    if walk.mask_costly:
        return f"key >= p.seq_k || !{walk.mask}"
    return f"(key >= p.seq_k) | !{walk.mask}"


def _sm80(plan: Plan) -> tuple[str, dict[str, Any]]:
    """The template for mma.sync, and its own fields: a head dim of half a step has a tail."""
    tails = {"qk_tail": plan.itemsize == 2 and plan.head_dim % 16 == 8}
    return "forward_sm80.cu.j2", tails | {"pv_tail": plan.head_dim_v % 16 == 8}


@dataclass(frozen=True)
class Part:
    """What one warpgroup of Hopper's kernel needs to know of a job.

    Attributes:
        step: of the kernel, in which it finds that out.
        walk: as far as it decides for this part.
        maps: that it copies by.
        copies: it brings keys and values.
        finds_queries: it is asked where the tile's queries begin.
    """

    step: str
    walk: Walk
    maps: Maps
    copies: bool
    finds_queries: bool


def _parts(walk: Walk, *, packed: bool) -> dict[str, Part]:
    """Where tiles are copied, nobody asks which are full, and the loop looks for the first too."""
    seeks = dataclasses.replace(
        walk, full=None, next=None, uses_lo=walk.seeks_lo, uses_hi=walk.seeks_hi
    )
    return {
        "copying": Part("2", seeks, Maps.of("kv"), True, packed or walk.seeks_lo or walk.seeks_hi),
        "computing": Part("4", walk, Maps.of("qo"), False, True),
    }


def _sm90(plan: Plan, walk: Walk, *, packed: bool) -> tuple[str, dict[str, Any]]:
    """The template for TMA and wgmma, and its own fields: panels, registers, turns."""
    operand = ELEMENTS[plan.dtype].mma

    def shape(columns: int) -> str:
        return f"m64n{columns}k16.f32.{operand}.{operand}"

    panel, panels = panels_of(plan.head_dim)
    panel_v, panels_v = panels_of(plan.head_dim_v)
    return "forward_sm90.cu.j2", {
        "panel": panel,
        "panels": panels,
        "panel_v": panel_v,
        "panels_v": panels_v,
        "scores": Results.of(plan.block_k),
        "output": Results.of(plan.head_dim_v),
        "scores_shape": shape(plan.block_k),
        "output_shape": shape(plan.head_dim_v),
        "producer_registers": plan.producer_registers,
        "consumer_registers": plan.registers,
        "turns": max(plan.head_dim, plan.head_dim_v) <= TURNS_UP_TO,
        **_parts(walk, packed=packed),
    }
