"""Every spec of specs/ on a code path: the emitted kernels pass the static gates and meet the error
rule in the emulator with all its checkers. In `make test` is a third of the specs, which have every
feature between them, each on one path; the others, and the other path, are in the slow tier.

Each spec has one small problem per path; the dtypes, head dims, lengths, head counts, memory
layouts, dropout and schemes of the backward pass alternate. The backward kernels are executed of
the specs in `make test`. Every spec at every head dim, forward and backward, is in the slow tier:
test_forward.py and test_backward.py of sm80/ and sm90/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashgen.kernels.planner import Tile, plan_backward
from flashgen.shared.paths import PATHS
from tests.support.examples import SPECS
from tests.support.judged import check_gates, example
from tests.support.shapes import LAYOUTS, Case

HEADS = ((2, 2), (2, 1), (3, 1))
# Ragged and whole tiles; fewer keys than a tile; fewer queries; one query.
LENGTHS = ((113, 90), (128, 64), (70, 33), (20, 150), (1, 139))
# dtype and head dim: of the smallest kernels, since the compiler takes most of the time.
KINDS = {
    "sm_80": (("float16", 16), ("bfloat16", 16), ("float16", 16), ("bfloat16", 24)),
    "sm_90a": (("float16", 16), ("bfloat16", 16)),
}
# Smaller than the planned tiles, so that these problems have empty, full and mixed ones, and a
# kernel compiles in half of the time. All other files of this folder and
# codegen/test_static_gates.py have planned tiles.
TILES = {"sm_80": Tile(16, 2, 2, 2), "sm_90a": Tile(16, 8, 1, 1)}
BACKWARD_TILES = {"sm_80": Tile(32, 4, 1, 2), "sm_90a": Tile(64, 8, 1, 1)}
# The specs of `make test`, whose backward kernels are executed too, and their paths.
BACKWARD = {
    "alibi": "sm_80",  # a score that reads positions, dropout
    "block_sparse": "sm_90a",  # a block layout
    "causal": "sm_90a",
    "dense_bias": "sm_80",  # a gradient for each score
    "document": "sm_90a",  # captured tensors in the mask, tiles skipped by intervals, dropout
    "empty_rows": "sm_80",  # rows without a key
    "head_gate": "sm_90a",  # a learned sum for each head
    "natten_2d": "sm_80",  # a mask in two dimensions
    "packed_causal": "sm_90a",  # packed sequences
    "relative_bias": "sm_80",  # a learned sum for each distance
    "sink": "sm_80",
    "softcap": "sm_90a",  # a score that is not linear, dropout
}


def problem(number: int, arch: str) -> tuple[Case, float, bool]:
    """The case, the dropout probability and whether gradients are deterministic."""
    turn = number + list(PATHS).index(arch)
    dtype, head_dim = KINDS[arch][turn % len(KINDS[arch])]
    lengths, batch = LENGTHS[turn % len(LENGTHS)], 1 + (turn % 7 == 0)
    heads, layout = HEADS[turn % len(HEADS)], LAYOUTS[turn // 2 % len(LAYOUTS)]
    case = Case(*lengths, batch, *heads, dtype, head_dim, None, layout)
    return case, 0.17 * (number % 4 == 0), bool(turn // 2 % 2)


def in_turn(number: int) -> list[Any]:
    """A spec on both paths; in `make test` on that of its backward kernels."""
    path = SPECS[number]
    first = BACKWARD.get(path.stem)
    return [
        pytest.param(
            path, arch, id=f"{path.stem}-{arch}", marks=() if arch == first else pytest.mark.slow
        )
        for arch in PATHS
    ]


@pytest.mark.parametrize(
    ("path", "arch"), [case for number in range(len(SPECS)) for case in in_turn(number)]
)
def test_the_kernels_of_every_spec_meet_the_error_rule_on_both_paths(path: Path, arch: str) -> None:
    number = SPECS.index(path)
    case, dropout_p, deterministic = problem(number, arch)
    call = example(path, case, dropout_p, arch=arch)
    forward = call.judged_forward(tiles={"forward": TILES[arch]})
    assert forward.report.kernel is not None
    check_gates(forward.report.kernel)
    assert forward.report.kernel.plan.path == arch
    if BACKWARD.get(path.stem) == arch:
        plan = plan_backward(call.spec, arch, deterministic=deterministic)
        tiles = {each.kernel: BACKWARD_TILES[arch] for each in plan.kernels if not each.streams}
        backward = call.judged_backward(forward, deterministic=deterministic, tiles=tiles)
        for report in backward.reports:
            if report.kernel is not None:
                check_gates(report.kernel)
