"""Many small reads, some of them ahead of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")


def read_ahead(
    read: Callable[[Item], Value], items: Iterable[Item], threads: int, ahead: int
) -> Iterator[Value]:
    """Yield `read(item)` for each item in order; threads read up to `ahead` items ahead.

    Memory is that of `ahead` results, however many items there are. An exception from `read` is
    raised at its item. Then, or when the consumer stops early, pending reads are dropped and
    running ones are not waited for.
    """
    waiting: deque[Future[Value]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(read, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Garbage collection may end this in a thread that is just starting: a join there hangs.
        pool.shutdown(wait=False, cancel_futures=True)
