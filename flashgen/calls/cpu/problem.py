"""One call of the tiled algorithms: its sizes, tiles, mods and dropout, and its chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from flashgen.calls.cpu.chunks import OWNED_ROWS, CallSizes, SequenceRows, Workspace
from flashgen.calls.cpu.spec_programs import programs_of
from flashgen.kernels.planner import plan, plan_backward
from flashgen.shared.arch import DEFAULT_ARCH
from flashgen.shared.dropout import keep_scale
from flashgen.shared.dtypes import Number
from flashgen.shared.errors import PlanError
from flashgen.shared.signature import LAYOUT, LAYOUT_LISTS, heads_of
from flashgen.spec.analysis.tile_walk import TileAxis
from flashgen.spec.language.block_layout import TENSORS as LAYOUT_TENSORS
from flashgen.spec.language.signature import with_options
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor_elements import TensorSymbol

Tensor = torch.Tensor


def exp_(x: Tensor, power_of_2: bool = False) -> Tensor:
    """e to the power x, in place, for x <= 0 in exact arithmetic.

    Where the result would be denormal or 0, the library's exp takes up to a hundred times as long.
    Such results are replaced by a number about a thousand times the smallest normal one, which is
    negligible beside the 1 of the largest element of every row. Exact zeros are selected later.

    Args:
        power_of_2: whether x is in the unit of `Products.power_of_2`, with normal results or 0.
    """
    if power_of_2:
        return x.exp2_()
    limit = _EXP_LIMIT[x.dtype]
    return x.clamp_(-limit, limit).exp_()


LOG2_E = 1 / math.log(2)
_EXP_LIMIT = {torch.float32: 80.0, torch.float64: 700.0}

_SMALL_SCORE = 32.0
"""Where no score of a chunk is larger, float32 products of different orders of summation make
relative differences of P below 1e-5, and no exponential of a difference of scores is denormal."""

_LARGE_SCORE = 1024.0
"""Where a score of a chunk with 16-bit operands may be larger, float32 products of different orders
of summation make differences of P that their rounding does not hide."""

_FEW_SCORES = 1 << 14
"""Chunks of fewer scores take so little time that the largest score is not estimated."""


_FITTING = 256
"""A head dim at which every spec has a tile of `DEFAULT_ARCH`, for any dtype."""


MOST_SHARED = 1 << 19
"""Elements of masks that the chunks of a call share: 2 MiB."""


class Products(NamedTuple):
    """How the scores of a chunk are computed.

    Attributes:
        dtype: the dtype in which products of q and k are accumulated.
        power_of_2: whether scores and row maxima are multiplied by log2(e), because the library's
            exp2 takes a third of the time of its exp. The scores are small then.
    """

    dtype: torch.dtype
    power_of_2: bool


def real_of(q: Tensor) -> torch.dtype:
    """The dtype of scores, statistics and accumulators."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def array(tensor: Tensor) -> Any:
    """The elements of a tensor as NumPy has them: wide floats, or int64."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    dtype = wide if tensor.is_floating_point() else torch.int64
    return tensor.detach().to("cpu", dtype).numpy()


@lru_cache(maxsize=256)
def tiles_of(spec: AttentionSpec, *, backward: bool) -> tuple[int, int]:
    """block_q and block_k of the forward kernel, or of the backward kernel that makes dK and dV.

    The plan of `DEFAULT_ARCH` has them. The CPU has neither registers nor shared memory to fit: a
    spec whose head dims leave no tile there has the tiles of narrower heads, and one without a
    backward kernel has the forward tiles in both passes.
    """
    try:
        chosen = plan(spec, DEFAULT_ARCH)
    except PlanError:
        if max(spec.head_dim, spec.head_dim_v or 0) <= _FITTING:
            raise
        narrow = with_options(spec, head_dim=_FITTING, head_dim_v=_FITTING)
        return tiles_of(narrow, backward=backward)
    if backward:
        with suppress(PlanError):
            chosen = plan_backward(spec, DEFAULT_ARCH).key_plan
    return chosen.block_q, chosen.block_k


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
        block_q, block_k: rows and keys of a tile; the plan decides where None.
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
        device: the device of the operands.
        real: the dtype of scores, statistics and accumulators: float32, or float64 for float64
            operands.
        bits: the integer dtype of the same width.
        plain: whether a softmax alone reads scores: no score function and no sink.
        narrow: the operands' dtype where P and dS are rounded to it, else None.
        dropout_scale: factor on kept elements of P; None without dropout.
        first_head, heads: the number of the first query head, and the number of query heads, in
            the whole of which the call computes a part.
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
        self.device = q.device
        self.real = real_of(q)
        self.bits = torch.int64 if self.real == torch.float64 else torch.int32
        self.narrow = q.dtype if q.dtype.itemsize == 2 else None
        self.programs = programs_of(spec, self.real)
        first, self.entries = sequence.index_and_count or (0, q.shape[0])
        self.sparse = spec.block_sparse
        lengths = q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        self.sizes = CallSizes(*lengths, first, on_cpu=q.device.type == "cpu")
        self.scale = arguments.scale
        self.plain = self.programs.score is None and spec.sink is None and spec.is_softmax
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
        self.arguments = arguments
        self.spec = spec
        self.first_head, self.heads = heads_of(arguments.scalars, q.shape[1])
        self.masks: dict[tuple[int, int, int, int], Tensor] = {}
        self.room = 0
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
            shape = sparse.shape(self.entries, self.heads, *ends)
            table = bytearray(sparse.table(*shape))
            live = torch.frombuffer(table, dtype=torch.bool) if table else torch.empty(0).bool()
            live = live.view(shape).to(self.device)
        self.tensors[LAYOUT_TENSORS[0].symbol] = live
        return live

    @property
    def learned_sink(self) -> int | None:
        """The sink's index among learned tensors; None where its gradient is not needed."""
        names = [tensor.name for tensor in self.spec.tensors if tensor.grad]
        sink = self.spec.sink
        return None if sink is None or not sink.grad else names.index(sink.name)

    @cached_property
    def walked(self) -> tuple[tuple[TensorSymbol, Any], ...]:
        """The captured tensors on which the class of tiles depends, as NumPy arrays."""
        decisive = self.programs.decisive
        return tuple((symbol, array(x)) for symbol, x in self.tensors.items() if symbol in decisive)

    @property
    def is_empty(self) -> bool:
        """True when no score is computed, because a size is 0."""
        sizes = self.sizes
        return 0 in (sizes.batch, sizes.heads_q, sizes.seq_q, sizes.seq_k)

    def products(self, q: Tensor, k: Tensor) -> Products:
        """How the products of q and k [pairs, rows, head_dim] are computed.

        Both passes need the same scores, because P is exp(s' - LSE). In float32 the matrix
        library's order of summation depends on the shapes, and the difference that this makes
        grows with the scores and with the slope of the score function.
        """
        largest = math.inf
        may_be_plain = not self.programs.has_slope or self.narrow is not None
        if may_be_plain and q.shape[1] * k.shape[1] >= _FEW_SCORES:
            # Rows with a NaN have no other scores in either dtype.
            lengths = (
                torch.linalg.vector_norm(x, dim=-1, dtype=self.real).nan_to_num_(0.0, math.inf)
                for x in (q, k)
            )
            largest = self.scale * math.prod(float(x.amax()) for x in lengths)
        small = largest < _SMALL_SCORE and not self.programs.has_slope
        near = small or (self.narrow is not None and largest < _LARGE_SCORE)
        return Products(self.real if near else torch.float64, small and self.plain)

    def share_mask(self, tile: tuple[int, int, int, int], bits: Tensor) -> None:
        """Keeps the mask of a tile for the other chunks, within `MOST_SHARED` elements."""
        self.room -= bits.numel()
        if self.room >= 0:
            self.masks[tile] = bits

    def multiply(self, work: Workspace, s: Tensor, q: Tensor, k: Tensor, power_of_2: bool) -> None:
        """Writes scale * q k^T to ``s``.

        Args:
            q, k, power_of_2: as `products` says.
        """
        wide = s if s.dtype == q.dtype else work.wide.matrix("s", *s.shape)
        factor = self.scale * LOG2_E if power_of_2 else self.scale
        torch.baddbmm(wide, q, k.transpose(1, 2), beta=0, alpha=factor, out=wide)
        if wide is not s:
            s.copy_(wide)
