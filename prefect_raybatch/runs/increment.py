"""Plans a run that reuses answers: which rows take over which, and what is left to ask."""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.errors import ConfigError, SourceError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.increments import (
    OF_ASKS,
    OF_ROWS,
    AnswerPart,
    Increment,
    RowCounts,
    asks_ledger,
)
from prefect_raybatch.ledger.layout import REUSED_FOLDER, table_path
from prefect_raybatch.ledger.part_files import PartFiles
from prefect_raybatch.ledger.plan_tables import to_parquet
from prefect_raybatch.ledger.record_files import put_record_proved
from prefect_raybatch.ledger.records import Plan, Unit, digest, load
from prefect_raybatch.model import pinned as models
from prefect_raybatch.plan.joining import Join
from prefect_raybatch.plan.keying import keying_of
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.plan.plan import settled as settled_job
from prefect_raybatch.plan.resolved import Resolved
from prefect_raybatch.runs.earlier import ANSWERS_A_BATCH, Earlier, find_earlier, opened_answers
from prefect_raybatch.source import Inventory, snapshot_tables
from prefect_raybatch.stages.block import Failure, input_columns, is_lost, losses
from prefect_raybatch.stages.calls.apart import NoChild
from prefect_raybatch.stages.calls.calling import Calls
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.raw_answers import NUMBER, ORIGIN, RAW
from prefect_raybatch.stages.request_key import KEY, KEY_BYTES, KEY_TYPE, Keying
from prefect_raybatch.storage import Store

if TYPE_CHECKING:
    from prefect_raybatch.stages.read import ShardReader

log = logging.getLogger(__name__)
CHUNK_ROWS = 8192  # rows whose keys are made together
ANSWERS_A_FILE = 1 << 18  # answers in a file of those taken over
PLACES_A_GROUP = 1 << 16  # rows of a table of places that are read together
NO_KEY = bytes(KEY_BYTES)


