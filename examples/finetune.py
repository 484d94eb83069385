"""A Gemma 2 trained with transformers' Trainer: eager attention, flashgen's, and dropout.

    python examples/finetune.py                  # 200 steps, three times; two minutes
    python examples/finetune.py --steps 20 --plot build/finetune.png

A small Gemma 2 (sliding windows in every second layer, scores capped by 50 * tanh(s / 50)) learns
the characters of coriolanus.txt, from the same weights on the same batches: first with
attn_implementation="eager", then with "fg", which computes the attention by flashgen. The losses
may differ by at most 1% at every step, else the exit status is 1. A third training drops elements
of the softmax inside the kernels: of the backends of transformers, only eager attention has
softcap, window and dropout. At the end the trained model continues a line twice, with either
attention; the two texts are equal, else the exit status is 1.

On the CPU this is float32; on a GPU it is bfloat16, and the operators launch the emitted kernels.

Needs transformers, accelerate and matplotlib: pip install ".[cuda,examples]"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from loss_plot import check, plot

LARGEST_DIFFERENCE = 0.01
CONTEXT = 128
SAMPLE = 120  # characters

TEXT = Path(__file__).resolve().parent / "coriolanus.txt"
Tensor = torch.Tensor


class Pieces(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pieces of a text as the numbers of its characters, one after another."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        self.text = torch.tensor([numbers[character] for character in text])

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.text[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": piece, "labels": piece}

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.characters[number] for number in numbers)


def model_of(pieces: Pieces, attention: str, dropout: float) -> Any:
    """The model with the same initial weights each time."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=len(pieces.characters),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=32,
        max_position_embeddings=4 * CONTEXT,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return Gemma2ForCausalLM._from_config(config, attn_implementation=attention)


def train(pieces: Pieces, attention: str, dropout: float, steps: int) -> tuple[Any, list[float]]:
    """Trains a model. Returns it and the loss of each step."""
    from transformers import Trainer, TrainingArguments

    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model_of(pieces, attention, dropout),
            TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=3e-3,
                warmup_steps=min(20, steps // 4),
                lr_scheduler_type="cosine",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=0,
                bf16=gpu,
                use_cpu=not gpu,
                dataloader_pin_memory=gpu,
            ),
            train_dataset=pieces,
        )
        trainer.remove_callback(_printing())
        trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _printing() -> Any:
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback


def continued(model: Any, attention: str, pieces: Pieces, steps: int) -> str:
    """A continuation of a line of the text, drawn at temperature 0.8 with the same seed."""
    model = model.eval().float()
    model.set_attn_implementation(attention)
    start = pieces.text[None, : CONTEXT // 2].to(model.device)
    torch.manual_seed(0)
    numbers = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=steps,
        do_sample=True,
        temperature=0.8,
    )
    return pieces.decode(numbers[0, start.shape[1] :].tolist())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="number of steps of each training")
    parser.add_argument("--dropout", type=float, default=0.1, help="of the third training")
    parser.add_argument("--plot", type=Path, default=Path("build/finetune.png"), help="the plot")
    options = parser.parse_args(arguments)
    if options.steps < 1 or not 0 <= options.dropout < 1:
        parser.error("--steps is at least 1, and --dropout from 0 to below 1")
    check(parser, options.plot, "transformers", "accelerate")

    from flashgen.integrations import transformers as integration

    integration.register()
    pieces = Pieces(TEXT.read_text(encoding="utf-8"))
    kinds = [("eager", 0.0), ("fg", 0.0), *([("fg", options.dropout)] if options.dropout else [])]
    losses: dict[str, list[float]] = {}
    trained: list[Any] = []
    for attention, dropout in kinds:
        name = {"eager": "eager", "fg": "flashgen"}[attention]
        name += f", dropout {dropout:g}" if dropout else ""
        model, losses[name] = train(pieces, attention, dropout, options.steps)
        trained.append(model)
        print(f"{name:22} loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}", flush=True)

    first, second = list(losses.values())[:2]
    apart = [abs(a - b) / b for a, b in zip(second, first, strict=True)]
    title = "A small Gemma 2 with eager attention and with flashgen's"
    plot(options.plot, title, losses, apart, LARGEST_DIFFERENCE)
    for operator in integration.operators():
        report = operator.report
        ran = report.kernel.source.name if report and report.kernel else "tiled algorithms"
        print(f"{'operator':22} {operator.name}: {ran}")

    texts = [continued(trained[1], attention, pieces, SAMPLE) for attention in ("eager", "fg")]
    same = texts[0] == texts[1]
    print(f"\n{texts[1]}\n\nthe same text with eager attention: {'yes' if same else 'NO'}")
    agree = max(apart) <= LARGEST_DIFFERENCE
    print(
        f"plot {options.plot}\nlargest relative difference of losses {max(apart):.1e}, "
        f"allowed {LARGEST_DIFFERENCE:.0e}: {'pass' if agree and same else 'FAIL'}"
    )
    return 0 if agree and same else 1


if __name__ == "__main__":
    sys.exit(main())
