"""Decoding calls, planned and predicted by their sizes alone: no tensor is made, nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from flashgen.calls.runtime.arguments.slices import split_number
from flashgen.calls.runtime.bind_arguments import heads_of_call
from flashgen.kernels.codegen import walk_of_kernel
from flashgen.kernels.pipeline import analysed
from flashgen.kernels.planner import Plan, invariant_splits, plan, plan_splits
from flashgen.kernels.planner.split_keys import times_of_runs
from flashgen.kernels.planner.traffic import LaunchSizes
from flashgen.kernels.visits.visited_tiles import KnownCall
from flashgen.shared import config
from flashgen.shared.arch import facts
from flashgen.shared.call import CheckedCall
from flashgen.shared.dtypes import Number
from flashgen.shared.errors import InputError
from flashgen.shared.launch_facts import HeadsPerTile
from flashgen.shared.signature import PAGE_NAMES, SPLIT, WHOLE
from flashgen.shared.split_choice import ALL_SPLITS, SplitPlan, fastest_run
from flashgen.spec.language.signature import joining, split
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.profile.run import refuse_lists
from flashgen.tools.profile.split_calls import SplitPrediction, predict_splits

NO_VALUES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class DecodingPlan:
    """The kernels of a call whose queries are the last positions of their sequences.

    Attributes:
        plan: the plan of the forward kernel.
        chosen: the choice of split_size, for calls that give none.
        why_other: why another split_size is taken.
        split_size: the keys of a split; 0 where keys are not split.
        splits: the splits of a sequence.
        runs: the splits that a block may have, with the predicted clocks.
        heads: the choice of the query heads that share a tile.
        predicted: bytes and durations; None where the tiles are known only in the launch.
        invariant: whether the call is batch-invariant.
    """

    plan: Plan
    chosen: SplitPlan
    why_other: str
    split_size: int
    splits: int
    heads: HeadsPerTile
    predicted: SplitPrediction | None
    invariant: bool = False
    runs: Mapping[int, float] = field(default_factory=dict)

    @property
    def run(self) -> int:
        """The neighbouring splits that a block has: one of `RUNS`, or `ALL_SPLITS`."""
        return fastest_run(self.runs)

    @property
    def bound_seconds(self) -> float:
        """The time in which K, V, q and out pass through global memory once."""
        assert self.predicted is not None, "bytes are known"
        arch = facts(self.plan.arch)
        return float(self.predicted.traffic.quantities["bound_bytes"]) / arch.hbm_bytes_per_s

    def __str__(self) -> str:
        lines = [str(self.plan), "", str(self.chosen)]
        if self.invariant:
            lines.append("          batch-invariant: the split_size of all calls, for any sizes")
        if self.split_size != self.chosen.size:
            lines.append(f"          {self.why_other}: split_size = {self.split_size:,}")
        if self.heads.reason:
            lines.append(f"heads     {self.heads.heads} per tile, {self.heads.reason}")
        lines.append(self._splits())
        if self.predicted is None:
            return "\n".join([*lines, "", "nothing is predicted: the call decides on its tiles"])
        return "\n".join([*lines, *self._predictions(self.predicted)])

    def _splits(self) -> str:
        if not self.split_size:
            return "splits    none: one thread block has all keys of a row"
        parts = -(-self.splits // max(self.run, 1))
        last = {
            ALL_SPLITS: "joined by the thread block of their rows",
            1: "and a merge of their results",
        }.get(self.run, f"{self.run} in each block, and a merge of {parts:,} results")
        lines = [f"splits    {self.splits:,} of {self.split_size:,} keys, {last}"]
        if self.runs:
            least = min(self.runs.values())
            times = ", ".join(
                f"{run or 'all'}: {time / least:.3f}" for run, time in sorted(self.runs.items())
            )
            lines.append(f"          splits in a block: time over the least one   {times}")
        return "\n".join(lines)

    def _predictions(self, prediction: SplitPrediction) -> list[str]:
        over = prediction.traffic.over_bound
        tiles = f"tiles     {prediction.work_tiles:,}, one for each block"
        product = facts(self.plan.arch).product
        launches = "both launches" if prediction.merge else "the launch"
        return [
            tiles if prediction.blocks is None else str(prediction.blocks),
            "",
            f"bytes     {over:.3f} times those of the HBM bound",
            *str(prediction.traffic).splitlines()[1:],
            "",
            str(prediction.forward),
            f"          slots have work for 1/quantisation = {prediction.busy:.1%} of the time",
            *(["", str(prediction.merge)] if prediction.merge else []),
            "",
            f"predicted {prediction.seconds * 1e6:,.1f} us for {launches}, without their starts: "
            f"{prediction.seconds / self.bound_seconds:.3f} times",
            f"          the {self.bound_seconds * 1e6:,.1f} us in which one {product} moves the "
            "bytes of the HBM bound",
        ]


def plan_decoding(
    spec: AttentionSpec,
    arch: str,
    sizes: LaunchSizes,
    *,
    page_size: int = 0,
    kv_dtype: str | None = None,
    split_size: int | None = None,
    sram: int | None = None,
    scalars: Mapping[str, Number] = NO_VALUES,
    captured: Mapping[str, Any] = NO_VALUES,
) -> DecodingPlan:
    """The kernels of a call over ``sizes.seq_k`` keys, and the predictions for their launches.

    Args:
        spec: a spec without ``paged=True``.
        arch, sram: as in `flashgen.plan`.
        page_size: keys of a page; 0 for contiguous keys.
        kv_dtype: the dtype of codes in the cache, with scales for its pages; None for elements.
        split_size: keys of a split; 0 for one thread block with all keys of a row, and None for the
            choice of `flashgen.kernels.planner.plan_splits`, or of `invariant_splits` where calls
            are batch-invariant.
        scalars, captured: the values of run-time scalars and captured tensors, by name.

    Raises:
        InputError: the spec has packed sequences or lists of blocks, or split_size is not a number
            of keys that kernels can split.
        PlanError: the architecture is unknown, or no tile fits.
        SpecError: the spec cannot have a paged cache, or split keys.
    """
    refuse_lists(spec)
    if spec.packed:
        raise InputError(
            "the lengths of packed sequences are not sizes of a call",
            where="spec of a decoding call",
            numbers=f"spec {spec.name} has packed=True",
            way_out="the spec without packed=True, with a batch entry for each sequence",
        )
    served_spec = spec.replace(paged=True, kv_dtype=kv_dtype) if page_size else spec
    capacity = sizes.seq_k
    if page_size:
        pages = max(-(-sizes.seq_k // page_size), 1)
        capacity = pages * page_size
        captured = {
            **captured,
            PAGE_NAMES[0]: np.zeros((sizes.batch, pages), dtype=np.int32),
            PAGE_NAMES[1]: np.full(sizes.batch, sizes.seq_k),
        }
    call = CheckedCall(
        *(*sizes[:4], capacity),
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v or spec.head_dim,
        q_offset=sizes.seq_k - sizes.seq_q,
        k_offset=0,
        scale=1.0,
        scalars=scalars,
    )
    invariant = split_size is None and config.batch_invariant()
    chosen = plan_splits(served_spec, arch, sizes.heads_kv)
    size, why = split_number(split_size), "given instead"
    splits = 1
    runs: Mapping[int, float] = {}
    if invariant:
        chosen = invariant_splits(served_spec, arch)
        size = chosen.size
    elif split_size is None:
        size = chosen.size_of(call, paged=page_size > 0)
        why = "not for this call, of few keys or of rows for several tiles"
    if size:
        served_spec = split(served_spec)
        whole = dict(zip(WHOLE, (0, sizes.heads_q, sizes.seq_q, capacity), strict=True))
        scalars = {**scalars, **whole, SPLIT: size}
        splits = -(-capacity // size)
        call = replace(call, scalars=scalars, splits=splits)
        runs = times_of_runs(served_spec, arch, call)
        run = fastest_run(runs)
        served_spec = joining(served_spec, run)
        if run != ALL_SPLITS:
            call = call.in_runs(run)
    heads = heads_of_call(served_spec, plan(served_spec, arch, sram=sram), call, captured)
    planned = plan(
        served_spec,
        arch,
        sram=sram,
        heads_per_tile=heads.heads,
        few_rows=heads.few_rows,
        unpaired=heads.unpaired,
    )
    mask = analysed(served_spec, walk_of_kernel("forward")).mask
    predicted = predict_splits(KnownCall(served_spec, call, captured), mask, planned)
    values = planned, chosen, why, size, splits, heads, predicted, invariant, runs
    return DecodingPlan(*values)
