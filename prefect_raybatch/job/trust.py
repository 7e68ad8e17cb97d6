"""Limits what a job may do, and what data may be.

What a job names (code, settings, folders, hosts) is compared with the policy in force, which is
decided where the job arrives and never by the job itself. docs/security.md has the rules for
people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import CorruptRun, RayBatchError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import class_name
from prefect_raybatch.job.functions import check_place
from prefect_raybatch.job.trusted_engine import check_engine_trust
from prefect_raybatch.job.trusted_places import check_reach
from prefect_raybatch.job.trusted_pods import check_made_pods
from prefect_raybatch.policy.in_force import policy_in_force

if TYPE_CHECKING:
    import pyarrow as pa

CANONICAL = re.compile(r"arrow\.(?!py_extension_type)")  # plain data under another name


def check_trust(job: BatchJob) -> None:
    """Raise `ConfigError` for anything in a job that the policy in force does not allow.

    That is code, settings, folders, hosts and secrets. Contacts no server, and imports no user
    module.
    """
    policy = policy_in_force()
    for field, name in (
        ("prompt.function", job.prompt.function),
        ("output.postprocess", job.output.postprocess),
        ("output.schema_model", class_name(job.output.schema_model)),
    ):
        if name:
            check_place(name, field)
    check_engine_trust(job.engine, policy)
    check_reach(job, policy)
    check_made_pods(job.cluster, policy)


def check_types(schema: pa.Schema, where: str, error: type[RayBatchError] = CorruptRun) -> None:
    """Raise `error` for a column whose type is more than data.

    Ray's object columns, for example, are unpickled when a value is read, which runs whatever the
    file's writer put there.
    """
    for field in schema:
        for name in _extensions(field):
            if not CANONICAL.match(name):
                raise error(
                    f"{where}: column {field.name!r} has the extension type {name}, which may run "
                    "code when it is read; store it as a plain Arrow type"
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
