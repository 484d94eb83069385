"""Exchanges between the lanes of a warp: shuffles, votes, matches, reductions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from ptx_emulator import launch
from tests.ptx_emulator.test_conformance import HEADER, Array, agree, probe, run, run_ptx

FULL = 0xFFFFFFFF
LANES = np.arange(32)


def lane_source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The source lane of shfl.sync and its predicate, as the ISA's pseudo-code has them."""
    amount, clamp, segment = b & 31, c & 31, c >> 8 & 31
    low = lane & segment
    last = low | clamp & ~segment
    source = {
        "up": lane - amount,
        "down": lane + amount,
        "bfly": lane ^ amount,
        "idx": low | amount & ~segment,
    }[mode]
    inside = source >= last if mode == "up" else source <= last
    return (source if inside else lane), inside


def shuffled(mode: str, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    values, flags = np.empty_like(a), np.empty(a.size, np.uint32)
    for at in range(a.size):
        source, inside = lane_source(mode, at % 32, int(b[at]), int(c[at]))
        values[at], flags[at] = a[at - at % 32 + source], inside
    return values, flags


WIDTH = {32: 0, 16: 0x1000, 8: 0x1800, 4: 0x1C00, 2: 0x1E00, 1: 0x1F00}


@pytest.mark.parametrize("width", [*WIDTH])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl_stays_inside_its_segment(mode: str, width: int) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(0, 1 << 32, 32 * 40, np.uint32)
    amounts = np.resize([*range(33), 63, 64, 255, FULL], 40).repeat(32).astype(np.uint32)
    c = np.full(a.size, WIDTH[width] | (0 if mode == "up" else 31), np.uint32)
    values, flags = shuffled(mode, a, amounts, c)
    body = f".reg .pred p; shfl.sync.{mode}.b32 %d|p, %a, %b, %c, -1; selp.b32 %e, 1, 0, p;"
    got, inside = probe(body, "u4 u4", a, amounts, c)
    agree(got, values, a, amounts, c)
    agree(inside, flags, a, amounts, c)


@pytest.mark.parametrize("clamp", [0x1F, 0, 7, 0x180F, 0x1C03, 0x0F07])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl_with_any_clamp_and_a_lane_of_its_own_choice(mode: str, clamp: int) -> None:
    rng = np.random.default_rng(clamp)
    a = rng.integers(0, 1 << 32, 256, np.uint32)
    b = rng.integers(0, 40, 256).astype(np.uint32)
    c = np.full(256, clamp, np.uint32)
    values, flags = shuffled(mode, a, b, c)
    body = f".reg .pred p; shfl.sync.{mode}.b32 %d|p, %a, %b, {clamp}, 0xffffffff;"
    got, inside = probe(body + "selp.b32 %e, 1, 0, p;", "u4 u4", a, b)
    agree(got, values, a, b, c)
    agree(inside, flags, a, b, c)


def test_shfl_moves_floats_kept_in_bit_registers_and_in_float_registers() -> None:
    a = np.random.default_rng(2).normal(size=128).astype(np.float32)
    want = a.reshape(-1, 32)[:, LANES ^ 5].reshape(-1)
    for typed in (True, False):
        body = "shfl.sync.bfly.b32 %d, %a, 5, 31, -1;"
        agree(probe(body, "f4", a, typed=typed), want, a)


@pytest.mark.parametrize("mask", [0x0000FFFF, 0xFFFF0000, 0xAAAAAAAA, 0x00000001, 0xF00F00F0])
def test_shuffles_and_votes_among_some_lanes_of_a_diverged_warp(mask: int) -> None:
    members = [lane for lane in range(32) if mask >> lane & 1]
    rng = np.random.default_rng(3)
    values = rng.integers(0, 1 << 32, 96, np.uint32)
    source = np.resize(members, 96)[rng.permutation(96)].astype(np.uint32)
    body = f""".reg .pred in, odd; .reg .b32 x, y;
        mov.u32 x, %laneid; shr.u32 y, {mask}, x; and.b32 y, y, 1; setp.ne.s32 in, y, 0;
        mov.b32 %d, 0; mov.b32 %e, 0;
        @!in bra OUTSIDE;
        shfl.sync.idx.b32 %d, %a, %b, 31, {mask};
        and.b32 y, %a, 1; setp.ne.s32 odd, y, 0;
        vote.sync.ballot.b32 %e, odd, {mask};
        OUTSIDE: bar.warp.sync -1;"""
    got, ballot = probe(body, "u4 u4", values, source)
    inside = np.isin(np.arange(96) % 32, members)
    warp = np.arange(96) // 32 * 32
    agree(got, np.where(inside, values[warp + source], 0).astype(np.uint32), values, source)
    odd = ((values & 1).astype(np.uint64) << (np.arange(96, dtype=np.uint64) % 32)) * inside
    ballots = odd.reshape(3, 32).sum(axis=1).repeat(32)
    agree(ballot, (ballots * inside).astype(np.uint32), values)


@pytest.mark.parametrize("negate", ["", "!"])
@pytest.mark.parametrize("pattern", [0, 1, 0x80000000, 0xFFFF, FULL - 1, FULL])
def test_votes(pattern: int, negate: str) -> None:
    lanes = np.tile((pattern >> LANES) & 1, 3).astype(np.uint32)
    seen = pattern ^ (FULL if negate else 0)
    body = f""".reg .pred p, q; .reg .b32 x; setp.ne.s32 p, %a, 0;
        vote.sync.ballot.b32 %e, {negate}p, -1;
        vote.sync.all.pred q, {negate}p, -1; selp.b32 %d, 1, 0, q;
        vote.sync.any.pred q, {negate}p, -1; selp.b32 x, 2, 0, q; or.b32 %d, %d, x;
        vote.sync.uni.pred q, {negate}p, -1; selp.b32 x, 4, 0, q; or.b32 %d, %d, x;"""
    flags, ballot = probe(body, "u4 u4", lanes)
    want = (seen == FULL) + 2 * (seen != 0) + 4 * (seen in (0, FULL))
    assert (ballot == seen).all()
    assert (flags == want).all()


@pytest.mark.parametrize("width", [32, 64])
def test_match_any_names_the_lanes_with_an_equal_value(width: int) -> None:
    rng = np.random.default_rng(width)
    values = rng.integers(0, 6, (4, 32)).astype(f"u{width // 8}") << (width - 8)
    want = ((values[:, :, None] == values[:, None, :]) << LANES.astype(np.uint64)).sum(axis=2)
    got = probe(f"match.any.sync.b{width} %d, %a, -1;", "u4", values)
    agree(got, want.astype(np.uint32).reshape(-1), values.reshape(-1))


def test_match_all_says_whether_the_whole_warp_agrees() -> None:
    values = np.full((3, 32), 0xABCD, np.uint32)
    values[1, 17] = 0xABCE
    body = ".reg .pred p; match.all.sync.b32 %d|p, %a, -1; selp.b32 %e, 1, 0, p;"
    mask, flag = probe(body, "u4 u4", values)
    assert mask.reshape(3, 32).T.tolist() == [[FULL, 0, FULL]] * 32
    assert flag.reshape(3, 32).T.tolist() == [[1, 0, 1]] * 32


REDUX: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda a, b: (a + b) & FULL,
    "add.s32": lambda a, b: (a + b) & FULL,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda a, b: min(a, b, key=lambda v: v ^ 0x80000000),
    "max.s32": lambda a, b: max(a, b, key=lambda v: v ^ 0x80000000),
    "and.b32": int.__and__,
    "or.b32": int.__or__,
    "xor.b32": int.__xor__,
}


