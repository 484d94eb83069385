"""Calls with split_size: the keys of a row in several blocks, and the merge of their results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.calls.runtime.merge import Splits
from flashgen.kernels.pipeline import build
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import split
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import (
    Call,
    check_few_spills,
    check_gates,
    equal,
    example,
    judge_forward,
    normal,
)
from tests.support.planted import nan_in_parts, planted
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

Tensor = torch.Tensor

CAUSAL = fg.load(spec_path("causal"))
SINK = fg.load(spec_path("sink"))
ARCHS = tuple(PATHS)
HOW: dict[str, Any] = {"backend": "emulator"}


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case", "split_size", "offset", "dropout_p", "arch"),
    [
        slow("causal", Case(70, 300, 2, 4, 2, layout="sequence_major"), 128, 230, 0.0, "sm_80"),
        slow("sliding_window", Case(5, 300, 1, 8, 2), 112, 295, 0.0, "sm_90a"),
        slow("sink", Case(33, 217, 1, 4, 2, "bfloat16"), 64, 180, 0.0, "sm_90a"),
        slow("sink", Case(33, 217, 1, 4, 2), 64, 180, 0.0, "sm_80"),
        slow("alibi", Case(40, 230, 2, 4, 2, "bfloat16", 40, 96, "gaps"), 48, 190, 0.0, "sm_80"),
        slow("alibi", Case(40, 230, 2, 4, 2, "float16", 40, 96), 48, 190, 0.0, "sm_90a"),
        slow("relative_bias", Case(17, 250, 1, 4, 1), 80, 200, 0.0, "sm_90a"),
        slow("document", Case(113, 239, 2, 4, 2), 32, 0, 0.0, "sm_80"),
        slow("document", Case(113, 239, 2, 4, 2), 32, 0, 0.0, "sm_90a"),
        slow("block_sparse", Case(64, 200, 1, 4, 2), 96, 128, 0.0, "sm_80"),
        slow("causal_offset", Case(20, 200, 1, 2, 2), 96, 0, 0.0, "sm_90a"),
        slow("full", Case(50, 200, 1, 2, 1, "float32"), 64, 0, 0.0, "sm_80"),
        slow("softcap", Case(64, 200, 1, 4, 2, "bfloat16", 128), 64, 128, 0.17, "sm_80"),
        slow("causal", Case(64, 200, 1, 4, 2), 48, 128, 0.17, "sm_90a"),
    ],
)
def test_results_are_those_of_the_whole_row(
    name: str, case: Case, split_size: int, offset: int, dropout_p: float, arch: str
) -> None:
    call = example(spec_path(name), case, dropout_p, {"q_offset": offset}, arch=arch)
    run = call.judged_forward(split_size=split_size)
    check_gates(run.report.kernel)
    assert run.out.dtype == call.qkv[0].dtype
    assert run.out.stride() == call.forward(backend="tiled").out.stride()


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize("name", ["causal", slow("alibi"), slow("document"), slow("softcap")])
def test_one_split_equals_unsplit(name: str, arch: str) -> None:
    call = example(spec_path(name), Case(40, 203, 1, 4, 2), offsets={"q_offset": 163}, arch=arch)
    found = call.forward(split_size=208)
    assert found.plan is not None
    assert equal(found, call.forward(tiles={"forward": found.plan.tile}))


@pytest.mark.slow
def test_one_split_equals_unsplit_in_float32() -> None:
    case = Case(40, 120, 1, 2, 2, "float32")
    call = example(spec_path("causal"), case, offsets={"q_offset": 80}, arch="sm_80")
    found = call.forward(split_size=128)
    assert found.plan is not None
    assert equal(found, call.forward(tiles={"forward": found.plan.tile}))


def test_tiled_algorithms_compute_the_same_with_and_without_splits() -> None:
    call = example(spec_path("alibi"), Case(40, 203, 1, 4, 2), backend="tiled")
    assert equal(call.forward(split_size=32), call.forward())


# ---- gradients ----------------------------------------------------------------------------------


def judged_gradients(call: Call, split_size: int | None = None) -> ForwardRun:
    """A call with split keys, and its gradients from the merged out and LSE."""
    run = call.judged_forward(split_size=split_size)
    assert run.report.split_size
    call.judged_backward(run)
    return run


@pytest.mark.parametrize(
    ("name", "dropout_p", "arch"),
    [
        ("alibi", 0.0, "sm_80"),
        slow("causal", 0.0, "sm_90a"),
        slow("causal", 0.17, "sm_90a"),
        slow("softcap", 0.17, "sm_80"),
        slow("sink", 0.0, "sm_90a"),
        slow("sink", 0.0, "sm_80"),
    ],
)
def test_gradients_are_those_of_the_whole_row(name: str, dropout_p: float, arch: str) -> None:
    offset = {"q_offset": 176}
    call = example(spec_path(name), Case(24, 200, 1, 4, 2), dropout_p, offset, arch=arch)
    judged_gradients(call, 64)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_every_spec_has_gradients_through_the_splits_of_the_plan(path: Path, arch: str) -> None:
    if not fg.load(path).packed:
        case = Case(16, 640, 1, 2, 1)
        judged_gradients(example(path, case, offsets={"q_offset": 624}, arch=arch))


def test_gradients_from_the_lse_of_one_split_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    call = example(spec_path("full"), Case(16, 128, 1, 1, 1), arch="sm_80")
    merge = Splits.merge

    def of_the_first(self: Splits, parts: Any, results: Any, *rest: Any) -> Any:
        found = merge(self, parts, results, *rest)
        results[1].copy_(parts[1][0])
        return found

    monkeypatch.setattr(Splits, "merge", of_the_first)
    with pytest.raises(AssertionError, match="dq"):
        call.judged_backward(call.forward(split_size=64))


# ---- bits ---------------------------------------------------------------------------------------


BIAS = fg.Tensor("bias", ("heads", "positions"), "float32")


def before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


SERVED = {
    "causal": CAUSAL,
    "window": fg.load(spec_path("sliding_window")),
    "alibi": fg.load(spec_path("alibi")).replace(mask_mod=before),
    "softcap": fg.load(spec_path("softcap")).replace(mask_mod=before),
    "sink": SINK,
    "bias": fg.AttentionSpec(before, lambda s, b, h, q, k: s + BIAS[h, k], sink=True, name="bias"),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        slow("causal", "sm_80"),
        slow("causal", "sm_90a"),
        *(slow(name, arch) for name in SERVED for arch in ARCHS if name != "causal"),
    ],
)
def test_decoding_gives_the_bits_of_the_row_in_a_prefill(name: str, arch: str) -> None:
    """One query over p + 1 keys, alone, is row p of many queries over more keys in a batch."""
    case, size = Case(250, 250, 2, 4, 1), 80
    spec, numbers = SERVED[name], {}
    if name == "window":
        numbers = {"scalars": {"window": 100}}
    values = {"sink": torch.linspace(-1, 2, 4), "bias": normal((4, 250), torch.float32, 1)}
    numbers["tensors"] = {tensor.name: values[tensor.name] for tensor in spec.tensors}
    q, k, v = case.tensors(seed=5)
    k[..., 0], q[..., 0] = torch.linspace(0, 40, case.seq_k), 0.7
    q[:, :, ::2, 0] = 20  # neighbours whose maxima grow in each tile
    how = {**HOW, **numbers, "arch": arch, "split_size": size}
    prefill = run_forward(spec, q, k, v, **how)
    assert prefill.plan is not None
    for p in (0, 79, 81, 249):
        row, keys = (1, slice(None), slice(p, p + 1)), (1, slice(None), slice(p + 1))
        alone = (q[row][None], k[keys][None], v[keys][None])
        some = run_forward(spec, *alone, q_offset=p, **how)
        assert torch.equal(some.out[0], prefill.out[row]), p
        assert torch.equal(some.lse[0], prefill.lse[row]), p
        assert some.plan is not None
        assert some.plan.heads_per_tile > prefill.plan.heads_per_tile
        assert some.plan.block_k == prefill.plan.block_k


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_positions_in_tensors_split_each_entry_at_the_same_global_positions(arch: str) -> None:
    case = Case(1, 150, 3, 4, 2)
    q, k, v = case.tensors(seed=2)
    firsts = torch.tensor([0, 37, 160], dtype=torch.int32)
    how = {**HOW, "arch": arch, "split_size": 64}
    found = run_forward(CAUSAL, q, k, v, q_offset=firsts + 149, k_offset=firsts, **how)
    for b, first in enumerate(firsts.tolist()):
        alone = [tensor[b : b + 1] for tensor in (q, k, v)]
        expected = run_forward(CAUSAL, *alone, q_offset=first + 149, k_offset=first, **how)
        assert torch.equal(found.out[b : b + 1], expected.out)
        assert torch.equal(found.lse[b : b + 1], expected.lse)
        judge_forward(
            (expected.out, expected.lse), CAUSAL, *alone, q_offset=first + 149, k_offset=first
        )


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_number_of_blocks_and_their_order() -> None:
    call = example(spec_path("sliding_window"), Case(70, 300, 1, 4, 2), offsets={"q_offset": 230})
    how = {"arch": "sm_90a", "split_size": 64}
    assert equal(call.forward(**how, blocks=3, order_seed=4), call.forward(**how))


# ---- splits without keys ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_parts_that_are_not_written_are_not_read(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(3, 200, 1, 4, 2)
    call = example(spec_path("sliding_window"), case, offsets={"q_offset": 150}, arch=arch)
    expected = call.forward(split_size=32)
    nan_in_parts(monkeypatch)
    found = call.judged_forward(split_size=32)
    assert equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_splits_out_of_reach_move_no_keys_and_no_output(arch: str) -> None:
    path, case = spec_path("sliding_window"), Case(1, 896, 1, 2, 2)
    call = example(path, case, offsets={"q_offset": 440}, arch=arch)
    call.numbers["scalars"] = {"window": 30}
    run = call.forward(split_size=112)  # 8 splits, of which the window reaches the fourth alone
    assert run.counters.global_write_bytes == 2 * (64 * 4 + 8 * 4)
    keys = 112 if arch == "sm_90a" else 2 * 96  # boxes; a tile, and its cut successor
    assert run.counters.global_read_bytes <= 2 * (keys * 2 + 1) * 64 * 2 + 4096


@pytest.mark.parametrize("arch", one_in(2, ARCHS))
def test_no_key_behind_the_border_of_a_split_is_read(arch: str) -> None:
    """The tile has more keys than the split, and NaN in V would reach the rows of the tile."""
    q, k, v = Case(1, 250, 1, 4, 2).tensors()
    v[:, :, 112:] = math.nan
    run = run_forward(CAUSAL, q, k, v, q_offset=111, split_size=112, arch=arch, **HOW)
    assert run.plan is not None
    assert run.plan.block_k % 112
    judge_forward((run.out, run.lse), CAUSAL, q, k[:, :, :112], v[:, :, :112], q_offset=111)


@pytest.mark.parametrize("arch", one_in(2, ARCHS))
def test_decoding_reads_each_key_once_for_all_heads_of_a_group(arch: str) -> None:
    block_k = fg.plan(split(CAUSAL), arch).block_k
    size = 416 // block_k * block_k  # a box of TMA reads on where a tile ends behind its split
    case, offsets = Case(1, 2 * size, 1, 4, 1), {"q_offset": 2 * size - 1}
    run = example(spec_path("causal"), case, offsets=offsets, arch=arch).forward(split_size=size)
    assert run.plan is not None
    assert run.plan.block_k == block_k
    keys = 2 * size * 64 * 2 * 2
    assert run.counters.global_read_bytes == pytest.approx(keys, rel=0.02)
    assert run.report.merge is not None
    launches = (run.counters, run.report.merge.counters)
    moved = sum(each.global_read_bytes + each.global_write_bytes for each in launches)
    assert moved <= 1.05 * (keys + 2 * 4 * 64 * 2)  # with q and out, once each


@pytest.mark.slow
def test_rows_without_keys_and_calls_with_one_key() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: k < q - 1, head_dim=64, name="strictly_before")
    q, k, v = Case(20, 1, 1, 1, 1).tensors()
    run = run_forward(spec, q, k, v, split_size=16, **HOW)
    assert not run.out[:, :, :2].any()
    assert (run.lse[:, :, :2] == -math.inf).all()
    judge_forward((run.out, run.lse), spec, q, k, v)
    none = run_forward(CAUSAL, q, k[:, :, :0], v[:, :, :0], split_size=16, **HOW)
    assert not none.out.any()
    assert (none.lse == -math.inf).all()


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("merge", "!(with_keys >> j & 1)", "false"),
        slow("merge", "lse == minus_infinity() ? lse : lse - top", "lse - top"),
        slow("forward", "p.o += split * p.o_stride_s;", ""),
        ("forward", "min(begin + size, call.seq_k)", "call.seq_k"),
    ],
)
def test_bugs_of_splits_are_seen(
    kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that nothing wrote, no guard for -inf, parts in one place, keys that count twice."""
    nan_in_parts(monkeypatch)
    spec = fg.AttentionSpec(lambda b, h, q, k: k + 3 < q, head_dim=64, name="some_before")
    call = Call(spec, Case(30, 40, 1, 1, 1).tensors(), arch="sm_80")
    with planted(kernel, old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged_forward(split_size=16)


# ---- the call -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sink_counts_once() -> None:
    call = example(spec_path("sink"), Case(20, 100, 1, 4, 2), offsets={"q_offset": 80})
    run = call.judged_forward(split_size=16)
    exact = reference.attention(call.spec, *call.qkv, **call.numbers)
    torch.testing.assert_close(run.lse.double(), exact[1], rtol=0, atol=1e-4)


def test_a_sink_that_counts_in_each_split_is_seen() -> None:
    once, twice = "= weight_of(sink, top);", "= p.splits * weight_of(sink, top);"
    call = example(spec_path("sink"), Case(20, 100, 1, 4, 2), offsets={"q_offset": 80})
    with planted("merge", once, twice), pytest.raises(AssertionError):
        call.judged_forward(split_size=64)


@pytest.mark.slow
def test_a_dropped_element_is_that_of_the_unsplit_call() -> None:
    """The oracle drops by position, whatever the splits, in both passes."""
    judged_gradients(example(spec_path("full"), Case(32, 96, 1, 2, 1), 0.3), 32)


def test_the_variant_has_a_name_of_its_own_and_other_kernels_stay() -> None:
    kernel = fg.emit(split(CAUSAL), "sm_90a").forward
    assert kernel.name == "causal_split_forward_fp16_d64"
    assert "flashgen.spec.language.signature.split(flashgen.load(" in kernel.text
    assert "split keys: one tile for every call" in str(kernel.plan)
    assert "split" not in fg.emit(CAUSAL, "sm_90a").forward.text


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_kernels_of_split_keys_spill_little(path: Path, arch: str, head_dim: int) -> None:
    """Their tile is that of all calls, also where the compiler spills in one of them."""
    spec = fg.load(path).replace(head_dim=head_dim, head_dim_v=head_dim)
    if not spec.packed:
        check_few_spills(build(split(spec), arch))
