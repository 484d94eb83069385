"""What an error of the operator says to try does what was meant, when it is typed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flashgen as fg
from flashgen.frontends.distributed.sharding import sharding_of
from flashgen.shared.errors import FlashgenError, InputError, SpecError
from tests.support.shapes import Case

WINDOW = fg.Scalar("window", "int32")
PLAIN = fg.AttentionSpec(head_dim=16, dtype="float32", name="plain")
WINDOWED = fg.AttentionSpec(
    lambda b, h, q, k: q - k < WINDOW, lambda s, b, h, q, k: s * 1.5, head_dim=16, dtype="float32"
)
CAPTURES: dict[fg.AttentionSpec, dict[str, Any]] = {PLAIN: {}, WINDOWED: {"window": 5}}


def operands(batch=2, heads_kv=4):
    return Case(8, 8, batch, 4, heads_kv, "float32", 16).tensors()


def refusal(call, *given, **options):
    with pytest.raises(FlashgenError) as caught:
        call(*given, **options)
    return caught.value


def typed(error, **names):
    """The value of the last line of what the error says to try."""
    *lines, last = error.way_out.replace("=...", "=5").partition(": k and v")[0].split("\n")
    space = {"fg": fg, "torch": torch, **names}
    exec("\n".join(lines), space)
    return eval(last, space)


def distance():
    return torch.arange(8)[:, None] - torch.arange(8)


def expected(spec, q, k, v, keep=None, bias=None):
    scores = 0.25 * q @ k.transpose(2, 3)
    if spec is WINDOWED:
        scores = (scores * 1.5).masked_fill(distance() >= 5, -torch.inf)
    if bias is not None:
        scores = scores + bias
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


MASKS = {  # each row keeps a key that is near
    "of all": (random(2, 4, 8, 8) < 0.5) | (distance() == 0),
    "of heads": (random(4, 8, 8) < 0.5) | (distance() == 0),
    "of pairs": (random(8, 8) < 0.5) | (distance() == 0),
    "of keys": torch.tensor([True, False] * 4).expand(2, 1, 1, 8),
    "floats": random(8, 8),
    "narrow floats": random(2, 1, 8, 8).bfloat16(),
    "bytes": ((random(2, 1, 8, 8) < 0.5) | (distance() == 0)).byte(),
}


@pytest.mark.parametrize("spec", [PLAIN, WINDOWED])
@pytest.mark.parametrize("name", ["is_causal", "causal"])
def test_is_causal_adds_a_mask_to_that_of_the_spec(name, spec):
    op, (q, k, v) = fg.attention(spec), operands()
    error = refusal(op, q, k, v, **CAPTURES[spec], **{name: True})
    assert "mask_mod=" in error.way_out
    out = typed(error, op=op, q=q, k=k, v=v)
    torch.testing.assert_close(out, expected(spec, q, k, v, distance() >= 0))


@pytest.mark.parametrize("spec", [PLAIN, WINDOWED])
@pytest.mark.parametrize("name", MASKS)
def test_attn_mask_becomes_a_captured_tensor(name, spec):
    op, (q, k, v), mask = fg.attention(spec), operands(), MASKS[name]
    errors = [refusal(op, q, k, v, **CAPTURES[spec], attn_mask=mask)]
    if spec is PLAIN:
        errors.append(refusal(op, q, k, v, mask))
    for error in errors:
        out = typed(error, op=op, q=q, k=k, v=v, attn_mask=mask)
        if mask.is_floating_point():
            torch.testing.assert_close(out, expected(spec, q, k, v, bias=mask.float()))
        else:
            torch.testing.assert_close(out, expected(spec, q, k, v, keep=mask.bool()))
    if spec is PLAIN and mask.dtype in (torch.bool, torch.float32):
        torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize("spec", [PLAIN, WINDOWED])
def test_options_of_other_functions_have_a_way_out(spec):
    op, (q, k, v) = fg.attention(spec), operands(heads_kv=2)

    def causal(b, h, q, k):
        return q >= k

    def halved(s, b, h, q, k):
        return s / 2

    for name, value in {
        "mask_mod": causal,
        "score_mod": halved,
        "softmax_scale": 0.5,
        "enable_gqa": True,
    }.items():
        error = refusal(op, q, k, v, **CAPTURES[spec], **{name: value})
        names = {name: value, "mask_mod": causal, "score_mod": halved}
        if spec is WINDOWED and name in ("mask_mod", "score_mod"):
            continue  # the spec that the lines make has other captures
        assert typed(error, op=op, q=q, k=k, v=v, **names).isfinite().all()


def test_an_argument_that_asks_for_something_is_not_only_left_out():
    op, (q, k, v) = fg.attention(WINDOWED), operands()
    for name in ("mask", "attention_mask", "block_mask", "attn_bias", "sliding_window", "sink"):
        way_out = refusal(op, q, k, v, window=5, **{name: torch.ones(8, 8)}).way_out
        assert way_out.startswith(f"an AttentionSpec that has what {name} stands for: mask_mod for")
        assert way_out.endswith("op(q, k, v, window=...) computes without it")


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("spec", [PLAIN, WINDOWED])
def test_sequences_and_pages_ask_for_a_spec_that_has_them(spec, cache):
    op, (q, k, v) = fg.attention(spec), operands(1)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends)
    if cache:  # the queries of both sequences see the page of their own
        k, v = torch.cat((k, k + 1)), torch.cat((v, v + 1))
        table = torch.tensor([[1], [0]], dtype=torch.int32)
        lengths = torch.tensor([3, 5], dtype=torch.int32)
        given = {"cu_seqlens_q": ends, "page_table": table, "cache_seqlens": lengths}
    error = refusal(op, q, k, v, **CAPTURES[spec], **given)
    out = typed(error, op=op, q=q, k=k, v=v, **given)
    for b, (first, end) in enumerate(((0, 3), (3, 8))):
        keys = (0, slice(first, end)) if not cache else (1 - b, slice(0, end - first))
        own = (x[None, keys[0], :, keys[1]] for x in (k, v))
        alone = op(q[:, :, first:end], *own, **CAPTURES[spec])
        torch.testing.assert_close(out[:, :, first:end], alone)


@pytest.mark.parametrize(
    ("served", "cache"),
    [({"packed": True}, True), ({"paged": True}, True), ({"paged": True}, False)],
)
def test_sequences_or_pages_ask_for_the_spec_that_has_what_is_given(served, cache):
    op, (q, k, v) = fg.attention(PLAIN.replace(**served)), operands(1)
    ends = torch.tensor([0, 8], dtype=torch.int32)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends)
    if cache:  # whose lengths are those of the keys
        table = torch.zeros((1, 1), dtype=torch.int32)
        given |= {"page_table": table, "cache_seqlens": ends[1:]}
    error = refusal(op, q, k, v, **given)
    way_out = error.way_out
    for name in given:
        way_out = way_out.replace(f"{name}=...", f"{name}={name}")
    out = eval(way_out, {"fg": fg, "op": op, "q": q, "k": k, "v": v, **given})
    torch.testing.assert_close(out, expected(PLAIN, q, k, v))


def test_scales_of_codes_ask_for_a_cache_that_has_them():
    op = fg.attention(PLAIN.replace(dtype="float16"))
    q, k, v = (x.half() for x in operands())
    for name in ("k_scale", "v_scale"):
        way_out = refusal(op, q, k, v, **{name: torch.tensor(0.5)}).way_out
        codes = eval(way_out.partition(", whose")[0], {"op": op})
        assert name in [tensor.name for tensor in codes.tensors]


def test_arguments_that_ask_for_nothing_are_left_out():
    op, (q, k, v) = fg.attention(WINDOWED), operands()
    for options in ({"is_causal": False}, {"attn_mask": None}, {"enable_gqa": False}):
        error = refusal(op, q, k, v, window=5, **options)
        assert torch.equal(typed(error, op=op, q=q, k=k, v=v), op(q, k, v, window=5))


@pytest.mark.parametrize("batches", [(1, 3, 3), (3, 1, 1), (1, 3, 1), (3, 3, 1), (3, 1, 3)])
def test_one_batch_entry_is_expanded_to_those_of_the_others(batches):
    op, given = fg.attention(PLAIN), {}
    for name, batch in zip("qkv", batches, strict=True):
        given[name] = operands(batch)["qkv".index(name)]
    for _ in range(3):
        try:
            assert op(**given).shape[0] == 3
            break
        except InputError as error:
            text = error.way_out.partition(" to share")[0]
            given[text[0]] = eval(text, dict(given))
    assert op(**given).shape[0] == 3
    error = refusal(op, *operands(2)[:1], *operands(3)[1:])
    assert "expand" not in error.way_out


def test_missing_operands_are_named():
    op, (q, k, v) = fg.attention(PLAIN), operands()
    for call, missing in (
        (lambda: op(q), "k"),
        (lambda: op(q, k), "v"),
        (lambda: op(), "q"),
        (lambda: op(k=k, v=v), "q"),
        (lambda: op(q, k, v, 0.5), "everything else by name"),
        (lambda: fg.attention(PLAIN.replace(paged=True))(q), "page_table"),
    ):
        error = refusal(call)
        assert isinstance(error, InputError)
        assert missing in error.what
    error = refusal(lambda: op(q))
    assert (
        eval(error.way_out.partition("; ")[0], {"op": op, "q": q, "k": k, "v": v}).shape == q.shape
    )


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"causal": True}, "mask_mod=lambda b, h, q, k: q >= k"),
        ({"is_causal": True}, "mask_mod=lambda b, h, q, k: q >= k"),
        ({"window_size": 5}, "mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 1024)"),
        ({"softcap": 5.0}, "score_mod=lambda score, b, h, q, k: 50 * fg.tanh(score / 50)"),
        ({"dropout_p": 0.1}, "dropout=True, and op(q, k, v, dropout_p=0.1)"),
        ({"headdim": 64}, "head_dim=..."),
        ({"mask": lambda b, h, q, k: q >= k}, "mask_mod=..."),
        ({"unheard_of": 1}, "mask_mod=..."),
    ],
)
def test_options_that_a_spec_does_not_have_are_named(options, way_out):
    for make in (fg.AttentionSpec, PLAIN.replace):
        error = refusal(make, **options)
        assert isinstance(error, SpecError)
        assert error.way_out == way_out
        assert error.where.startswith("tests/ops/test_ways_out.py:")
    if "lambda" in way_out:
        assert eval(f"fg.AttentionSpec({way_out})", {"fg": fg}).name


def test_options_by_position_are_counted():
    assert isinstance(refusal(fg.AttentionSpec, None, mask_mod=None), SpecError)
    assert isinstance(refusal(fg.AttentionSpec, *[None] * 30), SpecError)


def test_an_uneven_head_tail_is_not_told_to_try_head_tail():
    error = refusal(sharding_of, "head_tail", 4, 33)
    assert "head_tail" not in error.way_out
    assert sharding_of("head_tail", 4, int(error.way_out.split()[0])).length == 4 * 34
    assert sharding_of("contiguous", 4, 33).length == 4 * 33


@pytest.mark.parametrize(
    ("dim", "meant"),
    [("head", "heads"), ("Seq_K", "seq_k"), ("kv_heads", "heads_kv"), ("batches", "batch")],
)
def test_a_dimension_like_a_known_one_is_refused(dim, meant):
    error = refusal(fg.Tensor, "bias", (dim, "seq_k"))
    assert f"did you mean {meant!r}?" in error.what
    for name in error.way_out.split('"')[1:4:2]:
        fg.Tensor("bias", (name, "seq_k"))
    for name in ("tokens", "n", "distances", "rows", "blocks_q", "keys", "head_dim"):
        fg.Tensor("bias", (name,))
