"""Kernels compute the tiles that hold a kept element, and no others: counted, not assumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
from shapes import Case
from tiles_visited import kept, present, visited

import flashgen as fg
from examples import SPECS, values_of
from flashgen.expr import H
from flashgen.ops import run_backward, run_forward

LENGTHS = [
    pytest.param((320, 320), id="320x320"),
    pytest.param((448, 448), id="448x448", marks=pytest.mark.slow),
    pytest.param((203, 700), id="203x700", marks=pytest.mark.slow),
    pytest.param((700, 203), id="700x203", marks=pytest.mark.slow),
]


def masked(path: Path) -> bool:
    spec = fg.load(path)
    return spec.mask != sympy.true and not spec.packed  # the latter: test_packed.py


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "path", [path for path in SPECS if masked(path)], ids=lambda path: path.stem
)
def test_only_tiles_with_a_kept_element_are_computed(path: Path, lengths: tuple[int, int]) -> None:
    spec = fg.load(path)
    heads = 2 if H in spec.mask.free_symbols else 1
    case = Case(*lengths, heads_q=heads, heads_kv=1)
    values = values_of(path, case)
    q, k, v = case.tensors()
    how = {"backend": "emulator", "check_memory": False} | values
    run = run_forward(spec, q, k, v, **how)
    gradients = (torch.ones_like(run.out), None)
    back = run_backward(spec, q, k, v, run.out, run.lse, *gradients, deterministic=True, **how)
    keep = kept(spec, 1, heads, *lengths, values)
    reports = {report.kernel.plan.kernel: report for report in (run.report, *back.reports)}
    for kernel in ("forward", "dkdv", "dq"):
        assert visited(reports[kernel]) == present(reports[kernel], keep), kernel
