"""Manifests that are damaged, or written by someone else: each is an ExportError."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.exported.folder import open_folder
from flashgen.calls.exported.manifest import digest_of
from flashgen.shared.errors import ExportError, FlashgenError
from tests.support.exports import exported
from tests.support.tiers import slow

OF_EACH_TYPE = (None, True, 0, -1, 2**70, 10**400, 1.5, float("nan"), "x\ny", "\ud800", [], [1])
OF_EACH_TYPE += ({}, {"a": 1})
REMOVED = object()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported("sliding_window"), tmp_path / "export"))


def values_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def write(folder: Path, values: Any, *, sealed: bool = True) -> None:
    """Writes a manifest, with the digest of its fields where ``sealed``."""
    if sealed:
        fields = {name: values[name] for name in values if name not in ("format", "sha256")}
        values = {**values, "sha256": digest_of(fields)}
    (folder / "manifest.json").write_text(json.dumps(values))


def places(values: Any, to: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The place of every field and element."""
    parts = values.items() if isinstance(values, dict) else ()
    for key, part in enumerate(values) if isinstance(values, list) else parts:
        yield (*to, key)
        yield from places(part, (*to, key))


def changed(values: Any, place: tuple[str | int, ...], value: Any) -> Any:
    values = copy.deepcopy(values)
    holder = values
    for key in place[:-1]:
        holder = holder[key]
    if value is REMOVED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return values


