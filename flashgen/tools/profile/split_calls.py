"""Predictions for calls with split keys or a paged cache: bytes and durations of their launches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.calls.runtime.bind_arguments import blocks_of_call, box_rows_of
from flashgen.kernels.planner import Plan, plan_merge
from flashgen.kernels.planner.duration import Duration, duration_of
from flashgen.kernels.planner.split_traffic import SplitTraffic, SplitWalk, split_traffic
from flashgen.kernels.planner.traffic import (
    LaunchSizes,
    StepKind,
    Walk,
    computed_scores,
    forward_traffic,
    walks_of_head,
)
from flashgen.kernels.visits.visited_tiles import KnownCall, walks_of
from flashgen.shared.call import CheckedCall
from flashgen.shared.launch_facts import LaunchBlocks
from flashgen.shared.signature import PAGE_NAMES, SPLIT, WHOLE
from flashgen.shared.split_choice import PARTS_IN_FLIGHT, waits_of_merge
from flashgen.spec.analysis.mask import MaskAnalysis
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import BATCH, B


@dataclass(frozen=True)
class SplitPrediction:
    """The predictions for the launches of one call.

    Attributes:
        traffic: bytes of both launches.
        forward: the duration of the forward kernel.
        merge: the duration of the merge; None where the keys are not split.
        scores: elements of S that are computed, whole partial tiles included.
        visited: elements of S in the tiles that are visited.
        work_tiles: the work tiles of the forward kernel.
        blocks: the blocks of a persistent forward kernel; else None.
    """

    traffic: SplitTraffic
    forward: Duration
    merge: Duration | None
    scores: int
    visited: int
    work_tiles: int
    blocks: LaunchBlocks | None

    @property
    def seconds(self) -> float:
        """The duration of all launches, without the time of their starts."""
        return self.forward.seconds + (self.merge.seconds if self.merge else 0.0)

    @property
    def busy(self) -> float:
        """The share of the forward kernel's time in which its slots have work."""
        return 1 / self.forward.quantisation


def predict_splits(known: KnownCall, mask: MaskAnalysis, plan: Plan) -> SplitPrediction | None:
    """The predictions for a call of a variant with split keys, or with a paged cache.

    Args:
        mask: the variant's analysis for the forward kernel.
        plan: the plan of its forward kernel.

    Returns:
        None where the tiles are known only in the launch: for packed queries, for positions in
        tensors, and for masks that read the number of a sequence among sequences of different
        lengths.
    """
    spec, call, captured = known
    batches: Mapping[int, int] = {call.seq_k: call.batch}  # batch entries by their number of keys
    page_size = 0
    if spec.paged:
        batches = Counter(captured[PAGE_NAMES[1]].tolist())
        page_size = call.seq_k // max(captured[PAGE_NAMES[0]].shape[1], 1)
    by_entry = {B, BATCH} & mask.expr.free_symbols
    if spec.packed or spec.offsets or (by_entry and len(batches) > 1):
        return None
    by_tma = plan.code_path.copies_by_tma
    merge = plan_merge(spec, plan.arch, splits=True) if spec.split and not plan.folds else None
    blocks = 0 if merge is None else math.prod(merge.grid(*call.sizes))
    early = PARTS_IN_FLIGHT if waits_of_merge(plan.arch, blocks, call.splits) == 1 else 0
    entries: list[tuple[int, list[list[SplitWalk]]]] = []  # of each batch entry the blocks
    for length, batch in batches.items():
        walks_of_splits = [
            (_walks(known._replace(problem=part), mask, plan), behind)
            for part, behind in _splits(spec, replace(call, batch=batch), length)
        ]
        run = len(walks_of_splits) if plan.folds else call.run
        blocks_of = [
            walks_of_splits[first : first + run] for first in range(0, len(walks_of_splits), run)
        ]
        runs = [_walks_of_run(walks, early=index < early) for index, walks in enumerate(blocks_of)]
        entries.append((batch, runs))
    keys = call.heads_kv * sum(length * batch for length, batch in batches.items())
    traffic = split_traffic(
        plan,
        merge,
        [walk for _, runs in entries for walks in runs for walk in walks],
        call.batch * call.heads_q * call.seq_q,
        keys,
        box_rows=box_rows_of(plan.block_k, call, page_size) if by_tma else 0,
        page_size=page_size,
    )
    # The splits of a batch entry follow each other, as its work tiles do.
    in_order = [
        walk.split._replace(sizes=walk.split.sizes._replace(batch=1))
        for batch, runs in entries
        for _ in range(batch)
        for walks in runs
        for walk in (_folded(plan, walks) if plan.joins else walks)
    ]
    read = sum(w.sizes.batch * w.sizes.heads_q * w.sizes.seq_q for w in in_order)
    rereads = (read - call.batch * call.heads_q * call.seq_q) * plan.head_dim * plan.itemsize
    forward = duration_of(plan, in_order, uneven=mask.growth != 0, rereads=rereads)
    merging = None
    if merge is not None:
        sizes = LaunchSizes(call.batch, call.heads_q, call.heads_q, call.seq_q, 0)
        merging = duration_of(merge, [Walk(sizes)], splits=call.splits)
    all_walks = [walk.split for _, runs in entries for walks in runs for walk in walks]
    call = replace(call, splits=1) if plan.folds else call
    grid = plan.grid(*call.sizes, splits=call.splits)
    return SplitPrediction(
        traffic,
        forward,
        merging,
        sum(computed_scores(plan, walk) for walk in all_walks),
        sum(forward_traffic(plan, *walk.sizes, walk.visited).scores for walk in all_walks),
        math.prod(grid),
        blocks_of_call(plan, call) if plan.is_persistent else None,
    )


