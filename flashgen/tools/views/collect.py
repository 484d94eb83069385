"""All that a report shows of one call."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flashgen import reference
from flashgen.calls.ops import BackwardRun, ForwardRun
from flashgen.calls.runtime.reports import TangentRun
from flashgen.kernels.planner import Plan
from flashgen.reference.verdict import Judged, compare, judged_gradients, judged_tangents
from flashgen.shared.call import Inputs
from flashgen.shared.errors import FlashgenError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.tools.profile.kernel_profile import Profile
from flashgen.tools.profile.prediction import multiply_adds_of
from flashgen.tools.views.inputs import call_of
from flashgen.tools.views.kernel import pane_of_profile
from flashgen.tools.views.mask_call import KernelTile
from flashgen.tools.views.python_lines import PythonText
from flashgen.tools.views.report_page import versions
from flashgen.tools.views.tile_map import TileMap
from flashgen.tools.views.values import ErrorHistogram, KernelPane, Row, Side
from flashgen.tools.views.visualize import map_of

Tensor = torch.Tensor

ORACLE_SCORES = 1 << 26
"""Scores of the largest call for which the oracle is computed: it makes all of them in float64."""

_DECADES = 8
"""Bins of a histogram, one for each power of ten."""

MOST_CELLS = 1 << 18
"""Tiles of all heads that a page holds."""

MAP_SCORES = 1 << 21
"""Scores of all heads that a page holds, one bit each."""


@dataclass(frozen=True)
class CallResults:
    """A call that was executed in the emulator.

    Attributes:
        spec, inputs: the call; in its options, the scalars and the captured tensors.
        profiles: the profile of each launch, the forward pass first.
        forward: the result.
        backward, tangents: the gradients and the tangents; None where they were not computed.
    """

    spec: AttentionSpec
    inputs: Inputs
    profiles: Sequence[Profile]
    forward: ForwardRun
    backward: BackwardRun | None = None
    tangents: TangentRun | None = None


def side_of(
    results: CallResults,
    title: str,
    call: Sequence[Row],
    spec_file: PythonText | None,
) -> Side:
    """The report of a call.

    Args:
        title: what tells the call apart from another one.
        call: the call in rows of names and values.
        spec_file: the file of the spec; None for a spec that was made in Python.
    """
    panes = []
    seen: Counter[str] = Counter()
    for profile in results.profiles:
        role = profile.plan.kernel
        seen[role] += 1
        name = role if seen[role] == 1 else f"{role} ({seen[role]})"
        pane = pane_of_profile(profile, name, spec_file)
        panes.append(with_tile_map(pane, profile, results.spec, results.inputs))
    errors, note = _errors(results)
    return Side(title, tuple(call), tuple(panes), errors, note, versions())


def _errors(results: CallResults) -> tuple[tuple[ErrorHistogram, ...], str]:
    q, k, _ = results.inputs.operands
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if scores > ORACLE_SCORES:
        return (), (
            f"No oracle was computed: it makes all {scores:,} scores in float64, and this report "
            f"stops at {ORACLE_SCORES:,}. A smaller --shape has one."
        )
    if not scores:
        return (), "No oracle was computed: a size is 0, and there is no score."
    histograms = forward_errors(results.spec, results.inputs, results.forward)
    if results.backward is not None:
        histograms += backward_errors(results.spec, results.inputs, results.backward)
    if results.tangents is not None:
        histograms += tangent_errors(results.spec, results.inputs, results.tangents)
    return histograms, ""


# ---- how far results are from the float64 oracle -------------------------------------------------


def forward_errors(
    spec: AttentionSpec, inputs: Inputs, run: ForwardRun
) -> tuple[ErrorHistogram, ...]:
    """The histograms of out, and of lse or the sums of weights."""
    arguments: tuple[Any, ...] = (spec, *inputs.operands)
    exact = reference.attention(*arguments, **inputs.options)
    same = reference.same_dtype(*arguments, **inputs.options)
    return tuple(
        _histogram(name, result, Judged(compare(result, right, ordinary), right, ordinary))
        for name, result, right, ordinary in zip(
            ("out", *spec.row_results), (run.out, run.lse), exact, same, strict=False
        )
    )


def backward_errors(
    spec: AttentionSpec, inputs: Inputs, run: BackwardRun
) -> tuple[ErrorHistogram, ...]:
    """The histograms of dq, dk, dv and the gradients of learned tensors."""
    gradients = (run.dq, run.dk, run.dv, *run.captured)
    judged = judged_gradients(
        gradients, spec, *inputs.operands, *inputs.gradients, **inputs.options
    )
    return tuple(
        _histogram(name, tensor, judgement)
        for (name, judgement), tensor in zip(judged.items(), gradients, strict=True)
    )


def tangent_errors(
    spec: AttentionSpec, inputs: Inputs, run: TangentRun
) -> tuple[ErrorHistogram, ...]:
    """The histograms of the tangents of out and lse."""
    tangents = (run.out, run.lse)
    judged = judged_tangents(tangents, spec, *inputs.operands, inputs.tangents, **inputs.options)
    return tuple(
        _histogram(f"{name}'s tangent", tensor, judgement)
        for (name, judgement), tensor in zip(judged.items(), tangents, strict=False)
    )


def _histogram(name: str, result: Tensor, judged: Judged) -> ErrorHistogram:
    exact = judged.exact.double()
    errors, ordinary = (_differences(tensor, exact) for tensor in (result, judged.same))
    largest = max(float(x.max()) if x.numel() else 0.0 for x in (errors, ordinary))
    top = math.floor(math.log10(largest)) if largest > 0 else -1
    exponents = tuple(range(top - _DECADES + 1, top + 1))
    return ErrorHistogram(
        name=name,
        verdict=judged.verdict,
        exponents=exponents,
        found=tuple(_counts(errors, exponents)),
        ordinary=tuple(_counts(ordinary, exponents)),
    )


def _differences(tensor: Tensor, exact: Tensor) -> Tensor:
    """The absolute errors of all elements that are finite in both."""
    difference = (tensor.detach().double() - exact).abs().flatten()
    return difference[difference.isfinite()]


def _counts(errors: Tensor, exponents: tuple[int, ...]) -> Iterator[int]:
    """Elements per power of ten; the first bin has all smaller errors too."""
    bins = torch.full(errors.shape, exponents[0], dtype=torch.int64)
    positive = errors > 0
    bins[positive] = errors[positive].log10().floor().to(torch.int64)
    bins = bins.clamp(exponents[0], exponents[-1])
    for exponent in exponents:
        yield int((bins == exponent).sum())


# ---- the tile map of a kernel's mask -------------------------------------------------------------


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
        tile_map = _map_of(spec, plan, inputs)
    except FlashgenError as error:
        return replace(pane, tile_map_note=f"There is no tile map: {error.what}; {error.numbers}.")
    if tile_map.tiles > MOST_CELLS:
        note = f"{tile_map.tiles:,} tiles are too many for the page, which holds {MOST_CELLS:,}."
        return replace(pane, tile_map_note=f"There is no tile map: {note} A smaller --shape.")
    scores = sum(int(x.place.queries.length * x.place.keys.length) for x in tile_map.heads)
    note = ""
    if scores > MAP_SCORES:
        note = f"Single scores are left out: {scores:,}, and the page holds {MAP_SCORES:,}."
    data = _data(tile_map, spec, profile, whole=scores <= MAP_SCORES)
    return replace(pane, tile_map=data, tile_map_note=note)


def _map_of(spec: AttentionSpec, plan: Plan, inputs: Inputs) -> TileMap:
    q, k, _ = inputs.operands
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    options = inputs.options
    kernel = plan.kernel if plan.owns_keys or plan.kernel == "dq" else "forward"
    captures = {**(options.get("scalars") or {}), **(options.get("tensors") or {})}
    offsets = {name: options.get(name, 0) for name in ("q_offset", "k_offset")}
    tile = KernelTile.from_plan(plan, kernel, "of this call")
    return map_of(
        *call_of(spec, sizes, captures, offsets, arch=plan.arch, tile=tile, kernel=kernel)
    )


def _data(
    tile_map: TileMap, spec: AttentionSpec, profile: Profile, *, whole: bool
) -> Mapping[str, Any]:
    drawing = tile_map.drawing()
    plan = profile.plan
    per_tile = multiply_adds_of(plan, math.prod(plan.units))
    products = profile.work[0]

    def in_tiles(multiply_adds: float | None) -> float | None:
        if multiply_adds is None or not per_tile:
            return None
        return round(multiply_adds / float(per_tile), 2)

    return {
        "tile": list(tile_map.tile),
        "packed": spec.packed,
        "owns": "keys" if plan.owns_keys else "queries",
        "visits": tile_map.tiles - tile_map.counts["empty"],
        # Warpgroups leave out what their own rows do not reach; a gathered tile may lack boxes.
        "computed": in_tiles(products.predicted),
        "counted": in_tiles(products.counted),
        "tiles": tile_map.tiles,
        "kept": tile_map.kept,
        "legend": [
            {"code": int(e.code), "style": e.style, "text": e.text, "count": e.count}
            for e in drawing.legend
        ],
        "notes": list(drawing.notes),
        "heads": [_head_data(tile_map, head_tiles, whole=whole) for head_tiles in tile_map.heads],
    }


def _head_data(tile_map: TileMap, head_tiles: Any, *, whole: bool) -> dict[str, Any]:
    rows, columns = head_tiles.kinds.shape
    bits = None
    if whole and head_tiles.kinds.size:
        b, h = head_tiles.pairs[0]
        elements = tile_map.zoom(0, 0, size=max(rows, columns), batch=b, head=h).elements
        bits = base64.b64encode(np.packbits(elements).tobytes()).decode()
    axes = (head_tiles.place.queries, head_tiles.place.keys)
    return {
        "pairs": [list(pair) for pair in head_tiles.pairs],
        "rows": rows,
        "columns": columns,
        "kinds": "".join(map(str, head_tiles.kinds.ravel().tolist())),
        "queries": [axes[0].offset, axes[0].length, axes[0].before],
        "keys": [axes[1].offset, axes[1].length, axes[1].before],
        "scores": bits,
    }
