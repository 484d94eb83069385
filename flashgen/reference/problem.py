"""One call of the oracle: its arguments made ready, and cut into parts that fit memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sympy
import torch
from torch.autograd import forward_ad

from flashgen.dropout import keep_mask, keep_scale, kept_levels
from flashgen.errors import InputError
from flashgen.expr import BATCH, HEADS, LOWEST_SCORE, SCORE, SEQ_K, SEQ_Q, B, Element, H, K, Q
from flashgen.sparse import COMPRESSED
from flashgen.sparse import TENSORS as LAYOUT_TENSORS
from flashgen.spec import BOUNDARIES, AttentionSpec

from .interpret import evaluate

Tensor = torch.Tensor
Number = int | float | bool
State = Sequence[int] | Tensor
"""Seed and offset of dropout: a pair of integers or an int64 tensor [2]."""

_SCORES_AT_ONCE = 1 << 22
"""Elements of S held at a time; 32 MiB in float64, a few times over while mods are computed."""


@dataclass(frozen=True)
class Rows:
    """Queries and keys that belong together: all of them, or those of one packed sequence.

    Attributes:
        first: what the first batch entry is called: the number of the sequence.
        queries, keys: rows in q and in k.
    """

    first: int
    queries: slice
    keys: slice


@dataclass(frozen=True)
class Part:
    """Some (batch, head) pairs, counted through both, and some rows of queries.

    Attributes:
        pairs, rows, keys: which, in the operands.
        entry, h: int64 [n], batch entry in the operands and query head of each pair.
        kv: int64 [n], which (batch entry, key head), counted through both, each pair reads.
        q, k, v: [n, rows, head_dim], [n, seq_k, head_dim] and [n, seq_k, head_dim_v], copies.
        values: what the symbols of the mods are here.
        sink: the sink's logit, [n, 1, 1] in `Problem.real`; None without a sink.
        mask: bool [n, rows, seq_k], true where the mask keeps; None where there is no mask.
        kept: bool of the same shape, what dropout keeps; None without dropout.
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

    def of_rows(self, tensor: Tensor) -> Tensor:
        """The part [n, rows, ...] of a tensor [batch, heads_q, seq_q, ...]."""
        return tensor[self.entry, self.h, self.rows]

    def masked(self, scores: Tensor) -> Tensor:
        """``scores`` with -inf where the mask is false, and for what counts as that."""
        masked = scores <= LOWEST_SCORE
        return scores.masked_fill(masked if self.mask is None else masked | ~self.mask, -math.inf)

    def dropped(self, weights: Tensor) -> Tensor:
        """``weights`` with 0 for dropped elements, the others scaled; rounded once."""
        if self.kept is None:
            return weights
        return weights.masked_fill(~self.kept, 0) * self.kept_scale


