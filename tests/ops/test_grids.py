"""Calls with more heads and batch entries than one grid has blocks along y and z."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime import bind_arguments
from flashgen.calls.runtime.calls import run_backward, run_forward
from tests.support.shapes import Case
from tests.support.tiers import slow

SPEC = fg.AttentionSpec(
    lambda b, h, q, k: k <= q + b,
    lambda score, b, h, q, k: score / (h + 1),
    head_dim=16,
    sink=True,
    name="more_than_a_grid",
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_call_of_several_launches_has_the_results_of_one(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = Case(40, 40, 5, 6, 3, "float16", 16).tensors()
    tensors = {"sink": torch.linspace(-1, 1, 6)}
    call = {"tensors": tensors, "arch": arch, "backend": "emulator"}

    def results() -> list[torch.Tensor]:
        forward = run_forward(SPEC, q, k, v, **call)
        back = run_backward(SPEC, q, k, v, forward.out, forward.lse, q, deterministic=True, **call)
        return [forward.out, forward.lse, back.dq, back.dk, back.dv, *back.captured]

    one = results()
    monkeypatch.setattr(bind_arguments, "MOST_ALONG_Y_AND_Z", 2)
    for several, expected in zip(results(), one, strict=True):
        assert torch.equal(several, expected)


@pytest.mark.slow
def test_a_batch_of_more_than_65535_entries_has_results_in_each_entry() -> None:
    spec = fg.AttentionSpec(head_dim=8, name="large_batch")
    q, k, v = Case(1, 2, 65_537, 1, 1, "float16", 8).tensors()
    run = run_forward(spec, q, k, v, arch="sm_80", backend="emulator", check_memory=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
    assert (run.out.float() - expected).abs().max() < 4e-3
