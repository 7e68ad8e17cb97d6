"""Plans a run of two phases: which rows reuse an earlier answer, and which requests are sent.

The plan records this as its `increment`.
"""

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
    RetryShare,
    RowCounts,
    TakenPrecision,
    requests_ledger,
)
from prefect_raybatch.ledger.layout import REUSED_FOLDER
from prefect_raybatch.ledger.part_files import PartFiles
from prefect_raybatch.ledger.plan_tables import to_parquet
from prefect_raybatch.ledger.record_files import put_table
from prefect_raybatch.ledger.records import JsonObject, Plan, digest, load
from prefect_raybatch.plan.joining import Join
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.plan.prefix_order import MOST_ORDERED
from prefect_raybatch.plan.row_keys import RowKeys, keying_of
from prefect_raybatch.runs.precision import precision_of, taken_precision
from prefect_raybatch.runs.reusable_runs import (
    ANSWERS_A_BATCH,
    DamagedAnswers,
    ReusableRuns,
    damaged,
    find_reusable_runs,
    log_skipped_run,
    opened_answers,
)
from prefect_raybatch.source import Inventory, snapshot_tables
from prefect_raybatch.spec.engine import EngineSpec
from prefect_raybatch.spec.run import ReuseSpec, RunSpec
from prefect_raybatch.stages.images.rows import TOO_MANY_AWAY
from prefect_raybatch.stages.raw_answers import NUMBER, ORIGIN, POOLED, RAW
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.storage import Store, open_store

if TYPE_CHECKING:
    from prefect_raybatch.runs.plan_run import RunInput

log = logging.getLogger(__name__)
ANSWERS_A_FILE = 1 << 18  # answers in a file of copied answers
PLACES_A_GROUP = 1 << 16  # rows in a row group of a table that says where answers are


def increment_for(
    resolved: Resolved,
    spec: RunSpec,
    run_key: str,
    run_input: RunInput,
    context: JsonObject | None = None,
    earlier: bool = True,
) -> JsonObject:
    """Return the `increment` of a new run's plan, after writing the tables and files that it names.

    `context` records how `max_model_len: auto` was resolved. Runs with damaged answers are skipped.
    With `earlier=False`, no answers of earlier runs are reused. Raises the errors of
    `join_answers`.
    """
    skipped: set[str] = set()
    while True:
        try:
            with join_answers(
                *(resolved, spec, run_input.found, run_input.snapshot, run_key, earlier),
                in_order=True,
                skipped=skipped,
            ) as worked:
                return plan_increment(worked, resolved, spec, run_input, context).to_dict()
        except DamagedAnswers as error:  # found while answers were copied: join without that run
            _skip(error, skipped)


def _skip(error: DamagedAnswers, skipped: set[str]) -> None:
    """Log that a run has damaged answers, and add its URI to `skipped`."""
    log_skipped_run(error)
    skipped.add(error.run)


@dataclass
class JoinedRows:
    """The rows of a run, joined with the answers of `earlier` runs by request key.

    `join` says for each row whether it reuses an earlier answer, shares the answer of an equal row,
    or needs a request of its own. `rows` computes the request keys with `keying`. `parts` are the
    values (model, sampling, ...) that all requests have in common; `keying.context` is their
    hash.
    """

    keying: Keying
    parts: JsonObject
    earlier: ReusableRuns
    join: Join
    rows: RowKeys

    @property
    def counts(self) -> RowCounts:
        return self.join.counts


@contextmanager
def join_answers(
    resolved: Resolved,
    spec: RunSpec,
    inventory: Inventory,
    store: Store | None,
    run_key: str | None = None,
    earlier: bool = True,
    alone: bool = False,
    in_order: bool = False,
    skipped: set[str] | None = None,
) -> Iterator[JoinedRows]:
    """Compute the request keys of all rows, join them with those of earlier runs, yield the join.

    If the input is a snapshot, `store` holds its files; with `alone`, only this node can read them.
    With `earlier=False`, for retries, nothing is reused. With `in_order`, requests are numbered in
    the order of their prompts if that can raise prefix cache hits. Runs whose URI is in `skipped`
    are not reused; the URIs of runs with damaged answers are added to it. Writes only to TMPDIR.
    Raises `ConfigError` if `reuse` names a run that is missing, unfinished or keeps no answers, and
    `SourceError` for unreadable input.
    """
    model = resolved.with_adapters()
    keying, parts = keying_of(spec, model)
    ordered = in_order and _in_prompt_order(spec.engine, sum(file.rows for file in inventory.files))
    # The rows of a retry may lack their images for good, and must not hold up the run.
    away = TOO_MANY_AWAY if earlier else 1.0
    rows = RowKeys.of(spec, model, inventory, store, keying, ordered, away)
    skipped = set() if skipped is None else skipped

    def known_runs() -> ReusableRuns:
        found = find_reusable_runs(
            spec.reuse.run, spec.output, spec.name, run_key, keying.context, parts, skipped
        )
        return _of_one_precision(found, _precision(resolved, spec, found))

    with ExitStack() as stack:
        known, join = _begun_join(
            known_runs if earlier else ReusableRuns, rows.rows, ordered, skipped
        )
        stack.push(join)
        rows.add_to(join, spec.cluster, alone)
        join.run()
        yield JoinedRows(keying, parts, known, join, rows)


