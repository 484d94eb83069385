"""Trees of drafts: which paths have the bits of decoding, in the batch-invariant mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.programs import SpecProgram
from flashgen.shared.call import INVARIANT
from flashgen.shared.paths import PATHS
from tests.support.paged_specs import before
from tests.support.tiers import slow

Tensor = torch.Tensor
HEADS, HEADS_KV, D, PAGE, SPLIT = 4, 2, 64, 16, 96
GROUP = 16  # keys that one product of tensor cores adds up
PATHS_OF_TREE, DRAFTS = 3, 4

_PATH = fg.Tensor("path", ("batch", "seq_k"), "int32")
_OF_ROW = fg.Tensor("of_row", ("batch", PATHS_OF_TREE * DRAFTS), "int32")
_LAST = fg.Tensor("last", ("batch", PATHS_OF_TREE * DRAFTS), "int32")


def _on_its_path(b, h, q, k):  # type: ignore[no-untyped-def]
    row = q - (fg.seq_k - PATHS_OF_TREE * DRAFTS)
    return ((_PATH[b, k] < 0) | (_PATH[b, k] == _OF_ROW[b, row])) & (k <= _LAST[b, row])


CAUSAL = fg.AttentionSpec(before, head_dim=D, name="of_drafts")
TREE = fg.AttentionSpec(_on_its_path, head_dim=D, paged=True, name="tree_of_drafts")


class Tree:
    """A text of some keys, and paths of drafts behind it."""

    def __init__(self, keys: int, arch: str) -> None:
        self.keys, self.how = keys, {"backend": "emulator", "arch": arch, "split_size": INVARIANT}
        generator = torch.Generator().manual_seed(keys)

        def drawn(heads: int, rows: int, size: float) -> Tensor:
            return (size * torch.randn(1, heads, rows, D, generator=generator)).half()

        self.text = [drawn(HEADS_KV, keys, 1.0) for _ in "kv"]
        self.paths = [
            (drawn(HEADS, DRAFTS, 2.0), *(drawn(HEADS_KV, DRAFTS, 2.0) for _ in "kv"))
            for _ in range(PATHS_OF_TREE)
        ]

    def run(self, spec: fg.AttentionSpec, *qkv: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        found = run_forward(spec, *qkv, tensors=tensors, **self.how)
        return found.out, found.lse

    def decoded(self) -> list[tuple[Tensor, Tensor]]:
        """The rows of each path behind the text alone."""
        found = []
        for q, *kv in self.paths:
            k, v = (torch.cat(pair, 2) for pair in zip(self.text, kv, strict=True))
            length = self.keys + DRAFTS
            tables = self.paged(length, [(0, k, v)])
            found.append(self.run(CAUSAL.replace(paged=True), q, *tables.pop("cache"), **tables))
        return found

    def paged(self, length: int, rows: list[tuple[int, Tensor, Tensor]]) -> dict[str, Any]:
        """One sequence whose keys and values are these, from these positions on."""
        pages = -(-length // PAGE)
        cache = torch.zeros(2, pages, HEADS_KV, PAGE, D).half()
        for first, k, v in rows:
            slots = torch.arange(first, first + k.shape[2])
            fg.append_kv(k, v, *cache, slot_mapping=slots)
        return {
            "cache": cache,
            "page_table": torch.arange(pages, dtype=torch.int32)[None],
            "cache_seqlens": torch.tensor([length], dtype=torch.int32),
        }

    def in_groups(self) -> list[tuple[Tensor, Tensor]]:
        """All paths in one sequence. Each begins with a copy of the text's keys behind the last
        whole group, so that its keys have the places in their group that decoding gives them."""
        copied = self.keys % GROUP
        first, width = self.keys - copied, -(-(copied + DRAFTS) // GROUP) * GROUP
        length = first + PATHS_OF_TREE * width
        rows = [(0, *(x[:, :, :first] for x in self.text))]
        path = torch.full((1, -(-length // PAGE) * PAGE), -1, dtype=torch.int32)
        for p, (_, *kv) in enumerate(self.paths):
            begin = first + p * width
            pairs = zip(self.text, kv, strict=True)
            rows.append((begin, *(torch.cat([x[:, :, first:], y], 2) for x, y in pairs)))
            path[0, begin : begin + width] = p
        tables = self.paged(length, rows)
        of_row = torch.arange(PATHS_OF_TREE).repeat_interleave(DRAFTS)
        last = first + of_row * width + copied + torch.arange(DRAFTS).repeat(PATHS_OF_TREE)
        read = {"path": path, "of_row": of_row[None].int(), "last": last[None].int()}
        q = torch.cat([q for q, *_ in self.paths], 2)
        out, lse = self.run(TREE, q, *tables.pop("cache"), **tables, **read)
        return list(zip(out.split(DRAFTS, 2), lse.split(DRAFTS, 2), strict=True))

    def in_sequences(self) -> list[tuple[Tensor, Tensor]]:
        """Each path as a sequence of its own, which shares the whole pages of the text."""
        whole = self.keys // PAGE
        own = -(-(self.keys + DRAFTS) // PAGE) - whole
        cache = torch.zeros(2, whole + PATHS_OF_TREE * own, HEADS_KV, PAGE, D).half()
        table = torch.arange(whole + own, dtype=torch.int32).repeat(PATHS_OF_TREE, 1)
        table[:, whole:] += own * torch.arange(PATHS_OF_TREE, dtype=torch.int32)[:, None]
        lengths = torch.full((PATHS_OF_TREE,), self.keys + DRAFTS, dtype=torch.int32)
        pairs = zip(self.text, zip(*(kv for _, *kv in self.paths), strict=True), strict=True)
        kv = [torch.cat([torch.cat([x, y], 2) for y in ys]) for x, ys in pairs]
        tables = {"page_table": table, "cache_seqlens": lengths}
        fg.append_kv(*kv, *cache, **tables)
        q = torch.cat([q for q, *_ in self.paths])
        out, lse = self.run(CAUSAL.replace(paged=True), q, *cache, **tables)
        return list(zip(out.split(1), lse.split(1), strict=True))


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpecProgram, "invariant_split", lambda self, target: SPLIT)


def equal(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> list[bool]:
    pairs = zip(found, expected, strict=True)
    return [all(map(torch.equal, ours, theirs)) for ours, theirs in pairs]


@pytest.mark.parametrize("arch", [arch if arch == "sm_80" else slow(arch) for arch in PATHS])
@pytest.mark.parametrize("keys", [100, slow(108), slow(97)])
def test_paths_in_groups_of_keys_of_one_tile_have_the_bits_of_decoding(
    keys: int, arch: str
) -> None:
    tree = Tree(keys, arch)
    assert equal(tree.in_groups(), tree.decoded()) == [True] * PATHS_OF_TREE


@pytest.mark.parametrize("keys", [91, slow(30), slow(75)])
def test_paths_that_are_sequences_always_have_them(keys: int) -> None:
    tree = Tree(keys, "sm_80")
    decoded = tree.decoded()
    assert equal(tree.in_sequences(), decoded) == [True] * PATHS_OF_TREE
    if keys == 91:  # the keys of the second path are in another tile
        assert equal(tree.in_groups(), decoded) == [True, False, False]
