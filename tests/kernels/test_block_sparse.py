"""Block-sparse layouts in the emitted kernels: the error rule, and the blocks that are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls.ops import BackwardRun, ForwardRun, run_forward
from flashgen.spec.language.spec import AttentionSpec
from tests.support.judged import Call
from tests.support.masks import causal
from tests.support.shapes import Case
from tests.support.sparse_layouts import by_position, random_layout, sparse_spec

Tensor = torch.Tensor

bias = fg.Tensor("bias", ("heads", "distances"), grad=True)


def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + bias[h, fg.abs(q - k) // 8]


def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (fg.abs(q - k) < 150) & ((q - k) % 3 == 0)


def run_both(
    spec: AttentionSpec, case: Case, deterministic: bool = False, **numbers: Any
) -> tuple[ForwardRun, BackwardRun]:
    """Runs the kernels, and holds all that they give against the oracle."""
    call = Call(spec, case.tensors(), numbers)
    forward = call.judged_forward()
    return forward, call.judged_backward(forward, deterministic=deterministic)


# dtype, head_dim, block, batch and heads, lengths, heads that differ in their layout, offsets.
CASES = {
    "16": ("float16", 16, (16, 16), (1, 2, 1), (130, 203), (1, 1), (0, 0)),
    "64": ("bfloat16", 40, (64, 64), (2, 2, 2), (257, 190), (2, 1), (0, 0)),
    "128": ("float16", 64, (128, 128), (1, 2, 1), (300, 257), (1, 2), (0, 0)),
    "48, dividing nothing": ("float32", 16, (48, 48), (2, 2, 1), (113, 203), (2, 2), (0, 0)),
    "rectangles, before 0": ("bfloat16", 64, (16, 64), (1, 2, 1), (120, 150), (1, 2), (-40, -60)),
    "rectangles, shifted": ("float16", 40, (96, 32), (1, 2, 2), (150, 120), (1, 1), (37, 100)),
}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [None, causal], ids=["all", "causal"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_that_walk_a_layout_meet_the_error_rule(name: str, masked: Any) -> None:
    dtype, head_dim, block, heads, lengths, lines, offsets = CASES[name]
    number = list(CASES).index(name)
    spec = sparse_spec(*block, masked, dtype=dtype, head_dim=head_dim)
    ends = lengths[0] + offsets[0], lengths[1] + offsets[1]
    live = random_layout(spec, lines, ends, 0.4, number)
    case = Case(*lengths, *heads, dtype, head_dim)
    at = dict(zip(("q_offset", "k_offset"), offsets, strict=True))
    fixed = (number + (masked is None)) % 2 == 0
    run_both(spec, case, deterministic=fixed, tensors={"layout": live}, **at)


def test_the_oracle_masks_what_a_layout_leaves_out() -> None:
    spec = sparse_spec(16, 24, causal, dtype="float32", head_dim=8)
    q, k, v = (x.double() for x in Case(70, 90, 2, 4, 2, "float32", 8).tensors())
    live = random_layout(spec, (2, 4), (80, 120), 0.5, 1)
    out, lse = reference.attention(
        spec, q, k, v, tensors={"layout": live}, q_offset=10, k_offset=30
    )
    kept = by_position(live, 16, 24, 80, 120)[:, :, 10:, 30:]
    kept = kept & (torch.arange(10, 80)[:, None] >= torch.arange(30, 120))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * 8**-0.5).masked_fill(~kept, -torch.inf)
    wanted = scores.logsumexp(-1)
    torch.testing.assert_close(lse, wanted)
    seen = kept.any(-1)
    torch.testing.assert_close(out[seen], (scores.softmax(-1) @ v)[seen])
    assert not out[~seen].any()
    assert (~seen).any()


@pytest.mark.slow
def test_a_layout_composes_with_mask_bias_dropout_and_grouped_heads() -> None:
    spec = sparse_spec(32, 48, dilated, score_mod=biased, dtype="bfloat16", dropout=True)
    case = Case(130, 170, 2, 4, 2, "bfloat16", 64)
    live = random_layout(spec, (2, 4), (160, 170), 0.5, 7)
    values = torch.randn(4, 20, generator=torch.Generator().manual_seed(3))
    run_both(
        spec,
        case,
        tensors={"layout": live, "bias": values},
        q_offset=16,
        dropout_p=0.2,
        rng=torch.tensor([11, 5]),
    )


@pytest.mark.slow
def test_rows_and_columns_without_a_live_block_give_zeros() -> None:
    spec = sparse_spec(48, 32, dtype="float16", head_dim=16)
    live = random_layout(spec, (1, 2), (200, 230), 0.5, 3)
    live[:, :, 1] = live[:, :, :, 2] = live[:, 1] = False
    forward, backward = run_both(
        spec, Case(200, 230, 1, 2, 2, head_dim=16), tensors={"layout": live}
    )
    kept = by_position(live, 48, 32, 200, 230)
    unseen, unseeing = ~kept.any(2), ~kept.any(3)
    assert unseen[0, 0].sum() == 32
    assert unseeing[0, 0].sum() >= 48
    assert torch.equal(forward.lse == -torch.inf, unseeing)
    assert not forward.out[unseeing].any()
    assert not backward.dq[unseeing].any()
    assert not backward.dk[unseen].any()
    assert not backward.dv[unseen].any()


@pytest.mark.slow
def test_a_layout_of_functions_is_that_of_their_values() -> None:
    case = Case(150, 200, 2, 2, 1)
    for by_head in (False, True):

        def pattern(*place: int) -> bool:
            return sum(place) % 3 == 0

        layout = (lambda b, h, i, j: pattern(b, h, i, j)) if by_head else lambda i, j: pattern(i, j)
        static = sparse_spec(64, 64, causal, layout)
        given = sparse_spec(64, 64, causal)
        lines = (2, 2) if by_head else (1, 1)
        live = torch.tensor(
            [
                [[[sum((b, h, i, j)) % 3 == 0 for j in range(4)] for i in range(3)]
                 for h in range(lines[1])]
                for b in range(lines[0])
            ]
        )  # fmt: skip
        runs = [
            run_forward(static, *case.tensors(), backend="emulator"),
            run_forward(given, *case.tensors(), tensors={"layout": live}, backend="emulator"),
        ]
        assert torch.equal(runs[0].out, runs[1].out)
        assert torch.equal(runs[0].lse, runs[1].lse)


def triangle(block: int, seq: int) -> Tensor:
    blocks = -(-seq // block)
    return torch.ones(1, 1, blocks, blocks, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("mask", "block"),
    [
        pytest.param(causal, 64, id="blocks and mask", marks=pytest.mark.slow),
        pytest.param(None, 1, id="blocks of 1", marks=pytest.mark.slow),
    ],
)
def test_a_layout_equal_to_the_causal_mask_gives_the_bits_of_that_mask(
    mask: Any, block: int
) -> None:
    """Of kernels with the same tiles, forward and backward."""
    case = Case(150, 150, head_dim=16)
    found = []
    for spec, tensors in (
        (AttentionSpec(causal, head_dim=16), {}),
        (sparse_spec(block, block, mask, head_dim=16), {"layout": triangle(block, 150)}),
    ):
        forward, backward = run_both(spec, case, deterministic=True, tensors=tensors)
        plans = [report.kernel.plan for report in (forward.report, *backward.reports)]
        tiles = [(plan.block_q, plan.block_k) for plan in plans]
        results = forward.out, forward.lse, backward.dq, backward.dk, backward.dv
        found.append((tiles, results))
    (tiles, wanted), (same_tiles, got) = found
    assert tiles == same_tiles
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)


def test_blocks_of_16_on_a_causal_grid_give_the_bits_of_that_mask() -> None:
    operands = Case(200, 200, head_dim=16).tensors()
    grid = AttentionSpec(lambda b, h, q, k: q // 16 >= k // 16, head_dim=16)
    live = {"layout": triangle(16, 200)}
    wanted = run_forward(grid, *operands, backend="emulator")
    got = run_forward(sparse_spec(16, 16, head_dim=16), *operands, tensors=live, backend="emulator")
    assert torch.equal(wanted.out, got.out)
    assert torch.equal(wanted.lse, got.lse)
