"""Masks and arguments of the attention function: what is computed, and what is refused and how."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.distributed import DistributedConfig
from transformers.masking_utils import (
    causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    sdpa_mask,
)

from flashgen import FlashgenError, InputError, SpecError
from flashgen.frontends.transformers import layers
from flashgen.frontends.transformers.attention import attention
from flashgen.frontends.transformers.masks import Mask, make_mask
from flashgen.integrations import transformers as integration
from tests.support.tiers import slow
from tests.support.transformers_models import outputs_of, tiny

Tensor = torch.Tensor

HEADS, HEADS_KV, DIM = 4, 2, 16


class Layer(torch.nn.Module):
    """A layer as models pass it to their attention function."""

    is_causal = False


def qkv(seq_q: int, seq_k: int, batch: int = 2, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (HEADS, seq_q), (HEADS_KV, seq_k), (HEADS_KV, seq_k)
    q, k, v = (torch.randn(batch, *shape, dim, generator=generator) for shape in shapes)
    return q, k, v


def dense(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, added: Tensor | None = None
) -> Tensor:
    """Attention [batch, seq_q, heads, dim] by torch operations; rows without keys are 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if added is None else scores + added
    scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("q_offset", [0, 9, torch.tensor(9)], ids=["0", "9", "tensor"])
@pytest.mark.parametrize("k_offset", [0, 5])
def test_masks_see_the_positions_of_a_cache(q_offset: Any, k_offset: int) -> None:
    q, k, v = qkv(7, 19)
    padding = torch.ones(2, 24, dtype=torch.bool)
    padding[0, :6] = False

    def windowed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (kv_idx > q_idx - 8)

    sizes = 2, 7, 19, q_offset, k_offset
    mask = make_mask(*sizes, mask_function=windowed, attention_mask=padding)
    out, weights = attention(Layer(), q, k, v, mask)
    assert weights is None
    keep = sdpa_mask(
        *sizes, mask_function=windowed, attention_mask=padding, allow_is_causal_skip=False
    )
    torch.testing.assert_close(out, dense(q, k, v, keep))


def test_a_static_cache_that_advances_its_position_in_place_changes_no_mask() -> None:
    q, k, v = qkv(3, 19)
    position = torch.tensor(9)
    mask = make_mask(2, 3, 19, position, 0)
    position.add_(3)
    out, _ = attention(Layer(), q, k, v, mask)
    keep = sdpa_mask(2, 3, 19, 9, 0, allow_is_causal_skip=False)
    torch.testing.assert_close(out, dense(q, k, v, keep))


@pytest.mark.parametrize(
    "shape", [(2, 1, 7, 19), (1, 1, 7, 19), (2, HEADS, 7, 19), (2, 1, 1, 25), (1, HEADS, 7, 1)]
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_tensor_with_four_dimensions_is_a_mask_or_is_added(
    shape: tuple[int, ...], kind: str
) -> None:
    q, k, v = qkv(7, 19)
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(shape, generator=generator)
    given = values > 0 if kind == "bool" else values
    out, _ = attention(Layer(), q, k, v, given)
    given = given[..., :19]
    keep, added = (given, None) if kind == "bool" else (None, given)
    torch.testing.assert_close(out, dense(q, k, v, keep, added))


@pytest.mark.parametrize("q_offset", [0, 9, torch.tensor(9)], ids=["0", "9", "tensor"])
def test_a_position_bias_begins_at_the_first_query_of_the_call_and_is_learned(
    q_offset: Any,
) -> None:
    q, k, v = qkv(7, 19)
    bias = torch.randn(1, HEADS, 7, 19, generator=torch.Generator().manual_seed(6))
    bias.requires_grad_()
    mask = make_mask(2, 7, 19, q_offset, 0)
    out, _ = attention(Layer(), q, k, v, mask, position_bias=bias)
    keep = sdpa_mask(2, 7, 19, q_offset, 0, allow_is_causal_skip=False)
    expected = dense(q, k, v, keep, bias)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad(out, bias, weights)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, bias, weights)[0])


