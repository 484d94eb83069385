"""Emitters of integer arithmetic, logic, shifts and bit fields.

The float forms of the same opcodes are in `floats`.
"""

from __future__ import annotations

from flashgen.emulator.isa.emitters.floats import float_arithmetic, is_float
from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits, split_pair
from flashgen.emulator.ptx.instructions import as_immediate
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction

_SIGNS = {"add": "+", "sub": "-"}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_PACKED = {"u16x2": "u2", "s16x2": "i2"}  # the dtype of their elements


# ---- arithmetic


def neutral(g: Generator, ins: Instruction, kind: str) -> str:
    """The dtype for operations whose bits do not depend on signedness."""
    return "b1" if kind == "pred" else g.integer(ins.operands[0], TYPE_BYTES[kind])


def _packed_binary(g: Generator, ins: Instruction, kind: str, expression: str) -> None:
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    value = f"on_halves({_PACKED[kind]}, lambda a, b: {expression}, {a}, {b})"
    g.write(ins.operands[0], value, "u4")


def _add(g: Generator, ins: Instruction, kind: str) -> None:
    sign = _SIGNS[ins.op]
    if kind in _PACKED:
        _packed_binary(g, ins, kind, f"a {sign} b")
        return
    if "cc" in g.mods.left:
        _add_carried(g, ins, kind)
        return
    if g.mods.take("sat"):
        a, b = (g.read(o, "i4") for o in ins.operands[1:])
        g.write(ins.operands[0], f"saturating_add({a}, {b}, {sign}1)", "i4")
        return
    dtype = neutral(g, ins, kind)
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{a} {sign} {b}", dtype)


def _add_carried(g: Generator, ins: Instruction, kind: str) -> None:
    dtype = f"u{TYPE_BYTES[kind]}"
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    _write_carried(g, ins, a, b, dtype)


def _write_carried(g: Generator, ins: Instruction, a: str, b: str, dtype: str) -> None:
    """Writes ``a + b`` or ``a - b``: addc, subc and madc read the carry flag, .cc writes it."""
    if g.guard:
        raise g.unknown("a guarded carry")
    slot = len(g.program.registers)
    carry = g.current(slot) if ins.op.endswith("c") else g.literal(0, "u4")
    function = "subtract_borrow" if ins.op.startswith("sub") else "add_carry"
    both = g.let(f"{function}({a}, {b}, {carry})")
    g.write(ins.operands[0], f"{both}[0]", dtype)
    if g.mods.take("cc"):
        g.names[slot] = g.let(f"{both}[1]")


def _product(g: Generator, ins: Instruction, kind: str) -> tuple[str, str]:
    """The product of an integer mul or mad as an expression, and its dtype."""
    form = g.mods.take("lo", "hi", "wide")
    dtype = DTYPE[kind]
    if ins.op in ("mul24", "mad24"):
        shift = g.literal(8, dtype)
        if form == "hi":
            wide = f"{dtype[0]}8"
            a, b = (
                f"(({g.read(o, dtype)} << {shift}) >> {shift}).astype({wide})"
                for o in ins.operands[1:3]
            )
            return f"(({a} * {b}) >> {g.literal(16, wide)}).astype({dtype})", dtype
        a, b = (f"(({g.read(o, dtype)} << {shift}) >> {shift})" for o in ins.operands[1:3])
        return f"({a} * {b})", dtype
    if form == "wide":
        wide = f"{dtype[0]}{2 * TYPE_BYTES[kind]}"
        a, b = (f"{g.read(o, dtype)}.astype({wide})" for o in ins.operands[1:3])
        return f"({a} * {b})", wide
    if form != "hi":
        dtype = neutral(g, ins, kind)
    a, b = (g.read(o, dtype) for o in ins.operands[1:3])
    return (f"multiply_high({a}, {b})" if form == "hi" else f"({a} * {b})"), dtype


def _multiply(g: Generator, ins: Instruction, kind: str) -> None:
    value, dtype = _product(g, ins, kind)
    g.write(ins.operands[0], value, dtype)


def _multiply_add(g: Generator, ins: Instruction, kind: str) -> None:
    if "cc" in g.mods.left:
        _multiply_add_carried(g, ins, kind)
        return
    saturates = g.mods.take("sat")
    value, dtype = _product(g, ins, kind)
    if saturates:
        if "hi" not in ins.mods or kind != "s32":
            raise g.unknown("saturation of this mad")
        c = g.read(ins.operands[3], "i4")
        g.write(ins.operands[0], f"saturating_add({value}, {c}, 1)", "i4")
        return
    g.write(ins.operands[0], f"{value} + {g.read(ins.operands[3], dtype)}", dtype)


