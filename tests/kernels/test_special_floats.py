"""NaN, infinities, huge and tiny floats, and narrow integers: every path keeps what torch keeps.

Each spec has a random condition, or a random score, for each of its heads. The values of its
captured tensors and scalars are those that the rules of real numbers get wrong. The mods run on
PyTorch's tensors too, without flashgen; kernels and the CPU path keep the same elements, and NaN is
in the same rows. `make test` has 12 specs, all tiers 600 of floats and 150 of integers.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.kernels.planner import Tile
from flashgen.shared.paths import PATHS
from tests.support.expr_trees import (
    ARRAYS,
    SCALARS,
    SPECIAL,
    Tree,
    eager,
    narrow_condition,
    special_condition,
    special_number,
    traced,
)
from tests.support.tiers import one_in

HEADS, SEQ_Q, SEQ_K = 2, 20, 32
TILES = {"sm_80": Tile(16, 2, 2, 2), "sm_90a": Tile(16, 8, 1, 1)}  # of few keys
LEAST = 1e-20  # P of what is removed may be exp of the least exponent on the CPU path
INTEGERS = {"uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1)}

Positions = dict[str, torch.Tensor]


def leaves_of_call(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The captured tensors and the scalars of a call."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in ARRAYS.items():
        length = SEQ_Q if name in ("row", "other") or name.startswith("q_") else SEQ_K
        if tensor.dtype == "float32":
            values = torch.randn(HEADS, length, generator=generator)
            for head in range(HEADS):
                for place in range(length):
                    if draw.random() < 0.7:
                        values[head, place] = draw.choice(SPECIAL)
        else:
            low, high = INTEGERS.get(tensor.dtype, (-50, 50))
            values = torch.randint(low, high + 1, (length,), generator=generator)
            values[:2] = torch.tensor([low, high])
        tensors[name] = values.to(getattr(torch, tensor.dtype))
    finite = [x for x in SPECIAL if math.isfinite(x)]  # others are refused
    return tensors, {"slope": draw.choice(finite)}


def by_torch(tree: Tree, head: int, tensors: dict[str, torch.Tensor], slope: float) -> Any:
    """The tree of one head on tensors of [seq_q, seq_k], by torch alone."""
    leaves = {
        "q": torch.arange(SEQ_Q)[:, None],
        "k": torch.arange(SEQ_K)[None, :],
        "slope": torch.tensor(slope, dtype=torch.float32),
        "score": torch.zeros(SEQ_Q, SEQ_K),
    }
    for name, values in tensors.items():
        of_head = values[head] if values.dim() == 2 else values
        rows = name in ("row", "other") or name.startswith("q_")
        leaves[name] = of_head[:, None] if rows else of_head[None, :]
    return eager(tree, leaves)


EXPONENTS = 0.7, -2.5, 1.5, 60.25
BASES = (
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    0.01,
    0.5,
    1.0,
    1.7,
    300.0,
    1e30,
    -2.0,
    math.inf,
    -math.inf,
    math.nan,
)


def test_powers_by_fractions_are_those_of_torch() -> None:
    x = fg.Tensor("x", ("seq_q",), "float32")

    def power(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        of_heads = [x[q] ** each for each in EXPONENTS]
        return functools.reduce(
            lambda rest, head: fg.where(h == head, of_heads[head], rest), range(3), of_heads[3]
        )

    spec = fg.AttentionSpec(weight_mod=power, normalize="none", head_dim=16, dtype="bfloat16")
    assert "fast_power(" in fg.emit(spec, "sm_80").forward.text
    bases = torch.tensor(BASES)
    q, one = torch.zeros(1, 4, len(BASES), 16).bfloat16(), torch.ones(1, 4, 1, 16).bfloat16()
    out = run_forward(spec, q, one, one, tensors={"x": bases}, backend="emulator").out
    for head, exponent in enumerate(EXPONENTS):
        wanted = bases.double() ** exponent
        wanted[wanted.abs() < 2.0**-126] = 0
        found = out[0, head, :, 0].double()
        torch.testing.assert_close(
            found, wanted.float().double(), rtol=2**-7, atol=0, equal_nan=True
        )


def by_flashgen(trees: list[Tree], score: bool) -> Callable[..., Any]:
    """The mod with one tree for each head."""

    def value(h: Any, q: Any, k: Any, s: Any = None) -> Any:
        def element(name: str) -> Any:
            at = q if name in ("row", "other") or name.startswith("q_") else k
            tensor = ARRAYS[name]
            return tensor[h, at] if len(tensor.dims) == 2 else tensor[at]

        leaves = {"q": q, "k": k, "slope": SCALARS["slope"], "score": s}
        leaves |= {name: element(name) for name in ARRAYS}
        found = [traced(tree, leaves) for tree in trees]
        chosen = found[-1]
        for head in reversed(range(len(found) - 1)):
            chosen = fg.where(h == head, found[head], chosen)
        return chosen

    if score:
        return lambda s, b, h, q, k: value(h, q, k, s)
    return lambda b, h, q, k: value(h, q, k)


def kept_by_torch(trees: list[Tree], score: bool, *numbers: Any) -> torch.Tensor:
    """P of every head: uniform over the kept keys, or the softmax of the scores."""
    found = []
    for head, tree in enumerate(trees):
        value = torch.as_tensor(by_torch(tree, head, *numbers)).expand(SEQ_Q, SEQ_K)
        scores = value if score else torch.where(value, 0.0, -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        found.append(torch.where(empty, 0.0, scores.float().softmax(-1)))
    return torch.stack(found)


def random_trees(seed: int) -> tuple[list[Tree], bool]:
    """One tree for each head, and whether they are scores: those of every third seed."""
    draw, depth = random.Random(seed), 2 + seed % 2
    if seed % 3:
        return [special_condition(draw, depth) for _ in range(HEADS)], False
    trees: list[Tree] = []
    for _ in range(HEADS):
        kept = ("clamp", special_number(draw, depth - 1), -2.0, 2.0)
        other = draw.choice([-math.inf, math.inf, math.nan, 1.0])
        trees.append(("where", special_condition(draw, depth - 1), ("+", "score", kept), other))
    return trees, True


def check(trees: list[Tree], score: bool, seed: int, arch: str) -> None:
    """P of the kernels and of the CPU path is that of torch: v is the identity."""
    tensors, scalars = leaves_of_call(seed)
    expected = kept_by_torch(trees, score, tensors, scalars["slope"])
    mod = by_flashgen(trees, score)
    dtypes = ("float16", "bfloat16", "float32")[: 3 if arch == "sm_80" else 2]
    dtype = dtypes[seed // 2 % len(dtypes)]
    spec = fg.AttentionSpec(
        **{"score_mod" if score else "mask_mod": mod},
        head_dim=16,
        head_dim_v=SEQ_K,
        dtype=dtype,
        name=f"special_{seed}",
    )
    numbers: dict[str, Any] = {
        "tensors": {t.name: tensors[t.name] for t in spec.tensors},
        "scalars": {s.name: scalars[s.name] for s in spec.scalars},
    }
    q, k = torch.zeros(1, HEADS, SEQ_Q, 16), torch.zeros(1, HEADS, SEQ_K, 16)
    v = torch.eye(SEQ_K).expand(1, HEADS, SEQ_K, SEQ_K)
    qkv = [x.to(getattr(torch, dtype)) for x in (q, k, v)]
    tiles = None if dtype == "float32" else {"forward": TILES[arch]}
    for how in ({}, {"backend": "emulator", "arch": arch, "tiles": tiles}):
        (found,) = run_forward(spec, *qkv, **numbers, **how).out
        nan, wanted = found.isnan().any(-1), expected.isnan().any(-1)
        for head, tree in enumerate(trees):
            assert torch.equal(nan[head], wanted[head]), (how, tree)
            whole = ~wanted[head]
            kept, same = found[head][whole] > LEAST, expected[head][whole] > LEAST
            assert torch.equal(kept, same), (how, tree)


@pytest.mark.parametrize("seed", one_in(120, range(600)))
def test_every_path_keeps_the_elements_that_torch_keeps(seed: int) -> None:
    check(*random_trees(seed), seed, tuple(PATHS)[seed // 120 % 2])


@pytest.mark.parametrize("seed", one_in(75, range(150)))
def test_narrow_integers_wrap_as_those_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    trees = [narrow_condition(draw, 1 + seed % 3) for _ in range(HEADS)]
    check(trees, False, seed, tuple(PATHS)[seed // 60 % 2])


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_large_exponents_and_far_quotients_are_those_of_exact_arithmetic(backend: str) -> None:
    """Heads 0 to 2: powers of 1e10 and 1e6, and a remainder whose quotient no float32 holds."""
    near_1 = [1.0, 1 - 2**-24, 1 + 2**-23, -1 - 2**-23]
    parts = [1e38, -1e38, 7.0, 1e-30, -3e-35, 1e20, -0.7, 3e38] * 4
    base, part = fg.Tensor("base", ("bases",)), fg.Tensor("part", ("parts",))
    rest = fg.Tensor("rest", ("parts",))

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        power = base[k % 4]
        to_1e6 = fg.abs(power**1e6 - math.exp(2**-23 * 1e6)) < 1e-4
        exact = part[k] % 1e-6 == rest[k]
        return fg.where(h == 0, power**1e10 > 2, fg.where(h == 1, to_1e6, exact))

    spec = fg.AttentionSpec(mask, head_dim=16, head_dim_v=32, dtype="float32", name="far")
    part_t = torch.tensor(parts)
    divisor = torch.tensor(1e-6).double()
    rest_t = torch.remainder(part_t.double(), divisor).float()
    q, v = torch.zeros(1, 3, 32, 16), torch.eye(32).expand(1, 3, 32, 32)
    given = {"base": torch.tensor(near_1), "part": part_t, "rest": rest_t}
    kept = fg.attention(spec)(q, q, v, **given, backend=backend)[0, :, 0] > 0
    beyond = torch.tensor([False, False, True, True] * 8)
    assert torch.equal(kept[0], beyond)
    assert torch.equal(kept[1], beyond)
    assert kept[2].all()
