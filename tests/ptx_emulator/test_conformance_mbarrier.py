"""mbarriers: phases, arrivals, transaction counts, states and parities, waits that block."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import DeadlockError, MbarrierMisuse, StepLimit, launch
from ptx_emulator.errors import RaceError, UnknownInstruction
from tests.ptx_emulator.test_conformance import Array, run_ptx
from tests.support.hopper_ptx import hopper_ptx

SEEDS = [None, 1, 2, 3]

CUDA = r"""
__device__ __forceinline__ ull arrive_state(ull* b) {
    ull s;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(s) : "r"(SM(b)) : "memory");
    return s;
}
__device__ __forceinline__ bool test(ull* b, u parity) {
    u done;
    asm volatile("{ .reg .pred P; mbarrier.test_wait.parity.shared::cta.b64 P, [%1], %2;"
                 " selp.u32 %0, 1, 0, P; }" : "=r"(done) : "r"(SM(b)), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ bool test_state(ull* b, ull state) {
    u done;
    asm volatile("{ .reg .pred P; mbarrier.test_wait.shared::cta.b64 P, [%1], %2;"
                 " selp.u32 %0, 1, 0, P; }" : "=r"(done) : "r"(SM(b)), "l"(state) : "memory");
    return done;
}
#define START(count) __shared__ ull b[4]; \
    if (T == 0) { init(b, count); fence_init(); } \
    __syncthreads()
KERNEL(parities)(u* out) {
    __shared__ ull b[1];
    if (T == 0) {
        init(b, 2);
        u seen = 0;
        for (int i = 0; i < 6; ++i) {
            seen = seen << 2 | test(b, 0) << 1 | test(b, 1);
            arrive(b);
        }
        out[0] = seen;
    }
}
KERNEL(states)(u* out) {
    __shared__ ull b[1];
    if (T == 0) {
        init(b, 2);
        ull first = arrive_state(b);
        u seen = test_state(b, first);
        ull second = arrive_state(b);
        seen = seen << 1 | test_state(b, first);
        seen = seen << 1 | test_state(b, second);
        ull third = arrive_state(b);
        seen = seen << 1 | test_state(b, third);
        out[0] = seen;
    }
}
KERNEL(ring)(const int* in, int* out, int rounds) {   // every warp reads what the next one wrote
    START(blockDim.x);
    __shared__ int s[128];
    int x = in[T];
    for (int i = 0; i < rounds; ++i) {
        s[T] = x;
        arrive(b); wait(b, 0);
        x = s[(T + 33) % 128] + 1;
        arrive(b); wait(b, 1);
    }
    out[blockIdx.x * 128 + T] = x;
}
KERNEL(ring_of_states)(const int* in, int* out, int rounds) {
    START(blockDim.x);
    __shared__ int s[128];
    int x = in[T];
    for (int i = 0; i < 2 * rounds; ++i) {
        if (i % 2 == 0) s[T] = x;
        ull state = arrive_state(b);
        asm volatile("{ .reg .pred P; AGAIN: mbarrier.try_wait.shared::cta.b64 P, [%0], %1, 1000;"
                     " @!P bra AGAIN; }" :: "r"(SM(b)), "l"(state) : "memory");
        if (i % 2 == 0) x = s[(T + 33) % 128] + 1;
    }
    out[blockIdx.x * 128 + T] = x;
}
KERNEL(polling)(const int* in, int* out) {            // the earlier warp polls until it succeeds
    START(32);
    __shared__ int s[32];
    if (T >= 32) { s[T - 32] = in[T - 32] * 2; arrive(b); }
    else { while (!test(b, 0)) {} out[blockIdx.x * 128 + T] = s[31 - T]; }
}
KERNEL(polling_for_a_copy)(const int* in, int* out) {
    START(1);
    __shared__ __align__(16) int s[32];
    if (T == 0) { expect(b, 128); load_bulk(s, in, 128, b); }
    while (!test(b, 0)) {}
    out[blockIdx.x * 128 + T] = s[31 - T];
}
KERNEL(polls_for_ever)(int* out) { START(2); arrive(b); while (!test(b, 1) || !test(b, 0)) {} }
KERNEL(one_never_arrives)(int* out) { START(2); if (T) arrive(b); while (!test(b, 0)) {} }
__device__ __forceinline__ bool tries(ull* b, u parity) {
    u done;
    asm volatile("{ .reg .pred P; mbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2;"
                 " selp.u32 %0, 1, 0, P; }" : "=r"(done) : "r"(SM(b)), "r"(parity) : "memory");
    return done;
}
KERNEL(works_while_it_waits)(const int* in, int* out) {   // what it does, the other warp waits for
    __shared__ ull b[2];
    if (T == 0) { init(b, 1); init(b + 1, 1); }
    __syncthreads();
    if (T == 0) {
        int turns = 0;
        while (in[0] ? !tries(b, 0) : !test(b, 0)) if (++turns == 3) arrive(b + 1);
        out[blockIdx.x * 128] = turns;
    } else if (T == 32) { wait(b + 1, 0); arrive(b); }
}
KERNEL(lanes)(const int* in, int* out) {              // lanes of a warp wait for several barriers
    __shared__ ull b[4];
    __shared__ int s[4];
    if (T < 4) init(&b[T], 1);
    __syncthreads();
    if (T >= 32) { if (T % 32 == 0) { s[T / 32 - 1] = in[T / 32 - 1]; arrive(&b[T / 32 - 1]); } }
    else { wait(&b[T % 4], 0); out[blockIdx.x * 128 + T] = s[T % 4]; }
}
KERNEL(counts)(int* out) {
    __shared__ ull b[1];
    if (T == 0) {
        init(b, 40);
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(SM(b)), "r"(30));
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], 9;" :: "r"(SM(b)));
        u seen = test(b, 0);
        arrive(b);
        out[0] = seen << 1 | test(b, 0);
    }
}
KERNEL(drops)(int* out) {                             // from 3 arrivals to 2
    __shared__ ull b[1];
    if (T == 0) {
        init(b, 3);
        asm volatile("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" :: "r"(SM(b)));
        arrive(b); arrive(b);
        u seen = test(b, 0);
        arrive(b);
        seen = seen << 1 | test(b, 1);
        arrive(b);
        out[0] = seen << 1 | test(b, 1);
    }
}
KERNEL(bytes)(int* out) {                             // bytes may come before they are expected
    __shared__ ull b[1];
    if (T == 0) {
        init(b, 1);
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 48;" :: "r"(SM(b)));
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(SM(b)));
        u seen = test(b, 0);
        expect(b, 48);
        seen = seen << 1 | test(b, 0);
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(SM(b)));
        out[0] = seen << 1 | test(b, 0);
    }
}
KERNEL(again)(int* out) {                             // its memory becomes ordinary, then again not
    START(1);
    if (T == 0) {
        arrive(b);
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(SM(b)) : "memory");
    }
    __syncthreads();
    if (T == 1) b[0] = 7;
    __syncthreads();
    out[blockIdx.x * 128 + T] = (int)b[0];
    __syncthreads();
    if (T == 32) init(b, 1);
    __syncthreads();
    if (T == 64) arrive(b);
    wait(b, 0);
}
KERNEL(relaxed)(int* out) {
    START(1);
    __shared__ int s[32];
    if (T >= 32) {
        s[T - 32] = T; __syncwarp();
        if (T == 32) asm volatile("mbarrier.arrive." FIX("release") BUG("relaxed")
                                  ".cta.shared::cta.b64 _, [%0];" :: "r"(SM(b)) : "memory");
    } else { wait(b, 0); out[blockIdx.x * 128 + T] = s[T]; }
}
// One warp writes and arrives, another waits and reads; what is relaxed needs a fence.
#define ARRIVE(order) asm volatile("mbarrier.arrive" order ".shared::cta.b64 _, [%0];" \
                                   :: "r"(SM(b)) : "memory")