def _multiply_add_carried(g: Generator, ins: Instruction, kind: str) -> None:
    value, dtype = _product(g, ins, kind)
    unsigned = f"u{dtype[1:]}"
    c = g.read(ins.operands[3], unsigned)
    _write_carried(g, ins, f"{value}.view({unsigned})", c, unsigned)


def _divide(g: Generator, ins: Instruction, kind: str) -> None:
    dtype = DTYPE[kind]
    function = "divide" if ins.op == "div" else "remainder"
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{function}({a}, {b})", dtype)


def _minimum(g: Generator, ins: Instruction, kind: str) -> None:
    function = f"np.{ins.op}imum"
    if kind in _PACKED:
        if "relu" in ins.mods:
            raise g.unknown("relu")
        _packed_binary(g, ins, kind, f"{function}(a, b)")
        return
    dtype = DTYPE[kind]
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    value = f"{function}({a}, {b})"
    if g.mods.take("relu"):
        value = f"np.maximum({value}, {g.literal(0, dtype)})"
    g.write(ins.operands[0], value, dtype)


def _sign(g: Generator, ins: Instruction, kind: str) -> None:
    dtype = DTYPE[kind]
    value = g.read(ins.operands[1], dtype)
    g.write(ins.operands[0], f"np.abs({value})" if ins.op == "abs" else f"-{value}", dtype)


_ARITHMETIC = {
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("addc", "subc"), _add_carried),
    **dict.fromkeys(("mul", "mul24"), _multiply),
    **dict.fromkeys(("mad", "fma", "mad24"), _multiply_add),
    "madc": _multiply_add_carried,
    **dict.fromkeys(("div", "rem"), _divide),
    **dict.fromkeys(("min", "max"), _minimum),
    **dict.fromkeys(("abs", "neg"), _sign),
}


@emits(*_ARITHMETIC)
def arithmetic(g: Generator, ins: Instruction) -> None:
    kind = g.mods.take(*_PACKED) or g.mods.type()
    emit = float_arithmetic if is_float(kind) else _ARITHMETIC[ins.op]
    emit(g, ins, kind)


