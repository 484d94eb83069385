"""Emitters of cvt."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction

_INTEGER_ROUNDING = ("rni", "rzi", "rmi", "rpi")


@emits("cvt")
def convert_number(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("pack"):
        _pack(g, ins)
        return
    small = mods.take("e4m3x2", "e5m2x2")
    if small:
        _small_floats(g, ins, small.removesuffix("x2"))
        return
    pair = mods.take("f16x2", "bf16x2")
    source = mods.type()
    to = pair or mods.type()
    if not to:
        raise g.unknown("only one type")
    ftz = bool(mods.take("ftz"))
    saturates = bool(mods.take("sat"))
    clamps = bool(mods.take("relu"))
    integral = mods.take(*_INTEGER_ROUNDING)
    rounding = mods.take("rn", "rz", "rm", "rp", "rna")
    if pair:
        if source != "f32" or saturates or rounding not in ("rn", "rz"):
            raise g.unknown("this pair conversion")
        high, low = (g.read(o, "f4") for o in ins.operands[1:3])
        kind = pair.removesuffix("x2")
        value = f"pack_halves({high}, {low}, {kind!r}, {rounding!r}, {clamps})"
        g.write(ins.operands[0], value, "u4")
        return
    if clamps and source != "f32":
        raise g.unknown("relu of this source")
    dtype = DTYPE[to]
    value = g.read(ins.operands[1], DTYPE[source])
    if not _is_float(source):
        value = _from_integer(g, value, source, to, saturates, rounding)
        g.write(ins.operands[0], value, dtype)
        return
    if clamps:
        value = f"relu({value})"
    if ftz and source == "f32":
        value = f"flush({value})"
    if source == "bf16":
        value = f"bf16_to_f32({value})"
    if not _is_float(to):
        if not integral:
            raise g.unknown("float to integer without a rounding mode")
        g.write(ins.operands[0], f"float_to_integer({value}, {integral!r}, {dtype})", dtype)
        return
    if integral:
        value = f"round_to_integral({value}, {integral!r})"
    if saturates:
        value = f"saturate({value})"
    value = _rounded(value, "f4" if source == "bf16" else DTYPE[source], to, rounding)
    if ftz and to == "f32":
        value = f"flush({value})"
    g.write(ins.operands[0], value, dtype)


def _small_floats(g: Generator, ins: Instruction, kind: str) -> None:
    """To and from pairs of 8-bit floats."""
    mods = g.mods
    clamps, saturates = bool(mods.take("relu")), bool(mods.take("satfinite"))
    other = mods.take("f16x2", "f32")
    if not mods.take("rn") or not other:
        raise g.unknown("this conversion of 8-bit floats")
    to, *sources = ins.operands
    to_halves = ins.mods.index(other) < ins.mods.index(f"{kind}x2")
    if to_halves == saturates or (to_halves and other != "f16x2"):
        raise g.unknown("this conversion of 8-bit floats")
    if to_halves:
        value = f"halves_of_small_floats({g.read(sources[0], 'u2')}, {kind!r}, {clamps})"
        g.write(to, value, "u4")
    elif other == "f16x2":
        value = f"small_floats_of_halves({g.read(sources[0], 'u4')}, {kind!r}, {clamps})"
        g.write(to, value, "u2")
    else:
        high, low = (g.read(o, "f4") for o in sources)
        g.write(to, f"pack_small_floats({high}, {low}, {kind!r}, {clamps})", "u2")


def _pack(g: Generator, ins: Instruction) -> None:
    """cvt.pack: two integers saturated to fewer bits, side by side, below what the third holds."""
    mods = g.mods
    into = mods.take("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")
    if not into or not mods.take("sat") or not mods.take("s32"):
        raise g.unknown("this form of cvt.pack")
    bits = int(into[1:])
    if bool(mods.take("b32")) != (bits < 16):
        raise g.unknown("this number of operands")
    a, b = (g.read(o, "i4") for o in ins.operands[1:3])
    c = g.read(ins.operands[3], "u4") if bits < 16 else g.literal(0, "u4")
    g.write(ins.operands[0], f"pack_saturated({a}, {b}, {c}, {bits}, {into[0] == 's'})", "u4")


def _is_float(kind: str) -> bool:
    return "f" in kind


def _rounded(value: str, held: str, to: str, rounding: str) -> str:
    """A float of dtype ``held`` as the float type ``to``."""
    dtype = DTYPE[to]
    if to == "tf32":
        return f"to_tf32({value}, {rounding!r})"
    if to == "bf16":
        return f"to_bf16({value}, {rounding or 'rn'!r})"
    if int(held[1:]) > int(dtype[1:]):
        return f"round_directed({value}, {rounding or 'rn'!r}, {dtype})"
    return value if held == dtype else f"{value}.astype({dtype})"


def _from_integer(
    g: Generator, value: str, source: str, to: str, saturates: bool, rounding: str
) -> str:
    dtype = DTYPE[to]
    if not _is_float(to):
        if saturates:
            return f"saturate_integer({value}, {dtype})"
        wide, size = TYPE_BYTES[to], TYPE_BYTES[source]
        if wide > size:
            # Extended by the sign of the source.
            return f"{value}.astype({DTYPE[source][0]}{wide}).view({dtype})"
        return f"{value}.astype({dtype})"
    if to == "f32":
        text = f"integer_to_f32({value}, {rounding or 'rn'!r})"
        return f"saturate({text})" if saturates else text
    if rounding not in ("", "rn"):
        raise g.unknown(
            f"directed rounding {'to f64' if to == 'f64' else 'of an integer to a half'}"
        )
    text = f"{value}.astype(f8)"
    return _rounded(f"saturate({text})" if saturates else text, "f8", to, "rn")
