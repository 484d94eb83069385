"""Blocks that own a part of a group of query heads: dK and dV of the parts are added in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import BackwardRun, check, run_backward
from flashgen.calls.runtime.bind_arguments import bind, elements_of_sums
from flashgen.kernels.pipeline import build_backward, divides_groups
from flashgen.kernels.planner import Plan, plan_backward, times_of_parts
from flashgen.kernels.planner.requests import BackwardPlanRequest
from flashgen.shared.arch import GpuMemory, facts
from flashgen.shared.call import LaunchOptions
from flashgen.shared.launch_facts import Sizes
from tests.support.commands import CAUSAL as FILE
from tests.support.commands import flashgen
from tests.support.examples import spec_path
from tests.support.judged import Call, check_gates, dropping, example, sized
from tests.support.parts_of_groups import divide_groups
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import slow

ARCH = "sm_90a"
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
CAUSAL = fg.load(spec_path("causal"))
KERNELS = ["delta", "fused", "convert_dq", "convert_dk", "convert_dv"]


@contextmanager
def parts_of(heads: int, *, of_any_mask: bool = False) -> Iterator[None]:
    """Inside, a part has this many query heads.

    Args:
        of_any_mask: groups are divided where a mask gives all blocks equally many tiles, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        if of_any_mask:
            patch.setattr("flashgen.kernels.pipeline.divides_groups", lambda *_: True)
        divide_groups(patch, heads)
        yield


def causal(case: Case, dropout_p: float = 0.0, **offsets: int) -> Call:
    numbers = dropping(dropout_p) | offsets
    return Call(sized(CAUSAL, case, dropout_p), case.tensors(seed=1), numbers, arch=ARCH)


def of_packed(heads: tuple[int, int] = (6, 2), dims: tuple[int, int] = (64, 64)) -> Call:
    """Sequences of a packed call, one of which is empty, and rows after the last one."""
    case = Case(400, 400, 1, *heads, "float16", *dims)
    ends = torch.tensor([0, 150, 150, 200, 330], dtype=torch.int32)
    numbers = {"tensors": {"cu_seqlens_q": ends, "cu_seqlens_k": ends}}
    return Call(sized(CAUSAL, case).replace(packed=True), case.tensors(3), numbers, arch=ARCH)


def in_parts(call: Call, heads: int, *, of_any_mask: bool = False) -> BackwardRun:
    """By the error rule, from kernels that are compiled clean."""
    with parts_of(heads, of_any_mask=of_any_mask):
        run = call.judged_backward()
    built = [report.kernel for report in run.reports if report.kernel is not None]
    assert {"convert_dk", "convert_dv"} <= {each.plan.kernel for each in built}
    for each in built:
        check_gates(each)
    return run


@pytest.mark.parametrize(
    ("case", "heads", "dropout_p", "offsets"),
    [
        (Case(150, 200, 1, 5, 1, "bfloat16", 64), 2, 0.0, {}),
        slow(Case(150, 200, 2, 6, 2, "float16", 128, layout="rows_first"), 2, 0.0, {}),
        slow(Case(140, 300, 1, 7, 1, "bfloat16", 64, 128), 3, 0.1, {"q_offset": 160}),
        slow(Case(200, 130, 2, 8, 2, "float16", 88, 72), 1, 0.0, {"k_offset": -20}),
        slow(Case(1, 300, 1, 4, 2, "float16", 128), 1, 0.0, {"q_offset": 299}),
    ],
)
def test_parts_meet_the_error_rule(
    case: Case, heads: int, dropout_p: float, offsets: dict[str, int]
) -> None:
    run = in_parts(causal(case, dropout_p, **offsets), heads)
    assert [report.kernel.plan.kernel for report in run.reports] == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sink", "dense_bias", "document", "alibi", "prefix_lm", "softcap"]
)
def test_parts_meet_the_error_rule_for_other_specs(name: str) -> None:
    call = example(spec_path(name), Case(150, 200, 1, 6, 2, "float16", 64), arch=ARCH)
    in_parts(call, 2, of_any_mask=True)


