"""Forward mode and second derivatives through the operator, by every interface of torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import autograd
from flashgen.shared.call import Tangents
from flashgen.shared.errors import InputError, SpecError
from tests.kernels.test_every_spec import BACKWARD
from tests.support.examples import SPEC_IDS, SPECS, fitted, spec_path, values_of
from tests.support.judged import dropping, sized
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow
from tests.support.weights import SPECS as WEIGHTS
from tests.support.weights import captured_by, spec_of
from tests.support.wide_operator import wide_attention

Tensor = torch.Tensor

CAP = fg.Tensor("cap", ("heads",), grad=True)
SPEC = fg.AttentionSpec(
    lambda b, h, q, k: k <= q,
    lambda s, b, h, q, k: CAP[h] * fg.tanh(s / CAP[h]),
    head_dim=16,
    dtype="float32",
    sink=True,
)
OP = fg.attention(SPEC)
HEADS, ROWS = 4, 21


def call(q: Tensor, k: Tensor, v: Tensor, cap: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    return OP(q, k, v, cap=cap, sink=sink, return_lse=True)


def dense(q: Tensor, k: Tensor, v: Tensor, cap: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = cap[:, None, None] * torch.tanh(q @ k.mT / 4 / cap[:, None, None])
    s = s.masked_fill(~torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), -math.inf)
    s = torch.cat([s, sink[None, :, None, None].expand(2, HEADS, ROWS, 1)], -1)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)


def problem(seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """q, k, v, cap, sink, and tangents of all of them."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, ROWS, 16), (2, 2, ROWS, 16), (2, 2, ROWS, 16), (HEADS,), (HEADS,))
    operands = [torch.randn(shape, generator=make) for shape in shapes]
    operands[3] = 1 + operands[3].abs()
    return tuple(operands), tuple(torch.randn(shape, generator=make) for shape in shapes)


