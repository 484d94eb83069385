"""Bugs planted in Hopper's kernels are caught: those of synchronisation by the emulator's checkers,
those of arithmetic by the error rule.
"""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import flashgen as fg
import ptx_emulator as emulator
from flashgen.calls.ops import BackwardRun, ForwardRun
from flashgen.kernels.planner import Tile
from tests.kernels.sm90.test_captured import composed
from tests.support.examples import spec_path
from tests.support.judged import Call, sized
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import slow

pytestmark = pytest.mark.usefixtures("rounded_sums")

ARCH = "sm_90a"

WAIT_Q = "    barrier_wait(q_full[stage.index], stage.parity);\n    return"
GIVE_Q = "      barrier_arrive_warp(q_empty[used]);"
GIVE_LAST_K = "      if (thread % WARPGROUP == 0) barrier_arrive(k_empty[k.index]);\n"
GIVE_DO = "      barrier_arrive_warp(do_empty[used]);"
DK_DONE = "      wgmma_wait<1>();\n      pin(dk);\n      pin(dv);\n"

RESIDENT = "    barrier_wait(resident, 0);\n"
GIVE_K = "    if (lane == 0) barrier_arrive(k_empty[stage.index]);\n"
GIVE_V = "    if (thread % WARPGROUP == 0) barrier_arrive(v_empty[stage.index]);\n"
S_DONE = "    wgmma_wait<1>();\n    pin(s);\n"
DP_DONE = "    wgmma_wait<0>();\n    pin(ds);\n"
WAIT_K = "    barrier_wait(k_full[stage.index], stage.parity);\n    const Tile"
ROOM_K = "        barrier_wait(k_empty[stage.index], stage.parity ^ 1);\n        store_tile"
ROOM_V = "        barrier_wait(v_empty[stage.index], stage.parity ^ 1);\n"

NO_FENCE = "without a proxy fence"
WAITS = "Deadlock"

# Of every product: the assembler may order what wrote its registers after it.
NOT_FENCED = (
    "no wgmma.fence before any product",
    ' asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', "", "wgmma.fence",
)  # fmt: skip