@pytest.mark.slow
def test_parts_of_packed_sequences_meet_the_error_rule() -> None:
    in_parts(of_packed(), 2)
    in_parts(of_packed(heads=(3, 1), dims=(64, 128)), 2)
    in_parts(of_packed(heads=(3, 1), dims=(80, 64)), 1)


def test_a_part_of_all_heads_has_the_kernels_and_launches_of_a_whole_group() -> None:
    case = Case(150, 200, 1, 4, 2, "float16", 64)
    run = causal(case).backward()
    assert [report.kernel.plan.kernel for report in run.reports] == KERNELS[:3]
    fused = run.reports[1].kernel
    assert "parts" not in fused.source.text


@pytest.mark.slow
def test_one_contribution_to_each_sum_gives_the_bits_of_a_whole_group() -> None:
    """Sums of one addend, converted as the whole group's epilogue rounds them."""
    call = causal(Case(150, 200, 1, 2, 2, "bfloat16", 64))
    whole = call.backward()
    request = BackwardPlanRequest(call.spec, ARCH)
    parts = in_parts(call, 1, of_any_mask=True)
    assert not divides_groups(request, (1, 2, 2, 150, 200))
    assert torch.equal(parts.dk, whole.dk)
    assert torch.equal(parts.dv, whole.dv)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_keys_have_the_same_gradients_in_every_run(packed: bool) -> None:
    """The sums of the parts are added in their order, in whichever order blocks write them."""
    call = causal(Case(150, 200, 1, 7, 1, "float16", 64))
    if packed:
        call = of_packed(heads=(7, 1))
    forward = call.forward()
    with parts_of(2):
        runs = [call.backward(forward, order_seed=seed) for seed in (None, 1, 2)]
    for run in runs:
        assert [report.kernel.plan.kernel for report in run.reports] == KERNELS
        assert torch.equal(run.dk, runs[0].dk)
        assert torch.equal(run.dv, runs[0].dv)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["dk", "dv"])
def test_parts_are_added_one_after_the_other_in_their_order(gradient: str) -> None:
    """Of parts that cancel only in this order: 1, 2^30, -2^30, 1."""
    spec = CAUSAL.replace(head_dim=64, head_dim_v=64, dtype="bfloat16")
    with parts_of(1):
        builds = build_backward(spec, ARCH, sizes=(2, 4, 1, 40, 300))
    (built,) = (each for each in builds if each.plan.kernel == f"convert_{gradient}")
    check_gates(built)
    k = torch.full((2, 1, 300, 64), torch.nan, dtype=torch.bfloat16)
    call = check(spec, torch.empty(2, 4, 40, 64, dtype=k.dtype), k, k, scale=0.5)
    sums = torch.tensor([1.0, 2.0**30, -(2.0**30), 1.0]).view(1, 4, 1).repeat(2, 1, 3 * 128 * 64)
    assert sums.numel() == elements_of_sums(built.plan, call, part_heads=1)
    tensors = {gradient: k, f"{gradient}_sum": sums}
    bind(built, call, tensors, part_heads=1).emulate(tensors, LaunchOptions())
    assert torch.equal(k, torch.full_like(k, 0.5 if gradient == "dk" else 1.0))


READ_AND_WRITE = """
  if (!(((volatile float*)p.rows)[2 * (k_start % 64)] < 1e30f)) return;
  float* dk_sum ="""
"""Of base and delta, which the launch before writes: only what follows its end may read them."""


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False])
def test_blocks_without_query_tiles_write_after_the_launch_before(waits: bool) -> None:
    """Keys after all queries: the warps that copy find no tile and wait all the same, and the
    consumers, which wait for them, are ordered after the end of the launch before."""
    call = causal(Case(40, 400, 1, 3, 1, "float16", 64))
    with parts_of(2), planted("fused", "float* dk_sum =", READ_AND_WRITE, "// 6. dK and dV"):
        if waits:
            run = call.judged_backward()
            assert [report.kernel.plan.kernel for report in run.reports] == KERNELS
            assert not run.dk[:, :, 40:].any()
            assert not run.dv[:, :, 40:].any()
        else:
            with planted("fused", WAIT, ""), caught("may still write"):
                call.backward()


