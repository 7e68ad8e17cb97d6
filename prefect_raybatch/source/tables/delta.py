"""Delta Lake through the `deltalake` library: its SQL engine applies deletion vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import (
    Scrub,
    TablePin,
    TableSource,
    check_own_files,
    moment_of,
    translate_errors,
)
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import join
from prefect_raybatch.storage.delta_access import delta_access

if TYPE_CHECKING:
    from deltalake import DeltaTable

HISTORY = 1000  # commits looked through for the time of a version
# One partition reads the files one after the other, so that the order is the same each time.
_SESSION = {"datafusion.execution.target_partitions": "1"}


def open_delta(source: ReadSpec) -> TableSource:
    """Open a Delta table in a folder, local or on an object store.

    It is opened at source.version, None for the newest. Raises ConfigError for a malformed version,
    SourceError for a missing table or version.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    uri = join(source.uris[0])
    place, keys, scrub = delta_access(uri, source.options)
    what = f"source.uri: the Delta table {uri}"
    with translate_errors(what, scrub):
        try:
            newest = DeltaTable(place, storage_options=keys)
        except TableNotFoundError:
            raise SourceError(
                f"source.uri: no Delta table in {uri} (no readable _delta_log). Set it to the "
                "folder of the table, and check the path and the bucket"
            ) from None
        if source.version is None:
            return DeltaSource(newest, uri, _made(newest, newest.version()), scrub)
        table = DeltaTable(place, storage_options=keys)
    try:
        with translate_errors(what, scrub):
            _go_to(table, source.version)
    except SourceError as error:
        raise SourceError(
            f"source.version: {uri} has no readable version {source.version} (the newest is "
            f"{newest.version()}; log cleanup removes old ones): {error}"
        ) from None
    with translate_errors(what, scrub):
        opened = DeltaSource(table, uri, _made(newest, table.version()), scrub)
    asked, made = moment_of(source.version), opened.pin.made
    if asked and made and datetime.fromisoformat(made) > asked:
        raise SourceError(  # for an earlier time the library opens the oldest version
            f"source.version: {source.version} is older than the first readable version of {uri}, "
            f"which is {opened.pin.version} of {made}. Choose a later one"
        )
    return opened


def _go_to(table: DeltaTable, version: str) -> None:
    if version.isdecimal():
        table.load_as_version(int(version))
        return
    when = moment_of(version)
    if when is None:
        raise ConfigError(
            f"source.version: {version!r} is neither a version number of a Delta table nor a "
            "timestamp such as 2026-07-01T00:00:00Z"
        )
    table.load_as_version(when)


class DeltaSource(TableSource):
    """A Delta table at a version."""

    def __init__(self, table: DeltaTable, uri: str, made: str | None, scrub: Scrub = str) -> None:
        self._table, self._uri, self._scrub = table, uri, scrub
        self.pin = TablePin(
            format="delta",
            uri=uri,
            id=str(table.metadata().id),
            version=str(table.version()),
            made=made,
        )
        check_own_files(uri, _files(table, uri))
        self.schema = pa.schema(table.schema().to_arrow())
        self.rows = _rows(table)
        # The log's statistics count the rows that a deletion vector hides.
        self.counted = "deletionVectors" not in (table.protocol().reader_features or ())

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        from deltalake import QueryBuilder

        names = ", ".join(_name(name) for name in columns or self.schema.names)
        where = filter.sql(self.schema) if filter else None
        query = f"SELECT {names} FROM input{f' WHERE {where}' if where else ''}"
        with translate_errors(
            f"source.uri: the Delta table {self._uri} at version {self.pin.version}", self._scrub
        ):
            session = QueryBuilder(_SESSION).register("input", self._table)
            yield from pa.RecordBatchReader.from_stream(session.execute(query))


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _made(newest: DeltaTable, version: int) -> str | None:
    """Return when a version was committed, in ISO 8601, from the log of the newest version.

    None if the log no longer has the commit, or if it is over HISTORY commits back. `newest` must
    be open at the newest version, because for an older one the library numbers the log's entries
    wrongly.
    """
    back = newest.version() - version + 1
    if back <= HISTORY:
        with suppress(Exception):  # the time is only shown
            for entry in newest.history(back):
                if int(entry.get("version", -1)) == version:
                    return datetime.fromtimestamp(entry["timestamp"] / 1000, UTC).isoformat()
    return None


def _files(table: DeltaTable, uri: str) -> Iterator[str]:
    """Yield the locations of the table's files.

    Its log names them by URL: relative to the table's folder, or absolute.
    """
    for path in pa.table(table.get_add_actions())["path"].to_pylist():
        whole = "://" in path or path.startswith("/")
        yield path if "://" in path else unquote(path) if whole else f"{uri}/{unquote(path)}"


def _rows(table: DeltaTable) -> int | None:
    """Return the number of rows from the log's statistics; None if a writer left them out.

    Rows that a deletion vector hides are counted.
    """
    actions = pa.table(table.get_add_actions(flatten=True))
    if "num_records" not in actions.column_names:
        return None
    counts = actions["num_records"].to_pylist()
    return None if None in counts else sum(counts)
