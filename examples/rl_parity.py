"""Reinforcement learning whose trainer and sampler agree in every bit.

A tiny policy generates texts with a paged cache, in batches that requests join and leave, with
shared prefixes and with drafts that are verified several at once. The trainer computes the
log-probabilities of the same tokens in packed sequences. The difference is 0 for every token, as
the program checks after each update: attention by `flashgen.batch_invariant_mode`, all else by
sums in a fixed order, below.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import flashgen as fg

Tensor = torch.Tensor

VOCABULARY, LAYERS, HEADS, HEADS_KV, HEAD_DIM, CONTEXT = 16, 2, 4, 2, 8, 48
WIDTH = HEADS * HEAD_DIM
PAGE, CHUNK, DRAFTS, BATCH = 8, 10, 4, 3  # keys, tokens, drafts and requests of a call, at most
WINDOWS = 12, CONTEXT  # of the layers
CAP = 15.0

# ---- layers whose rows do not depend on the other rows ------------------------------------------


def added(x: Tensor) -> Tensor:
    """Sums over the last axis, in pairs: the order of additions depends on its length alone.

    Additions and products of single elements have the same bits wherever the element is.
    """
    while (length := x.shape[-1]) > 1:
        half = length // 2
        total = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([total, x[..., 2 * half :]], -1) if length % 2 else total
    return x[..., 0]


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, columns] times the transpose of weight [results, columns]."""
    return added(x[:, None] * weight)


def norm(x: Tensor) -> Tensor:
    """Each row divided by the root of its mean square. Division and root are rounded exactly."""
    return x / (added(x * x) / x.shape[1] + 1e-6).sqrt()[:, None]


def log_softmax(scores: Tensor) -> Tensor:
    """Row by row: a call of one row has the same bits in every batch."""
    return torch.cat([row.log_softmax(-1) for row in scores.split(1)])


# ---- the policy ---------------------------------------------------------------------------------

window = fg.Scalar("window", "int32")


def mask(b, h, q, k):
    return (k <= q) & (q - k < window)


def softcap(score, b, h, q, k):
    return CAP * fg.tanh(score / CAP)


SPEC = fg.AttentionSpec(
    *(mask, softcap),
    head_dim=HEAD_DIM,
    dtype="float32",
    sink=fg.Tensor("sink", ("heads",), "float32", grad=True),
)
Attention = Callable[..., Tensor]
"""The number of a layer, its q, k and v [1, heads, tokens, head_dim], its sink -> like q."""


class Policy(nn.Module):
    """Log-probabilities of the next token. Tokens of any sequences are packed in one row."""

    def __init__(self) -> None:
        super().__init__()
        size = LAYERS, (HEADS + 2 * HEADS_KV) * HEAD_DIM, WIDTH
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 4)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 4)
        self.to_qkv = nn.Parameter(torch.randn(size) / 4)
        self.from_heads = nn.Parameter(torch.randn(LAYERS, WIDTH, WIDTH) / 16)
        self.into, self.back = (
            nn.Parameter(torch.randn(LAYERS, *shape) / 16)
            for shape in ((2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH))
        )
        self.sinks = nn.Parameter(torch.zeros(LAYERS, HEADS))
        self.to_scores = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 6)

    def forward(self, tokens: Tensor, indices: Tensor, attention: Attention) -> Tensor:
        """int64 [tokens] twice -> [tokens, vocabulary]."""
        x = self.tokens[tokens] + self.positions[indices]
        for layer in range(LAYERS):
            qkv = product(norm(x), self.to_qkv[layer]).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
            q, k, v = qkv[None].split([HEADS, HEADS_KV, HEADS_KV], 1)
            mixed = attention(layer, q, k, v, self.sinks[layer])
            x = x + product(mixed[0].transpose(0, 1).flatten(1), self.from_heads[layer])
            x = x + product(product(norm(x), self.into[layer]).relu(), self.back[layer])
        return log_softmax(product(norm(x), self.to_scores))


# ---- the sampler --------------------------------------------------------------------------------


