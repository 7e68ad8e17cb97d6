"""The input of a job, and which of its rows are read: `source` of a job file."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, Literal

from pydantic import field_validator, model_validator

from prefect_raybatch.job.checks import (
    SCHEMES,
    WEB_SCHEMES,
    check_options,
    check_uri,
    check_web,
    is_web,
    run_checks,
    without_user,
)
from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.job.filter_text import parse_filter
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.placeholders import check_placeholders
from prefect_raybatch.job.secrets import hide_users, holds_password, is_masked
from prefect_raybatch.job.table_formats import (
    TABLE_FORMATS,
    arrow_type,
    check_catalog,
    format_of_scheme,
    hub_name,
    scheme_of,
)
from prefect_raybatch.schemes import store_scheme


class Web(Group):
    """Limits for files that are read by http(s)."""

    max_mb: int = field(
        10_000,
        title="Maximum file size",
        text="Largest file to download, in MB. A file is stored temporarily on the "
        "machine that plans the run.",
        gt=0,
        le=10_000_000,
    )
    allow_private: bool = field(
        False,
        title="Private addresses",
        text="Allow source.uri to name hosts in a private network and ports other "
        "than 80 and 443. Link-local addresses are always refused.",
    )


SourceFormat = Literal[
    "auto",
    "parquet",
    "csv",
    "jsonl",
    "openai_batch",
    "arrow",
    "delta",
    "iceberg",
    "lance",
    "sql",
    "huggingface",
]


class Source(Group):
    """The table or files to read, and which of their rows and columns."""

    uri: str | list[str] = field(
        title="Location",
        text="File, folder, glob or table, or a list of files, folders and globs: "
        "local or s3://, or single files by http(s). Folders are read recursively, and files in "
        "the order of their full names. A Hugging Face dataset is hf://datasets/OWNER/NAME.",
    )
    format: SourceFormat = field(
        "auto",
        title="Format",
        text="Format of the files or table. Default (auto): inferred from file "
        "extensions or table metadata.",
    )
    served_as: list[str] | None = field(
        None,
        title="Model names",
        text="Names of the model that requests of an openai_batch file may use; others get an "
        "error. Default: any name.",
        min_length=1,
    )
    limit: int | None = field(
        None, title="Row limit", text="Read only the first N rows. Default: all rows.", gt=0
    )
    columns: list[str] | None = field(
        None, title="Columns", text="Read only these columns. Default: all columns.", min_length=1
    )
    rows_per_shard: int | None = field(
        None,
        title="Rows per shard",
        text="Number of rows that are processed and committed together, at most "
        "1,000,000. Default: chosen from the number of rows, the workers and engine.batch_size.",
        gt=0,
        le=1_000_000,
    )
    options: dict[str, Any] = field(
        {},
        title="Storage options",
        text="Options of the store: those of s3fs for s3:// (endpoint_url, anon, ...), obstore's "
        "for gs:// (skip_signature, ...) and az:// (account_name, ...). For keys, prefer "
        "credentials_block or environment variables.",
    )
    credentials_block: str | None = field(
        None,
        title="Credentials block",
        text="Saved Prefect block with the keys for the input, as type-slug/name. "
        "Example: aws-credentials/nightly.",
    )
    media_root: str | None = field(
        None,
        title="Media folder",
        text="Local folder, present on every node, that contains the image files "
        "named by the rows. Default: rows cannot name local files.",
    )
    csv: Csv = field(
        Csv(), title="CSV options", text="Delimiter, encoding and header of CSV files."
    )
    version: str | None = field(
        None,
        title="Table version",
        text="Version of the table to read: a version or snapshot number, a tag or a "
        "timestamp. Default: the current version when the run is planned.",
        min_length=1,
    )
    filter: str | None = field(
        None,
        title="Filter",
        text="Read only rows that match this SQL condition. Example: country = 'DE' "
        "AND amount >= 10.",
    )
    web: Web = field(
        Web(), title="HTTP downloads", text="Limits for files that are read by http(s)."
    )
    catalog: dict[str, Any] = field(
        {},
        title="Iceberg catalog",
        text="pyiceberg properties of the catalog, such as {type: rest, uri: ...}, or "
        "{name: ...} for a catalog in .pyiceberg.yaml. ${NAME} is replaced by an environment "
        "variable. source.uri is then namespace.table.",
    )
    query: str | None = field(
        None,
        title="SQL query",
        text="SELECT statement to run on the database in source.uri, a SQLAlchemy URL "
        "such as postgresql://host/database. End it with ORDER BY to keep row numbers stable.",
        min_length=1,
    )
    types: dict[str, str] = field(
        {},
        title="Column types",
        text="Arrow type of each column whose type should not be inferred: columns of "
        "CSV and JSON files, of key=value folders, and of SQL queries. Example: {amount: "
        "'decimal(38,9)', created: 'timestamp[us, UTC]'}.",
    )
    config: str | None = field(
        None,
        title="Dataset configuration",
        text="Configuration (subset) of a Hugging Face dataset. Default: the "
        "dataset's default configuration.",
        min_length=1,
    )
    split: str | None = field(
        None,
        title="Dataset split",
        text="Split of a Hugging Face dataset, such as train, or several joined by +, "
        "such as train+test. Required if the dataset has more than one split.",
        min_length=1,
    )

    sample: int | None = field(
        None,
        title="Row sample",
        text="Read N rows, chosen by a hash of the row's number after source.filter, so that "
        "the same input gives the same rows. The whole input is read for it. Default: all rows.",
        gt=0,
        le=10_000_000,
    )
    sample_seed: int = field(
        0,
        title="Sample seed",
        text="Another number chooses other rows for source.sample.",
        ge=0,
        lt=1 << 63,
    )

    @model_validator(mode="before")
    @classmethod
    def _signed(cls, value: object) -> object:
        if isinstance(value, Mapping) and is_masked(value.get("uri")):
            raise ValueError(
                "uri: the signature of the URL was masked in Prefect's flow parameters; use an "
                "s3:// URI with a credentials_block, or call the flow in the process that signs "
                "the URL"
            )
        return value

    def _shown(self, name: str, value: Any) -> Any:
        if name != "uri" or not value:
            return super()._shown(name, value)
        if isinstance(value, str):
            return hide_users(value) if is_web(value) else value
        return [self._shown(name, uri) for uri in value]

    _catalog = field_check("catalog", by=check_catalog)

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | date):
            return value
        return str(value) if isinstance(value, int) else value.isoformat()  # as YAML reads them

    @field_validator("filter")
    @classmethod
    def _filter(cls, value: str | None) -> str | None:
        if value is not None:
            parse_filter(value)
        return value

    @field_validator("media_root")
    @classmethod
    def _media_root(cls, value: str | None) -> str | None:
        if value is not None:
            check_uri(value)
            if scheme := store_scheme(value):
                raise ValueError(
                    f"must be a local folder; remove it, and name {scheme}:// images by their full "
                    "URL in the rows"
                )
        return value

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and not value:
            raise ValueError("is an empty list; name at least one file")
        for uri in [value] if isinstance(value, str) else value:
            check_placeholders(uri)
            if is_web(uri):
                check_web(uri)
            elif format_of_scheme(scheme_of(uri)) is None:
                check_uri(uri)
            else:
                without_user(uri)
                if holds_password(uri):
                    raise ValueError(
                        "contains a password after the ?; put the password into an environment "
                        "variable, and name that variable in options.password_env"
                    )
                if scheme_of(uri) == "hf":
                    hub_name(uri)
        return value

    @field_validator("types")
    @classmethod
    def _types(cls, value: dict[str, str]) -> dict[str, str]:
        for name, kind in value.items():
            try:
                arrow_type(kind)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return value

    @model_validator(mode="after")
    def _combined(self) -> Source:
        run_checks(_CHECKS, self)
        return self

    @property
    def uris(self) -> list[str]:
        return [self.uri] if isinstance(self.uri, str) else list(self.uri)

    @property
    def most_rows(self) -> int | None:
        """Maximum number of rows to read, by `limit` or `sample`; None if neither is set."""
        return self.sample if self.limit is None else self.limit

    @property
    def table_format(self) -> str | None:
        """The table format (a key of TABLE_FORMATS) of the input; None for files.

        It is known from `format`, `catalog` or the URI's scheme. If `format` is auto, a folder may
        still turn out to be a table when its files are listed.
        """
        if self.format in TABLE_FORMATS:
            return self.format
        if self.format == "auto" and self.catalog:
            return "iceberg"
        if self.format == "auto" and len(self.uris) == 1:
            return format_of_scheme(scheme_of(self.uris[0]))
        return None

    @property
    def stored(self) -> bool:
        """Whether all URIs name files or folders, on disk, in object stores or at http(s) URLs.

        False for a catalog, a database or a Hugging Face dataset.
        """
        schemes = (*SCHEMES, *WEB_SCHEMES)
        return not self.catalog and all(scheme_of(uri) in schemes for uri in self.uris)


def _check_query(source: Source) -> None:
    """Raise ValueError for a database without a query, and for a query without a database.

    Also raises ValueError if `types` is set for a table format whose columns already have types.
    """
    if source.table_format == "sql" and source.query is None:
        raise ValueError("query: is required for a database; write the SELECT to read")
    if format_of_scheme(scheme_of(source.uris[0])) == "sql":
        return
    if source.table_format not in ("sql", None) and source.types:
        raise ValueError(
            f"types does not apply to a {source.table_format} table, whose columns are typed; "
            "remove it"
        )
    if source.table_format != "sql" and source.query:
        raise ValueError(
            "query needs a database, and uri names none; remove query, or set uri to a "
            "database such as sqlite:///sales.db"
        )


def _check_single_table(source: Source) -> None:
    """Raise ValueError if a table is one of several entries of `uri`, or contradicts `format`."""
    formats = {format_of_scheme(scheme_of(uri)) for uri in source.uris} - {None}
    name = source.table_format
    if formats - {name}:
        raise ValueError(
            f"uri: {source.uris[0]!r} cannot be read as format: {source.format}; remove format. A "
            "table or data set must be the only entry"
        )
    if name is not None and len(source.uris) > 1:
        raise ValueError(
            f"uri: {TABLE_FORMATS[name].source} must be the only entry; remove the others"
        )


def _check_catalog_and_version(source: Source) -> None:
    """Raise ValueError for `catalog` without Iceberg, and for `version` with plain files."""
    if source.catalog and source.table_format != "iceberg":
        raise ValueError(
            "catalog applies only to Iceberg tables; remove it, or set format: iceberg"
        )
    if source.version is not None and source.format not in ("auto", *TABLE_FORMATS):
        raise ValueError(f"version does not apply to {source.format} files; remove it")


def _check_hub(source: Source) -> None:
    """Raise ValueError if `config` or `split` is set for a source that cannot have it.

    Only a dataset of the Hugging Face Hub has a `config`. A `split` needs the format huggingface,
    or auto.

    Also raises ValueError if both `uri` and `version` name a version of the dataset.
    """
    on_hub = scheme_of(source.uris[0]) == "hf"
    if source.config is not None and not on_hub:
        raise ValueError(
            "config applies only to Hugging Face datasets (hf://datasets/...); remove it"
        )
    if source.split is not None and source.format not in ("auto", "huggingface"):
        raise ValueError(
            f"split applies only to Hugging Face datasets, not to {source.format}; remove it"
        )
    if on_hub and source.version is not None and hub_name(source.uris[0]).revision is not None:
        raise ValueError("version: uri already names a revision after the @; remove one of them")


def _check_sample(source: Source) -> None:
    """Raise ValueError if both `sample` and `limit` are set, or a seed without a sample."""
    if source.sample is not None and source.limit is not None:
        raise ValueError("sample and limit exclude each other; remove one of them")
    if source.sample is None and source.sample_seed:
        raise ValueError("sample_seed applies only to sample; set sample, or remove sample_seed")


def _check_options(source: Source) -> None:
    """Raise ValueError for an option that the Google or Azure store of a URI does not have.

    Options of other stores, such as S3, are not checked.
    """
    for uri in source.uris:
        check_options(uri, source.options)


_CHECKS = (
    *(_check_query, _check_single_table, _check_catalog_and_version, _check_hub),
    *(_check_sample, _check_options),
)
