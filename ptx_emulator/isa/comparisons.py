"""Comparisons and selections."""

from __future__ import annotations

from ptx_emulator.isa.definedness import ALL
from ptx_emulator.isa.floats import is_float
from ptx_emulator.isa.generator import Generator, formula, instruction, split_pair
from ptx_emulator.isa.warp import raw_dtype
from ptx_emulator.ptx.register_types import DTYPE
from ptx_emulator.ptx.syntax import TYPE_BYTES, Imm, Instruction, Not, Operand, Sink

LOGIC = {"and": "&", "or": "|", "xor": "^"}
_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
# The comparisons that a NaN makes true, and the opposites that it makes false.
_UNORDERED = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_ONES = {"f16": 0x3C00, "bf16": 0x3F80}  # the bits of 1.0
_COMPARISONS = (*_UNORDERED, "num", "nan", *_ORDERED, *_UNSIGNED)


def compare_halves(g: Generator, word: str, kind: str, x: str, y: str, ftz: bool) -> str:
    compare = f"lambda x, y: {compared(g, word, 'f4', 'x', 'y')}"
    return f"half_compare({x}, {y}, {kind!r}, {compare}, {ftz})"


def compare_pairs(g: Generator, word: str, kind: str, a: Operand, b: Operand) -> list[str]:
    """The comparisons of the low and of the high halves of two pairs, as locals."""
    ftz = bool(g.mods.take("ftz"))
    x, y = (g.let(g.read(o, "u4")) for o in (a, b))
    compared = []
    for shift in (0, 16):
        low, high = (f"({v} >> {g.literal(shift, 'u4')}).astype(u2)" for v in (x, y))
        compared.append(g.let(compare_halves(g, word, kind, low, high, ftz)))
    return compared


def comparison(g: Generator, word: str, kind: str, a: Operand, b: Operand) -> str:
    """An expression for ``a word b``."""
    g.refuse_if(kind == "pred", "a comparison of predicates")
    if word in _UNSIGNED and kind[0] != "f":
        kind = "u" + kind[1:]
    ftz = bool(g.mods.take("ftz"))
    dtype = DTYPE[kind]
    if kind in ("f16", "bf16"):
        return compare_halves(g, word, kind, g.read(a, "u2"), g.read(b, "u2"), ftz)
    x, y = g.read(a, dtype), g.read(b, dtype)
    if ftz and dtype == "f4":
        x = x if isinstance(a, Imm) else f"flush({x})"
        y = y if isinstance(b, Imm) else f"flush({y})"
    return compared(g, word, dtype, x, y)


def compared(g: Generator, word: str, dtype: str, x: str, y: str) -> str:
    if dtype[0] == "f":
        if word in ("num", "nan"):
            both = f"(np.isnan({x}) | np.isnan({y}))"
            return both if word == "nan" else f"(~{both})"
        if word == "ne":
            # An ordered comparison is false if an operand is a NaN.
            return f"(({x} < {y}) | ({x} > {y}))"
        if word in _UNORDERED:
            return f"(~{compared(g, _UNORDERED[word], dtype, x, y)})"
    sign = _ORDERED.get(word) or _UNSIGNED.get(word)
    if sign is None:
        raise g.unknown(f"the comparison {word}")
    return f"({x} {sign} {y})"


@instruction("setp", unit="compare")
def emit_set_predicate(g: Generator, ins: Instruction) -> None:
    kind = g.mods.take("f16x2", "bf16x2") or g.mods.type()
    word = g.one_of(*_COMPARISONS)
    combine = g.mods.take(*LOGIC)
    first, second = split_pair(ins.operands[0])
    if kind in ("f16x2", "bf16x2"):
        # The low halves set the first predicate, the high halves the second.
        value, other = compare_pairs(g, word, kind.removesuffix("x2"), *ins.operands[1:3])
    else:
        value = comparison(g, word, kind, ins.operands[1], ins.operands[2])
        if not combine and isinstance(second, Sink):
            g.write(first, value, "b1")
            return
        value = g.let(value)
        other = f"(~{value})"
    if combine:
        extra = g.let(g.read(ins.operands[3], "b1"))
        value, other = (f"{v} {LOGIC[combine]} {extra}" for v in (value, other))
    g.write(first, value, "b1")
    g.write(second, other, "b1")


@instruction("set", unit="compare")
def emit_set_value(g: Generator, ins: Instruction) -> None:
    source = g.mods.type()
    to = g.mods.type()
    word = g.mods.take(*_COMPARISONS)
    combine = g.mods.take(*LOGIC)
    extra = f" {LOGIC[combine]} {g.read(ins.operands[3], 'b1')}" if combine else ""
    if source in ("f16x2", "bf16x2"):
        parts = compare_pairs(g, word, source.removesuffix("x2"), *ins.operands[1:3])
        # Each half is 1.0, or all ones, if its comparison holds.
        true = _ONES.get(to.removesuffix("x2"), 0xFFFF)
        low, high = (f"({part}{extra}) * {g.literal(true << s, 'u4')}"
                     for part, s in zip(parts, (0, 16), strict=True))  # fmt: skip
        g.refuse_if(to not in (source, "u32", "s32", "b32"), "this result of a comparison of pairs")
        g.write(ins.operands[0], f"({low} | {high})", "u4")
        return
    value = f"({comparison(g, word, source, ins.operands[1], ins.operands[2])}{extra})"
    dtype = DTYPE[to]
    if to in _ONES:
        one, bits = g.literal(_ONES[to], "u2"), f"{value} * {{}}"
        g.write(ins.operands[0], f"({bits.format(one)}).view({dtype})", dtype)
    elif TYPE_BYTES[to] == 2:
        g.write(ins.operands[0], f"-{value}.astype(i2)", "i2")
    elif is_float(to):
        g.write(ins.operands[0], f"{value}.astype({dtype})", dtype)
    else:
        g.write(ins.operands[0], f"-{value}.astype(i4)", "i4")


@instruction("selp", unit="compare")
def emit_select(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    to, a, b, p = ins.operands
    dtype = raw_dtype(g, to, TYPE_BYTES[kind]) if kind[0] in "bus" else DTYPE[kind]
    if isinstance(p, Not):
        a, b, p = b, a, p.reg
    x = bits_or(g, a, dtype)
    defined_x, g.defined = g.defined, []
    y = bits_or(g, b, dtype)
    defined_y, g.defined = g.defined, []
    test = g.read(p, "b1")
    if defined_x or defined_y:
        # Only the selected value counts as read.
        chosen = [" & ".join(names) or g.literal(ALL, "u8") for names in (defined_x, defined_y)]
        g.defined.append(g.let(f"where({test}, {chosen[0]}, {chosen[1]})"))
    g.write(to, f"where({test}, {x}, {y})", dtype)


def bits_or(g: Generator, operand: Operand, dtype: str) -> str:
    """An operand of a .bN instruction: an integer immediate is bits, whatever the register is."""
    if isinstance(operand, Imm) and not operand.float_bits:
        return g.literal(operand.value, dtype)
    return g.read(operand, dtype)


# With .ftz a negative number that is subnormal counts as zero.
_POSITIVE = "({c:T} >= 0) | ({ftz} & (np.abs({c:T}) < 2.0**-126))"
formula("slct", "compare", "S", f"where({_POSITIVE}, {{a:S}}, {{b:S}})")
