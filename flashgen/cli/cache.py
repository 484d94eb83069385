"""``flashgen cache``: what is kept on disk, and getting rid of it."""

from __future__ import annotations

from datetime import datetime

from flashgen import config
from flashgen.cli.console import listing, plural, say
from flashgen.compile import cache


def show() -> None:
    """Every kernel in the cache, last used first."""
    root = config.cache_dir()
    if root is None:
        say("caching on disk is off (FLASHGEN_CACHE_DIR=off)")
        return
    entries = cache.entries(root)
    if entries:
        listing(
            ("kernel", "arch", "bytes", "last used", "folder"),
            [
                (
                    entry.kernel if entry.intact else f"{entry.filename} (damaged)",
                    entry.arch,
                    f"{entry.bytes:,}",
                    datetime.fromtimestamp(entry.used).isoformat(" ", "seconds"),
                    entry.path.name,
                )
                for entry in entries
            ],
        )
    say(f"{plural(len(entries), 'kernel')}, {cache.size(root):,} B in {root}")


def clear() -> None:
    root = config.cache_dir()
    removed = cache.clear(root) if root is not None else 0
    say(f"removed {plural(removed, 'kernel')} from {root or 'the cache, which is off'}")


def prune(max_megabytes: int | None, max_days: float | None) -> None:
    root = config.cache_dir()
    removed = []
    if root is not None:
        max_bytes = None if max_megabytes is None else max_megabytes * 1_000_000
        removed = cache.prune(root, max_bytes=max_bytes, max_age_days=max_days)
    freed = sum(entry.bytes for entry in removed)
    say(f"removed {plural(len(removed), 'kernel')}, {freed:,} B")
