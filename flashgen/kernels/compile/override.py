"""FLASHGEN_OVERRIDE: an edited file that is compiled in place of the emitted file of its name.

The file is compiled under its own path, so that its ``#include "..."`` are found beside it. What it
includes is part of the key of its binary.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from flashgen.shared import config
from flashgen.shared.errors import FlashgenError

P = ParamSpec("P")
T = TypeVar("T")

_SPLICE = re.compile(r"\\[ \t]*\r?\n")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(
    r"^[ \t]*(?:#|%:)[ \t]*(?:include|include_next|import)\b[ \t]*(.*)$"
    r"|__has_include[ \t]*\(([^)]*)\)",
    re.MULTILINE,
)
_NAMED = re.compile(r'(?:"([^"]*)"|<([^>]*)>)')


@dataclass(frozen=True)
class Override:
    """The edited file.

    Attributes:
        path: its path.
        text: its contents.
        headers: path and digest of each file that it includes, directly or through others.
    """

    path: Path
    text: str
    headers: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """A digest of the path and of all contents."""
        parts = str(self.path), self.text, self.headers
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()


_fitted: set[str] = set()
"""The paths of files that have replaced an emitted one in this process."""


def current() -> Override | None:
    """The edited file; None without one.

    Raises:
        FlashgenError: it is no text in UTF-8, or an include names its file by a macro.
    """
    path = config.override()
    if path is None:
        return None
    path = path.absolute()
    text = _text(path)
    headers: dict[str, str] = {}
    _add_headers(text, (path,), headers)
    return Override(path, text, tuple(sorted(headers.items())))


def state() -> str:
    """The `key` of the edited file, read anew at each call; "" without one."""
    edited = current()
    return "" if edited is None else edited.key


def replacing(filename: str, others: Callable[[], Iterable[str]] | None) -> Override | None:
    """The edited file, if it replaces the emitted file of this name.

    A file that fits no kernel is a warning.

    Args:
        others: the names of other files that are emitted for the spec; None for a kernel that specs
            share, which is not compared with the edited file's name.

    Raises:
        FlashgenError: as `current`.
    """
    edited = current()
    if edited is None:
        return None
    if edited.path.name == filename:
        _fitted.add(str(edited.path))
        return edited
    if others is not None and str(edited.path) not in _fitted:
        names = list(dict.fromkeys((filename, *others())))
        if edited.path.name not in names:
            warnings.warn(
                f"FLASHGEN_OVERRIDE is {edited.path.name}, which is the name of no kernel here; "
                f"the kernels are {', '.join(names)}. They are compiled unchanged",
                stacklevel=4,
            )
    return None


def cached(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`functools.lru_cache` for functions that compile: another edited file is another result."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.lru_cache(maxsize)
        def by_state(key: str, *args: P.args, **kwargs: P.kwargs) -> T:
            return function(*args, **kwargs)

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            return by_state(state(), *args, **kwargs)  # type: ignore[arg-type]

        wrapper.cache_clear = by_state.cache_clear  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
        if "\0" not in text:
            return text
        numbers = f"{path}: a zero byte at {text.index(chr(0)):,}"
    except UnicodeDecodeError as error:
        numbers = f"{path}: byte 0x{error.object[error.start]:02x} at {error.start:,}"
    except OSError as error:
        numbers = f"{path}: {error.strerror or error}"
    raise FlashgenError(
        "the edited kernel is no text in UTF-8",
        where="environment, FLASHGEN_OVERRIDE",
        numbers=numbers,
        way_out="save the file as UTF-8, or unset FLASHGEN_OVERRIDE",
    )


def _add_headers(text: str, includers: tuple[Path, ...], headers: dict[str, str]) -> None:
    """Adds the files that a text includes; ``includers`` are its file and those that include it."""
    spliced = _SPLICE.sub("", text)
    without_comments = _COMMENT.sub(" ", spliced)
    # With comments too: what looks like a long comment may begin inside of a short one.
    for match in (*_INCLUDE.finditer(without_comments), *_INCLUDE.finditer(spliced)):
        named = _NAMED.match((match[1] or match[2] or "").strip())
        if named is None:
            if match[1] is None or match.string is not without_comments:
                continue  # a macro of __has_include chooses among files that are included by name
            raise FlashgenError(
                "an include of the edited kernel names its file by a macro",
                where=f"environment, FLASHGEN_OVERRIDE: {includers[0]}",
                numbers=f"#include {match[1]:.80}: the cache cannot tell which file that is",
                way_out='#include "file.h", with the name of the file',
            )
        name = named[1] if named[1] is not None else named[2]
        for path in dict.fromkeys(includer.parent / name for includer in includers):
            if str(path) not in headers and path.is_file():
                data = path.read_bytes()
                headers[str(path)] = hashlib.sha256(data).hexdigest()
                _add_headers(data.decode("utf-8", "replace"), (path, *includers), headers)
