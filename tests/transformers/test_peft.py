"""Adapters of peft in models on flashgen, with checkpointed layers and under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft", reason="trains adapters: pip install peft")

import peft

from tests.support.tiers import one_in, slow
from tests.support.transformers_models import InFloat64, gradients_of, meet_the_rule, tiny

Tensor = torch.Tensor
ADAPTERS = {
    # The second factor is not 0, so that the first has gradients.
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def adapted(name: str, attention: str, adapter: str = "lora", layers: int | None = None) -> Any:
    """A model with the same weights and adapters each time, in training mode."""
    model = tiny(name).model(attention, layers=layers)
    torch.manual_seed(5)
    return peft.get_peft_model(model, ADAPTERS[adapter]()).train()


def inputs_of(name: str, adapter: str) -> dict[str, Tensor]:
    given = tiny(name).inputs(length=100)
    # The tokens of a prompt have outputs, and `gradients_of` leaves out those of padding.
    return {"input_ids": given["input_ids"]} if adapter == "prompt" else given


def check(name: str, adapter: str, found: dict[str, Tensor]) -> None:
    inputs = inputs_of(name, adapter)
    same = gradients_of(adapted(name, "eager", adapter), inputs)
    with InFloat64():
        exact, kept = (
            gradients_of(adapted(name, each, adapter).double(), inputs)
            for each in ("eager", "kept")
        )
    # A factor of an adapter has few independent elements.
    meet_the_rule(found, exact, [same], kept, few=1024)


@pytest.mark.parametrize("name", one_in(3, ["llama", "gemma2", "gpt_oss", "t5", "bert", "vit"]))
def test_low_rank_adapters_meet_the_error_rule(name: str) -> None:
    check(name, "lora", gradients_of(adapted(name, "fg"), inputs_of(name, "lora")))


@pytest.mark.parametrize("adapter", ["prefix", slow("prompt")])
def test_learned_tokens_meet_the_error_rule(adapter: str) -> None:
    found = gradients_of(adapted("llama", "fg", adapter), inputs_of("llama", adapter))
    assert any("prompt_encoder" in key for key in found)
    check("llama", adapter, found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", one_in(2, ["llama", "gemma2"]))
def test_checkpointed_layers_have_the_same_gradients(name: str, reentrant: bool) -> None:
    inputs = inputs_of(name, "lora")
    whole = gradients_of(adapted(name, "fg"), inputs)
    model = adapted(name, "fg")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again = gradients_of(model, {**inputs, "use_cache": False})
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], value) for key, value in whole.items())


@pytest.mark.slow
def test_a_model_with_adapters_is_one_graph_forward_and_backward() -> None:
    inputs = {**inputs_of("llama", "lora"), "use_cache": False}
    model = adapted("llama", "fg", layers=1)
    expected = gradients_of(model, inputs)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = gradients_of(graph, inputs)
    assert len(found) == len(expected)
    for value, wanted in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-5, rtol=1e-4)


def test_merged_adapters_generate_what_eager_attention_generates() -> None:
    inputs = inputs_of("llama", "lora")
    texts = []
    for attention in ("fg", "eager"):
        model = adapted("llama", attention).eval()
        texts.append(model.generate(**inputs, max_new_tokens=5, do_sample=False))
        merged = model.merge_and_unload()
        texts.append(merged.generate(**inputs, max_new_tokens=5, do_sample=False))
    assert all(torch.equal(text, texts[0]) for text in texts)
