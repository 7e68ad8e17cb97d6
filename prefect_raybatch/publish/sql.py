"""A table of a database: one transaction, whose first statement inserts the plan's hash.

The hash is a primary key, so of two publishers the second waits for the first and then finds that
the rows are there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import types as kinds

from prefect_raybatch.errors import ConfigError, PublishFailed
from prefect_raybatch.publish.base import PUBLISH_TRIES, AnsweredRows, Observe, Sink
from prefect_raybatch.publish.types import converted_schema
from prefect_raybatch.source.tables.sql import DRIVERS, NO_PLACE
from prefect_raybatch.words import storable_in

OURS = "_raybatch_published"
INSERT_ROWS = 1000  # of one INSERT
# About what a column holds, by the type that its values have in Python.
COLUMN_KINDS: dict[type, pa.DataType] = {
    **{bool: pa.bool_(), int: pa.int64(), float: pa.float64(), Decimal: pa.decimal128(38, 9)},
    **{date: pa.date32(), datetime: pa.timestamp("us"), time: pa.time64("us")},
    **{bytes: pa.binary()},
}
NUMERIC_KINDS = (kinds.is_integer, kinds.is_floating, kinds.is_decimal, kinds.is_boolean)
# What goes there without loss, by what a column holds; into any other column all that is text, too.
FITTING_KINDS: dict[pa.DataType, tuple[Callable[[Any], bool], ...]] = {
    **dict.fromkeys([pa.float64(), pa.decimal128(38, 9)], NUMERIC_KINDS),
    **dict.fromkeys([pa.bool_(), pa.int64()], (kinds.is_integer, kinds.is_boolean)),
    **{pa.date32(): (kinds.is_date,), pa.time64("us"): (kinds.is_time,)},
    **{pa.timestamp("us"): (kinds.is_timestamp, kinds.is_date), pa.binary(): (kinds.is_binary,)},
}


class SqlSink(Sink):
    """Append, or replace by key, through SQLAlchemy."""

    module, extra = "sqlalchemy", "postgresql"

    def existing(self) -> pa.Schema | None:
        engine = self._engine()
        try:
            table = self._reflected(engine)
            return None if table is None else _columns(table)
        finally:
            engine.dispose()

    def fit(self, wanted: pa.Schema, there: pa.Schema, whole: bool = True) -> pa.Schema:
        """By name, nullability and kind: widths differ from database to database, and it
        converts."""
        named = {field.name: field.type for field in wanted}
        shown = []
        for field in there:
            given = named.get(field.name, pa.null())
            fits = any(test(given) for test in FITTING_KINDS.get(field.type, (lambda kind: True,)))
            shown.append(field.with_type(given) if fits else field)
        return super().fit(wanted, pa.schema(shown), whole)

    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        from sqlalchemy.exc import DataError, IntegrityError, OperationalError

        engine = self._engine()
        wanted = converted_schema(rows.schema, self.target)
        try:
            for last in reversed(range(PUBLISH_TRIES)):
                with self.plainly(rows):
                    table, marks = self._tables(engine, wanted)
                    self.fit(
                        wanted, _columns(table)
                    )  # else SQLAlchemy leaves out what is not there
                    observe("opened")
                    if self._found(engine, marks, rows):
                        return ""
                    observe("looked")
                    try:
                        self._insert(engine, table, marks, rows, observe)
                    except IntegrityError:
                        if self._found(engine, marks, rows):
                            return ""
                        raise  # a row that the table does not take
                    except DataError as error:
                        if (where := _first_nul(rows)) is None:
                            raise
                        raise ConfigError(
                            f"{self.what}: {where} holds a NUL character, which the database does "
                            "not keep. What is in data/ stays as it is: take the character out in "
                            "a postprocess and run the job under another run key, where reuse "
                            "keeps the answers"
                        ) from error
                    except OperationalError:
                        if last:  # locked, or the connection broke: look again
                            continue
                        raise
                    observe("committed")
                    return ""
        finally:
            engine.dispose()
        raise PublishFailed(f"{self.what}: the database did not take the rows")

    def _insert(
        self, engine: Any, table: Any, marks: Any, rows: AnsweredRows, observe: Observe
    ) -> None:
        from sqlalchemy import and_, bindparam, true

        wanted = converted_schema(rows.schema, self.target)
        with engine.begin() as connection:
            note = {"hash": rows.plan, "run_key": rows.run_key, "rows": rows.count}
            connection.execute(marks.insert(), [note | {"at": datetime.now(UTC).isoformat()}])
            observe("in transaction")
            keys = self.target.key
            if keys:  # else two runs with one key might both find it absent, and both add it
                turn = marks.c.hash == self._turn
                connection.execute(marks.update().where(turn).values(run_key=rows.run_key))
            where = and_(true(), *(table.c[name] == bindparam(f"k_{name}") for name in keys))
            for batch in _values(rows, wanted, engine.dialect.name, _unpacked(table)):
                if keys:
                    named = [{f"k_{name}": row[name] for name in keys} for row in batch]
                    connection.execute(table.delete().where(where), named)
                connection.execute(table.insert(), batch)
            observe("inserted")

    def _found(self, engine: Any, marks: Any, rows: AnsweredRows) -> bool:
        with engine.connect() as connection:
            found = connection.execute(marks.select().where(marks.c.hash == rows.plan)).first()
        return found is not None

    def _tables(self, engine: Any, wanted: pa.Schema) -> tuple[Any, Any]:
        """(the table, ours), made where they are not there. In transactions of their own, since
        many databases end one at such a statement."""
        from sqlalchemy import BigInteger, Column, MetaData, String, Table
        from sqlalchemy.exc import IntegrityError

        table = self._reflected(engine)
        schema, _, name = (self.target.table or "").rpartition(".")
        known = MetaData(schema=schema or None)
        marks = Table(
            OURS,
            known,
            Column("hash", String(64), primary_key=True),
            Column("run_key", String(200)),
            Column("rows", BigInteger),
            Column("at", String(40)),
        )
        if table is None:
            columns = [
                Column(field.name, _sql_type(field.type, engine.dialect.name)) for field in wanted
            ]
            table = Table(name, known, *columns)
        for one in (table, marks):
            _create(engine, one)
        if self.target.key:
            try:
                with engine.begin() as connection:
                    connection.execute(marks.insert(), [{"hash": self._turn}])
            except IntegrityError:
                pass  # another publisher has made it
        return table, marks

    @property
    def _turn(self) -> str:
        """The row of our table whose lock a merge into this table holds until it is committed."""
        return f"merge {self.target.table}"[:64]

    def _reflected(self, engine: Any) -> Any:
        from sqlalchemy import MetaData, Table, Uuid
        from sqlalchemy.exc import NoSuchTableError

        schema, _, name = (self.target.table or "").rpartition(".")
        try:
            table = Table(name, MetaData(schema=schema or None), autoload_with=engine)
        except NoSuchTableError:
            return None
        for column in table.columns:
            if isinstance(column.type, Uuid):  # a result has them as text
                column.type = Uuid(as_uuid=False)
        return table

    def hopeless(self, error: Exception) -> str | None:
        from sqlalchemy.exc import DataError, IntegrityError, NotSupportedError, ProgrammingError

        if NO_PLACE.search(str(error)):
            return "there is no such database, so create it or correct uri"
        if (denied := super().hopeless(error)) is not None:
            return denied
        refused = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
        return "the database refuses the rows" if isinstance(error, refused) else None

    def _engine(self) -> Any:
        from sqlalchemy import create_engine, make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError
        from sqlalchemy.pool import NullPool

        try:
            url = make_url(self.target.uri or "")
            url = url.set(drivername=DRIVERS.get(url.drivername, url.drivername))
            # A connection for each look: one that was kept may have been cut off meanwhile.
            return create_engine(url, hide_parameters=True, poolclass=NullPool)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{self.what}: needs {error.name}, which is not installed; pip install it "
                '("prefect-raybatch[postgresql]" brings psycopg: postgresql+psycopg://...)'
            ) from None
        except (ArgumentError, NoSuchModuleError) as error:
            raise ConfigError(f"{self.what}: uri: {self.scrub(error)}") from None


def _columns(table: Any) -> pa.Schema:
    """Names, nullability, and about what they hold; null where that cannot be told."""
    return pa.schema([pa.field(c.name, _kind(c), bool(c.nullable)) for c in table.columns])


def _kind(column: Any) -> pa.DataType:
    try:
        return COLUMN_KINDS.get(column.type.python_type, pa.null())
    except NotImplementedError:
        return pa.null()


def _unpacked(table: Any) -> dict[str, Callable[[Any], Any]]:
    """What the values of columns that are not flat in the database become, by column."""
    from sqlalchemy import ARRAY, JSON

    found: dict[str, Callable[[Any], Any]] = {}
    for column in table.columns:
        if isinstance(column.type, JSON):
            found[column.name] = lambda value: json.loads(_json(value))
        elif isinstance(column.type, ARRAY):
            found[column.name] = lambda value: value
    return found


def _create(engine: Any, table: Any) -> None:
    """Makes a table unless it is there; another publisher may make it at the same moment."""
    from sqlalchemy import inspect
    from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

    try:
        table.create(engine, checkfirst=True)
    except (IntegrityError, OperationalError, ProgrammingError):
        if not inspect(engine).has_table(table.name, schema=table.schema):
            raise


def _sql_type(kind: Any, dialect: str) -> Any:
    import sqlalchemy as sql

    if kinds.is_decimal(kind):  # SQLite has none, and would make a float of it
        if dialect == "sqlite":
            return sql.Text()
        return sql.Numeric(kind.precision, kind.scale)
    if kinds.is_timestamp(kind):
        return sql.DateTime(timezone=kind.tz is not None)
    for test, made in (
        (kinds.is_boolean, sql.Boolean()),
        (kinds.is_integer, sql.BigInteger()),
        (kinds.is_floating, sql.Double()),
        (kinds.is_date, sql.Date()),
        (kinds.is_time, sql.Time()),
        (kinds.is_binary, sql.LargeBinary()),
    ):
        if test(kind):
            return made
    return sql.Text()


def _values(
    rows: AnsweredRows,
    wanted: pa.Schema,
    dialect: str,
    unpacked: dict[str, Callable[[Any], Any]],
) -> Iterator[list[dict[str, Any]]]:
    """Rows as a database's driver takes them: nested values as JSON text unless `unpacked` names
    their column, in SQLite decimals as text, too."""
    change: dict[str, Callable[[Any], Any]] = {}
    for given, kept in zip(rows.schema, wanted, strict=True):
        if kinds.is_nested(given.type):
            change[given.name] = unpacked.get(given.name, _json)
        elif kinds.is_timestamp(given.type) and given.type.tz:
            change[given.name] = _utc
        elif kinds.is_decimal(kept.type) and dialect == "sqlite":
            change[given.name] = str
    for batch in rows.read():
        for start in range(0, len(batch), INSERT_ROWS):
            values = batch.slice(start, INSERT_ROWS).to_pylist()
            for row in values:
                for name, changed in change.items():
                    if row[name] is not None:
                        row[name] = changed(row[name])
            yield values


def _first_nul(rows: AnsweredRows) -> str | None:
    """The first row and column whose text, or a text within, holds NUL: PostgreSQL refuses it and
    does not say where."""
    number = 0
    for batch in rows.read():
        for row in batch.to_pylist():
            for name, value in row.items():
                kept = storable_in(value)
                if kept is not value and kept != value:
                    return f"row {number:,} of the result (the first is 0), column '{name}',"
            number += 1
    return None


def _utc(value: Any) -> Any:
    return value.astimezone(UTC)


def _json(value: Any) -> str:
    return json.dumps(value, default=as_json, ensure_ascii=False)


def as_json(value: Any) -> Any:
    """What JSON has no type for: decimals and times as text, bytes in base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
