"""The packages of flashgen's peers, for a GPU machine that reaches no package index.

    python benchmarks/peers.py --fetch DIR       download, strip, compress, and cut into pieces
    python benchmarks/peers.py --unpack DIR      join the pieces, and say what PYTHONPATH needs
    python benchmarks/peers.py --check           what can be imported here, and why the rest cannot

Each group of packages is one archive, cut into pieces of at most 40 MiB that can be copied one by
one; ``manifest.json`` has their sizes and hashes. An archive whose pieces are not all there is left
out.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PYTHON = "3.12"
"""Of the GPU machines; they run Linux on x86-64."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
PIECE = 40 * 2**20
MANIFEST = "manifest.json"
SITE = "site"

PINS: dict[str, dict[str, str]] = {
    "fa4": {
        "flash-attn-4": "4.0.0b36",
        "quack-kernels": "0.6.5",
        "nvidia-cutlass-dsl": "4.8.1",
        "nvidia-cutlass-dsl-libs-base": "4.8.1",
        "nvidia-cutlass-dsl-libs-core": "4.8.1",
        "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
        "apache-tvm-ffi": "0.1.15.post2",
        "torch-c-dlpack-ext": "0.1.5",
    },
    "cudnn": {"nvidia-cudnn-frontend": "1.32.0"},
    "flashinfer": {"flashinfer-python": "0.7.2.post1", "nvidia-ml-py": "13.580.82"},
}
"""archive -> package -> version. cudnn's flex_attention and FlashInfer need those of "fa4" too."""

DROPPED = (
    "*.a",
    "*/stubs/*",
    "nvidia_cutlass_dsl/dsl_packages/iket/*.so",
    "torch_c_dlpack_ext/*-cpu.so",
    "torch_c_dlpack_ext/*torch2[4-9]-*",
    "flashinfer/data/cutlass/*",
    "flashinfer/data/csrc/*/*",
)
"""Files that attention on a Hopper GPU needs none of."""

ROOTS = ("", "nvidia_cutlass_dsl/dsl_packages")
"""Folders in the unpacked one from which Python imports; wheels say so in .pth files, which
PYTHONPATH does not read."""


class PeersError(Exception):
    """A package or a piece is missing or is not what the manifest says."""


# ---- on a machine with an index ------------------------------------------------------------------


