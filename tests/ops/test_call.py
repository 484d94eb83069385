"""Every way to call a spec sorts its arguments alike: operators, compiled graphs, `run_forward`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import check, run_forward
from flashgen.shared.errors import InputError

BIAS = fg.Tensor("bias", ("heads", "seq_k"), "float32")
WINDOW = fg.Scalar("window", "int32")
SLOPE = fg.Scalar("slope", "float32")
SPEC = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
    score_mod=lambda s, b, h, q, k: s * SLOPE + BIAS[h, k],
    head_dim=16,
    dtype="float32",
    name="sorted_alike",
)
OP = fg.attention(SPEC)
SCALARS: dict[str, Any] = {"window": 9, "slope": 0.5}


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, 24, 16, generator=generator) for _ in range(3)]


pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"q_offset": 3}, torch.float16),
        ({"q_offset": torch.tensor([3, 8])}, torch.float32),
        ({"k_offset": torch.tensor(2), "q_offset": 4, "split_size": 16}, torch.bfloat16),
        ({"split_size": 16, "scale": 0.3}, torch.float32),
    ],
)
def test_all_ways_to_call_a_spec_compute_the_same(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    q, k, v = operands()
    bias = torch.arange(80.0).view(2, 40).to(dtype) / 64
    expected = OP(q, k, v, bias=bias, **SCALARS, **options)
    run = run_forward(SPEC, q, k, v, scalars=SCALARS, tensors={"bias": bias}, **options)
    assert torch.equal(run.out, expected)

    def call(*given: torch.Tensor) -> torch.Tensor:
        q, k, v, bias = given
        return OP(q, k, v, bias=bias, **SCALARS, **options)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, bias), expected)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"windw": 3, "window": None}, "argument windw"),
        ({"bias": None}, "argument bias"),
        ({"q_offset": torch.zeros(2, 2, dtype=torch.int32)}, "argument q_offset"),
    ],
)
def test_all_ways_refuse_the_same_mistake(change: dict[str, Any], where: str) -> None:
    q, k, v = operands()
    given = {"bias": torch.zeros(2, 40), **SCALARS, **change}
    given = {name: value for name, value in given.items() if value is not None}
    tensors = {name: given.pop(name) for name in ("bias",) if name in given}
    options = {name: given.pop(name) for name in ("q_offset",) if name in given}

    def op() -> torch.Tensor:
        return OP(q, k, v, **given, **tensors, **options)

    errors = []
    for call in (
        op,
        torch.compile(op, backend="eager", fullgraph=True),
        lambda: run_forward(SPEC, q, k, v, scalars=given, tensors=tensors, **options),
        lambda: check(SPEC, q, k, v, scalars=given, tensors=tensors, **options),
    ):
        with pytest.raises(InputError) as caught:
            call()
        errors.append((caught.value.what, caught.value.where))
    assert errors == [(errors[0][0], where)] * 4


def test_numbers_and_tensors_of_run_forward_are_not_mixed_up() -> None:
    q, k, v = operands()
    given = {"bias": torch.zeros(2, 40)}
    with pytest.raises(InputError, match="'bias' is not a scalar of the spec") as caught:
        run_forward(SPEC, q, k, v, scalars={**SCALARS, **given})
    assert caught.value.where == "argument scalars"
    with pytest.raises(InputError, match="'window' is not a tensor of the spec"):
        run_forward(SPEC, q, k, v, scalars={"slope": 1.0}, tensors={**given, "window": 9})
