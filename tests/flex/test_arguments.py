"""The arguments of flex_attention: torch's semantics and exceptions."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import flashgen as fg
from flashgen import InputError
from tests.support.flex_mods import MAKERS, causal_mask, noise, operands, torch_answer


def softcap(score, b, h, q_idx, kv_idx):
    return 2 * torch.tanh(score / 2)


def close(given, wanted) -> None:
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


def test_the_signature_is_torchs_and_takes_what_it_refuses() -> None:
    def names(function):
        parameters = inspect.signature(function).parameters.values()
        return [
            (p.name, p.kind, None if p.default is p.empty else p.default)
            for p in parameters
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]

    assert names(fg.flex_attention) == names(torch_flex.flex_attention)


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ({"scale": 10**400}, r"scale is not a positive number below 2\^127"),
        ({"return_aux": True}, "return_aux is not a torch AuxRequest"),
        ({"return_aux": {"lse": True}}, "return_aux is not a torch AuxRequest"),
        ({"query": noise(1, 2, 8, 8).to_sparse()}, "query is not an ordinary dense tensor"),
        ({"value": noise(1, 2, 8, 8).to_mkldnn()}, "value is not an ordinary dense tensor"),
        ({"score_mod": 3}, "score_mod is not a function"),
        ({"score_mod": "causal"}, "score_mod is not a function"),
    ],
)
def test_arguments_of_other_kinds(named: dict[str, object], what: str) -> None:
    given = dict(zip(("query", "key", "value"), operands(1, 2, 8, 8, dim=8), strict=True))
    with pytest.raises(fg.FlashgenError, match=what):
        fg.flex_attention(**(given | named))


def added(score, b, h, q_idx, kv_idx):
    return score + 0.1 * kv_idx


@pytest.mark.parametrize("score_mod", [None, added], ids=["no mod", "a mod"])
@pytest.mark.parametrize("blocks", [False, True], ids=["no blocks", "blocks"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", True),
        ("is_causal", False),
        ("attn_mask", noise(20, 20, seed=1) > -0.5),
        ("attn_mask", noise(20, 20, seed=1)),
        ("attn_mask", (noise(2, 1, 20, 20, seed=1) > -0.5).int()),
        ("attn_mask", noise(3, 20, 20, seed=1)),
        ("attn_mask", None),
    ],
    ids=["causal", "not causal", "bools", "floats", "integers", "heads", "none"],
)
def test_the_ways_out_of_arguments_of_other_functions_compute_what_they_stand_for(
    name: str, value: object, blocks: bool, score_mod: object
) -> None:
    query, key, values = (x.detach() for x in operands(2, 3, 20, 20))
    mask_mod = (lambda b, h, q, k: k < 15) if blocks else None
    block_mask = create_block_mask(mask_mod, None, None, 20, 20, device="cpu") if blocks else None
    with pytest.raises(InputError, match=f"no argument '{name}'") as caught:
        fg.flex_attention(query, key, values, score_mod, block_mask, **{name: value})
    assert isinstance(caught.value, TypeError)
    scope = {"fg": fg, "torch": torch, "math": math, "query": query, "key": key, "value": values}
    scope |= {"score_mod": score_mod, "block_mask": block_mask, name: value}
    out = eval(caught.value.way_out, scope)

    def wanted(s, b, h, q, k):
        s = s if score_mod is None else added(s, b, h, q, k)
        if name == "is_causal":
            return torch.where(q >= k, s, -math.inf) if value else s
        if value is None:
            return s
        given = value.expand(2, 3, 20, 20)[b, h, q, k]
        return s + given if given.is_floating_point() else torch.where(given != 0, s, -math.inf)

    close(out, torch_answer(query, key, values, mask_mod, wanted)[0])


@pytest.mark.parametrize(
    ("given", "named", "what", "way_out"),
    [
        (1, {}, "key is missing", "fg.flex_attention(q, q, q)"),
        (0, {}, "query is missing", "fg.flex_attention(q, k, v)"),
        (3, {"scal": 0.5}, "no argument 'scal'", "scale=... instead of scal=..."),
        (3, {"softmax_scale": 0.5}, "no argument 'softmax_scale'", "scale=..."),
        (3, {"dropout_p": 0.5}, "no argument 'dropout_p'", "fg.AttentionSpec"),
        (3, {"window": 5}, "no argument 'window'", "score_mod"),
    ],
)
def test_missing_and_unknown_arguments(
    given: int, named: dict[str, float], what: str, way_out: str
) -> None:
    with pytest.raises(InputError, match=what) as caught:
        fg.flex_attention(*operands(1, 2, 8, 8)[:given], **named)
    assert way_out in caught.value.way_out


def test_more_arguments_than_there_are() -> None:
    with pytest.raises(TypeError, match="9 arguments by position"):
        fg.flex_attention(*operands(1, 2, 8, 8), None, None, None, False, False, None, 5)


def test_nothing_but_tensors() -> None:
    q, k, v = operands(2, 3, 20, 30)
    close(fg.flex_attention(q, k, v), torch_answer(q, k, v, None, None)[0])


@pytest.mark.parametrize("scale", [0.5, 2.0, np.float32(0.3)])
def test_scale(scale: float) -> None:
    q, k, v = operands(2, 3, 20, 30)
    out = fg.flex_attention(q, k, v, score_mod=softcap, scale=scale)
    close(out, torch_answer(q, k, v, None, softcap, scale)[0])


def test_heads_of_queries_are_counted_in_groups() -> None:
    q, k, v = operands(2, 6, 20, 30, heads_kv=2)
    slopes = noise(6).requires_grad_()

    def mod(score, b, h, q, k):
        return score * slopes[h]

    out = fg.flex_attention(q, k, v, mod, enable_gqa=True)
    wanted, _ = torch_answer(q, k, v, None, mod)
    close(out, wanted)
    leaves = [q, k, v, slopes]
    close(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves))


@pytest.mark.parametrize("enable_gqa", [False, True])
def test_heads_that_do_not_fit(enable_gqa: bool) -> None:
    q, k, v = operands(1, 6, 8, 8, heads_kv=4 if enable_gqa else 2)
    with pytest.raises(ValueError, match="Expect ") as ours:
        fg.flex_attention(q, k, v, enable_gqa=enable_gqa)
    with pytest.raises(ValueError, match="Expect ") as torchs, torch.no_grad():
        torch_flex.flex_attention(q.detach(), k.detach(), v.detach(), enable_gqa=enable_gqa)
    assert isinstance(ours.value, InputError)
    assert str(ours.value).startswith(str(torchs.value))


def test_keys_have_heads_where_queries_have_some() -> None:
    q, k, v = operands(1, 6, 8, 8, heads_kv=2)
    for enable_gqa in (False, True):
        with pytest.raises(ValueError, match="key and value have no heads") as error:
            fg.flex_attention(q, k[:, :0], v[:, :0], enable_gqa=enable_gqa)
        assert "key and value with 6 heads" in error.value.way_out
    out = fg.flex_attention(q[:, :0], k[:, :0], v[:, :0])
    assert out.shape == (1, 0, 8, q.shape[3])


def test_lse_and_auxiliary_outputs() -> None:
    q, k, v = operands(2, 3, 20, 30)
    wanted, wanted_lse = torch_answer(q, k, v, causal_mask, softcap)
    mask = create_block_mask(causal_mask, None, None, 20, 30, device="cpu")
    out, lse = fg.flex_attention(q, k, v, softcap, mask, return_lse=True)
    close(out, wanted)
    close(lse, wanted_lse)
    out, aux = fg.flex_attention(q, k, v, softcap, mask, return_aux=AuxRequest(lse=True))
    close(aux.lse, wanted_lse)
    assert aux.max_scores is None
    assert fg.flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None
    aux = fg.flex_attention(q, k, v, softcap, mask, return_aux=AuxRequest(max_scores=True))[1]
    scores = softcap((q @ k.mT / q.shape[3] ** 0.5).float(), 0, 0, 0, 0)
    kept = causal_mask(0, 0, torch.arange(20)[:, None], torch.arange(30))
    close(aux.max_scores, scores.masked_fill(~kept, -torch.inf).amax(-1))
    assert aux.lse is None
    assert not aux.max_scores.requires_grad
    with pytest.raises(ValueError, match="Cannot specify both return_lse and return_aux"):
        fg.flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in operands(1, 2, 20, 30))
    out = fg.flex_attention(q, k, v, softcap)
    assert out.dtype == dtype
    wanted, _ = torch_answer(q.float(), k.float(), v.float(), None, softcap)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)


def test_any_head_dim() -> None:
    q, k, _ = operands(1, 2, 20, 30, dim=20)
    v = noise(1, 2, 30, 12).requires_grad_()
    out = fg.flex_attention(q, k, v, softcap)
    wanted, _ = torch_answer(q, k, v, None, softcap)
    close(out, wanted)
    close(
        torch.autograd.grad(out.square().sum(), [q, k, v]),
        torch.autograd.grad(wanted.square().sum(), [q, k, v]),
    )


def test_keys_of_one_batch() -> None:
    q, k, v = operands(3, 2, 20, 30)
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    mask = create_block_mask(causal_mask, 3, None, 20, 30, device="cpu")
    out = fg.flex_attention(q, k, v, block_mask=mask)
    wanted, _ = torch_answer(q, k, v, causal_mask, None)
    close(out, wanted)
    close(torch.autograd.grad(out.sum(), [k, v]), torch.autograd.grad(wanted.sum(), [k, v]))
    with pytest.raises(ValueError, match="same batch size"):
        fg.flex_attention(q, k, v)
    other = create_block_mask(causal_mask, 1, None, 20, 30, device="cpu")
    with pytest.raises(ValueError, match="same batch size"):
        fg.flex_attention(q, k, v, block_mask=other)


@pytest.mark.parametrize("lengths", [(16, 32), (32, 16), (64, 64), (32, 64), (16, 64)])
def test_a_block_mask_is_for_its_lengths(lengths: tuple[int, int]) -> None:
    q, k, v = (x.detach() for x in operands(1, 2, 32, 32))
    mask = create_block_mask(causal_mask, None, None, *lengths, device="cpu")
    with pytest.raises(ValueError, match="block_mask was created for") as ours:
        fg.flex_attention(q, k, v, block_mask=mask)
    kinds = ValueError, RuntimeError  # until torch 2.13, and since
    with pytest.raises(kinds, match="block_mask was created for") as torchs:
        torch_flex.flex_attention(q, k, v, block_mask=mask)
    kind = "smaller length" if "smaller length" in str(torchs.value) else "larger length"
    assert kind in str(ours.value)


def test_block_masks() -> None:
    q, k, v = operands(2, 2, 300, 300, dim=8)
    none = torch_answer(q, k, v, None, None)[0]
    noop = create_block_mask(torch_flex.noop_mask, None, None, 300, 300, device="cpu")
    close(fg.flex_attention(q, k, v, block_mask=noop), none)
    empty = torch_flex._create_empty_block_mask(q, k)
    close(fg.flex_attention(q, k, v, block_mask=empty), none)

    causal = create_block_mask(causal_mask, None, None, 300, 300, device="cpu")
    sliced = causal[:, :, :1]
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        fg.flex_attention(q[:, :, :128], k, v, block_mask=sliced)
    sliced.seq_lengths = (128, 300)
    sliced.mask_mod = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    out = fg.flex_attention(q[:, :, :128], k, v, block_mask=sliced)
    close(out, torch_answer(q, k, v, causal_mask, None)[0][:, :, :128])

    other = create_block_mask(causal_mask, 2, 4, 300, 300, device="cpu")
    with pytest.raises(ValueError, match="another H"):
        fg.flex_attention(q, k, v, block_mask=other)
    with pytest.raises(ValueError, match="not a torch BlockMask"):
        fg.flex_attention(q, k, v, block_mask=causal_mask)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"query": None}, ValueError, "query is missing"),
        ({"query": [0.5]}, ValueError, "query is not a torch tensor"),
        ({"query": torch.zeros(2, 3, 4)}, NotImplementedError, "must be 4D tensors"),
        ({"value": torch.zeros(1, 2, 8, 16).half()}, ValueError, "to have the same dtype"),
        ({"key": torch.zeros(1, 2, 8, 24)}, ValueError, "same embedding dimension"),
        ({"query": torch.zeros(1, 2, 8, 16).double()}, NotImplementedError, "dtype"),
    ],
)
def test_wrong_tensors(change: dict, kind: type[Exception], message: str) -> None:
    q, k, v = operands(1, 2, 8, 8)
    with pytest.raises(kind, match=message) as caught:
        fg.flex_attention(**{"query": q, "key": k, "value": v, **change})
    assert isinstance(caught.value, InputError)


def test_without_gradients() -> None:
    mask_mod, score_mod, _ = MAKERS["alibi_slopes"](1, 2, 20, 30)
    q, k, v = operands(1, 2, 20, 30)
    with torch.no_grad():
        out = fg.flex_attention(q, k, v, score_mod)
    assert not out.requires_grad
    close(out, torch_answer(q, k, v, mask_mod, score_mod)[0].detach())


def test_under_autocast() -> None:
    bias = noise(30).requires_grad_()
    q, k, v = operands(1, 2, 20, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fg.flex_attention(q, k, v, lambda score, b, h, q, k: score + bias[k])
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert bias.grad is not None


@pytest.mark.parametrize("sizes", [(1, 1, 0, 8), (1, 2, 8, 0), (0, 2, 8, 8)])
def test_nothing_to_compute(sizes: tuple[int, int, int, int]) -> None:
    q, k, v = operands(*sizes)
    out, lse = fg.flex_attention(q, k, v, softcap, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
