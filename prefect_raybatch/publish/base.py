"""The common part of all targets: rows, the steps that tests observe, and plain errors."""

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

PUBLISH_TRIES = 20  # of one publishing: each lost to another writer of the table
PROPERTY = "raybatch."  # what our marks in a table's log begin with
ERROR_SHOWN = 400  # characters of a library's error
KEYS_REFUSED = "access denied, so set a user and keys that may read and write there"
NO_BUCKET = "no such bucket, so create it or correct its name"

# Called with the name of each step as it is reached; what it raises ends the publishing there.
Observe = Callable[[str], None]


@dataclass(frozen=True)
class AnsweredRows:
    """The answered rows of a run.

    `plan` is the key under which a target knows them; `read` yields them in input order, anew at
    each call.
    """

    plan: str
    run_key: str
    job: str
    count: int
    schema: pa.Schema
    read: Callable[[], Iterator[pa.RecordBatch]]
    # What was wrong with the rows themselves: libraries raise it as something else.
    faults: list[RayBatchError] = field(default_factory=list, compare=False)

    def as_schema(self, schema: pa.Schema) -> pa.RecordBatchReader:
        """Return the rows cast to a target's `schema`, by column name."""
        return pa.RecordBatchReader.from_batches(schema, self._cast(schema))

    def _cast(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            yield from to_schema(self.read(), schema)
        except RayBatchError as error:
            self.faults.append(error)
            raise

    @property
    def marks(self) -> dict[str, str]:
        """Return what a commit records about the origin of its rows."""
        return {f"{PROPERTY}plan": self.plan, f"{PROPERTY}run_key": self.run_key}


class Sink(ABC):
    """A target, opened anew for each publication.

    `planned`: it is opened for planning, before there is a result.
    """

    module = "pyarrow"  # library that the target needs
    never_null: tuple[str, ...] = ()  # columns of the result to which the table takes no null
    extra = ""  # extra of prefect-raybatch that installs the library

    def __init__(self, target: PublishTarget, options: StoreOptions, planned: bool = False) -> None:
        self.target, self.options, self.planned = target, options, planned

    @property
    def what(self) -> str:
        return f"output.publish: {self.target.label}"

    def need_library(self) -> None:
        """Raise `ConfigError` if the target's library is not installed."""
        if find_spec(self.module) is None:
            raise ConfigError(
                f"{self.what}: {self.module} is not installed. Run: "
                f'pip install "prefect-raybatch[{self.extra}]"'
            )

    def check(self, schema: pa.Schema, whole: bool = True) -> str:
        """Check that columns of these types can be published; return a line about the target.

        `whole`: they are all columns of the result. Writes nothing. Raises `ConfigError` that names
        column and remedy; `PublishFailed` if the target does not answer.
        """
        wanted = converted_schema(schema, self.target, whole)
        self.check_names(wanted.names)
        if self.planned:
            self.check_place()
        with self.plainly():
            there = self.existing()
        if there is not None:
            self.fit(wanted, there, whole)
            self.never_null = tuple(
                field.name for field in there if not field.nullable and field.name in wanted.names
            )
        if self.planned:
            with self.plainly():
                self.rehearse(wanted, there)
        return "is created by publishing" if there is None else "exists, and its columns fit"

    def check_place(self) -> None:  # noqa: B027 - a catalog or a server has no place to look at
        """Raise `ConfigError` if a local folder is not writable."""

    @property
    def system(self) -> str:
        """Return the name by which people know the system; a database's own name."""
        return self.target.format

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` for column names that the target cannot hold or distinguish."""
        self.refuse_alike(names, lambda name: name)

    def refuse_alike(self, names: Sequence[str], folded: Callable[[str], str]) -> None:
        """Raise `ConfigError` for two columns that are the same to the target.

        `folded` returns a name as the target compares it.
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
    def rehearse(self, wanted: pa.Schema, there: pa.Schema | None) -> None:
        """Find out what else the target would reject, and leave nothing there.

        What it raises is reported as an error of the target.
        """

    def need_writable(self, folder: str, made: bool = True) -> None:
        """Raise `ConfigError` unless this user can write to a local folder.

        With `made`, the folder may be missing if it can be created.
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

    def fit(self, wanted: pa.Schema, there: pa.Schema, whole: bool = True) -> pa.Schema:
        """Return the schema of rows for an existing table; raise `ConfigError` if there is none."""
        return fitted(wanted, there, self.what, whole)

    @abstractmethod
    def existing(self) -> pa.Schema | None:
        """Return the schema of the existing table, None if there is none."""

    @abstractmethod
    def place(self) -> tuple[str, ...]:
        """Return what identifies this table or folder, however the job writes it.

        A target in a folder returns ("folder", its absolute path or URI).
        """

    @abstractmethod
    def holds(self, plan: str, recorded: str) -> bool:
        """Return whether the target still has the rows of `plan`.

        They were published before as version `recorded`. If the target cannot tell, the record
        counts.
        """

    @abstractmethod
    def publish(self, rows: AnsweredRows, observe: Observe) -> str:
        """Write the rows unless they exist; return their version, "" if there are no versions.

        Safe to call concurrently and again after any crash.
        """

    @contextmanager
    def plainly(self, rows: AnsweredRows | None = None) -> Iterator[None]:
        """Convert the library's errors to one line without credentials.

        Errors of `rows` propagate.
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
        """Return what to fix if retrying cannot help; None if it may."""
        failure = failure_in(error)
        remedies = {"denied": KEYS_REFUSED, "no bucket": NO_BUCKET}
        if failure in remedies:
            return remedies[failure]
        return None if failure == "away" else self.refused(error)

    def refused(self, error: Exception) -> str | None:
        """Return why the library always rejects this, such as a value; None if transient."""
        return None

    def lost(self) -> PublishFailed:
        return PublishFailed(
            f"{self.what}: {PUBLISH_TRIES} commits in a row lost the race to other writers of the "
            "table. When it is less busy, run raybatch publish RUN_DIR --job JOB"
        )

    def scrub(self, error: object) -> str:
        """Return the first line of an error, with values that may be credentials masked.

        These are values of options, catalog and URL.
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
