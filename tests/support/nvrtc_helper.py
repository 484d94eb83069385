"""Compiles small CUDA kernels to PTX for the tests; needs NVRTC but neither a GPU nor a driver."""

from __future__ import annotations

import functools
from collections.abc import Sequence


def compile_ptx(source: str, arch: str = "sm_80", options: Sequence[str] = ()) -> str:
    """PTX of header-free CUDA C++, always with -lineinfo; the program is called ``test.cu``."""
    return _compile(source, arch, tuple(options))


@functools.cache
def _compile(source: str, arch: str, options: tuple[str, ...]) -> str:
    from cuda.bindings import nvrtc

    def check(code: object) -> None:
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {code}")

    code, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    check(code)
    virtual = arch.replace("sm_", "compute_")
    flags = [f"--gpu-architecture={virtual}".encode(), b"-lineinfo"]
    flags += [option.encode() for option in options]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode(errors="replace"))
    code, size = nvrtc.nvrtcGetPTXSize(program)
    check(code)
    text = b" " * size
    (code,) = nvrtc.nvrtcGetPTX(program, text)
    check(code)
    nvrtc.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0 ").decode()
