"""Plans: feasible everywhere, deterministic, plain values, refused with numbers when impossible."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import time
import types
from dataclasses import fields, replace

import pytest

import flashgen as fg
from flashgen.kernels.planner import api, plan, plan_backward, plan_errors, search
from flashgen.kernels.planner.plan_errors import no_tile_fits
from flashgen.kernels.planner.quantities import Quantities
from flashgen.kernels.planner.search import cheapest, evaluated, occupancies, shapes
from flashgen.kernels.planner.tile_problem import problem_of
from flashgen.shared.arch import facts, known_archs
from flashgen.shared.launch_facts import LaunchRules
from tests.support.paths import ROOT
from tests.support.plan_problems import (
    DTYPES,
    backward_of,
    every_plan,
    plan_of,
    problem_behind,
    spec_of,
    within_limits,
)
from tests.support.tiers import one_in

KIB = 1024


def test_every_head_dim_dtype_and_architecture_has_a_plan_within_its_limits():
    start = time.perf_counter()
    for each in every_plan():
        within_limits(each)
        assert each.block_k % 16 == 0
        assert each.row_groups in (1, 2)
        assert each.block_q == 16 * each.row_groups * each.warps
    assert time.perf_counter() - start < 60, "a plan takes milliseconds"


def test_the_layout_is_the_tiles_one_after_the_other():
    for each in every_plan(step=24):
        k_tile = each.block_k * each.head_dim * each.itemsize
        v_tile = each.block_k * each.head_dim_v * each.itemsize
        assert each.smem["q"] == 0
        assert each.smem["k"] >= each.block_q * each.head_dim * each.itemsize
        assert each.smem["v"] == each.smem["k"] + k_tile
        assert each.smem_bytes == each.smem["v"] + v_tile
        assert each.smem_bytes >= each.block_q * each.head_dim_v * each.itemsize
        assert each.smem["k"] % 128 == each.smem["v"] % 128 == 0, (
            "the swizzle works on aligned groups"
        )


def kernels_of(head_dim, dtype, deterministic=None):
    """The kernels that have a tile to choose; deterministic None: the forward kernel."""
    if deterministic is None:
        return [plan_of(head_dim, dtype)]
    return backward_of(head_dim, dtype, deterministic=deterministic).kernels[1:]


@pytest.mark.parametrize("deterministic", [None, True])
def test_the_chosen_tile_is_the_cheapest_that_fits(deterministic):
    for head_dim, dtype in ((64, "float16"), (128, "bfloat16"), (256, "float32")):
        for chosen in kernels_of(head_dim, dtype, deterministic):
            problem, tile = problem_behind(chosen)
            assert evaluated(problem, tile).excesses == ()
            every = (each for shape in shapes(problem) for each in occupancies(problem, shape))
            assert chosen.cost == min(each.cost for each in every if not each.excesses)


def test_tiles_are_those_that_hand_written_kernels_use():
    """FlashAttention 2's tables: 128 rows by 4 warps up to d = 128, by 8 warps beyond."""
    for head_dim in (64, 80, 96, 112, 128):
        each = plan_of(head_dim)
        assert (each.block_q, each.warps, each.row_groups) == (128, 4, 2)
        assert each.blocks_per_sm == 2
        assert each.block_k >= 48
    for head_dim in (192, 256):
        each = plan_of(head_dim)
        assert (each.block_q, each.warps, each.row_groups) == (128, 8, 1)
        assert each.block_k >= 64


@pytest.mark.parametrize(
    ("head_dim", "dtype"), one_in(4, itertools.product([64, 128, 256], DTYPES))
)
def test_more_shared_memory_never_makes_the_predicted_cost_worse(head_dim, dtype):
    forward = functools.partial(plan_of, head_dim, dtype)
    backward = functools.partial(backward_of, head_dim, dtype)
    for make in (forward, backward, functools.partial(backward, deterministic=True)):
        costs = []
        for kib in (32, 48, 64, 80, 99, 128, 163, 200, 227):
            try:
                costs.append(make(sram=kib * KIB).cost)
            except fg.PlanError:
                assert not costs, "what fits in less fits in more"
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] < costs[0]


