"""Products of a warpgroup: operands gathered from shared memory or registers, in float32.

Four warps hold the 64 rows of A and of the sums, 16 each, in the fragments of mma.sync (see
`tensor`). Instructions that follow one another along k and add to the same sums are one product,
warpgroups of a block that multiply by the same B are one as well. Dealing the columns of each eight
as 0 2 4 6 1 3 5 7 makes what four lanes hold of one row of the sums a piece of 16 bytes; that costs
nothing where B is gathered by columns.

Products of f16, bf16, tf32 and 8-bit floats are exact in float32; the sum along k of what is one
product is rounded to float32 once. Not modelled: that tensor cores truncate while they add, to
fewer bits for 8-bit floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashgen.emulator.descriptors import PATTERN_BYTES, PIECE_BYTES, Layout, pieces
from flashgen.emulator.tensor import (
    CACHE_BYTES,
    CHUNK,
    ELEMENTS,
    chunks,
    multiply_rounding_once,
    scratch,
    to_single,
)

Array = npt.NDArray[Any]
ROWS = 64


@dataclass(frozen=True)
class Form:
    """What one wgmma.mma_async says.

    Attributes:
        columns: N.
        half: sums of float16 instead of float32.
        kinds: element types of A and of B.
        transposed: whether A and B are MN-major.
        sign: -1 if exactly one operand is negated.
        registers: of the sums.
        fragments: registers of A; none when a descriptor says where A is.
    """

    columns: int
    half: bool
    kinds: tuple[str, str]
    transposed: tuple[bool, bool]
    sign: int
    registers: tuple[int, ...]
    fragments: tuple[int, ...]

    @property
    def fuses_as(self) -> tuple[Any, ...]:
        """Equal for instructions that can be one product along k."""
        return (self.kinds, self.transposed, self.sign, bool(self.fragments), self.half)


@dataclass
class Operand:
    """An operand in shared memory, of some warpgroups.

    Attributes:
        start: start addresses in the shared window (warpgroups,).
        layout: the same for all of them.
    """

    start: Array
    layout: Layout

    def part(self, keep: Array | slice) -> Operand:
        """The same of the warpgroups that ``keep`` selects."""
        return Operand(self.start[keep], self.layout)


def gather(
    view: Array,
    arena: Array,
    parts: list[Operand],
    rows: int,
    mn_major: bool,
    deal: bool,
    role: str,
) -> Array:
    """The pieces of an operand that some instructions read: (g, rows, k) or (g, k, rows).

    Args:
        view: shared memory of the wave in pieces of 16 bytes.
        arena: where the block of each warpgroup begins in it, in bytes (g,).
        parts: of each instruction.
        rows, mn_major, deal: see `flashgen.emulator.descriptors.pieces`.
        role: of the buffer for the result.
    """
    layout = parts[0].layout
    start = np.stack([part.start for part in parts], axis=1)
    base = start[:, 0] & -PATTERN_BYTES
    relative = start - base[:, None]
    first = (arena + base) // PIECE_BYTES
    if (relative == relative[0]).all():
        found = pieces(tuple(relative[0].tolist()), layout, rows, mn_major, deal)
        index = first[:, None, None] + found.places
    else:
        each = [pieces(tuple(r), layout, rows, mn_major, deal).places for r in relative.tolist()]
        index = first[:, None, None] + np.stack(each)
    out = scratch(role, index.shape, CHUNK)
    np.take(view, index, out=out, mode="clip")
    return out


def reach(operand: Operand, rows: int, mn_major: bool) -> tuple[Array, Array, Array]:
    """What one instruction reads of an operand: first byte and end (g,), and its pieces.

    The pieces are numbered from the shared window's start, (g, pieces).
    """
    base = operand.start & -PATTERN_BYTES
    relative, which = np.unique(operand.start - base, return_inverse=True)
    each = [pieces((int(r),), operand.layout, rows, mn_major) for r in relative]
    low, high = (np.array([getattr(p, end) for p in each])[which] for end in ("low", "high"))
    places = np.stack([p.places.reshape(-1) for p in each])[which]
    return base + low, base + high, base[:, None] // PIECE_BYTES + places


def fragments(steps: list[tuple[Any, ...]], warps: int) -> Array:
    """A from registers: four of each instruction; pieces (g, 64, k)."""
    left = scratch("wgmma a", (warps, 2, 8, len(steps), 2), CHUNK)
    for number, registers in enumerate(steps):
        for place, register in enumerate(registers):
            left[:, place % 2, :, number, place // 2] = chunks(register, warps)
    return left.reshape(warps // 4, ROWS, -1)


def multiply(
    view: Array, arena: Array, form: Form, a: list[Any], b: list[Operand], warps: int
) -> Array:
    """Products of some instructions that are one, as registers (N / 2, warps, 32) of float32.

    Args:
        view, arena: see `gather`.
        form: of the instructions, alike in all that `Form.fuses_as` says, and in N.
        a: per instruction an Operand, or four registers (warps, 32) or smaller.
        b: per instruction.
        warps: four times the warpgroups.
    """
    groups, n = warps // 4, form.columns
    kind_a, kind_b = form.kinds
    mn_a, mn_b = form.transposed
    left = (
        fragments(a, warps)
        if form.fragments
        else gather(view, arena, a, ROWS, mn_a, False, "wgmma a")
    )
    sharers = _sharers(arena, b)
    alone = [part.part(slice(None, None, sharers)) for part in b]
    right = gather(view, arena[::sharers], alone, n, mn_b, not mn_b, "wgmma b")
    product = scratch("wgmma d", (groups // sharers, ROWS * sharers, n), np.dtype("f4"))
    rows = left.view(ELEMENTS[kind_a])
    columns = right.view(ELEMENTS[kind_b])
    step = max(1, CACHE_BYTES // (right[0].nbytes + left[0].nbytes * sharers))
    for low in range(0, len(product), step):
        now = slice(low, low + step)
        x = to_single(rows[low * sharers : (low + step) * sharers], kind_a)
        if mn_a:
            x = x.swapaxes(1, 2)
        x = x.reshape(-1, ROWS * sharers, x.shape[2])
        y = columns[now]
        if not mn_b:
            # BLAS is faster when B need not be transposed: do it while elements are narrow.
            y = np.ascontiguousarray(y.swapaxes(1, 2))
        y = to_single(y.reshape(len(y), -1, n), kind_b)
        multiply_rounding_once(x, y, product[now])
    if form.sign < 0:
        np.negative(product, out=product)
    if mn_b:
        single = product.reshape(groups, 4, 2, 8, n // 8, 4, 2)
        out = np.ascontiguousarray(single.transpose(4, 2, 6, 0, 1, 3, 5))
    else:
        dealt = product.view(CHUNK).reshape(groups, 4, 2, 8, n // 8, 2)
        out = np.ascontiguousarray(dealt.transpose(4, 2, 5, 0, 1, 3)).view(np.float32)
    return out.reshape(n // 2, warps, 32)


def _sharers(arena: Array, b: list[Operand]) -> int:
    """How many warpgroups that follow one another multiply by the same B, all alike."""
    if len(arena) < 2:
        return 1
    same = arena[1:] == arena[:-1]
    for part in b:
        same = same & (part.start[1:] == part.start[:-1])
    firsts = np.flatnonzero(np.concatenate([[True], ~same]))
    count = len(arena) // len(firsts)
    return count if (firsts == np.arange(len(firsts)) * count).all() else 1


def add_half(product: Array, start: list[Any] | None) -> list[Array]:
    """Sums of float16 in pairs, (N / 4) registers of 32 bits, from ``start`` (None: zeros)."""
    pairs = product.reshape(-1, 2, 2, *product.shape[1:])  # columns of 8, row half, parity
    out = []
    for number in range(2 * len(pairs)):
        pair = np.stack(list(pairs[number // 2, number % 2]), axis=-1)
        if start is not None:
            old = np.ascontiguousarray(np.broadcast_to(start[number], pair.shape[:2]))
            pair += old.view(np.float16).reshape(pair.shape).astype(np.float32)
        out.append(pair.astype(np.float16).view(np.uint32)[..., 0])
    return out


def add_single(product: Array, start: list[Any] | None) -> list[Array]:
    """Sums of float32, (N / 2) registers, from ``start`` (None: zeros)."""
    out = list(product)
    for place, old in enumerate(start or ()):
        if old.ndim or old != 0:
            out[place] += old
    return out
