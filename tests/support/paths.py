"""Paths: the repository's root, and a test file's path as error messages print it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def from_root(file: str) -> str:
    """The path of ``file`` from the repository's root, as errors name the user's files."""
    return Path(file).resolve().relative_to(ROOT).as_posix()
