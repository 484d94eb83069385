"""The cache in folders that another user owns or can write, and metadata of another form."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen.kernels.compile import Binary, cache, compile, forget
from flashgen.kernels.compile.cache import CacheWarning
from flashgen.kernels.compile.ownership import hindrance
from flashgen.shared.errors import FlashgenError
from tests.support.compile_sources import TOY
from tests.support.tiers import slow

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")

SUPERUSER = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can change owners")


def build() -> Binary:
    return compile(TOY, filename="toy.cu", kernel="toy", arch="sm_80")


def again() -> Binary:
    forget()
    return build()


def owned_by_another(path: Path) -> None:
    os.chown(path, 4321, 4321)


def writable(mode: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.chmod(mode)

    return change


FOREIGN = [
    pytest.param(owned_by_another, "belongs to another user", marks=SUPERUSER, id="owner"),
    pytest.param(writable(0o770), "other users can write", id="group"),
    pytest.param(writable(0o702), "other users can write", id="others"),
    pytest.param(writable(0o1777), "other users can write", id="like_tmp"),
]


@pytest.mark.parametrize(("change", "why"), FOREIGN)
def test_a_folder_of_others_is_neither_read_nor_written_and_is_named(
    change: Callable[[Path], None], why: str, fresh_cache: Path
) -> None:
    first = build()
    change(fresh_cache)
    before = sorted(fresh_cache.rglob("*"))
    with pytest.warns(CacheWarning, match=f"{fresh_cache} is not used.*{why}"):
        found = again()
    assert not found.from_cache
    assert found.folder is None
    assert found.cubin.startswith(b"\x7fELF")
    assert sorted(fresh_cache.rglob("*")) == before
    os.chown(fresh_cache, os.geteuid(), os.getegid())
    fresh_cache.chmod(0o755)
    assert again().folder == first.folder


@pytest.mark.parametrize(("change", "why"), FOREIGN)
@pytest.mark.parametrize("name", ["", slow("meta.json"), "toy.cubin", slow("toy.ptx")])
def test_an_entry_of_others_is_named_and_compiled_again(
    change: Callable[[Path], None], why: str, name: str, fresh_cache: Path
) -> None:
    first = build()
    assert first.folder is not None
    change(first.folder / name)
    with pytest.warns(CacheWarning, match=why) as notes:
        found = again()
    assert first.folder.name in str(notes[0].message)
    assert not found.from_cache
    assert again().from_cache  # the entry was replaced


@pytest.mark.parametrize("name", ["", "meta.json", "toy.cubin"])
def test_an_entry_that_is_a_link_is_not_used(name: str, fresh_cache: Path) -> None:
    first = build()
    assert first.folder is not None
    place = first.folder / name
    place.rename(fresh_cache.parent / "elsewhere")
    place.symlink_to(fresh_cache.parent / "elsewhere")
    with pytest.warns(CacheWarning, match="is a link"):
        assert not again().from_cache
    assert again().from_cache


def test_a_pipe_in_place_of_a_file_does_not_hang(fresh_cache: Path) -> None:
    first = build()
    assert first.folder is not None
    (first.folder / "meta.json").unlink()
    os.mkfifo(first.folder / "meta.json")
    assert not cache.entries(fresh_cache)[0].intact
    with pytest.warns(CacheWarning, match="is no file"):
        assert not again().from_cache


def test_a_folder_above_that_everyone_can_write_lets_others_replace_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(shared / "cache"))
    shared.chmod(0o777)
    with pytest.warns(CacheWarning, match=f"other users can write {shared}"):
        assert again().folder is None
    assert not (shared / "cache").exists()
    shared.chmod(0o1777)  # as /tmp: nobody renames what is another's
    assert again().folder is not None


def test_a_lock_that_is_a_link_is_neither_followed_nor_truncated(fresh_cache: Path) -> None:
    key = build().key
    lock = fresh_cache / "locks" / f"{cache.lock_of(key)}.lock"
    (fresh_cache.parent / "precious").write_text("mine")
    lock.unlink(missing_ok=True)
    lock.symlink_to(fresh_cache.parent / "precious")
    with pytest.warns(CacheWarning, match="is a link"), cache.locked(fresh_cache, key[:2]) as held:
        assert not held
    assert (fresh_cache.parent / "precious").read_text() == "mine"


def test_a_link_to_a_folder_is_followed_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert hindrance(tmp_path / "link") == ""
    (tmp_path / "real").chmod(0o777)
    assert "other users can write" in hindrance(tmp_path / "link")
    (tmp_path / "real").chmod(0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "real")
    assert str(tmp_path / "open") in hindrance(tmp_path / "open" / "link")


def test_folders_and_files_are_for_their_user_alone_whatever_the_umask_is(
    fresh_cache: Path,
) -> None:
    before = os.umask(0)
    try:
        first = build()
        assert cache.replace_text(fresh_cache / "tuned" / "gpu" / "a.json", "{}") is None
    finally:
        os.umask(before)
    assert again().folder == first.folder
    for path in (fresh_cache, *fresh_cache.rglob("*")):
        is_lock = path.suffix == ".lock"
        assert is_lock or path.stat().st_mode & 0o022 == 0, path


def test_doctor_names_a_cache_that_is_not_used(fresh_cache: Path) -> None:
    from flashgen.tools.doctor.machine import _cache

    build()
    fresh_cache.chmod(0o777)
    with pytest.raises(FlashgenError, match="is not used") as error:
        _cache()
    assert "FLASHGEN_CACHE_DIR" in error.value.way_out


# ---- metadata


def sealed(values: Any) -> str:
    text = json.dumps(values, sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n"


def without(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {name: values[name] for name in values if name not in names}


def with_values(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: {**values, **changes}


FIELDS = [
    *("key", "files", "filename", "kernel", "arch", "options", "nvrtc", "resources"),
    *("warnings", "log"),
]
META: list[Callable[[dict[str, Any]], Any]] = [
    *(without(name) for name in FIELDS),
    *(with_values(**{name: None}) for name in FIELDS),
    *(with_values(**{name: 3.5}) for name in FIELDS),
    *(with_values(**{name: {"a": [1]}}) for name in FIELDS),
    with_values(more=1),
    with_values(resources={"registers": 1}),
    with_values(files={}),
    with_values(files={"../../secret": "0" * 64}),
    with_values(filename="../../toy.cu"),
    lambda values: None,
    lambda values: [],
    lambda values: {},
    lambda values: "text",
]


def test_metadata_of_another_form_is_damaged_and_compiled_again(fresh_cache: Path) -> None:
    folder = build().folder
    assert folder is not None
    kept = shutil.copytree(folder, fresh_cache.parent / "kept")
    values = json.loads((folder / "meta.json").read_text().partition("\n")[2])
    texts = [sealed(change(values)) for change in META]
    texts += ["0\n" + "[" * 200_000, "0\n" + '{"a":' * 200_000 + "1" + "}" * 200_000, "null"]
    texts += [f"0\n{sealed(values)}", "", '0\n{"a": NaN}', "0\n{}\udc80"]
    for text in texts:
        (folder / "meta.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        assert cache.read(folder, values["key"], quiet=True) is None, text[:200]
        with pytest.warns(CacheWarning, match=r"damaged meta\.json"):
            assert cache.read(folder, values["key"]) is None
        assert not cache.entries(fresh_cache)[0].intact
    with pytest.warns(CacheWarning, match=r"damaged meta\.json; compiling again"):
        assert not again().from_cache
    assert (folder / "toy.cubin").read_bytes() == (kept / "toy.cubin").read_bytes()
    assert again().from_cache
