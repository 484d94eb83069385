"""One call whose queries choose their keys, by lists of blocks.

It is computed by calls with paged caches (`flashgen.spec.language.chosen_specs`): the queries of a
group are a sequence, and the blocks of its list are the pages. The lists by blocks of keys, for the
gradients of keys and values, are made on the device, without waiting for it.

The CPU path, tangents and gradients of learned tensors take the same blocks as a layout for all
heads instead, which has a byte for each block of each group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.calls import sinks
from flashgen.calls.runtime import memory_layout
from flashgen.calls.runtime.arguments.refusals import refuse
from flashgen.calls.runtime.block_layouts import Layout
from flashgen.calls.runtime.kernel_arguments import named
from flashgen.calls.runtime.prepared_call import PreparedCall
from flashgen.calls.runtime.programs import CallProgram, SpecProgram, program_of
from flashgen.shared.call import (
    CallOptions,
    CheckedCall,
    LaunchOptions,
    Operands,
    OutputGradients,
)
from flashgen.shared.dtypes import INT32_MAX
from flashgen.shared.signature import (
    FIRST_QUERIES,
    LAYOUT_NAMES,
    LENGTHS,
    LISTED,
    LISTS,
    OFFSETS,
    OWNED,
    PAGE_NAMES,
    ROW_SINK,
    ROWS,
    BlockLayoutFacts,
    CallSignature,
)

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

MOST_OF_LIST = 1024
"""Groups in a list of a block of keys: longer ones are cut, so that no thread block has to walk the
groups of a block that all of them chose. The gradients of the parts are added."""

FEWEST_ROWS = 16
"""Keys of a block that are the rows of a sequence, at least. The keys of smaller blocks are rows of
the groups that list them: a small block would fill few of the 64 rows or more of a tile."""

MOST_ROWS = 1 << 18
"""Rows of keys at once, each with its key, value and gradients in memory."""

_DELTA_COLUMNS = 8
"""Columns of dO and V that subtract delta: the fewest that a head dim can have more."""


def in_blocks(
    spec: AttentionSpec | CallProgram, operands: Operands, options: CallOptions
) -> tuple[AttentionSpec | CallProgram, Operands, CallOptions]:
    """The same call, with a block layout in place of its lists where it has some."""
    program = program_of(spec).of_dtype(getattr(operands.q, "dtype", None))
    if program.signature.choice is None:
        return spec, operands, options
    return with_layout(program, operands, options)


def with_layout(
    program: CallProgram, operands: Operands, options: CallOptions
) -> tuple[CallProgram, Operands, CallOptions]:
    """The same call with a block layout in place of its lists."""
    from flashgen.spec.language.chosen_specs import with_layout as of_blocks

    signature = program.signature
    choice = signature.choice
    assert choice is not None, "asked for calls with lists"
    captured = named(signature, operands.captured)
    seq_k = operands.k.shape[2]
    if signature.paged:
        seq_k *= captured[PAGE_NAMES[0]].shape[1]
    group = operands.q.shape[1] // max(operands.k.shape[1], 1)
    live = live_blocks(choice, [captured.pop(name) for name in LISTS], seq_k, group)
    if not signature.paged:  # whatever rows contain that no group lists: 0 * NaN is NaN
        operands = operands._replace(
            k=_listed_rows(operands.k, live, choice.block_k),
            v=_listed_rows(operands.v, live, choice.block_k),
        )
    captured |= dict(zip(LAYOUT_NAMES, Layout.of(live), strict=True))
    first, scalars = options.q_offset, options.scalars
    if OFFSETS[0] in captured:
        captured[FIRST_QUERIES] = captured.pop(OFFSETS[0]).view(-1)
    if signature.paged:  # rows of blocks are counted from the first query
        captured[OFFSETS[0]] = torch.zeros(1, dtype=torch.int32, device=live.device)
    made = program_of(of_blocks(_spec(program)))
    given = tuple(captured[tensor.name] for tensor in made.signature.tensors)
    options = options._replace(q_offset=0, scalars=(*scalars, first))
    return made, operands._replace(captured=given), options


def live_blocks(
    choice: BlockLayoutFacts, lists: Sequence[Tensor], seq_k: int, group: int
) -> Tensor:
    """Listed blocks as a layout: bool [batch or 1, heads_q or 1, groups, blocks].

    Args:
        lists: kv_num_blocks and kv_indices.
        group: the query heads of a key head.
    """
    counts, blocks = lists
    columns = max(-(-seq_k // choice.block_k), 1)
    place = torch.arange(blocks.shape[-1], device=blocks.device)
    listed = (place < counts[..., None]) & (blocks >= 0) & (blocks < columns)
    live = blocks.new_zeros((*blocks.shape[:-1], columns + 1), dtype=torch.bool)
    # Entries that are not listed are written to an extra column.
    live = live.scatter_(-1, torch.where(listed, blocks, columns).long(), True)[..., :columns]
    return live.repeat_interleave(group, 1) if live.shape[1] > 1 else live


def _listed_rows(x: Tensor, live: Tensor, block_k: int) -> Tensor:
    """Keys or values with zeros in the rows that no group of any key head lists."""
    listed = live.any(1, keepdim=True).any(2).repeat_interleave(block_k, 2)[..., : x.shape[2], None]
    return x.masked_fill(~listed, 0)


def _spec(program: CallProgram) -> AttentionSpec:
    assert isinstance(program, SpecProgram), "an export has no lists"
    return program.spec


class _Pages(NamedTuple):
    """Rows of a tensor [batch, heads, length, columns] as the pages of a cache, without a copy.

    Attributes:
        cache: [pages, 1, rows of a page, columns]; pages overlap.
        entry, head, step: how many pages the next batch entry, head and block of rows are further.
    """

    cache: Tensor
    entry: int
    head: int
    step: int

    @staticmethod
    def of(x: Tensor, rows: int) -> _Pages:
        batch, heads, length, columns = x.shape
        moves = [
            stride if size > 1 else 0
            for size, stride in zip(
                (batch, heads, length // rows),
                (x.stride(0), x.stride(1), rows * x.stride(2)),
                strict=True,
            )
        ]
        unit = math.gcd(*moves) or columns
        entry, head, step = (move // unit for move in moves)
        last = (batch - 1) * entry + (heads - 1) * head + (length // rows - 1) * step
        size, stride = (last + 1, 1, rows, columns), (unit, unit, x.stride(2), 1)
        return _Pages(x.as_strided(size, stride, x.storage_offset()), entry, head, step)


class _Sizes(NamedTuple):
    """The sizes of a call with lists.

    Attributes:
        batch, heads: batch entries and key heads.
        group: query heads of a key head.
        groups: groups of queries; of block_q each.
        blocks: blocks of keys in a batch entry; of block_k each.
    """

    batch: int
    heads: int
    group: int
    groups: int
    blocks: int
    block_q: int
    block_k: int
    seq_q: int
    seq_k: int

    @property
    def ragged(self) -> tuple[bool, bool]:
        return self.seq_q % self.block_q > 0, self.seq_k % self.block_k > 0

    @property
    def rows(self) -> int:
        """The rows of a group of queries."""
        return self.group * self.block_q

    def by_groups(self, x: Tensor) -> Tensor:
        """Rows [batch, heads_q, seq_q, ...] as [sequences, 1, rows, ...]: groups of queries."""
        lacking = self.groups * self.block_q - self.seq_q
        if lacking:
            x = torch.cat([x, x.new_zeros(*x.shape[:2], lacking, *x.shape[3:])], 2)
        rest = x.shape[3:]
        x = x.reshape(self.batch, self.heads, self.group, self.groups, self.block_q, *rest)
        x = x.permute(0, 1, 3, 4, 2, *range(5, x.dim()))
        return x.reshape(-1, 1, self.rows, *rest)

    def of_groups(self, x: Tensor) -> Tensor:
        """What `by_groups` undoes: [batch, heads_q, seq_q, ...], a view."""
        rest = x.shape[3:]
        x = x.view(self.batch, self.heads, self.groups, self.block_q, self.group, *rest)
        x = x.permute(0, 1, 4, 2, 3, *range(5, x.dim()))
        return x.reshape(self.batch, -1, self.groups * self.block_q, *rest)[:, :, : self.seq_q]

    def by_blocks(self, x: Tensor) -> Tensor:
        """Keys [batch, heads, seq_k, columns], with rows of zeros up to the end of a block."""
        lacking = self.blocks * self.block_k - self.seq_k
        return torch.nn.functional.pad(x, (0, 0, 0, lacking)) if lacking else x

    def in_blocks(self, x: Tensor) -> Tensor:
        """Keys [batch, heads, seq_k, columns] as [blocks of all key heads, block_k, columns]."""
        return self.by_blocks(x).reshape(-1, self.block_k, x.shape[3])

    def of_blocks(self, x: Tensor) -> Tensor:
        """What `in_blocks` undoes."""
        return x.view(self.batch, self.heads, -1, x.shape[2])[:, :, : self.seq_k]

    def owners(self, lines: Tensor, own: Tensor) -> Tensor:
        """Int32 [sequences, 4]: batch entries, first query heads, own blocks and key heads.

        Args:
            lines: key heads, counted over all batch entries.
        """
        heads = lines % self.heads * self.group
        return torch.stack([lines // self.heads, heads, own, lines], -1).to(torch.int32)


def _lists(sizes: _Sizes, counts: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and lengths of the lists of each key head, without entries that are no block."""
    shape = sizes.batch, sizes.heads, sizes.groups
    place = torch.arange(blocks.shape[-1], device=blocks.device)
    none = (place >= counts[..., None]) | (blocks == -1)
    kept = blocks.gather(-1, none.to(torch.uint8).argsort(dim=-1, stable=True)).long()
    lengths = none.logical_not().sum(-1)
    kept = kept.expand(*shape, -1).reshape(sizes.batch * sizes.heads, sizes.groups, -1)
    return kept, lengths.expand(shape).reshape(sizes.batch * sizes.heads, sizes.groups)