def _begun_join(
    known_runs: Callable[[], ReusableRuns], rows: int, ordered: bool, skipped: set[str]
) -> tuple[ReusableRuns, Join]:
    """Return the earlier runs, and an entered `Join` to which the keys of their answers are added.

    The caller has to exit the join. `known_runs` returns the earlier runs that are not in
    `skipped`; runs with unreadable keys are added to `skipped`. `rows` is the number of input rows.
    `ordered` says that the requests are to be in the order of their prompts.
    """
    while True:
        with ExitStack() as stack:
            try:
                known = known_runs()
                join = stack.enter_context(Join(rows, known.rows, ordered))
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
    """Return whether to send requests in the order of their prompts, to get prefix cache hits."""
    model = engine.model
    caches = not model.pools and model.endpoint is None  # encoders keep no cache of prefixes
    return engine.sort and rows <= MOST_ORDERED and caches


def plan_increment(
    joined: JoinedRows,
    resolved: Resolved,
    spec: RunSpec,
    run_input: RunInput,
    context: JsonObject | None = None,
) -> Increment:
    """Write the files that a run's plan needs to reuse answers; return the plan's `increment`.

    The increment (see `Increment`) says which rows reuse an answer and which requests are sent. The
    files are copies of the reused answers, the input and tables of the requests phase, and tables
    that say where each row's answer is. They have no effect until plan.json is written. `context`
    records how `max_model_len: auto` was resolved.
    """
    join, earlier = joined.join, joined.earlier
    store = run_input.store
    reused = _copy_answers(joined, store, run_input.attempt)
    precision = _precision(resolved, spec, earlier)
    asks = None
    if join.asked:
        asks = _plan_requests_phase(joined, resolved, spec, run_input, context, precision)
    counts = join.counts
    log.info(
        "reuse: %d rows reuse answers, %d share the answer of an equal row, %d are asked",
        *(counts.reused, counts.merged, counts.asked),
    )
    return Increment(
        ledger=OF_ROWS,
        context=joined.keying.context,
        merge=joined.keying.merge,
        parts=joined.parts,
        places=tuple(_write_places(join, store)),
        reused=tuple(reused),
        asks=None if asks is None else load(asks.to_bytes(), "the plan of the asks"),
        earlier=earlier.runs,
        differs=earlier.differs,
        counts=counts,
        rows=joined.rows.rows,
        seconds=earlier.seconds,
        precision=precision,
    )


def _precision(resolved: Resolved, spec: RunSpec, reusable: ReusableRuns) -> TakenPrecision | None:
    """Return the precision that the new run takes over from another run; None to decide anew.

    The other run is the one whose failed rows are retried, or one whose answers are reused. Raises
    `DamagedAnswers` if reused answers have no readable record of their precision.
    """
    retry, output = resolved.identity.retry, spec.output
    root = open_store(output.uri, dict(output.options) or None) if retry else None
    parent = root.sub(retry["parent"]) if root is not None and retry else None
    stores = [store for store, _ in reusable.held]
    try:
        return taken_precision(spec.engine.tries, stores, parent)
    except CorruptRun as error:
        if parent is not None or not stores:
            raise
        raise damaged(stores[0], str(error)) from None


def _of_one_precision(found: ReusableRuns, precision: TakenPrecision | None) -> ReusableRuns:
    """Return `found` without the answers that are not in this `precision`.

    Answers in two precisions must not mix. If `precision` is None, returns all of `found`.
    """
    if precision is None:
        return found
    held = []
    for store, answers in found.held:
        try:
            note = precision_of(store)
        except CorruptRun as error:
            raise damaged(store, str(error)) from None
        if note is not None and dict(note.decided) == dict(precision.decided):
            held.append((store, answers))
        else:
            log.info("reuse: the answers of %s, in another precision, are not reused", store.uri)
    return replace(found, held=tuple(held))


def _write_places(join: Join, store: Store) -> Iterator[str]:
    """Write tables that say for each row, in order, which answer it gets; yield their names."""
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


