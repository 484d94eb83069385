"""Bugs planted in Hopper's kernel for gradients of learned tensors are caught.

The emulator reports bugs of synchronisation, and the error rule shows bugs of arithmetic.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

import flashgen as fg
from flashgen import reference
from flashgen.runtime import bound_kernel
from tests.kernels.sm90.test_captured import Composed
from tests.kernels.sm90.test_forward import with_text

RESIDENT = "    barrier_wait(resident, 0);\n"
GIVE_K = "    if (lane == 0) barrier_arrive(k_empty[stage.index]);\n"
GIVE_V = "    if (thread % WARPGROUP == 0) barrier_arrive(v_empty[stage.index]);\n"
S_DONE = "    wgmma_wait<1>();\n    pin(s);\n"
DP_DONE = "    wgmma_wait<0>();\n    pin(ds);\n"
WAIT_K = "    barrier_wait(k_full[stage.index], stage.parity);\n    const Tile"
ROOM_K = "        barrier_wait(k_empty[stage.index], stage.parity ^ 1);\n        store_tile"
ROOM_V = "        barrier_wait(v_empty[stage.index], stage.parity ^ 1);\n"

WAITS = "Deadlock"

# What is wrong, how, and what the error is called; "" where an early copy may show as any of some.
HANDED_OVER = [
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
    ("an arrival too many is asked for",
     "barrier_init(v_empty[i], CONSUMERS)", "barrier_init(v_empty[i], 3)", WAITS),
    ("the products are not fenced from what wrote their registers",
     "    wgmma_fence();\n", "", "wgmma.fence"),
]  # fmt: skip
# What is wrong, how, and whose gradient shows it.
COMPUTED = [
    ("the mask is left out", "if (!tile.full) {", "if (false) {", "gate"),
    ("dropped elements keep their dP",
     "kept(p, bits[e / 2 * 2 + n % 2], e % 2) ? ds[n][e] : 0.0f", "ds[n][e]", "gate"),
    ("delta is not scaled", "delta[r] = numbers.y / p.dropout_scale;", "delta[r] = numbers.y;",
     "row"),
    ("a row's sum is that of one lane", "all_by2 = quad_sum(by2[r])", "all_by2 = by2[r]", "row"),
    ("a column's sum is that of one lane", "by1 = column_sum(by1);", "", "column"),
    ("every lane adds a column's sum", "if (lane < 4 && by1", "if (by1", "column"),
    ("the other row of a lane", "place_of_by3(p, h, q, k)", "place_of_by3(p, h, q + 8, k)",
     "table"),
]  # fmt: skip


def reaches(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + 200 >= k


@functools.cache
def call() -> Composed:
    """Several steps for each of several blocks, mixed tiles among them, and dropout."""
    options = {"head_dim": 128, "dtype": "bfloat16"}
    return Composed("planted", reaches, options, 0.2, lengths=(300, 600), heads=(1, 1))


def verdicts(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """On the gradients of a call whose kernel for learned tensors has other text."""
    bound_init = bound_kernel.BoundKernel.__init__

    def with_bug(self: Any, build: Any, *rest: Any) -> None:
        if build.plan.of_captured:
            build = with_text(build, old, new)
        bound_init(self, build, *rest)

    monkeypatch.setattr(bound_kernel.BoundKernel, "__init__", with_bug)
    made = call()
    run = made.backward()
    found = (run.dq, run.dk, run.dv, *run.captured)
    of = (made.spec, *made.qkv, *made.results[2:])
    return reference.judge_gradients(found, *of, **made.numbers)


def cases(bugs: list[Any]) -> list[Any]:
    """Every sixth in `make test`: each compiles a kernel."""
    return [
        pytest.param(*bug[1:], id=bug[0], marks=[] if place % 6 == 0 else pytest.mark.slow)
        for place, bug in enumerate(bugs)
    ]


@pytest.mark.parametrize(("old", "new", "kind"), cases(HANDED_OVER))
def test_a_planted_bug_is_caught(
    old: str, new: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(fg.EmulatorError) as caught:
        verdicts(old, new, monkeypatch)
    assert kind in f"{type(caught.value).__name__}: {caught.value}"
    assert "_captured_" in str(caught.value)
    assert "_sm_90a.cu:" in str(caught.value)


@pytest.mark.parametrize(("old", "new", "whose"), cases(COMPUTED))
def test_wrong_numbers_are_seen_by_the_error_rule(
    old: str, new: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = verdicts(old, new, monkeypatch)
    assert not found[f"d{whose}"].ok
    assert math.isfinite(found[f"d{whose}"].max_error)
    assert all(found[name].ok for name in ("dq", "dk", "dv"))


def test_nothing_is_found_where_nothing_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    same = "(const __grid_constant__ Params p"
    assert all(each.ok for each in verdicts(same, same, monkeypatch).values())
