"""Environment variables in a job's texts, written ${NAME} and filled in where the flow runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from prefect_raybatch.errors import ConfigError

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def fill_variables(value: object, where: str) -> Any:
    """Return a text, or the texts in nested mappings, with environment variables filled in.

    Any other value, such as a list, is unchanged. Raises `ConfigError` for an unset variable;
    `where` is the field of `value`, for the error.
    """
    if isinstance(value, Mapping):
        return {name: fill_variables(inner, f"{where}.{name}") for name, inner in value.items()}
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        try:
            return os.environ[match[1]]
        except KeyError:
            raise ConfigError(
                f"{where}: environment variable {match[1]} is not set; set it where the flow runs"
            ) from None

    return VARIABLE.sub(variable, value)
