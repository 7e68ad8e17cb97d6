"""Makes texts storable for Prefect, in characters that its database accepts and people can see.

PostgreSQL rejects NUL, and JSON half a surrogate pair. Prefect's server drops the whole batch of an
event with one, including other runs' events, and rejects a final state with one, so the flow run
stays Running forever. A control character would reach the terminal of whoever reads the log there.
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
    """Return the same value with all its texts as Prefect is given them."""
    return change_texts(value, prefect_text)


def make_storable(error: BaseException) -> None:
    """Change the message of an error, which Prefect puts into a state, if it must be changed."""
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
    """A filter for loggers and handlers that send to Prefect; it changes lines where it must."""

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
