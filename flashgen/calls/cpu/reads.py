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
from functools import cached_property, lru_cache, partial
from typing import Any

import sympy
import torch

from flashgen.calls.cpu.chunks import sequences
from flashgen.calls.cpu.mods import compiled
from flashgen.calls.cpu.program import BoundProgram, Program
from flashgen.shared.dtypes import Number
from flashgen.shared.errors import InputError
from flashgen.shared.signature import CHOICE, LAYOUT_NAMES, LISTED, OWNED
from flashgen.spec.analysis.tile_walk import numbers_of
from flashgen.spec.language import mod_functions
from flashgen.spec.language.chosen_specs import DIM_OF_CALL
from flashgen.spec.language.integer_limits import Limits, limits
from flashgen.spec.language.lets import Let, lets_of, named
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE, B, H, K, Q, is_condition
from flashgen.spec.language.tensor import element_of_row
from flashgen.spec.language.tensor_elements import Element, TensorSymbol
from flashgen.spec.language.user_source import SourceLines

Tensor = torch.Tensor

_OF_ROWS = "normalize", "sink"  # options whose tensor has an element for each row
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
    """The reads of a spec's mods, first of the mask, then of the score; those of its sink."""
    finder = _Finder(spec)
    sink = sympy.S.Zero if spec.sink is None else element_of_row(spec.sink)
    return (
        *finder.reads(spec.mask, False),
        *finder.reads(spec.score, True),
        *finder.reads(sink, False),
    )


def size_of(tensor: TensorSymbol, axis: int) -> sympy.Symbol:
    """The length of a dimension; no capture of a mod has this name."""
    return sympy.Symbol(f"length {axis} of {tensor.name}", integer=True, positive=True)


