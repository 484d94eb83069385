"""Where threads meet: barriers whose numbers, counts and operations disagree, lanes that meet at
different bar.warp.sync, and mbarriers that are invalidated. Constant expressions have types."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import launch
from ptx_emulator.errors import BarrierDivergence, EmulatorError, MbarrierMisuse, RaceError
from tests.ptx_emulator.test_conformance import Array

TEXT = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {{
  .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>; .shared .align 16 .b8 tile[1024];
  ld.param.u64 %rd0, [p]; mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %rd0;
  and.b32 %r1, %r0, 1; setp.lt.u32 %p1, %r0, 16; setp.eq.u32 %p0, %r0, 0; mov.u32 %r8, tile;
  setp.lt.u32 %p2, %r0, 32;
  {body}
  ret;
}}"""


def run(body: str, block: int = 64, seed: int | None = None) -> Array:
    out = np.zeros(block, np.uint32)
    launch(TEXT.format(body=body), "k", 1, block, [out], order_seed=seed)
    return out


@pytest.mark.parametrize(
    "body",
    [
        "bar.sync %r1;",
        "bar.sync %r1, 64;",
        "shl.b32 %r1, %r1, 5; add.u32 %r1, %r1, 32; bar.sync 1, %r1;",
        "barrier.sync %r1, 32;",
    ],
)
def test_lanes_of_a_warp_agree_on_the_number_and_the_count_of_a_barrier(body: str) -> None:
    with pytest.raises(BarrierDivergence, match="different numbers or thread counts"):
        run(body)


def test_a_barrier_has_the_number_of_the_lanes_that_are_there() -> None:
    """Lane 0 has exited, and its register has another number than those of the others."""
    body = """@%p0 exit; selp.u32 %r2, 15, 3, %p0; st.shared.u32 [%r8], %r0;
        setp.lt.u32 %p3, %r0, 32; @%p3 bra FIRST; bar.sync 3, 64; bra DONE;
        FIRST: bar.sync %r2, 64; DONE: st.global.u32 [%rd0], %r2;"""
    assert (run(body.replace("st.shared.u32 [%r8], %r0;", ""))[1:] == 3).all()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bar.red.popc.u32 %r2, 0, %p1;", "bar.red.and.pred %p3, 0, %p1;"),
        ("bar.red.or.pred %p3, 0, %p1;", "bar.sync 0;"),
        ("bar.red.or.pred %p3, 2, 64, %p1;", "bar.arrive 2, 64;"),
    ],
)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_bar_red_meets_no_other_operation(one: str, other: str, seed: int | None) -> None:
    with pytest.raises(EmulatorError, match=r"bar\.red meets another operation"):
        run(f"@%p2 bra X; {one} bra Y; X: {other} Y:", seed=seed)


def test_an_arrival_at_a_barrier_has_a_count() -> None:
    with pytest.raises(EmulatorError, match="that PTX does not allow"):
        run("mov.u32 %r2, 0; bar.arrive 1, %r2;")


BOTH = "@%p1 bra X; {} bra Y; X: {} Y: {}"
MINE = "shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r8; "


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_lanes_meet_at_different_warp_barriers(seed: int | None) -> None:
    """The two halves of a warp exchange in the two arms of an if, each with its own barrier."""
    store = "st.shared.u32 [%r2], %r0; bar.warp.sync -1; ld.shared.u32 %r3, [%r2+{}];"
    body = MINE + BOTH.format(store.format(-64), store.format(64), "st.global.u32 [%rd0], %r3;")
    assert (run(body, 32, seed) == np.arange(32) ^ 16).all()
    turns = "mov.u32 %r3, 0; {0}: bar.warp.sync -1; add.u32 %r3, %r3, 1; "
    turns += "setp.lt.u32 %p4, %r3, 5; @%p4 bra {0};"
    body = BOTH.format(turns.format("P"), turns.format("Q"), "st.global.u32 [%rd0], %r3;")
    assert (run(body, 96, seed) == 5).all()


