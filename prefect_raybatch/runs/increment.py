"""Plans a run that reuses answers: which rows reuse which answer, and what is left to ask."""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import (
    FIRST_KEY,
    OF_ASKS,
    OF_FIRST,
    OF_LARGER,
    OF_ROWS,
    AnswerPart,
    Increment,
    RowCounts,
    TakenPrecision,
    asks_ledger,
)
from prefect_raybatch.ledger.layout import REUSED_FOLDER
from prefect_raybatch.ledger.part_files import PartFiles
from prefect_raybatch.ledger.plan_tables import to_parquet
from prefect_raybatch.ledger.record_files import put_table
from prefect_raybatch.ledger.records import JsonObject, Plan, digest, load
from prefect_raybatch.plan import image_bytes
from prefect_raybatch.plan.joining import Join
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.plan.prefix_order import MOST_ORDERED
from prefect_raybatch.plan.row_keys import RowKeys, keying_of
from prefect_raybatch.runs.earlier import (
    ANSWERS_A_BATCH,
    DamagedAnswers,
    Earlier,
    damaged,
    find_earlier,
    opened_answers,
    pass_over,
)
from prefect_raybatch.runs.precision import taken_precision
from prefect_raybatch.source import Inventory, snapshot_tables
from prefect_raybatch.spec.engine import EngineSpec
from prefect_raybatch.spec.run import ReuseSpec, RunSpec
from prefect_raybatch.stages.raw_answers import NUMBER, ORIGIN, POOLED, RAW
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.storage import Store, open_store

if TYPE_CHECKING:
    from prefect_raybatch.runs.plan_run import RunInput

log = logging.getLogger(__name__)
ANSWERS_A_FILE = 1 << 18  # answers in a file of those taken over
PLACES_A_GROUP = 1 << 16  # rows of a table of places that are read together


def increment_for(
    resolved: Resolved,
    spec: RunSpec,
    run_key: str,
    taken: RunInput,
    context: JsonObject | None = None,
    earlier: bool = True,
) -> JsonObject:
    """Return `Plan.increment` of a new run, with everything that it names written.

    `context` records what an automatic context length resolved to. Raises like `worked_out`.
    """
    skipped: set[str] = set()
    while True:
        try:
            with worked_out(
                *(resolved, spec, taken.found, taken.snapshot, run_key, earlier),
                in_order=True,
                skipped=skipped,
            ) as worked:
                return planned(worked, resolved, spec, taken, context).to_dict()
        except DamagedAnswers as error:  # found while answers were copied: join without that run
            _skip(error, skipped)


def _skip(error: DamagedAnswers, skipped: set[str]) -> None:
    """Exclude a run whose answers are damaged."""
    pass_over(error)
    skipped.add(error.run)


@dataclass
class Worked:
    """The rows of a run, joined with the answers of `earlier` runs.

    `join` says for each row whether its answer is reused, shared or asked; `rows` are the rows'
    keys, made by `keying`, and `parts` is its context.
    """

    keying: Keying
    parts: JsonObject
    earlier: Earlier
    join: Join
    rows: RowKeys

    @property
    def counts(self) -> RowCounts:
        return self.join.counts


@contextmanager
def worked_out(
    resolved: Resolved,
    spec: RunSpec,
    found: Inventory,
    store: Store | None,
    run_key: str | None = None,
    earlier: bool = True,
    alone: bool = False,
    in_order: bool = False,
    skipped: set[str] | None = None,
) -> Iterator[Worked]:
    """Compute the keys of all rows and join them with the earlier run's.

    `store` holds the files if they are a snapshot, which with `alone` no other node can read.
    Without `earlier`, nothing is reused. With `in_order`, asks are numbered in the order of their
    prompts if that helps. Writes only to TMPDIR. Raises `ConfigError` for a `reuse` that names no
    such run, `SourceError` for unreadable input.
    """
    model = resolved.with_adapters()
    keying, parts = keying_of(spec, model)
    ordered = in_order and _in_prompt_order(spec.engine, sum(file.rows for file in found.files))
    rows = RowKeys.of(spec, model, found, store, keying, ordered)
    skipped = set() if skipped is None else skipped

    def known_runs() -> Earlier:
        return find_earlier(
            spec.reuse.run, spec.output, spec.name, run_key, keying.context, parts, skipped
        )

    with ExitStack() as stack:
        known, join = _begun_join(known_runs if earlier else Earlier, rows.rows, ordered, skipped)
        stack.push(join)
        rows.add_to(join, spec.cluster, alone)
        join.run()
        yield Worked(keying, parts, known, join, rows)


