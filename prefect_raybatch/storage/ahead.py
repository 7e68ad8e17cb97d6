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
    """`read(item)` for each item, in order; `threads` threads work up to `ahead` items ahead.

    Memory is that of `ahead` results, however many items there are. What `read` raises comes out
    at its item; then, or when the consumer stops early, what has not begun is dropped and what has
    is not waited for.
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
