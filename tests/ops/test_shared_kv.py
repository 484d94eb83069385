"""Keys and values in one tensor: the values are the first columns of the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from tests.support.judged import normal
from tests.support.masks import causal
from tests.support.opchecks import passes_opcheck

Tensor = torch.Tensor
DIMS = ((64, 64), (128, 64), (576, 512))


def spec_of(dims: tuple[int, int] = (32, 16), dtype: str = "float32", **options: Any) -> Any:
    options = {"mask_mod": causal, "shared_kv": True, **options}
    return fg.AttentionSpec(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, **options)


def operands(dims: tuple[int, int] = (32, 16), dtype: torch.dtype = torch.float32) -> Any:
    q, kv = normal((2, 4, 30, dims[0]), dtype, 1), normal((2, 1, 37, dims[0]), dtype, 2)
    return q.requires_grad_(), kv.requires_grad_()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dims", DIMS)
def test_gradients_of_both_uses_add(dims: tuple[int, int], dtype: str) -> None:
    """Against float64, by the rule of the sum in the dtype of the operands."""
    spec = spec_of(dims, dtype)
    q, kv = operands(dims, getattr(torch, dtype))
    out = fg.attention(spec)(q, kv, q_offset=7)
    dout = normal(out.shape, out.dtype, 3)
    found = torch.autograd.grad(out, (q, kv), dout)
    given = spec, q.detach(), kv.detach(), None, dout
    verdicts = reference.judge_gradients(found, *given, q_offset=7)
    assert list(verdicts) == ["dq", "dkv"]
    assert all(verdicts.values()), verdicts
    plain = fg.attention(spec.replace(shared_kv=False))
    assert torch.equal(out, plain(q, kv, kv[..., : dims[1]], q_offset=7))


def test_the_reference_takes_one_tensor_too() -> None:
    spec = spec_of()
    q, kv = (x.detach() for x in operands())
    found, of_two = (reference.attention(spec, q, kv, *v) for v in ((), (kv[..., :16],)))
    assert torch.equal(found[0], of_two[0])


def test_calls_are_compiled_mapped_and_differentiated_twice() -> None:
    op: Any = fg.attention(spec_of())
    q, kv = operands()
    out = op(q, kv)
    compiled: Any = torch.compile(op, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, kv), out)
    gradients = [torch.autograd.grad(each(q, kv).sin().sum(), (q, kv)) for each in (op, compiled)]
    torch.testing.assert_close(*gradients)
    mapped = torch.func.vmap(op)(q[None].expand(3, -1, -1, -1, -1), kv.expand(3, *kv.shape))
    torch.testing.assert_close(mapped, out.expand(3, *out.shape))
    plain: Any = fg.attention(spec_of(shared_kv=False))

    def of_two(q: Tensor, kv: Tensor) -> Any:
        return plain(q, kv, kv[..., :16])

    first = [
        torch.autograd.grad(each(q, kv).sin().sum(), (q, kv), create_graph=True)
        for each in (op, of_two)
    ]
    second = [
        torch.autograd.grad(torch.stack([x.sum() for x in each]).sum(), (q, kv)) for each in first
    ]
    torch.testing.assert_close(*second)
    ways = torch.ones_like(q), torch.ones_like(kv)
    moved = torch.func.jvp(op, (q, kv), ways)[1]
    step = 1e-2
    ahead, behind = (op(q + at * ways[0], kv + at * ways[1]) for at in (step, -step))
    torch.testing.assert_close(moved, (ahead - behind) / (2 * step), rtol=1e-2, atol=1e-2)
    assert op(q.to("meta"), kv.to("meta")).shape == out.shape


def test_autocast_and_statistics_take_one_tensor() -> None:
    q, kv = operands()
    op = fg.attention(spec_of(dtype=None))  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert op(q, kv).dtype == torch.bfloat16
    out, aux = op(q, kv, return_aux=fg.AuxRequest(lse=True, entropy=True, key_mass=True))
    of_two = fg.attention(spec_of(dtype=None, shared_kv=False))  # type: ignore[arg-type]
    expected = of_two(q, kv, kv[..., :16], return_aux=fg.AuxRequest(lse=True, entropy=True))
    assert torch.equal(out, expected[0])
    assert aux.entropy is not None
    assert expected[1].entropy is not None
    assert torch.equal(aux.entropy, expected[1].entropy)
    assert aux.key_mass is not None
    assert aux.key_mass.shape == (2, 4, 37)


def test_the_registered_operator_passes_torchs_checks() -> None:
    spec = spec_of(name="shared_kv_opcheck")
    fg.attention(spec)
    q, kv = operands()
    overload = torch.ops.flashgen.shared_kv_opcheck.default
    assert passes_opcheck(overload, (q, kv, kv[..., :16], None, None, None))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda op, q, kv: op(q, kv, kv), "keys and values are one tensor, but the call has two"),
        (lambda op, q, kv: op(q), "k is missing"),
        (lambda op, q, kv: op(q, kv[..., :16]), "the last dimension of k is not the spec's"),
        (lambda op, q, kv: op(q, kv.bfloat16()), "k does not have the dtype of q"),
        (lambda op, q, kv: op(q, kv[0]), "k has 3 dimensions"),
        (lambda op, q, kv: op(q, [1.0]), "k is not a torch tensor"),
    ],
)
def test_wrong_operands_are_named(call: Any, what: str) -> None:
    with pytest.raises(fg.InputError, match=what):
        call(fg.attention(spec_of()), *operands())


@pytest.mark.parametrize("name", ["kv", "window", "is_causal", "softmax_scale"])
def test_ways_out_of_wrong_names_are_calls_with_one_tensor(name: str) -> None:
    q, kv = operands()
    with pytest.raises(fg.InputError) as caught:
        fg.attention(spec_of())(q, **({"kv": kv} if name == "kv" else {"k": kv, name: 2.0}))
    assert "(q, kv" in caught.value.way_out
    assert "q, k, v" not in caught.value.way_out


def test_operands_of_two_widths_are_not_told_to_have_a_spec_of_one() -> None:
    q, kv = operands()
    with pytest.raises(fg.InputError) as caught:
        fg.attention(spec_of())(q, kv[..., :16])
    assert caught.value.way_out.endswith(", and as many columns in both of q and k")


@pytest.mark.parametrize(
    ("options", "what", "way_out"),
    [
        ({"dims": (64, 128)}, "the first columns of the keys, which are fewer", "head_dim_v=64"),
        ({"shared_kv": 1}, "shared_kv is True or False", "shared_kv=True, and op(..., kv)"),
        (
            {"kv_dtype": "int8", "paged": True, "dtype": "float16"},
            "codes of 8 bits have scales of their own",
            "kv_dtype=None; or shared_kv=False",
        ),
    ],
)
def test_specs_that_cannot_share_say_why(options: Any, what: str, way_out: str) -> None:
    with pytest.raises(fg.SpecError, match=what) as caught:
        spec_of(**options)
    assert way_out in caught.value.way_out
