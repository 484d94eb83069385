"""The kernel cache on disk: a folder per entry, safe with many processes, never trusted blindly.

::

    <cache folder>/<file stem>.<arch>.<key>/   the emitted .cu, .cubin, .ptx, meta.json
                  /locks/<2 hex digits>.lock   taken while an entry is compiled
                  /tmp-*                       entries being written
                  /tuned/                      tiles that were measured, not kernels

An entry is written under a temporary name and renamed into place, so that it is there entirely or
not at all. ``meta.json`` holds the SHA-256 of every file and of itself; an entry that does not
match is compiled again, with a note. A folder that cannot be written costs time, not correctness:
the kernel is compiled, and a `CacheWarning` says why it was not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1  # part of every key: raise it when what an entry holds changes
META = "meta.json"
TUNED = "tuned"  # folder of the tiles that were measured: `flashgen.ops.tuned`
_LOCKS = "locks"
_TEMPORARY = "tmp-"
_LOCK_SECONDS = 120.0  # far beyond any compilation: whoever holds the lock is stuck
_ABANDONED_SECONDS = 3600.0  # a temporary folder this old belongs to a process that died


class CacheWarning(UserWarning):
    """The kernel cache could not be read or written; the result is right all the same."""


@dataclass(frozen=True)
class Entry:
    """One kernel in the cache, as `entries` lists it."""

    path: Path
    filename: str
    kernel: str
    arch: str
    bytes: int
    used: float  # seconds since the epoch, last time it was made or loaded
    intact: bool  # meta.json can be read and its own checksum is right


def key(parts: dict[str, Any]) -> str:
    """Content key: SHA-256 over the schema version and everything that decides the binary."""
    text = json.dumps({"schema": SCHEMA, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def folder(root: Path, *, filename: str, arch: str, key: str) -> Path:
    """Where an entry lives: a readable name, then enough of the key to be unique."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(filename).stem)[:80]
    return root / f"{stem}.{arch}.{key[:24]}"


def read(
    path: Path, expected_key: str, *, quiet: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """Reads an entry: its meta data and its files by name; None if there is none.

    A damaged entry counts as none, with a `CacheWarning` that says what is wrong with it, unless
    `quiet`.
    """
    try:
        return _read_intact(path, expected_key)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir() and not quiet:
            _note(f"cache entry {path.name} has no {META}; compiling again")
    except OSError as error:
        if not quiet:
            _note(f"cache entry {path.name} cannot be read ({error.strerror}); compiling again")
    except _Damaged as damage:
        if not quiet:
            _note(f"cache entry {path.name} {damage}; compiling again")
    return None


class _Damaged(Exception):
    """Says what is wrong with an entry, as the end of a sentence."""


def _read_intact(path: Path, expected_key: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    meta = _checked((path / META).read_bytes())
    if meta is None:
        raise _Damaged(f"has a damaged {META}")
    if meta["key"] != expected_key:
        raise _Damaged("belongs to another key")
    files: dict[str, bytes] = {}
    for name, digest in meta["files"].items():
        try:
            files[name] = (path / name).read_bytes()
        except FileNotFoundError:
            raise _Damaged(f"lacks {name}") from None
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise _Damaged(f"has a damaged {name}")
    # The time stamp serves prune; a folder that cannot be written can still be read.
    with suppress(OSError):
        os.utime(path / META)
    return meta, files


def write(path: Path, entry_key: str, meta: dict[str, Any], files: dict[str, bytes]) -> bool:
    """Stores an entry under its final name in one step; False, with a `CacheWarning`, if it cannot.

    The caller holds the lock of `locked` and has called `discard`.
    """
    full = {
        **meta,
        "key": entry_key,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    root, temporary = path.parent, None
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=root))
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        (temporary / META).write_bytes(_sealed(full))
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        _note(f"the kernel was compiled but cannot be kept in {root}: {error.strerror or error}")
        return False
    return True


def discard(path: Path) -> None:
    """Removes an entry, if it is there and can be; in one step for those who read it."""
    with suppress(OSError):
        if path.exists():
            aside = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=path.parent))
            os.replace(path, aside / "damaged")
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(root: Path, entry_key: str) -> Iterator[bool]:
    """Holds the lock of a key among all processes and threads; yields False where none is possible.

    256 lock files serve all keys, so that they do not pile up.
    """
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        held = False
        try:
            (root / _LOCKS).mkdir(parents=True, exist_ok=True)
            lock = FileLock(str(root / _LOCKS / f"{entry_key[:2]}.lock"))
            stack.enter_context(lock.acquire(timeout=_LOCK_SECONDS))
            held = True
        except Timeout:
            _note(f"another process has held a lock in {root} for {_LOCK_SECONDS:.0f} s; going on")
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            _note(f"the kernel cache {root} cannot be written ({reason}); compiling without it")
        yield held


