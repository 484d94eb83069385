"""The spec's functions as C++: score_mod, mask_mod, and what the analysis made of the mask.

A function is emitted only when the kernel calls it and takes only what it uses. A call passes
variables of the kernel that bear the parameters' names, so one list of names serves both.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from flashgen import expr as fx
from flashgen.analysis import Analysis, Interval, MaskAnalysis, ScoreAnalysis
from flashgen.cprint import CPrinter
from flashgen.render.text import COLUMNS, comment, comments, wrap_code
from flashgen.spec import AttentionSpec

K_OFFSET = sympy.Symbol("k_offset", integer=True)
TILE = sympy.Symbol("tile", integer=True)

# Function parameters in the order of a signature, with their C++ type.
PARAMETERS: dict[sympy.Symbol, str] = {
    fx.SCORE: "float score",
    fx.B: "int b",
    fx.H: "int h",
    fx.Q: "int q",
    fx.K: "int k",
    fx.Q_LO: "int q_lo",
    fx.Q_HI: "int q_hi",
    TILE: "int tile",
}
# The keys of a tile, first and last, without those past the end.
TILE_ENDS: dict[sympy.Symbol, str] = {
    fx.K_LO: "const int k_lo = p.k_offset + tile * BLOCK_K;",
    fx.K_HI: "const int k_hi = p.k_offset + min(tile * BLOCK_K + BLOCK_K, p.seq_k) - 1;",
}
FIELDS: dict[sympy.Symbol, str] = {
    fx.BATCH: "p.batch",
    fx.HEADS: "p.heads_q",
    fx.SEQ_Q: "p.seq_q",
    fx.SEQ_K: "p.seq_k",
    K_OFFSET: "p.k_offset",
}


@dataclass(frozen=True)
class SpecFunction:
    """One device function of the emitted file.

    ``uses`` are the positions that its expressions mention; the call's arguments follow from it.
    """

    name: str
    returns: str
    comment: tuple[str, ...]
    body: tuple[str, ...]
    uses: frozenset[sympy.Symbol]
    takes_params: bool

    @property
    def parameters(self) -> str:
        params = ["const Params& p"] if self.takes_params else []
        return ", ".join(params + [text for s, text in PARAMETERS.items() if s in self.uses])

    @property
    def signature(self) -> str:
        head = "__device__ __forceinline__"
        line = f"{head} {self.returns} {self.name}({self.parameters}) {{"
        if len(line) <= COLUMNS:
            return line
        return f"{head} {self.returns} {self.name}(\n    {self.parameters}) {{"

    def call(self, **replaced: str) -> str:
        """The call as the kernel writes it; ``replaced`` gives other text for an argument."""
        args = ["p"] if self.takes_params else []
        for symbol, text in PARAMETERS.items():
            if symbol in self.uses:
                name = text.split()[1]
                args.append(replaced.get(name, name))
        return f"{self.name}({', '.join(args)})"


class SpecFunctions:
    """Makes the functions of one spec, with one printer so that helpers are collected."""

    def __init__(self, spec: AttentionSpec, analysis: Analysis) -> None:
        names = {s: text.split()[1] for s, text in PARAMETERS.items()} | FIELDS
        names |= {fx.K_LO: "k_lo", fx.K_HI: "k_hi"}
        for scalar in spec.scalars:
            field = f"p.s_{scalar.name}"
            names[scalar.expr] = f"({field} != 0)" if scalar.dtype == "bool" else field
        self.spec = spec
        self.mask: MaskAnalysis = analysis.mask
        self.score: ScoreAnalysis = analysis.score
        self.printer = CPrinter(names, spec.dtype)

    def _function(
        self,
        name: str,
        returns: str,
        why: Sequence[str],
        exprs: Sequence[sympy.Basic],
        body: Sequence[str],
    ) -> SpecFunction:
        free = set().union(*(expr.free_symbols for expr in exprs)) if exprs else set()
        uses = frozenset(free & set(PARAMETERS))
        return SpecFunction(
            name=name,
            returns=returns,
            comment=tuple(why),
            body=tuple(line for text in body for line in wrap_code(text, indent=2)),
            uses=uses,
            takes_params="p." in "".join(body),
        )

    # The user's two functions.

    def score_mod(self) -> SpecFunction:
        block = self.score.value
        lets = self.printer.lets(block)
        result = self.printer.float(block.results[0])
        exprs = [value for _, value in block.lets] + list(block.results)
        return self._function(
            "score_mod",
            "float",
            self._source(self.spec.score_line),
            exprs,
            [*lets, f"return {result};"],
        )

    def mask_mod(self) -> SpecFunction:
        return self._function(
            "mask_mod",
            "bool",
            self._source(self.spec.mask_line),
            [self.mask.expr],
            [f"return {self.printer.expr(self.mask.expr)};"],
        )

    # What the analysis made of the mask.

    def row_keys(self) -> SpecFunction:
        interval = Interval(None, None) if self.mask.always else self.mask.row
        assert interval is not None, "asked for only where the mask is a range of each row"
        if self.mask.always:
            return self._range("row_keys", comment("The keys of a row: all of them."), interval)
        why = "The keys that row q keeps are one range: the mask, solved for k."
        return self._range(
            "row_keys", [*self._source(self.spec.mask_line), *comment(why)], interval
        )

    def tile_reach(self) -> SpecFunction:
        why = "Every key that some query in [q_lo, q_hi] keeps lies in this range."
        return self._range("tile_reach", comment(why), self.mask.reach)

    def tile_full(self) -> SpecFunction:
        why = "Every query in [q_lo, q_hi] keeps every key in this range."
        assert self.mask.full is not None, "asked for only where the range has a closed form"
        return self._range("tile_full", comment(why), self.mask.full)

    def tile_may(self) -> SpecFunction:
        why = "False: no element of the tile is kept (interval arithmetic over its corners)."
        return self._tile_condition("tile_may", why, self.mask.may)

    def tile_must(self) -> SpecFunction:
        why = "True: every element of the tile is kept (interval arithmetic over its corners)."
        return self._tile_condition("tile_must", why, self.mask.must)

    def _range(self, name: str, why: Sequence[str], interval: Interval) -> SpecFunction:
        # Counted from the first key of this call, and cut to the keys that there are.
        zero = sympy.S.Zero
        lo = zero if interval.lo is None else fx.Maximum(interval.lo - K_OFFSET, zero)
        hi = fx.SEQ_K if interval.hi is None else fx.Minimum(interval.hi - K_OFFSET, fx.SEQ_K)
        return self._function(
            name, "Range", why, [lo, hi], [f"return {{{self._int(lo)}, {self._int(hi)}}};"]
        )

    def _int(self, expr: sympy.Expr) -> str:
        text = self.printer.expr(expr)
        return f"int({text})" if self.printer.ctype(expr) == "long long" else text

    def _tile_condition(self, name: str, why: str, condition: sympy.Basic) -> SpecFunction:
        ends = [s for s in TILE_ENDS if s in condition.free_symbols]
        body = [TILE_ENDS[s] for s in ends] + [f"return {self.printer.expr(condition)};"]
        needs = [condition, TILE] if ends else [condition]
        return self._function(name, "bool", comment(why), needs, body)

    def _source(self, lines: fx.SourceLines | None) -> list[str]:
        if lines is None:
            return []
        return comments(
            [str(lines), *textwrap.indent(lines.text.rstrip(), "  ").splitlines()], "    "
        )
