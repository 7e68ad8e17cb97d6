"""Iceberg through the `pyiceberg` library: from a catalog, or from a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.filter_text import (
    AllOf,
    AnyOf,
    Compare,
    Condition,
    IsNull,
    Like,
    Literal,
    OneOf,
)
from prefect_raybatch.job.secrets import catalog_secrets
from prefect_raybatch.job.variables import fill_variables
from prefect_raybatch.schemes import options_for, store_scheme
from prefect_raybatch.source.filters import Filter, typed
from prefect_raybatch.source.tables.base import (
    Scrub,
    TablePin,
    TableSource,
    check_own_files,
    moment_of,
    translate_errors,
)
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.spec.read import ReadSpec
from prefect_raybatch.storage import (
    S3Settings,
    iceberg_options,
    is_remote,
    join,
    open_store,
    s3_settings,
)
from prefect_raybatch.storage.redirects import redirect_problem

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

METADATA_FILE = re.compile(
    r"(?:v(?P<hadoop>\d+)|(?P<number>\d+)-[^/]*)(?:\.gz)?\.metadata\.json(?:\.gz)?"
)
FILE_URL = re.compile(r"file:/(?!/)")  # as Hadoop writes it
SQLITE = "sqlite:///"
LEAST_HIDDEN = 4  # characters: shorter secrets occur in ordinary words, so they are shown


def open_iceberg(source: ReadSpec) -> TableSource:
    """Open an Iceberg table of a catalog (`namespace.table`), or in a folder, at source.version.

    Raises SourceError for a missing table or version, and for a table with equality deletes.
    """
    given = source.uris[0]
    place = given if source.catalog else join(given)
    on_s3 = source.catalog or store_scheme(place) == "s3"
    keys = s3_settings(options_for("s3://", source.options)) if on_s3 else None
    files = file_properties(source.options, keys)
    properties = fill_variables(source.catalog, "source.catalog")
    scrub = _scrub(keys, properties)
    name = f"source.uri: the Iceberg table {place}"
    with translate_errors(name, scrub):
        if source.catalog:
            table = _from_catalog(place, {**files, **properties})
        else:
            table = _from_folder(place, source.options, files)
        snapshot = _snapshot(table, source.version, place)
        return IcebergSource(table, snapshot, place, bool(source.catalog), scrub)


def _scrub(keys: S3Settings | None, properties: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that removes the credentials of store and catalog from a text."""
    secrets = sorted(catalog_secrets(properties), key=len, reverse=True)

    def scrub(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***") if len(secret) >= LEAST_HIDDEN else text
        return keys.scrub(text) if keys else text

    return scrub


def open_catalog(properties: Mapping[str, Any]) -> Catalog:
    """Return pyiceberg's catalog with these properties.

    Redirects of a REST catalog raise ConfigError, because pyiceberg would send the client's secret
    and headers to another host. Python code that a table's metadata names is not loaded.
    """
    from pyiceberg.catalog import load_catalog, rest
    from pyiceberg.io import PY_IO_IMPL
    from requests import Response, Session

    class NoRedirects(Session):
        def get_redirect_target(self, resp: Response) -> str | None:
            if resp.is_redirect:
                text = redirect_problem(resp.url, resp.headers.get("Location"))
                raise ConfigError(f"catalog: {text}")
            return None

    # pyiceberg has no option for this.
    rest.Session = NoRedirects  # type: ignore[attr-defined]
    given = dict(properties)
    catalog = load_catalog(given.pop("name", None), **given)
    load = catalog._load_file_io

    def without_code(properties: Mapping[str, str] = {}, location: str | None = None) -> FileIO:
        return load({n: v for n, v in properties.items() if n != PY_IO_IMPL}, location)

    catalog._load_file_io = without_code  # type: ignore[method-assign]
    return catalog


def file_properties(options: StoreOptions, keys: S3Settings | None) -> dict[str, str]:
    """Return the properties with which pyiceberg reads a table's files on any store.

    `keys` are the settings for S3, None if the table is on another store.
    """
    from prefect_raybatch.source.tables.cloud_files import cloud_properties

    return {**iceberg_options(keys), **cloud_properties(options)}


def _from_catalog(name: str, properties: dict[str, Any]) -> Table:
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    database = str(properties.get("uri", ""))
    if database.startswith(SQLITE) and not Path(database[len(SQLITE) :]).exists():
        raise SourceError(  # the database would be created, empty
            f"source.catalog: {database} does not exist. Check the path"
        )
    # Reading must not create tables in the catalog's database.
    given = {"init_catalog_tables": "false", **properties}
    catalog = open_catalog(given)
    try:
        table = catalog.load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError, ValueError):
        raise SourceError(
            f"source.uri: the catalog {catalog.name} has no table {name!r}. Write it as "
            "namespace.table"
        ) from None
    return table