def _copy_answers(joined: JoinedRows, store: Store, attempt: str) -> Iterator[AnswerPart]:
    """Copy the reused answers of earlier runs, in stored order; yield a record of each file."""
    parts = PartFiles(store, f"{REUSED_FOLDER}/{attempt}-{uuid.uuid4()}")
    held: list[pa.Table] = []
    start = 0
    pools = joined.rows.pools
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
        for theirs, answers, file in joined.earlier.files:
            needed = np.array(joined.join.needed[start : start + file.rows])
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
    """Return raw answers with a column ORIGIN, the key of the run that sent each answer's request.

    If `table` has no such column, all its answers are of run `run_key`. Other columns are those of
    `schema`.
    """
    if ORIGIN in table.column_names:
        origin = table[ORIGIN]
    else:
        origin = pa.array([run_key] * table.num_rows, pa.string())
    rows = table.select(schema.names).cast(schema)
    return rows.append_column(ORIGIN, origin).combine_chunks()


def _plan_requests_phase(
    joined: JoinedRows,
    resolved: Resolved,
    spec: RunSpec,
    run_input: RunInput,
    context: JsonObject | None,
    precision: TakenPrecision | None,
) -> Plan:
    """Write the input and the tables of the requests phase; return its plan.

    The plan itself is not written here: the run's plan holds a copy, from which it is written when
    the phase begins.
    """
    ledger, join = requests_ledger(run_input.store), joined.join

    found = snapshot_tables(lambda: joined.rows.rows_to_ask(join), ledger.store, run_input.attempt)
    weights = to_parquet(pa.table({"rows": pa.array(join.weights())}))
    name = f"weights-{digest(weights)[:16]}.parquet"
    asks, model = requests_spec(spec), resolved.with_adapters()
    asked = replace(run_input, found=found, store=ledger.store, copied=True)
    row_bytes = asked.row_bytes(asks, resolved.model)
    plan, named = make_plan(
        asks,
        resolved.identity,
        model,
        _requests_job(public_job(resolved.job)),
        "asks",
        found.files,
        found.schema,
        row_bytes,
        snapshot=True,
        engines=sized.engines_to_plan_for(asks.sizes, asks.cluster, model, row_bytes),
        context=context,
        increment=Increment(
            ledger=OF_ASKS,
            context=joined.keying.context,
            merge=joined.keying.merge,
            weights=name,
            rows=joined.rows.rows,
            precision=precision,
        ).to_dict(),
    )
    for table, data in {**named, name: weights}.items():
        put_table(ledger.store, table, data)
    return replace(plan, parent=None)  # only the run's own plan names it


def plan_first_model(
    resolved: Resolved, spec: RunSpec, run_input: RunInput, share: RetryShare | None
) -> JsonObject:
    """Write the tables of the plan of a cascade's first model; return the cascade's increment.

    The run's plan records the increment as `Plan.increment`. `share` limits the rows that a retry
    sends to the larger model (see `share_of_retry`). It is None if there is no such limit.
    """
    model = resolved.with_adapters()
    row_bytes = run_input.row_bytes(spec, resolved.model)
    plan, named = make_plan(
        spec,
        resolved.identity,
        model,
        public_job(resolved.job),
        FIRST_KEY,
        run_input.found.files,
        run_input.found.schema,
        row_bytes,
        snapshot=run_input.copied,
        engines=sized.engines_to_plan_for(spec.sizes, spec.cluster, model, row_bytes),
        increment=Increment(ledger=OF_FIRST, context="").to_dict(),
        weights=run_input.found.weights,
        classifier=resolved.classifier,
    )
    ledger = requests_ledger(run_input.store)
    for table, data in named.items():
        put_table(ledger.store, table, data)
    plan = replace(plan, parent=None)  # only the run's own plan names it
    asks = load(plan.to_bytes(), "the plan of the first model")
    return Increment(ledger=OF_LARGER, context="", asks=asks, share=share).to_dict()


def requests_spec(spec: RunSpec) -> RunSpec:
    """Return the spec of the requests phase of a run whose spec is `spec`.

    That phase infers the run's distinct requests and stores raw answers, which the rows phase
    postprocesses.
    """
    finish = replace(
        spec.finish, columns=(), row_number=NUMBER, postprocess=None, types=None, extras=()
    )
    output = replace(spec.output, targets=(), layout=replace(spec.output.layout, compact=True))
    reuse = ReuseSpec(run=None, keep_days=None, keeps=False, ordered=spec.reuse.ordered)
    return replace(spec, finish=finish, output=output, reuse=reuse)


def _requests_job(job: Mapping[str, Any]) -> JsonObject:
    """Return a job, already free of secrets, without the fields that only the rows phase uses."""
    by_default = ("postprocess", "schema", "keep_answers", "extras", "publish", "row_number")
    output = {n: value for n, value in job["output"].items() if n not in (*by_default, "compact")}
    made = {name: value for name, value in job.items() if name != "reuse"}
    return {**made, "output": {**output, "columns": []}}
