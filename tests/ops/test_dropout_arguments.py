"""The probability and the random state of dropout: what a call takes, and what it refuses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

import flashgen as fg
from tests.ops.test_checks import DROPS, STATE, checked, refusal


@pytest.mark.parametrize("p", [0.1, 0, 0.0, np.float32(0.1), np.float64(0.1), torch.tensor(0.1)])
def test_dropout_p_is_a_number_of_any_kind(p):
    assert checked(spec=DROPS, dropout_p=p, rng=STATE).dropout_p == pytest.approx(float(p))


@pytest.mark.parametrize("p", [0.25, np.float32(0.25), np.float64(0.25), Fraction(1, 4)])
def test_dropout_p_of_any_kind_drops_in_traces_and_transforms(p):
    op = fg.attention(DROPS)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16, generator=generator).half()

    def drop(x):
        return op(x, k, v, dropout_p=p, rng=STATE)

    wanted = op(q, k, v, dropout_p=0.25, rng=STATE)
    assert not torch.equal(wanted, op(q, k, v))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(drop, backend="eager", fullgraph=True)(q), wanted)
    assert torch.equal(torch.vmap(drop)(q[None])[0], wanted)


@pytest.mark.parametrize(
    "p",
    [
        *(-0.1, 1.0, 1, 1.5, float("nan"), 1 - 2**-18, True, "0.1", None, 0.1j, [0.1]),
        torch.tensor([0.1]),
        torch.tensor(1),
        torch.tensor(1.5),
        torch.empty((), device="meta"),
    ],
)
def test_dropout_p_is_a_probability(p):
    error = refusal(spec=DROPS, dropout_p=p, rng=STATE)
    assert error.where == "argument dropout_p"


@pytest.mark.parametrize(
    "rng",
    [
        (1, 2),
        7,
        STATE.int(),
        STATE.double(),
        STATE[:1],
        STATE.view(1, 2),
        STATE.to("meta"),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_rng_is_two_int64_on_the_device_of_q(p, rng):
    error = refusal(spec=DROPS, dropout_p=p, rng=rng)
    assert error.where == "argument rng"
    assert "torch.tensor([seed, offset]" in error.way_out


def test_dropout_needs_a_state_and_a_spec_that_has_it():
    assert "needs a random state" in refusal(spec=DROPS, dropout_p=0.5).what
    assert checked(spec=DROPS).dropout_p == 0.0
    error = refusal(dropout_p=0.5, rng=STATE)
    assert error.what == "the spec was made without dropout"
    assert "spec.replace(dropout=True)" in error.way_out
    assert refusal(rng=STATE).where == "argument rng"
    assert checked(dropout_p=0.0).dropout_p == 0.0


@pytest.mark.parametrize("name", ["q_offset", "k_offset"])
def test_dropout_needs_offsets_that_begin_a_block(name):
    for offset in (1, 8, 17, -1, -24):
        error = refusal(spec=DROPS, dropout_p=0.5, rng=STATE, **{name: offset})
        assert error.what == f"dropout needs a {name} that is a multiple of 16"
        assert error.where == f"argument {name}"
        assert f"given {offset}; dropout_p 0.5" in error.numbers
        below = offset // 16 * 16
        assert error.way_out == f"{name}={below} or {below + 16}, or dropout_p=0"
        assert getattr(checked(spec=DROPS, **{name: offset}), name) == offset
    assert checked(spec=DROPS, dropout_p=0.5, rng=STATE, **{name: -32}).dropout_p == 0.5
