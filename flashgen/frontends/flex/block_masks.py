"""The block-sparse layout that a torch BlockMask adds to its mask_mod.

torch's kernels apply the mask_mod in partial blocks, compute full blocks without it, and skip all
other blocks. Blocks that follow from the mask_mod need no layout; blocks that leave out positions
that the mask_mod keeps become a block-sparse layout, which kernels apply together with the mask.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch

from flashgen.calls.cpu.problem import array
from flashgen.calls.ops import Layout
from flashgen.calls.runtime.arguments.tensors import has_values
from flashgen.calls.runtime.block_layouts import dense_blocks
from flashgen.frontends.flex.checks import LARGE_BLOCK, FlexRuntimeError, FlexUnsupported
from flashgen.frontends.flex.graph_capture import captures_a_graph
from flashgen.frontends.flex.operation_results import alone
from flashgen.frontends.flex.recorded_mods import Record
from flashgen.frontends.flex.traced_mods import TracedMods
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import MaskAnalysis, analyse_mask
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.symbols import (
    BATCH,
    HEADS,
    K_HI,
    K_LO,
    Q_HI,
    Q_LO,
    SEQ_K,
    SEQ_Q,
    B,
    H,
    K,
    Q,
)

Tensor = torch.Tensor
Array = np.ndarray[Any, np.dtype[Any]]

_ELEMENTS = 1 << 22
"""Elements of a mask that are evaluated at once."""


@dataclass(frozen=True)
class BlockMaskLayout:
    """The block-sparse layout that a BlockMask adds to its mask_mod."""

    sparse: BlockSparse
    layout: Layout


LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")

_MOST_COMPARISONS = 8
"""The number of comparisons that are kept of a BlockMask."""


class _Seen:
    """A tensor as it was when its elements were read.

    Elements on the CPU are compared with a copy, so that no change of them is missed. On a GPU that
    would take a synchronisation: the object, its memory and its version are compared, and elements
    are read again where torch counts no versions.
    """

    def __init__(self, tensor: Tensor) -> None:
        is_on_cpu = tensor.device.type == "cpu"
        self.object = weakref.ref(tensor)
        self.stamp = None if is_on_cpu else _stamp(tensor)
        self.elements = _elements(tensor).clone() if is_on_cpu else None

    def is_same(self, tensor: Tensor) -> bool:
        if self.elements is not None:
            if tensor.device.type != "cpu":
                return False
            same = self.elements.dtype == tensor.dtype and self.elements.shape == tensor.shape
            return same and torch.equal(_bits(self.elements), _bits(_elements(tensor)))
        return self.object() is tensor and self.stamp is not None and self.stamp == _stamp(tensor)


def _stamp(tensor: Tensor) -> tuple[int, int] | None:
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def _elements(tensor: Tensor) -> Tensor:
    """The tensor without the transforms of torch.func around it.

    Raises:
        FlexUnsupported: torch.vmap has made a batch of it, whose entries may differ in the blocks.
    """
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if torch._C._functorch.is_batchedtensor(tensor):
        raise FlexUnsupported(
            "a BlockMask under torch.vmap reads a tensor over which vmap goes",
            where="argument block_mask",
            numbers=f"a tensor of shape {tuple(tensor.shape)} for each entry",
            way_out="the condition in the score_mod: torch.where(condition, score, -math.inf)",
        )
    return tensor.detach()


def _bits(tensor: Tensor) -> Tensor:
    """Integers in place of floats, of which a NaN is not equal to itself."""
    if not tensor.is_floating_point():
        return tensor
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


@dataclass(frozen=True)
class _Comparison:
    """The layout that a BlockMask needs beside its mask, and all that determines it."""

    traced: TracedMods
    numbers: tuple[object, ...]
    seen: tuple[_Seen | None, ...]
    layout: BlockMaskLayout | None


_comparisons: weakref.WeakKeyDictionary[Any, list[_Comparison]] = weakref.WeakKeyDictionary()


def followed(block_mask: Any) -> BlockMaskLayout:
    """The layout of all blocks of a BlockMask, beside whatever mask."""
    partial, full = dense_blocks(block_mask)
    block_q, block_k = map(int, block_mask.BLOCK_SIZE)
    return BlockMaskLayout(BlockSparse(None, block_q, block_k), Layout.of(partial | full))


def layout_beside_mask(
    block_mask: Any,
    traced: TracedMods,
    record: Record,
    sizes: tuple[int, int, int, int],
) -> BlockMaskLayout | None:
    """The block-sparse layout to apply beside the mask; None where the blocks follow from the mask.

    The comparison is made anew whenever the lists of the BlockMask, or tensors and numbers of its
    mask_mod, have changed. While torch.export traces, and on meta tensors, they have no elements,
    and the blocks are followed without a comparison.

    Args:
        block_mask: a BlockMask that has been checked and has blocks.
        traced, record: its mask_mod, traced, and the record of this call.
        sizes: batch, heads, seq_q, seq_k of the call.

    Raises:
        FlexUnsupported: a full block has positions that the mask_mod masks.
        FlexRuntimeError: the blocks would have to be read while a CUDA graph is captured.
    """
    lists = [getattr(block_mask, name) for name in LISTS]
    names = sorted(symbol.name for symbol in traced.mask_mod_condition.free_symbols)
    captured = {n: traced.tensors[n].tensor_in(record) for n in names if n in traced.tensors}
    by_name = {n: record.numbers[traced.numbers[n]] for n in names if n in traced.numbers}
    for name in names:
        if name in traced.sizes:
            location, dim = traced.sizes[name]
            by_name[name] = location.tensor_in(record).shape[dim]
    numbers = sizes, tuple(block_mask.BLOCK_SIZE), tuple(block_mask.shape), *by_name.values()
    tensors = [*lists, *captured.values()]
    if not all(has_values(tensor) for tensor in tensors if tensor is not None):
        return followed(block_mask)
    return _compared(block_mask, traced, tensors, {**captured, **by_name}, numbers)


@alone()
def _compared(
    block_mask: Any,
    traced: TracedMods,
    tensors: list[Any],
    values: Mapping[str, Any],
    numbers: tuple[Any, ...],
) -> BlockMaskLayout | None:
    lists = tensors[: len(LISTS)]
    comparisons = _comparisons.setdefault(block_mask, [])
    for comparison in comparisons:
        if comparison.traced is traced and comparison.numbers == numbers:
            pairs = zip(comparison.seen, tensors, strict=True)
            if all(s is t if s is None or t is None else s.is_same(t) for s, t in pairs):
                return comparison.layout
    if captures_a_graph(lists[0].device):
        raise FlexRuntimeError(
            "the blocks of a BlockMask cannot be read while a CUDA graph is captured",
            where="argument block_mask",
            numbers=f"shape {tuple(block_mask.shape)}, on {lists[0].device}",
            way_out="one call with this BlockMask before the capture",
        )
    plain = copy.copy(block_mask)
    for name, tensor in zip(LISTS, lists, strict=True):
        setattr(plain, name, None if tensor is None else _elements(tensor))
    layout = _needed_layout(plain, traced.mask_mod_condition, values, numbers[0])
    seen = tuple(None if tensor is None else _Seen(tensor) for tensor in tensors)
    comparisons.insert(0, _Comparison(traced, numbers, seen, layout))
    del comparisons[_MOST_COMPARISONS:]
    return layout


def has_blocks(block_mask: Any) -> bool:
    return block_mask is not None and tuple(block_mask.BLOCK_SIZE) != (LARGE_BLOCK, LARGE_BLOCK)


def _needed_layout(
    block_mask: Any,
    mask: sympy.Basic,
    captured: Mapping[str, Any],
    sizes: tuple[int, int, int, int],
) -> BlockMaskLayout | None:
    partial, full = dense_blocks(block_mask)
    live = partial | full
    if mask == sympy.true:
        leaves_out = not bool(live.all())
    else:
        symbols = (symbol for symbol in mask.free_symbols if symbol.name in captured)
        read = {symbol: _numbers(captured[symbol.name]) for symbol in symbols}
        grid = _Grid(block_mask, read, sizes)
        leaves_out = grid.leaves_out(mask, live.cpu().numpy(), full.cpu().numpy())
    if not leaves_out:
        return None
    return BlockMaskLayout(BlockSparse(None, *block_mask.BLOCK_SIZE), Layout.of(live))


class _Grid:
    """Evaluates a mask on the blocks of one BlockMask."""

    def __init__(
        self,
        block_mask: Any,
        read: Mapping[sympy.Symbol, Any],
        sizes: tuple[int, int, int, int],
    ) -> None:
        self.block_q, self.block_k = block_mask.BLOCK_SIZE
        self.batch, self.heads, self.seq_q, self.seq_k = sizes
        self.shown = f"shape {tuple(block_mask.shape)}, blocks of {(self.block_q, self.block_k)}"
        names = zip((BATCH, HEADS, SEQ_Q, SEQ_K), sizes, strict=True)
        self.env = {**{symbol: np.int64(size) for symbol, size in names}, **read}

    def leaves_out(self, mask: sympy.Basic, live: Array, full: Array) -> bool:
        """Whether a block that is not live may contain a position that the mask keeps.

        Args:
            live, full: bool [batch or 1, heads or 1, rows, columns].

        Raises:
            FlexUnsupported: a full block has positions that the mask masks.
        """
        analysis = _analysed(mask)
        rows, columns = live.shape[2:]
        if {B, H} & mask.free_symbols or live.shape[:2] != (1, 1):
            shape = (self.batch, self.heads, rows, columns)
            live, full = np.broadcast_to(live, shape), np.broadcast_to(full, shape)
        b, h = np.divmod(np.arange(live.shape[0] * live.shape[1])[:, None], live.shape[1])
        live, full = (blocks.reshape(-1, rows, columns) for blocks in (live, full))
        k_lo = np.arange(0, columns * self.block_k, self.block_k)
        corners = {B: b, H: h, K_LO: k_lo, K_HI: np.minimum(k_lo + self.block_k, self.seq_k) - 1}
        leaves_out, unclear = False, []
        with np.errstate(all="ignore"):
            for i in range(rows):
                q_lo = i * self.block_q
                q_hi = min(q_lo + self.block_q, self.seq_q) - 1
                values = {**self.env, **corners, Q_LO: np.int64(q_lo), Q_HI: np.int64(q_hi)}
                leaves_out |= bool((~live[:, i] & evaluate(analysis.may, values)).any())
                must = evaluate(analysis.must, values)
                lines, block_columns = np.nonzero(full[:, i] & np.logical_not(must))
                unclear += [np.stack([lines, np.full_like(lines, i), block_columns])]
            self._check_full(mask, np.concatenate(unclear, axis=1), b[:, 0], h[:, 0])
        return leaves_out

    def _check_full(self, mask: sympy.Basic, blocks: Array, b: Array, h: Array) -> None:
        """Evaluates every element of the full blocks that the analysis cannot prove to be full."""
        step = max(1, _ELEMENTS // (self.block_q * self.block_k))
        for start in range(0, blocks.shape[1], step):
            line, i, j = blocks[:, start : start + step, None, None]
            q = i * self.block_q + np.arange(self.block_q)[:, None]
            k = j * self.block_k + np.arange(self.block_k)
            keeps = evaluate(mask, {**self.env, B: b[line], H: h[line], Q: q, K: k})
            wrong = ~(keeps | (q >= self.seq_q) | (k >= self.seq_k))
            if wrong.any():
                first = int(wrong.any((1, 2)).argmax())
                raise FlexUnsupported(
                    "a full block of the BlockMask has positions that its mask_mod masks",
                    where="argument block_mask",
                    numbers=f"{self.shown}; block ({i[first].item()}, {j[first].item()}), "
                    f"{int(wrong[first].sum()):,} positions",
                    way_out="kv_num_blocks and kv_indices for blocks under the mask_mod, or a "
                    "mask_mod that is true in full blocks",
                )


@functools.lru_cache(maxsize=256)
def _analysed(mask: sympy.Basic) -> MaskAnalysis:
    return analyse_mask(mask)


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return array(_elements(value))
    return np.float64(value) if isinstance(value, float) else np.int64(value)
