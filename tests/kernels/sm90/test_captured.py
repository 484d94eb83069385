"""Hopper's kernels for the gradients of learned tensors: the error rule, bits, registers, bytes.

Every run is in the emulator with all checkers on. `make test` has a few of each; every spec that
learns a tensor at every head dim, in both forms and with dropout in turn, is `slow`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import BackwardRun
from flashgen.kernels.pipeline import build_backward
from flashgen.kernels.planner import Plan, Tile, plan_backward
from flashgen.tools.profile.run import profile_backward
from tests.support.examples import SPECS, spec_path
from tests.support.judged import Call, check_gates, dropping, example
from tests.support.masks import causal
from tests.support.shapes import HEADS, LAYOUTS, Case
from tests.support.tiers import slow

ARCH = "sm_90a"
HEAD_DIMS = (64, 96, 128, 192, 256)
# Whole tiles; fewer keys than a step; fewer queries than a tile; several of both, all ragged.
LENGTHS = ((128, 256), (70, 40), (3, 799), (300, 260), (129, 257))


def learns(path: Path) -> bool:
    """Its score reads a tensor that has a gradient."""
    spec = fg.load(path)
    return any(t.grad and t.symbol in spec.score.free_symbols for t in spec.tensors)


LEARNED = [path for path in SPECS if learns(path)]
IDS = [path.stem for path in LEARNED]


def captured_of(run: BackwardRun) -> list[Plan]:
    """The plans of the launches that make gradients of learned tensors, compiled clean."""
    found = [report.kernel for report in run.reports if report.kernel is not None]
    found = [kernel for kernel in found if kernel.plan.is_for_learned]
    for kernel in found:
        assert kernel.plan.path == ARCH
        check_gates(kernel)
    return [kernel.plan for kernel in found]


# ---- the error rule ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", LEARNED, ids=IDS)
def test_every_spec_meets_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    """Every factor changes with the spec and with the head dim."""
    number, turn = LEARNED.index(path), LEARNED.index(path) + HEAD_DIMS.index(head_dim)
    lengths = LENGTHS[(2 * number + turn) % len(LENGTHS)]
    dtype = ("float16", "bfloat16")[turn % 2]
    heads, layout = HEADS[turn % len(HEADS)], LAYOUTS[turn // 2 % len(LAYOUTS)]
    batch = 2 if lengths[0] * lengths[1] < 40_000 else 1
    case = Case(*lengths, batch, *heads, dtype, head_dim, None, layout)
    deterministic, dropout_p = bool(turn // 2 % 2), (0.0, 0.17)[turn // 3 % 2]
    run = example(path, case, dropout_p, arch=ARCH).judged_backward(deterministic=deterministic)
    kinds = [plan.kernel for plan in captured_of(run)]
    assert kinds == (["captured_exact"] * 2 if deterministic else ["captured"])


def comb(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q - k < 40) | (k % 128 < 7))


def by_layout(b: Any, h: Any, i: Any, j: Any) -> bool:
    return bool((i - j) % 3 != 1 or (i + h) % 4 == 0)


table = fg.Tensor("table", ("heads", "distance"), "float32", grad=True)
column = fg.Tensor("column", ("seq_k",), "float32", grad=True)
row = fg.Tensor("row", ("heads", "seq_q"), "float32", grad=True)
gate = fg.Tensor("gate", (), "float32", grad=True)


def of_all_kinds(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """An element of each kind of sum; the derivatives by two of them depend on the score."""
    return score * gate + fg.tanh(score * column[k]) + table[h, q - k + 9] + row[h, q]


def layout() -> fg.BlockSparse:
    return fg.BlockSparse(by_layout, block_q=48, block_k=32)


# How each kind of mask, of head dims and of options goes with sums of every kind.
COMPOSED: list[Any] = [
    # In `make test`, test_planted_bugs.py holds these sums against the oracle.
    slow("causal", causal, {"head_dim": 64}, 0.0),
    slow("comb", comb, {"head_dim": 64}, 0.1),
    slow("layout", None, {"head_dim": 64, "block_sparse": layout()}, 0.0),
    slow("layout_and_mask", comb, {"head_dim": 128, "block_sparse": layout()}, 0.1),
    slow("sink", causal, {"head_dim": 64, "sink": True}, 0.2),
    slow("odd_dims", causal, {"head_dim": 40, "head_dim_v": 72}, 0.2),
    slow("long_values", causal, {"head_dim": 8, "head_dim_v": 256}, 0.0),
    slow("long_keys", comb, {"head_dim": 192, "head_dim_v": 128}, 0.0),
]


def composed(
    name: str,
    mask: Any,
    options: dict[str, Any],
    dropout_p: float = 0.0,
    lengths: tuple[int, int] = (140, 200),
    heads: tuple[int, int] = (2, 1),
) -> Call:
    """A call of a spec with sums of every kind."""
    spec = fg.AttentionSpec(mask, of_all_kinds, name=name, dropout=dropout_p > 0, **options)
    case = Case(*lengths, 1, *heads, spec.dtype, spec.head_dim, spec.head_dim_v)
    generator = torch.Generator().manual_seed(3)
    known = {
        "table": torch.randn(heads[0], 200, generator=generator),  # farther: the last element
        "column": torch.randn(lengths[1], generator=generator),
        "row": torch.randn(heads[0], lengths[0], generator=generator),
        "gate": torch.tensor(0.8),
        "sink": torch.randn(heads[0], generator=generator),
    }
    tensors = {t.name: known[t.name] for t in spec.tensors if t.name in known}
    numbers = {"tensors": tensors} | dropping(dropout_p)
    return Call(spec, case.tensors(seed=1), numbers, arch=ARCH)


@pytest.mark.parametrize("deterministic", [False, slow(True)])
@pytest.mark.parametrize(("name", "mask", "options", "dropout_p"), COMPOSED)
def test_sums_of_every_kind_compose_with_masks_layouts_and_dims(
    name: str, mask: Any, options: dict[str, Any], dropout_p: float, deterministic: bool
) -> None:
    run = composed(name, mask, options, dropout_p).judged_backward(deterministic=deterministic)
    assert captured_of(run)


GIVEN = [
    slow(64, Tile(16, 8, 1, 1), 2),
    slow(64, Tile(16, 8, 1, 2), 2),
    slow(64, Tile(48, 8, 1, 1), 2),
    # One buffer only.
    slow(256, Tile(80, 8, 1, 1), 1),
    # One consumer warpgroup, as the rows of wide heads fill shared memory.
    slow(64, Tile(48, 4, 1, 1), 2),
    slow(256, Tile(96, 4, 1, 1), 1),
]


@pytest.mark.parametrize(("head_dim", "tile", "stages"), GIVEN)
def test_a_given_tile_gives_the_same_gradients(head_dim: int, tile: Tile, stages: int) -> None:
    call = composed("given", causal, {"head_dim": head_dim})
    run = call.judged_backward(tiles={"captured": tile})
    (plan,) = captured_of(run)
    assert plan.tile == tile
    assert (plan.policy, plan.stages) == ("given", stages)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", ARCH])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_added_for_queries_past_the_last(arch: str, deterministic: bool) -> None:
    """There the score function may give what is no number."""
    bias = fg.Tensor("bias", ("heads",), "float32", grad=True)
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: s / (fg.seq_q - q) + bias[h], head_dim=32, name="past"
    )
    numbers = {"tensors": {"bias": torch.tensor([0.5, -1.0])}}
    call = Call(spec, Case(70, 128, 1, 2, 2, "float16", 32).tensors(), numbers, arch=arch)
    verdicts = call.verdicts(call.backward(deterministic=deterministic))
    assert verdicts["dbias"].ok, verdicts["dbias"]


# ---- bits --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("orders", [2, 20])
def test_exact_sums_are_the_same_bits_in_any_order(orders: int) -> None:
    call = composed("ordered", causal, {"head_dim": 64}, 0.2)
    options = {"deterministic": True, "check_memory": False}
    runs = [call.backward(order_seed=seed, **options) for seed in range(orders)]
    for run in runs[1:]:
        assert all(map(torch.equal, run.captured, runs[0].captured))


@pytest.mark.slow
def test_float_sums_do_depend_on_the_order() -> None:
    """So that the test above can fail: what meets there is enough to tell orders apart."""
    call = composed("ordered", causal, {"head_dim": 64}, 0.2)
    first, second = (call.backward(order_seed=seed, check_memory=False) for seed in (1, 2))
    assert not all(map(torch.equal, first.captured, second.captured))


# ---- registers ---------------------------------------------------------------------------------


def check_compiled(spec: fg.AttentionSpec) -> None:
    """Nothing spills with the first plan, and threads have the registers of the plan."""
    for deterministic in (False, True):
        chosen = plan_backward(spec, ARCH, deterministic=deterministic)
        built = build_backward(spec, ARCH, deterministic=deterministic)[-1]
        plan, used = built.plan, built.binary.resources
        assert plan == chosen.kernel(plan.kernel), "planned with registers to spare"
        assert plan.is_for_learned
        assert plan.path == ARCH
        assert used.clean
        assert built.binary.warnings == ()
        assert used.max_threads == plan.threads == 384
        assert f"setmaxnreg.inc.sync.aligned.u32 {plan.registers};" in built.ptx
        assert f"setmaxnreg.dec.sync.aligned.u32 {plan.producer_registers};" in built.ptx


@pytest.mark.parametrize(
    "name", [slow("dense_bias"), slow("relative_bias"), slow("symmetric_bias")]
)
def test_planned_tiles_do_not_spill(name: str) -> None:
    head_dim = 128 if name == "relative_bias" else 64
    check_compiled(
        fg.load(spec_path(name)).replace(dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim)
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", LEARNED, ids=IDS)
def test_no_planned_tile_spills(path: Path, head_dim: int) -> None:
    """With dropout where the error rule is checked without it."""
    dropout = not (LEARNED.index(path) + HEAD_DIMS.index(head_dim)) // 3 % 2
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    check_compiled(fg.load(path).replace(dtype="bfloat16", dropout=dropout, **dims))


# ---- what the plan says ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head_dim", "dropout_p"),
    [
        slow("relative_bias", 64, 0.0),
        slow("dense_bias", 40, 0.1),
        slow("temperature", 192, 0.1),
        slow("dense_bias", 384, 0.0),
    ],
)
@pytest.mark.parametrize("deterministic", [False, slow(True)])
def test_bytes_of_operands_and_products_are_those_that_the_plan_predicts(
    name: str, head_dim: int, dropout_p: float, deterministic: bool
) -> None:
    case = Case(113, 203, 1, 2, 1, "float16", head_dim)
    call = example(spec_path(name), case, dropout_p)
    given = (call.spec, *call.qkv, *call.results, *call.gradients)
    how = {"arch": ARCH, "deterministic": deterministic}
    _, profiles = profile_backward(*given, **how, **call.numbers)
    profile = profiles[-1]
    assert profile.plan.is_for_learned
    assert profile.plan.path == ARCH
    issued = {tensor.name: tensor.issued for tensor in profile.tensors}
    operands = {"q", "k", "v", "do", "rows"} | ({"rng"} if dropout_p else set())
    assert operands <= set(issued)
    for operand in operands:
        assert issued[operand].counted == issued[operand].predicted > 0, operand
    (products,) = (each for each in profile.work if each.name == "multiply-adds")
    assert products.counted == products.predicted > 0
    numbers_of_steps = [phase.number for phase in profile.phases]
    assert {"5a", "5b", "5c", "5d"} <= set(numbers_of_steps)
