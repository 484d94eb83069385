"""Calls with split keys and pages: predicted bytes are counted, and their shares of the bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.programs import SpecProgram
from flashgen.kernels.planner.duration import duration_of
from flashgen.kernels.planner.formulas import evaluate
from flashgen.kernels.planner.split_keys import plan_splits
from flashgen.kernels.planner.split_traffic import OF_FORWARD, OF_MERGE
from flashgen.kernels.planner.traffic import LaunchSizes, Walk
from flashgen.shared.arch import facts
from flashgen.shared.errors import FlashgenError
from flashgen.shared.paths import PATHS
from flashgen.shared.split_choice import ALL_SPLITS, LOADS, Load, mean_times
from flashgen.tools.profile.decoding import DecodingPlan, plan_decoding
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.profile.run import profile_forward
from tests.support.examples import spec_path
from tests.support.paged_calls import Paged, Sequences
from tests.support.profiles import loaded
from tests.support.tiers import slow

CAUSAL = loaded("causal")
SERVED = CAUSAL.replace(head_dim=128, dtype="bfloat16")
LARGE = [(1, 131_072), (64, 4_096)]


def profiles(
    spec: fg.AttentionSpec, of: Sequences, page: int, arch: str, split_size: int | None
) -> tuple[Profile, ...]:
    """The profiles of a call: with pages, or of sequences of one length with contiguous keys."""
    how: dict[str, Any] = {"arch": arch, "split_size": split_size}
    if page:
        call = Paged(spec.replace(paged=True), of, page)
        q, k, v, tables = call.operands()
        return profile_forward(call.spec, q, k, v, tensors=tables, **how)[1]
    q, k, v = (torch.stack(each) for each in (of.q, of.k, of.v))
    return profile_forward(spec, q, k, v, q_offset=k.shape[2] - q.shape[2], **how)[1]


@pytest.mark.parametrize(
    ("arch", "page", "split_size", "queries", "keys", "dims"),
    [
        ("sm_90a", 16, 96, 1, (250,), (64, 64)),
        slow("sm_90a", 0, 96, 1, (250,), (64, 64)),
        slow("sm_90a", 0, 416, 1, (832, 832), (64, 64)),
        slow("sm_80", 16, 96, 1, (250, 130, 37), (64, 64)),
        slow("sm_80", 0, 48, 1, (250,), (40, 96)),
        *(slow(arch, 16, size, 1, (250,), (64, 64)) for arch in PATHS for size in (None, 0)),
        *(slow(arch, 4, 96, 1, (250,), (64, 64)) for arch in PATHS),
        *(slow(arch, 64, 208, 1, (450, 130), (128, 128)) for arch in PATHS),
        *(slow(arch, 16, 64, 3, (250, 90), (40, 96)) for arch in PATHS),
    ],
)
def test_predicted_bytes_of_both_launches_are_exactly_those_that_are_counted(
    arch: str,
    page: int,
    split_size: int | None,
    queries: int,
    keys: tuple[int, ...],
    dims: tuple[int, int],
) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1])
    of = Sequences.of((queries,) * len(keys), keys, heads=(4, 1), dims=dims)
    found = profiles(spec, of, page, arch, split_size)
    kernels = [profile.plan.kernel for profile in found]
    alone = split_size == 0 or found[0].plan.folds
    assert kernels == (["forward"] if alone else ["forward", "merge"])
    assert split_size is None or not found[0].plan.folds
    for profile in found:
        for tensor in profile.tensors:
            assert tensor.issued.counted == tensor.issued.predicted, (profile.kernel, tensor.name)
        assert profile.duration is not None


@pytest.mark.parametrize(
    ("arch", "page"), [("sm_80", 0), ("sm_90a", 16), slow("sm_80", 16), slow("sm_90a", 0)]
)
@pytest.mark.parametrize("run", [ALL_SPLITS, 2])
def test_a_block_with_several_splits_of_its_rows_reads_their_queries_once(
    run: int, arch: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpecProgram, "run_of", lambda *_: run)
    keys = (250, 130) if page else (250,)
    of = Sequences.of((1,) * len(keys), keys, heads=(4, 1), dims=(64, 64))
    found = profiles(CAUSAL, of, page, arch, 96)
    assert (found[0].plan.folds, found[0].plan.runs) == (run == ALL_SPLITS, run == 2)
    for profile in found:
        for tensor in profile.tensors:
            assert tensor.issued.counted == tensor.issued.predicted, tensor.name
    issued = {tensor.name: tensor.issued for tensor in found[0].tensors}
    blocks = 1 if run == ALL_SPLITS else 2  # of the longest sequence: 3 splits
    reads = len(keys) * blocks if arch == "sm_90a" else len(keys) * blocks - (len(keys) - 1)
    reads = len(keys) if run == ALL_SPLITS else reads
    assert issued["q"].counted == 2 * 64 * 4 * reads


def large(batch: int, keys: int, page: int, heads: tuple[int, int] = (32, 8)) -> DecodingPlan:
    return plan_decoding(SERVED, "sm_90a", LaunchSizes(batch, *heads, 1, keys), page_size=page)


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(("batch", "keys"), LARGE)
def test_a_decoding_call_moves_few_more_bytes_than_the_hbm_bound(
    batch: int, keys: int, page: int
) -> None:
    """With 32 query heads over 8 and the split_size that the plan chooses."""
    found = large(batch, keys, page).predicted
    assert found is not None
    assert 1 < found.traffic.over_bound <= 1.05


@pytest.mark.parametrize("heads_kv", [32, 16, 8])
def test_slots_are_busy_from_one_sequence_of_32k_keys_on(heads_kv: int) -> None:
    for keys in (32_768, 49_152, 65_536, 98_304, 131_072):
        found = large(1, keys, 16, heads=(4 * heads_kv, heads_kv)).predicted
        assert found is not None
        # Blocks of many splits leave some slots idle where global memory takes longer all the same.
        assert found.busy >= 0.95 or found.forward.bound == "hbm", keys
        assert found.traffic.over_bound <= 1.05


def test_shorter_splits_are_predicted_slower() -> None:
    """They have twice the parts: see benchmarks/NOTES.md."""
    for load in LOADS:
        sizes = LaunchSizes(load.batch, 32, 8, 1, load.keys)
        short, planned = (
            plan_decoding(SERVED, "sm_90a", sizes, page_size=16, split_size=size).predicted
            for size in (256, None)
        )
        assert short is not None
        assert planned is not None
        # Where the keys bind both, blocks of as many keys write as many parts.
        assert short.seconds >= planned.seconds


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_pages_of_16_are_read_in_the_sectors_of_contiguous_keys(arch: str) -> None:
    """Once for the heads that share a tile: all 4 of a group on sm_90a, one on sm_80."""
    of = Sequences.of((1,), (416,), heads=(4, 1))
    both = [profiles(CAUSAL, of, page, arch, 208)[0] for page in (0, 16)]
    reads = 4 // both[0].plan.heads_per_tile
    for name in ("k", "v"):
        found = [
            next(each for each in profile.tensors if each.name.startswith(name)) for profile in both
        ]
        bytes_ = 416 * 64 * 2
        assert {tensor.distinct for tensor in found} == {bytes_}
        assert {tensor.issued.counted for tensor in found} == {reads * bytes_}
        assert {tensor.sectors for tensor in found} == {reads * bytes_ // 32}
        assert found[0].sectors_least == found[1].sectors_least == found[0].sectors


def test_every_line_of_a_decoding_plan_is_its_own_arithmetic() -> None:
    found = large(2, 40_000, 16)
    assert found.predicted is not None
    assert found.predicted.merge is not None
    at = found.predicted.traffic.quantities
    for formula in (*OF_FORWARD, *OF_MERGE):
        assert evaluate(formula.substituted(at)) == at[formula.name]
    for line in found.predicted.merge.lines:
        assert evaluate(line.substituted) == pytest.approx(line.value, rel=2e-3), line
    text = str(found)
    assert str(found.chosen) in text
    splits = f"splits    {-(-40_000 // found.split_size)} of {found.split_size:,} keys, "
    parts = -(-found.splits // found.run)
    assert splits + f"{found.run} in each block, and a merge of {parts} results" in text
    assert "splits in a block: time over the least one" in text
    assert "predicted forward: " in text
    assert "predicted merge: " in text


def test_the_time_of_a_merge_grows_with_its_parts() -> None:
    merge = large(1, 40_000, 0).predicted.merge.plan  # type: ignore[union-attr]
    sizes = LaunchSizes(1, 32, 32, 1, 0)
    few, many = (duration_of(merge, [Walk(sizes)], splits=n).seconds for n in (2, 202))
    gpu = facts("sm_90a")
    blocks, in_flight = 128 // 32, 32 * 4 * 32  # of 32 parts, a float for each column
    of_row = 2 * 128 + 4
    in_turn = gpu.memory_latency * (202 * 4 * 129 + of_row) / blocks / in_flight
    at_once = gpu.memory_latency + (2 * 4 * 129 + of_row) / blocks / gpu.l2_bytes_per_clock
    assert many - few == pytest.approx((in_turn - at_once) / gpu.clock_hz)


def test_queries_and_values_inside_keys_pass_through_global_memory_once() -> None:
    """What the counted launches of test_shared_kv.py read; L2 has the queries of later splits."""
    of = fg.AttentionSpec(
        CAUSAL.mask_mod, head_dim=576, head_dim_v=512, shared_kv=True, dtype="bfloat16"
    )
    sizes = LaunchSizes(1, 64, 1, 1, 131_072)
    found = plan_decoding(of, "sm_90a", sizes, page_size=64, split_size=512).predicted
    assert found is not None
    (moved,) = [line for line in str(found.forward).splitlines() if "hbm = bytes" in line]
    rows = 64 * 128  # blocks have two splits
    each_once = 2 * 576 * (131_072 + 64) + (4 * 512 + 4) * rows
    assert f"= {each_once}/" in moved


def test_keys_that_are_not_split_have_one_launch() -> None:
    found = plan_decoding(CAUSAL, "sm_90a", LaunchSizes(1, 8, 2, 1, 9_000), split_size=0)
    assert found.predicted is not None
    assert found.predicted.merge is None
    assert found.predicted.traffic.quantities["merge_bytes"] == 0
    assert "splits    none" in str(found)
    assert "given instead: split_size = 0" in str(found)


def test_a_window_reads_the_keys_that_it_reaches() -> None:
    spec = loaded("sliding_window")
    values = {"window": 100}
    sizes = LaunchSizes(1, 8, 2, 1, 5_000)
    found = plan_decoding(spec, "sm_80", sizes, split_size=480, scalars=values)
    run = run_forward(
        spec,
        *(torch.zeros(1, heads, n, 64).half() for heads, n in ((8, 1), (2, 5_000), (2, 5_000))),
        scalars=values,
        q_offset=4_999,
        split_size=480,
        backend="emulator",
        arch="sm_80",
        check_memory=False,
    )
    assert found.predicted is not None
    at = found.predicted.traffic.quantities
    moved = run.counters.global_read_bytes + run.counters.global_write_bytes
    assert moved == at["forward_bytes"]
    assert at["keys"] < 2 * 300


def test_what_cannot_be_predicted_and_what_is_refused() -> None:
    sizes = LaunchSizes(1, 8, 2, 1, 900)
    for wrong in (100, 8):
        with pytest.raises(FlashgenError, match="split_size is not a number of keys"):
            plan_decoding(CAUSAL, "sm_90a", sizes, split_size=wrong)
    with pytest.raises(FlashgenError, match="no facts about this architecture"):
        plan_decoding(CAUSAL, "sm_10", sizes)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_time_that_decides_on_splits_is_the_predicted_one(dim: int, load: Load) -> None:
    spec = SERVED.replace(paged=False, head_dim=dim, dtype="bfloat16")
    chosen = plan_splits(spec, "sm_90a", 8)
    sizes = LaunchSizes(load.batch, 32, 8, 1, load.keys)
    found = plan_decoding(spec, "sm_90a", sizes)
    assert found.split_size == chosen.size
    assert found.predicted is not None
    ratio = found.predicted.seconds / found.bound_seconds
    run, fastest = chosen.fastest(load)
    assert found.run == run
    bound = chosen.kernel.bound(chosen.call_of(load))
    assert float(fastest.time) / bound == pytest.approx(ratio, rel=0.02)


def test_one_query_takes_about_the_time_of_its_bytes() -> None:
    spec = CAUSAL.replace(head_dim=128, dtype="bfloat16")
    for batch, keys in ((1, 8_192), (1, 131_072), (8, 8_192), (64, 4_096)):
        found = plan_decoding(spec, "sm_90a", LaunchSizes(batch, 32, 8, 1, keys), page_size=16)
        assert found.predicted is not None
        assert found.predicted.seconds <= 1.05 * found.bound_seconds


def test_the_plan_says_that_calls_are_batch_invariant() -> None:
    spec = fg.load(spec_path("causal"))
    sizes = LaunchSizes(1, 4, 1, 1, 32_768)
    free = plan_decoding(spec, "sm_90a", sizes)
    with fg.batch_invariant_mode():
        found = plan_decoding(spec, "sm_90a", sizes)
    assert "batch-invariant: the split_size of all calls" in str(found)
    assert "batch-invariant" not in str(free)
    assert found.split_size == found.chosen.size != free.split_size


@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_codes_are_predicted_to_take_at_most_057_of_the_time_of_elements(
    arch: str, kv_dtype: str
) -> None:
    for batch, keys in LARGE:
        sizes = LaunchSizes(batch, 32, 8, 1, keys)
        elements = plan_decoding(SERVED, arch, sizes, page_size=16).predicted
        codes = plan_decoding(SERVED, arch, sizes, page_size=16, kv_dtype=kv_dtype).predicted
        assert elements is not None
        assert codes is not None
        assert codes.seconds <= 0.57 * elements.seconds
        assert codes.traffic.over_bound <= 1.06


@pytest.mark.parametrize("spec", [SERVED, CAUSAL.replace(head_dim=256)])
def test_the_time_of_each_number_of_keys_is_that_of_a_plan_with_them(
    spec: fg.AttentionSpec,
) -> None:
    chosen = plan_splits(spec, "sm_90a", 8)
    sizes = np.arange(32, 600, 16)
    found = mean_times(chosen, sizes)
    assert found.tolist() == [replace(chosen, size=int(size)).mean for size in sizes]
