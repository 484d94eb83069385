"""A warp-specialised forward kernel for sm_90a in the emulator: results, counters, and
the report of every planted bug."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from flashgen.shared.errors import EmulatorError
from ptx_emulator import Counters, TensorMap, launch
from ptx_emulator.errors import DeadlockError, FenceError, InFlight, OutOfBounds, RaceError
from tests.support.emulator_kernels_sm90 import flash_forward, shared_bytes
from tests.support.nvrtc_helper import compile_ptx
from tests.support.tiers import one_in, slow

SEEDS = [None, 1, 2]


def flash(
    heads: int,
    n: int,
    head_dim: int = 64,
    causal: bool = False,
    *,
    source: str | None = None,
    check: bool = True,
    seed: int | None = None,
    profile: bool = False,
    swizzle: int = 128,
    sums: str = "hardware",
) -> tuple[list[np.ndarray], Counters]:
    rng = np.random.default_rng(n)
    q, k, v = (rng.standard_normal((heads, n, head_dim)).astype(np.float16) for _ in range(3))
    o = np.full_like(q, np.nan)
    boxes = [(64, 128, 1), (64, 64, 1), (64, 64, 1), (64, 64, 1)]
    spans = (swizzle, 128, 128, 128)
    parts = zip((q, k, v, o), boxes, spans, strict=True)
    maps = [TensorMap(x, box, swizzle=span) for x, box, span in parts]
    ptx = compile_ptx(source or flash_forward(head_dim), "sm_90a")
    args, grid = [*maps, n, head_dim**-0.5, int(causal)], (-(-n // 128), heads)
    how = {"check": check, "order_seed": seed, "profile": profile, "sums": sums}
    return [q, k, v, o], launch(ptx, "flash", grid, 384, args, shared_bytes(head_dim), **how)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.transpose(0, 2, 1) * q.shape[2] ** -0.5
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ v / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("head_dim", [64, slow(128)])
@pytest.mark.parametrize(
    ("n", "causal"), one_in(3, itertools.product([1, 65, 300], [False, True]), first=2)
)
def test_forward_agrees_with_fp64(n: int, causal: bool, head_dim: int) -> None:
    (q, k, v, o), _ = flash(1, n, head_dim, causal)
    assert np.abs(o - attention(q, k, v, causal)).max() < 2e-3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_result_does_not_depend_on_the_order_of_warps(seed: int) -> None:
    (q, k, v, o), _ = flash(2, 300, causal=True, seed=seed)
    assert np.abs(o - attention(q, k, v, True)).max() < 2e-3


def test_checkers_do_not_change_the_result() -> None:
    with_checks, without = flash(1, 300)[0][3], flash(1, 300, check=False)[0][3]
    assert with_checks.tobytes() == without.tobytes()


@pytest.mark.parametrize("head_dim", [slow(64), 128])
def test_counters_agree_with_the_formulas_of_the_kernel(head_dim: int) -> None:
    heads, n = 3, 512
    _, counters = flash(heads, n, head_dim, True, profile=True)
    walked = heads * sum(2 * (i + 1) for i in range(n // 128))  # tiles of 128 rows and 64 keys
    total = counters.total()
    each = walked * 128 * 64 * head_dim
    # For 64 both products have the same shape and types.
    assert total.tensor_multiply_adds == 2 * each
    assert set(total.multiply_adds) == {f"m64n{w}k16 f32 f16 f16" for w in (64, head_dim)}
    # Each warpgroup reads B of both products, and A of the scores.
    tile = 64 * head_dim * 2
    assert counters.shared_read_bytes >= walked * (2 * 2 * tile + 2 * tile)
    by_text = counters.by_instruction()
    read = sum(t.shared_bytes for text, t in by_text if "mma_async" in text)
    assert read == walked * (2 * 2 * tile + 2 * tile)
    stored = sum(t.shared_bytes for text, t in by_text if text.startswith("stmatrix"))
    assert stored == heads * n * head_dim * 2
    conflicts = sum(t.bank_conflicts for text, t in by_text if text.startswith("stmatrix"))
    assert conflicts == 0


@pytest.mark.slow
def test_speed_is_that_of_large_products() -> None:
    def seconds() -> float:
        begin = time.process_time()
        flash(8, 1024, 128, check=False, sums="rounded")
        return time.process_time() - begin

    flash(1, 256, check=False)
    assert any(seconds() < 2.0 for _ in range(3))


# ---- planted bugs: (what is replaced, by what, the error, words of its message)

_WAIT_K = "wait(b + 8 * (K_FULL + stage), t / 2 % 2);"
_PLANTED: dict[str, tuple[str, str, type[EmulatorError], tuple[str, ...]]] = {
    "a missing wait for keys": (_WAIT_K, "", RaceError, ("wgmma",)),
    "a missing wait for Q": ("wait(b + 8 * Q_FULL, 0);", "", RaceError, ("wgmma",)),
    "a missing wait for a free stage": (
        "wait(b + 8 * (V_EMPTY + stage), phase ^ 1);", "", EmulatorError, ("mbarrier",)),
    "a wrong phase": (
        _WAIT_K, _WAIT_K.replace("t / 2 % 2", "(t / 2 + 1) % 2"), EmulatorError, ()),
    "16 bytes too many expected": (
        "expect(b + 8 * (V_FULL + stage), STAGE);", "expect(b + 8 * (V_FULL + stage), STAGE + 16);",
        DeadlockError, ("16 bytes", "warp")),
    "a barrier's count off by one": (
        "% 4 >= 2 ? 2 : 1", "% 4 >= 2 ? 3 : 1", DeadlockError, ("warp 0", "mbarrier.try_wait")),
    "a named barrier's count off by one warp": (
        "bar.sync %0, 128;", "bar.sync %0, 160;", DeadlockError,
        ("warps 4-7", "128 of 160 threads have arrived")),
    "a missing proxy fence": ("PROXY_FENCE;\n  asm", "asm", RaceError, ("fence.proxy.async",)),
    "no barrier before the store": (
        'asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");', "", RaceError, ()),
    "values released before the wait": (
        "WAIT(1); keep(s);\n    if", "WAIT(1); keep(s);\n    if (first) arrive(b + 8 * (V_EMPTY + "
        "before));\n    if", RaceError, ("wgmma",)),
    "scores read before the wait": (
        "WAIT(1); keep(s);", "keep(s);", InFlight, ("an accumulator",)),
    "sums scaled before the wait": (
        "WAIT(0); keep(o); keep(s);",
        'asm volatile("mul.f32 %0, %0, %0;" : "+f"(o[3]) :: "memory"); WAIT(0); keep(o); keep(s);',
        InFlight, ("an accumulator",)),
    "fragments packed before the wait": (
        "WAIT(0); keep(o); keep(s);",
        'asm volatile("add.u32 %0, %0, 1;" : "+r"(p[1][2]) :: "memory"); '
        "WAIT(0); keep(o); keep(s);", InFlight, ("a fragment of A",)),
    "no fence before the scores": (
        "keep(s); FENCE;", "keep(s);", FenceError, ("wgmma.fence",)),
    "no fence before the values": ("keep(o); FENCE;", "keep(o);", FenceError, ("wgmma.fence",)),
    "a descriptor past the end": (
        "q + mine * 128, k);", "q + mine * 128, k + 5 * STAGE);", OutOfBounds,
        ("operand B of wgmma",)),
    "a descriptor of another swizzle": (
        "1ull << 62;", "2ull << 62;", EmulatorError, ("the middle of the swizzle's pattern",)),
    "registers never given back": (
        'asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");', "", DeadlockError,
        ("waits for registers", "240")),
}  # fmt: skip


@pytest.mark.parametrize("seed", one_in(3, SEEDS))
@pytest.mark.parametrize("name", one_in(4, _PLANTED))
def test_a_planted_bug_is_named(name: str, seed: int | None) -> None:
    old, new, error, words = _PLANTED[name]
    source = flash_forward(64)
    assert old in source
    with pytest.raises(error) as caught:
        flash(1, 260, source=source.replace(old, new), seed=seed)
    text = str(caught.value)
    assert "kernel flash, block (" in text
    assert all(word in text for word in words), text


def test_a_wrong_swizzle_gives_wrong_values() -> None:
    source = flash_forward(64)
    assert "(chunk ^ (at & 7))" in source
    plain_store = {"source": source.replace("(chunk ^ (at & 7))", "chunk")}
    for wrong in (plain_store, {"swizzle": 0}):
        (q, k, v, o), _ = flash(1, 200, **wrong)  # type: ignore[arg-type]
        assert np.abs(o - attention(q, k, v, False)).max() > 0.1
