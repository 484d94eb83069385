"""Divisions by a run-time scalar are multiplications on the device, exact for every int32."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sympy
import torch

import flashgen as fg
import ptx_emulator as emulator
from benchmarks.instructions import work_of
from flashgen.calls.runtime import kernel_arguments
from flashgen.kernels.codegen.environment import environment
from flashgen.kernels.compile import disassembly
from flashgen.shared.call import CallRanges
from flashgen.shared.dtypes import INT32_MAX
from flashgen.shared.fast_division import inverse_of, multiplier_of
from flashgen.spec.analysis.diagonals import by_distance
from flashgen.spec.analysis.natural import NaturalDiv, NaturalMod, with_natural_divisions
from flashgen.spec.language.signature import at_offsets
from flashgen.spec.language.symbols import APART, K, Q
from flashgen.spec.language.sympy_functions import FloorDiv, FloorMod
from tests.support.judged import Call, normal
from tests.support.nvrtc_helper import compile_ptx
from tests.support.paths import ROOT
from tests.support.tiers import one_in

INT32_MIN = -INT32_MAX - 1
LANES = 128


def edges() -> list[int]:
    """0, and the numbers beside powers of two and beside the ends of int32, of both signs."""
    near = {2**k + i for k in range(32) for i in (-1, 0, 1)} | {0, 3, 5, 7, 10, 641, 6700417}
    return sorted(x for x in near | {-x for x in near} if INT32_MIN <= x <= INT32_MAX)


def pairs() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    n, d = (grid.ravel() for grid in np.meshgrid(edges(), edges()))
    more = draw.integers(INT32_MIN, INT32_MAX, (2, 4000))
    more[1] >>= draw.integers(0, 31, 4000)
    # Where the quotient is about to grow: at multiples of the divisor, and one below.
    multiple = more[1] * (more[0] // np.where(more[1] == 0, 1, more[1]))
    n = np.concatenate([n, more[0], multiple, multiple - 1])
    d = np.concatenate([d, more[1], more[1], more[1]])
    inside = (n >= INT32_MIN) & (n <= INT32_MAX) & ~((n == INT32_MIN) & (d == -1))
    n, d = n[inside], d[inside]
    padding = -len(n) % LANES
    return np.append(n, [1] * padding), np.append(d, [1] * padding)


def run(
    expression: str, n: np.ndarray, d: np.ndarray, made: Callable[[int], int] = multiplier_of
) -> np.ndarray:
    """A device function of each n and d, with what the host makes of d in ``by``."""
    code = [
        "#define DEVICE __device__ __forceinline__",
        environment().get_template("common/math.cuh.j2").render(calls_sines=False),
        'extern "C" __global__ void run(const int* n_in, const int* d_in, const long long* by_in,',
        "                               int* out) {",
        f"  const int i = blockIdx.x * {LANES} + threadIdx.x;",
        "  const int n = n_in[i], d = d_in[i];",
        "  const long long by = by_in[i];",
        f"  out[i] = {expression};",
        "}",
    ]
    by = np.array([made(int(x)) for x in d], dtype=np.int64)
    out = np.zeros(len(n), np.int32)
    given = [n.astype(np.int32), d.astype(np.int32), by, out]
    ptx = compile_ptx("\n".join(code))
    emulator.launch(ptx, "run", (len(n) // LANES, 1, 1), (LANES, 1, 1), given, 0)
    return out


FUNCTIONS = ["signed_floor", "fast_floor", "fast"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_quotients_and_remainders_are_exact_for_every_int32(name: str) -> None:
    n, d = pairs()
    if name != "signed_floor":
        d = np.where(d < 0, np.minimum(-d, INT32_MAX), np.maximum(d, 1))
    if name == "fast":
        n = np.where(n < 0, -1 - n, n)
    whole = np.where(d == 0, 1, d)
    divisor = "n, by" if name != "signed_floor" else "n, d, by"
    np.testing.assert_array_equal(
        run(f"{name}_div({divisor})", n, d), np.where(d == 0, 0, n // whole)
    )
    np.testing.assert_array_equal(
        run(f"{name}_mod(n, d, by)", n, d), np.where(d == 0, 0, n % whole)
    )


def test_a_test_for_multiples_is_exact_for_every_int32() -> None:
    n, d = pairs()
    n = np.append(n, [INT32_MIN] * LANES)
    d = np.append(d, [INT32_MIN >> i % 32 for i in range(LANES)])
    whole = np.where(d == 0, 1, d)
    expected = np.where(d == 0, True, n % whole == 0)
    assert expected.sum() > 8000
    np.testing.assert_array_equal(run("divides(d, n, by)", n, d, inverse_of) != 0, expected)


def test_a_multiplier_has_32_bits_and_its_shift_31() -> None:
    for d in edges():
        shift, multiplier = divmod(multiplier_of(d), 2**32)
        assert 0 <= shift <= 31
        assert (multiplier == 0) == (d == 0)


step = fg.Scalar("step", "int32")
width = fg.Scalar("width", "int32", minimum=1)
IDS = fg.Tensor("ids", ("places",), "int32")
SPEC = fg.AttentionSpec(
    lambda b, h, q, k: (k <= q) & ((k - q) // step % 3 != 1) & ((q - 20) % width >= k % width - 3),
    head_dim=16,
    name="fast_division",
)


@pytest.mark.parametrize("arch", [None, "sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step_value", [3, -3, 2**30, -(2**30), -1])
def test_masks_that_divide_by_a_scalar_agree_with_the_oracle(
    step_value: int, arch: str | None
) -> None:
    operands = tuple(normal((1, 2, 48, 16), torch.float16, seed) for seed in range(3))
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    scalars = {"step": step_value, "width": 7}
    run = Call(SPEC, operands, {"scalars": scalars}, **how).judged_forward()
    if run.source is not None:
        assert "signed_floor_div(" in run.source.text
        assert "fast_floor_mod(" in run.source.text


MULTIPLES = fg.AttentionSpec(
    lambda b, h, q, k: (
        ((q - k) % step == 0) | ((k - q) % width != 0) & (k % 3 == 1) | ((q * 5 - 130) % width == 0)
    ),
    head_dim=16,
    name="multiples",
)


@pytest.mark.parametrize("arch", [None, "sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step_value", [6, -5, 1, 2**30, 47])
def test_masks_of_multiples_of_a_scalar_agree_with_the_oracle(
    step_value: int, arch: str | None
) -> None:
    operands = tuple(normal((1, 2, 48, 16), torch.float16, seed) for seed in range(3))
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    scalars = {"step": step_value, "width": 4}
    run = Call(MULTIPLES, operands, {"scalars": scalars}, **how).judged_forward()
    if run.source is not None:
        body = run.source.text.split("bool mask_mod(")[1].split("\n}")[0]
        assert "!divides(" in run.source.text
        assert " % p.s_" not in body


def test_a_wrong_inverse_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = tuple(normal((1, 1, 48, 16), torch.float16, seed) for seed in range(3))
    call = Call(MULTIPLES, operands, {"scalars": {"step": 6, "width": 7}}, arch="sm_80")
    monkeypatch.setattr(kernel_arguments, "inverse_of", lambda d: inverse_of(d) ^ 1 << 30)
    with pytest.raises(AssertionError):
        call.judged_forward()


def test_a_remainder_that_is_read_otherwise_too_is_computed_once() -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: ((q - k) % width == 0) | ((q - k) % width > 2),
        head_dim=16,
        name="remainder",
    )
    text = fg.emit(spec, "sm_80").forward.text
    body = text.split("bool mask_mod(")[1].split("\n}")[0]
    assert (body.count("fast_floor_mod("), body.count("divides(")) == (1, 0)


def random_mask(seed: int) -> Callable[..., object]:
    """A mask of a few tests of quotients and remainders, most of them of guarded differences."""

    def mask(b: object, h: object, q: Any, k: Any) -> Any:
        draw = random.Random(seed)

        def number() -> Any:
            some = [q - k, q - k, k - q, abs(q - k), q - k - 5, q, 3 * k - q, 7 - k]
            return draw.choice(some)

        def test() -> Any:
            n, d = number(), draw.choice([step, width, width, 3, 12, 16])
            tests = [n % d == 0, n % d != 0, n // d % 3 == 0, n % d < 4, n // width == 1]
            return draw.choice([tests[0], *tests])

        guard = draw.choice([q >= k, q > k, k <= q - 5, k > q, q - k >= width])
        first = guard & (test() | (number() < width))
        return draw.choice([first, first | test() & (k % 5 == 2), ~first, first & test()])

    return mask


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", one_in(32, range(32), 16))
def test_random_masks_of_divisions_agree_with_the_oracle(seed: int, arch: str) -> None:
    spec = fg.AttentionSpec(random_mask(seed), head_dim=16, name=f"divisions_{seed}")
    draw = random.Random(seed)
    operands = tuple(normal((1, 1, 40, 16), torch.float16, seed) for seed in range(3))
    for _ in range(2):  # the kernels are the same, and take the numbers of the call
        scalars = {
            "step": draw.choice([1, 2, -3, 8, -7, 1000, 2**30, -(2**30)]),
            "width": draw.choice([1, 2, 4, 7, 24, 2000, 2**30]),
        }
        taken = {each.name: scalars[each.name] for each in spec.scalars}
        call = Call(spec, operands, {"scalars": taken}, arch=arch)
        call.judged_backward(call.judged_forward())


def test_a_divisor_of_0_is_refused_where_multiples_are_kept() -> None:
    operands = tuple(normal((1, 1, 48, 16), torch.float16, seed) for seed in range(3))
    call = Call(MULTIPLES, operands, {"scalars": {"step": 0, "width": 5}}, arch="sm_80")
    with pytest.raises(fg.InputError, match="by 0"):
        call.forward()


def mask_body(mask: Callable[..., object]) -> str:
    """The emitted function of a mask."""
    text = fg.emit(fg.AttentionSpec(mask, head_dim=16, name="body"), "sm_80").forward.text
    return text[text.index("bool mask_mod(") :].split("\n}")[0]


@pytest.mark.parametrize(
    ("mask", "natural"),
    [
        (lambda b, h, q, k: (q >= k) & ((q - k) % width < 3), True),
        (lambda b, h, q, k: (q > k + 4) & ((q - k - 5) // width % 2 == 0), True),
        (lambda b, h, q, k: (k > q) | ((q - k) % width < 3), True),
        (
            lambda b, h, q, k: (width >= step) & (q - k >= width) & ((q - k - step) % width < 3),
            True,
        ),
        (lambda b, h, q, k: (q >= k) & ((q - k - 1) % width < 3), False),
        (lambda b, h, q, k: (q >= k) | ((q - k) % width < 3), False),
        (lambda b, h, q, k: ((q - k) % width < 3) & ((k == 0) | (q >= k)), False),
        (
            lambda b, h, q, k: (q >= k) & ((q - k) % width < 3) | (k < 9) & ((q - k) % width < 5),
            False,
        ),
        (lambda b, h, q, k: ((q - k) // width >= 0) & ((q - k) % width < 3), False),
        (lambda b, h, q, k: (q >= k) & (IDS[(q - k) // width] > 0), False),
    ],
)
def test_a_division_is_corrected_only_where_negative_numerators_matter(
    mask: Callable[..., object], natural: bool
) -> None:
    assert ("fast_floor_" in mask_body(mask)) == (not natural)


def test_a_mask_whose_divisions_are_not_corrected_does_not_read_their_results() -> None:
    q, k = Q, K
    a, w = q - k, width.expr
    quotient, remainder = FloorDiv(a, w), FloorMod(a, w)
    masks = [
        (q >= k) & (remainder < 2),
        (k > q) | (FloorMod(quotient, 3) < 1) | (quotient > 4),
        (q >= k) & (sympy.Eq(FloorMod(quotient, 3), 1) | (remainder > quotient)) | (k > 5),
        sympy.Not((q >= k) & (remainder < 2)) & (k < 6),
    ]
    for mask in masks:
        found = with_natural_divisions(mask)
        natural = found.atoms(NaturalDiv, NaturalMod)
        assert natural
        for wrong in (-9, 0, 1, 10**6):
            used = {x: sympy.Piecewise((x, x.args[0] >= 0), (wrong, True)) for x in natural}
            other = found.xreplace(used)
            for values in itertools.product((0, 3, 4, 8), range(0, 8, 3), (1, 3)):
                at = dict(zip((q, k, w), values, strict=True))
                assert other.subs(at) == mask.subs(at), (mask, at)


def test_a_mask_by_the_distance_has_the_values_of_the_mask() -> None:
    q, k, w = Q, K, width.expr
    multiple = sympy.Eq(FloorMod(q - k, w), 0)
    masks = [
        (q >= k) & multiple,
        (k > q) | (k - q + 2 <= FloorDiv(q - k + 3, 2)) | (k < 3) & multiple,
        sympy.Ne(q, k) & (FloorMod(k - q, 5) < w) & (abs(k - q) < 6) & (k < q + w),
        (2 * q > 2 * k + w) & (q + k > 3) & sympy.Eq(FloorMod(q - k - 1, 4), 0),
    ]
    for mask in masks:
        found = by_distance(mask)
        assert APART in found.free_symbols
        for values in itertools.product((0, 3, 4, 8), range(0, 8, 3), (1, 3)):
            at = dict(zip((q, k, w), values, strict=True))
            assert found.subs({APART: values[0] - values[1], **at}) == mask.subs(at), (mask, at)
    assert by_distance((q >= k) & (q - k < w)) == (q >= k) & (q - k < w)  # nothing is divided


@pytest.mark.skipif(disassembly.find_nvdisasm() is None, reason=disassembly.MISSING)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_mixed_tiles_of_multiples_take_15_instructions_per_score(arch: str) -> None:
    work = work_of(fg.build(fg.load(ROOT / "specs/strided.py"), arch))
    assert work.per_score(work.full, work.mask) <= 15


def test_a_division_of_64_bits_stays_a_division() -> None:
    ids = fg.Tensor("ids", ("seq_k",), "int64")
    spec = fg.AttentionSpec(lambda b, h, q, k: ids[k] // width > q, name="wide_division")
    assert "floor_div(ids_k, int64(p.s_width))" in fg.emit(spec, "sm_80").forward.text


def test_a_comparison_of_floats_beside_an_or_states_nothing_about_integers() -> None:
    spec = fg.AttentionSpec(
        head_dim=64,
        mask_mod=lambda b, h, q, k: (fg.exp(fg.Scalar("slope") * 1.0) > 0.0) | (k % 3 == 0),
    )
    assert not with_natural_divisions(spec.mask).atoms(NaturalDiv, NaturalMod)


def test_an_absolute_value_is_compared_exactly_for_every_int32() -> None:
    n, most = pairs()
    most = np.where(most < 0, -1 - most, most)
    np.testing.assert_array_equal(run("within(n, d)", n, most) != 0, np.abs(n) <= most)


DIGITS = fg.AttentionSpec(
    lambda b, h, q, k: (abs(k // width - q // width) <= 1) & (k % width >= q % width - 2),
    head_dim=16,
    name="digits",
)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("q_offset", [0, -21])
@pytest.mark.parametrize("k_offset", [0, 5, pytest.param(-9, marks=pytest.mark.slow)])
def test_positions_below_0_take_the_kernel_that_rounds_down(
    arch: str, q_offset: int, k_offset: int
) -> None:
    operands = tuple(normal((1, 1, 40, 16), torch.float16, seed) for seed in range(3))
    numbers = {"scalars": {"width": 7}, "q_offset": q_offset, "k_offset": k_offset}
    call = Call(DIGITS, operands, numbers, arch=arch)
    run = call.judged_forward()
    call.judged_backward(run)
    assert run.source is not None
    body = run.source.text.split("MaskKey mask_key_values(")[1].split("\n}")[0]
    below = min(q_offset, k_offset) < 0
    assert ("fast_floor_div(k, " in body) == below
    assert ("fast_div(k, " in body) != below
    if below:
        named = "k_offset" if k_offset < 0 else "q_offset"
        ranges = CallRanges.from_call(
            {"batch": 1, "heads": 1, "seq_q": 40, "seq_k": 40},
            {"q_offset": q_offset, "k_offset": k_offset},
            numbers["scalars"],
        )
        assert run.source.integers(ranges) == f"64-bit: {named} can be negative"


def test_positions_whose_offset_only_the_device_knows_round_down_in_every_kernel() -> None:
    spec = at_offsets(DIGITS, (("q_offset", "int32"),))
    text = fg.emit(spec, "sm_80").forward.text
    assert "fast_floor_div(q, " in text.split("MaskQuery mask_query_values(")[1].split("\n}")[0]
    assert "fast_div(k, " in text.split("MaskKey mask_key_values(")[1].split("\n}")[0]


def test_a_few_divisions_by_scalars_are_inlined() -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: (k // width % step >= q // width % step) & (k % width >= q % width),
        head_dim=16,
        name="several",
    )
    assert fg.emit(spec, "sm_80").forward.outlined == ()