@pytest.mark.parametrize("q_offset", [0, 12, torch.tensor(12)], ids=["0", "12", "tensor"])
def test_sinks_with_a_logit_for_each_row_of_the_call_are_learned(q_offset: Any) -> None:
    q, k, v = qkv(7, 19)
    sinks = torch.randn(2, HEADS, 7, 1, generator=torch.Generator().manual_seed(6))
    sinks.requires_grad_()
    out, _ = attention(Layer(), q, k, v, make_mask(2, 7, 19, q_offset), sinks=sinks)
    keep = sdpa_mask(2, 7, 19, q_offset, allow_is_causal_skip=False)
    # A sink is a key whose score is given and whose value is 0.
    more = [torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (k, v)]
    added = torch.cat([sinks.new_zeros(2, HEADS, 7, 19), sinks], 3)
    expected = dense(q, *more, torch.nn.functional.pad(keep, (0, 1), value=True), added)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad(out, sinks, weights)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, sinks, weights)[0])


def test_rows_of_sinks_alone_are_0_and_sinks_for_other_rows_are_refused() -> None:
    q, k, v = qkv(7, 19)
    mask = make_mask(2, 7, 19, attention_mask=torch.arange(19).expand(2, -1) > 3)
    sinks = torch.full((1, HEADS, 1, 1), -torch.inf)
    out, _ = attention(Layer(), q, k, v, mask, sinks=sinks)
    torch.testing.assert_close(out, attention(Layer(), q, k, v, mask)[0])
    error = refused("sinks do not broadcast", sinks=torch.zeros(HEADS))
    assert f"({HEADS},)" in error.numbers


def test_a_bias_that_a_model_adds_to_its_mask_is_added_to_the_scores() -> None:
    q, k, v = qkv(7, 19)
    bias = torch.randn(1, HEADS, 7, 19, generator=torch.Generator().manual_seed(6))
    mask = make_mask(2, 7, 19, 12)
    keep = sdpa_mask(2, 7, 19, 12, allow_is_causal_skip=False)
    for biased in (mask + bias, bias + mask):
        out, _ = attention(Layer(), q, k, v, biased)
        torch.testing.assert_close(out, dense(q, k, v, keep, bias))


def test_slopes_of_alibi_are_a_position_bias_of_one_row() -> None:
    q, k, v = qkv(7, 7)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    bias = (slopes[:, None] * torch.arange(1 - 7, 1)).view(1, HEADS, 1, 7)
    out, _ = attention(Layer(), q, k, v, make_mask(2, 7, 7), position_bias=bias)
    keep = sdpa_mask(2, 7, 7, allow_is_causal_skip=False)
    torch.testing.assert_close(out, dense(q, k, v, keep, bias))


def test_head_dims_that_are_no_multiple_of_8_are_padded() -> None:
    q, k, v = qkv(7, 19, dim=13)
    out, _ = attention(Layer(), q, k, v[..., :11], None)
    torch.testing.assert_close(out, dense(q, k, v[..., :11], None))


@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_packed_sequences_are_found_in_position_ids(compiled: bool) -> None:
    model = tiny("mistral")
    ids = model.inputs(length=60)["input_ids"]
    positions = torch.cat([torch.arange(25), torch.arange(35)]).expand(2, -1)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    made, eager = model.model("fg"), model.model("eager")
    with torch.no_grad():
        found = made(**inputs).logits
        torch.testing.assert_close(found, eager(**inputs).logits, atol=1e-4, rtol=1e-4)
        if compiled:
            graph = torch.compile(made, fullgraph=True, backend="eager")
            assert torch.equal(graph(**inputs).logits, found)


def test_chunked_masks_start_after_the_padding() -> None:
    config = hf.LlamaConfig(num_hidden_layers=1, attn_implementation="fg")
    integration.register()
    config._attn_implementation, config.attention_chunk_size = "fg", 8
    padding = torch.ones(2, 30, dtype=torch.long)
    padding[0, :5] = 0
    given = {
        "config": config,
        "inputs_embeds": torch.zeros(2, 30, 1),
        "attention_mask": padding,
        "past_key_values": None,
    }
    mask = create_chunked_causal_mask(**given)
    q, k, v = qkv(30, 30)
    out, _ = attention(Layer(), q, k, v, mask)
    config._attn_implementation = "sdpa"
    keep = create_chunked_causal_mask(**given)
    torch.testing.assert_close(out, dense(q, k, v, keep))