def wide(tensors: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def assert_near(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        largest = 1 + float(other.abs().max())
        torch.testing.assert_close(one.detach().double(), other, rtol=0, atol=2e-6 * largest)


def loss_of(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def loss(*tensors: Tensor) -> Tensor:
        out, lse = function(*tensors)
        return (out.sin() * (1 + out)).sum() + lse.square().sum()

    return loss


ALL = (0, 1, 2, 3, 4)
LOSS, DENSE_LOSS = loss_of(call), loss_of(dense)


# ---- forward mode --------------------------------------------------------------------------------


def by_func(operands: Any, ways: Any) -> Any:
    return jvp(call, operands, ways)[1]


def by_duals(operands: Any, ways: Any) -> Any:
    with forward_ad.dual_level():
        results = call(*map(forward_ad.make_dual, operands, ways))
        return [forward_ad.unpack_dual(each).tangent for each in results]


def by_duals_without_grad(operands: Any, ways: Any) -> Any:
    with torch.no_grad():
        return by_duals([x.requires_grad_() for x in operands], ways)


def by_module(operands: Any, ways: Any) -> Any:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cap = torch.nn.Parameter(operands[3])
            self.sink = torch.nn.Parameter(operands[4])

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return call(q, k, v, self.cap, self.sink)

    def of(parameters: Any, *qkv: Tensor) -> Any:
        return torch.func.functional_call(layer, parameters, qkv)

    layer = Layer()
    moving = {"cap": ways[3], "sink": ways[4]}
    return jvp(of, (dict(layer.named_parameters()), *operands[:3]), (moving, *ways[:3]))[1]


def by_overload(operands: Any, ways: Any) -> Any:
    def of(*tensors: Tensor) -> Any:
        return getattr(torch.ops.flashgen, OP.name)(*tensors)

    return jvp(of, operands, ways)[1]


@pytest.mark.parametrize("by", [by_func, by_duals, by_duals_without_grad, by_module, by_overload])
def test_tangents_of_out_and_lse_are_those_of_dense_attention(by: Callable[..., Any]) -> None:
    operands, ways = problem()
    wanted = jvp(dense, wide(operands), wide(ways))[1]
    assert_near(by(operands, ways), wanted)


@pytest.mark.parametrize("place", ALL)
def test_a_tangent_of_one_operand_alone(place: int) -> None:
    operands, ways = problem()

    def of(function: Any, given: Any) -> Any:
        return lambda x: function(*given[:place], x, *given[place + 1 :])

    got = jvp(of(call, operands), (operands[place],), (ways[place],))[1]
    exact = wide(operands)
    wanted = jvp(of(dense, exact), (exact[place],), (ways[place].double(),))[1]
    assert_near(got, wanted)


def test_vmap_of_jvp_and_jvp_of_vmap() -> None:
    operands, _ = problem()
    qs, moving = torch.randn(3, *operands[0].shape), torch.randn(3, *operands[0].shape)
    exact = wide(operands)
    each = [
        jvp(lambda q: dense(q, *exact[1:]), (q.double(),), (way.double(),))[1]
        for q, way in zip(qs, moving, strict=True)
    ]
    wanted = [torch.stack(parts) for parts in zip(*each, strict=True)]

    def of(q: Tensor) -> Any:
        return call(q, *operands[1:])

    assert_near(vmap(lambda q, way: jvp(of, (q,), (way,))[1])(qs, moving), wanted)
    assert_near(jvp(vmap(of), (qs,), (moving,))[1], wanted)


def test_jacfwd_maps_over_tangents() -> None:
    operands, _ = problem()
    exact = wide(operands)
    at = torch.zeros(HEADS, 1, 16)
    got = jacfwd(lambda e: call(operands[0] + e, *operands[1:])[0].sum((0, 2)))(at)
    wanted = jacfwd(lambda e: dense(exact[0] + e, *exact[1:])[0].sum((0, 2)))(at.double())
    assert_near([got], [wanted])


def test_several_tangents_at_once_are_refused_outside_of_torch_func() -> None:
    operands, _ = problem()

    def of(e: Tensor) -> Tensor:
        return call(operands[0] + e, *operands[1:])[0].square().sum()

    jacobian, zeros = torch.autograd.functional.jacobian, torch.zeros(16)
    with pytest.raises(InputError, match="several gradients or tangents at once"):
        jacobian(of, zeros, vectorize=True, strategy="forward-mode")
    with pytest.raises(InputError, match="several gradients or tangents at once"):
        torch.autograd.functional.hessian(of, zeros, vectorize=True)


def test_a_gradient_by_a_tangent_is_the_transposed_tangent_pass() -> None:
    operands, ways = problem()
    leaves = tuple(x.clone().requires_grad_() for x in ways)
    got = torch.autograd.grad(jvp(LOSS, operands, leaves)[1], leaves)
    assert_near(got, grad(DENSE_LOSS, ALL)(*wide(operands)))


@pytest.mark.parametrize("dtype", [slow("float16"), slow("bfloat16"), "float32"])
def test_a_tangent_runs_the_kernel_where_the_call_runs_kernels(dtype: str) -> None:
    spec = fg.AttentionSpec(lambda b, h, q, k: k <= q, head_dim=16, dtype=dtype)
    qkv = Case(40, 56, 1, 2, 1, dtype, 16).tensors()
    ways = tuple(torch.randn(x.shape).to(x.dtype) for x in qkv)

    def of(*x: Tensor) -> Any:
        return fg.attention(spec)(*x, return_lse=True, backend="emulator")

    _, found = jvp(of, qkv, ways)
    verdicts = reference.judge_tangents(found, spec, *qkv, Tangents(*ways))
    assert all(verdicts.values()), verdicts


def test_a_tangent_of_a_tensor_that_is_not_learned_is_refused() -> None:
    slope = fg.Tensor("slope", ("heads",))
    op = fg.attention(
        fg.AttentionSpec(
            score_mod=lambda s, b, h, q, k: s + slope[h] * (k - q), head_dim=16, dtype="float32"
        )
    )
    q, k, v = Case(9, 9, 1, 2, 2, "float32", 16).tensors()
    way = torch.ones(2)
    with pytest.raises(InputError, match="carries a tangent that the spec does not declare"):
        jvp(lambda x: op(q, k, v, slope=x), (way,), (way,))


def test_flex_attention_has_tangents_of_what_its_mods_capture() -> None:
    q, k, v = Case(9, 9, 1, 2, 2, "float32", 8).tensors()
    slope, way = torch.randn(2), torch.randn(2)

    def of(slope: Tensor, wide: bool = False) -> Tensor:
        def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s * torch.tanh(slope[h]) + slope[h] * (i - j)

        if not wide:
            return fg.flex_attention(q, k, v, mod)
        places, of_heads = torch.arange(9), slope[:, None, None]
        scores = q.double() @ k.double().mT / 8**0.5 * torch.tanh(of_heads)
        scores = scores + of_heads * (places[:, None] - places)
        return scores.softmax(-1) @ v.double()

    for _ in range(2):
        found = jvp(of, (slope,), (way,))
        assert_near(found, jvp(lambda x: of(x, True), (slope.double(),), (way.double(),)))
        second = grad(lambda x: grad(lambda y: of(y).square().sum())(x).square().sum())(slope)
        exact = grad(lambda x: grad(lambda y: of(y, True).square().sum())(x).square().sum())
        torch.testing.assert_close(second.double(), exact(slope.double()), rtol=1e-4, atol=1e-3)


# ---- second derivatives --------------------------------------------------------------------------


def forward_over_reverse(operands: Any, ways: Any) -> Any:
    return jvp(grad(LOSS, ALL), operands, ways)[1]


def reverse_over_forward(operands: Any, ways: Any) -> Any:
    return grad(lambda *x: jvp(LOSS, x, ways)[1], ALL)(*operands)


def reverse_over_reverse(operands: Any, ways: Any) -> Any:
    def of(*x: Tensor) -> Tensor:
        return sum((g * way).sum() for g, way in zip(grad(LOSS, ALL)(*x), ways, strict=True))  # type: ignore[return-value]

    return grad(of, ALL)(*operands)


def by_create_graph(operands: Any, ways: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in operands]
    first = torch.autograd.grad(LOSS(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(first, leaves, ways)


def duals_over_reverse(operands: Any, ways: Any) -> Any:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(x.clone().requires_grad_(), way)
            for x, way in zip(operands, ways, strict=True)
        ]
        found = torch.autograd.grad(LOSS(*duals), duals)
        return [forward_ad.unpack_dual(each).tangent for each in found]


def reverse_over_duals(operands: Any, ways: Any) -> Any:
    with forward_ad.dual_level():
        leaves = [x.clone().requires_grad_() for x in operands]
        moved = LOSS(*map(forward_ad.make_dual, leaves, ways))
        return torch.autograd.grad(forward_ad.unpack_dual(moved).tangent, leaves)


@pytest.mark.parametrize(
    "by",
    [
        *(forward_over_reverse, reverse_over_forward, reverse_over_reverse),
        *(by_create_graph, duals_over_reverse, reverse_over_duals),
    ],
)
def test_products_of_the_hessian_are_those_of_dense_attention(by: Callable[..., Any]) -> None:
    operands, ways = problem()
    wanted = jvp(grad(DENSE_LOSS, ALL), wide(operands), wide(ways))[1]
    assert_near(by(operands, ways), wanted)


def test_a_hessian() -> None:
    operands, _ = problem()
    exact = wide(operands)
    got = hessian(lambda e: LOSS(operands[0] + e, *operands[1:]))(torch.zeros(16))
    wanted = hessian(lambda e: DENSE_LOSS(exact[0] + e, *exact[1:]))(torch.zeros(16).double())
    assert_near([got], [wanted])


def test_a_gradient_penalty_with_a_gradient_that_no_one_needs() -> None:
    operands, _ = problem()
    q, k, v, cap, sink = operands
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(LOSS(leaf, k, v, cap, sink), leaf, create_graph=True)
    (got,) = torch.autograd.grad(first.square().sum(), leaf)
    exact = q.double().requires_grad_()
    rest = wide((k, v, cap, sink))
    (of_exact,) = torch.autograd.grad(DENSE_LOSS(exact, *rest), exact, create_graph=True)
    assert_near([got], torch.autograd.grad(of_exact.square().sum(), exact))


@pytest.mark.parametrize(
    "third",
    [
        lambda q, of: jvp(lambda x: jvp(of, (x,), (q,))[1], (q,), (q,)),
        lambda q, of: grad(lambda x: grad(lambda y: grad(of)(y).sum())(x).sum())(q),
        lambda q, of: jvp(grad(lambda x: grad(of)(x).sum()), (q,), (q,)),
    ],
)
def test_derivatives_beyond_these_are_refused(third: Callable[..., Any]) -> None:
    (q, *rest), _ = problem()
    with pytest.raises(InputError, match=r"forward mode over forward mode|differentiated again"):
        third(q, lambda x: LOSS(x, *rest))


def test_dtensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, ways = problem()
    monkeypatch.setattr(autograd, "is_dtensor", lambda tensor: True)
    for derive in (
        lambda: jvp(call, operands, ways),
        lambda: jvp(grad(LOSS), operands[:5], ways),
    ):
        with pytest.raises(InputError, match="DTensors have no tangents"):
            derive()


def test_the_emulator_and_paged_caches_refuse_second_derivatives() -> None:
    op = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float32"))
    q, k, v = Case(5, 9, 1, 2, 1, "float32", 16).tensors()

    def of(q: Tensor) -> Tensor:
        return op(q, k, v, backend="emulator").square().sum()

    with pytest.raises(InputError, match="emulator"):
        jvp(grad(of), (q,), (q,))
    spec = fg.AttentionSpec(paged=True, head_dim=16, dtype="float32")
    pages = {"page_table": torch.zeros(1, 1, dtype=torch.int32)}
    pages["cache_seqlens"] = torch.tensor([16], dtype=torch.int32)
    q, cache = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 16, 16)
    with pytest.raises(SpecError, match="paged"):
        jvp(lambda x: fg.attention(spec)(x, cache, cache, **pages), (q,), (q,))


# ---- every spec ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_in(4, BACKWARD))
def test_gradcheck_and_gradgradcheck_of_the_covering_specs(name: str) -> None:
    case = Case(7, 8, 1, 2, 1, "float32", 8, 8)
    drops = 0.3 if name in ("alibi", "document", "softcap") else 0.0
    spec = sized(fg.load(spec_path(name)), case, drops)
    given = values_of(spec_path(name), fitted(spec, case))
    tensors = {
        key: x.double() if x.is_floating_point() else x for key, x in given["tensors"].items()
    }
    function = wide_attention(spec, tensors, scalars=given["scalars"], **dropping(drops))
    check_second_order(spec, function, case, tensors)


@pytest.mark.parametrize("name", one_in(2, WEIGHTS))
def test_gradcheck_and_gradgradcheck_of_other_weights(name: str) -> None:
    case = Case(7, 8, 1, 2, 1, "float32", 8, 8)
    spec = spec_of(name, 8, "float32")
    tensors = {key: x.double() for key, x in captured_by(spec, 2, 7).items()}
    function = wide_attention(spec, tensors, **dropping(0.3 * spec.dropout))
    check_second_order(spec, function, case, tensors)


def check_second_order(spec: Any, function: Any, case: Case, tensors: dict[str, Tensor]) -> None:
    learned = [tensors[tensor.name] for tensor in spec.tensors if tensor.grad]
    leaves = [x.double().requires_grad_() for x in (*case.tensors(3), *learned)]
    how = {"fast_mode": True}
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, **how)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, **how)
    assert torch.autograd.gradgradcheck(function, leaves, check_rev_over_rev=True, **how)


DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("path", one_in(3, SPECS), ids=SPEC_IDS)
def test_tangents_of_every_spec_meet_the_error_rule(path: Path) -> None:
    number = SPECS.index(path)
    case = Case(113, 90, 2, 4, 2, DTYPES[number % 3], 40)
    drops = 0.2 * (number % 2)
    spec = sized(fg.load(path), case, drops)
    case = fitted(spec, case)
    check_rule(spec, case, values_of(path, case) | dropping(drops))


IN_RANGE = [  # float16 does not hold the fourth powers of small scores
    (name, dtype) for dtype in DTYPES for name in WEIGHTS if (name, dtype) != ("power", "float16")
]


@pytest.mark.parametrize(("name", "dtype"), one_in(3, IN_RANGE))
def test_tangents_of_other_weights_meet_the_error_rule(name: str, dtype: str) -> None:
    case = Case(113, 90, 2, 4, 2, dtype, 40)
    spec = spec_of(name, 40, dtype)
    numbers = {"tensors": captured_by(spec, 4, 113)} | dropping(0.2 * spec.dropout)
    check_rule(spec, case, numbers)


def check_rule(spec: fg.AttentionSpec, case: Case, numbers: dict[str, Any]) -> None:
    make = torch.Generator().manual_seed(1)
    qkv = case.tensors(2)
    tensors: dict[str, Tensor] = numbers.get("tensors") or {}
    learned = [tensor.name for tensor in spec.tensors if tensor.grad]
    operands = (*qkv, *(tensors[name] for name in learned))
    ways = tuple(torch.randn(x.shape, generator=make).to(x.dtype) for x in operands)
    given = {key: numbers[key] for key in numbers.keys() - {"tensors", "scalars"}}
    captured = tensors | (numbers.get("scalars") or {})

    def of(*x: Tensor) -> Any:
        own = captured | dict(zip(learned, x[3:], strict=True))
        if spec.is_softmax:
            return fg.attention(spec)(*x[:3], **own, **given, return_lse=True)
        return (fg.attention(spec)(*x[:3], **own, **given),)

    _, found = jvp(of, operands, ways)
    moving = Tangents(*ways[:3], ways[3:])
    verdicts = reference.judge_tangents(found, spec, *qkv, moving, **numbers)
    assert all(verdicts.values()), verdicts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["causal", "softcap", "relative_bias", "sink", "dense_bias"])
