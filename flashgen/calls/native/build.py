"""Builds `native.cpp` into the cache, and loads it where it was built for this process.

The library is built by `flashgen build-native` alone, which replaces an earlier one. Its name has a
hash of what it must fit: the source, torch, Python. A library of another key is another file, which
is never loaded. Flags of the environment are no part of it: a process that loads the library need
not have those of the shell that built it. The SHA-256 of a library stands at its end: to load a
damaged one would end the process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from flashgen.kernels.compile import cache
from flashgen.kernels.compile.ownership import NotOurs, contents, hindrance, make_folder
from flashgen.shared import config
from flashgen.shared.errors import CompileError

SOURCE = Path(__file__).with_name("native.cpp")
_NAME = "flashgen_native"
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")
_SECONDS = 900.0
_SEAL = hashlib.sha256().digest_size


def flags() -> tuple[str, ...]:
    """The flags of the compiler, with the flags in the environment variable CXXFLAGS."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return (*_FLAGS, f"-DTORCH_EXTENSION_NAME={_NAME}", abi, *config.cxx()[1])


@functools.lru_cache(maxsize=1)
def key() -> str:
    """A hash of what the library must fit, in 24 hexadecimal digits."""
    parts = (
        SOURCE.read_text(encoding="utf-8"),
        f"{torch.__version__} {torch.version.git_version} {os.path.dirname(torch.__file__)}",
        f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')} {platform.machine()}",
        *_FLAGS,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def path() -> Path | None:
    """The file of the library for this process, which need not exist; None without a cache."""
    root = config.cache_dir()
    return None if root is None else root / cache.NATIVE / f"{_NAME}.{key()}.so"


_loaded: dict[Path, ModuleType] = {}


def missing() -> str:
    """Why the native part is not used, as the end of a sentence; "" where it is, and is loaded."""
    if not config.native():
        return "FLASHGEN_NATIVE is 0"
    if sys.platform == "win32":
        return "it is not for Windows"
    file = path()
    return "the cache is off (FLASHGEN_CACHE_DIR=off)" if file is None else _obstacle(file)


def load() -> ModuleType | None:
    """The library, loaded once; None where `missing` has a reason."""
    return None if missing() else _loaded.get(path() or Path())


def _obstacle(file: Path) -> str:
    """Why a library cannot be loaded; "" where it is loaded now."""
    if file in _loaded:
        return ""
    try:
        data = contents(file)
    except FileNotFoundError:
        has_others = any(file.parent.glob(f"{_NAME}.*.so"))
        older = "; what is built is for another flashgen, torch or Python"
        return f"it is not built{older if has_others else ''}: run `flashgen build-native`"
    except NotOurs as error:
        return str(error)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    if data != _sealed(data[:-_SEAL]):
        return f"{file.name} is damaged: run `flashgen build-native`"
    try:
        _loaded[file] = _imported(file)
    except ImportError as error:  # of another libc or compiler, in a folder without execution
        return f"{file.name} cannot be loaded ({error})"
    return ""


def _sealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def _imported(file: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None, "the loader is given"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compiler() -> list[str]:
    """The C++ compiler of the environment variable CXX, which may have arguments, else c++,
    g++ or clang++.

    Raises:
        CompileError: there is none, or none can be used on this system.
    """
    if sys.platform == "win32":
        raise CompileError(
            "the native part is not for Windows",
            where="flashgen build-native",
            numbers="it has the libraries of Linux; calls are made in Python",
            way_out="go on without it: results are the same",
        )
    words, _ = config.cxx()
    names = list(words[:1]) or ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise CompileError(
            "the native part cannot be built without a C++ compiler",
            where="flashgen build-native",
            numbers=f"not found: {', '.join(names)}; calls are made in Python",
            way_out="install g++ 11 or newer, or set CXX to a compiler of C++20",
        )
    return [path, *words[1:]]


def command(output: Path) -> list[str]:
    """The command that compiles the library.

    Raises:
        CompileError: there is no compiler, or headers of Python or torch are missing.
    """
    root = Path(torch.__file__).parent
    include = Path(sysconfig.get_path("include"))
    needed = (include / "Python.h", root / "include" / "torch" / "extension.h")
    lacking = [str(file) for file in needed if not file.exists()]
    chosen = compiler()
    if lacking:
        raise CompileError(
            "the native part cannot be built without the headers of Python and torch",
            where="flashgen build-native",
            numbers=f"missing: {', '.join(lacking)}; calls are made in Python",
            way_out="install the development files of Python (python3-dev), and torch from a wheel",
        )
    folders = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include", include)
    return [
        *(*chosen, *flags(), *(f"-I{folder}" for folder in folders), str(SOURCE)),
        *("-o", str(output), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]


def build() -> Path:
    """Compiles the library into the cache, and returns its file.

    Raises:
        CompileError: there is no compiler, it fails, the cache cannot be written, or the library
            cannot be loaded.
    """
    file = path()
    if file is None:
        raise _unwritable("FLASHGEN_CACHE_DIR is off")
    try:
        make_folder(file.parent)
        reason = hindrance(file.parent)
        if reason:
            raise _unwritable(reason)
        with cache.replacing(file) as temporary:
            _compile(command(temporary))
            temporary.write_bytes(_sealed(temporary.read_bytes()))
            temporary.chmod(0o700)  # whatever the umask is
    except OSError as error:
        raise _unwritable(error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise _unwritable(f"the compiler runs longer than {_SECONDS:.0f} s") from None
    _loaded.pop(file, None)
    reason = _obstacle(file)
    if reason:
        raise _rejected(reason)
    return file


def _compile(line: list[str]) -> None:
    try:
        done = subprocess.run(
            line,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except OSError as error:
        raise _rejected(f"{line[0]} cannot be run ({error.strerror})") from None
    if done.returncode:
        first = [text for text in done.stderr.splitlines() if "error" in text][:3]
        raise _rejected("; ".join(first) or f"exit status {done.returncode}")


def _rejected(numbers: str) -> CompileError:
    return CompileError(
        "the C++ compiler does not make the native part",
        where=" ".join(compiler()),
        numbers=numbers,
        way_out="use g++ 11 or newer (CXX=...), or go on without it: calls are made in Python",
    )


def _unwritable(reason: str) -> CompileError:
    return CompileError(
        "the native part cannot be kept",
        where="flashgen build-native",
        numbers=f"{config.cache_dir()}: {reason}",
        way_out="set FLASHGEN_CACHE_DIR to a folder that is yours alone",
    )