@dataclass(frozen=True)
class Problem:
    """The arguments of `attention` and its like, checked and with their defaults filled in.

    Attributes:
        factor: on q.k.
        values: batch and heads, scalars and captured tensors, as the mods see them.
        p: probability of dropping.
        state: seed and offset; None without dropout.
        work: dtype of products, scores and probabilities.
        real: dtype that mods and the lse are computed in.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    q_offset: int
    k_offset: int
    factor: float
    values: Mapping[sympy.Symbol, Tensor]
    p: float
    state: tuple[int, int] | None
    work: torch.dtype
    real: torch.dtype

    def parts(self) -> Iterator[Part]:
        """All queries in parts of at most `_SCORES_AT_ONCE` scores.

        None where there is neither a key nor a sink.
        """
        pairs = self.q.shape[0] * self.q.shape[1]
        for of in self._rows():
            seq_q, seq_k = of.queries.stop - of.queries.start, of.keys.stop - of.keys.start
            if seq_k == 0 and self.spec.sink is None:
                continue
            seq_k = max(1, seq_k)
            rows = min(max(1, _SCORES_AT_ONCE // seq_k), max(1, seq_q))
            together = max(1, _SCORES_AT_ONCE // (rows * seq_k))
            for pair in range(0, pairs, together):
                for row in range(0, seq_q, rows):
                    yield self._part(
                        of,
                        slice(pair, min(pair + together, pairs)),
                        slice(row, min(row + rows, seq_q)),
                    )

    def _rows(self) -> Iterator[Rows]:
        if not self.spec.packed:
            yield Rows(0, slice(0, self.q.shape[2]), slice(0, self.k.shape[2]))
            return
        ends = [self.values[boundary.symbol].tolist() for boundary in BOUNDARIES]
        for i in range(len(ends[0]) - 1):
            yield Rows(i, *(slice(end[i], end[i + 1]) for end in ends))

    def _part(self, of: Rows, pairs: slice, rows: slice) -> Part:
        """``rows`` are counted from the first of those of ``of``, as positions are."""
        device, heads, heads_kv = self.q.device, self.q.shape[1], self.k.shape[1]
        seq_q, seq_k = of.queries.stop - of.queries.start, of.keys.stop - of.keys.start
        pair = torch.arange(pairs.start, pairs.stop, device=device)
        entry, h = pair // heads, pair % heads
        h_kv = h // (heads // heads_kv)
        here = slice(of.queries.start + rows.start, of.queries.start + rows.stop)
        values = {
            **self.values,
            SEQ_Q: torch.tensor(seq_q, device=device),
            SEQ_K: torch.tensor(seq_k, device=device),
            B: (entry + of.first)[:, None, None],
            H: h[:, None, None],
            Q: torch.arange(rows.start, rows.stop, device=device)[:, None] + self.q_offset,
            K: torch.arange(seq_k, device=device) + self.k_offset,
        }
        shape = (len(pair), rows.stop - rows.start, seq_k)
        mask = None
        if self.spec.keep is not sympy.true:
            mask = evaluate(self.spec.keep, values, self.real).expand(shape)
        kept = None
        if self.state is not None:
            numbers = np.arange(pairs.start, pairs.stop) + of.first * heads
            bits = keep_mask(
                self.p, *self.state, numbers, range(rows.start, rows.stop), range(seq_k)
            )
            kept = torch.from_numpy(bits).to(device)
        return Part(
            pairs=pairs,
            rows=here,
            keys=of.keys,
            entry=entry,
            h=h,
            kv=entry * heads_kv + h_kv,
            q=self.q[entry, h, here].to(self.work),
            k=self.k[entry, h_kv, of.keys].to(self.work),
            v=self.v[entry, h_kv, of.keys].to(self.work),
            values=values,
            sink=self._sink(h),
            mask=mask,
            kept=kept,
            kept_scale=keep_scale(self.p),
        )

    def _sink(self, h: Tensor) -> Tensor | None:
        """Of the heads ``h`` [n], as [n, 1, 1]."""
        if self.spec.sink is None:
            return None
        sink = self.values[self.spec.sink.symbol].detach().reshape(-1).to(self.real)
        return (sink.expand(len(h)) if len(sink) == 1 else sink[h]).view(-1, 1, 1)

    def score(self, scores: Tensor, part: Part) -> Tensor:
        """s' of s, unmasked, in the dtype of ``scores``."""
        if self.spec.score == SCORE:
            return scores
        values = {**part.values, SCORE: scores.to(self.real)}
        found = evaluate(self.spec.score, values, self.real)
        return found.to(scores.dtype).expand_as(scores)

    def score_and_slope(self, scores: Tensor, part: Part) -> tuple[Tensor, Tensor | None]:
        """s' of s, unmasked, in the dtype of ``scores``; ds'/ds in `real`, None stands for 1."""
        if self.spec.score == SCORE:
            return scores, None
        value, slope = self._differentiated(scores, part, SCORE)
        return value.to(scores.dtype).expand_as(scores), slope.expand_as(scores)

    def slope_by(self, element: Element, scores: Tensor, part: Part) -> Tensor:
        """ds'/d(element) in `real`, of a shape that broadcasts to that of ``scores``."""
        return self._differentiated(scores, part, element)[1]

    def _differentiated(
        self, scores: Tensor, part: Part, variable: sympy.Expr
    ) -> tuple[Tensor, Tensor]:
        """s' and its derivative by the score or by an element that it reads, in `real`.

        It is torch's forward-mode derivative of the interpreted expression. Reverse mode
        multiplies the branch that a ``where`` did not choose by 0, which is NaN for a branch
        of infinite slope; forward mode chooses between the slopes as between the values.
        """
        values = {**part.values, SCORE: scores.detach().to(self.real)}
        x = evaluate(variable, values, self.real).detach()
        with warnings.catch_warnings(), forward_ad.dual_level():
            # torch's own, when it loads its forward-mode formulas.
            warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
            dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
            found = evaluate(self.spec.score, {**values, variable: dual}, self.real)
            value, slope = forward_ad.unpack_dual(found)  # type: ignore[no-untyped-call]
        return value, torch.zeros_like(value) if slope is None else slope


def problem_of(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    exact: bool,
    scalars: Mapping[str, Number] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    q_offset: int = 0,
    k_offset: int = 0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rng: State | None = None,
) -> Problem:
    """The arguments of one call, in float64 when ``exact``, else in the operands' dtype.

    Raises:
        InputError: scalars or tensors that are not the spec's, a wrong probability or state.
    """
    batch, heads, _, head_dim = q.shape
    work = torch.float64 if exact else q.dtype
    real = torch.promote_types(work, torch.float32)
    factor = scale if scale is not None else spec.scale
    if spec.packed:
        batch = len((tensors or {})[BOUNDARIES[0].name]) - 1
    sizes = {BATCH: batch, HEADS: heads}
    values = {symbol: torch.tensor(size, device=q.device) for symbol, size in sizes.items()}
    return Problem(
        spec=spec,
        q=q,
        k=k,
        v=v,
        q_offset=q_offset,
        k_offset=k_offset,
        factor=factor if factor is not None else 1 / math.sqrt(head_dim),
        values=values
        | _scalar_values(spec, scalars or {}, real, q.device)
        | _tensor_values(spec, tensors or {})
        | _static_layout(
            spec, batch, heads, (q_offset + q.shape[2], k_offset + k.shape[2]), q.device
        ),
        p=dropout_p,
        state=_state_of(spec, dropout_p, rng),
        work=work,
        real=real,
    )


