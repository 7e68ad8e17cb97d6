"""A query of any database that SQLAlchemy supports, streamed in one read-only transaction.

The transaction sees one state of the database, however long the copy takes. Its isolation level is
REPEATABLE READ if the database has that level. On PostgreSQL and MySQL, this gives a snapshot.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qs, quote

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, SourceError, StoreUnavailable
from prefect_raybatch.job.table_formats import SQL_SCHEMES, arrow_type
from prefect_raybatch.job.trusted_places import database_file
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.source.tables.base import TablePin, TableSource, translate_errors
from prefect_raybatch.spec.read import ReadSpec

if TYPE_CHECKING:
    from sqlalchemy.engine import URL, Connection

FETCH_ROWS = 10_000  # rows held at a time; types are inferred from the first of these
LOGIN_SECONDS = 20
LEVELS = ("REPEATABLE READ", "SNAPSHOT", "SERIALIZABLE")  # the first available level is used
DRIVERS = {"postgresql": "postgresql+psycopg"}  # in our extra, not SQLAlchemy's default
# Packages that provide a dialect which SQLAlchemy lacks, as arguments of pip.
DIALECT_PACKAGES = {
    **{"postgresql": '"prefect-raybatch[postgresql]"', "duckdb": '"prefect-raybatch[duckdb]"'},
    **{"snowflake": "snowflake-sqlalchemy", "bigquery": "sqlalchemy-bigquery"},
    **{"redshift": "sqlalchemy-redshift redshift_connector", "trino": '"trino[sqlalchemy]"'},
    **{"clickhouse": "clickhouse-sqlalchemy", "clickhousedb": "clickhouse-connect"},
    **{"databricks": "databricks-sqlalchemy", "cockroachdb": "sqlalchemy-cockroachdb psycopg"},
    **{"awsathena": '"PyAthena[SQLAlchemy]"', "hana": "sqlalchemy-hana", "db2": "ibm_db_sa"},
    **{"teradatasql": "teradatasqlalchemy", "vertica": "sqlalchemy-vertica-python"},
}
# What to run if a module is missing whose package has another name.
MISSING_DRIVERS = {
    "MySQLdb": "pip install mysqlclient, or pip install pymysql and write mysql+pymysql://",
    "cx_Oracle": "pip install oracledb and write oracle+oracledb://",
    "duckdb": 'pip install "prefect-raybatch[duckdb]"',
    "psycopg2": 'pip install "prefect-raybatch[postgresql]" and write postgresql+psycopg://',
}
_PLAIN = (bool, int, float, str, bytes, Decimal, datetime, date, time, timedelta)
_DENIED = re.compile(
    r"password|authentication|access denied|permission denied|not permitted|login failed|role .* "
    r"does not exist|insufficient privilege",
    re.IGNORECASE,
)
NO_PLACE = re.compile(r"database .* does not exist|unknown database", re.IGNORECASE)
# Arrow types by the OIDs of PostgreSQL's types.
_OIDS: dict[int, pa.DataType] = {
    **{16: pa.bool_(), 17: pa.binary(), 18: pa.string(), 19: pa.string(), 20: pa.int64()},
    **{21: pa.int16(), 23: pa.int32(), 25: pa.string(), 26: pa.int64(), 114: pa.string()},
    **{700: pa.float32(), 701: pa.float64(), 1042: pa.string(), 1043: pa.string()},
    **{1082: pa.date32(), 1083: pa.time64("us"), 1114: pa.timestamp("us")},
    **{1184: pa.timestamp("us", "UTC"), 2950: pa.string(), 3802: pa.string()},
    **{1000: pa.list_(pa.bool_()), 1005: pa.list_(pa.int16()), 1007: pa.list_(pa.int32())},
    **{1009: pa.list_(pa.string()), 1015: pa.list_(pa.string()), 1016: pa.list_(pa.int64())},
    **{1021: pa.list_(pa.float32()), 1022: pa.list_(pa.float64())},
}

_OF_DUCKDB = {
    "FLOAT": pa.float32(),
    "FLOAT[]": pa.list_(pa.float32()),
    "UBIGINT": pa.uint64(),
}


def open_sql(source: ReadSpec) -> TableSource:
    """Connect to the database, begin a transaction, and return the rows of source.query.

    The caller must close the result, which ends the transaction and the connection.
    """
    import sqlalchemy
    from sqlalchemy.pool import NullPool

    url, secrets = _url(source)
    shown = _shown(url)
    what = f"source.uri: the database {shown}"
    if url.get_backend_name() == "sqlite":
        url = _read_only(url)
    with _explained(what, secrets):
        try:
            engine = sqlalchemy.create_engine(
                url, poolclass=NullPool, hide_parameters=True, connect_args=_arguments(url)
            )
        except (sqlalchemy.exc.NoSuchModuleError, ImportError) as error:
            raise ConfigError(f"{what}: {missing_driver(url, error)}") from None
        connection = engine.connect()
        try:
            _begin(connection)
            return SqlSource(connection, source, shown, what, secrets)
        except BaseException:
            connection.close()
            raise


class SqlSource(TableSource):
    """The rows of a query in an open transaction, which `close` ends."""

    counted = False

    def __init__(
        self, connection: Connection, source: ReadSpec, uri: str, what: str, secrets: Sequence[str]
    ) -> None:
        self._connection, self._query = connection, str(source.query)
        self._what, self._secrets = what, secrets
        self._declared = {name: arrow_type(kind) for name, kind in source.types.items()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.pin = TablePin(format="sql", uri=uri, id=uri, version=now, made=now)
        self.schema = self._first()

    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        with _explained(self._what, self._secrets):
            schema, names, before = self.schema, list(columns or self.schema.names), 0
            for _, rows in self._fetched():
                made = pa.table(
                    [
                        self._column(name, [row[at] for row in rows], schema.field(name), before)
                        for name in names
                        for at in (schema.get_field_index(name),)
                    ],
                    names=names,
                )
                before += len(rows)
                yield from made.to_batches()

    def close(self) -> None:
        with suppress(Exception):  # nothing was written
            self._connection.rollback()
        with suppress(Exception):
            self._connection.close()

    def _fetched(self) -> Iterator[tuple[Any, list[Any]]]:
        """Run the query; yield its result and rows, as (result, up to FETCH_ROWS rows) each time.

        The first item has no rows: (result, []). Uses a server-side cursor if the driver has one.
        Raises ConfigError for a statement that, unlike a SELECT, cannot return rows.
        """
        # Not sqlalchemy.text, to which a colon in the query is a parameter.
        options = {"stream_results": True, "max_row_buffer": FETCH_ROWS}
        result = self._connection.exec_driver_sql(self._query, execution_options=options)
        if not result.returns_rows:
            raise ConfigError("source.query returns no rows at all. Write a SELECT")
        try:
            yield result, []
            for rows in result.partitions(FETCH_ROWS):
                yield result, list(rows)
        finally:
            result.close()

    def _first(self) -> pa.Schema:
        """Run the query, read its first rows, and return the schema.

        The type of a column is the one in source.types, if it is there. Otherwise it is the type
        that the database names, if it is known, or the type inferred from the first rows.
        """
        fetched = self._fetched()
        result, _ = next(fetched)
        names = list(result.keys())
        told = {entry[0]: _OIDS.get(entry[1]) for entry in result.cursor.description or ()}
        if self._connection.dialect.name == "duckdb":
            told = self._told_by_duckdb(result.cursor.description or ())
        elif self._connection.dialect.name != "postgresql":
            told = {}
        rows = next(fetched, (None, []))[1]
        fetched.close()  # type: ignore[attr-defined]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ConfigError(
                f"source.query returns two columns {repeated[0]!r}. Rename one with AS"
            )
        for name in self._declared:
            if name not in names:
                raise ConfigError(
                    f"source.types: source.query returns no column {name!r} (columns: "
                    f"{', '.join(names)})"
                )
        fields = []
        for at, name in enumerate(names):
            kind = self._declared.get(name) or told.get(name)
            fields.append((name, kind or self._guessed(name, [row[at] for row in rows])))
        return pa.schema(fields)

    def _told_by_duckdb(self, description: Sequence[Any]) -> dict[str, pa.DataType | None]:
        """Return {column: Arrow type}; a type is None if it must be inferred from the values.

        `description` is `cursor.description` of DuckDB. Raises SourceError for a column of
        nanoseconds, which Python would truncate, unless source.types declares its type.
        """
        for name, kind, *_ in description:
            if "TIMESTAMP_NS" in str(kind) and name not in self._declared:
                raise SourceError(
                    f"source.query: column {name!r} is {kind}, so its nanoseconds would be lost. "
                    "CAST it AS VARCHAR or AS TIMESTAMP in the query"
                )
        return {entry[0]: _OF_DUCKDB.get(str(entry[1])) for entry in description}

    def _guessed(self, name: str, values: list[Any]) -> pa.DataType:
        try:
            kind = pa.array([_plain(value) for value in values]).type
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise SourceError(
                f"source.query: column {name!r} has values of different types ({error}). CAST it "
                "in the query, or set its type in source.types"
            ) from None
        if pa.types.is_decimal(kind):  # later values may have more digits before the point
            return pa.decimal128(38, kind.scale)
        if pa.types.is_timestamp(kind):
            return pa.timestamp("us", "UTC" if kind.tz else None)
        return kind

    def _column(self, name: str, values: list[Any], field: pa.Field, before: int) -> pa.Array:
        kind = pa.string() if pa.types.is_null(field.type) else field.type
        plain = [_plain(value, text=pa.types.is_string(kind)) for value in values]
        if pa.types.is_decimal(kind):  # from a float's shortest text, such as 0.1
            plain = [Decimal(str(v)) if isinstance(v, float) else v for v in plain]
        if pa.types.is_null(field.type) and any(value is not None for value in plain):
            number = next(i for i, value in enumerate(plain) if value is not None)
            raise SourceError(
                f"source.query: column {name!r} is null in the first {before:,} rows, but "
                f"{type(values[number]).__name__} in row {before + number:,} (counted from 0). Set "
                "its type in source.types"
            )
        try:
            return _exact_array(plain, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            at, why = _misfit(plain, kind)
            raise SourceError(
                f"source.query: column {name!r} is {kind}, but row {before + at:,} (counted from "
                f"0) does not fit ({why}). CAST it in the query, or set its type in source.types"
            ) from None

    @cached_property
    def rows(self) -> int | None:  # type: ignore[override]
        """Number of rows: counted by SQLite, estimated by PostgreSQL, None for other databases.

        None also for a statement whose rows SQLite or PostgreSQL cannot count, such as a PRAGMA.
        """
        from sqlalchemy.exc import DBAPIError

        dialect = self._connection.dialect.name
        with suppress(DBAPIError):
            if dialect == "sqlite":  # a local file, so counting is fast
                query = self._query.strip().rstrip(";")  # may end with a comment
                counted = self._connection.exec_driver_sql(f"SELECT count(*) FROM ({query}\n)")
                return int(counted.scalar_one())
            if dialect == "postgresql":
                explain = f"EXPLAIN (FORMAT JSON) {self._query}"
                with self._connection.begin_nested():  # a failure must not end the transaction
                    plan = self._connection.exec_driver_sql(explain).scalar_one()
                found = json.loads(plan) if isinstance(plan, str) else plan
                return max(1, int(found[0]["Plan"]["Plan Rows"]))
        return None


def _url(source: ReadSpec) -> tuple[URL, list[str]]:
    """Return (the URL with user and password, secrets that no message may contain).

    Raises ConfigError for an invalid URL, or if an environment variable is not set.
    """
    import sqlalchemy

    try:
        url = sqlalchemy.make_url(source.uris[0])
    except (sqlalchemy.exc.ArgumentError, ValueError):
        raise ConfigError(
            "source.uri is not a database URL. Write dialect+driver://host/database"
        ) from None
    url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
    given: dict[str, str] = {}
    for name in ("username", "password"):
        variable = source.options.get(f"{name}_env")
        value = os.environ.get(str(variable)) if variable else source.options.get(name)
        if variable and value is None:
            raise ConfigError(
                f"source.options.{name}_env: environment variable {variable} is not set. Set it "
                "where the run is planned"
            )
        if value is not None:
            given[name] = str(value)
    secrets = [value for name, value in given.items() if name == "password"]
    if url.get_backend_name() == "sqlite":  # a file has no users
        return url, secrets
    return url.set(username=given.get("username"), password=given.get("password")), secrets


def _read_only(url: URL) -> URL:
    """Return the URL of a SQLite file opened for reading only.

    When it may write, SQLite creates a missing file. Raises `SourceError` if the file is missing,
    `ConfigError` if the URL asks for a mode that may write.
    """
    place = database_file(url.render_as_string(hide_password=False))
    modes = {str(url.query.get("mode", "ro")), *_modes_in(url.database or "")}
    if modes - {"ro", "memory"}:
        raise ConfigError(
            "source.uri: SQLite may create or change a file with "
            f"mode={sorted(modes - {'ro', 'memory'})[0]}. Remove it, because a source is only read"
        )
    if place is None:
        return url
    if not os.path.isfile(place):
        raise SourceError(f"source.uri: no database file {place!r}. Check the path")
    path = quote(os.path.abspath(place))
    return url.set(database=f"file:{path}", query={"mode": "ro", "uri": "true"})


def _modes_in(database: str) -> list[str]:
    return parse_qs(database.partition("?")[2]).get("mode", [])


def _arguments(url: URL) -> Mapping[str, Any]:
    dialect = url.get_backend_name()
    if dialect == "sqlite":
        return {}
    if dialect == "duckdb":
        place = url.database or ":memory:"
        plain = place != ":memory:" and not place.startswith(("file:", "md:"))
        if plain and not os.path.isfile(place):  # DuckDB would create an empty one
            raise SourceError(f"source.uri: no database file {place!r}. Check the path")
        return {"read_only": True} if plain else {}
    known = url.get_backend_name() in ("postgresql", "mysql", "mariadb")
    return {"connect_timeout": LOGIN_SECONDS} if known else {}


def _begin(connection: Connection) -> None:
    """Begin a transaction that sees one state of the database.

    It is read-only if the database supports that.
    """
    dialect, driver = connection.dialect, cast(Any, connection.connection.dbapi_connection)
    connection.execution_options(no_parameters=True)  # otherwise, % in the query must be doubled
    if dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA query_only = ON")
        # ATTACH creates a missing file, and reads any other.
        driver.set_authorizer(_authorize)
        connection.exec_driver_sql("BEGIN")
        return
    if dialect.name == "duckdb":  # opened read-only; each transaction sees a snapshot
        return
    with suppress(NotImplementedError):
        levels = dialect.get_isolation_level_values(driver)
        level = next((level for level in LEVELS if level in levels), None)
        if level is not None:
            connection.execution_options(isolation_level=level)
    if dialect.name == "postgresql":
        connection.execution_options(postgresql_readonly=True)


def _authorize(action: int, *_: object) -> int:
    """Return SQLite's code to deny an action if it is ATTACH or DETACH, else the code to allow it.

    SQLite calls this for each action of a query. So no query can open or create another file.
    """
    refused = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
    return sqlite3.SQLITE_DENY if action in refused else sqlite3.SQLITE_OK


@contextmanager
def _explained(what: str, secrets: Sequence[str]) -> Iterator[None]:
    import sqlalchemy

    def scrub(text: str) -> str:
        for secret in filter(None, secrets):
            text = text.replace(secret, "**********")
        return text

    with translate_errors(what, scrub):
        try:
            yield
        except sqlalchemy.exc.DBAPIError as error:
            said = scrub(" ".join(str(error.orig).split())[:300])
            if NO_PLACE.search(said):
                raise SourceError(f"{what}: {said}. Check its name") from None
            if _DENIED.search(said):
                raise SourceError(
                    f"{what}: access denied ({said}). Set source.options.username and password_env "
                    "(an environment variable), or a credentials_block"
                ) from None
            operational = isinstance(error, sqlalchemy.exc.OperationalError)
            if error.connection_invalidated or (
                operational and re.search(r"connect|timeout|server closed|locked", said)
            ):
                raise StoreUnavailable(f"{what}: {said}") from None
            raise SourceError(f"source.query: {type(error.orig).__name__}: {said}") from None


def _shown(url: URL) -> str:
    """Return a URL without user, password and options, which may hold credentials."""
    plain = type(url).create(url.drivername, host=url.host, port=url.port, database=url.database)
    return str(plain.render_as_string())


def missing_driver(url: URL, error: Exception) -> str:
    """Return, for an error message, what to install so that SQLAlchemy can open a URL.

    `error` says which dialect or driver is missing.
    """
    dialect, name = url.get_backend_name(), url.drivername
    module = getattr(error, "name", None)
    if dialect not in SQL_SCHEMES:
        return (
            f"SQLAlchemy has no dialect {dialect!r}. Correct the URI "
            "(dialect+driver://host/database), or install the package that provides the dialect"
        )
    if module in MISSING_DRIVERS:
        return f"needs {module}, which is not installed. Run {MISSING_DRIVERS[module]}"
    if module is not None and dialect != "postgresql":
        return f"needs {module}, which is not installed. Run pip install {module}"
    needs = f"the driver of {name}://" if "+" in name else f"a dialect for {dialect}://"
    if dialect == "postgresql":
        needs = module or needs
    packages = DIALECT_PACKAGES.get(dialect, f"the package that provides {name}")
    return f"needs {needs}, which is not installed. Run pip install {packages}"


def _plain(value: Any, text: bool = False) -> Any:
    """Return a value as Arrow takes it: JSON as text, unknown types as their text.

    `text`: the column is text; numbers and lists become text as well.
    """
    if value is None or isinstance(value, (str, bytes) if text else _PLAIN):
        return value
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if isinstance(value, dict) or (text and isinstance(value, list)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _exact_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values as an array of type `kind`.

    Raises ArrowInvalid if Arrow would drop a part of one: a fraction, a time of day, an offset.
    """
    types = pa.types
    plain = values
    if types.is_floating(kind):  # Arrow converts no decimals to floats
        plain = [float(value) if isinstance(value, Decimal) else value for value in values]
    made = pa.array(plain, kind)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind):
        for value, held in zip(values, made.to_pylist(), strict=True):
            if value != held and not _is_held(value, held, kind):
                raise pa.ArrowInvalid(f"{value} does not fit {kind}")
    return made


def _is_held(value: Any, held: Any, kind: pa.DataType) -> bool:
    if isinstance(value, float) and pa.types.is_floating(kind):  # a narrower one rounds fractions
        return not value.is_integer()
    if isinstance(value, Decimal) and pa.types.is_floating(kind):
        return value != value.to_integral_value()
    if isinstance(value, datetime) and pa.types.is_date(kind):
        return value == datetime.combine(held, time(), value.tzinfo)
    if isinstance(value, datetime) and value.tzinfo is None:  # the zone is as declared
        return bool(value == held.replace(tzinfo=None))
    return False


def _misfit(values: Sequence[Any], kind: pa.DataType) -> tuple[int, str]:
    """Return (index of the first value that does not fit the type, why)."""
    for at, value in enumerate(values):
        try:
            _exact_array([value], kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            return at, " ".join(str(error).split())[:200]
    return 0, "unknown"
