"""Emitters of cvt."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.isa.semantics import convert  # noqa: F401  (registers the run-time functions)
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import TYPE_BYTES, Instruction

_INTEGER_ROUNDING = ("rni", "rzi", "rmi", "rpi")


@emits("cvt")
def convert_number(g: Generator, ins: Instruction) -> None:
    mods = g.mods
    if mods.take("pack"):
        raise g.unknown("cvt.pack")
    pair = mods.take("f16x2", "bf16x2")
    source = mods.type()
    to = pair or mods.type()
    if not to:
        raise g.unknown("only one type")
    ftz = bool(mods.take("ftz"))
    saturates = bool(mods.take("sat"))
    relu = bool(mods.take("relu"))
    integral = mods.take(*_INTEGER_ROUNDING)
    rounding = mods.take("rn", "rz", "rm", "rp", "rna")
    if pair:
        if source != "f32" or saturates or rounding not in ("rn", "rz"):
            raise g.unknown("this pair conversion")
        high, low = (g.read(o, "f4") for o in ins.operands[1:3])
        kind = pair.removesuffix("x2")
        value = f"pack_halves({high}, {low}, {kind!r}, {rounding!r}, {relu})"
        g.write(ins.operands[0], value, "u4")
        return
    if relu and source != "f32":
        raise g.unknown("relu of this source")
    value = g.read(ins.operands[1], DTYPE[source])
    if relu:
        value = g.let(value)
        zero = g.literal(0, "f4")
        value = f"where(np.isnan({value}), {value}, np.maximum({value}, {zero}))"
    if _is_float(source):
        text, dtype = _from_float(g, value, source, to, ftz, saturates, integral, rounding)
    else:
        text, dtype = _from_integer(g, value, source, to, saturates, rounding)
    g.write(ins.operands[0], text, dtype)


def _is_float(kind: str) -> bool:
    return "f" in kind


def _from_float(
    g: Generator,
    value: str,
    source: str,
    to: str,
    ftz: bool,
    saturates: bool,
    integral: str,
    rounding: str,
) -> tuple[str, str]:
    dtype = DTYPE[to]
    if ftz and source == "f32":
        value = f"flush({value})"
    if source == "bf16":
        value = f"bf16_to_f32({value})"
    held = "f4" if source == "bf16" else DTYPE[source]
    if not _is_float(to):
        if not integral:
            raise g.unknown("float to integer without a rounding mode")
        return f"float_to_integer({value}, {integral!r}, {dtype})", dtype
    if integral:
        value = f"round_to_integral({value}, {integral!r})"
    if saturates:
        value = f"saturate({value})"
    if to == "tf32":
        return f"to_tf32({value}, {rounding!r})", "f4"
    if to == "bf16":
        return (value if source == "bf16" else f"to_bf16({value}, {rounding or 'rn'!r})"), "u2"
    if to == "f16":
        return (value if held == "f2" else f"to_f16({value}, {rounding or 'rn'!r})"), "f2"
    if held == "f8" and to == "f32":
        value = f"f64_to_f32({value}, {rounding or 'rn'!r})"
    elif held != dtype:
        value = f"{value}.astype({dtype})"
    if ftz and to == "f32":
        value = f"flush({value})"
    return value, dtype


def _from_integer(
    g: Generator, value: str, source: str, to: str, saturates: bool, rounding: str
) -> tuple[str, str]:
    dtype = DTYPE[to]
    if not _is_float(to):
        if saturates:
            return f"saturate_integer({value}, {dtype})", dtype
        wide, size = TYPE_BYTES[to], TYPE_BYTES[source]
        if wide > size:
            # Extended by the sign of the source.
            return f"{value}.astype({DTYPE[source][0]}{wide}).view({dtype})", dtype
        return f"{value}.astype({dtype})", dtype
    if to == "f64":
        if rounding not in ("", "rn"):
            raise g.unknown("directed rounding to f64")
        return f"integer_to_f64({value})", dtype
    if to == "f32":
        text = f"integer_to_f32({value}, {rounding or 'rn'!r})"
        return (f"saturate({text})" if saturates else text), dtype
    if rounding not in ("", "rn"):
        raise g.unknown("directed rounding of an integer to a half")
    if to == "bf16":
        return f"to_bf16({value}.astype(f8), 'rn')", "u2"
    return f"to_f16({value}.astype(f8), 'rn')", "f2"
