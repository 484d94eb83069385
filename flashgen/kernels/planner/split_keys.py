"""Chooses split_size for calls that give none.

It is small enough to fill the SMs, and large enough to add at most 5 % of memory traffic.

Few queries over many keys make few work tiles, which are divided into splits of the keys. Long
splits write few partial results; short ones divide the work evenly. The choice depends on the spec,
the architecture, its SMs and the number of key heads alone. It cannot depend on the batch or on
lengths, because the bits of a row, and a CUDA graph, depend on it.
"""

from __future__ import annotations

import functools
import math

from flashgen.kernels.planner.api import plan_forward
from flashgen.kernels.planner.requests import PlanRequest
from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall
from flashgen.shared.errors import PlanError
from flashgen.shared.split_choice import HEADS_KV, SplitPlan, choose_split
from flashgen.spec.language.signature import split, without_dropout
from flashgen.spec.language.spec import AttentionSpec


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


def folds_splits(
    spec: AttentionSpec, arch: str, call: CheckedCall, *, sms: int | None = None
) -> bool:
    """Whether a call with split keys has rows enough that a thread block has all of their splits.

    Both ways have the same bits. One block for all splits of its rows writes and merges no parts,
    and takes at most twice the time of an even division where it leaves half of the SMs idle.

    Args:
        spec: the variant with split keys.
        arch, call, sms: as for `split_of_call`.
    """
    if spec.partial:
        return False
    plan = plan_forward(PlanRequest(spec, arch))
    blocks = math.prod(plan.grid(*call.sizes, packed=spec.packed))
    return 2 * blocks >= plan.blocks_per_sm * (sms or facts(arch).sms)


def invariant_splits(spec: AttentionSpec, arch: str) -> SplitPlan:
    """The splits of all batch-invariant calls of a spec: `plan_splits` for a usual GPU and model.

    Args: as for `plan_splits`; the spec's keys may be packed.
    """
    return _plan_splits(without_dropout(spec), arch, HEADS_KV, facts(arch).sms)


@functools.lru_cache(maxsize=1024)
def _plan_splits(spec: AttentionSpec, arch: str, heads_kv: int, sms: int) -> SplitPlan:
    return choose_split(plan_forward(PlanRequest(split(spec), arch)), heads_kv, sms)
