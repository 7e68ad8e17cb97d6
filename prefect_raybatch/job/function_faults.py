"""Checks the functions that a job names, with messages that give the function's file and line."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from prefect_raybatch.errors import ConfigError


def check_defined_in(
    value: object, module: str, attribute: str, field: str, place: str | None = None
) -> None:
    """Raise `ConfigError` unless the function or class `value` is defined in `module`.

    A name that a module only imports may be anything, such as `subprocess.check_call`. `attribute`
    is the name in the module, and `field` is the job field that names it. `place` is the module as
    the job writes it, for example a file; None if it is the same text as `module`.
    """
    while isinstance(value, (functools.partial, functools.partialmethod)):
        value = value.func
    if not callable(value):
        kind = type(value).__name__
        raise ConfigError(
            f"{field}: {place or module}:{attribute} is no function or class, but of type {kind}; "
            "correct the name"
        )
    home = getattr(value, "__module__", None)
    if home == module:
        return
    place = place or module
    if not isinstance(home, str):
        raise ConfigError(
            f"{field}: {place}:{attribute} does not say which module defines it; define a "
            "function that calls it, and name that"
        )
    raise ConfigError(
        f"{field}: {place}:{attribute} is defined in {home}, not in {place}; write "
        f"{home}:{getattr(value, '__name__', attribute)}, or define a function in {place} that "
        "calls it"
    )


def check_call(function: Callable[..., Any], name: str, field: str) -> None:
    """Raise `ConfigError` if a function cannot be called with a row, or is async or a generator.

    `name` is how the job names it, in the job field `field`.
    """
    called = (function, type(function).__call__)  # the latter for an object with __call__
    if any(inspect.iscoroutinefunction(one) for one in called):
        raise ConfigError(f"{field}: {name} is async{defined_at(function)}; write it with `def`")
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in called):
        raise ConfigError(
            f"{field}: {name} is a generator{defined_at(function)}; write `return`, not `yield`"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind({})
    except TypeError as error:
        raise ConfigError(
            f"{field}: {name}{signature} cannot be called with one argument, the row: {error}"
            f"{defined_at(function)}; change its parameters"
        ) from None


def defined_at(function: object) -> str:
    """Return " (FILE, line N)" for a function, to append to a message; "" if that is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def import_failure(module: str, error: BaseException) -> str:
    """Return a one-line message: what a module's own code raised on import, and where."""
    if isinstance(error, SyntaxError):
        reason, place = error.msg, f"{error.filename}, line {error.lineno}"
    else:
        reason = (str(error).splitlines() or [""])[0]
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
        last = (own or frames)[-1]
        place = f"{last.filename}, line {last.lineno}"
    return (
        f"importing module {module!r} fails with {type(error).__name__}: {reason} ({place}); "
        "correct the module"
    )
