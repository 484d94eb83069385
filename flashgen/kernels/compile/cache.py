"""The kernel cache on disk: one folder per entry, safe for concurrent processes, with checksums.

::

    <cache folder>/<file stem>.<arch>.<key>/   the emitted .cu, .cubin, .ptx, meta.json
                  /locks/<2 hex digits>.lock   held while an entry is compiled
                  /tmp-*                       entries being written
                  /tuned/                      measured tiles, not kernels
                  /trust/                      verdicts on code paths, not kernels
                  /native/                     the native part of calls

An entry is written under a temporary name and renamed into place, so that it exists entirely or not
at all. ``meta.json`` holds the SHA-256 of every file and of itself; an entry that does not
match is compiled again, with a note. A folder that cannot be written costs time, not correctness:
the kernel is compiled, and a `CacheWarning` gives the reason why it is not cached. So does a folder
that another user owns or can write, and an entry of such a user (`kernels.compile.ownership`).
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashgen.kernels.compile.nvrtc_log import Resources
from flashgen.kernels.compile.ownership import NotOurs, contents, hindrance, make_folder
from flashgen.shared import config
from flashgen.shared.plain import from_plain, parsed

SCHEMA = 2  # part of every key: increase it when the contents of entries change
META = "meta.json"
TUNED = "tuned"  # folder of the tiles that were measured: `flashgen.calls.runtime.tuned_tiles`
TRUST = "trust"  # folder of the verdicts on code paths: `flashgen.calls.trust.verdicts`
NATIVE = "native"  # folder of the native part of calls: `flashgen.calls.native.build`
_LOCKS = "locks"
_TEMPORARY = "tmp-"
_LOCK_SECONDS = 120.0  # far longer than any compilation: the holder of the lock hangs
_ABANDONED_SECONDS = 3600.0  # a temporary folder of this age belongs to a process that has ended


class CacheWarning(UserWarning):
    """The kernel cache could not be read or written; the result is still correct."""


@dataclass(frozen=True)
class Meta:
    """The contents of `META`.

    Attributes:
        files: the SHA-256 of each file by its name.
        other attributes: as in `flashgen.kernels.compile.Binary`.
    """

    key: str
    files: Mapping[str, str]
    filename: str
    kernel: str
    arch: str
    options: tuple[str, ...]
    nvrtc: str
    resources: Resources
    warnings: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class CacheEntry:
    """One kernel in the cache, as `entries` lists it."""

    path: Path
    filename: str
    kernel: str
    arch: str
    bytes: int
    used: float  # seconds since the epoch, when it was last compiled or loaded
    intact: bool  # meta.json is readable and its checksum is correct


def usable_root() -> Path | None:
    """The folder of the cache; None where caching is off or, with a `CacheWarning`, not safe."""
    root = config.cache_dir()
    reason = "" if root is None else hindrance(root)
    if reason:
        _note(
            f"the kernel cache {root} is not used: {reason}. chown and chmod go-w make it yours "
            "alone; FLASHGEN_CACHE_DIR names another folder"
        )
        return None
    return root


def key(parts: dict[str, Any]) -> str:
    """Content key: SHA-256 of the schema version and everything that determines the binary."""
    text = json.dumps({"schema": SCHEMA, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def folder(root: Path, *, filename: str, arch: str, key: str) -> Path:
    """The folder of an entry: a readable name and enough digits of the key to be unique."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(filename).stem)[:80]
    return root / f"{stem}.{arch}.{key[:24]}"


def read(
    path: Path, expected_key: str, *, quiet: bool = False
) -> tuple[Meta, dict[str, bytes]] | None:
    """Reads an entry: its metadata and its files by name; None if there is none.

    A damaged entry counts as none, with a `CacheWarning` that describes the damage, unless
    `quiet`.
    """
    try:
        return _read_intact(path, expected_key)
    except (FileNotFoundError, NotADirectoryError):
        damage = f"has no {META}" if path.is_dir() else ""
    except NotOurs as error:
        damage = f"is not used: {error}"
    except OSError as error:
        damage = f"cannot be read ({error.strerror})"
    except _Damaged as error:
        damage = str(error)
    if damage and not quiet:
        _note(f"cache entry {path.name} {damage}; compiling again")
    return None


class _Damaged(Exception):
    """An entry is damaged; the message is the end of a sentence that begins with its name."""


