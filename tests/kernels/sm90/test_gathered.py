"""Tiles that Hopper's forward kernel gathers from live blocks of a layout: the error rule, the
scores that are computed, and planted bugs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.kernels.planner import Tile, plan
from flashgen.kernels.planner.layout_share import live_blocks, share_of_scores
from flashgen.kernels.visits.layout_path import path_of_layout
from flashgen.spec.language.signature import split
from flashgen.spec.language.spec import AttentionSpec
from tests.support.examples import spec_path
from tests.support.judged import Call
from tests.support.masks import causal
from tests.support.planted import planted
from tests.support.shapes import Case
from tests.support.sparse_layouts import by_position, random_layout, sparse_spec
from tests.support.tiers import one_in, slow
from tests.support.tiles_visited import visited

ARCH = "sm_90a"
WIDE = Tile(step=128, warps=8, row_groups=1, blocks=1)

bias = fg.Tensor("bias", ("heads", "seq_k"), "float32")
ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")


def falling(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.01 * fg.abs(q - k)


def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + bias[h, k]


def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (fg.abs(q - k) < 150) & ((q - k) % 3 == 0)


def marked(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ids[b, k] != 1


def judged(
    spec: AttentionSpec,
    case: Case,
    lines: tuple[int, int] = (1, 1),
    density: float = 0.4,
    offsets: tuple[int, int] = (0, 0),
    tile: Tile | None = None,
    **numbers: Any,
) -> ForwardRun:
    ends = case.seq_q + offsets[0], case.seq_k + offsets[1]
    live = random_layout(spec, lines, ends, density, 3)
    tensors = {"layout": live, **numbers.pop("tensors", {})}
    at = dict(zip(("q_offset", "k_offset"), offsets, strict=True))
    how: dict[str, Any] = {"split_size": 0}
    if tile is not None:
        how["tiles"] = {"forward": tile}
    call = Call(spec, case.tensors(), {"tensors": tensors, **at, **numbers}, arch=ARCH, **how)
    run = call.judged_forward()
    assert run.plan is not None
    assert run.plan.box_k > 0
    return run


# Blocks, the mask, lines of the layout, offsets, the tile.
BLOCKS = {
    "16, by head": ((16, 16), None, (1, 2), (0, 0), None),
    "32, causal": ((32, 32), causal, (1, 1), (0, 0), None),
    "64, by batch": ((64, 64), None, (2, 1), (0, 0), WIDE),
    "128": ((128, 128), causal, (1, 1), (0, 0), None),
    "256, parts of a block": ((64, 256), None, (1, 1), (0, 0), WIDE),
    "48, rows that differ in a box": ((24, 48), causal, (1, 1), (0, 0), WIDE),
    "20, which no box divides": ((20, 20), None, (1, 1), (0, 0), None),
    "8, narrower than a box": ((16, 8), causal, (1, 1), (0, 0), None),
    "boxes across blocks": ((64, 64), causal, (1, 1), (37, 100), None),
    "before 0": ((32, 64), None, (1, 1), (-40, -60), WIDE),
}
FAST = ("16, by head", "boxes across blocks")


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in BLOCKS])
def test_gathered_tiles_meet_the_error_rule(name: str) -> None:
    block, mask, lines, offsets, tile = BLOCKS[name]
    spec = sparse_spec(*block, mask, dtype="float16", head_dim=64)
    judged(spec, Case(150, 333, lines[0], 2, 2), lines, offsets=offsets, tile=tile)


def test_rows_without_a_live_block_are_rows_without_keys() -> None:
    spec = sparse_spec(64, 32, None, dtype="float16", head_dim=64)
    live = torch.zeros(1, 1, 3, 8, dtype=torch.bool)
    live[..., 1, 4:6] = True
    call = Call(spec, Case(190, 250).tensors(), {"tensors": {"layout": live}}, arch=ARCH)
    run = call.judged_forward()
    assert torch.all(run.out[:, :, :64] == 0)
    assert torch.all(run.lse[:, :, 128:] == -torch.inf)


# What reads the positions of keys, which are not those of a range.
MODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "a score of positions": (causal, falling, {}),
    "a captured column": (None, biased, {"tensors": {"bias": torch.linspace(-2, 2, 666)}}),
    "a costly mask": (dilated, None, {}),
    "a mask of a tensor": (marked, None, {"tensors": {"ids": torch.arange(333) // 70 % 3}}),
    "dropout": (causal, None, {"dropout_p": 0.3, "rng": torch.tensor([11, 3])}),
}


def shaped(numbers: dict[str, Any]) -> dict[str, Any]:
    """The same numbers of `MODS`, with tensors of the shapes that their specs name."""
    shapes = {"bias": (2, 333), "ids": (1, 333)}
    kinds = {"bias": torch.float32, "ids": torch.int32}
    tensors = numbers.get("tensors", {})
    made = {name: tensor.view(shapes[name]).to(kinds[name]) for name, tensor in tensors.items()}
    return {**numbers, **({"tensors": made} if made else {})}


@pytest.mark.parametrize("block", [16, slow(64)])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("a score of positions", "a mask of a tensor") else slow(name)
        for name in MODS
    ],
)
def test_functions_of_the_key_read_it_from_its_box(name: str, block: int) -> None:
    mask, score, numbers = MODS[name]
    spec = sparse_spec(
        *(block, block, mask),
        score_mod=score,
        dtype="float16",
        head_dim=64,
        dropout="dropout_p" in numbers,
    )
    judged(spec, Case(100, 333, 1, 2, 1), **shaped(numbers))


@pytest.mark.parametrize("seq_q", [9, slow(70)])
def test_heads_share_gathered_tiles(seq_q: int) -> None:
    spec = sparse_spec(16, 32, causal, dtype="float16", head_dim=64)
    run = judged(spec, Case(seq_q, 300, 1, 4, 1), offsets=(300 - seq_q, 0))
    assert run.plan is not None
    assert run.plan.heads_per_tile > 1


@pytest.mark.slow
def test_packed_sequences_have_gathered_tiles() -> None:
    spec = sparse_spec(16, 32, causal, dtype="float16", head_dim=64, packed=True)
    lengths = [40, 0, 130, 7], [60, 30, 130, 90]
    starts = [torch.tensor([0, *each]).cumsum(0).int() for each in lengths]
    live = random_layout(spec, (1, 1), (130, 130), 0.5, 2)
    q, k, v = Case(177, 310, 1, 2, 1).tensors()
    tensors = {"layout": live, "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    Call(spec, (q, k, v), {"tensors": tensors}, arch=ARCH).judged_forward()


def test_a_tile_has_live_boxes_alone() -> None:
    spec = sparse_spec(64, 32, None, dtype="float16", head_dim=64)
    live = random_layout(spec, (1, 1), (64, 2048), 0.25, 1)
    q, k, v = Case(64, 2048).tensors()
    how: dict[str, Any] = {"backend": "emulator", "arch": ARCH, "split_size": 0}
    run = run_forward(spec, q, k, v, tensors={"layout": live}, **how)
    assert run.plan is not None
    boxes = int(by_position(live, 64, 32, 1, 2048).sum()) // run.plan.box_k
    assert visited(run.report) == -(-boxes // (run.plan.block_k // run.plan.box_k))


# What is wrong, and how.
BUGS = {
    "a live word of another tile": (
        "record[RECORD_LIVE + (unsigned)thread / 32]",
        "records[(k.parity * STAGES + k.index) * RECORD_WORDS + RECORD_LIVE + thread / 32]",
    ),
    "a live word of other rows": (
        "RECORD_LIVE + (unsigned)thread / 32",
        "RECORD_LIVE + (thread / 32 ^ 1)",
    ),
    "masks of tiles whose first box has none": (
        "if (masked & ((1u << BOXES) - 1))",
        "if (masked & 1)",
    ),
    "a box of the wrong base": ("exists ? own * BOX_K", "exists ? (own + 1) * BOX_K"),
    "a key of another box": ("const int k_start = record[box];", "const int k_start = record[0];"),
    "V of the next tile": ("full_v, of_v", "full_v, k_start"),
    "a mask that is left out": (
        "record[RECORD_MASKED] = masked",
        "record[RECORD_MASKED] = (masked & 1)",
    ),
}


@pytest.mark.parametrize("bug", one_in(4, BUGS))
def test_planted_bugs_are_caught(bug: str) -> None:
    old, new = BUGS[bug]
    spec = sparse_spec(32, 32, causal, dtype="float16", head_dim=64)
    tile = Tile(step=64, warps=8, row_groups=1, blocks=1)
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        judged(spec, Case(100, 333, 1, 1, 1), density=0.7, offsets=(100, 0), tile=tile)


def test_the_tile_has_rows_of_few_blocks_where_these_differ() -> None:
    butterfly = fg.load(spec_path("butterfly")).replace(head_dim=128, head_dim_v=128)
    found = plan(butterfly, ARCH)
    assert found.block_q == 64
    assert found.box_k == 64
    sparse = butterfly.block_sparse
    assert sparse is not None
    assert share_of_scores(sparse, 64) < share_of_scores(sparse, 128) < share_of_scores(sparse, 192)
    served = plan(split(butterfly), ARCH)  # which has one tile for all
    assert not served.gathers
    assert served.box_k == served.block_k
    assert plan(butterfly, "sm_80").box_k == 0


def test_a_layout_that_knows_the_blocks_of_its_calls_alone_has_plans() -> None:
    table = [[True, False], [True, True]]
    sparse = fg.BlockSparse(lambda i, j: table[i][j], 64, 64)
    spec = AttentionSpec(block_sparse=sparse, dtype="float16", head_dim=64)
    call = Call(spec, Case(128, 128).tensors(), arch=ARCH)
    call.judged_backward(call.judged_forward())
    for backward in (False, True):
        assert path_of_layout(spec, ARCH, backward=backward) is not None


def test_a_layout_of_small_blocks_is_asked_for_few_of_them() -> None:
    for block_q, block_k in ((1, 1), (1, 64), (16, 16), (64, 128)):
        spec = sparse_spec(block_q, block_k, None, lambda i, j: j <= i, dtype="float16")
        plan(spec, ARCH)
        assert spec.block_sparse is not None
        assert 0 < len(live_blocks(spec.block_sparse)) <= 512 * 512