#define WAIT(order, parity) asm volatile("{ .reg .pred P; A: mbarrier.try_wait.parity" order \
    ".shared::cta.b64 P, [%0], %1; @P bra D; bra A; D: }" :: "r"(SM(b)), "r"(parity) : "memory")
#define RELAXED ".relaxed.cluster"
#define FENCE(kind) asm volatile("fence." kind ";" ::: "memory")
#define PASS(arrive, released, wait, acquired) { \
    START(1); \
    __shared__ int s[32]; \
    for (int i = 0; i < 3; ++i) { \
        if (T >= 32) { \
            s[T - 32] = T + i; __syncwarp(); released; \
            if (T == 32) ARRIVE(arrive); \
        } else { WAIT(wait, i & 1); acquired; out[blockIdx.x * 128 + T] = s[T]; } \
        __syncthreads(); \
    } }
KERNEL(relaxed_wait)(int* out) PASS("", , RELAXED, FIX(FENCE("acq_rel.cta")))
KERNEL(relaxed_arrival)(int* out) PASS(RELAXED, FIX(FENCE("acq_rel.cta")), "", )
KERNEL(both_relaxed)(int* out)
    PASS(RELAXED, FENCE("release.sync_restrict::shared::cta.cluster"),
         RELAXED, FIX(FENCE("acquire.sync_restrict::shared::cluster.cluster")))