def entries(root: Path) -> list[Entry]:
    """Every entry, last used first; damaged ones included."""
    found = []
    for path in _folders(root):
        try:
            record = (path / META).read_bytes()
            used = (path / META).stat().st_mtime
        except OSError:
            record, used = b"", path.stat().st_mtime
        meta = _checked(record)
        stem, _, rest = path.name.partition(".")
        found.append(
            Entry(
                path=path,
                filename=meta["filename"] if meta else f"{stem}.cu",
                kernel=meta["kernel"] if meta else "?",
                arch=meta["arch"] if meta else rest.partition(".")[0],
                bytes=_size(path),
                used=used,
                intact=meta is not None,
            )
        )
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def size(root: Path) -> int:
    """Bytes that the cache takes on disk, files that are being written included."""
    return _size(root)


def clear(root: Path) -> int:
    """Removes everything of ours in the folder and nothing else; returns the number of entries."""
    removed = 0
    for path in _folders(root):
        shutil.rmtree(path, ignore_errors=True)
        removed += not path.exists()
    _sweep(root, older_than=0.0)
    shutil.rmtree(root / TUNED, ignore_errors=True)
    # A process that still holds one of these locks compiles beside us, which is harmless.
    shutil.rmtree(root / _LOCKS, ignore_errors=True)
    return removed


def prune(
    root: Path, *, max_bytes: int | None = None, max_age_days: float | None = None
) -> list[Entry]:
    """Removes damaged entries, those unused for too long, then the longest unused until it fits.

    Args:
        max_bytes: what all entries together may take.
        max_age_days: days since an entry was made or loaded.

    Returns:
        What was removed.
    """
    now, kept, removed = time.time(), 0, []
    for entry in entries(root):
        old = max_age_days is not None and now - entry.used > max_age_days * 86_400
        over = max_bytes is not None and kept + entry.bytes > max_bytes
        if old or over or not entry.intact:
            shutil.rmtree(entry.path, ignore_errors=True)
            removed.append(entry)
        else:
            kept += entry.bytes
    _sweep(root, older_than=_ABANDONED_SECONDS)
    return removed


def _note(text: str) -> None:
    warnings.warn(text, CacheWarning, stacklevel=2)


def _sealed(meta: dict[str, Any]) -> bytes:
    text = json.dumps(meta, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{digest}\n{json.dumps(meta, sort_keys=True, indent=1)}\n".encode()


def _checked(record: bytes) -> dict[str, Any] | None:
    """Meta data whose checksum is right and whose schema is ours, otherwise None."""
    digest, _, text = record.partition(b"\n")
    try:
        meta = json.loads(text)
        again = json.dumps(meta, sort_keys=True)
    except ValueError:
        return None
    if hashlib.sha256(again.encode()).hexdigest().encode() != digest:
        return None
    return meta if isinstance(meta, dict) else None


def _folders(root: Path) -> list[Path]:
    """Folders that look like entries: NAME.ARCH.KEY. Nothing else in the folder is touched."""
    pattern = re.compile(r"[A-Za-z0-9_-]+\.sm_\d+[af]?\.[0-9a-f]{24}")
    if not root.is_dir():
        return []
    return [p for p in root.iterdir() if pattern.fullmatch(p.name) and p.is_dir()]


def _sweep(root: Path, *, older_than: float) -> None:
    for path in root.glob(f"{_TEMPORARY}*") if root.is_dir() else ():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than:
                shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
