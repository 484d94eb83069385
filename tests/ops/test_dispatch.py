"""The operator as torch's dispatcher sees it: names, schemas, opcheck, modes, autocast."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen as fg
from flashgen.calls.ops.registration import operator_of
from flashgen.shared.errors import InputError
from tests.support.masks import causal
from tests.support.opchecks import passes_opcheck
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import one_in, slow

WINDOW, SLOPE = fg.Scalar("window", "int32"), fg.Scalar("slope", "float32")
FLIP = fg.Scalar("flip", "bool")


SPECS = {
    "full": (fg.AttentionSpec(head_dim=8, name="op_full"), {}),
    "causal": (fg.AttentionSpec(mask_mod=causal, head_dim=16, dtype="bfloat16"), {}),
    "scalars": (
        fg.AttentionSpec(
            mask_mod=lambda b, h, q, k: fg.where(FLIP, q < k, q - k < WINDOW),
            score_mod=lambda score, b, h, q, k: score + SLOPE * (q - k),
            head_dim=16,
            head_dim_v=8,
            dtype="float32",
        ),
        {"window": 4, "slope": 0.5, "flip": False},
    ),
    "dropout": (
        fg.AttentionSpec(mask_mod=causal, head_dim=16, dtype="float32", dropout=True),
        {},
    ),
}


def operands(spec, learnt=True, **sizes):
    case = Case(9, 12, 2, 4, 2, spec.dtype, spec.head_dim, spec.head_dim_v)
    return [tensor.requires_grad_(learnt) for tensor in case.tensors()]


def separated(scalars):
    """The scalars as the registered operator takes them: floats in tensors, and the others."""
    floats = [torch.tensor(x) for x in scalars.values() if type(x) is float]
    return floats, {name: x for name, x in scalars.items() if type(x) is not float}


@pytest.mark.parametrize("learnt", [slow(False), True])
@pytest.mark.parametrize("drops", [slow(False), True])
@pytest.mark.parametrize("name", one_in(4, SPECS, first=2))
def test_opcheck_passes_all_its_tests(name, drops, learnt):
    spec, scalars = SPECS[name]
    if drops and not spec.dropout:
        spec = spec.replace(dropout=True)
    q, k, v = operands(spec, learnt)
    state = (torch.tensor([3, 4]), torch.tensor(0.3)) if drops else ()
    operator = operator_of(spec)
    floats, others = separated(scalars)
    assert passes_opcheck(operator.overload, (q, k, v, *floats, *state), **others)
    # Layouts whose results are not contiguous.
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    assert passes_opcheck(operator.overload, (q, k, v[:1].expand_as(v), *floats, *state), **others)


@pytest.mark.parametrize("with_dlse", [slow(False), True])
@pytest.mark.parametrize("name", one_in(4, SPECS, first=2))
def test_opcheck_passes_for_the_backward_operator(name, with_dlse):
    spec, scalars = SPECS[name]
    q, k, v = operands(spec, False)
    state = (torch.tensor([3, 4]), torch.tensor(0.3)) if spec.dropout else ()
    operator = operator_of(spec)
    floats, others = separated(scalars)
    given = (q, k, v, *floats)
    out, lse = operator.overload(*given, *state, **others)
    given = (*given, out, lse, torch.ones_like(out), lse if with_dlse else None, *state)
    assert passes_opcheck(operator.overload_backward, given, **others)


def test_the_operator_has_the_name_of_its_spec():
    spec = fg.AttentionSpec(mask_mod=causal, head_dim=24, name="named_once")
    op = fg.attention(spec)
    assert op.name == "named_once"
    q, k, v = operands(spec, False)
    out, lse = torch.ops.flashgen.named_once(q, k, v)
    wanted, wanted_lse = op(q, k, v, return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)


def test_equal_specs_share_an_operator_and_others_get_a_name_of_their_own():
    first = fg.AttentionSpec(mask_mod=causal, head_dim=24, name="shared")
    op = fg.attention(first)
    assert fg.attention(first.replace()) is op
    other = fg.attention(first.replace(head_dim=32))
    assert other.name.startswith("shared_")
    assert len(other.name) == len("shared_") + 8
    third = fg.attention(first.replace(head_dim=40))
    assert len({op.name, other.name, third.name}) == 3
    assert hasattr(torch.ops.flashgen, f"{third.name}_backward")


@pytest.mark.parametrize("name", ["name", "default", "shadowed_backward"])
def test_names_that_mean_something_else_get_a_hash(name):
    fg.attention(fg.AttentionSpec(name="shadowed", head_dim=8))
    spec = fg.AttentionSpec(name=name, head_dim=8)
    op = fg.attention(spec)
    q, k, v = operands(spec, False)
    assert torch.equal(getattr(torch.ops.flashgen, op.name)(q, k, v)[0], op(q, k, v))


def test_scalars_are_arguments_of_the_operator():
    spec, scalars = SPECS["scalars"]
    operator = operator_of(spec)
    text = str(operator.overload._schema)
    for argument in ("SymInt window", "Tensor slope", "bool flip"):
        assert argument in text
    q, k, v = operands(spec, False)
    with pytest.raises(RuntimeError, match="slope"):
        operator.overload(q, k, v, window=3, flip=True)
    with pytest.raises(InputError, match="cannot take this value"):
        operator.overload(q, k, v, torch.tensor(math.nan), **separated(scalars)[1])
    with pytest.raises(InputError, match="slope is not a number"):
        operator.overload(q, k, v, torch.tensor([0.5]), **separated(scalars)[1])


def test_wrong_input_of_the_registered_operator_is_refused():
    spec, _ = SPECS["dropout"]
    overload = operator_of(spec).overload
    q, k, v = operands(spec)
    state = torch.tensor([1, 2])
    for wrong in (
        (q[0], k, v),
        (q, k[:, :, 1:], v),
        (q.half(), k, v),
        (q, k, v, None, torch.tensor(0.5)),
        (q, k, v, state[:1], torch.tensor(0.5)),
        (q, k, v, state, torch.tensor(1.5)),
        (q, k, v, state, torch.tensor([0.5])),
        (q, k, v, None, None, torch.tensor(-1.0)),
        (q, k, v, None, None, torch.tensor([0.5])),
    ):
        with pytest.raises(InputError):
            overload(*wrong)
    with pytest.raises(InputError, match="no such backend"):
        overload(q, k, v, backend="cudnn")


class Watch(TorchDispatchMode):
    """Writes down what the dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def through_vmap(call, q):
    return torch.vmap(call)(q[None])[0]


