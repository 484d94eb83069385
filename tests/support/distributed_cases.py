"""Cases of context parallelism, each executed by every rank of a group (`tests.support.ranks`).

Every rank makes the whole problem from one seed, computes it by one call, and compares its part of
the distributed results.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import flashgen as fg
from flashgen import distributed, reference
from flashgen.frontends.distributed.sharding import METHODS, Sharding, sharding_of
from tests.support import weights
from tests.support.examples import values_of
from tests.support.paths import ROOT
from tests.support.shapes import Case

Tensor = torch.Tensor


class Problem:
    """A spec with q, k, v and what it captures, on the whole sequence."""

    def __init__(
        self,
        spec: fg.AttentionSpec,
        seq: int,
        shard: Any = "contiguous",
        heads: tuple[int, int] = (4, 2),
        captures: dict[str, Any] | None = None,
    ) -> None:
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.op = fg.attention(spec)
        self.sharding: Sharding = sharding_of(shard, self.world, seq // self.world)
        self.shard = shard
        generator = torch.Generator().manual_seed(1)
        dtype = getattr(torch, spec.dtype)
        assert spec.head_dim_v is not None
        dims = (heads[0], spec.head_dim), (heads[1], spec.head_dim), (heads[1], spec.head_dim_v)
        # As models have them: views of [batch, seq, heads, head_dim].
        batch = 1 if spec.packed else 2
        shapes = [(batch, seq, count, dim) for count, dim in dims]
        self.qkv = [torch.randn(x, generator=generator).to(dtype).transpose(1, 2) for x in shapes]
        self.dout = torch.randn(batch, heads[0], seq, spec.head_dim_v, generator=generator).to(
            dtype
        )
        self.dlse = torch.randn(batch, heads[0], seq, generator=generator)
        self.captures = captures or {}

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's rows of [batch, heads, seq, ...]."""
        chunks = self.sharding.chunks_by_rank[self.rank]
        return torch.cat([whole[:, :, chunk.start : chunk.stop] for chunk in chunks], 2)

    def results(self, call: Callable[..., Any], own: bool) -> dict[str, Tensor]:
        """out, lse, and the gradients of q, k, v and learned tensors; ``own``: of own rows."""
        part = self.mine if own else (lambda whole: whole)
        q, k, v = (part(x).clone().requires_grad_() for x in self.qkv)
        captures = {
            name: x.clone().requires_grad_(x.is_floating_point())
            if isinstance(x, Tensor) and self._learned(name)
            else x
            for name, x in self.captures.items()
        }
        if self.op.spec.is_softmax:
            out, lse = call(q, k, v, return_lse=True, **captures)
            torch.autograd.backward((out, lse), (part(self.dout), part(self.dlse)))
        else:
            out, lse = call(q, k, v, **captures), None
            out.backward(part(self.dout))
        found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        learned = {n: x.grad for n, x in captures.items() if self._learned(n)}
        return {name: x.detach() for name, x in {**found, **learned}.items() if x is not None}

    def _learned(self, name: str) -> bool:
        return any(tensor.name == name and tensor.grad for tensor in self.op.spec.tensors)

    def compare(
        self, method: str, exact: bool = False, one: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The results of a method against those of one call, with options ``one``."""

        def call(*operands: Tensor, **given: Any) -> Any:
            return distributed.attention(
                self.op, *operands, method=method, shard=self.shard, **options, **given
            )

        whole = functools.partial(self.op, **(one or {}))
        found, expected = self.results(call, own=True), self.results(whole, own=False)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            rows = name in ("out", "lse", "dq", "dk", "dv")
            wanted = self.mine(expected[name]) if rows else expected[name]
            assert value.shape == wanted.shape
            if not wanted.numel():  # a rank without positions
                continue
            if exact and name in ("out", "lse"):
                assert torch.equal(value, wanted), f"{method} {name}"
            else:
                # Other orders of summation, relative to the largest element.
                largest = max(1.0, float(wanted.abs().nan_to_num(0.0, 0.0).max()))
                close = torch.isclose(value, wanted, atol=2e-5 * largest, rtol=2e-4)
                difference = float((value - wanted).abs().nan_to_num().max())
                assert close.all(), f"{self.op.name} {method} {name}: {difference} of {largest}"


def causal_spec(**options: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(
        lambda b, h, q, k: k <= q, head_dim=16, dtype="float32", name="causal", **options
    )


def window_spec() -> fg.AttentionSpec:
    return fg.AttentionSpec(
        lambda b, h, q, k: (k <= q) & (q - k < 40), head_dim=16, dtype="float32", name="window"
    )


def rich_spec() -> fg.AttentionSpec:
    """A learned bias of the distance, a slope for each head, a softcap and a sink."""
    table = fg.Tensor("table", ("heads", "distance"), "float32", grad=True)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 20 * fg.tanh(score / 20) + table[h, fg.minimum(q - k, 31)]

    return fg.AttentionSpec(
        lambda b, h, q, k: k <= q, score_mod, head_dim=16, dtype="float32", name="rich", sink=True
    )


def rich_captures() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "table": torch.randn(4, 32, generator=generator),
        "sink": torch.randn(4, generator=generator),
    }


def gathers_and_rings() -> None:
    for shard in ("contiguous", "head_tail"):
        for method in ("all_gather", "ring"):
            Problem(causal_spec(), 192, shard).compare(method)
            Problem(window_spec(), 192, shard).compare(method)
            Problem(rich_spec(), 128, shard, captures=rich_captures()).compare(method)


def weights_are_added_up() -> None:
    """Weights that are no exponentials: plain sums, which are divided when they are complete."""
    for name in ("retention", "power"):
        spec = weights.spec_of(name, 16, "float32").replace(dropout=False)
        captures = weights.captured_by(spec, 4, 1)
        problem = Problem(spec, 24 * dist.get_world_size(), "head_tail", captures=captures)
        for method in ("all_gather", "ring"):
            problem.compare(method)


def rows_and_numbers_are_those_of_the_whole() -> None:
    """fg.rand and a sink of heads and queries; the state is that of rank 0."""
    world = dist.get_world_size()
    spec = fg.AttentionSpec(
        lambda b, h, q, k: (k <= q) & ((fg.rand(b, h, q, k) < 0.7) | (q == k)),
        lambda score, b, h, q, k: score + fg.rand(0, h, 0, k, stream=1),
        head_dim=16,
        dtype="float32",
        name="random_rows",
        sink=fg.Tensor("sink", ("heads", "seq_q"), "float32", grad=True),
    )
    rng = torch.tensor([11, 7])
    own = rng + torch.tensor([0, dist.get_rank()])
    for method, heads in (("all_gather", 4), ("ring", 4), ("all_to_all", 2 * world)):
        captures = {"sink": torch.linspace(-2, 2, heads * 48 * world).view(heads, -1)}
        shared = (heads, heads // 2) if method == "all_to_all" else (4, 2)
        problem = Problem(spec, 48 * world, "head_tail", shared, captures)
        problem.compare(method, rng=own, one={"rng": rng})


def heads_are_exchanged() -> None:
    heads = 2 * dist.get_world_size(), dist.get_world_size()
    Problem(causal_spec(), 192, "head_tail", heads).compare("all_to_all")
    Problem(window_spec(), 192, "contiguous", heads).compare("all_to_all")
    rng = torch.tensor([11, 7])
    problem = Problem(sizes_spec(), 192, "head_tail", heads, sizes_captures(heads[0]))
    problem.compare("all_to_all", dropout_p=0.3, rng=rng, one={"dropout_p": 0.3, "rng": rng})


def sizes_spec() -> fg.AttentionSpec:
    """Reads the numbers of heads and positions and the head; with a sink, dropout and blocks."""
    slopes = fg.Tensor("slopes", ("heads",), "float32", grad=True)
    return fg.AttentionSpec(
        lambda b, h, q, k: (q - k < 16 * (h + 1) + fg.heads) & (k < fg.seq_k - h),
        lambda score, b, h, q, k: score + slopes[h] * (q - k) / fg.seq_q,
        head_dim=16,
        dtype="float32",
        name="sizes",
        sink=True,
        dropout=True,
        block_sparse=fg.BlockSparse(lambda b, h, i, j: (i + j + h) % 3 != 0, 32, 16),
    )


def sizes_captures(heads: int) -> dict[str, Tensor]:
    return {"slopes": torch.linspace(-1, 1, heads), "sink": torch.linspace(-2, 2, heads)}


def the_whole_is_seen() -> None:
    """Lengths and heads of the whole, in calls on parts of its positions."""
    rng = torch.tensor([11, 7])
    seq = 64 * dist.get_world_size()
    for method, shard in (("all_gather", "head_tail"), ("ring", "contiguous")):
        problem = Problem(sizes_spec(), seq, shard, captures=sizes_captures(4))
        problem.compare(method, dropout_p=0.3, rng=rng, one={"dropout_p": 0.3, "rng": rng})


def some_heads_of_a_whole() -> None:
    """Ranks that have the last heads, as beside tensor parallelism."""
    spec = sizes_spec().replace(dropout=False)
    captures = sizes_captures(6)
    place = {"h_offset": 2, "whole": {"heads": 6}}
    for method in ("all_gather", "ring"):
        problem = Problem(spec, 64 * dist.get_world_size(), captures=captures)
        problem.compare(method, one=place, **place)


def positions_begin_later() -> None:
    """q_offset and k_offset move the positions that mods, dropout and layouts see."""
    world, rng = dist.get_world_size(), torch.tensor([11, 7])
    heads = 2 * world, world
    sparse = window_spec().replace(block_sparse=fg.BlockSparse(block_q=32, block_k=16))
    live = torch.rand(1, 1, 3 * world, 6 * world, generator=torch.Generator().manual_seed(1)) < 0.5
    for method, shard, of_heads in (
        ("all_gather", "head_tail", (4, 2)),
        ("ring", "contiguous", (4, 2)),
        ("all_to_all", "contiguous", heads),
    ):
        problem = Problem(window_spec(), 64 * world, shard, of_heads)
        problem.compare(method, one={"q_offset": 70}, q_offset=70)
        place = {"q_offset": 32 * world, "k_offset": 16 * world}
        problem = Problem(sparse, 64 * world, shard, of_heads, {"layout": live})
        problem.compare(method, one=place, **place)
    dropped = {"dropout_p": 0.3, "rng": rng, "q_offset": 64, "k_offset": 48}
    problem = Problem(causal_spec(dropout=True), 64 * world, "head_tail")
    problem.compare("ring", one=dropped, **dropped)


def sums_have_a_fixed_order() -> None:
    """deterministic=True: those over the ranks too, which all_reduce may add in any order."""
    world = dist.get_world_size()
    heads = 2 * world, world
    for method, of_heads in (("all_gather", (4, 2)), ("ring", (4, 2)), ("all_to_all", heads)):
        generator = torch.Generator().manual_seed(2)
        captures = {"table": torch.randn(of_heads[0], 32, generator=generator)}
        spec = rich_spec().replace(sink=None)
        problem = Problem(spec, 64 * world, heads=of_heads, captures=captures)
        options: dict[str, Any] = {"deterministic": True}
        problem.compare(method, one=options, **options)
        call = functools.partial(distributed.attention, problem.op, method=method, **options)
        unordered = AssertionError("all_reduce has no order")
        with mock.patch.object(dist, "all_reduce", side_effect=unordered):
            first, again = (problem.results(call, own=True) for _ in range(2))
        for name, value in first.items():
            assert torch.equal(value, again[name]), f"{method} {name}"


def layouts_are_given() -> None:
    spec = causal_spec(block_sparse=fg.BlockSparse(block_q=32, block_k=16))
    seq = 96 * dist.get_world_size()
    live = torch.rand(1, 4, seq // 32, seq // 16, generator=torch.Generator().manual_seed(1)) < 0.4
    live[..., seq // 32 :] &= torch.arange(seq // 32)[:, None] % 2 == 0
    for method, shard in (("all_gather", "contiguous"), ("ring", "head_tail")):
        Problem(spec, seq, shard, captures={"layout": live}).compare(method)


def packed_sequences() -> None:
    """Chunks begin inside of sequences, and hold several; some sequences are empty."""
    bias = fg.Tensor("bias", ("batch", "distance"), "float32", grad=True)
    spec = fg.AttentionSpec(
        lambda b, h, q, k: (k <= q) & (q - k < 50),
        lambda score, b, h, q, k: score + bias[b, fg.minimum(q - k, 7)],
        head_dim=16,
        dtype="float32",
        name="packed_window",
        packed=True,
        sink=True,
    )
    seq = 96 * dist.get_world_size()
    ends = torch.tensor([0, 5, 5, seq // 2 + 9, seq - 20, seq - 3], dtype=torch.int32)
    captures = {"bias": torch.linspace(-1, 1, 40).view(5, 8), "sink": torch.linspace(-1, 1, 4)}
    captures |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for method in ("all_gather", "ring"):
        for shard in ("contiguous", "head_tail"):
            Problem(spec, seq, shard, captures=captures).compare(method)
    heads = 2 * dist.get_world_size(), dist.get_world_size()
    captures["sink"] = torch.linspace(-1, 1, heads[0])
    Problem(spec, seq, "head_tail", heads, captures).compare("all_to_all")


def gathered_chunks_are_equal_bits() -> None:
    """Chunks are whole tiles, and the keys that they reach are contiguous."""
    plan = fg.plan(causal_spec(), "sm_80")
    tile = max(plan.block_q, plan.block_k) * 2
    seq = dist.get_world_size() * 2 * tile
    Problem(causal_spec(), seq, "contiguous", (2, 1)).compare("all_gather", exact=True)


def the_same_elements_are_dropped() -> None:
    rng = torch.tensor([11, 7 + dist.get_rank()])  # that of rank 0 is taken
    options = {"dropout_p": 0.3, "rng": torch.tensor([11, 7])}
    for method, shard in (("all_gather", "head_tail"), ("ring", "contiguous")):
        problem = Problem(causal_spec(dropout=True), 64 * dist.get_world_size(), shard)
        problem.compare(method, one={**options}, **{**options, "rng": rng})


def halves_are_rounded_once() -> None:
    """Partial results are float32: the error is that of one call, not of a rounding per part."""
    spec = causal_spec().replace(dtype="bfloat16")
    seq = 64 * dist.get_world_size()
    for method, shard in (("ring", "contiguous"), ("all_gather", "head_tail")):
        problem = Problem(spec, seq, shard)
        exact, _ = reference.attention(spec, *problem.qkv)
        options = {"method": method, "shard": shard}
        out = distributed.attention(problem.op, *map(problem.mine, problem.qkv), **options)
        one, of_ranks = (
            (x - problem.mine(exact)).square().mean()
            for x in (problem.mine(problem.op(*problem.qkv)), out)
        )
        assert of_ranks <= 1.05 * one, f"{method}: {of_ranks / one}"


def any_list_of_chunks() -> None:
    world, size = dist.get_world_size(), 24
    chunks = [[range(n * size, (n + 1) * size) for n in (r, r + world)] for r in range(world)]
    for method in ("all_gather", "ring"):
        Problem(causal_spec(), 2 * world * size, chunks).compare(method)
    first, *rest = chunks  # the last rank has the first one's positions too, which has none
    for method in ("all_gather", "ring", "all_to_all"):
        one_less = [[], *rest[:-1], [*chunks[-1], *first]]
        Problem(causal_spec(), 2 * world * size, one_less, (2 * world, world)).compare(method)
    assigned = distributed.balance(causal_spec(), 2 * world * size, world, tile=8)
    Problem(causal_spec(), 2 * world * size, assigned.chunks).compare("ring")


def documents_are_sharded() -> None:
    ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")
    spec = fg.AttentionSpec(
        lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q),
        head_dim=16,
        dtype="float32",
        name="documents",
    )
    whole = torch.tensor([[0] * 50 + [1] * 100 + [2] * 42, [0] * 192], dtype=torch.int32)
    for method in ("all_gather", "ring"):
        problem = Problem(spec, 192, "head_tail", captures={"ids": whole})
        part = problem.mine(whole[:, None, :, None])[:, 0, :, 0]
        options = {"method": method, "shard": "head_tail", "sharded": {"ids": 1}}
        call = functools.partial(_with_part, problem.op, part, options)
        found, expected = problem.results(call, own=True), problem.results(problem.op, own=False)
        for name, value in found.items():
            torch.testing.assert_close(value, problem.mine(expected[name]), atol=2e-5, rtol=2e-4)


def _with_part(op: Any, part: Tensor, options: Any, *operands: Tensor, **given: Any) -> Any:
    return distributed.attention(op, *operands, **options, **{**given, "ids": part})


def sent_chunks() -> list[tuple[str, int]]:
    """The bytes that this rank sends for a window, by step, of the method ring."""
    from flashgen.frontends.distributed import exchange

    sent: list[tuple[str, int]] = []
    start = exchange.Exchange.start

    def counted(self: Any, given: Any, taken: Any, step: str, *tag: int) -> Any:
        if "of the ring" in step:
            sent.append((step, sum(each.tensor.numel() * 4 for each in given)))
        return start(self, given, taken, step, *tag)

    exchange.Exchange.start = counted  # type: ignore[method-assign]
    try:
        problem = Problem(window_spec(), 64 * dist.get_world_size())
        with torch.no_grad():
            distributed.attention(
                problem.op, *map(problem.mine, problem.qkv), method="ring", shard="contiguous"
            )
    finally:
        exchange.Exchange.start = start  # type: ignore[method-assign]
    return sent


def ranks_that_disagree() -> list[fg.InputError | None]:
    """The errors of other heads and rows, of other rows alone, and of what that error advises."""
    op, found = fg.attention(causal_spec()), []
    x = torch.zeros(1, 2, 64 if dist.get_rank() == 0 else 48, 16)
    heads = torch.cat([x, x], 1) if dist.get_rank() == 0 else x

    def error(q: Tensor, **options: Any) -> fg.InputError | None:
        try:
            distributed.attention(op, q, q, q, **options)
        except fg.InputError as raised:
            return raised
        return None

    found = [error(heads), error(x)]
    assert found[1] is not None
    advised = found[1].way_out.removeprefix("shard=")
    return [*found, error(x, shard=eval(advised))]


Wrong = dict[str, Any]


def wrong_calls() -> dict[str, str]:
    """The errors of calls with wrong arguments on all ranks or on the last one, then a good call.

    A rank that waited for one that refuses its arguments would take part in the wrong comparison.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    last = rank == world - 1
    x = torch.zeros(1, 2 * world, 32, 16)
    ids = torch.zeros(1, 32 - last, dtype=torch.int32)
    uneven = [
        [range(32)],
        [range(32, 72)],
        *([range(n * 36, (n + 1) * 36)] for n in range(2, world)),
    ]
    window = fg.AttentionSpec(
        lambda b, h, q, k: q - k < fg.Scalar("window", "int32"), head_dim=16, dtype="float32"
    )
    bias = fg.Tensor("bias", ("heads",), "float32", grad=True)
    biased = causal_spec().replace(score_mod=lambda s, b, h, q, k: s + bias[h])
    learned = {"bias": torch.zeros(2 * world, requires_grad=not last)}
    table = fg.Tensor("ids", ("batch", "seq_k"), "int32")
    documents = causal_spec().replace(mask_mod=lambda b, h, q, k: table[b, q] == table[b, k])
    boundaries = torch.tensor([5, 32 * world], dtype=torch.int32)
    packed, dropped = causal_spec(packed=True), causal_spec(dropout=True)
    sparse = causal_spec(block_sparse=fg.BlockSparse(block_q=16, block_k=16))
    ends = {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
    strided = torch.zeros(1, 2 * world, 16, 32).transpose(2, 3)
    everywhere: dict[str, Wrong] = {
        "uneven": {"shard": uneven},
        "shard": {"shard": "diagonal"},
        "method": {"method": "rings"},
        "arch": {"arch": "sm_1"},
        "sharded": {"sharded": 4},
        "packed": {"spec": packed, **ends},
        "odd heads": {"q": x[:, :3], "method": "all_to_all"},
        "scalar": {"spec": window, "window": "wide"},
        "summed": {"reduce_learned": "no"},
        "group": {"group": "cp"},
    }
    on_one: dict[str, Wrong] = {
        "one method": {"method": "all_gather"} if last else {},
        "one shard": {"shard": "head_tail"} if last else {},
        "one scale": {"scale": -1.0} if last else {},
        "one dtype": {"k": x.half()} if last else {},
        "one stride": {"q": strided} if last else {},
        "one list": {"q": [1.0]} if last else {},
        "one gradient": {"k": x.clone().requires_grad_(not last)},
        "one bias": {"spec": biased, **learned},
        "one switch": {"deterministic": True} if last else {},
        "one dropout": {"spec": dropped, "dropout_p": 0.5 if last else 0.0},
        "one name": {"\udcfc": 1} if last else {},  # an umlaut where the locale is C
        "one length": {"spec": documents, "ids": ids, "sharded": {"ids": 1}},
        "one scalar": {"spec": window, "window": 3 + last},
        "one layout": {"spec": sparse, "layout": torch.full((1, 1, 2 * world, 2 * world), last)},
        "one end": {"spec": packed, **dict.fromkeys(ends, torch.tensor([0, 32 - last, 64]).int())},
        "one document": {"spec": documents, "ids": torch.zeros(1, 32 * world).int() + last},
    }
    found, first = {}, dist.new_group([0])
    for name, options in {
        "warm": {},
        **everywhere,
        **on_one,
        "member": {"group": first},
        "good": {},
    }.items():
        given = {"spec": causal_spec(), "q": x, "k": x, "v": x, "method": "ring", **options}
        op = fg.attention(given.pop("spec"))
        try:
            distributed.attention(op, **given)
            found[name] = ""
        except fg.FlashgenError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def a_failing_step() -> list[str]:
    """The errors of calls whose kernel cannot be built, each followed by a call that compares."""
    from flashgen.frontends.distributed.context import Context

    def fail(*_: Any) -> None:
        raise fg.CompileError("no kernel", where="here", numbers="0", way_out="another")

    own_chunks = Context.own_chunks

    def begins_late(context: Any, *operands: Tensor) -> Any:
        time.sleep(0.2 * dist.get_rank())  # the first rank fails before the others send
        return own_chunks(context, *operands)

    found = []
    for passes in ("forward", "backward"):
        problem = Problem(causal_spec(), 64 * dist.get_world_size(), "head_tail")
        q, k, v = (problem.mine(x).requires_grad_() for x in problem.qkv)
        try:
            late = mock.patch.object(Context, "own_chunks", begins_late)
            with late, mock.patch.object(Context, passes, side_effect=fail):
                out = distributed.attention(problem.op, q, k, v, method="ring", shard="head_tail")
                assert isinstance(out, Tensor)
                out.sum().backward()
        except fg.CompileError as error:
            found.append(str(error))
        problem.compare("ring")
    return found


def different_specs() -> list[str]:
    """The errors of calls in which rank 1 has another spec."""

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < 5)

    def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + fg.Tensor("bias", ("heads",))[h]

    layout = fg.BlockSparse(lambda i, j: i >= j, 16, 16)
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"mask_mod": window}),
        ({}, {"score_mod": biased}),
        ({"scale": 1.0}, {"scale": 2.0, "dropout": True}),
        ({"block_sparse": layout}, {}),
    ]
    found = []
    for number, each in enumerate(changes):  # compared at the first call with each spec
        spec = causal_spec().replace(**each[dist.get_rank() > 0], name=f"different_{number}")
        captures = {tensor.name: torch.zeros(2) for tensor in spec.tensors}
        q, k, v = (torch.zeros(1, 2, 64, spec.head_dim) for _ in range(3))
        try:
            distributed.attention(fg.attention(spec), q, k, v, **captures)
            found.append("no error")
        except fg.InputError as error:
            found.append(str(error))
    return found


