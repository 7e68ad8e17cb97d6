"""Checks folders, hosts, variables and blocks against the policy in force."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn
from urllib.parse import parse_qsl, unquote

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.checks import NAME
from prefect_raybatch.job.table_formats import SQL_SCHEMES, format_of_scheme, scheme_of
from prefect_raybatch.job.variables import VARIABLE
from prefect_raybatch.policy.allowed import (
    CATALOG_PROPERTIES,
    DATABASE_PARAMETERS,
    REGION,
    REGION_NAMES,
    STORE_OPTIONS,
)
from prefect_raybatch.policy.in_force import POLICY_FILE, policy_in_force
from prefect_raybatch.policy.policy import ADDRESS, ANY, HOST, JobPolicy

HUB_HOST = "huggingface.co"
FILE_DATABASES = ("sqlite", "duckdb")
ACCOUNT = re.compile(r"[a-z0-9]{3,24}")  # of Azure
ENDPOINTS = ("base_url", "endpoint", "endpoint_url")  # store options that name a host
CATALOG_TYPES = ("rest", "sql", "in-memory")
MOST_PORT = 65535
CATALOG_BY_NAME = (
    "put the catalog into .pyiceberg.yaml where the flow runs, and refer to it as {name: ...}"
)
EXPORT = "export the rows to Parquet, and read those files"
ANY_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# A URL up to its host and port, in the form in which all libraries see the same host.
AUTHORITY = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//"
    r"(?:[^\s/?#@\\:]*(?::[^\s/?#@\\:]*)?@)?"
    rf"(?:(?P<name>{HOST})|\[(?P<address>{ADDRESS})\])"
    r"(?::(?P<port>\d{1,5}))?(?P<rest>[/?#].*)?",
    re.DOTALL,
)
# SQLAlchemy also looks for an @ after the first /, and drivers split at a semicolon.
ODD_IN_DATABASE = re.compile(r"[@#;\\\s\x00-\x1f\x7f]")


class Reach:
    """Checks what a job names (folders, hosts, variables, blocks) against a policy.

    Each method raises `ConfigError` with the field, what is rejected, and what the operator can add
    to the policy.
    """

    def __init__(self, policy: JobPolicy) -> None:
        self.policy = policy

    def read(self, field: str, uri: str) -> None:
        if not self.policy.may_read(uri):
            self._refuse(field, f"read {_shown(uri)}", _add("its folder to read"))

    def write(self, field: str, uri: str) -> None:
        if not self.policy.may_write(uri):
            self._refuse(field, f"write to {_shown(uri)}", _add("its folder to write"))

    def connect(self, field: str, host: str | None, port: int | None = None) -> None:
        name = host or "localhost"
        if not self.policy.may_connect(name, port):
            shown = f"[{name}]" if ":" in name else name
            shown += f":{port}" if port else ""
            self._refuse(field, f"name the host {shown}", _add("it to hosts"))

    def connect_url(self, field: str, url: str) -> None:
        """Check the host and port of a URL; reject a host that libraries may read differently."""
        match = AUTHORITY.fullmatch(url)
        if match is None or int(match["port"] or 0) > MOST_PORT:
            self._refuse(
                field,
                "name a URL without a plain host",
                "write scheme://host:port/... with only ASCII letters, digits, - and . in the host",
            )
        port = match["port"]
        self.connect(field, match["name"] or match["address"], int(port) if port else None)

    def secret(self, field: str, name: str) -> None:
        if not self.policy.may_name_secret(name):
            self._refuse(field, f"name the environment variable {name}", _add("it to secrets"))

    def block(self, field: str, name: str | None) -> None:
        if name is not None and not self.policy.may_name_block(name):
            self._refuse(field, f"name the Prefect block {name}", _add("it to blocks"))

    def private(self, field: str, wanted: bool) -> None:
        if wanted and not self.policy.allow_private:
            self._refuse(field, "reach private addresses", _add("allow_private: true"))

    def variables(self, field: str, value: object) -> None:
        """Reject each ${NAME} in `value`, at any depth, that the policy does not allow."""
        for text in _texts(value):
            for match in VARIABLE.finditer(text):
                self.secret(field, match[1])

    def model(self, field: str, name: str) -> None:
        """Check that a model or adapter may be read, from its path or URL or from Hugging Face."""
        local = name.startswith((".", "/", "~", "file:")) or os.path.exists(name)
        if local or (ANY_URL.match(name) and not name.startswith("hf://")):
            self.read(field, name)
        else:
            self.connect(field, HUB_HOST)

    def options(self, field: str, options: Mapping[str, object]) -> None:
        """Check store options: names, and the hosts, regions and variables in values."""
        for name, value in options.items():
            where = f"{field}.{name}"
            if name not in STORE_OPTIONS:
                self._refuse(
                    where, "set this option", "keep it in a saved block or the environment"
                )
            if name in REGION_NAMES:
                self.region(where, value)
            if name == "account_name":  # becomes the name of a host of Azure
                if not ACCOUNT.fullmatch(str(value)):
                    self._refuse(where, "use this account", "write 3 to 24 letters and digits")
                self.connect(where, f"{value}.blob.core.windows.net")
            if name.endswith("_env"):
                self.secret(where, str(value))
            elif name == "headers":
                continue
            elif isinstance(value, Mapping):
                self.options(where, value)
            else:
                for text in _texts(value):
                    if ANY_URL.match(text) or name in ENDPOINTS:
                        self.connect_url(where, text)

    def region(self, field: str, value: object) -> None:
        """Reject a region that is not a plain name: clients make it part of a host's name."""
        if value is not None and not re.fullmatch(REGION, str(value)):
            self._refuse(field, "use this region name", "write a plain name, such as eu-central-1")

    def catalog(self, field: str, catalog: Mapping[str, object], writes: bool) -> None:
        """Check a catalog's type, and its properties: names, hosts, regions, folders, variables.

        `writes`: the job writes to the catalog's tables.
        """
        self.variables(field, catalog)
        is_sql = format_of_scheme(scheme_of(str(catalog.get("uri")))) == "sql"
        kind = catalog.get("type") or ("sql" if is_sql else None)  # as pyiceberg infers it
        if kind is not None and kind not in CATALOG_TYPES:
            self._refuse(f"{field}.type", f"name a catalog of type {kind}", CATALOG_BY_NAME)
        for name, value in catalog.items():
            where = f"{field}.{name}"
            if name not in CATALOG_PROPERTIES or isinstance(value, (Mapping, list, tuple)):
                self._refuse(where, "set this property", CATALOG_BY_NAME)
            text = str(value)
            if name == "warehouse":
                if _is_place(text, kind):
                    (self.write if writes else self.read)(where, text)
            elif name in REGION_NAMES:
                self.region(where, text)
            elif name == "uri" and format_of_scheme(scheme_of(text)) == "sql":
                self.database(where, text, writes)
            elif ANY_URL.match(text) or name in ("uri", "s3.endpoint", "oauth2-server-uri"):
                self.connect_url(where, text)

    def database(self, field: str, url: str, writes: bool) -> None:
        """Check a database's URL: dialect, driver, parameters, and the file or host.

        `writes`: the job writes to the database.
        """
        head, _, query = url.partition("?")
        dialect, _, driver = head.partition("://")[0].lower().partition("+")
        if dialect not in SQL_SCHEMES:
            self._refuse(field, f"name a database of dialect {dialect}", EXPORT)
        if driver not in ("", "psycopg", "psycopg2", "asyncpg", "pymysql", "pysqlite"):
            self._refuse(field, f"name the driver {driver}", "leave the driver out")
        for name, _ in parse_qsl(query, keep_blank_values=True):
            if name not in DATABASE_PARAMETERS:
                self._refuse(field, f"set the parameter {name} of a database", "leave it out")
        if dialect == "duckdb" and not writes and ANY not in self.policy.read:
            # A query reads any file.
            self._refuse(field, "query DuckDB", EXPORT)
        if dialect in FILE_DATABASES:
            if not head.endswith("://") and ":///" not in head:
                self._refuse(field, "name a file and a host", f"write {dialect}:///path")
            place = database_file(url)
            if place is not None:
                (self.write if writes else self.read)(field, place)
            return
        match = AUTHORITY.fullmatch(url)
        if match is not None and ODD_IN_DATABASE.search(match["rest"] or ""):
            self._refuse(
                field,
                "name a URL without a plain host",
                "write dialect://host:port/database, without @, #, ; or \\ after the host",
            )
        self.connect_url(field, url)

    def _refuse(self, field: str, what: str, remedy: str) -> NoReturn:
        raise ConfigError(
            f"{field}: a job from Prefect's API or a job server may not {what} under "
            f"{self.policy.title}; {remedy}"
        )


