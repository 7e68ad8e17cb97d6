"""The base class of all publish targets, the rows they write, and their errors."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

import pyarrow as pa

from prefect_raybatch.errors import ConfigError, PublishFailed, RayBatchError
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.publish.types import converted_schema, fitted, to_schema
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage.library_errors import failure_in

PUBLISH_TRIES = 20  # commits tried in a publication; each may lose the race to another writer
PROPERTY = "raybatch."  # prefix of the properties that we write to a table
ERROR_SHOWN = 400  # characters of a library's error that a message shows
KEYS_REFUSED = "access denied, so set a user and keys that may read and write there"
NO_BUCKET = "no such bucket, so create it or correct its name"

# Called with the name of each step when it is reached; if it raises, the publication ends there.
Observe = Callable[[str], None]


@dataclass(frozen=True)
class AnsweredRows:
    """The answered rows of a run.

    `plan` is the hash of the run's plan, by which a target recognizes rows that it already has.
    `job` is the job's name, `count` the number of rows. Each call of `read` yields all rows, in
    input order. `recorded` is the version of the target that had them, as recorded in the run
    directory, "" if they were never published. `faults` collects errors of reading and casting the
    rows, because the targets' libraries raise them wrapped in errors of their own.
    """

    plan: str
    run_key: str
    job: str
    count: int
    schema: pa.Schema
    read: Callable[[], Iterator[pa.RecordBatch]]
    recorded: str = ""
    faults: list[RayBatchError] = field(default_factory=list, compare=False)

    def as_schema(self, schema: pa.Schema) -> pa.RecordBatchReader:
        """Return the rows cast to a target's `schema`, by column name.

        Columns that the rows lack are null. Reading raises `ConfigError` for a value that does not
        fit.
        """
        return pa.RecordBatchReader.from_batches(schema, self._cast(schema))

    def _cast(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            yield from to_schema(self.read(), schema)
        except RayBatchError as error:
            self.faults.append(error)
            raise

    @property
    def marks(self) -> dict[str, str]:
        """Return the properties to add to the table's commit: the run's plan and run key."""
        return {f"{PROPERTY}plan": self.plan, f"{PROPERTY}run_key": self.run_key}


class Sink(ABC):
    """A publish target, opened anew for each publication.

    `options` are the options of the store that holds the target, such as credentials. `planned`:
    the target is opened to check a plan, before there is a result. `never_null`, set by `check`,
    are the result's columns in which the existing table accepts no null.
    """

    module = "pyarrow"  # library that the target needs
    never_null: tuple[str, ...] = ()  # columns of the result to which the table takes no null
    extra = ""  # extra of prefect-raybatch that installs the library

    def __init__(self, target: PublishTarget, options: StoreOptions, planned: bool = False) -> None:
        self.target, self.options, self.planned = target, options, planned

    @property
    def what(self) -> str:
        """Return the target's name as error messages begin with it."""
        return f"output.publish: {self.target.label}"

    def need_library(self) -> None:
        """Raise `ConfigError` if the target's library is not installed."""
        if find_spec(self.module) is None:
            raise ConfigError(
                f"{self.what}: {self.module} is not installed. Run: "
                f'pip install "prefect-raybatch[{self.extra}]"'
            )

    def check(self, schema: pa.Schema, whole: bool = True) -> str:
        """Check that columns `schema` can be published; return whether the target exists, as text.

        The text continues a sentence that begins with the target's name, e.g. "is created by
        publishing". `whole`: `schema` has all columns of the result. Sets `never_null`, and leaves
        nothing in the target. Raises `ConfigError`, which names column and remedy, or
        `PublishFailed` if the target does not answer.
        """
        wanted = converted_schema(schema, self.target, whole)
        self.check_names(wanted.names)
        if self.planned:
            self.check_place()
        with self.with_plain_errors():
            there = self.existing()
        if there is not None:
            self.fit(wanted, there, whole)
            self.never_null = tuple(
                field.name for field in there if not field.nullable and field.name in wanted.names
            )
        if self.planned:
            with self.with_plain_errors():
                self.rehearse(wanted, there)
        return "is created by publishing" if there is None else "exists, and its columns fit"

    def check_place(self) -> None:  # noqa: B027 - a catalog or a server has no place to look at
        """Raise `ConfigError` if the target is a local folder to which this user cannot write."""

    @property
    def system(self) -> str:
        """Return the system's name for messages: the format or, for SQL, the database's dialect."""
        return self.target.format

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` if the target cannot hold a column name, or cannot tell two apart."""
        self.refuse_alike(names, lambda name: name)

    def refuse_alike(self, names: Sequence[str], folded: Callable[[str], str]) -> None:
        """Raise `ConfigError` if the target takes two different column names for the same.

        `folded` returns a name as the target compares it, e.g. in lower case.
        """
        columns: dict[str, str] = {}
        for name in names:
            other = columns.setdefault(folded(name), name)
            if other is not name and list(names).index(other) != list(names).index(name):
                raise ConfigError(
                    f"{self.what}: columns {other!r} and {name!r} differ only in case, which "
                    f"{self.system} does not allow. Rename one with output.column or "
                    "output.schema, or leave an input column out with source.columns"
                )

    @abstractmethod
    def rehearse(self, schema: pa.Schema, existing: pa.Schema | None) -> None:
        """Raise the error of the target's library if it would reject columns `schema`.

        The target is left unchanged. `existing` is the schema of the existing table, None if
        publishing creates it. `check` calls this within `with_plain_errors`, which converts the
        error.
        """

    def need_writable(self, folder: str, made: bool = True) -> None:
        """Raise `ConfigError` unless this user can write to a local folder.

        `made`: the folder may be missing, if it can be created.
        """
        above = folder
        while made and not os.path.lexists(above) and os.path.dirname(above) != above:
            above = os.path.dirname(above)
        if not os.path.isdir(above):
            fault = "is not a folder" if os.path.lexists(above) else "does not exist"
            raise ConfigError(f"{self.what}: {above!r} {fault}. Create the folder, or correct uri")
        if not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{self.what}: this user cannot write to the folder {above!r}. Change its "
                "permissions, or correct uri"
            )

    def fit(self, schema: pa.Schema, existing: pa.Schema, whole: bool = True) -> pa.Schema:
        """Return `existing`, the schema of the existing table, to which rows are cast.

        Raises `ConfigError` if columns `schema` do not fit the table. `whole`: `schema` has all
        columns of the result.
        """
        return fitted(schema, existing, self.what, whole)

    @abstractmethod
    def existing(self) -> pa.Schema | None:
        """Return the schema of the existing table, None if there is none."""

    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Return a tuple that identifies the table or folder, however its address is spelled.

        A target in a folder returns ("folder", its absolute path or URI).
        """

    @abstractmethod
    def holds(self, plan: str, recorded: str) -> bool:
        """Return whether the target still has the rows of `plan`, which were published before.

        `recorded` is the version that `publish` returned then, as recorded in the run directory. If
        the target's history no longer reaches back to it, returns True.
        """

    @abstractmethod
    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        """Write the rows unless the target has them; return the target's version with the rows.

        Returns "" for a target without versions. `observe` is called with the name of each step.
        Safe to call concurrently and again after any crash.
        """

    @contextmanager
    def with_plain_errors(self, rows: AnsweredRows | None = None) -> Iterator[None]:
        """Within the `with` block, convert errors of the target's library to ours.

        They become `ConfigError` if retrying cannot help, else `PublishFailed`, in one line without
        credentials. Errors of reading `rows` are raised unchanged.
        """
        try:
            yield
        except (RayBatchError, KeyboardInterrupt):
            raise
        except Exception as error:
            if rows is not None and rows.faults:
                raise rows.faults.pop() from None
            if (remedy := self.hopeless(error)) is not None:
                rest = (
                    "No row was processed yet"
                    if self.planned
                    else "The result in data/ is complete. Fix this, then run raybatch publish "
                    "RUN_DIR --job JOB"
                )
                raise ConfigError(f"{self.what}: {remedy}: {self.scrub(error)}. {rest}") from error
            after = (
                "Fix the cause and run the same command again"
                if self.planned
                else "The result in data/ is complete. Fix the cause, then run raybatch publish "
                "RUN_DIR --job JOB"
            )
            raise PublishFailed(
                f"{self.what}: {type(error).__name__}: {self.scrub(error)}. {after}"
            ) from error

    def hopeless(self, error: Exception) -> str | None:
        """Return the cause and remedy if retrying cannot help; None if retrying may help.

        Access errors of the store are recognized here, errors of the target's library by `refused`.
        """
        failure = failure_in(error)
        remedies = {"denied": KEYS_REFUSED, "no bucket": NO_BUCKET}
        if failure in remedies:
            return remedies[failure]
        return None if failure == "away" else self.refused(error)

    def refused(self, error: Exception) -> str | None:
        """Return why a retry would fail with the same error; None if a retry may succeed."""
        return None

    def lost_rows_error(self) -> PublishFailed:
        """Return the error for PUBLISH_TRIES commits that all lost the race to other writers."""
        return PublishFailed(
            f"{self.what}: {PUBLISH_TRIES} commits in a row lost the race to other writers of the "
            "table. When it is less busy, run raybatch publish RUN_DIR --job JOB"
        )

    def scrub(self, error: object) -> str:
        """Return the first non-empty line of an error, cut to ERROR_SHOWN, with credentials masked.

        Masked are values of the options and the catalog, and credentials in URLs.
        """
        from prefect_raybatch.job.secrets import hide_users

        line = next((line for line in str(error).splitlines() if line.strip()), "")
        for value in _texts([self.target.options, self.target.catalog, self.options]):
            if len(value) > 3:
                line = line.replace(value, "***")
        return str(hide_users(line))[:ERROR_SHOWN]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("type", "name", "uri", "warehouse", "endpoint_url", "region"):
                yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value
