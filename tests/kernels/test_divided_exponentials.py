"""Forward kernels that compute exponentials of some columns on FMA units, where that saves time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
import ptx_emulator as emulator
from benchmarks.instructions import work_of
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.kernels.planner import Plan, api, plan
from flashgen.kernels.planner.models.fitted_sm90 import FMA_EXP2_GAIN
from flashgen.kernels.planner.requests import PlanRequest
from flashgen.spec.language.signature import split
from tests.support.examples import spec_path
from tests.support.judged import Call, check_gates, example
from tests.support.nvrtc_helper import compile_ptx
from tests.support.shapes import Case
from tests.support.tiers import slow

Array = np.ndarray[Any, Any]

ARCH = "sm_90a"
FACTORS = ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1")
LIMITS = (-np.inf, -3.4e38, -1e38, -1e9, -127.5, -127, -126.9, -126.5, np.nan, -0.0, 0, 1, -126, 8)


def before(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def planned(name: str, head_dim: int, **changes: Any) -> Plan:
    spec = fg.load(spec_path(name)).replace(head_dim=head_dim, head_dim_v=head_dim, **changes)
    return plan(spec, ARCH)


# ---- the function -------------------------------------------------------------------------------


def fma(a: Array, b: Array, c: float) -> Array:
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


def exp2_on_fma(x: Array) -> Array:
    """The function of the kernels, in float32 step by step."""
    whole = np.float32(1.5 * 2**23 + 127)
    x = np.maximum(x, np.float32(-127))
    total = x + whole
    rest = x - (total - whole)
    y = np.full_like(x, float.fromhex(FACTORS[0]))
    for factor in (*map(float.fromhex, FACTORS[1:]), 1.0):
        y = fma(y, rest, factor)
    return y * (total.view(np.int32) << 23).view(np.float32)


def executed(x: Array) -> Array:
    """The function of an emitted kernel, called by a second kernel behind it."""
    spec = fg.load(spec_path("softcap")).replace(head_dim=64, head_dim_v=64)
    text = (
        fg.emit(spec, ARCH).forward.text
        + """
extern "C" __global__ void run(const float* in, float* out) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  out[i] = exp2_on_fma(in[i]);
}
"""
    )
    out = np.zeros_like(x)
    emulator.launch(compile_ptx(text, ARCH), "run", (len(x) // 128, 1, 1), (128, 1, 1), [x, out], 0)
    return out


def test_the_function_is_as_exact_as_the_approximate_instruction() -> None:
    """Its relative error is below 2^-22 wherever P is a normal number, lagging maxima included."""
    for low, high in ((-126, 9), (-1, 1), (-0.01, 0.01)):
        x = np.linspace(low, high, 1_000_003).astype(np.float32)
        exact = np.exp2(x.astype(np.float64))
        assert np.abs(exp2_on_fma(x) / exact - 1).max() < 2.0**-22
    limits = np.array(LIMITS, np.float32)
    assert exp2_on_fma(limits).tolist()[:8] == [0] * 8
    assert np.isnan(exp2_on_fma(limits)[8])
    assert exp2_on_fma(limits).tolist()[9:] == [1, 1, 2, 2.0**-126, 256]


def test_kernels_compute_that_function() -> None:
    draw = np.random.default_rng(0)
    x = np.concatenate([draw.uniform(-126.4, 9, 4096 - 128), np.resize(LIMITS, 128)])
    x = x.astype(np.float32)
    found, wanted = executed(x), exp2_on_fma(x)
    assert np.array_equal(found, wanted, equal_nan=True)


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head_dim", "divides"),
    [
        ("softcap", 32, True),
        ("softcap", 64, True),
        ("full", 8, True),  # hardly more than the 3 % that are asked
        ("softcap", 96, False),  # three warpgroups take as long for all that they do in turns
        ("softcap", 128, False),  # tensor cores have as much work
        ("full", 32, False),
        ("full", 64, False),
        ("full", 128, False),
    ],
)
def test_exponentials_are_divided_where_that_saves_clocks(
    name: str, head_dim: int, divides: bool
) -> None:
    found = planned(name, head_dim)
    at = found.quantities
    assert (found.fma_columns > 0) == divides
    assert found.fma_columns % 8 == 0
    assert found.fma_columns < found.block_k
    if "divided" not in at:  # nothing waits for special-function units
        assert at["special"] < at["busiest"]
        return
    saves = at["divided"] <= (1 - FMA_EXP2_GAIN) * at["undivided"]
    assert saves == divides
    assert found.cost == (at["divided"] if divides else at["undivided"])
    (note,) = (note for note in found.notes if note.startswith("exp2: "))
    assert note.startswith(f"exp2: {found.fma_columns} of {found.block_k} columns on FMA units; ")


def test_every_kernel_of_split_keys_divides_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cheapest tile, as no tile that splits suit better has divided exponentials."""
    monkeypatch.setattr(api, "MOST_OF_PREFILL", 1.0)
    spec = split(fg.load(spec_path("softcap")).replace(head_dim=8, head_dim_v=8))
    uncached = api.plan_forward.__wrapped__
    plans = [uncached(PlanRequest(spec, ARCH, heads_per_tile=heads)) for heads in (1, 2, 4, 8)]
    assert len({(each.block_k, each.fma_columns) for each in plans}) == 1
    assert plans[0].fma_columns > 0