def test_the_sram_of_another_architecture_gives_its_shared_memory_constraints():
    limited = plan_of(128, sram=99 * KIB)
    assert limited.smem_bytes <= 99 * KIB
    assert limited.blocks_per_sm * (limited.smem_bytes + KIB) <= 100 * KIB
    assert limited != plan_of(128)


@pytest.mark.parametrize("deterministic", [None, False])
def test_dtypes_of_one_size_have_the_same_tiles(deterministic):
    for head_dim in range(8, 257, 24 if deterministic is None else 120):
        half, bf = (kernels_of(head_dim, d, deterministic) for d in ("float16", "bfloat16"))
        assert [each.tile for each in half] == [each.tile for each in bf]


@pytest.mark.parametrize("head_dim_v", [192, 200, 216, 256])
def test_a_block_begins_with_the_registers_of_each_product(head_dim_v):
    """The assembler refuses kernels with fewer: of P V with 200 columns it asks for 130."""
    layout = fg.BlockSparse(block_q=64, block_k=64)
    spec = fg.AttentionSpec(head_dim=24, head_dim_v=head_dim_v, block_sparse=layout)
    chosen = plan(spec, "sm_90a")
    launched = chosen.quantities["launched"]
    assert max(chosen.block_k / 2 + 26, head_dim_v / 2 + 30) <= launched
    if head_dim_v == 200:
        two_blocks = replace(chosen.tile, step=16, blocks=2)
        with pytest.raises(fg.PlanError, match="registers of a product"):
            plan(spec, "sm_90a", tile=two_blocks)


def test_a_score_function_leaves_registers_for_its_temporaries():
    def softcap(score, b, h, q, k):
        return 30 * fg.tanh(score / 30)

    plain, capped = plan_of(128), plan(fg.AttentionSpec(score_mod=softcap, head_dim=128))
    assert capped.block_k < plain.block_k
    (registers,) = [line for line in capped.derivation if line.name == "registers"]
    assert registers.substituted.endswith("+ 16")


def test_a_mask_that_is_evaluated_for_each_score_leaves_registers_too():
    def of_both(b, h, q, k):
        return (q + k) % 4 == 0

    def dilated(b, h, q, k):
        return (q - k) % 4 == 0

    def causal(b, h, q, k):
        return k <= q

    extra = {}
    for mask_mod in (of_both, dilated, causal):
        one = plan(fg.AttentionSpec(mask_mod=mask_mod, head_dim=128))
        (extra[mask_mod],) = [x.substituted for x in one.derivation if x.name == "registers"]
    assert extra[of_both].endswith("+ 4")
    assert extra[dilated].endswith("+ 0")  # evaluated for each distance
    assert extra[causal].endswith("+ 0")


def test_element_access_has_the_same_layout_rules_and_says_so():
    narrow = plan_of(64, access_bytes=2)
    assert narrow.access_bytes == 2
    assert plan_of(64).access_bytes == 16
    assert narrow.cost > plan_of(64).cost


def test_a_plan_is_a_plain_value():
    one = plan_of(64)
    assert pickle.loads(pickle.dumps(one)) == one
    assert hash(pickle.loads(pickle.dumps(one))) == hash(one)
    assert len({one, plan_of(64), plan_of(128)}) == 2
    with pytest.raises(AttributeError):
        one.block_q = 1


def test_equal_requests_have_equal_plans_and_texts():
    from flashgen.kernels.planner import plan_forward

    before = [str(plan_of(d, dtype)) for d in (64, 128) for dtype in DTYPES]
    plan_forward.cache_clear()
    assert [str(plan_of(d, dtype)) for d in (64, 128) for dtype in DTYPES] == before


def test_the_grid_covers_every_query_of_every_head():
    one = plan_of(64)
    assert one.grid(3, 8, 2, 1, 5) == (1, 8, 3)
    assert one.grid(3, 8, 2, one.block_q, 5) == (1, 8, 3)
    assert one.grid(3, 8, 2, one.block_q + 1, 5) == (2, 8, 3)


