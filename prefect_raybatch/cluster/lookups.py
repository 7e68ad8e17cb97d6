"""Creates the lookup stage, with which a run's rows phase reads its answers from files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.increments import (
    PLACES_ROWS,
    Increment,
    begin_requests_phase,
    read_answers_by_row,
)
from prefect_raybatch.ledger.layout import REQUESTS_FOLDER, table_path
from prefect_raybatch.ledger.record_files import hash_in_name
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.ledger.success import Success
from prefect_raybatch.stages.columns import FORMED, REASONING_OPEN, TRUNCATED
from prefect_raybatch.stages.lookup import WHY, LookUp
from prefect_raybatch.stages.prepare import Prepare
from prefect_raybatch.stages.raw_answers import (
    POOLED,
    RAW,
    AnswerFile,
    AnswerFiles,
    NamedFile,
    in_order,
    numbered,
)
from prefect_raybatch.stages.request_key import Keying
from prefect_raybatch.stages.row_sampling import has_form
from prefect_raybatch.storage import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LookUpFiles:
    """The files from which a run's rows phase reads the answers to its rows.

    `reused` are answers of earlier runs, `new_answers` answers to this run's own requests, `failed`
    the errors of requests that failed. `new_answer_bytes` is the size of the files of
    `new_answers`.
    """

    reused: AnswerFiles
    new_answers: AnswerFiles
    failed: AnswerFiles
    new_answer_bytes: int = 0


def look_up_files(pools: bool, increment: Increment, store: Store) -> LookUpFiles:
    """Return the files from which the rows phase of a run reads answers.

    `store` is the run directory. `pools`: the answers are vectors of a pooling task, else text.
    Raises `CorruptRun` if the run's requests are not all answered, or if a file is missing or was
    changed.
    """
    success = requests_phase_success(store, increment)
    raw = raw_names(pools)
    with _repairable(store):
        reused = [NamedFile(p.path, p.rows, p.sha256) for p in increment.reused]
        return LookUpFiles(
            reused=AnswerFiles(store, in_order(store, reused), raw),
            new_answers=AnswerFiles(store, numbered_parts(store, success, "data"), raw),
            failed=AnswerFiles(store, numbered_parts(store, success, "quarantine"), WHY),
            new_answer_bytes=sum(part.bytes for part in success.of("data")) if success else 0,
        )


def raw_names(pools: bool) -> tuple[str, ...]:
    """Return the column names of a file of answers before postprocessing.

    With `pools`, the answers are vectors of a pooling task.
    """
    return tuple((POOLED if pools else RAW).names)


def look_up(
    pools: bool,
    plan: Plan,
    increment: Increment,
    store: Store,
    prepare: Prepare,
    keying: Keying,
) -> LookUp:
    """Return the stage that replaces an engine in the rows phase: it reads answers from files.

    `store` is the run directory. `pools`: the answers are vectors of a pooling task. Raises
    `CorruptRun` if the run's requests are not all answered, or if a file is missing or was changed.
    """
    known = look_up_files(pools, increment, store)
    by_row = _by_row(store, plan)
    tables = [NamedFile(table_path(n), PLACES_ROWS, hash_in_name(n)) for n in increment.places]
    with _repairable(store):
        places = in_order(store, tables)
    parsing = prepare.parsing
    flags = {
        REASONING_OPEN: parsing is not None and parsing.reasoning is not None,
        FORMED: bool(prepare.prompt.function) or has_form(prepare.sampling.fields),
        TRUNCATED: prepare.prompt.on_too_long != "quarantine",
    }
    told: tuple[str, ...] = ("kind", "at")
    if prepare.images is not None:
        prepare = replace(prepare, images=replace(prepare.images, digests=True, decode=False))
        told = (*told, "digests")
    return LookUp(
        prepare,
        keying,
        places=AnswerFiles(store, places, told),
        reused=known.reused,
        asked=known.new_answers,
        failed=known.failed,
        by_row=None if by_row is None else AnswerFiles(store, by_row, raw_names(pools)),
        rows_per_shard=plan.rows_per_shard,
        optional=tuple(name for name, wanted in flags.items() if wanted),
        pools=pools,
    )


def requests_phase_success(store: Store, increment: Increment) -> Success | None:
    """Return the `_SUCCESS` of a run's requests phase or, in a cascade, of its first model.

    None if the run has no such phase, e.g. because it reuses all answers. Raises `CorruptRun` while
    that phase is not finished.
    """
    begun = begin_requests_phase(store, increment)
    if begun is None:
        return None
    success = begun[0].finished(begun[1])
    if success is None:
        raise CorruptRun(f"{begun[0].store.uri}: the requests are not all answered yet")
    return success


def numbered_parts(store: Store, success: Success | None, kind: str) -> tuple[AnswerFile, ...]:
    """Return the result files of a `kind` ("data", "quarantine") of a finished requests phase.

    Their rows are numbered by the column `_row`. Empty if `success` is None.
    """
    parts = success.of(kind) if success is not None else []
    files = [
        (p.first or 0, NamedFile(f"{REQUESTS_FOLDER}/{p.path}", p.rows, p.sha256)) for p in parts
    ]
    return numbered(store, files)


def _by_row(store: Store, plan: Plan) -> tuple[AnswerFile, ...] | None:
    """Return the copy of the answer files whose rows are in row order.

    Returns None if the run has no such copy, or if the copy is damaged. The answers are then read
    from the files in request order.
    """
    try:
        found = read_answers_by_row(store, plan)
        if found is None:
            return None
        named = [(file.first, NamedFile(file.path, file.rows, file.sha256)) for file in found.files]
        return numbered(store, named)
    except CorruptRun as error:
        log.warning(
            "could not read the answers in row order; reading them in request order: %s", error
        )
        return None


@contextmanager
def _repairable(store: Store) -> Iterator[None]:
    """Add the repair command to the message of a `CorruptRun` raised in the block."""
    try:
        yield
    except CorruptRun as error:
        raise CorruptRun(f"{error}. Run: raybatch repair {store.uri}") from None
