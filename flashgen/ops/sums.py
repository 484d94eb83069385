"""What kernels add the gradients of captured tensors to, and how gradients are made of it."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence

import sympy
import torch

from flashgen import expr as fx
from flashgen.analysis import kind_of_sum
from flashgen.expr import Element
from flashgen.ops.checks import Problem
from flashgen.pipeline import Build
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor

SUM_BITS = 62
"""The greatest magnitude of an exact sum is at most 2^62, so that its sign fits too."""

_EXPONENT_BITS = 23  # lie above the fraction of a float32
_NO_NUMBER = 255  # the exponent of infinities and NaN
_BIAS = 127
_WIDE_FRACTION, _WIDE_BIAS = 52, 1023  # the same of a float64


class Sums(abc.ABC):
    """The gradients of learned tensors: what kernels add up, and what is added to that.

    Attributes:
        pointers: by the names that kernels have for them.
    """

    def __init__(self, spec: AttentionSpec, captured: Mapping[str, Tensor]) -> None:
        self.pointers: dict[str, Tensor | None] = {}
        self._of = _learned(spec, captured)
        self._more: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds a part of a gradient that no kernel adds up, float32 of the tensor's shape."""
        self._more[name] = gradient

    def gradients(self) -> tuple[Tensor, ...]:
        """In the shapes and dtypes of the learned tensors, in the spec's order."""
        return tuple(self._gradient(name, given.dtype) for name, given in self._of.items())

    @abc.abstractmethod
    def _gradient(self, name: str, dtype: torch.dtype) -> Tensor:
        """That of one learned tensor, in the dtype given."""


class FloatSums(Sums):
    """float32 sums, to which kernels add in the order in which their blocks happen to run."""

    def __init__(self, spec: AttentionSpec, captured: Mapping[str, Tensor]) -> None:
        super().__init__(spec, captured)
        self._totals = _zeros(self._of, torch.float32)
        self.pointers |= {f"dc_{name}": total for name, total in self._totals.items()}

    def _gradient(self, name: str, dtype: torch.dtype) -> Tensor:
        total, more = self._totals[name], self._more.get(name)
        return (total if more is None else total + more).to(dtype)


class ExactSums(Sums):
    """64-bit sums of whole numbers of a unit, which are the same in any order.

    The unit of a tensor is a power of 2, and follows from the greatest contribution and from how
    many may meet in one element. A contribution that is infinite or NaN has no such unit: the
    whole gradient of that tensor is NaN then.
    """

    def __init__(self, spec: AttentionSpec, captured: Mapping[str, Tensor]) -> None:
        super().__init__(spec, captured)
        self._totals = _zeros(self._of, torch.int64)
        self._greatest = {
            name: torch.zeros((), dtype=torch.int32, device=given.device)
            for name, given in self._of.items()
        }
        self._units: dict[str, Tensor] = {}
        for name in self._of:  # no unit is known yet
            self.pointers |= {
                f"dc_{name}": self._totals[name],
                f"greatest_{name}": self._greatest[name],
                f"root_{name}": None,
            }

    def measured(self, meetings: Mapping[str, int]) -> dict[str, Tensor]:
        """Makes units of the greatest contributions; the pointers that tell kernels of them.

        Args:
            meetings: for each tensor that is added to, how many contributions may meet in one
                element.
        """
        roots = {}
        for name, most in meetings.items():
            root, self._units[name] = unit_of(self._greatest[name], most)
            roots[f"root_{name}"] = root
        return roots

    def _gradient(self, name: str, dtype: torch.dtype) -> Tensor:
        total, more, unit = self._totals[name], self._more.get(name), self._units.get(name)
        if more is not None:
            return (more if unit is None else total * unit + more).to(dtype)
        if unit is None:  # nothing was added to it
            return total.to(dtype)
        # A product in float64, rounded as it is written.
        return torch.mul(total, unit, out=torch.empty_like(total, dtype=dtype))


def unit_of(greatest: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The unit of exact sums, and the root of how many of them 1 has: both powers of 2.

    A contribution is below 2^(e - 126), where e is the exponent's bits in the greatest one. With
    n = 62 - log2(most), rounded down, it may become a whole number of up to 2^n units, so that
    ``most`` of them stay within 2^62. The root is a float32 for denormal contributions too.

    Args:
        greatest: int32, the bits of a float32 that is not negative.
        most: how many contributions meet in one sum, at most.

    Returns:
        The root in float32, and the unit in float64; NaN for a greatest that is no finite number.
        No value is read on the host.
    """
    exponent = greatest >> _EXPONENT_BITS
    bits = SUM_BITS - (most - 1).bit_length()
    half = (bits + _BIAS - 1 - exponent) >> 1
    root = ((half + _BIAS) << _EXPONENT_BITS).view(torch.float32)
    unit = ((_WIDE_BIAS - 2 * half).to(torch.int64) << _WIDE_FRACTION).view(torch.float64)
    return root, torch.where(exponent < _NO_NUMBER, unit, math.nan)


def meetings_of(
    build: Build, problem: Problem, captured: Mapping[str, Tensor], *, packed: bool
) -> dict[str, int]:
    """For each tensor that the kernel adds to, how many contributions may meet in one element.

    Args:
        packed: the problem's batch entries are sequences that share its lengths.
    """
    most: dict[str, int] = {}
    for element, _ in build.analysis.score.learned:
        name = element.tensor.name
        here = _meetings(element, build, problem, captured[name].shape, packed)
        most[name] = most.get(name, 0) + here
    return most


def _meetings(
    element: Element, build: Build, problem: Problem, shape: Sequence[int], packed: bool
) -> int:
    """Of the contributions that go where the score reads this element, by position and kind."""
    plan, p = build.plan, problem
    tiles = p.seq_q // plan.block_q + p.batch if packed else -(-p.seq_q // plan.block_q)
    warps = tiles * plan.warps
    by_rows, by_columns = {
        "element": (p.seq_q, p.seq_k),
        "row": (p.seq_q, 1),
        "column": (warps, p.seq_k),
        "block": (warps, 1),
    }[kind_of_sum(element)]
    apart = _told_apart(element, problem, shape)
    # Over all sequences rows are no more than seq_q, and keys than seq_k.
    along = fx.Q not in apart or (fx.K not in apart and by_columns > 1)
    entries = 1 if packed and along else p.batch
    counts = ((fx.B, entries), (fx.H, p.heads_q), (fx.Q, by_rows), (fx.K, by_columns))
    return math.prod(count for symbol, count in counts if symbol not in apart)


def _told_apart(element: Element, problem: Problem, shape: Sequence[int]) -> set[sympy.Basic]:
    """The positions that are an index by themselves, and lie inside the tensor: none meet there."""
    p = problem
    first_and_count = {
        fx.B: (0, p.batch),
        fx.H: (0, p.heads_q),
        fx.Q: (p.q_offset, p.seq_q),
        fx.K: (p.k_offset, p.seq_k),
    }
    ranges = {symbol: (first, first + count) for symbol, (first, count) in first_and_count.items()}
    return {
        index
        for index, size in zip(element.indices, shape, strict=True)
        if index in ranges and ranges[index][0] >= 0 and ranges[index][1] <= size
    }


def _learned(spec: AttentionSpec, captured: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {tensor.name: captured[tensor.name] for tensor in spec.tensors if tensor.grad}


def _zeros(of: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Contiguous ones, of the shapes of ``of``."""
    return {
        name: torch.zeros(given.shape, dtype=dtype, device=given.device)
        for name, given in of.items()
    }
