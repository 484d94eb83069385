"""Block layouts as tensors: the live blocks, and lists of them for the kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.calls.runtime.arguments.positions import tensors_named
from flashgen.calls.runtime.arguments.refusals import (
    check_dense,
    is_dtensor,
    is_known,
    refuse,
    shape_of,
    shown,
)
from flashgen.shared.call import CheckedCall
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.errors import called_by_users
from flashgen.shared.signature import (
    BOUNDARIES,
    LAYOUT,
    LAYOUT_LISTS,
    LAYOUT_NAMES,
    LISTS,
    BlockLayoutFacts,
    CallSignature,
)

Tensor = torch.Tensor

_AXES = "[batch or 1, heads or 1, row blocks, column blocks]"


@called_by_users()
class Layout(NamedTuple):
    """A block layout as compressed rows and columns. `Layout.of` makes it, for any number of calls.

    Attributes:
        live: bool [batch or 1, heads or 1, rows, columns] of blocks, true if a block is computed.
        row_counts: int32 [batch or 1, heads or 1, rows], live blocks of each row.
        row_blocks: int32 [batch or 1, heads or 1, rows, columns], the columns of the live blocks in
            ascending order, then the columns of the other blocks.
        column_counts: int32 [batch or 1, heads or 1, columns], live blocks of each column.
        column_blocks: int32 [batch or 1, heads or 1, columns, rows], the rows of the live blocks in
            ascending order, then the rows of the other blocks.
    """

    live: Tensor
    row_counts: Tensor
    row_blocks: Tensor
    column_counts: Tensor
    column_blocks: Tensor

    @staticmethod
    @called_by_users()
    def of(live: Tensor) -> Layout:
        """Compresses ``live`` on its own device, without a device synchronisation.

        Args:
            live: bool [batch or 1, heads or 1, rows, columns]; rows and columns of blocks are
                counted from global position 0.

        Raises:
            InputError: ``live`` has another rank, dtype or storage.
        """
        _check_live(live)
        return Layout(live, *_listed(live), *_listed(live.transpose(2, 3)))

    @staticmethod
    @called_by_users()
    def from_lists(kv_num_blocks: Tensor, kv_indices: Tensor) -> ChosenBlocks:
        """The blocks of keys that groups of queries choose, for a spec whose block_sparse has
        ``heads="kv"``.

        Group g of a batch entry and key head holds the queries of the rows g * block_q to
        (g + 1) * block_q - 1 in all query heads of the key head; block j the keys of the rows
        j * block_k to (j + 1) * block_k - 1, of a paged cache those of the sequence. Blocks may be
        in any order. A block of -1 is no block. A group without blocks has an output of 0.

        Args:
            kv_num_blocks: int32 [batch or 1, heads_kv or 1, groups], the length of each list.
            kv_indices: int32 [batch or 1, heads_kv or 1, groups, most], the lists; what follows a
                list's length is not read. A block that is no block of the keys, and one that a
                list has twice, is an InputError of the call on the CPU. On a GPU lists are
                not checked: the former makes the rows of the group NaN, and the latter counts
                twice.

        Raises:
            InputError: another rank, dtype or device, or lists of different groups.
        """
        return _checked_lists(kv_num_blocks, kv_indices)


@called_by_users()
class ChosenBlocks(NamedTuple):
    """The blocks of keys that groups of queries choose. `Layout.from_lists` makes it.

    Attributes:
        kv_num_blocks: int32 [batch or 1, heads_kv or 1, groups].
        kv_indices: int32 [batch or 1, heads_kv or 1, groups, most].
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor


def _checked_lists(counts: object, blocks: object) -> ChosenBlocks:
    for name, tensor, rank in zip(LISTS, (counts, blocks), (3, 4), strict=True):
        axes = "[batch or 1, heads_kv or 1, groups" + (", most]" if rank == 4 else "]")
        if not isinstance(tensor, Tensor) or tensor.dim() != rank or tensor.dtype != torch.int32:
            shown_tensor = shown(tensor)
            if isinstance(tensor, Tensor):
                shown_tensor = f"{tensor.dtype} {tuple(tensor.shape)}"
            refuse(
                f"{name} is no int32 tensor of {rank} dimensions",
                f"argument {name}",
                f"given {shown_tensor}; expected torch.int32, {axes}",
                "fg.Layout.from_lists(counts.int(), blocks.int()), as in PyTorch's BlockMask",
            )
        if not is_dtensor(tensor):
            check_dense(name, tensor)
    assert isinstance(counts, Tensor)
    assert isinstance(blocks, Tensor)
    if is_known(counts.shape != blocks.shape[:3]) or counts.device != blocks.device:
        refuse(
            "kv_num_blocks and kv_indices have lists of different groups",
            "argument kv_num_blocks",
            f"kv_num_blocks {shape_of(counts)} on {counts.device}, kv_indices {shape_of(blocks)} "
            f"on {blocks.device}",
            "a count for each list: kv_num_blocks.shape == kv_indices.shape[:3]",
        )
    if is_known(blocks.shape[3] == 0):  # no list has a block
        blocks = blocks.new_full((*blocks.shape[:3], 1), -1)
    return ChosenBlocks(counts, blocks)


