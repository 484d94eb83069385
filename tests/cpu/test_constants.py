"""Values that are the same for all scores: constants, scalars, and tensors of one element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.spec.language import mod_functions
from tests.support.tiers import one_in, slow
from tests.support.tiled_calls import both

NUMBER, WHOLE = fg.Scalar("number", "float32"), fg.Scalar("count_of", "int32")
SWITCH, ACTIVE = fg.Scalar("switch", "bool"), fg.Tensor("active", ("batch",), "bool")
LEARNED, BY_ENTRY = fg.Tensor("learned", (), grad=True), fg.Tensor("entry", ("batch",), grad=True)
ONE, BY_HEAD = fg.Tensor("one", (1,), "float16"), fg.Tensor("gate", ("heads",), grad=True)
COUNT = fg.Tensor("count", (1, 1), "int32")
VALUES = {
    "number": 1.3,
    "count_of": 3,
    "switch": True,
    "active": torch.tensor([True]),
    "learned": torch.tensor(1.7),
    "entry": torch.tensor([0.6]),
    "one": torch.tensor([1.45], dtype=torch.float16),
    "gate": torch.tensor([0.8]),
    "count": torch.tensor([[5]], dtype=torch.int32),
}
CONSTANTS: dict[str, Callable[..., Any]] = {
    "python": lambda b, h: 2.3,
    "integer": lambda b, h: 3,
    "folded": lambda b, h: fg.sqrt(2.5),
    "floor": lambda b, h: fg.floor(fg.sqrt(2.5)),
    "round": lambda b, h: fg.round(fg.exp(1.7)) * 0.3,
    "quotient": lambda b, h: fg.sqrt(2.5) // 0.3,
    "remainder": lambda b, h: fg.exp(1.7) % 1.1,
    "scalar": lambda b, h: NUMBER,
    "int scalar": lambda b, h: WHOLE,
    "size": lambda b, h: fg.seq_k,
    "entry": lambda b, h: b + 1,
    "head": lambda b, h: h + 2,
    "learned": lambda b, h: LEARNED,
    "element of an entry": lambda b, h: BY_ENTRY[b],
    "element of a head": lambda b, h: BY_HEAD[h],
    "one element": lambda b, h: ONE[0],
    "one of one": lambda b, h: COUNT[b, h],
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "minimum": lambda x: fg.minimum(x, 1.5),
    "maximum": lambda x: fg.maximum(0.5, x),
    "where": lambda x: fg.where(x > 1, x, 0.25),
    "exp": lambda x: fg.exp(-1.0 * x),
    "atan2": lambda x: fg.atan2(x, 1.5),
    "log": lambda x: fg.log(x),
    "clamp": lambda x: fg.clamp(x, 0.5, 1.25),
    "popcount": lambda x: fg.popcount(fg.where(x > 1, 5, 6)),
    "choose": lambda x: fg.where(fg.isfinite(x), x, 0),
    "// and %": lambda x: x // 0.7 + x % 0.7 + 5.3 // x + 5.3 % x,
    "integers": lambda x: (WHOLE << 2 | 1) // 2 + (~WHOLE ^ 5) % 3,
}
_OF_ONE = (
    *("log2", "sqrt", "tanh", "sigmoid", "abs", "sin", "cos", "floor", "round", "exp2", "expm1"),
    *("log1p", "rsqrt", "erf", "erfc", "sign", "atan"),
)
FUNCTIONS |= {name: getattr(fg, name) for name in _OF_ONE}


def check(spec: fg.AttentionSpec, seq: int = 9) -> None:
    """Compares both passes with the float64 reference."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, seq, 8, generator=draw) for _ in range(4))
    dlse = torch.randn(1, 1, seq, generator=draw)
    scalars = {x.name: VALUES[x.name] for x in spec.scalars}
    tensors: dict[str, Any] = {x.name: VALUES[x.name] for x in spec.tensors}
    found = both(spec, q, k, v, dout, dlse, scalars=scalars, tensors=tensors)
    given = {"scalars": scalars, "tensors": tensors}
    expected = reference.attention(spec, q, k, v, **given)
    expected += tuple(reference.gradients(spec, q, k, v, dout, dlse, **given))
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


def test_all_functions_of_mods_are_here() -> None:
    own = {"absolute" if name == "abs" else name for name in FUNCTIONS if name.isidentifier()} | {
        "isfinite"
    }
    functions = {
        name
        for name, value in vars(mod_functions).items()
        if callable(value) and getattr(value, "__module__", "") == mod_functions.__name__
    }
    assert {name for name in functions if not name.startswith("_")} - {
        *("choose", "abs"),
        "rand",  # of integers, in tests/kernels/test_rand.py
    } <= own


def all_functions(constant: str) -> Callable[..., Any]:
    """The sum of the functions of a constant, as a function of b and h."""

    def value(b: Any, h: Any) -> Any:
        x = CONSTANTS[constant](b, h)
        return sum((function(x) for function in FUNCTIONS.values()), start=0.5 * x)

    return value


@pytest.mark.parametrize("constant", one_in(3, CONSTANTS))
def test_every_function_of_a_constant_is_added_to_scores(constant: str) -> None:
    value = all_functions(constant)
    check(fg.AttentionSpec(None, lambda s, b, h, q, k: s + 0.01 * value(b, h), head_dim=8))


