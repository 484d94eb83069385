"""Kernels compiled ahead of the tests that need them, by other processes, into the shared cache.

A test that runs before its kernel is ready compiles it itself; the cache's lock prevents two
processes from compiling the same kernel.
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
    """The kernels of one spec: the forward kernel, and backward kernels of one kind or none."""

    path: str
    arch: str
    dtype: str
    head_dim: int
    head_dim_v: int
    dropout: bool
    deterministic: bool


def make(wanted: Wanted) -> None:
    """Compiles the kernels. A compilation that fails here fails again in its test."""
    from flashgen.kernels.pipeline import build, build_backward
    from flashgen.shared.errors import FlashgenError
    from flashgen.spec.language.spec_file import load

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
