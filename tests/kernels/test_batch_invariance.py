"""Batch-invariant calls: a row has the same bits in every call, and so have its gradients."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.calls.runtime.programs import ForwardRequest, SpecProgram
from flashgen.kernels.planner import feasible, invariant_splits, plan_splits
from flashgen.shared.arch import facts
from flashgen.shared.call import INVARIANT, LaunchOptions
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import at_offsets, packed_queries, split
from tests.support.examples import SPECS
from tests.support.judged import judge_forward
from tests.support.tiers import case_id, every_share, one_in, slow

Tensor = torch.Tensor

HEADS, HEADS_KV, D, PAGE, SPLIT = 4, 2, 64, 16, 96
LENGTHS = 70, 5, 133


def before(b, h, q, k):  # type: ignore[no-untyped-def]
    return k <= q


def near(b, h, q, k):  # type: ignore[no-untyped-def]
    return (k <= q) & (q - k < 45)


def capped(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return 20 * fg.tanh(s / 20)


def of_length(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return s - (q - k) * 0.125 + fg.maximum(h - 1, 0) * 0.5


MADE = {
    "causal": fg.AttentionSpec(before, head_dim=D, name="inv_causal"),
    "window": fg.AttentionSpec(near, head_dim=D, name="inv_window"),
    "sink": fg.AttentionSpec(near, capped, head_dim=D, sink=True, name="inv_sink"),
    "alibi": fg.AttentionSpec(before, of_length, head_dim=D, dtype="bfloat16", name="inv_alibi"),
    "power": fg.AttentionSpec(
        before, weight_mod=lambda s, b, h, q, k: s * s, normalize="sum", head_dim=D, name="inv_pow"
    ),
}


class Model:
    """Queries, keys and values of some sequences, and their calls."""

    def __init__(self, name: str, how: dict[str, Any]) -> None:
        self.spec, self.how = MADE[name], how
        dtype = getattr(torch, self.spec.dtype)
        generator = torch.Generator().manual_seed(7)

        def drawn(heads: int) -> list[Tensor]:
            shape = [(1, heads, n, D) for n in LENGTHS]
            return [torch.randn(each, generator=generator).to(dtype) for each in shape]

        self.q, self.k, self.v = drawn(HEADS), drawn(HEADS_KV), drawn(HEADS_KV)
        for q, k in zip(self.q, self.k, strict=True):  # scores that grow, in neighbours too
            k[..., 0] = torch.linspace(0, 20, k.shape[2]).to(dtype)
            q[:, :, ::2, 0] = 8
        self.tensors = {"sink": torch.linspace(-1, 2, HEADS)} if self.spec.sink is not None else {}
        self.table = torch.full((len(LENGTHS), 10), -1, dtype=torch.int32)
        order = iter(torch.randperm(40, generator=generator).tolist())
        self.caches = [torch.full((40, HEADS_KV, PAGE, D), math.nan, dtype=dtype) for _ in "kv"]
        for b, rows in enumerate(zip(self.k, self.v, strict=True)):
            for page in range(-(-LENGTHS[b] // PAGE)):
                number = self.table[b, page] = next(order)
                for cache, x in zip(self.caches, rows, strict=True):
                    part = x[0, :, page * PAGE : (page + 1) * PAGE]
                    cache[number, :, : part.shape[1]] = part

    def run(self, spec: fg.AttentionSpec, *qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        tensors = {**self.tensors, **options.pop("tensors", {})}
        given = {"split_size": INVARIANT, **self.how, **options}
        found = run_forward(spec, *qkv, tensors=tensors, **given)
        return found.out, found.lse

    def training(self) -> list[tuple[Tensor, Tensor]]:
        """Each sequence alone, which is what the other calls are compared with."""
        triples = zip(self.q, self.k, self.v, strict=True)
        return [self.run(self.spec, *each) for each in triples]

    def packed(self, order: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        lengths = [LENGTHS[b] for b in order]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        qkv = (torch.cat([x[b] for b in order], 2) for x in (self.q, self.k, self.v))
        tensors = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        out, lse = self.run(self.spec.replace(packed=True), *qkv, tensors=tensors)
        return list(zip(out.split(lengths, 2), lse.split(lengths, 2), strict=True))

    def served(self, rows: dict[int, tuple[int, int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Rows [first, last) of some sequences in one call with packed queries, over pages."""
        counts = [last - first for first, last in rows.values()]
        tensors = {
            "page_table": self.table[list(rows)],
            "cache_seqlens": torch.tensor([last for _, last in rows.values()]).int(),
            "cu_seqlens_q": torch.tensor([0, *counts]).cumsum(0).int(),
        }
        q = torch.cat([self.q[b][:, :, slice(*ends)] for b, ends in rows.items()], 2)
        out, lse = self.run(self.spec.replace(paged=True), q, *self.caches, tensors=tensors)
        parts = zip(out.split(counts, 2), lse.split(counts, 2), strict=True)
        return dict(zip(rows, parts, strict=True))

    def check(self, step: int) -> None:
        """Compares all calls.

        Args:
            step: between the positions of which each is decoded.
        """
        whole = self.training()

        def same(b: int, first: int, found: tuple[Tensor, Tensor]) -> None:
            for x, expected in zip(found, whole[b], strict=True):
                assert torch.equal(x, expected[:, :, first : first + x.shape[2]]), (b, first)

        for order in ((0, 1, 2), (2, 0)):
            for b, found in zip(order, self.packed(order), strict=True):
                same(b, 0, found)
        chunks = [{2: (0, 50), 0: (0, 70)}, {2: (50, 99), 1: (4, 5)}, {2: (99, 133), 0: (66, 70)}]
        verified = [{0: (60, 64), 2: (125, 130)}]
        for rows in (*chunks, *verified):
            for b, found in self.served(rows).items():
                same(b, rows[b][0], found)
        for p in range(0, max(LENGTHS), step):
            rows = {b: (p, p + 1) for b, n in enumerate(LENGTHS) if p < n}
            for b, found in self.served(rows).items():
                same(b, p, found)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences of the tests have several splits."""
    monkeypatch.setattr(SpecProgram, "invariant_split", lambda self, target: SPLIT)


EMULATED = [{"backend": "emulator", "arch": arch} for arch in PATHS]


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("how", EMULATED, ids=list(PATHS))
@pytest.mark.parametrize("name", [slow(name) for name in MADE])
def test_a_row_has_the_same_bits_in_every_call_of_kernels(name: str, how: dict[str, Any]) -> None:
    Model(name, how).check(step=9)


@pytest.mark.parametrize("name", ["causal", slow("window"), "sink", slow("alibi"), slow("power")])
def test_a_row_has_the_same_bits_in_every_call_on_the_cpu(name: str) -> None:
    model = Model(name, {"backend": "tiled"})
    model.check(step=11)
    for b in (0, 2):
        qkv = model.q[b], model.k[b], model.v[b]
        judge_forward(model.run(model.spec, *qkv), model.spec, *qkv, tensors=model.tensors)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(
    "how", [EMULATED[0], *(pytest.param(EMULATED[1], marks=pytest.mark.slow),)]
)
def test_decoding_of_packed_neighbours_is_a_row_of_training(how: dict[str, Any]) -> None:
    model = Model("sink", how)
    q, k, v = model.q[2], model.k[2], model.v[2]
    out, lse = model.run(model.spec, q, k, v)
    for b, found in model.served({0: (69, 70), 2: (130, 133)}).items():
        if b == 2:
            assert torch.equal(found[0], out[:, :, 130:])
            assert torch.equal(found[1], lse[:, :, 130:])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.slow
def test_a_tile_that_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = SpecProgram.forward

    def of_batch(self: SpecProgram, request: ForwardRequest) -> Any:
        if request.call.batch > 2:
            kept = fg.plan(self.spec, request.arch).block_k
            plans = feasible(self.spec, request.arch)
            tile = next(plan.tile for plan in plans if plan.block_k != kept)
            request = request._replace(launch=LaunchOptions(tiles={"forward": tile}))
        return forward(self, request)

    monkeypatch.setattr(SpecProgram, "forward", of_batch)
    with pytest.raises(AssertionError):
        Model("causal", EMULATED[0]).check(step=40)


# ---- what the choice depends on -----------------------------------------------------------------


@pytest.mark.parametrize("arch", PATHS)
def test_the_split_of_a_usual_model_is_that_of_every_rank_and_gpu(arch: str) -> None:
    spec = MADE["causal"]
    chosen = invariant_splits(spec, arch)
    assert (chosen.heads_kv, chosen.kernel.sms) == (8, facts(arch).sms)
    assert chosen.size >= plan_splits(spec, arch, 8).size, "that of calls without a prefill"
    free = {plan_splits(spec, arch, heads, sms=sms).size for heads in (1, 8) for sms in (108, 132)}
    assert len(free) > 1, "the free choice depends on both"


def divisible(path: Path) -> bool:
    """Whether calls of all kinds take the spec: no packed one, and none with a static layout."""
    spec = fg.load(path)
    return not (spec.packed or (spec.block_sparse is not None and spec.block_sparse.is_static))


@every_share
@pytest.mark.parametrize(
    ("path", "arch"), one_in(9, product(filter(divisible, SPECS), PATHS)), ids=case_id
)
def test_all_kinds_of_calls_have_one_split_and_one_tile(path: Path, arch: str) -> None:
    spec = fg.load(path)
    plain = spec.replace(dropout=False)
    over_pages = plain.replace(paged=True)
    kinds = [
        *(plain, over_pages, packed_queries(over_pages), plain.replace(packed=True)),
        at_offsets(plain, (("q_offset", "int32"), ("k_offset", "int32"))),
    ]
    assert len({fg.plan(split(each), arch).tile for each in kinds}) == 1
    assert len({invariant_splits(each, arch).size for each in (spec, *kinds)}) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("blocks", [132, 114, 7])
def test_the_number_of_blocks_changes_no_bit(blocks: int) -> None:
    """132 SMs of an H100 SXM, 114 of an H100 PCIe. On sm_80 each work tile is a block."""
    model = Model("window", EMULATED[1])
    qkv = model.q[2], model.k[2], model.v[2]
    expected = model.run(model.spec, *qkv)
    found = model.run(model.spec, *qkv, blocks=blocks, order_seed=blocks)
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("how", [*map(slow, EMULATED)], ids=list(PATHS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_the_heads_have_the_bits_of_the_whole(
    ranks: int, how: dict[str, Any]
) -> None:
    model = Model("alibi", how)
    q, k, v = model.q[2], model.k[2], model.v[2]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))  # a key head for each rank
    whole = model.run(model.spec, q, k, v)
    share = HEADS // ranks
    for first in range(0, HEADS, share):
        heads = slice(first, first + share)
        given = (x[:, heads].contiguous() for x in (q, k, v))
        scalars = {"h_offset": first, "whole": {"heads": HEADS}}
        op = fg.attention(model.spec)
        found = op(*given, **scalars, return_lse=True, batch_invariant=True, **how)
        assert torch.equal(found[0], whole[0][:, heads])
        assert torch.equal(found[1], whole[1][:, heads])


# ---- gradients ----------------------------------------------------------------------------------


def gradients(model: Model, order: tuple[int, ...], *, recomputes: bool = False) -> list[Any]:
    """dq, dk and dv of each sequence of a packed batch."""
    lengths = [LENGTHS[b] for b in order]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = [torch.cat([x[b] for b in order], 2) for x in (model.q, model.k, model.v)]
    qkv = [x.requires_grad_() for x in qkv]
    op = fg.attention(model.spec.replace(packed=True))
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "batch_invariant": True, **model.how}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = op(q, k, v, **options, **model.tensors)
        return out

    out = checkpoint(attend, *qkv, use_reentrant=False) if recomputes else attend(*qkv)
    parts = out.split(lengths, 2)
    sum((part.float().square() * 1.5).sum() for part in parts).backward()
    return list(zip(*(x.grad.split(lengths, 2) for x in qkv), strict=True))


@pytest.mark.parametrize("name", [slow("causal"), slow("sink")])
@pytest.mark.parametrize("how", EMULATED, ids=list(PATHS))
def test_gradients_of_a_sequence_are_the_same_in_every_batch(
    name: str, how: dict[str, Any]
) -> None:
    model = Model(name, how)
    expected = gradients(model, (0, 1, 2))
    for order in ((2, 0), (1,), (0, 0, 2, 1)):
        for recomputes in (False, True):
            found = gradients(model, order, recomputes=recomputes)
            for b, each in zip(order, found, strict=True):
                assert all(map(torch.equal, each, expected[b])), (order, b)
