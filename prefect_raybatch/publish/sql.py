"""Publishes to a database table in one transaction, whose first statement inserts a mark.

A mark is a row whose primary key is (plan, table). So of two publishers the second waits for the
first and then finds the rows. Marks are in a separate table in the schema of the target table, so
that a backup restores both. If the target table is empty, it has lost the rows of all its marks:
they are ignored, and the next publication deletes them.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import types as kinds

from prefect_raybatch.errors import ConfigError, PublishFailed
from prefect_raybatch.job.trusted_places import FILE_DATABASES
from prefect_raybatch.publish.base import PUBLISH_TRIES, AnsweredRows, Observe, Sink
from prefect_raybatch.publish.sql_numbers import Holds, number_check
from prefect_raybatch.publish.types import converted_schema
from prefect_raybatch.source.tables.sql import DRIVERS, NO_PLACE, missing_driver
from prefect_raybatch.words import finite_in, storable_in

if TYPE_CHECKING:
    from sqlalchemy import Column, ColumnElement, Table
    from sqlalchemy.engine import URL, Connection, Engine
    from sqlalchemy.engine.interfaces import ReflectedColumn
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.types import TypeEngine

MARK_TABLE = "_raybatch_published"
TURN = "merge"  # stands for a plan in the mark whose row lock a merge holds until it is committed
INSERT_ROWS = 1000  # rows of one INSERT
Convert = Callable[[Any], object]  # a value of a result to one of the database
# The approximate Arrow type of a column, by the Python type of its values.
COLUMN_KINDS: dict[type, pa.DataType] = {
    **{bool: pa.bool_(), int: pa.int64(), float: pa.float64(), Decimal: pa.decimal128(38, 9)},
    **{date: pa.date32(), datetime: pa.timestamp("us"), time: pa.time64("us")},
    **{bytes: pa.binary()},
}
NUMERIC_KINDS = (kinds.is_integer, kinds.is_floating, kinds.is_decimal, kinds.is_boolean)
# Types that go into a column without loss, by the column's type. Columns of other types are not
# checked.
FITTING_KINDS: dict[pa.DataType, tuple[Callable[[pa.DataType], bool], ...]] = {
    **dict.fromkeys([pa.float64(), pa.decimal128(38, 9)], NUMERIC_KINDS),
    **dict.fromkeys([pa.bool_(), pa.int64()], (kinds.is_integer, kinds.is_boolean)),
    **{pa.date32(): (kinds.is_date,), pa.time64("us"): (kinds.is_time,)},
    **{pa.timestamp("us"): (kinds.is_timestamp, kinds.is_date), pa.binary(): (kinds.is_binary,)},
    **{pa.timestamp("us", "UTC"): (lambda kind: kinds.is_timestamp(kind) and kind.tz is not None,)},
}
# Statements that set a transaction's time zone, by dialect. In it the database converts times with
# a zone for columns without one, and the other way round.
USE_UTC = {"postgresql": "SET LOCAL TIME ZONE 'UTC'", "duckdb": "SET TimeZone = 'UTC'"}
# Dialects that tell names apart by case where SQLAlchemy quotes them, and those that read a name in
# lower case as one in upper case. To all others names that differ only in case are the same.
CASE_COUNTS = ("postgresql", "cockroachdb", "clickhouse", "clickhousedb")
UPPER_CASE = ("oracle", "snowflake", "db2", "hana")
# The longest name of a table or column. PostgreSQL and Redshift cut longer ones off silently.
LONGEST_NAMES: dict[str, tuple[int, str]] = {
    **{"postgresql": (63, "bytes"), "redshift": (127, "bytes"), "oracle": (128, "bytes")},
    **dict.fromkeys(("mysql", "mariadb"), (64, "characters")),
    **{"mssql": (128, "characters"), "snowflake": (255, "characters")},
    **{"bigquery": (300, "characters"), "db2": (128, "bytes"), "vertica": (128, "bytes")},
}
# Dialects whose CREATE TABLE is part of a transaction, so that it can be rolled back.
ROLLED_BACK = ("postgresql", "sqlite", "duckdb", "mssql")
# SQLSTATE: no connection, rolled back for another transaction, no resources, shut down, locked.
PASSING_STATES = ("08", "40", "53", "57", "55P03")
MYSQL_PASSING = {1040, 1053, 1158, 1159, 1160, 1161, 1205, 1213, *range(2000, 2056)}
_PASSING = re.compile(
    r"lock|timed? ?out|connect|server closed|shutting down|starting up|temporar|disk|no space"
    r"|i/o error|interrupted|conflict|failed to commit|try again",
    re.IGNORECASE,
)
_FINAL = re.compile(
    r"duplicate column|no such|unknown column|invalid column|has no column|already exists"
    r"|too many|read-?only|syntax|reserved|does not exist|unable to open|is not a .*database"
    r"|cannot open file|not null constraint",
    re.IGNORECASE,
)


class SqlSink(Sink):
    """A database table as a target: rows are inserted through SQLAlchemy, or replaced by key."""

    module, extra = "sqlalchemy", "postgresql"
    _table: Table | None = None  # the existing table, set by `existing`

    def check(self, schema: pa.Schema, whole: bool = True) -> str:
        text = super().check(schema, whole)
        table = self._table if self.planned else None
        checks = {} if table is None else self._number_checks(table, schema)
        named = ", ".join(f"{name} ({kind})" for name, (_, kind) in checks.items())
        return f"{text}; numbers that would change are refused in {named}" if named else text

    def place(self) -> tuple[str, ...]:
        url, (schema, name) = self._url(), self._names
        dialect = url.get_backend_name()
        where = url.database or ""
        if dialect in FILE_DATABASES:
            where = os.path.realpath(where)
            schema = schema or "main"
        elif dialect == "postgresql":
            schema = schema or "public"
        host = f"{url.host}:{url.port}"
        return ("sql", dialect, host, where, schema, _folded(name, dialect))

    def existing(self) -> pa.Schema | None:
        if not self._database_is_there():
            return None
        engine = self._engine()
        try:
            self._check_marks(engine)
            self._table = self._reflected(engine)
            return None if self._table is None else _columns(self._table)
        finally:
            engine.dispose()

    @property
    def system(self) -> str:
        return str(self._engine().dialect.name)

    def check_names(self, names: Sequence[str]) -> None:
        dialect = self.system
        self.refuse_alike(names, lambda name: _folded(name, dialect))
        most, unit = LONGEST_NAMES.get(dialect, (0, ""))
        named = [("column", name) for name in names]
        named += [("table", name) for name in self._names if name]
        for kind, name in named:
            if not name or "\0" in name:
                raise ConfigError(
                    f"{self.what}: the name of {kind} {name!r} is empty or contains NUL. Rename it"
                )
            size = len(name.encode()) if unit == "bytes" else len(name)
            if most and size > most:
                raise ConfigError(
                    f"{self.what}: the name of {kind} {name!r} has {size} {unit}, but {dialect} "
                    f"allows {most}. Choose a shorter name"
                )

    def fit(self, schema: pa.Schema, existing: pa.Schema, whole: bool = True) -> pa.Schema:
        """Return `existing`, with the type in `schema` for each column that can hold that type.

        A column whose type is not in FITTING_KINDS can hold any type. The database converts the
        values. Raises `ConfigError` if columns `schema` do not fit.
        """
        named = {field.name: field.type for field in schema}
        shown = []
        for field in existing:
            given = named.get(field.name, field.type)
            fits = any(test(given) for test in FITTING_KINDS.get(field.type, (lambda kind: True,)))
            nullable = field.nullable or kinds.is_null(given)  # Arrow has no other null type
            shown.append(pa.field(field.name, given, nullable) if fits else field)
        return super().fit(schema, pa.schema(shown), whole)

    def rehearse(self, schema: pa.Schema, existing: pa.Schema | None) -> None:
        """Create missing tables and insert no rows, in a transaction that is rolled back.

        This shows missing permissions, and which table or column the database rejects. Does nothing
        for databases that cannot roll back CREATE TABLE. A missing database file is not created; an
        in-memory database takes its place.
        """
        from sqlalchemy import create_engine, false, null, select

        engine = self._engine()
        dialect = engine.dialect.name
        if dialect not in ROLLED_BACK:
            return
        if not self._database_is_there():
            self._check_folder()
            engine = create_engine("sqlite://" if dialect == "sqlite" else "duckdb:///:memory:")
        try:
            table, marks = self._defined(engine, schema)
            with engine.connect() as connection:
                if dialect == "sqlite":  # its driver begins no transaction for CREATE TABLE
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
                try:
                    for one in (table, marks):
                        one.create(connection, checkfirst=True)
                    nulls = select(*(null() for _ in schema)).where(false())
                    connection.execute(table.insert().from_select(schema.names, nulls))
                    note = select(null(), null()).where(false())
                    connection.execute(marks.insert().from_select(["plan", "target"], note))
                    connection.execute(marks.update().where(false()).values(run_key=""))
                    if self.target.key:
                        connection.execute(table.delete().where(false()))
                finally:
                    connection.rollback()
        finally:
            engine.dispose()

    def holds(self, plan: str, recorded: str) -> bool:
        with self.with_plain_errors():
            if not self._database_is_there():
                return False
            engine = self._engine()
            try:
                table = self._reflected(engine)
                if table is None or not self._has(engine, MARK_TABLE):
                    return False
                self._check_marks(engine)
                marks = self._marks()
                return plan in self._published(engine, table, marks)[0]
            finally:
                engine.dispose()

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        from sqlalchemy.exc import DataError, IntegrityError, OperationalError

        engine = self._engine()
        try:
            for last in reversed(range(PUBLISH_TRIES)):
                with self.with_plain_errors(rows):
                    try:
                        if self._attempt(engine, rows, observe):
                            return ""
                    except IntegrityError:
                        if self.holds(rows.plan, ""):
                            return ""
                        raise  # a row that the table does not take
                    except DataError as error:
                        if (where := _first_nul(rows)) is None:
                            raise
                        raise ConfigError(
                            f"{self.what}: {where} contains a NUL character, which the database "
                            "cannot store. The result in data/ is complete. Remove the character "
                            "in output.postprocess and run the job under another run key, where "
                            "reuse keeps the answers"
                        ) from error
                    except OperationalError as error:
                        # Locked, or the connection broke: look again.
                        if not last or self.hopeless(error) is not None:
                            raise
        finally:
            engine.dispose()
        raise PublishFailed(f"{self.what}: the database did not accept the rows. Publish again")

    def _attempt(self, engine: Engine, rows: AnsweredRows, observe: Observe) -> bool:
        """Insert the rows unless the table has them; return False if another publisher interfered.

        The caller must then try again, which looks at the table anew.
        """
        wanted = converted_schema(rows.schema, self.target)
        table, marks = self._tables(engine, wanted)
        self.fit(wanted, _columns(table))  # else SQLAlchemy leaves out columns that the table lacks
        observe("opened")
        valid, stale = self._published(engine, table, marks)
        if rows.plan in valid:
            return True
        self._check_numbers(table, rows)
        observe("looked")
        if not self._insert(engine, table, marks, stale, rows, observe):
            return False
        observe("committed")
        return True

    def _number_checks(self, table: Table, schema: pa.Schema) -> dict[str, tuple[Holds, str]]:
        """Return {column: (test of whether it holds a number, its type in SQL)}.

        It has only the columns that would change numbers of their types in `schema`.
        """
        dialect = self._engine().dialect
        return {
            str(column.name): (holds, column.type.compile(dialect))
            for column in table.columns
            if column.name in schema.names
            and (holds := number_check(schema.field(column.name).type, column.type, dialect.name))
        }

    def _check_numbers(self, table: Table, rows: AnsweredRows) -> None:
        """Raise `ConfigError` for the first number that its column of the table would change."""
        checks = self._number_checks(table, rows.schema)
        number = 0
        for batch in rows.read() if checks else ():
            for name, (holds, kind) in checks.items():
                for at, value in enumerate(batch[name].to_pylist(), number):
                    if value is not None and not holds(value):
                        raise ConfigError(
                            f"{self.what}: row {at:,} of the result (counted from 0), column "
                            f"{name!r}, is {value}, which the existing table's type {kind} would "
                            "change. The result in data/ is complete. Change the column's type and "
                            "publish again; or round the value in output.postprocess and run the "
                            "job under another run key, where reuse keeps the answers"
                        )
            number += len(batch)

    def _insert(
        self,
        engine: Engine,
        table: Table,
        marks: Table,
        stale: dict[str, str],
        rows: AnsweredRows,
        observe: Observe,
    ) -> bool:
        from sqlalchemy import and_

        wanted = converted_schema(rows.schema, self.target)
        with engine.begin() as connection:
            use_utc = USE_UTC.get(engine.dialect.name)
            if use_utc and any(kinds.is_timestamp(field.type) for field in wanted):
                connection.exec_driver_sql(use_utc)
            note = {"run_key": rows.run_key, "rows": rows.count}
            note["published_at"] = datetime.now(UTC).isoformat()
            if (
                rows.plan in stale
            ):  # only as it was looked at: another publisher may have renewed it
                one = and_(*self._mark(marks, rows.plan), marks.c.published_at == stale[rows.plan])
                if not connection.execute(marks.update().where(one).values(**note)).rowcount:
                    return False
            else:
                key = {"plan": rows.plan, "target": self._mark_name}
                connection.execute(marks.insert(), [key | note])
            for plan, at in stale.items():
                if plan != rows.plan:
                    one = and_(*self._mark(marks, plan), marks.c.published_at == at)
                    connection.execute(marks.delete().where(one))
            observe("in transaction")
            if self.target.key:
                # Without the lock, two runs might both find a key absent, and both add it.
                turn = and_(*self._mark(marks, TURN))
                connection.execute(marks.update().where(turn).values(run_key=rows.run_key))
                self._delete(connection, table, rows, wanted)
            for batch in _values(rows, wanted, engine.dialect.name, _converters(table)):
                connection.execute(table.insert(), batch)
            observe("inserted")
        return True

    def _delete(
        self, connection: Connection, table: Table, rows: AnsweredRows, wanted: pa.Schema
    ) -> None:
        """Delete the table's rows that have a key of `rows`.

        A merge does this before its first insert: a database may compare keys without case, and
        would delete a row just inserted for another one.
        """
        from sqlalchemy import and_, bindparam

        columns = pa.schema([wanted.field(name) for name in self.target.key])
        where = and_(*(table.c[name] == bindparam(f"k_{name}") for name in columns.names))
        for batch in _values(rows, columns, connection.dialect.name, _converters(table)):
            keys = [{f"k_{name}": value for name, value in row.items()} for row in batch]
            connection.execute(table.delete().where(where), keys)

    def _published(
        self, engine: Engine, table: Table, marks: Table
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return (plans whose rows the table has, plans whose rows it has lost).

        Each is {plan hash: time of its mark}; a mark is a row that says when a plan was published.
        One of the two is always empty: if the table has no row, it has lost the rows of all marks,
        else it has them. A table that this user may not read counts as not empty.

        Reads the marks before the table. So a publisher that adds its mark and rows in between is
        in neither, and never counts as lost. Reads them once more after the table: whoever adds the
        first rows to an emptied table removes the marks of the rows that it lost.
        """
        from sqlalchemy import literal, select
        from sqlalchemy.exc import DBAPIError

        plans = self._read_marks(engine, marks)
        if not plans:
            return {}, {}
        try:
            with engine.connect() as connection:
                first = connection.execute(select(literal(1)).select_from(table).limit(1)).first()
        except DBAPIError as error:
            if super().hopeless(error) is None:
                raise
            return plans, {}  # the user may add rows and not read them
        if first is None:
            return {}, plans
        now = self._read_marks(engine, marks)
        return {plan: at for plan, at in plans.items() if now.get(plan) == at}, {}

    def _read_marks(self, engine: Engine, marks: Table) -> dict[str, str]:
        """Return the marks of this target's plans, as {plan hash: time of its mark}."""
        from sqlalchemy import select

        named = select(marks.c.plan, marks.c.published_at).where(marks.c.target == self._mark_name)
        with engine.connect() as connection:
            rows = connection.execute(named).all()
        return {str(plan): str(at) for plan, at in rows if plan != TURN}

    @property
    def _names(self) -> tuple[str, str]:
        """Return (schema or "", name) of the table.

        For DuckDB, the schema is never "": its dialect would mix columns of all schemas.
        """
        schema, _, name = (self.target.table or "").rpartition(".")
        if not schema and self._url().get_backend_name() == "duckdb":
            schema = "main"
        return schema, name

    @property
    def _mark_name(self) -> str:
        """Return the name of the target table in its marks, the rows that name published plans.

        It has no schema, since the table of marks is in the same one.
        """
        return _folded(self._names[1], self._url().get_backend_name())

    def _mark(self, marks: Table, plan: str) -> tuple[ColumnElement[bool], ...]:
        return marks.c.plan == plan, marks.c.target == self._mark_name

    def _marks(self) -> Table:
        from sqlalchemy import BigInteger, Column, MetaData, String, Table

        return Table(
            MARK_TABLE,
            MetaData(schema=self._names[0] or None),
            Column("plan", String(64), primary_key=True),
            Column("target", String(255), primary_key=True),
            Column("run_key", String(200)),
            Column("rows", BigInteger),
            Column("published_at", String(40)),
        )

    def _check_marks(self, engine: Engine) -> None:
        """Raise `ConfigError` if the table of marks (MARK_TABLE) exists, but lacks a column."""
        there = self._columns_of(engine, MARK_TABLE)
        names = {column["name"].lower() for column in there or ()}
        if there is not None and not {"plan", "target", "run_key", "rows", "published_at"} <= names:
            raise ConfigError(
                f"{self.what}: the existing table {MARK_TABLE} has the columns "
                f"{', '.join(sorted(names))}, not those of this version. Rename or drop it. "
                "Publishing one of its runs again then writes the rows again"
            )

    def _defined(self, engine: Engine, schema_to_write: pa.Schema) -> tuple[Table, Table]:
        """Return SQLAlchemy's definitions of (target table, MARK_TABLE); create neither.

        A target table that does not exist is defined with columns for `schema_to_write`.
        """
        from sqlalchemy import Column, MetaData, Table

        schema, name = self._names
        table = self._reflected(engine)
        if table is None:
            columns = [
                Column(_quoted(field.name, engine), sql_type_of(field.type, engine.dialect.name))
                for field in schema_to_write
            ]
            table = Table(_quoted(name, engine), MetaData(schema=schema or None), *columns)
        return table, self._marks()

    def _tables(self, engine: Engine, schema: pa.Schema) -> tuple[Table, Table]:
        """Return (the target table, the table of marks), created if missing.

        Each is created in its own transaction, because many databases end a transaction at CREATE
        TABLE. If the target has a key, also inserts TURN, the mark that each merge locks.
        """
        from sqlalchemy.exc import IntegrityError

        table, marks = self._defined(engine, schema)
        for one in (table, marks):
            _create(engine, one)
        if self.target.key:
            try:
                with engine.begin() as connection:
                    connection.execute(marks.insert(), [{"plan": TURN, "target": self._mark_name}])
            except IntegrityError:
                pass  # another publisher has inserted it
        return table, marks

    def _has(self, engine: Engine, name: str) -> bool:
        return self._columns_of(engine, name) is not None

    def _columns_of(self, engine: Engine, name: str) -> list[ReflectedColumn] | None:
        from sqlalchemy import inspect
        from sqlalchemy.exc import NoSuchTableError

        try:
            return inspect(engine).get_columns(name, schema=self._names[0] or None) or None
        except NoSuchTableError:
            return None

    def _reflected(self, engine: Engine) -> Table | None:
        """Return the existing table, None if there is none.

        It has columns only, because DuckDB's dialect cannot reflect keys.
        """
        from sqlalchemy import REAL, Column, MetaData, Table, Uuid

        schema, name = self._names
        found = self._columns_of(engine, name)
        if found is None:
            return None
        columns = [
            Column(_quoted(one["name"], engine), one["type"], nullable=one["nullable"])
            for one in found
        ]
        shorts = _short_floats(engine, schema, name)
        for column in columns:
            if column.name in shorts:
                column.type = REAL()
            if isinstance(column.type, Uuid):  # a result has them as text
                column.type = Uuid(as_uuid=False)
        return Table(_quoted(name, engine), MetaData(schema=schema or None), *columns)

    def hopeless(self, error: Exception) -> str | None:
        from sqlalchemy import exc

        if NO_PLACE.search(str(error)):
            return "no such database, so create it or correct uri"
        if (denied := super().hopeless(error)) is not None:
            return denied
        if isinstance(error, (exc.TimeoutError, exc.DisconnectionError)):
            return None
        if isinstance(error, exc.DBAPIError) and is_transient_database_error(error):
            return None
        if isinstance(error, (exc.SQLAlchemyError, ValueError, TypeError, OverflowError)):
            return f"the database rejects {'the table' if self.planned else 'the rows'}"
        return None

    def _url(self) -> URL:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            url = make_url(self.target.uri or "")
        except (ArgumentError, ValueError) as error:
            raise ConfigError(f"{self.what}: uri: {self.scrub(error)}") from None
        return url.set(drivername=DRIVERS.get(url.drivername, url.drivername))

    def _engine(self) -> Engine:
        from sqlalchemy import create_engine
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError
        from sqlalchemy.pool import NullPool

        url = self._url()
        try:
            # A new connection each time: a pooled one may have been closed meanwhile.
            engine = create_engine(url, hide_parameters=True, poolclass=NullPool)
        except (ImportError, NoSuchModuleError) as error:
            raise ConfigError(f"{self.what}: {missing_driver(url, error)}") from None
        except ArgumentError as error:
            raise ConfigError(f"{self.what}: uri: {self.scrub(error)}") from None
        if engine.dialect.is_async:
            raise ConfigError(
                f"{self.what}: uri: the driver {engine.dialect.driver} is asynchronous. Name "
                f"another driver, or none: {engine.dialect.name}://..."
            )
        return engine

    def _file(self) -> str | None:
        """Return the path of the database file; None for a server, or a `file:` or `md:` URI.

        Raises `ConfigError` for an in-memory database.
        """
        url = self._url()
        if url.get_backend_name() not in FILE_DATABASES or str(url.database).startswith(
            ("file:", "md:")
        ):
            return None
        if url.database in (None, "", ":memory:"):
            raise ConfigError(
                f"{self.what}: uri: an in-memory database is lost with the process. Name a file, "
                f"such as {url.get_backend_name()}:////data/answers.db"
            )
        return str(url.database)

    def _database_is_there(self) -> bool:
        """Return whether the database's file exists, which connecting would create otherwise.

        True for a database without a file on this machine, such as one on a server.
        """
        file = self._file()
        return file is None or os.path.exists(file)

    def _check_folder(self) -> None:
        """Raise `ConfigError` if the database's file cannot be created."""
        if (file := self._file()) is not None:
            self.need_writable(os.path.dirname(os.path.abspath(file)), made=False)


