"""Heads of more than 256 dimensions: the tiles that fit meet the error rule on both paths.

O, dQ, or dK and dV have more columns than a wgmma, which takes 256: such products have two parts.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.calls.runtime.programs import SpecProgram
from flashgen.kernels.pipeline import build
from flashgen.kernels.planner import plan_backward, plan_merge
from flashgen.kernels.planner.models.kernel_model import STEP
from flashgen.kernels.planner.streaming_kernels import plan_delta
from flashgen.shared.paths import PATHS
from flashgen.shared.split_choice import ALL_SPLITS
from flashgen.spec.language.signature import joining, split
from flashgen.tools.profile.run import profile_backward, profile_forward
from tests.support.codes import Coded
from tests.support.examples import COVERING, spec_path
from tests.support.judged import (
    Call,
    check_few_spills,
    check_gates,
    equal,
    example,
    forward_verdicts,
)
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_gradients import PagedGradient
from tests.support.paged_specs import CAUSAL, SERVED
from tests.support.planted import caught, planted
from tests.support.shapes import Case
from tests.support.tiers import slow

DIMS = ((320, 320), (264, 264), (320, 256))


def wide(name: str, turn: int, arch: str, dims: tuple[int, int]) -> Call:
    heads, lengths = ((2, 1), (3, 1), (2, 2))[turn % 3], ((70, 90), (33, 70))[turn // 2 % 2]
    case = Case(*lengths, 1, *heads, ("float16", "bfloat16")[turn % 2], *dims)
    return example(spec_path(name), case, COVERING.get(name, 0.0), arch=arch)


def judged(call: Call, *, deterministic: bool = False) -> None:
    """Forward and backward, by the error rule; no kernel spills."""
    forward = call.judged_forward()
    backward = call.judged_backward(forward, deterministic=deterministic)
    for report in (forward.report, *backward.reports):
        if report.kernel is not None:
            check_gates(report.kernel)


@pytest.mark.parametrize("arch", PATHS)
def test_an_output_has_more_columns_than_a_product(arch: str) -> None:
    case = Case(33, 40, 1, 1, 1, "bfloat16", 16, 320)
    run = example(spec_path("causal"), case, arch=arch).judged_forward()
    assert run.report.kernel is not None
    check_gates(run.report.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", COVERING)
def test_covering_specs_meet_the_error_rule(name: str, arch: str, dims: tuple[int, int]) -> None:
    turn = list(COVERING).index(name)
    judged(wide(name, turn, arch, dims), deterministic=bool((turn + DIMS.index(dims)) % 2))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dims", [(352, 352), (256, 320), (64, 320), (320, 64), (288, 304)])
def test_all_head_dims_that_fit_meet_the_error_rule(arch: str, dims: tuple[int, int]) -> None:
    call = wide("causal", 1, arch, dims)
    judged(call)
    judged(call, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(264, 264), (320, 320)])
def test_float32_meets_the_error_rule(dims: tuple[int, int]) -> None:
    case = Case(40, 50, 1, 2, 1, "float32", *dims)
    judged(example(spec_path("causal"), case, arch="sm_80"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dims", DIMS)
def test_paged_and_split_calls_meet_the_error_rule(arch: str, dims: tuple[int, int]) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16")
    of = Sequences.of((2, 2), (130, 47), dims=dims, dtype="bfloat16")
    run = Paged(spec, of, 16, how={"arch": arch, "split_size": 64}).judged()
    assert run.report.kernel is not None
    check_gates(run.report.kernel)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("dims", [*DIMS, (512, 512)])
def test_tangents_meet_the_error_rule(arch: str, dims: tuple[int, int]) -> None:
    wide("causal", 1, arch, dims).judged_tangent()


@pytest.mark.parametrize(("dim", "taken"), [(320, "sm_90a"), (512, "sm_90")])
def test_tangents_without_a_tile_take_the_path_of_all_architectures(dim: int, taken: str) -> None:
    program = SpecProgram(fg.AttentionSpec(head_dim=dim, dtype="bfloat16"))
    target = program.target("emulator", "sm_90a", torch.device("cpu"))
    assert program.path_of_pass(target, "deterministic").arch == "sm_90a"
    assert program.path_of_pass(target, "tangent", ("q", "k", "v")).arch == taken


# ---- values that no tile holds ------------------------------------------------------------------


def in_parts(call: Call, forward: int, backward: int, *, deterministic: bool = False) -> None:
    """Judges a call whose passes have so many parts of the columns of V."""
    run = call.judged_forward()
    assert 1 + len(run.report.others) == forward
    roles = [
        report.kernel.source.role
        for report in call.judged_backward(run, deterministic=deterministic).reports
        if report.kernel is not None
    ]
    assert roles.count("delta") == backward


@pytest.mark.parametrize(
    ("arch", "dims"), [("sm_80", (16, 392)), *(slow(arch, (512, 504)) for arch in PATHS)]
)
def test_values_that_no_tile_holds_are_computed_in_parts(arch: str, dims: tuple[int, int]) -> None:
    in_parts(wide("causal", int(dims[0] == 512), arch, dims), 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(512, 504), (576, 504), (576, 392), (64, 512)])
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", COVERING)
def test_parts_of_covering_specs_meet_the_error_rule(
    name: str, arch: str, dims: tuple[int, int]
) -> None:
    turn = list(COVERING).index(name)
    call = wide(name, turn, arch, dims)
    run = call.judged_forward()
    assert run.report.others or dims == (64, 512)  # one launch, where it costs less
    call.judged_backward(run, deterministic=bool(turn % 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "arch"),
    [((320, 320), "sm_80"), *(((512, 504), arch) for arch in PATHS)],
)
@pytest.mark.parametrize("name", ["softcap", "alibi", "relative_bias"])
def test_paged_and_split_calls_in_parts_meet_the_error_rule(
    name: str, dims: tuple[int, int], arch: str
) -> None:
    """On sm_80 a score function and the registers of a page table leave too few for 320 columns."""
    call = wide(name, 1, arch, dims)
    run = call.judged_forward(split_size=64)
    assert run.report.others
    assert run.report.split_size == 64
    spec = fg.load(spec_path("softcap")).replace(
        head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16", paged=True
    )
    of = Sequences.of((2, 2), (130, 47), dims=dims, dtype="bfloat16")
    assert Paged(spec, of, 16, how={"arch": arch, "split_size": 64}).judged().report.others


@pytest.mark.slow
def test_a_module_computes_parts_through_the_operator_and_autograd() -> None:
    spec = fg.load(spec_path("causal")).replace(head_dim=512, head_dim_v=512, dtype="bfloat16")
    call = Call(spec, Case(33, 40, 1, 2, 1, "bfloat16", 512, 512).tensors(seed=1))
    q, k, v = (x.requires_grad_() for x in call.qkv)
    op = fg.attention(spec)
    out, lse = op(q, k, v, backend="emulator", arch="sm_90a", return_lse=True)
    found = torch.autograd.grad((out, lse), (q, k, v), call.gradients)
    given = [x.detach() for x in (q, k, v)]
    verdicts = forward_verdicts((out.detach(), lse.detach()), spec, *given)
    verdicts |= reference.judge_gradients(found, spec, *given, *call.gradients)
    assert all(verdicts.values()), verdicts


# ---- values of which two warpgroups hold half each ----------------------------------------------

SHARES = ((384, 384), (448, 448), (512, 512), (576, 512))


def in_shares(run: ForwardRun) -> None:
    """A forward pass in one launch, whose kernel spills nothing."""
    assert run.report.kernel is not None
    assert (run.report.others, run.report.kernel.plan.column_warps) == ((), 2)
    check_gates(run.report.kernel)


@pytest.mark.parametrize("dims", [(448, 448), *(slow(each) for each in SHARES if each[0] != 448)])
@pytest.mark.parametrize("name", ["causal", slow("full")])
def test_two_warpgroups_hold_the_columns_of_one_launch(name: str, dims: tuple[int, int]) -> None:
    in_shares(wide(name, 1, "sm_90a", dims).judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("dims", SHARES)
@pytest.mark.parametrize("name", [*COVERING, "sigmoid", "alibi"])
def test_shares_of_covering_specs_meet_the_error_rule(name: str, dims: tuple[int, int]) -> None:
    turn = list(COVERING).index(name) if name in COVERING else 1
    in_shares(wide(name, turn, "sm_90a", dims).judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("dims", SHARES)
@pytest.mark.parametrize("name", ["causal", "softcap", "sink", "packed_causal"])
def test_split_calls_in_shares_meet_the_error_rule(name: str, dims: tuple[int, int]) -> None:
    in_shares(wide(name, 1, "sm_90a", dims).judged_forward(split_size=64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "old", "new"),
    [
        ("V is copied into the tile that is read",
         "barrier_wait(v_empty[before.index], before.parity ^ 1);", ""),
        ("both warpgroups multiply the first columns of V",
         "+ group * (O_COLUMNS / PANEL_V)", "+ 0"),
        ("both warpgroups write the first columns",
         "uniform(writer / WARPGROUP) * O_COLUMNS", "0"),
        ("P is read before it is written",
         "named_wait(BARRIER_P_FULL, THREADS);\n      UNROLL",
         "named_arrive(BARRIER_P_FULL, THREADS);\n      UNROLL"),
        ("P is overwritten before it was read",
         "named_wait(BARRIER_P_EMPTY, THREADS);\n      UNROLL",
         "named_arrive(BARRIER_P_EMPTY, THREADS);\n      UNROLL"),
        ("the factor of O is that of the tile before",
         "      *sent_factors = rescale ? make_float2(by[0][0], by[0][1])\n"
         "                              : make_float2(1.0f, 1.0f);\n"
         "      named_arrive(BARRIER_P_FULL, THREADS);",
         "      named_arrive(BARRIER_P_FULL, THREADS);\n"
         "      *sent_factors = rescale ? make_float2(by[0][0], by[0][1])\n"
         "                              : make_float2(1.0f, 1.0f);"),
        ("the factors of O are not sent", "send(rescale);", "send(false);"),
    ],
)  # fmt: skip
def test_bugs_of_shares_are_caught(bug: str, old: str, new: str) -> None:
    case = Case(33, 300, 1, 2, 1, "bfloat16", 512, 512)
    call = rising(case, 267)
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_forward()


def rising(case: Case, q_offset: int) -> Call:
    """A causal call whose scores rise with the keys, so that O is rescaled in later tiles too."""
    call = example(spec_path("causal"), case, arch="sm_90a")
    q, k, v = call.qkv
    grows = torch.linspace(0.1, 3.0, case.seq_k)[:, None]
    qkv = q.abs(), (k.abs() * grows).to(k.dtype), v
    return Call(call.spec, qkv, {**call.numbers, "q_offset": q_offset}, arch="sm_90a")


def test_both_warpgroups_rescale_their_columns() -> None:
    in_shares(rising(Case(33, 300, 1, 2, 1, "bfloat16", 448, 448), 267).judged_forward())


# ---- gradients whose tiles come panel by panel --------------------------------------------------

STREAMED = ((328, 328), (384, 384), (448, 448), (512, 512), (576, 512))


def streamed(call: Call) -> None:
    """A backward pass in one launch of each kernel; those of panels spill nothing."""
    reports = call.judged_backward(call.judged_forward(), deterministic=True).reports
    built = {report.kernel.plan.kernel: report.kernel for report in reports if report.kernel}
    assert [built[name].plan.streamed for name in ("dkdv", "dq")] == [True, True]
    for each in built.values():
        check_gates(each)


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("causal", (448, 448)),
        *(slow("causal", each) for each in STREAMED if each[0] != 448),
        *(
            slow(name, dims)
            for dims in ((384, 384), (512, 512))
            for name in COVERING
            if name != "causal"
        ),
        *(slow(name, (576, 512)) for name in ("sliding_window", "softcap", "sink", "full")),
        *(slow(name, (384, 384)) for name in ("sigmoid", "alibi", "retention")),
    ],
)
def test_gradients_of_panels_meet_the_error_rule(name: str, dims: tuple[int, int]) -> None:
    turn = list(COVERING).index(name) if name in COVERING else 1
    streamed(wide(name, turn, "sm_90a", dims))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", ["softcap", "document", "relative_bias", "sink"])
def test_gradients_with_dropout_meet_the_error_rule_at_the_widest_heads(
    name: str, arch: str
) -> None:
    case = Case(33, 40, 1, 2, 1, "bfloat16", 576, 512)
    call = example(spec_path(name), case, 0.17, arch=arch)
    for report in call.judged_backward(call.judged_forward()).reports:
        if report.kernel is not None:
            check_gates(report.kernel)


LEARNED = [
    ("dense_bias", "sm_86", (576, 64)),
    *product(
        ("dense_bias", "relative_bias", "temperature"),
        ("sm_86", "sm_90a"),
        ((384, 384), (512, 512), (576, 512)),
    ),
]


@pytest.mark.parametrize(("name", "arch", "dims"), LEARNED)
def test_gradients_of_learned_tensors_have_plans_of_one_launch_at_the_widest_heads(
    name: str, arch: str, dims: tuple[int, int]
) -> None:
    for deterministic in (False, True):
        spec = wide(name, 1, arch, dims).spec
        kernels = plan_backward(spec, arch, deterministic=deterministic).kernels
        assert [each.kernel for each in kernels].count("delta") == 1
        assert kernels[-1].is_for_learned


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "arch", "dims"), LEARNED)
def test_gradients_of_learned_tensors_take_one_launch_at_the_widest_heads(
    name: str, arch: str, dims: tuple[int, int], deterministic: bool
) -> None:
    call = wide(name, 1, arch, dims)
    found = call.judged_backward(call.judged_forward(), deterministic=deterministic).reports
    built = [report.kernel for report in found if report.kernel is not None]
    assert [each.source.role for each in built].count("delta") == 1
    assert built[-1].plan.is_for_learned
    for each in built:
        check_gates(each)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(448, 328), (328, 448)])
def test_unequal_head_dims_of_panels_meet_the_error_rule(dims: tuple[int, int]) -> None:
    streamed(wide("causal", 1, "sm_90a", dims))


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 7, 16, 64])
@pytest.mark.parametrize("dims", [(384, 384), (512, 512), (576, 512)])
def test_gradients_of_pages_come_panel_by_panel(dims: tuple[int, int], page: int) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16")
    of = Sequences.of((9, 9, 9), (37, 0, 200), dims=dims, dtype="bfloat16")
    call = PagedGradient(Paged(spec, of, page, how={"arch": "sm_90a"}))
    dq, outputs, record = call.run()
    call.judge(dq, outputs)
    of_queries = record.launches[1].build
    assert of_queries.plan.streamed
    check_gates(of_queries)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "sliding_window", "block_sparse"])
def test_panels_are_read_as_often_as_predicted(name: str) -> None:
    call = example(spec_path(name), Case(70, 150, 1, 2, 1, "bfloat16", 384), arch="sm_90a")
    given = (call.spec, *call.qkv, *call.results, *call.gradients)
    _, profiles = profile_backward(*given, arch="sm_90a", deterministic=True, **call.numbers)
    assert [each.plan.streamed for each in profiles if each.plan.kernel in ("dkdv", "dq")] == [
        True,
        True,
    ]
    for profile in profiles:
        for tensor in profile.tensors:
            assert tensor.issued.counted == tensor.issued.predicted, (profile.kernel, tensor.name)


HANDED_OVER = "  named_wait(BARRIER_CONSUMERS, THREADS);\n"
READS = '  UNROLL for (int n = 0; n < N; ++n) {\n    asm volatile("ld'


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["dq", "dkdv"])
@pytest.mark.parametrize(
    ("bug", "old", "new"),
    [
        ("dS is read before it is written",
         HANDED_OVER + READS, READS),
        ("the dS of the former step is handed over",
         "to + n * BYTES), \"r\"(mine[n][0])", "to + n * BYTES), \"r\"(theirs[n][0])"),
        ("a panel is given back before its product has begun",
         "slots.wait(ring);\n", "slots.wait(ring);\n    if (!KEEPS) slots.give_back(ring);\n"),
        ("panels that are kept are given back", "if (KEEPS == (c == 0)) slots", "slots"),
        ("both warpgroups multiply the same panels", "min(2 * i + warpgroup, COUNT - 1)",
         "min(2 * i, COUNT - 1)"),
        ("a warpgroup takes its own dS for that of the other", "(1 - thread / WARPGROUP) * (N",
         "(thread / WARPGROUP) * (N"),
    ],
)  # fmt: skip
def test_bugs_of_panels_are_caught(bug: str, old: str, new: str, kernel: str) -> None:
    call = example(spec_path("causal"), Case(70, 200, 1, 2, 1, "bfloat16", 448), arch="sm_90a")
    call.numbers["q_offset"] = 130
    run = call.judged_forward()
    with planted(kernel, old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_backward(run, deterministic=True)


@pytest.mark.parametrize("arch", PATHS)
def test_calls_on_the_cpu_need_no_tile_of_the_given_architecture(arch: str) -> None:
    call = wide("causal", 1, arch, (512, 512))
    q, k, v = (x.float() for x in call.qkv)
    op = fg.attention(call.spec.replace(dtype=None))
    assert torch.equal(op(q, k, v, backend="tiled", arch=arch), op(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_batch_invariant_calls_in_parts_have_the_bits_of_decoding(arch: str) -> None:
    spec = fg.load(spec_path("causal")).replace(head_dim=512, head_dim_v=512, dtype="bfloat16")
    op, (q, k, v) = fg.attention(spec), Case(5, 40, 1, 2, 1, "bfloat16", 512, 512).tensors(seed=1)
    with fg.batch_invariant_mode():
        rows = op(q, k, v, backend="emulator", arch=arch, q_offset=35)
        last = op(q[:, :, 4:], k, v, backend="emulator", arch=arch, q_offset=39)
    assert torch.equal(rows[:, :, 4:], last)


@pytest.mark.parametrize("arch", PATHS)
def test_a_plan_names_the_kernel_of_a_part(arch: str) -> None:
    whole = fg.load(spec_path("causal")).replace(head_dim=576, head_dim_v=504)
    with pytest.raises(fg.PlanError, match="no tile fits") as caught:
        fg.plan(whole, arch)
    assert "head_dim_v=256, the kernel of a part of the columns of v" in caught.value.way_out
    assert fg.plan(whole.replace(head_dim_v=256), arch).block_k >= STEP


# ---- values of which warps of the same rows hold shares, and exchange P --------------------------


def exchanged(run: ForwardRun) -> None:
    """A forward pass in one launch, whose kernel computes each score once and spills nothing."""
    assert run.report.kernel is not None
    assert run.report.others == ()
    assert run.report.kernel.plan.exchanges
    check_gates(run.report.kernel)


@pytest.mark.parametrize(
    ("arch", "dims"),
    [
        ("sm_80", (384, 384)),
        *(slow("sm_80", dims) for dims in (*SHARES[1:], (576, 576), (64, 448), (128, 512))),
        *(slow(arch, dims) for arch in ("sm_86", "sm_120") for dims in SHARES),
    ],
)
def test_warps_of_a_row_exchange_p(arch: str, dims: tuple[int, int]) -> None:
    exchanged(wide("causal", 1, arch, dims).judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(384, 384), (576, 512)])
@pytest.mark.parametrize("name", [*COVERING, "sigmoid", "alibi", "power", "retention"])
def test_exchanges_of_covering_specs_meet_the_error_rule(name: str, dims: tuple[int, int]) -> None:
    turn = list(COVERING).index(name) if name in COVERING else 1
    exchanged(wide(name, turn, "sm_80", dims).judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
@pytest.mark.parametrize("name", ["causal", "softcap", "sink", "packed_causal", "power"])
def test_split_calls_that_exchange_meet_the_error_rule(name: str, arch: str) -> None:
    exchanged(wide(name, 1, arch, (512, 512)).judged_forward(split_size=64))


@pytest.mark.slow
@pytest.mark.parametrize("page", [4, 16, 64])
@pytest.mark.parametrize("name", ["causal", "window", "softcap"])
@pytest.mark.parametrize(
    ("arch", "dims"), [("sm_90a", (448, 448)), ("sm_90a", (576, 512)), ("sm_80", (512, 448))]
)
def test_paged_calls_in_one_launch_meet_the_error_rule(
    name: str, arch: str, dims: tuple[int, int], page: int
) -> None:
    spec = SERVED[name].replace(head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16")
    of = Sequences.of((2, 2), (130, 47), heads=(4, 1), dims=dims, dtype="bfloat16")
    run = Paged(spec, of, page, how={"arch": arch, "split_size": 64}).judged()
    (in_shares if arch == "sm_90a" else exchanged)(run)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("queries", [1, 40])
def test_codes_that_exchange_have_the_bits_of_elements(kv_dtype: str, queries: int) -> None:
    spec = SERVED["causal"].replace(head_dim=384, head_dim_v=384, kv_dtype=kv_dtype)
    call = Coded.of(spec, queries=queries)
    found, expected = call.run(), call.of_elements()
    assert found.plan is not None
    assert expected.plan is not None
    assert (found.plan.exchanges, found.plan.block_k) == (True, expected.plan.block_k)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch", "dims"),
    [
        *((name, "sm_90a", (512, 512)) for name in ("causal", "sink")),
        *((name, "sm_80", (384, 384)) for name in ("causal", "sink", "power")),
    ],
)
def test_folded_splits_have_the_bits_of_merged_ones(
    name: str, arch: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, found = wide(name, 1, arch, dims), []
    for run in (1, 2, ALL_SPLITS):
        monkeypatch.setattr(SpecProgram, "run_of", lambda *_, run=run: run)
        found.append(call.judged_forward(split_size=64))
        assert found[-1].report.kernel is not None
        plan = found[-1].report.kernel.plan
        assert (plan.column_warps > 1, plan.folds) == (True, run == ALL_SPLITS)
        assert plan.exchanges == (arch == "sm_80")
        spilled = found[-1].report.kernel.binary.resources.spill_store_bytes
        assert arch == "sm_80" or spilled == 0
    assert equal(*found[:2])
    assert equal(*found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("run", [2, ALL_SPLITS])
@pytest.mark.parametrize("name", [name for name in COVERING if name != "packed_causal"])
def test_runs_of_splits_that_exchange_spill_little(name: str, run: int) -> None:
    """A few values of a block, which its splits store and load once each."""
    spec = fg.load(spec_path(name)).replace(head_dim=512, head_dim_v=512, dtype="bfloat16")
    built = build(joining(split(spec), run), "sm_80")
    assert built.plan.exchanges
    check_few_spills(built)


@pytest.mark.slow
def test_unaligned_operands_and_statistics_of_kernels_that_exchange() -> None:
    spec = fg.load(spec_path("softcap")).replace(head_dim=384, head_dim_v=384, dtype="float16")
    q, k, v = Case(33, 150, 1, 2, 1, "float16", 384, 384).tensors(seed=2)
    op, request = fg.attention(spec), fg.AuxRequest(lse=True, max_scores=True)
    moved = [torch.empty(*x.shape[:-1], 385, dtype=x.dtype)[..., 1:].copy_(x) for x in (q, k, v)]
    results = [
        op(*given, backend="emulator", arch="sm_80", return_aux=request)
        for given in ((q, k, v), moved)
    ]
    (out, aux), (again, aux_again) = results
    assert torch.equal(out, again)
    assert aux.max_scores is not None
    assert aux_again.max_scores is not None
    assert torch.equal(aux.max_scores, aux_again.max_scores)
    floats = fg.attention(spec.replace(dtype="float32"))
    expected, aux_expected = floats(q.float(), k.float(), v.float(), return_aux=request)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(aux.max_scores, aux_expected.max_scores, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("arch", "dims"),
    [
        ("sm_90a", (448, 448)),
        slow("sm_90a", (576, 512)),
        ("sm_80", (384, 384)),
        slow("sm_80", (576, 512)),
    ],
)
def test_keys_and_values_are_read_once_as_predicted(arch: str, dims: tuple[int, int]) -> None:
    call = wide("causal", 1, arch, dims)
    for profile in profile_forward(call.spec, *call.qkv, arch=arch)[1]:
        for tensor in profile.tensors:
            assert tensor.issued.counted == tensor.issued.predicted, tensor.name


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(448, 448), (576, 512)])
def test_tiles_of_few_rows_that_exchange_have_the_bits_of_many(dims: tuple[int, int]) -> None:
    spec = fg.load(spec_path("causal")).replace(
        head_dim=dims[0], head_dim_v=dims[1], dtype="bfloat16"
    )
    q, k, v = Case(40, 150, 1, 2, 1, "bfloat16", *dims).tensors(seed=3)
    how = {"backend": "emulator", "arch": "sm_80", "split_size": 128}
    many = run_forward(spec, q, k, v, q_offset=110, **how)  # type: ignore[arg-type]
    few = run_forward(spec, q[:, :, -1:], k, v, q_offset=149, **how)  # type: ignore[arg-type]
    rows = []
    for run in (many, few):
        assert run.report.kernel is not None
        assert run.report.kernel.plan.exchanges
        rows.append(run.report.kernel.plan.block_q)
    assert rows == [64, 16]
    assert torch.equal(many.out[:, :, -1:], few.out)
    assert torch.equal(many.lse[:, :, -1:], few.lse)


@pytest.mark.slow
@pytest.mark.parametrize("order_seed", [1, 2])
@pytest.mark.parametrize("name", ["causal", "sigmoid"])
def test_any_order_of_warps_that_exchange_is_right(name: str, order_seed: int) -> None:
    call = wide(name, 1, "sm_80", (512, 512))
    assert equal(call.forward(), call.forward(order_seed=order_seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "old", "new", "kind"),
    [
        ("maxima are read before all warps have written them",
         "    }\n  }\n  __syncthreads();\n  UNROLL for (int i = 0; i < 2 * ROW_GROUPS; ++i) {\n"
         "    UNROLL for (int j",
         "    }\n  }\n  UNROLL for (int i = 0; i < 2 * ROW_GROUPS; ++i) {\n"
         "    UNROLL for (int j", "Race"),
        ("P is read before all warps have written it",
         "      // Panels of V have arrived. Every warp is done with those in the other buffer.\n"
         "      const unsigned next = smem_base + SMEM_K + buffer;\n"
         "      buffer ^= BUFFER_BYTES;\n      copy_wait_all();\n      __syncthreads();",
         "      const unsigned next = smem_base + SMEM_K + buffer;\n"
         "      buffer ^= BUFFER_BYTES;\n      copy_wait_all();", "Race"),
        ("panels are copied into the buffer that is read",
         "copy_v(next, 0, k_start);", "copy_v(smem_base + SMEM_K + buffer, 0, k_start);", "Race"),
        ("the maxima of the other warps are left out",
         "x[i / 2][i % 2] = j == 0 ? y : join(x[i / 2][i % 2], y);",
         "x[i / 2][i % 2] = j == warp / ROW_WARPS ? y : x[i / 2][i % 2];", ""),
        ("the maxima are those of the tile before",
         "lag = update_maxima(row_max, row_base, row_sum, factor, tile_max, exp_scale);",
         "lag = update_maxima(row_max, row_base, row_sum, factor, row_max, exp_scale);", ""),
        ("the keys of a warp are left out",
         "const int first_key = warp / ROW_WARPS * SCORE_K;", "const int first_key = 0;", ""),
        ("all warps have the first columns of a panel",
         "const int first_column = warp / ROW_WARPS * SHARE;", "const int first_column = 0;", ""),
    ],
)  # fmt: skip
def test_bugs_of_exchanges_are_caught(bug: str, old: str, new: str, kind: str) -> None:
    case = Case(33, 300, 1, 2, 1, "bfloat16", 384, 384)
    call = example(spec_path("causal"), case, arch="sm_80")
    call.numbers["q_offset"] = 267
    if kind:
        with planted("forward", old, new), caught(kind):
            call.forward()
        return
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_forward()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_that_read_a_row_once_have_plans_for_rows_of_all_lengths(dtype: str) -> None:
    for dim in range(8, 577, 8):
        spec = fg.AttentionSpec(head_dim=8, head_dim_v=dim, dtype=dtype)
        plans = (
            plan_delta(spec, "sm_80", "sm_80"),
            plan_merge(spec),
            plan_merge(spec, splits=True),
        )
        assert all(plan.head_dim_v == dim for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_rows_of_576_float32_numbers_are_merged_and_multiplied(arch: str) -> None:
    case, offsets = Case(1, 133, 1, 2, 1, "bfloat16", 64, 576), {"q_offset": 132}
    call = example(spec_path("causal"), case, offsets=offsets, arch=arch)
    assert call.judged_forward(split_size=48).report.merge is not None
    example(
        spec_path("causal"), Case(9, 20, 1, 2, 1, "float32", 16, 576), arch=arch
    ).judged_backward()
