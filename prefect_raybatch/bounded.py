"""Time limits for calls that may hang, such as a name lookup in an unreachable network, and for
reading files that may be pipes."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

ANSWER = 5.0  # seconds that an answer of Ray's or the store's may take

Returned = TypeVar("Returned")


class Question:
    """A call that may hang and is repeated. While one hangs, no other is started, so it costs its
    caller `seconds` once, and one thread."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.under_way = False

    def __call__(self, work: Callable[[], Returned]) -> Returned:
        """Call `work` as `within` does. Raise `TimeoutError` at once while an earlier call is
        running."""
        if self.under_way:
            raise TimeoutError("an earlier question is not answered yet")
        self.under_way = True

        def once() -> Returned:
            try:
                return work()
            finally:
                self.under_way = False

        return within(self.seconds, once)


def read_regular_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return a file's content, or its first `most_bytes`. Raise `OSError` for a pipe or a device in
    its place, which could block or never end."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file; remove it", str(path))
        return file.read(most_bytes)


class _Stopped(BaseException):
    """Ends a thread whose time is over; no handler of `Exception` catches it."""


def within(seconds: float, work: Callable[[], Returned], stop: bool = False) -> Returned:
    """Return what `work` returns, or raise what it raises. Raise `TimeoutError` when it takes
    longer: then `work` goes on in a thread that does not keep the process from exiting. With `stop`
    an exception is raised in that thread, which ends a loop in Python but not a call into a library
    that does not return."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    # With the caller's contextvars: Prefect keeps its settings in one.
    run = copy_context().run
    thread = threading.Thread(target=run, args=(call,), name="raybatch-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not found:
        if stop and thread.ident is not None:
            ended_by = ctypes.py_object(_Stopped)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ended_by)
        raise TimeoutError(f"no answer within {seconds:g} s")
    result: Returned = found[0]
    return result