def _scalar_values(
    spec: AttentionSpec, scalars: Mapping[str, Number], real: torch.dtype, device: torch.device
) -> dict[sympy.Symbol, Tensor]:
    """A 0-dim tensor for the symbol of each scalar, of the kind that a kernel receives."""
    wanted = [scalar.name for scalar in spec.scalars]
    if sorted(wanted) != sorted(scalars):
        raise InputError(
            "the scalars given are not those of the spec",
            where=f"reference of {spec.name}",
            numbers=f"given: {', '.join(scalars) or 'none'}; wanted: {', '.join(wanted) or 'none'}",
            way_out="scalars={" + ", ".join(f'"{name}": ...' for name in wanted) + "}",
        )
    found = {}
    for scalar in spec.scalars:
        value = scalars[scalar.name]
        if scalar.dtype == "bool":
            tensor = torch.tensor(bool(value), device=device)
        elif scalar.dtype == "int32":
            tensor = torch.tensor(int(value), device=device)
        else:
            tensor = torch.tensor(value, dtype=torch.float32, device=device).to(real)
        found[scalar.expr] = tensor
    return found


def _tensor_values(
    spec: AttentionSpec, tensors: Mapping[str, Tensor]
) -> dict[sympy.Symbol, Tensor]:
    """Each captured tensor, as it is, for its symbol."""
    # What a layout compresses to says the same once more: it may be given, and is not read.
    unread = COMPRESSED if spec.block_sparse is not None else ()
    read = [tensor for tensor in spec.tensors if tensor.name not in unread]
    wanted = [tensor.name for tensor in read]
    if sorted(wanted) != sorted(name for name in tensors if name not in unread):
        raise InputError(
            "the tensors given are not those of the spec",
            where=f"reference of {spec.name}",
            numbers=f"given: {', '.join(tensors) or 'none'}; wanted: {', '.join(wanted) or 'none'}",
            way_out="tensors={" + ", ".join(f'"{name}": ...' for name in wanted) + "}",
        )
    for tensor in read:
        shape, dims = tuple(tensors[tensor.name].shape), ", ".join(map(str, tensor.dims))
        if len(shape) != len(tensor.dims):
            raise InputError(
                f"the tensor {tensor.name} does not have the dimensions of the spec",
                where=f"reference of {spec.name}, argument tensors",
                numbers=f"{tensor.name} has shape {shape}; dims ({dims})",
                way_out="a length for each dimension; 1 where all share its elements",
            )
    return {tensor.symbol: tensors[tensor.name] for tensor in read}


def _static_layout(
    spec: AttentionSpec, batch: int, heads: int, ends: tuple[int, int], device: torch.device
) -> dict[sympy.Symbol, Tensor]:
    """The live blocks of a layout that is a function; nothing for other specs."""
    sparse = spec.block_sparse
    if sparse is None or not sparse.is_static:
        return {}
    shape = sparse.shape(batch, heads, *ends)
    live = torch.tensor(list(sparse.table(*shape)), dtype=torch.bool, device=device)
    return {LAYOUT_TENSORS[0].symbol: live.view(shape)}


def _state_of(spec: AttentionSpec, p: float, rng: State | None) -> tuple[int, int] | None:
    """Seed and offset as integers; None when nothing is dropped, whatever ``rng`` is."""
    kept_levels(p)
    if p == 0:
        return None
    if not spec.dropout:
        raise InputError(
            "dropout_p is given to a spec without dropout",
            where=f"reference of {spec.name}",
            numbers=f"dropout_p {p!r}, spec.dropout False",
            way_out="AttentionSpec(..., dropout=True), or dropout_p=0",
        )
    if isinstance(rng, Tensor):
        fits = rng.dtype == torch.int64 and rng.shape == (2,)
        numbers = [int(number) for number in rng.tolist()] if fits else []
    else:
        numbers = [] if rng is None else list(rng)
    if len(numbers) != 2 or any(type(number) is not int for number in numbers):
        given = f"{rng.dtype} {tuple(rng.shape)}" if isinstance(rng, Tensor) else repr(rng)
        raise InputError(
            "the state of dropout's random numbers is not a seed and an offset",
            where=f"reference of {spec.name}, argument rng",
            numbers=f"given {given}; dropout_p {p!r}",
            way_out="rng=(seed, offset), or an int64 tensor of these two",
        )
    return numbers[0], numbers[1]
