"""Imports without garbage collection, which otherwise takes up to a quarter of their time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the `with` block. Use it for imports, which leave little of it.

    After the block, collections skip all objects that exist then (`gc.freeze`): they take less
    time, and forks of this process share more memory with it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
