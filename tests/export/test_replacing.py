"""flashgen.calls.export into a folder that holds something: what is replaced, kept and refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.calls.export import ExportRequest, export
from flashgen.calls.export.write import Destination
from flashgen.calls.exported.folder import open_folder
from flashgen.calls.exported.manifest import FileRecord, Manifest, digest_of
from flashgen.shared.errors import InputError
from tests.support.exports import exported, spec_of

REQUEST = ExportRequest(spec=spec_of("sliding_window"), archs=("sm_80",))
OTHER = ExportRequest(spec=spec_of("sliding_window").replace(name="other"), archs=("sm_80",))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def own_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported("sliding_window"), tmp_path / "export"))


MANIFESTS = {
    "of a web page": '{"name": "my site", "icons": []}',
    "of an extension": '{"manifest_version": 3, "version": "1.0", "files": {"notes.c": {}}}',
    "not JSON": "{",
    "empty": "",
    "null": "null",
    "deep": "[" * 200_000,
    "of an export, changed": json.dumps(
        {"format": 1, "sha256": "0" * 64, "files": {"notes.c": {"sha256": "0", "bytes": 4}}}
    ),
}


@pytest.mark.parametrize("text", MANIFESTS.values(), ids=MANIFESTS)
def test_a_folder_with_the_manifest_of_something_else_keeps_every_file(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "kernels").mkdir()
    for name in ("notes.c", "notes.h", "data.bin", "kernels/mine.cu", "kernels/mine.cubin"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "manifest.json").write_text(text)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="files of something else"):
        export(REQUEST, tmp_path)
    assert contents(tmp_path) == before


def test_an_export_keeps_the_files_beside_an_earlier_one(tmp_path: Path) -> None:
    folder = own_copy(tmp_path)
    mine = {"notes.c": b"1", "data.bin": b"2", "kernels/mine.cu": b"3", "kernels/mine.ptx": b"4"}
    for name, data in mine.items():
        (folder / name).write_bytes(data)
    export(OTHER, folder)
    found = contents(folder)
    assert {name: found[name] for name in mine} == mine
    assert set(found) == {*mine, *open_folder(folder).manifest.files, "manifest.json"}
    assert not [name for name in found if "sliding" in name]


def edited(folder: Path) -> str:
    path = next((folder / "kernels").glob("*.cu"))
    path.write_text(path.read_text() + "// my change\n")
    return f"kernels/{path.name}"


def has_the_name_of_a_new_file(folder: Path) -> str:
    (folder / "other.c").write_text("int mine;\n")
    return "other.c"


def is_a_link(folder: Path) -> str:
    path = folder / "sliding_window.c"
    path.rename(folder.parent / "elsewhere.c")
    path.symlink_to(folder.parent / "elsewhere.c")
    return path.name


def kernels_are_a_link(folder: Path) -> str:
    (folder / "kernels").rename(folder.parent / "elsewhere")
    (folder / "kernels").symlink_to(folder.parent / "elsewhere")
    return "kernels"


@pytest.mark.parametrize(
    "change", [edited, has_the_name_of_a_new_file, is_a_link, kernels_are_a_link]
)
def test_a_file_that_no_export_wrote_is_named_and_stays(
    change: Callable[[Path], str], tmp_path: Path
) -> None:
    folder = own_copy(tmp_path)
    name = change(folder)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="in the way") as error:
        export(OTHER, folder)
    assert error.value.numbers.startswith(f"{name}:")
    assert contents(tmp_path) == before


def test_a_file_that_has_another_name_too_keeps_its_bytes_there(tmp_path: Path) -> None:
    folder = own_copy(tmp_path)
    source = folder / "sliding_window.c"
    os.link(source, tmp_path / "mine.c")
    before = source.read_bytes()
    spec = spec_of("sliding_window").replace(scale=0.5)
    export(ExportRequest(spec=spec, archs=("sm_80",)), folder)
    assert source.read_bytes() != before
    assert (tmp_path / "mine.c").read_bytes() == before


def test_a_manifest_that_names_files_of_others_removes_none(tmp_path: Path) -> None:
    folder = own_copy(tmp_path)
    (tmp_path / "precious.c").write_text("mine")
    data = json.loads((folder / "manifest.json").read_text())
    for name in ("../precious.c", str(tmp_path / "precious.c"), "kernels/../../precious.c"):
        files = {name: {"sha256": "0" * 64, "bytes": 4}}
        values = {key: data[key] for key in data if key not in ("format", "sha256")}
        values["files"] = files
        text = json.dumps({**values, "format": 1, "sha256": digest_of(values)})
        (folder / "manifest.json").write_text(text)
        with pytest.raises(InputError, match="files of something else"):
            export(OTHER, folder)
        assert (tmp_path / "precious.c").read_text() == "mine"


def files_and_manifest(*names: str) -> tuple[dict[str, bytes], Manifest]:
    files = {name: f"{names}: {name}".encode() for name in names}
    records = {
        name: FileRecord(hashlib.sha256(data).hexdigest(), len(data))
        for name, data in files.items()
    }
    return files, replace(open_folder(exported("sliding_window")).manifest, files=records)


class Stopped(BaseException):
    """Ends an export where a signal would."""


class Interrupted:
    """Inside, an export stops before its step of this number, and clears nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, left: int) -> None:
        write, unlink, move = Path.write_bytes, Path.unlink, os.replace
        self.left = left

        def write_bytes(path: Path, data: bytes) -> int:
            if self.left == 0:
                write(path, data[: len(data) // 2])
            self.step()
            return write(path, data)

        def removed(path: Path, missing_ok: bool = False) -> None:
            self.step()
            unlink(path, missing_ok)

        def moved(source: Path, to: Path) -> None:
            self.step()
            move(source, to)

        patch.setattr(Path, "write_bytes", write_bytes)
        patch.setattr(Path, "unlink", removed)
        patch.setattr(os, "replace", moved)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stopped


@pytest.mark.parametrize("earlier", [False, True])
def test_an_export_that_was_interrupted_at_any_step_does_not_block_the_next_one(
    earlier: bool, tmp_path: Path
) -> None:
    old = files_and_manifest("old.c", "old.h", "same.c", "kernels/old.cu", "kernels/same.cu")
    new = files_and_manifest("new.c", "same.c", "kernels/new.cu", "kernels/same.cu")
    last = files_and_manifest("last.c", "same.c", "kernels/same.cu")
    done, steps = False, 0
    while not done:
        folder = tmp_path / str(steps)
        if earlier:
            Destination(folder).write(*old)
            (folder / "notes.c").write_text("mine")
        with pytest.MonkeyPatch.context() as patch:
            Interrupted(patch, steps)
            with suppress(Stopped):
                Destination(folder).write(*new)
                done = True
        Destination(folder).write(*last)
        found = contents(folder)
        mine = {"notes.c": b"mine"} if earlier else {}
        manifest = {"manifest.json": last[1].text().encode()}
        ours = {name: data for name, data in found.items() if not name.startswith(".export-")}
        assert ours == {**last[0], **manifest, **mine}, steps
        # Half of a manifest names no files, so that it stays; nothing else is left.
        assert {Path(name).name for name in found.keys() - ours} <= {"manifest.json"}, steps
        steps += 1
    assert steps > 10


def test_an_export_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    folder = own_copy(tmp_path)
    before = contents(folder)
    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.raises(InputError, match="cannot be written") as error:
        export(OTHER, folder)
    assert "No space left" in error.value.numbers
    assert contents(folder) == before
    open_folder(folder)