@emits("sad")
def absolute_difference(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    a, b, c = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{c} + (np.maximum({a}, {b}) - np.minimum({a}, {b}))", dtype)


@emits("dp4a")
def dot_bytes(g: Generator, ins: Instruction) -> None:
    kinds = {"s32": "i1", "u32": "u1"}
    second, first = kinds[g.mods.type()], kinds[g.mods.type()]
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    c = g.read(ins.operands[3], "i4" if "i1" in (first, second) else "u4")
    g.write(ins.operands[0], f"dot4({a}, {b}, {c}, {first}, {second})", "u4")


@emits("dp2a")
def dot_halves(g: Generator, ins: Instruction) -> None:
    high = g.mods.take("lo", "hi") == "hi"
    second, first = (g.mods.type()[0].replace("s", "i") for _ in range(2))
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    c = g.read(ins.operands[3], "i4" if "i" in (first, second) else "u4")
    g.write(ins.operands[0], f"dot2({a}, {b}, {c}, {first}2, {second}1, {high})", "u4")


# ---- bits


@emits("and", "or", "xor")
def logic(g: Generator, ins: Instruction) -> None:
    dtype = neutral(g, ins, g.mods.type())
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{a} {_LOGIC[ins.op]} {b}", dtype)


@emits("not", "cnot")
def invert(g: Generator, ins: Instruction) -> None:
    dtype = neutral(g, ins, g.mods.type())
    value = g.read(ins.operands[1], dtype)
    inverse = f"({value} == 0).astype({dtype})" if ins.op == "cnot" else f"~{value}"
    g.write(ins.operands[0], inverse, dtype)


@emits("shl", "shr")
def shift(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    size = TYPE_BYTES[kind]
    count = as_immediate(ins.operands[2])
    left = ins.op == "shl"
    if count is not None and 0 <= count < 8 * size:
        dtype = g.integer(ins.operands[0], size) if left else DTYPE[kind]
        value, amount = g.read(ins.operands[1], dtype), g.literal(count, dtype)
        g.write(ins.operands[0], f"{value} {'<<' if left else '>>'} {amount}", dtype)
        return
    dtype = f"u{size}" if left else DTYPE[kind]
    value, amount = g.read(ins.operands[1], dtype), g.read(ins.operands[2], "u4")
    function = "shift_left" if left else "shift_right"
    g.write(ins.operands[0], f"{function}({value}, {amount})", dtype)


@emits("shf")
def funnel_shift(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    left = g.mods.take("l", "r") == "l"
    wrap = g.mods.take("wrap", "clamp") == "wrap"
    a, b, c = (g.read(o, "u4") for o in ins.operands[1:])
    g.write(ins.operands[0], f"funnel({a}, {b}, {c}, {left}, {wrap})", "u4")


_LOGIC3 = {
    0x80: "{a} & {b} & {c}",
    0xFE: "{a} | {b} | {c}",
    0x96: "{a} ^ {b} ^ {c}",
    0xC0: "{a} & {b}",
    0xFC: "{a} | {b}",
    0x3C: "{a} ^ {b}",
    0xF8: "{a} | ({b} & {c})",
    0xEA: "({a} & {b}) | {c}",
    0xE2: "({b} & {c}) | (~{b} & {a})",
    0xCA: "({a} & {b}) | (~{a} & {c})",
    0x78: "{a} ^ ({b} & {c})",
    0x6A: "({a} & {b}) ^ {c}",
}


@emits("lop3")
def logic3(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    table = as_immediate(ins.operands[4])
    if table is None:
        raise g.unknown("a computed table")
    combine = g.mods.take("or", "and")
    a, b, c = (g.read(o, "u4") for o in ins.operands[1:4])
    text = _LOGIC3.get(table, "logic3({a}, {b}, {c}, {table})")
    text = text.format(a=a, b=b, c=c, table=table)
    if not combine:
        g.write(ins.operands[0], text, "u4")
        return
    to, some = split_pair(ins.operands[0])
    value, other = g.let(f"np.asarray({text})"), g.read(ins.operands[5], "b1")
    holds = g.let(f"({value} != 0) {_LOGIC[combine]} {other}")
    g.write(to, value, "u4")
    g.write(some, holds, "b1")


@emits("prmt")
def permute(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    mode = g.mods.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    selector = as_immediate(ins.operands[3])
    low, sixteen = g.literal(0xFFFF, "u4"), g.literal(16, "u4")
    if mode == "" and selector == 0x5410:
        text = f"({a} & {low}) | ({b} << {sixteen})"
    elif mode == "" and selector == 0x7632:
        text = f"({a} >> {sixteen}) | ({b} & ~{low})"
    else:
        text = f"permute_bytes({a}, {b}, {g.read(ins.operands[3], 'u4')}, {mode!r})"
    g.write(ins.operands[0], text, "u4")


@emits("bfe")
def extract(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    a = g.read(ins.operands[1], dtype)
    start, length = (as_immediate(o) for o in ins.operands[2:])
    bits = 8 * int(dtype[1:])
    if dtype[0] == "u" and start is not None and length is not None and 0 <= start < bits:
        mask = g.literal((1 << min(length, bits)) - 1, dtype)
        g.write(ins.operands[0], f"({a} >> {g.literal(start, dtype)}) & {mask}", dtype)
        return
    b, c = (g.read(o, "u4") for o in ins.operands[2:])
    g.write(ins.operands[0], f"extract_bits({a}, {b}, {c})", dtype)


@emits("bfi")
def insert(g: Generator, ins: Instruction) -> None:
    dtype = f"u{TYPE_BYTES[g.mods.type()]}"
    a, b = (g.read(o, dtype) for o in ins.operands[1:3])
    c, d = (g.read(o, "u4") for o in ins.operands[3:])
    g.write(ins.operands[0], f"insert_bits({a}, {b}, {c}, {d})", dtype)


@emits("bmsk", "szext")
def mask_bits(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    wrap = g.mods.take("wrap", "clamp") == "wrap"
    function = "make_mask" if ins.op == "bmsk" else "extend_sign"
    a, b = g.read(ins.operands[1], dtype), g.read(ins.operands[2], "u4")
    g.write(ins.operands[0], f"{function}({a}, {b}, {wrap})", dtype)


_COUNTS = {
    "popc": "np.bitwise_count({}).astype(u4)",
    "clz": "leading_zeros({})",
    "brev": "reverse_bits({})",
}


@emits(*_COUNTS)
def count_bits(g: Generator, ins: Instruction) -> None:
    dtype = f"u{TYPE_BYTES[g.mods.type()]}"
    text = _COUNTS[ins.op].format(g.read(ins.operands[1], dtype))
    g.write(ins.operands[0], text, dtype if ins.op == "brev" else "u4")


@emits("fns")
def find_nth(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    mask, base, offset = (
        g.read(o, k) for o, k in zip(ins.operands[1:], ("u4", "u4", "i4"), strict=True)
    )
    g.write(ins.operands[0], f"find_nth({mask}, {base}, {offset})", "u4")


@emits("bfind")
def find_bit(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    as_shift = bool(g.mods.take("shiftamt"))
    g.write(ins.operands[0], f"find_bit({g.read(ins.operands[1], dtype)}, {as_shift})", "u4")