@pytest.mark.parametrize("compose", ["or", "and"])
def test_a_mask_function_of_the_user_is_composed_with_that_of_the_model(compose: str) -> None:
    groups = torch.randint(3, (2, 30), generator=torch.Generator().manual_seed(2))

    def same_group(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return groups[b, q_idx] == groups[b, kv_idx]

    config = hf.LlamaConfig(num_hidden_layers=1)
    integration.register()
    q, k, v = qkv(30, 30)
    results = []
    for name in ("fg", "sdpa"):
        config._attn_implementation = name
        mask = create_causal_mask(
            config, torch.zeros(2, 30, 1), None, None, **{f"{compose}_mask_function": same_group}
        )
        results.append(mask)
    out, _ = attention(Layer(), q, k, v, results[0])
    torch.testing.assert_close(out, dense(q, k, v, results[1]))


def test_functions_of_the_same_operations_share_one_traced_mask() -> None:
    def window(size: int) -> Callable[..., Any]:
        return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx > q_idx - size)

    first, again, other = (make_mask(1, 4, 4, mask_function=window(n)) for n in (5, 5, 6))
    assert first.name == again.name != other.name


# ---- models


@pytest.mark.parametrize("name", [*map(slow, ("llama", "gemma3", "gpt_oss", "t5", "bert"))])
def test_a_model_compiles_to_one_graph_after_one_call(name: str) -> None:
    model = tiny(name)
    made, inputs = model.model("fg").train(), model.inputs(length=40)
    if name == "gpt_oss":  # eager experts loop over data
        made.set_experts_implementation("grouped_mm")
    expected = outputs_of(made, inputs)
    graph = torch.compile(made, fullgraph=True, backend="aot_eager" if name == "llama" else "eager")
    found = outputs_of(graph, inputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    queries = [
        p for n, p in made.named_parameters() if n.endswith(("q_proj.weight", "query.weight"))
    ]
    assert queries or name == "t5"
    assert all(p.grad is not None and p.grad.any() for p in queries)


def test_dynamic_floats_and_sizes_of_a_layer_are_one_graph() -> None:
    q, k, v = qkv(7, 7, dim=20)
    layer = Layer()
    layer.softcap, layer.scaling = 3.0, 0.3

    def call(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        options = {"softcap": layer.softcap, "scaling": layer.scaling, "dropout": dropout}
        return attention(layer, q, k, v, None, **options)[0]

    torch._dynamo.reset()
    graph = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(graph(q, k, v, 0.0), call(q, k, v, 0.0))
    layer.softcap = 4.0
    torch.testing.assert_close(graph(q, k, v, 0.0), call(q, k, v, 0.0))
    assert not torch.equal(graph(q, k, v, 0.5), call(q, k, v, 0.0))


def test_kinds_of_layers_that_are_new_in_a_graph_do_not_break_it() -> None:
    """A first layer of the second kind comes behind one of the first, whose operator is kept."""
    q, k, v = qkv(7, 7)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers = (attention(Layer(), q, k, v, None, softcap=cap)[0] for cap in (2.5, 3.5))
        return torch.stack(list(layers))

    torch._dynamo.reset()
    found = torch.compile(call, fullgraph=True, backend="eager")(q, k, v)
    assert torch.equal(found, call(q, k, v))


def test_a_compiled_model_without_an_earlier_call_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "_names_of_masks", {})
    model = tiny("llama")
    graph = torch.compile(model.model("fg"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="one call of the model that is not compiled"):
        graph(**model.inputs(length=21))


def test_models_and_their_masks_can_be_copied_and_pickled() -> None:
    model = tiny("mistral")
    made, inputs = model.model("fg"), model.inputs(length=40)
    expected = outputs_of(made, inputs)
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(outputs_of(twin, inputs), expected)


def test_gradient_checkpointing_drops_the_same_elements_again() -> None:
    model = tiny("llama")
    inputs = model.inputs(length=40)
    gradients = []
    for checkpointing in (False, True):
        made = model.model("fg", dropout=0.2).train()
        if checkpointing:
            made.gradient_checkpointing_enable()
        torch.manual_seed(3)
        outputs_of(made, inputs).sum().backward()
        gradients.append(made.model.layers[0].self_attn.q_proj.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_modes_without_gradients(context: Any) -> None:
    model = tiny("llama")
    made, inputs = model.model("fg"), model.inputs(length=40)
    expected = outputs_of(made, inputs)
    with context():
        assert torch.equal(outputs_of(made, inputs), expected)


def test_autocast_runs_the_kernels_of_its_dtype() -> None:
    model = tiny("llama")
    inputs = model.inputs(length=40)
    results = []
    for attention_of in ("fg", "sdpa"):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            results.append(outputs_of(model.model(attention_of), inputs).float())
    torch.testing.assert_close(*results, atol=0.15, rtol=0.05)


def test_operators_show_the_spec_and_the_last_call_of_each_kind_of_layer() -> None:
    model = tiny("gemma2")
    outputs_of(model.model("fg"), model.inputs(length=40))
    names = [op.name for op in integration.operators()]
    wanted = "sliding_window_causal_padding_softcap"
    assert any(name.startswith(wanted) for name in names), names
    op = next(op for op in integration.operators() if op.name.startswith(wanted))
    assert op.report is not None
    assert op.report.backend == "tiled"


@pytest.mark.parametrize("seq_q", [1, 7])
@pytest.mark.parametrize("with_mask", [False, True])
def test_chosen_keys_are_those_that_a_query_attends_to(seq_q: int, with_mask: bool) -> None:
    q, k, v = qkv(seq_q, 19)
    generator = torch.Generator().manual_seed(8)
    chosen = torch.randint(19, (2, seq_q, 5), dtype=torch.int32, generator=generator)
    keep = torch.zeros(2, 1, seq_q, 19, dtype=torch.bool)
    keep[:, 0].scatter_(-1, chosen.long(), True)
    others = torch.tensor([-1, 19], dtype=torch.int32).expand(2, seq_q, 2)  # no key's
    chosen = torch.cat([others, chosen], -1)
    mask = make_mask(2, seq_q, 19, q_offset=9) if with_mask else None
    if with_mask:
        keep &= torch.ones(19, 19, dtype=torch.bool).tril()[9 : 9 + seq_q]
    out, _ = attention(Layer(), q, k, v, mask, indices=chosen)
    torch.testing.assert_close(out, dense(q, k, v, keep))


def test_a_model_whose_layers_choose_keys_generates_as_with_eager_attention() -> None:
    config = hf.DeepseekV32Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
        num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, index_topk=4,
        index_n_heads=2, index_head_dim=16, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    integration.register()
    ids = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(2))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    given: dict[str, Any] = {"attention_mask": padding, "max_new_tokens": 4, "do_sample": False}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    found = []
    for name in ("eager", "fg"):
        torch.manual_seed(0)
        model = hf.DeepseekV32ForCausalLM._from_config(config, attn_implementation=name).eval()
        found.append(torch.stack(model.generate(ids, **given).logits))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_heads_that_differ_between_layers_need_no_plan() -> None:
    class Differing(hf.LlamaConfig):
        def __getattribute__(self, name: str) -> Any:
            if name == "num_key_value_heads" and "closed" in vars(self):
                raise RuntimeError("may vary across layers")
            return super().__getattribute__(name)

    config = Differing(hidden_size=48, num_attention_heads=4)
    config.closed = True
    assert make_mask(1, 4, 4, config=config)


# ---- refusals


@pytest.mark.parametrize("name", ["flash_fg", "eager", "sdpa", "", "paged|fg", 3])
def test_names_that_mean_something_to_transformers_are_refused(name: Any) -> None:
    with pytest.raises(InputError, match="argument name") as refused:
        integration.register(name)
    assert 'register("fg")' in str(refused.value)


def test_another_name_can_be_registered() -> None:
    integration.register("tiled_attention")
    try:
        assert AttentionInterface()["tiled_attention"] is attention
        assert AttentionMaskInterface()["tiled_attention"] is make_mask
    finally:
        del AttentionInterface()._global_mapping["tiled_attention"]
        del AttentionMaskInterface()._global_mapping["tiled_attention"]


def refused(what: str, **options: Any) -> FlashgenError:
    q, k, v = qkv(7, 19)
    mask = options.pop("mask", None)
    layer = options.pop("layer", Layer())
    with pytest.raises(InputError, match=what) as error:
        attention(layer, q, k, v, mask, **options)
    return error.value


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cache", object()),
        ("block_indices", torch.zeros(1)),
        ("head_mask", torch.ones(1)),
        ("output_attentions", True),
    ],
)
def test_arguments_without_a_counterpart_are_refused(option: str, value: Any) -> None:
    error = refused("no kernel", **{option: value})
    assert option in error.where
    assert "eager" in error.way_out