class ChosenCall:
    """The calls of paged caches that compute a call with lists, for tensors of one layout.

    Args:
        program: of the spec of a dtype, which has lists.
        call, operands, options, launch: the checked call.

    Raises:
        InputError: the call has an argument that calls with lists do not have.
    """

    def __init__(
        self,
        program: CallProgram,
        call: CheckedCall,
        operands: Operands,
        options: CallOptions,
        launch: LaunchOptions,
    ) -> None:
        signature = program.signature
        choice = signature.choice
        assert choice is not None, "asked for calls with lists"
        self._signature: CallSignature = signature
        self._spec = _spec(program)
        self._options = options
        self._launch = launch
        self._prepared: dict[str, Any] = {}
        self._call_pages, _, per_page, _ = operands.k.shape
        self._per_page = per_page // choice.block_k  # blocks
        self.sizes = _Sizes(
            call.batch,
            call.heads_kv,
            call.group,
            -(-call.seq_q // choice.block_q),
            -(-call.seq_k // choice.block_k),
            choice.block_q,
            choice.block_k,
            call.seq_q,
            call.seq_k,
        )
        self._scalars = (  # those of `CHOICE` follow the spec's own
            *options.scalars,
            options.q_offset,
            call.batch,
            call.heads_q,
            call.seq_q,
            call.seq_k,
            call.group,
            self.sizes.rows,
        )

    def forward(self, operands: Operands, prepare: Callable[..., Any]) -> tuple[Any, ...]:
        """The results of the call, and the record of the paged call.

        Args:
            prepare: as `flashgen.calls.runtime.forward.prepare`.
        """
        sizes, spec, given, options = self.sizes, *self.by_groups(operands)
        if options.split_size is None and sizes.groups > 1:
            options = options._replace(split_size=0)  # the groups keep the GPU busy
        call = self._prepare("forward", lambda: prepare(spec, given, options, self._launch))
        out, *of_rows, done = call.run(given)
        out = memory_layout.in_memory_order_of(operands.q, sizes.of_groups(out))
        return (out, *(sizes.of_groups(x).contiguous() for x in of_rows), done)

    def backward(
        self,
        operands: Operands,
        gradients: OutputGradients,
        prepare: Callable[..., Any],
        prepare_queries: Callable[..., Any],
    ) -> tuple[tuple[Tensor, ...], Any, list[tuple[Any, Any]]]:
        """dq, dk, dv and the gradient of a learned sink; the record of dq, and those of dv and dk
        for some of the keys each.

        Args:
            prepare, prepare_queries: as those of `flashgen.calls.runtime.forward` and `backward`.
        """
        from flashgen.spec.language.chosen_specs import by_keys, value_gradients
        from flashgen.spec.language.signature import with_columns

        sizes, spec, given, options = self.sizes, *self.by_groups(operands)
        rest = options._replace(split_size=0), self._launch
        out, lse, dout = (sizes.by_groups(x) for x in gradients[:3])
        dout = dout.contiguous()  # gradients of sums are expanded tensors
        dlse = None if gradients.dlse is None else sizes.by_groups(gradients.dlse)
        rows = OutputGradients(out, lse, dout, dlse)
        call = self._prepare("dq", lambda: prepare_queries(spec, given, rows, *rest))
        dq, of_queries = call.run(given, rows)
        dq = memory_layout.in_memory_order_of(operands.q, sizes.of_groups(dq))

        captured = named(self._signature, operands.captured)
        keys = self._of_keys(captured)
        tensors = self._captured(captured) | {ROWS[0]: lse.view(-1, sizes.groups, sizes.rows)}
        of_blocks = [sizes.in_blocks(x) for x in operands[1:3]]
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in of_blocks)
        delta = self._delta(rows)
        of_out = dout if delta is None else _with_columns(dout, _in_parts(delta, dout.dtype))
        records = []
        for part in keys.parts():
            own = tensors | part.tensors(sizes)
            k, v = (part.rows_of(x) for x in of_blocks)
            to_v = value_gradients(self._spec, keys.ragged, keys.of_groups)
            given_v = Operands(k, given.q, dout, _in_order(to_v, own))
            name = f"dv {len(k)}"
            call = self._prepare(name, functools.partial(prepare, to_v, given_v, *rest))
            found, _, done = call.run(given_v)
            part.add_to(dv, found)
            of_v = v if delta is None else _with_columns(v, v.new_full((3,), -1))
            to_k = with_columns(by_keys(self._spec, keys.ragged, keys.of_groups), of_v.shape[3])
            given_k = Operands(k, given.q, of_out, _in_order(to_k, own))
            of_keys = OutputGradients(of_v, lse.new_zeros(k.shape[:3]), of_v)
            make = functools.partial(prepare_queries, to_k, given_k, of_keys, *rest)
            found, of_k = self._prepare(f"dk {len(k)}", make).run(given_k, of_keys)
            part.add_to(dk, found)
            records.append((done, of_k))
        dk, dv = (
            memory_layout.in_memory_order_of(like, sizes.of_blocks(x).to(like.dtype))
            for x, like in zip((dk, dv), operands[1:3], strict=True)
        )
        results = (dq, dk, dv, *self._of_sink(captured, operands.q, gradients))
        return results, of_queries, records

    def _prepare(self, name: str, make: Any) -> Any:
        if name not in self._prepared:
            self._prepared[name] = make()
        return self._prepared[name]

    def by_groups(self, operands: Operands) -> tuple[AttentionSpec, Operands, CallOptions]:
        """The calls in which groups of queries are sequences: spec, operands and options."""
        from flashgen.spec.language.chosen_specs import by_groups

        sizes, captured = self.sizes, named(self._signature, operands.captured)
        spec = by_groups(self._spec, sizes.ragged)
        device = operands.q.device
        blocks, lengths = _lists(sizes, *(captured[name] for name in LISTS))
        k, v = operands.k, operands.v
        if not self._signature.paged:
            k, v = sizes.by_blocks(k), sizes.by_blocks(v)
        of_k, of_v = _Pages.of(k, sizes.block_k), _Pages.of(v, sizes.block_k)
        if of_v[1:] != of_k[1:]:  # one table has the pages of both
            of_k, of_v = (_Pages.of(x.contiguous(), sizes.block_k) for x in (k, v))
        lines = torch.arange(sizes.batch * sizes.heads, device=device)
        pages = self._pages(of_k, blocks, lines, captured)
        own = torch.arange(sizes.groups, device=device).repeat(len(lines))
        tensors = self._captured(captured) | {
            OWNED: sizes.owners(lines.repeat_interleave(sizes.groups), own),
            LISTED: blocks.flatten(0, 1).to(torch.int32),
            PAGE_NAMES[0]: pages.flatten(0, 1).to(torch.int32),
            PAGE_NAMES[1]: (lengths.flatten() * sizes.block_k).to(torch.int32),
            OFFSETS[0]: torch.zeros(1, dtype=torch.int32, device=device),
        }
        sink = self._signature.sink
        if sink is not None:
            logits = sinks.logits_of(
                captured[sink.name], sink.dims, self._rows(captured, operands.q)
            )
            logits = logits.expand(operands.q.shape[:3])
            tensors[ROW_SINK] = sizes.by_groups(logits)[:, 0]
        options = self._options._replace(q_offset=0, scalars=self._scalars)
        q = sizes.by_groups(operands.q)
        return spec, Operands(q, of_k.cache, of_v.cache, _in_order(spec, tensors)), options

    def _pages(
        self, of: _Pages, blocks: Tensor, lines: Tensor, captured: Mapping[str, Tensor]
    ) -> Tensor:
        """The pages of listed blocks, [batch * heads, groups, most]; -1 for one that is none."""
        sizes = self.sizes
        if of.cache.shape[0] > INT32_MAX:
            refuse(
                "k has more blocks of keys than kernels count",
                "argument k",
                f"blocks begin at {of.cache.shape[0]:,} places; at most {INT32_MAX:,}",
                "fewer batch entries in a call",
            )
        entry, head = (lines // sizes.heads)[:, None, None], (lines % sizes.heads)[:, None, None]
        if not self._signature.paged:
            inside = (blocks >= 0) & (blocks < sizes.blocks)
            pages = entry * of.entry + head * of.head + blocks * of.step
            return torch.where(inside, pages, -1)
        table, per_page = captured[PAGE_NAMES[0]].long(), self._per_page
        lengths = captured[PAGE_NAMES[1]].long()[lines // sizes.heads][:, None, None]
        inside = (blocks >= 0) & (blocks * sizes.block_k < lengths)
        page = table[entry, (blocks // per_page).clamp(0, table.shape[1] - 1)]
        known = inside & (page >= 0) & (page < self._call_pages)
        pages = page * of.entry + head * of.head + blocks % per_page * of.step
        return torch.where(known, pages, -1)

    def _captured(self, captured: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The captured tensors that mods read, by the names that they have in derived specs."""
        found = {name: x for name, x in captured.items() if name not in LISTS}
        if OFFSETS[0] in found:
            found[FIRST_QUERIES] = found.pop(OFFSETS[0]).view(-1)
        if self._signature.paged:
            found[LENGTHS] = found[PAGE_NAMES[1]]
        return found

    def _rows(self, captured: Mapping[str, Tensor], q: Tensor) -> sinks.Rows:
        return sinks.rows_of_call(self._signature, captured, q, 0, self._options.q_offset)

    def _of_keys(self, captured: Mapping[str, Tensor]) -> _KeyRows:
        blocks, lengths = _lists(self.sizes, *(captured[name] for name in LISTS))
        if self.sizes.block_k < FEWEST_ROWS:
            return _KeyRows.of_groups_of(self.sizes, blocks, lengths)
        return _KeyRows.of_blocks_of(self.sizes, blocks, lengths)

    def _delta(self, rows: OutputGradients) -> Tensor | None:
        """What is subtracted from dP in each row of the groups, [sequences, 1, rows]; None for
        nothing."""
        if self._signature.normalize == "none":
            return None
        delta = (rows.dout.float() * rows.out.float()).sum(-1)
        return delta if rows.dlse is None else delta - rows.dlse

    def _of_sink(
        self, captured: Mapping[str, Tensor], q: Tensor, gradients: OutputGradients
    ) -> tuple[Tensor, ...]:
        """The gradient of a learned sink."""
        sink = self._signature.sink
        if sink is None or not sink.grad:
            return ()
        out, lse, dout, dlse = gradients
        delta = (dout.float() * out.float()).sum(-1)
        delta = delta if dlse is None else delta - dlse
        given, rows = captured[sink.name], self._rows(captured, q)
        share = sinks.weights_of(given.detach(), sink.dims, rows, lse)
        total = sinks.gradient_of_rows(given, sink.dims, rows, -share.double() * delta.double())
        return (total.to(given.dtype),)


class ChosenPass(PreparedCall):
    """A checked call whose queries choose their keys, in one of its passes.

    Without `_chosen` it is computed with a block layout in place of its lists.
    """

    in_parts = True  # calls without Python are those of one launch

    def __init__(
        self, *checked: Any, operands: Operands, options: CallOptions, prepare: Callable[..., Any]
    ) -> None:
        """
        Args:
            checked: as for `PreparedCall`.
            operands, options: of the call.
            prepare: prepares the pass of a program, for its operands, their results or gradients,
                and options.
        """
        super().__init__(*checked)
        choice, page = self.signature.choice, operands.k.shape[2]
        assert choice is not None, "asked for calls with lists"
        if self.signature.paged and page % choice.block_k:
            refuse(
                "the blocks that queries choose are parts of pages",
                "argument k",
                f"pages of {page} keys, blocks of {choice.block_k}",
                f"pages of a multiple of {choice.block_k} keys",
            )
        self._options = options
        self._prepare = prepare
        self._chosen: ChosenCall | None = None
        self._of_blocks: Any = None

    def run(self, operands: Operands, *rest: Any) -> Any:
        """The results of the pass, and its record."""
        self._named(operands.captured, operands.k)
        program, given, options = with_layout(self.program, operands, self._options)
        if self._of_blocks is None:
            self._of_blocks = self._prepare(program, given, *rest, options)
        return self._of_blocks.run(given, *rest)


def _in_order(spec: AttentionSpec, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensors[tensor.name] for tensor in spec.tensors)


class _KeyRows(NamedTuple):
    """Sequences whose rows are keys, for the gradients of keys and values.

    Attributes:
        of_groups: whether a sequence has the keys in the list of a group; else it has a block of
            keys, and its list names groups that chose it. Long lists of this kind are cut.
        owners: int32 [sequences, 4], as `_Sizes.owners`.
        listed: int32 [sequences, most], the blocks of its list, or the groups.
        pages: int32 [sequences, most or 1], the groups among those of all key heads.
        lengths: int32 [sequences], how many of these there are.
        places: int64 [sequences, blocks of rows], the blocks of keys that its rows are, among those
            of all key heads; their number for one that is none.
    """

    sizes: _Sizes
    of_groups: bool
    owners: Tensor
    listed: Tensor
    pages: Tensor
    lengths: Tensor
    places: Tensor

    @property
    def ragged(self) -> tuple[bool, bool]:
        """As `_Sizes.ragged`; the rows of a list may be none, beyond all keys."""
        of_queries, of_keys = self.sizes.ragged
        return of_queries, of_keys or self.of_groups

    @staticmethod
    def of_groups_of(sizes: _Sizes, blocks: Tensor, lengths: Tensor) -> _KeyRows:
        """The keys that each group lists; each key is a row as often as it is listed.

        Args:
            blocks, lengths: the lists, as `_lists`.
        """
        lines, groups, _ = blocks.shape
        device = blocks.device
        group = torch.arange(lines * groups, device=device)
        listed = _in_lists(sizes, blocks, lengths).flatten(0, 1)
        kept = torch.where(listed, blocks.flatten(0, 1), sizes.blocks)
        line = (group // groups)[:, None]
        places = torch.where(listed, line * sizes.blocks + kept, lines * sizes.blocks)
        return _KeyRows(
            sizes,
            True,
            sizes.owners(group // groups, group % groups),
            kept.to(torch.int32),
            group[:, None].to(torch.int32),
            torch.ones_like(group, dtype=torch.int32),
            places,
        )

    @staticmethod
    def of_blocks_of(sizes: _Sizes, blocks: Tensor, lengths: Tensor) -> _KeyRows:
        """The blocks of keys, with the groups that chose each in ascending order.

        Args:
            blocks, lengths: the lists, as `_lists`.
        """
        lines, groups, most = blocks.shape
        device, total = blocks.device, lines * sizes.blocks
        line = torch.arange(lines, device=device)[:, None, None]
        listed = _in_lists(sizes, blocks, lengths)
        chosen = torch.where(listed, line * sizes.blocks + blocks, total).flatten()
        chosen, order = chosen.sort(stable=True)
        group = order // most  # among those of all key heads
        starts = torch.searchsorted(chosen, torch.arange(total + 1, device=device))
        counts = starts.diff()
        # Twice the mean length, so that most lists are whole and the table stays small.
        width = min(1 << (2 * len(chosen) // total).bit_length(), MOST_OF_LIST, groups)
        cuts = torch.nn.functional.pad((-(-counts // width)).clamp_min(1).cumsum(0), (1, 0))
        sequences = total + len(chosen) // width  # the most that there can be
        rank = torch.arange(len(chosen), device=device) - starts[chosen]
        own = (cuts[chosen] + rank // width).where(chosen < total, sequences)
        table = group.new_zeros((sequences + 1, width))
        table[own, (rank % width).where(chosen < total, 0)] = group
        pages = table[:-1]
        number = torch.arange(sequences, device=device)
        places = (torch.searchsorted(cuts, number, right=True) - 1).clamp(0, total - 1)
        rest = counts[places] - (number - cuts[places]) * width
        return _KeyRows(
            sizes,
            False,
            sizes.owners(places // sizes.blocks, places % sizes.blocks),
            (pages % groups).to(torch.int32),
            pages.to(torch.int32),
            rest.clamp(0, width).to(torch.int32),
            places[:, None],
        )

    def parts(self) -> Iterator[_KeyRows]:
        """Some of the sequences each, whose rows fit in memory."""
        many = max(MOST_ROWS // (self.places.shape[1] * self.sizes.block_k), 1)
        for first in range(0, len(self.owners), many):
            yield _KeyRows(*self[:2], *(x[first : first + many] for x in self[2:]))

    def tensors(self, sizes: _Sizes) -> dict[str, Tensor]:
        """The captured tensors of the calls, by name."""
        return {
            OWNED: self.owners,
            LISTED: self.listed,
            PAGE_NAMES[0]: self.pages,
            PAGE_NAMES[1]: self.lengths * sizes.rows,
            OFFSETS[0]: self.lengths.new_zeros(1),
        }

    def rows_of(self, x: Tensor) -> Tensor:
        """The rows [sequences, 1, rows, columns] of x [blocks, block_k, columns]."""
        taken: Tensor = x[self.places.clamp(max=len(x) - 1)]
        return taken.flatten(1, 2)[:, None]

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Adds rows to those of total [blocks, block_k, columns], in the order of the sequences."""
        inside = (self.places < len(total)).flatten()
        rows = x[:, 0].reshape(-1, *total.shape[1:]).float()
        rows = rows.masked_fill(~inside[:, None, None], 0)
        places = self.places.flatten().clamp(max=len(total) - 1)
        total.index_put_((places,), rows, accumulate=True)


def _in_lists(sizes: _Sizes, blocks: Tensor, lengths: Tensor) -> Tensor:
    """Which entries of the lists of groups are blocks of the keys."""
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < lengths[..., None]
    return listed & (blocks >= 0) & (blocks < sizes.blocks)


def _in_parts(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [...] as sums of three of a dtype of 16 bits, [..., 3], with the digits of float32.

    Further columns of dO that are multiplied by -1 in V subtract them from dO V^T.
    """
    parts = []
    for _ in range(3):
        parts.append(delta.to(dtype))
        delta = delta - parts[-1].float()
    return torch.stack(parts, -1)


def _with_columns(x: Tensor, more: Tensor) -> Tensor:
    """Rows [..., columns] with `_DELTA_COLUMNS` more, of which these are the first."""
    added = x.new_zeros((*x.shape[:-1], _DELTA_COLUMNS))
    added[..., : more.shape[-1]] = more
    return torch.cat([x, added], -1)
