"""Opens the rows of a finished run with pyarrow, pandas, Polars, DuckDB and Ray Data."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import ConfigError, CorruptRun, IncompleteRun
from prefect_raybatch.ledger.forks import key_to_continue
from prefect_raybatch.ledger.layout import table_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.partials import PartialResult, read_partial, split_partial
from prefect_raybatch.ledger.records import QUARANTINE
from prefect_raybatch.ledger.success import Success, check_parts
from prefect_raybatch.storage import CloudStore, Store, arrow_filesystem, open_store
from prefect_raybatch.words import some_are

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars
    import pyarrow.dataset
    import pyarrow.fs
    import ray.data

Options = Mapping[str, Any] | None


class FinishedRows:
    """Mixin with methods that read a finished run's result from the files named in its `_SUCCESS`.

    A partial result (RUN_DIR/partial/_UUID) is read from the files named in its own record.
    `options` are s3fs options, as in `output.options`; without them, the options with which the run
    was opened are used. With `quarantine=True`, a method returns the failed rows instead of the
    answered ones.

    Each method raises `IncompleteRun` if the run is not finished, `CorruptRun` if a file is missing
    or has another size, and `ConfigError` for a run with `output.compact: false`, which has no
    result files in row order.
    """

    @abstractmethod
    def _place(self) -> tuple[str, Options]:
        """Return (URI of the run or partial result, default store options)."""

    def dataset(self, options: Options = None) -> pyarrow.dataset.Dataset:
        """Return the answered rows, in input order, read on demand."""
        return rows_of_result(*self._opened(options), "data")

    def quarantine(self, options: Options = None) -> pyarrow.dataset.Dataset:
        """Return the failed rows: stage, error, message, attempts and the input row."""
        return rows_of_result(*self._opened(options), "quarantine")

    def to_arrow(self, options: Options = None, *, quarantine: bool = False) -> pyarrow.Table:
        """Return the answered rows, or with `quarantine` the failed ones, as a pyarrow Table.

        The whole table is in memory.
        """
        return self._rows(options, quarantine).to_table()

    def to_pandas(self, options: Options = None, *, quarantine: bool = False) -> pandas.DataFrame:
        """Return the answered rows, or with `quarantine` the failed ones, as a pandas DataFrame."""
        return self.to_arrow(options, quarantine=quarantine).to_pandas()

    def to_polars(self, options: Options = None, *, quarantine: bool = False) -> polars.LazyFrame:
        """Return the answered rows, or with `quarantine` the failed ones, as a Polars LazyFrame."""
        try:
            import polars
        except ImportError:
            raise ConfigError("to_polars() needs polars: pip install polars") from None
        return polars.scan_pyarrow_dataset(self._rows(options, quarantine))

    def to_duckdb(
        self, options: Options = None, *, quarantine: bool = False
    ) -> duckdb.DuckDBPyRelation:
        """Return the answered rows, or with `quarantine` the failed ones, as a DuckDB relation.

        It belongs to DuckDB's default connection. Raises `ConfigError` if duckdb is not installed.
        """
        try:
            import duckdb
        except ImportError:
            raise ConfigError("to_duckdb() needs duckdb: pip install duckdb") from None
        return duckdb.from_arrow(self._rows(options, quarantine))

    def to_ray(self, options: Options = None, *, quarantine: bool = False) -> ray.data.Dataset:
        """Return the answered rows, or with `quarantine` the failed ones, as a Ray dataset.

        Ray's workers read it.
        """
        import ray.data

        store, success = self._opened(options)
        kind = "quarantine" if quarantine else "data"
        names, filesystem = _files(store, success, kind)
        if not names:
            return ray.data.from_arrow(_empty(success, kind))
        return ray.data.read_parquet(names, filesystem=filesystem)

    def _rows(self, options: Options, quarantine: bool) -> pyarrow.dataset.Dataset:
        return self.quarantine(options) if quarantine else self.dataset(options)

    def _opened(self, options: Options) -> tuple[Store, Success | PartialResult]:
        place, known = self._place()
        uri, name = split_partial(place)
        store = open_store(uri, options or known)
        ledger = Ledger(store)
        plan = need_plan(ledger)
        if name is not None:
            return store, read_partial(store, plan, name)
        success = ledger.finished(plan)
        if success is None:
            done = int(ledger.committed(plan).sum())
            raise IncompleteRun(
                f"{store.uri} is not finished: {some_are(done, plan.shards, 'shard')} committed. "
                "Finish it with the command that started it (raybatch run JOB --run-key "
                f"{key_to_continue(store.above(), plan)}); raybatch status shows its progress"
            )
        if not success.compact:
            manifest = table_path(success.manifest or "")
            raise ConfigError(
                f"{store.uri} was written with output.compact: false, so it has no data/ to open. "
                f"{manifest} lists its files; docs/reference/job.md explains how rows are numbered"
            )
        return store, success


def _files(
    store: Store, success: Success | PartialResult, kind: str
) -> tuple[list[str], pyarrow.fs.FileSystem]:
    check_parts(store, success.parts)
    filesystem, root = arrow_filesystem(store)
    return [f"{root}/{part.path}" for part in success.of(kind)], filesystem


def _copied(store: Store, success: Success | PartialResult, kind: str) -> list[str]:
    """Copy the result's files of one `kind` into a temporary folder; return the copies' paths.

    `kind` is "data" or "quarantine". The folder is removed when the process ends.
    """
    check_parts(store, success.parts)
    folder = Path(tempfile.mkdtemp(prefix="raybatch-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copies = []
    for number, part in enumerate(success.of(kind)):
        copies.append(str(folder / f"{number:05}.parquet"))
        with store.open(part.path) as there, open(copies[-1], "wb") as here:
            shutil.copyfileobj(there, here, 1 << 20)
    return copies


def rows_of_result(
    store: Store, success: Success | PartialResult, kind: str
) -> pyarrow.dataset.Dataset:
    """Return the rows of `kind`, data or quarantine, from the files that `success` names.

    Raises `CorruptRun` if a file is missing, has another size, or cannot be read.
    """
    import pyarrow.dataset

    if isinstance(store, CloudStore):
        names, filesystem = _copied(store, success, kind), None
    else:
        names, filesystem = _files(store, success, kind)
    if not names:
        return pyarrow.dataset.dataset(_empty(success, kind))
    try:
        return pyarrow.dataset.dataset(names, filesystem=filesystem, format="parquet")
    except (OSError, ValueError) as error:
        raise CorruptRun(f"{store.uri}: cannot read its files: {error}") from None


def _empty(success: Success | PartialResult, kind: str) -> pyarrow.Table:
    """Return a table without rows, for a result that has no files of this `kind`.

    For "data", its only column is the row number, since no file tells the other columns. For
    "quarantine", it has the fixed columns of failed rows, as strings, and the row number.
    """
    import pyarrow as pa

    columns = {name: pa.array([], pa.string()) for name in QUARANTINE if kind == "quarantine"}
    return pa.table({**columns, success.row_number: pa.array([], pa.int64())})