def _quoted(name: str, engine: Engine) -> str:
    """Return a name that SQLAlchemy quotes where needed, and always for DuckDB.

    DuckDB's dialect only knows PostgreSQL's reserved words ("at" is one of DuckDB's).
    """
    from sqlalchemy.sql import quoted_name

    return quoted_name(name, True) if engine.dialect.name == "duckdb" else name


def _short_floats(engine: Engine, schema: str, table: str) -> set[str]:
    """Return a DuckDB table's columns of 32-bit floats, which its dialect reflects as doubles."""
    if engine.dialect.name != "duckdb":
        return set()
    query = (
        "SELECT column_name FROM duckdb_columns() WHERE data_type = 'FLOAT' AND table_name = ? "
        "AND schema_name = ? AND database_name = current_database()"
    )
    with engine.connect() as connection:
        return set(connection.exec_driver_sql(query, (table, schema)).scalars())


def _folded(name: str, dialect: str) -> str:
    """Return the name of a table or column in the case in which the database compares it."""
    if dialect in CASE_COUNTS:
        return name
    if dialect in UPPER_CASE:
        return name.upper() if name == name.lower() else name
    if dialect == "sqlite":  # it ignores the case of ASCII letters only
        return "".join(c.lower() if c.isascii() else c for c in name)
    return name.lower()


