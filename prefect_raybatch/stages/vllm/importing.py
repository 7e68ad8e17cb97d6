"""Imports a list of modules, skips those that fail, and collects no garbage meanwhile."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable

from prefect_raybatch.uncollected import uncollected


def import_all(names: Iterable[str], stop: Callable[[], bool] = lambda: False) -> None:
    """Import each module in turn; skip one that fails.

    Asks `stop()` before each, and returns once it is true. Code that needs a module which failed
    imports it again, and reports the reason.
    """
    with uncollected():
        for name in names:
            if stop():
                return
            with contextlib.suppress(Exception):
                importlib.import_module(name)
