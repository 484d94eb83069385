"""Printed CUDA expressions, compiled, executed in the emulator and compared with evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ptx_emulator as emulator
from flashgen.kernels.codegen.environment import environment
from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.shared.errors import SpecError
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.mask import analyse_mask
from flashgen.spec.language.float_functions import Abs, Cos, Exp, Log, Log2, Sigmoid, Sin, Tanh
from flashgen.spec.language.lets import inlined
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, B, H, K, Q, is_condition, is_int
from flashgen.spec.language.sympy_functions import Floor, FloorDiv, FloorMod, Maximum, Minimum
from flashgen.spec.language.traced import Value
from tests.support.expr_trees import MASKS, NUMBERS, SCALARS, SIZES, Undefined, direct, traced
from tests.support.nvrtc_helper import compile_ptx

LANES = 32
INTEGERS = ("b", "h", "q", "k", "q_lo", "q_hi", "k_lo", "k_hi", *SCALARS, *SIZES)


def values_of_lanes(seed: int) -> dict[str, np.ndarray]:
    """Random values of every symbol; one lane has positions at the limit of what is admitted."""
    draw = np.random.default_rng(seed)
    ranges = {"b": (0, 3), "h": (0, 4), "width": (-6, 9), "step": (1, 6), "flag": (0, 2)}
    ranges |= {"heads": (1, 5), "seq_q": (1, 13), "seq_k": (1, 13)}
    lanes = {n: draw.integers(*ranges.get(n, (-20, 40)), LANES) for n in INTEGERS}
    lanes["q"][0], lanes["k"][0] = 2**28, -(2**28)
    for axis in "qk":
        lanes[f"{axis}_lo"] = lanes[axis]
        lanes[f"{axis}_hi"] = lanes[axis] + draw.integers(0, 9, LANES)
    return {name: value.astype(np.int32) for name, value in lanes.items()}


def kernel(exprs: list[Any], printer: CPrinter) -> str:
    body = [
        f"  const {'bool' if name == 'flag' else 'int'} {name} = in[{i * LANES} + threadIdx.x];"
        for i, name in enumerate(INTEGERS)
    ]
    for i, expr in enumerate(exprs):
        whole = is_condition(expr) or is_int(expr)
        out = "whole" if whole else "real"
        body.append(f"  {out}[{i * LANES} + threadIdx.x] = {printer.expr(expr)};")
    helpers = environment().get_template("common/math.cuh.j2").render(calls_sines=False)
    head = 'extern "C" __global__ void run(const int* in, long long* whole, float* real) {'
    return "\n".join(["#define DEVICE __device__ __forceinline__", helpers, head, *body, "}", ""])


def executed(exprs: list[Any], lanes: dict[str, np.ndarray], dtype: str = "float32") -> Any:
    printer = CPrinter({}, dtype)
    ptx = compile_ptx(kernel(exprs, printer))
    whole = np.zeros((len(exprs), LANES), np.int64)
    real = np.zeros((len(exprs), LANES), np.float32)
    given_values = np.stack([lanes[name] for name in INTEGERS])
    emulator.launch(ptx, "run", (1, 1, 1), (LANES, 1, 1), [given_values, whole, real], 0)
    return [
        w if is_condition(e) or is_int(e) else r for e, w, r in zip(exprs, whole, real, strict=True)
    ]


def symbols() -> dict[str, sympy.Symbol]:
    found = {s.name: s for s in (B, H, Q, K, Q_LO, Q_HI, K_LO, K_HI)}
    return found | {name: leaf.expr for name, leaf in {**SCALARS, **SIZES}.items()}


def all_exprs(tree: Any) -> list[Any]:
    """A mask with everything that the analysis makes of it, or a number alone."""
    leaves = {**SCALARS, **SIZES, "b": Value(B), "h": Value(H), "q": Value(Q), "k": Value(K)}
    try:
        value = traced(tree, leaves)
    except SpecError:  # integers that can be too large
        return []
    if not isinstance(value, Value):
        return []
    if not is_condition(value.expr):
        return [value.expr]
    found = analyse_mask(value.expr)
    ends = [found.reach.lo, found.reach.hi]
    if found.full is not None:
        ends += [found.full.lo, found.full.hi]
    conditions = [found.may, found.must, *(end for end in ends if end is not None)]
    return [value.expr, *map(inlined, conditions)]


def defined(tree: Any, env: dict[str, Any]) -> bool:
    try:
        direct(tree, env)
    except Undefined:
        return False
    return True


@settings(max_examples=2, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees=st.lists(st.one_of(MASKS, NUMBERS), min_size=30, max_size=30), seed=st.integers(0, 9))
def test_random_expressions_run_to_their_value(trees: list[Any], seed: int) -> None:
    check(trees, seed)


def test_bounds_of_bits_run_to_their_value() -> None:
    operations = [("popcount", ("^", "q", "k")), ("|", ("&", "q", 24), "k"), ("^", "q", "k")]
    shifts = [(sign, x, n) for sign in ("<<", ">>") for x, n in (("q", "h"), ("k", "step"))]
    shifts += [("&", ("<<", 1, ("minimum", ("&", "k", 63), 60)), ("*", "q", 2**30))]
    check([("<", x, y) for x in (*operations, *shifts) for y in (5, "width")], seed=3)


def check(trees: list[Any], seed: int) -> None:
    """The masks of the trees and what the analysis makes of them, in lanes and evaluated."""
    lanes = values_of_lanes(seed)
    cases = [(tree, expr) for tree in trees for expr in all_exprs(tree)]
    results = executed([expr for _, expr in cases], lanes)
    by_name = symbols()
    for (tree, expr), found in zip(cases, results, strict=True):
        for lane in range(LANES):
            plain = {name: int(values[lane]) for name, values in lanes.items()}
            if not defined(tree, {**plain, "flag": bool(plain["flag"])}):
                continue
            try:
                expected = evaluate(expr, {by_name[name]: v for name, v in plain.items()})
            except ZeroDivisionError:
                continue
            if is_condition(expr) or is_int(expr):
                assert found[lane] == expected, (expr, plain)
            else:
                assert found[lane] == pytest.approx(expected, rel=1e-5, abs=1e-5), (expr, plain)


X = sympy.Symbol("x", real=True)

# Function, its argument as a multiple of an integer symbol, relative error at float32 and float16.
FUNCTIONS = [
    (Exp, sympy.Rational(1, 4), 3e-7, 3e-7),
    (Tanh, sympy.Rational(1, 9), 2e-7, 2**-10.9),
    (Sigmoid, sympy.Rational(1, 3), 1e-6, 1e-6),
    (lambda x: Log(x + 17), sympy.S.One, 2e-7, 2e-7),
    (lambda x: Log2(x + 17), sympy.S.One, 2e-7, 2e-7),
    (lambda x: sympy.sqrt(x * x + 1), sympy.Rational(3, 7), 2e-7, 3e-7),
    (lambda x: 1 / (x * x + 1), sympy.Rational(3, 7), 2e-7, 3e-7),
    (lambda x: (x * x + 1) ** sympy.Rational(-1, 2), sympy.Rational(3, 7), 3e-7, 3e-7),
    (lambda x: 3**x, sympy.Rational(1, 5), 1e-6, 1e-6),
    (lambda x: (1 + x * x) ** (x / 9), sympy.Rational(1, 5), 1e-6, 1e-6),
    (lambda x: (x * x + 2) ** 5, sympy.Rational(1, 3), 1e-6, 1e-6),
    (Floor, sympy.Rational(1, 3), 0, 0),
    (lambda x: FloorDiv(sympy.sqrt(x * x), 2), sympy.S.One, 0, 0),
    (lambda x: FloorMod(x * sympy.sqrt(4 + 0 * x), sympy.Rational(5, 2)), sympy.S.One, 2e-7, 2e-7),
    (lambda x: Minimum(Exp(x), 2, Exp(-x)), sympy.Rational(1, 4), 3e-7, 3e-7),
    (lambda x: Maximum(Exp(x), Exp(-x)), sympy.Rational(1, 4), 3e-7, 3e-7),
    (lambda x: Abs(Tanh(x)), sympy.Rational(1, 9), 2e-7, 2**-10.9),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_functions_are_as_accurate_as_they_say(dtype: str) -> None:
    lanes = values_of_lanes(3)
    lanes["q"] = np.arange(-16, 16, dtype=np.int32)
    exprs = [function(Q * factor) for function, factor, _, _ in FUNCTIONS]
    for (_, _, exact, fast), expr, found in zip(
        FUNCTIONS, exprs, executed(exprs, lanes, dtype), strict=True
    ):
        tolerance = exact if dtype == "float32" else fast
        expected = np.array([float(evaluate(expr, {Q: int(q)})) for q in lanes["q"]])
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=1e-37, err_msg=str(expr))


def test_sine_and_cosine_hold_for_small_and_for_huge_arguments() -> None:
    lanes = values_of_lanes(4)
    lanes["q"] = np.array([*range(-8, 8), *(3**i for i in range(16))], dtype=np.int32)
    scales = [sympy.Rational(1, 1000), sympy.S.One, sympy.Integer(10) ** 9, sympy.Integer(10) ** 30]
    exprs = [kind(Q * scale) for scale in scales for kind in (Sin, Cos)]
    for expr, found in zip(exprs, executed(exprs, lanes), strict=True):
        scale = np.float32(float(expr.args[0].as_coeff_Mul()[0]))
        # What the kernel computes: the sine of the float32 that the argument rounds to.
        argument = (lanes["q"].astype(np.float32) * scale).astype(np.float32)
        exact = [float(expr.func(sympy.Rational(float(x))).evalf(20)) for x in argument]
        np.testing.assert_allclose(found, exact, rtol=0, atol=2e-7, err_msg=str(expr))
