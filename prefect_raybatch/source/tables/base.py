"""The interface of table formats: what a format must provide to be the input of a run.

A *table source* is a table, dataset or query opened at one version. It is always copied once to the
Parquet snapshot in the run directory when the plan is made, and a resumed run reads only that
snapshot, so a version that vanishes later does no harm. Ranges of rows are never read in place,
because deletion vectors, partition values, column mapping and field ids are left to the format's
own reader.

To add a format:

1. a line in `TABLE_FORMATS` (`prefect_raybatch/job/table_formats.py`): name, import name, extra,
   schemes of its URIs, what source.version may be; the name in the `Literal` of `source.format`
   (`prefect_raybatch/job/source.py`);
2. a subclass of `TableSource` in a module of its own here, and the function that opens it in
   `OPENERS` (`prefect_raybatch/source/tables/copying.py`). The library is imported in that
   function, never at module level. `translate_errors` converts its errors to ours;
3. if the contents of a folder show that it has the format: `mark` and `OPENED`
   (`prefect_raybatch/source/places.py`).

Everything else follows: `source.columns`, `source.limit`, `source.filter`, the check of types that
a snapshot cannot hold, the estimate for `raybatch plan`, sampled prompts, the record in plan.json
and the error for a missing extra.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import pyarrow as pa

from prefect_raybatch.errors import RayBatchError, SourceError, StoreUnavailable
from prefect_raybatch.job.trusted_places import check_table_files
from prefect_raybatch.source.filters import Filter
from prefect_raybatch.storage import is_remote
from prefect_raybatch.storage.library_errors import failure_in, text_of

Scrub = Callable[[str], str]  # removes credentials from a text


@dataclass(frozen=True)
class TablePin:
    """A table and its version as plan.json records them, so no field may hold a credential.

    `id` is the format's permanent identity of the table (a UUID if it has one, else the URI);
    `version` identifies its content permanently (a version number, a snapshot id, a commit, the
    time of a transaction); `made` is when that version was written, in ISO 8601, if the format
    knows.
    """

    format: str
    uri: str
    id: str
    version: str
    made: str | None = None

    def record(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class TableSource(ABC):
    """A table opened at one version, by a function `open_...(source: ReadSpec) -> TableSource`.

    The opening function is bounded in time and reads few rows or none. `schema` has all columns, in
    the table's order, and may contain dictionaries and view types. `rows` is the number of rows
    before any filter; None if the table's metadata does not have it. `counted` is False if `rows`
    is only an estimate.
    """

    pin: TablePin
    schema: pa.Schema
    rows: int | None = None
    counted: bool = True

    @abstractmethod
    def batches(
        self, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows of the version, streamed, in the same order each time if possible.

        `columns`: the columns to read (None: all), including columns that only the filter needs and
        that are dropped later. `filter` may be pushed down as far as the format can: the caller
        applies it to the result in any case, so the pushed part may keep too many rows but never
        drop a matching one. May be called several times; the iterator may be closed before its end.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End connections and transactions; nothing is read afterwards."""

    def __enter__(self) -> TableSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_own_files(table: str, files: Iterable[str]) -> None:
    """Raise SourceError for a local file among the `files` of a remote table.

    `table` is the table's URI. Raises ConfigError for a file that the operator's policy refuses.
    """
    named = list(files)
    local = next((file for file in named if not is_remote(file)), None)
    if local is not None and is_remote(table):
        raise SourceError(
            f"source.uri: the table {table} lists a local file, {local}, as one of its own. Read a "
            "copy of the table that has all its files"
        )
    check_table_files(named)


@contextmanager
def translate_errors(what: str, scrub: Scrub = str) -> Iterator[None]:
    """Within the block, which reads `what`, convert a library's errors to this package's errors.

    Raises SourceError or StoreUnavailable, with a text of one line from which `scrub` has removed
    credentials. MemoryError and NotImplementedError are not converted.
    """
    try:
        yield
    except RayBatchError:
        raise
    except (MemoryError, NotImplementedError):
        raise
    except Exception as error:  # each library has its own classes, some only Exception
        whole = scrub(text_of(error))
        text = whole[:300] or type(error).__name__
        failure = failure_in(error)
        if failure == "denied":
            raise SourceError(
                f"{what}: access denied ({text}). Check the credentials in source.options, "
                "source.catalog, the credentials_block or the environment, and that they may read "
                "it"
            ) from None
        if failure == "no bucket":
            raise SourceError(
                f"{what}: the bucket does not exist ({text}). Check its name"
            ) from None
        if failure == "gone":
            raise SourceError(
                f"{what}: a file is missing ({text}). Check the path, and whether a cleanup "
                "(vacuum, expired snapshots) has removed it"
            ) from None
        if failure == "away":
            raise StoreUnavailable(f"{what}: {text}") from None
        raise SourceError(f"{what} cannot be read ({type(error).__name__}: {text})") from None


def moment_of(text: str) -> datetime | None:
    """Return the time of an ISO 8601 text, in UTC if it names no zone; None for other texts."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