# What is wrong, how, and what the error is called; "" where an early copy may show as any of some.
FORWARD = [
    NOT_FENCED,
    ("consumer does not wait for K",
     "      barrier_wait(k_full[k.index], k.parity);\n", "", "Race"),
    ("producer does not wait for space",
     "barrier_wait(v_empty[v.index], v.parity ^ 1);", "", ""),
    ("wrong phase", "barrier_wait(v_full[v.index], v.parity);",
     "barrier_wait(v_full[v.index], v.parity ^ 1);", ""),
    ("more bytes announced than come", "barrier_announce(full_v, V_BYTES);",
     "barrier_announce(full_v, V_BYTES + 16);", WAITS),
    ("a warpgroup never says that K is read", GIVE_LAST_K, "", WAITS),
    ("one arrival too many is expected", "barrier_init(v_empty[i], CONSUMERS);",
     "barrier_init(v_empty[i], CONSUMERS + 1);", WAITS),
    ("S is read before the products are done", "wgmma_wait<1>();", "wgmma_wait<2>();", ""),
    ("rows past the end are written", "if (q_row + 8 * r < p.seq_q && 8", "if (8", ""),
    ("a warpgroup has no Q", "for (int i = 0; i < CONSUMERS; ++i) {\n          barrier_announce",
     "for (int i = 1; i < CONSUMERS; ++i) {\n          barrier_announce", WAITS),
]  # fmt: skip
# These show where a block computes several work tiles.
WORK_TILES = [
    ("Q is loaded before the products with the last Q are done",
     "        barrier_wait(k_empty[next.index], next.parity ^ 1);\n", "", "Race"),
    ("Q waits for a K too early", "stage_of(copied + STAGES - 1)", "stage_of(copied)", "Race"),
    ("Q waits for its own products", "stage_of(copied + STAGES - 1)", "stage_of(copied + STAGES)",
     WAITS),
    ("the last K, and with it Q, is given back twice, first before it was read",
     "        wgmma_wait<1>();\n", GIVE_LAST_K + "        wgmma_wait<1>();\n", ""),
    ("a warpgroup never gives back the last K, and with it Q", GIVE_LAST_K, "", WAITS),
    ("a work tile is read before it is written", "barrier_wait(full, parities & 1);", "", "Race"),
    ("a work tile is overwritten before it is read", "barrier_wait(empty, parity ^ 1);", "", ""),
    ("a warp never signals that it read its work tile",
     "if (threadIdx.x % 32 == 0) barrier_arrive(empty);", "", WAITS),
    ("Q's phase stands still", "parities ^= 2;", "", ""),
    ("V of a work tile's last key tile is never released",
     "      start_output();\n      finish_output();\n",
     "      start_output();\n      wgmma_wait<0>();\n      pin(o[0]);\n", WAITS),
    ("the tensor cores are not released",
     "      start_scores();\n      named_arrive(BARRIER_PING_PONG + next_group, 2 * WARPGROUP);\n"
     "      w", "      start_scores();\n      w", WAITS),
]  # fmt: skip
# These show where a warpgroup computes only some of a block's key tiles.
HANDED_ON = [
    ("buffers are released before every warp has waited for them",
     "      named_wait(BARRIER_WARPGROUP + group, WARPGROUP);\n", "", "two phases ahead"),
    ("a turn is not handed on",
     "      named_arrive(BARRIER_PING_PONG + next_group, 2 * WARPGROUP);\n"
     "      barrier_wait(v_", "      barrier_wait(v_", WAITS),
    ("V is not handed on", "        barrier_arrive(v_empty[v.index]);\n", "", WAITS),
    ("the last tiles are not handed on", "tile < tile_end; ++tile) hand_on();", "false;);", ""),
    ("Q is waited for twice where no tile is computed", "parities ^= 2;", "", ""),
    ("rows before the first are written", "if (unsigned(q_row + 8 * r) < p.seq_q && 8",
     "if (q_row + 8 * r < p.seq_q && 8", ""),
    ("Q of rows that do not exist is waited for", " && first_query >= 0", "", WAITS),
    ("Q of rows that do not exist is copied", "if (q_start + 64 * i < 0) continue;", "", ""),
]  # fmt: skip
FUSED = [
    NOT_FENCED,
    ("no fence before dS is read",
     "      proxy_fence();\n      named_wait(BARRIER_CONSUMERS",
     "      named_wait(BARRIER_CONSUMERS", NO_FENCE),
    ("no fence before dQ is added",
     "    proxy_fence();\n    named_arrive(BARRIER_DQ_FULL", "    named_arrive(BARRIER_DQ_FULL",
     NO_FENCE),
    ("dQ is added before all warps wrote it",
     "          named_wait(BARRIER_DQ_FULL + i, WARPGROUP + 32);",
     "          named_arrive(BARRIER_DQ_FULL + i, WARPGROUP + 32);", "never written"),
    ("dQ waits for the wrong number of threads",
     "named_arrive(BARRIER_DQ_FULL + warpgroup, WARPGROUP + 32)",
     "named_arrive(BARRIER_DQ_FULL + warpgroup, WARPGROUP + 64)", ""),
    ("the second dQ is overwritten while it is added",
     "        bulk_wait<0>();\n        __syncwarp();\n", "", "Race"),
    ("the last dQ is added when the block has ended",
     "    bulk_wait<0>();  // before", "    //", ""),
    ("dS is read before all wrote it",
     "      named_wait(BARRIER_CONSUMERS, THREADS);\n\n      // 5g", "\n      // 5g", "Race"),
    ("one buffer of dS", "      exchange ^= 1;\n", "", "Race"),
    ("dO is given back before it was read",
     "      wgmma_wait<1>();\n" + GIVE_DO, GIVE_DO, ""),
    ("Q is given back before dK", DK_DONE + GIVE_Q, GIVE_Q + "\n" + DK_DONE, ""),
    ("dO is not waited for",
     "      barrier_wait(do_full[stage.index], stage.parity);\n", "", "Race"),
    ("Q of the next step is not waited for",
     "    barrier_wait(q_full[stage.index], stage.parity);\n    return", "    return", ""),
    ("K and V are not announced",
     "        barrier_expect(q_full[0], K_BYTES + V_BYTES);", "", ""),
    ("the phase of Q is always the first", WAIT_Q, WAIT_Q.replace("stage.parity", "0"), ""),
    ("Q's space is not waited for",
     "          barrier_wait(q_empty[stage.index], stage.parity ^ 1);\n          barrier_ann",
     "          barrier_ann", ""),
    ("the first dQ is overwritten while it is added",
     "        bulk_wait<1>();\n        __syncwarp();\n", "", "Race"),
    ("S is read before its product is done",
     "      wgmma_wait<0>();\n      pin(s);\n", "      pin(s);\n", ""),
    ("one arrival too many is expected",
     "barrier_init(q_full[i], 3)", "barrier_init(q_full[i], 4)", WAITS),
    ("more bytes are announced than come",
     "barrier_announce(do_here, DO_BYTES)", "barrier_announce(do_here, DO_BYTES + 16)",
     WAITS),
]  # fmt: skip
# Where both warpgroups own the same keys, and the scores of a step are computed in passes.
COLUMNS = [
    NOT_FENCED,
    ("no fence before P and dS are read",
     "    proxy_fence();\n\n    // 5f", "\n    // 5f", NO_FENCE),
    ("P and dS are read before both warpgroups wrote them",
     "    named_wait(BARRIER_CONSUMERS, THREADS);\n    wgmma_fence();", "    wgmma_fence();",
     "Race"),
    ("P and dS are overwritten while they are read",
     "      if (pass == 0) named_wait(BARRIER_CONSUMERS, THREADS);\n", "", "Race"),
    ("the phase of dO is that of Q",
     "barrier_wait(do_full[0], step % 2);", "barrier_wait(do_full[0], stage.parity);", ""),
    ("dO is not waited for", "      barrier_wait(do_full[0], step % 2);\n", "", "Race"),
    ("dO is released before it is read",
     "    wgmma_wait<1>();\n    barrier_arrive_warp(do", "    barrier_arrive_warp(do", ""),
    ("dQ is added before its product is done",
     "      wgmma_wait<0>();\n      pin(dq);\n", "      pin(dq);\n", ""),
    ("every pass has the first keys",
     "min(pass * PASS_KEYS, KEYS - PASS_KEYS)", "0", "never written"),
    ("one arrival too many is expected",
     "barrier_init(do_empty[0], 4 * CONSUMERS)", "barrier_init(do_empty[0], 9)", WAITS),
]  # fmt: skip
DQ = [
    NOT_FENCED,
    ("V is not waited for",
     "    barrier_wait(v_full[stage.index], stage.parity);\n", "", "Race"),
    ("K is given back before dQ",
     "    wgmma_wait<0>();\n    pin(dq);\n    if (lane == 0) barrier_arrive(k_empty[stage."
     "index]);", "    if (lane == 0) barrier_arrive(k_empty[stage.index]);\n"
     "    wgmma_wait<0>();\n    pin(dq);", ""),
    ("a warpgroup never says that V is read",
     "    if (thread % WARPGROUP == 0) barrier_arrive(v_empty[stage.index]);\n", "", WAITS),
]  # fmt: skip
CAPTURED = [
    ("V is not waited for",
     "    barrier_wait(v_full[stage.index], stage.parity);\n", "", "Race"),
    ("the phase of K is always the first", WAIT_K, WAIT_K.replace("stage.parity", "0"), ""),
    ("Q and dO are not waited for", RESIDENT, "", "Race"),
    ("K is given back before it was read",
     S_DONE + GIVE_K, GIVE_K + S_DONE, ""),
    ("V is given back before it was read",
     DP_DONE + GIVE_V, GIVE_V + DP_DONE, ""),
    ("dP is read before its product is done", DP_DONE, "    pin(ds);\n", ""),
    ("a warpgroup never says that V is read", GIVE_V, "", WAITS),
    ("a warp never says that K is read", GIVE_K, GIVE_K.replace("lane", "thread"), WAITS),
    ("K's space is not waited for", ROOM_K, "        store_tile", ""),
    ("V's space is not waited for", ROOM_V, "", ""),
    ("more bytes are announced than come",
     "barrier_announce(v_here, V_BYTES)", "barrier_announce(v_here, V_BYTES + 16)", WAITS),
    ("one arrival too many is expected",
     "barrier_init(v_empty[i], CONSUMERS)", "barrier_init(v_empty[i], 3)", WAITS),
    ("the products are not fenced from what wrote their registers",
     "    wgmma_fence(s);\n    UNROLL for (int c = 0; c < (HEAD_DIM +",
     "    UNROLL for (int c = 0; c < (HEAD_DIM +", "wgmma.fence"),
    ("a warp's sums are read before all lanes added to them",
     "    __syncwarp();\n    ROLLED for (int place",
     "    ROLLED for (int place", "lanes of one warp"),
]  # fmt: skip
# Wrong numbers: of the output, of every gradient, or of the one that is named.
COMPUTED_FORWARD = [
    ("the lanes of a quad keep their columns of O", "        transpose_in_quad(x, writer);\n", ""),
    ("columns go to the wrong lane", "const bool upper = lane & bit;", "const bool upper = true;"),
]  # fmt: skip
COMPUTED_FUSED = [
    ("wrong swizzle of dS", "16 * (vector ^ lane % 8)", "16 * vector"),
    ("delta of the other query", "4 * BLOCK_Q, first.y, next.y", "4 * BLOCK_Q, first.y, first.y"),
]  # fmt: skip
COMPUTED_COLUMNS = [
    ("the wrong strip of dK", "q_here.from_panel(strip - PANELS_V)", "q_here"),
    ("the sums of dQ of the other warpgroup", "dq_query % SUM_QUERIES", "0"),
    ("rows of dK are not transposed", "x2.trans.shared.b16", "x2.shared.b16"),
    ("the mask's second row is its first", "int at = n + r;", "int at = n;"),
]  # fmt: skip
COMPUTED = {"forward": COMPUTED_FORWARD, "fused": COMPUTED_FUSED, "columns": COMPUTED_COLUMNS}
COMPUTED_CAPTURED = [
    ("the mask is left out", "if (!tile.full) {", "if (false) {", "gate"),
    ("dropped elements keep their dP",
     "kept(p, bits[e / 2 * 2 + n % 2], e % 2) ? ds[n][e] : 0.0f", "ds[n][e]", "gate"),
    ("delta is not scaled", "delta[r] = numbers.y / p.dropout_scale;", "delta[r] = numbers.y;",
     "row"),
    ("a row's sum is that of one lane", "all_by2 = quad_sum(by2[r])", "all_by2 = by2[r]", "row"),
    ("a column's sum is that of one lane", "by1 = column_sum(by1);", "", "column"),
    ("every lane adds a column's sum", "if (lane < 4 && by1", "if (by1", "column"),
    ("the other row of a lane", "index_in_by3(p, q, k, by3", "index_in_by3(p, q + 8, k, by3",
     "table"),
    ("a warp's sums are not cleared", "sums[place] = 0;\n      }", "}", "table"),
]  # fmt: skip


WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
READ_ROWS = "      if (loads && query + 1 < p.seq_q) next = rows[1];\n"
COPY_K = "barrier_expect(q_full[0], K_BYTES + V_BYTES);"
COPY_DQ = "  Element* rows = p.dq"
EARLY = "what the launch before may still write"
# Launches that do not wait for the one before; the last change of a kernel is made first.
NO_WAIT = [
    slow("dkdv", [(WAIT, "")], EARLY, id="dkdv: no wait"),
    ("fused", [(WAIT, "")], EARLY),
    slow("fused", [(READ_ROWS, READ_ROWS + WAIT), (WAIT, "")], EARLY, id="fused: after the read"),
    slow("fused", [(COPY_K, WAIT + COPY_K), (WAIT, "")], EARLY, id="fused: in another warp"),
    slow("convert_dq", [(WAIT, "")], EARLY, id="convert_dq: no wait"),
    slow("convert_dq", [(COPY_DQ, WAIT + COPY_DQ), (WAIT, "")], EARLY,
         id="convert_dq: after the read"),
    slow("convert_dq", [("sums[32 * i + lane]", "__ldg(sums + 32 * i + lane)")],
         "valid for memory that nothing writes", id="convert_dq: by __ldg"),
    slow("dq", [(WAIT, "")], "never waits for it", id="dq: no wait"),
    slow("merge", [(WAIT, "")], EARLY, id="merge: no wait"),
]  # fmt: skip