def test_no_tile_fits_names_the_need_the_limit_and_what_would_fit():
    spec = fg.AttentionSpec(head_dim=256, dtype="float32", name="wide")
    with pytest.raises(fg.PlanError) as caught:
        plan(spec, "sm_86", sram=40_000)
    assert str(caught.value) == (
        "no tile fits in shared memory\n"
        "  where    wide(head_dim=256, dtype=float32)\n"
        "  numbers  needs 65,536 B at the smallest tile (block_q 32, block_k 16); "
        "limit 40,000 B per block as given by sram\n"
        "           smem = e*max(block_q*d_qk + stages*block_k*(d_qk + d_v), block_q*d_v)\n"
        "             = 4*max(32*256 + 1*16*(256 + 256), 32*256) = 65,536 B of 40,000 B\n"
        '  try      dtype="float16" (24,576 B)\n'
        "           head_dim=152 (38,912 B)\n"
        "           sram=65536, or none for sm_86's own 101,376 B"
    )


@pytest.mark.parametrize("dims", [(264, 512), (8, 576), (576, 512), (512, 512)])
def test_smaller_head_dims_that_are_said_to_fit_do(dims):
    spec = spec_of(*dims, "float32")
    with pytest.raises(fg.PlanError) as caught:
        plan(spec, "sm_80")
    assert ".0 B" not in caught.value.way_out
    smaller = next(x for x in caught.value.way_out.splitlines() if x.startswith("head_dim"))
    plan(spec.replace(**eval(f"dict({smaller.split(' (')[0]})")), "sm_80")


