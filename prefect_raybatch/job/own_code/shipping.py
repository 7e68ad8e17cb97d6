"""Sends users' functions to Ray's workers by value, because workers lack the file or notebook."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.own_code.loading import MAIN, is_own_code, load_user_function


class OwnFunction(str):
    """The name of a function that workers cannot import; pickling it includes the function itself.

    `field` is the job field that names the function. `payload` is the pickled function in a worker,
    None in the process that defines it. `sent` caches the first pickle, so all tasks of a run get
    the same function even if its file changes meanwhile.
    """

    field: str
    payload: bytes | None
    sent: bytes | None

    def __new__(cls, name: str, field: str, payload: bytes | None = None) -> OwnFunction:
        made = super().__new__(cls, name)
        made.field, made.payload, made.sent = field, payload, payload
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self.sent is None:
            # Finalizing needs no function: if its file is gone, only a worker that calls it fails.
            with suppress(ConfigError):
                self.sent = pickle_by_value(self, self.field)
        return OwnFunction, (str(self), self.field, self.sent)

    def __deepcopy__(self, memo: object) -> OwnFunction:
        return self

    def load(self) -> Callable[..., Any]:
        """Return the function; raise `ConfigError` if this process cannot load it."""
        if self.payload is None:
            function: Callable[..., Any] = load_user_function(self, self.field)
            return function
        try:
            return _unpacked(self.payload)
        except Exception as error:  # whatever a module that it uses does on import
            raise ConfigError(
                f"{self.field}: {self} cannot be loaded on this node "
                f"({type(error).__name__}: {error}); install what it imports there"
            ) from None


def shipped(name: str | None, field: str) -> str | None:
    """Return a function's name as an `OwnFunction` if workers cannot import the function.

    Returns the name of any other function, and None, unchanged. `field` is the job field that names
    the function, for errors.
    """
    return OwnFunction(name, field) if name is not None and is_own_code(name) else name


def pickle_by_value(name: str, field: str) -> bytes:
    """Return a function pickled together with what it uses from its file or notebook.

    Raises `ConfigError` that begins with the job field `field`, if the function cannot be loaded or
    uses something that cannot be pickled.
    """
    import cloudpickle

    function = load_user_function(name, field)
    module = sys.modules[function.__module__]
    if module.__name__ != MAIN:  # cloudpickle always pickles __main__ by value
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:  # whatever pickling a value of the user's raises
        raise ConfigError(
            f"{field}: {name} uses something that cannot be sent to other processes "
            f"({type(error).__name__}: {error}); create it within the function"
        ) from None
    return data


@lru_cache(maxsize=16)  # one copy per process, so that a function keeps its state
def _unpacked(payload: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = pickle.loads(payload)
    return function
