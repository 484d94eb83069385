"""Which rank holds what, which pairs of chunks are computed, and how even the work is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flashgen as fg
from flashgen import InputError, distributed
from flashgen.frontends.distributed import checks
from flashgen.frontends.distributed.reach import reached
from flashgen.frontends.distributed.sharding import METHODS, sharding_of
from tests.support.paths import ROOT

SEQ, WORLD = 8192, 8


def test_contiguous_and_head_tail_cover_the_sequence() -> None:
    assert sharding_of("contiguous", 3, 4).chunks_by_rank == (
        (range(4),),
        (range(4, 8),),
        (range(8, 12),),
    )
    assert sharding_of("head_tail", 2, 4).chunks_by_rank == (
        (range(2), range(6, 8)),
        (range(2, 4), range(4, 6)),
    )


def test_a_rank_without_positions_has_an_empty_chunk() -> None:
    found = sharding_of([[range(4)], [], [(4, 6)]], 3, 4)
    assert found.chunks_by_rank == ((range(4),), (range(0),), (range(4, 6),))
    assert found.rows(1) == 0
    assert found.part(torch.ones(1, 2, 6, 8), 1).shape == (1, 2, 0, 8)


@pytest.mark.parametrize(
    ("shard", "rows", "what"),
    [
        ("tail", 4, "no such sharding"),
        ("head_tail", 3, "two chunks of equal length"),
        ([[range(4)]], 4, "one entry for each rank"),
        ([[range(4)], [range(5, 8)]], 4, "cover the positions"),
        ([[range(4)], [range(2, 8)]], 4, "cover the positions"),
        ([[3], [4]], 4, "a list of ranges"),
        ([[(0, 4.5)], [(4, 8)]], 4, "a list of ranges"),
        ([["04"], ["48"]], 4, "a list of ranges"),
    ],
)
def test_wrong_shardings_are_refused(shard: Any, rows: int, what: str) -> None:
    with pytest.raises(InputError, match=what) as error:
        sharding_of(shard, 2, rows)
    assert ("contiguous" if rows % 2 else "head_tail") in error.value.way_out


@pytest.mark.parametrize(
    "name", ["causal", "sliding_window", "prefix_lm", "dilated_window", "document"]
)
def test_pairs_of_chunks_that_are_left_out_have_no_element(name: str) -> None:
    spec = fg.load(ROOT / "specs" / f"{name}.py")
    captures = captures_of(name, 128)
    tensors = {n: x for n, x in captures.items() if isinstance(x, torch.Tensor)}
    scalars = {n: x for n, x in captures.items() if n not in tensors}
    chunks = tuple(range(start, start + 16) for start in range(0, 128, 16))
    live = reached(spec, chunks, chunks, (1, 1, 128, 128), scalars, tensors)
    mask = (
        fg.reference.keep(spec, 128, 128, **captures) if hasattr(fg, "keep") else dense(name, 128)
    )
    blocks = mask.reshape(8, 16, 8, 16).any(axis=(1, 3))
    assert (live >= blocks).all()
    if name in ("causal", "sliding_window", "prefix_lm"):
        assert (live == blocks).all()


def captures_of(name: str, seq: int) -> dict[str, Any]:
    if name == "document":
        starts = torch.arange(seq) // (seq // 5)
        return {"ids": starts[None].to(torch.int32)}
    return {
        "sliding_window": {"window": seq // 8},
        "prefix_lm": {"prefix": seq // 4},
        "dilated_window": {"window": seq // 8, "dilation": 2},
    }.get(name, {})


def dense(name: str, seq: int) -> np.ndarray[Any, np.dtype[Any]]:
    q, k = np.arange(seq)[:, None], np.arange(seq)[None]
    document = np.arange(seq) // (seq // 5)
    window = seq // 8
    masks = {
        "causal": k <= q,
        "sliding_window": (k <= q) & (q - k < window),
        "prefix_lm": (k <= q) | (k < seq // 4),
        "dilated_window": (abs(q - k) <= window) & ((q - k) % 2 == 0),
        "document": document[:, None] == document[None],
    }
    return masks[name]


@pytest.mark.parametrize("name", ["causal", "sliding_window", "document", "prefix_lm"])
def test_the_largest_share_of_8_ranks_is_within_5_percent_of_the_mean(name: str) -> None:
    spec = fg.load(ROOT / "specs" / f"{name}.py")
    found = distributed.balance(spec, SEQ, WORLD, **captures_of(name, SEQ))
    assert found.largest_over_mean <= 1.05, str(found)
    assert sum(found.shares) == pytest.approx(1)
    covered = sorted(position for chunks in found.chunks for c in chunks for position in c)
    assert covered == list(range(SEQ))
    assert len({sum(map(len, chunks)) for chunks in found.chunks}) == 1
    assert f"{found.largest_over_mean:.3f} of the mean" in str(found)


def test_causal_masks_need_two_chunks_per_rank() -> None:
    spec = fg.load(ROOT / "specs" / "causal.py")
    found = distributed.balance(spec, SEQ, WORLD)
    assert [len(chunks) for chunks in found.chunks] == [2] * WORLD


def test_a_sequence_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InputError, match="equal length") as error:
        distributed.balance(fg.load(ROOT / "specs" / "causal.py"), 100, 8)
    assert "112" in error.value.way_out


def test_a_call_without_a_group_says_what_to_start() -> None:
    op = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float32"))
    with pytest.raises(InputError, match="no process group") as error:
        distributed.attention(op, *(torch.zeros(1, 1, 4, 16) for _ in range(3)))
    assert "torchrun" in error.value.way_out


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SPEC = fg.AttentionSpec(lambda b, h, q, k: k <= q, head_dim=16, dtype="float32", dropout=True)
ALIGNED = fg.AttentionSpec(
    lambda b, h, q, k: k <= q + (fg.seq_k - fg.seq_q), dtype="float32", head_dim=16
)
ENDS = torch.tensor([0, 20, 32], dtype=torch.int32)
CU_SEQLENS = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}


@pytest.mark.usefixtures("alone")
def test_a_call_over_one_rank_has_tangents() -> None:
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    op = fg.attention(SPEC)
    found = torch.func.jvp(lambda q: distributed.attention(op, q, k, v), (q,), (k,))
    torch.testing.assert_close(found, torch.func.jvp(lambda q: op(q, k, v), (q,), (k,)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("spec", "options", "what"),
    [
        (SPEC, {"method": "broadcast"}, "no such method"),
        (SPEC, {"return_aux": fg.AuxRequest(lse=True)}, "returns no statistics"),
        (SPEC, {"shard": [[range(8), range(8, 32)]], "dropout_p": 0.1}, "multiples of 16"),
        (SPEC, {"shard": [[range(24)]]}, "rows of this rank's chunks"),
        (SPEC, {"q_offset": 2**31}, "positions larger than kernels support"),
        (SPEC, {"k_offset": 0.5}, "k_offset is not a whole number"),
        (SPEC, {"q_offset": torch.tensor([1])}, "decided on the host"),
        (SPEC, {"k_offset": 8, "dropout_p": 0.5}, "begin at multiples of 16"),
        (SPEC.replace(packed=True), {**CU_SEQLENS, "q_offset": 16}, "offsets of their own"),
        (SPEC, {"q_offset": 16, "sharded": {"ids": 0}}, "positions before it"),
        (SPEC, {"deterministic": 1}, "neither True, False nor None"),
        (SPEC, {"sharded": {"ids": 0}}, "an element for each of the rank's positions"),
        (ALIGNED.replace(packed=True), CU_SEQLENS, "does not know its length"),
        (SPEC, {"whole": {"seq_q": 64}}, "lengths of the whole follow from the chunks"),
        (SPEC, {"whole": 4}, "lengths of the whole follow from the chunks"),
        (SPEC, {"h_offset": 2}, "are not among those of the whole"),
        (SPEC.replace(packed=True), {**CU_SEQLENS, "dropout_p": 0.5}, "begin at multiples of 16"),
    ],
)
def test_what_cannot_be_distributed_is_refused(
    spec: fg.AttentionSpec, options: dict[str, Any], what: str
) -> None:
    q, k, v = (torch.zeros(1, 2, 32, spec.head_dim) for _ in range(3))
    with pytest.raises(InputError, match=what) as error:
        distributed.attention(fg.attention(spec), q, k, v, **options)
    assert error.value.way_out


@pytest.mark.usefixtures("alone")
def test_operands_that_are_no_tensors_of_four_dimensions_are_refused() -> None:
    x, op = torch.zeros(1, 2, 32, 16), fg.attention(SPEC)
    for operands, name in (((x[0], x, x), "q"), ((x, [1.0], x), "k"), ((x, x, None), "v")):
        with pytest.raises(InputError, match=f"{name} is not a tensor of 4 dimensions"):
            distributed.attention(op, *operands)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="q is not a torch tensor"):
        op([1.0], x, x, h_offset=1, whole={"heads": 4})  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_rank_is_a_call() -> None:
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    op = fg.attention(SPEC)
    assert torch.equal(distributed.attention(op, q, k, v, method="ring"), op(q, k, v))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", METHODS)
def test_the_rows_of_one_rank_are_those_of_its_chunks(method: str) -> None:
    """Also where they are not in the order of the positions."""
    chunks = [range(16, 32), range(16)]
    order = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
    qkv = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    mine = [x.detach()[:, :, order].requires_grad_() for x in qkv]
    op = fg.attention(SPEC)
    found = distributed.attention(op, *mine, method=method, shard=[chunks])
    assert isinstance(found, torch.Tensor)
    expected = op(*qkv)[:, :, order]
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found.square().sum(), mine)
    whole = torch.autograd.grad(expected.square().sum(), qkv)
    torch.testing.assert_close(gradients, tuple(x[:, :, order] for x in whole))


LAYOUT = fg.AttentionSpec(head_dim=16, block_sparse=fg.BlockSparse(block_q=32, block_k=16))
DOCUMENT = fg.load(ROOT / "specs" / "document.py")
WINDOW = fg.load(ROOT / "specs" / "sliding_window.py")


@pytest.mark.parametrize(
    ("spec", "options", "argument"),
    [
        ("causal", {}, "spec"),
        (SPEC, {"seq": "a"}, "seq"),
        (SPEC, {"seq": 0}, "seq"),
        (SPEC, {"seq": 64.0}, "seq"),
        (SPEC, {"world": True}, "world"),
        (SPEC, {"world": -2}, "world"),
        (SPEC, {"batch": None}, "batch"),
        (SPEC, {"heads": 0}, "heads"),
        (WINDOW, {}, "window"),
        (WINDOW, {"window": "wide"}, "window"),
        (DOCUMENT, {"ids": [1, 2]}, "ids"),
        (DOCUMENT, {"ids": torch.zeros(1, 64)}, "ids"),
        (DOCUMENT, {"ids": torch.zeros(64, dtype=torch.int32)}, "ids"),
        (DOCUMENT, {"ids": torch.zeros(3, 64, dtype=torch.int32)}, "ids"),
        (LAYOUT, {}, "layout"),
        (LAYOUT, {"layout": torch.ones(1, 1, 2, 3, dtype=torch.bool)}, "layout"),
        (SPEC.replace(packed=True), {**CU_SEQLENS, "cu_seqlens_q": ENDS.flip(0)}, "cu_seqlens_q"),
    ],
)
def test_wrong_values_of_balance_and_forecast_are_refused(
    spec: Any, options: dict[str, Any], argument: str
) -> None:
    sizes = {"seq": 64, "world": 2, "batch": 1, "heads": 2}
    given = {**sizes, **{n: x for n, x in options.items() if n in sizes}}
    captures = {n: x for n, x in options.items() if n not in sizes}
    with pytest.raises(InputError) as error:
        distributed.balance(spec, **given, **captures)
    assert f"argument {argument}" in error.value.where
    shape = given["batch"], given["heads"], given["heads"], given["seq"]
    with pytest.raises(InputError) as error:
        distributed.forecast(spec, given["world"], shape, captures=captures)
    assert f"argument {argument}" in error.value.where


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"sizes": 64}, "sizes"),
        ({"link": -1.0}, "link"),
        ({"link": "fast"}, "link"),
        ({"method": ["ring"]}, "method"),
        ({"shard": [[range(16)], [range(16, 32)]]}, "shard"),
        ({"shard": 3}, "shard"),
    ],
)
def test_wrong_options_of_forecast_are_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(InputError, match=f"argument {argument} of") as error:
        distributed.forecast(SPEC, 2, **{"sizes": (1, 2, 2, 64), **options})
    assert error.value.way_out


def test_tiles_of_no_positions_are_refused() -> None:
    for tile in (0, -8, 12.5, "a"):
        with pytest.raises(InputError, match="argument tile of"):
            distributed.balance(SPEC, 64, 2, tile=tile)  # type: ignore[arg-type]


class _Ranks:
    """The transfers of a group of two GPUs of which both ranks always ask for the same."""

    rank, world, device = 0, 2, "cuda"

    def __init__(self, group: object) -> None:
        self.group = group
        self.comparisons = 0

    def notes(self, said: bytes, step: str) -> list[bytes]:
        self.comparisons += 1
        return [said] * 2


class _Group:
    pass


def test_what_the_ranks_agree_on_ends_with_their_group() -> None:
    spec = fg.AttentionSpec(head_dim=16)
    before = len(checks._agreed)
    for _ in range(3):  # of which each may have the id of the one before
        ranks: Any = _Ranks(_Group())
        checks.compare(ranks, spec, {})
        checks.compare(ranks, spec, {})
        assert ranks.comparisons == 1
        del ranks
        assert len(checks._agreed) == before
