"""Threads that each compute whole tiles, with one thread of torch in each.

With torch's own threads every operation of a tile is a parallel region, and all threads wait for
the slowest at its end: beside another process that takes a part of a core, they wait for it
thousands of times in a call. Here a call is one region, and a thread that runs late computes fewer
tiles.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")
Work = Callable[[int, int], None]
"""Computes one item, given the number of the thread and that of the item."""


FEW_SCORES = 1 << 15
"""Calls of fewer scores have no operation that torch splits among threads."""


def threads_of(scores: int) -> int:
    """The number of threads that share a call of this many scores."""
    return 1 if scores < FEW_SCORES else torch.get_num_threads()


def share(threads: int, count: int, work: Work, *, fixed: bool = False) -> None:
    """Computes items; returns when all are computed.

    Args:
        threads: 1 for the calling thread, with number 0; otherwise at most the threads of torch.
        fixed: whether the number of an item determines its thread; otherwise the next item goes to
            the next free thread.

    Raises:
        BaseException: the first exception of ``work``; items that had not begun are left out.
    """
    if threads == 1:
        for item in range(count):
            work(0, item)
        return
    next_items, failed = itertools.count(), threading.Event()

    def run(thread: int) -> None:
        items = itertools.count(thread, threads) if fixed else next_items
        try:
            with torch.no_grad():
                while not failed.is_set() and (item := next(items)) < count:
                    work(thread, item)
        except BaseException:
            failed.set()
            raise

    pool = _pool(torch.get_num_threads(), os.getpid())
    running = [pool.submit(run, thread) for thread in range(min(threads, count))]
    wait(running)
    for future in running:
        future.result()


def alone(threads: int, work: Callable[[], T]) -> T:
    """The result of ``work`` in one of ``threads``; its operations start no threads of torch."""
    results: list[T] = []
    share(threads, 1, lambda thread, item: results.append(work()))
    return results[0]


@lru_cache(maxsize=2)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process: the threads of its parent do not survive a fork."""
    started = threading.Barrier(threads + 1)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread sets the number to that of all
        torch.set_num_threads(1)  # of the operations that this thread calls
        started.wait()

    pool = ThreadPoolExecutor(threads, "flashgen-cpu", start)
    for _ in range(threads):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(threads)  # what threads of others begin with
    return pool
