"""Prints to the terminal.

All text for people is printed through `out` and `err`, so that no control character of a row, a
file name or an error reaches the terminal.
"""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import TracebackType
from typing import Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from prefect_raybatch.harmless import visible

UNFOLDED = 10_000  # width of a table that is printed into a file
_FORMATTER = logging.Formatter()
# The base class of argument errors: newer versions of Typer contain a copy of click, whose class
# is not click's own.
_ARGUMENT_ERROR = cast(
    type[Exception],
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)


class Terminal(Console):
    """A console that escapes hidden characters, such as control characters, in its output.

    It prints no hyperlinks.
    """

    @property
    def options(self) -> ConsoleOptions:
        """Return rich's options: the terminal's width, or no limit for a file or a pipe.

        Programs read files and pipes, so tables must not be folded in them.
        """
        options = super().options
        folds = self.is_terminal or "COLUMNS" in self._environ
        return options if folds else options.update_width(UNFOLDED)

    def render_str(self, text: str, **options: Any) -> Text:
        # Escaped before rich measures the text, so that tables have room for the escapes.
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


# Emoji codes are off, so that `:x:` in a row is printed unchanged.
out = Terminal(highlight=False, soft_wrap=True, emoji=False)
err = Terminal(highlight=False, soft_wrap=True, emoji=False, stderr=True)


class HelpfulCommand(TyperCommand):
    """A command whose `--help` shows no `<bool>` beside flags.

    In the program's list of commands, its description has no full stop at the end.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.help:
            self.help = _paragraphs(self.help)
            self.short_help = self.short_help or self.help.partition("\n\n")[0].rstrip(".")

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))


class VisibleGroup(TyperGroup):
    """The program: a Typer group of all commands.

    `order` lists the names of commands in the order of `--help`. Errors in the arguments are
    printed with hidden characters escaped, because they quote what the user typed.
    """

    order: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = _paragraphs(self.help or "")

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: [*self.order, name].index(name))

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            near = [other for other in names if other.startswith(name)]
            near = near or get_close_matches(name, names)
            ctx.fail(f"There is no command {name!r}.{_did_you_mean(near)}")
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*arguments, **extra)
        try:
            status = super().main(*arguments, **extra)
        except _ARGUMENT_ERROR as error:
            _print_argument_error(error)
            sys.exit(getattr(error, "exit_code", 2))
        except typer.Abort:
            err.print("Aborted.")
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


def _paragraphs(text: str) -> str:
    """Return a docstring with each paragraph on one line, so that it fills the terminal's width."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _plain_flags(params: list[Any]) -> list[Any]:
    """Change the help of flags among `params` in place; return `params`.

    No type is shown for a flag, because `<bool>` would suggest that it takes a value, and the full
    stop at the end of its help is removed (Typer's own `--help` has one).
    """
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
            param.help = (param.help or "").rstrip(".")
    return params


def _did_you_mean(names: Sequence[str]) -> str:
    """Return e.g. " Did you mean 'status'?", or "" without names."""
    return f" Did you mean {' or '.join(repr(name) for name in names)}?" if names else ""


def _print_argument_error(error: Any) -> None:
    """Print the usage of the command and what is wrong with its arguments."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already
        return
    context = getattr(error, "ctx", None)
    if context is not None:
        err.print(context.get_usage(), markup=False)
        err.print(f"Try '{context.command_path} --help' for help.", markup=False)
    err.print("[red]Error[/]: ", end="")
    message = error.format_message()
    if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        message = f"There is no option {option!r}.{_did_you_mean(error.possibilities or ())}"
    err.print(message, markup=False)


@contextmanager
def visible_logs() -> Iterator[None]:
    """Escape hidden characters in all log records that this process creates in the `with` block."""
    default_factory = logging.getLogRecordFactory()

    def record_factory(*args: Any, **options: Any) -> logging.LogRecord:
        record = default_factory(*args, **options)
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # logging reports it when it prints the record
            return record
        if (shown := visible(message)) != message:
            record.msg, record.args = shown, ()
        if record.exc_info and record.exc_info[0]:
            record.exc_text = visible(_FORMATTER.formatException(record.exc_info))
        return record

    logging.setLogRecordFactory(record_factory)
    try:
        yield
    finally:
        logging.setLogRecordFactory(default_factory)


def print_traceback(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Print an unexpected error as Python does.

    Use it as `sys.excepthook`; the message may quote a row.
    """
    err.print("".join(traceback.format_exception(kind, error, where)), markup=False, end="")


def show_tracebacks_visibly() -> None:
    """Make the interpreter print an uncaught error through `print_traceback`."""
    sys.excepthook = print_traceback
