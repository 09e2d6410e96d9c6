"""Several small decompositions at a time: one thread each is faster than all of them on each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["side_by_side"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    function: Callable[[Item], Result], items: Iterable[Item], several: bool = True
) -> Generator[tuple[Item, Result]]:
    """Items with what ``function`` makes of them, in order, on as many threads as torch has.

    No more items are taken than there are threads, and one: they may be large. LAPACK's eigenvalue
    solvers hardly gain from a second core, but two of them run on two cores. One after the other if
    not ``several``.
    """
    threads = torch.get_num_threads() if several else 1
    if threads == 1:
        for item in items:
            yield item, function(item)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    # What a thread sets is its own, but torch keeps the last number for threads that come later.
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > threads:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