KERNEL(relaxed_wait_for_a_copy)(int* out, const int* in) {
    START(1);
    __shared__ __align__(128) int s[32];
    if (T == 0) { fence_init(); expect(b, 128); load_bulk(s, in, 128, b); }
    __syncwarp();
    WAIT(RELAXED, 0);
    FIX(FENCE("acq_rel.cta");)
    out[T] = s[T];
}
// Two warps wait for copies, and do something else meanwhile.
__device__ __forceinline__ bool complete(ull* b, u parity) {
    u done;
    asm volatile("{ .reg .pred P; mbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2;"
                 " selp.u32 %0, 1, 0, P; }" : "=r"(done) : "r"(SM(b)), "r"(parity) : "memory");
    return done;
}
KERNEL(meanwhile)(int* out, const int* in, int* turns) {
    __shared__ __align__(128) int s[2][32];
    __shared__ ull full[2];
    if (T == 0) { init(full, 1); init(full + 1, 1); fence_init(); }
    __syncthreads();
    const int w = T / 32;
    if (T % 32 == 0) { expect(full + w, 128); load_bulk(s[w], in + 32 * w, 128, full + w); }
    __syncwarp();
    if (w == 0) {
        while (!complete(full, 0)) atomicAdd(turns, 1);
    } else {
        while (!complete(full + 1, 0))
            for (int i = 0; i < 3; ++i)
                if (atomicAdd(turns + 1, 1) < 0) atomicAdd(turns, 1);
    }
    out[T] = s[w][T % 32];
}
KERNEL(completes)(int* out) {
    START(2);
    if (T == 0) {
        ull state;
        for (int i = 0; i < FIX(1) BUG(2); ++i)
            asm volatile("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], 1;"
                         : "=l"(state) : "r"(SM(b)) : "memory");
    }
}
"""


def launched(kernel: str, block: int, *given: Array | int, seed: int | None = None) -> Array:
    """What two blocks of a kernel write, (2, 128)."""
    out = np.zeros((2, 128), np.int32)
    arrays = [*given[:1], out, *given[1:]]
    launch(hopper_ptx(CUDA), kernel, 2, block, arrays, order_seed=seed)
    return out


def one(kernel: str) -> int:
    out = np.zeros(1, np.int32)
    launch(hopper_ptx(CUDA), kernel, 1, 32, [out])
    return int(out[0])


def test_parities_tell_which_phase_has_completed() -> None:
    # (parity 0 done, parity 1 done): before phase 0 ends the one "before" it has, and so on.
    assert one("parities") == 0b01_01_10_10_01_01


def test_states_tell_whether_their_phase_has_completed() -> None:
    assert one("states") == 0b0110


def test_arrivals_have_counts() -> None:
    assert one("counts") == 0b01


def test_dropped_arrivals_are_not_expected_any_more() -> None:
    assert one("drops") == 0b101


def test_bytes_hold_up_a_phase_in_either_direction() -> None:
    assert one("bytes") == 0b001


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", ["ring", "ring_of_states"])
def test_phases_order_warps_like_barriers(kernel: str, seed: int | None) -> None:
    values = np.arange(128, dtype=np.int32) * 3
    out = launched(kernel, 128, values, 5, seed=seed)
    want = values
    for _ in range(5):
        want = np.roll(want, -33) + 1
    assert (out == want).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "factor", "block"), [("polling", 2, 64), ("polling_for_a_copy", 1, 32)]
)
def test_a_warp_may_poll(kernel: str, factor: int, block: int, seed: int | None) -> None:
    values = np.arange(32, dtype=np.int32)
    out = launched(kernel, block, values, seed=seed)
    assert (out[:, :32] == factor * values[::-1]).all()


def test_polling_for_what_never_comes_is_stopped() -> None:
    with pytest.raises(StepLimit):
        launch(hopper_ptx(CUDA), "polls_for_ever", 1, 1, [None], step_limit=1500)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_that_tests_a_phase_which_cannot_complete_is_a_deadlock(seed: int | None) -> None:
    with pytest.raises(DeadlockError, match="phase 0: 1 of 2 arrivals pending"):
        launch(hopper_ptx(CUDA), "one_never_arrives", 1, 2, [None], order_seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tries", [0, 1])
def test_a_warp_may_work_while_it_waits(tries: int, seed: int | None) -> None:
    out = launched("works_while_it_waits", 64, np.array([tries], np.int32), seed=seed)
    assert (out[:, 0] >= 3).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_a_warp_wait_for_their_own_barriers(seed: int | None) -> None:
    values = np.arange(4, dtype=np.int32) + 7
    out = launched("lanes", 160, values, seed=seed)
    assert (out[:, :32] == np.tile(values, 8)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_invalidated_barrier_is_ordinary_memory(seed: int | None) -> None:
    assert (launched("again", 96, seed=seed)[:, :96] == 7).all()


def test_a_relaxed_arrival_publishes_nothing() -> None:
    out = np.zeros(32, np.int32)
    launch(hopper_ptx(CUDA, True), "relaxed", 1, 64, [out])
    assert (out == np.arange(32) + 32).all()
    with pytest.raises(RaceError):
        launch(hopper_ptx(CUDA), "relaxed", 1, 64, [out])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", ["relaxed_wait", "relaxed_arrival", "both_relaxed"])
def test_fences_order_what_relaxed_arrivals_and_waits_do_not(kernel: str, seed: int | None) -> None:
    out = np.zeros(32, np.int32)
    launch(hopper_ptx(CUDA, True), kernel, 1, 64, [out], order_seed=seed)
    assert (out == np.arange(32) + 34).all()
    with pytest.raises(RaceError, match="a read and a write of another warp are not ordered"):
        launch(hopper_ptx(CUDA), kernel, 1, 64, [out], order_seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_relaxed_wait_alone_does_not_show_what_a_copy_wrote(seed: int | None) -> None:
    out, given = np.zeros(32, np.int32), np.arange(32, dtype=np.int32)
    name = "relaxed_wait_for_a_copy"
    launch(hopper_ptx(CUDA, True), name, 1, 32, [out, given], order_seed=seed)
    assert (out == given).all()
    with pytest.raises(RaceError, match="a read and an asynchronous write are not ordered"):
        launch(hopper_ptx(CUDA), name, 1, 32, [out, given], order_seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_arrive_while_all_warps_do_something_between_their_waits(seed: int | None) -> None:
    out, given = np.zeros(64, np.int32), np.arange(64, dtype=np.int32)
    args = [out, given, np.zeros(3, np.int32)]
    launch(hopper_ptx(CUDA), "meanwhile", 1, 64, args, order_seed=seed, step_limit=20_000)
    assert (out == given).all()


def test_an_arrival_without_completion_must_not_complete() -> None:
    launch(hopper_ptx(CUDA, True), "completes", 1, 32, [None])
    with pytest.raises(MbarrierMisuse, match="noComplete"):
        launch(hopper_ptx(CUDA), "completes", 1, 32, [None])


PTX = """.visible .entry k(.param .u64 out) {
    .reg .pred %p, %q; .reg .b32 %t, %v; .reg .b64 %at, %s, %o; .shared .align 8 .b64 room[2];
    mov.u32 %t, %tid.x; ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, 4, %o;
    setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared.b64 [room+8], 64; bar.sync 0;
    BODY
    st.global.u32 [%o], %v; ret; }"""
FORMS = {
    "generic addresses": """mov.u64 %at, room; cvta.shared.u64 %at, %at;
        mbarrier.arrive.b64 %s, [%at+8]; W: mbarrier.try_wait.b64 %q, [%at+8], %s; @!%q bra W;
        selp.u32 %v, 1, 0, %q;""",
    "scopes and orders": """mbarrier.arrive.release.cluster.shared::cluster.b64 _, [room+8];
        W: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %q, [room+8], 0, 100; @!%q bra W;
        selp.u32 %v, 1, 0, %q;""",
    "a guarded wait": """mbarrier.arrive.shared.b64 %s, [room + 8];
        setp.lt.u32 %p, %t, 40; setp.ne.u32 %q, %t, %t;
        @%p mbarrier.try_wait.parity.shared.b64 %q, [room + 8], 0; bar.sync 0;
        selp.u32 %v, 1, 2, %q;""",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", FORMS)
def test_spellings(form: str, seed: int | None) -> None:
    out = np.zeros(64, np.uint32)
    ptx = PTX.replace("BODY", FORMS[form])
    header = ".version 8.0\n.target sm_90\n.address_size 64\n"
    launch(header + ptx, "k", 1, 64, [out], order_seed=seed)
    want = np.where(np.arange(64) < 40, 1, 2) if form == "a guarded wait" else 1
    assert (out == want).all()


# As in the pipelines of CUTLASS, a turn tries at its end for the next one, which waits where that
# failed. The predicate is true without a try where there is no other turn.
TRIES = """.visible .entry k(.param .u64 out, .param .u32 turns) {
    .reg .pred %p<8>; .reg .b32 %t, %v, %n, %turns, %full, %s, %again; .reg .b64 %o;
    .shared .align 8 .b64 full[4]; .shared .b32 s[4];
    mov.u32 %t, %tid.x; ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, 4, %o;
    ld.param.u32 %turns, [turns]; mov.u32 %n, 0; mov.u32 %again, 0; mov.u32 %v, 0;
    mov.u32 %full, full; mov.u32 %s, s; setp.eq.u32 %p0, %t, 0; @!%p0 bra MEET;
    mbarrier.init.shared.b64 [full], 1; mbarrier.init.shared.b64 [full+8], 1;
    MEET: bar.sync 0; setp.ge.u32 %p1, %t, 32; @%p1 bra READS; @!%p0 bra END;
    st.shared.u32 [s], 7; mbarrier.arrive.shared.b64 _, [full];
    st.shared.u32 [s+4], 9; mbarrier.arrive.shared.b64 _, [full+8]; bra END;
    READS: setp.lt.s32 %p1, %turns, 1; mov.pred %p2, -1; @%p1 bra BEGIN;
    mbarrier.try_wait.parity.shared.b64 %p2, [%full], 0;
    BEGIN: setp.gt.s32 %p3, %turns, 0; @!%p3 bra LAST;
    TURN: @%p2 bra READY; WAIT
    READY: ld.shared.u32 %v, [%s]; st.global.u32 [%o], %v;
    add.u32 %full, %full, 8; add.u32 %s, %s, 4;
    add.s32 %n, %n, 1; setp.le.s32 %p5, %turns, %n; mov.pred %p2, -1; @%p5 bra NEXT;
    mbarrier.try_wait.parity.shared.b64 %p2, [%full], 0;
    NEXT: setp.ne.s32 %p6, %n, %turns; @%p6 bra TURN;
    LAST: sub.s32 %turns, %turns, %n; add.s32 %again, %again, 1; setp.lt.s32 %p7, %again, 2;
    mov.s32 %n, 0; @%p7 bra READS;
    END: ret; }"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_turn_may_wait_where_the_turn_before_has_tried_in_vain(seed: int | None) -> None:
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p4, [full], 0; @!%p4 bra W;"
    out = np.zeros(64, np.uint32)
    run_ptx(TRIES.replace("WAIT", wait), "k", 1, 64, out, np.uint32(2), order_seed=seed)
    assert (out[32:] == 9).all()
    with pytest.raises(RaceError, match="not ordered"):
        run_ptx(TRIES.replace("WAIT", ""), "k", 1, 64, out, np.uint32(2), order_seed=seed)