def _add(what: str) -> str:
    where = "where the flow or its Ray job runs"
    return f"to allow it, add {what} in the file of {POLICY_FILE} {where}"


def limited_reach() -> Reach | None:
    """Return a `Reach` for the policy in force; None for a job that its owner runs.

    The owner's policy sets no limits on folders, hosts, variables or blocks.
    """
    policy = policy_in_force()
    return Reach(policy) if policy.limited else None


def check_run_place(uri: str) -> None:
    """Raise `ConfigError` if the policy in force does not allow writing to run directory `uri`."""
    if reach := limited_reach():
        reach.write("run directory", uri)


def check_written(field: str, uri: str) -> None:
    """Raise `ConfigError` if the policy in force does not allow writing to the folder `uri`.

    `field` begins the message. It says what the folder is, e.g. "TARGET: the table's files".
    """
    if reach := limited_reach():
        reach.write(field, uri)


def check_output_place(uri: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigError` if the policy in force does not allow writing to `uri` with `options`.

    `uri` is the output folder of a job, `options` are the options of its store.
    """
    if reach := limited_reach():
        reach.write("output.uri", uri)
        reach.options("output.options", options)


def check_run_read(uri: str) -> None:
    """Raise `ConfigError` if the policy in force does not allow reading the run directory `uri`."""
    if reach := limited_reach():
        reach.read("run directory", uri)


def check_store_options(field: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigError` for store options that the policy in force does not allow.

    Options decide which host gets requests signed with this machine's credentials. `field` is the
    job field of the options, for the error.
    """
    if reach := limited_reach():
        reach.options(field, options)


def check_links(uris: Sequence[str]) -> None:
    """Raise `ConfigError` for an input file that is a symbolic link out of the allowed folders."""
    if reach := limited_reach():
        for uri in uris:
            if "://" not in uri and os.path.realpath(uri) != uri:
                reach.read("source.uri", uri)


def check_table_files(uris: Iterable[str]) -> None:
    """Raise `ConfigError` for a file of a table that is outside the allowed folders."""
    if reach := limited_reach():
        for uri in uris:
            reach.read("source.uri", uri)


def url_check(field: str) -> Callable[[str], None]:
    """Return a function that raises `ConfigError` for a URL of a host that is not allowed.

    The function uses the policy in force now, even when another thread calls it later. `field` is
    the job field in the error.
    """
    reach = limited_reach()

    def check(url: str) -> None:
        if reach is not None:
            reach.connect_url(field, url)

    return check


def check_server(field: str, url: str) -> None:
    """Raise `ConfigError` if the policy in force does not allow a job server or a Ray address.

    `url` may lack a scheme.
    """
    if reach := limited_reach():
        reach.connect_url(field, url if "://" in url else f"//{url}")


def database_file(url: str) -> str | None:
    """Return the path of a SQLite or DuckDB URL's file; None for a database in memory.

    The path does not include the URL's parameters. If it begins with `file:`, it is read as SQLite
    does: this prefix, a host after it and a fragment are removed, and percent escapes are decoded.
    """
    place = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if place.startswith("file:"):
        place = unquote(place.removeprefix("file:").partition("#")[0])
        if place.startswith("//"):
            place = "/" + place.removeprefix("//").partition("/")[2]
    return None if place in ("", ":memory:") else place


def _is_place(warehouse: str, kind: object) -> bool:
    """Return whether the `warehouse` of an Iceberg catalog of type `kind` may be a folder.

    For a REST catalog, it may be a name that the catalog's server knows. So it may be for a catalog
    that is configured elsewhere, whose type is unknown (None).
    """
    if kind == "rest":
        return bool(ANY_URL.match(warehouse)) or warehouse.startswith((".", "/", "~"))
    return kind is not None or not NAME.match(warehouse)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _shown(uri: str) -> str:
    """Return at most 200 characters of a location, for a message, without credentials."""
    return uri.partition("?")[0].rpartition("@")[2][:200]