def _walks(known: KnownCall, mask: MaskAnalysis, plan: Plan) -> list[Walk]:
    """The walks over the keys of one split."""
    if known.problem.seq_k == 0:
        return [Walk(LaunchSizes(*known.problem.sizes))]
    return list(walks_of(known, mask, plan))


def _walks_of_run(run: Sequence[tuple[list[Walk], int]], *, early: bool) -> list[SplitWalk]:
    """The walks of blocks that have these splits, each with the keys behind it."""
    (first, _), *others = run
    alike = [walks for walks, _ in others if len(walks) == len(first)]
    split_walks = []
    for index, (walks, behind) in enumerate(run):
        for walk_index, walk in enumerate(walks):
            rest = () if index else tuple(walks_alike[walk_index] for walks_alike in alike)
            split_walks.append(SplitWalk(walk, behind, writes=not index, early=early, others=rest))
    return split_walks


def _folded(plan: Plan, walks: Sequence[SplitWalk]) -> Sequence[SplitWalk]:
    """The walks of one launch whose blocks have all of these splits of their rows."""
    with_keys = [walk.split for walk in walks if walk.split.sizes.seq_k]
    if not with_keys:
        return walks[:1]
    if {walk.sizes.heads_q for walk in with_keys} != {walks[0].split.sizes.heads_q}:
        return walks  # heads with different walks, each of which is one of its own
    tiles_of_splits = [walks_of_head(plan, walk.sizes, walk.visited) for walk in with_keys]
    visited: list[list[int]] = [[] for _ in tiles_of_splits[0]]
    keys = 0
    for walk, tiles_of_split in zip(with_keys, tiles_of_splits, strict=True):
        first = -(-keys // plan.walked_keys)  # each split begins with a tile of its own
        for tiles, split_tiles in zip(visited, tiles_of_split, strict=True):
            tiles += [first + tile for tile in split_tiles]
        keys = first * plan.walked_keys + walk.sizes.seq_k
    steps: list[Counter[StepKind]] | None = None
    if all(walk.steps is not None for walk in with_keys):
        steps = [
            sum(map(Counter, steps_of_block), Counter())
            for steps_of_block in zip(*(w.steps or () for w in with_keys), strict=True)
        ]
    restarts = [max(0, sum(map(bool, tiles)) - 1) for tiles in zip(*tiles_of_splits, strict=True)]
    sizes = with_keys[0].sizes._replace(seq_k=keys)
    return [
        SplitWalk(
            with_keys[0]._replace(sizes=sizes, visited=visited, steps=steps, restarts=restarts)
        )
    ]


def _splits(
    spec: AttentionSpec, call: CheckedCall, length: int
) -> Iterator[tuple[CheckedCall, int]]:
    """The call over the keys of each split, and the number of keys behind them."""
    scalars = dict(call.scalars)
    if spec.paged:
        call = replace(call, q_offset=length - call.seq_q)
        if spec.split:
            scalars[WHOLE[3]] = length
    size = int(scalars[SPLIT]) if spec.split else max(length, 1)
    border = call.k_offset // size * size if spec.split else call.k_offset
    for index in range(call.splits * call.run):
        first = min(max(border + index * size - call.k_offset, 0), length)
        end = min(border + (index + 1) * size - call.k_offset, length)
        offset = call.k_offset + first
        part = replace(call, k_offset=offset, seq_k=end - first, scalars=scalars, splits=1)
        yield part, length - end
