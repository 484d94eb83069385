"""The bits of a row of the result depend on its query and its keys, not on the rows beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.shared.paths import PATHS
from tests.support.examples import spec_path, values_of
from tests.support.judged import normal, sized
from tests.support.shapes import Case
from tests.support.tiers import slow

Tensor = torch.Tensor

CASE = Case(112, 480, 1, 4, 2)  # three tiles of keys on sm_90a
FIRST = 368  # position of the first query
ROWS = (5, 47, 90, 111)
SPECS = ("sliding_window", "alibi", "sink", "softcap", "relative_bias", "document")


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a row grow with its query's column 0, by less than 2^8 in those of `ROWS`."""
    q, k, v = case.tensors(seed=7)
    k[..., 0] = torch.linspace(0, 40, case.seq_k)
    q[..., 0] = 0.7
    return q, k, v


def beside(q: Tensor, rows: tuple[int, ...], column: float, seed: int) -> Tensor:
    """The queries with others beside ``rows``: their scores grow by ``column`` times the keys'."""
    others = normal(q.shape, q.dtype, seed)
    others[..., 0] = column
    others[:, :, rows] = q[:, :, rows]
    return others


def run(spec: fg.AttentionSpec, arch: str, *qkv: Tensor, **numbers: Any) -> tuple[Tensor, Tensor]:
    how = {"backend": "emulator", "arch": arch, "split_size": 0}  # also for a row alone
    found = run_forward(spec, *qkv, **how, **numbers)
    return found.out, found.lse


def check(spec: fg.AttentionSpec, arch: str, case: Case, **numbers: Any) -> None:
    q, k, v = operands(case)
    numbers["q_offset"] = 0 if spec.packed else FIRST
    out, lse = run(spec, arch, q, k, v, **numbers)
    for column, seed in ((20.0, 1), (0.0, 2), (-20.0, 3)):
        others = run(spec, arch, beside(q, ROWS, column, seed), k, v, **numbers)
        assert torch.equal(out[:, :, ROWS], others[0][:, :, ROWS])
        assert torch.equal(lse[:, :, ROWS], others[1][:, :, ROWS])
    if spec.packed:
        return
    for row in ROWS:  # in a tile that the heads share
        numbers["q_offset"] = FIRST + row
        alone = run(spec, arch, q[:, :, row : row + 1], k, v, **numbers)
        assert torch.equal(out[:, :, row : row + 1], alone[0])
        assert torch.equal(lse[:, :, row : row + 1], alone[1])


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("causal", "sm_80"),
        slow("causal", "sm_90a"),
        *(slow(name, arch) for name in SPECS for arch in PATHS),
    ],
)
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(name: str, arch: str) -> None:
    path = spec_path(name)
    check(sized(fg.load(path), CASE), arch, CASE, **values_of(path, CASE, q_offset=FIRST))


@pytest.mark.parametrize(("dtype", "head_dim"), [slow("float32", 64), slow("bfloat16", 128)])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours_in_other_dtypes(
    dtype: str, head_dim: int
) -> None:
    case = Case(112, 480, 1, 4, 2, dtype, head_dim)
    check(sized(fg.load(spec_path("causal")), case), "sm_80", case)


@pytest.mark.parametrize("arch", [slow("sm_80"), slow("sm_90a")])
def test_the_bits_of_a_row_do_not_depend_on_its_neighbours_in_packed_sequences(arch: str) -> None:
    of_q, of_k = (torch.tensor([0, 60, n], dtype=torch.int32) for n in (CASE.seq_q, CASE.seq_k))
    tensors = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    check(fg.load(spec_path("variable_length")), arch, CASE, tensors=tensors)
