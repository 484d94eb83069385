"""The parts of a call that are computed one after another: sequences, and chunks of their pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch

from flashgen.calls.cpu.chunks import (
    FEW_AT_ONCE,
    WALKED_ROWS,
    Chunk,
    SequenceRows,
    chunks,
    sequences,
)
from flashgen.calls.cpu.problem import MOST_SHARED, SequenceProblem, TileArguments
from flashgen.calls.cpu.program import BoundProgram, Program
from flashgen.calls.cpu.reads import number_tensor
from flashgen.shared.dropout import keep_mask
from flashgen.shared.dtypes import Number
from flashgen.spec.analysis.tile_walk import BlockLayoutTiles, TileRun, TileWalk, numbers_of
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import B, H

Tensor = torch.Tensor

_walk = lru_cache(maxsize=8)(TileWalk)


class SequenceParts(NamedTuple):
    """Batch entries or a packed sequence of a call, with its chunks; none where a size is 0."""

    rows: SequenceRows
    problem: SequenceProblem
    chunks: Iterable[ChunkScores]


def parts_of(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    arguments: TileArguments,
    *,
    backward: bool = False,
    keep: bool = False,
) -> Iterator[SequenceParts]:
    """The parts of a call, in order. They do not depend on the values of q and k.

    Args:
        keep: whether the parts serve several calls, so that they keep their masks.
    """
    offsets = arguments.q_offset, arguments.k_offset
    for rows in sequences(spec, q.shape[0], arguments.tensors, offsets):
        (q_rows,), (k_rows,) = rows.query_rows(q), rows.key_rows(k)
        problem = SequenceProblem(spec, q_rows, k_rows, arguments, rows, backward=backward)
        chunks = () if problem.is_empty else chunks_of(problem, keep=keep)
        yield SequenceParts(rows, problem, tuple(chunks) if keep else chunks)


def chunks_of(problem: SequenceProblem, *, keep: bool = False) -> Iterator[ChunkScores]:
    """The chunks of a sequence, with their mods bound."""
    sizes = problem.entries, problem.sizes.heads_q, problem.sizes.seq_q, problem.sizes.seq_k
    numbers = numbers_of(problem.spec, sizes, problem.arguments.scalars)
    device = problem.device
    q = torch.arange(problem.sizes.seq_q, device=device).add_(problem.queries.offset)
    k = torch.arange(problem.sizes.seq_k, device=device).add_(problem.keys.offset)
    q, k = q.view(1, -1, 1, 1), k.view(1, 1, 1, -1)
    owned, walked = (problem.queries, problem.keys)[:: -1 if problem.backward else 1]
    tile = min(owned.block, owned.length) * min(max(WALKED_ROWS, walked.block), walked.length)
    rng = None
    if problem.dropout_scale is not None:
        assert problem.arguments.rng is not None, "dropout needs the seed and the offset"
        seed, offset = (int(word) for word in problem.arguments.rng)
        rng = problem.arguments.dropout_p, seed, offset
    sequence_chunks = chunks(problem.sizes, tile)
    problem.room = MOST_SHARED if keep or len(sequence_chunks) > 1 else 0
    for chunk in sequence_chunks:
        yield ChunkScores(problem, chunk, numbers, q, k, rng)


class Modified(NamedTuple):
    """The scores of a tile after score_mod, with the derivatives that the backward pass needs.

    Attributes:
        score: s', [pairs, rows, group, keys]; it may be a view that repeats elements.
        slope: ds'/ds, of a shape that broadcasts to that of the score; None for 1.
        uses: for each element that s' depends on, the index of its learned tensor, ds'/d(element)
            and the indices of the elements; the last two have shapes that broadcast.
    """

    score: Tensor
    slope: Tensor | None = None
    uses: tuple[tuple[int, Tensor | float, Tensor], ...] = ()


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
        used_numbers = [(symbol, value) for symbol, value in numbers.items() if symbol in used]
        entry_and_head: list[tuple[sympy.Symbol, Any]] = []
        if B in used or H in used:
            b, h = chunk.batch_and_head
            entry_and_head = [(B, b.reshape(-1, 1).numpy()), (H, h.reshape(-1, 1).numpy())]
        entry_and_head.extend(problem.walked)
        layout = self._layout()
        # Arrays cannot be keys of a cache.
        make = TileWalk if entry_and_head or layout else _walk
        mask = problem.programs.analysis.mask
        axes = problem.queries, problem.keys, problem.backward
        self._walk = make(mask, (*used_numbers, *entry_and_head), *axes, layout)

    def _layout(self) -> BlockLayoutTiles | None:
        """The block layout of this chunk's pairs; one where all pairs share it."""
        live, sparse = self.problem.layout, self.problem.sparse
        if live is None or sparse is None:
            return None
        entries, heads = self.chunk.batch_and_head
        b, h = (
            indices.flatten() if size > 1 else torch.zeros(1, dtype=torch.int64)
            for indices, size in zip(
                (entries, heads + self.problem.first_head), live.shape[:2], strict=True
            )
        )
        blocks = live.cpu()[b, h].numpy()
        if self.problem.backward:
            return BlockLayoutTiles(blocks.swapaxes(1, 2), sparse.block_k, sparse.block_q)
        return BlockLayoutTiles(blocks, sparse.block_q, sparse.block_k)

    @cached_property
    def fits_at_once(self) -> bool:
        """Whether the softmax of all scores is computed without tiles, because they are few.

        There are no query groups, score function, sink or dropout, P is not rounded, and no block
        sizes are given.
        """
        problem, sizes = self.problem, self.problem.sizes
        few = sizes.scores <= FEW_AT_ONCE
        plain = problem.plain and problem.dropout_scale is None and problem.narrow is None
        tiled = problem.arguments.block_q or problem.arguments.block_k
        return few and plain and not tiled and self.chunk.is_whole and sizes.group == 1

    @cached_property
    def removed(self) -> Tensor | None:
        """Where the mask is false, [pairs or 1, seq_q, seq_k]; None for a mask that is true."""
        if self.problem.programs.mask is None:
            return None
        (keep,) = self._run(self.problem.programs.mask, slice(None), slice(None), None)
        return keep.logical_not().expand(-1, self.problem.sizes.seq_q, 1, -1).squeeze(2)

    def runs(self, start: int, stop: int) -> list[TileRun]:
        """The tiles that the positions [start, stop) visit, as tiles and joined tiles.

        In the forward pass queries visit keys, in the backward pass keys visit queries.
        """
        return self._walk.runs(start, stop, self.chunk.walked(stop - start))

    def score(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """s' of s, [pairs, rows, group, keys]; it may be a view that repeats elements."""
        assert self.problem.programs.score is not None
        (value,) = self._run(self.problem.programs.score, rows, keys, scores)
        return value.expand_as(scores)

    def modified(self, scores: Tensor, rows: slice, keys: slice) -> Modified:
        """s' of s with its derivatives."""
        code = self.problem.programs
        assert code.derivatives is not None
        results = iter(self._run(code.derivatives, rows, keys, scores))
        value = next(results).expand_as(scores)
        slope = next(results) if code.has_slope else None
        slopes = [next(results) if use.factor is None else use.factor for use in code.uses]
        numbers = [use.tensor for use in code.uses]
        return Modified(value, slope, tuple(zip(numbers, slopes, results, strict=True)))

    def pushed(
        self, program: Program, rows: slice, keys: slice, scores: Tensor, tangents: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The results of a program of scores and their tangents; None for tangents of 0.

        Returns:
            The first two results like the scores, [pairs, rows * group, keys]; and the other
            results, [pairs, rows, group, keys], which may be views that repeat elements.
        """
        s = self.grouped(scores)
        s_tangent = torch.zeros_like(s) if tangents is None else self.grouped(tangents)
        t, t_tangent, *derivatives = self._run(program, rows, keys, s, s_tangent)
        t, t_tangent = (
            x.expand(s.shape).reshape(scores.shape).contiguous() for x in (t, t_tangent)
        )
        return t, t_tangent, derivatives

    def mask_bits(self, rows: slice, keys: slice) -> Tensor:
        """All bits set where the mask is true, else 0, in the integer dtype of the scores' width.

        A bitwise ``and`` with these bits replaces masked values, NaN included, by 0, in a tenth
        of the time of ``masked_fill``.
        """
        program = self.problem.programs.mask
        assert program is not None

        tile = rows.start, rows.stop, keys.start, keys.stop
        bits = self.problem.masks.get(tile)
        if bits is None:
            (keep,) = self._run(program, rows, keys, None)
            bits = keep.to(self.problem.bits).neg_()
            if not program.uses(B, H):
                self.problem.share_mask(tile, bits)
        return bits

    def grouped(self, tile: Tensor) -> Tensor:
        """[pairs, rows * group, x] as [pairs, rows, group, x]."""
        return tile.view(tile.shape[0], -1, self.problem.sizes.group, tile.shape[2])

    def select(self, tile: Tensor, bits: Tensor | None) -> None:
        """Writes 0 to ``tile`` [pairs, rows * group, keys] where ``bits`` are 0, in place."""
        if bits is not None:
            self.grouped(tile).view(self.problem.bits).bitwise_and_(bits)

    def minus_infinity_where_not(self, bits: Tensor) -> Tensor:
        """The bits of -inf where ``bits`` are 0, else 0."""
        return bits.bitwise_not().bitwise_and_(self._minus_infinity)

    def dropout_bits(self, rows: slice, keys: slice) -> Tensor | None:
        """All bits set where dropout keeps the element, else 0; None where nothing is dropped.

        The shape is [pairs, rows, group, keys].
        """
        if self._rng is None:
            return None
        p, seed, offset = self._rng
        b, h = self.chunk.batch_and_head
        pairs = b * self.problem.heads + h + self.problem.first_head
        first_q, first_k = self.problem.queries.offset, self.problem.keys.offset
        keep = keep_mask(
            p,
            seed,
            offset,
            pairs.flatten().numpy(),
            range(first_q + rows.start, first_q + rows.stop),
            range(first_k + keys.start, first_k + keys.stop),
        )
        bits = torch.from_numpy(np.negative(keep.view(np.int8)))
        bits = bits.to(self.problem.device, self.problem.bits)
        return bits.view(*pairs.shape, *bits.shape[1:]).transpose(1, 2)

    def _run(
        self,
        program: Program,
        rows: slice,
        keys: slice,
        scores: Tensor | None,
        tangents: Tensor | None = None,
    ) -> list[Tensor]:
        bound = self._bound.get(program)
        if bound is None:
            bound = program.bind(self._values(program))
            self._bound[program] = bound
        results = bound(self._q[:, rows], self._k[..., keys], scores, tangents)
        # A value that is the same for all scores of all tiles has no dimensions.
        device = self.problem.device
        return [value if value.dim() else value.view(1, 1, 1, 1).to(device) for value in results]

    def _values(self, program: Program) -> dict[sympy.Symbol, Tensor]:
        values = {}
        if program.uses(B, H):
            b, h = (indices.to(self.problem.device) for indices in self.chunk.batch_and_head)
            values = {B: b[:, None, :, None], H: h[:, None, :, None]}
        for symbol in program.inputs:
            if symbol in self._numbers:
                values[symbol] = number_tensor(self._numbers[symbol], self.problem.real)
            elif symbol in self.problem.tensors:
                values[symbol] = self.problem.tensors[symbol]
        return values
