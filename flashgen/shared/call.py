"""The frozen values that carry a call from the API to the launch.

::

    Operands, CallOptions  --Call.from_arguments, check-->  CheckedCall  --bind-->  kernel arguments

The backward pass adds `OutputGradients`. Tests and tools also pass `LaunchOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.shared.dtypes import POSITION_LIMIT, Number
from flashgen.shared.signature import WHOLE, heads_of

if TYPE_CHECKING:
    from torch import Tensor


class Operands(NamedTuple):
    """The tensors that a forward call reads.

    Attributes:
        q: [batch, heads_q, seq_q, head_dim].
        k: [batch, heads_kv, seq_k, head_dim].
        v: [batch, heads_kv, seq_k, head_dim_v].
        captured: the captured tensors in the order of the signature, block layouts compressed.
        rng: int64 [2], seed and offset of dropout; None without dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: tuple[Tensor, ...] = ()
    rng: Tensor | None = None


class OutputGradients(NamedTuple):
    """The results of a forward call with their gradients.

    Attributes:
        out, dout: [batch, heads_q, seq_q, head_dim_v].
        lse, dlse: float32 [batch, heads_q, seq_q]; a dlse of None stands for zeros.
    """

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None


class Tangents(NamedTuple):
    """The tangents of the operands of a call, each like its operand; None where there is none.

    Attributes:
        captured: the tangents of learned tensors, in the order of the signature; () for none.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    captured: tuple[Tensor | None, ...] = ()


NO_TANGENTS = Tangents()


class ResultTangents(NamedTuple):
    """The tangents of the results of a forward call and of their gradients; None for zeros."""

    out: Tensor | None = None
    lse: Tensor | None = None
    dout: Tensor | None = None
    dlse: Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """The inputs of one call, forward, backward and in forward mode, for tools.

    Attributes:
        operands: q, k, v.
        gradients: the gradients of out and of lse, the second may be None.
        options: scalars, tensors, offsets, scale, dropout_p and rng, as for
            `flashgen.calls.ops.run_forward`.
        tangents: the tangents of the operands.
    """

    operands: tuple[Tensor, Tensor, Tensor]
    gradients: tuple[Tensor, Tensor | None]
    options: dict[str, Any]
    tangents: Tangents = NO_TANGENTS


class CallOptions(NamedTuple):
    """The arguments of a call that are not tensors. `flashgen.calls.ops.Attention` describes them.

    Attributes:
        q_offset, k_offset: ints; before `Call.from_arguments` of `calls.runtime.arguments.call`,
            tensors too.
        split_size: the keys of a split; 0: one thread block has all keys of a row; None: the plan
            chooses; `INVARIANT`: it chooses from the spec and the architecture alone.
        scalars: values of the run-time scalars, in the order of the signature.
        dropout_p: a number or a CPU tensor of one number.
    """

    scale: float | None = None
    q_offset: Any = 0
    k_offset: Any = 0
    backend: str | None = None
    arch: str | None = None
    deterministic: bool | None = None
    split_size: Any = None
    scalars: tuple[Any, ...] = ()
    dropout_p: Any = 0.0


DEFAULT_OPTIONS = CallOptions()

INVARIANT = -1
"""The split_size of batch-invariant calls, which is all that tells them from others: every call of
a spec on an architecture has the same splits and tiles then, and the CPU path sums in one order."""


@dataclass(frozen=True)
class CheckedCall:
    """The sizes and numbers of one call, checked.

    Attributes:
        batch: the number of batch entries. Where sequences are packed, batch is their number, and
            seq_q and seq_k are the totals of all sequences.
        scalars: values of the run-time scalars, by name.
        splits: the splits in which a batch entry can have keys, or the runs of them that are parts;
            1 where keys are not split.
        run: the neighbouring splits of a part.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int
    q_offset: int
    k_offset: int
    scale: float
    scalars: Mapping[str, Number]
    dropout_p: float = 0.0
    splits: int = 1
    run: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """batch, heads_q, heads_kv, seq_q and seq_k."""
        return self.batch, self.heads_q, self.heads_kv, self.seq_q, self.seq_k

    @property
    def named_sizes(self) -> dict[str, int]:
        """The sizes by the names that they have in mods."""
        return {
            "batch": self.batch,
            "heads": self.heads_q,
            "seq_q": self.seq_q,
            "seq_k": self.seq_k,
        }

    def in_runs(self, run: int) -> CheckedCall:
        """The call whose parts are runs of so many neighbouring splits."""
        return replace(self, splits=-(-self.splits // run), run=run)

    @property
    def group(self) -> int:
        """The query heads that share a key head; all query heads where there is no key head."""
        return self.heads_q // max(self.heads_kv, 1)

    def queries_of_each(self, *, packed: bool) -> int:
        """The most queries of a sequence. Packed queries are known to be few in each sequence only
        where there are no more queries than sequences."""
        return 1 if packed and self.seq_q <= self.batch else self.seq_q

    @property
    def query_rows(self) -> int:
        """The query rows of the heads that share a key head."""
        return self.group * self.seq_q

    @property
    def first_head(self) -> int:
        """The number of the first query head, counted in the whole."""
        return heads_of(self.scalars, self.heads_q)[0]

    @property
    def heads(self) -> int:
        """The query heads of the whole, where the call computes a part of one, else of the call."""
        return heads_of(self.scalars, self.heads_q)[1]

    @property
    def is_empty(self) -> bool:
        """True when there is no score to compute, because a size is 0."""
        return 0 in (self.batch, self.heads_q, self.seq_q, self.seq_k)


@dataclass(frozen=True)
class LaunchOptions:
    """Options of planning and launching kernels, for tests, tools and benchmarks.

    Attributes:
        sram: shared memory per block in bytes to plan for, instead of the architecture's.
        tiles: `kernels.planner.Tile` by kernel name, instead of the planner's and of tuned tiles.
        blocks: blocks of a persistent kernel, instead of the plan's number.
        check_memory: whether the emulator checks memory accesses and races.
        order_seed: seed of the order in which the emulator runs blocks and warps; None for that of
            the backend's name ("emulator:7"), else FLASHGEN_EMULATOR_ORDER, else for the order of
            their numbers.
    """

    sram: int | None = None
    tiles: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    blocks: int | None = None
    check_memory: bool = True
    order_seed: int | None = None

    @property
    def plans_itself(self) -> bool:
        """True where the planner's tiles are used, unless tuned tiles are stored."""
        return self.sram is None and not self.tiles


DEFAULT_LAUNCH = LaunchOptions()


# Threads compute positions past the end of their tile, which they do not use.
_PAST_THE_END = 1024


Limits = tuple[int, int]


class CallRanges(NamedTuple):
    """The least and the greatest value in a call of each name that expressions use, in order."""

    names: tuple[str, ...]
    ends: tuple[Limits, ...]

    @staticmethod
    def from_call(
        sizes: Mapping[str, int],
        offsets: Mapping[str, int | None],
        scalars: Mapping[str, int | float],
        sequences_vary: bool = False,
    ) -> CallRanges:
        """
        Args:
            sizes: batch, heads, seq_q, seq_k.
            offsets: q_offset and k_offset; None where only the device knows them.
            sequences_vary: whether sequences have lengths of their own, up to these.
        """
        limits: dict[str, Limits] = {name: (size, size) for name, size in sizes.items()}
        limits |= {"b": (0, sizes["batch"] - 1), "h": (0, sizes["heads"] - 1)}
        for axis in ("q", "k"):
            offset, length = offsets[f"{axis}_offset"], sizes[f"seq_{axis}"]
            most = -POSITION_LIMIT, POSITION_LIMIT
            first, last = most if offset is None else (offset, offset)
            limits[f"{axis}_offset"] = first, last
            ends = first - _PAST_THE_END, last + length + _PAST_THE_END
            limits |= dict.fromkeys((axis, f"{axis}_lo", f"{axis}_hi"), ends)
            if sequences_vary:
                limits[f"seq_{axis}"] = 0, length
        limits |= {n: (int(x), int(x)) for n, x in scalars.items() if not isinstance(x, float)}
        if sequences_vary and WHOLE[3] in limits:
            limits[WHOLE[3]] = limits["seq_k"]
        return CallRanges(tuple(limits), tuple(limits.values()))

    def rounded(self) -> CallRanges:
        """Wider ranges with powers of two as their ends, which many calls share."""
        return CallRanges(self.names, tuple((_below(lo), -_below(-hi)) for lo, hi in self.ends))


def _below(number: int) -> int:
    """A number that is not larger and of the same sign: 1, 0 or the opposite of a power of two."""
    return -(1 << (-number).bit_length()) if number < 0 else min(number, 1)