def names_of(filename: str) -> tuple[str, str, str]:
    """The names of an entry's files: the source, the cubin and the PTX."""
    stem = Path(filename).stem
    return filename, f"{stem}.cubin", f"{stem}.ptx"


def _read_intact(path: Path, expected_key: str) -> tuple[Meta, dict[str, bytes]]:
    if path.is_symlink():
        raise NotOurs("it is a link")
    meta = _checked(contents(path / META))
    if meta is None:
        raise _Damaged(f"has a damaged {META}")
    if meta.key != expected_key:
        raise _Damaged("belongs to another key")
    files: dict[str, bytes] = {}
    for name, digest in meta.files.items():
        try:
            files[name] = contents(path / name)
        except FileNotFoundError:
            raise _Damaged(f"lacks {name}") from None
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise _Damaged(f"has a damaged {name}")
    # `prune` uses the time stamp; a read-only folder can still be read.
    with suppress(OSError):
        os.utime(path / META)
    return meta, files


def write(path: Path, meta: Meta, files: dict[str, bytes]) -> bool:
    """Stores an entry under its final name in one step; False, with a `CacheWarning`, if it cannot.

    The caller holds the lock of `locked` and has called `discard`.

    Args:
        meta: its digests are not used.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    sealed = _sealed({**asdict(meta), "files": digests})
    root, temporary = path.parent, None
    try:
        make_folder(root)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=root))
        for name, data in {**files, META: sealed}.items():
            (temporary / name).write_bytes(data)
            (temporary / name).chmod(0o600)  # whatever the umask is
        os.replace(temporary, path)
    except OSError as error:
        _note(f"the kernel was compiled but cannot be kept in {root}: {error.strerror or error}")
        return False
    finally:
        if temporary is not None:  # it exists still after an error or Ctrl-C
            shutil.rmtree(temporary, ignore_errors=True)
    return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside ``path``, which takes its place in one step at the end of the block.

    Raises:
        OSError: it cannot be made, or cannot take the place.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{_TEMPORARY}", dir=path.parent)
    os.close(handle)
    try:
        yield Path(temporary)
        os.replace(temporary, path)
    finally:  # it exists still after an error or Ctrl-C
        with suppress(OSError):
            os.unlink(temporary)


def replace_text(path: Path, text: str) -> str | None:
    """Writes a small file in one step; returns why that is impossible, None when it is done."""
    try:
        make_folder(path.parent)
        reason = hindrance(path.parent)
        if reason:
            return reason
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        return error.strerror or str(error)
    return None


def discard(path: Path) -> None:
    """Removes an entry if it exists and can be removed, atomically for readers."""
    with suppress(OSError):
        if path.exists():
            temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=path.parent))
            os.replace(path, temporary / "damaged")
            shutil.rmtree(temporary, ignore_errors=True)


def lock_of(entry_key: str) -> str:
    """The name of an entry's lock: 256 lock files serve all keys, so that they do not pile up."""
    return entry_key[:2]


@contextmanager
def locked(root: Path, name: str, seconds: float = _LOCK_SECONDS) -> Iterator[bool]:
    """Holds a lock across processes and threads; yields False where locking fails.

    Args:
        name: the name of the lock; `lock_of` gives the name for an entry.
        seconds: how long the call waits for another holder of the lock.
    """
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        acquired = False
        try:
            make_folder(root / _LOCKS)
            reason = hindrance(root / _LOCKS)
            path = root / _LOCKS / f"{name}.lock"
            if reason or path.is_symlink():
                raise NotOurs(reason or f"{path.name} is a link")
            lock = FileLock(str(path))
            stack.enter_context(lock.acquire(timeout=seconds))
            acquired = True
        except Timeout:
            _note(f"another process has held a lock in {root} for {seconds:.0f} s; going on")
        except (OSError, NotImplementedError) as error:
            why = getattr(error, "strerror", None) or error
            _note(f"the kernel cache {root} cannot be written ({why}); going on without it")
        yield acquired


def entries(root: Path) -> list[CacheEntry]:
    """All entries, damaged ones included, the most recently used first."""
    result = []
    for path in _folders(root):
        try:
            record = contents(path / META)
            used = (path / META).stat().st_mtime
        except OSError:
            record, used = b"", path.stat().st_mtime
        meta = _checked(record)
        stem, _, rest = path.name.partition(".")
        result.append(
            CacheEntry(
                path=path,
                filename=meta.filename if meta else f"{stem}.cu",
                kernel=meta.kernel if meta else "?",
                arch=meta.arch if meta else rest.partition(".")[0],
                bytes=size(path),
                used=used,
                intact=meta is not None,
            )
        )
    return sorted(result, key=lambda entry: entry.used, reverse=True)


