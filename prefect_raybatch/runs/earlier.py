"""The earlier run whose raw answers a run takes over, and the runs that retried its failed rows."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.parquet as pq

from prefect_raybatch.errors import ConfigError, CorruptRun, NoSuchRun
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.trust import check_types
from prefect_raybatch.ledger.family import Family, Member, load_family, place
from prefect_raybatch.ledger.increments import AnswerPart, Answers, read_answers
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.ledger.same_job import difference
from prefect_raybatch.plan.prompt_lengths import PromptLengths
from prefect_raybatch.result.rows import reading_parquet
from prefect_raybatch.runs.run import run_keys
from prefect_raybatch.stages.raw_answers import KEY_COLUMN
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.storage.proof import CHUNK

log = logging.getLogger(__name__)
LATEST = "latest"
ANSWERS_A_BATCH = 16_384


@dataclass(frozen=True)
class Earlier:
    """Runs with raw answers, the one that was named first: `held` are (store, what it keeps) of
    those under the same context; `differs` the fields in which the first one's is another."""

    runs: tuple[str, ...] = ()
    plan: str | None = None
    held: tuple[tuple[Store, Answers], ...] = ()
    differs: tuple[str, ...] = ()

    @property
    def files(self) -> list[tuple[Store, Answers, AnswerPart]]:
        return [(store, answers, part) for store, answers in self.held for part in answers.files]

    @property
    def rows(self) -> int:
        return sum(part.rows for _, _, part in self.files)

    @property
    def seconds(self) -> float | None:
        """Engine time that an answer took, as the newest of them has measured it."""
        known = [answers.seconds for _, answers in self.held if answers.seconds is not None]
        return known[-1] if known else None

    def every_key(self) -> Iterator[list[bytes]]:
        """The keys of all answers, in the order of the files and of the rows in them."""
        for store, _, part in self.files:
            with (
                _named(store, part),
                store.open(part.path) as stream,
                pq.ParquetFile(stream, pre_buffer=False) as found,
            ):
                if found.metadata.num_rows != part.rows:
                    raise _changed(store, part)
                for batch in found.iter_batches(
                    ANSWERS_A_BATCH, columns=[KEY_COLUMN], use_threads=False
                ):
                    yield batch.column(0).to_pylist()


def find_earlier(
    job: BatchJob, run_key: str | None, context: str, parts: dict[str, Any]
) -> Earlier:
    """What `reuse` names. Raises `ConfigError` for a run that is not there, is not finished, or
    keeps no answers; `latest` without such a run is no error."""
    named = _named_run(job, run_key)
    if named is None:
        return Earlier()
    member, held = named
    first = held[0][1]
    differs = () if first.context == context else tuple(difference(first.parts, parts))
    same = tuple((store, answers) for store, answers in held if answers.context == context)
    names = tuple(store.uri for store, _ in held)
    return Earlier(names, member.plan.hash, same, differs)


def with_earlier_length(
    job: BatchJob, run_key: str | None, measured: PromptLengths
) -> PromptLengths:
    """The context length that `auto` comes to: that of the run whose answers are taken over, while
    tonight's prompts fit into it. Another length is another context, under which all is asked."""
    named = _named_run(job, run_key)
    before = named[1][0][1].parts.get("engine.max_model_len") if named is not None else None
    if not isinstance(before, int) or before <= measured.max_model_len:
        return measured
    why = f"that of the run whose answers are taken over; {measured.max_model_len:,} would do"
    return replace(measured, max_model_len=before, why=why)


def _named_run(
    job: BatchJob, run_key: str | None
) -> tuple[Member, list[tuple[Store, Answers]]] | None:
    """The run that `reuse` names, and what it and its retries keep; None for none."""
    if job.reuse is None:
        return None
    options = job.output.options or None
    if job.reuse == LATEST:
        root = open_store(job.output.uri, options)
        key = _latest(root, job.name, run_key)
        if key is None:
            return None
    else:
        root, key = place(job.reuse, options)
    try:
        family = load_family(root, key)
    except NoSuchRun as error:
        raise ConfigError(f"reuse: {error}") from None
    member = family.members[key]
    held = []
    for one in _with_retries(family, member):
        if one.summary is None:
            if one is member:
                raise ConfigError(
                    f"reuse: {one.ledger.store.uri} is not finished; finish it, or name another run"
                )
            continue
        answers = read_answers(one.ledger.store)
        if answers is not None and not answers.expired:
            held.append((one.ledger.store, answers))
        elif one is member:
            why = "kept no answers" if answers is None else "keeps its answers no longer"
            raise ConfigError(
                f"reuse: {one.ledger.store.uri} {why} (reuse, output.keep_answers); name another "
                "run, or latest"
            )
    return member, held


def _with_retries(family: Family, member: Member) -> Iterator[Member]:
    """A run, the runs that retried its failed rows, those that retried theirs, ..."""
    yield member
    for child in family.children(member.key):
        yield from _with_retries(family, child)


def _latest(root: Store, name: str, run_key: str | None) -> str | None:
    """The newest complete run of a job below `root` that still keeps answers."""
    found = []
    for key in run_keys(root):
        ledger = Ledger(root.sub(key))
        try:
            plan = ledger.load_plan()
            if plan is None or plan.job_name != name or plan.parent is not None or key == run_key:
                continue
            if plan.increment is None or ledger.finished(plan) is None:
                continue
            answers = read_answers(ledger.store)
        except CorruptRun as error:  # of another version, or not ours
            log.warning("reuse: latest passes over %s: %s", key, error)
            continue
        if answers is not None and not answers.expired:
            found.append((plan.created, key))
    return max(found)[1] if found else None


@contextmanager
def opened_answers(store: Store, part: AnswerPart) -> Iterator[Any]:
    """A file of raw answers, fetched to the local disk and proved to be what was written."""
    with tempfile.TemporaryFile(prefix="raybatch-") as local, _named(store, part):
        hashed = hashlib.sha256()
        with store.open(part.path) as stream:
            while chunk := stream.read(CHUNK):
                hashed.update(chunk)
                with local_disk():
                    local.write(chunk)
        if hashed.hexdigest() != part.sha256:
            raise _changed(store, part)
        local.seek(0)
        with pq.ParquetFile(local, pre_buffer=False) as found:
            check_types(found.schema_arrow, part.path)
            yield found


@contextmanager
def _named(store: Store, part: AnswerPart) -> Iterator[None]:
    try:
        with reading_parquet(f"{store.uri}/{part.path}"):
            yield
    except FileNotFoundError:
        raise CorruptRun(
            f"{store.uri}/{part.path}, raw answers of that run, is missing; name another run with "
            "reuse, or run without it"
        ) from None


def _changed(store: Store, part: AnswerPart) -> CorruptRun:
    return CorruptRun(
        f"{store.uri}/{part.path} is not what its run wrote, so its answers cannot be trusted; "
        "restore the file, name another run with reuse, or run without it"
    )
