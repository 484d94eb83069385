"""The folders of tests that belong to the changed files: ``python -m tests.support.changed``.

Changed are the files that differ from the last commit, and where none does, those of that commit.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import PurePosixPath

from tests.support.paths import ROOT

# Folders and files whose tests are in a folder of another name.
TESTED_IN = {
    "runtime": ("ops",),
    "diffusers": ("integrations",),
    "templates/common": ("codegen", "kernels"),
    "templates/sm80": ("codegen", "kernels/sm80"),
    "templates/sm90": ("codegen", "kernels/sm90"),
    "templates/report": ("views",),
    "specs": ("codegen", "language"),
    "generated": ("codegen",),
    ".md": ("docs",),
    ".ci": ("package",),
    "Makefile": ("docs", "package"),
    "pyproject.toml": ("package",),
}


def folders_of(name: str) -> tuple[str, ...]:
    """The folders of tests/ for a file: the deepest part of its path that one is named after."""
    path = PurePosixPath(name)
    for part in [path, *path.parents]:
        keys = (part.as_posix(), part.name, part.suffix)
        named = [TESTED_IN[key] for key in keys if key in TESTED_IN]
        if named:
            return named[0]
        folder = part.stem if part.suffix == ".py" else part.name
        if path.parts[0] == "tests" and part.parent == PurePosixPath("tests"):
            return (part.name,) if (ROOT / part).is_dir() and folder != "support" else ("package",)
        if path.parts[0] != "tests" and folder and (ROOT / "tests" / folder).is_dir():
            return (folder,)
    return ("package",)


def changed_files() -> list[str]:
    """Paths relative to the repository."""

    def lines_of(*command: str) -> list[str]:
        done = subprocess.run(
            ["git", *command], cwd=ROOT, text=True, capture_output=True, check=True
        )
        return done.stdout.splitlines()

    found = lines_of("diff", "--name-only", "HEAD")
    found += lines_of("ls-files", "--others", "--exclude-standard")
    return found or lines_of("diff", "--name-only", "HEAD~1", "HEAD")


def folders(names: Iterable[str]) -> list[str]:
    """The folders of the tests of several files, without those that lie in another of them."""
    found = {f"tests/{folder}" for name in names for folder in folders_of(name)}
    return sorted(f for f in found if not any(f.startswith(f"{other}/") for other in found))


if __name__ == "__main__":
    print(*folders(changed_files()))