def clear(root: Path) -> int:
    """Removes the files of the cache and nothing else; returns the number of entries."""
    removed = 0
    for path in _folders(root):
        removed += _remove(path)
    _sweep(root, older_than=0.0)
    # A process that still holds one of the locks compiles concurrently, which is harmless.
    for name in (TUNED, TRUST, NATIVE, _LOCKS):
        _remove(root / name)
    return removed


def prune(
    root: Path, *, max_bytes: int | None = None, max_age_days: float | None = None
) -> list[CacheEntry]:
    """Removes damaged entries, then expired ones, then the least recently used until it fits.

    Args:
        max_bytes: the largest total size of all entries, in bytes; None for no limit.
        max_age_days: the largest number of days since an entry was made or loaded; None for no
            limit.

    Returns:
        The removed entries.
    """
    now, kept_bytes, removed = time.time(), 0, []
    for entry in entries(root):
        old = max_age_days is not None and now - entry.used > max_age_days * 86_400
        over = max_bytes is not None and kept_bytes + entry.bytes > max_bytes
        if old or over or not entry.intact:
            _remove(entry.path)
            removed.append(entry)
        else:
            kept_bytes += entry.bytes
    _sweep(root, older_than=_ABANDONED_SECONDS)
    return removed


def _note(text: str) -> None:
    warnings.warn(text, CacheWarning, stacklevel=2)


def _sealed(meta: dict[str, Any]) -> bytes:
    text = json.dumps(meta, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{digest}\n{json.dumps(meta, sort_keys=True, indent=1)}\n".encode()


def _checked(record: bytes) -> Meta | None:
    """Metadata with a correct checksum, otherwise None."""
    digest, _, text = record.partition(b"\n")
    try:
        values = parsed(text)
        meta = from_plain(Meta, values)
        canonical = json.dumps(values, sort_keys=True)
    except ValueError:
        return None
    is_whole = hashlib.sha256(canonical.encode()).hexdigest().encode() == digest
    names = set(names_of(meta.filename))
    is_inside = all(name == os.path.basename(name) for name in names)
    return meta if is_whole and is_inside and set(meta.files) == names else None


def _folders(root: Path) -> list[Path]:
    """Folders named like entries, NAME.ARCH.KEY; no other file is touched."""
    pattern = re.compile(r"[A-Za-z0-9_-]+\.sm_\d+[af]?\.[0-9a-f]{24}")
    if not root.is_dir():
        return []
    return [p for p in root.iterdir() if pattern.fullmatch(p.name) and p.is_dir()]


def _sweep(root: Path, *, older_than: float) -> None:
    for path in root.iterdir() if root.is_dir() else ():
        with suppress(OSError):
            is_ours = re.fullmatch(rf"{_TEMPORARY}[a-z0-9_]{{8}}", path.name)
            if is_ours and time.time() - path.stat().st_mtime >= older_than:
                _remove(path)


_OURS = re.compile(
    rf"{re.escape(META)}|[\w.-]+\.(cu|cuh|cubin|ptx)"
    r"|\w+\.[0-9a-f]{16}\.sm_\w+\.\w+\.bh\d+-g\d+-q\d+-k\d+\.json|sm_\w+\.[0-9a-f]{24}\.json"
    r"|flashgen_native\.\w+\.so"
    rf"|([0-9a-f]{{2}}|trust-[0-9a-f]{{24}})\.lock|\.{_TEMPORARY}[a-z0-9_]{{8}}",
    re.ASCII,
)
"""The names of all files in the folders of the cache: of entries, of tiles and verdicts, of the
native part, of locks, and of those that are being written."""


def _remove(folder: Path) -> bool:
    """Removes files whose names are names of the cache, and folders that are empty afterwards.

    A folder that a user has named like one of the cache keeps all other files.
    """
    if folder.is_symlink():
        return False
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in names if _OURS.fullmatch(name)):
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            os.rmdir(parent)
    return not folder.exists()


def size(path: Path) -> int:
    """The size in bytes of an entry, or of the whole cache with files that are being written."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
