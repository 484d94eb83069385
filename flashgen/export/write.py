"""Writes an export: kernels, sources for C, and the manifest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from flashgen.arch import facts
from flashgen.compile import nvrtc
from flashgen.errors import InputError
from flashgen.export.c_source import c_sources, why_no_sources
from flashgen.export.collect import Collection, ExportRequest
from flashgen.exported.manifest import KERNELS, MANIFEST, FileRecord, Manifest
from flashgen.planner.models.fitted_common import HEADS_PER_TILE_GAIN
from flashgen.version import __version__


def export(request: ExportRequest, folder: Path) -> Manifest:
    """Compiles all kernels of a spec's calls and writes them to a folder.

    Files of an earlier export in the folder are removed.

    Returns:
        The manifest that was written.

    Raises:
        InputError: the folder holds other files, or an option does not suit the spec.
        SpecError, PlanError, RenderError, CompileError: as `flashgen.build`.
    """
    for arch in request.archs:
        facts(arch)  # an unknown one is refused before anything is compiled
    _check_folder(folder)
    found = Collection(request)
    programs = tuple(map(found.program, request.variants()))
    manifest = Manifest(
        flashgen=__version__,
        nvrtc=nvrtc.version().partition(" ")[0],
        command=request.command,
        archs=request.archs,
        heads_gain=HEADS_PER_TILE_GAIN,
        kernels=tuple(found.records),
        programs=programs,
        files={},
    )
    if not why_no_sources(programs[0]):
        found.files |= {name: text.encode() for name, text in c_sources(manifest).items()}
    records = {
        name: FileRecord(hashlib.sha256(data).hexdigest(), len(data))
        for name, data in sorted(found.files.items())
    }
    manifest = replace(manifest, files=records)
    _clear(folder)
    for name, data in found.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    # Last: a folder without a manifest is no export.
    (folder / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    return manifest


def _check_folder(folder: Path) -> None:
    """Raises InputError for a folder that is neither empty nor an earlier export."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        others = sorted(path.name for path in folder.iterdir())
        raise InputError(
            "the folder holds files of something else",
            where=f"option -o {folder}",
            numbers=f"{len(others)} entries, such as {others[0]}; an export has {MANIFEST}",
            way_out="a new folder, or one that holds an export, which is replaced",
        )


def _clear(folder: Path) -> None:
    """Removes an earlier export."""
    (folder / MANIFEST).unlink(missing_ok=True)
    old = [*folder.glob("*.[ch]"), *folder.glob("*.bin")]
    for suffix in ("cu", "ptx", "cubin"):
        old += (folder / KERNELS).glob(f"*.{suffix}")
    for path in old:
        path.unlink()
