"""One call of the tiled algorithms: its sizes, tiles, mods and dropout, and its chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch

from flashgen.analysis.tile_walk import BlockLayoutTiles, TileAxis, TileRun, TileWalk, numbers_of
from flashgen.cpu.chunks import (
    OWNED_ROWS,
    WALKED_ROWS,
    Chunk,
    SequenceRows,
    Sizes,
    Workspace,
    budget,
    chunks,
)
from flashgen.cpu.program import BoundProgram, Program
from flashgen.cpu.spec_programs import programs_of
from flashgen.dropout import keep_mask, keep_scale
from flashgen.dtypes import Number
from flashgen.errors import PlanError
from flashgen.language import B, H, TensorSymbol
from flashgen.language.block_layout import TENSORS as LAYOUT_TENSORS
from flashgen.language.spec import AttentionSpec
from flashgen.planner import plan, plan_backward
from flashgen.signature import LAYOUT, LAYOUT_LISTS

Tensor = torch.Tensor

ARCH = "sm_80"
"""The architecture whose plans give the default tiles."""


def exp_(x: Tensor, power_of_2: bool = False, bounded: bool = False) -> Tensor:
    """e or 2 to the power x, in place, for x <= 0 in exact arithmetic.

    Args:
        bounded: whether x is known to be -inf or to have a normal result.

    Denormal numbers are slow, in the library's exp and as factors of products. Where the result
    would be denormal or 0, it is replaced by a number about a thousand times the smallest normal
    one, which is negligible beside the 1 of the largest element of every row. Exact zeros are
    selected later.
    """
    limit = _EXP_LIMIT[x.dtype]
    if power_of_2:
        return (x if bounded else x.clamp_(-limit * LOG2_E, limit * LOG2_E)).exp2_()
    return x.clamp_(-limit, limit).exp_()


LOG2_E = 1 / math.log(2)
_EXP_LIMIT = {torch.float32: 80.0, torch.float64: 700.0}

_SMALL_SCORE = 32.0
"""Where no score of a chunk is larger, float32 products of different orders of summation make
relative differences of P below 1e-5, and no exponential of a difference of scores is denormal."""

_FEW_SCORES = 1 << 14
"""Chunks of fewer scores take so little time that the largest score is not estimated."""


_MOST_SHARED = 1 << 19
"""Elements of masks that the chunks of a call share: 2 MiB."""


class Modified(NamedTuple):
    """s' of a tile and its derivatives.

    Attributes:
        score: s', [pairs, rows, group, keys]; it may be a view that repeats elements.
        slope: ds'/ds, of a shape that broadcasts to that of the score; None for 1.
        uses: for each element that s' depends on, the index of its learned tensor, ds'/d(element)
            and the indices of the elements; the last two have shapes that broadcast.
    """

    score: Tensor
    slope: Tensor | None = None
    uses: tuple[tuple[int, Tensor | float, Tensor], ...] = ()


def _array(tensor: Tensor) -> Any:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide if tensor.is_floating_point() else torch.int64).numpy()


@lru_cache(maxsize=256)
def tiles_of(spec: AttentionSpec, *, backward: bool) -> tuple[int, int]:
    """block_q and block_k of the forward kernel, or of the backward kernel that makes dK and dV.

    A spec without a backward kernel on `ARCH`, because no tile fits its shared memory, uses the
    forward tiles in both passes, because the CPU has no shared memory to fit.
    """
    chosen = plan(spec, ARCH)
    if backward:
        with suppress(PlanError):
            chosen = plan_backward(spec, ARCH).of_keys
    return chosen.block_q, chosen.block_k


_walk = lru_cache(maxsize=8)(TileWalk)


@dataclass(frozen=True)
class TileArguments:
    """The arguments of a call other than q, k and v.

    Attributes:
        scale: factor on q.k.
        q_offset, k_offset: global positions of the first query and key, where they are not among
            the tensors.
        scalars: a number for each of spec.scalars.
        tensors: a tensor for each of spec.tensors, with any strides; float64 may replace float32.
        dropout_p: probability of dropping an element of P.
        rng: seed and offset of dropout: int64 [2] or two integers.
        block_q, block_k: rows and keys of a tile; those of the plan where None.
    """

    scale: float
    q_offset: int = 0
    k_offset: int = 0
    scalars: Mapping[str, Number] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    dropout_p: float = 0.0
    rng: Tensor | tuple[int, int] | None = None
    block_q: int | None = None
    block_k: int | None = None


class SequenceProblem:
    """One call, or one packed sequence or batch entry of a call.

    Attributes:
        real: the dtype of scores, statistics and accumulators: float32, or float64 for float64
            operands.
        bits: the integer dtype of the same width.
        power_of_2: whether scores and row maxima are multiplied by log2(e), because the library's
            exp2 takes a third of the time of its exp; where nothing but the softmax sees them.
        narrow: the operands' dtype where P and dS are rounded to it, else None.
        dropout_scale: factor on kept elements of P; None without dropout.
        masks: masks of tiles that all chunks share, by the ranges of rows and of keys.
        tensors: captured tensors by symbol, with the live blocks of a block layout.
        sink: the captured tensor that is the sink; None without one.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        arguments: TileArguments,
        sequence: SequenceRows,
        *,
        backward: bool = False,
    ) -> None:
        """
        Args:
            q, k: the rows of ``sequence``.
        """
        self.real = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.bits = torch.int64 if self.real == torch.float64 else torch.int32
        self.narrow = q.dtype if q.dtype.itemsize == 2 else None
        self.programs = programs_of(spec, self.real)
        first, self._entries = sequence.place or (0, q.shape[0])
        self.sparse = spec.block_sparse
        self.sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], first)
        self.scale = arguments.scale
        self.power_of_2 = self.programs.score is None and spec.sink is None
        self._factor = self.scale * LOG2_E if self.power_of_2 else self.scale
        self.backward = backward
        block_q, block_k = tiles_of(spec, backward=backward)
        if backward:
            block_k *= max(1, OWNED_ROWS // block_k)
        else:
            group = max(1, q.shape[1] // max(1, k.shape[1]))
            block_q *= max(1, OWNED_ROWS // (block_q * group))
        q_offset, k_offset = sequence.offsets
        self.queries = TileAxis(q.shape[2], arguments.block_q or block_q, q_offset)
        self.keys = TileAxis(k.shape[2], arguments.block_k or block_k, k_offset)
        dropout_p, tensors = arguments.dropout_p, arguments.tensors
        self.dropout_scale = keep_scale(dropout_p) if dropout_p else None
        self._arguments = arguments
        self._spec = spec
        self.masks: dict[tuple[int, int, int, int], Tensor] = {}
        self._room = 0
        unread = LAYOUT_LISTS if spec.block_sparse is not None else ()
        read = (tensor for tensor in spec.tensors if tensor.name not in unread)
        self.tensors = {x.symbol: tensors[x.name].detach() for x in read}
        self.sink = None if spec.sink is None else self.tensors[spec.sink.symbol]
        self.layout = self._live_blocks(tensors)

    def _live_blocks(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Bool [batch or 1, heads or 1, rows, columns], where the spec has a block layout."""
        sparse = self.sparse
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
    def learned_sink(self) -> int | None:
        """The sink's index among learned tensors; None where its gradient is not needed."""
        names = [tensor.name for tensor in self._spec.tensors if tensor.grad]
        sink = self._spec.sink
        return None if sink is None or not sink.grad else names.index(sink.name)

    @cached_property
    def walked(self) -> tuple[tuple[TensorSymbol, Any], ...]:
        """The captured tensors on which the class of tiles depends, as NumPy arrays."""
        decisive = self.programs.decisive
        return tuple(
            (symbol, _array(x)) for symbol, x in self.tensors.items() if symbol in decisive
        )

    @property
    def is_empty(self) -> bool:
        """True when no score is computed, because a size is 0."""
        sizes = self.sizes
        return 0 in (sizes.batch, sizes.heads_q, sizes.seq_q, sizes.seq_k)

    def product_dtype(self, q: Tensor, k: Tensor) -> torch.dtype:
        """The dtype in which products of q and k [pairs, rows, head_dim] are accumulated.

        Both passes need the same scores, because P is exp(s' - LSE). In float32 the matrix
        library's order of summation depends on the shapes, and the difference that this makes
        grows with the scores and with the slope of the score function.
        """
        if self.narrow:
            return self.real
        if self.programs.has_slope or q.shape[1] * k.shape[1] < _FEW_SCORES:
            return torch.float64
        # Rows with a NaN have no other scores in either dtype.
        lengths = (
            torch.linalg.vector_norm(x, dim=-1).nan_to_num_(0.0, math.inf).amax() for x in (q, k)
        )
        largest = self.scale * float(math.prod(lengths))
        return self.real if largest < _SMALL_SCORE else torch.float64

    def share_mask(self, place: tuple[int, int, int, int], bits: Tensor) -> None:
        """Keeps the mask of a tile for the other chunks, within `_MOST_SHARED` elements."""
        self._room -= bits.numel()
        if self._room >= 0:
            self.masks[place] = bits

    def bounded(self, product: torch.dtype) -> bool:
        """Whether no exponential of a chunk is denormal: its scores are below `_SMALL_SCORE`."""
        return self.power_of_2 and product == torch.float32 and self.narrow is None

    def multiply(self, work: Workspace, s: Tensor, q: Tensor, k: Tensor) -> None:
        """Writes scale * q k^T to ``s``, in the unit of `power_of_2`.

        Args:
            q, k: in the dtype of `product_dtype`.
        """
        wide = s if s.dtype == q.dtype else work.wide.matrix("s", *s.shape)
        torch.baddbmm(wide, q, k.transpose(1, 2), beta=0, alpha=self._factor, out=wide)
        if wide is not s:
            s.copy_(wide)

    def chunks(self) -> Iterator[ChunkScores]:
        """The chunks, with their mods bound."""
        sizes = self._entries, self.sizes.heads_q, self.sizes.seq_q, self.sizes.seq_k
        numbers = numbers_of(self._spec, sizes, self._arguments.scalars)
        q = torch.arange(self.sizes.seq_q).add_(self.queries.offset).view(1, -1, 1, 1)
        k = torch.arange(self.sizes.seq_k).add_(self.keys.offset).view(1, 1, 1, -1)
        owned, walked = (self.queries, self.keys)[:: -1 if self.backward else 1]
        tile = min(owned.block, owned.length) * min(max(WALKED_ROWS, walked.block), walked.length)
        rng = None
        if self.dropout_scale is not None:
            assert self._arguments.rng is not None, "dropout needs the seed and the offset"
            seed, offset = (int(word) for word in self._arguments.rng)
            rng = self._arguments.dropout_p, seed, offset
        found = chunks(self.sizes, tile)
        self._room = _MOST_SHARED if len(found) > 1 else 0
        for chunk in found:
            yield ChunkScores(self, chunk, numbers, q, k, rng)


class ChunkScores:
    """One chunk of a call: its walk over tiles, and the mods on their scores.

    The scores of a tile have the shape [pairs, block_q, group, block_k].
    """

    def __init__(
        self,
        problem: SequenceProblem,
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
        self._bound: dict[Program, BoundProgram] = {}
        self._minus_infinity = torch.tensor(-torch.inf, dtype=problem.real).view(problem.bits)
        used = problem.programs.decisive
        known = [(symbol, value) for symbol, value in numbers.items() if symbol in used]
        places: list[tuple[sympy.Symbol, Any]] = []
        if B in used or H in used:
            b, h = chunk.batch_and_head
            places = [(B, b.reshape(-1, 1).numpy()), (H, h.reshape(-1, 1).numpy())]
        places.extend(problem.walked)
        layout = self._layout()
        # Arrays cannot be keys of a cache.
        make = TileWalk if places or layout else _walk
        mask = problem.programs.analysis.mask
        axes = problem.queries, problem.keys, problem.backward
        self._walk = make(mask, (*known, *places), *axes, layout)

    def _layout(self) -> BlockLayoutTiles | None:
        """The block layout of this chunk's pairs; one where all pairs share it."""
        live, sparse = self.problem.layout, self.problem.sparse
        if live is None or sparse is None:
            return None
        b, h = (
            places.flatten() if size > 1 else torch.zeros(1, dtype=torch.int64)
            for places, size in zip(self.chunk.batch_and_head, live.shape[:2], strict=True)
        )
        blocks = live[b, h].numpy()
        if self.problem.backward:
            return BlockLayoutTiles(blocks.swapaxes(1, 2), sparse.block_k, sparse.block_q)
        return BlockLayoutTiles(blocks, sparse.block_q, sparse.block_k)

    def runs(self, start: int, stop: int) -> list[TileRun]:
        """The tiles that the positions [start, stop) visit, as tiles and joined tiles.

        In the forward pass queries visit keys, in the backward pass keys visit queries.
        """
        most = budget() // (self.chunk.pairs * self.problem.sizes.group * (stop - start))
        return self._walk.runs(start, stop, most)

    def score(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """s' of s, [pairs, rows, group, keys]; it may be a view that repeats elements."""
        assert self.problem.programs.score is not None
        (value,) = self._run(self.problem.programs.score, rows, keys, scores)
        return value.expand_as(scores)

    def modified(self, scores: Tensor, rows: slice, keys: slice) -> Modified:
        """s' of s with its derivatives."""
        code = self.problem.programs
        assert code.derivatives is not None
        found = iter(self._run(code.derivatives, rows, keys, scores))
        value = next(found).expand_as(scores)
        slope = next(found) if code.has_slope else None
        slopes = [next(found) if use.factor is None else use.factor for use in code.uses]
        numbers = [use.tensor for use in code.uses]
        return Modified(value, slope, tuple(zip(numbers, slopes, found, strict=True)))

    def mask_bits(self, rows: slice, keys: slice) -> Tensor:
        """All bits set where the mask is true, else 0, in the integer dtype of the scores' width.

        A bitwise ``and`` with these bits replaces masked values, NaN included, by 0, in a tenth
        of the time of ``masked_fill``.
        """
        program = self.problem.programs.mask
        assert program is not None

        place = rows.start, rows.stop, keys.start, keys.stop
        bits = self.problem.masks.get(place)
        if bits is None:
            (keep,) = self._run(program, rows, keys, None)
            bits = keep.to(self.problem.bits).neg_()
            if not program.uses(B, H):
                self.problem.share_mask(place, bits)
        return bits

    def grouped(self, tile: Tensor) -> Tensor:
        """[pairs, rows * group, x] as [pairs, rows, group, x]."""
        return tile.view(tile.shape[0], -1, self.problem.sizes.group, tile.shape[2])

    def select(self, tile: Tensor, bits: Tensor) -> None:
        """Writes 0 to ``tile`` [pairs, rows * group, keys] where ``bits`` are 0, in place."""
        self.grouped(tile).view(self.problem.bits).bitwise_and_(bits)

    def minus_infinity_where_not(self, bits: Tensor) -> Tensor:
        """The bits of -inf where ``bits`` are 0, else 0."""
        return bits.bitwise_not().bitwise_and_(self._minus_infinity)

    def dropout_bits(self, rows: slice, keys: slice) -> Tensor:
        """All bits set where dropout keeps the element, else 0; [pairs, rows, group, keys]."""
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