def is_transient_database_error(error: DBAPIError) -> bool:
    """Return whether a database error is transient, so that a retry may succeed.

    Decided by SQLSTATE, class, MySQL's error number or text. If none of these decides, the error
    counts as transient, unless the database is a file.
    """
    from sqlalchemy import exc

    original, text = error.orig, str(error.orig)
    if error.connection_invalidated:
        return True
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if state:
        return str(state).startswith(PASSING_STATES)
    refused = (exc.DataError, exc.IntegrityError, exc.NotSupportedError, exc.ProgrammingError)
    if isinstance(error, refused):
        return False
    number = next(iter(getattr(original, "args", ())), None)
    if type(original).__module__.partition(".")[0].lower() in ("pymysql", "mysqldb", "mysql"):
        return number in MYSQL_PASSING
    if _FINAL.search(text):
        return False
    if type(original).__module__.partition(".")[0] in ("sqlite3", "_duckdb", "duckdb"):
        return _PASSING.search(text) is not None
    return True


def _columns(table: Table) -> pa.Schema:
    """Return a table's columns as a schema with approximate types; string if a type is unknown."""
    return pa.schema([pa.field(c.name, _kind(c), bool(c.nullable)) for c in table.columns])


def _kind(column: Column[Any]) -> pa.DataType:
    try:
        if column.type.python_type is datetime and getattr(column.type, "timezone", False):
            return pa.timestamp("us", "UTC")
        return COLUMN_KINDS.get(column.type.python_type, pa.string())
    except NotImplementedError:
        return pa.string()