@pytest.mark.parametrize(
    "chosen", [torch.zeros(2, 6, 3, dtype=torch.int32), torch.zeros(2, 7, 3), [0]]
)
def test_chosen_keys_of_other_sizes_are_refused(chosen: Any) -> None:
    error = refused("the chosen keys are no integers", indices=chosen)
    assert "indices" in error.where
    assert "eager" in error.way_out


def test_a_causal_layer_without_a_mask_is_refused() -> None:
    layer = Layer()
    layer.is_causal = True
    error = refused("a causal layer has no mask", layer=layer)
    assert "register()" in error.way_out


def test_a_causal_layer_may_say_so_where_no_mask_is_needed() -> None:
    q, k, v = qkv(19, 19)
    out, _ = attention(Layer(), q, k, v, None, is_causal=True)
    torch.testing.assert_close(out, dense(q, k, v, torch.ones(19, 19, dtype=torch.bool).tril()))


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        (torch.ones(2, 19), "neither a mask of flashgen nor a tensor with four dimensions"),
        ("causal", "neither a mask of flashgen nor a tensor"),
        (torch.ones(2, 1, 7, 19, dtype=torch.int64), "a mask of integers"),
        (torch.ones(2, 1, 7, 18), "does not broadcast"),
        (torch.ones(3, 1, 7, 19), "does not broadcast"),
    ],
)
def test_unknown_masks_are_refused(mask: Any, what: str) -> None:
    assert refused(what, mask=mask).way_out


