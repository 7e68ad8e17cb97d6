"""Faults at chosen points inside of a driver: kill or stop at the N-th write of a name.

A hook is a dict: `op` (a method of the store), `path` (prefix, in the run directory), `n` (from 1),
`when` (before, middle or after the call) and `do`: kill (this process), group (its process group)
or stop (SIGSTOP). "middle" strikes a few ms after the call began, from a thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from prefect_raybatch.storage import local, s3

OPERATIONS = ("put_if_absent", "put", "put_file", "put_file_if_absent", "delete")


def install(hooks: list[dict[str, Any]], folder: Path) -> None:
    """Arms this process; `folder` (the trial's) gets a file `stopped-PID` before a SIGSTOP."""
    for hook in hooks:
        if hook["op"] == "piece":  # written by Ray's workers, which only know the folder
            (folder / "driver.pid").write_text(str(os.getpid()))
            (folder / "piece.at").write_text(str(hook["n"]))
            from prefect_raybatch.stages import vectors

            from .finish import FinishThatKills

            # where `finish_of` looks for the stage of a job about text
            vectors.Finish = partial(FinishThatKills, folder=str(folder))  # type: ignore[misc,assignment]
            continue
        counter = _Counter(hook, folder)
        for store in (local.LocalStore, s3.S3Store):
            original = getattr(store, hook["op"])
            setattr(store, hook["op"], _wrapped(original, counter))


class _Counter:
    def __init__(self, hook: dict[str, Any], folder: Path) -> None:
        self.hook, self.folder, self.seen = hook, folder, 0
        self.lock = threading.Lock()

    def hits(self, path: Any) -> bool:
        first = path if isinstance(path, str) else next(iter(path), "")
        if not first.startswith(self.hook["path"]):
            return False
        with self.lock:
            self.seen += 1
            return self.seen == self.hook["n"]

    def strike(self) -> None:
        what = self.hook["do"]
        (self.folder / f"struck-{os.getpid()}").write_text(f"{what} {time.time()}")
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(original: Callable[..., Any], counter: _Counter) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, str):
            path = list(path)
        if not counter.hits(path):
            return original(self, path, *args, **kwargs)
        when = counter.hook["when"]
        if when == "before":
            counter.strike()
        elif when == "middle":
            threading.Timer(counter.hook.get("delay", 0.002), counter.strike).start()
        found = original(self, path, *args, **kwargs)
        if when == "after":
            counter.strike()
        return found

    return call
