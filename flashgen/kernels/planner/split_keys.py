"""Chooses split_size for calls that give none.

Few queries over many keys make few work tiles, which are divided into splits of the keys. Long
splits write few partial results; short ones divide the work evenly. The choice depends on the spec,
the architecture, its SMs and the number of key heads alone. It cannot depend on the batch or on
lengths, because the bits of a row, and a CUDA graph, depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flashgen.kernels.planner.api import plan_forward
from flashgen.kernels.planner.column_parts import columns_of_launch
from flashgen.kernels.planner.duration import decoding_tile
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.requests import PlanRequest
from flashgen.kernels.planner.schedule import choose_heads, few_rows_of
from flashgen.shared import split_choice
from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall
from flashgen.shared.errors import PlanError
from flashgen.shared.launch_facts import mean_length
from flashgen.shared.signature import SPLIT
from flashgen.shared.split_choice import SplitPlan, choose_split, fastest_run, usual_heads_kv
from flashgen.spec.language.signature import split, with_columns, without_dropout
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import K, Q


def plan_splits(
    spec: AttentionSpec, arch: str, heads_kv: int, *, sms: int | None = None
) -> SplitPlan:
    """The split_size for calls that give none; `SplitPlan.size_of` says which calls have it.

    Args:
        spec: a spec whose keys are not packed.
        arch: the architecture, as in `flashgen.plan`.
        heads_kv: the key heads of a call.
        sms: SMs of the GPU; None for the product that the architecture's facts name.

    Raises:
        PlanError: the architecture is unknown, or no tile fits.
    """
    return _plan_splits(spec, arch, max(heads_kv, 1), sms or facts(arch).sms)


def split_of_call(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> int:
    """The split_size of a call that gives none; 0 where its keys are not split.

    Keys are not split where the variant for split keys, which takes more registers, has no tile.

    Args: as for `plan_splits`.
    """
    if spec.packed and not spec.paged:
        return 0
    try:
        chosen = plan_splits(spec, arch, call.heads_kv, sms=sms)
    except PlanError:
        return 0
    return chosen.size_of(call, paged=spec.paged)


def run_of_splits(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> int:
    """The number of neighbouring splits that a thread block computes in a call with split keys.

    Longer runs write and merge fewer parts, a run of all splits none, but they leave SMs idle where
    a call has few rows. The bits are the same, so that the choice may depend on the whole call.

    Args:
        spec: the variant with split keys.
        arch, call, sms: as for `split_of_call`.

    Returns:
        One of `RUNS`, or `ALL_SPLITS`: the `fastest_run`.
    """
    return fastest_run(times_of_runs(spec, arch, call, sms=sms))


def times_of_runs(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> Mapping[int, float]:
    """The predicted times of a call with runs of splits, in clocks, as if the mask kept all keys.

    Args: as for `run_of_splits`.

    Returns:
        The times of `ALL_SPLITS` and of shorter runs; none where the kernel of another call
        decides, or where there is nothing to compute.
    """
    if spec.partial or call.is_empty:
        return {}
    size = int(call.scalars[SPLIT])
    return _times_of_runs(spec, arch, sms or facts(arch).sms, call.sizes[:4], call.splits, size)


@functools.lru_cache(maxsize=4096)
def _times_of_runs(
    spec: AttentionSpec,
    arch: str,
    sms: int,
    sizes: tuple[int, int, int, int],
    splits: int,
    size: int,
) -> Mapping[int, float]:
    """`times_of_runs`, cached: the last split counts as a whole one, so that most tokens of a
    decoded sequence have the result of the token before."""
    try:
        plan = _plan_of_heads(spec, arch, *sizes)
    except PlanError:  # the columns of V are computed in parts, and each part decides
        return {}
    tile, by_position = decoding_tile(plan, plan.cost, plan.cost), compares_positions(spec)
    sized = sizes, splits, size
    return split_choice.times_of_runs(
        plan, tile, sms, *sized, packed=spec.packed, by_position=by_position
    )


def compares_positions(spec: AttentionSpec) -> bool:
    """Whether the mask depends on the positions of queries and of keys."""
    return bool({Q, K} <= spec.mask.free_symbols)


@functools.lru_cache(maxsize=1024)
def _plan_of_heads(
    spec: AttentionSpec, arch: str, batch: int, heads_q: int, heads_kv: int, seq_q: int
) -> Plan:
    """The plan of a call; tiles have rows of several heads where heads share K and V."""
    plan = plan_forward(PlanRequest(spec, arch))
    heads = choose_heads(spec, plan, batch, heads_q, heads_kv, seq_q).heads
    queries = mean_length(seq_q, batch) if spec.packed else seq_q
    few = few_rows_of(spec, plan, heads, queries)
    return plan_forward(PlanRequest(spec, arch, heads_per_tile=heads, few_rows=few))


def invariant_splits(spec: AttentionSpec, arch: str) -> SplitPlan:
    """The splits of all batch-invariant calls of a spec, for a usual GPU and model.

    Args: as for `plan_splits`; the spec's keys may be packed.
    """
    heads_kv = usual_heads_kv(one_tensor=spec.shared_kv)
    return _plan_splits(without_dropout(spec), arch, heads_kv, facts(arch).sms, invariant=True)


@functools.lru_cache(maxsize=1024)
def _plan_splits(
    spec: AttentionSpec, arch: str, heads_kv: int, sms: int, *, invariant: bool = False
) -> SplitPlan:
    parts = split(spec)
    columns = columns_of_launch(parts, arch, "forward").columns
    if columns not in (0, spec.head_dim_v):
        parts = with_columns(parts, columns)
    kernel = plan_forward(PlanRequest(parts, arch))
    return choose_split(kernel, heads_kv, sms, invariant=invariant)