def _begun_join(
    known_runs: Callable[[], Earlier], rows: int, ordered: bool, skipped: set[str]
) -> tuple[Earlier, Join]:
    """Return the earlier runs and a join, entered, with the keys of their answers.

    A run with unreadable keys is added to `skipped`.
    """
    while True:
        known = known_runs()
        with ExitStack() as stack:
            join = stack.enter_context(Join(rows, known.rows, ordered))
            try:
                number = 0
                for keys, usable in known.every_key():
                    numbers = number + np.flatnonzero(usable)
                    taken = [key for key, use in zip(keys, usable.tolist(), strict=True) if use]
                    join.theirs.add(taken, numbers, np.zeros(len(taken), bool))
                    number += len(keys)
            except DamagedAnswers as error:
                _skip(error, skipped)
                continue
            stack.pop_all()
            return known, join


def _in_prompt_order(engine: EngineSpec, rows: int) -> bool:
    """Return whether requests of this run with a common prefix are asked one after the other."""
    model = engine.model
    caches = not model.pools and model.endpoint is None  # encoders keep no cache of prefixes
    return engine.sort and rows <= MOST_ORDERED and caches


def planned(
    worked: Worked,
    resolved: Resolved,
    spec: RunSpec,
    taken: RunInput,
    context: JsonObject | None = None,
) -> Increment:
    """Write everything that the run's plan is going to name.

    That is: reused answers, the input and the tables of the requests phase, and where each row's
    answer is. None of it counts before plan.json exists.
    """
    join, earlier = worked.join, worked.earlier
    store = taken.store
    reused = _copy_answers(worked, store, taken.attempt)
    precision = _precision(resolved, spec, earlier)
    asks = None
    if join.asked:
        asks = _plan_asks(worked, resolved, spec, taken, context, precision)
    counts = join.counts
    log.info(
        "reuse: %d rows reuse answers, %d share the answer of an equal row, %d are asked",
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
        differs=earlier.differs,
        counts=counts,
        rows=worked.rows.rows,
        seconds=earlier.seconds,
        precision=precision,
    )


def _precision(resolved: Resolved, spec: RunSpec, earlier: Earlier) -> TakenPrecision | None:
    retry, output = resolved.identity.retry, spec.output
    root = open_store(output.uri, dict(output.options) or None) if retry else None
    parent = root.sub(retry["parent"]) if root is not None and retry else None
    stores = [store for store, _ in earlier.held]
    try:
        return taken_precision(spec.engine.tries, stores, parent)
    except CorruptRun as error:
        if parent is not None or not stores:
            raise
        raise damaged(stores[0], str(error)) from None


def _write_places(join: Join, store: Store) -> Iterator[str]:
    """Write the tables of places; yield their names in order."""
    start = 0
    for kind, at in join.places():
        out = io.BytesIO()
        table = pa.table({"kind": pa.array(kind), "at": pa.array(at)})
        if (digests := join.kept_digests(start, start + len(kind))) is not None:
            table = table.append_column("digests", digests)
        start += len(kind)
        pq.write_table(table, out, compression="zstd", row_group_size=PLACES_A_GROUP)
        data = out.getvalue()
        name = f"places-{digest(data)[:16]}.parquet"
        put_table(store, name, data)
        yield name


def _copy_answers(worked: Worked, store: Store, attempt: str) -> Iterator[AnswerPart]:
    """Copy the earlier answers that rows reuse, in their order."""
    parts = PartFiles(store, f"{REUSED_FOLDER}/{attempt}-{uuid.uuid4()}")
    held: list[pa.Table] = []
    start = 0
    pools = worked.rows.pools
    schema = POOLED if pools else RAW

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
                        pa.Table.from_batches([batch.filter(mask)]), answers.run_key, schema
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


