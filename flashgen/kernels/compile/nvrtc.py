"""The interface to NVRTC: CUDA C++ text to a cubin, its PTX and the log.

It uses the low-level bindings, which need neither a GPU nor a driver, and imports them at the first
compilation. The architecture ``sm_XX`` yields cubin and PTX from the same compilation. NVRTC
releases the GIL, so that threads compile in parallel.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.shared.errors import CompileError

# --minimal: without textures and the CUDA runtime, whose declarations take time in every kernel.
# --device-as-default-execution-space: up to release 13.0, NVRTC takes a lambda with a parameter of
# type auto, inside of a kernel, for a function of the host; it is one of the device, as with nvcc.
# -lineinfo: messages, profilers and the emulator name lines of the emitted file.
# -v and --warn-on-spills: the log of a success contains registers, stack and spills.
BASE_OPTIONS = (
    "--std=c++17",
    "--minimal",
    "--device-as-default-execution-space",
    "-lineinfo",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
)


@dataclass(frozen=True)
class NvrtcOutput:
    """The results of a compilation: the cubin, the PTX it was assembled from, and the log."""

    cubin: bytes
    ptx: str
    log: str


class NvrtcRejection(Exception):
    """NVRTC rejected the program; with its status, its log, and the PTX if there is any.

    It is internal: `kernels.compile` raises a `CompileError` with lines of the source instead.
    """

    def __init__(self, status: str, log: str, ptx: str) -> None:
        self.status, self.log, self.ptx = status, log, ptx
        super().__init__(f"{status}\n{log}")


@functools.lru_cache(maxsize=1)
def _bindings() -> Any:
    """The module cuda.bindings.nvrtc, with its library loaded.

    Raises:
        CompileError: a package is missing.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise missing("cuda-bindings", error) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        # Covers cuda.pathfinder's DynamicLibNotFoundError, a RuntimeError.
        raise missing("nvidia-cuda-nvrtc", error) from error
    return nvrtc


def missing(package: str, error: Exception) -> CompileError:
    return CompileError(
        f"NVRTC, the CUDA compiler library, cannot be loaded: {package} is missing",
        where="cuda.bindings.nvrtc",
        numbers=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}",
        way_out='pip install "flashgen[cuda]", or "flashgen[cuda12]" for a driver before 580',
    )


@functools.lru_cache(maxsize=1)
def version() -> str:
    """Version of NVRTC as it enters cache keys, such as "13.5 build 141163664".

    NVRTC reports only its major and minor version; the size of the library distinguishes patch
    releases.
    """
    _, major, minor = _bindings().nvrtcVersion()
    text, path = f"{major}.{minor}", library()
    try:
        return f"{text} build {path.stat().st_size}" if path is not None else text
    except OSError:
        return text


@functools.lru_cache(maxsize=1)
def library() -> Path | None:
    """The path of NVRTC's library; None where it is not known."""
    try:
        from cuda import pathfinder

        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, OSError, RuntimeError):
        return None
    return Path(path) if path else None


def supported_archs() -> tuple[str, ...]:
    """The base architectures that this NVRTC supports, such as ("sm_75", "sm_80", ...)."""
    _, numbers = _bindings().nvrtcGetSupportedArchs()
    return tuple(f"sm_{number}" for number in numbers)


def keeps_name(program: str) -> bool:
    """Whether line information has a path of a source as it is, so that profilers open the file.

    NVRTC writes octal numbers in place of what is not printable ASCII, and does not assemble line
    information with a quotation mark.
    """
    return re.fullmatch(r"[ !#-~]*", program) is not None


def run(source: str, *, program: str, arch: str, options: tuple[str, ...] = ()) -> NvrtcOutput:
    """Compiles one translation unit.

    Args:
        program: the path that messages and line information give to the source; see `keeps_name`.
        arch: "sm_80", "sm_90a", ...
        options: NVRTC options besides `BASE_OPTIONS`.

    Raises:
        NvrtcRejection: NVRTC rejected the program or an option.
        CompileError: NVRTC is missing.
    """
    nvrtc = _bindings()
    status, handle = nvrtc.nvrtcCreateProgram(source.encode(), program.encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise NvrtcRejection(status.name, "", "")
    try:
        flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *BASE_OPTIONS, *options)]
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(flags), flags)
        log = _fetch(nvrtc, handle, "ProgramLog").decode(errors="replace").strip("\0\n ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # If only the assembler failed, the PTX exists and shows the cause.
            ptx = _fetch(nvrtc, handle, "PTX").decode(errors="replace").rstrip("\0")
            raise NvrtcRejection(status.name, log, ptx)
        cubin = _fetch(nvrtc, handle, "CUBIN")
        ptx = _fetch(nvrtc, handle, "PTX").decode().rstrip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return NvrtcOutput(cubin, ptx, log)


def _fetch(nvrtc: Any, handle: Any, kind: str) -> bytes:
    """Reads the log, the PTX or the cubin; empty when there is none."""
    size_status, size = getattr(nvrtc, f"nvrtcGet{kind}Size")(handle)
    # An empty text has size 1, and all bytes objects of one space are the same object.
    if size_status != nvrtc.nvrtcResult.NVRTC_SUCCESS or size < 2:
        return b""
    # The bindings write into the bytes object.
    buffer = b" " * size
    (status,) = getattr(nvrtc, f"nvrtcGet{kind}")(handle, buffer)
    return buffer if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else b""


def name_the_file(ptx: str, program: str, filename: str) -> str:
    """Replaces the compiler's path of the source by the emitted file's name in ``.file`` lines.

    NVRTC writes absolute paths there, and some releases add the time stamp and size of the file.
    The PTX must not depend on the machine.
    """

    def shorten(match: re.Match[str]) -> str:
        path = match[2]
        is_emitted = path == program or Path(path).name == filename
        return f'{match[1]}"{filename}"' if is_emitted else match[0]

    return re.sub(r'^(\s*\.file\s+\d+\s+)"([^"]*)".*$', shorten, ptx, flags=re.MULTILINE)