def _from_folder(place: str, options: Mapping[str, Any], properties: dict[str, str]) -> Table:
    """Return the table in the folder `place`, as its newest metadata file describes it.

    `place` may also be the URI of one metadata file; then this file is used. pyiceberg's
    `StaticTable` is not used, because it lets properties in the table's metadata override our own.
    A malicious table could then name Python code to load, or endpoints to send credentials to.
    """
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io import load_file_io
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import Table

    file = place if METADATA_FILE.fullmatch(place.rpartition("/")[2]) else _newest(place, options)
    io = load_file_io(properties, location=file)
    return Table(
        identifier=("folder", place),
        metadata=FromInputFile.table_metadata(io.new_input(file)),
        metadata_location=file,
        io=io,
        catalog=NoopCatalog("folder"),
    )


def _newest(place: str, options: Mapping[str, Any]) -> str:
    found: dict[int, list[str]] = {}
    for info in open_store(place, options).list("metadata", recursive=False):
        match = METADATA_FILE.fullmatch(info.path.rpartition("/")[2])
        if match:
            found.setdefault(int(match["hadoop"] or match["number"]), []).append(info.path)
    if not found:
        raise SourceError(
            f"source.uri: no Iceberg table in {place} (no metadata/*.metadata.json). Set it to the "
            "folder of the table, or set source.catalog for a table of a catalog"
        )
    newest = found[max(found)]
    if len(newest) > 1:
        raise SourceError(
            f"source.uri: {place} has {len(newest)} newest metadata files ({', '.join(newest)}), "
            "and only its catalog knows which is current. Set source.catalog, or set source.uri to "
            "one of them"
        )
    return join(place, newest[0])


def _snapshot(table: Table, version: str | None, place: str) -> Snapshot:
    """Return a snapshot by id, branch, tag or time; the current one if `version` is None.

    Raises SourceError if there is none.
    """
    if version is None:
        found = table.current_snapshot()
        if found is None:
            raise SourceError(f"source.uri: the table {place} has no rows. Check source.uri")
        return found
    when = None if version.isdecimal() else moment_of(version)
    if version.isdecimal():
        found = table.snapshot_by_id(int(version))
    elif when is not None:
        found = table.snapshot_as_of_timestamp(int(when.timestamp() * 1000))
    else:
        found = table.snapshot_by_name(version)
    if found is None:
        known = [f"{s.snapshot_id} of {_utc(s.timestamp_ms)}" for s in table.snapshots()[-5:]]
        names = ", ".join(sorted(table.refs())) or "none"
        raise SourceError(
            f"source.version: {place} has no snapshot {version} (the newest: "
            f"{', '.join(known) or 'none'}; branches and tags: {names}). Choose another; expiry "
            "removes old ones"
        )
    return found


