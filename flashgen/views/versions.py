"""The versions of all that takes part in making a report."""

from __future__ import annotations

import platform
from importlib import metadata

from flashgen.codegen.environment import template_digest
from flashgen.compile import nvrtc
from flashgen.errors import CompileError
from flashgen.version import __version__

_PACKAGES = ("torch", "numpy", "sympy", "cuda-bindings", "nvidia-cuda-nvdisasm")


def versions() -> tuple[tuple[str, str], ...]:
    """The names and versions, "missing" for what is not installed; nothing is imported for it."""
    found = [("flashgen", __version__), ("templates", template_digest())]
    found.append(("Python", platform.python_version()))
    found += [(name, _version_of(name)) for name in _PACKAGES]
    try:
        compiler = nvrtc.version()
    except CompileError:
        compiler = "missing"
    return (*found, ("NVRTC", compiler))


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
