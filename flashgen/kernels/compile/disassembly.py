"""Machine code as text, by nvdisasm of the package nvidia-cuda-nvdisasm or of a CUDA toolkit."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashgen.shared.errors import CompileError

MISSING = "nvdisasm is neither in this Python's packages nor on the PATH"
INSTALL = 'pip install "flashgen[sass]"'


def find_nvdisasm() -> str | None:
    """The disassembler of the package nvidia-cuda-nvdisasm, else the one on the PATH."""
    suffix = sysconfig.get_config_var("EXE") or ""
    for key in ("purelib", "platlib"):
        root = Path(sysconfig.get_path(key)) / "nvidia"
        paths = sorted(root.glob(f"*/bin/nvdisasm{suffix}"))
        if paths:
            return str(paths[-1])
    return shutil.which("nvdisasm")


def disassembled(cubin: bytes, kernel: str, arch: str, options: Sequence[str] = ("-c",)) -> str:
    """The machine code of a cubin as nvdisasm prints it.

    Args:
        cubin: the file.
        kernel, arch: its kernel and its architecture, for messages.
        options: options of nvdisasm: "-c" for code alone, "-gi" for the lines of the source too.

    Raises:
        CompileError: there is no disassembler, or it fails.
    """
    tool = find_nvdisasm()
    if tool is None:
        raise CompileError(
            "there is no disassembler",
            where=f"nvdisasm on {kernel} for {arch}",
            numbers=MISSING,
            way_out=f"{INSTALL}; PTX needs no disassembler",
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kernel}.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [tool, *options, file], capture_output=True, encoding="utf-8", check=False
        )
    if done.returncode != 0:
        raise CompileError(
            "the disassembler does not read this cubin",
            where=f"nvdisasm on {kernel} for {arch}",
            numbers=f"status {done.returncode}: {done.stderr.strip()[:400] or 'no message'}",
            way_out="an nvidia-cuda-nvdisasm that is as new as nvidia-cuda-nvrtc",
        )
    return done.stdout
