"""The emitted backward kernels, executed through the operator: what the operator adds to them.

tests/kernels checks the kernels' results for every spec and shape.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from tests.support.shapes import Case
from tests.support.tiers import slow

SLOPE = fg.Scalar("slope", "float32")
SPEC = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: q >= k,
    score_mod=lambda score, b, h, q, k: score + SLOPE * (k - q) / (h + 1),
    head_dim=16,
    name="slanted",
    dropout=True,
)
OPTIONS = {"scalars": {"slope": 0.25}, "dropout_p": 0.25, "rng": torch.tensor([3, 9])}
forward = partial(run_forward, SPEC, backend="emulator", **OPTIONS)
backward = partial(run_backward, SPEC, backend="emulator", **OPTIONS)


def operands(seq_q=37, seq_k=50, batch=2, seed=0):
    return Case(seq_q, seq_k, batch, 4, 2, "float16", 16).tensors(seed)


def gradient_of(out, seed=5):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def verify(back, operands, dout, dlse=None):
    """Holds the gradients to the error rule."""
    found = (back.dq, back.dk, back.dv)
    verdicts = reference.judge_gradients(found, SPEC, *operands, dout, dlse, **OPTIONS)
    assert all(verdicts.values()), verdicts
    assert {gradient.dtype for gradient in found} == {operands[0].dtype}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seq_q", [16, 37, 130])
def test_kernels_run_one_after_another(seq_q, deterministic):
    tensors = operands(seq_q)
    run = forward(*tensors)
    dout, dlse = gradient_of(run.out), gradient_of(run.lse)
    back = backward(*tensors, run.out, run.lse, dout, dlse, deterministic=deterministic)
    verify(back, tensors, dout, dlse)
    roles = [report.kernel.source.role for report in back.reports]
    assert roles[0] == "delta"
    assert back.deterministic == deterministic
    if deterministic:
        assert roles == ["delta", "dkdv", "dq"]
    assert all(report.counters.global_write_bytes > 0 for report in back.reports)
    assert {report.access_bytes for report in back.reports} == {16}


def test_the_gradient_of_lse_may_be_left_out():
    tensors = operands()
    run = forward(*tensors)
    dout = gradient_of(run.out)
    verify(backward(*tensors, run.out, run.lse, dout), tensors, dout)


def shifted(tensor):
    """The same numbers two bytes past a multiple of 16."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def spread(tensor):
    """The same numbers with rows 34 bytes apart."""
    return tensor.new_empty(*tensor.shape[:3], 17)[..., :16].copy_(tensor)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (shifted, "begins 2 B past a multiple of 16 B"),
        (spread, "row stride of {} is 34 B, not a multiple of 16 B"),
    ],
)
@pytest.mark.parametrize("place", [0, *map(slow, (1, 2, 3)), 4])
def test_operands_that_kernels_cannot_read_are_copied_and_reported(place, change, why):
    tensors = operands(32, 32, 1)
    run = forward(*tensors)
    given = [*tensors, run.out, gradient_of(run.out)]
    plain = backward(*given[:4], run.lse, given[4])
    assert plain.copies == ()
    given[place] = change(given[place])
    back = backward(*given[:4], run.lse, given[4])
    name = ("q", "k", "v", "out", "dout")[place]
    assert len(back.copies) == 1
    assert back.copies[0].startswith(f"{name} was copied: ")
    assert back.copies[0].endswith(why.format(name))
    for mine, other in zip(
        (back.dq, back.dk, back.dv), (plain.dq, plain.dk, plain.dv), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)


def test_a_gradient_without_strides_is_copied():
    tensors = [tensor.requires_grad_() for tensor in operands(20, 20, 1)]
    op = fg.attention(SPEC)
    rest = {"slope": 0.25, "dropout_p": 0.25, "rng": OPTIONS["rng"]}
    emulated = op(*tensors, **rest, backend="emulator")
    emulated.sum().backward()
    assert [r.backend for r in op.backward_reports] == ["emulator"] * len(op.backward_reports)
    tiled = torch.autograd.grad(op(*tensors, **rest).sum(), tensors)
    for tensor, other in zip(tensors, tiled, strict=True):
        torch.testing.assert_close(tensor.grad, other, atol=4e-3, rtol=4e-3)
    run = forward(*(t.detach() for t in tensors))
    expanded = torch.ones((), dtype=torch.float16).expand(run.out.shape)
    back = backward(*(t.detach() for t in tensors), run.out, run.lse, expanded)
    assert back.copies == ("dout was copied: the last dimension of dout is not contiguous",)


