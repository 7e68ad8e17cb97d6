"""Maps table formats to the functions that open them, and reports missing libraries."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.table_formats import TABLE_FORMATS
from prefect_raybatch.source.tables.base import TableSource
from prefect_raybatch.source.tables.delta import open_delta
from prefect_raybatch.source.tables.huggingface import open_huggingface
from prefect_raybatch.source.tables.iceberg import open_iceberg
from prefect_raybatch.source.tables.lance_sets import open_lance
from prefect_raybatch.source.tables.sql import open_sql
from prefect_raybatch.spec.read import ReadSpec

OPENERS: dict[str, Callable[[ReadSpec], TableSource]] = {
    "delta": open_delta,
    "iceberg": open_iceberg,
    "lance": open_lance,
    "sql": open_sql,
    "huggingface": open_huggingface,
}


def open_table(format: str, source: ReadSpec) -> TableSource:
    """Return the table that `source` names, at source.version or as it is now.

    Raises ConfigError for a missing extra or a malformed source.version, SourceError for a table or
    version that does not exist or may not be read, `StoreUnavailable` if the location does not
    answer.
    """
    need_extra(format)
    return OPENERS[format](source)


def need_extra(format: str) -> None:
    """Raise ConfigError unless the library of a table format is installed."""
    known = TABLE_FORMATS[format]
    if find_spec(known.module) is None:
        raise ConfigError(
            f"source.format: {known.title} needs {known.module}, which is not installed. Run pip "
            f'install "prefect-raybatch[{known.extra}]"'
        )
