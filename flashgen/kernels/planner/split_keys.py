"""Chooses split_size for calls that give none.

Few queries over many keys make few work tiles, which are divided into splits of the keys. Long
splits write few partial results; short ones divide the work evenly. The choice depends on the spec,
the architecture, its SMs and the number of key heads alone. It cannot depend on the batch or on
lengths, because the bits of a row, and a CUDA graph, depend on it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from flashgen.kernels.planner.api import plan_forward
from flashgen.kernels.planner.column_parts import columns_of_launch
from flashgen.kernels.planner.duration import restarted_steps, step_facts
from flashgen.kernels.planner.formulas import Formula, FormulaSequence
from flashgen.kernels.planner.kernel_plan import Plan
from flashgen.kernels.planner.requests import PlanRequest
from flashgen.kernels.planner.schedule import ROUNDS, choose_heads, few_rows_of
from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall
from flashgen.shared.errors import PlanError
from flashgen.shared.signature import SPLIT
from flashgen.shared.split_choice import (
    ALL_SPLITS,
    RUNS,
    SplitPlan,
    choose_split,
    usual_heads_kv,
)
from flashgen.spec.language.signature import split, with_columns, without_dropout
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import K, Q


def plan_splits(
    spec: AttentionSpec, arch: str, heads_kv: int, *, sms: int | None = None
) -> SplitPlan:
    """The split_size of calls that give none; `SplitPlan.size_of` says which calls have it.

    Args:
        spec: a spec whose keys are not packed.
        arch: the architecture, as in `flashgen.plan`.
        heads_kv: the key heads of a call.
        sms: SMs of the GPU; None for those of the product that the architecture's facts name.

    Raises:
        PlanError: the architecture is unknown, or no tile fits.
    """
    return _plan_splits(spec, arch, max(heads_kv, 1), sms or facts(arch).sms)


def split_of_call(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> int:
    """The split_size of a call that gives none; 0: its keys are not split.

    They are not where the variant for split keys, which takes more registers, has no tile.

    Args: as for `plan_splits`.
    """
    if spec.packed and not spec.paged:
        return 0
    try:
        chosen = plan_splits(spec, arch, call.heads_kv, sms=sms)
    except PlanError:
        return 0
    return chosen.size_of(call, paged=spec.paged)


# A call with split keys, whose blocks have a run of neighbouring splits of their rows: all of them,
# or fewer, so that there are parts that another launch merges. Clocks of an SM for a split of a
# block, over those of its scores: to start it, for which Q is read and nothing overlaps one step;
# to go on with it in a block that has others, which sets the finished O aside and joins it; to
# write parts, which rows past the last do not have; and to move these, or the keys, through global
# memory. All but the last runs of rows are whole. Blocks with equal work leave some slots idle in
# the last round; of those with less and less, the short ones fill it. The times of launches follow
# from these as in `duration.FORMULAS`.
STARTED = Formula("started", "(block_k + e*d_qk/(l2_rate*cost))/split_size")
JOINED = Formula("joined", "restarted*block_k/split_size")
SHARE = Formula("share", "rows/(block_q*work_tiles)")
MOVED = Formula("moved", "4*d_v/(hbm_rate*cost*split_size)*share")
WRITTEN = Formula("written", "4*d_v/(l2_rate*cost*split_size)*share + moved")
KEYS_MOVED = Formula("keys_moved", "key_bytes*key_heads/(hbm_rate*cost*block_q*work_tiles)")
PARTS = Formula("parts", "ceil(splits/run)")
PARTS_MOVED = Formula("parts_moved", "moved*parts/splits")
FOLDED_WORK = Formula("work", "1 + (started + joined*(splits - 1))/splits")
RUN_WORK = Formula("work", "(1 + (started + joined*(run - 1) + written)/run)*run*parts/splits")
EVEN_ROUNDS = Formula("idle", "slots*rounds/work_tiles")
UNEVEN_ROUNDS = Formula("idle", "max(1, slots/work_tiles)")
LAUNCH_TIME = Formula(
    "time", "max(work*idle, hbm, hbm*(rounds - 1)*slots/work_tiles + work*idle/rounds)"
)


def run_of_splits(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> int:
    """The neighbouring splits of its rows that a thread block has in a call with split keys.

    Longer runs write and merge fewer parts, and all splits none, but leave SMs idle where a call
    has few rows. The bits are the same, so that all of the call may decide.

    Args:
        spec: the variant with split keys.
        arch, call, sms: as for `split_of_call`.

    Returns:
        One of `RUNS`, or `ALL_SPLITS`: that with the least predicted time.
    """
    return fastest_run(times_of_runs(spec, arch, call, sms=sms))


def fastest_run(times: Mapping[int, float]) -> int:
    """The run of the least of the times that `times_of_runs` gives; one split where it gives
    none."""
    return min(times, key=times.__getitem__) if times else RUNS[0]


def times_of_runs(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> dict[int, float]:
    """The predicted times of a call with runs of splits, over that of its scores on busy SMs.

    Args: as for `run_of_splits`.

    Returns:
        The times of `ALL_SPLITS` and of the runs that are shorter; none where the kernel of another
        call decides.
    """
    if spec.partial:
        return {}
    try:
        plan = _plan_of_heads(spec, arch, *call.sizes[:4])
    except PlanError:  # the columns of V are computed in parts, each of which decides
        return {}
    gpu = facts(arch)
    sms = sms or gpu.sms
    columns = plan.head_dim + (0 if plan.one_tensor else plan.head_dim_v)
    work_tiles = math.prod(plan.grid(*call.sizes, packed=spec.packed))
    at = step_facts(plan) | {
        "hbm_rate": gpu.hbm_bytes_per_s / (gpu.sms * gpu.clock_hz),
        "split_size": int(call.scalars[SPLIT]),
        "rows": call.batch * call.heads_q * call.seq_q,
        "slots": sms * plan.blocks_per_sm,
        "splits": call.splits,
        "work_tiles": work_tiles,
        "key_bytes": plan.kv_itemsize * columns,
        "key_heads": call.batch * call.heads_kv,
        "restarted": restarted_steps(plan),
    }
    if spec.packed:
        at["rows"] = call.heads_q * call.seq_q
    uneven = {Q, K} <= spec.mask.free_symbols and 2 * call.seq_q >= call.seq_k
    rounds = UNEVEN_ROUNDS if uneven else EVEN_ROUNDS
    FormulaSequence(STARTED, JOINED, SHARE, MOVED, WRITTEN, KEYS_MOVED)(at)
    folded = at | {"hbm": at["keys_moved"]}
    FormulaSequence(ROUNDS, FOLDED_WORK, rounds, LAUNCH_TIME)(folded)
    times = {ALL_SPLITS: float(folded["time"])}
    for run in RUNS:
        if run > 1 and run >= call.splits:
            break
        parts = at | {"run": run}
        FormulaSequence(PARTS, PARTS_MOVED)(parts)
        parts["hbm"] = at["keys_moved"] + parts["parts_moved"]
        parts["work_tiles"] = parts["parts"] * work_tiles
        FormulaSequence(ROUNDS, RUN_WORK, rounds, LAUNCH_TIME)(parts)
        times[run] = float(parts["time"] + parts["parts_moved"])
    return times


@functools.lru_cache(maxsize=1024)
def _plan_of_heads(
    spec: AttentionSpec, arch: str, batch: int, heads_q: int, heads_kv: int, seq_q: int
) -> Plan:
    """The plan of a call, whose tiles have rows of several heads where these share K and V."""
    plan = plan_forward(PlanRequest(spec, arch))
    heads = choose_heads(spec, plan, batch, heads_q, heads_kv, seq_q).heads
    queries = -(-seq_q // batch) if spec.packed else seq_q
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
