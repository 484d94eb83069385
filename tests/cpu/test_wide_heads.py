"""Heads of up to 576 dimensions on the CPU path, where no tile has to fit."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen.calls.cpu.problem import tiles_of
from flashgen.shared.arch import DEFAULT_ARCH
from tests.support.examples import spec_path
from tests.support.judged import example
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_specs import CAUSAL
from tests.support.shapes import Case

CASES = (
    ("causal", "bfloat16", (512, 512), 0.0),
    ("softcap", "float16", (576, 512), 0.0),
    ("relative_bias", "float32", (512, 512), 0.17),
    ("sink", "bfloat16", (576, 576), 0.0),
    ("packed_causal", "float32", (384, 512), 0.0),
    ("block_sparse", "float16", (512, 512), 0.0),
)


@pytest.mark.parametrize(("name", "dtype", "dims", "dropout_p"), CASES)
def test_both_passes_and_tangents_meet_the_error_rule(
    name: str, dtype: str, dims: tuple[int, int], dropout_p: float
) -> None:
    case = Case(70, 90, 1, 4, 2, dtype, *dims)
    call = example(spec_path(name), case, dropout_p, backend="tiled")
    forward = call.judged_forward()
    call.judged_backward(forward)
    call.judged_tangent(forward)


def test_second_derivatives_are_those_of_ordinary_attention() -> None:
    op = fg.attention(
        fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=576, head_dim_v=512, dtype="float32")
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 1, 9, dim, generator=generator).requires_grad_() for dim in (576, 576, 512)
    )

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    found, expected = [], []
    for function, results in ((op, found), (plain, expected)):
        first = torch.autograd.grad(function(q, k, v).sin().sum(), (q, k, v), create_graph=True)
        total = sum(gradient.square().sum() for gradient in first)
        results += torch.autograd.grad(total, (q, k, v))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_pages_and_splits_compute_the_same() -> None:
    spec = CAUSAL.replace(head_dim=576, head_dim_v=512, dtype="bfloat16")
    of = Sequences.of((2, 2), (130, 47), dims=(576, 512), dtype="bfloat16")
    for how in ({}, {"split_size": 64}):
        Paged(spec, of, 16, how={"backend": "tiled", **how}).judged()


def test_tiles_are_those_of_narrower_heads_where_none_fits() -> None:
    wide, narrow = (
        fg.AttentionSpec(head_dim=dim, dtype="float32", name=f"d{dim}") for dim in (512, 256)
    )
    with pytest.raises(fg.PlanError):
        fg.plan(wide, DEFAULT_ARCH)
    for backward in (False, True):
        assert tiles_of(wide, backward=backward) == tiles_of(narrow, backward=backward)
