"""Rejects column types that run code when they are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import CorruptRun, RayBatchError

if TYPE_CHECKING:
    import pyarrow as pa

CANONICAL = re.compile(r"arrow\.(?!py_extension_type)")  # plain data under another name


def check_types(schema: pa.Schema, where: str, error: type[RayBatchError] = CorruptRun) -> None:
    """Raise `error` for a column whose type may run code when it is read.

    Examples are Ray's object columns: reading them unpickles their values, and so runs code that
    the file's writer put there. `where` is the file or schema, for the message.
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
