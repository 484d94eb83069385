"""``flashgen cache``: the kernels that are kept on disk, and their removal."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from flashgen import config
from flashgen.cli.arguments import CacheArguments
from flashgen.cli.console import listing, plural, say
from flashgen.compile import cache as disk


def cache(arguments: CacheArguments) -> None:
    """Clears, prunes or lists the cache; lists it where no option is given."""
    root = config.cache_dir()
    if arguments.clear:
        removed = disk.clear(root) if root is not None else 0
        say(f"removed {plural(removed, 'kernel')} from {root or 'the cache, which is off'}")
    if arguments.prune:
        _prune(root, arguments)
    if arguments.show or not (arguments.clear or arguments.prune):
        _show(root)


def _prune(root: Path | None, arguments: CacheArguments) -> None:
    megabytes = arguments.max_megabytes
    max_bytes = None if megabytes is None else megabytes * 1_000_000
    removed = []
    if root is not None:
        removed = disk.prune(root, max_bytes=max_bytes, max_age_days=arguments.max_days)
    freed = sum(entry.bytes for entry in removed)
    say(f"removed {plural(len(removed), 'kernel')}, {freed:,} B")


def _show(root: Path | None) -> None:
    """Every kernel in the cache, the last used first."""
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
