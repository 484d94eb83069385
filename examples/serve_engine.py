"""A serving engine of one file: continuous batching, a paged cache, shared prefixes, drafts.

The model sees packed tokens. `Engine.attention` gives its layers the paged cache; all else here
decides which tokens a call has and where their keys and values lie, as in vLLM (Kwon et al.,
"Efficient memory management for large language model serving with PagedAttention", 2023). Drafts
are those of prompt lookup decoding (Saxena, 2023), as a tree (Miao et al., "SpecInfer", 2023).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from train_char_model import CharTransformer, Sizes, Tensor

import flashgen as fg

PAGE = 16  # keys of a page
CHUNK = 24  # tokens of one request in one call, at most; a longer prompt takes several calls
DRAFTS = 12  # drafts of one request in one call, at most
DEPTH = 6  # drafts of one path through the tree, at most
LONGEST_MATCH = 6  # characters at the end of a text that are looked up in the text before

# ---- attention ----------------------------------------------------------------------------------

tree = fg.Tensor("tree", ("batch", DRAFTS, DRAFTS), "bool")  # which drafts a draft sees
drafts = fg.Tensor("drafts", ("batch",), "int32")  # how many a sequence has


def causal_and_tree(b, h, q, k):
    """The drafts are the last positions of a sequence, parents before their children."""
    first = fg.seq_k - drafts[b]
    return (k <= q) & ((k < first) | tree[b, q - first, k - first])


# ---- requests, pages, drafts --------------------------------------------------------------------


@dataclass
class Request:
    """A text that is continued.

    Attributes:
        tokens: the prompt and the generated tokens.
        length: the number of tokens of the finished text.
        pages: the pages of its keys and values, in order.
        cached: the number of tokens whose keys and values are in the pages.
    """

    tokens: list[int]
    length: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0


class Pages:
    """Allocates the pages of a cache: a page is free when no request refers to it."""

    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.free = list(range(count))

    def take(self) -> int:
        page = self.free.pop()
        self.references[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)


class Tree:
    """Drafts of a continuation. Node 0 is the last token of the text, the others are drafts.

    Attributes:
        tokens, parents, depths: the token, the parent and the depth of each node; parents come
            before their children.
        children: the node that follows a node by a token.
    """

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [0], [0]
        self.children: dict[tuple[int, int], int] = {}

    def add(self, path: Sequence[int]) -> None:
        """Adds the tokens of a path that begins at the root, as far as there is room."""
        node = 0
        for token in path:
            if (node, token) not in self.children:
                if len(self.tokens) > DRAFTS:
                    return
                self.children[node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
            node = self.children[node, token]

    def mask(self) -> Tensor:
        """A draft sees itself and all drafts that its parent sees; the root is no draft."""
        seen = torch.eye(DRAFTS, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent > 0:
                seen[node - 1] |= seen[parent - 1]
        return seen

    def accepted(self, best: Sequence[int]) -> tuple[list[int], list[int]]:
        """The drafts that the model itself would have generated.

        Args:
            best: the model's next token after each node.

        Returns:
            The nodes of their path, and the generated tokens: one more than the path has nodes,
            because the model gives a token after the last of them too.
        """
        node, path, generated = 0, [], [best[0]]
        while (node, generated[-1]) in self.children:
            node = self.children[node, generated[-1]]
            path.append(node)
            generated.append(best[node])
        return path, generated


def drafted(request: Request) -> Tree:
    """Continuations of earlier occurrences of the last characters, the longest match first."""
    tokens, tree = request.tokens, Tree(request.tokens[-1])
    depth = min(DEPTH, request.length - len(tokens) - 1)  # the call gives one token without drafts
    for n in range(min(LONGEST_MATCH, len(tokens) - 1), 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                tree.add(tokens[end : end + depth])
    return tree


# ---- the engine ---------------------------------------------------------------------------------


@dataclass
class Part:
    """One request in a call: ``count`` tokens that are not in the cache yet, then its drafts."""

    request: Request
    count: int
    tree: Tree

    def tokens(self) -> list[int]:
        first = self.request.cached
        return self.request.tokens[first : first + self.count] + self.tree.tokens[1:]

    def positions(self) -> list[int]:
        """Positions in the text, for the embedding: drafts of one depth have the same.

        In the cache each draft has a position of its own, which the mask sees.
        """
        first, end = self.request.cached, self.request.cached + self.count
        return [*range(first, end), *(end - 1 + depth for depth in self.tree.depths[1:])]


@dataclass
class Counts:
    """The work of an engine in numbers.

    Attributes:
        tokens: the tokens of each call, drafts included.
        pages: the most pages that running requests had at one time.
        shared: tokens that were in the cache when their request came.
        accepted: the number of drafts that each verification accepted.
        preempted: how often a request gave its pages back and waited.
    """

    tokens: list[int] = field(default_factory=list)
    pages: int = 0
    shared: int = 0
    accepted: list[int] = field(default_factory=list)
    preempted: int = 0


class Engine:
    """Serves requests by greedy decoding.

    Args:
        model: its attention is replaced, in a copy, by one with a paged cache.
        dtype: the dtype of the cache.
        pages: the number of pages of the cache.
        batch: the most requests that run at one time.
        sharing, drafting: whether prefixes are shared, and drafts verified.
        run_options: the backend and the architecture of all calls.
    """

    def __init__(
        self, model: CharTransformer, sizes: Sizes, dtype: torch.dtype, pages: int = 64,
        batch: int = 4, sharing: bool = True, drafting: bool = True, **run_options: Any,
    ) -> None:  # fmt: skip
        self.batch, self.sharing, self.drafting = batch, sharing, drafting
        self.run_options = run_options
        self.op = fg.attention(
            fg.AttentionSpec(causal_and_tree, head_dim=sizes.head_dim, dtype=dtype, paged=True)
        )
        self.model = copy.deepcopy(model)
        for layer, block in enumerate(self.model.blocks):
            block.attention = partial(self.attention, layer)
        self.device = model.to_scores.weight.device
        # [layers, k and v, pages, heads, page, head_dim]: a page has one number in all layers.
        shape = (sizes.layers, 2, pages, sizes.heads, PAGE, sizes.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self.pages = Pages(pages)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # the oldest first
        self.finished: list[Request] = []  # their pages are kept until another request needs them
        self.tables: dict[str, Tensor] = {}  # of the present call
        self.counts = Counts()

    def tensor(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    # One call of the model. Its layers see packed tokens and know nothing of requests.

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        """[1, heads, tokens of all requests, head_dim] -> the same shape."""
        k_cache, v_cache = self.cache[layer]
        dtype, tables = self.cache.dtype, self.tables
        fg.append_kv(
            k.to(dtype),
            v.to(dtype),
            k_cache,
            v_cache,
            page_table=tables["page_table"],
            cache_seqlens=tables["cache_seqlens"],
            cu_seqlens=tables["cu_seqlens_q"],
            **self.run_options,
        )
        out: Tensor = self.op(q.to(dtype), k_cache, v_cache, **tables, **self.run_options)
        return out.to(q.dtype)

    def call(self, parts: Sequence[Part]) -> list[list[int]]:
        """The model's next token after each token of the parts."""
        counts = [len(part.tokens()) for part in parts]
        keys = [part.request.cached + n for part, n in zip(parts, counts, strict=True)]
        width = max(len(part.request.pages) for part in parts)
        table = [part.request.pages + [-1] * (width - len(part.request.pages)) for part in parts]
        self.tables = {
            "page_table": self.tensor(table),
            "cache_seqlens": self.tensor(keys),
            "cu_seqlens_q": self.tensor([0, *itertools.accumulate(counts)]),
            "tree": torch.stack([part.tree.mask() for part in parts]).to(self.device),
            "drafts": self.tensor([len(part.tree.tokens) - 1 for part in parts]),
        }
        tokens = self.tensor([token for part in parts for token in part.tokens()], torch.int64)
        positions = self.tensor([position for part in parts for position in part.positions()])
        with torch.no_grad():
            best = self.model(tokens[None], positions)[0].argmax(1)
        self.counts.tokens.append(sum(counts))
        return [tokens_of_part.tolist() for tokens_of_part in best.split(counts)]

    def move(self, request: Request, moves: Sequence[tuple[int, int]]) -> None:
        """Copies keys and values of a request from positions to other positions."""
        slots = [[request.pages[p // PAGE] * PAGE + p % PAGE for p in pair] for pair in moves]
        old, new = self.tensor(slots, torch.int64).T
        rows = self.cache[:, :, old // PAGE, :, old % PAGE]  # [moves, layers, k and v, heads, d]
        for layer, (k_cache, v_cache) in enumerate(self.cache):
            k, v = rows[:, layer].permute(1, 2, 0, 3)[:, None]
            fg.append_kv(k, v, k_cache, v_cache, slot_mapping=new, **self.run_options)

    # Pages.

    def take_page(self) -> int | None:
        """A free page, if need be of the requests that finished first. None if all are in use."""
        while not self.pages.free and self.finished:
            self.pages.release(self.finished.pop(0).pages)
        return self.pages.take() if self.pages.free else None

    def grow(self, request: Request, positions: int) -> bool:
        """Gives a request pages for its first ``positions``. False if there are too few."""
        while len(request.pages) * PAGE < positions:
            page = self.take_page()
            if page is None:
                return False
            request.pages.append(page)
        return True

    def share(self, request: Request) -> None:
        """Shares the pages of the request that has the longest common prefix in the cache.

        A full page is never written again. Of a page that the prefix fills in part the request gets
        a copy, in which it continues. Engines with many requests find prefixes by a hash of each
        page, as vLLM does, or in a radix tree, as SGLang does.
        """

        def common(other: Request) -> int:
            # At least one token is computed: the next one depends on its scores.
            both = zip(request.tokens[:-1], other.tokens[: other.cached], strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

        others = [*self.running, *self.finished]
        if not others:
            return
        other = max(others, key=common)
        count = common(other)
        request.pages = other.pages[: -(-count // PAGE)]
        self.pages.share(request.pages)
        rest = count % PAGE
        if rest:
            partly = request.pages.pop()
            page_copy = self.take_page()
            if page_copy is not None:
                self.cache[:, :, page_copy, :, :rest] = self.cache[:, :, partly, :, :rest]
                request.pages.append(page_copy)
            else:
                count -= rest
            self.pages.release([partly])
        request.cached = count

    def give_back(self, request: Request) -> None:
        """Releases the pages of a request, which starts anew later."""
        self.pages.release(request.pages)
        request.pages, request.cached = [], 0

    # Requests.

    def schedule(self) -> list[Part]:
        """The parts that the next call computes: one of each request that runs.

        A prompt and a text that continues are no different: both have tokens that are not cached.
        A request begins when there are pages for all its tokens. If no page is left for a request
        that runs, the youngest ones give theirs back and wait.
        """
        while self.waiting and len(self.running) < self.batch:
            request = self.waiting[0]
            if self.sharing:
                self.share(request)
            if not self.grow(request, len(request.tokens) + DRAFTS):
                self.give_back(request)
                break
            self.running.append(self.waiting.pop(0))
            self.counts.shared += request.cached
        parts = []
        for request in list(self.running):
            missing = len(request.tokens) - request.cached
            ends = missing <= CHUNK
            tree = drafted(request) if self.drafting and ends else Tree(request.tokens[-1])
            part = Part(request, min(missing, CHUNK), tree)
            while request in self.running:
                if self.grow(request, request.cached + len(part.tokens())):
                    parts.append(part)
                    break
                youngest = self.running.pop()
                self.give_back(youngest)
                self.waiting.insert(0, youngest)
                self.counts.preempted += 1
        used = {page for request in self.running for page in request.pages}
        self.counts.pages = max(self.counts.pages, len(used))
        return parts

    def step(self) -> None:
        """Makes one call and adds the accepted tokens to each request."""
        parts = self.schedule()
        for part, best in zip(parts, self.call(parts), strict=True):
            request = part.request
            request.cached += part.count
            end = request.cached
            if end < len(request.tokens):
                continue  # the rest of the prompt is for the next calls
            path, generated = part.tree.accepted(best[part.count - 1 :])
            # Draft n is at position end + n - 1, behind rejected ones. What is left there when the
            # accepted ones have moved lies past the length, and later tokens overwrite it.
            moves_of_drafts = [(end + node - 1, end + i) for i, node in enumerate(path)]
            moves = [(old, new) for old, new in moves_of_drafts if old != new]
            if moves:
                self.move(request, moves)
            request.cached += len(path)
            request.tokens += generated
            if part.tree.children:
                self.counts.accepted.append(len(path))
            if len(request.tokens) == request.length:
                self.running.remove(request)
                self.finished.append(request)

    def serve(self, requests: Sequence[Request], every: int = 2) -> None:
        """Serves requests; one comes every ``every`` calls."""
        capacity = len(self.pages.references) * PAGE
        longest = max(request.length for request in requests)
        if longest + DRAFTS > capacity:
            raise ValueError(f"{longest} tokens and their drafts in a cache of {capacity}")
        coming = list(requests)
        calls = 0
        while coming or self.waiting or self.running:
            if coming and calls % every == 0:
                self.waiting.append(coming.pop(0))
            if self.waiting or self.running:
                self.step()
            calls += 1