def test_products_of_the_hessian_meet_the_error_rule(name: str, dtype: str) -> None:
    case = Case(113, 90, 2, 4, 2, dtype, 40)
    spec = sized(fg.load(spec_path(name)), case)
    numbers = values_of(spec_path(name), case)
    make = torch.Generator().manual_seed(1)
    qkv, tensors = case.tensors(2), numbers["tensors"]
    learned = [tensor.name for tensor in spec.tensors if tensor.grad]
    operands = (*qkv, *(tensors[key] for key in learned))
    ways = tuple(torch.randn(x.shape, generator=make).to(x.dtype) for x in operands)
    dout, of_dout = (torch.randn(2, 4, 113, 40, generator=make).to(qkv[0].dtype) for _ in "ab")

    def gradients(dout: Tensor, *x: Tensor) -> Any:
        def of(*x: Tensor) -> Tensor:
            own = tensors | dict(zip(learned, x[3:], strict=True)) | numbers["scalars"]
            return fg.attention(spec)(*x[:3], **own)

        return vjp(of, *x)[1](dout)

    _, found = jvp(gradients, (dout, *operands), (of_dout, *ways))
    given = spec, *qkv, (dout, None), Tangents(*ways[:3], ways[3:]), (of_dout, None)
    exact = reference.gradient_tangents(*given, **numbers)
    same = reference.gradient_tangents(*given, exact=False, **numbers)
    for got, wanted, ordinary in zip(found, exact, same, strict=True):
        verdict = reference.compare(got, wanted, ordinary, factor=reference.GRADIENT_FACTOR)
        # In float32 the rounding of LSE and O adds to the error, as it does to that of gradients.
        more = 1.5 if dtype == "float32" else 1.0
        if got.numel() >= 256:
            assert verdict.max_error <= verdict.max_allowed, verdict
            assert verdict.rms_error <= more * verdict.rms_allowed, verdict


