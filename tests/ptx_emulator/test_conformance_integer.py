"""Integer instructions of PTX against Python's integers, on every pair of edge operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx_emulator.test_conformance import Array, agree, bits_of, pairs, probe

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = {
    16: [0, 1, 2, 3, 7, 0x55AA, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 255, 256],
    32: [
        *(0, 1, 2, 31, 32, 33, 0xFF, 0x8000, 0xFFFF, 0x10000, 0x12345678, 0x7FFFFFFE, 0x7FFFFFFF),
        *(0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFF00, 0xFFFFFFFE, 0xFFFFFFFF),
    ],
    64: [0, 1, 2, 63, M32, M32 + 1, 0x123456789ABCDEF0, (1 << 63) - 1, 1 << 63, M64 - 1, M64],
}


def signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) & 1 else value


def operands(kind: str) -> Array:
    return np.array(EDGES[int(kind[1:])], f"u{int(kind[1:]) // 8}")


def expected(
    function: Callable[..., int], kinds: str, out: str, inputs: tuple[Array, ...]
) -> Array:
    """`function` on each element, read as signed where the kind says so, wrapped to `out`."""
    width, rows = int(out[1:]), []
    for row in zip(*(array.tolist() for array in inputs), strict=True):
        values = [
            signed(v, int(k[1:])) if k[0] == "s" else v
            for v, k in zip(row, kinds.split(), strict=True)
        ]
        rows.append(function(*values) & ((1 << width) - 1))
    return np.array(rows, f"u{width // 8}")


def check(body: str, out: str, kinds: str, function: Callable[..., int], *inputs: Array) -> None:
    got = probe(body, f"u{int(out[1:]) // 8}", *inputs)
    agree(got, expected(function, kinds, out, inputs), *inputs)


def truncated(a: int, b: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


TWO_OPERANDS: list[tuple[str, str, Callable[[int, int], int]]] = [
    *((f"{op}.{kind}", kind, f) for op, f in (
        ("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul.lo", lambda a, b: a * b),
        ("min", min), ("max", max),
    ) for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"mul.hi.{kind}", kind, lambda a, b, w=int(kind[1:]): a * b >> w)
      for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"{op}.b{w}", f"u{w}", f) for op, f in (
        ("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b),
    ) for w in (16, 32, 64)),
    ("add.sat.s32", "s32", lambda a, b: max(-(1 << 31), min((1 << 31) - 1, a + b))),
    ("sub.sat.s32", "s32", lambda a, b: max(-(1 << 31), min((1 << 31) - 1, a - b))),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "kind", "function"), TWO_OPERANDS, ids=lambda v: str(v)[:16])
def test_two_operands_wrap_to_their_width(
    opcode: str, kind: str, function: Callable[[int, int], int]
) -> None:
    check(f"{opcode} %d, %a, %b;", kind, f"{kind} {kind}", function, *pairs(operands(kind)))


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_mul_wide_keeps_the_whole_product(kind: str) -> None:
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    inputs = pairs(operands(kind))
    check(f"mul.wide.{kind} %d, %a, %b;", wide, f"{kind} {kind}", lambda a, b: a * b, *inputs)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_mad_wide_adds_at_the_double_width(kind: str) -> None:
    wide = f"{kind[0]}{2 * int(kind[1:])}"
    left, right = pairs(operands(kind))
    given = (left, right, np.resize(operands(wide), left.size))
    body, kinds = f"mad.wide.{kind} %d, %a, %b, %c;", f"{kind} {kind} {wide}"
    check(body, wide, kinds, lambda a, b, c: a * b + c, *given)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_mad_adds_one_half_of_the_product(kind: str, part: str) -> None:
    shift = 0 if part == "lo" else int(kind[1:])
    left, right = pairs(operands(kind))
    given = (left, right, np.resize(operands(kind), left.size))
    body, kinds = f"mad.{part}.{kind} %d, %a, %b, %c;", f"{kind} {kind} {kind}"
    check(body, kind, kinds, lambda a, b, c: (a * b >> shift) + c, *given)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("opcode", ["div", "rem"])
def test_division_truncates_towards_zero(opcode: str, kind: str) -> None:
    left, right = pairs(operands(kind))
    lowest = 1 << (int(kind[1:]) - 1)
    defined = (right != 0) & ~((left == lowest) & (~right == 0))
    functions = {"div": truncated, "rem": lambda a, b: a - b * truncated(a, b)}
    inputs = (left[defined], right[defined])
    check(f"{opcode}.{kind} %d, %a, %b;", kind, f"{kind} {kind}", functions[opcode], *inputs)


SHIFTS = np.array([0, 1, 5, 15, 16, 31, 32, 33, 63, 64, 65, 255, 256, 0x80000000, M32], np.uint32)


@pytest.mark.parametrize(
    ("opcode", "kind"), [*itertools.product(["shl.b", "shr.u", "shr.s"], [16, 32, 64])]
)
def test_shifts_past_the_width_clamp(opcode: str, kind: int) -> None:
    def function(a: int, amount: int) -> int:
        amount = min(amount, kind)
        return a << amount if opcode == "shl.b" else a >> amount

    sign = "s" if opcode == "shr.s" else "u"
    inputs = pairs(operands(f"u{kind}"), SHIFTS)
    check(f"{opcode}{kind} %d, %a, %b;", f"u{kind}", f"{sign}{kind} u32", function, *inputs)


@pytest.mark.parametrize(("side", "mode"), [*itertools.product("lr", ["wrap", "clamp"])])
def test_funnel_shift(side: str, mode: str) -> None:
    def function(low: int, high: int, amount: int) -> int:
        amount = amount & 31 if mode == "wrap" else min(amount, 32)
        both = high << 32 | low
        return both << amount >> 32 if side == "l" else both >> amount

    low, high = pairs(operands("u32"))
    low, high = (np.repeat(v, SHIFTS.size) for v in (low, high))
    amount = np.resize(SHIFTS, low.size)
    body = f"shf.{side}.{mode}.b32 %d, %a, %b, %c;"
    check(body, "u32", "u32 u32 u32", function, low, high, amount)


def permuted(a: int, b: int, c: int, mode: str) -> int:
    stock = [(b << 32 | a) >> 8 * i & 255 for i in range(8)]
    step = c & 3
    selectors = {
        "": [c >> 4 * i & 15 for i in range(4)],
        ".f4e": [step + i for i in range(4)],
        ".b4e": [(step - i) % 8 for i in range(4)],
        ".rc8": [step] * 4,
        ".ecl": [max(i, step) for i in range(4)],
        ".ecr": [min(i, step) for i in range(4)],
        ".rc16": [2 * (step & 1) + (i & 1) for i in range(4)],
    }[mode]
    chosen = [stock[s & 7] for s in selectors]
    if mode == "":
        chosen = [(255 if v & 128 else 0) if s & 8 else v for v, s in zip(chosen, selectors)]  # noqa: B905
    return sum(v << 8 * i for i, v in enumerate(chosen))


@pytest.mark.parametrize("mode", ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
def test_prmt_picks_bytes(mode: str) -> None:
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(0, 1 << 32, (3, 2000), np.uint32)
    c[:8] = [0x3210, 0x7654, 0xFEDC, 0x0123, 0x5410, 0x7632, 0x8888, 0xFFFF5410]
    body = f"prmt.b32{mode} %d, %a, %b, %c;"
    check(body, "u32", "u32 u32 u32", lambda a, b, c: permuted(a, b, c, mode), a, b, c)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe_extracts_and_extends(kind: str) -> None:
    width = int(kind[1:])

    def function(a: int, start: int, length: int) -> int:
        start, length, a = start & 255, length & 255, a & ((1 << width) - 1)
        top = min(start + length - 1, width - 1)
        fill = a >> top & 1 if kind[0] == "s" and length else 0
        bits = [
            a >> start + i & 1 if i < length and start + i < width else fill for i in range(width)
        ]
        return sum(bit << i for i, bit in enumerate(bits))

    steps = np.array([0, 1, 7, 8, 16, 24, 31, 32, 33, 63, 64, 65, 255, 256 + 4], np.uint32)
    start, length = pairs(steps)
    values = np.repeat(operands(kind), start.size)
    inputs = (values, np.resize(start, values.size), np.resize(length, values.size))
    check(f"bfe.{kind} %d, %a, %b, %c;", kind, f"{kind} u32 u32", function, *inputs)


@pytest.mark.parametrize(("start", "length"), [*itertools.product([0, 1, 8, 31, 32, 40], repeat=2)])
def test_bfi_inserts_a_field(start: int, length: int) -> None:
    def function(a: int, b: int) -> int:
        for i in range(min(length, max(0, 32 - start))):
            b = b & ~(1 << start + i) | (a >> i & 1) << start + i
        return b

    inputs = pairs(operands("u32"))
    check(f"bfi.b32 %d, %a, %b, {start}, {length};", "u32", "u32 u32", function, *inputs)


def highest_difference(value: int, width: int) -> int:
    """bfind: the highest bit that differs from the sign (signed) or is set (unsigned)."""
    value = ~value if value < 0 else value
    return value.bit_length() - 1 if value else M32


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("brev.b", lambda a, w: int(f"{a:0{w}b}"[::-1], 2)),
        ("not.b", lambda a, w: ~a),
        ("cnot.b", lambda a, w: int(a == 0)),
        ("abs.s", lambda a, w: abs(a)),
        ("neg.s", lambda a, w: -a),
    ],
)
def test_one_operand_keeps_its_width(
    opcode: str, function: Callable[[int, int], int], width: int
) -> None:
    sign = "s" if opcode.endswith("s") else "u"
    values = operands(f"u{width}")
    body = f"{opcode}{width} %d, %a;"
    check(body, f"u{width}", f"{sign}{width}", lambda a: function(a, width), values)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("popc.b", lambda a, w: a.bit_count()),
        ("clz.b", lambda a, w: w - a.bit_length()),
        ("bfind.u", highest_difference),
        ("bfind.s", highest_difference),
        ("bfind.shiftamt.u", lambda a, w: w - a.bit_length() if a else M32),
    ],
)
def test_bit_counts_are_32_bit_numbers(
    opcode: str, function: Callable[[int, int], int], width: int
) -> None:
    sign = "s" if opcode.endswith("s") else "u"
    values = np.concatenate([operands(f"u{width}"), 1 << np.arange(width, dtype=f"u{width // 8}")])
    body = f"{opcode}{width} %d, %a;"
    check(body, "u32", f"{sign}{width}", lambda a: function(a, width), values)


@pytest.mark.parametrize(
    "table", [0x00, 0x01, 0x1B, 0x3C, 0x80, 0x96, 0xCA, 0xD8, 0xE8, 0xFE, 0xFF]
)
def test_lop3_follows_its_truth_table(table: int) -> None:
    def function(a: int, b: int, c: int) -> int:
        return sum(
            (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
            for i in range(32)
        )

    rng = np.random.default_rng(table)
    inputs = tuple(rng.integers(0, 1 << 32, (3, 200), np.uint32))
    body = f"lop3.b32 %d, %a, %b, %c, {table:#x};"
    check(body, "u32", "u32 u32 u32", function, *inputs)


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("add.cc.u32 %d, %a, %b; addc.u32 %e, %a, 0;", lambda a, b: (a + b, a + (a + b >> 32))),
        ("sub.cc.u32 %d, %a, %b; subc.u32 %e, %a, %b;", lambda a, b: (a - b, a - b - (a < b))),
        ("mad.lo.cc.u32 %d, %a, %b, %a; madc.hi.u32 %e, %a, %b, 0;",
         lambda a, b: (a * b + a, a * b + a >> 32)),
    ],
)  # fmt: skip
def test_carry_chains(body: str, function: Callable[[int, int], tuple[int, int]]) -> None:
    inputs = pairs(operands("u32"))
    low, high = probe(body, "u4 u4", *inputs)
    agree(low, expected(lambda a, b: function(a, b)[0], "u32 u32", "u32", inputs), *inputs)
    agree(high, expected(lambda a, b: function(a, b)[1], "u32 u32", "u32", inputs), *inputs)


@pytest.mark.parametrize(
    ("body", "kinds", "function"),
    [
        ("mul24.lo.s32 %d, %a, %b;", "s32 s32",
         lambda a, b: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24)),
        ("mul24.lo.u32 %d, %a, %b;", "u32 u32", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
        ("sad.s32 %d, %a, %b, 5;", "s32 s32", lambda a, b: abs(a - b) + 5),
        ("sad.u32 %d, %a, %b, 5;", "u32 u32", lambda a, b: abs(a - b) + 5),
        ("dp4a.s32.s32 %d, %a, %b, 9;", "u32 u32", lambda a, b: 9 + sum(
            signed(a >> 8 * i & 255, 8) * signed(b >> 8 * i & 255, 8) for i in range(4))),
        ("dp4a.u32.s32 %d, %a, %b, 9;", "u32 u32", lambda a, b: 9 + sum(
            (a >> 8 * i & 255) * signed(b >> 8 * i & 255, 8) for i in range(4))),
        ("vabsdiff4.u32.u32.u32 %d, %a, %b, %a;", "u32 u32", lambda a, b: sum(
            abs((a >> 8 * i & 255) - (b >> 8 * i & 255)) << 8 * i for i in range(4))),
        ("vabsdiff4.u32.u32.u32.add %d, %a, %b, 7;", "u32 u32", lambda a, b: 7 + sum(
            abs((a >> 8 * i & 255) - (b >> 8 * i & 255)) for i in range(4))),
    ],
    ids=lambda v: str(v)[:14],
)  # fmt: skip
def test_rarer_arithmetic(body: str, kinds: str, function: Callable[[int, int], int]) -> None:
    check(body, "u32", kinds, function, *pairs(operands("u32")))


def test_moves_pack_and_unpack_halves() -> None:
    words = operands("u32")
    body = ".reg .b16 x, y; mov.b32 {x, y}, %a; mov.b32 %d, {y, x};"
    agree(probe(body, "u4", words), (words >> 16) | (words << 16), words)
    low, high = pairs(words)
    body = ".reg .b32 x, y; mov.b64 %d, {%a, %b}; mov.b64 {x, y}, %d; sub.u32 %e, y, x;"
    both, difference = probe(body, "u8 u4", low, high)
    agree(both, high.astype(np.uint64) << 32 | low, low, high)
    agree(difference, high - low, low, high)
    assert bits_of(both).dtype == np.uint64


def test_the_carry_of_a_subtraction_is_set_where_nothing_is_borrowed() -> None:
    """subc takes the borrow of sub.cc; addc reads the flag itself, as NVVM's divisions do."""
    a, b = pairs(np.array(EDGES[32], np.uint32))
    borrowed, flag = probe(
        "sub.cc.u32 %d, %a, %b; subc.u32 %d, 0, 0; sub.cc.u32 %e, %a, %b; addc.u32 %e, 0, 0;",
        "u4 u4",
        a,
        b,
    )
    agree(borrowed, np.where(a < b, np.uint32(M32), np.uint32(0)), a, b)
    agree(flag, (a >= b).astype(np.uint32), a, b)


def test_a_guard_keeps_the_carry() -> None:
    a = np.array([0x80000000, 0x80000000, 1], np.uint32)
    guard = np.array([1, 0, 1], np.uint32)
    body = """.reg .pred p; setp.ne.u32 p, %b, 0; add.cc.u32 %d, 0, 0; @p add.cc.u32 %d, %a, %a;
    addc.u32 %d, 0, 0;"""
    agree(probe(body, "u4", a, guard), np.array([1, 0, 0], np.uint32), a)


def test_max_of_pairs_with_relu_is_not_negative() -> None:
    a, b = np.array([0x0001FFF0], np.uint32), np.array([0xFF00FFFF], np.uint32)
    agree(probe("max.s16x2.relu %d, %a, %b;", "u4", a, b), np.array([0x10000], np.uint32), a, b)