def download(package: str, version: str, folder: Path, python: str = PYTHON) -> Path:
    """The wheel of a package, of exactly this version.

    Raises:
        PeersError: pip cannot get it.
    """
    abi = f"cp{python.replace('.', '')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [word for name in (abi, "abi3", "none") for word in ("--abi", name)]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    with tempfile.TemporaryDirectory(dir=folder) as apart:
        done = subprocess.run(
            [*command, "--dest", apart, f"{package}=={version}"], capture_output=True, text=True
        )
        wheels = list(Path(apart).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise PeersError(f"{package} {version}: {reason}")
        return wheels[0].rename(folder / wheels[0].name)


def is_kept(name: str) -> bool:
    return not name.endswith("/") and not any(fnmatch(name, pattern) for pattern in DROPPED)


def archive_of(wheels: Sequence[Path]) -> bytes:
    """The files of some wheels that are kept, as one compressed archive; always the same bytes."""
    packed = io.BytesIO()
    # Machine code is most of it: the filter makes addresses of calls repeat.
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]
    with (
        lzma.open(packed, "wb", filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as source:
                for name in filter(is_kept, source.namelist()):
                    data = source.read(name)
                    entry = tarfile.TarInfo(name)
                    entry.size, entry.mode = len(data), 0o644
                    tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def pieces_of(name: str, data: bytes, size: int = PIECE) -> Iterator[tuple[str, bytes]]:
    for number, first in enumerate(range(0, len(data), size)):
        yield f"{name}.tar.xz.{number:02}", data[first : first + size]


def fetch(
    folder: Path,
    pins: Mapping[str, Mapping[str, str]] = PINS,
    python: str = PYTHON,
    get: Callable[..., Path] = download,
    size: int = PIECE,
) -> dict[str, Any]:
    """Adds the pieces of every archive to a folder; the manifest, with archives of earlier fetches.

    Raises:
        PeersError: a package cannot be had, or the folder is for another Python.
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {"python": python, "archives": {}}
    if (folder / MANIFEST).exists():
        manifest = manifest_in(folder)
    if manifest["python"] != python:
        raise PeersError(
            f"{folder} is for Python {manifest['python']}: another folder for {python}"
        )
    for name, packages in pins.items():
        with tempfile.TemporaryDirectory() as wheels:
            wheels_by_package = {
                p: get(p, version, Path(wheels), python) for p, version in packages.items()
            }
            data = archive_of(list(wheels_by_package.values()))
            entry: dict[str, Any] = {
                "sha256": digest(data),
                "packages": {
                    package: {"version": packages[package], "bytes": wheel.stat().st_size}
                    for package, wheel in wheels_by_package.items()
                },
                "pieces": {},
            }
        for old in manifest["archives"].get(name, {"pieces": ()})["pieces"]:
            (folder / old).unlink(missing_ok=True)
        for piece, part in pieces_of(name, data, size):
            (folder / piece).write_bytes(part)
            entry["pieces"][piece] = {"bytes": len(part), "sha256": digest(part)}
        manifest["archives"][name] = entry
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def manifest_in(folder: Path) -> dict[str, Any]:
    """What `fetch` has written about a folder.

    Raises:
        PeersError: it has written nothing there, or the manifest is damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed(manifest)  # which reads every field
    except (FileNotFoundError, NotADirectoryError):
        way_out = f"--fetch {folder} makes it, with the pieces"
        raise PeersError(f"{folder} has no {MANIFEST}: {way_out}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        way_out = "copy it again, or remove it and fetch again"
        raise PeersError(f"{folder / MANIFEST} is damaged ({error!r}): {way_out}") from None
    return manifest


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listed(manifest: Mapping[str, Any]) -> str:
    """Packages and pieces with their sizes."""
    lines = [f"for Python {manifest['python']}, Linux, x86-64"]
    for entry in manifest["archives"].values():
        for package, wheel in entry["packages"].items():
            lines.append(f"  {package + ' ' + wheel['version']:<44} wheel {wheel['bytes']:>12,} B")
        lines += [f"{file:<46} piece {p['bytes']:>12,} B" for file, p in entry["pieces"].items()]
    total = sum(p["bytes"] for e in manifest["archives"].values() for p in e["pieces"].values())
    return "\n".join([*lines, f"{'together':<46}       {total:>12,} B"])


# ---- on the GPU machine --------------------------------------------------------------------------


def archive_in(folder: Path, entry: Mapping[str, Any]) -> bytes:
    """An archive from its pieces.

    Raises:
        PeersError: a piece is missing, or is not the one that the manifest was written for.
    """
    parts = []
    for piece, record in entry["pieces"].items():
        if not (folder / piece).is_file():
            raise PeersError(f"{piece} is not there")
        part = (folder / piece).read_bytes()
        if digest(part) != record.get("sha256"):
            raise PeersError(f"{piece} has another hash: {len(part)} of {record['bytes']} bytes")
        parts.append(part)
    return b"".join(parts)


def unpack(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Unpacks every whole archive into ``folder``/site: folders for PYTHONPATH, and what is not
    whole with the reason.

    Raises:
        PeersError: it is no folder that `fetch` has filled.
    """
    manifest = manifest_in(folder)
    site, left_out = folder / SITE, {}
    if site.exists():  # what was unpacked from other pieces
        shutil.rmtree(site)
    if manifest["python"] != f"{sys.version_info[0]}.{sys.version_info[1]}":
        print(f"the packages are for Python {manifest['python']}; this is {sys.version.split()[0]}")
    for name, entry in manifest["archives"].items():
        try:
            data = archive_in(folder, entry)
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
                tar.extractall(site, filter="data")
        except (PeersError, tarfile.TarError) as reason:
            left_out[name] = str(reason)
    return [site / root for root in ROOTS if (site / root).is_dir()], left_out


def check() -> list[str]:
    """A line for each library: its version, or the reason why it cannot be imported.

    Each is imported in a process of its own, since a library that was built for another one may
    take the process with it.
    """
    from benchmarks.suite.contenders.libraries import (
        LIBRARIES,
        NOT_INSTALLED,
        cudnn_text,
        named,
    )

    lines = [f"Python {sys.version.split()[0]}, {named('torch')}, {cudnn_text()}"]
    for library in LIBRARIES:
        lines.append(f"{library.text:<38} {library.module:<50} {outcome(library.module)}")
    lacking = [
        name
        for name, packages in PINS.items()
        if any(named(package).endswith(NOT_INSTALLED) for package in packages)
    ]
    if lacking:
        lines.append(f"--fetch and --unpack bring packages that are missing: {', '.join(lacking)}")
    return lines


def outcome(module: str) -> str:
    """What becomes of an import, in words."""
    program = f"import importlib; importlib.import_module({module!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "its import takes longer than 120 s"
    if done.returncode == 0:
        return "can be imported"
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"cannot be imported: {last.removeprefix('ModuleNotFoundError: ')}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_mutually_exclusive_group(required=True)
    fetched = "download, strip and compress the packages into pieces that can be copied one by one"
    actions.add_argument("--fetch", type=Path, metavar="DIR", help=fetched)
    unpacked = "join the pieces on the GPU machine, and print the PYTHONPATH that they need"
    actions.add_argument("--unpack", type=Path, metavar="DIR", help=unpacked)
    checked = "say for each package whether this Python can import it, and why not"
    actions.add_argument("--check", action="store_true", help=checked)
    python = f"with --fetch: the version on the GPU machine; {PYTHON} by default"
    parser.add_argument("--python", default=PYTHON, metavar="X.Y", help=python)
    only = f"with --fetch: some archives of {', '.join(PINS)}"
    parser.add_argument(
        "--only", choices=PINS, nargs="+", default=[*PINS], metavar="NAME", help=only
    )
    options = parser.parse_args(arguments)
    try:
        if options.fetch:
            pins = {name: PINS[name] for name in options.only}
            print(listed(fetch(options.fetch, pins, options.python)))
        elif options.unpack:
            roots, left_out = unpack(options.unpack)
            for name, reason in left_out.items():
                print(f"{name} is left out: {reason}")
            print("export PYTHONPATH=" + ":".join(str(root.resolve()) for root in roots))
            return 1 if left_out else 0
        else:
            print("\n".join(check()))
    except (PeersError, OSError) as reason:
        print(reason)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
