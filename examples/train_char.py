"""A character transformer trained with torch's attention, with flashgen's, and with dropout.

    python examples/train_char.py                 # 400 steps, three times; about two minutes
    python examples/train_char.py --dropout 0     # without the third training
    python examples/train_char.py --help

The same model is trained from the same weights on the same batches: first with
scaled_dot_product_attention(is_causal=True), then with a flashgen operator. The two losses may
differ by at most 1% at every step, else the exit status is 1. A third training drops elements of
the softmax inside the operator. Losses are printed and plotted, those on held-out text too, and at
the end the model that flashgen trained continues the text.

On the CPU this is float32 and the operator runs flashgen's tiled algorithms. On a GPU it is
bfloat16 by autocast, and the operator launches the emitted kernels, forward and backward.

The text, coriolanus.txt, is the first three acts of William Shakespeare's play Coriolanus, with
the names of speakers and without stage directions. It is in the public domain.

Needs matplotlib for the plot.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from loss_plot import check, plot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional
from train_char_model import Attention, CharTransformer, Sizes, Tensor, Text

import flashgen as fg

LARGEST_DIFFERENCE = 0.01
LEARNING_RATE = 4e-3
WARM_UP = 20  # steps
ROWS = 16  # approximate number of rows in the table of losses
SAMPLE = 300  # characters

TEXT = Path(__file__).resolve().parent / "coriolanus.txt"


def causal(b, h, q, k):
    return q >= k


def torch_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


class FlashgenAttention:
    """The same attention by a flashgen operator.

    Args:
        dropout: whether its kernels can drop elements; kernels that cannot are smaller.
    """

    def __init__(self, head_dim: int, dtype: str, *, dropout: bool) -> None:
        self.op = fg.attention(
            fg.AttentionSpec(causal, head_dim=head_dim, dtype=dtype, dropout=dropout)
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return self.op(q, k, v, dropout_p=dropout_p)

    def what_ran(self) -> str:
        """Names of the kernels, or of the algorithms, of the last forward and backward pass."""
        reports = [report for report in (self.op.report, *self.op.backward_reports) if report]
        names = [report.kernel.source.name if report.kernel else "" for report in reports]
        return ", ".join(filter(None, names)) or f"{reports[0].backend} algorithms, no kernel"


@dataclass(frozen=True)
class Setting:
    """The settings that all trainings share.

    Attributes:
        device: "cpu" or "cuda".
        dtype: "float32", or "bfloat16" for weights in float32 under autocast.
    """

    text: Text
    sizes: Sizes
    steps: int
    seed: int
    device: str
    dtype: str

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")


@dataclass
class Training:
    """One training and its results.

    Attributes:
        dropout: probability of dropping an element of the softmax while training.
        losses: the loss of the batch of every step, before the step; nats per character.
        held_out: the loss on the held-out text after the last step, without dropout.
        seconds: the duration of all steps.
    """

    name: str
    attention: Attention
    dropout: float = 0.0
    losses: list[float] = field(default_factory=list)
    held_out: float = math.nan
    seconds: float = math.nan


def train(training: Training, setting: Setting, step_done: Callable[[], None]) -> CharTransformer:
    """Trains from the weights that the seed gives and fills in the results of ``training``."""
    torch.manual_seed(setting.seed)  # the weights, and what dropout draws
    model = CharTransformer(
        len(setting.text.characters), setting.sizes, training.attention, training.dropout
    ).to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))

    def factor(step: int) -> float:
        """Factor on the learning rate: a linear warm-up, then a cosine down to a tenth."""
        return min((step + 1) / WARM_UP, 0.55 + 0.45 * math.cos(math.pi * step / setting.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start = time.perf_counter()
    for pieces, following in setting.text.batches(setting.sizes, setting.steps, setting.seed):
        with setting.autocast():
            loss = model.loss(pieces.to(setting.device), following.to(setting.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        training.losses.append(loss.item())
        step_done()
    training.seconds = time.perf_counter() - start

    model.eval()
    pieces, following = setting.text.held_out_pieces(setting.sizes)
    with torch.no_grad(), setting.autocast():
        training.held_out = model.loss(
            pieces.to(setting.device), following.to(setting.device)
        ).item()
    return model


def train_all(trainings: Sequence[Training], setting: Setting) -> list[CharTransformer]:
    """Runs the trainings one after another, with a progress bar for each on stderr."""
    models = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for training in trainings:
            bar = progress.add_task(training.name, total=setting.steps, loss=math.nan)

            def step_done(training: Training = training, bar: int = bar) -> None:
                progress.update(bar, advance=1, loss=training.losses[-1])

            models.append(train(training, setting, step_done))
    return models


def differences(ours: Training, theirs: Training) -> list[float]:
    """The difference of the losses at every step, relative to ``theirs``."""
    return [abs(a - b) / b for a, b in zip(ours.losses, theirs.losses, strict=True)]


def agree(apart: Sequence[float]) -> bool:
    """Whether every difference is within the allowed bound; NaN is not."""
    return all(difference <= LARGEST_DIFFERENCE for difference in apart)


def show(trainings: Sequence[Training], apart: Sequence[float]) -> None:
    """Prints the table: some of the steps, then the held-out text and the time."""
    names = [training.name for training in trainings]
    rows = [["step", *names[:2], "difference", *names[2:]]]
    steps = len(apart)
    every = max(1, steps // ROWS)
    for step in sorted({1, *range(every, steps + 1, every), steps}):
        losses = [f"{training.losses[step - 1]:.4f}" for training in trainings]
        rows.append([str(step), *losses[:2], f"{apart[step - 1]:.1e}", *losses[2:]])
    held_out = [f"{training.held_out:.4f}" for training in trainings]
    seconds = [f"{training.seconds:.1f}" for training in trainings]
    rows.append(["held out", *held_out[:2], "", *held_out[2:]])
    rows.append(["seconds", *seconds[:2], "", *seconds[2:]])

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print("\ntraining loss in nats per character")
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The settings of the command line; invalid ones end the program with status 2."""
    parser = argparse.ArgumentParser(
        description="Trains a character transformer with torch's attention and with flashgen's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="number of steps of each training")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="probability in the third training; 0 omits it"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where to train",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of matrix products; bfloat16 on a GPU, float32 on the CPU",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and dropout")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file in UTF-8")
    parser.add_argument("--plot", type=Path, default=Path("build/train_char.png"), help="the plot")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    if not 0 <= options.dropout < 1:
        parser.error(f"--dropout {options.dropout}: from 0 to below 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    check(parser, options.plot)
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    try:
        options.characters = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {options.text}: {error}")
    least = 20 * Sizes().context
    if len(options.characters) < least:
        length = len(options.characters)
        parser.error(f"--text {options.text}: {length} characters, at least {least} are needed")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    text, sizes = Text(options.characters), Sizes()
    setting = Setting(text, sizes, options.steps, options.seed, options.device, options.dtype)
    ours = FlashgenAttention(sizes.head_dim, setting.dtype, dropout=False)
    trainings = [Training("torch SDPA", torch_attention), Training("flashgen", ours)]
    if options.dropout > 0:
        dropping = FlashgenAttention(sizes.head_dim, setting.dtype, dropout=True)
        name = f"flashgen, dropout {options.dropout:g}"
        trainings.append(Training(name, dropping, options.dropout))

    print(
        f"text      {options.text.name}, {len(options.characters):,} characters, "
        f"{len(text.characters)} different; the last tenth is held out\n"
        f"model     {sizes.layers} layers, {sizes.heads} heads of {sizes.head_dim}, "
        f"context {sizes.context}, batch {sizes.batch}\n"
        f"device    {setting.device}, {setting.dtype}; seed {setting.seed}",
        flush=True,
    )
    models = train_all(trainings, setting)
    print(f"flashgen  {ours.what_ran()}")
    apart = differences(trainings[1], trainings[0])
    show(trainings, apart)
    title = (
        "Character transformer with the attention of torch and of flashgen\n"
        f"{setting.dtype} on {setting.device}, same weights and batches"
    )
    losses = {
        f"{training.name} (held out: {training.held_out:.3f})": training.losses
        for training in trainings
    }
    plot(options.plot, title, losses, apart, LARGEST_DIFFERENCE)

    start = text.held_out[: sizes.context // 4].tolist()
    with setting.autocast():
        continued = models[1].continued(start, SAMPLE, setting.seed)
    print(f"\n[the held-out text]{text.decode(start)}[flashgen's model]{text.decode(continued)}")

    largest = max(apart, key=lambda value: math.inf if math.isnan(value) else value)
    verdict = "pass" if agree(apart) else "FAIL"
    print(
        f"\nplot      {options.plot}\n"
        f"largest relative difference {largest:.1e} at step {apart.index(largest) + 1} "
        f"of {len(apart)}, allowed {LARGEST_DIFFERENCE:.0e}: {verdict}"
    )
    return 0 if verdict == "pass" else 1


if __name__ == "__main__":
    sys.exit(main())
