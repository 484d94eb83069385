"""Block-sparse layouts as tensors: compressed once for a forward and a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flashgen.expr import POSITION_LIMIT
from flashgen.ops.numbers import refuse
from flashgen.sparse import COMPRESSED, LAYOUT, NAMES, BlockSparse
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from flashgen.ops.checks import Problem

Tensor = torch.Tensor

_AXES = "[batch or 1, heads or 1, row blocks, column blocks]"


class Layout(NamedTuple):
    """A block-sparse layout, compressed: what `of` makes of the live blocks, for many calls.

    Attributes:
        live: bool [batch or 1, heads or 1, rows, columns], of blocks.
        row_counts: int32 [batch or 1, heads or 1, rows], live blocks of each row.
        row_blocks: int32 [batch or 1, heads or 1, rows, columns], the columns of these blocks in
            ascending order, then the others.
        column_counts, column_blocks: the same of each column of blocks.
    """

    live: Tensor
    row_counts: Tensor
    row_blocks: Tensor
    column_counts: Tensor
    column_blocks: Tensor

    @staticmethod
    def of(live: Tensor) -> Layout:
        """Compressed on the device of ``live``, without waiting for it.

        Args:
            live: bool [batch or 1, heads or 1, rows, columns]; rows and columns of blocks, counted
                from global position 0.

        Raises:
            InputError: it is no such tensor.
        """
        _check_live(live)
        return Layout(live, *_listed(live), *_listed(live.transpose(2, 3)))


def _listed(live: Tensor) -> tuple[Tensor, Tensor]:
    counts = live.sum(-1, dtype=torch.int32)
    # A stable sort keeps the order among equals.
    return counts, live.logical_not().to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)


def _check_live(live: object) -> None:
    if not isinstance(live, Tensor):
        refuse(
            "layout is none of those things that a layout can be",
            "argument layout",
            f"given a {type(live).__name__}; expected a bool tensor {_AXES}, "
            "a flashgen.Layout or a torch BlockMask",
            "layout=live, true for each block that is computed",
        )
    if live.layout != torch.strided or live.is_nested:
        refuse(
            "layout is not an ordinary dense tensor",
            "argument layout",
            f"layout {live.layout}, {live.dtype}",
            "layout.to_dense()",
        )
    if live.dtype != torch.bool or live.dim() != 4:
        refuse(
            "layout does not say of each block whether it is live",
            "argument layout",
            f"shape {tuple(live.shape)}, {live.dtype}; expected torch.bool, {_AXES}",
            "live[None, None] for a layout that all heads share, live.bool() for one of numbers",
        )


def with_layout(spec: AttentionSpec, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """``given`` with the tensors of a compressed layout where the call gives a layout.

    Args:
        given: values of captures by name. A layout may be a bool tensor, a `Layout` or a torch
            BlockMask with the blocks of the spec, of which the partial and the full ones are live.

    Raises:
        InputError: what is given as the layout is none of these.
    """
    sparse = spec.block_sparse
    if sparse is None or sparse.is_static or LAYOUT not in given:
        return given
    if any(name in given for name in COMPRESSED):
        return given  # all five, as the operator itself takes them
    value = given[LAYOUT]
    if hasattr(value, "kv_num_blocks"):
        value = blocks_of(sparse, value)
    made = value if isinstance(value, Layout) else Layout.of(value)
    return {**given, **dict(zip(NAMES, made, strict=True))}


def blocks_of(sparse: BlockSparse, block_mask: Any) -> Tensor:
    """The partial and the full blocks of a torch BlockMask, as live ones.

    Raises:
        InputError: its blocks are of another size.
    """
    size = sparse.block_q, sparse.block_k
    if tuple(block_mask.BLOCK_SIZE) != size:
        refuse(
            "the BlockMask has blocks of another size than the spec",
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
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    if block_mask.full_kv_num_blocks is None:
        return partial, torch.zeros_like(partial)
    return partial, _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)


def _dense(counts: Tensor, blocks: Tensor, columns: int) -> Tensor:
    """The blocks of lists as bools: the first so many of each line of ``blocks``."""
    listed = torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None]
    # What is not listed goes to a column more.
    places = torch.where(listed, blocks, columns).long()
    live = places.new_zeros((*places.shape[:-1], columns + 1), dtype=torch.bool)
    return live.scatter(-1, places, True)[..., :columns]


def check_layout(
    spec: AttentionSpec, captured: Sequence[Tensor], lengths: tuple[int, int], ends: tuple[int, int]
) -> None:
    """What a layout of the call's own needs beyond the dtypes and dimensions of its tensors.

    Args:
        captured: for each of spec.tensors, checked for these.
        lengths, ends: of queries and keys: how many, and one beyond the last global position.

    Raises:
        InputError: too few or too many blocks, or five tensors that are not of one layout.
    """
    sparse = spec.block_sparse
    if sparse is None or sparse.is_static:
        return
    layout = Layout(*captured[-len(NAMES) :])
    blocks = tuple(layout.live.shape[2:])
    for what, size, count, length, end in zip(
        ("queries", "keys"), (sparse.block_q, sparse.block_k), blocks, lengths, ends, strict=True
    ):
        needed, most = -(-end // size), -(-POSITION_LIMIT // size)
        if length and not needed <= count <= most:
            few = count < needed
            refuse(
                f"the layout has too {'few' if few else 'many'} blocks of {what}",
                "argument layout",
                f"shape {tuple(layout.live.shape)}; the {what} end at {end:,}, in blocks of "
                f"{size}: {f'at least {needed:,}' if few else f'at most {most:,}'}",
                "a block for every position up to the last one, those before q_offset and k_offset "
                "included"
                if few
                else "only the blocks up to the last position",
            )
    lines, (rows, columns) = tuple(layout.live.shape[:2]), blocks
    shapes = ((rows, columns), (rows,), (rows, columns), (columns,), (columns, rows))
    for name, tensor, shape in zip(NAMES, layout, shapes, strict=True):
        if tuple(tensor.shape) != (*lines, *shape):
            refuse(
                f"{name} is not of the same layout as the live blocks",
                f"argument {name}",
                f"shape {tuple(tensor.shape)}; layout {tuple(layout.live.shape)}, so expected "
                f"{(*lines, *shape)}",
                "layout=flashgen.Layout.of(live), which makes all five",
            )


def check_lists(captured: Mapping[str, Tensor]) -> None:
    """That the lists of a layout are those of its live blocks.

    Raises:
        InputError: other lists; it names the first of them.
    """
    layout = Layout(*(captured[name] for name in NAMES))
    for live, counts, blocks, names in (
        (layout.live, layout.row_counts, layout.row_blocks, NAMES[1:3]),
        (layout.live.transpose(2, 3), layout.column_counts, layout.column_blocks, NAMES[3:5]),
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
            wrong.append((names[1], (_dense(counts, blocks, width) != live).any(-1)))
        for name, lines in wrong:
            if lines.any():
                place = tuple(lines.nonzero()[0].tolist())
                refuse(
                    f"{name} is not of the live blocks",
                    f"argument {name}",
                    f"at {place}: {captured[name][place].tolist()}; live there: "
                    f"{live[place].nonzero()[:, 0].tolist()}",
                    "layout=flashgen.Layout.of(live), which makes all five",
                )


def static_layout(spec: AttentionSpec, problem: Problem, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a layout that is a function, by name; none for other specs.

    It is evaluated once for each number of blocks, and for each batch and number of heads where it
    depends on these, and kept on each device.

    Raises:
        SpecError: the function does not say of each block whether it is live.
    """
    sparse = spec.block_sparse
    if sparse is None or not sparse.is_static or problem.is_empty:
        return {}
    ends = problem.q_offset + problem.seq_q, problem.k_offset + problem.seq_k
    shape = sparse.shape(problem.batch, problem.heads_q, *ends)
    return dict(zip(NAMES, _evaluated(sparse, *shape, device), strict=True))


@functools.lru_cache(maxsize=64)
def _evaluated(
    sparse: BlockSparse, batch: int, heads: int, rows: int, columns: int, device: torch.device
) -> Layout:
    table = bytearray(sparse.table(batch, heads, rows, columns))
    live = torch.frombuffer(table, dtype=torch.bool).view(batch, heads, rows, columns)
    return Layout.of(live.to(device))
