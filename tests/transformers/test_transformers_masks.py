"""Masks of flashgen where models use them in unusual ways: sums, cuts, names, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from flashgen import InputError
from flashgen.frontends.transformers import layers
from flashgen.frontends.transformers.attention import attention
from flashgen.frontends.transformers.masks import Mask, MaskError, make_mask
from flashgen.integrations import transformers as integration
from tests.support.tiers import slow
from tests.support.transformers_models import outputs_of, tiny

Tensor = torch.Tensor

LENGTH = 13
GROUPS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 3


class Layer(torch.nn.Module):
    """A layer as models pass it to their attention function."""

    is_causal = False


def qkv(seq_q: int = LENGTH, seq_k: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, n, 16, generator=generator) for n in (seq_q, seq_k, seq_k))
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask).nan_to_num(0.0).transpose(1, 2)


def check(function: Callable[..., Any]) -> None:
    q, k, v = qkv()
    made = make_mask(2, LENGTH, LENGTH, mask_function=function)
    keep = sdpa_mask(
        2, LENGTH, LENGTH, mask_function=function, allow_is_causal_skip=False, use_vmap=True
    )
    out, _ = attention(Layer(), q, k, v, made)
    torch.testing.assert_close(out, expected(q, k, v, keep))


def full(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return GROUPS[b, q_idx] == GROUPS[b, kv_idx]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) & (GROUPS[b, q_idx] == GROUPS[b, kv_idx])


def test_no_name_stands_for_two_masks() -> None:
    functions = [full, causal, causal_mask_function, bidirectional_mask_function]
    for size in (2, 5):

        def band_2(b: Any, h: Any, q_idx: Any, kv_idx: Any, size: int = size) -> Any:
            return abs(q_idx - kv_idx) < size

        functions.append(band_2)
    for function in (*functions, *functions):
        check(function)


@pytest.mark.parametrize("seq_q", [1, 7])
def test_biases_that_a_model_adds_to_its_mask_are_added_to_the_scores(seq_q: int) -> None:
    q, k, v = qkv(seq_q)
    bias = torch.randn(1, 4, seq_q, LENGTH, generator=torch.Generator().manual_seed(4))
    offset = LENGTH - seq_q
    mask = bias + make_mask(2, seq_q, LENGTH, offset) + bias
    assert isinstance(mask, Mask)
    keep = sdpa_mask(2, seq_q, LENGTH, offset, allow_is_causal_skip=False)
    out, _ = attention(Layer(), q, k, v, mask)
    added = (2 * bias).expand(2, -1, -1, -1).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(out, expected(q, k, v, added))


def test_a_mask_for_one_query_holds_for_all_queries_if_it_reads_none() -> None:
    q, k, v = qkv()
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, :4] = False
    mask = make_mask(2, 1, LENGTH, 0, 0, bidirectional_mask_function, padding)
    out, _ = attention(Layer(), q, k, v, mask)
    torch.testing.assert_close(out, expected(q, k, v, padding[:, None, None]))
    with pytest.raises(InputError, match="other sizes"):
        attention(Layer(), q, k, v, make_mask(2, 1, LENGTH))


def test_a_mask_that_reads_no_position_holds_for_any_number_of_them() -> None:
    """As for the keys of an encoder in a static cache, where other implementations get no mask."""
    q, k, v = qkv(3, 9)
    mask = make_mask(2, 3, LENGTH, mask_function=bidirectional_mask_function)
    out, _ = attention(Layer(), q, k, v, mask)
    torch.testing.assert_close(out, expected(q, k, v, torch.ones(3, 9, dtype=torch.bool)))


def test_a_mask_is_cut_to_the_first_keys() -> None:
    q, k, v = qkv(LENGTH, 9)
    mask = make_mask(2, LENGTH, LENGTH)
    keep = torch.ones(LENGTH, 9, dtype=torch.bool).tril()
    for cut in (mask[:, :, :, :9], mask[..., :9], mask[..., :-4]):
        out, _ = attention(Layer(), q, k, v, cut)
        torch.testing.assert_close(out, expected(q, k, v, keep))


@pytest.mark.parametrize("q_offset", [0, 5, torch.tensor(5)], ids=["0", "5", "tensor"])
def test_the_mask_of_its_one_head_can_be_negated(q_offset: int | Tensor) -> None:
    """A layer that chooses keys by scores of its own leaves out those that no query sees."""
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, :4] = False
    mask = make_mask(2, 3, LENGTH, q_offset, attention_mask=padding)
    at = int(q_offset)
    if isinstance(q_offset, Tensor):
        q_offset += 3  # as a static cache does before the first layer reads it
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[at : at + 3] & padding[:, None]
    assert mask[:, 0].dtype == torch.bool
    assert torch.equal(~mask[:, 0, :, :], ~kept)
    assert torch.equal(~mask[..., :9][:, 0], ~kept[..., :9])


@pytest.mark.parametrize("negate", [lambda mask: ~mask, lambda mask: mask.logical_not()])
def test_a_mask_can_be_negated(negate: Callable[[Mask], Tensor]) -> None:
    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, :4] = False
    mask = make_mask(2, LENGTH, LENGTH, attention_mask=padding)
    kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & padding[:, None, None]
    assert mask.dtype == torch.bool
    assert torch.equal(negate(mask), ~kept)
    assert torch.equal(negate(mask[..., :9]), ~kept[..., :9])


def test_a_speech_model_clears_rows_of_padding_before_its_convolutions() -> None:
    config = hf.LasrEncoderConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=48, subsampling_conv_channels=8, num_mel_bins=8,
    )  # fmt: skip
    integration.register()
    torch.manual_seed(0)
    model = hf.LasrEncoder._from_config(config, attn_implementation="fg").eval()
    features = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(2))
    frames = torch.arange(60) < torch.tensor([[36], [60]])
    with torch.no_grad():
        found = model(features, attention_mask=frames, output_attention_mask=True)
        model.set_attn_implementation("eager")
        wanted = model(features, attention_mask=frames).last_hidden_state
    rows = found.attention_mask.bool()
    assert not rows.all()
    torch.testing.assert_close(found.last_hidden_state[rows], wanted[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_graph_of_torch_compile_negates_the_mask_of_its_one_head() -> None:
    def scores(padding: Tensor) -> Tensor:
        mask = make_mask(2, LENGTH, LENGTH, attention_mask=padding)
        assert mask[:, 0].dtype == torch.bool
        return torch.zeros(2, LENGTH, LENGTH).masked_fill(~mask[:, 0, :, :], -1.0)

    padding = torch.ones(2, LENGTH, dtype=torch.bool)
    padding[1, :4] = False
    wanted = scores(padding)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(scores, fullgraph=True, backend="eager")(padding), wanted)
    added = torch.compile(lambda: make_mask(2, LENGTH, LENGTH)[:, 0] + 1.0, backend="eager")
    with pytest.raises(Exception, match="the model computes with its mask"):
        added()


@pytest.mark.parametrize(
    "use",
    [
        *(lambda mask: mask + 1.0, lambda mask: mask[0], lambda mask: torch.zeros(4, 4) + mask),
        *(lambda mask: mask < 0, lambda mask: mask == 0, lambda mask: mask.float()),
        lambda mask: torch.zeros(4, 4).masked_fill(mask, 0.0),
    ],
)
def test_all_else_of_a_mask_of_one_head_is_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(MaskError, match="the model computes with its mask"):
        use(make_mask(2, 4, 4)[:, 0])


@pytest.mark.parametrize(
    "use",
    [
        *(lambda mask: 1.0 - mask, lambda mask: mask * -1e4, lambda mask: mask == 0),
        *(lambda mask: mask != 0, lambda mask: mask < 0, lambda mask: torch.ones(4, 4) > mask),
        *(lambda mask: (torch.ones(4, 4) + mask) / 2, lambda mask: mask.bool()),
        *(lambda mask: torch.ones(4, 4).add_(mask), lambda mask: torch.where(mask, 0.0, -1.0)),
        lambda mask: torch.softmax(torch.ones(4, 4) + mask, -1),
        lambda mask: ~(mask + torch.ones(4, 4)),
    ],
)
def test_all_else_that_is_computed_with_a_mask_is_refused(use: Callable[[Mask], Any]) -> None:
    with pytest.raises(MaskError, match="the model computes with its mask"):
        use(make_mask(2, 4, 4))


@pytest.mark.parametrize("kind", ["float64", "list", "transposed", "learned"])
def test_tensors_that_a_mask_function_reads_or_makes(kind: str) -> None:
    rows = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(5))
    double, transposed, listed = rows.double(), rows.T.contiguous().T, (rows > 0).tolist()
    learned = rows.clone().requires_grad_()
    functions: dict[str, Callable[..., Any]] = {
        "float64": lambda b, h, q, k: double[b, q] > double[b, k],
        "list": lambda b, h, q, k: torch.tensor(listed)[b, k],
        "transposed": lambda b, h, q, k: transposed[b, q] > transposed[b, k],
        "learned": lambda b, h, q, k: learned[b, k] > 0,
    }
    check(functions[kind])


def test_keys_without_contiguous_rows_and_a_head_dim_that_no_kernel_has() -> None:
    q, k, v = qkv()
    mask = make_mask(2, LENGTH, LENGTH)
    out, _ = attention(Layer(), q, k.transpose(2, 3).contiguous().transpose(2, 3), v, mask)
    torch.testing.assert_close(out, attention(Layer(), q, k, v, mask)[0])
    wide = torch.zeros(2, 4, LENGTH, 584)
    with pytest.raises(InputError, match="no kernel computes the attention of this layer"):
        attention(Layer(), wide, wide, wide, mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_compiled_model_breaks_its_graph_at_a_new_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_names_of_masks", {})
    model = tiny(name)
    made, inputs = model.model("fg"), model.inputs(length=21)
    torch._dynamo.reset()
    graph = torch.compile(made, backend="eager")
    found = [outputs_of(graph, inputs) for _ in range(2)]
    for each in found:
        torch.testing.assert_close(each, outputs_of(made, inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_model_without_a_cache_or_padding_compiles_to_one_graph_after_one_call() -> None:
    made = tiny("llama").model("fg")
    inputs: dict[str, Any] = {
        "input_ids": tiny("llama").inputs(length=21)["input_ids"],
        "use_cache": False,
    }
    expected = outputs_of(made, inputs)
    torch._dynamo.reset()
    graph = torch.compile(made, fullgraph=True, backend="eager")
    torch.testing.assert_close(outputs_of(graph, inputs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("strict", [False, slow(True)])
def test_a_layer_is_exported(strict: bool) -> None:
    """A strict export needs one call before it, of which it says so."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        apart = (q_idx - kv_idx + strict) % 3 * 2 // 2 / 2
        return (GROUPS[b, q_idx] == GROUPS[b, kv_idx]) & ~(apart != 1) | (q_idx**2 < -kv_idx)

    class Exported(Layer):
        def forward(self, *operands: Tensor) -> Tensor:
            return attention(self, *operands, make_mask(2, LENGTH, LENGTH, mask_function=near))[0]

    layer = Exported()
    if strict:
        with pytest.raises(Exception, match="needs one call of the model that is not compiled"):
            torch.export.export(layer, qkv(), strict=True)
    wanted = layer(*qkv())
    torch._dynamo.reset()
    graph = torch.export.export(layer, qkv(), strict=strict).module()
    assert torch.equal(graph(*qkv()), wanted)


def test_a_call_that_jit_traces_is_refused_as_one() -> None:
    model = tiny("llama")
    inputs = model.inputs(length=9)
    with pytest.raises(InputError, match=r"torch\.jit\.trace cannot record"):
        torch.jit.trace(model.model("fg"), (inputs["input_ids"],), strict=False)


def test_a_record_is_the_same_while_torch_compile_traces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled model finds the expression of a mask by the record of an earlier call."""
    keys: list[object] = []

    def known(key: object) -> str:
        keys.append(key)
        return ""

    known._dynamo_marked_constant = True
    monkeypatch.setattr(layers, "known_name", known)
    kept = torch.ones(2, 8, dtype=torch.bool)

    def mask(b, h, q, k):
        near = (q - k < 5).to(q.device) & (k <= q)
        return near & kept[b, k].to(q.device) & q.new_ones((), dtype=torch.bool)

    def run(x: torch.Tensor) -> torch.Tensor:
        layers.known_name(layers.record_mask(mask, torch.device("cpu")).key)
        return x + 1

    run(torch.ones(2))
    torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2))
    assert keys[0] == keys[-1]
    assert len(keys) >= 2
