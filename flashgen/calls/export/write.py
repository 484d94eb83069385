"""Writes an export: kernels, sources for C, and the manifest.

Only files that an earlier export wrote are replaced or removed: the files in its manifest, with
the contents that it names. All files are first written to a folder of their own inside of the
export's, ``.export-...`` with the new manifest first, and then moved. An export that is interrupted
leaves that folder, whose manifest tells the next export which files it wrote.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flashgen.calls.export.c_source import c_sources, why_no_sources
from flashgen.calls.export.collect import Collection, ExportRequest
from flashgen.calls.exported.manifest import MANIFEST, FileRecord, Manifest, stored
from flashgen.kernels.compile import nvrtc
from flashgen.kernels.planner.models.fitted_common import HEADS_PER_TILE_GAIN
from flashgen.shared.arch import facts
from flashgen.shared.errors import InputError
from flashgen.version import __version__

_STAGED = ".export-"


def export(request: ExportRequest, folder: Path) -> Manifest:
    """Compiles all kernels of a spec's calls and writes them to a folder.

    Files of an earlier export in the folder are removed, and no others.

    Returns:
        The manifest that was written.

    Raises:
        InputError: the folder holds other files and no export, or an edited file of one, or a file
            with the name of a new one; it cannot be written; or an option does not suit the spec.
        SpecError, PlanError, RenderError, CompileError: as `flashgen.build`.
    """
    for arch in request.archs:
        facts(arch)  # an unknown one is refused before anything is compiled
    Destination(folder).earlier({})
    collection = Collection(request)
    programs = collection.programs()
    manifest = Manifest(
        flashgen=__version__,
        nvrtc=nvrtc.version().partition(" ")[0],
        command=request.command,
        archs=request.archs,
        heads_gain=HEADS_PER_TILE_GAIN,
        kernels=tuple(collection.records),
        programs=programs,
        files={},
    )
    if not why_no_sources(programs[0]):
        collection.files |= {name: text.encode() for name, text in c_sources(manifest).items()}
    records = {
        name: FileRecord(hashlib.sha256(data).hexdigest(), len(data))
        for name, data in sorted(collection.files.items())
    }
    manifest = replace(manifest, files=records)
    Destination(folder).write(collection.files, manifest)
    return manifest


class Destination:
    """The folder of an export, in which only an export's files are touched."""

    def __init__(self, folder: Path) -> None:
        self._folder_option = folder
        # A link to a folder is the user's choice; links inside of it are not followed.
        self._folder = Path(os.path.realpath(folder))

    def write(self, files: Mapping[str, bytes], manifest: Manifest) -> None:
        """Writes an export in place of an earlier one."""
        earlier = self.earlier(manifest.files)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            staged = self._stage({MANIFEST: manifest.text().encode(), **files})
            # Until the last file is moved, the folder holds a damaged export.
            for name in sorted(earlier - {*files, MANIFEST}):
                (self._folder / name).unlink()
            for name in (*files, MANIFEST):
                (self._folder / name).parent.mkdir(exist_ok=True)
                os.replace(staged / name, self._folder / name)
            shutil.rmtree(staged, ignore_errors=True)
            self._remove_staged()
        except OSError as error:
            raise self._refusal(
                "the export cannot be written",
                f"{error.strerror or error}: {error.filename}",
                "a folder that can be written, on a disk with room for it",
            ) from None

    def earlier(self, names: Mapping[str, object]) -> set[str]:
        """The files of an earlier export that exist still, with its manifest.

        Args:
            names: the files that will be written.

        Raises:
            InputError: something else has the name of a file that would be written or removed.
        """
        digests = self._earlier_digests()
        if not digests and self._other_entries():
            raise self._refusal(
                "the folder holds files of something else",
                f"{len(self._other_entries())} entries, such as {self._other_entries()[0]!r}; "
                f"an export has its own {MANIFEST}",
                "a new folder, or one that holds an export, which is replaced",
            )
        files = set()
        for name in sorted({*digests, *names, MANIFEST}):
            path = self._folder / name
            blocked = os.path.lexists(path.parent) and not _is_folder(path.parent)
            if blocked or os.path.lexists(path):
                data = None if blocked else _contents(path)
                if data is None or hashlib.sha256(data).hexdigest() not in digests.get(name, ()):
                    raise self._refusal(
                        "a file is in the way that no export wrote, or that was changed since",
                        f"{path.parent.name if blocked else name}: it would be replaced or removed",
                        "move it to another place, or export to a new folder",
                    )
                files.add(name)
        return files

    def _earlier_digests(self) -> dict[str, set[str]]:
        """The digests of files that earlier exports wrote here, or began to write, by name."""
        known_digests: dict[str, set[str]] = {}
        for path in (self._folder / MANIFEST, *self._staged(MANIFEST)):
            text = _contents(path)
            with suppress(ValueError):
                record = stored(text or b"")
                if record.is_whole:
                    digests = {name: file.sha256 for name, file in record.files.items()}
                    digests[MANIFEST] = hashlib.sha256(text or b"").hexdigest()
                    for name, digest in digests.items():
                        known_digests.setdefault(name, set()).add(digest)
        return known_digests

    def _other_entries(self) -> list[str]:
        if not self._folder.exists():
            return []
        if not self._folder.is_dir():
            return [self._folder.name]
        names = (path.name for path in self._folder.iterdir())
        return sorted(name for name in names if not name.startswith(_STAGED))

    def _staged(self, name: str = "") -> list[Path]:
        """The folders that interrupted exports left, or a file in each."""
        folders = sorted(self._folder.glob(f"{_STAGED}*"))
        return [path / name for path in folders if _is_folder(path)]

    def _stage(self, files: Mapping[str, bytes]) -> Path:
        """Writes files, in this order, to a new folder inside of the export's."""
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=self._folder))
        try:
            for name, data in files.items():
                (staged / name).parent.mkdir(exist_ok=True)
                (staged / name).write_bytes(data)
        except BaseException:  # Ctrl-C too
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return staged

    def _remove_staged(self) -> None:
        """Removes what interrupted exports left: the files that their manifests name."""
        for staged in self._staged():
            text = _contents(staged / MANIFEST)
            with suppress(ValueError, OSError):
                names = stored(text or b"").files
                for path in (*map(staged.joinpath, names), staged / MANIFEST):
                    path.unlink(missing_ok=True)
                for folder in (*{(staged / name).parent for name in names} - {staged}, staged):
                    folder.rmdir()

    def _refusal(self, what: str, numbers: str, way_out: str) -> InputError:
        where = f"option -o {str(self._folder_option)!r}"
        return InputError(what, where=where, numbers=numbers, way_out=way_out)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _contents(path: Path) -> bytes | None:
    """The bytes of a file; None for a link, a pipe and what cannot be read."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else None
    except OSError:
        return None
