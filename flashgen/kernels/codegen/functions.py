"""The device functions of a spec: score_mod, mask_mod, and the bounds and classes of tiles.

A function is emitted only if the kernel calls it, with only the parameters that it uses. A call
passes variables of the kernel that have the parameters' names, so that one list serves both.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from flashgen.kernels.codegen.conditions import returned
from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.kernels.codegen.integer_ranges import AssumedBlock
from flashgen.kernels.codegen.params import inverse_field, is_set_by_kernel, multiplier_field
from flashgen.kernels.codegen.readers import extreme, reader
from flashgen.kernels.codegen.shared_values import FunctionInParts, in_parts, values_of
from flashgen.kernels.codegen.spec_function import PARAMETERS, TILE, TILE_END, SpecFunction
from flashgen.kernels.codegen.text import DeviceFunction, comment, comments
from flashgen.spec.analysis import Analysis
from flashgen.spec.analysis.diagonals import (
    OFFSETS,
    code_of_mask,
    known_positions,
    natural_positions,
)
from flashgen.spec.analysis.folding import FoldedScore
from flashgen.spec.analysis.intervals import Interval, WalkedAxis
from flashgen.spec.analysis.invariants import Level, LeveledCode, leveled
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.analysis.score import ScoreAnalysis
from flashgen.spec.analysis.sharing import is_costly, share, share_evaluated
from flashgen.spec.analysis.tangents import TangentAnalysis
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import BOUNDARIES, PAGES, AttentionSpec
from flashgen.spec.language.symbols import (
    BATCH,
    HEADS,
    K_HI,
    K_LO,
    Q_HI,
    Q_LO,
    SCALE,
    SEQ_K,
    SEQ_Q,
    K,
    Q,
)
from flashgen.spec.language.sympy_functions import Maximum, Minimum
from flashgen.spec.language.tensor import MOST_DIMS, Tensor
from flashgen.spec.language.tensor_elements import Element
from flashgen.spec.language.user_source import SourceLines

Q_OFFSET = sympy.Symbol("q_offset", integer=True)
K_OFFSET = sympy.Symbol("k_offset", integer=True)
FIELDS: dict[sympy.Symbol, str] = {
    BATCH: "p.batch",
    HEADS: "p.heads_q",
    SEQ_Q: "p.seq_q",
    SEQ_K: "p.seq_k",
    Q_OFFSET: "p.q_offset",
    K_OFFSET: "p.k_offset",
    SCALE: "p.scale",
}


@dataclass(frozen=True)
class Direction:
    """The axis along which a kernel walks over tiles, for a tile of the other axis that it owns.

    Attributes:
        walk: the axis in the analysis.
        counts: the word for positions along the axis in comments.
        row: the name of the function that solves the mask for a position on the axis; row_why,
            row_all, reach_why and full_why are the comments of the functions.
        offset, length: the symbols of the first position and of the number of positions.
        owned_lo, owned_hi: the symbols of the first and last position of the owned tile.
        ends: C++ declarations of the first and last position of a tile within the sequence.
    """

    walk: WalkedAxis
    counts: str
    row: str
    row_why: str
    row_all: str
    reach_why: str
    full_why: str
    offset: sympy.Symbol
    length: sympy.Symbol
    owned_lo: sympy.Symbol
    owned_hi: sympy.Symbol
    ends: dict[sympy.Symbol, str]

    @property
    def owns_keys(self) -> bool:
        """Whether the owned tile is one of keys."""
        return self.owned_lo is K_LO


def _ends(lo: sympy.Symbol, hi: sympy.Symbol, unit: str) -> dict[sympy.Symbol, str]:
    """The declarations of the first and the last position of a walked tile, or box, by its unit."""
    axis = unit[-1].lower()
    first, end = f"p.{axis}_offset", f"p.seq_{axis}"
    return {
        lo: f"const int {axis}_lo = {first} + tile * {unit};",
        hi: f"const int {axis}_hi = {first} + min(tile * {unit} + {unit}, {end}) - 1;",
    }


KEYS = Direction(
    walk=WalkedAxis(K),
    counts="keys",
    row="row_keys",
    row_why="The keys that row q keeps are one range: the mask, solved for k.",
    row_all="All keys belong to the range of a row.",
    reach_why="Every key that some query in [q_lo, q_hi] keeps lies in this range.",
    full_why="Every query in [q_lo, q_hi] keeps every key in this range.",
    offset=K_OFFSET,
    length=SEQ_K,
    owned_lo=Q_LO,
    owned_hi=Q_HI,
    ends=_ends(K_LO, K_HI, "BLOCK_K"),
)
GATHERED_KEYS = replace(KEYS, ends=_ends(K_LO, K_HI, "BOX_K"))
"""The walk over boxes of keys that are gathered to tiles, where `tile` is the number of a box."""

QUERIES = Direction(
    walk=WalkedAxis(Q),
    counts="queries",
    row="key_queries",
    row_why="The queries that keep key k are one range: the mask, solved for q.",
    row_all="All queries belong to the range of a key.",
    reach_why="Every query that keeps some key in [k_lo, k_hi] lies in this range.",
    full_why="Every query in this range keeps every key in [k_lo, k_hi].",
    offset=Q_OFFSET,
    length=SEQ_Q,
    owned_lo=K_LO,
    owned_hi=K_HI,
    ends=_ends(Q_LO, Q_HI, "BLOCK_Q"),
)

GATHERED_QUERIES = replace(QUERIES, ends=_ends(Q_LO, Q_HI, "BOX_Q"))
"""The walk over boxes of queries that are gathered to tiles."""


_TESTS = {
    "tile_may": "False: no element of the tile is kept (interval arithmetic over its corners).",
    "tile_must": "True: every element of the tile is kept (interval arithmetic over its corners).",
}


def _notes(folded: FoldedScore | None) -> list[str]:
    """The notes on the folded factors, as comments."""
    return comment(f"Of an element of Q K^T: {'; '.join(folded.notes)}.") if folded else []


class SpecFunctions:
    """The functions of one spec, printed by one printer, which collects the helpers they call."""

    def __init__(
        self,
        spec: AttentionSpec,
        analysis: Analysis,
        direction: Direction = KEYS,
        *,
        wide: bool = False,
        more_tensors: tuple[Tensor, ...] = (),
    ) -> None:
        """
        Args:
            more_tensors: tensors that functions may read besides the spec's.
        """
        names = {s: text.split()[1] for s, text in PARAMETERS.items()} | FIELDS
        for scalar in spec.scalars:
            field = f"p.s_{scalar.name}"
            names[scalar.expr] = f"({field} != 0)" if scalar.dtype == "bool" else field
        self.spec = spec
        self.direction = direction
        self._readable = (*spec.read_tensors, *more_tensors)
        self.mask: MaskAnalysis = analysis.mask
        self.score: ScoreAnalysis = analysis.score
        self.printer = CPrinter(names, spec.dtype, wide=wide)
        divisors = [
            scalar
            for scalar in spec.scalars
            if scalar.dtype == "int32" and not is_set_by_kernel(spec, scalar)
        ]
        self.printer.multipliers = {s.expr: f"p.{multiplier_field(s)}" for s in divisors}
        self.printer.inverses = {s.expr: f"p.{inverse_field(s)}" for s in divisors}
        # The tensors that the kernel itself reads.
        kernel_tensors = (*(BOUNDARIES if spec.packed else ()), *(PAGES if spec.paged else ()))
        spec_symbols = {tensor.symbol for tensor in spec.tensors}
        self.printer.tensors |= {tensor.symbol for tensor in kernel_tensors} & spec_symbols
        self.printer.tensors |= {tensor.symbol for tensor in spec.offsets}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the functions made so far read, min/max tables included."""
        used = self.printer.tensors | {symbol for symbol, _, _ in self.printer.extremes}
        return tuple(t for t in self._readable if t.symbol in used)

    @property
    def readers(self) -> tuple[DeviceFunction, ...]:
        """The functions that read these tensors and their min/max tables."""
        by_symbol = {tensor.symbol: tensor for tensor in self.tensors}
        extremes = sorted(self.printer.extremes, key=lambda read: (read[0].name, *read[1:]))
        return (
            *(reader(t) for t in self.tensors if t.symbol in self.printer.tensors),
            *(extreme(by_symbol[symbol], axis, least) for symbol, axis, least in extremes),
        )

    @property
    def tables(self) -> tuple[tuple[Tensor, int], ...]:
        """The min/max tables that the functions read: a tensor and an axis each."""
        read = {(symbol, axis) for symbol, axis, _ in self.printer.extremes}
        axes = range(MOST_DIMS)
        return tuple((t, axis) for t in self.tensors for axis in axes if (t.symbol, axis) in read)

    def _function(
        self,
        name: str,
        returns: str,
        why: Sequence[str],
        exprs: Sequence[sympy.Basic],
        body: Sequence[str],
    ) -> SpecFunction:
        free = set().union(*(expr.free_symbols for expr in exprs)) if exprs else set()
        uses = free & (PARAMETERS.keys() - self.direction.ends.keys())
        return SpecFunction.create(name, returns, why, body, uses)

    # The user's functions.

    def score_mod(self, folded: FoldedScore | None = None) -> FunctionInParts:
        """The score function; with ``folded``, its remaining part as a function of Q K^T."""
        why = [*self._source(self.spec.score_line), *_notes(folded)]
        code = folded.code if folded else self.score.value
        return self._scoring("score_mod", "float", why, code)

    def score_mod_and_slope(self, folded: FoldedScore | None) -> FunctionInParts:
        """score_mod with its derivative; common subexpressions are computed once."""
        derived = comment(f"Derivative by the score: {python_text(self.score.derivative)}")
        why = [*self._source(self.spec.score_line), *_notes(folded), *derived]
        code = folded.code_with_slope if folded else None
        code = code or self.score.value_and_derivative
        return self._scoring("score_mod", "Scored", why, code)

    def score_mod_and_tangent(self, tangents: TangentAnalysis) -> FunctionInParts:
        """score_mod with its tangent; common subexpressions are computed once."""
        derived = comment(f"Its tangent: {python_text(tangents.tangent)}")
        why = [*self._source(self.spec.score_line), *derived]
        return self._scoring("score_mod", "Moved", why, tangents.value_and_tangent)

    def score_partials(self) -> FunctionInParts:
        """The derivatives of score_mod by the elements of learned tensors that it reads."""
        names = ", ".join(python_text(element) for element, _ in self.score.learned)
        why = comment(f"Derivatives of score_mod by {names}.")
        return self._scoring("score_partials", "Partials", why, self.score.partials)

    def address_of(self, name: str, element: Element, kind: str) -> SpecFunction:
        """The address of the gradient of ``element``, at which ``name`` is accumulated.

        Args:
            kind: the type of the accumulator.
        """
        block = share(element)
        lets = self.printer.lets(block)
        indices = ", ".join(["p", *map(self.printer.index, block.results[0].indices)])
        return self._function(
            f"address_of_{name}",
            f"{kind}*",
            comment(f"The address of {name}'s sum, the gradient of {python_text(element)}."),
            element.indices,
            [*lets, f"return sum_of_{element.tensor.name}({indices});"],
        )

    def _scoring(
        self, name: str, returns: str, why: list[str], code: LeveledCode
    ) -> FunctionInParts:
        def result() -> str:
            results = ", ".join(self.printer.float(result) for result in code.block.results)
            return results if returns == "float" else f"{{{results}}}"

        return in_parts(name, returns, why, code, self.printer, result)

    def mask_mod(self) -> FunctionInParts:
        natural = natural_positions(self.mask.expr, known_positions(self.spec))
        code = code_of_mask(self.mask.expr, frozenset() if self.printer.wide else natural)
        offsets = tuple(sorted(OFFSETS[position] for position in natural))
        self.printer.assumptions.insert(0, AssumedBlock(natural=offsets))

        def result() -> str:
            return self.printer.expr(code.block.results[0])

        why = self._source(self.spec.mask_line)
        self.printer.evaluates_all = True
        function = in_parts("mask_mod", "bool", why, code, self.printer, result)
        self.printer.evaluates_all = False
        return function

    # The bounds and conditions of the analysis.

    def row(self, along: Direction, row_range: Interval) -> SpecFunction:
        """The range of positions ``along`` an axis that a row keeps."""
        why = [*self._source(self.spec.mask_line), *comment(along.row_why)]
        if self.mask.always:
            why = comment(along.row_all)
        return self._range(along.row, why, row_range, along)

    def tile_reach(self) -> SpecFunction:
        return self._range("tile_reach", comment(self.direction.reach_why), self.mask.reach)

    def tile_full(self) -> SpecFunction:
        assert self.mask.full is not None, "the function exists only if the range has a closed form"
        return self._range("tile_full", comment(self.direction.full_why), self.mask.full)

    def tile_may(self) -> SpecFunction:
        return self._tile_condition("tile_may", self.mask.may)

    def next_live_tile(
        self, may: SpecFunction, must: SpecFunction | None, *, keeps: bool
    ) -> SpecFunction:
        """The search for the next tile for which ``may`` is true: it may have a kept element.

        Args:
            keeps: whether the warp keeps the results of its lanes for 32 tiles, also of ``must``.
        """
        once = ", once for all of them" if keeps else ""
        why = (
            "The first tile from `tile` on that may have a kept element; tile_end if none has. "
            f"Each lane of the warp evaluates one of 32 tiles{once}."
        )
        live = f"const bool live = tile + lane < tile_end && {may.call(tile='tile + lane')};"
        if keeps:
            search = [
                "if (unsigned(tile - known.first) >= 32) {",
                "  known.first = tile;",
                f"  {live}",
                "  known.live = __ballot_sync(0xffffffffu, live);",
            ]
            if must is not None:
                search += [
                    f"  const bool full = live && {must.call(tile='tile + lane')};",
                    "  known.full = __ballot_sync(0xffffffffu, full);",
                ]
            search += ["}", "const unsigned lives = known.live >> (tile - known.first);"]
        else:
            search = [live, "const unsigned lives = __ballot_sync(0xffffffffu, live);"]
        body = (
            "const int lane = threadIdx.x % 32;",
            f"for (; tile < tile_end; tile {'= known.first + 32' if keeps else '+= 32'}) {{",
            *(f"  {line}" for line in search),
            "  if (lives != 0) return tile + __ffs(lives) - 1;",
            "}",
            "return tile_end;",
        )
        uses = may.uses | (must.uses if keeps and must else frozenset()) | {TILE, TILE_END}
        extra_params = ["KnownTiles& known"] if keeps else []
        return SpecFunction.create(
            "next_live_tile", "int", comment(why), body, uses, extra_params=extra_params
        )

    def tile_must(self) -> SpecFunction:
        return self._tile_condition("tile_must", self.mask.must)

    def _range(
        self,
        name: str,
        why: Sequence[str],
        interval: Interval,
        along: Direction | None = None,
    ) -> SpecFunction:
        # Relative to the first position of the call, within its length.
        along = along or self.direction
        zero, offset, length = sympy.S.Zero, along.offset, along.length
        lo = zero if interval.lo is None else Maximum(interval.lo - offset, zero)
        hi = length if interval.hi is None else Minimum(interval.hi - offset, length)
        block = share_evaluated(lo, hi)
        lets = self.printer.lets(block)
        ends = ", ".join(map(self._int, block.results))
        return self._function(name, "Range", why, [lo, hi], [*lets, f"return {{{ends}}};"])

    def _int(self, expr: sympy.Expr) -> str:
        text = self.printer.expr(expr)
        return f"int({text})" if self.printer.ctype(expr) == "int64" else text

    @functools.cached_property
    def _tile_tests(self) -> dict[str, tuple[SpecFunction, ...]]:
        """The tests of tiles by name, with the functions of the bounds that they share.

        Empty where a test reads memory or divides: its parts are evaluated only where needed.
        """
        tests = {"tile_may": self.mask.may, "tile_must": self.mask.must}
        if any(map(is_costly, tests.values())):
            return {}
        code = leveled(*tests.values(), bounded=False)
        if not (code.values(Level.QUERY) and code.values(Level.KEY)):
            return {}
        why = "What the tests of tiles compute from the {many} alone."
        by_level = values_of("tile", why, code, self.printer)
        functions = {"": tuple(values.function for values in by_level.values())}
        lets = dict(code.block.lets)
        value_uses = set().union(*(values.function.uses for values in by_level.values()))
        for number, (name, why) in enumerate(_TESTS.items()):
            needed = code.needed(Level.SCORE, number)
            exprs = [*(lets[symbol] for symbol in needed), code.block.results[number]]
            read = value_uses.union(*(expr.free_symbols for expr in exprs))
            body = [
                *(text for end, text in self.direction.ends.items() if end in read),
                *(f"const {x.kind} {x.name} = {x.call};" for x in by_level.values()),
                *(self.printer.let(symbol, lets[symbol]) for symbol in needed),
                f"return {self.printer.expr(code.block.results[number])};",
            ]
            uses = (read & PARAMETERS.keys()) - self.direction.ends.keys() | {TILE}
            functions[name] = (SpecFunction.create(name, "bool", comment(why), body, uses),)
        return functions

    @property
    def tile_values(self) -> tuple[SpecFunction, ...]:
        """The functions of the bounds that the tests of tiles share."""
        return self._tile_tests.get("", ())

    def _tile_condition(self, name: str, condition: sympy.Basic) -> SpecFunction:
        if self._tile_tests:
            return self._tile_tests[name][0]
        texts = self.direction.ends
        ends = [s for s in texts if s in condition.free_symbols]
        body = [*(texts[s] for s in ends), *returned(condition, self.printer)]
        needs = [condition, TILE] if ends else [condition]
        return self._function(name, "bool", comment(_TESTS[name]), needs, body)

    def _source(self, lines: SourceLines | None) -> list[str]:
        if lines is None:
            return []
        return comments([str(lines), *textwrap.indent(lines.text.rstrip(), "  ").splitlines()])
