"""The code path of a call on a GPU: how it is decided, and for how long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime import backends
from flashgen.calls.trust import Decision


def operands() -> list[torch.Tensor]:
    return [torch.zeros(1, 1, 16, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]


def deciding(monkeypatch: pytest.MonkeyPatch, *decisions: Decision) -> list[Decision]:
    """`decide` gives one of these after another; those that are left are returned."""
    left = list(decisions)
    monkeypatch.setattr(backends, "decide", lambda index, capturing: left.pop(0))
    return left


def test_a_settled_decision_is_made_once_and_is_in_the_report(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = fg.attention(fg.AttentionSpec(head_dim=16, name="settled"))
    left = deciding(monkeypatch, *(Decision("sm_80", "it passed") for _ in range(2)))
    for _ in range(3):
        out = op(*operands(), backend="gpu")
        out.sum().backward()
    assert left == []  # one for the forward pass, one for the backward pass
    assert op.report is not None
    assert (op.report.arch, op.report.arch_reason) == ("sm_80", "it passed")
    assert {report.arch_reason for report in op.backward_reports} == {"it passed"}


def test_a_decision_in_a_capture_holds_for_its_call_only(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = fg.attention(fg.AttentionSpec(head_dim=16, name="provisional"))
    passing = Decision("sm_80", "a CUDA graph is being captured", is_final=False)
    left = deciding(monkeypatch, passing, passing, Decision("sm_80", "it passed"))
    given = [tensor.detach() for tensor in operands()]
    reasons = []
    for _ in range(4):
        op(*given, backend="gpu")
        assert op.report is not None
        reasons.append(op.report.arch_reason)
    assert reasons == [passing.why, passing.why, "it passed", "it passed"]
    assert left == []


@pytest.mark.parametrize(
    ("given", "variable", "why"),
    [
        ("sm_80", None, "argument arch"),
        (None, "sm_80", "FLASHGEN_ARCH"),
        (None, None, "the default of the backend 'tiled'"),
    ],
)
def test_a_chosen_architecture_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, why: str
) -> None:
    deciding(monkeypatch)  # a call of it fails
    if variable is not None:
        monkeypatch.setenv("FLASHGEN_ARCH", variable)
    op = fg.attention(fg.AttentionSpec(head_dim=16, name="chosen"))
    op(*operands(), arch=given)
    assert op.report is not None
    assert op.report.arch_reason == why