def _converters(table: Table) -> dict[str, Convert]:
    """Return {column: function that converts a nested value or a boolean for the column}.

    It has only the table's JSON, array and number columns.
    """
    from sqlalchemy import ARRAY, JSON, Integer, Numeric

    found: dict[str, Convert] = {}
    for column in table.columns:
        if isinstance(column.type, JSON):
            found[column.name] = lambda value: json.loads(json_text(value))
        elif isinstance(column.type, ARRAY):
            found[column.name] = lambda value: value
        elif isinstance(column.type, (Integer, Numeric)):  # PostgreSQL casts no booleans
            found[column.name] = int
    return found


def _create(engine: Engine, table: Table) -> None:
    """Create a table unless it exists, also if another publisher creates it at the same moment."""
    from sqlalchemy import inspect
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    try:
        table.create(engine, checkfirst=True)
    except (IntegrityError, OperationalError, ProgrammingError):
        if not inspect(engine).has_table(table.name, schema=table.schema):
            raise


def sql_type_of(kind: pa.DataType, dialect: str) -> TypeEngine[Any]:
    """Return the type of a column that keeps values of `kind` whole, to the microsecond."""
    import sqlalchemy as sql
    from sqlalchemy.dialects import mssql, mysql, oracle

    if kinds.is_decimal(kind):  # SQLite has no decimals, and would convert them to floats
        if dialect == "sqlite":
            return sql.Text()
        return sql.Numeric(kind.precision, kind.scale)
    mysqls = "mysql", "mariadb"
    if kinds.is_timestamp(kind):
        moments = sql.DateTime(timezone=kind.tz is not None)
        moments = moments.with_variant(mysql.DATETIME(fsp=6), *mysqls)
        moments = moments.with_variant(oracle.TIMESTAMP(), "oracle")
        return moments if kind.tz else moments.with_variant(mssql.DATETIME2, "mssql")
    times = sql.Time().with_variant(mysql.TIME(fsp=6), *mysqls)
    for test, made in (
        (kinds.is_boolean, sql.Boolean()),
        (kinds.is_integer, sql.BigInteger()),
        (kinds.is_floating, sql.Double()),
        (kinds.is_date, sql.Date()),
        (kinds.is_time, times.with_variant(mssql.TIME, "mssql")),
        (kinds.is_binary, sql.LargeBinary().with_variant(mysql.LONGBLOB(), *mysqls)),
    ):
        if test(kind):
            return made
    texts = sql.Text().with_variant(mysql.LONGTEXT(), *mysqls)
    return texts.with_variant(sql.UnicodeText(), "mssql")


