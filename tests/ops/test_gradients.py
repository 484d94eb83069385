"""Gradients through the operator, by every interface of torch, and those that it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from flashgen.shared.errors import InputError
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import slow

WINDOW = fg.Scalar("window", "int32")


def within(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def softened(score, b, h, q, k):
    return 4 * fg.tanh(score / 4)


SPEC = fg.AttentionSpec(mask_mod=within, score_mod=softened, head_dim=16, dtype="float32")
OP = fg.attention(SPEC)
OVERLOAD = getattr(torch.ops.flashgen, OP.name)
CALLS = {
    "op": lambda q, k, v: OP(q, k, v, window=9),
    "torch.ops": lambda q, k, v: OVERLOAD(q, k, v, window=9)[0],
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def operands(dtype="float32", seed=0):
    q, k, v = Case(21, 30, 2, 4, 2, dtype, 16).tensors(seed)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def exact(spec, operands, dout, dlse=None, window=9):
    return reference.gradients(spec, *operands, dout, dlse, scalars={"window": window})


def assert_near(got, wanted, tolerance=1e-5):
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_those_of_the_oracle(dtype):
    spec = SPEC.replace(dtype=dtype)
    tensors = operands(dtype)
    out = fg.attention(spec)(*tensors, window=9)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    got = torch.autograd.grad(out, tensors, dout)
    same = reference.same_dtype_gradients(spec, *tensors, dout, scalars={"window": 9})
    for name, mine, right, ordinary in zip(
        "qkv", got, exact(spec, tensors, dout), same, strict=True
    ):
        verdict = reference.compare(mine, right, ordinary, factor=3)
        assert verdict.max_error <= verdict.max_allowed, f"d{name}: {verdict}"
        assert mine.isfinite().all()


def test_lse_has_gradients_too(call):
    tensors = operands()
    out, lse = OP(*tensors, window=9, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    both = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    assert_near(both, exact(SPEC, tensors, dout, dlse))
    _, lse = OP(*tensors, window=9, return_lse=True)
    alone = torch.autograd.grad(lse, tensors, dlse, allow_unused=True)
    assert_near(alone, exact(SPEC, tensors, torch.zeros_like(dout), dlse))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_tensors_that_require_a_gradient_get_one(call, wanted):
    tensors = [t.detach() for t in operands()]
    asked = [t.requires_grad_() for name, t in zip("qkv", tensors, strict=True) if name in wanted]
    out = call(*tensors)
    out.sum().backward()
    full = exact(SPEC, tensors, torch.ones_like(out))
    for name, tensor, right in zip("qkv", tensors, full, strict=True):
        assert (tensor.grad is not None) == (name in wanted)
        if name in wanted:
            assert_near([tensor.grad], [right])
    assert len(asked) == len(wanted)


def test_nothing_is_recorded_when_nothing_requires_a_gradient(call):
    tensors = operands()
    with torch.no_grad():
        assert not call(*tensors).requires_grad
    assert not call(*(t.detach() for t in tensors)).requires_grad
    with torch.inference_mode():
        assert not call(*tensors).requires_grad
        with torch.enable_grad():  # torch records nothing either
            assert not call(*tensors).requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out.sum(),
        lambda out: out[:, :, ::2, 1].sum(),
        lambda out: (out.transpose(1, 2).flatten(2) ** 2).sum(),
        lambda out: out.transpose(2, 3).contiguous().cumsum(-1).sum(),
        lambda out: out.mean((0, 1)).sum(),
    ],
)
def test_gradients_of_any_strides_are_taken(call, change):
    tensors = operands()
    out = call(*tensors)
    leaf = out.detach().requires_grad_()
    (dout,) = torch.autograd.grad(change(leaf), leaf)
    assert_near(torch.autograd.grad(change(out), tensors), exact(SPEC, tensors, dout))


@pytest.mark.parametrize("layout", ["sequence_major", "gaps"])
def test_gradients_have_the_memory_order_of_their_operands(layout):
    tensors = [
        t.requires_grad_() for t in Case(21, 30, 2, 4, 2, "float32", 16, None, layout).tensors()
    ]
    out = OP(*tensors, window=9)
    for gradient in torch.autograd.grad(out.sum(), tensors):
        ordered = gradient.transpose(1, 2) if layout == "sequence_major" else gradient
        assert ordered.is_contiguous()


def test_rows_without_a_key_have_gradients_of_exactly_zero(call):
    q, k, v = operands()
    with torch.no_grad():
        k[:, :, 20:] = math.nan  # out of every row's window
        v[:, :, 20:] = math.inf
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out, lse = OP(q, k, v, window=0, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    (out.sum() + lse.sum()).backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_empty_problems_have_gradients_of_zero(call, sizes):
    seq_q, seq_k = sizes
    q, k, v = (t.requires_grad_() for t in Case(seq_q, seq_k, 2, 4, 2, "float32", 16).tensors())
    call(q, k, v).sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad.shape == tensor.shape
        assert (tensor.grad == 0).all()


def test_a_saved_tensor_that_was_changed_is_noticed(call):
    q, k, v = operands()
    out = call(q, k * 1, v)
    with torch.no_grad():
        q += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_activation_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    gate = fg.Tensor("gate", (), grad=True)
    op = fg.attention(SPEC.replace(score_mod=lambda s, b, h, q, k: s * gate, dropout=True))
    found = []
    for wrap in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)):
        leaves = (*operands(), torch.tensor(1.25, requires_grad=True))
        torch.manual_seed(5)
        out = wrap(lambda q, k, v, g: op(q, k, v, gate=g, window=9, dropout_p=0.3), *leaves)
        found.append(torch.autograd.grad(out.sum(), leaves))
    assert all(map(torch.equal, *found))


def test_torch_func_grad_and_vjp_agree_with_backward(call):
    q, k, v = operands()
    wanted = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    q, k, v = (t.detach() for t in (q, k, v))
    got = torch.func.grad(lambda *t: call(*t).square().sum(), argnums=(0, 1, 2))(q, k, v)
    assert_near(got, [t.double() for t in wanted])
    out, pullback = torch.func.vjp(call, q, k, v)
    assert_near(pullback(2 * out), [t.double() for t in wanted])


def test_gradients_of_several_outputs_at_once_go_through_torch_func(call):
    q, k, v = operands()
    out = call(q, k, v)
    gradients = torch.stack([torch.ones_like(out), 2 * torch.ones_like(out)])
    wanted = [
        torch.autograd.grad(out, (q, k, v), each.clone(), retain_graph=True) for each in gradients
    ]
    with pytest.raises(InputError, match="several gradients or tangents at once") as caught:
        torch.autograd.grad(out, (q, k, v), gradients, is_grads_batched=True)
    assert "torch.func.vmap" in caught.value.way_out
    _, pullback = torch.func.vjp(call, *(t.detach() for t in (q, k, v)))
    got = torch.func.vmap(pullback)(gradients)
    assert_near(got, [torch.stack(each).double() for each in zip(*wanted, strict=True)])


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_a_result_in_the_order_of_its_queries_can_be_modified_in_place(backend):
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in operands())
    tensors = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = OP(*tensors, window=9, backend=backend)
    assert out.stride() == q.stride()
    wanted = 2 * out.detach()
    assert torch.equal(out.mul_(2), wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_create_graph_alone_is_fine(call):
    q, k, v = operands()
    (first,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
    assert_near([first.detach()], exact(SPEC, (q, k, v), torch.ones_like(q))[:1])


def test_tensors_without_a_tangent_pass_within_a_dual_level(call):
    tensors = operands()
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(call(*tensors), call(*tensors))


def test_the_backward_call_reports_its_backend_and_copies():
    q, k, v = (t.detach() for t in operands())
    run = run_forward(SPEC, q, k, v, scalars={"window": 9})
    back = run_backward(SPEC, q, k, v, run.out, run.lse, run.out, scalars={"window": 9})
    assert (back.backend, back.arch) == ("tiled", "sm_80")
    assert back.copies == ()
    assert not back.deterministic
    assert back.reports[0].run_seconds > 0
    assert_near((back.dq, back.dk, back.dv), exact(SPEC, (q, k, v), run.out))


def test_deterministic_follows_torch_by_default():
    q, k, v = (t.detach() for t in operands())
    run = run_forward(SPEC, q, k, v, scalars={"window": 9})

    def settled(**options):
        out = run_backward(
            SPEC, q, k, v, run.out, run.lse, run.out, scalars={"window": 9}, **options
        )
        return out.deterministic

    torch.use_deterministic_algorithms(True)
    try:
        assert settled()
        assert not settled(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert settled(deterministic=True)
    assert not settled()


def test_the_tiles_of_another_architecture_give_the_same_numbers():
    q, k, v = operands()
    out = OP(q, k, v, window=9, arch="sm_86")
    assert OP.report.arch == "sm_86"
    assert_near(
        torch.autograd.grad(out.sum(), (q, k, v)), exact(SPEC, (q, k, v), torch.ones_like(out))
    )
    with pytest.raises(fg.PlanError):
        OP(q, k, v, window=9, arch="sm_75")


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_powers_of_a_score_of_zero_have_the_derivatives_of_torch(backend: str) -> None:
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: s**h, head_dim=16, dtype="float32", name="degrees"
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 8, 16, generator=generator) for _ in range(3))
    q[:, :, 3] = 0
    q.requires_grad_()
    k.requires_grad_()
    fg.attention(spec)(q, k, v, backend=backend).square().sum().backward()
    x, y = (tensor.detach().clone().requires_grad_() for tensor in (q, k))
    scores = (x @ y.mT / 4) ** torch.arange(4).view(4, 1, 1)
    (scores.softmax(-1) @ v).square().sum().backward()
    torch.testing.assert_close(q.grad, x.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(k.grad, y.grad, atol=1e-4, rtol=1e-4)
