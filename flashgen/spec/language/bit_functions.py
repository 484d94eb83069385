"""Operations on the bits of integers, in two's complement, as sympy functions.

``x << n`` and ``x >> n`` by a constant are a product and a floor division, and ``x & (2**n - 1)``
is a remainder, which the analysis of masks understands better.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import sympy

from flashgen.shared.random_numbers import BITS, random_bits
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod

Limits = tuple[int, int]


class BitFunction(sympy.Function):  # type: ignore[misc]
    """A function of integers whose value is an integer; its derivative is 0.

    Attributes:
        compute: the value for integers of Python, and for arrays and tensors of 64-bit integers.
    """

    integer_closed = True
    compute: ClassVar[Callable[..., Any]]

    def _eval_is_integer(self) -> bool:
        return True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.S.Zero

    def limits(self, *parts: Limits) -> Limits:
        """The least and the greatest value, from the limits of the arguments."""
        least = min(lo for lo, _ in parts)
        most = max(max(~lo, hi) for lo, hi in parts)
        above = (1 << most.bit_length()) - 1
        return (0 if least >= 0 else -above - 1), above


class _Commutative(BitFunction):
    nargs = (2,)

    @classmethod
    def eval(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(cls.compute(int(a), int(b)))
        if a.is_Integer or (not b.is_Integer and [a, b] != list(sympy.ordered((a, b)))):
            return cls(b, a)
        return cls.simpler(a, b)

    @classmethod
    def simpler(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return a if b == 0 else None


class BitAnd(_Commutative):
    """``a & b``"""

    compute = staticmethod(operator.and_)

    @classmethod
    def simpler(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        if a == b or b == -1:
            return a
        if b.is_Integer and b >= 0:
            mask = int(b)
            if mask == 0:
                return sympy.S.Zero
            low = (mask & -mask).bit_length() - 1
            ones = (mask >> low) + 1
            if ones & (ones - 1) == 0:  # one run of ones
                return FloorMod(FloorDiv(a, 2**low), ones) * 2**low
        return None

    def limits(self, *parts: Limits) -> Limits:
        positive = [hi for lo, hi in parts if lo >= 0]
        return (0, min(positive)) if positive else super().limits(*parts)


class BitOr(_Commutative):
    """``a | b``"""

    compute = staticmethod(operator.or_)

    @classmethod
    def simpler(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return a if b == 0 or a == b else None


class BitXor(_Commutative):
    """``a ^ b``"""

    compute = staticmethod(operator.xor)

    @classmethod
    def simpler(cls, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        return sympy.S.Zero if a == b else a if b == 0 else None


class _Shift(BitFunction):
    nargs = (2,)

    @classmethod
    def farthest(cls, x: Limits) -> int:
        """The largest amount for an x within limits; greater ones count as this one."""
        raise NotImplementedError

    def amounts(self, x: Limits, bounds: Limits) -> Limits:
        """The least and the greatest amount: the bounds that intervals give may be wider."""
        least, most = (min(max(bound, 0), self.farthest(x)) for bound in bounds)
        return least, most


class ShiftLeft(_Shift):
    """``x << n`` for n from 0 to 31, or up to 60 where 61 bits hold the result: ``x * 2**n``"""

    compute = staticmethod(operator.lshift)

    @classmethod
    def farthest(cls, x: Limits) -> int:
        return max(31, 61 - max(bound.bit_length() for bound in x))

    @classmethod
    def eval(cls, x: sympy.Expr, n: sympy.Expr) -> sympy.Expr | None:
        return x * 2**n if n.is_Integer else None

    def limits(self, *parts: Limits) -> Limits:
        (lo, hi), (_, most) = parts[0], self.amounts(*parts)
        return min(lo, lo << most), max(hi, hi << most)


class ShiftRight(_Shift):
    """``x >> n`` for n from 0 to 63: ``x // 2**n``"""

    compute = staticmethod(operator.rshift)

    @classmethod
    def farthest(cls, x: Limits) -> int:
        """The number of bits of x, at least 31: greater amounts give the same."""
        return max(31, *(bound.bit_length() for bound in x))

    @classmethod
    def eval(cls, x: sympy.Expr, n: sympy.Expr) -> sympy.Expr | None:
        return FloorDiv(x, 2**n) if n.is_Integer else None

    def limits(self, *parts: Limits) -> Limits:
        (lo, hi), (least, most) = parts[0], self.amounts(*parts)
        return min(lo >> least, lo >> most), max(hi >> least, hi >> most)


class _OfOne(BitFunction):
    nargs = (1,)

    @classmethod
    def eval(cls, x: sympy.Expr) -> sympy.Expr | None:
        return sympy.Integer(cls.compute(int(x))) if x.is_Integer else None


class Popcount(_OfOne):
    """The number of ones among the low 32 bits"""

    @staticmethod
    def compute(x: Any) -> Any:
        """The number of ones, counted in pairs, fours and bytes."""
        x = x & 0xFFFFFFFF
        x = x - (x >> 1 & 0x55555555)
        x = (x & 0x33333333) + (x >> 2 & 0x33333333)
        x = x + (x >> 4) & 0x0F0F0F0F
        return x * 0x01010101 >> 24 & 0xFF

    def _eval_is_nonnegative(self) -> Any:
        return True

    def limits(self, *parts: Limits) -> Limits:
        return 0, 32


class Filled(_OfOne):
    """Ones from the highest one of a 32-bit integer down: the bits in which numbers from a to b
    can differ are those of ``Filled(a ^ b)``. Masks do not have it, but bounds of their bits."""

    @staticmethod
    def compute(x: Any) -> Any:
        """Ones from the highest one down: -1 for a negative number."""
        for step in (1, 2, 4, 8, 16):
            x = x | x >> step
        return x


class RandomBits(BitFunction):
    """24 random bits of the two halves of a seed, an offset, a stream, b, h, q and k"""

    nargs = (8,)
    compute = staticmethod(random_bits)

    def _eval_is_nonnegative(self) -> Any:
        return True

    def limits(self, *parts: Limits) -> Limits:
        return 0, (1 << BITS) - 1
