"""Blocks of a BlockMask in flex_attention, applied with its mask_mod as in torch's kernels."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashgen as fg
from flashgen.frontends.flex import block_masks
from tests.support.flex_mods import MAKERS, causal_mask, operands, torch_answer

Tensor = torch.Tensor

SIZES = (2, 4, 300, 260)
BLOCK = 64
ROWS, COLUMNS = 5, 5


def lists(live: Tensor) -> tuple[Tensor, Tensor]:
    """As torch has them: counts of live blocks, and their columns first."""
    order = (~live).int().argsort(dim=-1, stable=True)
    return live.sum(-1, dtype=torch.int32), order.int()


def block_mask(live: Tensor, full: Tensor | None = None, mask_mod: Any = None) -> BlockMask:
    partial = lists(live if full is None else live & ~full)
    rest = () if full is None else lists(full)
    return BlockMask.from_kv_blocks(
        *partial, *rest, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=SIZES[2:]
    )


def random_blocks(batch: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, heads, ROWS, COLUMNS, generator=generator) < 0.5


def expected(live: Tensor, mask_mod: Any = None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.detach() for x in operands(*SIZES))
    spread = live.expand(2, 4, ROWS, COLUMNS)

    def kept(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        here = spread[b, h, i // BLOCK, j // BLOCK]
        return here if mask_mod is None else here & mask_mod(b, h, i, j)

    return torch_answer(q, k, v, kept, None)


def check(given: BlockMask, live: Tensor, mask_mod: Any = None) -> None:
    q, k, v = (x.detach() for x in operands(*SIZES))
    out, lse = fg.flex_attention(q, k, v, block_mask=given, return_lse=True)
    wanted, wanted_lse = expected(live, mask_mod)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lines", [(1, 1), (2, 1), (2, 4)], ids=str)
def test_blocks_without_a_mask_mod_are_a_layout(lines: tuple[int, int]) -> None:
    live = random_blocks(*lines, 1)
    check(block_mask(live), live)
    full = random_blocks(*lines, 2)
    check(block_mask(live, full), live | full)


@pytest.mark.parametrize("lines", [(1, 1), (2, 4)], ids=str)
def test_blocks_and_a_mask_mod_of_its_own_both_hold(lines: tuple[int, int]) -> None:
    live = random_blocks(*lines, 3)
    check(block_mask(live, mask_mod=causal_mask), live, causal_mask)


def test_a_layout_and_a_score_mod_that_masks_both_hold() -> None:
    live, window = random_blocks(1, 1, 4), 40
    q, k, v = (x.detach() for x in operands(*SIZES))

    def near(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where((q_idx - kv_idx).abs() < window, score, -float("inf"))

    out = fg.flex_attention(q, k, v, near, block_mask(live))
    wanted, _ = expected(live, lambda b, h, i, j: (i - j).abs() < window)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_what_a_mod_captures_may_be_called_layout() -> None:
    live, layout = random_blocks(1, 1, 6), torch.arange(260) % 3 == 0

    def chosen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return layout[kv_idx]

    check(block_mask(live, mask_mod=chosen), live, chosen)


@pytest.mark.parametrize("name", ["causal", "document", "natten", "softcap"])
def test_blocks_that_follow_from_the_mask_mod_are_no_layout(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask_mod, score_mod, _ = MAKERS[name](*SIZES)
    found = []
    inner = block_masks._needed_layout

    def watched(*given: Any) -> Any:
        found.append(inner(*given))
        return found[-1]

    monkeypatch.setattr(block_masks, "_needed_layout", watched)
    q, k, v = (x.detach() for x in operands(*SIZES))
    mask = mask_mod and create_block_mask(mask_mod, 2, 4, *SIZES[2:], device="cpu", BLOCK_SIZE=32)
    for _ in range(2):
        out = fg.flex_attention(q, k, v, score_mod, mask)
    assert found == ([] if mask is None else [None])  # asked once, and nothing is added
    wanted, _ = torch_answer(q, k, v, mask_mod, score_mod)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_a_full_block_that_the_mask_mod_masks_in_part_is_refused() -> None:
    live = torch.zeros(1, 1, ROWS, COLUMNS, dtype=torch.bool)
    full = live.clone()
    full[..., 2, 1], full[..., 2, 2] = True, True  # the second is on the diagonal
    q, k, v = (x.detach() for x in operands(*SIZES))
    with pytest.raises(NotImplementedError, match="has positions that its mask_mod masks") as error:
        fg.flex_attention(q, k, v, block_mask=block_mask(live, full, causal_mask))
    assert "block (2, 2), 2,016 positions" in str(error.value)
    full[..., 2, 2] = False
    check(block_mask(live, full, causal_mask), full)


def test_gradients_flow_through_blocks() -> None:
    live = random_blocks(2, 4, 8)
    leaves = operands(*SIZES)
    out = fg.flex_attention(*leaves, block_mask=block_mask(live))
    found = torch.autograd.grad(out.square().sum(), leaves)
    same = operands(*SIZES)
    wanted, _ = torch_answer(*same, lambda b, h, i, j: live[b, h, i // BLOCK, j // BLOCK], None)
    for a, b in zip(found, torch.autograd.grad(wanted.square().sum(), same), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_what_was_found_of_a_block_mask_goes_with_it() -> None:
    mask = block_mask(random_blocks(1, 1, 9))
    q, k, v = (x.detach() for x in operands(*SIZES))
    fg.flex_attention(q, k, v, block_mask=mask)
    before, gone = len(block_masks._comparisons), weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None
    assert len(block_masks._comparisons) < before


def test_lists_that_change_in_place_or_are_replaced_are_seen() -> None:
    live = random_blocks(1, 1, 10)
    given = block_mask(live)
    check(given, live)
    other = random_blocks(1, 1, 11)
    for change in (lambda old, new: old.copy_(new), lambda old, new: old.data.copy_(new)):
        for name, new in zip(("kv_num_blocks", "kv_indices"), lists(other), strict=True):
            change(getattr(given, name), new)
        check(given, other)
        other = random_blocks(1, 1, 12)
    counts, indices = lists(other)
    given.kv_num_blocks.numpy()[:] = counts.numpy()
    given.kv_indices.numpy()[:] = indices.numpy()
    check(given, other)
    given.kv_num_blocks, given.kv_indices = lists(live)
    check(given, live)
    given.mask_mod = causal_mask
    check(given, live, causal_mask)
    given.full_kv_num_blocks, given.full_kv_indices = lists(torch.zeros_like(live))
    check(given, live, causal_mask)
    given.kv_num_blocks.fill_(0)
    check(given, torch.zeros_like(live))


def test_tensors_and_numbers_of_a_mask_that_change_are_seen() -> None:
    """The blocks are those of the mask as it was, and the mask is the one that it is now."""
    ids, width = torch.zeros(SIZES[3], dtype=torch.int64), [300]

    def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        near = (q_idx - kv_idx).abs() < width[0]
        return near & (ids[torch.minimum(q_idx, kv_idx.new_tensor(259))] == ids[kv_idx])

    ids[130:] = 1
    made = create_block_mask(same, None, None, *SIZES[2:], device="cpu", BLOCK_SIZE=BLOCK)
    live = torch.ones(1, 1, ROWS, COLUMNS, dtype=torch.bool)
    live[..., :2, 3:], live[..., 3:, :2] = False, False
    made.full_kv_num_blocks.zero_()  # no block is without its mask
    made.kv_num_blocks, made.kv_indices = lists(live)
    check(made, live, same)
    for change in (lambda: ids.zero_(), lambda: ids.data.copy_(torch.arange(260) // 100)):
        change()
        check(made, live, same)
    for width[0] in (100, 150, 400):
        check(made, live, same)


@pytest.mark.parametrize("mask_mod", [None, causal_mask])
def test_blocks_on_the_meta_device_are_taken_as_they_are(mask_mod: Any) -> None:
    given = block_mask(random_blocks(1, 1, 10), mask_mod=mask_mod).to("meta")
    q, k, v = (x.detach().to("meta").requires_grad_() for x in operands(*SIZES))
    out, lse = fg.flex_attention(q, k, v, block_mask=given, return_lse=True)
    assert out.is_meta
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    out.sum().backward()
    assert k.grad is not None
    assert k.grad.is_meta
