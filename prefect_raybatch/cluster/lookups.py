"""The stage that looks answers up, bound to the run whose answers they are."""

from __future__ import annotations

from dataclasses import replace

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.increments import PLACES_ROWS, Increment, begin_asks
from prefect_raybatch.ledger.layout import ASKS, table_path
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.stages.block import FORMED, REASONING_OPEN, TRUNCATED
from prefect_raybatch.stages.lookup import WHY, LookUp
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.raw_answers import POOLED, RAW, AnswerFile, AnswerFiles, in_order
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.stages.row_sampling import has_form
from prefect_raybatch.storage import Store


def look_up(
    job: BatchJob,
    plan: Plan,
    increment: Increment,
    store: Store,
    prepare: Prepare,
    keying: Keying,
) -> LookUp:
    """For the run at `store`, whose asks are finished; `CorruptRun` where they are not."""
    success = _finished_asks(store, increment)
    pools = tasks.pools(job.engine.task)
    raw = tuple((POOLED if pools else RAW).names)
    places = [(table_path(name), PLACES_ROWS) for name in increment.places]
    parsing = prepare.parsing
    flags = {
        REASONING_OPEN: parsing is not None and parsing.reasoning is not None,
        FORMED: bool(job.prompt.function) or has_form(job.asked()),
        TRUNCATED: job.prompt.on_too_long != "quarantine",
    }
    told: tuple[str, ...] = ("kind", "at")
    if prepare.images is not None:
        prepare = replace(prepare, images=replace(prepare.images, digests=True, decode=False))
        told = (*told, "digests")
    return LookUp(
        prepare,
        keying,
        places=AnswerFiles(store, in_order(places), told),
        reused=AnswerFiles(store, in_order([(p.path, p.rows) for p in increment.reused]), raw),
        asked=AnswerFiles(store, _numbered(success, "data"), raw),
        failed=AnswerFiles(store, _numbered(success, "quarantine"), WHY),
        rows_per_shard=plan.rows_per_shard,
        optional=tuple(name for name, wanted in flags.items() if wanted),
        pools=pools,
    )


def _finished_asks(store: Store, increment: Increment) -> Success | None:
    begun = begin_asks(store, increment)
    if begun is None:
        return None
    success = begun[0].finished(begun[1])
    if success is None:
        raise CorruptRun(f"{begun[0].store.uri}: its requests are not all answered yet")
    return success


def _numbered(success: Success | None, kind: str) -> tuple[AnswerFile, ...]:
    parts = success.of(kind) if success is not None else []
    return tuple(AnswerFile(f"{ASKS}/{p.path}", p.first or 0, numbered=True) for p in parts)
