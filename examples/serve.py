"""A small serving engine: continuous batching, a paged cache, shared prefixes, verified drafts.

    python examples/serve.py                                    # about half a minute
    python examples/serve.py --backend emulator --arch sm_90a   # a short run on emitted kernels
    python examples/serve.py --help

A character transformer learns the first 2,000 characters of coriolanus.txt and serves requests,
which continue a text. They come while others decode, and each call of the model computes all that
run: a part of one request's prompt beside the next token of another, packed by cu_seqlens_q. Keys
and values lie in the pages of one cache, and a request shares the pages of another whose text
begins alike. Drafts of the next tokens are what followed the last characters where they occur in
the text before. They form a tree, which the call that computes the last token verifies: a draft
sees its ancestors in the tree, by a mask that reads two captured tensors. serve_engine.py is the
engine.

The requests are served one by one, batched, with shared prefixes, and with drafts too. Every text
must be that of plain generation, which computes the whole text anew for each token by the ordinary
causal operator, without a cache; else the exit status is 1.

All is float32, except that --backend emulator takes caches and kernels of float16.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from serve_engine import Engine, Request
from train_char_model import CharTransformer, Sizes, Tensor, Text

import flashgen as fg

TEXT = Path(__file__).resolve().parent / "coriolanus.txt"
SIZES = Sizes(context=128, batch=8, layers=2, heads=2, head_dim=32)
LEARNED = 2000  # characters; a model that knows them by heart has something to say
BEGINNING = "First Citizen:\nBefore we proceed any further, hear me speak.\n\n"
REQUESTS = (  # prompts, and how many characters follow
    (BEGINNING + "All:\n", 60),
    (BEGINNING + "First Citizen:\n", 40),
    ("All:\nNo more", 80),
    (BEGINNING + "All:\nSpeak, speak.\n\nFirst", 38),
    ("Second Citizen:\n", 70),
    (BEGINNING + "All:\nResolved", 50),
    ("First Citizen:\nFirst, you", 90),
    (BEGINNING, 24),
)
ENGINES = {  # batch: requests that run at one time
    "one by one": {"batch": 1, "sharing": False, "drafting": False},
    "batched": {"batch": 4, "sharing": False, "drafting": False},
    "with shared prefixes": {"batch": 4, "sharing": True, "drafting": False},
    "with drafts too": {"batch": 4, "sharing": True, "drafting": True},
}


def causal(b, h, q, k):
    return k <= q


def causal_attention(head_dim: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The ordinary operator, for training and plain generation."""
    op = fg.attention(fg.AttentionSpec(causal, head_dim=head_dim, dtype=dtype))
    return lambda q, k, v, dropout_p: op(q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)


