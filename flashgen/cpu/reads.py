"""Reads outside of captured tensors, found before a call is computed.

An index outside a tensor is clamped to it, because scores that the mask removes may compute any
index. Where the value is used it is a mistake, which this module finds: an element is used where
the branch of a choice that holds it is taken, where the other parts of a condition do not decide
alone, and, in a score function, where the mask keeps the score. Reads whose indices are inside for
all positions of a call, by the bounds of the expression, are not evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch

from flashgen.analysis.tile_walk import numbers_of
from flashgen.cpu.chunks import SequenceRows, sequences
from flashgen.cpu.mods import compiled
from flashgen.cpu.program import Program
from flashgen.dtypes import Number
from flashgen.errors import InputError
from flashgen.language import (
    SCORE,
    B,
    Element,
    H,
    K,
    Q,
    TensorSymbol,
    mod_functions,
    python_text,
)
from flashgen.language.integer_limits import Limits, limits
from flashgen.language.lets import Let, elements_of, named
from flashgen.language.spec import AttentionSpec
from flashgen.language.user_source import SourceLines
from flashgen.signature import LAYOUT_NAMES

Tensor = torch.Tensor

_MOST_ELEMENTS = 1 << 21
"""The largest number of positions that are looked at together."""


@dataclass(frozen=True)
class Read:
    """One index of an element that a mod reads.

    Attributes:
        dim: the declared dimension.
        outside: the condition that the index is outside the tensor.
        used: the condition that the element is used, in a score function where the mask is true.
        in_score: whether the score function reads it.
    """

    element: Element
    axis: int
    dim: str | int
    outside: sympy.Basic
    used: sympy.Basic
    in_score: bool

    @property
    def index(self) -> sympy.Expr:
        return self.element.indices[self.axis]

    @property
    def mistake(self) -> sympy.Basic:
        return _all(self.used, self.outside)


@lru_cache(maxsize=256)
def reads_of(spec: AttentionSpec) -> tuple[Read, ...]:
    """The reads of a spec's mods: those of the mask come first."""
    finder = _Finder(spec)
    return (*finder.reads(spec.mask, False), *finder.reads(spec.score, True))


def size_of(tensor: TensorSymbol, axis: int) -> sympy.Symbol:
    """The length of a dimension; no capture of a mod has this name."""
    return sympy.Symbol(f"length {axis} of {tensor.name}", integer=True, positive=True)


class _Finder:
    """Finds the elements that expressions read, and where they use them."""

    def __init__(self, spec: AttentionSpec) -> None:
        # Other tensors have no dimensions that a mod can miss.
        self.dims = {x.symbol: x.dims for x in spec.tensors if x.name not in LAYOUT_NAMES}
        self.possible: dict[tuple[sympy.Basic, bool], sympy.Basic] = {}

    def reads(self, expr: sympy.Basic, in_score: bool) -> Iterator[Read]:
        order: dict[sympy.Basic, None] = {}
        self._visit(expr, order)
        uses: dict[sympy.Basic, list[sympy.Basic]] = {expr: [sympy.true]}
        for node in reversed(order):  # every node after all that contain it
            used = named(_any(*uses[node]))
            for part, where in self._parts(node):
                uses.setdefault(part, []).append(_all(used, where))
            if isinstance(node, Element) and node.tensor in self.dims:
                for axis, dim in enumerate(self.dims[node.tensor]):
                    if SCORE in node.indices[axis].free_symbols:
                        continue  # known only where scores are computed
                    yield Read(node, axis, dim, self._outside(node, axis), used, in_score)

    def _visit(self, node: sympy.Basic, order: dict[sympy.Basic, None]) -> None:
        """Appends the nodes that contain elements, each after its parts."""
        if node not in order:
            for part, _ in self._parts(node):
                self._visit(part, order)
            order[node] = None

    def _parts(self, node: sympy.Basic) -> Iterator[tuple[sympy.Basic, sympy.Basic]]:
        """The parts of a node that contain elements, each with the condition that it is used."""
        if isinstance(node, Let):
            parts = [(node.value, sympy.true)]
        elif isinstance(node, sympy.Piecewise):
            parts, before = [], sympy.true
            for value, condition in node.args:
                parts += [(value, _all(before, self._may(condition))), (condition, before)]
                before = _all(before, self._may(condition, turned=True))
        elif isinstance(node, sympy.And | sympy.Or):
            turned = isinstance(node, sympy.Or)
            parts = [
                (part, _all(*(self._may(x, turned) for x in node.args if x is not part)))
                for part in node.args
                if elements_of(part)
            ]
        else:
            parts = [(part, sympy.true) for part in node.args]
        return ((part, where) for part, where in parts if elements_of(part))

    def _may(self, condition: sympy.Basic, turned: bool = False) -> sympy.Basic:
        """The condition, or its opposite, with each comparison that a mistake or the score decides
        replaced by true where it is decided so."""
        if SCORE not in condition.free_symbols and not elements_of(condition):
            return _not(condition) if turned else condition
        if (condition, turned) not in self.possible:
            self.possible[condition, turned] = named(self._possible(condition, turned))
        return self.possible[condition, turned]

    def _possible(self, condition: sympy.Basic, turned: bool) -> sympy.Basic:
        if isinstance(condition, Let):
            return self._may(condition.value, turned)
        if isinstance(condition, sympy.Not):
            return self._may(condition.args[0], not turned)
        if isinstance(condition, sympy.And | sympy.Or):
            join = _all if isinstance(condition, sympy.And) != turned else _any
            return join(*(self._may(part, turned) for part in condition.args))
        if SCORE in condition.free_symbols:
            return sympy.true
        mistakes = (read.mistake for read in self.reads(condition, False))
        return _any(_not(condition) if turned else condition, *mistakes)

    def _outside(self, element: Element, axis: int) -> sympy.Basic:
        index, dim = element.indices[axis], self.dims[element.tensor][axis]
        size = dim if isinstance(dim, int) else size_of(element.tensor, axis)
        inside = sympy.And(index >= 0, index < size, evaluate=False)  # false for NaN
        outside = sympy.Not(inside, evaluate=False)
        return outside if isinstance(dim, int) else _all(sympy.Gt(size, 1), outside)


