"""Loads the functions that a job names, only from modules that the operator installed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.policy.in_force import POLICY_FILE, policy_in_force

# Parts of Python that `sys.stdlib_module_names` leaves out, and what a process was started with.
UNLISTED = ("__main__", "__mp_main__", "_distutils_hack", "builtins", "test")


def check_module(module: str, field: str) -> None:
    """Raise `ConfigError` unless the policy allows functions of `module`. Imports nothing."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in UNLISTED:
        raise ConfigError(
            f"{field}: {module!r} is part of Python; name a function in a module of your own"
        )
    policy = policy_in_force()
    if not policy.may_use_module(module):
        allowed = ", ".join(policy.function_modules) or "no module"
        raise ConfigError(
            f"{field}: under {policy.title}, functions may come from {allowed}, not from "
            f"{module!r}; add the module to function_modules in the file of {POLICY_FILE} where "
            "the flow runs"
        )


def check_defined_in(value: object, module: str, attribute: str, field: str) -> None:
    """Raise `ConfigError` unless a function or class is defined in the module that names it.

    A name that a module only imports may be anything, such as `subprocess.check_call`.
    """
    while isinstance(value, (functools.partial, functools.partialmethod)):
        value = value.func
    home = getattr(value, "__module__", None)
    if home == module:
        return
    if not isinstance(home, str):
        raise ConfigError(
            f"{field}: {module}:{attribute} does not say which module defines it; define a "
            "function that calls it, and name that"
        )
    raise ConfigError(
        f"{field}: {module}:{attribute} is defined in {home}, not in {module}; write "
        f"{home}:{getattr(value, '__name__', attribute)}, or define a function in {module} that "
        "calls it"
    )


def load_function(name: str, field: str) -> Callable[..., Any]:
    """Return the callable `package.module:function`.

    Raises `ConfigError` that names `field` if it cannot be loaded.
    """
    module_name, _, attribute = name.partition(":")
    check_module(module_name, field)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{field}: module {module_name!r} cannot be imported ({error}); install it where the "
            "driver and the workers run, or set PYTHONPATH to the folder that holds it"
        ) from None
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ConfigError(f"{field}: {import_failure(module_name, error)}") from None
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{field}: {module_name} has no function {attribute!r}; correct the name")
    check_defined_in(function, module_name, attribute, field)
    return function


def import_failure(module: str, error: BaseException) -> str:
    """Return in a line what a module's own code raised on import, and where."""
    if isinstance(error, SyntaxError):
        reason, place = error.msg, f"{error.filename}, line {error.lineno}"
    else:
        reason = (str(error).splitlines() or [""])[0]
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename}, line {frames[-1].lineno}"
    return (
        f"importing module {module!r} fails with {type(error).__name__}: {reason} ({place}); "
        "correct the module"
    )


def source_digest(name: str, field: str) -> str:
    """Return the SHA-256 of the source file of the function's module.

    It changes with a helper in the same file too.

    Falls back to the function's own source, then to its name (a builtin has none).
    """
    function = load_function(name, field)
    try:
        data = Path(inspect.getsourcefile(function) or "").read_bytes()
    except (OSError, TypeError):
        try:
            data = inspect.getsource(function).encode()
        except (OSError, TypeError):
            data = name.encode()
    return hashlib.sha256(data).hexdigest()