@pytest.mark.parametrize("opcode", [*REDUX])
def test_redux_folds_the_members_of_its_mask(opcode: str) -> None:
    values = np.random.default_rng(5).integers(0, 1 << 32, (3, 32), np.uint32)
    for mask in (FULL, 0x0FF0F0F1):
        body = f""".reg .pred in; .reg .b32 x; mov.u32 x, %laneid; shr.u32 x, {mask}, x;
            and.b32 x, x, 1; setp.ne.s32 in, x, 0; mov.b32 %d, 0;
            @in redux.sync.{opcode} %d, %a, {mask};"""
        got = probe(body, "u4", values).reshape(3, 32)
        members = (mask >> LANES & 1).astype(bool)
        for row, line in zip(values, got, strict=True):
            want = functools.reduce(REDUX[opcode], row[members].tolist())
            assert (line[members] == want).all()
            assert (line[~members] == 0).all()


def test_special_registers_of_a_three_dimensional_block() -> None:
    shape, grid = (4, 3, 6), (2, 3, 2)
    names = ["tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "laneid", "warpid",
             "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge",
             "ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z"]  # fmt: skip
    stores = "\n".join(
        f"mov.u32 %v, %{name}; st.global.u32 [%out+{4 * i}], %v;" for i, name in enumerate(names)
    )
    ptx = f""".visible .entry k(.param .u64 out) {{ .reg .b32 %v, %i, %j, %n; .reg .b64 %out;
        mov.u32 %i, %ctaid.z;
        mov.u32 %n, %nctaid.y; mov.u32 %j, %ctaid.y; mad.lo.u32 %i, %i, %n, %j;
        mov.u32 %n, %nctaid.x; mov.u32 %j, %ctaid.x; mad.lo.u32 %i, %i, %n, %j;
        mov.u32 %n, %ntid.z; mov.u32 %j, %tid.z; mad.lo.u32 %i, %i, %n, %j;
        mov.u32 %n, %ntid.y; mov.u32 %j, %tid.y; mad.lo.u32 %i, %i, %n, %j;
        mov.u32 %n, %ntid.x; mov.u32 %j, %tid.x; mad.lo.u32 %i, %i, %n, %j;
        ld.param.u64 %out, [out]; mad.wide.u32 %out, %i, {4 * len(names)}, %out; {stores} ret; }}"""
    blocks, threads = int(np.prod(grid)), int(np.prod(shape))
    out = np.zeros((blocks, threads, len(names)), np.uint32)
    launch(HEADER + ptx, "k", grid, shape, [out])
    thread, block = np.arange(threads), np.arange(blocks)[:, None]
    lane = thread % 32
    columns = {
        "tid.x": thread % 4, "tid.y": thread // 4 % 3, "tid.z": thread // 12,
        "ctaid.x": block % 2, "ctaid.y": block // 2 % 3, "ctaid.z": block // 6,
        "laneid": lane, "warpid": thread // 32,
        "lanemask_eq": 1 << lane, "lanemask_lt": (1 << lane) - 1, "lanemask_le": (2 << lane) - 1,
        "lanemask_gt": FULL ^ ((2 << lane) - 1), "lanemask_ge": FULL ^ ((1 << lane) - 1),
        **{f"{n}.{axis}": size for n, sizes in (("ntid", shape), ("nctaid", grid))
           for axis, size in zip("xyz", sizes, strict=True)},
    }  # fmt: skip
    for i, name in enumerate(names):
        assert (out[:, :, i] == columns[name]).all(), name


