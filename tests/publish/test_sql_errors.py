"""Which errors of a database are transient."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import exc

from prefect_raybatch.publish.sql import is_transient_database_error


def raised(module: str, *args: Any, **fields: Any) -> Exception:
    """Return an error of the driver `module`, with the attributes `fields`."""
    return type("Error", (Exception,), {"__module__": module, **fields})(*args)


DEADLOCK = 1213  # MySQL's number


@pytest.mark.parametrize(
    ("kind", "original", "transient"),
    [
        (exc.OperationalError, raised("psycopg.errors", "deadlock", sqlstate="40P01"), True),
        (exc.OperationalError, raised("psycopg2", "gone", pgcode="08006"), True),
        (exc.OperationalError, raised("psycopg.errors", "no such role", sqlstate="28000"), False),
        (exc.DataError, raised("pymysql.err", DEADLOCK, "too long"), False),
        (exc.IntegrityError, raised("pymysql.err", DEADLOCK, "twice"), False),
        (exc.ProgrammingError, raised("sqlite3", "locked"), False),
        (exc.NotSupportedError, raised("sqlite3", "locked"), False),
        *(
            (exc.OperationalError, raised(module, number, "text"), number == DEADLOCK)
            for module in ("pymysql.err", "MySQLdb", "mysql.connector.errors")
            for number in (DEADLOCK, 1045)
        ),
        (exc.OperationalError, raised("pymysql.err"), False),
        (exc.OperationalError, raised("sqlite3", "database is locked"), True),
        (exc.OperationalError, raised("sqlite3", "no such table: a"), False),
        (exc.OperationalError, raised("other", "anything else"), True),
    ],
)
def test_an_error_is_transient_by_its_state_class_number_or_text(
    kind: type[exc.DBAPIError], original: Exception, transient: bool
) -> None:
    assert is_transient_database_error(kind("INSERT", {}, original)) == transient


def test_a_broken_connection_is_transient_whatever_the_error() -> None:
    error = exc.ProgrammingError("INSERT", {}, raised("sqlite3", "x"), connection_invalidated=True)
    assert is_transient_database_error(error)