@pytest.mark.parametrize(("arch", "limit"), [("sm_80", 255), ("sm_86", 255), ("sm_90a", 240)])
def test_heads_whose_output_fills_the_registers_are_refused_with_the_derivation(arch, limit):
    for head_dim in (512, 576):
        with pytest.raises(fg.PlanError) as caught:  # no two equal shares for wgmma
            plan(spec_of(head_dim, 504, "bfloat16"), arch)
        assert caught.value.what == "no tile fits in the registers of a thread"
        assert "d_v" in caught.value.numbers.splitlines()[1]
        assert caught.value.numbers.endswith(f" of {limit}")
        of_head_dim, of_parts, of_cpu = caught.value.way_out.splitlines()
        assert of_cpu == "tensors on the CPU, where no tile has to fit"
        able = eval(f"dict({of_head_dim.split(' (')[0]})")
        plan(spec_of(head_dim, 504, "bfloat16").replace(**able), arch)
        assert of_parts.startswith("head_dim_v=256, the kernel of a part of the columns of v")
        plan(spec_of(head_dim, 256, "bfloat16"), arch)
        plan_backward(spec_of(head_dim, 256, "bfloat16"), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
def test_heads_of_320_have_tiles_in_both_passes_for_16_bit_operands(arch):
    for dims in ((264, 264), (288, 288), (304, 304), (320, 320), (320, 256), (64, 320)):
        spec = spec_of(*dims, "bfloat16")
        plan(spec, arch)
        for deterministic in (False, True):
            plan_backward(spec, arch, deterministic=deterministic)


def test_every_way_out_of_a_plan_error_works():
    for head_dim, head_dim_v, sram in ((256, 256, 40_000), (64, 256, 20_000), (256, 8, 18_000)):
        spec = spec_of(head_dim, head_dim_v, "float32")
        with pytest.raises(fg.PlanError) as caught:
            plan(spec, sram=sram)
        ways = caught.value.way_out.splitlines()
        assert len(ways) >= 2
        for way in ways:
            name, _, value = way.split(" (")[0].split(",")[0].partition("=")
            if name == "sram":
                plan(spec, sram=int(value))
            elif name == "head_dim_v":
                plan(spec.replace(head_dim_v=int(value)), sram=sram)
            elif name.startswith("torch.cat"):  # the calls of that spec
                continue
            elif name == "dtype":
                plan(spec.replace(dtype=value.strip('"')), sram=sram)
            else:
                dim = int(value)
                lower = spec.replace(head_dim=min(head_dim, dim), head_dim_v=min(head_dim_v, dim))
                plan(lower, sram=sram)


def test_the_error_for_an_architecture_s_own_limit_names_larger_architectures():
    small = replace(facts("sm_86"), smem_per_sm=61 * KIB, smem_per_block=60 * KIB)
    spec = spec_of(256, 256, "float32")
    problem = problem_of(spec, small, None, 16)
    assert cheapest(problem) is None
    error = no_tile_fits(problem, given_sram=False)
    assert "limit 61,440 B per block on sm_86\nsmem = " in error.numbers
    assert error.way_out.splitlines()[-1] == (
        "arch=sm_80 or sm_86 or sm_89 or sm_90 or sm_100 or sm_120"
    )


def test_the_error_names_the_line_of_the_user_s_function():
    def mask_mod(b, h, q, k):
        return k <= q

    with pytest.raises(fg.PlanError) as caught:
        plan(fg.AttentionSpec(mask_mod=mask_mod, head_dim=64), sram=100)
    assert "test_plan.py:" in caught.value.where


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": "greedy"}, "there is no such planning policy"),
        ({"access_bytes": 4}, "global memory is accessed in whole vectors or element by element"),
        ({"sram": 0}, "the SRAM size is a positive number of bytes"),
        ({"sram": 1.5}, "the SRAM size is a positive number of bytes"),
        ({"arch": "sm_75"}, "flashgen has no facts about this architecture"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, what):
    with pytest.raises(fg.PlanError) as caught:
        plan_of(64, **options)
    assert caught.value.what == what
    (name,) = options
    assert name in caught.value.where


def test_a_suffixed_architecture_is_planned_as_its_chip():
    assert plan_of(64, arch="sm_100a").arch == "sm_100a"
    assert plan_of(64, arch="sm_100a").block_k == plan_of(64, arch="sm_100").block_k
    assert {plan_of(64, arch=name).path for name in known_archs()} == {"sm_80"}


def test_hopper_has_a_code_path_of_its_own():
    hopper = plan_of(64, arch="sm_90a")
    assert (hopper.arch, hopper.path) == ("sm_90a", "sm_90a")
    assert hopper.threads == 32 * hopper.warps + 128
    assert hopper.smem_bytes <= 227 * KIB
    assert plan_of(64, "float32", arch="sm_90a").path == "sm_80"


@pytest.mark.parametrize(("head_dim", "tile"), [(192, (128, 112)), (256, (128, 80))])
def test_the_model_finds_the_tiles_that_flashattention_3_was_tuned_to(head_dim, tile):
    """Its tiles for attention without a mask, from registers and shared memory alone."""
    found = plan_of(head_dim, arch="sm_90a")
    assert (found.block_q, found.block_k) == tile


def test_at_head_dim_128_the_model_finds_the_tile_that_was_faster_on_an_h200():
    """192 x 80 took 10 % less time than FlashAttention-3's 128 x 176, causal, and 7 % less without
    a mask."""
    found = plan_of(128, arch="sm_90a")
    assert (found.block_q, found.block_k) == (192, 80)


def test_at_head_dim_192_the_backward_pass_has_the_form_that_was_faster_on_an_h200():
    """Two kernels took 5 % less time than one, causal, in 2 x 8 heads of 8,192 positions."""
    spec = fg.AttentionSpec(head_dim=192, dtype="bfloat16")
    assert plan_backward(spec, "sm_90a").scheme == "split"


def test_three_warpgroups_have_fewer_keys_where_registers_are_short_as_on_an_h200():
    """At head dim 128, causal, 192 x 64 took 8 % less time than 128 x 176."""
    spec = fg.load(ROOT / "specs" / "variable_length.py").replace(head_dim=128, dtype="bfloat16")
    found = fg.plan(spec, "sm_90a")
    assert (found.block_q, found.block_k) == (192, 64)


@pytest.mark.parametrize(("head_dim", "share"), [(128, 0.79), (256, 0.83)])
def test_the_tensor_cores_are_predicted_as_busy_as_they_were(head_dim, share):
    """The speeds recorded without a mask at 8,192 positions on an H200: 778 and 825 TFLOP/s."""
    hopper = plan_of(head_dim, arch="sm_90a")
    assert hopper.quantities["tensor"] / hopper.cost == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 192), (96, 192), (192, 128), (256, 128)])
