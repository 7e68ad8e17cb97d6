"""Limits the time of calls that may hang, such as DNS lookups, and the bytes read of a file."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

ANSWER = 5.0  # seconds to wait for an answer of Ray or the store

Returned = TypeVar("Returned")


class BoundedCalls:
    """Runs calls that may hang, one at a time, each for at most `seconds`.

    While a call hangs, further calls fail at once, so a service that hangs costs the caller
    `seconds` once, and occupies only one thread.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.under_way = False

    def __call__(self, work: Callable[[], Returned]) -> Returned:
        """Return the result of `work`; raise `TimeoutError` if it takes longer than `seconds`.

        Raises `TimeoutError` at once, without calling `work`, if an earlier call has not returned.
        """
        if self.under_way:
            raise TimeoutError("an earlier call has not returned yet")
        self.under_way = True

        def once() -> Returned:
            try:
                return work()
            finally:
                self.under_way = False

        return within(self.seconds, once)


def read_regular_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a regular file, cut off after `most_bytes` bytes.

    Raises `OSError` for a pipe or a device, which could block or never end.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
        return file.read(most_bytes)


class _Stopped(BaseException):
    """Raised in a thread to end it after its time limit; no handler of `Exception` catches it."""


def within(seconds: float, work: Callable[[], Returned], stop: bool = False) -> Returned:
    """Return the result of `work`, or raise its error; raise `TimeoutError` after `seconds`.

    `work` runs in a daemon thread and continues there after a timeout. With `stop`, an exception is
    then raised in that thread, which ends a loop in Python but not a call into a library that does
    not return.
    """
    results: list[Returned] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    # With the caller's contextvars: Prefect keeps its settings in one.
    run = copy_context().run
    thread = threading.Thread(target=run, args=(call,), name="raybatch-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        if stop and thread.ident is not None:
            ended_by = ctypes.py_object(_Stopped)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ended_by)
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
