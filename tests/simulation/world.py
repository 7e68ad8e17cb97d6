"""One schedule's world: a store, a run in it, and the package's seams bound to both."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from helpers.small import MODEL, input_rows, make_job
from helpers.specs import new_plan_of

from prefect_raybatch import storage
from prefect_raybatch.cluster.side_by_side import workers_for
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger import checkpoints
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import InputFile, Plan
from prefect_raybatch.runs.plan_run import with_checked_models
from prefect_raybatch.storage import LocalStore, S3Store, Store, bucket

from .disk import Disk
from .s3 import BUCKET, Wired
from .scheduler import Process, Scheduler, installed, replace
from .tasks import Cluster
from .watch import Watch
from .wire import Weather, Wire

KEY = "key"
# All that a schedule uses is loaded before the first one: what is loaded later has the real clock.
for room in ("driver", "ledger", "plan", "report", "result", "runs", "source", "storage"):
    package = importlib.import_module(f"prefect_raybatch.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


class World:
    """`kind`: s3 or disk. `rows` in shards of `per_shard`."""

    def __init__(self, scheduler: Scheduler, kind: str, folder: Path, weather: Weather) -> None:
        rng = scheduler.rng
        self.scheduler, self.kind, self.folder = scheduler, kind, folder
        self.watch = Watch(self.files)
        self.wire = Wire(scheduler, weather, self.watch)
        self.rows, self.per_shard = rng.randrange(3, 13), rng.randrange(1, 5)
        self.single_put = rng.choice([0, bucket.SINGLE_PUT_BYTES])  # larger files go another way
        self.compact = rng.random() < 0.75
        self.root = f"s3://{BUCKET}" if kind == "s3" else str(folder / "out")
        if kind != "s3":
            Path(self.root).mkdir(parents=True)
        self.disk = Disk(Path(self.root), self.wire)
        self.connection = Wired(self.wire)
        self.cluster = Cluster(scheduler)
        self.watch.left_alone = self._left_alone
        self.job = make_job(
            source={"uri": "data/in.parquet", "rows_per_shard": self.per_shard},
            output={"uri": self.root, "compact": self.compact},
            limits={"max_failed_fraction": 1.0},
        )
        # Rows that no attempt answers, and rows whose engine dies of them.
        self.bad = {row for row in range(self.rows) if rng.random() < 0.15}
        self.deadly = {row for row in range(self.rows) if rng.random() < 0.05}

    def files(self) -> dict[str, bytes]:
        """What is readable now, by its path below the root."""
        if self.kind == "s3":
            return {key: file.data for key, file in self.wire.files.items()}
        return self.disk.files()

    def damage(self, key: str, data: bytes | None) -> None:
        """The file holds other bytes from now on, or is gone: it says nothing of it."""
        if self.kind != "s3":
            self.disk.damage(key, data)
        elif data is None:
            del self.wire.files[key]
        else:
            self.wire.files[key] = self.wire.files[key]._replace(data=data)

    def _left_alone(self) -> str | None:
        scheduler = self.scheduler
        return scheduler.process.leaves if scheduler.inside else None

    def open(self, uri: str) -> Store:
        if self.kind == "s3":
            return S3Store(uri, self.connection)
        return LocalStore(uri)

    def planned(self, ledger: Ledger) -> Plan:
        """The run's plan, made if need be; whoever makes it, it is of the same job."""
        resolved = Resolved.of(self.job, MODEL)
        files = [InputFile("data/in.parquet", 1000, None, 1, self.rows)]
        schema = input_rows(0, 1).schema
        plan, tables = new_plan_of(resolved, KEY, files, schema, 50.0, snapshot=False)
        return ledger.create_plan(plan, tables)

    def input_of(self, ledger: Ledger, plan: Plan) -> pa.Table:
        """The rows that a run is about, read as its read tasks do where they lie in the store."""
        if not plan.snapshot:
            return input_rows(0, self.rows)
        tables = []
        for file in ledger.files(plan):
            with ledger.store.open(file.uri) as stream:
                tables.append(pq.read_table(stream, pre_buffer=False, use_threads=False))
        return pa.concat_tables(tables)

    def job_of(self, plan: Plan) -> BatchJob:
        return BatchJob.from_dict(plan.job, "plan.json")

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every store that the package opens below the root is this world's."""
        with ExitStack() as stack:
            stack.enter_context(installed(self.scheduler))
            if self.kind != "s3":
                stack.enter_context(self.disk.installed())
            stack.enter_context(self.cluster.installed())
            stack.enter_context(_replaced(workers_for, self.cluster.workers_for))
            stack.enter_context(_replaced(storage.open_store, self._open_store))
            # Whether a model's files fit the job is no part of the protocol.
            stack.enter_context(_replaced(with_checked_models, lambda resolved: resolved))
            finalize = sys.modules["prefect_raybatch.result.finalize"].finalize
            stack.enter_context(_replaced(finalize, self._with_small_files(finalize)))
            page = sys.modules["prefect_raybatch.runs.finalize_run"].html_page
            stack.enter_context(_replaced(page, lambda report: "drawn in 0.1 s: left out"))
            writer = pq.ParquetWriter
            stack.enter_context(_replaced(writer, self._other_pyarrow(writer), "pyarrow.parquet"))
            stack.enter_context(_replaced(pq.read_table, read_here, "pyarrow.parquet"))
            # A race of eight for a name: a question about a store, not a part of the protocol.
            stack.enter_context(_set(Store, probe=lambda store: None))
            stack.enter_context(_set(bucket, SINGLE_PUT_BYTES=self.single_put))
            stack.enter_context(_set(checkpoints, FOLD=2, LEAST_COMMITS=1))
            stack.enter_context(_set(tempfile, tempdir=str(self.folder)))
            yield

    def _open_store(self, uri: str, options: Any = None, links: bool = False) -> Store:
        if uri == self.root or uri.startswith(f"{self.root}/"):
            return self.open(uri)
        return storage.open_store(uri, options, links)

    def _with_small_files(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """So that twelve rows are several files; a job's unit is the MiB."""
        signature = inspect.signature(finalize)

        def finalized(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.arguments["file_bytes"] = self.scheduler.process.file_bytes
            return finalize(*bound.args, **bound.kwargs)

        return finalized

    def _other_pyarrow(self, writer: Callable[..., Any]) -> Callable[..., Any]:
        """Some processes have another pyarrow, which writes the same rows as other bytes."""

        def made(*args: Any, **kwargs: Any) -> Any:
            if self.scheduler.inside and getattr(self.scheduler.process, "other_pyarrow", False):
                kwargs["data_page_version"] = "2.0"
            return writer(*args, **kwargs)

        return made

    def process(self, name: str, disturbed: bool = True) -> Process:
        made = Process(name, disturbed)
        # Another version may cut the result into other files, were there not a common layout.
        made.file_bytes = self.scheduler.rng.choice([1, 4000, 1 << 20])  # type: ignore[attr-defined]
        made.other_pyarrow = self.scheduler.rng.random() < 0.3  # type: ignore[attr-defined]
        return made


def read_here(source: Any, columns: Any = None, **_: Any) -> pa.Table:
    """`read_table` of one file without its threads, which take longer to wake than to read."""
    with pq.ParquetFile(source, pre_buffer=False) as file:
        return file.read(columns, use_threads=False)


@contextmanager
def _set(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def _replaced(value: Any, other: Any, package: str = "prefect_raybatch") -> Iterator[None]:
    """`other` in place of `value` in every module of a package that has imported it."""
    replace(package, {id(value): other})
    try:
        yield
    finally:
        replace(package, {id(other): value})  # also where it was imported meanwhile