def test_a_wait_that_sleeps_after_some_turns_is_a_deadlock_too() -> None:
    """As those of libcu++: the loop has two branches back, of which one counts."""
    body = """setp.lt.u32 %p, %t, 32; @%p mbarrier.arrive.shared.b64 _, [room+8]; mov.u32 %v, 0;
        bra W; COUNT: add.u32 %v, %v, 1; W: mbarrier.try_wait.parity.shared.b64 %q, [room+8], 0;
        @!%q bra SLEEP; bra DONE; SLEEP: setp.lt.u32 %p, %v, 16; @%p bra COUNT;
        nanosleep.u32 20; bra W; DONE:"""
    text = ".version 8.0\n.target sm_90\n.address_size 64\n" + PTX.replace("BODY", body)
    with pytest.raises(DeadlockError, match="32 of 64 arrivals pending"):
        launch(text, "k", 1, 64, [np.zeros(64, np.uint32)], step_limit=1000)


@pytest.mark.parametrize(
    "body", ["mbarrier.pending_count.b32 %v, %s;", "mbarrier.arrive.b32 _, [room];"]
)
def test_what_is_not_known_is_refused(body: str) -> None:
    out = np.zeros(64, np.uint32)
    with pytest.raises(UnknownInstruction):
        run_ptx(PTX.replace("BODY", body), "k", 1, 64, out)


def test_a_deadlock_names_every_waiting_warp_of_every_block() -> None:
    ptx = PTX.replace("BODY", FORMS["scopes and orders"]).replace("[room+8], 64", "[room+8], 65")
    header = ".version 8.0\n.target sm_90\n.address_size 64\n"
    with pytest.raises(DeadlockError) as caught:
        launch(header + ptx, "k", 2, 64, [np.zeros(64, np.uint32)], check=False)
    said = str(caught.value)
    for block in (0, 1):
        assert (
            f"block ({block}, 0, 0) warps 0, 1 at mbarrier at shared offset 8, phase 0: 1 of 65 "
            in said
        )
