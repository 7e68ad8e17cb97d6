"""Reads the operator's policy from its YAML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from prefect_raybatch.bounded import read_regular_file
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.policy.allowed import SECRETS
from prefect_raybatch.policy.policy import ANY, MOST_WORKERS, JobPolicy, KubernetesLimits
from prefect_raybatch.schemes import STORES
from prefect_raybatch.yaml_text import read_yaml

MAX_POLICY_BYTES = 1 << 20
LISTS = (
    *("read", "write", "hosts", "function_modules", "engine_variables", "engine_arguments"),
    *("secrets", "blocks"),
)
FIELDS = (*LISTS, "allow_private", "kubernetes")


def read_policy(path: str) -> JobPolicy:
    """Return the policy that a YAML file holds.

    Raises `ConfigError`, naming file and field, for anything invalid or unknown: a policy without
    its wrong entries would not be the one that the operator wrote.
    """
    try:
        data = read_regular_file(path, MAX_POLICY_BYTES + 1)
        if len(data) > MAX_POLICY_BYTES:
            raise ConfigError(f"{path}: too large for a policy (over 1 MiB)")
        value = read_yaml(data.decode()).value
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: the policy cannot be read: {error}. Correct RAYBATCH_POLICY, or unset it for "
            "the strict default"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply for a policy. Correct it") from None
    except ValueError as error:
        lines = str(error).split("\n")
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None
    values = _mapping({} if value is None else value, path, FIELDS)
    folder = os.path.dirname(os.path.abspath(path))
    lists: dict[str, Any] = {
        name: _texts(values[name], f"{path}: {name}") for name in LISTS if name in values
    }
    for name in ("read", "write"):
        if name in lists:
            lists[name] = tuple(_place(one, folder, f"{path}: {name}") for one in lists[name])
    if "secrets" in lists:
        lists["secrets"] = (*SECRETS, *lists["secrets"])
    return JobPolicy(
        title=f"the policy in {path}",
        allow_private=_boolean(values.get("allow_private", False), f"{path}: allow_private"),
        kubernetes=_kubernetes(values.get("kubernetes") or {}, f"{path}: kubernetes"),
        **lists,
    )


def _kubernetes(value: object, where: str) -> KubernetesLimits:
    given = _mapping(value, where, tuple(one.name for one in fields(KubernetesLimits)))
    limits: dict[str, Any] = {}
    for name, item in given.items():
        if name in ("manifest", "privileged"):
            limits[name] = _boolean(item, f"{where}.{name}")
        elif name == "max_workers":
            if type(item) is not int or not 0 <= item <= MOST_WORKERS:
                raise ConfigError(f"{where}.{name}: must be an integer from 0 to {MOST_WORKERS}")
            limits[name] = item
        else:
            limits[name] = _texts(item, f"{where}.{name}")
    return KubernetesLimits(**limits)


def _mapping(value: object, where: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a mapping with the fields {', '.join(known)}")
    for name in value:
        if name not in known:
            raise ConfigError(
                f"{where}: unknown field {str(name)!r}. The fields are {', '.join(known)}"
            )
    return value


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"{where}: must be a list of texts, such as [a, b]")
    return tuple(value)


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: must be true or false")
    return value


def _place(text: str, folder: str, where: str) -> str:
    """Return an entry of `read` or `write`; a relative local path is resolved against `folder`.

    URIs and the entry `*` are returned unchanged. Raises `ConfigError`, which begins with `where`,
    for any other entry that contains `*`, and for a scheme that is not supported.
    """
    if text == ANY:
        return text
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme not in ("", "file", *STORES) or "*" in text:
        raise ConfigError(
            f"{where}: {text!r} is not a folder. Write a local folder or s3://bucket/prefix "
            "(or gs://, az://) without wildcards, or * for any"
        )
    if scheme:
        return text
    return os.path.normpath(os.path.join(folder, os.path.expanduser(text)))
