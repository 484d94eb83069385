"""``flashgen cache``: the kernels that are kept on disk, and their removal."""

from __future__ import annotations

from datetime import datetime

from flashgen.kernels.compile import cache as disk
from flashgen.shared import config
from flashgen.tools.cli.arguments import (
    CacheClearArguments,
    CacheListArguments,
    CachePruneArguments,
)
from flashgen.tools.cli.console import listing, plural, say


def cache_clear(_: CacheClearArguments) -> None:
    """Empties the cache."""
    root = config.cache_dir()
    removed = disk.clear(root) if root is not None else 0
    say(f"removed {plural(removed, 'kernel')} from {root or 'the cache, which is off'}")


def cache_prune(arguments: CachePruneArguments) -> None:
    """Removes damaged kernels, and those beyond the limits."""
    root = config.cache_dir()
    removed = []
    if root is not None:
        max_bytes = arguments.max_megabytes * 1_000_000
        removed = disk.prune(root, max_bytes=max_bytes, max_age_days=arguments.max_days)
    freed = sum(entry.bytes for entry in removed)
    say(f"removed {plural(len(removed), 'kernel')}, {freed:,} B")


def cache_list(_: CacheListArguments) -> None:
    """Shows every kernel in the cache, the last used first."""
    root = config.cache_dir()
    if root is None:
        say("caching on disk is off (FLASHGEN_CACHE_DIR=off)")
        return
    entries = disk.entries(root)
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
    say(f"{plural(len(entries), 'kernel')}, {disk.size(root):,} B in {root}")
