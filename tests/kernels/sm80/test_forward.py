"""The emitted forward kernels meet the error rule, executed by the emulator with all its checkers.

test_every_spec.py has every spec once in `make test`. Here every spec at every head dim, with a
quarter of the lengths and the dtypes, batches, head counts and memory layouts in turn, is `slow`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen as fg
from tests.support.examples import SPEC_IDS, SPECS, spec_path
from tests.support.judged import Call, example, sized
from tests.support.shapes import (
    DTYPES,
    HEAD_DIMS,
    Case,
    quarter_of_cases,
)
from tests.support.tiers import one_in

ROWS = 256
ODD = ("odd stride", "odd base")
OFFSETS = [(90, 0), (0, 57), (1000, 900), (-40, -60)]


def check_case(path: Path, case: Case, **offsets: int) -> None:
    """Run one problem and hold the output and the LSE against the oracle."""
    call = example(path, case, offsets=offsets)
    run = call.judged_forward()
    assert run.out.dtype == call.qkv[0].dtype
    assert run.lse.dtype == torch.float32


UNEQUAL = itertools.product([(192, 128), (64, 128), (128, 8), (24, 72)], DTYPES)


@pytest.mark.parametrize(("dims", "dtype"), one_in(12, UNEQUAL, first=3))
def test_values_may_be_longer_or_shorter_than_keys(dims: tuple[int, int], dtype: str) -> None:
    check_case(spec_path("causal"), Case(113, 203, 1, 2, 1, dtype, *dims))


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_offsets_shift_the_positions_that_mods_see(path: Path) -> None:
    q_offset, k_offset = OFFSETS[SPECS.index(path) % len(OFFSETS)]
    check_case(path, Case(113, 203), q_offset=q_offset, k_offset=k_offset)


@pytest.mark.slow
def test_a_prefill_in_pieces_equals_the_whole() -> None:
    call = example(spec_path("sliding_window"), Case(257, 257, 1, 2, 2, "float16", 64))
    whole, (q, k, v) = call.forward(), call.qkv
    pieces = []
    for a, b in ((0, 100), (100, 101), (101, 257)):
        part = Call(call.spec, (q[:, :, a:b], k, v), call.numbers)
        pieces.append(part.forward(q_offset=a).out)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole.out, atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", one_in(2, ["float16", "float32"]))
@pytest.mark.parametrize("layout", ODD)
def test_tensors_not_aligned_to_16_bytes_are_read_by_element(dtype: str, layout: str) -> None:
    case = Case(65, 70, 1, 2, 1, dtype, 40)
    moved = []
    for tensor in case.tensors():
        *shape, dim = tensor.shape
        start, more = (1, 8) if layout == "odd base" else (0, 1)
        view = tensor.new_full((*shape, dim + more), math.nan)[..., start : start + dim]
        view.copy_(tensor)
        moved.append(view)
    run = Call(sized(fg.load(spec_path("causal")), case), tuple(moved)).judged_forward()
    assert run.report.access_bytes == case.tensors()[0].element_size(), run.report.access_reason


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_forward_meets_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    """A quarter of the lengths; all factors take turns, so that specs together meet all pairs."""
    turn = SPECS.index(path) + HEAD_DIMS.index(head_dim)
    for _, case in quarter_of_cases(turn, head_dim, 400_000):
        # The errors of a row are correlated: the RMS of a few rows depends on chance.
        batch = max(case.batch, math.ceil(ROWS / (case.heads_q * case.seq_q)))
        check_case(path, replace(case, batch=batch))
