"""Builds `native.cpp` into the cache, and loads it where it was built for this process.

The library is built by `flashgen build-native` alone. Its name has a hash of everything that it
depends on: the source, torch, Python, the compiler's flags. A library of another key is another
file, which is never loaded.
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


def flags() -> tuple[str, ...]:
    """The flags of the compiler, with those of the environment variable CXXFLAGS."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return (*_FLAGS, f"-DTORCH_EXTENSION_NAME={_NAME}", abi, *config.cxx()[1])


@functools.lru_cache(maxsize=8)
def key(flags: tuple[str, ...]) -> str:
    """A hash of all that determines the library, in 24 hexadecimal digits."""
    parts = (
        SOURCE.read_text(),
        f"{torch.__version__} {torch.version.git_version} {os.path.dirname(torch.__file__)}",
        f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')} {platform.machine()}",
        *flags,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def path() -> Path | None:
    """The file of the library for this process, which need not exist; None without a cache."""
    root = config.cache_dir()
    return None if root is None else root / cache.NATIVE / f"{_NAME}.{key(flags())}.so"


def missing() -> str:
    """Why the native part is not used, as the end of a sentence; "" where it is."""
    if not config.native():
        return "FLASHGEN_NATIVE is 0"
    file = path()
    if file is None:
        return "the cache is off (FLASHGEN_CACHE_DIR=off)"
    if not file.exists():
        others = any(file.parent.glob(f"{_NAME}.*.so")) if file.parent.is_dir() else False
        older = "; what is built is for another version of flashgen, torch, Python or the compiler"
        return f"it is not built{older if others else ''}: run `flashgen build-native`"
    return hindrance(file.parent) or _foreign(file)


def _foreign(file: Path) -> str:
    try:
        contents(file)
    except NotOurs as error:
        return str(error)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    return ""


_loaded: dict[Path, ModuleType] = {}


def load() -> ModuleType | None:
    """The library, loaded once; None where `missing` has a reason."""
    file = path()
    if file in _loaded and config.native():
        return _loaded[file]
    if file is None or not file.exists() or missing():
        return None
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None, "the loader is given"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    _loaded[file] = module
    return module


def compiler() -> str:
    """The C++ compiler: that of the environment variable CXX, else c++, g++ or clang++.

    Raises:
        CompileError: there is none.
    """
    given, _ = config.cxx()
    names = [given] if given else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise CompileError(
            "the native part cannot be built without a C++ compiler",
            where="flashgen build-native",
            numbers=f"not found: {', '.join(names)}; calls are made in Python",
            way_out="install g++ 11 or newer, or set CXX to a compiler of C++20",
        )
    return found


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
        *(chosen, *flags(), *(f"-I{folder}" for folder in folders), str(SOURCE)),
        *("-o", str(output), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"),
    ]


def build() -> Path:
    """Compiles the library into the cache, and returns its file.

    Raises:
        CompileError: there is no compiler, it fails, or the cache cannot be written.
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
            temporary.chmod(0o700)  # whatever the umask is
    except OSError as error:
        raise _unwritable(error.strerror or str(error)) from None
    except subprocess.TimeoutExpired:
        raise _unwritable(f"the compiler runs longer than {_SECONDS:.0f} s") from None
    return file


def _compile(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        first = [text for text in done.stderr.splitlines() if "error" in text][:3]
        raise CompileError(
            "the C++ compiler rejects the native part",
            where=line[0],
            numbers="; ".join(first) or f"exit status {done.returncode}",
            way_out="use g++ 11 or newer (CXX=...), or go on without it: calls are made in Python",
        )


def _unwritable(reason: str) -> CompileError:
    return CompileError(
        "the native part cannot be kept",
        where="flashgen build-native",
        numbers=f"{config.cache_dir()}: {reason}",
        way_out="set FLASHGEN_CACHE_DIR to a folder that is yours alone",
    )
