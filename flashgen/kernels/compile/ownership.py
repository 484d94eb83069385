"""Whether a folder and its files are this user's alone: kernels that another user wrote never run.

What a folder of the cache holds becomes machine code of this process, and its checksums say nothing
about who wrote it. A folder is this user's if it belongs to this user and no other can write it, or
replace it in a folder above; the same holds for each file that is read. The superuser may own the
folders above. On Windows, where a profile's folders have access lists, nothing is checked.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(OSError):
    """A file that another user owns or can write; its text says which and why."""


def hindrance(folder: Path) -> str:
    """Why another user may have written into a folder, or replaced it; "" for none, or no folder.

    Args:
        folder: an absolute path. Links above it are followed.
    """
    if sys.platform == "win32":
        return ""
    real = Path(os.path.realpath(folder))
    paths = [real, *real.parents]
    if folder.is_symlink():
        paths[1:1] = folder.parents
    for path in paths:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        reason = (
            _folder_hindrance(path, status) if path == real else _parent_hindrance(path, status)
        )
        if reason:
            return reason
    if folder.is_symlink() and folder.lstat().st_uid != os.geteuid():
        return f"the link {folder} belongs to another user"
    return ""


def _folder_hindrance(path: Path, status: os.stat_result) -> str:
    if sys.platform == "win32":
        return ""
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user ({status.st_uid})"
    if status.st_mode & _OTHERS:
        return f"other users can write {path} (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _parent_hindrance(path: Path, status: os.stat_result) -> str:
    """Why another user may have written into a folder above; "" for none.

    A group may write it: private groups of one user are common.
    """
    if sys.platform == "win32":
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user ({status.st_uid})"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return f"other users can write {path} (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def contents(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        NotOurs: another user can have written it, or its folder, or it is a link or no file.
        OSError: it cannot be read.
    """
    reason = hindrance(path.parent)
    if reason:
        raise NotOurs(reason)
    if path.is_symlink():
        raise NotOurs(f"{path.name} is a link")
    # A pipe would wait for its other end.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotOurs(f"{path.name} is no file")
        reason = _folder_hindrance(path, status)
        if reason:
            raise NotOurs(reason)
        return file.read()


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing, for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    if missing and not missing[0].is_dir():
        raise NotADirectoryError(20, "Not a directory", str(missing[0]))
