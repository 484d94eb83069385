"""The persistent forward kernel for Hopper: its blocks compute one work tile after another.

Results have the same bits for any number of blocks. `make test` has a case of each kind.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.kernels.planner import kernel_plan
from flashgen.kernels.planner.schedule import blocks_of
from flashgen.shared.arch import facts
from flashgen.shared.errors import InputError, PlanError
from flashgen.shared.launch_facts import MAX_WORK_TILES
from flashgen.tools.profile.run import profile_forward
from tests.support.examples import spec_path
from tests.support.judged import example
from tests.support.profiles import loaded, random_operands
from tests.support.shapes import Case
from tests.support.tiers import slow

ARCH = "sm_90a"
CAUSAL = fg.load(spec_path("causal"))
HOW: dict[str, Any] = {"backend": "emulator", "arch": ARCH}


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case", "dropout_p"),
    [
        # Work tiles of different lengths, the longest first; some without key tiles; dropout.
        ("causal", Case(300, 200, 1, 2, 1, "float16", 64), 0.0),
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
    call = example(spec_path(name), case, dropout_p, arch=ARCH)
    one_each = call.forward()
    assert one_each.report.blocks is not None
    assert not one_each.report.blocks.persistent
    for blocks, seed in ((1, None), (3, None), (2, 5)):
        run = call.forward(blocks=blocks, order_seed=seed)
        assert run.report.blocks is not None
        assert (run.report.blocks.count, run.report.blocks.persistent) == (blocks, True)
        assert torch.equal(run.out, one_each.out)
        assert torch.equal(run.lse, one_each.lse)


def test_there_are_at_most_as_many_blocks_as_work_tiles() -> None:
    q, k, v = Case(70, 90, 1, 2, 2).tensors()
    run = run_forward(CAUSAL, q, k, v, blocks=50, **HOW)
    assert run.report.blocks is not None
    assert run.report.blocks.count == run.report.blocks.work_tiles == 2
    assert run.report.blocks.reason == "as requested"


# ---- where it pays ------------------------------------------------------------------------------


def test_blocks_are_persistent_where_that_saves_more_than_clearing_the_counter_costs() -> None:
    plan = fg.plan(CAUSAL, ARCH)
    slots = facts(ARCH).sms * plan.blocks_per_sm
    long, short = blocks_of(plan, 64 * slots), blocks_of(plan, 2 * slots)
    assert (long.count, long.persistent) == (slots, True)
    assert (short.count, short.persistent) == (2 * slots, False)
    saved = {line.name: line.value for line in long.lines}
    assert saved["saved"] > saved["cleared"] > 0
    assert "more than" in long.reason
    assert "no more than" in short.reason
    assert f"{slots} blocks, which fetch them from a counter" in str(long)


def test_the_number_follows_the_gpus_multiprocessors() -> None:
    plan = fg.plan(CAUSAL, ARCH)
    assert blocks_of(plan, 10_000, sms=78).count == 78 * plan.blocks_per_sm


def test_every_work_tile_is_counted_once(monkeypatch) -> None:
    """The profile predicts the count."""
    few = replace(facts(ARCH), sms=1)
    monkeypatch.setattr(kernel_plan, "facts", lambda name: few)
    (profile,) = profile_forward(CAUSAL, *random_operands(loaded("causal"), (1, 8, 8, 40, 40)),
                                 arch=ARCH)[1]  # fmt: skip
    (counter,) = [tensor for tensor in profile.tensors if tensor.name == "tile_counter"]
    assert counter.issued.counted == counter.issued.predicted == 4 * 8


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [0, -1, True, 2.0, "3"])
def test_an_invalid_number_of_blocks_is_refused(blocks: object) -> None:
    q, k, v = Case(40, 40, 1, 1, 1).tensors()
    with pytest.raises(PlanError, match="blocks is not a number of blocks"):
        run_forward(CAUSAL, q, k, v, blocks=blocks, **HOW)


def test_kernels_that_are_not_persistent_refuse_a_number_of_blocks() -> None:
    q, k, v = Case(40, 40, 1, 1, 1).tensors()
    with pytest.raises(PlanError, match="one block per work tile") as caught:
        run_forward(CAUSAL, q, k, v, blocks=2, backend="emulator", arch="sm_80")
    assert "path sm_80" in str(caught.value)
    with pytest.raises(InputError, match="tiled algorithms have no blocks"):
        run_forward(CAUSAL, q, k, v, blocks=2, backend="tiled")


def test_more_work_tiles_than_the_kernel_can_count_are_refused() -> None:
    with pytest.raises(PlanError, match="too many query tiles"):
        blocks_of(fg.plan(CAUSAL, ARCH), MAX_WORK_TILES + 1)
