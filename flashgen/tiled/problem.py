"""One call: its sizes, tiles, mods and random bits, in the form that the tiles need them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch

from flashgen.analysis import Analysis, analyse
from flashgen.dropout import keep_mask, keep_scale
from flashgen.errors import PlanError
from flashgen.expr import BATCH, HEADS, SEQ_K, SEQ_Q, B, H, TensorSymbol
from flashgen.plan import plan, plan_backward
from flashgen.sparse import COMPRESSED, LAYOUT, BlockSparse
from flashgen.sparse import TENSORS as LAYOUT_TENSORS
from flashgen.spec import AttentionSpec

from .chunks import Chunk, Sizes, Workspace, budget, chunks
from .mods import compiled
from .program import Bound, Program
from .walk import Axis, Layout, Run, Walk

Tensor = torch.Tensor
Number = int | float | bool

ARCH = "sm_80"
"""Of the plans whose tiles are used: the code path that runs everywhere."""


def exp_(x: Tensor) -> Tensor:
    """e to the power x, in place, of what is 0 or less in exact arithmetic.

    Where the result would be denormal or 0, the library's exp takes up to a hundred times as long;
    there it is replaced by a number some thousand times the smallest normal one, nothing beside
    the 1 that the largest element of every row gives. What must be 0 exactly is selected after it.
    """
    limit = _EXP_LIMIT[x.dtype]
    return x.clamp_(-limit, limit).exp_()


_EXP_LIMIT = {torch.float32: 80.0, torch.float64: 700.0}


@dataclass(frozen=True)
class Use:
    """An element of a learnable tensor in the score function.

    Attributes:
        tensor: which of the learnable tensors.
        factor: ds'/d(element); None where it is no number.
    """

    tensor: int
    factor: float | None


class Modified(NamedTuple):
    """s' of a tile and what it changes with.

    Attributes:
        score: s', [pairs, rows, group, keys], perhaps a view that repeats elements.
        slope: ds'/ds, of a shape that broadcasts; None for 1.
        uses: which learnable tensor, ds'/d(element) and the places of the elements, the last two
            of shapes that broadcast.
    """

    score: Tensor
    slope: Tensor | None = None
    uses: tuple[tuple[int, Tensor | float, Tensor], ...] = ()


@dataclass(frozen=True)
class Code:
    """All that depends on the spec alone.

    Attributes:
        mask, score: of one result; None for a mask (with the layout) that is always true, a score
            that stays as it is.
        derivatives: s', ds'/ds where ``has_slope``, ds'/d(element) of each of ``uses`` where it is
            no number, and the places of all of them; None where only s' is left of it.
        has_slope: ds'/ds is not 1.
        uses: elements of learnable tensors that s' changes with.
    """

    analysis: Analysis
    mask: Program | None
    score: Program | None
    derivatives: Program | None
    has_slope: bool
    uses: tuple[Use, ...]

    @property
    def ignores_score(self) -> bool:
        return self.analysis.score.ignores_score

    @cached_property
    def decisive(self) -> frozenset[sympy.Symbol]:
        """What the class of a tile depends on, its corners among it."""
        mask = self.analysis.mask
        return frozenset(mask.may.free_symbols | mask.must.free_symbols)


@lru_cache(maxsize=256)
def code_of(spec: AttentionSpec, real: torch.dtype) -> Code:
    """The programs of a spec, its numbers computed in ``real``."""
    analysis = analyse(spec)
    same, slope = analysis.score.identity, analysis.score.derivative
    learned = [tensor.symbol for tensor in spec.tensors if tensor.grad]
    read = [(element, by) for element, by in analysis.score.learned if by != 0]
    results, uses = [spec.score], []
    if slope != 1:
        results.append(slope)
    for element, by in read:
        number = by.is_number and by.is_finite
        uses.append(Use(learned.index(element.tensor), float(by) if number else None))
        if not number:
            results.append(by)
    places = tuple(element for element, _ in read)
    return Code(
        analysis=analysis,
        mask=None if spec.keep == sympy.true else compiled((spec.keep,), real),
        score=None if same else compiled((spec.score,), real),
        derivatives=compiled(tuple(results), real, places) if slope != 1 or uses else None,
        has_slope=slope != 1,
        uses=tuple(uses),
    )


def _array(tensor: Tensor) -> Any:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide if tensor.is_floating_point() else torch.int64).numpy()


@lru_cache(maxsize=256)
def tiles_of(spec: AttentionSpec, *, backward: bool) -> tuple[int, int]:
    """block_q and block_k of the forward kernel, or of the backward kernel that makes dK and dV.

    A spec without a backward kernel on `ARCH`, because no tile fits its shared memory, has the
    forward's tiles here too: nothing has to fit on the CPU.
    """
    chosen = plan(spec, ARCH)
    if backward:
        with suppress(PlanError):
            chosen = plan_backward(spec, ARCH).of_keys
    return chosen.block_q, chosen.block_k


_walk = lru_cache(maxsize=8)(Walk)


class Problem:
    """The arguments of a call.

    Attributes:
        real: the dtype of scores, statistics and accumulators: float32, or float64 for float64
            operands.
        bits: the integer dtype of the same width.
        narrow: the operands' dtype where P and dS are rounded to it, else None.
        exact: the dtype in which products of q and k are added up. Both passes need the same scores
            to the last bit, because P is exp(s' - LSE): for float32 operands the order in which the
            matrix library adds, which depends on the shapes, would show.
        dropout_scale: what kept elements of P are multiplied by; None without dropout.
        tensors: the captured ones, a layout's live blocks among them.
        sink: the one that joins the softmax's denominator; None without one.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        q_offset: int,
        k_offset: int,
        scalars: Mapping[str, Number],
        tensors: Mapping[str, Tensor],
        dropout_p: float,
        rng: Tensor | Sequence[int] | None,
        block_q: int | None,
        block_k: int | None,
        backward: bool = False,
        sequence: tuple[int, int] | None = None,
    ) -> None:
        """
        Args:
            sequence: for one of several packed sequences, its number, and how many there are.
        """
        self.real = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.bits = torch.int64 if self.real == torch.float64 else torch.int32
        self.narrow = q.dtype if q.dtype.itemsize == 2 else None
        self.exact = self.real if self.narrow else torch.float64
        self.code = code_of(spec, self.real)
        first, self._entries = sequence or (0, q.shape[0])
        self.sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], first)
        self.scale = scale
        planned = tiles_of(spec, backward=backward)
        self.queries = Axis(q.shape[2], block_q or planned[0], q_offset)
        self.keys = Axis(k.shape[2], block_k or planned[1], k_offset)
        self.dropout_scale = keep_scale(dropout_p) if dropout_p else None
        self._dropout_p = dropout_p
        self._rng = rng
        self._spec = spec
        self._scalars = scalars
        unread = COMPRESSED if spec.block_sparse is not None else ()
        read = (tensor for tensor in spec.tensors if tensor.name not in unread)
        self.tensors = {x.symbol: tensors[x.name].detach() for x in read}
        self.sink = None if spec.sink is None else self.tensors[spec.sink.symbol]
        self.layout = self._live_blocks(tensors)

    def _live_blocks(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Bool [batch or 1, heads or 1, rows, columns], where the spec has a layout."""
        sparse = self._spec.block_sparse
        if sparse is None:
            return None
        live = tensors.get(LAYOUT)
        if live is None:
            ends = (axis.offset + axis.length for axis in (self.queries, self.keys))
            shape = sparse.shape(self._entries, self.sizes.heads_q, *ends)
            table = bytearray(sparse.table(*shape))
            live = torch.frombuffer(table, dtype=torch.bool) if table else torch.empty(0).bool()
            live = live.view(shape)
        self.tensors[LAYOUT_TENSORS[0].symbol] = live
        return live

    @property
    def sparse(self) -> BlockSparse | None:
        return self._spec.block_sparse

    @property
    def learned_sink(self) -> int | None:
        """The sink's place among learned tensors; None where its gradient is not wanted."""
        names = [tensor.name for tensor in self._spec.tensors if tensor.grad]
        sink = self._spec.sink
        return None if sink is None or not sink.grad else names.index(sink.name)

    @cached_property
    def walked(self) -> tuple[tuple[TensorSymbol, Any], ...]:
        """The captured tensors that decide on whole tiles, as numpy arrays."""
        decisive = self.code.decisive
        return tuple(
            (symbol, _array(x)) for symbol, x in self.tensors.items() if symbol in decisive
        )

    @property
    def is_empty(self) -> bool:
        """True when no score is computed, because a size is 0."""
        sizes = self.sizes
        return 0 in (sizes.batch, sizes.heads_q, sizes.seq_q, sizes.seq_k)

    def multiply(self, work: Workspace, s: Tensor, q: Tensor, k: Tensor) -> None:
        """Writes scale * q k^T to ``s``; q and k are in `exact`."""
        wide = s if s.dtype == q.dtype else work.wide.matrix("s", *s.shape)
        torch.baddbmm(wide, q, k.transpose(1, 2), beta=0, alpha=self.scale, out=wide)
        if wide is not s:
            s.copy_(wide)

    def parts(self) -> Iterator[Part]:
        """The chunks, with their mods bound."""
        numbers = self._numbers()
        q = torch.arange(self.sizes.seq_q).add_(self.queries.offset).view(1, -1, 1, 1)
        k = torch.arange(self.sizes.seq_k).add_(self.keys.offset).view(1, 1, 1, -1)
        tile = min(self.queries.block, len(q[0])) * min(self.keys.block, k.shape[3])
        rng = None
        if self.dropout_scale is not None:
            assert self._rng is not None, "dropout needs the seed and the offset"
            seed, offset = (int(word) for word in self._rng)
            rng = self._dropout_p, seed, offset
        for chunk in chunks(self.sizes, tile):
            yield Part(self, chunk, numbers, q, k, rng)

    def _numbers(self) -> dict[sympy.Symbol, Number]:
        sizes = self.sizes
        lengths = (self._entries, sizes.heads_q, sizes.seq_q, sizes.seq_k)
        numbers: dict[sympy.Symbol, Number] = dict(
            zip((BATCH, HEADS, SEQ_Q, SEQ_K), lengths, strict=True)
        )
        for scalar in self._spec.scalars:
            value = self._scalars[scalar.name]
            # A kernel receives a float32.
            numbers[scalar.expr] = float(np.float32(value)) if scalar.dtype == "float32" else value
        return numbers


class Part:
    """One chunk of a problem: where its tiles are, and what becomes of their scores.

    A tile's scores are seen as [pairs, block_q, group, block_k].
    """

    def __init__(
        self,
        problem: Problem,
        chunk: Chunk,
        numbers: Mapping[sympy.Symbol, Number],
        q: Tensor,
        k: Tensor,
        rng: tuple[float, int, int] | None,
    ) -> None:
        self.problem = problem
        self.chunk = chunk
        self._numbers = numbers
        self._q = q
        self._k = k
        self._rng = rng
        self._bound: dict[Program, Bound] = {}
        self._minus_infinity = torch.tensor(-torch.inf, dtype=problem.real).view(problem.bits)
        used = problem.code.decisive
        known = [(symbol, value) for symbol, value in numbers.items() if symbol in used]
        places: list[tuple[sympy.Symbol, Any]] = []
        if B in used or H in used:
            b, h = chunk.batch_and_head
            places = [(B, b.reshape(-1, 1).numpy()), (H, h.reshape(-1, 1).numpy())]
        places.extend(problem.walked)
        layout = self._layout()
        # Arrays have no hash to be found by.
        make = Walk if places or layout else _walk
        mask = problem.code.analysis.mask
        self._walk = make(mask, (*known, *places), problem.queries, problem.keys, layout)

    def _layout(self) -> Layout | None:
        """The layout of this chunk's pairs: one for all where they share it."""
        live, sparse = self.problem.layout, self.problem.sparse
        if live is None or sparse is None:
            return None
        b, h = (
            places.flatten() if size > 1 else torch.zeros(1, dtype=torch.int64)
            for places, size in zip(self.chunk.batch_and_head, live.shape[:2], strict=True)
        )
        return Layout(live[b, h].numpy(), sparse.block_q, sparse.block_k)

    def key_runs(self, start: int, stop: int) -> list[Run]:
        """The keys that the query positions [start, stop) reach, as tiles and joined tiles."""
        return self._walk.key_runs(start, stop, self._most(stop - start))

    def query_runs(self, start: int, stop: int) -> list[Run]:
        """The query positions that reach the keys [start, stop), as tiles and joined tiles."""
        return self._walk.query_runs(start, stop, self._most(stop - start))

    def _most(self, across: int) -> int:
        return budget() // (self.chunk.pairs * self.problem.sizes.group * across)

    def score(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """s' of s, [pairs, rows, group, keys], perhaps a view that repeats elements."""
        assert self.problem.code.score is not None
        (value,) = self._run(self.problem.code.score, rows, keys, scores)
        return value.expand_as(scores)

    def modified(self, scores: Tensor, rows: slice, keys: slice) -> Modified:
        """s' of s with its derivatives."""
        code = self.problem.code
        assert code.derivatives is not None
        found = iter(self._run(code.derivatives, rows, keys, scores))
        value = next(found).expand_as(scores)
        slope = next(found) if code.has_slope else None
        slopes = [next(found) if use.factor is None else use.factor for use in code.uses]
        numbers = [use.tensor for use in code.uses]
        return Modified(value, slope, tuple(zip(numbers, slopes, found, strict=True)))

    def mask_bits(self, rows: slice, keys: slice) -> Tensor:
        """All ones where the mask is true, else 0, in the integer dtype of the scores' width.

        A bitwise ``and`` with it selects: it makes 0 of anything, NaN too, and takes a tenth of
        the time of ``masked_fill``.
        """
        assert self.problem.code.mask is not None
        (keep,) = self._run(self.problem.code.mask, rows, keys, None)
        return keep.to(self.problem.bits).neg_()

    def grouped(self, tile: Tensor) -> Tensor:
        """[pairs, rows * group, x] as [pairs, rows, group, x]."""
        return tile.view(tile.shape[0], -1, self.problem.sizes.group, tile.shape[2])

    def select(self, tile: Tensor, bits: Tensor) -> None:
        """0 in [pairs, rows * group, keys] where ``bits`` are 0, whatever was there."""
        self.grouped(tile).view(self.problem.bits).bitwise_and_(bits)

    def minus_infinity_where_not(self, bits: Tensor) -> Tensor:
        """The bits of -inf where ``bits`` are 0, else 0."""
        return bits.bitwise_not().bitwise_and_(self._minus_infinity)

    def dropout_bits(self, rows: slice, keys: slice) -> Tensor:
        """All ones where dropout keeps the element, else 0; [pairs, rows, group, keys]."""
        assert self._rng is not None
        p, seed, offset = self._rng
        b, h = self.chunk.batch_and_head
        pairs = b * self.problem.sizes.heads_q + h
        kept = keep_mask(
            p,
            seed,
            offset,
            pairs.flatten().numpy(),
            range(rows.start, rows.stop),
            range(keys.start, keys.stop),
        )
        ones = torch.from_numpy(np.negative(kept.view(np.int8))).to(self.problem.bits)
        return ones.view(*pairs.shape, *ones.shape[1:]).transpose(1, 2)

    def _run(
        self, program: Program, rows: slice, keys: slice, scores: Tensor | None
    ) -> list[Tensor]:
        bound = self._bound.get(program)
        if bound is None:
            bound = program.bind(self._values(program))
            self._bound[program] = bound
        return bound(self._q[:, rows], self._k[..., keys], scores)

    def _values(self, program: Program) -> dict[sympy.Symbol, Tensor]:
        values = {}
        if program.uses(B, H):
            b, h = self.chunk.batch_and_head
            values = {B: b[:, None, :, None], H: h[:, None, :, None]}
        for symbol in program.inputs:
            if symbol in self._numbers:
                values[symbol] = self._tensor(self._numbers[symbol])
            elif symbol in self.problem.tensors:
                values[symbol] = self.problem.tensors[symbol]
        return values

    def _tensor(self, number: Number) -> Tensor:
        if isinstance(number, bool):
            return torch.tensor(number)
        dtype = torch.int64 if isinstance(number, int) else self.problem.real
        return torch.tensor(number, dtype=dtype)