def _listed(live: Tensor) -> tuple[Tensor, Tensor]:
    counts = live.sum(-1, dtype=torch.int32)
    # A stable sort keeps live columns in ascending order.
    return counts, live.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)


def _check_live(live: object) -> None:
    if not isinstance(live, Tensor):
        refuse(
            "layout is not a block layout",
            "argument layout",
            f"given a {type(live).__name__}; expected a bool tensor {_AXES}, "
            "a flashgen.Layout or a torch BlockMask",
            "layout=live, true for each block that is computed",
        )
    check_dense("layout", live)
    if live.dtype != torch.bool or live.dim() != 4:
        refuse(
            "layout is not a bool for each block",
            "argument layout",
            f"shape {tuple(live.shape)}, {live.dtype}; expected torch.bool, {_AXES}",
            "live[None, None] for a layout that all heads share, live.bool() for one of numbers",
        )


def with_layout(signature: CallSignature, captures: Mapping[str, Any]) -> Mapping[str, Any]:
    """``captures`` with the tensors of a block layout in place of the layout that the user gives.

    Args:
        captures: values of captured tensors and scalars by name. A layout may be a bool tensor, a
            `Layout` or a torch BlockMask with the spec's block size, whose partial and full blocks
            are the live ones.

    Raises:
        InputError: the layout is of another type or has another block size.
    """
    if signature.choice is not None and LISTS[0] not in captures:
        return {n: x for n, x in captures.items() if n != LAYOUT} | _lists_of(captures.get(LAYOUT))
    sparse = signature.call_layout
    if sparse is None or LAYOUT not in captures:
        return captures
    if isinstance(captures[LAYOUT], ChosenBlocks):
        refuse(
            "lists for groups of queries are those of another kind of layout",
            "argument layout",
            f"given lists of blocks; the spec has blocks of {sparse.block_q} x {sparse.block_k}, "
            "which are tiles for all heads",
            f'fg.BlockSparse(block_q={sparse.block_q}, block_k={sparse.block_k}, heads="kv") in '
            "the spec, or layout=fg.Layout.of(live)",
        )
    if any(name in captures for name in LAYOUT_LISTS):
        return captures  # all five tensors, which are the arguments of the registered operator
    value = captures[LAYOUT]
    if hasattr(value, "kv_num_blocks"):
        value = blocks_of(sparse, value)
    layout = value if isinstance(value, Layout) else Layout.of(value)
    return {**captures, **dict(zip(LAYOUT_NAMES, layout, strict=True))}


def _lists_of(value: object) -> dict[str, Tensor]:
    """The tensors of lists that the user gives."""
    if not isinstance(value, ChosenBlocks):
        refuse(
            "queries that choose their keys have lists of blocks",
            "argument layout",
            f"given {shown(value)}",
            "layout=fg.Layout.from_lists(kv_num_blocks, kv_indices)",
        )
    return dict(zip(LISTS, value, strict=True))


def blocks_of(sparse: BlockLayoutFacts, block_mask: Any) -> Tensor:
    """The live blocks of a torch BlockMask: its partial and its full blocks.

    Raises:
        InputError: its blocks have another size.
    """
    size = sparse.block_q, sparse.block_k
    if tuple(block_mask.BLOCK_SIZE) != size:
        refuse(
            "the BlockMask has another block size than the spec",
            "argument layout",
            f"BLOCK_SIZE {tuple(block_mask.BLOCK_SIZE)}; the spec has {size}",
            f"fg.BlockSparse(block_q={block_mask.BLOCK_SIZE[0]}, "
            f"block_k={block_mask.BLOCK_SIZE[1]}), or create_block_mask(..., BLOCK_SIZE={size})",
        )
    partial, full = dense_blocks(block_mask)
    return partial | full


