"""Plans of kernels whose values are the first columns of their keys."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.kernels.planner import columns_of_launch, plan_splits
from flashgen.kernels.planner.models.forward_sm80 import PANEL
from flashgen.kernels.planner.traffic import forward_traffic
from flashgen.shared.paths import PATHS
from flashgen.tools.views.values import smem_map

Dims = tuple[int, int]


def spec_of(dims: Dims, shared_kv: bool = True, dtype: str = "bfloat16") -> fg.AttentionSpec:
    return fg.AttentionSpec(
        lambda b, h, q, k: q >= k,
        head_dim=dims[0],
        head_dim_v=dims[1],
        shared_kv=shared_kv,
        dtype=dtype,
        name="latent",
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (512, 512), (576, 512)])
def test_every_architecture_has_a_tile(dims: Dims, arch: str) -> None:
    plan = fg.plan(spec_of(dims), arch)
    assert plan.one_tensor
    assert plan.smem["v"] == 0
    regions = {region.title: region.size for region in smem_map(plan)}
    exchanges = dims[1] == 512 and not plan.code_path.copies_by_tma
    assert plan.exchanges == exchanges
    columns = PANEL * plan.quantities["panels"] if exchanges else dims[0]
    buffers = f"{'panels of ' if exchanges else ''}K and V ({plan.stages} buffers)"
    assert regions[buffers] == plan.stages * plan.block_k * columns * plan.itemsize
    assert (plan.column_warps > 1) == (dims[1] == 512)
    assert plan.output_columns * plan.column_warps == dims[1]


@pytest.mark.parametrize("dims", [(576, 8), (576, 16), (256, 32)])
def test_a_launch_has_no_more_columns_than_there_are(dims: Dims) -> None:
    for arch in PATHS:
        for dtype in ("float16", "float32"):
            spec = spec_of(
                (min(dims[0], 256), dims[1]) if dtype == "float32" else dims, dtype=dtype
            )
            assert 0 < columns_of_launch(spec, arch, "forward").columns <= dims[1]


@pytest.mark.parametrize("arch", PATHS)
def test_keys_and_values_are_read_once(arch: str) -> None:
    one, two = (fg.plan(spec_of((128, 64), shared), arch) for shared in (True, False))
    moved, of_two = (forward_traffic(plan, 1, 4, 1, 100, 200) for plan in (one, two))
    assert (moved.v, moved.k > 0, of_two.v > 0) == (0, True, True)
    assert of_two.compulsory - moved.compulsory == 200 * 64 * 2


@pytest.mark.parametrize(
    ("arch", "dims"),
    [("sm_80", (448, 416)), *(("sm_90a", dims) for dims in ((448, 448), (576, 576)))],
)
def test_what_does_not_fit_names_the_kernel_of_a_part(arch: str, dims: Dims) -> None:
    """No two shares of these columns have whole multiples of 128 bytes, or of a panel."""
    spec = spec_of(dims)
    with pytest.raises(fg.PlanError, match="no tile fits in the registers") as caught:
        fg.plan(spec, arch)
    half = dims[1] // 2
    assert f"shared_kv=False, head_dim_v={half}, the kernel of a part" in caught.value.way_out
    assert columns_of_launch(spec, arch, "forward").columns == half
    fg.plan(spec.replace(shared_kv=False, head_dim_v=half), arch)


def test_two_tiles_of_heads_are_few_rows() -> None:
    one, two = (plan_splits(spec_of((256, 256), x), "sm_90a", 1) for x in (True, False))
    plan = fg.plan(spec_of((256, 256)), "sm_90a")
    assert one.kernel.tile.key_bytes * 2 == two.kernel.tile.key_bytes
    assert plan.row_bytes == 256 * 2
    assert plan_splits(spec_of((576, 512)), "sm_90a", 1).few_rows == 128


@pytest.mark.parametrize("shared", [False, True])
def test_p_and_the_factors_of_o_have_a_place_where_two_warpgroups_share_rows(shared: bool) -> None:
    plan = fg.plan(spec_of((512, 512), shared), "sm_90a")
    assert (plan.block_q, plan.column_warps, plan.score_warps) == (64, 2, 1)
    regions = {region.title: region.size for region in smem_map(plan)}
    assert regions["P"] == 64 * plan.block_k * plan.itemsize + 128 * 8
    assert plan.stages == 2  # a tile of keys and values has two parts instead of a third buffer
