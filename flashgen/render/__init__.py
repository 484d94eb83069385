"""Plan + template -> Source: the emitted CUDA file.

Every decision is taken here or earlier; the templates only lay the result out. The same inputs give
the same bytes: no timestamp, no path of a machine, everything in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.analysis import Analysis
from flashgen.plan import Plan
from flashgen.render.banner import banner
from flashgen.render.environment import render_template
from flashgen.render.functions import SpecFunctions
from flashgen.render.walk import ScoreCode, walk_of
from flashgen.spec import AttentionSpec

__all__ = ["Param", "Source", "forward"]

DTYPE_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Param:
    """One field of the kernel's ``struct Params``, in order.

    ``ctype`` is "pointer", "int64", "int32" or "float32".
    """

    name: str
    ctype: str
    declaration: str
    what: str

    @property
    def comment(self) -> str:
        """Behind the declaration: a shape, or what the number counts."""
        return f"  // {self.what}" if self.what else ""


@dataclass(frozen=True)
class Source:
    """One emitted file, and what it takes to launch its kernel.

    Attributes:
        name: of the ``extern "C"`` kernel.
        filename: of the file, without folders.
        text: CUDA C++, self-contained.
        params: fields of the one by-value ``struct Params``, in order.
        plan: block size, shared memory and grid of the launch.
    """

    name: str
    filename: str
    text: str
    params: tuple[Param, ...]
    plan: Plan


@dataclass(frozen=True)
class Element:
    """Names that the operand type has in PTX."""

    mma: str
    bits: str
    constraint: str


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
    lse="fmaf(row_max[g][r], exp_scale, logf(sum))",
    inverse=None,
    divide="/ divisor",
)

ELEMENTS = {
    "float16": Element("f16", "b16", "h"),
    "bfloat16": Element("bf16", "b16", "h"),
    "float32": Element("tf32", "f32", "f"),
}

_SHAPES = {
    "q": "[batch, heads_q, seq_q, HEAD_DIM]",
    "k": "[batch, heads_kv, seq_k, HEAD_DIM]",
    "v": "[batch, heads_kv, seq_k, HEAD_DIM_V]",
    "o": "[batch, heads_q, seq_q, HEAD_DIM_V]",
}
_AXES = {"b": "batch entry", "h": "head", "n": "row"}
_SIZES = {
    "batch": "",
    "heads_q": "",
    "heads_kv": "divides heads_q",
    "seq_q": "",
    "seq_k": "",
    "q_offset": "position of query row 0",
    "k_offset": "position of key 0",
}
_SCALAR_TYPES = {
    "int32": ("int32", "int"),
    "bool": ("int32", "int"),
    "float32": ("float32", "float"),
}


def forward(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The forward kernel of ``spec`` (FlashAttention, Algorithm 1, with FlashAttention-2's loops).

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    functions = SpecFunctions(spec, analysis)
    walk = walk_of(functions)
    score = ScoreCode.of(functions)
    name = kernel_name(spec, "forward")
    precise = plan.dtype == "float32"
    kernel_helpers = set() if precise else {"rcp"}
    text = render_template(
        "forward_sm80.cu.j2",
        name=name,
        banner=banner(spec, plan, "forward", "forward_sm80.cu.j2"),
        plan=plan,
        softmax=SOFTMAX_FLOAT32 if precise else SOFTMAX_HALF,
        element=ELEMENTS[plan.dtype],
        params=(params := forward_params(spec)),
        spec_functions=score.functions + walk.functions,
        uses_ranges=any(f.returns == "Range" for f in walk.functions),
        math_helpers=frozenset(functions.printer.helpers | kernel_helpers),
        walk=walk,
        score=score,
        qk_tail=plan.itemsize == 2 and plan.head_dim % 16 == 8,
        pv_tail=plan.head_dim_v % 16 == 8,
    )
    return Source(name, f"{name}_{plan.arch}.cu", tidy(text), params, plan)


def kernel_name(spec: AttentionSpec, direction: str) -> str:
    """``causal_forward_fp16_d64``: what profiles, symbols and files are called by."""
    dims = f"d{spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        dims += f"v{spec.head_dim_v}"
    return f"{spec.name}_{direction}_{DTYPE_SHORT[spec.dtype]}_{dims}"


def forward_params(spec: AttentionSpec) -> tuple[Param, ...]:
    """The fields of the forward kernel's ``struct Params``."""
    params = [
        Param(t, "pointer", f"{'' if t == 'o' else 'const '}Element* {t};", shape)
        for t, shape in _SHAPES.items()
    ]
    params.append(Param("lse", "pointer", "float* lse;", "[batch, heads_q, seq_q], natural log"))
    for tensor in _SHAPES:
        for axis, what in _AXES.items():
            name = f"{tensor}_stride_{axis}"
            params.append(
                Param(name, "int64", f"long long {name};", f"elements to the next {what}")
            )
    for name, what in _SIZES.items():
        params.append(Param(name, "int32", f"int {name};", what))
    params.append(Param("scale", "float32", "float scale;", "of Q K^T"))
    for scalar in spec.scalars:
        ctype, cpp = _SCALAR_TYPES[scalar.dtype]
        params.append(
            Param(f"s_{scalar.name}", ctype, f"{cpp} s_{scalar.name};", f"the spec's {scalar.name}")
        )
    return tuple(params)


def tidy(text: str) -> str:
    """The text without what template tags leave behind: trailing spaces, blank lines in a row."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if not line and (not lines or not lines[-1]):
            continue
        lines.append(line)
    return "\n".join(lines).rstrip() + "\n"
