"""Packed sequences of transformers: kept apart or refused, never dropped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2TextForCausalLM

from flashgen import InputError
from flashgen.frontends.transformers.attention import attention
from flashgen.frontends.transformers.masks import make_mask
from flashgen.frontends.transformers.packed import packed
from flashgen.frontends.transformers.sequences import check_positions
from flashgen.integrations import transformers as integration
from tests.support.tiers import slow
from tests.support.transformers_models import tiny

Tensor = torch.Tensor
LENGTHS = (7, 1, 12)
LEFT_OUT = torch.arange(20) >= 8  # from here on, positions have been left out


def flattened(**options: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(4)
    samples = [{"input_ids": torch.randint(3, 97, (n,), generator=draw).tolist()} for n in LENGTHS]
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)(samples)
    return {name: batch[name] for name in batch if name != "labels"}


def apart(model: Any, ids: Tensor) -> Tensor:
    """The logits of each sample in a call of its own."""
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ["llama", slow("mistral"), slow("gemma2"), slow("gpt_oss")])
def test_boundaries_of_sequences_keep_samples_apart(name: str, cache: bool) -> None:
    batch = flattened(return_flash_attn_kwargs=True)
    model = tiny(name).model("fg", layers=2)
    with torch.no_grad():
        found = model(**batch, use_cache=cache).logits
        expected = apart(tiny(name).model("eager", layers=2), batch["input_ids"])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_boundaries_serve_without_positions_too_and_in_training() -> None:
    batch = flattened(return_flash_attn_kwargs=True, return_position_ids=False)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    ours, eager = tiny("llama").model("fg"), tiny("llama").model("eager")
    # Rotary embeddings depend on differences of positions alone.
    loss = ours(**batch).logits.square().sum()
    expected = eager(batch["input_ids"], position_ids=positions, use_cache=False).logits
    name = "model.layers.0.self_attn.q_proj.weight"
    own, other = (dict(each.named_parameters())[name] for each in (ours, eager))
    torch.testing.assert_close(
        torch.autograd.grad(loss, own)[0],
        torch.autograd.grad(expected.square().sum(), other)[0],
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("boundaries", [slow(False), slow(True)])
def test_a_compiled_model_keeps_samples_apart(boundaries: bool) -> None:
    batch = flattened(return_flash_attn_kwargs=boundaries)
    model = tiny("llama").model("fg")
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        graph = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(graph(**batch, use_cache=False).logits, expected)


def test_packed_positions_beside_a_cache_are_refused_with_a_way_out_that_works() -> None:
    batch = flattened()
    model = tiny("llama").model("fg")
    with torch.no_grad():
        with pytest.raises(InputError, match="start again") as error:
            model(**batch, use_cache=True)
        assert "use_cache=False" in error.value.way_out
        assert error.value.numbers.startswith("3 sequences in 20 rows")
        found = model(**batch, use_cache=False).logits
        expected = apart(tiny("llama").model("eager"), batch["input_ids"])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_packed_positions_that_a_model_does_not_give_its_mask_have_a_way_out_that_works() -> None:
    """GPT-OSS makes its masks without positions, so that eager attention mixes the samples."""
    batch = flattened()
    model = tiny("gpt_oss").model("fg")
    with torch.no_grad():
        with pytest.raises(InputError, match="start again") as error:
            model(**batch, use_cache=False)
        assert "cu_seq_lens_q" in error.value.way_out
        batch = flattened(return_flash_attn_kwargs=True)
        found = model(**batch, use_cache=False).logits
        expected = apart(tiny("gpt_oss").model("eager"), batch["input_ids"])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def without_positions_in_layers() -> dict[str, Any]:
    """Models whose layers get no positions. CTRL's mask does, and reads them without a cache; the
    text model of Kosmos-2 makes a tensor of its own, and NeoMME repeats them for two axes.
    """
    sizes = {"vocab_size": 97, "pad_token_id": 0, "hidden_size": 32, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 48}
    distil = {"dim": 32, "n_heads": 2, "n_layers": 1, "hidden_dim": 48, "vocab_size": 97}
    modern = {**sizes, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    kosmos = {"layers": 1, "embed_dim": 32, "attention_heads": 2, "ffn_dim": 48, "vocab_size": 97}
    neo = {**sizes, "embedding_rank": 16, "num_key_value_heads": 2, "head_dim": 16}
    ctrl = {"n_embd": 32, "n_head": 2, "n_layer": 1, "dff": 48, "vocab_size": 97}
    return {
        "ctrl": (hf.CTRLLMHeadModel, hf.CTRLConfig(**ctrl)),
        "kosmos2": (Kosmos2TextForCausalLM, hf.models.kosmos2.Kosmos2TextConfig(**kosmos)),
        "bert": (hf.BertForMaskedLM, hf.BertConfig(**sizes)),
        "distilbert": (hf.DistilBertForMaskedLM, hf.DistilBertConfig(**distil)),
        "modernbert": (hf.ModernBertForMaskedLM, hf.ModernBertConfig(**modern)),
        "neomme": (hf.NeoMMEForMaskedLM, hf.NeoMMEConfig(**neo, layer_types=["full_attention"])),
    }


@pytest.mark.parametrize(
    "name", ["bert", "kosmos2", slow("ctrl"), slow("distilbert"), "modernbert", "neomme"]
)
def test_packed_positions_that_only_the_model_reads_are_refused(name: str) -> None:
    integration.register()
    batch = flattened(return_flash_attn_kwargs=True)
    make, config = without_positions_in_layers()[name]
    torch.manual_seed(0)
    model = make._from_config(config, attn_implementation="fg").eval()
    alone = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        for mask in (None, torch.ones_like(batch["input_ids"])):
            with pytest.raises(InputError, match="start again") as error:
                model(**alone, attention_mask=mask)
            assert "cu_seq_lens_q" in error.value.way_out
        found = model(**batch).logits
        model.set_attn_implementation("eager")
        parts = [
            model(part, position_ids=torch.arange(part.shape[1])[None]).logits
            for part in batch["input_ids"].split(LENGTHS, 1)
        ]
    torch.testing.assert_close(found, torch.cat(parts, 1), atol=1e-4, rtol=1e-4)


def test_a_tensor_of_the_user_says_who_attends_to_whom() -> None:
    batch = flattened()
    packs = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    mask = (packs[:, None] == packs) & torch.ones(20, 20, dtype=torch.bool).tril()
    model = tiny("llama").model("fg", layers=1)
    with torch.no_grad():
        found = model(**batch, attention_mask=mask[None, None], use_cache=True).logits
        expected = apart(tiny("llama").model("eager", layers=1), batch["input_ids"])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_positions_of_a_mask_are_those_of_the_model_that_makes_it() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, position_ids: Tensor, own: Tensor | None = None) -> Any:
            return self.inner(own)

    class Inner(torch.nn.Module):
        def forward(self, position_ids: Tensor | None) -> Any:
            def helper() -> Any:
                return make_mask(1, 20, 20), position_ids

            return helper()[0]

    packs, own = torch.arange(20)[None] % 7, torch.arange(20)[None]
    assert Outer()(packs).positions is None
    assert Outer()(packs, own).positions is own
    assert Outer()(packs, own).to("cpu").positions is own


def of_axes(*parts: Any) -> Tensor:
    """Positions with three axes: a number is so many rows of text, sizes are those of an image."""
    rows, begin = [], 0
    for part in parts:
        if part == "next":
            begin = 0
            continue
        sizes = (part,) if isinstance(part, int) else part
        grid = torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))
        rows.append(begin + grid.reshape(len(sizes), -1).expand(3, -1))
        begin += max(sizes)
    return torch.cat(rows, -1)[:, None]


def test_packed_positions_with_several_axes_are_refused() -> None:
    for parts in ((7, "next", 5), (3, (1, 4, 2), "next", 2, (2, 1, 3)), (4, "next", (1, 2, 2))):
        positions = of_axes(*parts)
        rows = positions.shape[-1]
        with pytest.raises(InputError, match="start again"):
            check_positions(positions, None, (), (1, 2, rows, rows))
        with pytest.raises(InputError, match="start again"):
            check_positions(positions, torch.ones(1, rows), (), (1, 2, rows, rows))
    numbers = torch.tensor([[0] * 7 + [1] * 5])  # those of a mask that keeps the samples apart
    check_positions(of_axes(7, "next", 5), None, (numbers,), (1, 2, 12, 12))


def test_positions_of_images_with_several_axes_are_no_packed_ones() -> None:
    slow_video = of_axes(3, (2, 2, 3), 2)
    slow_video[0, 0, 3:9] = slow_video[0, 0, 3]  # frames of one point in time
    # Qwen2.5-Omni begins and ends a video with sound by two tokens of one position each.
    bounds = [torch.full((3, 1, 2), place) for place in (3, 29)]
    frames, sound = of_axes((1, 2, 2)), of_axes(6)
    with_sound = [of_axes(3), bounds[0], 4 + frames, 4 + sound, 24 + frames, 10 + sound, bounds[1]]
    images = of_axes(2, (1, 4, 2), (3, 2, 2), 5), of_axes((1, 2, 2), 4)
    for positions in (slow_video, torch.cat(with_sound, -1), *images):
        rows = positions.shape[-1]
        check_positions(positions, None, (), (1, 2, rows, rows))
        check_positions(positions + 7, torch.ones(1, rows), (), (1, 2, rows, rows))


def test_the_one_position_of_a_model_without_positions_is_no_packed_one() -> None:
    config = hf.DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=32, n_head=2, n_layer=1, max_ep_len=9, n_positions=32
    )
    integration.register()
    model = hf.DecisionTransformerModel._from_config(config, attn_implementation="fg").eval()
    draw = torch.Generator().manual_seed(3)
    sizes = {"states": 3, "actions": 2, "rewards": 1, "returns_to_go": 1}
    given = {name: torch.randn(2, 5, size, generator=draw) for name, size in sizes.items()}
    given |= {"timesteps": torch.arange(5).expand(2, 5)}
    padding = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    with torch.no_grad():
        found = model(**given, attention_mask=padding).action_preds
        model.set_attn_implementation("eager")
        expected = model(**given, attention_mask=padding).action_preds
    torch.testing.assert_close(found[padding == 1], expected[padding == 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "positions",
    [torch.zeros(20, dtype=torch.int64), torch.arange(20) * 2, torch.arange(20) + 9 * LEFT_OUT],
    ids=["one for all", "every second", "some left out"],
)
def test_positions_that_are_left_out_or_the_same_begin_no_sample(positions: Tensor) -> None:
    """Others attend across them, except where the mask of transformers keeps them apart."""
    draw = torch.Generator().manual_seed(6)
    given = {"input_ids": torch.randint(3, 97, (2, 20), generator=draw)}
    given |= {"position_ids": positions.expand(2, -1)}
    fg, eager = (tiny("llama").model(name) for name in ("fg", "eager"))
    ones = torch.ones_like(given["input_ids"])
    for options in ({"use_cache": True}, {"use_cache": False}, {"attention_mask": ones}):
        with torch.no_grad():
            found, expected = (model(**given, **options).logits for model in (fg, eager))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_packed_positions_beside_a_mask_without_padding_are_refused() -> None:
    batch = flattened()
    model = tiny("llama").model("fg")
    ones = torch.ones_like(batch["input_ids"])
    tail = ones.clone()
    tail[:, -3:] = 0
    for mask in (ones, tail):
        with torch.no_grad(), pytest.raises(InputError, match="start again") as error:
            model(**batch, attention_mask=mask, use_cache=False)
        assert "no attention_mask" in error.value.way_out


def test_positions_that_go_on_and_those_of_padding_are_no_packed_ones() -> None:
    given = tiny("llama").inputs(length=30)
    model = tiny("llama").model("fg")
    ids, padding = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        first = model(ids[:, :20], use_cache=True)
        cache = first.past_key_values
        rest = model(ids[:, 20:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(rest, model(ids).logits[:, 20:], atol=1e-4, rtol=1e-4)
        positions = (padding.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=padding, position_ids=positions, use_cache=True)
        assert model.generate(**given, max_new_tokens=3, do_sample=False).shape == (2, 33)


def test_contents_that_change_in_place_are_read_again() -> None:
    model = tiny("llama").model("fg")
    ids, positions = torch.arange(3, 23)[None], torch.arange(20)[None]
    with torch.no_grad():
        model(ids, position_ids=positions, use_cache=True)
        positions[:, 10:] -= 10
        with pytest.raises(InputError, match="start again"):
            model(ids, position_ids=positions, use_cache=True)


class OfDocuments(hf.LlamaForCausalLM):
    """A model of a user that makes the mask of its packed samples by itself."""

    first = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        given = locals()
        documents = (position_ids == 0).cumsum(-1)
        causal = torch.ones(20, 20, dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        mask[..., : self.first] = True  # what samples have in common
        out = super().forward(
            input_ids, position_ids=position_ids, attention_mask=mask[:, None], **options
        )
        assert given["input_ids"] is input_ids
        return out


def test_a_mask_of_a_model_s_own_may_keep_samples_apart() -> None:
    batch, config = flattened(), tiny("llama").config
    model, sdpa = (
        OfDocuments._from_config(copy.deepcopy(config), attn_implementation=attention)
        for attention in ("fg", "sdpa")
    )
    sdpa.load_state_dict(model.state_dict())
    with torch.no_grad():
        found, expected = (each.eval()(**batch).logits for each in (model, sdpa))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        model.first = 2
        with pytest.raises(InputError, match="does not keep its samples apart") as error:
            model(**batch)
    assert "attention_mask [batch, 1, rows, rows]" in error.value.way_out


def call(
    batch: int = 1, keys: int = 20, causal: bool = True, masked: Any = None, **options: Any
) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(batch, 2, n, 16, generator=draw) for n in (20, keys))
    layer = torch.nn.Module()
    given = {} if masked is None else {"mask_function": masked}
    mask = make_mask(batch, 20, keys, **given) if causal else None
    return attention(layer, q, k, k, mask, is_causal=None if causal else False, **options)[0]


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"cu_seq_lens_q": ends(0, 20)}, "no tensor of boundaries"),
        ({"cu_seq_lens_q": [0, 20], "cu_seq_lens_k": [0, 20]}, "no tensor of boundaries"),
        ({"cu_seq_lens_q": ends(0, 19), "cu_seq_lens_k": ends(0, 20)}, "do not divide the rows"),
        ({"cu_seq_lens_q": ends(0, 20), "cu_seq_lens_k": ends(1, 20)}, "do not divide the rows"),
        (dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends(0, 9, 7, 20)), "do not divide"),
        ({"cu_seq_lens_q": ends(0, 9, 20), "cu_seq_lens_k": ends(0, 8, 20)}, "other boundaries"),
        ({"cu_seqlens": ends(0, 20)}, "boundaries of sequences"),
        (
            {"batch": 2, **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends(0, 20))},
            "a batch of 1",
        ),
    ],
)
def test_boundaries_that_fit_no_row_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        call(**options)


def test_an_encoder_may_have_other_boundaries_for_its_keys() -> None:
    options = {"cu_seq_lens_q": ends(0, 9, 20), "cu_seq_lens_k": ends(0, 4, 4 + 12)}
    found = call(keys=16, causal=False, **options, max_length_q=11, max_length_k=12)
    whole = call(keys=16, causal=False)
    assert not torch.allclose(found, whole)
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 2, n, 16, generator=draw) for n in (20, 16))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(q[:, :, a:b], k[:, :, c:d], k[:, :, c:d])
        for (a, b), (c, d) in (((0, 9), (0, 4)), ((9, 20), (4, 16)))
    ]
    torch.testing.assert_close(found, torch.cat(parts, 2).transpose(1, 2))
    names = [op.name for op in integration.operators()]
    assert "full_packed" in names


def chunks(size: int = 8) -> Any:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    "masked", [chunks(), lambda b, h, q, k: (k <= q) | (k < 5)], ids=["chunks", "prefix"]
)
def test_masks_that_count_from_the_row_are_refused_beside_boundaries(masked: Any) -> None:
    boundaries = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends(0, 9, 20))
    with pytest.raises(InputError, match="counts positions from the first") as error:
        call(masked=masked, **boundaries)
    assert "use_cache=False" in error.value.way_out
    whole = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends(0, 20))
    assert torch.equal(call(masked=masked, **whole), call(masked=masked))


def test_masks_of_distances_or_of_positions_in_a_tensor_are_taken_beside_boundaries() -> None:
    boundaries = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends(0, 9, 20))
    positions = torch.cat([torch.arange(9), torch.arange(11)])[None]
    packs = (torch.arange(20) > 8).long()[None]
    for masked in (chunks(), and_masks(sliding_window_overlay(5), causal_mask_function)):
        remapped = packed(masked, positions, packs)
        torch.testing.assert_close(call(masked=remapped, **boundaries), call(masked=remapped))
    both_ways = and_masks(sliding_window_bidirectional_overlay(5), bidirectional_mask_function)
    call(masked=both_ways, **boundaries)
    window = and_masks(sliding_window_overlay(5), causal_mask_function)
    apart = packed(window, positions, packs)
    torch.testing.assert_close(call(masked=window, **boundaries), call(masked=apart))
