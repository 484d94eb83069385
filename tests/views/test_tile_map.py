"""A tile map says what kernels do and what masks keep: compared with both, score by score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from flashgen.shared.errors import InputError
from flashgen.tools.views.tile_kinds import TileKind
from flashgen.tools.views.tile_map import TileMap
from tests.support import flex_mods
from tests.support.examples import SPECS, spec_path, values_of
from tests.support.masks import causal
from tests.support.random_mods import captures, random_mask
from tests.support.shapes import Case
from tests.support.sparse_layouts import random_layout, sparse_spec
from tests.support.tiers import one_in
from tests.support.tiles_visited import kept, visited

TILE = (16, 24)
LENGTHS = (203, 150)
EMPTY, MIXED, FULL = 0, 1, 2


def has_one_layout(path: Path) -> bool:
    spec = fg.load(path)
    return not (spec.packed or (spec.block_sparse is not None and spec.block_sparse.by_head))


# Packed sequences, and layouts of single heads, have tests of their own.
ONE_LAYOUT = [path for path in SPECS if has_one_layout(path)]


def exact_classes(keep: torch.Tensor, tile: tuple[int, int] = TILE) -> np.ndarray:
    """The class of each tile of a mask, bool [seq_q, seq_k], by looking at its scores."""
    rows, columns = (range(0, n, block) for n, block in zip(keep.shape, tile, strict=True))
    parts = [[keep[q : q + tile[0], k : k + tile[1]] for k in columns] for q in rows]
    return np.array([[int(p.any()) + int(p.all()) for p in line] for line in parts])


def agrees(found: TileMap, keep: torch.Tensor, tile: tuple[int, int] = TILE) -> None:
    """Compares a map with its mask, bool [batch, heads, seq_q, seq_k]."""
    assert found.exact
    for b, of_batch in enumerate(keep):
        for h, one in enumerate(of_batch):
            here = found.of(b, h)
            wanted = exact_classes(one, tile)
            assert np.array_equal(here.exact_classes, wanted)
            # What the kernel skips is empty, and where it evaluates no mask, every score is kept.
            assert (wanted[here.classes == EMPTY] == EMPTY).all()
            assert (wanted[here.classes == FULL] == FULL).all()
    assert found.kept == pytest.approx(float(keep.double().mean()))


def flat(values: dict[str, Any]) -> dict[str, Any]:
    return {**values["scalars"], **values["tensors"]}


@pytest.mark.parametrize("path", ONE_LAYOUT, ids=lambda path: path.stem)
@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_the_map_of_every_spec_is_that_of_its_mask(path: Path, kernel: str) -> None:
    spec = fg.load(path)
    values = values_of(path, Case(*LENGTHS, batch=2, heads_q=2))
    found = fg.visualize(spec, (2, 2, 2, *LENGTHS), tile=TILE, kernel=kernel, captures=flat(values))
    agrees(found, kept(spec, 2, 2, *LENGTHS, values))


@pytest.mark.parametrize("seed", one_in(3, range(12)))
def test_the_map_of_a_random_mask_is_that_of_the_mask(seed: int) -> None:
    spec = fg.AttentionSpec(mask_mod=random_mask(seed))
    values = captures(seed, 2, 2, *LENGTHS)
    read = {each.name for each in (*spec.tensors, *spec.scalars)}
    given = {name: x for name, x in flat(values).items() if name in read}
    found = fg.visualize(spec, (2, 2, 2, *LENGTHS), tile=TILE, captures=given)
    agrees(found, kept(spec, 2, 2, *LENGTHS, values))


@pytest.mark.usefixtures("rounded_sums")
def test_the_visited_tiles_are_those_that_emulated_kernels_compute() -> None:
    case = Case(300, 300, heads_q=1, heads_kv=1, head_dim=16)
    spec = fg.load(spec_path("causal")).replace(head_dim=16, head_dim_v=16)
    q, k, v = case.tensors()
    how = {"backend": "emulator", "check_memory": False}
    run = run_forward(spec, q, k, v, **how)
    gradients = (torch.ones_like(run.out), None)
    back = run_backward(spec, q, k, v, run.out, run.lse, *gradients, deterministic=True, **how)
    reports = {each.kernel.plan.kernel: each for each in (run.report, *back.reports)}
    for kernel in ("forward", "dkdv", "dq"):
        plan = reports[kernel].kernel.plan
        found = fg.visualize(spec, (1, 1, 300), kernel=kernel)
        assert found.tile == (plan.block_q, plan.block_k)
        counts = found.counts
        assert counts["mixed"] + counts["full"] == visited(reports[kernel]), kernel


def test_a_tile_past_the_end_is_masked_by_the_kernel_although_it_is_full() -> None:
    found = fg.visualize(fg.AttentionSpec(), (1, 1, 1, 64, 100), tile=(32, 32))
    assert found.counts == {"empty": 0, "mixed": 2, "full": 6}
    assert found.exact_counts == {"empty": 0, "mixed": 0, "full": 8, "not computed": 0}
    assert found.kinds[TileKind.FULL_BUT_MASKED] == 2
    assert found.density == found.kept == 1


def test_tiles_that_no_analysis_can_exclude_are_said_to_be_visited_and_empty() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q * q + k * k) % 4 == 3  # squares leave 0 or 1, so that nothing is kept

    found = fg.visualize(mask_mod, (1, 1, 64), tile=(16, 16))
    assert found.counts["empty"] == 0
    assert found.exact_counts == {"empty": 16, "mixed": 0, "full": 0, "not computed": 0}
    assert "no score is kept" in str(found)
    assert found.kept == 0


def test_heads_with_the_same_tiles_share_a_grid() -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < 32 * (h // 2 + 1))

    found = fg.visualize(mask_mod, (3, 4, 256), tile=(16, 16))
    assert [sorted(each.pairs) for each in found.heads] == [
        [(b, h) for b in range(3) for h in heads] for heads in ((0, 1), (2, 3))
    ]
    assert found.tiles == 3 * 4 * 256
    assert "heads 0 to 1" in str(found)
    one = fg.visualize(mask_mod, (3, 4, 256), tile=(16, 16), batch=1, head=3)
    assert one.tiles == 256
    assert np.array_equal(one.of(1, 3).kinds, found.of(1, 3).kinds)


def test_of_many_pairs_that_differ_the_first_are_computed_and_the_map_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + 16 * h

    monkeypatch.setattr("flashgen.tools.views.visualize.MOST_PAIRS", 3)
    found = fg.visualize(mask_mod, (1, 5, 256), tile=(16, 16))
    assert [each.pairs for each in found.heads] == [((0, h),) for h in range(3)]
    assert "The map has 3 of 5 pairs of a batch entry and a head" in str(found)
    assert fg.visualize(mask_mod, (1, 5, 256), tile=(16, 16), head=4).of(0, 4).kinds.any()


def test_layouts_given_with_the_call_and_layouts_by_head_are_shown() -> None:
    spec = sparse_spec(24, 40, causal)
    live = random_layout(spec, (2, 3), LENGTHS, 0.5, seed=3)
    found = fg.visualize(spec, (2, 3, 3, *LENGTHS), tile=TILE, layout=live)
    values = {"scalars": {}, "tensors": {"layout": live}}
    agrees(found, kept(spec, 2, 3, *LENGTHS, values))

    of_heads = sparse_spec(24, 40, causal, lambda b, h, i, j: bool(live[b, h, i, j]))
    again = fg.visualize(of_heads, (2, 3, 3, *LENGTHS), tile=TILE)
    for b in range(2):
        for h in range(3):
            assert np.array_equal(again.of(b, h).kinds, found.of(b, h).kinds)


def test_offsets_move_the_map() -> None:
    spec = fg.load(spec_path("causal"))
    keep = torch.arange(64)[:, None] + 100 >= torch.arange(200) + 40
    found = fg.visualize(spec, (1, 1, 1, 64, 200), tile=TILE, q_offset=100, k_offset=40)
    agrees(found, keep[None, None])
    each = torch.tensor([100, 7])
    several = fg.visualize(spec, (2, 1, 1, 64, 200), tile=TILE, q_offset=each, k_offset=40)
    assert np.array_equal(several.of(0).kinds, found.of(0).kinds)
    keep = torch.arange(64)[:, None] + 7 >= torch.arange(200) + 40
    assert np.array_equal(several.of(1).exact_classes, exact_classes(keep))
    assert several.drawing().grids[1].queries == (7, 70)


def test_a_paged_cache_is_shown_by_logical_positions_with_the_queries_last() -> None:
    spec = fg.AttentionSpec(mask_mod=causal, paged=True, name="paged")
    found = fg.visualize(spec, (1, 1, 1, 16, 256), tile=(16, 32))
    assert found.counts == {"empty": 0, "mixed": 1, "full": 7}


def test_packed_sequences_have_a_grid_each() -> None:
    ends = torch.tensor([0, 40, 40, 104], dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    found = fg.visualize(causal, tile=TILE, **given)
    assert [each.pairs for each in found.heads] == [((0, 0),), ((2, 0),)]
    for b, length in ((0, 40), (2, 64)):
        keep = torch.ones(length, length, dtype=torch.bool).tril()
        assert np.array_equal(found.of(b).exact_classes, exact_classes(keep))
    spec = fg.AttentionSpec(mask_mod=causal, packed=True)
    assert str(fg.visualize(spec, (1, 1, 104), tile=TILE, **given)).count("sequence") == 3
    nothing = {name: torch.zeros(5, dtype=torch.int32) for name in given}
    with pytest.raises(InputError, match="a sequence with queries and keys") as caught:
        fg.visualize(spec, (1, 1, 1), tile=TILE, **nothing)
    assert caught.value.numbers == "4 sequences, 1 heads, 1 queries, 1 keys"


MODS = ["causal", "sliding_window", "document", "padding_of_bools", "natten", "paged", "stitched"]


@pytest.mark.parametrize("name", MODS)
def test_mods_of_torch_are_traced_with_the_tensors_that_they_hold(name: str) -> None:
    mask_mod, _, _ = getattr(flex_mods, name)(2, 2, *LENGTHS)
    block_mask = create_block_mask(mask_mod, 2, 2, *LENGTHS, device="cpu", BLOCK_SIZE=TILE)
    found = fg.visualize(mask_mod, (2, 2, 2, *LENGTHS), tile=TILE)
    same = fg.visualize(block_mask, tile=TILE)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    q, k = torch.arange(LENGTHS[0])[:, None], torch.arange(LENGTHS[1])
    vmapped = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        vmapped = torch.vmap(vmapped, in_dims=dims)
    keep = torch.vmap(vmapped, in_dims=(0, None, None, None))(
        b.flatten(), h.flatten(), q.flatten(), k
    )
    agrees(found, keep)
    agrees(same, keep)


def test_blocks_of_a_block_mask_that_leave_out_scores_are_applied() -> None:
    blocks = torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32)
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=128, mask_mod=causal)
    found = fg.visualize(block_mask, tile=(128, 128))
    assert found.of().exact_classes.tolist() == [[MIXED, EMPTY], [EMPTY, MIXED]]


def test_zoom_shows_the_scores_of_a_tile() -> None:
    found = fg.visualize(causal, (1, 1, 100), tile=(32, 48))
    keep = np.tril(np.ones((100, 100), dtype=bool))
    assert np.array_equal(found.elements(1, 0), keep[32:64, :48])
    assert np.array_equal(found.elements(3, 2), keep[96:, 96:])
    several = found.zoom(2, 1, size=2)
    assert np.array_equal(several.elements, keep[64:, 48:])
    assert (several.queries, several.keys) == ((64, 99), (48, 99))
    assert "kept" in str(several)
    assert "<svg" in several.to_svg()


@pytest.mark.slow
def test_large_maps_take_little_space_and_say_what_they_join() -> None:
    live = torch.rand(1, 1, 1024, 1024, generator=torch.Generator().manual_seed(0)) < 0.3
    spec = sparse_spec(128, 128)
    found = fg.visualize(spec, (1, 1, 1 << 17), tile=(128, 64), layout=live)
    assert found.counts["full"] == 2 * int(live.sum())
    svg = found.to_svg()
    assert len(svg) < 1_000_000
    assert "A cell stands for 4 x 8 tiles" in svg
    assert max(map(len, str(found).splitlines())) < 120


def test_beyond_the_budget_maps_say_which_classes_they_do_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = torch.zeros(256, 256, dtype=torch.bool)
    flags[::16, ::16] = True  # at a sampled place of each tile, beside others that are not kept
    flags[64:80] = False

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return flags[q, k]

    whole = fg.visualize(mask_mod, (1, 1, 256), tile=(16, 16))
    monkeypatch.setattr("flashgen.tools.views.visualize.ELEMENTS", 256 * 64 + 100)
    found = fg.visualize(mask_mod, (1, 1, 256), tile=(16, 16))
    assert whole.exact_counts == {"empty": 16, "mixed": 240, "full": 0, "not computed": 0}
    assert found.exact_counts == {"empty": 0, "mixed": 240, "full": 0, "not computed": 16}
    assert not found.exact
    assert found.kept is None
    assert "the exact class was not computed" in found.to_svg()
    monkeypatch.setattr("flashgen.tools.views.visualize.ELEMENTS", 256 * 64 + 16 * 256)
    assert fg.visualize(mask_mod, (1, 1, 256), tile=(16, 16)).exact_counts == whole.exact_counts
    monkeypatch.setattr("flashgen.tools.views.visualize.ELEMENTS", 100)
    none = fg.visualize(mask_mod, (1, 1, 256), tile=(16, 16))
    assert none.exact_counts["not computed"] == 256


@pytest.mark.parametrize("name", ["causal", "sliding_window", "symmetric_window", "prefix_lm"])
def test_exact_bounds_give_the_same_map_without_evaluating_the_mask(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec_path(name)
    spec = fg.load(path)
    given = flat(values_of(path, Case(256, 256)))
    known = fg.visualize(spec, (1, 2, 256), tile=(32, 16), captures=given)
    monkeypatch.setattr("flashgen.tools.views.visualize.ELEMENTS", 0)
    found = fg.visualize(spec, (1, 2, 256), tile=(32, 16), captures=given)
    assert found.exact
    assert np.array_equal(found.of().kinds, known.of().kinds)
    assert found.kept in (known.kept, None)


def test_the_first_tile_of_queries_is_as_short_as_the_kernel_has_it() -> None:
    spec = fg.load(spec_path("causal")).replace(head_dim=64)
    found = fg.visualize(spec, (1, 1, 500), arch="sm_90a")
    assert found.tile == (192, 112)
    assert [*found.heads[0].place.queries.tiles()] == [(0, 128), (128, 320), (320, 500)]
    assert found.heads[0].classes.astype(bool).sum(1).tolist() == [2, 3, 5]
    assert found.elements(0, 1).shape == (128, 112)
    assert found.elements(1, 0).shape == (192, 112)
    assert found.heads[0].kept == 500 * 501 // 2
    given = fg.visualize(spec, (1, 1, 500), arch="sm_90a", tile=(192, 112))
    assert next(given.heads[0].place.queries.tiles()) == (0, 192)


def test_a_mask_is_shown_without_what_only_weights_and_statistics_read() -> None:
    gate = fg.Tensor("gate", ("heads",), "float32", grad=True)
    divisor = fg.Tensor("divisor", ("heads", "seq_q"), "float32")
    spec = fg.AttentionSpec(
        causal,
        weight_mod=lambda s, b, h, q, k: s * gate[h],
        normalize=divisor,
        statistics={"gated": fg.sum_over_keys(lambda s, w, b, h, q, k: w * gate[h])},
    )
    assert fg.visualize(spec, (1, 2, 100)).counts == fg.visualize(causal, (1, 2, 100)).counts


def test_the_way_out_of_a_wrong_call_is_a_call_of_visualize() -> None:
    window = fg.Scalar("window", "int32")
    spec = fg.AttentionSpec(lambda b, h, q, k: q - k < window)
    with pytest.raises(InputError) as caught:
        fg.visualize(spec, (1, 2, 100))
    assert caught.value.way_out == "fg.visualize(spec, (1, 2, 2, 100, 100), window=...)"
