"""Text on its way to Prefect, in characters that its database holds.

PostgreSQL refuses NUL, and JSON half a surrogate pair. Of an event with one Prefect's server drops
the whole batch, other runs' events included; a final state with one it refuses, and the flow run
says Running for ever.
"""

from __future__ import annotations

import logging

from prefect_raybatch.words import storable, storable_in

_FORMATTER = logging.Formatter()


def make_storable(error: BaseException) -> None:
    """Changes what the error says, of which Prefect makes the message of a state, where it must."""
    try:
        said = str(error)
        if storable(said) == said:
            return
    except Exception:  # a user's own class: Prefect says itself what it makes of that
        return
    error.args = tuple(map(storable_in, error.args))
    if isinstance(error, OSError) and isinstance(error.filename, str):
        error.filename = storable(error.filename)


class StorableLines(logging.Filter):
    """Of loggers and handlers that send to Prefect: changes lines where it must."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # logging itself says so, when the line is written
            return True
        if (kept := storable(said)) != said:
            record.msg, record.args = kept, ()
        if record.exc_info and record.exc_info[0] and not record.exc_text:
            told = _FORMATTER.formatException(record.exc_info)
            if (kept := storable(told)) != told:
                record.exc_text = kept
        return True


STORABLE_LINES = StorableLines()
