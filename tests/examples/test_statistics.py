"""The examples with statistics of a call: QK-clip, and blocks of keys selected by their mass."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import flashgen as fg


@pytest.mark.parametrize("example", ["qk_clip"], indirect=True)
def test_qk_clip_scales_the_scores_of_a_head_to_the_threshold(example: ModuleType) -> None:
    torch.manual_seed(1)
    layer = example.Attention(64, 4)
    with torch.no_grad():
        layer.q.weight.view(4, 16, 64)[1].mul_(9)
        layer.k.weight.view(4, 16, 64)[2].mul_(5)
    x = torch.randn(2, 40, 64)
    before = layer(x)[1]
    layer.clip(before, 2.0)
    assert (before > 2).sum() == 2
    torch.testing.assert_close(layer(x)[1], before.clamp(max=2.0))


@pytest.mark.parametrize("example", ["qk_clip"], indirect=True)
def test_training_with_qk_clip_keeps_scores_near_the_threshold(example: ModuleType) -> None:
    free, clipped = example.train(30, None), example.train(30, 3.0)
    assert free[0] == clipped[0] < 3
    assert free[-1] > 5
    assert max(clipped) < 4.5  # a new batch can have larger scores


@pytest.mark.parametrize("example", ["select_blocks"], indirect=True)
def test_selected_blocks_are_the_layout_of_the_next_call(example: ModuleType) -> None:
    q, k, v = example.problem(500)
    wanted, aux = example.full(q, k, v, return_aux=fg.AuxRequest(block_mass=64))
    live = example.select(aux.block_mass, 3)
    assert live.shape == (2, 4, 8, 8)
    assert int(live.sum(3).max()) == 3
    assert not live.triu(1).any()  # blocks without a kept score
    of_queries = live.repeat_interleave(64, 2)[:, :, :500]
    kept = (aux.block_mass * of_queries).sum(3)
    others = (aux.block_mass * ~of_queries).sum(3)
    torch.testing.assert_close(kept + others, torch.ones_like(kept))
    assert kept.mean() > 0.95
    found = example.sparse(q, k, v, layout=fg.Layout.of(live))
    # O of the whole is a mean of that of the selected blocks and of the others, by their mass.
    bound = 2 * others[..., None] * v.abs().amax(2, keepdim=True)
    assert ((found - wanted).abs() <= bound + 1e-5).all()
    complete = example.sparse(q, k, v, layout=fg.Layout.of(example.select(aux.block_mass, 8)))
    torch.testing.assert_close(complete, wanted)