@pytest.mark.slow
def test_compiled_calls_have_parts() -> None:
    call = causal(Case(150, 200, 1, 3, 1, "float16", 64))
    dout, _ = call.gradients = call.gradients[0], None
    op = fg.attention(call.spec)
    qkv = [x.clone().requires_grad_() for x in call.qkv]

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return op(*given, backend="emulator", arch=ARCH)

    with parts_of(2):
        out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*qkv)
        _, dk, dv = torch.autograd.grad(out, qkv, dout)
        run = call.backward(call.forward())
    assert [report.kernel.plan.kernel for report in op.backward_reports] == KERNELS
    assert torch.equal(dk, run.dk)
    assert torch.equal(dv, run.dv)


@pytest.mark.slow
def test_deterministic_calls_have_whole_groups() -> None:
    with parts_of(1):
        run = causal(Case(70, 90, 1, 2, 1, "float16", 64)).backward(deterministic=True)
    assert [report.kernel.plan.kernel for report in run.reports] == ["delta", "dkdv", "dq"]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_whole_groups_have_bits_that_do_not_depend_on_the_batch(deterministic: bool) -> None:
    call = causal(Case(150, 200, 2, 4, 2, "float16", 64))
    forward = call.forward()
    together = call.backward(forward, deterministic=deterministic)
    for b in range(2):
        read = (x[b : b + 1] for x in (*call.qkv, forward.out, forward.lse, *call.gradients))
        options = {"backend": "emulator", "arch": ARCH, "deterministic": deterministic}
        alone = run_backward(call.spec, *read, **options)
        assert torch.equal(alone.dk, together.dk[b : b + 1])
        assert torch.equal(alone.dv, together.dv[b : b + 1])


BUGS = [
    ("fused", "* p.part_heads;", "* p.part_heads + 1;", "", ""),
    ("fused", "min(first_h + p.part_heads, ", "min(first_h + p.part_heads + 1, ", "", ""),
    ("fused", "p.heads_kv * p.parts", "p.heads_kv", "// 6. dK and dV", ""),
    ("fused", "(4 * n + e) * 32", "(4 * n + e) * 33", "// 6. dK and dV", ""),
    ("convert_dk", "part < p.parts", "part < p.parts - 1", "", ""),
    ("convert_dk", "int part = 1", "int part = 0", "", "OutOfBounds"),
    ("convert_dv", "from += part_vectors", "from += part_vectors - 32", "", ""),
    ("convert_dv", "p.heads_kv + h) * p.parts", "p.heads_kv + h)", "", ""),
    ("convert_dv", "16 * (rows % 2)", "0 * (rows % 2)", "", ""),
    ("convert_dv", "  __syncthreads();\n", "", "// 3.", "RaceError"),
]
"""A part that begins or ends at a wrong head, sums in the place of another head or with gaps, and
conversions that leave a part out, read one more, or read elsewhere."""


@pytest.mark.parametrize(
    ("kernel", "old", "new", "after", "kind"), [BUGS[0], *(slow(*bug) for bug in BUGS[1:])]
)
def test_a_planted_bug_is_found(kernel: str, old: str, new: str, after: str, kind: str) -> None:
    call = causal(Case(100, 150, 2, 3, 1, "bfloat16", 64))
    with parts_of(2), planted(kernel, old, new, after):
        if kind:
            with caught(kind) as error:
                call.backward()
            assert kernel in error.value.where
        else:
            with pytest.raises((AssertionError, fg.FlashgenError)):
                call.judged_backward()


# ---- the rule -----------------------------------------------------------------------------------


H100 = facts(ARCH).memory
H200 = GpuMemory(60 * 2**20, 4.8e12)
"""By the data sheet of the NVIDIA H200: 4.8 TB/s."""


def fused_of(dim: int = 128) -> tuple[BackwardPlanRequest, Plan]:
    spec = CAUSAL.replace(head_dim=dim, head_dim_v=dim, dtype="bfloat16")
    return BackwardPlanRequest(spec, ARCH), plan_backward(spec, ARCH).kernel("fused")


