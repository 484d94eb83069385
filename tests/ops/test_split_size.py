"""The argument split_size: what it accepts, torch's machinery, and the missing backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen as fg
from flashgen import InputError, SpecError
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime.arguments.slices import scalars_of
from flashgen.spec.language.signature import split
from tests.support.examples import spec_path
from tests.support.opchecks import passes_opcheck
from tests.support.shapes import Case

CAUSAL = fg.load(spec_path("causal"))
ATTEND = fg.attention(CAUSAL)
EMULATED: dict[str, Any] = {"backend": "emulator", "arch": "sm_80"}


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return Case(16, 80, 1, 2, 1).tensors(seed=3)


@pytest.mark.parametrize("size", [17, -16, 8, 2**29, True, 1.5, "16", torch.tensor(16)])
def test_other_values_than_multiples_of_16_are_refused(size: Any) -> None:
    with pytest.raises(InputError, match="split_size is not a number of keys") as error:
        ATTEND(*operands(), split_size=size)
    assert error.value.where == "argument split_size"
    assert "a multiple of 16 from 16 to 268,435,456" in error.value.numbers
    assert error.value.way_out == "split_size=512, or None for one part with all keys"


def test_the_registered_operator_refuses_them_too() -> None:
    q, k, v = operands()
    numbers = scalars_of(0, None, q, k)
    with pytest.raises(InputError, match="split_size is not a number of keys"):
        operator_of(split(CAUSAL)).overload(q, k, v, **numbers, split_size=24)


def test_packed_sequences_are_refused() -> None:
    spec = fg.load(spec_path("variable_length"))
    ends = torch.tensor([0, 16], dtype=torch.int32)
    with pytest.raises(SpecError, match="packed sequences cannot have split keys"):
        fg.attention(spec)(*operands(), cu_seqlens_q=ends, cu_seqlens_k=ends, split_size=32)


def test_a_backward_pass_is_refused() -> None:
    q, k, v = operands()
    out = ATTEND(q.requires_grad_(), k, v, split_size=32)
    with pytest.raises(SpecError, match="a call with split_size has no backward pass") as error:
        out.sum().backward()
    assert "torch.no_grad()" in error.value.way_out


def test_none_and_0_are_the_ordinary_call() -> None:
    ATTEND(*operands(), split_size=0, **EMULATED)
    ordinary = ATTEND.report
    assert ordinary is not None
    assert ordinary.kernel is not None
    assert ordinary.kernel.source.name.startswith("causal_forward_fp16_d64")
    ATTEND(*operands(), split_size=32, **EMULATED)
    assert ATTEND.report is not None
    assert ATTEND.report.kernel is not None
    assert ATTEND.report.kernel.source.name.startswith("causal_split_forward_fp16_d64")


def test_compile_fake_and_vmap_accept_split_keys() -> None:
    q, k, v = operands()
    expected = ATTEND(q, k, v, q_offset=64, split_size=32, **EMULATED)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ATTEND(q, k, v, q_offset=64, split_size=32, **EMULATED)

    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), expected)
    assert torch.equal(torch.vmap(call, (0, None, None))(q[None], k, v)[0], expected)
    with FakeTensorMode():
        out, lse = ATTEND(
            *(torch.empty(1, 2, 16, 64).half() for _ in range(3)), split_size=32, return_lse=True
        )
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


@pytest.mark.slow
def test_the_operator_passes_opcheck() -> None:
    q, k, v = operands()
    numbers = scalars_of(0, None, q, k)
    assert passes_opcheck(operator_of(split(CAUSAL)).overload, (q, k, v), **numbers, split_size=32)


@pytest.mark.slow
def test_autocast_and_parts_of_a_whole_work_with_split_keys() -> None:
    q, k, v = operands()
    expected = ATTEND(q, k, v, q_offset=64, split_size=32, **EMULATED)
    with torch.autocast("cpu", torch.float16):
        found = ATTEND(q.float(), k.float(), v.float(), q_offset=64, split_size=32, **EMULATED)
    assert torch.equal(found, expected)
    heads = ATTEND(
        q[:, 1:], k, v, q_offset=64, h_offset=1, whole={"heads": 2}, split_size=32, **EMULATED
    )
    assert torch.equal(heads, expected[:, 1:])


@pytest.mark.slow
def test_one_compiled_graph_serves_several_sizes_and_checks_them() -> None:
    q, k, v = operands()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
        return ATTEND(q, k, v, q_offset=64, split_size=size, **EMULATED)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (32, 48, 80):
        assert torch.equal(compiled(q, k, v, size), call(q, k, v, size))
    with pytest.raises(InputError, match="split_size is not a number of keys"):
        compiled(q, k, v, 40)
