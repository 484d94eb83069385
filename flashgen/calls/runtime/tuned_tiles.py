"""Tuned tiles: the fastest measured ones, stored on disk by GPU, spec, pass and shape class.

::

    <cache folder>/tuned/<GPU>/<spec>.<hash>.<arch>.<pass>.<shape class>.json

`flashgen tune` writes them, and calls on that GPU use them. The emulator, other GPUs and shapes of
other classes use the planner's tiles.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flashgen.kernels.compile.cache import TUNED, CacheWarning, replace_text, usable_root
from flashgen.kernels.compile.ownership import contents
from flashgen.shared import config
from flashgen.shared.call import CheckedCall
from flashgen.shared.errors import PlanError
from flashgen.shared.plain import from_plain, parsed
from flashgen.version import __version__

if TYPE_CHECKING:
    from flashgen.kernels.planner import Tile
    from flashgen.spec.language.spec import AttentionSpec

PASSES = ("forward", "tangent", "backward", "deterministic")


@dataclass(frozen=True)
class Winner:
    """The tiles with the shortest measured time.

    Attributes:
        tiles: the tiles by name of the kernel.
        seconds: duration of the pass with these tiles.
        derived_seconds: duration of the pass with the planner's tiles.
        version: the version of flashgen that measured them.
    """

    tiles: Mapping[str, Tile]
    seconds: float
    derived_seconds: float
    version: str = __version__


@dataclass(frozen=True)
class _StoredTiles:
    """A `Winner` in its file, before the planner is imported."""

    tiles: dict[str, dict[str, int]]
    seconds: float
    derived_seconds: float
    version: str


def shape_class(call: CheckedCall) -> str:
    """The class of shapes that share tuned tiles: sizes rounded up to powers of two."""
    batch, queries, keys = (
        1 << max(0, size - 1).bit_length()
        for size in (call.batch * call.heads_q, call.seq_q, call.seq_k)
    )
    return f"bh{batch}-g{call.heads_q // call.heads_kv}-q{queries}-k{keys}"


def gpu_name(index: int) -> str:
    """The name of a CUDA device in the driver, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(index)


def remembered(
    spec: AttentionSpec, arch: str, pass_name: str, call: CheckedCall, index: int
) -> Mapping[str, Tile]:
    """The tuned tiles for a call on a GPU, by name of the kernel; empty without a measurement."""
    root = config.cache_dir()
    if root is None or not (root / TUNED).is_dir() or usable_root() is None:
        return {}
    winner = read(tiles_file(root, gpu_name(index), spec, arch, pass_name, call))
    if winner is None or not _is_possible(spec, arch, pass_name, winner.tiles):
        return {}
    config.log(1, f"flashgen: {spec.name}, {pass_name}: tuned tiles, {winner.tiles}")
    return winner.tiles


def tiles_file(
    root: Path, gpu: str, spec: AttentionSpec, arch: str, pass_name: str, call: CheckedCall
) -> Path:
    """The file of tuned tiles.

    Args:
        pass_name: one of `PASSES`.
    """
    device = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
    name = f"{spec.name}.{spec.digest[:16]}.{arch}.{pass_name}.{shape_class(call)}.json"
    return root / TUNED / device / name


def write(path: Path, winner: Winner) -> bool:
    """Stores tuned tiles atomically; False, with a `CacheWarning`, where that is impossible."""
    hindrance = replace_text(path, json.dumps(asdict(winner), indent=1, sort_keys=True))
    if hindrance is not None:
        _note(f"tuned tiles cannot be stored in {path.parent}: {hindrance}")
    return hindrance is None


def read(path: Path) -> Winner | None:
    """The stored tiles, or None where the file is missing or, with a `CacheWarning`, unusable."""
    from flashgen.kernels.planner import Tile

    try:
        values = from_plain(_StoredTiles, parsed(contents(path)))
        tiles = from_plain(dict[str, Tile], values.tiles)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _note(f"{path.name} holds no tiles ({error}); the planner's are used")
        return None
    winner = Winner(tiles, values.seconds, values.derived_seconds, values.version)
    if winner.version != __version__:
        _note(f"{path.name} is of flashgen {winner.version}; tune again for {__version__}")
        return None
    return winner


def _is_possible(spec: AttentionSpec, arch: str, pass_name: str, tiles: Mapping[str, Tile]) -> bool:
    """Whether a plan with these tiles exists; the file can hold anything."""
    from flashgen.kernels.planner import TangentPlanRequest, plan, plan_backward, plan_tangent

    try:
        if pass_name == "forward":
            plan(spec, arch, tile=tiles["forward"])
        elif pass_name == "tangent":
            plan_tangent(replace(TangentPlanRequest.for_all(spec, arch), tile=tiles["tangent"]))
        else:
            plan_backward(spec, arch, deterministic=pass_name == "deterministic", tiles=tiles)
    except (PlanError, KeyError, TypeError) as error:
        _note(f"tuned tiles of {spec.name} are unusable: {error}")
        return False
    return True


def _note(text: str) -> None:
    warnings.warn(text, CacheWarning, stacklevel=3)
