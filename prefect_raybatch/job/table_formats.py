"""The values of source.format that are versioned tables rather than files.

`prefect_raybatch.source.tables` opens them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.job.checks import SCHEMES
from prefect_raybatch.job.secrets import USERINFO

_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:,\s*(?:tz=)?([\w/+:-]+))?\]")


@dataclass(frozen=True)
class TableFormat:
    """A format of versioned tables that `source.format` may name.

    `title`: its official spelling. `module`: the Python module that reads it. `extra`: the pip
    extra that installs it. `version`: the valid forms of source.version, in words for an error;
    None if the format has no versions. `schemes`: its URI schemes.
    """

    title: str
    module: str
    extra: str
    version: str | None
    schemes: Sequence[str] = SCHEMES

    @property
    def source(self) -> str:
        """Return a source of this format in words, such as `a Delta source`."""
        return f"{'an' if self.title in ('Iceberg', 'SQL') else 'a'} {self.title} source"

    @property
    def own_schemes(self) -> tuple[str, ...]:
        """Return the URI schemes that no object store has, so that they identify the format."""
        return tuple(scheme for scheme in self.schemes if scheme not in SCHEMES)


# Dialects of SQLAlchemy; postgresql+psycopg:// and the like name the driver as well.
SQL_SCHEMES = (
    *("postgresql", "sqlite", "mysql", "mariadb", "oracle", "mssql", "snowflake", "redshift"),
    *("bigquery", "duckdb", "trino", "clickhouse", "clickhousedb", "databricks", "cockroachdb"),
    *("awsathena", "hana", "teradatasql", "vertica", "db2"),
)

TABLE_FORMATS: dict[str, TableFormat] = {
    "delta": TableFormat("Delta", "deltalake", "delta", "a version number or a timestamp"),
    "iceberg": TableFormat(
        "Iceberg", "pyiceberg", "iceberg", "a snapshot id, a branch or tag, or a timestamp"
    ),
    "lance": TableFormat("Lance", "lance", "lance", "a version number, a tag or a timestamp"),
    "sql": TableFormat("SQL", "sqlalchemy", "postgresql", None, SQL_SCHEMES),
    "huggingface": TableFormat(
        "Hugging Face", "datasets", "huggingface", "a commit, a branch or tag", (*SCHEMES, "hf")
    ),
}


HUB_NAME = re.compile(
    r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?/?"
)


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI in lower case, without a driver (+psycopg); "" for a path."""
    return uri.split("://", 1)[0].lower().partition("+")[0] if "://" in uri else ""


def format_of_scheme(scheme: str) -> str | None:
    """Return the table format that a URI scheme identifies ("sql" for mysql); None if none."""
    return next((name for name, one in TABLE_FORMATS.items() if scheme in one.own_schemes), None)


@dataclass(frozen=True)
class HubName:
    """A dataset of the Hugging Face Hub as `source.uri` names it.

    `repository` is OWNER/NAME; `revision` is None if the URI has none.
    """

    repository: str
    revision: str | None


def hub_name(uri: str) -> HubName:
    """Parse `hf://datasets/OWNER/NAME[@REVISION]`; raise ValueError for another form."""
    match = HUB_NAME.fullmatch(uri)
    if match is None:
        raise ValueError(
            f"{uri!r} is not a Hugging Face dataset; write hf://datasets/OWNER/NAME or "
            "hf://datasets/OWNER/NAME@REVISION, and set source.config and source.split to choose a "
            "part of it"
        )
    return HubName(match["repository"], match["revision"])


def check_catalog_code(properties: Mapping[str, object]) -> None:
    """Raise ValueError for properties of a catalog that name Python code to import."""
    for name, value in properties.items():
        if "impl" in str(name).lower() or (isinstance(value, Mapping) and "impl" in value):
            raise ValueError(
                f"{name} names Python code to load, which is not allowed in a job; put the catalog "
                "into .pyiceberg.yaml where the flow runs, and refer to it as {name: ...}"
            )


def check_catalog(properties: Mapping[str, object]) -> None:
    """Raise ValueError for catalog properties that name Python code or contain a user in a URL."""
    check_catalog_code(properties)
    for name, value in properties.items():
        if isinstance(value, str) and USERINFO.search(value):
            raise ValueError(
                f"{name} contains a user or key before an @; put it into .pyiceberg.yaml or the "
                "environment (PYICEBERG_CATALOG__NAME__URI) where the flow runs"
            )


def arrow_type(name: str) -> Any:
    """Return the Arrow type of that name; raise ValueError for an unknown one.

    Examples: int64, string, decimal(38,9), timestamp[us], timestamp[us, UTC].
    """
    import pyarrow as pa

    if match := _DECIMAL.fullmatch(name.strip()):
        precision, scale = int(match[1]), int(match[2])
        if 0 < precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    if match := _TIMESTAMP.fullmatch(name.strip()):
        return pa.timestamp(match[1], match[2])
    try:
        return pa.type_for_alias(name.strip())
    except ValueError:
        raise ValueError(
            f"{name!r} is not an Arrow type; write for example int64, double, string, bool, "
            "date32, timestamp[us], timestamp[us, UTC] or decimal(38,9)"
        ) from None
