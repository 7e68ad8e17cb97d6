"""Checks of a job that need neither the input nor a cluster."""

from __future__ import annotations

import difflib
import math
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.secrets import USERINFO
from prefect_raybatch.schemes import (
    EXTRAS,
    INSTALL,
    STORES,
    SUPPORTED,
    check_cloud_options,
    names_account,
    store_scheme,
)

LONGEST_NAME = 128  # characters
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}\Z")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
FILE_FUNCTION = re.compile(r"[^\n\0]+\.py:[A-Za-z_]\w*\Z")
# No user:password@, which would be kept in clear, and no path: Ray's client appends its own.
SERVER = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?/?\Z")
SCHEMES = ("", "file", *STORES)
WEB_SCHEMES = ("http", "https")  # of single files that are read
RESERVED = "__rb_"  # prefix of this package's own columns in a block
BRACES = "write {{ and }} for literal braces"


def check_name(value: str) -> str:
    """Return `value` if it is a valid name of a job or target; raise ValueError otherwise."""
    if not NAME.match(value):
        raise ValueError(
            f"{value!r} is not a valid name; use up to 128 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit"
        )
    return value


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


CheckedValue = TypeVar("CheckedValue")


def run_checks(checks: Iterable[Callable[[CheckedValue], None]], value: CheckedValue) -> None:
    """Run all checks; raise one ValueError with a line for each that fails."""
    faults: dict[str, None] = {}
    for check in checks:
        try:
            check(value)
        except ValueError as error:
            faults.update(dict.fromkeys(str(error).splitlines()))
    if faults:
        raise ValueError("\n".join(faults))


def seconds_of(text: str) -> float:
    """Return a duration such as `90s`, `15m`, `2h` or `3d` in seconds.

    Raises `ConfigError` for anything else.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; write for example 90s, 15m, 2h or 3d")
    return float(match[1]) * UNITS[match[2]]


def check_duration(text: str | None) -> str | None:
    """Return the text of a duration above zero, such as 15m (see `seconds_of`); None stays None.

    Raises ValueError for anything else.
    """
    if text is not None:
        try:
            seconds = seconds_of(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if not seconds:
            raise ValueError(f"{text!r} is zero; write a longer time, such as 15m or 6h")
    return text


def without_user(uri: str) -> str:
    """Return `uri`; raise ValueError if it contains a user or a password.

    The message does not quote `uri`. A valid Azure account in an abfss:// or similar URI is
    allowed.
    """
    if names_account(uri):
        return uri
    bucket = uri.partition("://")[2].partition("/")[0]
    if store_scheme(uri) == "az" and "@" in bucket and ":" not in bucket:
        raise ValueError(
            "names no account of core.windows.net, whose names are 3 to 24 small letters and "
            "digits; write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/path in this order, or "
            "write az://container/path, and put account_name and endpoint into options"
        )
    if USERINFO.search(uri):
        raise ValueError(
            "contains a user or key before an @; write s3://bucket/key, and put keys into options, "
            "a credentials_block or the environment"
        )
    return uri


def check_options(uri: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for an option that a Google or Azure store does not have.

    Options of other stores, such as S3, are not checked.
    """
    try:
        check_cloud_options(uri, options)
    except ValueError as error:
        raise ValueError(f"options: {error}") from None


def check_uri(uri: str) -> str:
    """Return `uri`, a local path, file:// or object store URI; raise ValueError for any other."""
    if not uri or not uri.strip() or "\x00" in uri:
        raise ValueError("is empty; write a path such as data/customers.csv or s3://bucket/key")
    without_user(uri)
    scheme = uri.split("://", 1)[0].lower() if "://" in uri else ""
    if scheme not in SCHEMES:
        raise ValueError(
            f"{uri!r} has the unsupported scheme {scheme!r}; write {SUPPORTED} ({INSTALL})"
        )
    if scheme in STORES and not uri.split("://", 1)[1].split("/", 1)[0]:
        raise ValueError(f"{uri!r} names no bucket; write {STORES[scheme]}://bucket/key")
    bucket = uri.partition("://")[2].partition("/")[0].partition("@")[0]
    if STORES.get(scheme) in EXTRAS and bucket != bucket.lower():
        raise ValueError(
            f"{uri!r} has capitals in the name of its bucket or container, which are not allowed "
            "there; write it in small letters"
        )
    return uri


def missing_path(path: str | os.PathLike[str]) -> str:
    """Return a message that a local path does not exist; it names the folder that was searched."""
    given = os.fspath(path).removeprefix("file://")
    folder, name = os.path.split(os.path.abspath(os.path.expanduser(given)))
    start = "" if os.path.isabs(given) else f" (relative paths start at {os.getcwd()})"
    if not os.path.isdir(folder):
        return f"no folder {folder!r}, in which {name!r} should be{start}"
    return f"no file or folder {name!r} in {folder}{start}"


def is_web(uri: str) -> bool:
    """Return whether `uri` is an http(s) URL."""
    return uri.partition("://")[0].lower() in WEB_SCHEMES and "://" in uri


def check_web(uri: str) -> str:
    """Return `uri`, an http(s) URL; raise ValueError unless its path ends in a file name."""
    without_user(uri)
    place = uri.partition("://")[2].partition("#")[0].partition("?")[0]
    host, _, path = place.partition("/")
    if not host or not path or path.endswith("/"):
        raise ValueError(f"{uri!r} names no file; write http(s)://host/path/file.csv")
    return uri


