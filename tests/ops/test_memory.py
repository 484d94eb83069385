"""The memory of a call with kernels grows with N: no tensor has N x N or (N / tile)^2 elements.

The tests record every tensor that torch makes during a call. A tensor that grew with N x N, or with
the square of the number of tiles, would become four times as large whenever N doubles.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from tests.cpu.test_memory import Bytes
from tests.support.examples import spec_path, values_of
from tests.support.shapes import Case
from tests.support.tiers import slow

LENGTHS = (128, 256, 512)
MOST = 3  # times as many elements, at twice the length; a min/max table has N log N


def made_by(name: str, n: int) -> list[int]:
    path, case = spec_path(name), Case(n, n, head_dim=8)
    spec = fg.load(path).replace(head_dim=8)
    values = values_of(path, case) | {"backend": "emulator", "check_memory": False}
    q, k, v = case.tensors()
    with Bytes() as made:
        run = run_forward(spec, q, k, v, **values)
        run_backward(spec, q, k, v, run.out, run.lse, torch.ones_like(run.out), **values)
    return made.sizes


@pytest.mark.parametrize("name", [slow("document"), slow("relative_bias"), slow("variable_length")])
def test_no_tensor_grows_with_the_square_of_the_length(name: str) -> None:
    runs = [made_by(name, n) for n in LENGTHS]
    assert runs[0], "out at least"
    assert len({len(run) for run in runs}) == 1, runs
    for sizes in zip(*runs, strict=True):
        for shorter, longer in itertools.pairwise(sizes):
            assert longer <= MOST * shorter, runs


def test_a_tensor_that_grows_with_the_square_would_be_detected() -> None:
    runs = []
    for n in LENGTHS:
        with Bytes() as made:
            positions = torch.arange(n // 64)
            _ = positions[:, None] >= positions
        runs.append(made.sizes[-1])
    assert runs[1] > MOST * runs[0]
