"""`visualize`: the tile map of a mask_mod, a spec or a BlockMask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.shared.arch import DEFAULT_ARCH
from flashgen.shared.errors import InputError, called_by_users
from flashgen.tools.views.inputs import call_of
from flashgen.tools.views.mask_call import MaskCall
from flashgen.tools.views.tile_kinds import ELEMENTS, classify
from flashgen.tools.views.tile_map import HeadTiles, TileMap

MOST_TILES = 1 << 24
"""Tiles of one map, and of all different maps together."""

MOST_PAIRS = 256
"""Pairs of a batch entry and a head whose tiles are computed one by one."""


@called_by_users()
def visualize(
    mask: Any,
    /,
    shape: Any = None,
    *,
    arch: str = DEFAULT_ARCH,
    tile: tuple[int, int] | None = None,
    kernel: str = "forward",
    batch: int | None = None,
    head: int | None = None,
    q_offset: Any = None,
    k_offset: Any = 0,
    captures: Mapping[str, Any] | None = None,
    **named: Any,
) -> TileMap:
    """The tile map of a mask: which tiles a kernel skips, and in which it evaluates the mask.

    Notebooks show the map as a picture, terminals as text. The classes are those by which kernels
    walk tiles: they follow from the mask's expression, and from captured tensors only where the
    mask reads them. Where a visited tile is in truth full or empty, which kernels cannot know
    without its scores, the map says so.

    Args:
        mask: an AttentionSpec; a mask_mod, of flashgen or of PyTorch's flex_attention; or a
            PyTorch BlockMask.
        shape: batch, heads and lengths of a call: (B, H, N), (B, Hq, Hkv, Nq, Nk), (Nq, Nk), N, or
            a text such as "1,8,4096". With packed sequences N is the sum of their lengths. For a
            BlockMask and for packed sequences it may be left out.
        arch: the architecture whose plan gives the tile, as for `plan`.
        tile: queries and keys of a tile, instead of those of the plan. The first tile is whole.
        kernel: "forward", or a kernel of the backward pass: "fused", "dkdv" or "dq".
        batch: the batch entry, or the packed sequence, that the map shows; all if None.
        head: the query head that the map shows; all if None. Heads with the same tiles share one
            grid.
        q_offset: the global position of the first query: an int, or an int32 or int64 tensor with
            one for each batch entry. None is 0, or for a spec with paged=True the position with
            which the queries come last.
        k_offset: the global position of the first key, likewise.
        captures: values by name of scalars and captured tensors of the mask, of ``layout``, and of
            ``cu_seqlens_q`` and ``cu_seqlens_k``.
        named: the same as arguments: ``visualize(spec, shape, window=64)``.

    Returns:
        The map, with `TileMap.counts`, `TileMap.density` and `TileMap.zoom`.

    Raises:
        InputError: an argument is wrong, a capture is missing, or the map has too many tiles.
        SpecError: the mask_mod cannot be traced.
        PlanError: the architecture is unknown, or no tile fits it.
    """
    values = _captures(captures, named)
    offsets = {"q_offset": q_offset, "k_offset": k_offset}
    name, call = call_of(mask, shape, values, offsets, arch=arch, tile=tile, kernel=kernel)
    _check_pair(call, batch, head)
    return map_of(name, call, batch, head)


def map_of(name: str, call: MaskCall, batch: int | None = None, head: int | None = None) -> TileMap:
    """The tile map of a checked call.

    Raises:
        InputError: the map is empty or has too many tiles.
    """
    heads: dict[tuple[Any, ...], HeadTiles] = {}
    pairs = done = tiles = 0
    budget = ELEMENTS
    for group in call.head_groups(batch, head):
        pairs += len(group.pairs)
        if not (group.queries.length and group.keys.length):
            continue
        size = len(group.queries.corners()[0]) * len(group.keys.corners()[0])
        _check_tiles(call, size)
        if done >= MOST_PAIRS or (heads and tiles + size > MOST_TILES):
            continue
        classified = classify(call, group, budget)
        budget -= classified.evaluated
        tiles += size
        done += 1
        key = group.queries, group.keys, classified.kinds.tobytes(), classified.kept_scores
        earlier = heads.get(key)
        all_pairs = group.pairs if earlier is None else earlier.pairs + group.pairs
        heads[key] = HeadTiles(all_pairs, classified.kinds, classified.kept_scores, group)
    if not heads:
        entries = "sequences" if call.spec.packed else "batch entries"
        raise InputError(
            "a tile map needs a sequence with queries and keys"
            if call.spec.packed
            else "a tile map needs at least one batch entry, head, query and key",
            where="argument shape",
            numbers=f"{call.problem.batch:,} {entries}, {call.problem.heads_q:,} heads, "
            f"{call.problem.seq_q:,} queries, {call.problem.seq_k:,} keys",
            way_out="fg.visualize(spec, (1, 1, 1024))",
        )
    shown = sum(len(head_tiles.pairs) for head_tiles in heads.values())
    return TileMap(
        name,
        (call.tile.block_q, call.tile.block_k),
        tuple(heads.values()),
        call,
        tuple(_notes(call, shown, pairs)),
    )


def _notes(call: MaskCall, shown: int, pairs: int) -> list[str]:
    notes = []
    if shown < pairs:
        entry = "packed sequence" if call.spec.packed else "batch entry"
        notes.append(
            f"The map has {shown:,} of {pairs:,} pairs of a {entry} and a head, without empty "
            "ones; batch= and head= choose others."
        )
    return notes


def _captures(captures: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    if captures is not None and not isinstance(captures, Mapping):
        raise InputError(
            "captures is not a dictionary of values by name",
            where="argument captures",
            numbers=f"given a {type(captures).__name__}",
            way_out='captures={"window": 64}',
        )
    twice = sorted(set(captures or {}) & set(named))
    if twice:
        raise InputError(
            f"the capture {twice[0]!r} is given twice",
            where=f"arguments captures and {twice[0]}",
            numbers=f"in both: {', '.join(twice)}",
            way_out="each value once",
        )
    return {**(captures or {}), **named}


def _check_pair(call: MaskCall, batch: Any, head: Any) -> None:
    p = call.problem
    for name, value, count in (("batch", batch, p.batch), ("head", head, p.heads_q)):
        number = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (number and 0 <= value < count):
            raise InputError(
                f"the call does not have this {name}",
                where=f"argument {name}",
                numbers=f"given {value!r}; from 0 to {count - 1:,}",
                way_out=f"{name}=0, or leave it out for all",
            )


def _check_tiles(call: MaskCall, tiles: int) -> None:
    if tiles > MOST_TILES:
        q, k = call.tile.block_q, call.tile.block_k
        factor = 2
        while tiles > MOST_TILES * factor**2:
            factor *= 2
        raise InputError(
            "the map has too many tiles",
            where="argument tile",
            numbers=f"{tiles:,} tiles of {q} x {k}; at most {MOST_TILES:,}",
            way_out=f"tile=({q * factor}, {k * factor})",
        )
