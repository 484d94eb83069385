"""The kernel cache: content keys, one compilation among many processes, checksums."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.kernels import compile as compiler
from flashgen.kernels.compile import Binary, cache, compile, forget, nvrtc
from flashgen.kernels.compile.cache import CacheWarning
from tests.support.compile_sources import SPILLING, STACKED, TOY


def build(source: str = TOY, kernel: str = "toy", arch: str = "sm_80") -> Binary:
    return compile(source, filename=f"{kernel}.cu", kernel=kernel, arch=arch)


def same(a: Binary, b: Binary) -> bool:
    """Equal but for where they came from."""
    return replace(a, seconds=0.0, from_cache=True) == replace(b, seconds=0.0, from_cache=True)


def test_a_second_compile_comes_from_memory_and_a_later_process_from_disk(
    fresh_cache: Path,
) -> None:
    first = build()
    assert not first.from_cache
    again = build()
    assert again.from_cache
    forget()
    loaded = build()
    assert loaded.from_cache
    assert same(first, again)
    assert same(first, loaded)
    assert first.folder.is_relative_to(fresh_cache)


def test_an_entry_holds_source_cubin_ptx_and_what_the_compiler_said(fresh_cache: Path) -> None:
    binary = build(SPILLING, "spilling")
    files = {path.name for path in binary.folder.iterdir()}
    assert files == {"spilling.cu", "spilling.cubin", "spilling.ptx", "meta.json"}
    assert (binary.folder / "spilling.cu").read_text() == SPILLING
    assert (binary.folder / "spilling.cubin").read_bytes() == binary.cubin
    assert (binary.folder / "spilling.ptx").read_text() == binary.ptx
    meta = json.loads((binary.folder / "meta.json").read_text().partition("\n")[2])
    assert meta["resources"]["registers"] == binary.resources.registers
    assert meta["log"] == binary.log
    assert meta["nvrtc"] == nvrtc.version()
    forget()
    assert build(SPILLING, "spilling").warnings == binary.warnings


@pytest.mark.parametrize(
    "change",
    [
        {"source_text": TOY.replace("2.0f", "3.0f")},
        {"filename": "other.cu"},
        {"arch": "sm_86"},
        {"options": ("--fmad=false",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_decides_the_binary_is_in_the_key(
    fresh_cache: Path, change: dict[str, Any]
) -> None:
    base: dict[str, Any] = {
        "source_text": TOY,
        "filename": "toy.cu",
        "kernel": "toy",
        "arch": "sm_80",
        "options": (),
    }
    first = compile(**base)
    other = compile(**{**base, **change})
    assert not other.from_cache
    assert other.key != first.key
    assert compile(**base).key == first.key


def test_another_release_of_the_compiler_has_other_keys(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()
    monkeypatch.setattr(nvrtc, "version", lambda: "99.9 build 1")
    other = build()
    assert not other.from_cache
    assert other.key != first.key


def damage_meta(folder: Path) -> None:
    text = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(text.replace('"registers": ', '"registers": 1'))


def truncate(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return act


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate("toy.cubin"), "damaged toy.cubin"),
        (truncate("toy.ptx"), "damaged toy.ptx"),
        (truncate("toy.cu"), "damaged toy.cu"),
        (truncate("meta.json"), "damaged meta.json"),
        (damage_meta, "damaged meta.json"),
        (remove("toy.cubin"), "lacks toy.cubin"),
        (remove("meta.json"), "no meta.json"),
    ],
    ids=["cubin", "ptx", "source", "meta", "meta_number", "no_cubin", "no_meta"],
)
def test_a_damaged_entry_is_compiled_again_with_a_note(
    fresh_cache: Path, damage: Callable[[Path], None], says: str
) -> None:
    first = build()
    damage(first.folder)
    forget()
    with pytest.warns(CacheWarning, match=says) as notes:
        second = build()
    assert len(notes) == 1
    assert not second.from_cache
    assert same(first, second)
    forget()
    assert build().from_cache
    assert [path.name for path in fresh_cache.glob("tmp-*")] == []


def test_a_flipped_bit_in_a_cubin_never_reaches_the_caller(fresh_cache: Path) -> None:
    first = build()
    data = bytearray(first.cubin)
    data[len(data) // 2] ^= 1
    (first.folder / "toy.cubin").write_bytes(data)
    forget()
    with pytest.warns(CacheWarning, match=r"damaged toy\.cubin"):
        assert build().cubin == first.cubin


def test_an_entry_copied_under_another_key_is_not_believed(fresh_cache: Path) -> None:
    first, other = build(), build(arch="sm_86")
    for path in first.folder.iterdir():
        (other.folder / path.name).write_bytes(path.read_bytes())
    forget()
    with pytest.warns(CacheWarning, match="belongs to another key"):
        assert build(arch="sm_86").cubin == other.cubin


def test_a_cache_that_cannot_be_written_costs_a_warning_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "a_file"
    occupied.write_text("not a folder")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(occupied / "cache"))
    forget()
    with pytest.warns(CacheWarning, match="cannot be written"):
        binary = build()
    assert binary.resources.registers > 0
    assert binary.folder is None
    assert binary.ptx.count('"toy.cu"') == 1


def test_a_read_only_cache_is_still_read(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()

    # Not by permissions: the superuser, who runs many CI machines, is not bound by them.
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for owner, name in ((os, "utime"), (os, "replace"), (Path, "mkdir"), (Path, "write_bytes")):
        monkeypatch.setattr(owner, name, refuse)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = build()
    assert loaded.from_cache
    assert same(first, loaded)
    with pytest.warns(CacheWarning, match="Read-only file system"):
        missing = build(arch="sm_86")
    assert not missing.from_cache
    assert missing.folder is None


def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_room)
    with pytest.warns(CacheWarning, match="No space left on device"):
        binary = build()
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.folder is None
    assert [path.name for path in fresh_cache.iterdir()] == ["locks"]


def test_the_disk_cache_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    forget()
    first, second = build(), build()
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.folder is None


def _one_of_many(root: str, start: Any, results: Any) -> None:
    """What each process of the test below does."""
    os.environ["FLASHGEN_CACHE_DIR"] = root
    start.wait()
    binary = build(STACKED, "stacked")
    results.put((binary.from_cache, binary.cubin))


def test_many_processes_compile_a_missing_kernel_once(fresh_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    count = 3
    start, results = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=_one_of_many, args=(str(fresh_cache), start, results))
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert sorted(from_cache for from_cache, _ in answers) == [False, True, True]
    assert len({cubin for _, cubin in answers}) == 1
    assert len(cache.entries(fresh_cache)) == 1


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory_only"])
def test_many_threads_compile_a_missing_kernel_once(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    if not disk:
        monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    runs: list[str] = []
    real = nvrtc.run

    def counted(source: str, **names: Any) -> nvrtc.NvrtcOutput:
        runs.append(names["arch"])
        return real(source, **names)

    monkeypatch.setattr(nvrtc, "run", counted)
    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert runs == ["sm_80"]


def test_a_failed_compilation_is_not_kept(fresh_cache: Path) -> None:
    broken = TOY.replace("p.x", "p.z")
    for _ in range(2):
        with pytest.raises(compiler.CompileError):
            build(broken)
    assert cache.entries(fresh_cache) == []


def test_entries_are_listed_last_used_first(fresh_cache: Path) -> None:
    old, new = build(), build(arch="sm_90")
    os.utime(old.folder / "meta.json", (1, 1))
    listed = cache.entries(fresh_cache)
    assert [(entry.kernel, entry.arch) for entry in listed] == [("toy", "sm_90"), ("toy", "sm_80")]
    assert listed[0].filename == "toy.cu"
    assert listed[0].bytes == sum(p.stat().st_size for p in new.folder.iterdir())
    assert cache.size(fresh_cache) == sum(entry.bytes for entry in listed)
    # Loading an entry makes it the last used.
    forget()
    build()
    assert cache.entries(fresh_cache)[0].arch == "sm_80"


def test_prune_removes_the_old_the_damaged_and_what_does_not_fit(fresh_cache: Path) -> None:
    folders = []
    for days, arch in enumerate(["sm_80", "sm_86", "sm_89", "sm_90"]):
        folder = build(arch=arch).folder
        folders.append(folder)
        then = time.time() - days * 86_400 - 60
        os.utime(folder / "meta.json", (then, then))
    assert [e.arch for e in cache.prune(fresh_cache, max_age_days=2.5)] == ["sm_90"]
    (folders[1] / "meta.json").write_text("{}")
    assert [e.path for e in cache.prune(fresh_cache)] == [folders[1]]
    newest = cache.entries(fresh_cache)[0]
    assert [e.arch for e in cache.prune(fresh_cache, max_bytes=newest.bytes)] == ["sm_89"]
    assert [e.arch for e in cache.entries(fresh_cache)] == ["sm_80"]


def test_what_a_killed_process_left_is_never_read_and_swept_later(fresh_cache: Path) -> None:
    first = build()
    left = fresh_cache / "tmp-abc1_xyz"
    left.mkdir()
    (left / "toy.cubin").write_bytes(first.cubin[:100])
    assert len(cache.entries(fresh_cache)) == 1
    cache.prune(fresh_cache)
    assert left.exists()  # it may be another process at work
    os.utime(left, (1, 1))
    cache.prune(fresh_cache)
    assert not left.exists()
    assert first.folder.exists()


def test_clear_removes_what_is_ours_and_nothing_else(fresh_cache: Path) -> None:
    build()
    build(arch="sm_90")
    (fresh_cache / "notes.txt").write_text("the user's own")
    (fresh_cache / "photos").mkdir()
    (fresh_cache / "tmp-ofadead1").mkdir()
    theirs = ("tuned/guitar.json", "trust/fund.txt", "locks/doors.lock", "tmp-photos/1.png")
    for name in theirs:
        (fresh_cache / name).parent.mkdir(exist_ok=True)
        (fresh_cache / name).write_text("the user's own")
    assert cache.clear(fresh_cache) == 2
    found = {p.relative_to(fresh_cache).as_posix() for p in fresh_cache.rglob("*") if p.is_file()}
    assert found == {"notes.txt", *theirs}
    assert (fresh_cache / "photos").is_dir()
    forget()
    assert not build().from_cache


def test_an_absent_cache_is_empty(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert cache.entries(absent) == []
    assert cache.size(absent) == 0
    assert cache.clear(absent) == 0
    assert cache.prune(absent, max_bytes=0) == []
    assert not absent.exists()


def test_a_kernel_in_memory_is_found_in_under_a_millisecond(fresh_cache: Path) -> None:
    build(SPILLING, "spilling")
    assert min(build(SPILLING, "spilling").seconds for _ in range(20)) < 1e-3


def test_a_kernel_on_disk_is_loaded_in_under_20_ms(fresh_cache: Path) -> None:
    build(SPILLING, "spilling")

    def load() -> float:
        forget()
        return build(SPILLING, "spilling").seconds

    assert min(load() for _ in range(5)) < 0.020
