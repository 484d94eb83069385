"""examples/export: the CMake project builds with an export and runs on a recording driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.exported_c import FAKE, WARNINGS, compiler, cuda_headers
from tests.support.exports import exported
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "export"

# What main.c calls besides what the launches need.
HOST = """
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
CUresult CUDAAPI cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(uintptr_t)(device + 1);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) { (void)context; return CUDA_SUCCESS; }
CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned flags) {
  *stream = (CUstream)(uintptr_t)(7 + flags);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) { (void)stream; return CUDA_SUCCESS; }
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *at, size_t bytes) {
  *at = (CUdeviceptr)(uintptr_t)calloc(1, bytes);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
  memcpy((void *)(uintptr_t)to, from, bytes);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
  memcpy(to, (void *)(uintptr_t)from, bytes);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGetErrorString(CUresult result, const char **text) {
  *text = result ? "failed" : "success";
  return CUDA_SUCCESS;
}
"""


def fake_driver(folder: Path, name: str) -> Path:
    """A library that has the driver's functions and records launches."""
    (folder / "host.c").write_text(HOST)
    sources = (str(FAKE), str(folder / "host.c"))
    made = (compiler(), *WARNINGS, "-isystem", str(cuda_headers()), "-shared", "-fPIC", *sources)
    subprocess.run([*made, "-o", str(folder / name)], check=True)
    return folder / name


def built(build: Path, **options: object) -> Path:
    """The program of the example."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    defined = [f"-D{name}={value}" for name, value in options.items()]
    flags = f"-DCMAKE_C_FLAGS={' '.join(WARNINGS[1:])}"
    configure = [cmake, "-S", str(EXAMPLE), "-B", str(build), flags, *defined]
    for command in (configure, [cmake, "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "example"


@pytest.mark.slow
def test_the_project_builds_and_launches(tmp_path: Path) -> None:
    folder, build = exported("causal"), tmp_path / "build"
    driver = fake_driver(tmp_path, "libcuda.so")
    built(build, EXPORT=folder, CUDA_INCLUDE=cuda_headers(), CUDA_DRIVER=driver)
    run = subprocess.run([str(build / "example"), str(folder)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "lse 0.0000 0.0000 0.0000 0.0000\n"  # nothing computes
    wrong = subprocess.run([str(build / "example"), str(tmp_path)], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "cubin of the export cannot be read" in wrong.stderr


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libcuda.so.1 is Linux's")
def test_the_project_builds_without_a_driver_and_runs_with_one(tmp_path: Path) -> None:
    folder, without = exported("causal"), {"CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit": "ON"}
    program = built(tmp_path / "build", EXPORT=folder, CUDA_INCLUDE=cuda_headers(), **without)
    command, clean = [str(program), str(folder)], {"PATH": os.environ["PATH"]}
    alone = subprocess.run(command, capture_output=True, text=True, env=clean)
    if alone.returncode == 127:  # there is no driver here either
        assert "libcuda.so.1" in alone.stderr
    for library, status, text in (
        (program.parent, 1, "cuInit: an error of the driver"),
        (fake_driver(tmp_path, "libcuda.so.1").parent, 0, "lse 0.0000"),
    ):
        there = {**clean, "LD_LIBRARY_PATH": str(library)}
        run = subprocess.run(command, capture_output=True, text=True, env=there)
        assert run.returncode == status
        assert text in run.stdout + run.stderr