def a_compiled_call() -> tuple[bool, int, list[str], str]:
    """Whether the results are those without torch.compile, graphs, reasons of breaks, an error."""
    from torch._dynamo.utils import counters

    problem = Problem(causal_spec(), 64 * dist.get_world_size())
    inputs = [problem.mine(x).requires_grad_() for x in problem.qkv]

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = (2 * x for x in inputs)
        return (distributed.attention(problem.op, q, k, v, method="ring") * 3).square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    counters.clear()
    compiled = torch.compile(loss, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs), inputs)
    same = all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    graphs, reasons = counters["stats"]["unique_graphs"], list(counters["graph_break"])
    try:
        torch.compile(loss, backend="eager", fullgraph=True)(*inputs)
        error = ""
    except Exception as raised:
        error = str(raised)
    return same, graphs, reasons, error


def derivatives_beyond_the_first() -> list[str]:
    """What the refusals of forward mode and of second derivatives say, for each method."""
    problem = Problem(causal_spec(), 64 * dist.get_world_size())
    found = []
    for method in METHODS:

        def call(q: torch.Tensor, method: str = method) -> torch.Tensor:
            rest = (problem.mine(x) for x in problem.qkv[1:])
            return distributed.attention(problem.op, q, *rest, method=method)

        q = problem.mine(problem.qkv[0]).requires_grad_()
        (first,) = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
        for derive in (
            lambda: first.square().sum().backward(),  # noqa: B023
            lambda: call(torch.autograd.forward_ad.make_dual(q.detach(), q.detach())),  # noqa: B023
        ):
            try:
                with torch.autograd.forward_ad.dual_level():
                    derive()
            except fg.InputError as error:
                found.append(error.what)
    return found


