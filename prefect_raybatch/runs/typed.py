"""The command line of this process, completed so that repeating it continues the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from prefect_raybatch.job.secrets import (
    ARGUMENT,
    FREE_ARGUMENTS,
    MASK,
    SECRET_WORD,
    hide_users,
    safe_option,
)
from prefect_raybatch.job.variables import VARIABLE
from prefect_raybatch.yaml_text import read_yaml

SECRET_GROUPS = FREE_ARGUMENTS.union(
    ("options", "env", "env_vars", "headers", "catalog", "client_kwargs")
)

_typed: ContextVar[tuple[str, ...]] = ContextVar("typed", default=())


@contextmanager
def typed_command(words: Sequence[str]) -> Iterator[None]:
    """Record `words` as this process's command line within the block, with secret values masked."""
    token = _typed.set(tuple(without_secrets(words)))
    try:
        yield
    finally:
        _typed.reset(token)


def name_typed_run(run_key: str) -> None:
    """Add the run key to the recorded `raybatch run` command, so that it repeats this run."""
    words = _typed.get()
    if words[1:2] == ("run",):
        _typed.set(_with_option(words, "--run-key", run_key))


def typed_words(
    run_key: str | None = None, changes: Mapping[str, object] | None = None
) -> list[str]:
    """Return the recorded command line, completed so that repeating it continues the run.

    `run_key` becomes the `--run-key` of a `raybatch run`; `changes` (field: value) are added as
    `--set` options to a `raybatch run` or `retry-failed`. Empty if this process was not started by
    a `raybatch` command, e.g. in a Prefect worker.
    """
    words = _typed.get()
    if run_key is not None and words[1:2] == ("run",):
        words = _with_option(words, "--run-key", run_key)
    if words[1:2] in {("run",), ("retry-failed",)}:
        for field, value in (changes or {}).items():
            words = (*words, "--set", f"{field}={json.dumps(value)}")
    return [*words]


def _with_option(words: Sequence[str], option: str, value: str) -> tuple[str, ...]:
    """Return the words with the option's value, replacing an existing one."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return (*kept, option, value)


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words, with the value of each FIELD=VALUE masked if it may be a credential.

    The credentials in a URI are masked as well.
    """
    return [_shown_word(word) for word in words]


def _shown_word(word: str) -> str:
    word = str(hide_users(word))  # the whole: "=" may be in a URL, even in its password
    option = "--set=" if word.startswith("--set=") else ""
    field, equals, text = word.removeprefix(option).partition("=")
    if not equals:
        return word
    try:
        value = read_yaml(text).value
    except ValueError:  # perhaps a mapping with a credential and a syntax error
        return f"{option}{field}={MASK}" if {"{", ":"} & set(text) else word
    if isinstance(value, str) and VARIABLE.fullmatch(value):  # names the secret and holds none
        return word
    *groups, name = field.split(".")
    names = [*groups, name, *_names_within(value)]
    is_safe = safe_option(name) and len(names) == len(groups) + 1
    may_be_secret = any(name in SECRET_GROUPS or _names_key(name) for name in names)
    return f"{option}{field}={MASK if may_be_secret and not is_safe else text}"


def _names_within(value: object) -> Iterator[str]:
    """Yield the keys of all mappings in a value."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _names_within(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names_within(inner)


def _names_key(name: str) -> bool:
    return bool(ARGUMENT.search(name) or SECRET_WORD.search(name))