def at(values: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        values = values[key]
    return values


def assert_refused(folder: Path) -> ExportError:
    with pytest.raises(ExportError) as error:
        open_folder(folder)
    assert len(str(error.value).splitlines()) == 4, error.value
    return error.value


@pytest.mark.parametrize(
    ("name", "options", "share"),
    [
        ("sliding_window", {}, 32),
        slow("sliding_window", {}, 1),
        slow("document", {"backward": True}, 40),
        slow("bigbird", {}, 4),
        slow("block_diagonal", {"calls": ("split_size",)}, 20),
    ],
)
def test_a_value_of_another_type_in_any_place_is_refused(
    name: str, options: dict[str, Any], share: int, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported(name, **options), tmp_path / "export"))
    values = values_of(folder)
    open_folder(folder)
    cases = [(place, value) for place in places(values) for value in (REMOVED, *OF_EACH_TYPE)]
    for place, value in random.Random(0).sample(cases, len(cases) // share):
        old = at(values, place)
        # Values that the type of the place allows: a sequence with an element fewer, any number in
        # place of a number, and all that may be absent.
        free = isinstance(place[-1], int) or {"files", "tables"} & set(place[:-1])
        of_parts = value is REMOVED and free
        same = type(value) is type(old) or {type(value), type(old)} <= {int, float}
        optional = {"narrow", "scale", "minimum", "sums_tile", "sink", "layout"} & set(place)
        if not (of_parts or same or optional):
            write(folder, changed(values, place, value), sealed=place != ("sha256",))
            assert_refused(folder)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("programs",), []),
        (("archs",), []),
        (("archs", 0), "sm_8"),
        (("kernels",), []),
        (("kernels", 0, "stem"), "../../other"),
        (("kernels", 0, "facts", "block_q"), 0),
        (("kernels", 0, "facts", "threads"), -128),
        (("kernels", 0, "facts", "kernel"), "backwards"),
        (("kernels", 0, "facts", "params", 0, "ctype"), "double"),
        (("programs", 0, "forward"), []),
        (("programs", 0, "forward", 0, "kernel"), 7),
        (("programs", 0, "forward", 0, "kernel"), -1),
        (("programs", 0, "forward", 0, "heads"), 0),
        (("programs", 0, "signature", "name"), "a b"),
        (("programs", 0, "signature", "name"), "x(Tensor q) -> Tensor"),
        (("programs", 0, "signature", "head_dim"), 8),
        (("programs", 0, "signature", "dtype"), "float8"),
        (("programs", 0, "signature", "kv_dtype"), "int8"),
        (("programs", 0, "signature", "scalars", 0, "name"), "q-offset"),
        (("programs", 0, "signature", "scalars", 0, "dtype"), "int7"),
        (("programs", 0, "narrow"), [{}]),
        (("programs", 0, "no_backward"), ["one"]),
        (("command",), "flashgen export\nrm -r /"),
        (("heads_gain",), 0.5),
        (("format",), True),
        (("format",), 1.0),
    ],
)
def test_values_that_do_not_fit_together_are_refused(
    place: tuple[str | int, ...], value: Any, folder: Path
) -> None:
    write(folder, changed(values_of(folder), place, value))
    assert_refused(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '"export"',
        "[" * 200_000,
        '{"format": 1, "sha256": "x", "files": ' + "[" * 900 + "]" * 900 + "}",
        '{"a":' * 200_000 + "1" + "}" * 200_000,
        '{"format": 1, "sha256": NaN}',
        '{"format": 1, "sha256": "x", "heads_gain": Infinity}',
        '{"format": ' + "9" * 5000 + "}",
        b"\xff\xfe{",
    ],
)
def test_text_that_is_no_manifest_is_refused(text: str | bytes, folder: Path) -> None:
    (folder / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    error = assert_refused(folder)
    assert error.where == str(folder / "manifest.json")


# ---- files outside of the folder


@pytest.mark.parametrize("name", ["../secret.c", "kernels/../../secret.c", "{absolute}", "a\\b.c"])
def test_a_manifest_cannot_name_a_file_outside_of_its_folder(name: str, folder: Path) -> None:
    secret = folder.parent / "secret.c"
    secret.write_text("secret")
    values = values_of(folder)
    record = values["files"].pop("sliding_window.c")
    values["files"][name.format(absolute=secret)] = record
    write(folder, values)
    assert "no file of an export has the name" in assert_refused(folder).numbers


@pytest.mark.parametrize("name", ["sliding_window.c", "kernels", "manifest.json"])
def test_a_link_that_leads_out_of_the_folder_is_not_followed(name: str, folder: Path) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    assert "leads out of the folder" in assert_refused(folder).numbers


def test_a_link_to_the_folder_itself_is_followed(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert open_folder(folder.parent / "link").path == folder


def test_a_pipe_in_place_of_a_file_does_not_hang(folder: Path) -> None:
    for name in ("sliding_window.c", "manifest.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert "it is no file" in assert_refused(folder).numbers


def test_the_error_is_one_of_launches_too(folder: Path) -> None:
    shutil.rmtree(folder)
    with pytest.raises(fg.LaunchError, match="no export") as error:
        fg.load_export(folder)
    assert type(error.value) is fg.ExportError


def test_the_command_that_makes_a_missing_export_is_one_for_a_folder_of_any_name() -> None:
    with pytest.raises(fg.ExportError) as error:
        fg.load_export("no folder")
    assert error.value.way_out.startswith("flashgen export SPEC -o 'no folder', or ")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_every_architecture_that_kernels_are_compiled_for_may_be_in_a_manifest(
    folder: Path, arch: str
) -> None:
    def renamed(values: Any) -> Any:
        if isinstance(values, dict):
            return {
                renamed(key): part if key == "path" else renamed(part)
                for key, part in values.items()
            }
        if isinstance(values, list):
            return [renamed(part) for part in values]
        return arch if values == "sm_80" else values

    write(folder, renamed(values_of(folder)))
    assert open_folder(folder).manifest.archs == (arch,)


@pytest.mark.parametrize("folder", [None, 3, ["folder"]])
def test_what_is_no_path_is_no_export(folder: Any) -> None:
    with pytest.raises(ExportError, match="is a path"):
        fg.load_export(folder)


def test_a_kernel_that_is_no_text_is_refused_where_it_is_read(folder: Path) -> None:
    values = values_of(folder)
    for name, record in values["files"].items():
        if name.endswith((".cu", ".ptx")):
            (folder / name).write_bytes(b"\xff\xfe")
            record |= {"sha256": hashlib.sha256(b"\xff\xfe").hexdigest(), "bytes": 2}
    write(folder, values)
    q, k, v = torch.randn(3, 1, 1, 8, 16).half()
    with pytest.raises(FlashgenError):
        fg.load_export(folder)(q, k, v, window=4)
