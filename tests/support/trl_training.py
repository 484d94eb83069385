"""Trainings by TRL: a tiny random Llama, a tokenizer and texts, made without any download."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from flashgen.integrations import transformers as integration
from tests.support import kept_attention
from tests.support.transformers_models import TEXT, InFloat64

Tensor = torch.Tensor

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = TEXT["vocab_size"] - len(SPECIAL)


def tokenizer() -> Any:
    words = [*SPECIAL.values(), *(f"w{number}" for number in range(WORDS))]
    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(numbers, unk_token=SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)


def texts(count: int = 12, longest: int = 40) -> list[str]:
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, longest, (count,), generator=draw).tolist()
    words = [torch.randint(WORDS, (length,), generator=draw).tolist() for length in lengths]
    return [" ".join(f"w{number}" for number in each) for each in words]


def llama(attention: str, make: Any = LlamaForCausalLM, **options: Any) -> Any:
    """The model with the same weights each time."""
    integration.register()
    kept_attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(**{**TEXT, "pad_token_id": 0, **options})
    return make._from_config(config, attn_implementation=attention)


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Arguments of all trainings.

    The optimizer is SGD: a step of Adam has the size of the learning rate wherever a gradient is
    not 0, also where rounding alone made it.
    """
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        **options,
    }


class Trained(NamedTuple):
    """The losses of all steps, and the gradients of the first."""

    losses: list[float]
    gradients: dict[str, Tensor]


class _Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        if not self.found:
            each = model.named_parameters()
            self.found = {name: p.grad.clone() for name, p in each if p.grad is not None}


def trained(make_trainer: Callable[..., Any], exact: bool = False) -> Trained:
    """A training.

    Args:
        make_trainer: makes a trainer with the given callbacks.
        exact: whether it is in float64.
    """
    datasets.disable_progress_bars()
    gradients = _Gradients()
    trainer = make_trainer(callbacks=[gradients])
    if exact:
        trainer.model.double()
    with InFloat64() if exact else nullcontext():
        trainer.train()
    history = trainer.state.log_history
    return Trained([each["loss"] for each in history if "loss" in each], gradients.found)


def sft(
    attention: str,
    folder: Path,
    *,
    peft_config: Any = None,
    exact: bool = False,
    dropout: float = 0.0,
    layers: int = 2,
    **options: Any,
) -> Trained:
    """A training by SFTTrainer; ``options`` are those of SFTConfig."""
    model = llama(attention, attention_dropout=dropout, num_hidden_layers=layers)
    if exact:  # `InFloat64` ends before a checkpointed layer is computed again
        options["gradient_checkpointing"] = False

    def make_trainer(**more: Any) -> Any:
        return SFTTrainer(
            model,
            args=SFTConfig(**arguments(folder, **{"max_length": 64, **options})),
            train_dataset=datasets.Dataset.from_dict({"text": texts()}),
            processing_class=tokenizer(),
            peft_config=deepcopy(peft_config),
            **more,
        )

    return trained(make_trainer, exact)