def dense_blocks(block_mask: Any) -> tuple[Tensor, Tensor]:
    """The partial and the full blocks of a torch BlockMask, bool [B, H, rows, columns] each."""
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    partial = dense_lists(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    return partial, dense_lists(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)


def dense_lists(counts: Tensor, blocks: Tensor, columns: int) -> Tensor:
    """Lists of blocks as bools: the first ``counts`` entries of each line of ``blocks``, without
    entries that are ``columns``."""
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None]
    # Entries that are not listed are scattered to an extra column.
    block_indices = torch.where(listed, blocks, columns).long()
    live = block_indices.new_zeros((*block_indices.shape[:-1], columns + 1), dtype=torch.bool)
    return live.scatter(-1, block_indices, True)[..., :columns]


def check_layout(
    signature: CallSignature,
    captured: Sequence[Tensor],
    lengths: tuple[int, int],
    ends: tuple[int, int],
) -> None:
    """Checks the sizes of a layout that a call gives; dtypes and ranks were checked before.

    Args:
        captured: a tensor for each of the signature's tensors.
        lengths, ends: for queries and keys: their number, and the last global position plus 1.

    Raises:
        InputError: too few or too many blocks, or tensors of different layouts.
    """
    if signature.choice is not None:
        _check_groups(signature, captured, lengths[0])
    sparse = signature.call_layout
    if sparse is None:
        return
    layout = Layout(*captured[-len(LAYOUT_NAMES) :])
    blocks = tuple(layout.live.shape[2:])
    for axis_name, size, count, length, end in zip(
        ("queries", "keys"), (sparse.block_q, sparse.block_k), blocks, lengths, ends, strict=True
    ):
        needed, most = -(-end // size), -(-POSITION_LIMIT // size)
        if length and not needed <= count <= most:
            few = count < needed
            refuse(
                f"the layout has too {'few' if few else 'many'} blocks of {axis_name}",
                "argument layout",
                f"shape {tuple(layout.live.shape)}; the {axis_name} end at {end:,}, in blocks of "
                f"{size}: {f'at least {needed:,}' if few else f'at most {most:,}'}",
                "a block for every position up to the last one, those before q_offset and k_offset "
                "included"
                if few
                else "only the blocks up to the last position",
            )
    lines, (rows, columns) = tuple(layout.live.shape[:2]), blocks
    shapes = ((rows, columns), (rows,), (rows, columns), (columns,), (columns, rows))
    for name, tensor, shape in zip(LAYOUT_NAMES, layout, shapes, strict=True):
        if tuple(tensor.shape) != (*lines, *shape):
            refuse(
                f"{name} does not have the shape of the live blocks",
                f"argument {name}",
                f"shape {tuple(tensor.shape)}; layout {tuple(layout.live.shape)}, so expected "
                f"{(*lines, *shape)}",
                "layout=flashgen.Layout.of(live), which makes all five",
            )


def _check_groups(signature: CallSignature, captured: Sequence[Tensor], seq_q: int) -> None:
    """Checks that there is a list for each group of queries."""
    choice = signature.choice
    assert choice is not None, "a call with lists"
    counts, blocks = tensors_named(signature, captured, LISTS)
    groups = -(-seq_q // choice.block_q)
    if counts.shape[2] != groups or counts.shape != blocks.shape[:3]:
        refuse(
            "the lists are not those of the groups of queries",
            "argument layout",
            f"kv_num_blocks {tuple(counts.shape)}, kv_indices {tuple(blocks.shape)}; {seq_q:,} "
            f"queries in groups of {choice.block_q}: {groups:,} groups",
            f"lists for {groups:,} groups: [batch or 1, heads_kv or 1, {groups}, most]",
        )


def refuse_parts_of_choice(k_offset: object, h_offset: object, whole: object, ends: object) -> None:
    """Refuses a call with lists that is a part of a whole, or whose queries are packed.

    Args:
        ends: cu_seqlens_q; None where it is not given.

    Raises:
        InputError: one of these arguments is given.
    """
    if ends is not None:
        refuse(
            "queries that choose their keys are not packed",
            f"argument {BOUNDARIES[0]}",
            f"given {shown(ends)}",
            "a batch entry of q, and of the lists, for each sequence; sequences with different "
            "numbers of queries in calls of their own",
        )
    part_arguments = {"k_offset": k_offset, "h_offset": h_offset, "whole": whole}
    for name, value in part_arguments.items():
        if isinstance(value, Tensor) or (value is not None and value != 0):
            refuse(
                "queries that choose their keys are a call of their own, with all heads and keys",
                f"argument {name}",
                f"given {shown(value)}",
                f"no {name}: lists of the blocks of these keys; and where mods read positions or "
                "heads of a whole, those that they read from a Tensor of the spec",
            )


def check_choice(
    choice: BlockLayoutFacts, captured: Mapping[str, Tensor], seq_k: int | Tensor
) -> None:
    """Checks the contents of lists.

    Args:
        seq_k: the number of keys, of each batch entry where it is a tensor.

    Raises:
        InputError: a length that is none, a block that is none, or one that a list has twice.
    """
    counts, blocks = (captured[name] for name in LISTS)
    width = blocks.shape[-1]
    most = -(-seq_k // choice.block_k)
    if isinstance(most, Tensor):
        most = most[:, None, None, None]
        blocks = blocks.expand(len(most), *blocks.shape[1:])
        counts = counts.expand(len(most), *counts.shape[1:])
    slot = torch.arange(width, device=blocks.device)
    listed = (slot < counts[..., None]) & (blocks != -1)
    outside = listed & ((blocks < 0) | (blocks >= most))
    ordered = torch.where(listed, blocks, -1 - slot).sort(-1).values
    twice = torch.nn.functional.pad((ordered.diff(dim=-1) == 0), (0, 1)) if width else listed
    for wrong, mistake, way_out in (
        ((counts < 0) | (counts > width), "a list has a length that is none", "0 to its width"),
        (
            outside.any(-1),
            "a list has a block that is no block of the keys",
            "blocks that begin at a key",
        ),
        (twice.any(-1), "a list has a block twice", "each block once: blocks.unique()"),
    ):
        if wrong.any():
            list_index = tuple(wrong.nonzero()[0].tolist())
            length = int(counts[list_index])
            keys = seq_k[list_index[0]] if isinstance(seq_k, Tensor) else seq_k
            refuse(
                mistake,
                "argument layout",
                f"kv_num_blocks[{list_index}] is {length} of {width}; kv_indices there: "
                f"{blocks[list_index][: max(length, 0)].tolist()!s:.200}; {keys} keys in blocks of "
                f"{choice.block_k}",
                f"{way_out}; -1 stands for no block",
            )


def check_lists(captured: Mapping[str, Tensor]) -> None:
    """Checks that the lists of a layout have its live blocks.

    Raises:
        InputError: a list differs; the error names the first one.
    """
    layout = Layout(*(captured[name] for name in LAYOUT_NAMES))
    for live, counts, blocks, names in (
        (layout.live, layout.row_counts, layout.row_blocks, LAYOUT_NAMES[1:3]),
        (
            layout.live.transpose(2, 3),
            layout.column_counts,
            layout.column_blocks,
            LAYOUT_NAMES[3:5],
        ),
    ):
        width = blocks.shape[-1]
        listed = torch.arange(width, device=blocks.device) < counts[..., None]
        steps = blocks.diff(dim=-1).where(listed[..., 1:], 1)
        inside = ((blocks >= 0) & (blocks < width)) | ~listed
        wrong = [
            (names[0], counts != live.sum(-1)),
            (names[1], ~inside.all(-1) | (steps <= 0).any(-1)),
        ]
        if not any(bool(lines.any()) for _, lines in wrong):
            wrong.append((names[1], (dense_lists(counts, blocks, width) != live).any(-1)))
        for name, lines in wrong:
            if lines.any():
                line = tuple(lines.nonzero()[0].tolist())
                refuse(
                    f"{name} does not list the live blocks",
                    f"argument {name}",
                    f"at {line}: {captured[name][line].tolist()}; live there: "
                    f"{live[line].nonzero()[:, 0].tolist()}",
                    "layout=flashgen.Layout.of(live), which makes all five",
                )


def static_layout(
    signature: CallSignature, call: CheckedCall, device: torch.device
) -> dict[str, Tensor]:
    """The tensors of a block layout that is a function, by name; none for other specs.

    The function is evaluated once for each number of blocks, and for each batch and number of heads
    where it depends on them. The tensors are cached on each device.

    Raises:
        SpecError: the function raises an error or does not return a bool.
    """
    sparse = signature.static_layout
    if sparse is None or call.is_empty:
        return {}
    ends = call.q_offset + call.seq_q, call.k_offset + call.seq_k
    shape = sparse.shape(call.batch, call.heads, *ends)
    return dict(zip(LAYOUT_NAMES, _evaluated(sparse, *shape, device), strict=True))


@functools.lru_cache(maxsize=64)
def _evaluated(
    sparse: BlockLayoutFacts, batch: int, heads: int, rows: int, columns: int, device: torch.device
) -> Layout:
    table = bytearray(sparse.table(batch, heads, rows, columns))
    live = torch.frombuffer(table, dtype=torch.bool).view(batch, heads, rows, columns)
    return Layout.of(live.to(device))