class _Finder:
    """Finds the elements that expressions read, and where they use them.

    What is known of a part is kept for all that contain it, and large conditions have names, so
    that the time is linear in the size of the mods.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        # Other tensors have no dimensions that a mod can miss.
        self.dims = {x.symbol: x.dims for x in spec.tensors if x.name not in LAYOUT_NAMES}
        self.possible: dict[tuple[sympy.Basic, bool], sympy.Basic] = {}
        self.mistakes: dict[sympy.Basic, sympy.Basic] = {}

    def reads(self, expr: sympy.Basic, in_score: bool) -> Iterator[Read]:
        order: dict[sympy.Basic, tuple[tuple[sympy.Basic, sympy.Basic], ...]] = {}
        for part in (*lets_of(expr), expr):  # parts before what uses them: recursion stays shallow
            if _reads_tensors(part):
                self._visit(part, order)
        uses: dict[sympy.Basic, list[sympy.Basic]] = {expr: [sympy.true]}
        for node, parts in reversed(order.items()):  # every node after all that contain it
            used = named(_any(*uses[node]))
            for part, where in parts:
                uses.setdefault(part, []).append(_all(used, where))
            for axis, dim, outside in self._outside(node):
                yield Read(node, axis, dim, outside, used, in_score)

    def _visit(
        self,
        node: sympy.Basic,
        order: dict[sympy.Basic, tuple[tuple[sympy.Basic, sympy.Basic], ...]],
    ) -> None:
        """Appends the nodes that contain elements, with their parts, each after its parts."""
        if node not in order:
            parts = tuple(self._parts(node))
            for part, _ in parts:
                self._visit(part, order)
            order[node] = parts
            if isinstance(node, Let):
                self._mistake(node)
                if is_condition(node):
                    self._may(node), self._may(node, turned=True)

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
                if _reads_tensors(part)
            ]
        else:
            parts = [(part, sympy.true) for part in node.args]
        return ((part, where) for part, where in parts if _reads_tensors(part))

    def _may(self, condition: sympy.Basic, turned: bool = False) -> sympy.Basic:
        """The condition, or its opposite, with each comparison that a mistake or the score decides
        replaced by true where it is decided so."""
        if SCORE not in condition.free_symbols and not _reads_tensors(condition):
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
        return _any(_not(condition) if turned else condition, self._mistake(condition))

    def _mistake(self, node: sympy.Basic) -> sympy.Basic:
        """The condition that a part of an expression uses an element outside of its tensor."""
        if node not in self.mistakes:
            outside_reads = (outside for _, _, outside in self._outside(node))
            inner = (_all(where, self._mistake(part)) for part, where in self._parts(node))
            self.mistakes[node] = named(_any(*outside_reads, *inner))
        return self.mistakes[node]

    def _outside(self, node: sympy.Basic) -> Iterator[tuple[int, str | int, sympy.Basic]]:
        """For each index of an element: the axis, the dimension, and that it is outside."""
        dims = self.dims.get(node.tensor, ()) if isinstance(node, Element) else ()
        for axis, dim in enumerate(dims):
            index, size = node.indices[axis], dim
            if SCORE in index.free_symbols:
                continue  # known only where scores are computed
            if isinstance(dim, str):
                size = size_of(node.tensor, axis)
            inside = sympy.And(index >= 0, index < size, evaluate=False)  # false for NaN
            outside = sympy.Not(inside, evaluate=False)
            yield axis, dim, outside if size is dim else _all(sympy.Gt(size, 1), outside)


def _reads_tensors(expr: sympy.Basic) -> bool:
    return any(isinstance(symbol, TensorSymbol) for symbol in expr.free_symbols)


def _all(*conditions: sympy.Basic) -> sympy.Basic:
    return _combined(sympy.And, sympy.true, sympy.false, conditions)


def _any(*conditions: sympy.Basic) -> sympy.Basic:
    return _combined(sympy.Or, sympy.false, sympy.true, conditions)


def _combined(
    join: Any, neutral: sympy.Basic, absorbing: sympy.Basic, conditions: tuple[sympy.Basic, ...]
) -> sympy.Basic:
    """The conditions joined as they are: sympy would compare each with each."""
    remaining = tuple(dict.fromkeys(x for x in conditions if x != neutral))
    if absorbing in remaining:
        return absorbing
    if len(remaining) > 1:
        return join(*remaining, evaluate=False)
    return remaining[0] if remaining else neutral


def _not(condition: sympy.Basic) -> sympy.Basic:
    return sympy.Not(condition, evaluate=condition in (sympy.true, sympy.false))


@lru_cache(maxsize=256)
def _program(spec: AttentionSpec, reads: tuple[Read, ...], with_mask: bool) -> Program:
    keep = spec.keep if with_mask else sympy.true
    return compiled(
        tuple(_all(keep, x.mistake) if x.in_score else x.mistake for x in reads), torch.float32
    )


class ReadCheck:
    """Refuses the calls of a spec whose mods use an element outside of a captured tensor.

    What the contents of tensors do not change is found once for all calls with the same sizes and
    shapes.
    """

    def __init__(self, spec: AttentionSpec, scalars: Mapping[str, Number]) -> None:
        """
        Args:
            scalars: a number for each of spec.scalars, the same in all calls.
        """
        self.spec = spec
        self._positions = lru_cache(maxsize=64)(partial(_Positions, spec, scalars))

    def __call__(
        self,
        sizes: tuple[int, int, int, int],
        offsets: tuple[int, int],
        tensors: Mapping[str, Tensor],
    ) -> bool:
        """Whether all calls with these sizes and shapes are right, whatever their tensors hold.

        Args:
            sizes: batch, heads_q, seq_q and seq_k of the operands.
            offsets: q_offset and k_offset, where they are not among ``tensors``.
            tensors: the captured tensors by name, on the CPU, with the blocks of a block layout.

        Raises:
            InputError: an index is outside; the error names the mod, the index and the position.
        """
        spec = self.spec
        captured = {
            x.symbol: tensors[x.name].detach() for x in spec.read_tensors if x.name in tensors
        }
        shapes = tuple((symbol, tensor.shape) for symbol, tensor in captured.items())
        always = not (spec.packed or spec.offsets)
        for rows in sequences(spec, sizes[0], tensors, offsets):
            number, entries = rows.index_and_count or (0, sizes[0])
            seq_q, seq_k = (
                len(range(length)[part])
                for length, part in zip(sizes[2:], (rows.queries, rows.keys), strict=True)
            )
            shape = sizes[0] if rows.index_and_count is None else 1, sizes[1], seq_q, seq_k
            positions = self._positions(shape, (number, 0, *rows.offsets), entries, shapes)
            always &= positions.always
            if positions.reads:
                positions.check(captured)
        return always


class _Positions:
    """The positions of a sequence of a call, or of all its batch entries at the same positions.

    Attributes:
        shape: batch entries, heads, queries and keys.
        first: the least b, h, q and k.
        shapes: the shapes of the captured tensors, by symbol.
        numbers: sizes and scalars by symbol.
        reads: the reads whose indices are not inside the tensor by their bounds alone.
        always: whether the reads are right for any contents of tensors.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        scalars: Mapping[str, Number],
        shape: tuple[int, int, int, int],
        first: tuple[int, int, int, int],
        entries: int,
        shapes: tuple[tuple[TensorSymbol, torch.Size], ...],
    ) -> None:
        self.spec, self.shape, self.first, self.shapes = spec, shape, first, dict(shapes)
        self.numbers = numbers_of(spec, (entries, *shape[1:]), scalars)
        for symbol, lengths in shapes:
            self.numbers |= {size_of(symbol, axis): size for axis, size in enumerate(lengths)}
        ranges: dict[sympy.Symbol, Limits] = {
            symbol: (least, least + max(length, 1) - 1)
            for symbol, least, length in zip((B, H, Q, K), first, shape, strict=True)
        }
        ranges |= {x: (int(n), int(n)) for x, n in self.numbers.items() if type(n) in (int, bool)}
        reads = () if 0 in shape else reads_of(spec)
        self.reads = tuple(read for read in reads if not self._is_inside(read, ranges))
        decisive = spec.keep.free_symbols.union(*(x.mistake.free_symbols for x in self.reads))
        self.always = not (self.reads and any(isinstance(x, TensorSymbol) for x in decisive))

    @cached_property
    def _fixed(self) -> tuple[dict[sympy.Symbol, Tensor], Tensor, Tensor]:
        """The values that programs read besides tensors, by symbol, and all q and k."""
        b, h, q, k = (
            torch.arange(first, first + length).view(*(-1 if i == axis else 1 for i in range(4)))
            for axis, (first, length) in enumerate(zip(self.first, self.shape, strict=True))
        )
        return {x: number_tensor(n) for x, n in self.numbers.items()} | {B: b, H: h}, q, k

    def _is_inside(self, read: Read, ranges: Mapping[sympy.Symbol, Limits]) -> bool:
        size = self.shapes[read.element.tensor][read.axis]
        if size == 1 and isinstance(read.dim, str):
            return True
        try:
            least, greatest = limits(read.index, ranges, {})
        except TypeError:  # an index that is made of floats
            return False
        return least >= 0 and greatest < size

    def check(self, tensors: Mapping[sympy.Symbol, Tensor]) -> None:
        """Raises InputError for the first read that is a mistake."""
        fixed, q, k = self._fixed
        values = {**fixed, **tensors}
        for with_mask in (False, True):
            program = _program(self.spec, self.reads, True) if with_mask else self._unmasked_program
            first_mistake = self._first(program.bind(values), q, k)
            if first_mistake is None:
                return
            number, position = first_mistake
            if with_mask or not self.reads[number].in_score:
                self._refuse(self.reads[number], position, values)
        raise AssertionError("the second round returns or refuses")

    @cached_property
    def _unmasked_program(self) -> Program:
        return _program(self.spec, self.reads, False)

    def _first(
        self, bound: BoundProgram, q: Tensor, k: Tensor
    ) -> tuple[int, tuple[int, int, int, int]] | None:
        """The number of the first condition that is true somewhere, and b, h, q and k there."""
        batch, heads, seq_q, seq_k = self.shape
        step = max(1, _MOST_ELEMENTS // (batch * heads * seq_k))
        if not bound.program.uses(Q):
            step = seq_q
        for start in range(0, seq_q, step):
            rows = q[:, :, start : start + step]
            for number, wrong in enumerate(bound(rows, k)):
                if wrong.any():
                    wrong = wrong.expand(batch, heads, rows.shape[2], seq_k)
                    flat_index = wrong.flatten().to(torch.uint8).argmax()
                    indices = torch.unravel_index(flat_index, wrong.shape)
                    ends = zip(self.first, indices, (0, 0, start, 0), strict=True)
                    return number, tuple(first + int(i) + more for first, i, more in ends)  # type: ignore[return-value]
        return None

    def _refuse(
        self,
        read: Read,
        position: tuple[int, int, int, int],
        values: Mapping[sympy.Symbol, Tensor],
    ) -> None:
        b, h, q, k = (torch.tensor(number) for number in position)
        program = compiled((read.index,), torch.float64)
        (value,) = program.bind({**values, B: b, H: h})(q, k)
        element, axis = read.element, read.axis
        size = self.shapes[element.tensor][axis]
        # Where queries choose their keys, the kernel reads the positions of the mod from tables.
        reads_tables = any(
            str(symbol) in (OWNED, LISTED) for i in element.indices for symbol in i.free_symbols
        )
        texts = ["index" if reads_tables else python_text(index) for index in element.indices]
        text = f"{element.tensor.name}[{', '.join(texts)}]"
        # A block layout in place of their lists counts queries from the first one of the call.
        first = int(values.get(Scalar.reserved(CHOICE[0]).expr, 0))
        position_text = (
            f", at b={position[0]}, h={position[1]}, q={first + position[2]}, k={position[3]}"
        )
        position_text = "" if reads_tables else position_text
        texts = list(map(_as_typed, texts))
        texts[axis] = f"fg.clamp({texts[axis]}, 0, {size - 1})"
        option, lines = _reader(self.spec, read)
        way_out = f"{element.tensor.name}[{', '.join(texts)}] for the nearest element, a longer "
        way_out += "tensor, or a mask_mod or fg.where that is false there"
        if option in _OF_ROWS:
            way_out = "pass a q_offset with which all positions lie in the tensor"
        raise InputError(
            f"{option} uses an element outside of the captured tensor {element.tensor.name!r}",
            where=f"{lines or option}, {text}",
            numbers=f"index {float(value):.0f} of dimension {axis} "
            f"({str(read.dim).removeprefix(DIM_OF_CALL)}), whose length is {size:,}{position_text}",
            way_out=way_out,
        )


def _reader(spec: AttentionSpec, read: Read) -> tuple[str, SourceLines | None]:
    """The option of a spec that reads an element, and its lines in the user's source, if any."""
    options: list[tuple[str, sympy.Basic, SourceLines | None]] = [
        ("mask_mod", spec.mask, spec.mask_line)
    ]
    if read.in_score:
        options = [
            ("score_mod", spec.modified, spec.score_line),
            ("weight_mod", spec.weight, spec.weight_line),
        ]
    for option, expr, lines in options:
        if read.element.tensor in expr.free_symbols:
            return option, lines
    return _OF_ROWS[0 if read.in_score else 1], None


def _as_typed(index: str) -> str:
    """The text of an index in a mod; "index" where the mod's own line says it better."""
    names = re.findall(r"[A-Za-z_]\w*(?=\()", index)
    if "..." in index or not all(hasattr(mod_functions, name) for name in names):
        return "index"
    return re.sub(r"([A-Za-z_]\w*\(|\b(?:batch|heads|seq_q|seq_k)\b)", r"fg.\1", index)


def number_tensor(number: Number, real: torch.dtype = torch.float32) -> Tensor:
    """A scalar of a mod as a tensor: a bool, an int64, or a float of this dtype."""
    if isinstance(number, bool):
        return torch.tensor(number)
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else real)
