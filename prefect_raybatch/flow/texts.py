"""Makes texts storable for Prefect: printable characters that its database accepts.

PostgreSQL rejects NUL, and JSON cannot hold half a surrogate pair. If an event contains one,
Prefect's server drops its whole batch, including events of other runs. If the final state of a flow
run contains one, the server rejects the state, so the flow run stays Running forever. A control
character would reach the terminal of whoever reads the log there.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect_raybatch.harmless import visible
from prefect_raybatch.words import change_texts, storable

_FORMATTER = logging.Formatter()


def prefect_text(text: str) -> str:
    """Return the text with escapes in place of characters that Prefect cannot store or show."""
    return visible(storable(text))


def prefect_text_in(value: Any) -> Any:
    """Return `value` with `prefect_text` applied to all its strings.

    Strings in lists, tuples and mappings are included.
    """
    return change_texts(value, prefect_text)


def make_storable(error: BaseException) -> None:
    """Change an error in place so that its message can be stored in a Prefect state."""
    try:
        message = str(error)
        if prefect_text(message) == message:
            return
    except Exception:  # a user's class without a usable message: left to Prefect
        return
    error.args = tuple(map(prefect_text_in, error.args))
    if isinstance(error, OSError) and isinstance(error.filename, str):
        error.filename = prefect_text(error.filename)


class StorableLines(logging.Filter):
    """Makes log lines storable; for loggers and handlers that send to Prefect."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # logging reports it when the line is written
            return True
        if (stored := prefect_text(message)) != message:
            record.msg, record.args = stored, ()
        if record.exc_info and record.exc_info[0] and not record.exc_text:
            traceback = _FORMATTER.formatException(record.exc_info)
            if (stored := prefect_text(traceback)) != traceback:
                record.exc_text = stored
        return True


STORABLE_LINES = StorableLines()
