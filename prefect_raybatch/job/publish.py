"""The targets to which a finished result is published: tables or files of other systems."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from prefect_raybatch.job.checks import check_name, check_options
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.placeholders import check_placeholders
from prefect_raybatch.job.secrets import holds_password, is_masked
from prefect_raybatch.job.table_formats import check_catalog_code
from prefect_raybatch.job.variables import VARIABLE, fill_variables

TargetFormat = Literal["delta", "iceberg", "sql", "lance", "parquet", "jsonl"]


class PublishTarget(Group):
    """A table or folder that receives the answered rows of a finished run, once."""

    format: TargetFormat = field(title="Format", text="Format of the target.")
    uri: str | None = field(
        None,
        title="Location",
        text="Local or s3:// folder of the table or files, or a SQLAlchemy URL for "
        "sql. {run_key}, {run_date} and environment variables (${NAME}) are filled in.",
        min_length=1,
    )
    table: str | None = field(
        None,
        title="Table",
        text="Name of the table, for sql and iceberg (namespace.table). {run_key} and "
        "{run_date} are filled in.",
        min_length=1,
    )
    name: str | None = field(
        None,
        title="Name",
        text="Name of the target in the run's records; must be unique. Default: the format.",
    )
    mode: Literal["append", "merge"] = field(
        "append",
        title="Mode",
        text="append: add the rows. merge: replace rows that have the same key, and "
        "add the others.",
    )
    key: list[str] = field(
        [],
        title="Key columns",
        text="Columns that identify a row, for mode: merge. They must be unique in "
        "the result and never null.",
    )
    partition_by: list[str] = field(
        [],
        title="Partition columns",
        text="Columns that partition the files (key=value folders) or a new Delta table.",
    )
    catalog: dict[str, Any] = field(
        {},
        title="Iceberg catalog",
        text="pyiceberg properties of the catalog, such as {type: rest, uri: ...}, or "
        "{name: ...} for a catalog in .pyiceberg.yaml. ${NAME} is replaced by an environment "
        "variable.",
    )
    options: dict[str, Any] = field(
        {}, title="Storage options", text="s3fs options for the target. Default: output.options."
    )

    _name = field_check("name", by=check_name)

    _words = field_check("uri", "table", by=check_placeholders)

    _uri = field_check("uri", by=lambda uri: _without_password(uri))

    @field_validator("catalog")
    @classmethod
    def _catalog(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_catalog_code(value)
        _without_password(str(value.get("uri", "")))
        return value

    @model_validator(mode="after")
    def _fits(self) -> PublishTarget:
        kind, where = self.format, f"format {self.format}"
        needs = {"iceberg": ("table", "catalog"), "sql": ("uri", "table")}.get(kind, ("uri",))
        for name in ("uri", "table", "catalog"):
            if name in needs and not getattr(self, name):
                raise ValueError(f"{where} needs {name}; set it")
            if name not in needs and getattr(self, name):
                raise ValueError(f"{where} does not use {name}; remove it")
        check_options(self.uri or "", self.options)
        if self.partition_by and kind not in ("parquet", "jsonl", "delta"):
            raise ValueError(
                f"partition_by applies to parquet, jsonl and delta; create the {kind} table "
                "yourself"
            )
        if (self.mode == "merge") != bool(self.key):
            raise ValueError("mode: merge and key need each other; set both or neither")
        for names in (self.key, self.partition_by):
            if len(set(names)) < len(names):
                raise ValueError(f"{', '.join(names)}: duplicate column; remove one")
        if self.mode == "merge" and kind in ("parquet", "jsonl"):
            raise ValueError(
                f"{where} cannot merge atomically; set mode: append, or choose another format"
            )
        if kind == "lance" and self.mode == "append" and "{run_key}" not in (self.uri or ""):
            raise ValueError(
                "format lance cannot append exactly once; put {run_key} into uri, so that each run "
                "gets its own dataset, or use mode: merge with a key"
            )
        return self

    @property
    def label(self) -> str:
        return self.name or self.format

    def place(self, run_key: str) -> str:
        """Return the location as text for display and records, with {run_key} filled in.

        The text is the URI, or else the catalog's name or URI, followed by #TABLE if a table is
        set. ${NAME} is not filled in, so that no secret shows.
        """
        where = self.uri or str(self.catalog.get("name") or self.catalog.get("uri") or "catalog")
        whole = f"{where}#{self.table}" if self.table else where
        return whole.replace("{run_key}", run_key)

    def filled(self, run_key: str) -> PublishTarget:
        """Return a copy of the target with {run_key} and environment variables (${NAME}) filled in.

        Raises `ConfigError` for an unset variable.
        """
        changed = {
            name: fill_variables(getattr(self, name), f"output.publish: {self.label}: {name}")
            for name in ("uri", "catalog", "options")
        }
        changed["table"] = self.table
        for name in ("uri", "table"):
            if changed[name]:
                changed[name] = changed[name].replace("{run_key}", run_key)
        return self.model_copy(update=changed)

    def public(self) -> dict[str, Any]:
        """Return the target as plain values for the run directory, without possible credentials.

        Omits `options` and masked catalog properties.
        """
        value = self.model_dump(mode="json", exclude_defaults=True)  # JSON mode masks credentials
        value.pop("options", None)
        if "catalog" in value:
            kept = {k: v for k, v in value["catalog"].items() if not is_masked(v)}
            value["catalog"] = kept or {"name": "default"}
        return value


def _without_password(uri: str) -> str:
    try:
        password = urlsplit(VARIABLE.sub("", uri)).password
    except ValueError:
        password = None
    if password or holds_password(VARIABLE.sub("", uri)):
        raise ValueError(
            "the URL contains a password or key; put it into an environment variable where the "
            "flow runs, and write ${NAME} instead"
        )
    return uri


def check_targets(targets: list[PublishTarget]) -> list[PublishTarget]:
    """Return the targets; raise ValueError unless their names are unique."""
    labels = [target.label for target in targets]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(
                f"two targets are called {label!r}; set a different `name` in one of them"
            )
    return targets