@pytest.mark.parametrize("fake", [False, True], ids=["meta", "fake"])
@pytest.mark.parametrize("kind", ["causal", "padding", "packed"])
def test_a_model_computes_shapes_of_tensors_without_values(
    kind: str, fake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_names_of_masks", {})  # its masks are new

    def logits() -> torch.Size:
        device = "cpu" if fake else "meta"
        model = tiny("gemma2").model("fg", layers=2)
        model = model if fake else model.to(device)
        ids = torch.zeros(1, 9, dtype=torch.int64, device=device)
        given: dict[str, Any] = {}
        if kind == "padding":
            given["attention_mask"] = torch.ones_like(ids)
        if kind == "packed":
            ends = torch.zeros(3, dtype=torch.int32, device=device)
            given |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        shape: torch.Size = model(ids, **given).logits.shape
        return shape

    with FakeTensorMode() if fake else nullcontext():
        assert logits() == (1, 9, 97)


def test_a_mask_of_padding_with_three_dimensions_is_refused_with_a_way_out_that_works() -> None:
    given = tiny("llama").inputs(length=6)
    model = tiny("llama").model("fg", layers=1)
    who = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        with pytest.raises(InputError, match="has two dimensions") as error:
            model(given["input_ids"], attention_mask=who)
        assert "(2, 6, 6)" in error.value.numbers
        found = model(given["input_ids"], attention_mask=who[:, None]).logits
        torch.testing.assert_close(found, model(given["input_ids"]).logits)


def test_a_mask_for_other_sizes_is_refused() -> None:
    error = refused("made for other sizes", mask=make_mask(2, 7, 18))
    assert "(2, 7, 18)" in error.numbers


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 1), (3, 3), (4, 2)])
def test_a_plan_that_would_divide_a_head_is_refused(
    monkeypatch: pytest.MonkeyPatch, heads: int, heads_kv: int
) -> None:
    config = hf.LlamaConfig(hidden_size=48, num_attention_heads=heads, num_key_value_heads=heads_kv)
    config.distributed_config = DistributedConfig(tp_size=2)
    assert make_mask(1, 4, 4, config=config)  # in one process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    if heads_kv == 2:
        assert make_mask(1, 4, 4, config=config)
        return
    with pytest.raises(InputError, match="among the ranks of its plan") as caught:
        make_mask(1, 4, 4, config=config)
    assert caught.value.numbers == f"{min(heads, heads_kv)} heads, 2 ranks"


