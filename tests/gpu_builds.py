"""Kernels compiled ahead of the tests that want them, by other processes, into the shared cache.

A test that comes first compiles its kernel itself; the cache's lock keeps two from doing the same.
This module is imported by those processes and needs neither torch nor a GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """The kernels of one spec: the forward one, and the backward ones of one kind or of none."""

    path: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    dropout: bool
    deterministic: bool


def make(wanted: Wanted) -> None:
    """Compiles them. What fails here fails in its test again, and is told there."""
    from flashgen.errors import FlashgenError
    from flashgen.pipeline import build, build_backward
    from flashgen.spec import load

    with contextlib.suppress(FlashgenError):
        spec = load(wanted.path).replace(
            dtype=wanted.dtype,
            head_dim=wanted.head_dim,
            head_dim_v=wanted.head_dim_v,
            dropout=wanted.dropout,
        )
        build(spec, wanted.arch)
        build_backward(spec, wanted.arch, deterministic=wanted.deterministic)


@contextlib.contextmanager
def ahead(wanted: Iterable[Wanted], workers: int | None = None) -> Iterator[None]:
    """Compiles in the background, in the order given, until the block ends."""
    most = workers or max(1, min(12, (os.cpu_count() or 2) - 2))
    pool = ProcessPoolExecutor(most, mp_context=multiprocessing.get_context("spawn"))
    try:
        for one in dict.fromkeys(wanted):
            pool.submit(make, one)
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