def _with_origin(table: pa.Table, run_key: str, schema: pa.Schema) -> pa.Table:
    """Return raw answers with the run that asked for each."""
    if ORIGIN in table.column_names:
        origin = table[ORIGIN]
    else:
        origin = pa.array([run_key] * table.num_rows, pa.string())
    rows = table.select(schema.names).cast(schema)
    return rows.append_column(ORIGIN, origin).combine_chunks()


def _plan_asks(
    worked: Worked,
    resolved: Resolved,
    spec: RunSpec,
    taken: RunInput,
    context: JsonObject | None,
    precision: TakenPrecision | None,
) -> Plan:
    """Write the input of the requests phase and the tables of its plan.

    The plan itself is written later, from the bytes that the run's plan holds.
    """
    ledger, join = asks_ledger(taken.store), worked.join

    found = snapshot_tables(lambda: worked.rows.asked(join), ledger.store, taken.attempt)
    weights = to_parquet(pa.table({"rows": pa.array(join.weights())}))
    name = f"weights-{digest(weights)[:16]}.parquet"
    asks = asks_of(spec)
    plan, named = make_plan(
        asks,
        resolved.identity,
        resolved.with_adapters(),
        _asks_job(public_job(resolved.job)),
        "asks",
        found.files,
        found.schema,
        image_bytes.row_bytes(
            asks.prompt.images, asks.engine.model, asks.read, resolved.model, found, ledger.store
        ),
        snapshot=True,
        engines=sized.engines_to_plan_for(asks.sizes, asks.cluster),
        context=context,
        increment=Increment(
            ledger=OF_ASKS,
            context=worked.keying.context,
            merge=worked.keying.merge,
            weights=name,
            rows=worked.rows.rows,
            precision=precision,
        ).to_dict(),
    )
    for table, data in {**named, name: weights}.items():
        put_table(ledger.store, table, data)
    return replace(plan, parent=None)  # of a retry, the run itself has it


def plan_first_model(resolved: Resolved, spec: RunSpec, taken: RunInput) -> JsonObject:
    """Return `Plan.increment` of a cascade, with the tables of its first plan written."""
    plan, named = make_plan(
        spec,
        resolved.identity,
        resolved.with_adapters(),
        public_job(resolved.job),
        FIRST_KEY,
        taken.found.files,
        taken.found.schema,
        image_bytes.row_bytes(
            spec.prompt.images,
            spec.engine.model,
            spec.read,
            resolved.model,
            taken.found,
            taken.snapshot,
        ),
        snapshot=taken.copied,
        engines=sized.engines_to_plan_for(spec.sizes, spec.cluster),
        increment=Increment(ledger=OF_FIRST, context="").to_dict(),
        weights=taken.found.weights,
    )
    ledger = asks_ledger(taken.store)
    for table, data in named.items():
        put_table(ledger.store, table, data)
    plan = replace(plan, parent=None)  # of a retry, the run itself has it
    asks = load(plan.to_bytes(), "the plan of the first model")
    return Increment(ledger=OF_LARGER, context="", asks=asks).to_dict()


def asks_of(spec: RunSpec) -> RunSpec:
    """Return the spec of the requests phase of a run, which asks the distinct requests of `spec`.

    Its answers are raw; finishing them is left to the rows phase.
    """
    finish = replace(
        spec.finish, columns=(), row_number=NUMBER, postprocess=None, types=None, extras=()
    )
    output = replace(spec.output, targets=(), layout=replace(spec.output.layout, compact=True))
    reuse = ReuseSpec(run=None, keep_days=None, keeps=False, ordered=spec.reuse.ordered)
    return replace(spec, finish=finish, output=output, reuse=reuse)


def _asks_job(job: Mapping[str, Any]) -> JsonObject:
    """Return a public job as the plan of its requests phase keeps it (`asks_of`)."""
    by_default = ("postprocess", "schema", "keep_answers", "extras", "publish", "row_number")
    output = {n: value for n, value in job["output"].items() if n not in (*by_default, "compact")}
    made = {name: value for name, value in job.items() if name != "reuse"}
    return {**made, "output": {**output, "columns": []}}