def through_a_mode(call, q):
    with Watch():
        return call(q)


@pytest.mark.parametrize("through", [through_vmap, through_a_mode, lambda call, q: call(q)])
def test_numbers_of_numpy_and_wrong_numbers_are_handled_before_the_dispatcher(through):
    spec, _ = SPECS["scalars"]
    op, (q, k, v) = fg.attention(spec), operands(spec, False)
    given = {"window": np.int32(4), "slope": np.float32(0.5), "flip": np.bool_(False)}
    wanted = op(q, k, v, **given, q_offset=np.int64(2))

    def mapped(**changes):
        return through(lambda x: op(x, k, v, **{**given, **changes}), q)

    assert torch.equal(mapped(q_offset=np.int64(2)), wanted)
    for wrong in (
        {"q_offset": 1.5},
        {"scale": "1"},
        {"window": 1.0},
        {"flip": 1},
        {"backend": 3},
        {"arch": 80},
        {"deterministic": 1},
    ):
        with pytest.raises(InputError):
            mapped(**wrong)


def on_meta(call, q):
    return call(q.to("meta"))


@pytest.mark.parametrize("through", [on_meta, through_vmap, through_a_mode])
def test_values_of_numbers_are_checked_where_no_kernel_may_run(through):
    spec, scalars = SPECS["scalars"]
    window = fg.Scalar("window", "int32", minimum=1)
    spec = spec.replace(
        mask_mod=lambda b, h, q, k: fg.where(FLIP, q < k, q - k < window), dropout=True
    )
    op, (q, _, v) = fg.attention(spec), operands(spec, False)

    def mapped(**changes):
        return through(
            lambda x: op(x, x[:, :2], v[:, :, :9].to(x.device), **{**scalars, **changes}), q
        )

    assert mapped().shape == (2, 4, 9, 8)
    for name, *values in (
        ("scale", math.nan, math.inf, 0.0, -1.0),
        ("q_offset", 2**29),
        ("k_offset", -(2**29)),
        ("dropout_p", 1.5, -0.1, math.nan),
        ("window", 0, 2**40),
        ("slope", math.nan, 1e300),
    ):
        for value in values:
            with pytest.raises(InputError) as refused:
                mapped(**{name: value})
            assert refused.value.where == f"argument {name}"


