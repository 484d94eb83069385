"""The folder of an export: its manifest and its files, checked against their digests."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import shlex
from pathlib import Path
from typing import Any, NoReturn

from flashgen.calls.exported.manifest import (
    FORMAT,
    KERNELS,
    MANIFEST,
    KernelRecord,
    Manifest,
    stored,
)
from flashgen.calls.exported.validity import checked
from flashgen.calls.launch import Gpu, fitting_versions, loads
from flashgen.kernels.compile import Binary
from flashgen.shared.arch import runs_on, version_of
from flashgen.shared.call import CallRanges
from flashgen.shared.errors import ExportError, LaunchError
from flashgen.shared.launch_facts import LaunchBlocks, LaunchFacts
from flashgen.shared.plain import from_plain
from flashgen.version import __version__


class ExportedKernel:
    """A kernel of an export.

    Attributes:
        facts: the facts that launches need.
        binary: its cubin and its PTX.
    """

    def __init__(self, record: KernelRecord, binary: Binary) -> None:
        self.facts: LaunchFacts = record.facts
        self.binary = binary

    @property
    def plan(self) -> LaunchFacts:
        """The facts, in place of the plan that made them."""
        return self.facts

    def blocks(
        self, work_tiles: int, sms: int | None = None, requested: int | None = None
    ) -> LaunchBlocks:
        """The blocks of a launch, as `flashgen.shared.launch_facts.LaunchRules.blocks_of`."""
        return self.facts.blocks_of(work_tiles, sms, requested)

    def integers(self, ranges: CallRanges) -> str:
        """The width of integers of mask and score."""
        return f"{self.facts.integer_bits}-bit, as exported"


class Folder:
    """An export on disk, whose files are as its manifest says.

    Attributes:
        path: the folder.
        manifest: the manifest of the folder.
        digest: the digest of the manifest.
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        self._files = {name: _checked(path, name, manifest) for name in manifest.files}

    def read(self, name: str) -> bytes:
        """The contents of a file, as they were when the folder was loaded."""
        return self._files[name]

    @functools.cache  # noqa: B019  (folders live as long as their operators)
    def kernel(self, number: int) -> ExportedKernel:
        """A kernel by its number in the manifest."""
        record = self.manifest.kernels[number]
        stem = f"{KERNELS}/{record.stem}"
        binary = Binary(
            kernel=record.facts.name,
            arch=record.facts.arch,
            filename=f"{record.stem}.cu",
            source=self.read(f"{stem}.cu").decode(errors="replace"),
            cubin=self.read(f"{stem}.cubin"),
            ptx=self.read(f"{stem}.ptx").decode(errors="replace"),  # the parser refuses it
            resources=record.resources,
            warnings=(),
            log="",
            seconds=0.0,
            from_cache=True,
            key=self.manifest.files[f"{stem}.cubin"].sha256,
            folder=self.path,
        )
        return ExportedKernel(record, binary)

    def check_gpu(self, gpu: Gpu) -> str:
        """The architecture of the export whose kernels a GPU runs, its own before an older one.

        Raises:
            LaunchError: no kernel is for this GPU, or its driver is older than their compiler.
        """
        manifest = self.manifest
        fitting = [arch for arch in manifest.archs if runs_on(arch, gpu.capability)]
        if not fitting:
            self._refuse(
                "the export has no kernels for this GPU",
                f"CUDA device {gpu.index}, {gpu.name}",
                f"exported for {', '.join(manifest.archs)}; the device is {gpu.arch}",
                f"{manifest.command} with --arch {gpu.arch}",
            )
        needed = max(record.cuda for record in manifest.kernels)
        if not loads(gpu.cuda, needed):
            self._refuse(
                "the driver is older than the compiler of the export",
                f"CUDA device {gpu.index}, {gpu.name}",
                f"compiled by NVRTC {manifest.nvrtc}; the driver supports CUDA "
                f"{gpu.cuda[0]}.{gpu.cuda[1]}",
                fitting_versions(needed, gpu.cuda),
            )
        return max(fitting, key=version_of)

    def _refuse(self, what: str, where: str, numbers: str, way_out: str) -> NoReturn:
        raise LaunchError(what, where=where, numbers=numbers, way_out=way_out)


def open_folder(folder: str | os.PathLike[str]) -> Folder:
    """Reads a folder and checks it.

    Raises:
        ExportError: there is no export, it has another version, or a file is missing, changed or
            outside of the folder.
    """
    path = Path(os.path.realpath(folder))
    file = path / MANIFEST
    try:
        text = _contents(path, MANIFEST)
    except OSError as error:
        raise ExportError(
            "there is no export in this folder",
            where=str(folder),
            numbers=f"{MANIFEST} cannot be read: {error.strerror or error}",
            way_out=f"flashgen export SPEC -o {shlex.quote(str(folder))}, or the folder that holds "
            f"{MANIFEST}",
        ) from None
    try:
        stored_manifest = stored(text)
    except ValueError as error:
        raise _damaged(file, f"it is not the JSON of an export: {error}", "") from None
    command, release = (_shown(stored_manifest.data.get(name)) for name in ("command", "flashgen"))
    if stored_manifest.version != FORMAT:
        raise ExportError(
            "the export has another version than this release reads",
            where=str(file),
            numbers=f"format {stored_manifest.version}, of flashgen {release!r}; flashgen "
            f"{__version__} reads format {FORMAT}",
            way_out=f"export again: {command or 'flashgen export SPEC -o DIR'}"
            + (f"; or pip install flashgen=={release}" if release not in ("", __version__) else ""),
        )
    if not stored_manifest.is_whole:
        raise _damaged(file, "its digest is not that of its contents", command)
    try:
        manifest = checked(from_plain(Manifest, stored_manifest.data))
        assert stored_manifest.files == manifest.files
    except ValueError as error:
        raise _damaged(file, str(error), command) from None
    return Folder(path, manifest, stored_manifest.digest)


def _contents(folder: Path, name: str) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: it cannot be read, or a link leads out of the folder.
    """
    path = Path(os.path.realpath(folder / name))
    if not path.is_relative_to(folder):
        raise OSError(errno.EPERM, "a link leads out of the folder")
    if path.exists() and not path.is_file():  # a pipe would wait for its other end
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def _checked(path: Path, name: str, manifest: Manifest) -> bytes:
    record = manifest.files[name]
    try:
        data = _contents(path, name)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _damaged(path / name, f"it cannot be read: {reason}", manifest.command) from None
    digest = hashlib.sha256(data).hexdigest()
    if (digest, len(data)) != (record.sha256, record.bytes):
        difference = (
            f"{len(data):,} B with sha256 {digest[:12]}...; {MANIFEST} has {record.bytes:,} B "
        )
        raise _damaged(path / name, f"{difference}with {record.sha256[:12]}...", manifest.command)
    return data


def _shown(value: Any) -> str:
    """A text of a manifest that may be damaged, for an error; "" where it is no line of text."""
    return value if isinstance(value, str) and value.isprintable() else ""


def _damaged(file: Path, numbers: str, command: str) -> ExportError:
    again = f"export again to a new folder: {command or 'flashgen export SPEC -o DIR'}"
    return ExportError(
        "a file of the export is damaged",
        where=str(file),
        numbers=numbers,
        way_out=f"copy the folder again, or {again}",
    )
