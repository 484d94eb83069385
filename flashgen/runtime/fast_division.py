"""What the host makes so that kernels divide by a run-time scalar without a division.

Source of the method: Granlund and Montgomery, "Division by Invariant Integers using
Multiplication", 1994; CUTLASS's FastDivmod uses it in the same way.
"""

from __future__ import annotations


def multiplier_of(divisor: int) -> int:
    """The multiplier m and the shift s of a division by an int32, as one number m + s 2^32.

    For D = |divisor| and 0 <= n <= 2^31, floor(n / D) = floor(n m / 2^(31 + s)): s is the smallest
    number with 2^s >= D, and m = ceil(2^(31 + s) / D) < 2^32. The number is 0 for a divisor of 0.
    """
    size = abs(divisor)
    if size == 0:
        return 0
    shift = (size - 1).bit_length()
    return -(-(1 << (31 + shift)) // size) + (shift << 32)
