"""The one place by which the command line reaches a terminal: no control character of a row, a
file's name or an error passes it.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperGroup

from prefect_raybatch.harmless import visible

_FORMATTER = logging.Formatter()
# Errors of arguments. Newer versions of Typer carry a copy of click, so that it is not click's own.
_ARGUMENT_ERROR = cast(
    type[Exception],
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)


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


class VisibleGroup(TyperGroup):
    """The commands of a program, whose errors of arguments are printed by `err`: they quote what
    was typed, such as the name of a file."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            status = super().main(*given, **extra)
        except _ARGUMENT_ERROR as error:
            _print_argument_error(error)
            sys.exit(getattr(error, "exit_code", 2))
        except typer.Abort:
            err.print("Aborted.")
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _print_argument_error(error: Any) -> None:
    """Print what is wrong with the arguments, and the usage of the command."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already
        return
    context = getattr(error, "ctx", None)
    if context is not None:
        err.print(context.get_usage(), markup=False)
        err.print(f"Try '{context.command_path} --help' for help.", markup=False)
    err.print("[red]Error[/]: ", end="")
    err.print(error.format_message(), markup=False)


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
