"""Every function for mods, in the tiled path and in kernels of both code paths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashgen as fg
from tests.support.judged import Call, normal
from tests.support.tiers import slow

# Arguments are inside the domains; a score has a jump or a kink only where no score is exactly.
FUNCTIONS: dict[str, Any] = {
    "erf": lambda s: fg.erf(s) + s,
    "erfc": lambda s: 3 * fg.erfc(s),
    "exp2": lambda s: fg.exp2(s / 2),
    "log1p": lambda s: fg.log1p(s * s),
    "expm1": lambda s: fg.expm1(s / 2),
    "rsqrt": lambda s: 2 * fg.rsqrt(s * s + 1),
    "atan": lambda s: 2 * fg.atan(s) + s / 4,
    "atan2": lambda s: fg.atan2(s, 1.5 - s / 4),
    "round": lambda s: fg.round(s * 3 + 0.01) / 3 + s / 2,
    "clamp": lambda s: fg.clamp(s, -0.7, 0.9) + s / 8,
    "sign": lambda s: fg.sign(s + 0.001) + s,
    "isfinite": lambda s: fg.where(fg.isfinite(s), s, 0),
}


def every(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    total = score
    for function in FUNCTIONS.values():
        total = total + function(score) / 8
    return total


def bits(b: Any, h: Any, q: Any, k: Any) -> Any:
    window = (q & 0x15) ^ (k & 0x15)
    near = (q >> (k & 3)) | (1 << (h + 2))
    return (fg.popcount(window ^ near) < 4) | (~q & k == 0) | (q == k)


def operands(dtype: str) -> tuple[torch.Tensor, ...]:
    return tuple(normal((1, 2, 48, 16), getattr(torch, dtype), seed) for seed in range(3))


@pytest.mark.parametrize("arch", [None, slow("sm_80"), slow("sm_90a")])
@pytest.mark.parametrize("dtype", ["float16", slow("float32")])
def test_functions_and_bits_agree_with_the_oracle(dtype: str, arch: str | None) -> None:
    spec = fg.AttentionSpec(bits, every, head_dim=16, dtype=dtype, name="every_function")
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    call = Call(spec, operands(dtype), **how)
    forward = call.judged_forward()
    call.check(call.backward(forward))


@pytest.mark.parametrize("arch", [None, slow("sm_80"), slow("sm_90a")])
def test_a_score_may_remove_itself(arch: str | None) -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: k <= q,
        lambda score, b, h, q, k: fg.where(score > 0.05 * h, score, -math.inf),
        head_dim=16,
        name="above_threshold",
    )
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    call = Call(spec, operands("float16"), **how)
    forward = call.judged_forward()
    # In the first rows every key may be removed.
    empty = forward.lse == -math.inf
    assert 0 < empty.sum() < empty.numel()
    backward = call.backward(forward)
    call.check(backward)
    assert (backward.dq[empty] == 0).all()


def test_captured_flags_are_conditions() -> None:
    kept = fg.Tensor("kept", ("heads", "seq_k"), "int32")
    high = fg.Tensor("high", ("heads",), "uint8")
    spec = fg.AttentionSpec(
        lambda b, h, q, k: kept[h, k] & (k <= q) | (k == 0),
        lambda score, b, h, q, k: fg.where(high[h], score, 2 * score),
        head_dim=16,
    )
    q, k, v = operands("float16")
    flags = torch.arange(96, dtype=torch.int32).reshape(2, 48) % 3
    given = {"kept": flags, "high": torch.tensor([0, 2], dtype=torch.uint8)}
    Call(spec, (q, k, v), {"tensors": given}, backend="tiled").judged_forward()
    alone = fg.AttentionSpec(lambda b, h, q, k: kept[h, k])
    assert str(alone.mask) == "Ne(Element(kept, h, k), 0)"


def test_dtypes_of_torch_are_taken() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert fg.AttentionSpec(dtype=dtype).dtype == str(dtype).removeprefix("torch.")
    with pytest.raises(fg.SpecError, match="dtype"):
        fg.AttentionSpec(dtype=torch.float64)
    assert fg.Tensor("t", (4,), torch.int32).dtype == "int32"
