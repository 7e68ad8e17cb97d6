"""Imports without garbage collection, which otherwise takes up to a quarter of their time."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection in the block. Use it for imports, which leave little garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def import_all(names: Iterable[str], stop: Callable[[], bool] = lambda: False) -> None:
    """Import each module in turn, without garbage collection; skip one that fails.

    Calls `stop()` before each import, and returns once it is true. Code that needs a failed module
    imports it again, and reports the reason.
    """
    with uncollected():
        for name in names:
            if stop():
                return
            with contextlib.suppress(Exception):
                importlib.import_module(name)