def test_a_mask_that_kernels_cannot_express_names_the_operation() -> None:
    def noisy(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.rand(()) > 0.5

    with pytest.raises(SpecError, match="random"):
        make_mask(1, 4, 4, mask_function=noisy)


def test_a_branch_on_a_position_is_refused_whatever_it_returns_at_position_0() -> None:
    def branching(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return causal_mask_function(b, h, q_idx, kv_idx) if q_idx > 3 else kv_idx >= 0

    with pytest.raises(SpecError):
        make_mask(1, 4, 4, mask_function=branching)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: torch.zeros(2, 1, 4, 4).masked_fill(mask, 0.0),
        lambda mask: mask[:, :, 1:],
        lambda mask: mask.sum(),
    ],
    ids=["masked_fill", "slice", "method"],
)
def test_a_model_that_computes_with_its_mask_gets_an_error(use: Callable[[Mask], Any]) -> None:
    with pytest.raises(InputError, match="computes with its mask") as error:
        use(make_mask(2, 4, 4))
    assert "eager" in error.value.way_out


def test_a_model_whose_layers_drop_a_mask_that_is_no_tensor_is_refused() -> None:
    config = hf.DogeConfig(
        vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    integration.register()
    model = hf.DogeForCausalLM._from_config(config, attn_implementation="fg")
    with pytest.raises(InputError, match="tells a BlockMask from a tensor") as caught:
        model(torch.ones(1, 5, dtype=torch.int64))
    assert "sdpa" in caught.value.way_out


@pytest.mark.parametrize("offset", [0, 12, torch.tensor(12)], ids=["first", "cached", "static"])
def test_rows_may_be_cut_from_a_mask(offset: Any) -> None:
    """Gemma 4 computes its last layers for the positions whose logits are wanted."""
    q, k, v = qkv(7, 19)
    padding = torch.ones(2, 19, dtype=torch.bool)
    padding[0, :3] = False
    bias = torch.randn(1, 1, 7, 19, generator=torch.Generator().manual_seed(1))
    mask = make_mask(2, 7, 19, q_offset=offset, attention_mask=padding) + bias
    whole = attention(Layer(), q, k, v, mask)[0]
    for rows in (slice(-1, None), slice(2, 5), slice(0, None)):
        cut = mask[:, :, rows, :]
        assert cut.shape == (2, 1, len(range(7)[rows]), 19)
        found = attention(Layer(), q[:, :, rows], k, v, cut)[0]
        torch.testing.assert_close(found, whole[:, rows])
    with pytest.raises(InputError, match="computes with its mask"):
        mask[:, :, ::2, :]


def test_trailing_keys_may_be_cut_from_a_mask() -> None:
    mask = make_mask(2, 4, 4)
    assert mask[:, :, :, :4].shape == (2, 1, 4, 4)
    assert mask[..., :3].shape == (2, 1, 4, 3)
    assert mask.shape == (2, 1, 4, 4)
    assert mask.to("cpu").name == mask.name
    assert "of flashgen" in repr(mask)
