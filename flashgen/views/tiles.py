"""The tile map of a kernel's mask as data for the page, with its scores where they are few."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flashgen.call import Inputs
from flashgen.errors import FlashgenError
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan
from flashgen.profile import Profile
from flashgen.profile.prediction import multiply_adds_of
from flashgen.views.tile_map import TileMap
from flashgen.views.values import KernelPane
from flashgen.views.visualize import visualize

MOST_CELLS = 1 << 18
"""Tiles of all heads that a page holds."""

MOST_SCORES = 1 << 21
"""Scores of all heads that a page holds, one bit each."""

_OF_QUERIES = "forward"


def with_tile_map(
    pane: KernelPane, profile: Profile, spec: AttentionSpec, inputs: Inputs
) -> KernelPane:
    """The pane with the tile map of its kernel, or with a note on why there is none."""
    plan = profile.plan
    if plan.streams or not plan.block_k:
        return replace(pane, tile_map_note="This kernel visits no tiles of scores.")
    if spec.paged or spec.split:
        return replace(pane, tile_map_note="No tile map is made of calls with pages or splits.")
    try:
        found = _map_of(spec, plan, inputs)
    except FlashgenError as error:
        return replace(pane, tile_map_note=f"There is no tile map: {error.what}; {error.numbers}.")
    if found.tiles > MOST_CELLS:
        note = f"{found.tiles:,} tiles are too many for the page, which holds {MOST_CELLS:,}."
        return replace(pane, tile_map_note=f"There is no tile map: {note} A smaller --shape.")
    scores = sum(_scores(each.place) for each in found.heads)
    note = ""
    if scores > MOST_SCORES:
        note = f"Single scores are left out: {scores:,}, and the page holds {MOST_SCORES:,}."
    data = _data(found, spec, profile, whole=scores <= MOST_SCORES)
    return replace(pane, tile_map=data, tile_map_note=note)


def _map_of(spec: AttentionSpec, plan: Plan, inputs: Inputs) -> TileMap:
    q, k, _ = inputs.operands
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    options = inputs.options
    kernel = plan.kernel if plan.owns_keys or plan.kernel == "dq" else _OF_QUERIES
    return visualize(
        spec,
        sizes,
        arch=plan.arch,
        tile=(plan.queries_per_tile, plan.block_k),
        kernel=kernel,
        q_offset=options.get("q_offset", 0),
        k_offset=options.get("k_offset", 0),
        captures={**(options.get("scalars") or {}), **(options.get("tensors") or {})},
    )


def _scores(place: Any) -> int:
    return int(place.queries.length * place.keys.length)


def _data(
    found: TileMap, spec: AttentionSpec, profile: Profile, *, whole: bool
) -> Mapping[str, Any]:
    drawing = found.drawing()
    plan = profile.plan
    per_tile = multiply_adds_of(plan, plan.queries_per_tile * plan.block_k)
    counted = profile.totals.tensor_multiply_adds / per_tile if per_tile else None
    return {
        "tile": list(found.tile),
        "packed": spec.packed,
        "owns": "keys" if plan.owns_keys else "queries",
        "visits": found.tiles - found.counts["empty"],
        "counted": None if counted is None else round(counted, 2),
        "tiles": found.tiles,
        "kept": found.kept,
        "legend": [
            {"code": int(e.code), "style": e.style, "text": e.text, "count": e.count}
            for e in drawing.legend
        ],
        "notes": list(drawing.notes),
        "heads": [_of_heads(found, each, whole=whole) for each in found.heads],
    }


def _of_heads(found: TileMap, each: Any, *, whole: bool) -> dict[str, Any]:
    rows, columns = each.kinds.shape
    bits = None
    if whole and each.kinds.size:
        b, h = each.pairs[0]
        kept = found.zoom(0, 0, size=max(rows, columns), batch=b, head=h).elements
        bits = base64.b64encode(np.packbits(kept).tobytes()).decode()
    axes = (each.place.queries, each.place.keys)
    return {
        "pairs": [list(pair) for pair in each.pairs],
        "rows": rows,
        "columns": columns,
        "kinds": "".join(map(str, each.kinds.ravel().tolist())),
        "queries": [axes[0].offset, axes[0].length],
        "keys": [axes[1].offset, axes[1].length],
        "scores": bits,
    }
