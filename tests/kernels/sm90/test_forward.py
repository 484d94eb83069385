"""The forward kernel for Hopper (TMA, wgmma) meets the error rule in the emulator, checkers on.

test_every_spec.py has every spec once in `make test`. Here every spec at every head dim, with
dropout, lengths, heads and the number of blocks in turn, is `slow`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import emulator, reference
from flashgen.compile import compile
from flashgen.ops import ForwardRun, run_forward
from flashgen.pipeline import Build
from flashgen.runtime import bound_kernel
from tests.support.examples import SPEC_IDS, SPECS, fitted, spec_path, values_of
from tests.support.shapes import HEADS, LAYOUTS, LENGTHS, Case
from tests.support.tiers import slow

ARCH = "sm_90a"
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
SMALL = [lengths for lengths in LENGTHS if lengths[0] * lengths[1] < 70_000]


def judged(
    spec: fg.AttentionSpec,
    path: Path,
    case: Case,
    dropout_p: float = 0.0,
    blocks: int | None = None,
) -> ForwardRun:
    case = fitted(spec, case)
    numbers: dict[str, Any] = values_of(path, case)
    if dropout_p:
        numbers |= {"dropout_p": dropout_p, "rng": torch.tensor([7, 3])}
    q, k, v = case.tensors(seed=case.scores % 1000)
    run = run_forward(spec, q, k, v, backend="emulator", arch=ARCH, blocks=blocks, **numbers)
    exact = reference.attention(spec, q, k, v, **numbers)
    same = reference.same_dtype(spec, q, k, v, **numbers)
    for name, got, ref, ordinary in zip(
        ("out", "lse"), (run.out, run.lse), exact, same, strict=True
    ):
        verdict = reference.compare(got, ref, ordinary)
        assert verdict, f"{path.stem} {case.id} {name}: {verdict}"
    assert run.binary is not None
    assert run.binary.warnings == ()
    assert run.binary.resources.clean
    return run


def turn_of(number: int, head_dim: int) -> tuple[Case, float]:
    """Every factor changes with the spec and with the head dim."""
    turn = number + HEAD_DIMS.index(head_dim)
    case = Case(
        *SMALL[(5 * turn + number) % len(SMALL)],
        1 + 2 * (turn % 4 == 0),
        *HEADS[turn % len(HEADS)],
        ("float16", "bfloat16")[turn % 2],
        head_dim,
        None,
        LAYOUTS[turn // 2 % len(LAYOUTS)],
    )
    return case, (0.0, 0.17)[turn // 3 % 2]


def check(path: Path, head_dim: int) -> None:
    case, dropout_p = turn_of(SPECS.index(path), head_dim)
    spec = fg.load(path).replace(dtype=case.dtype, head_dim=head_dim, head_dim_v=head_dim)
    spec = spec.replace(dropout=dropout_p > 0)
    blocks = (None, 4)[(SPECS.index(path) + HEAD_DIMS.index(head_dim)) % 2]
    run = judged(spec, path, case, dropout_p, blocks)
    assert run.plan is not None
    assert run.plan.path == "sm_90a"


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_every_spec_meets_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    check(path, head_dim)


CAUSAL_PATH = spec_path("causal")
CAUSAL = fg.load(CAUSAL_PATH)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [slow(192, 128), slow(64, 128), slow(128, 8), (24, 72)]
)
def test_values_may_be_longer_or_shorter_than_keys(head_dim: int, head_dim_v: int) -> None:
    spec = CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim_v)
    judged(spec, CAUSAL_PATH, Case(113, 203, 1, 2, 1, "float16", head_dim, head_dim_v))


@pytest.mark.parametrize("head_dim", [slow(8), slow(40), 104, slow(168), slow(248)])
def test_head_dims_that_fill_no_panel_are_padded_by_the_copies(head_dim: int) -> None:
    spec = CAUSAL.replace(head_dim=head_dim, head_dim_v=head_dim)
    judged(spec, CAUSAL_PATH, Case(70, 90, 1, 2, 2, "float16", head_dim, None, "gaps"))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 700), (17, 5), (64, 128), (129, 1)])
def test_lengths_that_fill_no_tile_meet_the_error_rule(lengths: tuple[int, int]) -> None:
    judged(CAUSAL, CAUSAL_PATH, Case(*lengths, 2, 2, 1, "float16", 64))


@pytest.mark.parametrize("seed", [1, slow(2), slow(3)])
def test_the_bits_do_not_depend_on_the_order_of_warps_and_copies(seed: int) -> None:
    q, k, v = Case(200, 500, 1, 2, 2, "float16", 64).tensors(seed=1)
    how: dict[str, Any] = {"backend": "emulator", "arch": ARCH}
    plain = run_forward(CAUSAL, q, k, v, **how)
    shuffled = run_forward(CAUSAL, q, k, v, order_seed=seed, **how)
    assert torch.equal(plain.out, shuffled.out)
    assert torch.equal(plain.lse, shuffled.lse)


# ---- where TMA cannot be used, the plan or the report says why ----------------------------------


def test_float32_uses_the_sm80_path_and_the_plan_gives_the_reason() -> None:
    plan = fg.plan(CAUSAL.replace(dtype="float32"), ARCH)
    assert plan.path == "sm_80"
    assert "parts of tf32" in str(plan)
    assert "sm_80 path" in str(plan)


def test_unaligned_operands_use_the_sm80_path() -> None:
    q, k, v = (t[..., 1:] for t in Case(40, 40, 1, 1, 1, "float16", 72).tensors(seed=1))
    q, k, v = (t[..., :64] for t in (q, k, v))
    run = run_forward(CAUSAL, q, k, v, backend="emulator", arch=ARCH)
    assert run.plan.path == "sm_80"
    assert "TMA takes addresses" in str(run.plan)
    assert "past a multiple of 16 B" in run.report.access_reason


def test_expanded_operands_use_the_sm80_path() -> None:
    q, k, v = Case(40, 40, 1, 2, 1, "float16", 64).tensors(seed=1)
    k, v = k.expand(1, 2, 40, 64), v.expand(1, 2, 40, 64)
    run = run_forward(CAUSAL, q, k, v, backend="emulator", arch=ARCH)
    assert run.plan.path == "sm_80"
    assert "the head stride of k is 0" in run.report.access_reason
    judged_out = reference.attention(CAUSAL, q, k, v)[0]
    same = reference.same_dtype(CAUSAL, q, k, v)[0]
    assert reference.compare(run.out, judged_out, same)


# ---- planted bugs ------------------------------------------------------------------------------


def with_text(built: Build, old: str, new: str, count: int = 1) -> Build:
    text = built.source.text
    assert text.count(old) == count, (old, text.count(old))
    text = text.replace(old, new)
    name = built.source.name
    binary = compile(text, filename=built.source.filename, kernel=name, arch=ARCH)
    return replace(built, source=replace(built.source, text=text), binary=binary)


PLANTED = [
    ("consumer does not wait for K",
     "        barrier_wait(k_full[k.index], k.parity);\n        wait_for_tensor_cores();",
     "        wait_for_tensor_cores();", "Race"),
    ("producer does not wait for space",
     "barrier_wait(v_empty[v.index], v.parity ^ 1);", "", ""),
    ("wrong phase", "barrier_wait(v_full[v.index], v.parity);\n        start_output",
     "barrier_wait(v_full[v.index], v.parity ^ 1);\n        start_output", ""),
    ("more bytes announced than come", "barrier_announce(full, V_BYTES);",
     "barrier_announce(full, V_BYTES + 16);", "Deadlock"),
    ("a warpgroup never says that K is read",
     "pin(s[0]);\n        if (thread % WARPGROUP == 0) barrier_arrive(k_empty[k.index]);",
     "pin(s[0]);", "Deadlock"),
    ("an arrival too many is asked for", "barrier_init(v_empty[i], CONSUMERS);",
     "barrier_init(v_empty[i], CONSUMERS + 1);", "Deadlock"),
    ("S is read before the products are done", "wgmma_wait<1>();", "wgmma_wait<2>();", ""),
    ("no fence before the output is copied", "  proxy_fence();\n", "", ""),
    ("the output is copied before all wrote it",
     "  proxy_fence();\n    named_wait(BARRIER_WARPGROUP + group, WARPGROUP);", "  proxy_fence();",
     "Race"),
]  # fmt: skip
# These show where a block computes several work tiles.
PLANTED_IN_WORK_TILES = [
    ("Q is loaded over O before O has been stored", "bulk_wait();\n      if (tile", "if (tile",
     ""),
    ("a work tile is read before it is written", "barrier_wait(full, parity);", "", "Race"),
    ("a work tile is overwritten before it is read", "barrier_wait(empty, parity ^ 1);", "", ""),
    ("a warp never signals that it read its work tile",
     "if (threadIdx.x % 32 == 0) barrier_arrive(empty);", "", "Deadlock"),
    ("Q's phase stands still", "q_parity ^= 1;", "", ""),
    ("V of a work tile's last key tile is never released",
     "pin(o[0]);\n      if (thread % WARPGROUP == 0) barrier_arrive(v_empty[v.index]);",
     "pin(o[0]);", "Deadlock"),
    ("the tensor cores are not released",
     "      start_scores(k.index);\n      release_tensor_cores();",
     "      start_scores(k.index);", "Deadlock"),
]  # fmt: skip


def planted(old: str, new: str, kind: str, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    # With several work tiles, one tile of keys for each: the next one is written early.
    lengths = (700, 200) if how else (128, 1200)
    q, k, v = Case(*lengths, 1, 1, 1, "float16", 64).tensors(seed=1)
    spec = fg.AttentionSpec(head_dim=64, name="full")
    bound_init = bound_kernel.BoundKernel.__init__

    def with_bug(self, build, *rest):
        bound_init(self, with_text(build, old, new), *rest)

    monkeypatch.setattr(bound_kernel.BoundKernel, "__init__", with_bug)
    with pytest.raises(fg.EmulatorError) as caught:
        run_forward(spec, q, k, v, backend="emulator", arch=ARCH, **how)
    assert kind in type(caught.value).__name__, caught.value
    assert "_sm_90a.cu:" in str(caught.value)


def cases(bugs: list[tuple[str, str, str, str]], *fast: str) -> list[Any]:
    """In `make test` those that are named: each compiles a kernel."""
    assert set(fast) <= {bug[0] for bug in bugs}
    return [
        pytest.param(*bug[1:], id=bug[0], marks=[] if bug[0] in fast else pytest.mark.slow)
        for bug in bugs
    ]


CASES = cases(
    PLANTED,
    "consumer does not wait for K",
    "wrong phase",
    "an arrival too many is asked for",
    "S is read before the products are done",
    "no fence before the output is copied",
)
CASES_IN_WORK_TILES = cases(
    PLANTED_IN_WORK_TILES,
    "Q is loaded over O before O has been stored",
    "a work tile is overwritten before it is read",
)


@pytest.mark.parametrize(("old", "new", "kind"), CASES)
def test_a_planted_bug_is_caught(old: str, new: str, kind: str, monkeypatch) -> None:
    planted(old, new, kind, monkeypatch)


@pytest.mark.parametrize(("old", "new", "kind"), CASES_IN_WORK_TILES)
def test_a_bug_planted_between_work_tiles_is_caught(
    old: str, new: str, kind: str, monkeypatch
) -> None:
    planted(old, new, kind, monkeypatch, blocks=1)


def test_a_wrong_swizzle_gives_wrong_numbers(monkeypatch) -> None:
    q, k, v = Case(64, 64, 1, 1, 1, "float16", 64).tensors(seed=1)
    spec = fg.AttentionSpec(head_dim=64, name="full")
    made = emulator.TensorMap.__init__

    def unswizzled(self, array, box, swizzle, **how):
        made(self, array, box, 0, **how)

    right = run_forward(spec, q, k, v, backend="emulator", arch=ARCH).out
    monkeypatch.setattr(emulator.TensorMap, "__init__", unswizzled)
    wrong = run_forward(spec, q, k, v, backend="emulator", arch=ARCH).out
    assert not torch.allclose(right.float(), wrong.float(), atol=0.1)
