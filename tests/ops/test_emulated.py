"""The operator on CPU tensors: the emitted kernel, executed, against the oracle.

tests/kernels runs every spec on every shape; these tests cover what the operator adds.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

import flashgen as fg
import ptx_emulator
from flashgen.calls.ops import run_forward
from flashgen.spec.language.spec import AttentionSpec
from tests.support.judged import judge_forward
from tests.support.masks import causal
from tests.support.shapes import DTYPES, HEAD_DIMS, HEADS, LAYOUTS, LENGTHS, Case, covering
from tests.support.tiers import one_in

emulated = partial(run_forward, backend="emulator")


def verify(spec, q, k, v, **options):
    """Runs the kernel and holds out and lse to the error rule; gives the run."""
    run = emulated(spec, q, k, v, **options)
    names = options.keys() & {"scalars", "scale", "q_offset", "k_offset"}
    numbers = {name: options[name] for name in names}
    judge_forward((run.out, run.lse), spec, q, k, v, **numbers)
    return run


@pytest.mark.parametrize("seed", range(10))
def test_a_covering_subset_covers(seed):
    for most in (None, 120_000):
        cases = covering(seed, most_scores=most)
        assert {(case.seq_q, case.seq_k) for case in cases} == set(LENGTHS)
        assert {case.dtype for case in cases} == set(DTYPES)
        assert {case.head_dim for case in cases} == set(HEAD_DIMS)
        assert {case.layout for case in cases} == set(LAYOUTS)
        assert {case.batch for case in cases} == {1, 3}
        assert {(case.heads_q, case.heads_kv) for case in cases} >= set(HEADS)


UNEQUAL = itertools.product([(24, 8), (8, 40), (192, 128), (40, 112)], DTYPES)


@pytest.mark.parametrize(("dims", "dtype"), one_in(12, UNEQUAL))
def test_value_head_dim_may_differ(dims, dtype):
    head_dim, head_dim_v = dims
    case = Case(37, 70, 1, 2, 1, dtype, head_dim, head_dim_v)
    spec = AttentionSpec(mask_mod=causal, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    run = verify(spec, *case.tensors())
    assert run.out.shape == (1, 2, 37, head_dim_v)


def test_aligned_operands_take_the_wide_kernel_and_others_the_narrow_one():
    spec = AttentionSpec(mask_mod=causal, head_dim=24)
    q, k, v = Case(40, 50, 1, 2, 2, head_dim=24).tensors()
    wide = verify(spec, q, k, v)
    assert wide.report.access_bytes == 16
    assert wide.plan.access_bytes == 16

    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape).copy_(k)
    narrow = verify(spec, q, shifted, v)
    assert narrow.report.access_bytes == 2
    assert "k begins 2 B past" in narrow.report.access_reason
    assert narrow.plan.access_bytes == 2
    torch.testing.assert_close(narrow.out, wide.out, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", one_in(3, DTYPES))
def test_odd_row_strides_work(dtype):
    kind = getattr(torch, dtype)
    buffer = torch.full((2, 3, 30, 25), math.nan, dtype=kind)
    q = buffer[:, :, :, :24].normal_(generator=torch.Generator().manual_seed(0))
    k = torch.empty(2, 30, 3, 27, dtype=kind).normal_()[..., 3:].transpose(1, 2)
    v = torch.empty(3, 2, 30, 24, dtype=kind).normal_().transpose(0, 1)
    run = verify(AttentionSpec(mask_mod=causal, head_dim=24, dtype=dtype), q, k, v)
    assert run.report.access_bytes == q.element_size()


def test_expanded_operands_are_read_in_place():
    spec = AttentionSpec(head_dim=16)
    q, k, v = Case(20, 33, 1, 1, 1, head_dim=16).tensors()
    run = verify(
        spec, q.expand(3, 4, -1, -1), k.expand(3, 2, -1, -1), v[:, :, :1].expand(3, 2, 33, -1)
    )
    assert run.out.is_contiguous()
    torch.testing.assert_close(run.out[2, 3], run.out[0, 0], rtol=0, atol=0)


@pytest.mark.slow
def test_elements_beyond_2_to_the_31_are_reached():
    step = 2**31 + 64
    memory = torch.empty(step + 20 * 16, dtype=torch.float16)  # touched at its two ends only
    q = memory.as_strided((2, 1, 20, 16), (step, 320, 16, 1)).normal_()
    _, k, v = Case(20, 33, 2, 1, 1, head_dim=16).tensors()
    verify(AttentionSpec(mask_mod=causal, head_dim=16), q, k, v)


def test_packed_projections_are_read_in_place():
    packed = torch.randn(2, 21, 3, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    run = verify(AttentionSpec(mask_mod=causal, head_dim=16, dtype="bfloat16"), q, k, v)
    assert run.report.access_bytes == 16


def test_the_output_has_the_memory_order_of_q():
    spec = AttentionSpec(head_dim=16)
    q, k, v = Case(20, 33, 2, 4, 2, head_dim=16).tensors()
    assert emulated(spec, q, k, v).out.is_contiguous()
    out = emulated(spec, q.transpose(1, 2).contiguous().transpose(1, 2), k, v).out
    assert out.transpose(1, 2).is_contiguous()


def test_inputs_are_not_changed():
    q, k, v = Case(20, 33, 2, 4, 2, head_dim=16).tensors()
    before = [tensor.clone() for tensor in (q, k, v)]
    emulated(AttentionSpec(mask_mod=causal, head_dim=16), q, k, v)
    for tensor, copy in zip((q, k, v), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize(
    "offsets", [(0, 5), (5, 0), (100, 90), (-20, -8), (2**28 - 40, 2**28 - 60)]
)
def test_offsets_shift_the_positions_that_mods_see(offsets):
    spec = AttentionSpec(
        mask_mod=lambda b, h, q, k: (q >= k) & (k // 4 != 3),
        score_mod=lambda score, b, h, q, k: score + (k - q) / 16,
        head_dim=16,
    )
    q, k, v = Case(40, 50, 1, 2, 2, head_dim=16).tensors()
    verify(spec, q, k, v, q_offset=offsets[0], k_offset=offsets[1])


def test_a_chunk_with_its_offset_is_that_part_of_the_whole():
    spec = AttentionSpec(mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 30), head_dim=16)
    op = partial(fg.attention(spec), backend="emulator")
    q, k, v = Case(70, 70, 1, 2, 2, head_dim=16).tensors()
    whole, whole_lse = op(q, k, v, return_lse=True)
    part, part_lse = op(
        q[:, :, 50:], k[:, :, 10:], v[:, :, 10:], q_offset=50, k_offset=10, return_lse=True
    )
    torch.testing.assert_close(part, whole[:, :, 50:], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(part_lse, whole_lse[:, :, 50:], rtol=1e-5, atol=1e-5)


def test_rows_without_keys_are_zero_with_lse_minus_infinity():
    spec = AttentionSpec(mask_mod=lambda b, h, q, k: (q >= 9) & (q < 80) & (q >= k), head_dim=16)
    q, k, v = Case(100, 90, 1, 2, 2, head_dim=16).tensors()
    run = verify(spec, q, k, v)
    empty = [*range(9), *range(80, 100)]
    assert (run.out[:, :, empty] == 0).all()
    assert (run.lse[:, :, empty] == -math.inf).all()
    assert run.lse[:, :, 9:80].isfinite().all()


def test_the_scale_of_a_call_replaces_that_of_the_spec():
    spec = AttentionSpec(head_dim=16, scale=0.1)
    q, k, v = Case(20, 33, head_dim=16).tensors()
    default, mine = verify(spec, q, k, v), verify(spec, q, k, v, scale=0.7)
    assert not torch.equal(default.out, mine.out)
    torch.testing.assert_close(mine.out, verify(spec.replace(scale=0.7), q, k, v).out)


def test_scalars_of_every_dtype_reach_the_kernel():
    window, slope = fg.Scalar("window", "int32"), fg.Scalar("slope", "float32")
    flip = fg.Scalar("flip", "bool")
    spec = AttentionSpec(
        mask_mod=lambda b, h, q, k: fg.where(flip, q < k, q - k < window),
        score_mod=lambda score, b, h, q, k: score + slope * (q - k),
        head_dim=16,
    )
    q, k, v = Case(40, 50, 2, 2, 2, head_dim=16).tensors()
    outs = [
        verify(spec, q, k, v, scalars={"window": window, "slope": slope, "flip": flip}).out
        for window, slope, flip in (
            (5, 0.1, False),
            (-7, 0.1, False),
            (5, -0.1, True),
            (5, 0.1, True),
        )
    ]
    for index, one in enumerate(outs):
        assert not any(torch.equal(one, other) for other in outs[index + 1 :])


def test_batch_heads_and_sizes_reach_the_kernel():
    spec = AttentionSpec(
        mask_mod=lambda b, h, q, k: (k + b * 3 < fg.seq_k) | (h == fg.heads - 1),
        score_mod=lambda score, b, h, q, k: (
            score * (h + 1) / fg.heads + (b - fg.batch) * k / fg.seq_q
        ),
        head_dim=16,
    )
    verify(spec, *Case(40, 50, 3, 4, 2, head_dim=16).tensors())


def test_the_operator_returns_what_its_options_ask_for():
    spec = AttentionSpec(mask_mod=causal, head_dim=16, name="without_a_call")  # of no other test
    op = fg.attention(spec)
    assert (op.report, op.backward_reports) == (None, ())
    q, k, v = Case(20, 20, head_dim=16).tensors()
    out = op(q, k, v)
    assert op.report.backend == "tiled"
    assert op.report.kernel is None
    assert isinstance(out, torch.Tensor)
    again, lse = op(q, k, v, return_lse=True, backend="emulator", arch="sm_90")
    torch.testing.assert_close(again, out, atol=1e-3, rtol=1e-3)
    assert lse.dtype == torch.float32
    assert op.report.backend == "emulator"
    assert op.report.arch == "sm_90"
    assert op.report.counters.global_read_bytes > 0
    assert op.report.kernel.source.text.startswith("//")


@pytest.mark.parametrize("given", ["argument", "environment", "environment's backend"])
def test_the_order_of_the_emulator_can_be_chosen(given, monkeypatch):
    spec = AttentionSpec(mask_mod=causal, head_dim=16)
    q, k, v = (x.requires_grad_() for x in Case(32, 32, 1, 1, 1, "float16", 16, 16).tensors())
    seeds = []
    launched = ptx_emulator.launch
    monkeypatch.setattr(
        ptx_emulator, "launch", lambda *a, **k: seeds.append(k["order_seed"]) or launched(*a, **k)
    )
    backend = {"argument": "emulator:5", "environment": "emulator"}.get(given)
    monkeypatch.setenv("FLASHGEN_EMULATOR_ORDER", "" if backend is None else "9")
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator:5")
    op = fg.attention(spec)
    op(q, k, v, backend=backend).sum().backward()
    assert len(seeds) > 1
    assert set(seeds) == {9 if given == "environment" else 5}
    assert op.report.backend == "emulator"


@pytest.mark.parametrize("backend", ["emulator:", "emulator:x", "emulator:-1", "gpu:3", "tiled:0"])
def test_a_backend_with_another_order_is_refused(backend):
    tensors = Case(32, 32, 1, 1, 1, "float16", 16, 16).tensors()
    with pytest.raises(fg.InputError, match="no such backend") as caught:
        fg.attention(AttentionSpec(mask_mod=causal, head_dim=16))(*tensors, backend=backend)
    assert "emulator:7" in caught.value.numbers


def test_a_kernel_is_built_once():
    spec = AttentionSpec(mask_mod=lambda b, h, q, k: q + 3 >= k, head_dim=16)
    q, k, v = Case(20, 20, head_dim=16).tensors()
    first = emulated(spec, q, k, v)
    second = emulated(spec.replace(), q, k, v)
    assert second.report.kernel is first.report.kernel