@pytest.mark.parametrize(
    ("sizes", "heads", "bits"),
    [
        ((1, 64, 8, 8192, 8192), 2, 1),  # two heads of Q, dO and sums in each of two parts
        ((1, 16, 2, 16384, 16384), 2, 0),
        ((2, 64, 8, 4096, 4096), 2, 2),
        ((1, 40, 8, 8192, 8192), 2, 1),  # the last of three parts has one head
        ((1, 64, 8, 32768, 32768), 1, 0),
        ((1, 8, 2, 2048, 2048), 4, 1),  # all heads of the call fit
        ((2, 16, 16, 8192, 8192), 1, 2),
    ],
)
def test_as_many_heads_are_in_a_part_as_fit_in_l2(sizes: Sizes, heads: int, bits: int) -> None:
    _, fused = fused_of()
    assert fused.part_heads(*sizes) == heads
    assert fused.head_bits(*sizes[1:], heads) == bits


@pytest.mark.parametrize(
    ("sizes", "on_h100", "on_h200"),
    [
        # Measured on both GPUs: the table in docs/planner.md.
        ((1, 64, 8, 8192, 8192), True, False),
        ((1, 16, 2, 16384, 16384), True, False),
        ((2, 32, 8, 4096, 4096), False, False),
        # By the rule alone.
        ((8, 64, 8, 1024, 1024), False, False),  # short walks: the sums take longer
        ((1, 71, 1, 4096, 4096), True, True),
        ((2, 16, 16, 8192, 8192), False, False),
    ],
)
def test_groups_are_divided_where_blocks_would_wait_longer_than_the_sums_of_parts_take(
    sizes: Sizes, on_h100: bool, on_h200: bool
) -> None:
    request, _ = fused_of()
    assert divides_groups(request, sizes) == divides_groups(request, sizes, H100) == on_h100
    assert divides_groups(request, sizes, H200) == on_h200


def test_blocks_wait_less_the_more_memory_serves_and_l2_holds() -> None:
    _, fused = fused_of()
    sizes = (1, 64, 8, 8192, 8192)

    def waits(l2_mib: int, rate: float) -> float:
        memory = GpuMemory(l2_mib * 2**20, rate)
        return times_of_parts(fused, sizes, memory, packed=False).waits

    by_rate = [waits(50, rate * 1e12) for rate in (1.0, 2.0, 3.35, 9.0)]
    by_l2 = [waits(mib, 3.35e12) for mib in (10, 30, 50, 120)]
    for found in (by_rate, by_l2):
        assert found == sorted(found, reverse=True)
        assert found[-1] == 0
    # All accesses of the longest walks miss at worst: 1.5 times their bytes move.
    scores = 64 * 8192 * 8192 / 2
    moved = scores / fused.block_k * 1.5 * fused.row_bytes
    assert waits(0, 1e12) < moved / 1e12


def test_packed_sequences_count_as_equally_long() -> None:
    _, fused = fused_of()
    apart = times_of_parts(fused, (8, 64, 8, 1024, 1024), H100, packed=False)
    packed = times_of_parts(fused, (8, 64, 8, 8192, 8192), H100, packed=True)
    assert packed.waits == apart.waits


def test_blocks_with_equal_walks_keep_whole_groups() -> None:
    full = fg.AttentionSpec(head_dim=128, dtype="bfloat16")
    assert not divides_groups(BackwardPlanRequest(full, ARCH), (1, 64, 8, 8192, 8192))


@pytest.mark.slow
def test_commands_print_what_the_parts_of_a_call_cost(tmp_path: Path) -> None:
    shape, page = "1,16,1,20000,20000", tmp_path / "page.html"
    moved = 4 * 8 * 157 * 128 * (64 + 64)  # eight parts of 157 tiles of keys
    words = f"8 of each group, of up to 2 query heads: {moved:,} B of sums of dK and dV"
    of_call = ["--backward", "--arch", ARCH]
    planned = flashgen("plan", FILE, *of_call, "--shape", shape)
    assert f"parts     {words}" in planned.stdout, planned.stderr
    assert "blocks of whole groups would wait" in planned.stdout
    assert "predicted convert_dk: " in planned.stdout
    small = flashgen("plan", FILE, *of_call, "--shape", "1,16,1,200,200")
    assert "parts  " not in small.stdout
    options = ["--shape", "1,16,1,20,20", "--predict", shape, "-o", str(page)]
    reported = flashgen("report", FILE, *of_call, *options)
    assert reported.exit_code == 0, reported.stderr
    assert words in page.read_text()
