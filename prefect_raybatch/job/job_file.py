"""A job as plain values: read from its file, changed field by field, its faults in words."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import nearest
from prefect_raybatch.job.secrets import hide_users

MAX_JOB_BYTES = 4 << 20
MAX_VALUES = 100_000  # in a job file; a few aliases of aliases can stand for billions


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The values of a job file; `ConfigError` when it is missing, not YAML or no mapping."""
    import yaml

    try:
        if Path(path).stat().st_size > MAX_JOB_BYTES:
            raise ConfigError(f"{path}: is too large to be a job (over 4 MiB)")
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such job file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    # A date such as 2026-99-99 is a ValueError of its own.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be a job") from None
    if not _fits(value):
        raise ConfigError(f"{path}: holds over {MAX_VALUES:,} values (aliases count each time)")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a mapping with name, source, prompt and output")
    return value


def with_fields(value: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A job as plain values with `changes` ({"sampling.max_tokens": 99}) made in a copy of it.

    Groups that are not there are made; `ConfigError` where a field is taken for a group.
    """
    made = copy.deepcopy(dict(value))
    for field, new in changes.items():
        at = made
        *groups, last = field.split(".")
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{field}: {group} is no group of fields")
        at[last] = new
    return made


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """A pydantic error as lines a person can act on: field, what is wrong, value."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        message = hide_users(item["msg"].removeprefix("Value error, "))
        if item["type"] == "extra_forbidden":
            message = f"unknown field{nearest(str(item['loc'][-1]), _siblings(model, item['loc']))}"
        elif item["type"] == "missing":
            message = "is required"
        elif not {*item["loc"]} & {"options", "env", "hf_token"} and not isinstance(
            item.get("input"), (dict, BaseModel)
        ):
            message += f" (value: {hide_users(_short(item.get('input')))!r})"
        lines.append(": ".join(filter(None, (where, path, message))))
    return "\n".join(dict.fromkeys(lines))


def _fits(value: object) -> bool:
    """Whether a value holds at most MAX_VALUES values; stops counting there."""
    waiting, seen = [value], 0
    while waiting and seen <= MAX_VALUES:
        seen += 1
        inner = waiting.pop()
        if isinstance(inner, dict):
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
    return seen <= MAX_VALUES


def _short(value: object) -> str:
    """The start of a value; never all of one that aliases have blown up."""
    if isinstance(value, str):
        return value[:80]
    brief = reprlib.Repr()
    brief.maxlevel = 2
    return (brief.repr(value) if isinstance(value, (list, dict)) else str(value))[:80]


def _siblings(model: type[BaseModel], loc: tuple[int | str, ...]) -> set[str]:
    """The names of all fields of the group in which a field stands."""
    for part in loc[:-1]:
        found = model.model_fields.get(str(part))
        if found is None or not isinstance(found.annotation, type):
            return set()
        if issubclass(found.annotation, BaseModel):
            model = found.annotation
    return {f.alias or name for name, f in model.model_fields.items()}
