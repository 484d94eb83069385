"""The predicted duration of a launch: its lines are its arithmetic, its rounds are counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import flashgen as fg
from flashgen.kernels.pipeline import plan_backward_of_call
from flashgen.kernels.planner import Plan, plan, plan_backward, plan_merge
from flashgen.kernels.planner.duration import (
    Duration,
    HeadSteps,
    cost_of_parts,
    duration_of,
    makespan,
)
from flashgen.kernels.planner.formulas import evaluate
from flashgen.kernels.planner.models.fitted_time import STATED_ERROR
from flashgen.kernels.planner.traffic import LaunchSizes, Visited, Walk
from flashgen.shared.arch import facts

SPEC = fg.AttentionSpec(head_dim=64)


def duration(plan: Plan, *sizes: int, visited: Visited | None = None) -> Duration:
    return duration_of(plan, [Walk(LaunchSizes(*sizes), visited)])


def test_every_line_is_its_own_arithmetic() -> None:
    for each in (plan(SPEC), *plan_backward(SPEC, deterministic=True).kernels):
        found = duration(each, 2, 8, 4, 1000, 3000)
        values = {line.name: line.value for line in found.lines}
        for line in found.lines:
            assert evaluate(line.substituted) == pytest.approx(line.value, rel=2e-3), line
        work = values["work"] * values["quantisation"]
        least = max(work, values["hbm"])
        if not each.streams:
            least = max(least, values["full_rounds"] + work / values["rounds"])
        assert values["time"] == pytest.approx(least)
        if each.streams:
            bytes_in_flight = 512 * each.warps * each.quantities["loads"]
            assert values["in_flight"] == bytes_in_flight
            assert values["block_time"] >= max(values["from_l2"], values["in_turn"])
        assert found.seconds > 0
        assert "predicted" in str(found)


def test_blocks_have_the_pace_of_those_that_share_their_sm() -> None:
    chosen, sms = plan(SPEC, "sm_80"), facts("sm_80").sms
    alone, two = (plan(SPEC, "sm_80", tile=replace(chosen.tile, blocks=n)) for n in (1, 2))
    rows = two.block_q
    for heads, shared in ((1, 1), (sms, 1), (sms + 1, 2), (2 * sms, 2), (5 * sms, 2)):
        found = duration(two, 1, heads, heads, rows, 3000)
        values = {line.name: line.value for line in found.lines}
        assert (values["resident"], values["slots"]) == (shared, shared * sms)
        if shared == 1:
            assert found.seconds == duration(alone, 1, heads, heads, rows, 3000).seconds


def test_the_cost_of_parts_of_groups_is_their_bytes_and_their_time() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=128, dtype="bfloat16", name="c")
    sizes = 1, 64, 8, 8192, 8192
    plans = plan_backward_of_call(spec, "sm_90a", sizes).kernels
    found = cost_of_parts([duration(each, *sizes) for each in plans], LaunchSizes(*sizes))
    moved = 4 * 4 * 8 * 8192 * (128 + 128)  # four parts of float32
    read = 2 * (moved / 2 + 8 * 8192 * 128 * 2) / facts("sm_90a").hbm_bytes_per_s
    assert f"4 of each group, of up to 2 query heads: {moved:,} B" in found
    assert f"writes in {moved / facts('sm_90a').hbm_bytes_per_s * 1e6:.1f} us" in found
    assert f"in order in {read * 1e6:.1f} us" in found
    few = 1, 4, 4, 100, 100
    plans = plan_backward_of_call(spec, "sm_90a", few).kernels
    assert cost_of_parts([duration(each, *few) for each in plans], LaunchSizes(*few)) == ""


@pytest.mark.parametrize(
    ("lengths", "times", "slots", "expected"),
    [
        ([5, 5, 5], 1, 3, 5),
        ([5, 5, 5], 1, 2, 10),
        ([1, 2, 3, 4], 1, 2, 5),
        ([4, 1, 1], 2, 2, 6),
        ([], 3, 2, 1),
        ([7], 10, 4, 21),
    ],
)
def test_blocks_run_in_rounds(lengths: list[int], times: int, slots: int, expected: int) -> None:
    assert makespan([HeadSteps(lengths, times)], slots) == expected


def test_no_schedule_is_shorter_than_its_work_or_its_longest_block() -> None:
    chance = random.Random(0)
    for _ in range(200):
        lengths = [chance.randrange(1, 40) for _ in range(chance.randrange(1, 30))]
        times, slots = chance.randrange(1, 5), chance.randrange(1, 20)
        found = makespan([HeadSteps(lengths, times, chance.randrange(1, 4))], slots)
        least = max(max(lengths), -(-sum(lengths) * times // slots))
        assert least <= found < least + max(lengths)


def test_a_launch_that_fills_its_rounds_loses_nothing() -> None:
    chosen = plan(SPEC)
    slots = 108 * chosen.blocks_per_sm
    full = duration(chosen, 1, slots, slots, chosen.block_q, 4096)
    one_more = duration(chosen, 1, slots + 1, slots + 1, chosen.block_q, 4096)
    assert full.quantisation == 1
    assert one_more.quantisation == pytest.approx(2 * slots / (slots + 1))


def value(found: Duration, name: str) -> float:
    return next(line.value for line in found.lines if line.name == name)


def test_a_work_tile_takes_its_steps_one_more_and_the_copies_of_its_rows() -> None:
    chosen = plan(SPEC)
    rows = chosen.block_q * chosen.block_k
    bytes_of_rows = 2 * chosen.block_q * (64 + 64)
    copies = bytes_of_rows / chosen.quantities["l2_rate"] / (chosen.cost * rows)
    found = duration(chosen, 1, 108 * chosen.blocks_per_sm, 1, chosen.block_q, 3 * chosen.block_k)
    assert value(found, "begun") == pytest.approx(1 + copies)
    assert value(found, "time") == pytest.approx(
        (3 + 1 + copies) * chosen.cost * rows * chosen.blocks_per_sm
    )


def test_rows_past_the_end_of_a_tile_are_not_copied() -> None:
    chosen = plan(SPEC, "sm_90a")
    sizes = (1, 40, 40, 1, 5000)
    copies = 2 * (64 + 64) / chosen.quantities["l2_rate"]  # of one query and its result
    of_a_step = chosen.cost * chosen.block_q * chosen.block_k
    assert value(duration(chosen, *sizes), "begun") == pytest.approx(1 + copies / of_a_step)


def test_the_last_round_is_not_shorter_than_a_work_tile() -> None:
    """One query over many keys is bound by global memory, which the last work tiles do not fill."""
    chosen = plan(SPEC.replace(head_dim=128), "sm_90a")

    def of(heads: int) -> Duration:
        return duration(chosen, 1, heads, heads, 1, 20 * chosen.block_k)

    slots = facts(chosen.arch).sms * chosen.blocks_per_sm
    alone, full, more, most = of(1), of(2 * slots), of(2 * slots + 1), of(3 * slots)
    assert (alone.bound, full.bound) == ("work", "hbm")
    assert more.seconds == pytest.approx(full.seconds + alone.seconds, rel=1e-3)
    assert more.seconds < most.seconds
    assert most.seconds == pytest.approx(1.5 * full.seconds, rel=1e-3)


def test_every_prediction_states_the_error_of_the_model() -> None:
    chosen = plan(SPEC)
    assert STATED_ERROR in str(duration(chosen, 1, 1, 1, 512, 512))
    assert STATED_ERROR in " ".join(str(chosen).split())


def test_half_of_the_tiles_take_half_of_the_work_of_the_loop() -> None:
    chosen = plan(SPEC)
    n = 64 * chosen.block_q
    tiles = -(-n // chosen.block_k)
    some = [range(tiles // 2)] * 64
    whole, half = duration(chosen, 8, 8, 8, n, n), duration(chosen, 8, 8, 8, n, n, visited=some)
    begun = value(whole, "begun")
    assert half.seconds == pytest.approx(whole.seconds * (tiles // 2 + begun) / (tiles + begun))
    with pytest.raises(ValueError, match="there are 64"):
        duration(chosen, 1, 1, 1, n, n, visited=[range(2)])


def test_a_block_walks_for_each_head_of_its_group() -> None:
    dkdv = plan_backward(SPEC, deterministic=True).kernel("dkdv")
    sizes = (1, 2, 1, 3 * dkdv.block_q, 2 * dkdv.block_k)
    alike = duration(dkdv, *sizes, visited=[[0], [1, 2]])
    assert duration(dkdv, *sizes, visited=[[0], [1, 2], [0], [1, 2]]) == alike
    fewer = duration(dkdv, *sizes, visited=[[0], [1, 2], [], [0]])
    of_starts = 2 * value(alike, "begun")  # of two work tiles
    share = (4 + of_starts) / (6 + of_starts)
    assert value(fewer, "work") == pytest.approx(value(alike, "work") * share)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_block_with_few_companions_is_bound_by_its_loads_in_flight_or_by_l2(arch: str) -> None:
    """One block takes as long as few, no SM exceeds the rate of L2, and many are bound by HBM."""
    merge, gpu = plan_merge(SPEC.replace(head_dim=256), arch, splits=True), facts(arch)
    columns = 256 // 32  # blocks of a row
    latency = gpu.memory_latency

    def at(rows: int, splits: int) -> Duration:
        sizes = LaunchSizes(1, rows, rows, 1, 0)
        return duration_of(merge, [Walk(sizes)], splits=splits)

    def clocks(rows: int, splits: int) -> float:
        return at(rows, splits).seconds * gpu.clock_hz

    few = gpu.sms // 4 // columns
    assert clocks(1, 500) == pytest.approx(clocks(few, 500))
    of_block = (500 * (1024 + 4) + 512 + 4) / columns
    in_flight = 32 * 4 * 32  # of 32 parts, a float for each column
    assert clocks(1, 500) == pytest.approx(latency * of_block / in_flight)
    resident = 8
    of_many = of_block * resident / gpu.l2_bytes_per_clock
    many = at(resident * gpu.sms // columns, 500)
    assert value(many, "from_l2") == pytest.approx(latency + of_many)
    # Parts are loaded beside their LSE where that costs no more than the wait for these.
    assert latency < clocks(1, 1) < clocks(1, 32) < 1.25 * latency
    assert value(at(gpu.sms, 32), "block_time") > 2 * latency
    many = at(64 * gpu.sms, 20)
    assert many.bound == "hbm"
    assert many.seconds == pytest.approx(
        64 * gpu.sms * (20 * (1024 + 4) + 512 + 4) / gpu.hbm_bytes_per_s
    )


def test_interleaved_heads_leave_no_long_block_for_the_end() -> None:
    one_head = list(range(1, 33))
    by_head = makespan([HeadSteps(one_head, 16)], 132)
    interleaved = makespan([HeadSteps(one_head, 16, 8)], 132)
    assert interleaved < by_head
    assert interleaved <= 1.05 * sum(one_head) * 16 / 132


# ---- order of blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "seq", "bits"),
    [
        ((16, 16), 4096, 4),  # 32 MiB of K and V
        ((16, 16), 8192, 3),
        ((16, 2), 8192, 4),  # eight heads share theirs
        ((12, 12), 512, 2),
        ((7, 7), 512, 0),
        ((32, 32), 1 << 20, 0),  # not even one head's fit
    ],
)
def test_as_many_heads_are_interleaved_as_fit_in_l2(heads, seq, bits) -> None:
    chosen = plan(fg.AttentionSpec(head_dim=128), "sm_90a")
    queries = 1 << 15  # the tiles of one head occupy all SMs
    assert chosen.head_bits(*heads, queries, seq) == bits
    tiles = -(-queries // chosen.block_q)
    assert chosen.grid(3, *heads, queries, seq, head_bits=bits) == (
        tiles << bits,
        heads[0] >> bits,
        3,
    )


def test_where_blocks_own_keys_it_is_q_its_gradient_and_sums_that_must_fit() -> None:
    fused = plan_backward(fg.AttentionSpec(head_dim=128), "sm_90a").kernel("fused")
    keys = 1 << 15
    assert fused.head_bits(16, 16, 4096, keys) == 3
    assert fused.head_bits(16, 2, 2048, keys) == 1
    assert fused.head_bits(16, 2, 4096, keys) == 0
    dkdv = plan_backward(fg.AttentionSpec(head_dim=128), "sm_90a", deterministic=True).key_plan
    assert dkdv.head_bits(16, 16, 4096, keys) == 4  # it has no sums


def test_enough_heads_are_interleaved_to_occupy_most_sms_whatever_fits_in_l2() -> None:
    fused = plan_backward(fg.AttentionSpec(head_dim=128), "sm_90a").kernel("fused")
    sms = fused.machine.sms * fused.blocks_per_sm
    group, seq = 8, 8192  # Q and dO of a key head: 32 MiB
    tiles = seq // fused.block_k
    assert 3 * tiles < 2 * sms < 6 * tiles
    assert fused.head_bits(8 * group, 8, seq, seq) == 1
    long = 2 * sms * fused.block_k
    assert fused.head_bits(8 * group, 8, long, long) == 0
