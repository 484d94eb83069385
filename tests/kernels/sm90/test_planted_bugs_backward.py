"""Bugs planted in Hopper's backward kernels are caught by the emulator, or by the error rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

import flashgen as fg
from flashgen import reference
from flashgen.ops import run_backward, run_forward
from flashgen.runtime import bound_kernel
from tests.kernels.sm90.test_forward import with_text
from tests.support.examples import spec_path
from tests.support.judged import like
from tests.support.shapes import Case

ARCH = "sm_90a"
CAUSAL = fg.load(spec_path("causal"))
# Several steps for each of several blocks; of "dq" more than there are buffers.
CASES = {
    "fused": Case(400, 200, 1, 1, 1, "bfloat16", 128),
    "dq": Case(400, 600, 1, 1, 1, "bfloat16", 128),
}

WAIT_Q = "    barrier_wait(q_full[stage.index], stage.parity);\n    const Tile"
GIVE_Q = "    if (lane == 0) barrier_arrive(q_empty[stage.index]);"
GIVE_DO = "    if (thread % WARPGROUP == 0) barrier_arrive(do_empty[stage.index]);"
ALL_DONE = "    wgmma_wait<0>();\n    pin(dk);\n    pin(dv);\n"

NO_FENCE = "without a proxy fence"
WAITS = "Deadlock"

# What is wrong, how, and what the error is called; "" where only the numbers are wrong.
FUSED = [
    ("no fence before dS is read",
     "    proxy_fence();\n    const auto ds_here", "    const auto ds_here", NO_FENCE),
    ("no fence before dQ is added",
     "    proxy_fence();\n    __syncwarp();\n    if (lane == 0) {", "    __syncwarp();\n"
     "    if (lane == 0) {", NO_FENCE),
    ("dS is read before all wrote it",
     "    named_wait(BARRIER_CONSUMERS, THREADS);\n\n    // 5g", "\n    // 5g", "Race"),
    ("one buffer of dS", "    exchange ^= 1;\n", "", "Race"),
    ("dO is given back before it was read",
     "    wgmma_wait<1>();\n" + GIVE_DO, GIVE_DO, ""),
    ("Q is given back before dK", ALL_DONE + GIVE_Q, GIVE_Q + "\n" + ALL_DONE, ""),
    ("dO is not waited for",
     "    barrier_wait(do_full[stage.index], stage.parity);\n", "", "Race"),
    ("K and V are not waited for", "    barrier_wait(resident, 0);\n", "", "Race"),
    ("the phase of Q is always the first", WAIT_Q, WAIT_Q.replace("stage.parity", "0"), ""),
    ("Q's space is not waited for",
     "          barrier_wait(q_empty[stage.index], stage.parity ^ 1);\n          barrier_ann",
     "          barrier_ann", ""),
    ("dQ is overwritten while it is added",
     "    if (lane == 0) bulk_wait();  // for", "    if (false) bulk_wait();  // for", "Race"),
    ("S is read before its product is done",
     "    wgmma_wait<1>();\n    pin(s);\n", "    pin(s);\n", ""),
    ("an arrival too many is asked for",
     "barrier_init(q_full[i], 3)", "barrier_init(q_full[i], 4)", WAITS),
    ("more bytes are announced than come",
     "barrier_announce(do_here, DO_BYTES)", "barrier_announce(do_here, DO_BYTES + 16)",
     WAITS),
]  # fmt: skip
DQ = [
    ("V is not waited for",
     "    barrier_wait(v_full[stage.index], stage.parity);\n", "", "Race"),
    ("K is given back before dQ",
     "    wgmma_wait<0>();\n    pin(dq);\n    if (lane == 0) barrier_arrive(k_empty[stage."
     "index]);", "    if (lane == 0) barrier_arrive(k_empty[stage.index]);\n"
     "    wgmma_wait<0>();\n    pin(dq);", ""),
    ("a warpgroup never says that V is read",
     "    if (thread % WARPGROUP == 0) barrier_arrive(v_empty[stage.index]);\n", "", WAITS),
]  # fmt: skip
WRONG = [
    ("wrong swizzle of dS", "16 * (vector ^ lane % 8)", "16 * vector"),
    ("delta of the other query", "-first.y, -next.y);\n        store_pair(to + 4 * BLOCK_Q + 16 * "
     "thread + 8", "-first.y, -first.y);\n        store_pair(to + 4 * BLOCK_Q + 16 * thread + 8"),
]  # fmt: skip


def planted(kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The verdicts on the gradients of a call in which one kernel has other text."""
    bound_init = bound_kernel.BoundKernel.__init__

    def with_bug(self: Any, build: Any, *rest: Any) -> None:
        if build.plan.kernel == kernel:
            build = with_text(build, old, new)
        bound_init(self, build, *rest)

    case = CASES[kernel]
    spec = CAUSAL.replace(dtype=case.dtype, head_dim=128, head_dim_v=128)
    q, k, v = case.tensors(seed=1)
    forward = run_forward(spec, q, k, v, backend="emulator")
    dout, dlse = like(forward.out, 1), like(forward.lse, 2)
    monkeypatch.setattr(bound_kernel.BoundKernel, "__init__", with_bug)
    how: dict[str, Any] = {"backend": "emulator", "arch": ARCH, "deterministic": kernel == "dq"}
    run = run_backward(spec, q, k, v, forward.out, forward.lse, dout, dlse, **how)
    found = (run.dq, run.dk, run.dv)
    return reference.judge_gradients(found, spec, q, k, v, dout, dlse)


@pytest.mark.parametrize(
    ("kernel", "old", "new", "kind"),
    [
        pytest.param(
            *(role, *bug[1:]),
            id=f"{role}: {bug[0]}",
            marks=[] if place % 3 == 0 else pytest.mark.slow,  # each compiles a kernel
        )
        for role, bugs in (("fused", FUSED), ("dq", DQ))
        for place, bug in enumerate(bugs)
    ],
)
def test_a_planted_bug_is_caught(
    kernel: str, old: str, new: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(fg.EmulatorError) as caught:
        planted(kernel, old, new, monkeypatch)
    assert kind in f"{type(caught.value).__name__}: {caught.value}"
    assert "_sm_90a.cu:" in str(caught.value)


@pytest.mark.parametrize(("old", "new"), [bug[1:] for bug in WRONG], ids=[bug[0] for bug in WRONG])
def test_wrong_numbers_are_seen_by_the_error_rule(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = planted("fused", old, new, monkeypatch)
    assert not all(verdict.ok for verdict in verdicts.values())
    assert all(math.isfinite(verdict.max_error) for verdict in verdicts.values())


def test_nothing_is_found_where_nothing_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("fused", "dq"):
        with monkeypatch.context() as once:
            verdicts = planted(
                kernel,
                "(const __grid_constant__ Params p",
                "(const __grid_constant__ Params p",
                once,
            )
        assert all(verdict.ok for verdict in verdicts.values())
