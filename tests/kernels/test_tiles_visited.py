"""Kernels compute the tiles that hold a kept element, and no others: counted, not assumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch

import flashgen as fg
from flashgen.calls.ops import run_backward, run_forward
from flashgen.kernels.visits.visited_tiles import KnownCall, walks_of
from flashgen.shared.call import CheckedCall
from flashgen.spec.analysis import analyse
from flashgen.spec.language.symbols import H
from tests.support.examples import SPECS, spec_path, values_of
from tests.support.shapes import Case
from tests.support.sparse_layouts import touched
from tests.support.tiers import slow
from tests.support.tiles_visited import kept, present, visited

pytestmark = pytest.mark.usefixtures("rounded_sums")

LENGTHS = [(300, 300), (203, 700), (700, 203)]
# In `make test`, at the first lengths: bounds on one side and a min/max table.
FAST = "causal"


def masked(path: Path) -> bool:
    spec = fg.load(path)
    return spec.mask != sympy.true and not spec.packed  # the latter: test_packed.py


CASES = [
    pytest.param(
        path,
        lengths,
        id=f"{path.stem}-{lengths[0]}x{lengths[1]}",
        marks=[] if path.stem == FAST and lengths == LENGTHS[0] else pytest.mark.slow,
    )
    for path in SPECS
    if masked(path)
    for lengths in LENGTHS
]


@pytest.mark.parametrize(("path", "lengths"), CASES)
def test_only_tiles_with_a_kept_element_are_computed(path: Path, lengths: tuple[int, int]) -> None:
    dim = 16 if lengths == LENGTHS[0] else 64
    spec = fg.load(path).replace(head_dim=dim, head_dim_v=dim, dtype="float16")
    heads = 2 if H in spec.mask.free_symbols else 1
    case = Case(*lengths, heads_q=heads, heads_kv=1, head_dim=dim)
    values = values_of(path, case)
    q, k, v = case.tensors()
    how = {"backend": "emulator", "check_memory": False} | values
    run = run_forward(spec, q, k, v, **how)
    gradients = (torch.ones_like(run.out), None)
    back = run_backward(spec, q, k, v, run.out, run.lse, *gradients, deterministic=True, **how)
    keep = kept(spec, 1, heads, *lengths, values)
    reports = {report.kernel.plan.kernel: report for report in (run.report, *back.reports)}
    for kernel in ("forward", "dkdv", "dq"):
        assert visited(reports[kernel], spec) == present(reports[kernel], keep), kernel


@pytest.mark.parametrize("name", ["sliding_window", slow("causal"), slow("prefix_lm")])
def test_a_warpgroup_computes_only_the_tiles_that_its_own_rows_reach(name: str) -> None:
    path = spec_path(name)
    spec = fg.load(path).replace(head_dim=64, dtype="float16")
    case = Case(500, 500, head_dim=64)
    values = values_of(path, case)
    how = {"backend": "emulator", "arch": "sm_90a", "check_memory": False} | values
    report = run_forward(spec, *case.tensors(), **how).report
    plan = report.kernel.plan
    keep = kept(spec, case.batch, case.heads_q, 500, 500, values)
    of_warpgroups = int(touched(keep, 64, plan.block_k).sum())
    assert plan.block_q > 64
    assert visited(report) * plan.block_q / 64 == of_warpgroups


def test_the_tile_that_lacks_queries_is_the_one_that_reaches_the_fewest_keys() -> None:
    path = spec_path("causal")
    spec = fg.load(path).replace(head_dim=64, dtype="float16")
    operands = Case(500, 500, head_dim=64).tensors()
    how = {"backend": "emulator", "arch": "sm_90a", "check_memory": False}
    report = run_forward(spec, *operands, **how).report
    plan = report.kernel.plan
    assert plan.block_q == 192  # 500 queries are 8 groups of 64: 2, 3 and 3
    call = CheckedCall(1, 1, 1, 500, 500, 64, 64, 0, 0, 1.0, {})
    (walk,) = walks_of(KnownCall(spec, call), analyse(spec).mask, plan)
    assert walk.visited == [list(range(-(-end // plan.block_k))) for end in (128, 320, 500)]
    copies = sum(n for name, n in report.counters.opcodes.items() if name.startswith("cp.async."))
    assert copies == 2 * sum(map(len, walk.visited)) + 8  # of K and V; of Q for each group