# ---- under torch.compile -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x, ways: jvp(call, x, ways)[1],
        lambda x, ways: jvp(grad(LOSS, ALL), x, ways)[1],
        lambda x, ways: grad(lambda *y: jvp(LOSS, y, ways)[1], ALL)(*x),
        lambda x, ways: vmap(lambda way: jvp(lambda q: call(q, *x[1:]), x[:1], (way,))[1])(
            torch.stack([ways[0], 2 * ways[0]])
        ),
    ],
)
def test_a_compiled_derivative_is_one_graph(function: Callable[..., Any]) -> None:
    operands, ways = problem()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got, wanted = compiled(operands, ways), function(operands, ways)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_reverse_mode_through_a_compiled_jvp() -> None:
    operands, ways = problem()
    leaves = [x.clone().requires_grad_() for x in operands]
    compiled = torch.compile(lambda *x: jvp(LOSS, x, ways)[1], fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves)
    assert_near(got, jvp(grad(DENSE_LOSS, ALL), wide(operands), wide(ways))[1])


def test_vjp_of_a_mapped_tangent_with_dropout_drops_alike() -> None:
    op = fg.attention(fg.AttentionSpec(dropout=True, head_dim=16, dtype="float32"))
    q, k, v = Case(20, 30, 1, 2, 2, "float32", 16).tensors()
    how = {"dropout_p": 0.4, "rng": torch.tensor([5, 6])}

    def of(x: Tensor) -> Tensor:
        return op(x, k, v, **how)

    way, other = torch.randn_like(q), torch.randn_like(q)
    _, moved = jvp(of, (q,), (way,))
    _, pull = vjp(of, q)
    torch.testing.assert_close((moved * other).sum(), (pull(other)[0] * way).sum())
