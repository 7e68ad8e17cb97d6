"""Passes vLLM's log records in this process to listeners, even if vLLM replaces its handlers.

vLLM (0.32) configures its loggers again in an engine's core process. That removes earlier log
handlers, but not the factory of log records, which vLLM only wraps. So the listeners are called by
a factory, not by a handler.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

RecordListener = Callable[[logging.LogRecord], None]

_listeners: dict[str, RecordListener] = {}
_taps: list[
    Callable[..., logging.LogRecord]
] = []  # holds the record factory of this module once it is installed


def listen_to_vllm(what: str, listener: RecordListener | None) -> None:
    """Call `listener` with each record that vLLM's loggers emit; None removes the listener.

    `what` names the listener; an earlier one with that name is replaced. Processes forked from this
    one inherit its listeners. A listener's errors are dropped.
    """
    if listener is None:
        _listeners.pop(what, None)
        return
    _listeners[what] = listener
    if not _taps:
        _taps.append(partial(_made, logging.getLogRecordFactory()))
        logging.setLogRecordFactory(_taps[0])


def _made(
    make: Callable[..., logging.LogRecord], *arguments: Any, **options: Any
) -> logging.LogRecord:
    record = make(*arguments, **options)
    if record.name.partition(".")[0] == "vllm":
        for listener in list(_listeners.values()):
            with contextlib.suppress(Exception):
                listener(record)
    return record