def check_function(name: str) -> str:
    """Return `name` if it is written as `package.module:function` or `file.py:function`.

    Raises ValueError otherwise. Imports nothing.
    """
    if FILE_FUNCTION.match(name):
        if "://" in name:
            raise ValueError(f"{name!r} is not a local file; write file.py:function")
    elif not FUNCTION.match(name):
        raise ValueError(
            f"{name!r} is not a function name; write package.module:function, or file.py:function "
            "for a file beside the job file"
        )
    return name


def class_name(value: object) -> str | None:
    """Return `value` if it is a text like package.module:Class or file.py:Class, else None."""
    is_name = isinstance(value, str) and (FUNCTION.match(value) or FILE_FUNCTION.match(value))
    return str(value) if is_name else None


def template_fields(template: str) -> tuple[str, ...]:
    """Return the column names that a template uses, in order of first use.

    Only plain `{Column}` fields are allowed ({{ and }} are literal braces). Attribute or index
    access, conversions and format specs raise ValueError, because a job file is untrusted input.
    """
    names: list[str] = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is not a valid template: {error}; {BRACES}") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion or any(c in name for c in ".[]"):
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}"
            shown = " ".join(shown[:80].splitlines())
            raise ValueError(
                f"{{{shown}}} is not a plain {{Column}}; {BRACES}, as in JSON, or use "
                "prompt.function for anything beyond column values"
            )
        if name not in names:
            names.append(name)
    return tuple(names)


def refuse_unknown(
    given: Mapping[str, object],
    known: frozenset[str] | None,
    ours: set[str],
    where: str = "",
    between: str = "\n",
) -> None:
    """Raise ValueError that lists the fields in `given` that are neither in `known` nor in `ours`.

    `known` are vLLM's fields and `ours` this package's; if `known` is None, nothing is checked.
    `where` begins the message about each field; `between` separates the messages.
    """
    unknown = [name for name in given if known is not None and name not in known | ours]
    if known is not None and unknown:
        names = known | ours
        told = [f"{where}unknown field {name!r}{nearest(name, names)}" for name in unknown]
        raise ValueError(between.join(told))


@contextmanager
def with_unknown_fields(
    kind: type[BaseModel], value: object, known: Callable[[], frozenset[str] | None]
) -> Iterator[None]:
    """Add a group's unknown fields to a ValidationError that the `with` block raises.

    Unknown fields are then reported together with the group's other errors. `kind` is the class of
    the group, and `value` its plain values. `known` returns the names of vLLM's fields; if it
    returns None, nothing is added.
    """
    try:
        yield
    except ValidationError as error:
        lines = [_again(line) for line in error.errors(include_url=False)]
        try:
            given = value if isinstance(value, Mapping) else {}
            refuse_unknown(given, known(), set(kind.model_fields))
        except ValueError as unknown:
            if not any(str(unknown) in line["msg"] for line in error.errors(include_url=False)):
                told: InitErrorDetails = {"type": "value_error", "loc": (), "input": value}
                lines.append({**told, "ctx": {"error": unknown}})
        raise ValidationError.from_exception_data(kind.__name__, lines) from None


def _again(line: ErrorDetails) -> InitErrorDetails:
    made: InitErrorDetails = {"type": line["type"], "loc": line["loc"], "input": line["input"]}
    return {**made, "ctx": line["ctx"]} if "ctx" in line else made


def nearest(name: str, known: set[str] | frozenset[str]) -> str:
    """Return "; did you mean 'X'?" with the most similar of the `known` names, or "; remove it"."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "; remove it"


def check_count(value: object, most: int, auto: bool = True) -> Any:
    """Return a whole number from 1 to `most` or, if `auto`, the text auto; else raise ValueError.

    Text of digits counts as a number, because a form sends text.
    """
    if auto and value == "auto":
        return value
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        if not (isinstance(value, float) and value.is_integer()):
            raise ValueError(
                f"is not a whole number{' or auto' if auto else ''}; write for example 4"
            )
        value = int(value)
    if value < 1:
        raise ValueError("must be greater than 0")
    if value > most:
        raise ValueError(f"must be at most {most}")
    return value


def path_of_non_finite(value: object) -> str | None:
    """Return the path of the first NaN or infinity in a plain value, such as `.bias.3`.

    Returns "" if `value` itself is NaN or infinity, and None if there is none in it.
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else ""
    if isinstance(value, Mapping):
        inner: Iterable[tuple[object, object]] = value.items()
    else:
        inner = enumerate(value) if isinstance(value, (list, tuple)) else ()
    for name, item in inner:
        place = path_of_non_finite(item)
        if place is not None:
            return f".{name}{place}"
    return None


def check_run_key(key: str) -> str:
    """Return a run key if it has only letters, digits, '.', '_' and '-' and is a valid folder name.

    Raises `ConfigError` for anything else. Otherwise a key such as `../x` could name a folder
    outside the folder of the runs.
    """
    if not NAME.match(key) or ".." in key:
        raise ConfigError(
            f"run key {key!r} is not valid; use up to 128 letters, digits, '.', '_' and '-', "
            "starting with a letter or digit and without '..'"
        )
    return key
