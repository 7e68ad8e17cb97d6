"""Collects the errors that an engine's processes log before they end, to explain its death.

vLLM tells the process that drives an engine only "See stack trace (above) for the root cause". The
cause is in the log of the engine's core, and so is the exit code of a worker of that core. Our
plugin listens to vLLM's log there and writes errors, but no row data, to a file.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.process
import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import cast

from prefect_raybatch.exit_codes import signal_text
from prefect_raybatch.stages.vllm.internals import NOT_THE_CAUSE
from prefect_raybatch.stages.vllm.log_tap import listen_to_vllm

PLACE = "RAYBATCH_LAST_WORDS"  # environment variable of an engine's processes: PID:FILE
MOST_TEXT = 500  # characters of an error that are kept
EXIT = re.compile(r"exit code: (-?\d+)")
NO_CODE = "exit code: None"  # vLLM's text for a worker that had not quite ended
WAIT = 2.0  # seconds to wait for the end of such a worker
STARTED = re.compile(r"'[^']*': (-\d+)")  # core failed to start: {'EngineCore': -4}


def _note_error(place: str, record: logging.LogRecord) -> None:
    """Append the error in a vLLM log record to the file that collects an engine's errors.

    `place` is the value of the variable `PLACE`, "PID:FILE"; process PID reads the file and never
    writes to it. Skips records below level ERROR, from `NOT_THE_CAUSE`, or with neither an
    exception nor an exit code.
    """
    reader, _, path = place.partition(":")
    if record.levelno < logging.ERROR or os.getpid() == int(reader):
        return
    if record.name.startswith(NOT_THE_CAUSE):
        return
    error = record.exc_info[1] if record.exc_info else None
    text = f"{type(error).__name__}: {error}" if error else record.getMessage()
    if NO_CODE in text:
        text = text.replace(NO_CODE, f"exit code: {_code(record.args)}")
    elif error is None and not EXIT.search(text):
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(" ".join(text.split())[:MOST_TEXT] + "\n")


def _code(args: object) -> int | None:
    """Return the exit code of the worker that a log record's `args` name; None if unknown."""
    name = args[0] if isinstance(args, tuple) and args else None
    # Not active_children(), which drops children that have just ended.
    for worker in list(getattr(multiprocessing.process, "_children", ())):
        if worker.name == name:
            worker.join(WAIT)
            return cast("int | None", worker.exitcode)
    return None


def listen() -> None:
    """Write errors that vLLM logs in this process and its forks to the file in PLACE, if set."""
    place = os.environ.get(PLACE)
    if place is not None:
        listen_to_vllm("errors", partial(_note_error, place))


class EngineErrors:
    """The errors that one engine logs.

    Start the engine inside `capture()`; after it died, get its errors with `read()`.
    """

    def __init__(self) -> None:
        # Has no name, so nothing is left after a kill -9.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record, for `read`, the errors of processes that are started in the `with` block.

        Only one engine may start at a time, because an environment variable names the file.
        """
        me = os.getpid()
        os.environ[PLACE] = f"{me}:/proc/{me}/fd/{self._file.fileno()}"
        try:
            yield
        finally:
            os.environ.pop(PLACE, None)

    def read(self) -> str:
        """Return the first error, which caused the later ones; "" if none, or after `forget`.

        If a signal ended the process, the text names the signal.
        """
        if self._file.closed:
            return ""
        words = os.pread(self._file.fileno(), 4 * MOST_TEXT, 0).partition(b"\n")[0]
        return with_signal(words.decode(errors="replace"))

    def forget(self) -> None:
        """Close the file, which drops the errors."""
        self._file.close()


def with_signal(text: str) -> str:
    """Return vLLM's message `text`; append the signal's meaning if it has a signal's exit code."""
    found = EXIT.search(text) or STARTED.search(text)
    meaning = signal_text(int(found[1])) if found else ""
    return f"{text} ({meaning})" if meaning else text