@dataclass
class Request:
    """A text that is continued up to ``length`` tokens.

    Attributes:
        noise: Gumbel noise [length, vocabulary] by which tokens are drawn.
        logs: the log-probability of each generated token.
        cached: the number of tokens whose keys and values are in the pages.
    """

    tokens: list[int]
    length: int
    noise: Tensor
    logs: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    def drafts(self) -> list[int]:
        """What followed the last token where it occurred before."""
        past = self.tokens[:-1]
        if self.tokens[-1] not in past:
            return []
        after = len(past) - past[::-1].index(self.tokens[-1])
        room = self.length - len(self.tokens) - 1
        return self.tokens[after : after + min(DRAFTS, max(room, 0))]


class Sampler:
    """Generates texts with a paged cache.

    Attributes:
        calls: the number of calls of the policy.
        shared: the number of tokens whose keys another request had computed.
        accepted: the number of drafts that were right.
    """

    def __init__(self, policy: Policy, pages: int, **run_options: Any) -> None:
        self.policy, self.run_options = policy, run_options
        self.op = fg.attention(SPEC.replace(paged=True))
        self.cache = torch.zeros(LAYERS, 2, pages, HEADS_KV, PAGE, HEAD_DIM)
        self.free = list(range(pages))
        self.tables: dict[str, Tensor] = {}
        self.calls = self.shared = self.accepted = 0

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        tables = dict(self.tables)
        caches = self.cache[layer].unbind()
        ends = tables["cu_seqlens_q"]
        page_tables = {name: tables[name] for name in ("page_table", "cache_seqlens")}
        fg.append_kv(k, v, *caches, **page_tables, cu_seqlens=ends, **self.run_options)
        out: Tensor = self.op(
            q, *caches, **tables, sink=sink, window=WINDOWS[layer], **self.run_options
        )
        return out

    def start(self, request: Request, others: list[Request]) -> None:
        """Shares the full pages of the longest prefix that another request has computed."""

        def common(other: Request) -> int:
            both = zip(request.tokens[:-1], other.tokens[: other.cached], strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

        other = max(others, key=common, default=None)
        if other is not None:
            request.cached = common(other) // PAGE * PAGE
            request.pages = other.pages[: request.cached // PAGE]
            self.shared += request.cached
        count = -(-request.length // PAGE) - len(request.pages)
        request.pages = request.pages + [self.free.pop() for _ in range(count)]

    @torch.no_grad()
    def step(self, running: list[Request]) -> None:
        """One call: parts of prompts, and the last tokens of texts with their drafts."""
        parts = []
        for request in running:
            missing = request.tokens[request.cached :]
            ends = len(missing) <= CHUNK
            parts.append(missing + request.drafts() if ends else missing[:CHUNK])
        width = max(len(request.pages) for request in running)
        table = [request.pages + [-1] * (width - len(request.pages)) for request in running]
        lengths = [request.cached + len(part) for request, part in zip(running, parts, strict=True)]
        ends = [0, *itertools.accumulate(map(len, parts))]
        names = "page_table", "cache_seqlens", "cu_seqlens_q"
        values = (torch.tensor(rows, dtype=torch.int32) for rows in (table, lengths, ends))
        self.tables = dict(zip(names, values, strict=True))
        tokens = torch.tensor([token for part in parts for token in part])
        firsts = (range(n - len(part), n) for n, part in zip(lengths, parts, strict=True))
        positions = torch.tensor([position for part in firsts for position in part])
        logs = self.policy(tokens, positions, self.attention).split([len(part) for part in parts])
        for request, part, part_logs in zip(running, parts, logs, strict=True):
            self.take(request, part, part_logs)
        self.calls += 1

    def take(self, request: Request, part: list[int], logs: Tensor) -> None:
        """Draws tokens behind a part, as long as they are equal to the drafts."""
        cached, count = request.cached, len(request.tokens)
        for i, row in enumerate(logs):
            if cached + i + 1 < count:
                continue  # the prompt goes on
            if cached + i >= count:  # a draft, which must be what was drawn there
                if request.tokens[cached + i] != part[i]:
                    break
                self.accepted += 1
            token = int((row + request.noise[cached + i]).argmax())
            request.tokens.append(token)
            request.logs.append(float(row[token]))
        request.cached = min(cached + len(part), len(request.tokens) - 1)

    def generate(self, requests: list[Request]) -> None:
        """Generates all texts; a waiting request begins when another one ends."""
        waiting, running, done = list(requests), [], []  # type: ignore[var-annotated]
        while waiting or running:
            while waiting and len(running) < BATCH:
                self.start(waiting[0], [*running, *done])
                running.append(waiting.pop(0))
            self.step(running)
            done += [request for request in running if len(request.tokens) == request.length]
            running = [request for request in running if len(request.tokens) < request.length]


# ---- the trainer --------------------------------------------------------------------------------


class Trainer:
    """Learns from the texts of the sampler, all of them in one packed sequence of tokens."""

    def __init__(self, policy: Policy, **run_options: Any) -> None:
        self.policy, self.run_options = policy, run_options
        self.op = fg.attention(SPEC.replace(packed=True))
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=0.003)

    def logs(self, requests: list[Request]) -> list[Tensor]:
        """The log-probabilities of the generated tokens of each text."""
        counts = [len(request.tokens) - 1 for request in requests]
        ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
            sequences = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            out: Tensor = self.op(
                q, k, v, **sequences, sink=sink, window=WINDOWS[layer], **self.run_options
            )
            return out

        tokens = torch.tensor([token for text in requests for token in text.tokens[:-1]])
        positions = torch.cat([torch.arange(count) for count in counts])
        logs = self.policy(tokens, positions, attention).split(counts)
        following = (torch.tensor(request.tokens[1:]) for request in requests)
        rows = (x.gather(1, y[:, None])[:, 0] for x, y in zip(logs, following, strict=True))
        return [x[-len(text.logs) :] for x, text in zip(rows, requests, strict=True)]

    def update(self, requests: list[Request], rewards: Tensor) -> Tensor:
        """One step of policy gradients. Returns the log-probabilities before it."""
        logs = self.logs(requests)
        gain = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
        loss = -sum(x.mean() * by for x, by in zip(logs, gain, strict=True)) / len(logs)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        self.optimizer.step()
        return torch.cat(logs).detach()


# ---- the program --------------------------------------------------------------------------------


def requests_of(seed: int, prompts: int = 2, samples: int = 2) -> list[Request]:
    """Some texts for each of some prompts, which have a common beginning."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    common, requests = draw(9), []
    for _ in range(prompts):
        prompt = common + draw(int(torch.randint(3, 12, (), generator=generator)))
        for _ in range(samples):
            length = len(prompt) + int(torch.randint(6, 12, (), generator=generator))
            uniform = torch.rand(length, VOCABULARY, generator=generator)
            requests.append(Request(prompt.copy(), length, -(-uniform.log()).log()))
    return requests


def reward(request: Request) -> float:
    """The share of generated tokens that are one, four, seven, ... above the token before."""
    last = request.tokens[-len(request.logs) - 1 :]
    return sum((b - a) % 3 == 1 for a, b in itertools.pairwise(last)) / len(request.logs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A trainer with the bits of its sampler.")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--backend", help='"emulator" for emitted kernels; default: by tensor')
    parser.add_argument("--arch")
    parser.add_argument("--ordinary", action="store_true", help="without the batch-invariant mode")
    options = parser.parse_args(arguments)
    run_options = {"backend": options.backend, "arch": options.arch}
    torch.manual_seed(0)
    policy, begun = Policy(), time.perf_counter()
    trainer = Trainer(policy, **run_options)
    tokens = calls = shared = accepted = differing = 0
    largest = 0.0
    with fg.batch_invariant_mode(not options.ordinary):
        for number in range(options.updates):
            requests = requests_of(number)
            sampler = Sampler(policy, pages=64, **run_options)
            sampler.generate(requests)
            rewards = torch.tensor([reward(request) for request in requests])
            trained = trainer.update(requests, rewards)
            sampled = torch.tensor([log for request in requests for log in request.logs])
            difference = (trained - sampled).abs()
            tokens, differing = tokens + len(trained), differing + int((difference != 0).sum())
            largest = max(largest, float(difference.max()))
            calls, shared = calls + sampler.calls, shared + sampler.shared
            accepted += sampler.accepted
            if number % 10 == 0 or number == options.updates - 1:
                print(f"update {number:3}   reward {float(rewards.mean()):.3f}")
    print(
        f"{tokens:,} tokens in {calls:,} calls; {shared:,} tokens of shared prefixes, "
        f"{accepted:,} accepted drafts; {time.perf_counter() - begun:.1f} s"
    )
    print(f"log-probabilities that differ: {differing:,}, by {largest:.1e} at most")
    return int(differing > 0 and not options.ordinary)


if __name__ == "__main__":
    raise SystemExit(main())
