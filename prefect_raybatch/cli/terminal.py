"""The one place by which the command line reaches a terminal: no control character of a row, a
file's name or an error passes it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from prefect_raybatch.harmless import visible

_FORMATTER = logging.Formatter()


class Terminal(Console):
    """A console that shows hidden characters as escapes, and makes nothing a hyperlink."""

    def render_str(self, text: str, **options: Any) -> Text:
        # Before it is measured, so that tables have room for the escapes.
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else _harmless_segment(segment)


def _harmless_segment(segment: Segment) -> Segment:
    style = segment.style
    if style is not None and style.link is not None:
        style = style.update_link(None)
    return Segment(visible(segment.text), style)


# Without emoji: `:x:` in a row stays what it is.
out = Terminal(highlight=False, soft_wrap=True, emoji=False)
err = Terminal(highlight=False, soft_wrap=True, emoji=False, stderr=True)


@contextmanager
def visible_logs() -> Iterator[None]:
    """Show hidden characters in all log lines of this process as escapes, whoever prints them."""
    before = logging.getLogRecordFactory()

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        made = before(*args, **more)
        try:
            said = made.getMessage()
        except (TypeError, ValueError, KeyError):  # logging itself says so when it prints the line
            return made
        if (shown := visible(said)) != said:
            made.msg, made.args = shown, ()
        if made.exc_info and made.exc_info[0]:
            made.exc_text = visible(_FORMATTER.formatException(made.exc_info))
        return made

    logging.setLogRecordFactory(record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


def print_traceback(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Print an error that is none of ours as Python does, for `sys.excepthook`: its message may
    quote a row."""
    err.print("".join(traceback.format_exception(kind, error, where)), markup=False, end="")


def show_tracebacks_visibly() -> None:
    """Have the interpreter print the error that ends this process through `print_traceback`."""
    sys.excepthook = print_traceback
