"""What the plan predicts is what the emulator counts; and what good kernels do not do."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import flashgen as fg
import ptx_emulator as emulator
from flashgen.calls.runtime.bound_kernel import span
from flashgen.kernels.compile import compile
from flashgen.kernels.pipeline import Build, build
from flashgen.kernels.planner import backward_traffic, feasible, forward_traffic
from flashgen.tools.cli.inputs import example_scalars
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.profile.prediction import LaunchPrediction
from flashgen.tools.profile.run import profile_forward, profile_of
from ptx_emulator.counters.recorder import SECTOR_BYTES
from tests.support.parts_of_groups import divide_groups
from tests.support.profiles import ROOT, all_kernels, forward, loaded, random_operands, tangents
from tests.support.tiers import one_in, slow

pytestmark = pytest.mark.usefixtures("rounded_sums")

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
# (batch, heads_q, heads_kv, seq_q, seq_k): whole tiles; ragged, in groups; more queries than keys.
SIZES = [(1, 2, 2, 384, 384), (2, 2, 1, 113, 203), (1, 2, 1, 257, 150)]
KERNELS = ("forward", "delta", "fused", "convert_dq", "delta", "dkdv", "dq")


def check_bytes(spec: fg.AttentionSpec, sizes: tuple[int, ...], **options: float | str) -> None:
    profiles = all_kernels(spec, sizes, **options)
    assert tuple(profile.plan.kernel for profile in profiles) == KERNELS
    check_each(profiles)


def check_each(profiles: tuple[Profile, ...]) -> None:
    for profile in profiles:
        for tensor in profile.tensors:
            counted, predicted = tensor.issued.counted, tensor.issued.predicted
            assert counted == predicted, (profile.kernel, tensor.name)
        assert profile.issued.counted == profile.issued.predicted > 0
        assert profile.issued.ratio == 1


@pytest.mark.parametrize("sizes", [*map(slow, SIZES[:2]), SIZES[2]])
@pytest.mark.parametrize("name", [slow("full"), "causal"])
def test_predicted_bytes_are_exactly_those_that_every_kernel_issues(name, sizes):
    check_bytes(loaded(name), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_predicted_bytes_and_products_are_exact_in_tiles_that_are_not_chosen(head_dim):
    spec = loaded("causal").replace(head_dim=head_dim, head_dim_v=head_dim)
    operands = random_operands(spec, (1, 1, 1, 160, 160))
    tiles = sorted({replace(plan.tile, blocks=1) for plan in feasible(spec, "sm_80")})[::5]
    assert len(tiles) > 7
    for tile in tiles:
        _, (profile,) = profile_forward(
            spec, *operands, arch="sm_80", tiles={"forward": tile}, split_size=0
        )
        check_each((profile,))
        (products,) = [each for each in profile.work if each.name == "multiply-adds"]
        assert products.counted == products.predicted


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["bigbird", "local_global"])
def test_predicted_bytes_are_exact_under_a_layout_its_own_lists_included(name, sizes):
    check_bytes(loaded(name), sizes)
    forward = all_kernels(loaded(name), sizes)[0]
    lists = {"c_layout", "c_layout_row_counts", "c_layout_row_blocks"}
    assert lists <= {tensor.name for tensor in forward.tensors}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_predicted_bytes_are_exact_under_a_layout_of_each_head_that_is_given_with_the_call(sizes):
    check_bytes(loaded("block_sparse"), sizes, density=0.3)


@pytest.mark.parametrize(
    ("name", "head_dim", "dropout_p"),
    [
        slow("causal", 64, 0.0),
        slow("causal", 32, 0.1),
        slow("causal", 64, 0.1),
        slow("full", 40, 0.0),
        slow("causal", 192, 0.0),
        slow("bigbird", 128, 0.0),
        slow("local_global", 64, 0.0),
    ],
)
def test_predicted_bytes_and_products_of_hoppers_backward_kernels_are_exact(
    name, head_dim, dropout_p
):
    spec = loaded(name).replace(head_dim=head_dim, head_dim_v=head_dim, dropout=dropout_p > 0)
    # Of 512 keys and more, blocks of local_global own boxes of keys that are apart.
    sizes = (1, 2, 1, 113, 603 if name == "local_global" else 203)
    _, *profiles = all_kernels(spec, sizes, arch="sm_90a", dropout_p=dropout_p)
    for profile in profiles:
        assert profile.plan.path == "sm_90a"
        for tensor in profile.tensors:
            if tensor.name == "rng" and profile.plan.owns_keys:
                continue  # read in each step, as much of it as the compiler chooses
            assert tensor.issued.counted == tensor.issued.predicted, (profile.kernel, tensor.name)
        products = [each for each in profile.work if each.name == "multiply-adds"]
        assert all(each.counted == each.predicted for each in products)
        assert bool(products) == (not profile.plan.streams)


@pytest.mark.parametrize(
    ("name", "arch"),
    [("causal", "sm_90a"), slow("causal", "sm_80"), ("sink", "sm_80"), slow("sink", "sm_90a")],
)
def test_predicted_bytes_and_products_of_the_kernel_of_tangents_are_exact(name, arch):
    spec, sizes = loaded(name).replace(head_dim=64, head_dim_v=64), (1, 2, 1, 113, 203)
    (profile,) = tangents(spec, sizes, arch)
    assert profile.plan.kernel == "tangent"
    for tensor in profile.tensors:
        if tensor.name != "c_sink_tangent":
            assert tensor.issued.counted == tensor.issued.predicted, tensor.name
    (products,) = [each for each in profile.work if each.name == "multiply-adds"]
    assert products.counted == products.predicted
    assert profile.duration is not None


@pytest.mark.slow
def test_predicted_bytes_are_exact_for_parts_of_groups(monkeypatch):
    divide_groups(monkeypatch, 2)
    spec = loaded("causal").replace(head_dim=64, head_dim_v=40)
    _, *profiles = all_kernels(spec, (1, 6, 2, 113, 203), arch="sm_90a")
    assert {"convert_dk", "convert_dv"} <= {profile.plan.kernel for profile in profiles}
    for profile in profiles:
        for tensor in profile.tensors:
            assert tensor.issued.counted == tensor.issued.predicted, (profile.kernel, tensor.name)


def comb(b, h, q, k):
    return (k <= q) & ((q - k < 40) | (k % 128 < 7))


def window_of_the_head(b, h, q, k):
    return (k <= q) & (q - k < 32 * (h + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "blocks", "changes", "offsets"),
    [
        # The next tile depends on both the block layout and the mask.
        (comb, (32, 32), {}, (0, 0)),
        (window_of_the_head, (48, 32), {}, (17, 0)),
        # Blocks of a few positions: more lines and more blocks of a tile than a warp has lanes.
        (None, (3, 2), {"head_dim": 32}, (0, 11)),
        (None, (200, 136), {"dtype": "float32"}, (0, 0)),
        # Two warps compute the same scores in "dkdv" and "dq": each reads the layout for them.
        (comb, (40, 24), {"head_dim": 256, "dtype": "float32"}, (0, 33)),
    ],
)
def test_predicted_bytes_are_exact_for_masks_and_layouts_of_any_blocks(
    mask, blocks, changes, offsets
):
    sparse = fg.BlockSparse(None, *blocks)
    spec = fg.AttentionSpec(mask, block_sparse=sparse, **{"head_dim": 64, **changes})
    q_offset, k_offset = offsets
    for sizes, density in zip(SIZES, (0.8, 0.1, 0.3), strict=True):
        options = {"density": density, "q_offset": q_offset, "k_offset": k_offset}
        check_each(all_kernels(spec, sizes, **options))


def test_what_the_plan_calls_issued_is_what_the_emulator_counts():
    spec, (batch, heads_q, heads_kv, seq_q, seq_k) = loaded("causal"), SIZES[1]
    found = {profile.plan.kernel: profile for profile in all_kernels(spec, SIZES[1])}
    plan = found["forward"].plan
    ends = [min(first + plan.block_q, seq_q) for first in range(0, seq_q, plan.block_q)]
    walk = [range(-(-end // plan.block_k)) for end in ends]
    moved = forward_traffic(plan, batch, heads_q, heads_kv, seq_q, seq_k, walk)
    assert found["forward"].issued.counted == moved.issued
    assert found["forward"].distinct.counted == moved.compulsory
    plan = found["dq"].plan
    ends = [min(first + plan.block_q, seq_q) for first in range(0, seq_q, plan.block_q)]
    walk = [range(-(-end // plan.block_k)) for end in ends]
    moved = backward_traffic(plan, batch, heads_q, heads_kv, seq_q, seq_k, walk)
    assert found["dq"].issued.counted == moved.read + moved.written


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 40, *HEAD_DIMS])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_predicted_bytes_are_exact_at_every_head_dim(name, head_dim):
    check_bytes(loaded(name).replace(head_dim=head_dim), SIZES[1])
    check_bytes(loaded(name).replace(head_dim=head_dim, head_dim_v=64), SIZES[2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_bytes_are_exact_for_every_dtype(dtype):
    for sizes in SIZES:
        check_bytes(loaded("causal").replace(dtype=dtype), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", one_in(2, [(each,) for each in SIZES[1:]]))
def test_predicted_bytes_are_exact_with_a_sink(sizes):
    check_bytes(loaded("sink"), sizes, sink=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_predicted_bytes_are_exact_with_dropout_but_for_seeds_that_a_loop_reads(sizes):
    for profile in all_kernels(loaded("causal").replace(dropout=True), sizes, dropout_p=0.1):
        unknown = {tensor.name for tensor in profile.tensors if tensor.issued.predicted is None}
        assert unknown == ({"rng"} if profile.plan.owns_keys else set()), profile.kernel
        for tensor in profile.tensors:
            if tensor.name not in unknown:
                assert tensor.issued.counted == tensor.issued.predicted, tensor.name
        if profile.plan.kernel == "forward":
            assert profile.distinct.counted == profile.distinct.predicted


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "sliding_window",
        "symmetric_window",
        "block_causal",
        "block_diffusion",
        "causal_offset",
        "dilated_window",
        "empty_rows",
        "longformer",
        "prefix_lm",
        "strided",
    ],
)
def test_predicted_bytes_are_exact_for_masks_that_skip_tiles(name):
    values = example_scalars(str(ROOT / "specs" / f"{name}.py"))
    for sizes in SIZES:
        check_bytes(loaded(name), sizes, **values)
    if name == "sliding_window":  # some queries reach no key
        check_bytes(loaded(name), SIZES[2], window=30)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_forward_kernel_has_no_bank_conflict_and_coalesces_every_access(head_dim):
    profile = forward(loaded("causal").replace(head_dim=head_dim), (1, 2, 2, 200, 200))
    assert profile.totals.bank_conflicts == 0
    assert profile.totals.wavefronts > 1000
    for tensor in profile.tensors:
        assert tensor.sectors == tensor.sectors_least > 0, tensor.name
    assert profile.sectors_in_excess == 0


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_main_loops_of_every_dtype_have_no_bank_conflict(dtype, head_dim):
    spec = loaded("causal").replace(head_dim=head_dim, dtype=dtype)
    profile = forward(spec, (1, 2, 2, 200, 200))
    loop = [phase for phase in profile.phases if phase.number.startswith("5")]
    assert sum(phase.totals.wavefronts for phase in loop) > 1000
    assert sum(phase.totals.bank_conflicts for phase in loop) == 0
    assert profile.sectors_in_excess == 0
    # float32 is staged in pairs of 8 bytes, of which two rows meet in the same banks.
    conflicting = {phase.number for phase in profile.phases if phase.totals.bank_conflicts}
    assert conflicting == ({"7"} if dtype == "float32" else set())


@pytest.mark.parametrize("head_dim", one_in(6, HEAD_DIMS, first=1))
def test_no_kernel_of_16_bits_has_a_bank_conflict_or_an_access_that_is_not_coalesced(head_dim):
    for profile in all_kernels(loaded("causal").replace(head_dim=head_dim), (1, 2, 2, 200, 200)):
        assert profile.totals.bank_conflicts == 0, profile.kernel
        assert profile.sectors_in_excess == 0, profile.kernel


def profile_of_text(made: Build, text: str):
    """The profile of an edited causal forward kernel; its result is not checked."""
    source = replace(made.source, text=text)
    binary = compile(text, filename=source.filename, kernel=source.name, arch="sm_80")
    sizes = (1, 1, 1, 200, 200)
    q, k, v = random_operands(loaded("causal"), sizes)
    out, lse = np.zeros(v.shape, np.float16), np.zeros(v.shape[:3], np.float32)
    arrays = {"o": out.reshape(-1), "lse": lse.reshape(-1)}
    values = arrays | {name: span(t) for name, t in zip("qkv", (q, k, v), strict=True)}
    for name, t in zip("qkvo", (q, k, v, v), strict=True):
        for axis, stride in zip("bhn", t.stride(), strict=False):
            values[f"{name}_stride_{axis}"] = np.int64(stride)
    numbers = ("batch", "heads_q", "heads_kv", "seq_q", "seq_k", "q_offset", "k_offset")
    values |= dict(zip(numbers, map(np.int32, (*sizes, 0, 0)), strict=True))
    values["scale"] = np.float32(0.125)
    values |= dict.fromkeys(("head_bits", "first_head_group", "first_batch"), np.int32(0))
    params = tuple(values[param.name] for param in source.params)
    plan = source.plan
    counters = emulator.launch(
        binary.ptx,
        source.name,
        plan.grid(*sizes),
        plan.threads,
        [params],
        plan.smem_bytes,
        check=False,
        profile=True,
    )
    return profile_of(Build(made.analysis, source, binary), counters, LaunchPrediction())


@pytest.mark.slow
def test_no_swizzle_is_a_bank_conflict_and_every_second_vector_is_not_coalesced():
    made = build(loaded("causal"))
    text = made.source.text
    right = profile_of_text(made, text)
    assert right.totals.bank_conflicts == right.sectors_in_excess == 0
    plain, count = re.subn(r"row \* G \+ \(column \^ .*\)\)\)\);", "row * G + column);", text)
    assert count == 1
    profile = profile_of_text(made, plain)
    conflicts = {phase.number: phase.totals.bank_conflicts for phase in profile.phases}
    assert conflicts["5b"] > 500
    assert conflicts["5f"] > 500
    place = "16 * (threadIdx.x % G)"
    assert text.count(place) == 1
    # 16 bytes for every second vector of 16: half of each sector.
    skipping = profile_of_text(made, text.replace(place, "32 * (threadIdx.x % (G / 2))"))
    read = [t for t in skipping.tensors if t.name in ("q", "k", "v")]
    assert all(tensor.sectors > tensor.sectors_least for tensor in read)


def test_what_fits_l2_moves_the_compulsory_bytes():
    for sizes in SIZES:
        profile = forward(loaded("causal"), sizes)
        # LSE of 4 bytes a row and rows of an odd count share sectors at their ends.
        assert 0 <= profile.l2.hbm - profile.distinct.counted < SECTOR_BYTES
        assert profile.l2.evictions == 0


def test_multiply_adds_are_predicted_exactly_for_whole_fragments():
    for profile in all_kernels(loaded("causal"), SIZES[1]):
        for quantity in profile.work:
            if quantity.name in ("multiply-adds", "tensor"):
                assert quantity.counted == quantity.predicted, profile.kernel


def test_multiply_adds_are_predicted_exactly_for_head_dims_that_wgmma_pads():
    spec = loaded("causal").replace(head_dim=40, head_dim_v=40)
    profile = forward(spec, SIZES[1], arch="sm_90a")
    (products,) = [each for each in profile.work if each.name == "multiply-adds"]
    assert products.counted == products.predicted


def test_every_multiply_add_of_the_forward_kernel_is_in_its_two_products():
    profile = forward(loaded("causal"), SIZES[1])
    by_step = {phase.number: phase.totals.tensor_multiply_adds for phase in profile.phases}
    assert by_step["5b"] == by_step["5f"] == profile.totals.tensor_multiply_adds // 2
    barriers = {phase.number for phase in profile.phases if phase.totals.barriers}
    assert barriers == {"5a", "5c", "6"}
