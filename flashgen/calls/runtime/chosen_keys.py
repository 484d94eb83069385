"""One call whose queries choose their keys, by lists of blocks.

It is computed by calls with paged caches (`flashgen.spec.language.chosen_specs`): the queries of a
group are a sequence, and the blocks of its list are the pages. The lists by blocks of keys, for the
gradients of keys and values, are made on the device, without waiting for it; small blocks are
copied in the order of the lists of groups instead.

The CPU path, tangents and gradients of learned tensors take the same blocks as a layout for all
heads instead, which has a byte for each block of each group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.calls import sinks
from flashgen.calls.runtime import memory_layout
from flashgen.calls.runtime.add_rows import Order, add_rows
from flashgen.calls.runtime.arguments.refusals import refuse
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.block_layouts import Layout, dense_lists
from flashgen.calls.runtime.bound_kernel import KernelRun
from flashgen.calls.runtime.chosen_lists import FEWEST_ROWS, KeyRows, ListSizes, Pages, lists_of
from flashgen.calls.runtime.kernel_arguments import named
from flashgen.calls.runtime.prepared_call import PreparedCall, Setup
from flashgen.calls.runtime.programs import CallProgram, SpecProgram, program_of
from flashgen.shared.call import (
    CallOptions,
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
    LSE_OF_LISTS,
    OFFSETS,
    OWNED,
    PAGE_NAMES,
    ROW_SINK,
    BlockLayoutFacts,
    CallSignature,
)

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

_DELTA_COLUMNS = 8
"""Columns of dO and V that subtract delta: the fewest that a head dim can have more."""


def in_blocks(
    spec: AttentionSpec | CallProgram, operands: Operands, options: CallOptions
) -> tuple[AttentionSpec | CallProgram, Operands, CallOptions]:
    """The same call; a block layout replaces its lists where it has lists."""
    program = program_of(spec).with_dtype(getattr(operands.q, "dtype", None))
    if program.signature.choice is None:
        return spec, operands, options
    return with_layout(program, operands, options)


def with_layout(
    program: CallProgram, operands: Operands, options: CallOptions
) -> tuple[CallProgram, Operands, CallOptions]:
    """The same call with a block layout in place of its lists."""
    from flashgen.spec.language.chosen_specs import with_layout as spec_with_layout

    signature = program.signature
    choice = signature.choice
    assert choice is not None, "a call with lists"
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
    layout_program = program_of(spec_with_layout(_spec(program)))
    layout_captured = tuple(captured[tensor.name] for tensor in layout_program.signature.tensors)
    options = options._replace(q_offset=0, scalars=(*scalars, first))
    return layout_program, operands._replace(captured=layout_captured), options


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
    inside = (blocks >= 0) & (blocks < columns)
    live = dense_lists(counts, blocks.where(inside, columns), columns)
    return live.repeat_interleave(group, 1) if live.shape[1] > 1 else live


def _listed_rows(x: Tensor, live: Tensor, block_k: int) -> Tensor:
    """Keys or values with zeros in the rows that no group of any key head lists."""
    listed = live.any(1, keepdim=True).any(2).repeat_interleave(block_k, 2)[..., : x.shape[2], None]
    return x.masked_fill(~listed, 0)


def _spec(program: CallProgram) -> AttentionSpec:
    assert isinstance(program, SpecProgram), "an export has no lists"
    return program.spec


class CallLists(NamedTuple):
    """The contents of the lists of a call.

    Attributes:
        captured: the captured tensors by name.
        blocks, lengths: as `chosen_lists.lists_of` gives them.
    """

    captured: dict[str, Tensor]
    blocks: Tensor
    lengths: Tensor


class ChosenCall:
    """The calls of paged caches that compute a call with lists, for tensors of one layout.

    Args:
        setup: of a program that has lists.

    Raises:
        InputError: the call has an argument that calls with lists do not have.
    """

    def __init__(self, setup: Setup, operands: Operands, options: CallOptions) -> None:
        program, call, _, self._launch = setup
        signature = program.signature
        choice = signature.choice
        assert choice is not None, "a call with lists"
        self._signature: CallSignature = signature
        self._spec = _spec(program)
        self._options = options
        self._prepared: dict[str, Any] = {}
        self._call_pages, _, per_page, _ = operands.k.shape
        self._per_page = per_page // choice.block_k  # blocks
        self.sizes = ListSizes(
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
        sizes = self.sizes
        spec, group_operands, options = self.by_groups(operands, self.read(operands))
        if options.split_size is None and sizes.groups > 1:
            options = options._replace(split_size=0)  # the groups keep the GPU busy
        call = self._prepare(
            "forward", lambda: prepare(spec, group_operands, options, self._launch)
        )
        out, *row_results, outcome = call.run(group_operands)
        out = memory_layout.in_memory_order_of(operands.q, sizes.from_groups(out))
        return (out, *(sizes.from_groups(x).contiguous() for x in row_results), outcome)

    def backward(
        self,
        operands: Operands,
        gradients: OutputGradients,
        target: Target,
        prepare: Callable[..., Any],
        prepare_queries: Callable[..., Any],
        prepare_keys: Callable[..., Any],
    ) -> tuple[tuple[Tensor, ...], Any, list[tuple[tuple[Any, ...], Any, tuple[KernelRun, ...]]]]:
        """dq, dk, dv and the gradient of a learned sink; the record of dq; and for each part of the
        keys the records of forward calls, of the backward call, and of the launches that add rows.

        Args:
            target: where the call runs.
            prepare: `flashgen.calls.runtime.forward.prepare`.
            prepare_queries, prepare_keys: `prepare` of `flashgen.calls.runtime.backward`, with
                alone="queries" and alone="keys".
        """
        read, sizes = self.read(operands), self.sizes
        spec, group_operands, options = self.by_groups(operands, read)
        options_and_launch = options._replace(split_size=0), self._launch
        out, lse, dout = (sizes.by_groups(x) for x in gradients[:3])
        dout = dout.contiguous()  # gradients of sums are expanded tensors
        dlse = None if gradients.dlse is None else sizes.by_groups(gradients.dlse)
        rows = OutputGradients(out, lse, dout, dlse)
        call = self._prepare(
            "dq", lambda: prepare_queries(spec, group_operands, rows, *options_and_launch)
        )
        (dq,), query_record = call.run(group_operands, rows)
        dq = memory_layout.in_memory_order_of(operands.q, sizes.from_groups(dq))

        keys = self._key_sequences(read)
        tensors = self._captured(read.captured)
        tensors[LSE_OF_LISTS] = lse.view(-1, sizes.groups, sizes.rows)
        blocks_of_operands = [sizes.in_blocks(x) for x in operands[1:3]]
        totals = [x.new_zeros(x.shape, dtype=torch.float32) for x in blocks_of_operands]
        delta, dout_and_delta = self._delta(gradients), dout
        if not (keys.has_group_lists or delta is None):
            dout_and_delta = _widened(dout, _in_parts(sizes.by_groups(delta), dout.dtype))
        records = []
        for groups, part in keys.parts():
            k = part.rows_of(blocks_of_operands[0])
            shared = self._signature.shared_kv
            v = k[..., : dout.shape[3]] if shared else part.rows_of(blocks_of_operands[1])
            part_arguments = Operands(group_operands.q, k, v, ()), tensors | part.tensors(), part
            if keys.has_group_lists:
                part_gradients, record = self._by_listed_keys(
                    *part_arguments, rows, groups, prepare_keys, options_and_launch
                )
            else:
                passes = prepare, prepare_queries, options_and_launch
                part_gradients, record = self._by_keys(
                    *part_arguments, rows, dout_and_delta, *passes
                )
            order = Order.by_sums(part.key_blocks.flatten(), len(totals[0]))
            added = tuple(
                add_rows(total, x[:, 0].reshape(-1, total.shape[2]), order, target, self._launch)
                for total, x in zip(totals, part_gradients, strict=True)
            )
            records.append((*record, added))
        dk, dv = (
            memory_layout.in_memory_order_of(like, sizes.from_blocks(x).to(like.dtype))
            for x, like in zip(totals, operands[1:3], strict=True)
        )
        sink = self._sink_gradient(read.captured, operands.q, gradients.lse, delta)
        return (dq, dk, dv, *sink), query_record, records

    def _by_listed_keys(
        self,
        operands: Operands,
        tensors: Mapping[str, Tensor],
        part: KeyRows,
        rows: OutputGradients,
        groups: slice,
        prepare_keys: Callable[..., Any],
        options_and_launch: tuple[Any, ...],
    ) -> tuple[Any, tuple[tuple[Any, ...], Any]]:
        """dk and dv of the keys in the lists of some groups, and the records of the calls.

        Args:
            operands: all queries, and the keys and values of the part.
            rows: of all queries.
            groups: the groups of the part.
            options_and_launch: options and launch of the calls.
        """
        from flashgen.spec.language.chosen_specs import by_listed_keys

        spec = by_listed_keys(self._spec, part.ragged)
        dlse = None if rows.dlse is None else rows.dlse[groups]
        group_rows = OutputGradients(rows.out[groups], rows.lse[groups], rows.dout[groups], dlse)
        part_operands = operands._replace(q=operands.q[groups], captured=_in_order(spec, tensors))
        make = functools.partial(prepare_keys, spec, part_operands, group_rows, *options_and_launch)
        gradients, record = self._prepare(f"dkdv {len(part_operands.q)}", make).run(
            part_operands, group_rows
        )
        return gradients, ((), record)

    def _by_keys(
        self,
        operands: Operands,
        tensors: Mapping[str, Tensor],
        part: KeyRows,
        rows: OutputGradients,
        dout_and_delta: Tensor,
        prepare: Callable[..., Any],
        prepare_queries: Callable[..., Any],
        options_and_launch: tuple[Any, ...],
    ) -> tuple[Any, tuple[tuple[Any, ...], Any]]:
        """dk and dv of blocks of keys, and the records of the calls.

        Args:
            operands: all queries, and the keys and values of the part.
            dout_and_delta: dO with columns that subtract delta, where there is one.
            options_and_launch: options and launch of the calls.
        """
        from flashgen.spec.language.chosen_specs import by_keys, value_gradients
        from flashgen.spec.language.signature import with_columns

        q, k, v = operands[:3]
        to_v, to_k = (derive(self._spec, part.ragged) for derive in (value_gradients, by_keys))
        dv_operands = Operands(k, q, rows.dout, _in_order(to_v, tensors))
        call = self._prepare(
            f"dv {len(k)}", functools.partial(prepare, to_v, dv_operands, *options_and_launch)
        )
        dv, *_, outcome = call.run(dv_operands)
        if dout_and_delta.shape[3] > v.shape[3]:
            to_k = with_columns(to_k, dout_and_delta.shape[3])
            v = _widened(v, v.new_full((3,), -1))
        dk_operands = Operands(k, q, dout_and_delta, _in_order(to_k, tensors))
        key_rows = OutputGradients(v, rows.lse.new_zeros(k.shape[:3]), v)
        make = functools.partial(prepare_queries, to_k, dk_operands, key_rows, *options_and_launch)
        (dk,), record = self._prepare(f"dk {len(k)}", make).run(dk_operands, key_rows)
        return (dk, dv), ((outcome,), record)

    def _prepare(self, name: str, make: Any) -> Any:
        if name not in self._prepared:
            self._prepared[name] = make()
        return self._prepared[name]

    def read(self, operands: Operands) -> CallLists:
        """The captured tensors of a call, and its lists without entries that are no block."""
        captured = named(self._signature, operands.captured)
        keys = captured[PAGE_NAMES[1]] if self._signature.paged else None
        counts, blocks = (captured[name] for name in LISTS)
        return CallLists(captured, *lists_of(self.sizes, counts, blocks, keys))

    def by_groups(
        self, operands: Operands, read: CallLists
    ) -> tuple[AttentionSpec, Operands, CallOptions]:
        """The calls in which groups of queries are sequences: spec, operands and options.

        Args:
            read: of these operands.
        """
        from flashgen.spec.language.chosen_specs import by_groups

        sizes, (captured, blocks, lengths) = self.sizes, read
        spec = by_groups(self._spec, sizes.ragged)
        device = operands.q.device
        k, v = operands.k, operands.v
        if not self._signature.paged:
            k, v = sizes.by_blocks(k), sizes.by_blocks(v)
        k_pages, v_pages = Pages.from_rows(k, sizes.block_k), Pages.from_rows(v, sizes.block_k)
        if v_pages[1:] != k_pages[1:]:  # one table has the pages of both
            k_pages, v_pages = (Pages.from_rows(x.contiguous(), sizes.block_k) for x in (k, v))
        lines = torch.arange(sizes.batch * sizes.heads, device=device)
        pages = self._pages(k_pages, blocks, lines, captured)
        groups = torch.arange(sizes.groups, device=device).repeat(len(lines))
        tensors = self._captured(captured) | {
            OWNED: sizes.owners(lines.repeat_interleave(sizes.groups), groups),
            LISTED: blocks.flatten(0, 1).to(torch.int32),
            PAGE_NAMES[0]: pages.flatten(0, 1).to(torch.int32),
            PAGE_NAMES[1]: self._keys(blocks, lengths, lines, captured).flatten().to(torch.int32),
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
        return spec, Operands(q, k_pages.cache, v_pages.cache, _in_order(spec, tensors)), options

    def _keys(
        self, blocks: Tensor, lengths: Tensor, lines: Tensor, captured: Mapping[str, Tensor]
    ) -> Tensor:
        """The keys in listed blocks, [batch * heads, groups].

        Slots of a page past the keys of a sequence are no keys: P is 0 there, but V may be NaN.
        """
        keys = lengths * self.sizes.block_k
        if not self._signature.paged or not blocks.shape[-1]:
            return keys
        entry_lengths = captured[PAGE_NAMES[1]].long()[lines // self.sizes.heads][:, None]
        keys_of_last_block = entry_lengths % self.sizes.block_k
        last = blocks.gather(-1, (lengths - 1).clamp(min=0)[..., None])[..., 0]
        ragged = (
            (lengths > 0) & (keys_of_last_block > 0) & (last == entry_lengths // self.sizes.block_k)
        )
        return torch.where(ragged, keys - self.sizes.block_k + keys_of_last_block, keys)

    def _pages(
        self, layout: Pages, blocks: Tensor, lines: Tensor, captured: Mapping[str, Tensor]
    ) -> Tensor:
        """The pages of listed blocks, [batch * heads, groups, most]; -1 for one that is none."""
        sizes = self.sizes
        if layout.cache.shape[0] > INT32_MAX:
            refuse(
                "k has more blocks of keys than kernels count",
                "argument k",
                f"blocks begin at {layout.cache.shape[0]:,} places; at most {INT32_MAX:,}",
                "fewer batch entries in a call",
            )
        entry, head = (lines // sizes.heads)[:, None, None], (lines % sizes.heads)[:, None, None]
        if not self._signature.paged:
            inside = (blocks >= 0) & (blocks < sizes.blocks)
            pages = entry * layout.entry + head * layout.head + blocks * layout.step
            return torch.where(inside, pages, -1)
        table, per_page = captured[PAGE_NAMES[0]].long(), self._per_page
        lengths = captured[PAGE_NAMES[1]].long()[lines // sizes.heads][:, None, None]
        inside = (blocks >= 0) & (blocks * sizes.block_k < lengths)
        page = table[entry, (blocks // per_page).clamp(0, table.shape[1] - 1)]
        exists = inside & (page >= 0) & (page < self._call_pages)
        pages = page * layout.entry + head * layout.head + blocks % per_page * layout.step
        return torch.where(exists, pages, -1)

    def _captured(self, captured: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The captured tensors that mods read, by the names that they have in derived specs."""
        read_by_mods = {name: x for name, x in captured.items() if name not in LISTS}
        if OFFSETS[0] in read_by_mods:
            read_by_mods[FIRST_QUERIES] = read_by_mods.pop(OFFSETS[0]).view(-1)
        if self._signature.paged:
            read_by_mods[LENGTHS] = read_by_mods[PAGE_NAMES[1]]
        return read_by_mods

    def _rows(self, captured: Mapping[str, Tensor], q: Tensor) -> sinks.Rows:
        return sinks.rows_of_call(self._signature, captured, q, 0, self._options.q_offset)

    def _key_sequences(self, read: CallLists) -> KeyRows:
        make = KeyRows.by_group if self.sizes.block_k < FEWEST_ROWS else KeyRows.by_block
        return make(self.sizes, read.blocks, read.lengths)

    def _delta(self, gradients: OutputGradients) -> Tensor | None:
        """The delta that each row subtracts from dP, [batch, heads_q, seq_q]; None for none."""
        if self._signature.normalize == "none":
            return None
        delta = (gradients.dout.float() * gradients.out.float()).sum(-1)
        return delta if gradients.dlse is None else delta - gradients.dlse

    def _sink_gradient(
        self, captured: Mapping[str, Tensor], q: Tensor, lse: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The gradient of a learned sink, which stands beside a softmax alone."""
        sink = self._signature.sink
        if sink is None or not sink.grad:
            return ()
        assert delta is not None, "that of a softmax"
        sink_tensor, rows = captured[sink.name], self._rows(captured, q)
        share = sinks.weights_of(sink_tensor.detach(), sink.dims, rows, lse)
        total = sinks.gradient_of_rows(
            sink_tensor, sink.dims, rows, -share.double() * delta.double()
        )
        return (total.to(sink_tensor.dtype),)


class ChosenPass(PreparedCall):
    """A checked call whose queries choose their keys, in one of its passes.

    Without `_chosen` it is computed with a block layout in place of its lists.
    """

    in_parts = True  # calls without Python are those of one launch

    def __init__(
        self,
        setup: Setup,
        operands: Operands,
        options: CallOptions,
        prepare: Callable[..., Any],
    ) -> None:
        """
        Args:
            prepare: prepares the pass of a program, for its operands, their results or gradients,
                options and launch.
        """
        super().__init__(setup)
        choice, page = self.signature.choice, operands.k.shape[2]
        assert choice is not None, "a call with lists"
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
        self._by_layout: Any = None

    def run(self, operands: Operands, *arguments: Any) -> Any:
        """The results of the pass, and its record."""
        self._named(operands.captured, operands.k)
        program, layout_operands, options = with_layout(self.program, operands, self._options)
        if self._by_layout is None:
            self._by_layout = self._prepare(
                program, layout_operands, *arguments, options, self.launch
            )
        return self._by_layout.run(layout_operands, *arguments)


def _in_order(spec: AttentionSpec, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensors[tensor.name] for tensor in spec.tensors)


def _in_parts(delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers [...] as sums of three of a dtype of 16 bits, [..., 3], with the digits of float32.

    Further columns of dO that are multiplied by -1 in V subtract them from dO V^T.
    """
    parts = []
    for _ in range(3):
        parts.append(delta.to(dtype))
        delta = delta - parts[-1].float()
    return torch.stack(parts, -1)


def _widened(x: Tensor, more: Tensor) -> Tensor:
    """Rows [..., columns] with `_DELTA_COLUMNS` further columns: ``more``, then zeros."""
    added = x.new_zeros((*x.shape[:-1], _DELTA_COLUMNS))
    added[..., : more.shape[-1]] = more
    return torch.cat([x, added], -1)
