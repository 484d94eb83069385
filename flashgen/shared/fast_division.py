"""Numbers by which kernels divide, or test for multiples, without a division."""

from __future__ import annotations

from flashgen.shared.dtypes import INT32_MAX


def multiplier_of(divisor: int) -> int:
    """Magic-number division: the multiplier m and the shift s that a kernel uses instead of
    dividing by a scalar, as one number m + s 2^32.

    For D = |divisor| and 0 <= n <= 2^31, floor(n / D) = floor(n m / 2^(31 + s)): s is the smallest
    number with 2^s >= D, and m = ceil(2^(31 + s) / D) < 2^32. The number is 0 for a divisor of 0.

    Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994;
    CUTLASS's FastDivmod uses it in the same way.
    """
    size = abs(divisor)
    if size == 0:
        return 0
    shift = (size - 1).bit_length()
    return -(-(1 << (31 + shift)) // size) + (shift << 32)


def inverse_of(divisor: int) -> int:
    """The inverse i and the limit l by which a kernel tests for multiples of a scalar, as one
    number i + l 2^32, of type int64.

    For |divisor| = o 2^s with o odd, i is the inverse of o modulo 2^32. A multiple n = t divisor
    has n i = t 2^s modulo 2^32 with |t| at most m = floor((2^31 - 1) / |divisor|), and no other
    int32 has. l is 2 m, and 2 m + 1 for a power of 2, of which -2^31 is a multiple too. By 0, every
    remainder is 0.

    Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994,
    section 9.
    """
    size = abs(divisor)
    if size == 0:
        return -(1 << 32)
    power = size & -size
    limit = 2 * (INT32_MAX // size) + (size == power)
    number = pow(size // power, -1, 1 << 32) + (limit << 32)
    return number - (number >> 63 << 64)
