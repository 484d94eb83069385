"""The kernel of the tangent pass in the emulator, with all its checkers, by the error rule.

Every spec has one small problem, whose dtypes, head dims, lengths, head counts, memory layouts and
dropout alternate, and tangents of all its operands. In `make test` are the specs with features that
the kernel's own steps depend on; the others are in the slow tier.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.runtime.calls import run_tangent
from flashgen.kernels.pipeline import build_tangent
from flashgen.kernels.planner import Tile, moves, plan_backward, tangents_of
from flashgen.kernels.planner.requests import TangentPlanRequest
from flashgen.kernels.planner.tangent_pass import plan_tangent
from flashgen.shared.errors import PlanError
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import Call, check_gates, dropping, example, sized
from tests.support.shapes import DTYPES, LAYOUTS, Case
from tests.support.tiers import one_in

HEADS = ((2, 2), (2, 1), (3, 1))
LENGTHS = ((70, 90), (113, 40), (33, 70), (20, 150), (1, 139))
KINDS = (("float16", 16), ("bfloat16", 40), ("float16", 64), ("bfloat16", 24))
# Smaller than the planned tiles, so that these problems have several, of all kinds.
TILES = {"sm_80": {"tangent": Tile(16, 2, 2, 2)}, "sm_90a": {"tangent": Tile(32, 8, 1, 1)}}
PATHS = tuple(TILES)
FIRST = (
    "causal",
    "document",  # captured tensors in the mask
    "empty_rows",
    "head_gate",  # a learned tensor with the head alone
    "packed_causal",
    "relative_bias",  # a learned tensor that each score reads elsewhere
    "sink",
    "softcap",
)


def in_turn(number: int) -> list[Any]:
    """A spec on both paths; in `make test` the first ones, each on one path."""
    name = SPECS[number].stem
    first = PATHS[FIRST.index(name) % 2] if name in FIRST else None
    return [
        pytest.param(
            number, path, id=f"{name}-{path}", marks=() if path == first else pytest.mark.slow
        )
        for path in PATHS
    ]


@pytest.mark.parametrize(
    ("number", "arch"), [case for number in range(len(SPECS)) for case in in_turn(number)]
)
def test_the_tangents_of_every_spec_meet_the_error_rule(number: int, arch: str) -> None:
    dtype, head_dim = KINDS[number % len(KINDS)]
    heads, lengths = HEADS[number % len(HEADS)], LENGTHS[number % len(LENGTHS)]
    layout = LAYOUTS[number // 2 % len(LAYOUTS)]
    case = Case(*lengths, 1 + (number % 7 == 0), *heads, dtype, head_dim, None, layout)
    call = example(SPECS[number], case, 0.17 * (number % 4 == 0), arch=arch)
    run = call.judged_tangent(tiles=TILES[arch])
    assert run.reports[-1].kernel is not None
    check_gates(run.reports[-1].kernel)
    assert run.reports[-1].kernel.plan.path == arch


CAUSAL = fg.AttentionSpec(mask_mod=lambda b, h, q, k: q >= k, head_dim=64, name="causal")


@pytest.mark.parametrize(
    ("names", "arch"),
    [
        pytest.param(
            names, arch, id=f"{''.join(names)}-{arch}", marks=pytest.mark.slow if n == turn else ()
        )
        for n in (1, 2)
        for names in combinations(("q", "k", "v"), n)
        for turn, arch in enumerate(PATHS, 1)
    ],
)
def test_a_kernel_computes_only_what_the_given_tangents_need(
    names: tuple[str, ...], arch: str
) -> None:
    case = Case(70, 90, 1, 2, 1, "bfloat16", 16)
    call = Call(sized(CAUSAL, case, 0.2), case.tensors(3), dropping(0.2), arch=arch)
    run = call.judged_tangent(names=names, tiles=TILES[arch])
    (built,) = [report.kernel for report in run.reports]
    assert built is not None
    check_gates(built)
    given = {param.name for param in built.source.params}
    assert {f"{x}_tangent" for x in "qkv"} & given == {f"{x}_tangent" for x in names}
    assert ("v" in given) == (names != ("v",))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "arch"),
    [
        pytest.param(
            *(dtype, dim, arch),
            marks=() if (dtype, dim, arch) == ("float32", 40, "sm_80") else pytest.mark.slow,
        )
        for dtype in DTYPES
        for dim in (40, 64, 128, 256)
        for arch in PATHS
    ],
)
def test_tangents_have_their_planned_tile_at_each_dtype_and_head_dim(
    dtype: str, head_dim: int, arch: str
) -> None:
    case = Case(65, 83, 1, 2, 1, dtype, head_dim)
    call = Call(sized(CAUSAL, case), case.tensors(3), arch=arch)
    run = call.judged_tangent()
    assert run.reports[-1].kernel is not None
    check_gates(run.reports[-1].kernel)


@pytest.mark.parametrize(("dtype", "arch"), [("bfloat16", "sm_80"), ("float16", "sm_90a")])
def test_the_common_motion_of_all_keys_costs_no_accuracy(dtype: str, arch: str) -> None:
    """A common tangent of all keys moves all scores of a row alike, and O not at all."""
    case = Case(40, 90, 1, 1, 1, dtype, 64)
    call = Call(sized(CAUSAL, case), case.tensors(5), arch=arch)
    moving = call.moving(("k",))
    assert moving.k is not None
    errors = []
    for common in (0.0, 100.0):
        here = moving._replace(k=moving.k + common)
        run = run_tangent(call.spec, *call.qkv, *call.results, here, **call.how)
        exact, _ = reference.tangents(call.spec, *call.qkv, here)
        errors.append(float((run.out - exact).square().mean().sqrt()))
    assert errors[1] < 8 * errors[0]


WEIGHTS = {
    "silu": {"weight_mod": lambda s, b, h, q, k: s * fg.sigmoid(s), "normalize": "none"},
    "relu_squared": {
        "weight_mod": lambda s, b, h, q, k: fg.maximum(s, 0.0) ** 2,
        "normalize": "sum",
    },
    "linear_rows": {
        "weight_mod": lambda s, b, h, q, k: s,
        "normalize": fg.Tensor("r", ("batch", "heads", "seq_q"), "float32", grad=True),
    },
}


@pytest.mark.parametrize(
    ("name", "dropout_p", "arch"), one_in(4, product(WEIGHTS, (0.0, 0.2), ("sm_80", "sm_90a")), 1)
)
def test_tangents_of_other_weights_meet_the_error_rule(
    name: str, dropout_p: float, arch: str
) -> None:
    case = Case(70, 90, 1, 2, 1, "bfloat16", 16)
    spec = sized(CAUSAL.replace(name=name, **WEIGHTS[name]), case, dropout_p)
    rows = 0.5 + torch.rand((1, 2, 70), generator=torch.Generator().manual_seed(1))
    tensors = {"r": rows} if name == "linear_rows" else {}
    numbers = {"tensors": tensors} | dropping(dropout_p)
    call = Call(spec, case.tensors(3), numbers, arch=arch)
    for names in (None, ("v",), *((("r",),) if tensors else ())):
        run = call.judged_tangent(names=names, tiles=TILES[arch])
        assert run.reports[-1].kernel is not None
        check_gates(run.reports[-1].kernel)


@pytest.mark.parametrize(
    "how",
    [{"arch": "sm_80"}, {"arch": "sm_90a"}, {"backend": "tiled"}],
    ids=lambda how: next(iter(how.values())),
)
def test_the_share_of_a_rows_only_key_does_not_move(how: dict[str, str]) -> None:
    """It is 1 whatever its weight is, also where weights are rounded before they are added up."""
    case = Case(16, 1, 1, 1, 1, "bfloat16", 16)
    call = Call(sized(fg.load(spec_path("power")), case), case.tensors(3), {"q_offset": 1}, **how)
    run = run_tangent(
        call.spec, *call.qkv, *call.results, call.moving(("k",)), **call.numbers, **call.how
    )
    of_weight = reference.tangents(call.spec, *call.qkv, call.moving(("k",)), **call.numbers)[1]
    assert of_weight.abs().min() > 1e-3
    torch.testing.assert_close(run.out, torch.zeros_like(run.out), atol=1e-5, rtol=0)


def test_a_call_without_keys_has_the_tangent_of_its_sink() -> None:
    case = Case(5, 0, 1, 2, 2, "float16", 16)
    call = example(spec_path("sink"), case, arch="sm_80")
    run = call.judged_tangent(call.forward())
    assert run.lse.abs().min() > 0


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_tangent_of_a_sink_alone_needs_no_kernel(dropout_p: float) -> None:
    case = Case(40, 60, 1, 2, 1, "float16", 16)
    rows = fg.Tensor("sink", ("heads", "seq_q"), grad=True)
    spec = sized(CAUSAL.replace(sink=rows), case, dropout_p)
    sink = torch.randn(2, 70, generator=torch.Generator().manual_seed(1))
    sink[0, 25] = -torch.inf
    numbers: dict[str, Any] = {"tensors": {"sink": sink}, "q_offset": 16} | dropping(dropout_p)
    call = Call(spec, case.tensors(3), numbers, arch="sm_90a")
    run = call.judged_tangent(names=("sink",))
    assert [report.kernel for report in run.reports] == [None]
    with pytest.raises(PlanError, match="need no kernel"):
        plan_tangent(TangentPlanRequest(spec, "sm_90a", ("sink",)))


def test_the_tangent_of_q_is_0_where_scores_do_not_read_it() -> None:
    bias = fg.Tensor("bias", ("seq_k",))
    case = Case(9, 12, 1, 2, 1, "float16", 16)
    spec = sized(CAUSAL.replace(score_mod=lambda s, b, h, q, k: bias[k]), case)
    call = Call(spec, case.tensors(3), {"tensors": {"bias": torch.randn(12)}}, arch="sm_80")
    run = call.judged_tangent(names=("q",))
    assert [report.kernel for report in run.reports] == [None]


def test_a_plan_says_its_products_and_the_cost_of_the_backward_pass() -> None:
    spec = sized(CAUSAL, Case(1, 1, 1, 1, 1, "bfloat16", 64))
    plan = plan_tangent(TangentPlanRequest(spec, "sm_80", ("q", "k", "v")))
    note = next(note for note in plan.notes if note.startswith("tangents of q, k, v"))
    assert "5 products per score" in note
    assert f"{plan_backward(spec, 'sm_80').cost:.4f} clk" in note
    for names, products in ((("q",), 3), (("v",), 2), (("q", "k"), 4)):
        few = plan_tangent(TangentPlanRequest(spec, "sm_80", names))
        assert any(f"{products} products per score" in note for note in few.notes)
        assert few.cost < plan.cost


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernel_of_every_spec_compiles_without_spills(path: Path, arch: str) -> None:
    for dtype, dim in (("bfloat16", 64), ("float16", 128), ("bfloat16", 256), ("float32", 64)):
        spec = sized(fg.load(path), Case(1, 1, 1, 1, 1, dtype, dim))
        built = build_tangent(spec, arch)
        if dim == 256 and arch == "sm_90a" and spec.block_sparse is not None:
            # No smaller tile has more registers: those of causal block layouts spill 8 bytes.
            assert built.binary.resources.spill_store_bytes <= 8
        else:
            check_gates(built)
        learned = tangents_of(spec)[3:]
        if moves(spec, learned):
            check_gates(build_tangent(spec, arch, learned))
