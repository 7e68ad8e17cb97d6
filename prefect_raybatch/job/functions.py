"""Loads the functions a job names; only from importable modules that the operator installed."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.trust import check_module


def load_function(name: str, field: str) -> Callable[..., Any]:
    """The callable `package.module:function`; `ConfigError` names `field` when it cannot be had."""
    module_name, _, attribute = name.partition(":")
    check_module(module_name, field)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{field}: module {module_name!r} cannot be imported ({error}); install it where the "
            "driver and the workers run"
        ) from None
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ConfigError(f"{field}: {import_failure(module_name, error)}") from None
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{field}: {module_name} has no function {attribute!r}")
    return function


def import_failure(module: str, error: BaseException) -> str:
    """Say in a line what a module's own code raised on import, and where."""
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
    """SHA-256 of the source file of the function's module: a changed helper beside it counts too.

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
