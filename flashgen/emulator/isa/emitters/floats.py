"""Emitters of floating-point arithmetic."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import Instruction, Operand

_HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
_FLOATS = {*_HALVES, "f32", "f64", "f32x2"}
_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def is_float(kind: str) -> bool:
    return kind in _FLOATS


def finish(g: Generator, to: Operand, value: str, dtype: str, ftz: bool, saturates: bool) -> None:
    """Applies .sat and .ftz to a result and assigns it."""
    if saturates:
        value = f"saturate({value})"
    if ftz:
        value = f"flush({value})"
    g.write(to, value, dtype)


def sources(g: Generator, operands: list[Operand], dtype: str, ftz: bool) -> list[str]:
    names = [g.read(o, dtype) for o in operands]
    return [f"flush({n})" if ftz and n[0] != "K" else n for n in names]


def half_arithmetic(g: Generator, ins: Instruction, kind: str) -> None:
    """Any arithmetic on f16, bf16 and their pairs."""
    g.mods.take("rn")
    flags = ",".join(w for w in ("sat", "ftz", "relu", "NaN") if g.mods.take(w))
    g.mods.take("approx")
    if g.mods.take("xorsign", "noftz"):
        raise g.unknown("xorsign or noftz")
    pair = kind.endswith("x2")
    raw = "u4" if pair else "u2"
    operands = ", ".join(g.read(o, raw) for o in ins.operands[1:])
    function = "half_op2" if pair else "half_op"
    value = f"{function}({ins.op!r}, {kind.removesuffix('x2')!r}, {flags!r}, {operands})"
    g.write(ins.operands[0], value if pair else f"({value}).view({DTYPE[kind]})", DTYPE[kind])


def float_arithmetic(g: Generator, ins: Instruction, kind: str) -> None:
    """add, sub, mul, div, min, max, abs, neg, fma; mad is the same as fma since sm_20."""
    mods, op = g.mods, ins.op
    if kind == "f32x2":
        raise g.unknown("pairs of f32")
    if kind in _HALVES:
        if op == "div":
            raise g.unknown("half division")
        half_arithmetic(g, ins, kind)
        return
    dtype = DTYPE[kind]
    ftz = bool(mods.take("ftz"))
    values = sources(g, ins.operands[1:], dtype, ftz)
    if op in ("abs", "neg"):
        (value,) = values
        g.write(ins.operands[0], f"np.abs({value})" if op == "abs" else f"-{value}", dtype)
        return
    saturates = bool(mods.take("sat"))
    rounding = mods.take("rn", "rz", "rm", "rp") or "rn"
    if rounding != "rn" and dtype != "f4":
        raise g.unknown("directed rounding of f64")
    if op in ("fma", "mad"):
        a, b, c = values
        value = f"fma{kind[1:]}({a}, {b}, {c})"
        if rounding != "rn":
            value = f"directed('fma', {rounding!r}, {a}, {b}, {c})"
    else:
        value = _binary(g, op, rounding, values)
    finish(g, ins.operands[0], value, dtype, ftz, saturates)


def _binary(g: Generator, op: str, rounding: str, values: list[str]) -> str:
    """The result of add, sub, mul, div, min or max as an expression."""
    mods = g.mods
    if op in ("min", "max"):
        if mods.take("xorsign"):
            raise g.unknown("xorsign")
        propagates = mods.take("NaN")
        if mods.take("abs") or len(values) != 2:
            raise g.unknown("three operands or .abs")
    a, b = values
    if op in ("min", "max"):
        value = f"{op}imum({a}, {b})"
        return f"or_nan({value}, {a}, {b})" if propagates else value
    if op == "div":
        form = mods.take("approx", "full")
        if rounding != "rn":
            return f"directed_quotient({rounding!r}, {a}, {b})"
        return f"quick_quotient({a}, {b})" if form == "approx" else f"{a} / {b}"
    if rounding == "rn":
        return f"{a} {_SIGNS[op]} {b}"
    if op == "sub":
        return f"directed('add', {rounding!r}, {a}, -{b})"
    return f"directed({op!r}, {rounding!r}, {a}, {b})"


# ---- functions of one argument

_FUNCTIONS = {
    "ex2": "np.exp2({x})",
    "lg2": "np.log2({x})",
    "rcp": "{one} / {x}",
    "rsqrt": "(1.0 / np.sqrt({x}.astype(f8))).astype({dtype})",
    "sqrt": "np.sqrt({x})",
    "sin": "np.sin({x}.astype(f8)).astype({dtype})",
    "cos": "np.cos({x}.astype(f8)).astype({dtype})",
    "tanh": "np.tanh({x})",
}


@emits(*_FUNCTIONS)
def function(g: Generator, ins: Instruction) -> None:
    kind = g.mods.take("f16x2", "bf16x2") or g.mods.type()
    if kind in _HALVES:
        if ins.op not in ("ex2", "tanh"):
            raise g.unknown("in half precision")
        half_arithmetic(g, ins, kind)
        return
    dtype = DTYPE[kind]
    ftz = bool(g.mods.take("ftz"))
    approx = g.mods.take("approx")
    rounding = g.mods.take("rn", "rz", "rm", "rp")
    directed = rounding not in ("", "rn")
    if not approx and not rounding:
        raise g.unknown("no rounding mode")
    if directed and (dtype != "f4" or ins.op not in ("rcp", "sqrt")):
        raise g.unknown("directed rounding")
    if dtype == "f8" and ins.op not in ("rcp", "sqrt", "rsqrt"):
        raise g.unknown("in double precision")
    if ins.op == "ex2" and ftz:
        g.write(ins.operands[0], f"exp2_flushed({g.read(ins.operands[1], dtype)})", dtype)
        return
    (x,) = sources(g, ins.operands[1:2], dtype, ftz)
    one = g.constant_one(dtype)
    value = _FUNCTIONS[ins.op].format(x=x, one=one, dtype=dtype)
    if directed and ins.op == "rcp":
        value = f"directed_quotient({rounding!r}, {one}, {x})"
    elif directed:
        value = f"directed_root({rounding!r}, {x})"
    finish(g, ins.operands[0], value, dtype, ftz, False)


@emits("copysign")
def copy_sign(g: Generator, ins: Instruction) -> None:
    dtype = DTYPE[g.mods.type()]
    a, b = (g.read(o, dtype) for o in ins.operands[1:])
    g.write(ins.operands[0], f"np.copysign({b}, {a})", dtype)


_PROPERTIES = {
    "finite": "np.isfinite({x})",
    "infinite": "np.isinf({x})",
    "number": "~np.isnan({x})",
    "notanumber": "np.isnan({x})",
    "normal": "np.isfinite({x}) & (np.abs({x}) >= np.finfo({dtype}).tiny)",
    "subnormal": "({x} != 0) & (np.abs({x}) < np.finfo({dtype}).tiny)",
}


@emits("testp")
def test(g: Generator, ins: Instruction) -> None:
    text = _PROPERTIES[g.mods.take(*_PROPERTIES)]
    dtype = DTYPE[g.mods.type()]
    g.write(ins.operands[0], text.format(x=g.read(ins.operands[1], dtype), dtype=dtype), "b1")
