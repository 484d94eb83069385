"""Mods that choose among values: computed without a branch for each score, as wgmma needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

import flashgen as fg
from benchmarks.instructions import work_of
from flashgen.kernels.pipeline import build_backward
from tests.support.judged import Call
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow

ARCHS = ("sm_80", "sm_90a")
GATE, BIAS = fg.Tensor("gate", ("h",)), fg.Tensor("bias", ("h", "q", "k"))

MASKS: dict[str, Any] = {
    "full": None,
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (k <= q) & (q - k < 256),
}
SCORES: dict[str, Any] = {
    "plain": None,
    "gated": lambda s, b, h, q, k: s * GATE[h],
    "sloped": lambda s, b, h, q, k: s - 0.1 * (q - k),
    "capped": lambda s, b, h, q, k: 20 * fg.tanh(s / 20),
    "biased": lambda s, b, h, q, k: s * GATE[h] + BIAS[h, q, k],
    "leaky": lambda s, b, h, q, k: fg.where(s > 0, s, fg.exp(s) - 1),
}
WEIGHTS: dict[str, Any] = {
    "sigmoid": lambda s, *at: fg.sigmoid(s - 1.5),
    "relu": lambda s, *at: fg.maximum(s, 0.0) ** 2,
    "square": lambda s, *at: s * s,
    "fourth": lambda s, *at: s**4,
    "silu": lambda s, *at: s * fg.sigmoid(s),
    "softplus": lambda s, *at: fg.log(1 + fg.exp(s)),
    "elu": lambda s, *at: fg.where(s > 0, s + 1, fg.exp(s)),
    "gelu": lambda s, *at: 0.5 * s * (1 + fg.erf(s * 0.7071)),
}
COMBINED = tuple(
    (weight, tuple(MASKS)[turn % 3], score, ("none", "sum")[turn // 3 % 2], head_dim)
    for turn, (weight, score, head_dim) in enumerate(itertools.product(WEIGHTS, SCORES, (64, 128)))
)
"""Every weight of every score, with a mask and a divisor in turns."""


def spec_of(score: Any, weight: Any = None, mask: Any = None, **options: Any) -> fg.AttentionSpec:
    common: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "name": "chosen"}
    return fg.AttentionSpec(mask, score, weight_mod=weight, **common | options)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "choice",
    [
        lambda s: fg.where(s > 0, s, fg.exp(s) - 1),
        slow(lambda s: fg.where(s > 1, fg.tanh(s), fg.where(s < -1, fg.sqrt(-s), 1 / (s + 3)))),
    ],
)
def test_a_choice_makes_no_branch(choice: Callable[[Any], Any], arch: str) -> None:
    work = work_of(fg.build(spec_of(lambda s, b, h, q, k: choice(s)), arch))
    assert work.by_kind(work.full)["control"] < 0.2  # per score: those of the loop


def test_an_element_that_only_the_condition_allows_is_read_behind_it() -> None:
    near = fg.Tensor("near", (8,))
    spec = spec_of(lambda s, b, h, q, k: fg.where(abs(q - k) < 4, s + near[q - k + 4], fg.exp(s)))
    assert "selected(" not in fg.emit(spec).forward.text.partition("DEVICE float score_mod")[2]


@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16"), slow("float32")])
@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_chosen_scores_meet_the_error_rule(arch: str, dtype: str) -> None:
    case = Case(70, 130, 1, 2, 1, dtype, 64)
    spec = spec_of(SCORES["leaky"], mask=MASKS["causal"], dtype=dtype)
    call = Call(spec, case.tensors(seed=5), {}, arch=arch)
    call.judged_forward()
    call.judged_backward()


@pytest.mark.parametrize(("weight", "mask", "score", "normalize", "head_dim"), one_in(96, COMBINED))
def test_kernels_of_all_weights_overlap_their_products(
    weight: str, mask: str, score: str, normalize: str, head_dim: int
) -> None:
    """`build` refuses a kernel whose wgmma instructions the assembler serialises."""
    spec = spec_of(SCORES[score], WEIGHTS[weight], MASKS[mask], normalize=normalize)
    spec = spec.replace(head_dim=head_dim, head_dim_v=head_dim)
    made = (fg.build(spec, "sm_90a"), *build_backward(spec, "sm_90a"))
    assert all(each.binary.resources.spill_store_bytes <= 64 for each in made)
