"""The code paths: one module for each, and nothing else of flashgen tests a path by its name.

To add one, write its module, its templates and its cost models, and list it here.
"""

from __future__ import annotations

from flashgen.shared.paths import sm80, sm90
from flashgen.shared.paths.code_path import CodePath

__all__ = ["PATHS", "CodePath", "path_on"]

PATHS: dict[str, CodePath] = {module.PATH.name: module.PATH for module in (sm80, sm90)}
"""The code paths by their names."""


def path_on(arch: str) -> CodePath:
    """The code path of an architecture's own kernels."""
    specific = [path for path in PATHS.values() if arch in path.only_on]
    return specific[0] if specific else sm80.PATH
