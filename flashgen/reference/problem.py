"""One call of the oracle: its checked arguments, and blocks of its scores that fit in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import sympy
import torch
from torch.autograd import forward_ad

from flashgen.reference.dropout_state import State, numbers_of, state_of
from flashgen.reference.interpret import evaluate
from flashgen.shared.dropout import keep_mask, keep_scale
from flashgen.shared.dtypes import SCALAR_DTYPES, Number, dtype_name
from flashgen.shared.errors import InputError
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import (
    CHOICE,
    FIRST_QUERIES,
    LAYOUT,
    LAYOUT_LISTS,
    LISTS,
    OFFSETS,
    heads_of,
)
from flashgen.spec.language.block_layout import TENSORS as LAYOUT_TENSORS
from flashgen.spec.language.chosen_specs import with_layout
from flashgen.spec.language.lets import substituted
from flashgen.spec.language.signature import at_offsets
from flashgen.spec.language.spec import BOUNDARIES, PAGES, AttentionSpec
from flashgen.spec.language.symbols import BATCH, HEADS, SCORE, SEQ_K, SEQ_Q, B, H, K, Q
from flashgen.spec.language.tensor import element_of_row
from flashgen.spec.language.tensor_elements import Element

if TYPE_CHECKING:
    from typing import Unpack

Tensor = torch.Tensor
"""Seed and offset of dropout: a pair of integers or an int64 tensor [2]."""

_SCORES_AT_ONCE = 1 << 22
"""Elements of S in memory at once: 32 MiB in float64, and a multiple of it while mods run."""


class OracleArguments(TypedDict, total=False):
    """The keyword arguments of the functions of the reference.

    Attributes:
        scalars: a number for each of spec.scalars; numbers for float32 scalars are rounded to
            float32 first, because a kernel receives float32.
        tensors: a tensor for each of spec.tensors, with any strides; a dimension of length 1 is
            broadcast.
        q_offset, k_offset: global positions of the first query and key, or tensors of (batch,).
        scale: factor on q.k; if None, spec.scale, or 1 / sqrt(head_dim) where that is None too.
        dropout_p: probability of dropping an element of P, in [0, 1); rounded to a multiple of
            2^-16. `flashgen.shared.dropout` defines the dropped elements.
        rng: seed and offset, two integers or an int64 tensor [2]; needed when dropout_p > 0 and for
            mods that call fg.rand.
    """

    scalars: Mapping[str, Number] | None
    tensors: Mapping[str, Tensor] | None
    q_offset: int | Tensor
    k_offset: int | Tensor
    scale: float | None
    dropout_p: float
    rng: State | None


@dataclass(frozen=True)
class RowRanges:
    """The queries and keys of a call, or of one packed sequence.

    Attributes:
        first: the batch index of the first entry in mods: 0, or the number of the sequence.
        queries, keys: ranges of rows in q and in k.
    """

    first: int
    queries: slice
    keys: slice


@dataclass(frozen=True)
class ScoreBlock:
    """A block of scores: some (batch, head) pairs, and some rows of queries.

    Attributes:
        pairs: indices of the pairs, with the head as the fastest index.
        rows, keys: rows of the block in q and in k.
        entry, h: int64 [n], batch entry in the operands and query head of each pair.
        kv: int64 [n], the index of the (batch entry, key head) that each pair reads.
        q, k, v: [n, rows, head_dim], [n, seq_k, head_dim] and [n, seq_k, head_dim_v], copies.
        values: the values of the symbols of the mods.
        sink: the sink's logits, [n, rows or 1, 1] in `OracleProblem.real`; None without a sink.
        mask: bool [n, rows, seq_k], true where the mask keeps; None where there is no mask.
        kept: bool of the same shape, true where dropout keeps an element; None without dropout.
        kept_scale: factor on kept elements.
    """

    pairs: slice
    rows: slice
    keys: slice
    entry: Tensor
    h: Tensor
    kv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    values: Mapping[sympy.Symbol, Tensor]
    sink: Tensor | None
    mask: Tensor | None
    kept: Tensor | None
    kept_scale: float

    def rows_of(self, tensor: Tensor) -> Tensor:
        """The rows [n, rows, ...] of a tensor [batch, heads_q, seq_q, ...]."""
        return tensor[self.entry, self.h, self.rows]

    def masked(self, scores: Tensor) -> Tensor:
        """``scores`` with -inf where the mask is false."""
        return scores if self.mask is None else scores.masked_fill(~self.mask, -math.inf)

    def weighted(self, weights: Tensor) -> Tensor:
        """``weights`` with 0 where the mask is false, also in rows whose scores are NaN."""
        return weights if self.mask is None else weights.masked_fill(~self.mask, 0)

    def dropped(self, weights: Tensor) -> Tensor:
        """``weights`` with 0 for dropped elements and the others scaled, rounded once."""
        if self.kept is None:
            return weights
        return weights.masked_fill(~self.kept, 0) * self.kept_scale


@dataclass(frozen=True)
class OracleProblem:
    """The arguments of one call, checked and with their defaults.

    Attributes:
        first_head, heads: the number of the first query head, and the number of query heads, in
            the whole of which the call computes a part.
        factor: the factor on q.k.
        values: the values of batch, heads, scalars and captured tensors in mods.
        p: probability of dropping.
        state: seed and offset; None without dropout.
        work: dtype of products, scores and probabilities.
        real: dtype that mods and the lse are computed in.
        decides: dtype in which mods compare floats.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    q_offset: int | Tensor
    k_offset: int | Tensor
    first_head: int
    heads: int
    factor: float
    values: Mapping[sympy.Symbol, Tensor]
    p: float
    state: tuple[int, int] | None
    work: torch.dtype
    real: torch.dtype
    decides: torch.dtype

    def blocks(self) -> Iterator[ScoreBlock]:
        """All queries, in blocks of at most `_SCORES_AT_ONCE` scores.

        There are no blocks without keys and without a sink.
        """
        pairs = self.q.shape[0] * self.q.shape[1]
        for sequence in self._rows():
            queries, keys = sequence.queries, sequence.keys
            seq_q, seq_k = queries.stop - queries.start, keys.stop - keys.start
            if seq_k == 0 and self.spec.sink is None:
                continue
            seq_k = max(1, seq_k)
            rows = min(max(1, _SCORES_AT_ONCE // seq_k), max(1, seq_q))
            together = max(1, _SCORES_AT_ONCE // (rows * seq_k))
            for pair in range(0, pairs, together):
                pair_range = slice(pair, min(pair + together, pairs))
                for row in range(0, seq_q, rows):
                    yield self._block(sequence, pair_range, slice(row, min(row + rows, seq_q)))

    def _rows(self) -> Iterator[RowRanges]:
        ends = [[0, self.q.shape[2]], [0, self.k.shape[2]]]
        if self.spec.packed:
            ends = [self.values[boundary.symbol].tolist() for boundary in BOUNDARIES]
        for i in range(len(ends[0]) - 1):
            yield RowRanges(i, *(slice(end[i], end[i + 1]) for end in ends))

    def _block(self, sequence: RowRanges, pairs: slice, rows: slice) -> ScoreBlock:
        """The block of some rows, which are counted from the first row of ``sequence``."""
        device, heads, heads_kv = self.q.device, self.q.shape[1], self.k.shape[1]
        queries, keys = sequence.queries, sequence.keys
        seq_q, seq_k = queries.stop - queries.start, keys.stop - keys.start
        pair = torch.arange(pairs.start, pairs.stop, device=device)
        entry, h = pair // heads, pair % heads
        h_kv = h // (heads // heads_kv)
        q_rows = slice(queries.start + rows.start, queries.start + rows.stop)
        values = {
            **self.values,
            SEQ_Q: torch.tensor(seq_q, device=device),
            SEQ_K: torch.tensor(seq_k, device=device),
            B: (entry + sequence.first)[:, None, None],
            H: h[:, None, None],
            Q: torch.arange(rows.start, rows.stop, device=device)[:, None]
            + _entry_offsets(self.q_offset, entry + sequence.first),
            K: torch.arange(seq_k, device=device)
            + _entry_offsets(self.k_offset, entry + sequence.first),
        }
        shape = (len(pair), rows.stop - rows.start, seq_k)
        mask = None
        keep = self.spec.keep
        if keep is not sympy.true:
            mask = evaluate(keep, values, self.real, self.decides).expand(shape)
        kept = None
        if self.state is not None:
            entries, local = np.divmod(np.arange(pairs.start, pairs.stop), heads)
            numbers = (entries + sequence.first) * self.heads + local + self.first_head
            first_q, first_k = int(self.q_offset), int(self.k_offset)
            q_positions = range(first_q + rows.start, first_q + rows.stop)
            bits = keep_mask(
                self.p, *self.state, numbers, q_positions, range(first_k, first_k + seq_k)
            )
            kept = torch.from_numpy(bits).to(device)
        return ScoreBlock(
            pairs=pairs,
            rows=q_rows,
            keys=keys,
            entry=entry,
            h=h,
            kv=entry * heads_kv + h_kv,
            q=self.q[entry, h, q_rows].to(self.work),
            k=self.k[entry, h_kv, keys].to(self.work),
            v=self.v[entry, h_kv, keys].to(self.work),
            values=values,
            sink=self._sink(values),
            mask=mask,
            kept=kept,
            kept_scale=keep_scale(self.p),
        )

    def _sink(self, values: Mapping[sympy.Symbol, Tensor]) -> Tensor | None:
        """The logits of rows, [n, rows or 1, 1]."""
        if self.spec.sink is None:
            return None
        logits = evaluate(self.sink_element, values, self.real)
        return logits + torch.zeros_like(values[H], dtype=self.real)

    @property
    def sink_element(self) -> sympy.Expr:
        """The element of the spec's sink at a row, whose head is counted in the whole."""
        return substituted(element_of_row(self.spec.sink), {H: H + self.first_head})

    def masked(self, scores: Tensor, part: ScoreBlock) -> Tensor:
        """The results of `score` where the mask is true, elsewhere what removes them."""
        return part.masked(scores) if self.spec.is_softmax else part.weighted(scores)

    def masked_scores(self, part: ScoreBlock) -> Tensor:
        """s' of the rows of a block, or the weights, without those that the mask removes."""
        products = part.q @ part.k.transpose(1, 2)
        return self.masked(self.score(products * self.factor, part), part)

    def score(self, scores: Tensor, part: ScoreBlock) -> Tensor:
        """s' of s, or its weight, unmasked, in the dtype of ``scores``."""
        if self.spec.score == SCORE:
            return scores
        values = {**part.values, SCORE: scores.to(self.real)}
        value = evaluate(self.spec.score, values, self.real, self.decides)
        return value.to(scores.dtype).expand_as(scores)

    def score_and_slope(self, scores: Tensor, part: ScoreBlock) -> tuple[Tensor, Tensor | None]:
        """s' of s, unmasked, in the dtype of ``scores``; ds'/ds in `real`, None stands for 1."""
        if self.spec.score == SCORE:
            return scores, None
        value, slope = self._differentiated(scores, part, SCORE)
        return value.to(scores.dtype).expand_as(scores), slope.expand_as(scores)

    def slope_by(self, element: Element, scores: Tensor, part: ScoreBlock) -> Tensor:
        """ds'/d(element) in `real`, of a shape that broadcasts to that of ``scores``."""
        return self._differentiated(scores, part, element)[1]

    def _differentiated(
        self, scores: Tensor, part: ScoreBlock, variable: sympy.Expr
    ) -> tuple[Tensor, Tensor]:
        """s' and its derivative by the score or by an element that it reads, in `real`.

        This is torch's forward-mode derivative of the interpreted expression. Reverse mode
        multiplies the slope of the branch that a ``where`` did not choose by 0, which gives NaN
        for an infinite slope; forward mode selects the slope with the value.
        """
        values = {**part.values, SCORE: scores.detach().to(self.real)}
        x = evaluate(variable, values, self.real).detach()
        with forward_mode():
            dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
            dual_value = evaluate(
                self.spec.score, {**values, variable: dual}, self.real, self.decides
            )
            value, slope = forward_ad.unpack_dual(dual_value)  # type: ignore[no-untyped-call]
        return value, torch.zeros_like(value) if slope is None else slope


@contextmanager
def forward_mode() -> Iterator[None]:
    """A level of torch's forward mode, without the warning of torch when it loads its formulas."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
        yield


def in_blocks(
    spec: AttentionSpec, q: Tensor, k: Tensor, call: OracleArguments
) -> tuple[AttentionSpec, OracleArguments]:
    """A call whose queries choose their keys, with the same blocks as a layout for all heads.

    Raises:
        InputError: the lists are missing.
    """
    if spec.block_sparse is None or not spec.block_sparse.chooses:
        return spec, call
    tensors = dict(call.get("tensors") or {})
    _check_names(spec, "tensors", [tensor.name for tensor in spec.tensors], tensors)
    counts, blocks = (tensors.pop(name) for name in LISTS)
    seq_k = k.shape[2] * (tensors[PAGES[0].name].shape[1] if spec.paged else 1)
    number = torch.arange(max(-(-seq_k // spec.block_sparse.block_k), 1), device=q.device)
    listed = torch.arange(blocks.shape[-1], device=q.device) < counts[..., None]
    live = ((blocks[..., None] == number) & listed[..., None]).any(-2)
    group = q.shape[1] // (k.shape[1] if live.shape[1] > 1 else q.shape[1])
    tensors[LAYOUT] = live.repeat_interleave(group, 1)
    first, scalars = call.get("q_offset", 0), dict(call.get("scalars") or {})
    changed: OracleArguments = {**call, "tensors": tensors, "q_offset": 0}
    changed["scalars"] = scalars | {CHOICE[0]: 0 if isinstance(first, Tensor) else first}
    if isinstance(first, Tensor):
        spec = at_offsets(spec, ((OFFSETS[0], dtype_name(first.dtype)),))
        tensors[FIRST_QUERIES] = first.view(-1)
    if spec.paged:
        changed["q_offset"] = torch.zeros(1, dtype=torch.int32)
    return with_layout(spec), changed


def problem_of(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    exact: bool,
    **call: Unpack[OracleArguments],
) -> OracleProblem:
    """The checked arguments of one call.

    Args:
        exact: whether everything is computed in float64, or in the operands' dtype.

    Raises:
        InputError: scalars or tensors differ from those of the spec, or dropout_p or rng is wrong.
    """
    spec, call = in_blocks(spec, q, k, call)
    scalars, tensors = call.get("scalars") or {}, dict(call.get("tensors") or {})
    if spec.draws:
        seed, offset = numbers_of(spec, call.get("rng"), "mods that call fg.rand")
        words = seed, seed >> 32, offset, offset >> 32
        tensors[RANDOM_STATE] = torch.tensor([word & 0xFFFFFFFF for word in words], device=q.device)
    q_offset, k_offset = call.get("q_offset", 0), call.get("k_offset", 0)
    scale, dropout_p = call.get("scale"), call.get("dropout_p", 0.0)
    batch, _, _, head_dim = q.shape
    first_head, heads = heads_of(scalars, q.shape[1])
    work = torch.float64 if exact else q.dtype
    real = torch.promote_types(work, torch.float32)
    factor = scale if scale is not None else spec.scale
    if spec.packed:
        batch = len(tensors[BOUNDARIES[0].name]) - 1
    ends: Any = (q_offset + q.shape[2], k_offset + k.shape[2])  # numbers, for a static layout
    sizes = {BATCH: batch, HEADS: heads}
    values = {symbol: torch.tensor(size, device=q.device) for symbol, size in sizes.items()}
    return OracleProblem(
        spec=spec,
        q=q,
        k=k,
        v=v,
        q_offset=q_offset,
        k_offset=k_offset,
        first_head=first_head,
        heads=heads,
        factor=factor if factor is not None else 1 / math.sqrt(head_dim),
        values=values
        | _scalar_values(spec, scalars, real, q.device)
        | _tensor_values(spec, tensors)
        | _static_layout(spec, batch, heads, ends, q.device),
        p=dropout_p,
        state=state_of(spec, dropout_p, call.get("rng"), (q_offset, k_offset)),
        work=work,
        real=real,
        decides=torch.promote_types(q.dtype, torch.float32),
    )


def _entry_offsets(offset: int | Tensor, entries: Tensor) -> int | Tensor:
    """The offset of each of some batch entries, [n, 1, 1]; a number where all have the same."""
    many = isinstance(offset, Tensor) and offset.numel() > 1
    return offset.long()[entries, None, None] if many else int(offset)  # type: ignore[union-attr]


def _scalar_values(
    spec: AttentionSpec, scalars: Mapping[str, Number], real: torch.dtype, device: torch.device
) -> dict[sympy.Symbol, Tensor]:
    """A 0-dim tensor for the symbol of each scalar, with the value that a kernel receives."""
    _check_names(spec, "scalars", [scalar.name for scalar in spec.scalars], scalars)
    values = {}
    for scalar in spec.scalars:
        value = SCALAR_DTYPES[scalar.dtype].stored(scalars[scalar.name])
        dtype = real if isinstance(value, float) else None
        values[scalar.expr] = torch.tensor(value, dtype=dtype, device=device)
    return values


def _tensor_values(
    spec: AttentionSpec, tensors: Mapping[str, Tensor]
) -> dict[sympy.Symbol, Tensor]:
    """Each captured tensor by its symbol."""
    # The lists of a block layout may be given, but only the live blocks are read.
    unread = LAYOUT_LISTS if spec.block_sparse is not None else ()
    read = [tensor for tensor in spec.tensors if tensor.name not in unread]
    _check_names(spec, "tensors", [tensor.name for tensor in read], tensors, unread)
    for tensor in read:
        shape, dims = tuple(tensors[tensor.name].shape), ", ".join(map(str, tensor.dims))
        if len(shape) != len(tensor.dims):
            raise InputError(
                f"the tensor {tensor.name} does not have the dimensions of the spec",
                where=f"reference of {spec.name}, argument tensors",
                numbers=f"{tensor.name} has shape {shape}; dims ({dims})",
                way_out="a length for each dimension; 1 where all positions share its elements",
            )
    return {tensor.symbol: tensors[tensor.name] for tensor in read}


def _check_names(
    spec: AttentionSpec,
    kind: str,
    wanted: Sequence[str],
    named: Mapping[str, object],
    unread: Sequence[str] = (),
) -> None:
    """Raises InputError unless exactly the ``wanted`` names are given, those ``unread`` aside."""
    if sorted(wanted) != sorted(name for name in named if name not in unread):
        raise InputError(
            f"the {kind} given are not those of the spec",
            where=f"reference of {spec.name}",
            numbers=f"given: {', '.join(named) or 'none'}; expected: {', '.join(wanted) or 'none'}",
            way_out=f"{kind}={{" + ", ".join(f'"{name}": ...' for name in wanted) + "}",
        )


def _static_layout(
    spec: AttentionSpec, batch: int, heads: int, ends: tuple[int, int], device: torch.device
) -> dict[sympy.Symbol, Tensor]:
    """The live blocks of a block layout that is a function; empty for other specs."""
    sparse = spec.block_sparse
    if sparse is None or not sparse.is_static:
        return {}
    shape = sparse.shape(batch, heads, *ends)
    live = torch.tensor(list(sparse.table(*shape)), dtype=torch.bool, device=device)
    return {LAYOUT_TENSORS[0].symbol: live.view(shape)}