def increment_for(
    resolved: Resolved,
    found: Inventory,
    store: Store,
    attempt: str,
    copied: bool,
    run_key: str,
    earlier: bool = True,
    context: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`Plan.increment` of a new run in `store`, with all that it names written. `copied`: the
    input's files are a snapshot there; `context`: what `auto` came to. As `worked_out`."""
    rows = store if copied else None
    settled = replace(resolved, job=settled_job(resolved.job, context))
    with worked_out(settled, found, rows, run_key, earlier) as worked:
        return planned(worked, resolved, store, attempt, context).to_dict()


@dataclass
class Worked:
    """What a run would reuse and ask: `join` says it row by row."""

    keying: Keying
    parts: dict[str, Any]
    earlier: Earlier
    join: Join
    rows: _Rows

    @property
    def counts(self) -> RowCounts:
        return self.join.counts


@contextmanager
def worked_out(
    resolved: Resolved,
    found: Inventory,
    store: Store | None,
    run_key: str | None = None,
    earlier: bool = True,
) -> Iterator[Worked]:
    """Makes the keys of all rows and joins them with the earlier run's; `store` holds the files
    where they are a snapshot. Without `earlier` nothing is taken over. Writes to TMPDIR alone.

    Raises `ConfigError` for a `reuse` that names no such run, `SourceError` for what cannot be
    read.
    """
    job, model = resolved.job, resolved.with_adapters()
    keying, parts = keying_of(job, model)
    known = find_earlier(job, run_key, keying.context, parts) if earlier else Earlier()
    rows = _Rows.of(job, model, found, store, keying)
    with Join(rows.reader.rows, known.rows) as join:
        number = 0
        for keys in known.every_key():
            numbers = np.arange(number, number + len(keys))
            join.theirs.add(keys, numbers, np.zeros(len(keys), bool))
            number += len(keys)
        for start, _, made in rows.keyed(None):
            well = [(key, start + i, exact) for i, (key, exact) in enumerate(made) if key]
            join.ours.add(
                [key for key, _, _ in well],
                np.array([row for _, row, _ in well], np.int64),
                np.array([exact for _, _, exact in well], bool),
            )
        join.run()
        yield Worked(keying, parts, known, join, rows)


@dataclass(frozen=True)
class _Rows:
    """The rows of the input, read as far as requests are made of them."""

    reader: ShardReader
    prepare: Prepare
    keying: Keying

    @classmethod
    def of(
        cls,
        job: BatchJob,
        model: dict[str, Any],
        found: Inventory,
        store: Store | None,
        keying: Keying,
    ) -> _Rows:
        from prefect_raybatch.stages.read import ShardReader

        schema = found.schema
        if not job.prompt.function:  # no other columns are needed
            wanted = set(job.prompt.columns) or {schema.names[0]}
            schema = pa.schema([field for field in schema if field.name in wanted])
        limits = job.limits
        # Apart: a function that ends its process would end the driver, here and at each new try.
        calls = Calls(limits.function_seconds or None, apart=True, deaths=limits.engine_deaths)
        prepare = Prepare(
            job.prompt,
            models.with_tokenizer(model, job.engine),
            job.engine.context,
            calls=calls,
            sampling=job.asked(),
            fixed_form=job.fixed_form,
        )
        reader = ShardReader(found.files, schema, store, job.source.options)
        return cls(reader, prepare, keying)

    def keyed(
        self, only: Join | None
    ) -> Iterator[tuple[int, pa.Table, list[tuple[bytes | None, bool]]]]:
        """(first row, rows, key and whether it is exact of each) of the input in order; of the
        places where `only` has rows that are asked about."""
        rows = self.reader.rows
        units = [
            (Unit(number, 0, min(CHUNK_ROWS, rows - start)), start)
            for number, start in enumerate(range(0, rows, CHUNK_ROWS))
            if only is None or only.leaders(start, min(rows, start + CHUNK_ROWS)).any()
        ]
        starts = {unit.shard: start for unit, start in units}
        for task in self.reader.tasks(units, max(1, len(units))):
            for unit, table in zip(task.units, self.reader.read(task), strict=True):
                if is_lost(table):
                    raise SourceError(losses(table)[0].message)
                try:
                    requests = self.prepare.requests(table)
                except NoChild as error:
                    raise ConfigError(f"no requests of the rows: {error}") from None
                keys = self.keying.keys(requests, table)
                exact = [not isinstance(r, Failure) and self.keying.exact(r) for r in requests]
                yield starts[unit.shard], table, list(zip(keys, exact, strict=True))


def planned(
    worked: Worked,
    resolved: Resolved,
    store: Store,
    attempt: str,
    context: dict[str, Any] | None = None,
) -> Increment:
    """Writes all that the run's plan is going to name: answers that are taken over, the input and
    the tables of the asks, and where each row's answer is. Nothing of it counts before plan.json
    is there."""
    join, earlier = worked.join, worked.earlier
    reused = _copy_answers(worked, store, attempt)
    asks = _plan_asks(worked, resolved, store, attempt, context) if join.asked else None
    counts = join.counts
    log.info(
        "reuse: %d rows take over answers, %d share another row's, %d are asked",
        *(counts.reused, counts.merged, counts.asked),
    )
    return Increment(
        ledger=OF_ROWS,
        context=worked.keying.context,
        merge=worked.keying.merge,
        parts=worked.parts,
        places=tuple(_write_places(join, store)),
        reused=tuple(reused),
        asks=None if asks is None else load(asks.to_bytes(), "the plan of the asks"),
        earlier=earlier.runs,
        earlier_plan=earlier.plan,
        differs=earlier.differs,
        counts=counts,
        rows=worked.rows.reader.rows,
        seconds=earlier.seconds,
    )


def _write_places(join: Join, store: Store) -> Iterator[str]:
    """Writes the tables of places; their names in order."""
    for kind, at in join.places():
        out = io.BytesIO()
        table = pa.table({"kind": pa.array(kind), "at": pa.array(at)})
        pq.write_table(table, out, compression="zstd", row_group_size=PLACES_A_GROUP)
        data = out.getvalue()
        name = f"places-{digest(data)[:16]}.parquet"
        put_record_proved(store, table_path(name), data)
        yield name


def _copy_answers(worked: Worked, store: Store, attempt: str) -> Iterator[AnswerPart]:
    """Copies the earlier answers that rows take over, in their order."""
    parts = PartFiles(store, f"{REUSED_FOLDER}/{attempt}-{uuid.uuid4()}")
    held: list[pa.Table] = []
    start = 0

    def write() -> None:
        if held:
            parts.write(pa.concat_tables(held))
            held.clear()

    def finished() -> Iterator[AnswerPart]:
        if (made := parts.finish()) is not None:
            part = made[0]
            yield AnswerPart(part.path, part.rows, part.bytes, part.sha256)

    try:
        for theirs, answers, file in worked.earlier.files:
            needed = np.array(worked.join.needed[start : start + file.rows])
            start += file.rows
            if not needed.any():
                continue
            with opened_answers(theirs, file) as found:
                at = 0
                for batch in found.iter_batches(ANSWERS_A_BATCH, use_threads=False):
                    mask = pa.array(needed[at : at + batch.num_rows])
                    at += batch.num_rows
                    rows = _with_origin(
                        pa.Table.from_batches([batch.filter(mask)]), answers.run_key
                    )
                    held += [rows] if rows.num_rows else []
                    if sum(table.num_rows for table in held) >= ANSWERS_A_BATCH:
                        write()
                    if parts.rows >= ANSWERS_A_FILE:
                        yield from finished()
        write()
        yield from finished()
    finally:
        parts.discard()


def _with_origin(table: pa.Table, run_key: str) -> pa.Table:
    """Raw answers with the run that asked for each."""
    if ORIGIN in table.column_names:
        origin = table[ORIGIN]
    else:
        origin = pa.array([run_key] * table.num_rows, pa.string())
    rows = table.select(RAW.names).cast(RAW)
    return rows.append_column(ORIGIN, origin).combine_chunks()


def _plan_asks(
    worked: Worked,
    resolved: Resolved,
    store: Store,
    attempt: str,
    context: dict[str, Any] | None,
) -> Plan:
    """Writes the input of the asks and the tables of their plan; the plan itself is begun later,
    with the bytes that the run's plan holds."""
    ledger, join = asks_ledger(store), worked.join

    def tables() -> Iterator[tuple[str, pa.Table]]:
        for start, table, made in worked.rows.keyed(join):
            mask = join.leaders(start, start + table.num_rows)
            keys = [made[i][0] or NO_KEY for i in np.flatnonzero(mask).tolist()]
            rows = table.select(input_columns(table)).filter(pa.array(mask))
            yield "the requests", rows.append_column(KEY, pa.array(keys, KEY_TYPE))

    found = snapshot_tables(tables, ledger.store, attempt)
    weights = to_parquet(pa.table({"rows": pa.array(join.weights())}))
    name = f"weights-{digest(weights)[:16]}.parquet"
    job = job_of_asks(resolved.job)
    plan, named = make_plan(
        replace(resolved, job=job),
        "asks",
        found.files,
        found.schema,
        found.row_bytes,
        snapshot=True,
        engines=sized.engines_to_plan_for(job),
        context=context,
        increment=Increment(
            ledger=OF_ASKS,
            context=worked.keying.context,
            merge=worked.keying.merge,
            weights=name,
            rows=worked.rows.reader.rows,
        ).to_dict(),
    )
    for table, data in {**named, name: weights}.items():
        put_record_proved(ledger.store, table_path(table), data)
    return replace(plan, parent=None)  # of a retry, the run itself has it


def job_of_asks(job: BatchJob) -> BatchJob:
    """The job whose answers are raw: what finish would make of them is left to the run itself."""
    output = job.output.model_copy(
        update={
            **dict.fromkeys(("postprocess", "output_schema", "keep_answers")),
            **{"columns": [], "extras": [], "publish": []},
            **{"row_number": NUMBER, "compact": True},
        }
    )
    return job.model_copy(update={"output": output, "reuse": None})
