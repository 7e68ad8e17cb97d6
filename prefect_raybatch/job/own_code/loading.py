"""Loads functions and classes that no worker can import: `file.py:NAME` and `__main__:NAME`.

Only a job that its owner starts on the command line or in Python may name them. A job that arrives
through Prefect's API or a job server may not, whatever the operator's policy allows, because its
author could name any file of the machine.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import threading
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from prefect_raybatch.bounded import read_regular_file
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import FILE_FUNCTION, missing_path
from prefect_raybatch.job.function_faults import check_defined_in, import_failure
from prefect_raybatch.policy.in_force import POLICY_FILE, policy_in_force

MAIN = "__main__"  # a notebook, or the script that Python was started with
MOST_CODE_BYTES = 4 << 20  # of a file with functions

_lock = threading.RLock()  # loading a file may load another
_modules: dict[str, tuple[str, ModuleType]] = {}  # by path: the digest of its content, the module


def is_own_code(name: str) -> bool:
    """Return whether `name` is `file.py:NAME` or `__main__:NAME`, which workers cannot import."""
    return FILE_FUNCTION.match(name) is not None or name.startswith(f"{MAIN}:")


def name_of_function(value: object) -> object:
    """Return a function or class as the text `module:name`; return any other value unchanged.

    Raises ValueError for a callable that is not defined at the top level of a module.
    """
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or not name.isidentifier():
        raise ValueError(
            f"{name or value!r} cannot be found by a name; define it at the top level with `def`"
        )
    return f"{module}:{name}"


def shown_name(name: str) -> str:
    """Return `file.py:NAME` without its folder; moving the file then keeps the run's fingerprint.

    Returns any other name unchanged.
    """
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).name}:{attribute}" if is_own_code(name) else name


def check_owner(name: str, field: str) -> None:
    """Raise `ConfigError` if the job's policy forbids functions from files and notebooks.

    Only a job from its owner may use them. `name` is the function that the job's `field` names.
    Reads no file.
    """
    policy = policy_in_force()
    if policy.limited:
        raise ConfigError(
            f"{field}: under {policy.title}, functions and classes may not come from "
            f"{name.rpartition(':')[0]!r}; move them to an installed module, and add that to "
            f"function_modules in the file of {POLICY_FILE} where the flow runs"
        )


def load_user_function(name: str, field: str) -> Any:
    """Return the function or class of `name`, which is `file.py:NAME` or `__main__:NAME`.

    Executes the file if its content is new. Raises `ConfigError` that begins with the job field
    `field`, if the job may not use the file, or if the file cannot be read or executed or does not
    define the name.
    """
    check_owner(name, field)
    place, _, attribute = name.rpartition(":")
    module = sys.modules[MAIN] if place == MAIN else _file_module(place, field)
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{field}: {_unknown_name(place, attribute, module)}")
    check_defined_in(found, module.__name__, attribute, field, place)
    return found


def _unknown_name(place: str, attribute: str, module: ModuleType) -> str:
    own = [name for name, value in vars(module).items() if _is_defined_in(value, module)]
    close = get_close_matches(attribute, own, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "correct the name"
    if place != MAIN:
        return f"{place} has no function {attribute!r}; {hint}"
    return (
        f"this process has no function {attribute!r} in its notebook or script; {hint} A run with "
        "such a function continues only where it is defined; a file beside the job file "
        "(file.py:function) works everywhere"
    )


def _is_defined_in(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _file_module(path: str, field: str) -> ModuleType:
    """Execute a Python file and return its module; reuse the module if the content is unchanged.

    Raises `ConfigError` that begins with the job field `field`.
    """
    data = read_source_file(path, field)
    digest = hashlib.sha256(data).hexdigest()
    with _lock:
        loaded = _modules.get(path)
        if loaded is not None and loaded[0] == digest:
            return loaded[1]
        unique = hashlib.sha256(f"{path}\n{digest}".encode()).hexdigest()[:16]
        module = ModuleType(f"raybatch_file_{unique}")
        module.__file__ = path
        sys.modules[module.__name__] = module  # dataclasses and pydantic look there
        try:
            # Not by an import: that would leave bytecode beside the user's file, and take a file
            # that was changed within a second for the one before.
            exec(compile(data, path, "exec", dont_inherit=True), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[module.__name__]
            alone = (
                ". Only installed modules can be imported there, not files beside it"
                if isinstance(error, ImportError)
                else ""
            )
            raise ConfigError(f"{field}: {import_failure(path, error)}{alone}") from None
        _modules[path] = digest, module
        return module


def read_source_file(path: str, field: str) -> bytes:
    """Return the bytes of a user's Python file; raise `ConfigError` if unreadable or over 4 MiB."""
    try:
        data = read_regular_file(path, MOST_CODE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{field}: {missing_path(path)}; check the path") from None
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror or error}") from None
    if len(data) > MOST_CODE_BYTES:
        raise ConfigError(f"{field}: {path} has over {MOST_CODE_BYTES:,} bytes; make it smaller")
    return data


def function_digest(name: str, field: str) -> str:
    """Return the SHA-256 of the whole file of `file.py:NAME`, or of the code of `__main__:NAME`.

    In a notebook or script, the hash covers the function and everything there that it uses,
    directly or not: the source of functions and classes, the value of JSON-compatible objects, the
    type of other objects, and the name of modules. Changes in other cells or lines do not change
    it.
    """
    place = name.rpartition(":")[0]
    if place != MAIN:
        return hashlib.sha256(read_source_file(place, field)).hexdigest()
    texts = dict(sorted(_texts(load_user_function(name, field))))
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _texts(first: object) -> Iterator[tuple[str, str]]:
    """Yield (name, text to hash) of an object and of all that it uses in `__main__`, recursively.

    The name of `first` itself is "". The text is the source of what `__main__` defines, and
    `_value_text` of other values.
    """
    main = sys.modules[MAIN]
    pending, seen = [("", first)], {""}
    while pending:
        name, value = pending.pop()
        if not _is_defined_in(value, main):
            yield name, _value_text(value)
            continue
        yield name, _source_text(value)
        for used in sorted(_used_names(value)):
            if used in vars(main) and used not in seen:
                seen.add(used)
                pending.append((used, vars(main)[used]))


def _codes(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of the plain methods of a class, and of inner functions.

    Class methods, static methods and properties are left out.
    """
    members = list(vars(value).values()) if isinstance(value, type) else [value]
    codes = [inspect.unwrap(one).__code__ for one in members if inspect.isfunction(one)]
    while codes:
        code = codes.pop()
        yield code
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _used_names(value: object) -> set[str]:
    return {name for code in _codes(value) for name in code.co_names}


def _source_text(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):  # typed at a Python prompt: use the compiled code
        return repr([(c.co_code, c.co_names, _plain_constants(c)) for c in _codes(value)])


def _plain_constants(code: CodeType) -> list[object]:
    return [one for one in code.co_consts if not isinstance(one, CodeType)]


def _value_text(value: object) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__module__}.{type(value).__qualname__}"
