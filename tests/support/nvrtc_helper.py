"""Compiles small CUDA kernels to PTX for the tests; needs NVRTC but neither a GPU nor a driver."""

from __future__ import annotations

import functools


@functools.cache
def compile_ptx(
    source: str, arch: str = "sm_80", options: tuple[str, ...] = (), program: str = "test.cu"
) -> str:
    """PTX of header-free CUDA C++, always with -lineinfo.

    Not with -G: after it NVRTC 13.5 optimises every later program of the process less, so that
    kernels spill.
    """
    from cuda.bindings import nvrtc

    def check(code: object) -> None:
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {code}")

    code, program = nvrtc.nvrtcCreateProgram(source.encode(), program.encode(), 0, [], [])
    check(code)
    virtual = arch.replace("sm_", "compute_")
    flags = [f"--gpu-architecture={virtual}".encode(), b"-lineinfo", b"--minimal"]
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
