"""examples/export: the CMake project builds with an export and runs on a recording driver."""

from __future__ import annotations

import shutil
import subprocess
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


@pytest.mark.slow
def test_the_project_builds_and_launches(tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    (tmp_path / "host.c").write_text(HOST)
    driver = tmp_path / "libcuda.so"
    sources = (str(FAKE), str(tmp_path / "host.c"))
    made = (compiler(), *WARNINGS, "-isystem", str(cuda_headers()), "-shared", "-fPIC", *sources)
    subprocess.run([*made, "-o", str(driver)], check=True)
    folder, build = exported("causal"), tmp_path / "build"
    options = {"EXPORT": folder, "CUDA_INCLUDE": cuda_headers(), "CUDA_DRIVER": driver}
    defined = [f"-D{name}={value}" for name, value in options.items()]
    flags = f"-DCMAKE_C_FLAGS={' '.join(WARNINGS[1:])}"
    configure = [cmake, "-S", str(EXAMPLE), "-B", str(build), flags, *defined]
    for command in (configure, [cmake, "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    run = subprocess.run([str(build / "example"), str(folder)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "lse 0.0000 0.0000 0.0000 0.0000\n"  # nothing computes
    wrong = subprocess.run([str(build / "example"), str(tmp_path)], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "cubin of the export cannot be read" in wrong.stderr
