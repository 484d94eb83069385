"""The code path of every architecture from sm_80 on: mma.sync, ldmatrix and cp.async."""

from __future__ import annotations

from flashgen.shared.paths.code_path import CodePath

PATH = CodePath(
    name="sm_80",
    only_on=(),
    fallback="",
    templates="sm80",
    instructions="mma.sync, ldmatrix, cp.async",
    models=("forward_sm80", "backward_sm80", "tangent_sm80"),
    constants="sm_80",
    template_fields="",
    itemsizes=(2, 4),
    copies_by_tma=False,
    persistent=(),
    dependents=(),
    tensor_rate="mma_16bit",
    group_rows=16,
    fragment="s[g][n]",
    dq_sums="[batch, heads_q, rows / 16, HEAD_DIM / 8, 4, 32], unscaled, whole tiles of rows",
    dq_strips=False,
)
