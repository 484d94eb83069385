"""The argument split_size: what it accepts, torch, and which calls split their keys without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen as fg
from flashgen import InputError
from flashgen.calls.ops import Report
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime.programs import program_of
from flashgen.kernels.planner import plan_splits
from flashgen.shared.call import CheckedCall
from tests.support.examples import spec_path
from tests.support.opchecks import passes_opcheck
from tests.support.shapes import Case
from tests.support.tiers import slow

CAUSAL = fg.load(spec_path("causal"))
ATTEND = fg.attention(CAUSAL)
EMULATED: dict[str, Any] = {"backend": "emulator", "arch": "sm_80"}


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return Case(16, 80, 1, 2, 1).tensors(seed=3)


@pytest.mark.parametrize("size", [17, -16, -1, 8, 2**29, True, 1.5, "16", torch.tensor(16)])
def test_other_values_than_multiples_of_16_are_refused(size: Any) -> None:
    with pytest.raises(InputError, match="split_size is not a number of keys") as error:
        ATTEND(*operands(), split_size=size)
    assert error.value.where == "argument split_size"
    assert "a multiple of 16 from 16 to 268,435,456" in error.value.numbers
    assert error.value.way_out == (
        "split_size=512, or 0 for one thread block with all keys of a row"
    )


def test_the_registered_operator_refuses_them_too() -> None:
    with pytest.raises(InputError, match="split_size is not a number of keys"):
        operator_of(CAUSAL).overload(*operands(), split_size=24)


# ---- which calls split their keys ---------------------------------------------------------------


def reported(*given: torch.Tensor, **options: Any) -> Report:
    """The report of a call: one query at the last position, unless ``options`` say otherwise."""
    options = {"q_offset": given[1].shape[2] - given[0].shape[2], **EMULATED, **options}
    ATTEND(*given, **options)
    assert ATTEND.report is not None
    return ATTEND.report


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_calls_with_few_query_rows_split_their_keys_by_the_plan(arch: str) -> None:
    chosen = plan_splits(CAUSAL.replace(dtype="float16"), arch, 2)
    assert chosen == plan_splits(CAUSAL.replace(dtype="float16", paged=True), arch, 2)
    given = Case(1, chosen.size + 1, 3, 4, 2).tensors(seed=3)
    report = reported(*given, arch=arch)
    assert report.split_size == chosen.size
    assert report.kernel.source.name.startswith("causal_split_forward_fp16_d64")
    assert report.merge is not None


def test_calls_with_more_rows_few_keys_or_a_given_size_do_not_split_by_the_plan() -> None:
    chosen = plan_splits(CAUSAL.replace(dtype="float16"), "sm_80", 1)
    rows, keys = min(chosen.few_rows, chosen.size) // 2, chosen.size + 1
    program = program_of(CAUSAL.replace(dtype="float16"))
    target = program.target("emulator", "sm_80", torch.device("cpu"))

    def planned(seq_q: int, seq_k: int, batch: int = 1) -> int:
        call = CheckedCall(batch, 2, 1, seq_q, seq_k, 64, 64, seq_k - seq_q, 0, 1.0, {})
        return program.planned_split(target, call)

    assert planned(rows, keys) == planned(rows, keys, batch=500) == chosen.size
    assert planned(rows + 1, keys) == planned(1, chosen.size) == 0
    given = Case(1, keys, 1, 2, 1).tensors(seed=3)
    whole = reported(*given, split_size=0)
    assert whole.split_size == 0
    assert whole.kernel.source.name.startswith("causal_forward_fp16_d64")
    assert reported(*given, split_size=64).split_size == 64


def test_the_batch_changes_no_bit_of_a_call_with_few_query_rows() -> None:
    q, k, v = Case(2, 500, 3, 2, 1).tensors(seed=3)
    out, lse = ATTEND(q, k, v, q_offset=498, return_lse=True, **EMULATED)
    assert ATTEND.report is not None
    assert ATTEND.report.split_size
    for b in range(3):
        alone = (tensor[b : b + 1] for tensor in (q, k, v))
        found = ATTEND(*alone, q_offset=498, return_lse=True, **EMULATED)
        assert torch.equal(found[0][0], out[b])
        assert torch.equal(found[1][0], lse[b])


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_gradients_and_torch_compile_change_no_bit_and_no_split(arch: str) -> None:
    q, k, v = Case(3, 600, 1, 4, 2).tensors(seed=3)
    how = {**EMULATED, "arch": arch, "q_offset": 597}
    expected = ATTEND(q, k, v, **how)
    size = ATTEND.report.split_size
    assert size
    learned = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    found = ATTEND(*learned, **how)
    assert ATTEND.report.split_size == size
    assert torch.equal(found, expected)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ATTEND(q, k, v, **how)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), expected)
    again = compiled(*learned)
    assert torch.equal(again, expected)
    both = [torch.autograd.grad(out.sum(), learned) for out in (found, again)]
    assert all(map(torch.equal, *both))


@pytest.mark.slow
def test_parts_of_a_whole_split_by_the_plan_too() -> None:
    q, k, v = Case(1, 500, 1, 4, 2).tensors(seed=3)
    how = {**EMULATED, "q_offset": 499}
    expected = ATTEND(q, k, v, split_size=320, **how)
    found = ATTEND(q[:, 2:], k[:, 1:], v[:, 1:], h_offset=2, whole={"heads": 4}, **how)
    assert ATTEND.report.split_size
    torch.testing.assert_close(found, expected[:, 2:], rtol=0, atol=2e-3)


# ---- torch's machinery --------------------------------------------------------------------------


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
    assert passes_opcheck(operator_of(CAUSAL).overload, operands(), split_size=32)


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
