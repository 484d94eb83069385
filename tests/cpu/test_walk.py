"""The walk over tiles: the tiles that it visits, and those on which the mask is evaluated."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen as fg
from flashgen import reference
from flashgen.calls import cpu
from flashgen.calls.cpu.chunks import OWNED_ROWS
from flashgen.calls.cpu.parts import ChunkScores
from flashgen.kernels.planner import plan_backward
from flashgen.shared.call import OutputGradients
from flashgen.shared.errors import SpecError
from flashgen.spec.analysis import analyse
from flashgen.spec.analysis.tile_walk import EMPTY, FULL, MIXED, TileAxis, TileWalk
from flashgen.spec.language.symbols import BATCH, HEADS, SEQ_K, SEQ_Q, B, H, K, Q
from tests.analysis.test_property import SETTINGS
from tests.cpu.test_attention import gradient_of, spec_of
from tests.support.examples import SPECS, values_of
from tests.support.expr_trees import MASKS, SCALARS, SIZES, VALUES, traced
from tests.support.shapes import Case
from tests.support.tiers import one_in
from tests.support.tiled_calls import arguments, both, forward

DIM = 8


class Scores(TorchDispatchMode):
    """Counts the elements of S that are computed: results of products that are not DIM wide."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.baddbmm.out and result.shape[2] != DIM:
            self.elements += result.numel()
        return result


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each evaluation of the mask."""
    sizes: list[int] = []
    original = ChunkScores.mask_bits

    def counted(self: ChunkScores, rows: slice, keys: slice) -> torch.Tensor:
        sizes.append((rows.stop - rows.start) * (keys.stop - keys.start))
        return original(self, rows, keys)

    monkeypatch.setattr(ChunkScores, "mask_bits", counted)
    return sizes


@pytest.mark.parametrize(
    ("path", "offsets"), one_in(2, itertools.product(SPECS, [(0, 0), (37, 5), (-20, 9)]))
)
def test_tiles_are_classified_as_their_elements_say(path: Path, offsets: tuple[int, int]) -> None:
    spec = fg.load(path)
    case = Case(150, 210)
    given = values_of(path, case, q_offset=max(offsets[0], 0), k_offset=max(offsets[1], 0))
    queries, keys = TileAxis(150, 32, offsets[0]), TileAxis(210, 24, offsets[1])
    env = {BATCH: 1, HEADS: 1, SEQ_Q: 150, SEQ_K: 210, B: 0, H: 0}
    env |= {scalar.expr: given["scalars"][scalar.name] for scalar in spec.scalars}
    tensors = {tensor.symbol: given["tensors"][tensor.name] for tensor in spec.tensors}
    arrays = {symbol: tensor.numpy() for symbol, tensor in tensors.items()}
    mask, known = analyse(spec).mask, {**env, **arrays}
    by_query, by_key = (TileWalk(mask, known.items(), queries, keys, by) for by in (False, True))
    values = {symbol: torch.tensor(value) for symbol, value in env.items()} | tensors
    values[Q] = torch.arange(150)[:, None] + offsets[0]
    values[K] = torch.arange(210)[None, :] + offsets[1]
    keep = reference.evaluate(spec.mask, values).expand(150, 210).numpy()

    def kind(tile: np.ndarray) -> int:
        return FULL if tile.all() else MIXED if tile.any() else EMPTY

    exact = not spec.tensors and path.stem not in ("natten_2d", "block_diffusion")
    rows = []
    for start, stop in queries.tiles():
        wanted = [kind(keep[start:stop, a:b]) for a, b in keys.tiles()]
        rows.append(by_query.classes(start, stop))
        for found, right in zip(rows[-1].tolist(), wanted, strict=True):
            assert found == right or (not exact and found == MIXED)
    columns = [by_key.classes(*ends) for ends in keys.tiles()]
    assert (np.array(rows) == np.array(columns).T).all()


def test_neighbouring_tiles_of_one_class_are_joined_up_to_a_length() -> None:
    axes = TileAxis(64, 16, 0), TileAxis(100, 10, 0)
    runs = TileWalk(analyse(spec_of()).mask, (), *axes).runs(48, 64, 30)
    assert [(run.start, run.stop, run.full) for run in runs] == [
        (0, 30, True),
        (30, 40, True),
        (40, 70, False),
    ]
    by_key = TileWalk(analyse(spec_of()).mask, (), *axes, owns_keys=True)
    assert [(run.start, run.stop) for run in by_key.runs(50, 60, 16)] == [(48, 64)]
    assert by_key.runs(70, 80, 16) == []


def test_causal_computes_about_half_of_the_scores(masks: list[int]) -> None:
    n = 1024
    q, k, v = Case(n, n, 1, 2, 2, "float32", DIM).tensors()
    options = arguments(spec_of(), q, block_q=32, block_k=32)
    with Scores() as count:
        out, lse = cpu.forward(spec_of(), q, k, v, options)
    tiles = n // 32
    assert count.elements == 2 * 32 * 32 * tiles * (tiles + 1) // 2
    assert sum(masks) == tiles * 32 * 32, "the mask is evaluated on the diagonal alone"
    masks.clear()
    with Scores() as count:
        cpu.backward(spec_of(), q, k, v, OutputGradients(out, lse, torch.ones_like(q)), options)
    # S and dP.
    assert count.elements == 2 * 2 * 32 * 32 * tiles * (tiles + 1) // 2
    assert sum(masks) == tiles * 32 * 32


def test_a_window_costs_the_same_for_every_row() -> None:
    window = fg.Scalar("window", "int32", minimum=1)
    spec = spec_of(lambda b, h, q, k: (k <= q) & (q - k < window))
    counts = []
    for n in (1024, 2048):
        q, k, v = Case(n, n, 1, 1, 1, "float32", DIM).tensors()
        with Scores() as count:
            forward(spec, q, k, v, block_q=32, block_k=32, scalars={"window": 64})
        counts.append(count.elements / n)
    assert counts[1] == pytest.approx(counts[0], rel=0.03)
    assert counts[1] <= 4 * 32


def test_a_mask_that_is_always_true_is_never_evaluated(masks: list[int]) -> None:
    q, k, v = Case(100, 100, 1, 2, 2, "float32", DIM).tensors()
    both(spec_of(None), q, k, v, torch.ones_like(q))
    assert masks == []


def test_operands_of_empty_tiles_are_not_read() -> None:
    q, k, v = Case(100, 200, 1, 2, 2, "float32", DIM).tensors()
    dout = gradient_of(q, DIM, 1)
    expected = both(spec_of(), q, k, v, dout, block_q=16, block_k=16)
    k[:, :, 112:], v[:, :, 112:] = math.nan, math.inf
    found = both(spec_of(), q, k, v, dout, block_q=16, block_k=16)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_masks_by_head_are_classified_for_all_heads_together(masks: list[int]) -> None:
    spec = spec_of(lambda b, h, q, k: k // 16 == h)
    q, k, v = Case(16, 96, 2, 4, 2, "float32", DIM).tensors()
    with Scores() as count:
        out, _lse, *gradients = both(spec, q, k, v, torch.ones_like(q), block_q=16, block_k=16)
    # Four of six tiles have a key for some head; forward S, backward S and dP, 8 pairs.
    assert count.elements == 3 * 8 * 4 * 16 * 16
    exact = reference.attention(spec, q, k, v)
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-5, atol=1e-5)
    exact = reference.gradients(spec, q, k, v, torch.ones_like(q))
    for a, b in zip(gradients, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@settings(SETTINGS, max_examples=30)
@given(
    tree=MASKS,
    values=VALUES,
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    offsets=st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
)
def test_any_mask_gives_what_the_oracle_gives(
    tree: Any, values: dict[str, Any], sizes: tuple[int, int], offsets: tuple[int, int]
) -> None:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return traced(tree, {**SCALARS, **SIZES, "b": b, "h": h, "q": q, "k": k})

    try:
        spec = spec_of(mask)
    except SpecError:  # random products can be too large, and a division by 0 can be there to see
        assume(False)
        raise
    q, k, v = (x.double() for x in Case(*sizes, 2, 4, 2, "float32", DIM).tensors())
    dout, dlse = gradient_of(q, DIM, 1), gradient_of(q, 1, 2)[..., 0]
    options = {
        "scalars": {scalar.name: values[scalar.name] for scalar in spec.scalars},
        "q_offset": offsets[0],
        "k_offset": offsets[1],
    }
    found = both(spec, q, k, v, dout, dlse, block_q=4, block_k=3, **options)
    exact = reference.attention(spec, q, k, v, **options)
    exact += reference.gradients(spec, q, k, v, dout, dlse, **options)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_tiles_own_whole_tiles_of_the_plan_unless_blocks_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    original = TileWalk.runs

    def counted(self: TileWalk, *args: int) -> Any:
        seen[self.owned.block, self.walked.block] += 1
        return original(self, *args)

    monkeypatch.setattr(TileWalk, "runs", counted)
    spec = spec_of(head_dim=32)
    q, k, v = Case(300, 300, 1, 1, 1, "float32", 32).tensors()
    both(spec, q, k, v, torch.ones_like(q))
    ahead = fg.plan(spec, "sm_80")
    back = {kernel.kernel: kernel for kernel in plan_backward(spec, "sm_80").kernels}
    chosen = back["fused"] if "fused" in back else back["dkdv"]
    assert set(seen) == {
        (OWNED_ROWS // ahead.block_q * ahead.block_q, ahead.block_k),
        (OWNED_ROWS // chosen.block_k * chosen.block_k, chosen.block_q),
    }
    seen.clear()
    both(spec, q, k, v, torch.ones_like(q), block_q=40, block_k=24)
    assert set(seen) == {(40, 24), (24, 40)}