def the_example_learns() -> None:
    """The training of `examples/long_context.py`, whose losses are those of one process."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import long_context as example
    finally:
        sys.path.remove(str(ROOT / "examples"))
    text = example.Text(example.TEXT.read_text(encoding="utf-8"))
    sizes = example.Sizes(context=32 * dist.get_world_size(), batch=2, layers=1, heads=2)
    places = example.own_positions(sizes.context, dist.get_rank(), dist.get_world_size())
    one, many = (example.train(text, sizes, 3, "cpu", own) for own in (None, places))
    apart = [abs(a - b) for a, b in zip(one, many, strict=True)]
    assert max(apart) <= example.LARGEST_DIFFERENCE, apart


def a_rank_that_ends() -> str:
    import os

    problem = Problem(causal_spec(), 64 * dist.get_world_size())
    q, k, v = (problem.mine(x).requires_grad_() for x in problem.qkv)
    out = distributed.attention(problem.op, q, k, v, method="ring")
    assert isinstance(out, Tensor)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    try:
        out.sum().backward()
    except distributed.DistributedError as error:
        return str(error)
    return "no error"


def methods_of(spec: fg.AttentionSpec) -> tuple[str, ...]:
    """The methods that can compute the spec."""
    read = {s.name for s in spec.mask.free_symbols | spec.score.free_symbols}
    reads_length = not read.isdisjoint(("seq_q", "seq_k"))
    return ("all_to_all",) if spec.packed and reads_length else METHODS


def every_spec() -> int:
    paths = sorted((ROOT / "specs").glob("*.py"))
    for number, path in enumerate(paths):
        spec = fg.load(path).replace(dtype="float32", head_dim=16, dropout=False)
        seq = 32 * dist.get_world_size()
        heads = 2 * dist.get_world_size(), dist.get_world_size()
        values = values_of(path, Case(seq, seq, 1 if spec.packed else 2, *heads))
        captures = {**values["scalars"], **values["tensors"]}
        shard = ("contiguous", "head_tail")[number % 2]
        problem = Problem(spec, seq, shard, heads, captures)
        for method in methods_of(spec):
            problem.compare(method)
    return len(paths)


def peak_of_a_ring() -> float:
    return _held(causal_spec(), "ring")


def peak_of_a_gather() -> float:
    return _held(window_spec(), "all_gather")


def _held(spec: fg.AttentionSpec, method: str) -> float:
    """Keys and values of other ranks that this rank holds at most, in shares of its own."""
    from flashgen.frontends.distributed import context

    live: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0
    room = context.Context.room

    def counted(self: Any, number: int, k: Tensor, v: Tensor) -> Any:
        nonlocal most
        made = room(self, number, k, v)
        live.update(made.tensors)
        most = max(most, sum(x.numel() for x in live))
        return made

    context.Context.room = counted  # type: ignore[method-assign]
    try:
        problem = Problem(spec, 64 * dist.get_world_size(), "head_tail")
        q, k, v = map(problem.mine, problem.qkv)
        with torch.no_grad():
            distributed.attention(problem.op, q, k, v, method=method, shard="head_tail")
    finally:
        context.Context.room = room  # type: ignore[method-assign]
    return most / (k.numel() + v.numel())
