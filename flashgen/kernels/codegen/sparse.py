"""How a kernel walks a block layout: listed tiles, full tiles, rows of scores, single elements.

The lists of live blocks are searched instead of walked: the next tile depends on the current tile
alone, and a binary search finds it in a few steps, however many tiles are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from flashgen.kernels.codegen.functions import GATHERED_KEYS, GATHERED_QUERIES, SpecFunctions
from flashgen.kernels.codegen.params import head_in_whole
from flashgen.kernels.codegen.shared_values import FunctionInParts, SharedValues
from flashgen.kernels.codegen.spec_function import TILE, TILE_END, SpecFunction
from flashgen.kernels.codegen.text import comment
from flashgen.kernels.planner import Plan
from flashgen.spec.analysis.diagonals import is_costly_mask
from flashgen.spec.language.block_layout import TENSORS
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, B, H, K, Q


@dataclass(frozen=True)
class _Side:
    """One axis of the block layout in C++: the names of positions, sizes and block lists."""

    position: str
    block: str
    offset: str
    size: str  # the constant with the size of the kernel's tile
    lists: str  # the tensors that list the other axis' live blocks for each block of this one


_QUERIES = _Side("q", "LAYOUT_Q", "p.q_offset", "BLOCK_Q", "layout_row")
_KEYS = _Side("k", "LAYOUT_K", "p.k_offset", "BLOCK_K", "layout_column")


_LIVE = "Whether the score's block is live. Negative positions are in block 0."


class LayoutFunctions:
    """The device functions of a spec's block layout, for one direction of the walk.

    Attributes:
        functions: the functions made so far, in an order in which they can be emitted.
        uses: the symbols that the functions of tiles use.
    """

    def __init__(self, functions: SpecFunctions, plan: Plan) -> None:
        self._direction = functions.direction
        self._strided = plan.key_stride > 1
        self._head = head_in_whole(functions.spec, "h")
        by_keys = not functions.direction.owns_keys
        keys = replace(_KEYS, size="BOX_K") if functions.direction is GATHERED_KEYS else _KEYS
        gathers = functions.direction is GATHERED_QUERIES
        queries = replace(_QUERIES, size="BOX_Q") if gathers else _QUERIES
        self._owned, self._walked = (queries, keys) if by_keys else (keys, queries)
        live, *lists = (tensor.symbol for tensor in TENSORS)
        functions.printer.tensors.update([live, *(lists[:2] if by_keys else lists[2:])])
        self._listed = self._next_listed_tile()
        self.functions: tuple[SpecFunction, ...] = (self._listed,)
        self.uses = self._listed.uses

    @staticmethod
    def create(functions: SpecFunctions, plan: Plan) -> LayoutFunctions | None:
        """The functions of the spec's block layout; None for a spec without one."""
        return LayoutFunctions(functions, plan) if functions.spec.block_sparse is not None else None

    def part(self) -> SpecFunction:
        """The function that says which blocks of a part of a tile are live."""
        why = "Of the blocks that some queries and keys touch, bit 0: some are live; bit 1: all."
        body = (
            "bool some = false, every = true;",
            "ROLLED for (int i = max(q_lo / LAYOUT_Q, 0); i <= max(q_hi / LAYOUT_Q, 0); ++i) {",
            "  ROLLED for (int j = max(k_lo / LAYOUT_K, 0); j <= max(k_hi / LAYOUT_K, 0); ++j) {",
            f"    const bool live = read_layout(p, b, {self._head}, i, j) != 0;",
            "    some |= live;",
            "    every &= live;",
            "  }",
            "}",
            "return some + 2 * every;",
        )
        uses = {B, H, Q_LO, Q_HI, K_LO, K_HI}
        function = SpecFunction.create("live_part", "int", comment(why), body, uses)
        self.functions += (function,)
        return function

    def full(self) -> SpecFunction:
        """The function that is true if every block that a tile touches is live."""
        function = self._layout_full()
        self.functions += (function,)
        return function

    def next_tile(self, live: SpecFunction | None) -> SpecFunction:
        """The function that finds the next tile of both the layout and ``live``, the mask's."""
        if live is None:
            return self._listed
        why = "The first tile from `tile` on in which both layout and mask may keep elements."
        body = (
            "while (true) {",
            f"  const int listed = {self._listed.call()};",
            f"  tile = {live.call(tile='listed')};",
            "  if (tile == listed) return tile;",
            "}",
        )
        uses = self._listed.uses | live.uses
        extra_params = (*live.extra_params, *self._listed.extra_params)
        function = SpecFunction.create(
            "next_common_tile", "int", comment(why), body, uses, extra_params=extra_params
        )
        self.functions += (function,)
        return function

    def element(self, mask: SpecFunction | None) -> SpecFunction:
        """The function that is true if both the mask and the block layout keep a score."""
        body = (f"return read_layout(p, b, {self._head}, q / LAYOUT_Q, k / LAYOUT_K) != 0;",)
        uses = {B, H, Q, K}
        inside = SpecFunction.create("in_layout", "bool", comment(_LIVE), body, uses)
        self.functions += (inside,)
        return inside if mask is None else self._and_mask(mask, inside)

    def by_rows(
        self, parts: FunctionInParts | None, mask: SpecFunction | None, plan: Plan
    ) -> FunctionInParts:
        """The function of mask and layout, where a lane reads the blocks of each row once, as bits.

        Args:
            parts: the mask's function, with the values that scores share.
            mask: the mask's function; None where the mask is true.
        """
        rows, columns = (_QUERIES, _KEYS) if plan.rows_are_queries else (_KEYS, _QUERIES)
        column, level = (K, "query") if plan.rows_are_queries else (Q, "key")
        row = f"layout_{level}"
        shared = {name: getattr(parts, name) for name in ("head", "query", "key")} if parts else {}
        mask_values: SharedValues | None = shared.get(level)
        values = self._blocks_of_row(rows, columns, mask_values)
        bit = f"max({columns.position}, 0) / {columns.block} - {row}.first"
        body = (f"return ({row}.blocks >> ({bit}) & 1) != 0;",)
        extra_params = [f"const {values.kind}& {row}"]
        function = SpecFunction.create(
            "in_layout", "bool", comment(_LIVE), body, {column}, extra_params=extra_params
        )
        self.functions += (function,)
        if mask is not None:
            function = self._and_mask(mask, function, mask_values, row)
        return FunctionInParts(function, **{**shared, level: values})

    def _and_mask(
        self,
        mask: SpecFunction,
        inside: SpecFunction,
        mask_values: SharedValues | None = None,
        row: str = "",
    ) -> SpecFunction:
        """The function of mask and layout.

        Args:
            mask_values: the values that scores of a row share in the mask, a field of ``row``.
        """
        passed = {mask_values.name: f"{row}.{mask_values.name}"} if mask_values else {}
        both = SpecFunction.create(
            "mask_and_layout",
            "bool",
            comment("Whether the mask and the block layout both keep a score."),
            (f"return {mask.call(**passed)} && {inside.call()};",),
            mask.uses | inside.uses,
            extra_params=[
                *(text for text in mask.extra_params if text.split()[-1] not in passed),
                *inside.extra_params,
            ],
        )
        self.functions += (both,)
        return both

    def _blocks_of_row(
        self, rows: _Side, columns: _Side, mask_values: SharedValues | None
    ) -> SharedValues:
        """The values that the scores of a row share: the blocks at its columns, a bit each."""
        word, words = ("query", "queries") if rows is _QUERIES else ("key", "keys")
        kind = f"Layout{word.title()}"
        fields = ["unsigned blocks;  // which are live, a bit each", "int first;  // of the blocks"]
        fields_returned = "live, first"
        if mask_values is not None:
            fields.append(f"{mask_values.kind} {mask_values.name};")
            fields_returned += f", {mask_values.function.call()}"
        indices = {rows: f"{rows.position} / {rows.block}", columns: "first + i"}
        i, j = indices[_QUERIES], indices[_KEYS]
        body = (
            f"const int start = {columns.offset} + (column & ~7);",
            f"const int first = max(start / {columns.block}, 0);",
            "unsigned live = 0;",
            f"for (int i = 0; i < (MASKED_COLUMNS - 1) / {columns.block} + 2; ++i) {{",
            f"  const int here = read_layout(p, b, {self._head}, {i}, {j});",
            "  live |= unsigned(here != 0) << i;",
            "}",
            f"return {{{fields_returned}}};",
        )
        why = "The blocks of the layout in a row of the scores that a warp masks."
        extra_params = [*(mask_values.function.extra_params if mask_values else ()), "int column"]
        uses = {B, H, Q if rows is _QUERIES else K}
        function = SpecFunction.create(
            f"layout_{word}_values",
            kind,
            comment(why),
            body,
            uses | mask_values.function.uses if mask_values else uses,
            extra_params=extra_params,
            struct="\n".join([f"struct {kind} {{", *(f"  {line}" for line in fields), "};"]),
        )
        self.functions += (function,)
        return SharedValues(kind, f"layout_{word}", f"layout_{words}", function, function.call())

    def _next_listed_tile(self) -> SpecFunction:
        owned, walked = self._owned, self._walked
        lines = "row" if owned is _QUERIES else "column"
        why = (
            "The first tile from `tile` on that touches a live block of the layout; tile_end when "
            f"none does. Each lane searches the ascending list of one {lines} of blocks that the "
            f"{self._owned_words()} touch."
        )
        lo, hi = f"{owned.position}_lo", f"{owned.position}_hi"
        loop = [
            f"const int first_{lines} = max({lo} / {owned.block}, 0);",
            f"const int last_{lines} = max({hi} / {owned.block}, 0);",
            "int next = tile_end;",
            f"for (int i = first_{lines} + threadIdx.x % 32; i <= last_{lines}; i += 32) {{",
        ]
        if self._strided:  # the first and the last key of each box
            loop = [
                "int next = tile_end;",
                "const int place = threadIdx.x % 32;",
                "const int key = k_lo + place / 2 * key_step + place % 2 * (KEY_BOX - 1);",
                "if (place < 2 * BLOCK_K / KEY_BOX) {",
                f"  const int i = max(min(key, k_hi) / {owned.block}, 0);",
            ]
        body = (
            f"const int first = max(({walked.offset} + tile * {walked.size}) / {walked.block}, 0);",
            *loop,
            f"  const int count = read_{owned.lists}_counts(p, b, {self._head}, i);",
            "  int low = 0, high = count;",
            "  while (low < high) {",
            "    const int middle = (low + high) / 2;",
            f"    if (read_{owned.lists}_blocks(p, b, {self._head}, i, middle) < first) {{",
            "      low = middle + 1;",
            "    } else {",
            "      high = middle;",
            "    }",
            "  }",
            "  if (low < count) {",
            f"    const int block = read_{owned.lists}_blocks(p, b, {self._head}, i, low);",
            f"    const int start = (block * {walked.block} - {walked.offset}) / {walked.size};",
            "    next = min(next, block == first ? tile : start);",
            "  }",
            "}",
            "return __reduce_min_sync(0xffffffffu, next);",
        )
        direction = self._direction
        uses = {B, H, direction.owned_lo, direction.owned_hi, TILE, TILE_END}
        extra_params = ["int key_step"] if self._strided else []
        return SpecFunction.create(
            "next_listed_tile", "int", comment(why), body, uses, extra_params=extra_params
        )

    def _layout_full(self) -> SpecFunction:
        direction = self._direction
        body = (
            *direction.ends.values(),
            "const int row = max(q_lo / LAYOUT_Q, 0);",
            "const int column = max(k_lo / LAYOUT_K, 0);",
            "const int columns = max(k_hi / LAYOUT_K, 0) - column + 1;",
            "const int blocks = (max(q_hi / LAYOUT_Q, 0) - row + 1) * columns;",
            "bool live = true;",
            "for (int i = threadIdx.x % 32; i < blocks; i += 32) {",
            f"  live = live && read_layout(p, b, {self._head}, row + i / columns, column + i % "
            "columns) != 0;",
            "}",
            "return __all_sync(0xffffffffu, live);",
        )
        why = "True: every block that the tile touches is live. The lanes check different blocks."
        uses = {B, H, direction.owned_lo, direction.owned_hi, TILE}
        return SpecFunction.create("layout_full", "bool", comment(why), body, uses)

    def _owned_words(self) -> str:
        return "block's queries" if self._owned is _QUERIES else "block's keys"


def blocks_are_bits(spec: AttentionSpec, mask: sympy.Basic, plan: Plan) -> bool:
    """Whether a lane reads the layout's blocks of a row of scores once, as bits.

    Else it reads them for each score: where blocks are too narrow, and beside a costly mask, whose
    values in a row are not kept.
    """
    sparse = spec.block_sparse
    return sparse is not None and not is_costly_mask(mask) and plan.blocks_as_bits(sparse)
