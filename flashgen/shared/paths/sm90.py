"""Hopper's code path: wgmma and TMA, with warpgroups that copy and warpgroups that compute."""

from __future__ import annotations

from flashgen.shared.paths.code_path import CodePath

PATH = CodePath(
    name="sm_90a",
    only_on=("sm_90a",),
    fallback="sm_80",
    templates="sm90",
    instructions="wgmma, TMA, mbarriers",
    models=("forward_sm90", "backward_sm90", "tangent_sm90"),
    constants="sm_90a",
    template_fields="wgmma",
    itemsizes=(2,),
    copies_by_tma=True,
    persistent=("forward",),
    dependents=(
        *(("delta", "dkdv"), ("dkdv", "dq")),
        *(("delta", "fused"), ("fused", "convert_dq")),
        ("forward", "merge"),  # of split keys
    ),
    tensor_rate="tensor_16bit",
    group_rows=64,
    fragment="s[n]",
    dq_sums="[batch, heads_q, rows / DQ_QUERIES, DQ_STRIPS, DQ_QUERIES / 8, 128], unscaled",
    dq_strips=True,
)
