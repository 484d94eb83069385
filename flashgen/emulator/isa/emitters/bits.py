"""Emitters of logic, shifts and bit fields."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.isa.semantics import integers  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.instructions import as_immediate
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction

_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@emits("and", "or", "xor")
def logic(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    dtype = "b1" if kind == "pred" else g.integer(ins.operands[0], TYPE_BYTES[kind])
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"{a} {_LOGIC[ins.op]} {b}", dtype)


@emits("not", "cnot")
def invert(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    dtype = "b1" if kind == "pred" else g.integer(ins.operands[0], TYPE_BYTES[kind])
    value = g.read(ins.operands[1], dtype)
    if ins.op == "cnot":
        g.write(ins.operands[0], f"({value} == 0).astype({dtype})", dtype)
    else:
        g.write(ins.operands[0], f"~{value}", dtype)


@emits("shl", "shr")
def shift(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    size = TYPE_BYTES[kind]
    count = as_immediate(ins.operands[2])
    left = ins.op == "shl"
    dtype = g.integer(ins.operands[0], size) if left else DTYPE[kind]
    value = g.read(ins.operands[1], dtype)
    if count is not None and 0 <= count < 8 * size:
        sign = "<<" if left else ">>"
        g.write(ins.operands[0], f"{value} {sign} {g.literal(count, dtype)}", dtype)
        return
    amount = g.read(ins.operands[2], "u4")
    if left:
        unsigned = f"u{size}"
        value = g.read(ins.operands[1], unsigned)
        g.write(ins.operands[0], f"shift_left({value}, {amount})", unsigned)
    else:
        g.write(ins.operands[0], f"shift_right({value}, {amount})", dtype)


@emits("shf")
def funnel_shift(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    left = g.mods.take("l", "r") == "l"
    wrap = g.mods.take("wrap", "clamp") == "wrap"
    a, b, c = (g.read(o, "u4") for o in ins.operands[1:])
    g.write(ins.operands[0], f"funnel({a}, {b}, {c}, {left}, {wrap})", "u4")


@emits("lop3")
def logic3(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    table = as_immediate(ins.operands[4])
    if table is None or len(ins.operands) != 5:
        raise g.unknown("a form with a predicate")
    a, b, c = (g.read(o, "u4") for o in ins.operands[1:4])
    g.write(ins.operands[0], f"logic3({a}, {b}, {c}, {table})", "u4")


@emits("prmt")
def permute(g: Generator, ins: Instruction) -> None:
    g.mods.type()
    mode = g.mods.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    a, b = (g.read(o, "u4") for o in ins.operands[1:3])
    selector = as_immediate(ins.operands[3])
    known = {
        0x5410: f"({a} & KL) | ({b} << KS)",
        0x7632: f"({a} >> KS) | ({b} & ~KL)",
    }
    if mode == "" and selector in known:
        text = known[selector].replace("KL", g.literal(0xFFFF, "u4"))
        g.write(ins.operands[0], text.replace("KS", g.literal(16, "u4")), "u4")
        return
    c = g.read(ins.operands[3], "u4")
    g.write(ins.operands[0], f"permute_bytes({a}, {b}, {c}, {mode!r})", "u4")


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
    kind = g.mods.type()
    wrap = g.mods.take("wrap", "clamp") == "wrap"
    b = g.read(ins.operands[2], "u4")
    if ins.op == "bmsk":
        g.write(ins.operands[0], f"make_mask({g.read(ins.operands[1], 'u4')}, {b}, {wrap})", "u4")
    else:
        a = g.read(ins.operands[1], DTYPE[kind])
        g.write(ins.operands[0], f"extend_sign({a}, {b}, {wrap})", DTYPE[kind])


@emits("popc", "clz", "brev", "bfind")
def count_bits(g: Generator, ins: Instruction) -> None:
    kind = g.mods.type()
    size = TYPE_BYTES[kind]
    if ins.op == "bfind":
        as_shift = bool(g.mods.take("shiftamt"))
        value = g.read(ins.operands[1], DTYPE[kind])
        g.write(ins.operands[0], f"find_bit({value}, {as_shift})", "u4")
        return
    value = g.read(ins.operands[1], f"u{size}")
    function = {"popc": "population_count", "clz": "leading_zeros", "brev": "reverse_bits"}[ins.op]
    g.write(ins.operands[0], f"{function}({value})", f"u{size}" if ins.op == "brev" else "u4")
