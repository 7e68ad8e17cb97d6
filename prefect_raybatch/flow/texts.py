"""Text on its way to Prefect, in characters that its database holds and that people see.

PostgreSQL refuses NUL, and JSON half a surrogate pair. Of an event with one Prefect's server drops
the whole batch, other runs' events included; a final state with one it refuses, and the flow run
says Running for ever. A control character would reach the terminal of whoever reads the log there.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect_raybatch.harmless import visible
from prefect_raybatch.words import change_texts, storable

_FORMATTER = logging.Formatter()


def prefect_text(text: str) -> str:
    """Return the text as Prefect is given it."""
    return visible(storable(text))


def prefect_text_in(value: Any) -> Any:
    """Return the same value, with the texts in it as Prefect is given them."""
    return change_texts(value, prefect_text)


def make_storable(error: BaseException) -> None:
    """Changes what the error says, of which Prefect makes the message of a state, where it must."""
    try:
        said = str(error)
        if prefect_text(said) == said:
            return
    except Exception:  # a user's own class: Prefect says itself what it makes of that
        return
    error.args = tuple(map(prefect_text_in, error.args))
    if isinstance(error, OSError) and isinstance(error.filename, str):
        error.filename = prefect_text(error.filename)


class StorableLines(logging.Filter):
    """Of loggers and handlers that send to Prefect: changes lines where it must."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # logging itself says so, when the line is written
            return True
        if (kept := prefect_text(said)) != said:
            record.msg, record.args = kept, ()
        if record.exc_info and record.exc_info[0] and not record.exc_text:
            told = _FORMATTER.formatException(record.exc_info)
            if (kept := prefect_text(told)) != told:
                record.exc_text = kept
        return True


STORABLE_LINES = StorableLines()
