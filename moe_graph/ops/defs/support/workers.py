"""Runs the independent parts of a kernel side by side, each part in one thread.

PyTorch splits every operator among its threads by itself, which costs a barrier per operator and
lets the bits of a result depend on where the shares end: ATen computes ``exp`` with vector code and
the odd elements at the end of a share with scalar code, and a matrix product is blocked by shape.
Here a kernel cuts its work into parts by shape alone and a part never leaves its thread, so the
number of threads cannot show in the result.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")

_before = threading.local()  # .threads: what the calling thread had before `one_thread`


def run_parts(work: Callable[[Part], object], parts: Sequence[Part]) -> None:
    """Call `work` on every part, on at most ``torch.get_num_threads()`` threads.

    Parts start in order and must not depend on each other. `work` must not need the caller's
    thread-local state: in other threads it runs in inference mode.

    Raises:
        Exception: the first one that `work` raised, after all parts that had started have ended.
    """
    with one_thread() as threads:
        helpers = min(threads, len(parts)) - 1
        if helpers < 1:
            for part in parts:
                work(part)
            return
        waiting = iter(parts)  # next() of a list iterator is atomic

        def drain() -> None:
            for part in waiting:
                work(part)

        tasks = [_pool(os.getpid(), helpers).submit(_help, drain) for _ in range(helpers)]
        try:
            drain()
        finally:
            # A helper that has not started by now has nothing left to do.
            started = [task for task in tasks if not task.cancel()]
            for task in started:
                task.exception()
        for task in started:
            task.result()


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Keep the operators of the calling thread in that thread; yield the threads it had.

    :func:`run_parts` still uses as many. PyTorch's setting belongs to the calling thread, but is
    also what a thread that has not yet used PyTorch starts with: one born meanwhile stays with one
    thread.
    """
    outer: int | None = getattr(_before, "threads", None)
    threads = outer or torch.get_num_threads()
    if outer or threads == 1:
        yield threads
        return
    torch.set_num_threads(1)
    _before.threads = threads
    try:
        yield threads
    finally:
        _before.threads = None
        torch.set_num_threads(threads)


@functools.cache
def _pool(pid: int, size: int) -> ThreadPoolExecutor:
    """Return `size` threads of process `pid`: after a fork the parent's threads are gone."""
    pool = ThreadPoolExecutor(size, f"moe_graph_{pid}", initializer=_become_helper)
    all_there = threading.Barrier(size + 1)
    for _ in range(size):
        pool.submit(all_there.wait)
    all_there.wait()  # so that no helper changes PyTorch's setting after the caller restores it
    return pool


def _become_helper() -> None:
    torch.get_num_threads()  # the first use of a thread copies the process's setting
    torch.set_num_threads(1)


def _help(drain: Callable[[], None]) -> None:
    with torch.inference_mode():
        drain()
