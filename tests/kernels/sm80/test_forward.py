"""The emitted forward kernels meet the error rule, executed by the emulator with all its checkers.

test_every_spec.py has every spec once in `make test`. Here every spec at every head dim, with half
of the lengths and the dtypes, batches, head counts and memory layouts in turn, is `slow`.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.language.spec import AttentionSpec
from flashgen.ops import run_forward
from tests.support.examples import SPEC_IDS, SPECS, fitted, spec_path, values_of
from tests.support.shapes import (
    DTYPES,
    HEAD_DIMS,
    HEADS,
    LAYOUTS,
    Case,
    halves_of_lengths,
)
from tests.support.tiers import one_in

ROWS = 256
ODD = ("odd stride", "odd base")
OFFSETS = [(90, 0), (0, 57), (1000, 900), (-40, -60)]


def loaded(path: Path, case: Case) -> AttentionSpec:
    return fg.load(path).replace(
        dtype=case.dtype, head_dim=case.head_dim, head_dim_v=case.head_dim_v or case.head_dim
    )


def check_case(path: Path, case: Case, **offsets: int) -> None:
    """Run one problem and hold the output and the LSE against the oracle."""
    spec = loaded(path, case)
    case = fitted(spec, case)
    values = values_of(path, case, **offsets) | offsets
    q, k, v = case.tensors(seed=case.scores % 1000)
    run = run_forward(spec, q, k, v, backend="emulator", **values)
    exact = reference.attention(spec, q, k, v, **values)
    same = reference.same_dtype(spec, q, k, v, **values)
    for name, got, ref, ordinary in zip(
        ("out", "lse"), (run.out, run.lse), exact, same, strict=True
    ):
        verdict = reference.compare(got, ref, ordinary)
        assert verdict.ok, f"{path.stem} {case.id} {name}: {verdict}"
    assert run.out.dtype == q.dtype
    assert run.lse.dtype == torch.float32


UNEQUAL = itertools.product([(192, 128), (64, 128), (128, 8), (24, 72)], DTYPES)


@pytest.mark.parametrize(("dims", "dtype"), one_in(12, UNEQUAL, first=3))
def test_values_may_be_longer_or_shorter_than_keys(dims: tuple[int, int], dtype: str) -> None:
    check_case(spec_path("causal"), Case(113, 203, 1, 2, 1, dtype, *dims))


SHIFTED = [
    pytest.param(path, id=path.stem, marks=[] if number % 36 == 2 else pytest.mark.slow)
    for number, path in enumerate(SPECS)
]


@pytest.mark.parametrize("path", SHIFTED)
def test_offsets_shift_the_positions_that_mods_see(path: Path) -> None:
    q_offset, k_offset = OFFSETS[SPECS.index(path) % len(OFFSETS)]
    check_case(path, Case(113, 203), q_offset=q_offset, k_offset=k_offset)


def test_a_prefill_in_pieces_equals_the_whole() -> None:
    path = spec_path("sliding_window")
    case = Case(257, 257, 1, 2, 2, "float16", 64)
    spec = loaded(path, case)
    values = values_of(path, case) | {"backend": "emulator"}
    q, k, v = case.tensors()
    whole = run_forward(spec, q, k, v, **values)
    pieces = [
        run_forward(spec, q[:, :, a:b], k, v, q_offset=a, **values).out
        for a, b in ((0, 100), (100, 101), (101, 257))
    ]
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole.out, atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", one_in(2, ["float16", "float32"]))
@pytest.mark.parametrize("layout", ODD)
def test_tensors_not_aligned_to_16_bytes_are_read_by_element(dtype: str, layout: str) -> None:
    case = Case(65, 70, 1, 2, 1, dtype, 40)
    path = spec_path("causal")
    spec = loaded(path, case)
    moved = []
    for tensor in case.tensors():
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 1), float("nan")).to(tensor.dtype)
        if layout == "odd base":
            wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 8), float("nan")).to(
                tensor.dtype
            )
        start = 1 if layout == "odd base" else 0
        view = wide[..., start : start + tensor.shape[-1]]
        view.copy_(tensor)
        moved.append(view)
    run = run_forward(spec, *moved, backend="emulator")
    assert run.report.access_bytes == case.tensors()[0].element_size(), run.report.access_reason
    exact, _ = reference.attention(spec, *moved)
    same, _ = reference.same_dtype(spec, *moved)
    verdict = reference.compare(run.out, exact, same)
    assert verdict.ok, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("path", SPECS, ids=SPEC_IDS)
def test_forward_meets_the_error_rule_at_every_head_dim(path: Path, head_dim: int) -> None:
    """Half of the lengths; all other factors take turns, so that specs together meet all pairs."""
    turn = SPECS.index(path) + HEAD_DIMS.index(head_dim)
    dtype = DTYPES[turn % len(DTYPES)]
    for number, (seq_q, seq_k) in halves_of_lengths(turn // len(DTYPES)):
        heads_q, heads_kv = HEADS[(turn + number) % len(HEADS)]
        batch = 3 if (turn + number) % 4 == 0 else 1
        layout = LAYOUTS[(turn + number // 2) % len(LAYOUTS)]
        if batch * heads_q * seq_q * seq_k > 400_000:
            batch, heads_q, heads_kv = 1, 1, 1
        # The errors of a row go together: it takes many rows before an RMS says more than chance.
        batch = max(batch, math.ceil(ROWS / (heads_q * seq_q)))
        check_case(
            path, Case(seq_q, seq_k, batch, heads_q, heads_kv, dtype, head_dim, None, layout)
        )
