"""Gradients of captured tensors that have the same bits in every run: sums of whole numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.runtime.calls import check
from flashgen.calls.runtime.learned_gradients import SUM_BITS, contributions_of, unit_of
from flashgen.kernels.built_kernel import gradient_terms
from flashgen.kernels.pipeline import build_backward
from flashgen.kernels.planner import Plan, plan_backward
from tests.support.examples import spec_path
from tests.support.judged import Call, example
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import slow

Tensor = torch.Tensor

NAMES = ("relative_bias", "t5_bias", "dense_bias", "symmetric_bias", "head_gate", "temperature")
ORDERS = 20
BLOCKS = Case(130, 20, 1, 3, 1, "float16", 32)  # six of them for kernels that own queries

# ---- units -------------------------------------------------------------------------------------

LEAST_NORMAL, LEAST, MOST = 2.0**-126, 2.0**-149, float(np.finfo(np.float32).max)
GREATEST = (0.0, LEAST, 3 * LEAST, LEAST_NORMAL, 1e-30, 0.75, 1.0, 1.9999, 2.0, 1e30, MOST)
COUNTS = (1, 2, 3, 1000, 2**20, 2**20 + 1, 2**36, 2**45)


def bits_of(x: float) -> Tensor:
    return torch.tensor(x).view(torch.int32)


@pytest.mark.parametrize("most", COUNTS)
@pytest.mark.parametrize("greatest", GREATEST)
def test_the_greatest_possible_sum_does_not_overflow(greatest: float, most: int) -> None:
    root, unit = unit_of(bits_of(greatest), most)
    assert root.dtype == torch.float32
    assert math.frexp(float(root))[0] == 0.5, "a power of two"
    assert LEAST_NORMAL <= float(root) <= 2.0**126
    assert float(root) ** 2 * float(unit) == 1
    x = torch.tensor(greatest)
    assert most * round(float(x * root * root)) <= 2**SUM_BITS
    assert x * root * root == greatest * float(root) ** 2, "no step of the product rounds"


@pytest.mark.parametrize("most", COUNTS)
@pytest.mark.parametrize("greatest", [x for x in GREATEST if x >= LEAST_NORMAL])
def test_a_unit_is_at_most_what_the_plan_states(greatest: float, most: int) -> None:
    _, unit = unit_of(bits_of(greatest), most)
    assert float(unit) <= 2.0 ** ((most - 1).bit_length() - 60) * greatest


@pytest.mark.parametrize("greatest", [0.0, LEAST, 3 * LEAST])
def test_denormal_contributions_are_whole_numbers_of_units(greatest: float) -> None:
    _, unit = unit_of(bits_of(greatest), 2**36)
    assert LEAST % float(unit) == 0


@pytest.mark.parametrize("greatest", [math.inf, math.nan])
def test_infinite_and_nan_contributions_have_no_unit(greatest: float) -> None:
    root, unit = unit_of(bits_of(greatest), 2**20)
    assert root.isfinite()
    assert unit.isnan()


# ---- how many meet -----------------------------------------------------------------------------


def meetings(name: str, case: Case, offset: int = 0, **shapes: tuple[int, ...]) -> dict[str, int]:
    spec = fg.load(spec_path(name))
    tensors = {tensor: torch.zeros(shape) for tensor, shape in shapes.items()}
    problem = check(
        spec, *case.tensors(), scale=None, q_offset=offset, k_offset=0, scalars={}, tensors=tensors,
        dropout_p=0.0, rng=None,
    )  # fmt: skip
    # A given tile stays where the compiler spills; `warps_of` is for that of the plan.
    build = build_backward(spec, deterministic=True, tiles={"captured_exact": planned(spec).tile})[
        -1
    ]
    return contributions_of(gradient_terms(build), build.plan, problem, tensors, packed=False)


def planned(spec: fg.AttentionSpec) -> Plan:
    return plan_backward(spec, deterministic=True).kernel("captured_exact")


def warps_of(name: str) -> int:
    """The warps that add sums of 300 queries of a head."""
    plan = planned(fg.load(spec_path(name)))
    return -(-300 // plan.block_q) * plan.warps


@pytest.mark.slow
def test_contributions_that_a_warp_sums_first_count_once() -> None:
    case, pairs = Case(300, 70, 2, 4, 2), 2 * 4
    assert meetings("temperature", case, t=()) == {"t": pairs * warps_of("temperature")}
    met = {"t": pairs * (warps_of("symmetric_bias") + 1)}
    assert meetings("symmetric_bias", case, t=(300,)) == met
    assert meetings("relative_bias", case, table=(370,)) == {"table": pairs * 300 * 70}


@pytest.mark.slow
def test_positions_with_an_element_each_add_one_contribution() -> None:
    case = Case(300, 70, 2, 4, 2)
    assert meetings("dense_bias", case, bias=(2, 4, 300, 70)) == {"bias": 1}
    assert meetings("dense_bias", case, bias=(1, 4, 300, 70)) == {"bias": 2}
    assert meetings("dense_bias", case, bias=(1, 1, 300, 1)) == {"bias": 2 * 4 * 70}
    assert meetings("t5_bias", case, table=(4, 32)) == {"table": 2 * 300 * 70}
    assert meetings("head_gate", case, gate=(4,)) == {"gate": 2 * warps_of("head_gate")}
    assert meetings("head_gate", case, gate=(1,)) == {"gate": 2 * 4 * warps_of("head_gate")}


@pytest.mark.slow
def test_positions_past_the_end_of_a_tensor_meet_in_its_last_element() -> None:
    case = Case(300, 70, 1, 1, 1)
    warps = warps_of("symmetric_bias")
    assert meetings("symmetric_bias", case, t=(299,)) == {"t": 300 + warps}
    assert meetings("symmetric_bias", case, t=(69,)) == {"t": 300 + 70 * warps}
    assert meetings("symmetric_bias", case, 5, t=(304,)) == {"t": 300 + warps}
    assert meetings("symmetric_bias", case, -1, t=(400,)) == {"t": 300 + warps}


@pytest.mark.slow
def test_packed_sequences_share_their_rows_and_keys() -> None:
    t = fg.Tensor("t", ("seq_q", "seq_k"), "float32", grad=True)
    kinds = {
        "element": lambda s, b, h, q, k: s + t[q - k, 0],
        "apart": lambda s, b, h, q, k: s + t[q, k],
        "row": lambda s, b, h, q, k: s + t[q, 0],
        "block": lambda s, b, h, q, k: s + t[b, h],
    }
    found = {}
    boundaries = torch.tensor([0, 100, 150, 300], dtype=torch.int32)
    tensors = {"t": torch.zeros(300, 300), "cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
    for name, score in kinds.items():
        spec = fg.AttentionSpec(score_mod=score, packed=True, name=name)
        problem = check(
            spec, *Case(300, 300, 1, 2, 2).tensors(), scale=None, q_offset=0, k_offset=0,
            scalars={}, tensors=tensors, dropout_p=0.0, rng=None,
        )  # fmt: skip
        build = build_backward(spec, deterministic=True)[-1]
        terms = gradient_terms(build)
        found[name] = contributions_of(terms, build.plan, problem, tensors, packed=True)["t"]
    # Tiles of queries, at most; b and h tell the blocks' elements apart. The last kind is "block".
    warps = (300 // build.plan.block_q + 3) * build.plan.warps
    assert found == {"element": 2 * 300 * 300, "apart": 2 * 3, "row": 2 * 3, "block": warps}


# ---- emitted kernels ---------------------------------------------------------------------------


def of_spec(name: str, case: Case, dropout_p: float = 0.0) -> Call:
    return example(spec_path(name), case, dropout_p, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "orders"), [("symmetric_bias", 2), *((name, ORDERS) for name in NAMES)]
)
def test_gradients_are_the_same_bits_in_any_order_of_blocks(name: str, orders: int) -> None:
    call = of_spec(name, BLOCKS, 0.2)
    runs = [call.backward(check_memory=False, order_seed=seed) for seed in range(orders)]
    for run in runs[1:]:
        assert all(map(torch.equal, run.captured, runs[0].captured))


@pytest.mark.slow
def test_float_sums_do_depend_on_the_order_of_blocks() -> None:
    """So that the test above can fail: what meets there is enough to tell orders apart."""
    call = of_spec("symmetric_bias", BLOCKS, 0.2)
    options = {"check_memory": False, "deterministic": False}
    first, second = (call.backward(order_seed=seed, **options) for seed in (1, 2))
    assert not torch.equal(first.captured[0], second.captured[0])
    torch.testing.assert_close(first.captured[0], second.captured[0], atol=1e-5, rtol=1e-5)


JUDGED = [
    pytest.param(name, dtype, marks=[] if (i, j) == (3, 0) else pytest.mark.slow)
    for i, name in enumerate(NAMES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "dtype"), JUDGED)
def test_gradients_meet_the_error_rule_with_dropout(name: str, dtype: str) -> None:
    of_spec(name, Case(70, 90, 2, 2, 1, dtype, 32), 0.2).judged_backward()


@pytest.mark.slow
def test_the_kernel_is_launched_twice_and_both_are_reported() -> None:
    run = of_spec("head_gate", Case(20, 20, 1, 2, 1, "float16", 32)).backward()
    roles = [report.kernel.source.role for report in run.reports if report.kernel]
    assert roles == ["delta", "dkdv", "dq", "captured_exact", "captured_exact"]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e30, 1e-30])
@pytest.mark.parametrize(
    "name", ["symmetric_bias", pytest.param("temperature", marks=pytest.mark.slow)]
)
def test_huge_and_tiny_gradients_are_as_exact_as_others(name: str, factor: float) -> None:
    call = of_spec(name, Case(40, 50, 1, 2, 2, "float32", 16))
    call.gradients = tuple(factor * gradient for gradient in call.gradients)
    (found,) = call.backward().captured
    *_, exact = reference.gradients(call.spec, *call.qkv, *call.gradients, **call.numbers)
    assert float((found.double() - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    assert exact.abs().max() > factor / 100


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_without_contributions_are_0(name: str) -> None:
    call = of_spec(name, Case(40, 50, 1, 2, 2, "float16", 32))
    call.gradients = tuple(0 * gradient for gradient in call.gradients)
    (found,) = call.backward().captured
    assert found.shape == next(iter(call.numbers["tensors"].values())).shape
    assert (found == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.inf, slow(math.nan)])
@pytest.mark.parametrize("name", ["symmetric_bias", slow("temperature")])
def test_contributions_that_are_not_finite_give_nan(name: str, bad: float) -> None:
    call = of_spec(name, Case(40, 50, 1, 2, 2, "float16", 32))
    call.gradients[1][0, 1, 7] = bad
    (found,) = call.backward().captured
    assert found.isnan().all()


@pytest.mark.slow
def test_a_sum_of_the_most_contributions_to_one_element_is_exact() -> None:
    """Of one key, every query adds dLSE; all at one place, which only the data decide."""
    bias = fg.Tensor("bias", ("n",), "float32", grad=True)
    spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s + bias[q * k], head_dim=16)
    qkv = Case(200, 1, 1, 2, 1, "float16", 16).tensors()
    call = Call(spec, qkv, {"tensors": {"bias": torch.zeros(1)}}, deterministic=True)
    dout, dlse = call.gradients
    for each in (1.0, -1.0, 2.0**-149, 1.5 * 2.0**116):
        call.gradients = torch.zeros_like(dout), torch.full_like(dlse, each)
        assert float(call.backward().captured[0]) == 2 * 200 * each


@pytest.mark.slow
def test_the_dtype_of_the_tensor_is_the_dtype_of_its_gradient() -> None:
    for dtype in DTYPES:
        t = fg.Tensor("t", ("heads",), dtype, grad=True)
        spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k, t=t: s * t[h], head_dim=32)
        qkv = Case(20, 30, 1, 2, 2, "float16", 32).tensors()
        numbers = {"tensors": {"t": torch.tensor([0.5, 2.0]).to(getattr(torch, dtype))}}
        call = Call(spec, qkv, numbers, deterministic=True)
        run = call.backward()
        *_, exact = reference.gradients(spec, *qkv, *call.gradients, **numbers)
        assert run.captured[0].dtype == getattr(torch, dtype)
        torch.testing.assert_close(run.captured[0].double(), exact, atol=0.02, rtol=0.02)


@pytest.mark.slow
def test_a_learned_tensor_that_the_score_does_not_read_has_a_gradient_of_0() -> None:
    edge = fg.Tensor("edge", ("heads",), "float32", grad=True)
    gate = fg.Tensor("gate", (), "float32", grad=True)
    for score, reads in (
        (lambda s, b, h, q, k: s * gate, True),
        (lambda s, b, h, q, k: s + 0 * gate, False),
    ):
        spec = fg.AttentionSpec(lambda b, h, q, k: k < edge[h], score, head_dim=32)
        qkv = Case(20, 30, 1, 2, 2, "float16", 32).tensors()
        given = {"edge": torch.tensor([5.0, 20.0]), "gate": torch.tensor(0.7)}
        assert {tensor.name for tensor in spec.tensors} == set(given)
        run = Call(spec, qkv, {"tensors": given}, deterministic=True).backward()
        found = dict(zip((tensor.name for tensor in spec.tensors), run.captured, strict=True))
        assert torch.equal(found["edge"], torch.zeros(2))
        assert bool(found["gate"] != 0) == reads


# ---- the operator ------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchs_switch_gives_the_same_bits_through_autograd() -> None:
    spec = fg.load(spec_path("t5_bias")).replace(head_dim=32)
    op = fg.attention(spec)
    q, k, v = Case(150, 60, 1, 2, 1, "float16", 32).tensors()
    table = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        out = op(q, k, v, table=table, backend="emulator")
        (found,) = torch.autograd.grad(out.square().sum(), table)
    finally:
        torch.use_deterministic_algorithms(False)
    roles = [report.kernel.source.role for report in op.backward_reports]
    assert roles[-1] == "captured_exact"
    out = op(q, k, v, table=table, backend="emulator", deterministic=True)
    (asked,) = torch.autograd.grad(out.square().sum(), table)
    assert torch.equal(found, asked)


@pytest.mark.slow
def test_a_compiled_call_gives_the_bits_of_an_eager_one() -> None:
    spec = fg.load(spec_path("symmetric_bias")).replace(head_dim=32)
    op = fg.attention(spec)
    q, k, v = Case(40, 50, 1, 2, 1, "float16", 32).tensors()

    def gradient(t: Tensor) -> Tensor:
        out = op(q, k, v, t=t, backend="emulator", deterministic=True)
        return out.square().sum()

    found = []
    for function in (gradient, torch.compile(gradient, backend="aot_eager", fullgraph=True)):
        t = torch.linspace(-1, 1, 50).requires_grad_()
        function(t).backward()
        found.append(t.grad)
    assert torch.equal(*found)