def _all(*conditions: sympy.Basic) -> sympy.Basic:
    return _joined(sympy.And, sympy.true, sympy.false, conditions)


def _any(*conditions: sympy.Basic) -> sympy.Basic:
    return _joined(sympy.Or, sympy.false, sympy.true, conditions)


def _joined(
    join: Any, neutral: sympy.Basic, absorbing: sympy.Basic, conditions: tuple[sympy.Basic, ...]
) -> sympy.Basic:
    """The conditions joined as they are: sympy would compare each with each."""
    rest = tuple(dict.fromkeys(x for x in conditions if x != neutral))
    if absorbing in rest:
        return absorbing
    return rest[0] if len(rest) == 1 else join(*rest, evaluate=False) if rest else neutral


def _not(condition: sympy.Basic) -> sympy.Basic:
    return sympy.Not(condition, evaluate=condition in (sympy.true, sympy.false))


@lru_cache(maxsize=256)
def _program(spec: AttentionSpec, reads: tuple[Read, ...], with_mask: bool) -> Program:
    keep = spec.keep if with_mask else sympy.true
    return compiled(
        tuple(_all(keep, x.mistake) if x.in_score else x.mistake for x in reads), torch.float32
    )


def check_reads(
    spec: AttentionSpec,
    sizes: tuple[int, int, int, int],
    offsets: tuple[int, int],
    scalars: Mapping[str, Number],
    tensors: Mapping[str, Tensor],
) -> bool:
    """Refuses a call whose mods use an element outside of a captured tensor.

    Args:
        sizes: batch, heads_q, seq_q and seq_k of the operands.
        offsets: q_offset and k_offset, where they are not among ``tensors``.
        tensors: the captured tensors by name, on the CPU, with the blocks of a block layout.

    Returns:
        Whether all calls with these sizes, numbers and shapes are right, whatever their tensors
        hold.

    Raises:
        InputError: an index is outside; the error names the mod, the index and the position.
    """
    by_symbol = {x.symbol: tensors[x.name] for x in spec.read_tensors if x.name in tensors}
    always = not (spec.packed or spec.offsets)
    for rows in sequences(spec, sizes[0], tensors, offsets):
        call = _Call.of(spec, sizes, rows, scalars, by_symbol)
        reads = call.open_reads(reads_of(spec))
        if reads and 0 not in call.shape:
            always &= not any(isinstance(x, TensorSymbol) for x in _decisive(spec, reads))
            call.check(reads)
    return always


def _decisive(spec: AttentionSpec, reads: tuple[Read, ...]) -> set[sympy.Symbol]:
    """The symbols on which it depends whether a read is wrong."""
    symbols: set[sympy.Symbol] = set(spec.keep.free_symbols)
    return symbols.union(*(x.mistake.free_symbols for x in reads))