def train(text: Text, sizes: Sizes, steps: int, device: str) -> CharTransformer:
    """A model that has learned the text, with the ordinary operator as its attention."""
    torch.manual_seed(0)
    attention = causal_attention(sizes.head_dim, torch.float32)
    model = CharTransformer(len(text.characters), sizes, attention).to(device)
    rate = 8e-3  # after a warm-up, decreasing in proportion to the steps that remain
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99))
    for step, (pieces, following) in enumerate(text.batches(sizes, steps, seed=0)):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 20, 1.1 - step / steps)
        loss = model.loss(pieces.to(device), following.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def plain(model: CharTransformer, request: Request) -> list[int]:
    """The same text without a cache: all of it is computed for each token."""
    tokens = list(request.tokens)
    device = model.to_scores.weight.device
    with torch.no_grad():
        while len(tokens) < request.length:
            scores = model(torch.tensor([tokens], device=device))
            tokens.append(int(scores[0, -1].argmax()))
    return tokens


def mean(numbers: Sequence[int]) -> str:
    return f"{sum(numbers) / len(numbers):.2f}" if numbers else "-"


def show(engines: dict[str, Engine], seconds: dict[str, float]) -> None:
    """Prints the table of the engines, and each call of the last one."""
    rows = [["", "calls", "tokens", "a call", "shared", "most pages", "accepted", "seconds"]]
    for name, engine in engines.items():
        counts = engine.counts
        row = [len(counts.tokens), sum(counts.tokens), mean(counts.tokens)]
        row += [counts.shared, counts.pages, mean(counts.accepted), f"{seconds[name]:.1f}"]
        rows.append([name, *map(str, row)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(name.ljust(widths[0]), *numbers, sep="  ")
    print(
        "tokens: computed, drafts included; shared: found in the cache; most pages: of requests\n"
        "that run at one time; accepted: drafts in each verification, beside the token that the\n"
        "call gives without drafts"
    )
    name, engine = list(engines.items())[-1]
    counts = engine.counts
    tokens = " ".join(map(str, counts.tokens))
    accepted = " ".join(map(str, counts.accepted))
    for text in (f"Tokens of each call {name}: {tokens}", f"Accepted drafts: {accepted}"):
        print("", *textwrap.wrap(text, 100), sep="\n")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The settings of the command line; invalid ones end the program with status 2."""
    parser = argparse.ArgumentParser(
        description="Trains a character transformer and serves requests from a paged cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=320, help="number of steps of the training")
    parser.add_argument("--backend", choices=("gpu", "tiled", "emulator"), help="of the engine")
    parser.add_argument("--arch", help="architecture of the engine's kernels, such as sm_90a")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda if there is a GPU")
    parser.add_argument("--requests", type=int, help="how many; all, or 3 in the emulator")
    parser.add_argument(
        "--tokens", type=int, help="most tokens that are generated for one; 8 in the emulator"
    )
    options = parser.parse_args(arguments)
    emulator = options.backend == "emulator"
    options.device = options.device or ("cuda" if gpu and not emulator else "cpu")
    if options.requests is None:
        options.requests = 3 if emulator else len(REQUESTS)
    if options.tokens is None:
        options.tokens = 8 if emulator else SIZES.context
    if min(options.steps, options.requests, options.tokens) < 1:
        parser.error("--steps, --requests and --tokens are at least 1")
    if options.device == "cuda" and not gpu:
        parser.error("--device cuda: torch finds no CUDA device")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    dtype = torch.float16 if options.backend == "emulator" else torch.float32
    text, sizes = Text(TEXT.read_text(encoding="utf-8")[:LEARNED]), SIZES
    print(
        f"text      {TEXT.name}, {LEARNED:,} characters\n"
        f"model     {sizes.layers} layers, {sizes.heads} heads of {sizes.head_dim}, "
        f"context {sizes.context}\n"
        f"device    {options.device}, caches of {dtype}",
        flush=True,
    )
    start = time.perf_counter()
    model = train(text, sizes, options.steps, options.device)
    print(f"trained   {options.steps} steps in {time.perf_counter() - start:.0f} s", flush=True)
    for block in model.blocks:
        block.attention = causal_attention(sizes.head_dim, dtype)

    numbers = {character: number for number, character in enumerate(text.characters)}

    def requests() -> list[Request]:
        chosen = REQUESTS[: options.requests]
        prompts = [[numbers[character] for character in prompt] for prompt, _ in chosen]
        lengths = [len(prompt) + min(more, options.tokens) for prompt, more in chosen]
        return [Request(*fields) for fields in zip(prompts, lengths, strict=True)]

    expected = [plain(model, request) for request in requests()]
    for request, tokens in zip(requests(), expected, strict=True):
        prompt = len(request.tokens)
        print(f"request   {text.decode(tokens[:prompt])!r}")
        print(f"       -> {text.decode(tokens[prompt:])!r}")

    engines: dict[str, Engine] = {}
    seconds: dict[str, float] = {}
    equal = True
    for name, engine_options in ENGINES.items():
        engine = Engine(
            model, sizes, dtype, **engine_options, backend=options.backend, arch=options.arch
        )
        running = requests()
        start = time.perf_counter()
        engine.serve(running)
        engines[name], seconds[name] = engine, time.perf_counter() - start
        equal = equal and [request.tokens for request in running] == expected
    show(engines, seconds)
    verdict = "pass" if equal else "FAIL"
    print(f"\nEvery text equals that of plain generation: {verdict}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