def _values(
    rows: AnsweredRows,
    schema: pa.Schema,
    dialect: str,
    converters: dict[str, Convert],
) -> Iterator[list[dict[str, object]]]:
    """Yield lists of at most INSERT_ROWS rows, with values as the database's driver accepts them.

    Nested values become JSON text unless `converters` has a function for their column, which also
    converts booleans; times with a zone become UTC; in SQLite, decimals become text. `schema` has
    the columns to yield, with the types in which the target stores them.
    """
    change: dict[str, Convert] = {}
    for kept in schema:
        given = rows.schema.field(kept.name)
        if kinds.is_nested(given.type):
            change[given.name] = converters.get(given.name, json_text)
        elif kinds.is_boolean(given.type) and given.name in converters:
            change[given.name] = converters[given.name]
        elif kinds.is_timestamp(given.type) and given.type.tz:
            change[given.name] = _utc
        elif kinds.is_decimal(kept.type) and dialect == "sqlite":
            change[given.name] = str
    for batch in rows.read():
        for start in range(0, len(batch), INSERT_ROWS):
            values = batch.select(schema.names).slice(start, INSERT_ROWS).to_pylist()
            for row in values:
                for name, changed in change.items():
                    if row[name] is not None:
                        row[name] = changed(row[name])
            yield values


def _first_nul(rows: AnsweredRows) -> str | None:
    """Return text that names the first row and column with a NUL character; None if there is none.

    PostgreSQL rejects NUL, also in nested texts, without saying where.
    """
    number = 0
    for batch in rows.read():
        for row in batch.to_pylist():
            for name, value in row.items():
                kept = storable_in(value)
                if kept is not value and kept != value:
                    return f"row {number:,} of the result (counted from 0), column '{name}',"
            number += 1
    return None


def _utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


def json_text(value: object) -> str:
    """Return a value as JSON text.

    NaN and infinity, which JSON cannot express, become null at any depth. Decimals and
    times become texts, bytes base64.
    """
    return json.dumps(finite_in(value), default=_as_text, ensure_ascii=False)


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
