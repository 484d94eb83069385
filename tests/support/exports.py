"""Exports that tests share: made once per process."""

from __future__ import annotations

import atexit
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashgen as fg
from flashgen.calls.export import ExportRequest, export
from flashgen.calls.exported.manifest import Pass, PathRecord, ProgramRecord
from tests.support.examples import spec_path


@functools.cache
def _exports() -> str:
    """The folder of the exports of this process, which is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="flashgen-exports-")
    atexit.register(folder.cleanup)
    return folder.name


@functools.cache
def exported(name: str, archs: tuple[str, ...] = ("sm_80",), **options: Any) -> Path:
    """The export of a spec of ``specs/``, at head dim 16 unless told otherwise."""
    changes = {"head_dim": options.pop("head_dim", 16), "dropout": options.pop("dropout", False)}
    if "head_dim_v" in options:
        changes["head_dim_v"] = options.pop("head_dim_v")
    spec = fg.load(str(spec_path(name))).replace(**changes)
    folder = Path(tempfile.mkdtemp(dir=_exports()))
    command = f"flashgen export specs/{name}.py -o {name} --arch {','.join(archs)}"
    export(ExportRequest(spec=spec, archs=archs, command=command, **options), folder)
    return folder


def spec_of(name: str, **changes: Any) -> fg.AttentionSpec:
    return fg.load(str(spec_path(name))).replace(head_dim=16, **changes)


def with_portable_path(record: ProgramRecord) -> ProgramRecord:
    """As if the forward pass of sm_90a, and its gradients in fixed order, took kernels of sm_90."""
    passes = ((False, False, "sm_90"), (True, False, "sm_90a"), (True, True, "sm_90"))
    dim = record.signature.head_dim_v
    paths = (
        PathRecord("sm_90a", True, Pass(False, (), *how), taken, dim, "predicted")
        for *how, taken in passes
    )
    return replace(record, paths=tuple(paths))