def test_strided_operands_and_lse_gradients_are_read_right():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in operands())
    k = k[:1].expand(2, -1, -1, -1)
    run = forward(q, k, v)
    dlse = gradient_of(run.lse.transpose(0, 2)).transpose(0, 2)
    dout = gradient_of(run.out.transpose(1, 2)).transpose(1, 2)
    back = backward(q, k, v, run.out, run.lse, dout, dlse)
    verify(back, (q, k, v), dout, dlse)
    assert back.copies == ()
    assert back.dq.transpose(1, 2).is_contiguous()


def test_a_state_with_gaps_is_read_right():
    tensors = operands(20, 20, 1)
    state = torch.tensor([3, 0, 9, 0])[::2]
    options = {**OPTIONS, "rng": state}
    one = run_forward(SPEC, *tensors, backend="emulator", **options)
    two = forward(*tensors)
    assert torch.equal(one.out, two.out)
    dout = gradient_of(one.out)
    a = run_backward(SPEC, *tensors, one.out, one.lse, dout, backend="emulator", **options)
    b = backward(*tensors, one.out, one.lse, dout)
    assert torch.equal(a.dv, b.dv)


@pytest.mark.slow
def test_an_order_of_blocks_changes_nothing_in_deterministic_mode():
    tensors = operands(70, 70, 1)
    run = forward(*tensors)
    dout = gradient_of(run.out)
    runs = [
        backward(*tensors, run.out, run.lse, dout, deterministic=True, order_seed=seed)
        for seed in (None, 1, 2)
    ]
    for other in runs[1:]:
        for name in ("dq", "dk", "dv"):
            assert torch.equal(getattr(other, name), getattr(runs[0], name))
    again = forward(*tensors, order_seed=4)
    assert torch.equal(again.out, run.out)


def test_a_call_that_drops_nothing_runs_a_kernel_without_dropout():
    tensors = operands(20, 20, 1)
    scalars = {"slope": 0.25}
    run = run_forward(SPEC, *tensors, backend="emulator", scalars=scalars)
    plain = run_forward(SPEC.replace(dropout=False), *tensors, backend="emulator", scalars=scalars)
    assert run.report.kernel is plain.report.kernel
    assert run.rng is None
    assert "rng" not in [param.name for param in run.source.params]
    assert torch.equal(run.out, plain.out)


def test_kernels_are_built_once():
    tensors = operands(20, 20, 1)
    run = forward(*tensors)
    dout = gradient_of(run.out)
    first, second = (backward(*tensors, run.out, run.lse, dout) for _ in range(2))
    for one, other in zip(first.reports, second.reports, strict=True):
        assert one.kernel is other.kernel
    assert second.reports[0].build_seconds < 0.01


def test_the_environment_is_read_at_every_call(monkeypatch):
    op = fg.attention(SPEC)
    numbers = {"slope": 0.25, "dropout_p": 0.25, "rng": OPTIONS["rng"]}
    tensors = [tensor.requires_grad_() for tensor in operands(20, 20, 1)]
    found = []
    for name in (None, "emulator", "tiled", "emulator"):
        if name is None:
            monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)
        else:
            monkeypatch.setenv("FLASHGEN_BACKEND", name)
        op(*tensors, **numbers).sum().backward()
        found.append((op.report.backend, op.backward_reports[0].backend))
    assert found == [(b, b) for b in ("tiled", "emulator", "tiled", "emulator")]
    monkeypatch.setenv("FLASHGEN_ARCH", "sm_90")
    monkeypatch.setenv("FLASHGEN_BACKEND", "tiled")
    op(*tensors, **numbers)
    assert op.report.arch == "sm_90"
