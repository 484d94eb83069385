"""The map of shared memory agrees with the offsets and the size of the plan."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.kernels.planner import Plan, plan_backward
from flashgen.tools.views.values import smem_map
from tests.support.profiles import loaded

OFFSETS = {
    "Q": "q",
    "K": "k",
    "V": "v",
    "dO": "do",
    "P": "p",
    "dS": "ds",
    "LSE and delta": "rows",
    "sums of learned elements": "windows",
}


def check(plan: Plan) -> None:
    regions = smem_map(plan)
    end = 0
    for region in regions:
        assert region.offset == end
        assert region.size > 0
        end += region.size
        field = OFFSETS.get(region.title.split(" (")[0])
        if field is not None:
            assert plan.smem[field] == region.offset, (plan.kernel, region)
    assert end == plan.smem_bytes
    assert "other" not in {region.title for region in regions}


@pytest.mark.parametrize("dims", [(64, 64), (128, 40), (40, 128)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["causal", "relative_bias"])
def test_regions_cover_shared_memory_at_the_plan_s_offsets(name, arch, dims) -> None:
    spec = loaded(name).replace(head_dim=dims[0], head_dim_v=dims[1])
    check(fg.plan(spec, arch=arch))
    for deterministic in (False, True):
        for plan in plan_backward(spec, arch, deterministic=deterministic).kernels:
            check(plan)
