"""`flashgen.load_export`: the callable of an exported spec, without the compiler."""

from __future__ import annotations

import os
from pathlib import Path

from flashgen.exported.folder import open_folder
from flashgen.exported.program import ExportedProgram
from flashgen.ops.api import Attention
from flashgen.ops.registration import register_hashed_name


class ExportedAttention(Attention):
    """The callable of an export: `flashgen.ops.Attention`, with kernels from a folder.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        folder = open_folder(path)
        record, *_ = folder.manifest.programs
        super().__init__(ExportedProgram(folder, record, record.signature.dropout))
        self.path = folder.path
        # Programs of torch.export look operators up by their names.
        for each in folder.manifest.programs:
            register_hashed_name(ExportedProgram(folder, each, each.signature.dropout))

    def __repr__(self) -> str:
        return f"flashgen.load_export({str(self.path)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return load_export, (str(self.path),)


def load_export(folder: str | os.PathLike[str]) -> ExportedAttention:
    """The callable of a spec that ``flashgen export`` wrote to a folder.

    It has the arguments and results of `flashgen.attention`, for calls that were exported, and
    needs neither sympy nor jinja2 nor NVRTC. CUDA tensors run on their GPU, CPU tensors in the
    emulator. It registers the operator under the name that it has in the process that exported it,
    ``torch.ops.flashgen.<name>``, so that programs of torch.export which hold it can be loaded.

    Args:
        folder: the folder that holds manifest.json.

    Returns:
        A callable; `flashgen.ops.Attention.__call__` lists its arguments. ``backend="tiled"``,
        another ``arch``, and arguments whose kernels were not exported raise InputError.

    Raises:
        ExportError: there is no export, it has another version, or a file is missing, changed or
            outside of the folder.
        LaunchError: of a call: no kernel is for the GPU, or its driver is older than the compiler.
    """
    return ExportedAttention(Path(folder))