@dataclass(frozen=True)
class _Call:
    """A sequence of a call, or all its batch entries at the same positions.

    Attributes:
        shape: batch entries, heads, queries and keys.
        first: the least b, h, q and k.
        values: numbers and tensors by symbol.
    """

    spec: AttentionSpec
    shape: tuple[int, int, int, int]
    first: tuple[int, int, int, int]
    values: Mapping[sympy.Symbol, Any]

    @staticmethod
    def of(
        spec: AttentionSpec,
        sizes: tuple[int, int, int, int],
        rows: SequenceRows,
        scalars: Mapping[str, Number],
        tensors: Mapping[sympy.Symbol, Tensor],
    ) -> _Call:
        number, entries = rows.place or (0, sizes[0])
        own = sizes[0] if rows.place is None else 1
        seq_q, seq_k = (
            len(range(length)[part])
            for length, part in zip(sizes[2:], (rows.queries, rows.keys), strict=True)
        )
        shape = own, sizes[1], seq_q, seq_k
        values: dict[sympy.Symbol, Any] = dict(
            numbers_of(spec, (entries, sizes[1], seq_q, seq_k), scalars)
        )
        values |= {x: tensor.detach() for x, tensor in tensors.items()}
        for symbol, tensor in tensors.items():
            values |= {size_of(symbol, axis): size for axis, size in enumerate(tensor.shape)}
        return _Call(spec, shape, (number, 0, *rows.offsets), values)

    def open_reads(self, reads: tuple[Read, ...]) -> tuple[Read, ...]:
        """The reads whose indices are not inside the tensor by their bounds alone."""
        known: dict[sympy.Symbol, Limits] = {
            symbol: (first, first + max(length, 1) - 1)
            for symbol, first, length in zip((B, H, Q, K), self.first, self.shape, strict=True)
        }
        known |= {x: (n, n) for x, n in self.values.items() if type(n) in (int, bool)}
        return tuple(read for read in reads if not self._is_inside(read, known))

    def _is_inside(self, read: Read, known: Mapping[sympy.Symbol, Limits]) -> bool:
        size = self.values[read.element.tensor].shape[read.axis]
        if size == 1 and isinstance(read.dim, str):
            return True
        try:
            least, greatest = limits(read.index, known, {})
        except TypeError:  # an index that is made of floats
            return False
        return least >= 0 and greatest < size

    def check(self, reads: tuple[Read, ...]) -> None:
        """Raises InputError for the first of these reads that is a mistake."""
        for with_mask in (False, True):
            program = _program(self.spec, reads, with_mask)
            found = self._first(program)
            if found is None:
                return
            if with_mask or not reads[found[0]].in_score:
                self._refuse(reads[found[0]], found[1])
        raise AssertionError("the second round returns or refuses")

    def _first(self, program: Program) -> tuple[int, tuple[int, int, int, int]] | None:
        """The number of the first condition that is true somewhere, and b, h, q and k there."""
        batch, heads, seq_q, seq_k = self.shape
        b, h, q, k = (
            torch.arange(first, first + length).view(*(-1 if i == axis else 1 for i in range(4)))
            for axis, (first, length) in enumerate(zip(self.first, self.shape, strict=True))
        )
        bound = program.bind(self._bound(program, b, h))
        step = max(1, _MOST_ELEMENTS // (batch * heads * seq_k))
        if not program.uses(Q):
            step = seq_q
        for start in range(0, seq_q, step):
            rows = q[:, :, start : start + step]
            for number, wrong in enumerate(bound(rows, k)):
                if wrong.any():
                    wrong = wrong.expand(batch, heads, rows.shape[2], seq_k)
                    at = wrong.flatten().to(torch.uint8).argmax()
                    places = torch.unravel_index(at, wrong.shape)
                    ends = zip(self.first, places, (0, 0, start, 0), strict=True)
                    return number, tuple(first + int(i) + more for first, i, more in ends)  # type: ignore[return-value]
        return None

    def _bound(self, program: Program, b: Tensor, h: Tensor) -> dict[sympy.Symbol, Tensor]:
        values = {**self.values, B: b, H: h}
        return {
            x: values[x] if isinstance(values[x], Tensor) else _as_tensor(values[x])
            for x in program.inputs
            if x in values
        }

    def _refuse(self, read: Read, place: tuple[int, int, int, int]) -> None:
        b, h, q, k = (torch.tensor(number) for number in place)
        program = compiled((read.index,), torch.float64)
        (value,) = program.bind(self._bound(program, b, h))(q, k)
        element, axis = read.element, read.axis
        size = self.values[element.tensor].shape[axis]
        texts = [python_text(index) for index in element.indices]
        text = f"{element.tensor.name}[{', '.join(texts)}]"
        texts = list(map(_as_typed, texts))
        texts[axis] = f"fg.clamp({texts[axis]}, 0, {size - 1})"
        lines: SourceLines | None = self.spec.score_line if read.in_score else self.spec.mask_line
        mod = "score_mod" if read.in_score else "mask_mod"
        raise InputError(
            f"{mod} uses an element outside of the captured tensor {element.tensor.name!r}",
            where=f"{lines or mod}, {text}",
            numbers=f"index {float(value):.0f} of dimension {axis} ({read.dim}), whose length is "
            f"{size:,}, at b={place[0]}, h={place[1]}, q={place[2]}, k={place[3]}",
            way_out=f"{element.tensor.name}[{', '.join(texts)}] for the nearest element, a longer "
            "tensor, or a mask_mod or fg.where that is false there",
        )


def _as_typed(index: str) -> str:
    """The text of an index in a mod; "index" where the mod's own line says it better."""
    names = re.findall(r"[A-Za-z_]\w*(?=\()", index)
    if "..." in index or not all(hasattr(mod_functions, name) for name in names):
        return "index"
    return re.sub(r"([A-Za-z_]\w*\()", r"fg.\1", index)


def _as_tensor(number: Number) -> Tensor:
    if isinstance(number, bool):
        return torch.tensor(number)
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float32)
