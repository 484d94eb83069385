"""Captured tensors as arguments of the operator: what is accepted, computed and differentiated."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import run_backward, run_forward
from flashgen.shared.errors import InputError
from tests.support.captured import VARIANTS
from tests.support.shapes import Case

WINDOW = fg.Scalar("window", "int32")
IDS = fg.Tensor("ids", ("batch", "seq_k"), "int32")
BIAS = fg.Tensor("bias", ("heads", "seq_k"), grad=True)
GATE = fg.Tensor("gate", (), grad=True)
TABLE = fg.Tensor("table", ("distances", 2), "bfloat16", grad=True)


def same_document_or_near(b, h, q, k):
    return (IDS[b, q] == IDS[b, k]) | (fg.abs(q - k) < WINDOW)


def biased(score, b, h, q, k):
    return score * GATE + BIAS[h, k] + TABLE[fg.clamp(q - k + 5, 0, 10), h % 2]


SPEC = fg.AttentionSpec(
    mask_mod=same_document_or_near, score_mod=biased, head_dim=16, dtype="float32", name="captures"
)
OP = fg.attention(SPEC)
OVERLOAD = getattr(torch.ops.flashgen, OP.name)
CALLS = {
    "op": OP,
    "torch.ops": lambda *t, window, return_lse=False, **c: OVERLOAD(
        *t, **{name: c[name] for name in ("ids", "gate", "bias", "table")}, window=window
    )[slice(None) if return_lse else 0],
}
LEARNED = ("gate", "bias", "table")
CASE = Case(9, 12, 2, 4, 2, "float32", 16)


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def captured(learned=True, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 3, (2, 12), generator=generator, dtype=torch.int32),
        "gate": torch.tensor(1.25, requires_grad=learned),
        "bias": torch.randn(4, 12, generator=generator).requires_grad_(learned),
        "table": torch.randn(11, 2, generator=generator).bfloat16().requires_grad_(learned),
    }


def operands(learned=True):
    return [t.requires_grad_(learned) for t in CASE.tensors()]


def exact_gradients(qkv, given, dout, dlse=None, spec=SPEC, window=2):
    """By name: q, k, v and the learned tensors."""
    found = reference.gradients(
        spec, *qkv, dout, dlse, tensors=given, scalars={"window": window} if window else None
    )
    names = ["q", "k", "v", *(t.name for t in spec.tensors if t.grad)]
    return dict(zip(names, found, strict=True))


def assert_near(found, wanted, tolerance=2e-5):
    narrow = found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.double(), wanted.double(), atol=tolerance, rtol=2**-8 if narrow else tolerance
    )


def refusal(op=OP, operands=None, **changes):
    """The error of a call with some captures changed, or left out where None."""
    given = {**captured(), "window": 2, **changes}
    with pytest.raises(InputError) as caught:
        op(*(operands or CASE.tensors()), **{n: v for n, v in given.items() if v is not None})
    error = caught.value
    assert len(str(error).splitlines()) == 4
    return error


# ---- values ------------------------------------------------------------------------------------


def test_a_call_takes_scalars_and_tensors_by_name(call):
    given = captured()
    out, lse = call(*operands(), **given, window=2, return_lse=True)
    options = {"tensors": given, "scalars": {"window": 2}}
    wanted, wanted_lse = reference.attention(SPEC, *operands(), **options)
    assert_near(out, wanted)
    assert_near(lse, wanted_lse)


# One variant gives a dimension's name two lengths, which the oracle does not mind.
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_variant_runs_and_trains(name, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CHECK_READS", "0")  # some read at clamped indices
    variant = VARIANTS[name]
    spec = variant.spec(head_dim=16)
    given = {
        t.name: variant.tensors(CASE)[t.name].to(getattr(torch, t.dtype)).requires_grad_(t.grad)
        for t in spec.tensors
    }
    tensors = operands()
    out = fg.attention(spec)(*tensors, **given)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    assert_near(out, reference.attention(spec, *tensors, tensors=given)[0])
    out.backward(dout)
    wanted = exact_gradients(tensors, given, dout, spec=spec, window=None)
    for name, tensor in {**dict(zip("qkv", tensors, strict=True)), **given}.items():
        if name in wanted:
            assert_near(tensor.grad, wanted[name], 1e-4)


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "every third": lambda t: t.repeat_interleave(3, -1)[..., ::3] if t.dim() else t,
    "inside a larger one": lambda t: torch.stack((t, t + 1))[0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_are_read(call, layout):
    plain = captured(learned=False)
    given = {name: LAYOUTS[layout](tensor) for name, tensor in plain.items()}
    assert torch.equal(call(*operands(), **given, window=2), OP(*operands(), **plain, window=2))


def test_expanded_tensors_and_dimensions_of_length_1_are_the_same():
    qkv = operands()
    given = captured(learned=False)
    given["bias"], given["ids"] = given["bias"][:1], given["ids"][:1]
    long = given | {"bias": given["bias"].expand(4, -1), "ids": given["ids"].expand(2, -1)}
    found = []
    for tensors in (given, long):
        tensors["bias"].requires_grad_()
        out = OP(*qkv, **tensors, window=2)
        found.append((out, torch.autograd.grad(out.square().sum(), tensors["bias"])[0]))
    (one, of_one), (many, of_many) = found
    assert torch.equal(one, many)
    assert of_one.shape == (1, 12)
    assert of_many.shape == (4, 12)
    torch.testing.assert_close(of_one, of_many.sum(0, keepdim=True))


def test_one_tensor_may_be_given_twice():
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: (
            s + fg.Tensor("row", ("n",), grad=True)[q] + fg.Tensor("column", ("n",), grad=True)[k]
        ),
        head_dim=16,
        dtype="float32",
    )
    both = torch.randn(12, generator=torch.Generator().manual_seed(1), requires_grad=True)
    qkv = operands(False)
    out = fg.attention(spec)(*qkv, row=both, column=both)
    out.backward(torch.ones_like(out) * out.detach())
    given = {"row": both, "column": both}
    wanted = exact_gradients(qkv, given, out.detach(), spec=spec, window=None)
    assert_near(both.grad, wanted["row"] + wanted["column"])


def test_contents_are_read_at_every_call():
    qkv, given = operands(False), captured(learned=False)
    first = OP(*qkv, **given, window=2)
    given["ids"].fill_(0)
    second = OP(*qkv, **given, window=2)
    assert not torch.equal(first, second)
    given["bias"] = given["bias"].mT.contiguous().mT  # other strides, the same numbers
    assert torch.equal(OP(*qkv, **given, window=2), second)


def test_low_level_calls_take_tensors_by_name():
    qkv, given = operands(False), captured()
    options = {"tensors": given, "scalars": {"window": 2}}
    run = run_forward(SPEC, *qkv, **options)
    back = run_backward(SPEC, *qkv, run.out, run.lse, run.out, **options)
    wanted = exact_gradients(qkv, given, run.out)
    for name, found in zip("qkv", (back.dq, back.dk, back.dv), strict=True):
        assert_near(found, wanted[name])
    assert len(back.captured) == 3
    for name, found in zip(LEARNED, back.captured, strict=True):
        assert (found.shape, found.dtype) == (given[name].shape, given[name].dtype)
        assert_near(found, wanted[name])
    plain = fg.AttentionSpec(head_dim=16, dtype="float32")
    run = run_forward(plain, *qkv)
    assert run_backward(plain, *qkv, run.out, run.lse, run.out).captured == ()


# ---- gradients ---------------------------------------------------------------------------------


def test_captures_get_the_gradients_of_the_oracle(call):
    qkv, given = operands(), captured()
    out, lse = call(*qkv, **given, window=2, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), (dout, dlse))
    wanted = exact_gradients(qkv, given, dout, dlse)
    for name, tensor in zip("qkv", qkv, strict=True):
        assert_near(tensor.grad, wanted[name])
    for name in LEARNED:
        assert given[name].grad.dtype == given[name].dtype
        assert_near(given[name].grad, wanted[name])
    assert given["ids"].grad is None


@pytest.mark.parametrize("wanted", [("bias",), ("gate", "table"), ("q", "table"), ("k",)])
def test_only_tensors_that_require_a_gradient_get_one(call, wanted):
    """Also when nothing but captured tensors is learned."""
    leaves = {**dict(zip("qkv", operands(False), strict=True)), **captured(learned=False)}
    for name in wanted:
        leaves[name].requires_grad_()
    qkv = [leaves[name] for name in "qkv"]
    given = {name: leaves[name] for name in ("ids", *LEARNED)}
    out = call(*qkv, **given, window=2)
    assert out.requires_grad
    out.square().sum().backward()
    right = exact_gradients(qkv, given, 2 * out.detach())
    for name, tensor in leaves.items():
        assert (tensor.grad is not None) == (name in wanted)
        if name in wanted:
            assert_near(tensor.grad, right[name])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_empty_problems_have_gradients_of_zero(call, sizes):
    case = Case(*sizes, 2, 4, 2, "float32", 16)
    given = captured() | {"bias": torch.randn(4, sizes[1], requires_grad=True)}
    given["ids"] = given["ids"][:, : max(sizes)]
    call(*case.tensors(), **given, window=2).sum().backward()
    for name in LEARNED:
        assert torch.equal(given[name].grad, torch.zeros_like(given[name]))


def test_a_captured_tensor_that_was_changed_is_noticed(call):
    given = captured()
    out = call(*operands(), **given, window=2)
    given["ids"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_with_respect_to_captures(call):
    given = captured()
    out = call(*operands(), **given, window=2)
    (first,) = torch.autograd.grad(out.square().sum(), given["bias"], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given["bias"])
    step = 1e-2 * second / second.norm()
    ends = []
    for sign in (1, -1):
        moved = given | {"bias": (given["bias"].detach() + sign * step).requires_grad_()}
        out = call(*operands(), **moved, window=2)
        ends.append(torch.autograd.grad(out.square().sum(), moved["bias"])[0].square().sum())
    torch.testing.assert_close(ends[0] - ends[1], 2e-2 * second.norm(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("learned", [False, True])
def test_a_tangent_of_a_capture_is_the_transposed_gradient(call, learned):
    given, qkv = captured(learned), operands(learned)

    def of(bias):
        return call(*qkv, **given | {"bias": bias}, window=2)

    bias = given["bias"].detach()
    out, moved = torch.func.jvp(of, (bias,), (bias,))
    _, pull = torch.func.vjp(of, bias)
    wanted = (pull(out)[0] * bias).sum()
    torch.testing.assert_close((moved * out).sum(), wanted, rtol=1e-3, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        dual = of(torch.autograd.forward_ad.make_dual(bias, bias))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual).tangent, moved)


def test_a_gradient_that_the_spec_does_not_declare_is_refused(call):
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: s + fg.Tensor("slope", ("heads",))[h] * (k - q),
        head_dim=16,
        dtype="float32",
        name="undeclared",
    )
    op = fg.attention(spec)
    overload = getattr(torch.ops.flashgen, op.name)
    slope = torch.rand(4, requires_grad=True)
    for function in (op, overload):
        with pytest.raises(InputError, match="a gradient that the spec does not declare") as caught:
            function(*operands(), slope=slope)
        assert caught.value.where == "argument slope"
        assert "grad=True" in caught.value.way_out
        with torch.no_grad():
            function(*operands(), slope=slope)
        function(*operands(), slope=slope.detach())


@pytest.mark.parametrize("how", ["argument", "torch"])
def test_the_tiled_backend_is_deterministic_with_captures(how):
    qkv, given = operands(), captured()
    torch.use_deterministic_algorithms(how == "torch")
    try:
        found = []
        for _ in range(2):
            out = OP(*qkv, **given, window=2, deterministic=True if how == "argument" else None)
            found.append(torch.autograd.grad(out.sum(), list(given.values())[1:]))
        assert all(map(torch.equal, *found))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- what is refused ---------------------------------------------------------------------------


def test_missing_and_superfluous_captures_are_named():
    error = refusal(bias=None)
    assert error.what == "the tensor 'bias' of the spec is missing"
    assert error.where == "argument bias"
    assert "takes: ids, gate, bias, table, window; given: ids, gate, table" in error.numbers
    assert refusal(window=None).what == "the scalar 'window' of the spec is missing"
    error = refusal(biass=torch.zeros(4, 12))
    assert error.what == "'biass' is not a scalar or tensor of the spec"
    call = "op(q, k, v, ids=..., gate=..., bias=..., table=..., window=...)"
    assert error.way_out.endswith(f"; {call} computes without it")
    with pytest.raises(InputError, match="the tensor 'ids' of the spec is missing"):
        run_forward(SPEC, *operands(), scalars={"window": 2})
    with pytest.raises(InputError, match="'window' is not a tensor of the spec"):
        run_forward(
            SPEC, *operands(), scalars={"window": 2}, tensors={**captured(), "window": GATE}
        )


def test_a_number_for_a_tensor_of_one_number_is_refused_with_the_way_to_make_one():
    error = refusal(gate=1.5)
    assert error.what == "gate is not a torch tensor"
    assert "given a float" in error.numbers
    assert error.way_out == "torch.tensor(1.5, dtype=torch.float32, device='cpu')"
    assert "torch.as_tensor" in refusal(bias=[[0.0] * 12] * 4).way_out


def test_a_tensor_for_a_scalar_is_refused_with_the_way_to_capture_it():
    error = refusal(window=torch.tensor(2))
    assert "window.item()" in error.way_out
    assert "fg.Tensor('window', (), 'int64')" in error.way_out


NONSENSE = {
    "dtype": (lambda t: t.int(), "does not have the dtype that the spec declares"),
    "complex": (lambda t: t + 0j, "does not have the dtype that the spec declares"),
    "rank": (lambda t: t[0], "has 1 dimensions, not 2"),
    "more rank": (lambda t: t[None], "has 3 dimensions, not 2"),
    "device": (lambda t: t.to("meta"), "is not on the device of q"),
    "sparse": (lambda t: t.to_sparse(), "is not an ordinary dense tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([t]), "is not an ordinary dense tensor"),
    "heads": (lambda t: t[:2], "does not have the length of its dimension heads"),
    "no heads": (lambda t: t[:0], "does not have the length of its dimension heads"),
    "keys": (lambda t: t[:, :11], "does not have the length of its dimension seq_k"),
    "no keys": (lambda t: t[:, :0], "does not have the length of its dimension seq_k"),
}


@pytest.mark.filterwarnings("ignore:.*prototype stage")
@pytest.mark.parametrize("name", NONSENSE)
def test_a_tensor_of_the_wrong_form_is_refused_by_name(name):
    change, what = NONSENSE[name]
    error = refusal(bias=change(captured(learned=False)["bias"]))
    assert error.what == f"bias {what}"
    assert error.where == "argument bias"


@pytest.mark.parametrize(
    ("name", "shape", "numbers"),
    [
        ("ids", (3, 12), "dimension 0: batch is 2 here, or 1"),
        ("table", (11, 3), "dimension 1: declared as 2"),
        ("table", (11, 1), "dimension 1: declared as 2"),
        ("table", (0, 2), "dimension 0: distances is 1 or more"),
        ("bias", (4, 7), "dimension 1: seq_k ends at 12, so at least that, or 1"),
    ],
)
def test_a_wrong_length_is_refused_with_the_right_one(name, shape, numbers):
    tensor = captured(learned=False)[name]
    assert numbers in refusal(**{name: tensor.new_zeros(shape)}).numbers


def test_lengths_along_the_sequence_reach_the_last_position():
    given = captured(learned=False)
    with pytest.raises(InputError, match="length of its dimension seq_k") as caught:
        OP(*operands(), **given, window=2, k_offset=1)
    assert "seq_k ends at 13" in caught.value.numbers
    with pytest.raises(InputError, match="uses an element outside of the captured tensor 'ids'"):
        OP(*operands(), **given, window=2, k_offset=-3)
    long = torch.nn.functional.pad(given["bias"], (0, 20))
    ids = torch.nn.functional.pad(given["ids"], (0, 1))
    assert (
        OP(*operands(), **given | {"bias": long, "ids": ids}, window=2, k_offset=1).isfinite().all()
    )


def test_lengths_of_one_name_are_equal_or_1():
    spec = fg.AttentionSpec(
        score_mod=lambda s, b, h, q, k: (
            s + fg.Tensor("x", ("n",))[q % 7] * fg.Tensor("y", ("n",))[k % 7]
        ),
        head_dim=16,
        dtype="float32",
    )
    op = fg.attention(spec)
    x = torch.rand(7)
    with pytest.raises(InputError, match="y does not have the length") as caught:
        op(*operands(), x=x, y=x[:6])
    assert "n is 7 in x, or 1" in caught.value.numbers
    for y in (x, x[:1]):
        assert op(*operands(), x=x, y=y).isfinite().all()


def test_a_refused_call_is_refused_again_and_has_no_effect():
    given = captured(learned=False)
    wanted = OP(*operands(), **given, window=2)
    for _ in range(2):
        refusal(bias=given["bias"][:, :11])
        assert torch.equal(OP(*operands(), **given, window=2), wanted)


@pytest.mark.parametrize("count", [45, 60])
def test_more_tensors_than_torch_takes_arguments_are_refused_with_the_number(count: int) -> None:
    tables = [fg.Tensor(f"table_{i}", ("heads",), "float32") for i in range(count)]

    def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
        for table in tables:
            score = score + table[h]
        return score

    spec = fg.AttentionSpec(score_mod=score_mod, head_dim=16, dtype="float16", name=f"many_{count}")
    if count < 50:
        assert fg.attention(spec) is not None
        return
    with pytest.raises(fg.SpecError, match=r"captures more tensors") as caught:
        fg.attention(spec)
    assert f"{count} tensors and 0 scalars make {count + 16} arguments" in caught.value.numbers
