"""Emitters of floating-point arithmetic."""

from __future__ import annotations

from flashgen.emulator.isa.generator import Generator
from flashgen.emulator.isa.registry import emits
from flashgen.emulator.isa.semantics import floats, halves  # noqa: F401  (register the run-time functions)
from flashgen.emulator.ptx.register_types import DTYPE
from flashgen.emulator.ptx.syntax import Instruction, Operand

_FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2"}
_HALVES = {"f16", "bf16", "f16x2", "bf16x2"}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


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
    if pair:
        g.write(ins.operands[0], value, "u4")
    else:
        g.write(ins.operands[0], f"({value}).view({DTYPE[kind]})", DTYPE[kind])


def binary_float(g: Generator, ins: Instruction, kind: str) -> None:
    """add, sub, mul, div, min and max."""
    mods = g.mods
    if kind == "f32x2":
        raise g.unknown("pairs of f32")
    if kind in _HALVES:
        if ins.op == "div":
            raise g.unknown("half division")
        half_arithmetic(g, ins, kind)
        return
    dtype = DTYPE[kind]
    ftz = bool(mods.take("ftz"))
    saturates = bool(mods.take("sat"))
    rounding = mods.take("rn", "rz", "rm", "rp") or "rn"
    a, b, *more = sources(g, ins.operands[1:], dtype, ftz)
    if ins.op in ("min", "max"):
        if mods.take("xorsign"):
            raise g.unknown("xorsign")
        function = {"min": "minimum", "max": "maximum"}[ins.op]
        if mods.take("NaN"):
            function += "_nan"
        if mods.take("abs") or more:
            raise g.unknown("three operands or .abs")
        value = f"{function}({a}, {b})"
    elif ins.op == "div":
        form = mods.take("approx", "full")
        if rounding != "rn":
            if dtype != "f4":
                raise g.unknown("directed rounding of f64")
            value = f"directed_quotient({rounding!r}, {a}, {b})"
        else:
            value = f"quick_quotient({a}, {b})" if form == "approx" else f"{a} / {b}"
    elif rounding != "rn":
        if dtype != "f4":
            raise g.unknown("directed rounding of f64")
        if ins.op == "sub":
            value = f"directed('add', {rounding!r}, {a}, -{b})"
        else:
            value = f"directed({ins.op!r}, {rounding!r}, {a}, {b})"
    else:
        value = f"{a} {_SIGNS[ins.op]} {b}"
    finish(g, ins.operands[0], value, dtype, ftz, saturates)


def multiply_add_float(g: Generator, ins: Instruction, kind: str) -> None:
    """fma, and mad, which is the same for floats since sm_20."""
    mods = g.mods
    if kind in _HALVES:
        half_arithmetic(g, ins, kind)
        return
    if kind == "f32x2":
        raise g.unknown("pairs of f32")
    dtype = DTYPE[kind]
    ftz = bool(mods.take("ftz"))
    saturates = bool(mods.take("sat"))
    rounding = mods.take("rn", "rz", "rm", "rp") or "rn"
    a, b, c = sources(g, ins.operands[1:], dtype, ftz)
    if rounding != "rn":
        if dtype != "f4":
            raise g.unknown("directed rounding of f64")
        value = f"directed('fma', {rounding!r}, {a}, {b}, {c})"
    else:
        value = f"fma{kind[1:]}({a}, {b}, {c})"
    finish(g, ins.operands[0], value, dtype, ftz, saturates)


def unary_float(g: Generator, ins: Instruction, kind: str) -> None:
    """abs and neg."""
    if kind in _HALVES:
        half_arithmetic(g, ins, kind)
        return
    dtype = DTYPE[kind]
    ftz = bool(g.mods.take("ftz"))
    (value,) = sources(g, ins.operands[1:], dtype, ftz)
    g.write(ins.operands[0], f"np.abs({value})" if ins.op == "abs" else f"-{value}", dtype)


# ---- functions of one argument

_FUNCTIONS = {
    "ex2": "np.exp2({x})",
    "lg2": "np.log2({x})",
    "rcp": "{one} / {x}",
    "rsqrt": "reciprocal_root({x})",
    "sqrt": "np.sqrt({x})",
    "sin": "sine({x})",
    "cos": "cosine({x})",
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
    value = _FUNCTIONS[ins.op].format(x=x, one=one)
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


@emits("testp")
def test(g: Generator, ins: Instruction) -> None:
    kinds = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    what = g.mods.take(*kinds)
    dtype = DTYPE[g.mods.type()]
    g.write(ins.operands[0], f"test_property({g.read(ins.operands[1], dtype)}, {what!r})", "b1")