def _utc(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")


class IcebergSource(TableSource):
    """An Iceberg table at a snapshot; its files are read one by one, sorted by name."""

    def __init__(
        self, table: Table, snapshot: Snapshot, place: str, of_catalog: bool, scrub: Scrub = str
    ) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        self._table, self._snapshot, self._scrub = table, snapshot, scrub
        self._of_catalog = of_catalog
        self.pin = TablePin(
            format="iceberg",
            uri=place,
            id=str(table.metadata.table_uuid),
            version=str(snapshot.snapshot_id),
            made=_utc(snapshot.timestamp_ms),
        )
        self._scheme = table.scan(snapshot_id=snapshot.snapshot_id).projection()
        self.schema = schema_to_pyarrow(self._scheme, include_field_ids=False)
        told = snapshot.summary.additional_properties if snapshot.summary else {}
        self._refuse_equality_deletes(told)
        self.rows = _rows(told)

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        where = None
        # The library looks names up in the current schema, which may differ from the snapshot's.
        if filter is not None and self._scheme == self._table.schema():
            where = _expression(filter.condition, self.schema)
        where = AlwaysTrue() if where is None else where
        with translate_errors(
            f"source.uri: the Iceberg table {self.pin.uri} at snapshot {self.pin.version}",
            self._scrub,
        ):
            scan = self._table.scan(
                row_filter=where,
                selected_fields=tuple(columns or self.schema.names),
                snapshot_id=self._snapshot.snapshot_id,
            )
            self._check_files([self._snapshot.manifest_list])
            manifests = self._snapshot.manifests(self._table.io)
            self._check_files(manifest.manifest_path for manifest in manifests)
            tasks = sorted(scan.plan_files(), key=lambda task: str(task.file.file_path))
            reader = ArrowScan(self._table.metadata, self._table.io, scan.projection(), where)
            for task in tasks:  # given several at once, the library holds all of them in memory
                files = [task.file, *task.delete_files]
                self._check_files(str(file.file_path) for file in files)
                yield from reader.to_record_batches([task])

    def _refuse_equality_deletes(self, told: Mapping[str, str]) -> None:
        if int(told.get("total-equality-deletes", 0)):
            raise SourceError(
                f"source.uri: the Iceberg table {self.pin.uri} has equality deletes, which "
                "pyiceberg cannot apply yet. Compact the table (rewrite_data_files), or choose an "
                "earlier source.version"
            )

    def _check_files(self, files: Iterable[str]) -> None:
        """Raise SourceError or ConfigError for files of the table that the job may not read.

        For a table of a catalog only local files are checked: the catalog is trusted with the
        locations of files on object stores.
        """
        place = str(self._table.location()) if self._of_catalog else self.pin.uri
        named = (file for file in files if not (self._of_catalog and is_remote(file)))
        check_own_files(place, (FILE_URL.sub("file:///", file) for file in named))


def _rows(told: Mapping[str, str]) -> int | None:
    if "total-records" not in told:
        return None
    return int(told["total-records"]) - int(told.get("total-position-deletes", 0))


def _expressions() -> Any:
    """Return pyiceberg's module of expressions as Any: type checkers misread its classes."""
    from pyiceberg import expressions

    return expressions


def _expression(condition: Condition, schema: pa.Schema) -> Any:
    """Return a pyiceberg expression that keeps at least all matching rows; None: keep all rows."""
    ice = _expressions()
    if isinstance(condition, AllOf | AnyOf):
        parts = [_expression(part, schema) for part in condition.parts]
        known = [part for part in parts if part is not None]
        if isinstance(condition, AnyOf) and len(known) < len(parts):
            return None
        join_all = ice.And if isinstance(condition, AllOf) else ice.Or
        return known[0] if len(known) == 1 else join_all(*known) if known else None
    name, field = condition.column, schema.field(condition.column)
    if isinstance(condition, IsNull):
        return ice.NotNull(name) if condition.negated else ice.IsNull(name)
    if isinstance(condition, Like):
        start, _, rest = condition.pattern.partition("%")
        plain = start and not rest and not set("_\\") & set(condition.pattern)
        return ice.StartsWith(name, start) if plain and not condition.negated else None
    if isinstance(condition, OneOf):
        values = [_value(value, field) for value in condition.values]
        if None in values:
            return None
        return ice.NotIn(name, values) if condition.negated else ice.In(name, values)
    value = _value(condition.value, field)
    return None if value is None else _compare(condition, value)


def _compare(condition: Compare, value: Any) -> Any:
    ice = _expressions()
    kinds = {
        "=": ice.EqualTo,
        "!=": ice.NotEqualTo,
        "<": ice.LessThan,
        "<=": ice.LessThanOrEqual,
        ">": ice.GreaterThan,
        ">=": ice.GreaterThanOrEqual,
    }
    return kinds[condition.op](condition.column, value)


def _value(value: Literal, field: pa.Field) -> Any:
    """Convert a filter's literal to the Python value to give pyiceberg for the column `field`.

    Returns None if pyiceberg might select other rows with it than the package's own filter does.
    """
    types, kind = pa.types, field.type
    plain = (
        types.is_integer(kind) and isinstance(value, int),
        types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind),
        types.is_date(kind) or (types.is_timestamp(kind) and kind.unit != "ns"),
    )
    found = typed(value, field).as_py()
    return found if any(plain) and isinstance(found, bool | int | str | date) else None
