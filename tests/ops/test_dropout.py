"""Dropout through the operator: the random state, the dropped elements and the gradients."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_forward
from flashgen.shared.errors import InputError
from tests.support.shapes import Case

SPEC = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: q >= k, head_dim=16, dtype="float32", dropout=True, name="drops"
)
OP = fg.attention(SPEC)
STATE = torch.tensor([11, 5])


def operands():
    return [t.requires_grad_() for t in Case(30, 30, 2, 4, 2, "float32", 16).tensors()]


def test_dropout_and_its_gradients_are_those_of_the_oracle():
    tensors = operands()
    out, lse = OP(*tensors, dropout_p=0.3, rng=STATE, return_lse=True)
    options = {"dropout_p": 0.3, "rng": STATE}
    wanted, wanted_lse = reference.attention(SPEC, *tensors, **options)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, tensors, dout)
    for mine, right in zip(got, reference.gradients(SPEC, *tensors, dout, **options), strict=True):
        torch.testing.assert_close(mine.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", pytest.param("emulator", marks=pytest.mark.slow)])
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_calls_on_parts_of_the_queries_or_keys_drop_what_the_whole_drops(side, backend):
    leaves = [t.requires_grad_() for t in Case(64, 64, 2, 4, 2, "float32", 16).tensors()]
    call = {"dropout_p": 0.3, "rng": STATE, "backend": backend, "return_lse": True}
    results = []
    for pieces in ([slice(0, 64)], [slice(0, 16), slice(16, 48), slice(48, 64)]):
        outs, lses = [], []
        for piece in pieces:
            q, k, v = leaves
            if side == "queries":
                out, lse = OP(q[:, :, piece], k, v, q_offset=piece.start, **call)
            else:
                out, lse = OP(q, k[:, :, piece], v[:, :, piece], k_offset=piece.start, **call)
            outs.append(out)
            lses.append(lse)
        if side == "queries":
            out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
        else:
            lse = torch.stack(lses).logsumexp(0)
            weights = [(each - lse).exp()[..., None] for each in lses]
            out = sum(weight * each for weight, each in zip(weights, outs, strict=True))
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        results.append((out, lse, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_the_same_state_gives_the_same_result(backend):
    spec = SPEC.replace(dtype="float16", name="drops_half")
    op, tensors = fg.attention(spec), [t.half() for t in operands()]
    first = op(*tensors, dropout_p=0.3, rng=STATE, backend=backend)
    assert torch.equal(op(*tensors, dropout_p=0.3, rng=STATE.clone(), backend=backend), first)
    for other in ([12, 5], [11, 6]):
        changed = op(*tensors, dropout_p=0.3, rng=torch.tensor(other), backend=backend)
        assert not torch.equal(changed, first)
    torch.testing.assert_close(
        op(*tensors, dropout_p=0.3, rng=STATE, backend="emulator"),
        op(*tensors, dropout_p=0.3, rng=STATE, backend="tiled"),
        atol=4e-3,
        rtol=4e-3,
    )


def test_a_state_that_was_changed_in_place_counts():
    tensors, state = operands(), STATE.clone()
    first = OP(*tensors, dropout_p=0.3, rng=state)
    state += 1
    assert not torch.equal(OP(*tensors, dropout_p=0.3, rng=state), first)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_states_come_from_the_generator_of_torch():
    tensors = operands()

    def three(seed):
        torch.manual_seed(seed)
        return [OP(*tensors, dropout_p=0.3) for _ in range(3)]

    first, again = three(0), three(0)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], three(1)[0])


def test_states_fill_their_range():
    from flashgen.calls.runtime.arguments.options import draw_rng

    torch.manual_seed(0)
    drawn = torch.stack([draw_rng(0.5, torch.device("cpu")) for _ in range(200)])
    assert drawn.dtype == torch.int64
    assert (drawn >= 0).all()
    assert drawn.unique().numel() == 400
    for bit in range(62):  # every bit is one about half of the time: 200 +- 5.5 sigma
        assert 145 < int((drawn >> bit & 1).sum()) < 255


@pytest.mark.parametrize("p", [0.0, 0, torch.tensor(0.0)])
def test_a_probability_of_0_drops_nothing(p):
    tensors = operands()
    plain = fg.attention(SPEC.replace(dropout=False))(*tensors)
    assert torch.equal(OP(*tensors, dropout_p=p), plain)
    assert torch.equal(OP(*tensors), plain)
    assert torch.equal(OP(*tensors, dropout_p=p, rng=STATE), plain)


def test_nothing_is_drawn_when_nothing_is_dropped():
    before = torch.get_rng_state()
    OP(*operands())
    fg.attention(SPEC.replace(dropout=False))(*operands())
    OP(*operands(), dropout_p=0.5, rng=STATE)
    assert torch.equal(torch.get_rng_state(), before)
    OP(*operands(), dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_probability_may_be_a_tensor_of_one_number():
    tensors = operands()
    wanted = OP(*tensors, dropout_p=0.25, rng=STATE)
    assert torch.equal(OP(*tensors, dropout_p=torch.tensor(0.25), rng=STATE), wanted)
    out = OP(*tensors, dropout_p=torch.tensor(0.25, dtype=torch.float64), rng=STATE)
    one = torch.autograd.grad(out.sum(), tensors)
    other = torch.autograd.grad(wanted.sum(), tensors)
    assert all(map(torch.equal, one, other))
    torch.manual_seed(3)
    drawn = OP(*tensors, dropout_p=torch.tensor(0.25))
    torch.manual_seed(3)
    assert torch.equal(drawn, OP(*tensors, dropout_p=0.25))


@pytest.mark.parametrize("wrong", [-0.5, 1.0, "0.5", True, torch.tensor([0.5])])
def test_a_wrong_probability_is_refused_before_anything_is_drawn(wrong):
    before = torch.get_rng_state()
    with pytest.raises(InputError, match="dropout_p"):
        OP(*operands(), dropout_p=wrong, rng=None if not isinstance(wrong, torch.Tensor) else STATE)
    with pytest.raises(InputError, match="dropout_p"):
        run_forward(SPEC, *operands(), dropout_p=wrong, rng=STATE)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_call_gives_the_state_that_was_drawn():
    tensors = [t.detach() for t in operands()]
    torch.manual_seed(8)
    run = run_forward(SPEC, *tensors, dropout_p=0.4)
    assert run.rng.shape == (2,)
    assert torch.equal(run.out, OP(*tensors, dropout_p=0.4, rng=run.rng))
    torch.manual_seed(8)
    assert torch.equal(OP(*tensors, dropout_p=0.4), run.out)