def test_the_machine_code_has_the_planned_exponentials() -> None:
    spec = fg.load(spec_path("softcap")).replace(head_dim=64, head_dim_v=64)
    built = fg.build(spec, ARCH)
    check_gates(built)
    share = built.plan.fma_columns / built.plan.block_k
    work = work_of(built)
    special = work.by_kind(work.full)["exponential"]
    assert special == pytest.approx(2 - share)  # with one tanh
    predicted = built.plan.quantities["products"] + built.plan.quantities["rest"]
    assert work.per_score(work.full) == pytest.approx(predicted, rel=0.05)


# ---- results ------------------------------------------------------------------------------------


def call_of(name: str, head_dim: int, dtype: str = "float16") -> Call:
    """A call with two tiles of keys or more, whose heads share no tile."""
    return example(spec_path(name), Case(70, 300, 1, 2, 2, dtype, head_dim), arch=ARCH)


def judged(call: Call) -> ForwardRun:
    """The result of a call without split keys, whose tile is the cheapest one."""
    return call.judged_forward(split_size=0)


def has_share(run: ForwardRun) -> bool:
    return run.plan is not None and run.plan.fma_columns > 0


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [
        ("softcap", 64, "float16"),
        *(slow("softcap", d, t) for d in (8, 16, 32, 64) for t in ("float16", "bfloat16")),
    ],
)
def test_results_meet_the_error_rule(name: str, head_dim: int, dtype: str) -> None:
    assert has_share(judged(call_of(name, head_dim, dtype)))


@pytest.mark.parametrize("factor", [slow(1e2), slow(1e4), slow(3e4)])
def test_large_scores_meet_the_error_rule(factor: float) -> None:
    call = call_of("softcap", 8)
    q, k, v = call.qkv
    q = (q * factor).clamp(-6e4, 6e4)
    assert has_share(judged(Call(call.spec, (q, k, v), call.numbers, arch=ARCH)))


@pytest.mark.parametrize("key", [3, *map(slow, (64, 71, 72, 79))])
def test_an_undefined_score_makes_its_rows_undefined_and_no_others(key: int) -> None:
    call = call_of("softcap", 8)
    q, k, v = call.qkv
    undefined = k.clone()
    undefined[0, 1, key, 5] = math.nan
    found = Call(call.spec, (q, undefined, v), arch=ARCH).forward()
    assert has_share(found)
    assert found.out[0, 1].isnan().all()
    assert found.lse[0, 1].isnan().all()
    assert torch.equal(found.out[0, 0], call.forward().out[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dim"), [("softcap", 64), ("softcap", 32)])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(name: str, head_dim: int) -> None:
    call = call_of(name, head_dim)
    q, k, v = call.qkv
    q, k = q.clone(), k.clone()
    k[..., 0], q[..., 0] = torch.linspace(0, 40, k.shape[2]), 0.7
    whole = Call(call.spec, (q, k, v), call.numbers, arch=ARCH).forward(split_size=0)
    assert has_share(whole)
    for row in (0, 5, 47, 69):
        others = torch.full_like(q, 0)
        others[..., 0] = 20  # maxima that grow in each tile
        others[:, :, row] = q[:, :, row]
        for queries, place in ((others, row), (q[:, :, row : row + 1], 0)):
            rest = Call(call.spec, (queries, k, v), call.numbers, arch=ARCH)
            found = rest.forward(split_size=0)
            assert torch.equal(found.out[:, :, place], whole.out[:, :, row])
            assert torch.equal(found.lse[:, :, place], whole.lse[:, :, row])


@pytest.mark.slow
def test_decoding_with_split_keys_gives_the_bits_of_the_row_in_a_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "MOST_OF_PREFILL", 1.0)  # as above; no other test has this spec
    spec = fg.load(spec_path("softcap")).replace(mask_mod=before, head_dim=8, head_dim_v=8)
    q, k, v = Case(600, 600, 2, 4, 1, head_dim=8).tensors(seed=5)
    k[..., 0], q[..., 0] = torch.linspace(0, 40, 600), 0.7
    q[:, :, ::2, 0] = 20
    how: dict[str, Any] = {"backend": "emulator", "arch": ARCH, "split_size": 240}
    prefill = run_forward(spec, q, k, v, **how)
    assert has_share(prefill)
    for p in (0, 239, 241, 599):
        row, keys = (1, slice(None), slice(p, p + 1)), (1, slice(None), slice(p + 1))
        alone = run_forward(spec, q[row][None], k[keys][None], v[keys][None], q_offset=p, **how)
        assert has_share(alone)
        assert torch.equal(alone.out[0], prefill.out[row]), p
        assert torch.equal(alone.lse[0], prefill.lse[row]), p
