"""Captured tensors as arguments of the emitted kernels: in the emulator, and packed for a GPU."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from flashgen.calls.runtime.kernel_arguments import numbers_of_captured
from tests.support.fake_driver import unpacked
from tests.support.judged import judge_forward
from tests.support.shapes import Case
from tests.support.tiers import slow

IDS = fg.Tensor("ids", ("batch", "seq_k"), "int64")
KEEP = fg.Tensor("keep", ("seq_k",), "bool")
BIAS = fg.Tensor("bias", ("heads", "distances"), "bfloat16", grad=True)
SPEC = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & KEEP[k],
    score_mod=lambda s, b, h, q, k: s + BIAS[h, fg.clamp(q - k + 3, 0, 8)],
    head_dim=16,
    name="emulated_captures",
)
OP = fg.attention(SPEC)


def captured(seq, heads=2, batch=2):
    """Each with strides that no contiguous tensor of its shape has."""
    generator = torch.Generator().manual_seed(seq)
    ids = torch.randint(0, 5, (seq, batch), generator=generator).sort(0).values.mT
    keep = (torch.rand(seq, 3, generator=generator) < 0.8)[:, 1]
    bias = torch.randn(heads, 1, generator=generator).bfloat16().expand(-1, 9)
    return {"ids": ids, "keep": keep, "bias": bias}


def operands(seq, heads=(2, 1)):
    return Case(seq, seq, 2, *heads, "float16", 16).tensors()


@pytest.mark.parametrize("seq", [slow(13), slow(70)])
def test_kernels_read_captures_of_any_strides_and_sum_their_gradients(seq):
    """With all checkers on; the second length compiles nothing."""
    qkv, given = operands(seq), captured(seq)
    run = run_forward(SPEC, *qkv, tensors=given, backend="emulator")
    judge_forward((run.out, run.lse), SPEC, *qkv, tensors=given)
    dout, dlse = run.out.flip(0), run.lse.nan_to_num(neginf=0.0) / 9
    given_back = (SPEC, *qkv, run.out, run.lse, dout, dlse)
    back = run_backward(*given_back, tensors=given, backend="emulator")
    gradients = (SPEC, *qkv, dout, dlse)
    found = (back.dq, back.dk, back.dv, *back.captured)
    assert (back.captured[0].shape, back.captured[0].dtype) == ((2, 9), torch.bfloat16)
    for name, verdict in reference.judge_gradients(found, *gradients, tensors=given).items():
        assert verdict.ok, f"{name}: {verdict}"


@pytest.mark.slow
def test_only_captures_are_learned_through_the_emulated_operator():
    qkv, given = operands(13), captured(13)
    given["bias"].requires_grad_()
    out = OP(*qkv, **given, backend="emulator")
    out.backward(out.detach())
    (wanted,) = reference.gradients(SPEC, *qkv, out.detach(), tensors=given)[3:]
    torch.testing.assert_close(given["bias"].grad.double(), wanted, atol=0.02, rtol=0.02)
    assert {report.backend for report in OP.backward_reports} == {"emulator"}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_for_gradients_that_are_not_required_are_not_run(deterministic):
    qkv, given = [t.requires_grad_() for t in operands(13)], captured(13)
    wanted = torch.autograd.grad(OP(*qkv, **given).sum(), qkv)
    out = OP(*qkv, **given, backend="emulator", deterministic=deterministic)
    found = torch.autograd.grad(out.sum(), qkv)
    sums = [p.name for r in OP.backward_reports for p in r.kernel.source.params]
    assert "dc_bias" not in sums
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


@pytest.mark.slow
def test_kernels_that_make_minmax_tables_are_reported():
    qkv, given = [t.requires_grad_() for t in operands(13)], captured(13)
    out = OP(*qkv, **given, backend="emulator")
    tables = OP.report.tables
    assert [table.kernel.source.role for table in tables] == ["minmax_table"] * 2  # of ids and keep
    assert tables[0].counters.global_write_bytes > 0
    torch.autograd.grad(out.sum(), qkv)
    roles = [report.kernel.source.role for report in OP.backward_reports]
    assert roles[:3] == ["minmax_table", "minmax_table", "delta"]
    OP(*qkv, **given)  # on the CPU path
    assert OP.report.tables == ()


def test_strides_are_of_the_tensor_and_of_a_contiguous_gradient():
    tensor = torch.zeros(3, 5, 7).permute(2, 0, 1)[:, :1]
    scalar = torch.zeros(())
    numbers = numbers_of_captured({"x": tensor, "t": scalar})
    assert [numbers[f"c_x_size_{i}"] for i in range(3)] == [7, 1, 5]
    assert [numbers[f"c_x_stride_{i}"] for i in range(3)] == [1, 0, 7]
    assert [numbers[f"dc_x_stride_{i}"] for i in range(3)] == [5, 0, 1]
    assert not any("_t_" in name for name in numbers)


@pytest.mark.slow
def test_a_launch_on_a_gpu_packs_the_addresses_and_strides_of_captures(gpu):
    qkv, given = operands(70), captured(70)
    run = run_forward(SPEC, *qkv, tensors=given, backend="gpu", arch="sm_80")
    *before, last = gpu.started
    assert last.kernel.name == run.source.name
    values = unpacked(run.source.params, last.packed)
    for tensor in ("ids", "keep", "bias"):
        assert values[f"c_{tensor}"] == given[tensor].data_ptr()
    assert values["q"] == qkv[0].data_ptr()
    assert values["o"] == run.out.data_ptr()
    assert (values["c_ids_stride_0"], values["c_ids_stride_1"]) == (1, 2)
    assert (values["c_keep_size_0"], values["c_keep_stride_0"]) == (70, 3)
    assert (values["c_bias_size_1"], values["c_bias_stride_1"]) == (9, 0)
    tables = [name for name in values if name.startswith("m_")]
    assert tables
    assert len(before) == len(tables)  # each is made by a launch before

    gpu.started.clear()
    back = run_backward(
        SPEC, *qkv, run.out, run.lse, run.out, tensors=given, backend="gpu", arch="sm_80"
    )
    # Nothing ran: what the kernels would have added to is still 0.
    assert torch.equal(back.captured[0], torch.zeros(2, 9, dtype=torch.bfloat16))
    sources = {report.kernel.source.name: report.kernel.source for report in back.reports}
    packs = [unpacked(sources[x.kernel.name].params, x.packed) for x in gpu.started]
    (sums,) = [values for values in packs if "dc_bias" in values]
    assert (sums["dc_bias_stride_0"], sums["dc_bias_stride_1"]) == (9, 1)
    assert sums["dc_bias"] not in (0, given["bias"].data_ptr())