def reaches(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + 200 >= k


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (4 * q >= k) & (4 * q - k < 600)  # warpgroups are several tiles of keys apart


@functools.cache
def call(kernel: str) -> Call:
    """Several steps for each of several blocks; of "dq" more than there are buffers."""
    if kernel == "captured":  # mixed tiles and dropout
        options = {"head_dim": 128, "dtype": "bfloat16"}
        return composed("planted", reaches, options, 0.2, (200, 400), (1, 1))
    if kernel == "handed on":  # at both ends
        spec = fg.AttentionSpec(near, head_dim=64, name="near")
        return Call(spec, Case(500, 1200).tensors(seed=1), arch=ARCH)
    if kernel in ("forward", "work tiles"):
        # With several work tiles, one tile of keys for each: the next one is written early.
        lengths = (128, 1200) if kernel == "forward" else (700, 200)
        spec = fg.AttentionSpec(head_dim=64, name="full")
        return Call(spec, Case(*lengths).tensors(seed=1), arch=ARCH)
    lengths = (400, 600) if kernel == "dq" else (300, 200)
    case = Case(*lengths, 1, 1, 1, "bfloat16", 256 if kernel == "columns" else 128)
    spec = sized(fg.load(spec_path("causal")), case)
    how: dict[str, Any] = {"deterministic": kernel == "dq"}
    if kernel == "columns":  # a form that the plan does not choose at this head dim
        how["tiles"] = {"fused": Tile(64, 8, 6, 1, 8, 8)}
    return Call(spec, case.tensors(seed=1), arch=ARCH, **how)


def run(kernel: str) -> ForwardRun | BackwardRun:
    """The pass that has this kernel."""
    if ROLES.get(kernel, kernel) == "forward":
        return call(kernel).forward(split_size=0, blocks=None if kernel == "forward" else 1)
    return call(kernel).backward()


BUGS = {
    "forward": FORWARD,
    "work tiles": WORK_TILES,
    "handed on": HANDED_ON,
    "fused": FUSED,
    "columns": COLUMNS,
    "dq": DQ,
    "captured": CAPTURED,
}
ROLES = {"work tiles": "forward", "handed on": "forward", "columns": "fused"}
# The places of those in `make test`.
FAST = {
    "forward": (2, 5, 7),
    "work tiles": (0, 2),
    "handed on": (0,),
    "fused": (0, 3, 6, 9),
    "columns": (),  # the wrong strip of dK, below, executes them
    "dq": (),
    "captured": (),
}


@pytest.mark.parametrize(
    ("kernel", "old", "new", "kind"),
    [
        pytest.param(
            *(kernel, *bug[1:]),
            id=f"{kernel}: {bug[0]}",
            marks=[] if place in FAST[kernel] else pytest.mark.slow,
        )
        for kernel, bugs in BUGS.items()
        for place, bug in enumerate(bugs)
    ],
)
def test_a_planted_bug_is_caught(kernel: str, old: str, new: str, kind: str) -> None:
    role = ROLES.get(kernel, kernel)
    with planted(role, old, new), caught(kind) as error:
        run(kernel)
    assert f"_{role}_" in str(error.value)
    assert "_sm_90a.cu:" in str(error.value)


@pytest.mark.parametrize(("kernel", "changes", "kind"), NO_WAIT)
def test_a_launch_that_does_not_wait_for_the_one_before_is_caught(
    kernel: str, changes: list[tuple[str, str]], kind: str
) -> None:
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(planted(kernel, *change))
        stack.enter_context(caught(kind))
        if kernel == "merge":
            qkv, how = Case(8, 300).tensors(seed=1)[:3], {"backend": "emulator", "arch": ARCH}
            fg.attention(fg.AttentionSpec(head_dim=64, name="full"))(*qkv, split_size=64, **how)
        else:
            call("fused" if kernel in ("fused", "convert_dq") else "dq").backward()


@pytest.mark.parametrize(
    ("kernel", "old", "new", "whose"),
    [
        *(
            pytest.param(kernel, *bug[1:], "", id=bug[0], marks=[pytest.mark.slow][:place])
            for kernel, bugs in COMPUTED.items()
            for place, bug in enumerate(bugs)
        ),
        *(
            pytest.param("captured", *bug[1:], id=bug[0], marks=pytest.mark.slow)
            for bug in COMPUTED_CAPTURED
        ),
    ],
)
def test_wrong_numbers_are_seen_by_the_error_rule(
    kernel: str, old: str, new: str, whose: str
) -> None:
    with planted(ROLES.get(kernel, kernel), old, new):
        verdicts = call(kernel).verdicts(run(kernel))
    wrong = [name for name, verdict in verdicts.items() if not verdict.ok]
    assert wrong
    assert all(math.isfinite(verdicts[name].max_error) for name in wrong)
    if whose:
        assert f"d{whose}" in wrong
        assert not {"dq", "dk", "dv"} & set(wrong)


@pytest.mark.parametrize(
    "kernel", ["fused", *map(slow, ("handed on", "columns", "dq", "captured"))]
)
def test_nothing_is_found_where_nothing_is_planted(kernel: str) -> None:
    same = "(const __grid_constant__ Params p"
    with planted(ROLES.get(kernel, kernel), same, same):
        call(kernel).check(run(kernel))


def test_a_wrong_swizzle_gives_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = emulator.TensorMap.__init__

    def unswizzled(self: Any, array: Any, box: Any, swizzle: int, **how: Any) -> None:
        made(self, array, box, 0, **how)

    of = Call(fg.AttentionSpec(head_dim=64, name="full"), Case(64, 64).tensors(seed=1), arch=ARCH)
    right = of.forward().out
    monkeypatch.setattr(emulator.TensorMap, "__init__", unswizzled)
    wrong = of.forward().out
    assert not torch.allclose(right.float(), wrong.float(), atol=0.1)
