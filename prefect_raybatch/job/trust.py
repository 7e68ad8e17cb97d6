"""What a job file may not bring about, since whoever wrote it need not be the operator.

A job names code and settings; whether that code may run is decided where the flow runs, by its
environment, and never by the job itself. docs/security.md has the rules for people.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError, CorruptRun, RayBatchError
from prefect_raybatch.job.checks import class_name

if TYPE_CHECKING:
    import pyarrow as pa

    from prefect_raybatch.job.batch_job import BatchJob

MODULES = "RAYBATCH_FUNCTION_MODULES"
ENGINE_CODE = "RAYBATCH_ALLOW_ENGINE_CODE"
# vLLM arguments that run Python from elsewhere: the model's folder, a named class, a plugin.
RUNS_CODE = frozenset(
    (
        "trust_remote_code",
        "worker_cls",
        "worker_extension_cls",
        "logits_processors",
        "io_processor_plugin",
        "scheduler_cls",
        "model_impl",
        "hf_config_path",
    )
)
HARMLESS = {"worker_cls": "auto", "model_impl": "auto", "trust_remote_code": False}
# Variables that decide which code a process loads.
LOADS_CODE = re.compile(r"LD_.*|PYTHON.*|PATH|BASH_ENV|ENV|VLLM_PLUGINS|.*_PRELOAD", re.IGNORECASE)
CANONICAL = re.compile(r"arrow\.(?!py_extension_type)")  # plain data under another name


def check_trust(job: BatchJob) -> None:
    """Raises `ConfigError` for code or settings that the operator has not allowed."""
    for field, name in (
        ("prompt.function", job.prompt.function),
        ("output.postprocess", job.output.postprocess),
        ("output.schema_model", class_name(job.output.schema_model)),
    ):
        if name:
            check_module(name.partition(":")[0], field)
    for name in job.engine.env:
        if LOADS_CODE.fullmatch(name):
            raise ConfigError(
                f"engine.env: {name} decides which code the engine loads, so a job cannot set it; "
                "set it on the cluster's nodes"
            )
    extra = job.engine.model_extra or {}
    for name in sorted(RUNS_CODE & extra.keys()):
        value = extra[name]
        if value in (None, [], "") or value == HARMLESS.get(name):
            continue
        if os.environ.get(ENGINE_CODE, "").lower() not in ("1", "true", "yes"):
            raise ConfigError(
                f"engine.{name}: runs Python that is not part of this installation on every node; "
                f"set {ENGINE_CODE}=1 in the environment of the flow if you trust it"
            )


def check_module(module: str, field: str) -> None:
    """Raises `ConfigError` unless a user function may come from `module`. Imports nothing."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("builtins", "__main__"):
        raise ConfigError(
            f"{field}: {module!r} is part of Python; name a function of a module of your own"
        )
    allowed = [name.strip() for name in os.environ.get(MODULES, "").split(",") if name.strip()]
    if allowed and not any(module == name or module.startswith(f"{name}.") for name in allowed):
        raise ConfigError(
            f"{field}: functions may only come from {', '.join(allowed)} here ({MODULES}), not "
            f"from {module!r}"
        )


def check_types(schema: pa.Schema, where: str, error: type[RayBatchError] = CorruptRun) -> None:
    """Raises `error` for a column whose type is more than data.

    Ray's object columns, for one, are unpickled when a value is looked at, which runs whatever the
    file's writer put there.
    """
    for field in schema:
        for name in _extensions(field):
            if not CANONICAL.match(name):
                raise error(
                    f"{where}: column {field.name!r} is of extension type {name}, which may run "
                    "code when it is read; store it as plain Arrow types"
                )


def _extensions(field: pa.Field) -> Iterator[str]:
    import pyarrow as pa

    kind: Any = field.type
    named = (field.metadata or {}).get(b"ARROW:extension:name")
    if named is not None:  # of a type that this process does not know
        yield named.decode(errors="replace")
    if isinstance(kind, pa.BaseExtensionType):
        yield kind.extension_name
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        yield from _extensions(pa.field("values", kind.value_type))
    for index in range(kind.num_fields):
        yield from _extensions(kind.field(index))