def test_a_warp_that_the_block_does_not_fill_has_fewer_active_lanes() -> None:
    ptx = """.visible .entry k(.param .u64 out) { .reg .b32 %t, %m; .reg .b64 %out; .reg .pred %p;
        mov.u32 %t, %tid.x; ld.param.u64 %out, [out]; mad.wide.u32 %out, %t, 8, %out;
        activemask.b32 %m; st.global.u32 [%out], %m; setp.eq.u32 %p, 0, 0;
        vote.sync.ballot.b32 %m, %p, %m; st.global.u32 [%out+4], %m; ret; }"""
    out = np.zeros((41, 2), np.uint32)
    run_ptx(ptx, "k", 1, 41, out)
    assert (out[:32] == FULL).all()
    assert (out[32:] == 0x1FF).all()


WARP_CUDA = r"""
extern "C" __global__ void scan(const int* in, int* out, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % width, x = in[i];
    for (int d = 1; d < width; d *= 2) {
        int y = __shfl_up_sync(0xffffffffu, x, d, width);
        if (lane >= d) x += y;
    }
    out[i] = x;
}
extern "C" __global__ void mean(const double* in, double* out) {
    double x = in[threadIdx.x];
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    out[threadIdx.x] = x;
}
extern "C" __global__ void rank(const int* in, int* out) {
    unsigned equal = __match_any_sync(0xffffffffu, in[threadIdx.x]);
    unsigned below; asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    out[threadIdx.x] = __popc(equal & below) * 100 + __ffs(equal) - 1;
}
extern "C" __global__ void compact(const float* in, float* out, int* count) {
    float x = in[threadIdx.x];
    unsigned keep = __ballot_sync(0xffffffffu, x > 0.f);
    if (x > 0.f) out[__popc(keep & ((1u << threadIdx.x) - 1))] = x;
    if (__any_sync(0xffffffffu, x > 2.5f)) *count = __popc(keep);
}
"""


