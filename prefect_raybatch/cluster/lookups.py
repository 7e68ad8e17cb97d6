"""The stage that looks answers up, bound to the run whose answers they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.job import tasks
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.ledger.increments import (
    PLACES_ROWS,
    Increment,
    begin_asks,
    read_answers_by_row,
)
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


@dataclass(frozen=True)
class Known:
    """The answers that a run looks up: taken over, asked for, and why others failed, by number.
    `asked_bytes`: of the files of what was asked."""

    reused: AnswerFiles
    asked: AnswerFiles
    failed: AnswerFiles
    asked_bytes: int = 0


def known_answers(job: BatchJob, increment: Increment, store: Store) -> Known:
    """Of the run at `store`, whose asks are finished; `CorruptRun` where they are not."""
    success = _finished_asks(store, increment)
    raw = raw_names(job)
    return Known(
        reused=AnswerFiles(store, in_order([(p.path, p.rows) for p in increment.reused]), raw),
        asked=AnswerFiles(store, _numbered(success, "data"), raw),
        failed=AnswerFiles(store, _numbered(success, "quarantine"), WHY),
        asked_bytes=sum(part.bytes for part in success.of("data")) if success else 0,
    )


def raw_names(job: BatchJob) -> tuple[str, ...]:
    """The columns of its raw answers."""
    return tuple((POOLED if tasks.pools(job.engine.task) else RAW).names)


def look_up(
    job: BatchJob,
    plan: Plan,
    increment: Increment,
    store: Store,
    prepare: Prepare,
    keying: Keying,
) -> LookUp:
    """For the run at `store`, whose asks are finished; `CorruptRun` where they are not."""
    known = known_answers(job, increment, store)
    by_row = read_answers_by_row(store, plan)
    files = [AnswerFile(f.path, f.first, numbered=True) for f in by_row.files] if by_row else None
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
        reused=known.reused,
        asked=known.asked,
        failed=known.failed,
        by_row=None if files is None else AnswerFiles(store, tuple(files), raw_names(job)),
        rows_per_shard=plan.rows_per_shard,
        optional=tuple(name for name, wanted in flags.items() if wanted),
        pools=tasks.pools(job.engine.task),
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