@pytest.mark.parametrize("constant", one_in(3, CONSTANTS, first=1))
def test_every_function_of_a_constant_multiplies_scores(constant: str) -> None:
    value = all_functions(constant)
    check(fg.AttentionSpec(None, lambda s, b, h, q, k: s * (0.1 * value(b, h)), head_dim=8))


@pytest.mark.parametrize("name", one_in(4, FUNCTIONS))
@pytest.mark.parametrize(
    "constant", [slow(each) if each not in ("floor", "learned") else each for each in CONSTANTS]
)
def test_a_function_of_a_constant_is_a_score_and_a_mask(constant: str, name: str) -> None:
    def value(b: Any, h: Any) -> Any:
        return FUNCTIONS[name](CONSTANTS[constant](b, h))

    check(fg.AttentionSpec(None, lambda s, b, h, q, k: value(b, h), head_dim=8))
    check(fg.AttentionSpec(lambda b, h, q, k: value(b, h) * NUMBER > 0.3, head_dim=8))


MASKS: dict[str, Callable[..., Any]] = {
    "True": lambda b, h, q, k: True,
    "False": lambda b, h, q, k: False,
    "switch": lambda b, h, q, k: SWITCH,
    "not switch": lambda b, h, q, k: ~SWITCH,
    "active": lambda b, h, q, k: ACTIVE[b],
    "not active": lambda b, h, q, k: ~ACTIVE[0],
    "number": lambda b, h, q, k: NUMBER > 1,
    "floor": lambda b, h, q, k: fg.floor(fg.sqrt(2.5)) < 1.5,
    "remainder": lambda b, h, q, k: fg.sqrt(2.5) % 1.0 > fg.exp(1.5) // 0.7,
    "count": lambda b, h, q, k: COUNT[0, 0] == 5,
    "size": lambda b, h, q, k: fg.seq_k > fg.seq_q - 1,
    "entry": lambda b, h, q, k: b == 0,
    "head": lambda b, h, q, k: h > 0,
    "query": lambda b, h, q, k: q > 4,
    "key": lambda b, h, q, k: k > 4,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seq", [9, slow(300), slow(1)])
def test_masks_that_do_not_depend_on_all_positions(mask: str, seq: int) -> None:
    check(fg.AttentionSpec(MASKS[mask], head_dim=8), seq)


@pytest.mark.parametrize("mask", one_in(4, MASKS))
def test_masks_that_do_not_depend_on_all_positions_beside_a_score(mask: str) -> None:
    check(fg.AttentionSpec(MASKS[mask], lambda s, b, h, q, k: s * LEARNED, head_dim=8))


@pytest.mark.parametrize("live", [True, False])
def test_a_layout_of_one_block(live: bool) -> None:
    layout = torch.full((1, 1, 1, 1), live)
    for sparse in (fg.BlockSparse(None, 128, 128), fg.BlockSparse(lambda i, j: live, 128, 128)):
        spec = fg.AttentionSpec(block_sparse=sparse, head_dim=8, dtype="float32")
        q = torch.ones(1, 1, 9, 8)
        given = {"layout": layout} if sparse.layout is None else {}
        out = fg.attention(spec)(q, q, q, **given)
        assert torch.equal(out, q if live else torch.zeros_like(q))


BEYOND: dict[str, Callable[[Any, Callable[[float], Any]], Any]] = {
    "exp": lambda of, n: of.exp(n(1000.0)),
    "its opposite": lambda of, n: -of.exp(n(1000.0)),
    "exp2 of a huge number": lambda of, n: of.exp2(n(3e10)),
    "a product": lambda of, n: of.exp(n(80.0)) * of.exp(n(80.0)),
    "an odd power": lambda of, n: n(-10.0) ** 401,
    "a sum": lambda of, n: n(3e38) + 3e38,
    "a reciprocal": lambda of, n: 1 / n(1e-39),
    "a difference": lambda of, n: of.exp(n(1000.0)) - of.exp(n(900.0)),
    "nothing of it": lambda of, n: of.exp(n(1000.0)) * 0.0,
    "exp of its opposite": lambda of, n: of.exp(-of.exp(n(1000.0))),
}


@pytest.mark.parametrize("name", BEYOND)
def test_constants_beyond_float32_are_those_of_torch(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, 9, 8, generator=draw) for _ in range(3))
    scores, number = q @ k.mT * 8**-0.5, BEYOND[name](torch, torch.tensor)

    def own(x: float) -> Any:
        return fg.where(True, x, 0.0)  # a traced value: Python's float does not overflow

    added = fg.AttentionSpec(None, lambda s, b, h, q, k: s + BEYOND[name](fg, own), head_dim=8)
    chosen = fg.AttentionSpec(
        None, lambda s, b, h, q, k: fg.where(k > 2, BEYOND[name](fg, own) * s, s), head_dim=8
    )
    of_key = torch.arange(9) > 2
    for spec, wanted in (
        (added, scores + number),
        (chosen, torch.where(of_key, number * scores, scores)),
    ):
        out = fg.attention(spec.replace(dtype="float32"))(q, k, v)
        weights = torch.softmax(wanted, -1).masked_fill((wanted == -math.inf).all(-1, True), 0)
        torch.testing.assert_close(out, weights @ v, rtol=1e-4, atol=1e-5, equal_nan=True)
