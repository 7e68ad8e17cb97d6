"""Expands `~`, $NAME and ${NAME} in the paths and URIs of a job file that its owner runs.

Jobs that come from elsewhere (Prefect's API, a job server) are never expanded: their authors could
read the environment of the machine where the flow runs.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect_raybatch.job.checks import FILE_FUNCTION
from prefect_raybatch.job.faults import FieldPlace
from prefect_raybatch.policy.in_force import policy_in_force

FUNCTION_FIELDS = ("prompt.function", "output.postprocess", "output.schema_model")
# `output.publish` and the catalogs are not expanded: their ${NAME} is filled in where the flow
# runs, so that no record of a run holds the value.
EXPANDED_FIELDS = (
    "source.uri",
    "source.media_root",
    "prompt.chat_template",
    "engine.model",
    "engine.classifier",
    "engine.adapter",
    "engine.adapters",
    "output.escalate.to.model",
    "output.uri",
    "reuse",
    "quality.golden",
    "quality.judge.model",
    "cluster.kubernetes.manifest_file",
    *FUNCTION_FIELDS,
)
_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_INLINE = re.compile(r"\A\s*\{|\{[{%#]|\n")  # a JSON Schema or a Jinja template, not a path

Faults = dict[FieldPlace, str]


def expanded(value: Mapping[str, Any]) -> tuple[dict[str, Any], Faults]:
    """Return (job file's values with paths expanded, {path of field: error} for unset variables).

    The values are a copy. Nothing is expanded in a job that comes through Prefect's API or a job
    server.
    """
    made, faults = copy.deepcopy(dict(value)), Faults()
    if policy_in_force().limited:
        return made, faults
    for field in EXPANDED_FIELDS:
        *groups, name = place = tuple(field.split("."))
        group: Any = made
        for part in groups:
            group = group.get(part) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group:
            group[name] = _expanded(group[name], place, faults)
    return made, faults


def _expanded(value: object, place: FieldPlace, faults: Faults) -> object:
    if isinstance(value, list):
        return [_expanded(inner, (*place, at), faults) for at, inner in enumerate(value)]
    if isinstance(value, dict) and place[-1] == "adapters":
        return {name: _expanded(inner, (*place, name), faults) for name, inner in value.items()}
    if not isinstance(value, str) or _INLINE.search(value):
        return value

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return "$"
        if name not in os.environ:
            faults[place] = (
                f"environment variable {name} is not set; set it, or write $$ for a dollar sign "
                f"(value: {value[:80]!r})"
            )
        return os.environ.get(name, match[0])

    text = _VARIABLE.sub(variable, value)
    if text == "~" or text.startswith("~/"):
        text = os.path.expanduser(text)
    return text


def anchored(value: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of a job file with `folder` put before each relative `file.py:NAME`.

    NAME is a function or class. Changes `value` in place.
    """
    for field in FUNCTION_FIELDS:
        group, name = field.split(".")
        fields = value.get(group)
        if not isinstance(fields, dict):
            continue
        text = fields.get(name)
        if isinstance(text, str) and FILE_FUNCTION.match(text):
            value[group] = {**fields, name: os.path.join(folder.absolute(), text)}
    return value