@pytest.mark.parametrize("width", [32, 16, 4])
def test_a_scan_by_shuffles(width: int) -> None:
    values = np.random.default_rng(1).integers(-99, 99, 256).astype(np.int32)
    out = np.zeros_like(values)
    run(WARP_CUDA, "scan", (2,), (128,), values, out, np.int32(width))
    assert (out == values.reshape(-1, width).cumsum(axis=1).reshape(-1)).all()


def test_a_double_is_shuffled_as_two_words() -> None:
    values = np.random.default_rng(2).integers(-99, 99, 64) / 8
    out = np.zeros_like(values)
    run(WARP_CUDA, "mean", (1,), (64,), values, out)
    assert (out == values.reshape(2, 32).sum(axis=1).repeat(32)).all()


def test_ranking_by_match_any() -> None:
    values = np.random.default_rng(3).integers(0, 5, 32).astype(np.int32)
    out = np.zeros_like(values)
    run(WARP_CUDA, "rank", (1,), (32,), values, out)
    seen = values.tolist()
    assert out.tolist() == [seen[:i].count(v) * 100 + seen.index(v) for i, v in enumerate(seen)]


def test_compaction_by_ballot() -> None:
    values = np.random.default_rng(4).normal(size=32).astype(np.float32)
    values[5] = 3
    out, count = np.zeros(32, np.float32), np.zeros(1, np.int32)
    run(WARP_CUDA, "compact", (1,), (32,), values, out, count)
    kept = values[values > 0]
    assert count[0] == kept.size
    assert (out[: kept.size] == kept).all()
    assert (out[kept.size :] == 0).all()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_whole_warp_does_not_wait_for_the_lanes_that_another_misses(seed: int | None) -> None:
    """Some lanes of warp 0 take a way round that lies behind the exchange, and come back to it."""
    ptx = """.visible .entry k(.param .u64 p) {
        .reg .b32 %t, %x; .reg .b64 %p, %q; .reg .pred %p1;
        mov.u32 %t, %tid.x; mov.u32 %x, %t; setp.lt.u32 %p1, %t, 5; @%p1 bra ROUND;
        BACK: shfl.sync.bfly.b32 %x, %x, 1, 0x1f, -1; ld.param.u64 %p, [p];
        mul.wide.u32 %q, %t, 4; add.u64 %p, %p, %q; st.global.b32 [%p], %x; ret;
        ROUND: add.u32 %x, %x, 250; setp.lt.u32 %p1, %x, 1000; @%p1 bra ROUND; bra BACK; }"""
    out = np.zeros(64, np.uint32)
    run_ptx(ptx, "k", 1, 64, out, order_seed=seed)
    sent = np.arange(64) + np.where(np.arange(64) < 5, 1000, 0)
    assert (out == sent[np.arange(64) ^ 1]).all()