def test_accesses_that_no_common_warp_barrier_orders_are_a_race() -> None:
    late = "bar.warp.sync -1; st.shared.u32 [%r2], %r0; ld.shared.u32 %r3, [%r2+-64];"
    early = "st.shared.u32 [%r2], %r0; bar.warp.sync -1; ld.shared.u32 %r3, [%r2+64];"
    with pytest.raises(RaceError):
        run(MINE + BOTH.format(late, early, ""), 32)


def test_a_warp_barrier_in_one_arm_alone_is_reported() -> None:
    with pytest.raises(BarrierDivergence):
        run(BOTH.format("bar.warp.sync -1;", "", "bar.sync 0;"), 32)


START = "@%p0 mbarrier.init.shared.b64 [%r8], {}; bar.sync 0; "
WAIT = "AGAIN: mbarrier.try_wait.parity.shared.b64 %p3, [%r8], 0; @!%p3 bra AGAIN; "
INVALIDATE = "@%p0 mbarrier.inval.shared.b64 [%r8]; "


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_an_mbarrier_is_not_invalidated_while_others_use_it(seed: int | None) -> None:
    arrive = "@%p0 mbarrier.arrive.shared.b64 %rd1, [%r8]; "
    with pytest.raises((RaceError, MbarrierMisuse)):
        run(START.format(1) + arrive + WAIT + INVALIDATE, seed=seed)
    run(START.format(1) + arrive + WAIT + "bar.sync 0; " + INVALIDATE, seed=seed)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_lane_does_not_invalidate_an_mbarrier_for_which_others_may_wait(seed: int | None) -> None:
    arrive = "@%p0 mbarrier.arrive.shared.b64 %rd1, [%r8]; "
    with pytest.raises(RaceError, match="while other lanes of the warp may use it"):
        run(START.format(1) + arrive + WAIT + INVALIDATE, 32, seed=seed)
    run(START.format(1) + arrive + WAIT + "bar.warp.sync -1; " + INVALIDATE, 32, seed=seed)


def test_an_arrival_at_an_mbarrier_counts() -> None:
    arrive = "mov.u32 %r2, 0; mbarrier.arrive.shared.b64 %rd1, [%r8], %r2;"
    with pytest.raises(MbarrierMisuse, match="counts as none"):
        run(START.format(64) + arrive)


def test_matrices_are_loaded_and_stored_at_generic_addresses() -> None:
    body = """mov.u64 %rd1, tile; cvta.shared.u64 %rd1, %rd1; mul.wide.u32 %rd2, %r0, 16;
        add.u64 %rd2, %rd1, %rd2; stmatrix.sync.aligned.m8n8.x1.b16 [%rd2], {%r0};
        bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.b16 {%r3}, [%rd2];
        st.global.u32 [%rd0], %r3;"""
    assert (run(body, 32) == np.arange(32)).all()


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("(-1 < 5)", 1),
        ("(-1 < 5U)", 0),
        ("(5U > -1)", 0),
        ("((-1 / 2U) >> 62)", 1),
        ("((-1 % 10U) + 0)", 5),
        ("(((.u64) -2 >> 1) >> 62)", 1),
        ("((-2 >> 1U) == -1)", 1),  # a shift has the type of what it shifts
        ("((.s64) 0xffffffffffffffffU < 5)", 1),
        ("(0xffffffffffffffff < 5)", 0),  # too large for .s64
        ("((1 < 2U) - 2 < 0)", 1),  # a comparison is signed
        ("((~0U) / 0x8000000000000000)", 1),
        ("(-7 % 3)", 0),  # of numbers of .u64, as the complement is
        ("(~0 < 0)", 0),
        ("((-1 & -1) < 0)", 1),
        ("((-1 & 5U) - 6 < 0)", 0),
        ("((0x7fffffffffffffff + 1) < 0)", 1),  # sums wrap
    ],
)
def test_constant_expressions_are_signed_or_unsigned(text: str, want: int) -> None:
    assert (run(f"mov.u32 %r2, {text}; st.global.u32 [%rd0], %r2;", 32) == want).all()
