"""Reads a job file as plain values, and changes such values field by field."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import missing_path

if TYPE_CHECKING:
    from prefect_raybatch.yaml_text import YamlText

MAX_JOB_BYTES = 4 << 20


def read_job_file(path: str | Path) -> YamlText:
    """Return the content of a job file, with the lines of its fields.

    Raises `ConfigError` if it is missing, not YAML, not a mapping, or too large, or if it repeats a
    key.
    """
    from prefect_raybatch.yaml_text import read_yaml

    try:
        if Path(path).stat().st_size > MAX_JOB_BYTES:
            raise ConfigError(f"{path}: is larger than 4 MiB; name a job file")
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such job file: {missing_path(path)}; check the path"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        found = read_yaml(text)
    except ValueError as error:
        raise ConfigError("\n".join(f"{path}: {x}" for x in str(error).splitlines())) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply; name a job file") from None
    if not isinstance(found.value, dict):
        glued = isinstance(found.value, str) and ":" in found.value
        space = ", and a space behind each colon" if glued else ""
        raise ConfigError(
            f"{path}: is not a mapping; write the fields name, source, prompt and output{space}"
        )
    return found


def with_line(message: str, path: str) -> str:
    """Return a message about a field, preceded by the job file and the number of the field's line.

    Returns the message unchanged if it does not begin with the name of a field that the file `path`
    sets, or if the file cannot be read.
    """
    named = re.match(r"(\w+(?:\.\w+)+): ", message)
    if named is None:
        return message
    try:
        content = read_job_file(path)
    except ConfigError:
        return message
    *groups, last = named[1].split(".")
    group: Any = content.value
    for name in groups:
        group = group.get(name) if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or last not in group:
        return message
    return f"{path}: line {content.line((*groups, last))}: {message}"


def with_fields(value: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of a job's plain values with `changes`, e.g. {"sampling.max_tokens": 99}.

    Missing groups are created. Raises `ConfigError` if a field is used as a group.
    """
    made = copy.deepcopy(dict(value))
    for field, new in changes.items():
        at = made
        *groups, last = field.split(".")
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{field}: {group} is not a group of fields; correct the name")
        at[last] = new
    return made
