"""Blocks of Hopper's forward kernel do one tile of queries after another, where that pays.

In whatever number of blocks, results have the same bits. `make test` has a case of each kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from profiles import loaded, random_operands
from shapes import Case
from tiers import slow

import flashgen as fg
from examples import fitted, spec_path, values_of
from flashgen.arch import facts
from flashgen.errors import InputError, PlanError
from flashgen.ops import run_forward
from flashgen.plan import jobs
from flashgen.plan.jobs import MOST_JOBS, blocks_of
from flashgen.profile import profile_forward

ARCH = "sm_90a"
CAUSAL = fg.load(spec_path("causal"))
HOW: dict[str, Any] = {"backend": "emulator", "arch": ARCH}


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case", "dropout_p"),
    [
        # Jobs of different lengths, longest first; of no key tile at all; random bits.
        ("causal", Case(300, 200, 1, 4, 2, "float16", 64), 0.0),
        slow("causal", Case(400, 150, 2, 2, 2, "bfloat16", 128), 0.17),
        # Tiles that are searched for, by tables, by lists; heads that share a tile; sequences.
        slow("document", Case(300, 300, 2, 2, 1, "float16", 64), 0.0),
        slow("bigbird", Case(300, 400, 1, 2, 2, "float16", 192), 0.0),
        slow("alibi", Case(40, 300, 2, 8, 2, "float16", 96), 0.0),
        slow("packed_causal", Case(300, 300, 1, 2, 1, "float16", 64), 0.0),
    ],
)
def test_the_bits_do_not_depend_on_the_number_of_blocks(
    name: str, case: Case, dropout_p: float
) -> None:
    path = spec_path(name)
    case = fitted(fg.load(path), case)
    dims = {"head_dim": case.head_dim, "head_dim_v": case.head_dim}
    spec = fg.load(path).replace(dtype=case.dtype, dropout=dropout_p > 0, **dims)
    numbers = values_of(path, case)
    if dropout_p:
        numbers |= {"dropout_p": dropout_p, "rng": torch.tensor([7, 3])}
    q, k, v = case.tensors(seed=1)
    one_each = run_forward(spec, q, k, v, **numbers, **HOW)
    assert one_each.report.blocks is not None
    assert not one_each.report.blocks.persistent
    for blocks, seed in ((1, None), (3, None), (2, 5)):
        run = run_forward(spec, q, k, v, blocks=blocks, order_seed=seed, **numbers, **HOW)
        assert run.report.blocks is not None
        assert (run.report.blocks.count, run.report.blocks.persistent) == (blocks, True)
        assert torch.equal(run.out, one_each.out)
        assert torch.equal(run.lse, one_each.lse)


def test_more_blocks_than_jobs_are_as_many_as_jobs() -> None:
    q, k, v = Case(70, 90, 1, 2, 2).tensors()
    run = run_forward(CAUSAL, q, k, v, blocks=50, **HOW)
    assert run.report.blocks is not None
    assert run.report.blocks.count == run.report.blocks.jobs == 2
    assert run.report.blocks.reason == "as asked for"


# ---- where it pays ------------------------------------------------------------------------------


def test_blocks_do_several_jobs_where_the_starts_saved_cost_more_than_a_cleared_counter() -> None:
    plan = fg.plan(CAUSAL, ARCH)
    slots = facts(ARCH).sms * plan.blocks_per_sm
    long, short = blocks_of(plan, 64 * slots), blocks_of(plan, 2 * slots)
    assert (long.count, long.persistent) == (slots, True)
    assert (short.count, short.persistent) == (2 * slots, False)
    saved = {line.name: line.value for line in long.lines}
    assert saved["saved"] > saved["cleared"] > 0
    assert "more than" in long.reason
    assert "no more than" in short.reason
    assert f"{slots} blocks, which take them one after another" in str(long)


def test_the_number_follows_the_gpus_multiprocessors() -> None:
    plan = fg.plan(CAUSAL, ARCH)
    assert blocks_of(plan, 10_000, sms=78).count == 78 * plan.blocks_per_sm


def test_every_job_is_counted_once(monkeypatch) -> None:
    """And the profile says so beforehand."""
    few = replace(facts(ARCH), sms=1)
    monkeypatch.setattr(jobs, "facts", lambda name: few)
    (profile,) = profile_forward(CAUSAL, *random_operands(loaded("causal"), (1, 8, 8, 40, 40)),
                                 arch=ARCH)[1]  # fmt: skip
    (counter,) = [tensor for tensor in profile.tensors if tensor.name == "taken"]
    assert counter.issued.counted == counter.issued.predicted == 4 * 8


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [0, -1, True, 2.0, "3"])
def test_what_is_no_number_of_blocks_is_refused(blocks: object) -> None:
    q, k, v = Case(40, 40, 1, 1, 1).tensors()
    with pytest.raises(PlanError, match="blocks is not a number of blocks"):
        run_forward(CAUSAL, q, k, v, blocks=blocks, **HOW)


def test_kernels_whose_blocks_take_no_jobs_refuse_a_number() -> None:
    q, k, v = Case(40, 40, 1, 1, 1).tensors()
    with pytest.raises(PlanError, match="do not take jobs") as caught:
        run_forward(CAUSAL, q, k, v, blocks=2, backend="emulator", arch="sm_80")
    assert "path sm_80" in str(caught.value)
    with pytest.raises(InputError, match="tiled algorithms have no blocks"):
        run_forward(CAUSAL, q, k, v, blocks=2, backend="tiled")


def test_more_jobs_than_the_kernel_counts_are_refused() -> None:
    with pytest.raises(PlanError, match="too many query tiles"):
        blocks_of(fg.plan(CAUSAL, ARCH), MOST_JOBS + 1)
