"""Trainings by TRL on flashgen: packed samples, adapters, checkpointing, compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("trl", reason="trains by SFTTrainer: pip install trl peft")
pytest.importorskip("peft", reason="trains adapters: pip install peft")

import datasets
import peft
from transformers import LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from flashgen import InputError
from flashgen.integrations import transformers as integration
from tests.support.tiers import slow
from tests.support.transformers_models import meet_the_rule
from tests.support.trl_training import (
    Trained,
    arguments,
    llama,
    sft,
    texts,
    tokenizer,
    trained,
)

# Adapters whose second factor is not 0, so that the first has gradients.
LORA = peft.LoraConfig(
    task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False
)
# The gradient of a factor has 4 x 64 elements or more, of which few are independent.
FEW = 1024
PACKED = {"packing": True}
PADDING_FREE = {"padding_free": True, "max_length": None}
CHECKPOINTS = {
    kind: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": kind}}
    for kind in (False, True)
}


def check(folder: Path, options: dict[str, Any], expected: dict[str, Any]) -> None:
    """Holds a training to the error rule.

    Args:
        expected: the options of the ordinary trainings, in float32 and float64.
    """
    found = sft("fg", folder, **options)
    same = [sft(each, folder, **expected) for each in ("eager", "sdpa")]
    exact, kept = (sft(each, folder, exact=True, **expected) for each in ("eager", "kept"))
    assert found.losses == pytest.approx(exact.losses, rel=2e-6)
    ordinary = [each.gradients for each in same]
    meet_the_rule(found.gradients, exact.gradients, ordinary, kept.gradients, FEW)


@pytest.mark.parametrize(
    "options",
    [
        {"peft_config": LORA, **PACKED, **CHECKPOINTS[True]},
        slow({"peft_config": LORA, **PACKED, **CHECKPOINTS[False]}),
        slow({**PACKED, "gradient_checkpointing": False}),
        slow({**PACKED, "packing_strategy": "wrapped"}),
        slow({**PACKED, "pad_to_multiple_of": 16}),
        slow(PADDING_FREE),
        slow({}),
    ],
    ids=lambda options: "-".join(name for name in options if name != "max_length"),
)
def test_a_training_meets_the_error_rule(options: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, options, options)


@pytest.mark.slow
def test_samples_without_padding_are_trained_as_if_each_had_a_row(tmp_path: Path) -> None:
    check(tmp_path, PADDING_FREE, {})


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_drops_the_same_elements_again(
    reentrant: bool, tmp_path: Path
) -> None:
    options = {"dropout": 0.25, "peft_config": LORA, **PACKED}
    whole = sft("fg", tmp_path, gradient_checkpointing=False, **options)
    again = sft("fg", tmp_path, **CHECKPOINTS[reentrant], **options)
    assert again.losses == whole.losses
    assert whole.losses != sft("fg", tmp_path, **{**options, "dropout": 0.0}).losses
    assert all(torch.equal(again.gradients[name], x) for name, x in whole.gradients.items())


def test_a_saved_model_is_trained_by_its_name_alone(tmp_path: Path) -> None:
    llama("eager").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    options = {"model_init_kwargs": {"attn_implementation": "fg", "dtype": "float32"}, **PACKED}
    trainer = SFTTrainer(
        str(tmp_path),
        args=SFTConfig(**arguments(tmp_path, max_length=64, **options)),
        train_dataset=datasets.Dataset.from_dict({"text": texts()}),
    )
    assert trainer.model.config._attn_implementation == "fg"
    found = trained(lambda callbacks: trainer)
    assert found.losses == pytest.approx(sft("eager", tmp_path, **PACKED).losses, rel=1e-5)


def test_virtual_tokens_before_packed_samples_are_refused(tmp_path: Path) -> None:
    # peft takes the positions away, and puts the tokens before the first sample alone.
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(InputError, match="do not divide the rows"):
        sft("fg", tmp_path, peft_config=virtual, **PADDING_FREE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [CHECKPOINTS[False], {}], ids=["checkpoints", "plain"])
def test_a_compiled_model_is_trained_with_the_same_losses(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    options = {"peft_config": LORA, **PACKED, "gradient_checkpointing": False, **options}
    expected = sft("fg", tmp_path, **options)
    graph = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found = sft("fg", tmp_path, **graph, **options)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, gradient in expected.gradients.items():
        of_graph = found.gradients[f"_orig_mod.{name}" if name not in found.gradients else name]
        torch.testing.assert_close(of_graph, gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_emitted_kernels_train_adapters_under_autocast(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"peft_config": LORA, "layers": 1, "max_steps": 1, **PACKED}
    same = sft("eager", tmp_path, bf16=True, **options)
    exact, kept = (sft(each, tmp_path, exact=True, **options) for each in ("eager", "kept"))
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    monkeypatch.setenv("FLASHGEN_ARCH", arch)
    found = sft("fg", tmp_path, bf16=True, **options)
    reports = [op.report for op in integration.operators() if op.report is not None]
    assert any(r.backend == "emulator" and r.kernel.plan.arch == arch for r in reports if r.kernel)
    assert found.losses == pytest.approx(exact.losses, rel=1e-3)
    meet_the_rule(found.gradients, exact.gradients, [same.gradients], kept.gradients, FEW)


def preferences(attention: str, folder: Path) -> Trained:
    pairs = {"prompt": texts()[:6], "chosen": texts()[6:], "rejected": texts()[3:9]}
    model = llama(attention)
    return trained(
        lambda **more: DPOTrainer(
            model,
            args=DPOConfig(**arguments(folder)),
            train_dataset=datasets.Dataset.from_dict(pairs),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4),
            **more,
        )
    )


def policies(attention: str, folder: Path) -> Trained:
    given = arguments(folder, per_device_train_batch_size=4)
    model = llama(attention)
    return trained(
        lambda **more: GRPOTrainer(
            model,
            args=GRPOConfig(num_generations=2, max_completion_length=8, **given),
            train_dataset=datasets.Dataset.from_dict({"prompt": texts()}),
            processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(set(each))) for each in completions],
            **more,
        )
    )


def rewards(attention: str, folder: Path) -> Trained:
    pairs = {"chosen": texts()[6:], "rejected": texts()[3:9]}
    model = llama(attention, LlamaForSequenceClassification, num_labels=1)
    return trained(
        lambda **more: RewardTrainer(
            model,
            args=RewardConfig(**arguments(folder)),
            train_dataset=datasets.Dataset.from_dict(pairs),
            processing_class=tokenizer(),
            **more,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("training", [preferences, policies, rewards])
def test_other_trainers_find_the_losses_and_gradients_of_eager_attention(
    training: Any, tmp_path: Path
) -> None:
    found, expected = (training(each, tmp_path) for each in ("fg", "eager"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, atol=1e-5, rtol=1e-3)
