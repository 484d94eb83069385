"""The emitted functions of a mask's tiles: what they return, how they are named and laid out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy

import flashgen as fg
import ptx_emulator as emulator
from flashgen.kernels.codegen.environment import environment
from flashgen.kernels.codegen.functions import SpecFunctions
from flashgen.kernels.codegen.text import COLUMNS, within_columns, wrap_code
from flashgen.shared.fast_division import multiplier_of
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.evaluate import evaluate
from flashgen.spec.analysis.sharing import share_evaluated
from flashgen.spec.language.symbols import K_HI, K_LO, Q_HI, Q_LO, K, Q
from flashgen.spec.language.sympy_functions import FloorDiv
from tests.support.nvrtc_helper import compile_ptx

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
SPECS = ("natten_2d", "block_diffusion", "longformer", "strided", "dilated_window", "bigbird")
LANES, BLOCK_K, SEQ_K = 64, 8, 150
SIZES = {"k_offset": 0, "q_offset": 0, "seq_q": 150, "seq_k": SEQ_K, "batch": 1, "heads_q": 1}


def functions_of(name: str) -> SpecFunctions:
    spec = fg.load(ROOT / "specs" / f"{name}.py")
    return SpecFunctions(spec, analyse(spec))


def scalars_of(make: SpecFunctions) -> dict[str, int]:
    draw = np.random.default_rng(7)
    return {scalar.name: int(draw.integers(3, 12)) for scalar in make.spec.scalars}


@pytest.mark.parametrize("name", SPECS)
def test_tile_functions_return_what_the_analysis_says(name: str) -> None:
    make = functions_of(name)
    if make.spec.tensors or any(scalar.dtype != "int32" for scalar in make.spec.scalars):
        pytest.skip("the mask reads tensors or floats")
    emitted = [make.tile_may(), make.tile_must()]
    scalars = scalars_of(make)
    fields = {**SIZES, **{f"s_{name}": value for name, value in scalars.items()}}
    multipliers = {f"d_{name}": multiplier_of(value) for name, value in scalars.items()}
    draw = np.random.default_rng(1)
    q_lo = draw.integers(0, 140, LANES)
    q_hi, tile = q_lo + draw.integers(0, 9, LANES), draw.integers(0, SEQ_K // BLOCK_K, LANES)
    lanes = {"q_lo": q_lo, "q_hi": q_hi, "tile": tile}
    code = [
        "#define DEVICE __device__ __forceinline__",
        environment().get_template("common/math.cuh.j2").render(calls_sines=False),
        f"constexpr int BLOCK_K = {BLOCK_K};",
        "struct Params {",
        *(f"  int {name};" for name in fields),
        *(f"  long long {name};" for name in multipliers),
        "};",
        *(function.text for function in (*make.tile_values, *emitted)),
        'extern "C" __global__ void run(const int* in, int* out) {',
        f"  const Params p = {{{', '.join(map(str, (fields | multipliers).values()))}}};",
        *(f"  const int {n} = in[{i * LANES} + threadIdx.x];" for i, n in enumerate(lanes)),
        *(f"  out[{i * LANES} + threadIdx.x] = {f.call()};" for i, f in enumerate(emitted)),
        "}",
    ]
    out = np.full((2, LANES), -1, np.int32)
    given = np.stack(list(lanes.values())).astype(np.int32)
    ptx = compile_ptx("\n".join(code))
    emulator.launch(ptx, "run", (1, 1, 1), (LANES, 1, 1), [given, out], 0)
    k_lo = tile * BLOCK_K
    env = {Q_LO: q_lo, Q_HI: q_hi, K_LO: k_lo, K_HI: np.minimum(k_lo + BLOCK_K, SEQ_K) - 1}
    env |= {scalar.expr: np.int64(scalars[scalar.name]) for scalar in make.spec.scalars}
    for found, condition in zip(out, (make.mask.may, make.mask.must), strict=True):
        wanted = np.broadcast_to(evaluate(condition, env), LANES)
        np.testing.assert_array_equal(found.astype(bool), wanted)


def test_names_say_what_they_hold_and_are_declared_once() -> None:
    make = functions_of("natten_2d")
    texts = ["\n".join(function.body) for function in (*make.tile_values, make.tile_may())]
    queries, _, may = texts
    assert "const int q_hi_div_width = fast_floor_div(q_hi, p.d_width);" in queries
    assert "const int clamped_q_hi_div_width" in queries
    assert [text.count("floor_div(") for text in texts] == [2, 2, 0]
    assert "tile_query.clamped_q_lo_div_width" in may
    for text in texts:
        declared = re.findall(r"^const \w+ (\w+) =", text, re.MULTILINE)
        assert len(declared) == len(set(declared))


@pytest.mark.parametrize("name", ["natten_2d", "block_diffusion"])
def test_a_test_of_tiles_has_few_lines(name: str) -> None:
    make = functions_of(name)
    assert len(make.tile_values) == 2  # what is made from the queries alone, and from the keys
    for function in (make.tile_may(), make.tile_must()):
        assert len(function.text.splitlines()) <= 22
        assert "floor_" not in function.text


def test_a_division_behind_a_condition_stays_behind_it() -> None:
    d = sympy.Symbol("d", integer=True)
    guarded = sympy.And(sympy.Gt(d, 0), sympy.Or(Q > K, sympy.Gt(FloorDiv(Q, d), 3)))
    block = share_evaluated(*guarded.args)
    assert not any(value.has(FloorDiv) for _, value in block.lets)


def test_only_the_part_that_needs_a_value_waits_for_it() -> None:
    d = sympy.Symbol("d", integer=True, positive=True)
    first, second = Q > 5, sympy.Gt(FloorDiv(Q, d), 3)
    stages = share_evaluated(first, second).stages()
    assert [len(needed) for needed, _ in stages] == [0, 1]


@pytest.mark.parametrize("name", SPECS)
def test_no_emitted_line_is_too_long_and_none_ends_inside_a_cast(name: str) -> None:
    make = functions_of(name)
    functions = [make.tile_may(), make.tile_must(), make.tile_reach(), *make.mask_mod().functions]
    for line in (line for function in functions for line in function.text.splitlines()):
        assert len(line) <= COLUMNS, line
        assert not line.rstrip().endswith(("&&", "||", "int64(", "int(")), line


def test_statements_are_broken_before_their_loosest_operators() -> None:
    condition = " && ".join(f"first_operand_{n} <= second_operand_{n}" for n in range(4))
    assert wrap_code(f"return {condition};", indent=2) == [
        "return first_operand_0 <= second_operand_0",
        "    && first_operand_1 <= second_operand_1",
        "    && first_operand_2 <= second_operand_2",
        "    && first_operand_3 <= second_operand_3;",
    ]


def test_a_long_line_of_a_template_is_broken_where_nothing_changes_its_meaning() -> None:
    operand, sentence = "some_operand[row * COLUMNS + column]", "Some words of a comment."
    lines = [
        f"    if ({operand} > {operand}) {operand} = one_of(p, {operand});",
        f"  // {' '.join([sentence] * 5)}",
        f'  static_assert({operand} == 0, "{" ".join([sentence] * 5)}");',
        f"  const int* number;  // {' '.join([sentence] * 4)}",
        f"  const int number = {operand} + {operand};  // {sentence}",
    ]
    assert within_columns("\n".join(lines)).splitlines() == [
        f"    if ({operand} > {operand})",
        f"      {operand} = one_of(p, {operand});",
        f"  // {' '.join([sentence] * 3)} Some words of a",
        f"  // comment. {sentence}",
        lines[2],
        f"  const int* number;  // {' '.join([sentence] * 3)}",
        f"                      // {sentence}",
        f"  // {sentence}",
        f"  const int number = {operand} + {operand};",
    ]


INDEXED = fg.Tensor("indexed", ("any",), "float32", grad=True)
WIDTH, PREFIX = fg.Scalar("width", "int32", minimum=1), fg.Scalar("prefix", "int32")


@pytest.mark.parametrize(
    ("mask_mod", "score_mod"),
    [
        (lambda b, h, q, k: (q - k < WIDTH) | (k < PREFIX), None),
        (
            lambda b, h, q, k: fg.where(
                fg.where(h % 2 == 0, q >= k, q <= k), q % 5 != k % 3, (q - k) % -4 == -1
            ),
            None,
        ),
        (
            None,
            lambda s, b, h, q, k: (
                s + INDEXED[-3 * q] * INDEXED[-3 * q + 1] + INDEXED[fg.maximum(-3 * q, k)]
            ),
        ),
    ],
    ids=["a bound that is a number", "a comparison with a number", "a negative factor"],
)
def test_names_are_identifiers_whatever_they_describe(mask_mod: Any, score_mod: Any) -> None:
    kernels = fg.emit(fg.AttentionSpec(mask_mod, score_mod, head_dim=16, name="named"))
    sections = [each.spec_section for each in (kernels.forward, *kernels.backward)]
    text = "\n".join(line for section in sections for line in section)
    names = re.findall(r"^ *const [a-z0-9]+ (\S+) =", text, re.MULTILINE)
    assert names
    assert [name for name in names if not re.fullmatch(r"[A-Za-z_]\w*", name)] == []