def test_three_warpgroups_compute_where_the_softmax_outlasts_the_products(head_dim, rows):
    """As in FlashAttention-3 and -4, which were tuned on H100. Beyond head dim 128 a third one
    would leave room for few keys, where two all but suffice."""
    hopper = plan_of(head_dim, arch="sm_90a")
    assert hopper.block_q == rows
    at = hopper.quantities
    two_suffice = at["alone"] / 2 <= 1.1 * at["busiest"]
    assert two_suffice == (rows == 128)


def test_a_given_tile_is_evaluated_once(monkeypatch):
    seen = []
    real = search.evaluated

    def counted(problem, tile):
        seen.append(tile)
        return real(problem, tile)

    for module in (search, plan_errors):
        monkeypatch.setattr(module, "evaluated", counted)
    tile = plan_of(64).tile
    api.plan_forward.cache_clear()
    assert plan_of(64, tile=tile).tile == tile
    assert seen == [tile]


def test_the_facts_of_launches_are_those_of_the_plan():
    one = replace(plan_of(64, arch="sm_90a"), heads_per_tile=4, integer_bits=64)
    facts_ = one.launch_facts("kernel", [])
    for each in fields(LaunchRules):
        assert getattr(facts_, each.name) == getattr(one, each.name)
    assert (facts_.threads, facts_.machine, facts_.boxes) == (one.threads, one.machine, one.boxes)
    assert facts_.grid(2, 8, 2, 300, 70) == one.grid(2, 8, 2, 300, 70)


def test_decisions_of_the_schedule_are_the_plans():
    """Ping-pong up to head dim 128; bits instead of comparisons where a lane has many columns."""
    wide = plan(spec_of(64, 192, "float16"), "sm_90a")
    assert [plan_of(d, arch="sm_90a").ping_pong for d in (64, 128, 136)] == [True, True, False]
    assert not wide.ping_pong
    few, many = (replace(plan_of(64), block_k=keys) for keys in (48, 80))
    assert [each.ranges_as_bits(ends) for each in (few, many) for ends in (1, 2)] == [
        *(False, False),
        *(True, True),
    ]
    text = fg.emit(spec_of(64, 192, "float16"), "sm_90a").forward.text
    assert "BARRIER_PING_PONG" not in text
    assert "BARRIER_PING_PONG" in fg.emit(spec_of(64, 64, "float16"), "sm_90a").forward.text


def test_quantities_are_immutable_and_can_be_pickled():
    quantities = plan_of(64).quantities
    with pytest.raises(TypeError):
        quantities["cost"] = 0
    assert isinstance(pickle.loads(pickle.dumps(quantities)), Quantities)
    assert pickle.loads(pickle.dumps(quantities)) == quantities


def test_importing_the_planner_leaves_plan_a_function():
    assert isinstance(fg.plan, types.FunctionType)
    assert plan is api.plan
    assert inspect.unwrap(fg.plan) is inspect.unwrap(plan)


def test_plans_of_other_weights_do_not_stand_in_for_those_of_softmaxes():
    # The model has the same numbers for both, and divides exponentials of softmaxes alone.
    causal = fg.load(ROOT / "specs/causal.py")
    weighs = causal.replace(weight_mod=lambda s, *_: s * fg.sigmoid(s), normalize="none")
    softcap = fg.load(ROOT / "specs/softcap.py")
    plan_of_softmax = plan(softcap, "sm_90a")
    cheapest.cache_clear()
    api.plan_forward.cache_clear()
    assert plan(weighs, "sm_90a").fma_columns == 0
    assert plan(softcap, "sm_90a") == plan_of_softmax
    assert plan_of_softmax.fma_columns > 0


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: fg.clamp(s, -2.0, 0.9) ** 2,
        lambda s, b, h, q, k: fg.where(1 / fg.where(s > 1, 1.0, 0.0) > 2, s, 0.0) ** 2,
    ],
    ids=["literals", "pole"],
)
def test_powers_of_choices_between_numbers_are_planned(score_mod):
    """sympy rewrites the conditions of a choice that is a power's base, its own relations alone."""
    spec = fg.AttentionSpec(score_mod=score_mod, head_dim=32)
    assert plan(spec)
    assert plan_backward(spec)
