"""`flashgen.batch_invariant_mode`: which calls have it, and what follows from it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import flashgen as fg
from flashgen import InputError
from flashgen.calls.ops.registration import operator_of
from flashgen.kernels.planner import invariant_splits
from flashgen.shared import config
from tests.support.examples import spec_path
from tests.support.shapes import Case

CAUSAL = fg.load(spec_path("causal"))
ATTEND = fg.attention(CAUSAL)
EMULATED: dict[str, Any] = {"backend": "emulator", "arch": "sm_80"}
SPLIT = invariant_splits(CAUSAL.replace(dtype="float16"), "sm_80").size


def operands() -> list[torch.Tensor]:
    return list(Case(20, 40, 1, 2, 1).tensors(seed=3))


def split_of(**options: Any) -> int:
    ATTEND(*operands(), **EMULATED, **options)
    assert ATTEND.report is not None
    return ATTEND.report.split_size


def test_the_call_the_context_the_program_and_the_environment_decide_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert split_of() == 0
    monkeypatch.setenv("FLASHGEN_BATCH_INVARIANT", "1")
    assert split_of() == SPLIT
    monkeypatch.setattr(config, "_batch_invariant_of_program", None)
    fg.set_batch_invariant_mode(False)
    assert split_of() == 0
    with fg.batch_invariant_mode():
        assert split_of() == SPLIT
        with fg.batch_invariant_mode(False):
            assert split_of() == 0
        for given in ({}, {"return_aux": fg.AuxRequest(lse=True)}):
            assert split_of(batch_invariant=False, **given) == 0
        assert split_of() == SPLIT
    for given in ({}, {"return_aux": fg.AuxRequest(lse=True)}):
        assert split_of(batch_invariant=True, **given) == SPLIT


def test_other_threads_have_the_mode_of_the_program_and_not_of_the_context() -> None:
    found: list[bool] = []
    with fg.batch_invariant_mode():
        thread = threading.Thread(target=lambda: found.append(config.batch_invariant()))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize("value", ["yes", "2"])
def test_other_values_of_the_variable_are_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_BATCH_INVARIANT", value)
    with pytest.raises(fg.FlashgenError, match="FLASHGEN_BATCH_INVARIANT has a value"):
        ATTEND(*operands())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"batch_invariant": 1}, "neither True, False nor None"),
        ({"batch_invariant": True, "split_size": 64}, "have the same splits"),
        ({"batch_invariant": True, "deterministic": False}, "have the same splits"),
    ],
)
def test_options_that_contradict_it_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        ATTEND(*operands(), **options)


def test_operands_that_need_another_kernel_are_refused() -> None:
    q, k, v = operands()
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view_as(k).copy_(k)
    with pytest.raises(InputError, match="the arithmetic of another kernel") as error:
        ATTEND(q, shifted, v, batch_invariant=True, **EMULATED)
    assert "k begins 2 B past a multiple of 16 B" in error.value.numbers
    expanded = k[:, :, :1].expand_as(k)
    with pytest.raises(InputError, match="the arithmetic of another kernel"):
        ATTEND(q, expanded, v, batch_invariant=True, backend="emulator", arch="sm_90a")


def test_gradients_are_deterministic_wherever_backward_is_called() -> None:
    q, k, v = operands()
    q.requires_grad_()
    with fg.batch_invariant_mode():
        out = ATTEND(q, k, v, **EMULATED)
    out.backward(torch.ones_like(out))
    kernels = {report.kernel.facts.kernel for report in ATTEND.backward_reports}
    assert kernels == {"delta", "dkdv", "dq"}


def test_a_compiled_function_called_in_the_other_mode_is_compiled_anew() -> None:
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return ATTEND(*qkv, **EMULATED)

    for mode in (False, True, False, True):
        with fg.batch_invariant_mode(mode):
            attend(*operands())
        done = operator_of(CAUSAL).done
        assert done is not None
        assert done[0].call.scalars.get("split_size", 0) == (SPLIT if mode else 0)
    assert counter.frame_count == 2


def test_gradients_of_a_compiled_function_have_the_mode_of_its_forward_call() -> None:
    attend = torch.compile(lambda *qkv: ATTEND(*qkv, **EMULATED), backend="aot_eager")
    found = []
    for call in (attend, lambda *qkv: ATTEND(*qkv, **EMULATED)):
        q, k, v = (x.requires_grad_() for x in operands())
        with fg.batch_invariant_mode():
            out = call(q, k, v)
        out.float().square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