def test_shapes_are_known_without_data():
    spec, scalars = SPECS["scalars"]
    operator = operator_of(spec)
    q, k, v = (t.to("meta") for t in operands(spec, False))
    floats, others = separated(scalars)
    out, lse = operator.overload(q, k, v, *floats, **others)
    assert (out.shape, out.dtype, out.device.type) == ((2, 4, 9, 8), torch.float32, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in operands(spec)]
        out = fg.attention(spec)(*fakes, **scalars)
        assert out.shape == (2, 4, 9, 8)
        assert out.requires_grad
        with pytest.raises(InputError, match="batch of q"):
            fg.attention(spec)(fakes[0], fakes[1][:1], fakes[2], **scalars)


def test_a_dispatch_mode_receives_the_operator_and_nothing_else():
    spec, _ = SPECS["causal"]
    op, tensors = fg.attention(spec), operands(spec)
    with Watch() as watch:
        out = op(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    names = [name for name in watch.seen if name.startswith("flashgen")]
    assert names == [f"flashgen.{op.name}.default", f"flashgen.{op.name}_backward.default"]
    assert torch.equal(out, op(*tensors))


def test_subclasses_of_tensors_go_through_the_dispatcher_and_parameters_are_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    spec, _ = SPECS["causal"]
    op = fg.attention(spec)
    q, k, v = operands(spec, False)
    two = op(*(TwoTensor(t, 2 * t) for t in (q, k, v)))
    assert isinstance(two, TwoTensor)
    assert torch.equal(two.a, op(q, k, v))
    assert torch.equal(two.b, op(2 * q, 2 * k, 2 * v))
    assert torch.equal(op(*map(torch.nn.Parameter, (q, k, v))), op(q, k, v))


def test_make_fx_traces_one_node():
    from torch.fx.experimental.proxy_tensor import make_fx

    spec, scalars = SPECS["scalars"]
    op, tensors = fg.attention(spec), operands(spec, False)
    graph = make_fx(lambda q, k, v: op(q, k, v, **scalars), tracing_mode="symbolic")(*tensors)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count(f"flashgen.{op.name}.default") == 1
    assert torch.equal(graph(*tensors), op(*tensors, **scalars))


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_negated_views_are_resolved(backend):
    spec, _ = SPECS["dropout"]
    op, tensors = fg.attention(spec), operands(spec, False)
    lazy = [torch._neg_view(t) for t in tensors]
    assert all(t.is_neg() for t in lazy)
    wanted = op(*(-t for t in tensors), backend=backend)
    assert torch.equal(op(*lazy, backend=backend), wanted)
    given = [t.requires_grad_() for t in tensors]
    out, lse = op(*given, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    mine = torch.autograd.grad(
        (out, lse), given, (torch._neg_view(dout), torch._neg_view(dlse)), retain_graph=True
    )
    other = torch.autograd.grad((out, lse), given, (-dout, -dlse))
    assert all(map(torch.equal, mine, other))


# ---- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16])
def test_autocast_casts_operands_and_takes_the_kernel_of_its_dtype(dtype, to):
    spec = fg.AttentionSpec(mask_mod=causal, head_dim=16, dtype=dtype, name="cast_from")
    op, tensors = fg.attention(spec), operands(spec)
    mixed = [tensors[0].float(), tensors[1].half(), tensors[2].bfloat16()]
    with torch.autocast("cpu", dtype=to):
        out = op(*tensors)
        sdpa = torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=False, enable_gqa=True
        )
        assert out.dtype == sdpa.dtype == to
        assert op(*mixed).dtype == to
    with torch.no_grad():
        other = fg.attention(spec.replace(dtype=str(to).removeprefix("torch.")))
        assert torch.equal(out, other(*(t.to(to) for t in tensors)))
    for tensor, gradient in zip(
        tensors, torch.autograd.grad(out.float().sum(), tensors), strict=True
    ):
        assert gradient.dtype == tensor.dtype
    assert op.report.backend == "tiled"


def test_autocast_does_not_reach_into_the_tiled_algorithms():
    spec = fg.AttentionSpec(mask_mod=causal, head_dim=16, dtype="float32", name="undisturbed")
    operator, tensors = operator_of(spec), operands(spec)
    wanted, _ = operator.overload(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = operator.overload(*tensors)
        (gradient,) = torch.autograd.grad(got.sum(), tensors[0])
    assert torch.equal(got, wanted)
    assert torch.equal(gradient, torch.autograd.grad(wanted.sum(), tensors[0])[0])


def test_operands_that_autocast_does_not_cast_are_checked():
    spec, _ = SPECS["causal"]
    op = fg.attention(spec)
    q, k, v = operands(spec, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for wrong in (q.double(), q.int(), None, [1.0]):
            with pytest.raises(InputError, match=r"dtype of|not a torch tensor|q is missing"):
                op(wrong, k, v)
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        assert op(q, k, v).dtype == torch.bfloat16
