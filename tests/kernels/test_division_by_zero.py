"""Integer // and % by 0 have one meaning for tracing, calls, the tiled path, kernels and oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.cpu.mods import compiled
from flashgen.reference.interpret import evaluate
from flashgen.spec.analysis.evaluate import evaluate as host
from flashgen.spec.language.symbols import SCORE
from flashgen.spec.language.tracing import trace_score
from tests.support.judged import Call, normal
from tests.support.tiers import slow

STEPS = fg.Tensor("steps", ("heads",), "int32")
SIZE = fg.Scalar("size", "int32")


def operands(heads: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(normal((1, heads, 32, 64), torch.float16, seed) for seed in range(3))


@pytest.mark.parametrize("divided", [lambda a, b: a % b, lambda a, b: a // b])
def test_positions_that_can_divide_by_zero_are_an_error_of_the_spec(divided: Any) -> None:
    with pytest.raises(fg.SpecError) as caught:
        fg.AttentionSpec(lambda b, h, q, k: divided(k, h) < 3)
    assert Path(__file__).name in caught.value.where
    assert "fg.maximum(h, 1)" in caught.value.way_out


@pytest.mark.parametrize(
    "divisor",
    [
        lambda h, q: fg.maximum(h, 1),
        lambda h, q: fg.where(h > 0, h, 1),
        lambda h, q: fg.where(h == 0, 3, h),
        lambda h, q: 2 * q + 1,
        lambda h, q: SIZE * (h + 1),
    ],
)
def test_divisors_that_positions_cannot_make_zero_are_accepted(divisor: Any) -> None:
    fg.AttentionSpec(lambda b, h, q, k: k % divisor(h, q) < 3)


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_a_scalar_that_divides_by_zero_is_an_error_of_the_call(backend: str) -> None:
    op = fg.attention(fg.AttentionSpec(lambda b, h, q, k: k % (SIZE - 4) <= q))
    assert op(*operands(), size=2, backend="tiled").shape == (1, 2, 32, 64)
    with pytest.raises(fg.InputError, match="divides by 0") as caught:
        op(*operands(), size=4, backend=backend)
    assert "size=4" in caught.value.numbers


def test_a_branch_that_the_call_does_not_choose_may_divide_by_zero() -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: fg.where(SIZE > 0, k // SIZE, k) <= q)
    out = fg.attention(spec)(*operands(), size=0)
    causal = fg.attention(fg.AttentionSpec(lambda b, h, q, k: k <= q))(*operands())
    assert torch.equal(out, causal)


@pytest.mark.parametrize("arch", [None, "sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: (k % STEPS[h] == 0) & (k // STEPS[h] <= q // STEPS[h]),
        slow(lambda b, h, q, k: k % STEPS[h] == 0),
        slow(lambda b, h, q, k: (k // STEPS[h] <= 0) & (q // STEPS[h] >= k // STEPS[h])),
    ],
)
def test_a_captured_zero_gives_zero_on_every_path(arch: str | None, mod: Any) -> None:
    spec = fg.AttentionSpec(mod, name="by_captured_zero")
    steps = torch.tensor([0, 3], dtype=torch.int32)
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    call = Call(spec, operands(), {"tensors": {"steps": steps}}, **how)
    run = call.judged_forward()
    # Where the divisor is 0, both masks are true.
    q, k, v = (x[:, :1] for x in call.qkv)
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (run.out[:, :1] - full).abs().max() < 2e-3


def test_floats_divide_as_the_rounded_quotient_rounds_down() -> None:
    mod = trace_score(lambda score, b, h, q, k: score // 0.01)
    score = torch.tensor(0.5, dtype=torch.float64)
    (tiled,) = compiled((mod.expr,), torch.float32).bind({})(None, None, score.float())
    assert tiled == evaluate(mod.expr, {SCORE: score}) == 50
    assert host(mod.expr, {SCORE: 0.5}) == 50
