"""Loads the functions that a job names.

They come from modules that the operator installed; the owner of a job may also use files and
notebooks (`own_code`).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.function_faults import check_call, check_defined_in, import_failure
from prefect_raybatch.job.openai_batch import REQUEST_FUNCTIONS
from prefect_raybatch.job.own_code.loading import check_owner, function_digest, is_own_code
from prefect_raybatch.job.own_code.shipping import OwnFunction, pickle_by_value
from prefect_raybatch.policy.in_force import POLICY_FILE, policy_in_force

# Modules of Python that `sys.stdlib_module_names` lacks, and a child process's main module.
UNLISTED = ("__mp_main__", "_distutils_hack", "builtins", "test")


def check_module(module: str, field: str) -> None:
    """Raise `ConfigError` if `module` is in the standard library, or if the policy forbids it.

    `field` is the job field that names it. Imports nothing.
    """
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


def check_place(name: str, field: str) -> None:
    """Raise `ConfigError` unless the policy in force allows the function or class `name`.

    `name` is e.g. package.module:function, in the job field `field`. Imports nothing.
    """
    if is_own_code(name):
        check_owner(name, field)
    elif name not in REQUEST_FUNCTIONS:
        check_module(name.partition(":")[0], field)


def load_function(name: str, field: str) -> Callable[..., Any]:
    """Return the callable `name`: package.module:function, file.py:function or __main__:function.

    Raises `ConfigError` that names the job field `field` if it cannot be loaded, or cannot be
    called with a row.
    """
    if is_own_code(name):
        own = name if isinstance(name, OwnFunction) else OwnFunction(name, field)
        function = own.load()
    else:
        function = _module_function(name, field)
    if not callable(function):
        raise ConfigError(f"{field}: {name} is no function; correct the name")
    check_call(function, name, field)
    return function


def _module_function(name: str, field: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    check_place(name, field)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if _is_inside(module_name, error):
            raise ConfigError(f"{field}: {import_failure(module_name, error)}") from None
        raise ConfigError(
            f"{field}: module {module_name!r} cannot be imported ({error}); install it where the "
            "driver and the workers run, or set PYTHONPATH to the folder that holds it. For a file "
            f"beside the job file, write {module_name.rpartition('.')[2]}.py:{attribute}"
        ) from None
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise ConfigError(f"{field}: {import_failure(module_name, error)}") from None
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{field}: {module_name} has no function {attribute!r}; correct the name")
    check_defined_in(function, module_name, attribute, field)
    return function


def _is_inside(module: str, error: ImportError) -> bool:
    """Return whether `module` itself was found. If so, `error` comes from an import inside it."""
    missing = error.name or ""
    return not (module == missing or module.startswith(f"{missing}."))


def source_digest(name: str, field: str) -> str:
    """Return the SHA-256 (hex) of the whole source file that defines a function.

    If there is no source file, hashes the function's own source instead. For a builtin, hashes
    `name`. For a function from a file or notebook, returns its `function_digest`, and first checks
    that it can be pickled. Raises `ConfigError` if the function cannot be loaded or pickled.
    """
    function = load_function(name, field)
    if is_own_code(name):
        pickle_by_value(name, field)
        return function_digest(name, field)
    try:
        data = Path(inspect.getsourcefile(function) or "").read_bytes()
    except (OSError, TypeError):
        try:
            data = inspect.getsource(function).encode()
        except (OSError, TypeError):
            data = name.encode()
    return hashlib.sha256(data).hexdigest()
