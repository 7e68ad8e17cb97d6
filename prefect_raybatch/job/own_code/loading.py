"""Loads functions and classes that no worker can import: `file.py:NAME` and `__main__:NAME`.

Only a job that its owner starts on the command line or in Python may name them. A job that arrives
through Prefect's API or a job server may not, whatever the operator's policy allows, because its
author could name any file of the machine.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
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
    """Return `file.py:NAME` without the file's folder; return any other name unchanged.

    So the run's fingerprint stays the same if the file is moved.
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

    Executes the file if its content is new. Raises `ConfigError`, which begins with the job field
    `field`, in these cases:
    - the job may not use functions from files,
    - the file cannot be read or executed,
    - the file or notebook does not define the name.
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
    directly or not. What is hashed depends on the kind of object:
    - functions, classes and decorators: their source,
    - JSON-compatible objects: their value,
    - objects whose class is defined there: their class and attributes,
    - modules: their name,
    - other objects: their type.

    Changes in other cells or lines do not change the hash.
    """
    place = name.rpartition(":")[0]
    if place != MAIN:
        return hashlib.sha256(read_source_file(place, field)).hexdigest()
    texts = dict(sorted(_texts(load_user_function(name, field))))
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _texts(first: object) -> Iterator[tuple[str, str]]:
    """Yield (name, text to hash) of an object and of all that it uses in `__main__`, recursively.

    The name of `first` itself is "". For a function or class that `__main__` defines, the text is
    its source. For any other value, it is `_value_text` of the value.
    """
    main = sys.modules[MAIN]
    pending, seen = [("", first)], {""}
    while pending:
        name, value = pending.pop()
        is_code = _is_defined_in(value, main) and not _is_own_object(value)
        yield name, _source_text(value) if is_code else _value_text(value)
        used = _parts(name, value)
        if is_code:
            used += [(one, vars(main)[one]) for one in sorted(_used_names(value) & set(vars(main)))]
        for place, part in used:
            if place not in seen:
                seen.add(place)
                pending.append((place, part))


def _is_own_object(value: object) -> bool:
    """Return whether `value` is an object, but not a class, whose class `__main__` defines."""
    return type(value).__module__ == MAIN and not isinstance(value, type)


def _parts(name: str, value: object) -> list[tuple[str, object]]:
    """Return (name, object) for what `value` uses although its code does not name it.

    These objects are the function and the arguments of a `functools.partial`, the class of an
    object and the base classes of a class. Classes from other modules than `__main__` are not
    returned.
    """
    parts: list[tuple[str, object]] = []
    if isinstance(value, functools.partial):
        parts = [(f"{name}.func", value.func), (f"{name}.args", [value.args, value.keywords])]
    classes = [type(value), *(value.__bases__ if isinstance(value, type) else ())]
    own = [one for one in classes if one.__module__ == MAIN]
    return parts + [(f"{name}.{one.__qualname__}", one) for one in own]


# What holds the function of a method, property, decorated or partial function.
_HOLDERS = ("__func__", "__wrapped__", "fget", "fset", "fdel", "func")


def _functions(value: Any) -> list[FunctionType]:
    """Return the functions of `__main__` that a function or class consists of.

    They include methods of all kinds, properties, and what decorators wrap and return.
    """
    namespace = vars(sys.modules[MAIN])
    pending, seen = [value], {}
    while pending:
        one = pending.pop(0)
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, type):
            pending += list(vars(one).values()) if one.__module__ == MAIN else []
        elif type(one).__module__ in ("builtins", "functools"):
            pending += [getattr(one, name) for name in _HOLDERS if hasattr(one, name)]
    return [
        one for one in seen.values() if inspect.isfunction(one) and one.__globals__ is namespace
    ]


def _codes(value: Any) -> Iterator[CodeType]:
    """Yield the code of `_functions`, and of the functions within them."""
    codes = [function.__code__ for function in _functions(value)]
    while codes:
        code = codes.pop()
        yield code
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def _used_names(value: object) -> set[str]:
    return {name for code in _codes(value) for name in code.co_names}


def _source_text(value: Any) -> str:
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError):  # typed at a Python prompt: use the compiled code
        return repr([(c.co_code, c.co_names, _plain_constants(c)) for c in _codes(value)])
    for function in _functions(value):
        with suppress(OSError):  # a method that a decorator such as `dataclass` has generated
            source = inspect.getsource(function.__code__)
            text += "" if source in text else source  # what a decorator has put around it
    return text


def _plain_constants(code: CodeType) -> list[object]:
    return [one for one in code.co_consts if not isinstance(one, CodeType)]


def _value_text(value: object) -> str:
    if not _is_own_object(value):
        return _plain_text(value)
    # As at the plan: an attribute that calls change, such as a counter, counts as a change, too.
    held = getattr(value, "__dict__", {})
    attributes = {str(name): _plain_text(one) for name, one in held.items()}
    return f"{_plain_text(value)} {json.dumps(attributes, sort_keys=True)}"


def _plain_text(value: object) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return f"{type(value).__module__}.{type(value).__qualname__}"
