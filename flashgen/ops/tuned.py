"""Tiles that were measured to be the fastest, kept on disk: per GPU, spec, pass and kind of shape.

::

    <cache folder>/tuned/<GPU>/<spec>.<hash>.<arch>.<pass>.<shape class>.json

`flashgen tune` writes them. A call on that GPU takes them; the emulator, another GPU and every
other kind of shape go on with what the planner derives.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashgen import config
from flashgen.compile.cache import TUNED, CacheWarning
from flashgen.errors import PlanError
from flashgen.ops.checks import Problem
from flashgen.plan import Tile, plan, plan_backward
from flashgen.spec import AttentionSpec
from flashgen.version import __version__

PASSES = ("forward", "backward", "deterministic")


@dataclass(frozen=True)
class Winner:
    """What was measured to be the fastest.

    Attributes:
        tiles: by kernel.
        seconds: of the pass with them; derived_seconds: with the planner's own tiles.
        version: of flashgen.
    """

    tiles: Mapping[str, Tile]
    seconds: float
    derived_seconds: float
    version: str = __version__


def shape_class(problem: Problem) -> str:
    """Shapes that share a winner: batch, heads and lengths, each up to the next power of two."""
    batch, queries, keys = (
        1 << max(0, size - 1).bit_length()
        for size in (problem.batch * problem.heads_q, problem.seq_q, problem.seq_k)
    )
    return f"bh{batch}-g{problem.heads_q // problem.heads_kv}-q{queries}-k{keys}"


def gpu_name(index: int) -> str:
    """Of a CUDA device, as the driver has it: "NVIDIA H200"."""
    return torch.cuda.get_device_name(index)


def remembered(
    spec: AttentionSpec, arch: str, which: str, problem: Problem, index: int
) -> Mapping[str, Tile]:
    """The tiles to take for a call on a GPU; none where nothing was measured."""
    root = config.cache_dir()
    if root is None or not (root / TUNED).is_dir():
        return {}
    winner = read(place(root, gpu_name(index), spec, arch, which, problem))
    if winner is None or not _can_have(spec, arch, which, winner.tiles):
        return {}
    config.tell(1, f"flashgen: {spec.name}, {which}: tiles that were measured, {winner.tiles}")
    return winner.tiles


def place(
    root: Path, gpu: str, spec: AttentionSpec, arch: str, which: str, problem: Problem
) -> Path:
    """The file of a winner.

    Args:
        which: one of `PASSES`.
    """
    device = re.sub(r"[^A-Za-z0-9]+", "-", gpu)
    name = f"{spec.name}.{spec.digest[:16]}.{arch}.{which}.{shape_class(problem)}.json"
    return root / TUNED / device / name


def write(path: Path, winner: Winner) -> bool:
    """Keeps a winner, in one step; False, with a `CacheWarning`, where it cannot be kept."""
    record = asdict(winner)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    except OSError as error:
        _note(f"the winner cannot be kept in {path.parent}: {error.strerror or error}")
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        _note(f"the winner cannot be kept in {path.parent}: {error.strerror or error}")
        return False
    return True


def read(path: Path) -> Winner | None:
    """A winner; None where there is none, and with a `CacheWarning` where it is no use."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _note(f"{path.name} cannot be read ({error}); the planner's tiles are taken")
        return None
    try:
        tiles = {str(kernel): Tile(**fields) for kernel, fields in record.pop("tiles").items()}
        winner = Winner(tiles, **record)
    except (AttributeError, KeyError, TypeError):
        _note(f"{path.name} holds no tiles; the planner's are taken")
        return None
    if winner.version != __version__:
        _note(f"{path.name} is of flashgen {winner.version}; tune again for {__version__}")
        return None
    return winner


def _can_have(spec: AttentionSpec, arch: str, which: str, tiles: Mapping[str, Tile]) -> bool:
    """Whether the plan can be made with these tiles; a file can hold anything."""
    try:
        if which == "forward":
            plan(spec, arch, tile=tiles["forward"])
        else:
            plan_backward(spec, arch, deterministic=which == "deterministic", tiles=tiles)
    except (PlanError, KeyError, TypeError) as error:
        _note(f"tiles that were measured for {spec.name} are no use: {error}")
        return False
    return True


def _note(text: str) -> None:
    warnings.warn(text, CacheWarning, stacklevel=3)
