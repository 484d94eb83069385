"""Results over some of a row's keys: out is float32, although q, k and v have 16 bits."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen as fg
from flashgen import SpecError, reference
from flashgen.calls.ops import run_backward, run_forward
from flashgen.calls.ops.registration import operator_of
from flashgen.kernels.planner import forward_traffic, plan, plan_backward
from flashgen.spec.language.signature import partial
from tests.support.examples import spec_path
from tests.support.judged import Call, check_gates, dropping, sized
from tests.support.shapes import Case
from tests.support.tiers import slow

CAUSAL = fg.load(spec_path("causal"))
SINK = fg.load(spec_path("sink"))


@pytest.mark.parametrize(
    ("spec", "case", "dropout_p", "arch"),
    [
        (CAUSAL, Case(113, 203, 1, 4, 2), 0.0, "sm_80"),
        slow(CAUSAL, Case(113, 203, 1, 4, 4), 0.0, "sm_90a"),
        slow(CAUSAL, Case(113, 203, 1, 4, 2, "bfloat16", 40), 0.0, "sm_90a"),
        (CAUSAL, Case(257, 257, layout="sequence_major"), 0.0, "tiled"),
        (CAUSAL, Case(17, 5), 0.0, "tiled"),
        slow(CAUSAL, Case(113, 203, 1, 4, 2, "bfloat16", 24, 256, "gaps"), 0.0, "sm_80"),
        slow(CAUSAL, Case(113, 203, 1, 4, 1, "float16", 256, 8, "gaps"), 0.17, "sm_90a"),
        slow(SINK, Case(64, 128, 3, 4, 2, "float16"), 0.17, "sm_80"),
        slow(SINK, Case(64, 128, 3, 4, 2, "bfloat16", 128), 0.0, "sm_90a"),
    ],
)
def test_out_is_returned_as_the_ordinary_call_has_it_before_rounding(
    spec: fg.AttentionSpec, case: Case, dropout_p: float, arch: str
) -> None:
    spec = sized(spec, case, dropout_p)
    how = {"backend": "tiled"} if arch == "tiled" else {"arch": arch}
    numbers = dropping(dropout_p)
    if spec.sink is not None:
        numbers["tensors"] = {"sink": torch.linspace(-1, 2, case.heads_q)}
    call = Call(spec, case.tensors(), numbers, **how)
    rounded, found = call.forward(), Call(partial(spec), case.tensors(), numbers, **how).forward()
    assert found.out.dtype == found.lse.dtype == torch.float32
    assert torch.equal(found.out.to(rounded.out.dtype), rounded.out)
    assert torch.equal(found.lse, rounded.lse)
    assert found.out.stride() == rounded.out.stride()
    call.check(found)
    exact, _ = reference.attention(spec, *call.qkv, **call.numbers)
    error, error_rounded = (float((x.out - exact).square().mean()) for x in (found, rounded))
    assert error < 0.6 * error_rounded
    if found.report.kernel is not None:
        check_gates(found.report.kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "arch"),
    [(Case(112, 203, 1, 4, 2), "sm_80"), (Case(112, 203, 1, 4, 2, "bfloat16", 40), "sm_90a")],
)
def test_out_is_written_in_whole_sectors_and_its_bytes_are_predicted(case: Case, arch: str) -> None:
    run = Call(partial(sized(CAUSAL, case)), case.tensors(), arch=arch).forward()
    assert run.plan is not None
    traffic = forward_traffic(run.plan, 1, 4, 2, 112, 203)
    assert traffic.o == 4 * 4 * 112 * case.head_dim
    assert run.counters.global_write_bytes == traffic.o + traffic.lse
    assert run.counters.global_write_sectors == (traffic.o + traffic.lse) // 32


def test_a_variant_has_its_own_name_and_the_tile_of_its_spec() -> None:
    spec = partial(CAUSAL)
    kernel = fg.emit(spec).forward
    assert kernel.name == "causal_partial_forward_fp16_d64"
    assert "O in float32: a partial result" in kernel.text
    assert "flashgen.emit(flashgen.spec.language.signature.partial(flashgen.load(" in kernel.text
    assert spec.digest != CAUSAL.digest
    assert kernel.plan.tile == plan(CAUSAL).tile
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.replace(head_dim=32).out_dtype == "float32"


def test_a_float32_spec_is_its_own_variant() -> None:
    spec = CAUSAL.replace(dtype="float32")
    assert partial(spec) is spec
    assert partial(partial(CAUSAL)) is partial(CAUSAL)


def test_a_fake_result_has_the_dtype_of_the_real_one() -> None:
    operator = operator_of(partial(CAUSAL))
    with FakeTensorMode():
        out, lse = operator.overload(*(torch.empty(1, 2, 32, 64).half() for _ in range(3)))
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    out, _ = operator.overload(*Case(32, 32, 1, 2, 2).tensors())
    assert out.dtype == torch.float32


def test_an_empty_result_has_it_too() -> None:
    out = run_forward(partial(CAUSAL), *Case(3, 0).tensors()).out
    assert out.dtype == torch.float32
    assert not out.any()


def test_a_backward_pass_is_refused() -> None:
    spec, (q, k, v) = partial(CAUSAL), Case(16, 16).tensors()
    out, lse = operator_of(spec).overload(q.requires_grad_(), k, v)
    for attempt in (
        lambda: plan_backward(spec),
        lambda: fg.emit(spec).backward,
        lambda: run_backward(spec, q, k, v, out, lse, out),
        lambda: out.sum().backward(),
    ):
        with pytest.raises(SpecError, match="a partial result has no backward pass") as error:
            attempt()
        assert error.value.numbers == "out is float32, q, k and v are float16"
        assert "merged out and LSE" in error.value.way_out
