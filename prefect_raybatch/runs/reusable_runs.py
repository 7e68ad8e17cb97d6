"""Finds the earlier runs whose raw answers a run reuses.

These are one run and its retries of failed rows or, with `reuse: all`, all runs of the job.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from prefect_raybatch.errors import ConfigError, CorruptRun, NoSuchRun
from prefect_raybatch.job.column_types import check_types
from prefect_raybatch.job.placeholders import start_of_key
from prefect_raybatch.ledger.family import (
    Family,
    Member,
    former_families,
    load_family,
    locate_run,
)
from prefect_raybatch.ledger.forks import follow_forks, forks_of
from prefect_raybatch.ledger.increments import AnswerPart, Answers, read_answers
from prefect_raybatch.ledger.layout import REUSED_FOLDER
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.part_files import local_disk
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.ledger.same_job import difference
from prefect_raybatch.plan.prompt_lengths import PromptLengths
from prefect_raybatch.result.rows import reading_parquet
from prefect_raybatch.runs.run import run_keys
from prefect_raybatch.spec.result import OutputSpec
from prefect_raybatch.stages.columns import KEY_TYPE
from prefect_raybatch.stages.raw_answers import KEY_COLUMN
from prefect_raybatch.storage import Store, open_store
from prefect_raybatch.storage.proof import CHUNK

log = logging.getLogger(__name__)
LATEST, EVERY_RUN = "latest", "all"
ANSWERS_A_BATCH = 16_384

RunAnswers = list[tuple[Store, Answers]]


class DamagedAnswers(CorruptRun):
    """Stored answers of an earlier run are missing or changed; `run` is that run's URI."""

    run = ""


def damaged(store: Store, text: str) -> DamagedAnswers:
    """Return a `DamagedAnswers` with this text and the URI of the run at `store`."""
    error = DamagedAnswers(text)
    error.run = store.uri
    return error


def log_skipped_run(error: DamagedAnswers) -> None:
    """Log that the answers of a run are damaged and not reused."""
    log.warning(
        "reuse: the answers of %s are not reused, so its rows are asked again: %s",
        *(error.run, error),
    )


@dataclass(frozen=True)
class ReusableRuns:
    """Earlier runs with raw answers: the one that the job's `reuse` names, then its retries.

    With `reuse: all` (`every_run`), they are all runs of the job that keep answers, newest first.
    `runs` has the URIs of all of them. The context of a run is the hash of what all its requests
    have in common (model, sampling, ...). Only answers from the new run's context can be reused:
    `held` has (store, record of answers) of each run of `runs` with that context. If the first run
    of `runs` has another context, `differs` names the job fields in which it differs from the new
    run; else it is ().
    """

    runs: tuple[str, ...] = ()
    held: tuple[tuple[Store, Answers], ...] = ()
    differs: tuple[str, ...] = ()
    every_run: bool = False

    @property
    def files(self) -> list[tuple[Store, Answers, AnswerPart]]:
        """Return (store, record of answers, file) of each file of answers, newest run first.

        If several files have an answer to the same greedy request, the first of them is reused.
        """
        return [(*pair, part) for pair in self._newest_first for part in pair[1].files]

    @property
    def _newest_first(self) -> tuple[tuple[Store, Answers], ...]:
        return self.held if self.every_run else self.held[::-1]

    @property
    def rows(self) -> int:
        return sum(part.rows for _, _, part in self.files)

    @property
    def seconds(self) -> float | None:
        """Return the GPU-seconds per answer of the newest run that recorded them, or None."""
        known = (answers.seconds for _, answers in self._newest_first)
        return next((seconds for seconds in known if seconds is not None), None)

    def every_key(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """Yield the request keys of stored answers, in batches, each with a bool array.

        The array says which of these answers may be reused. The keys are in the order of `files`
        and of the rows in each file. Raises `DamagedAnswers` if a file cannot be read. Checksums
        are not compared here, but later, when answers are copied.
        """
        for store, answers, part in self.files:
            with (
                _reading(store, part),
                store.open(part.path) as stream,
                pq.ParquetFile(stream, pre_buffer=False) as found,
            ):
                usable, at = answers.usable(part), 0
                if found.metadata.num_rows != part.rows:
                    raise _changed(store, part)
                for batch in found.iter_batches(
                    ANSWERS_A_BATCH, columns=[KEY_COLUMN], use_threads=False
                ):
                    keys = batch.column(0)
                    if keys.type != KEY_TYPE or keys.null_count:
                        raise _changed(store, part)
                    yield keys.to_pylist(), usable[at : at + len(keys)]
                    at += len(keys)


def find_reusable_runs(
    reused: str | None,
    output: OutputSpec,
    name: str,
    run_key: str | None,
    context: str,
    parts: JsonObject,
    skipped: Collection[str] = (),
) -> ReusableRuns:
    """Return the runs below `output` whose answers the new run `run_key` of the job `name` reuses.

    `reused` is the job's `reuse`: a run, "latest", "all", or None for none. `context` is the hash
    of `parts`, which are the values (model, sampling, ...) that all requests of the new run have in
    common. Runs whose URI is in `skipped` are left out. Raises `ConfigError` for a named run that
    is missing, unfinished, or keeps no answers; finding none for "latest" or "all" is no error.
    """
    held = _stored_answers(reused, output, name, run_key, skipped)
    if held is None:
        return ReusableRuns()
    first = held[0][1]
    differs = () if first.context == context else tuple(difference(first.parts, parts))
    same = tuple((store, answers) for store, answers in held if answers.context == context)
    names = tuple(store.uri for store, _ in held)
    return ReusableRuns(names, same, differs, reused == EVERY_RUN)


def with_reused_context(
    reused: str | None,
    output: OutputSpec,
    name: str,
    run_key: str | None,
    measured: PromptLengths,
) -> PromptLengths:
    """Return `measured` with the max_model_len of the run whose answers are reused, if larger.

    Answers of a run with another max_model_len could not be reused. `reused`, `output`, `name` and
    `run_key` are explained in `find_reusable_runs`.
    """
    held = _stored_answers(reused, output, name, run_key)
    before = held[0][1].parts.get("engine.max_model_len") if held is not None else None
    if not isinstance(before, int) or before <= measured.max_model_len:
        return measured
    why = f"as in the run with the reused answers; {measured.max_model_len:,} would be enough"
    return replace(measured, max_model_len=before, why=why)


def _stored_answers(
    reused: str | None,
    output: OutputSpec,
    name: str,
    run_key: str | None,
    skipped: Collection[str] = (),
) -> RunAnswers | None:
    """Return a list of (store, record of answers) of the run `reused`, then of its retries.

    `reused` may be "latest" for the newest run of the job `name` with intact answers, or "all" for
    all its runs that keep answers, newest first. Run `run_key` and runs whose URI is in `skipped`
    are left out. Returns None if `reused` is None, if the answers of the named run are damaged, or
    if no run is found for "latest" or "all". Raises `ConfigError` for a named run that is missing,
    unfinished or keeps no answers.
    """
    if reused is None:
        return None
    options = dict(output.options) or None
    if reused in (LATEST, EVERY_RUN):
        every = reused == EVERY_RUN
        root = open_store(output.uri, options)
        newest = _newest_first(root, name, run_key, retries=every)
        if every:
            stores = [(root.sub(key), _without_reused(answers)) for key, answers in newest]
            return [pair for pair in stores if pair[0].uri not in skipped] or None
        keys = [key for key, _ in newest]
    else:
        root, key = locate_run(reused, options)
        keys = [_follow_forks(root, key)]
    for key in keys:
        try:
            return _kept_by(root, key, skipped)
        except DamagedAnswers as error:
            if error.run not in skipped:
                log_skipped_run(error)
    return None


def _without_reused(answers: Answers) -> Answers:
    """Return the record without answers that the run copied from an earlier one.

    With `reuse: all`, each answer is read from the run that sent its request, because a sampled
    answer may be reused for one row only.
    """
    own = tuple(part for part in answers.files if not part.path.startswith(f"{REUSED_FOLDER}/"))
    return replace(answers, files=own)


def _kept_by(root: Store, key: str, skipped: Collection[str]) -> RunAnswers:
    """Return (store, record of answers) of run `key` and of each of its retries that keeps answers.

    A damaged or unfinished retry is left out. Raises `DamagedAnswers` if the run's records or
    answers are damaged. Raises `ConfigError` if the run does not exist, is not finished or keeps no
    answers.
    """
    uri = root.sub(key).uri
    try:
        family = load_family(root, key)
    except NoSuchRun as error:
        raise ConfigError(f"reuse: {error}") from None
    except CorruptRun as error:
        raise damaged(root.sub(key), str(error)) from None
    member = family.members[key]
    held: RunAnswers = []
    for one in (member, *_retries(root, family, member)):
        store = one.ledger.store
        if one.summary is None:
            if one is member:
                raise ConfigError(f"reuse: {uri} is not finished. Finish it, or name another run")
            continue
        try:
            if store.uri in skipped:
                raise damaged(store, "its answers are damaged")
            answers = _answers_of(store)
        except DamagedAnswers as error:
            if one is member:
                raise
            if store.uri not in skipped:
                log_skipped_run(error)
            continue
        if answers is not None and not answers.expired:
            held.append((store, answers))
        elif one is member:
            why = "kept no answers" if answers is None else "has deleted its answers by now"
            raise ConfigError(
                f"reuse: {uri} {why} (see output.keep_answers). Name another run, or use `latest`"
            )
    return held


def _answers_of(store: Store) -> Answers | None:
    try:
        return read_answers(store)
    except CorruptRun as error:
        raise damaged(store, str(error)) from None


def _retries(root: Store, family: Family, member: Member) -> Iterator[Member]:
    """Yield the retries of a run, each before its own retries.

    If the run was forked from damaged runs, the retries of these runs follow.
    """
    yield from _descendants(family, member.key)
    for former in former_families(root, member.plan):
        yield from _descendants(former, former.base)


def _descendants(family: Family, key: str) -> Iterator[Member]:
    for child in family.children(key):
        yield child
        yield from _descendants(family, child.key)


def _follow_forks(root: Store, key: str) -> str:
    """Return the key of the finished run that supersedes run `key`, else `key` itself."""
    ledger = Ledger(root.sub(key))
    with suppress(CorruptRun):
        plan = ledger.load_plan()
        if plan is not None:
            fork, its_plan = follow_forks(ledger, plan)
            if fork.finished(its_plan) is not None:
                return its_plan.run_key
    return key


def _newest_first(
    root: Store, name: str, run_key: str | None, retries: bool
) -> list[tuple[str, Answers]]:
    """Return (key, record of answers) of the job's complete runs that keep answers, newest first.

    `name` is the job's name. Leaves out run `run_key` and, unless `retries`, runs that retry failed
    rows. Unreadable runs are skipped with a warning.
    """
    found: list[tuple[tuple[datetime, int, float, str], tuple[str, Answers]]] = []
    for key in run_keys(root):
        ledger = Ledger(root.sub(key))
        try:
            plan = ledger.load_plan()
            if plan is None or plan.job_name != name or key == run_key:
                continue
            if plan.parent is not None and not retries:
                continue
            if plan.run_key != key:  # a link to a run, or a copy of one
                continue
            if plan.increment is None or (success := ledger.finished(plan)) is None:
                continue
            answers = read_answers(ledger.store)
        except CorruptRun as error:  # damaged, of another version, or not ours
            log.warning("reuse: run %s is skipped: %s", key, error)
            continue
        if answers is not None and answers.files and not answers.expired:
            order = (intended_time(plan), forks_of(key), success.finished, key)
            found.append((order, (key, answers)))
    return [run for _, run in sorted(found, key=itemgetter(0), reverse=True)]


def intended_time(plan: Plan) -> datetime:
    """Return the date and time for which a run was made.

    This is the scheduled start in a default run key, so that a late run counts for its schedule.
    For another run key, it is the time of planning; a repaired run has the time of the original.
    """
    start = start_of_key(plan.run_key)
    if start is not None:
        return start
    try:
        planned = datetime.fromisoformat(plan.first_created)
    except ValueError:
        raise CorruptRun(f"plan.json: `created` must be a time, but is {plan.created!r}") from None
    return planned if planned.tzinfo else planned.replace(tzinfo=UTC)


@contextmanager
def opened_answers(store: Store, part: AnswerPart) -> Iterator[Any]:
    """Download a file of raw answers to the local disk; yield it as an open Parquet file.

    Raises `DamagedAnswers` if it is missing or was changed.
    """
    with tempfile.TemporaryFile(prefix="raybatch-") as local, _reading(store, part):
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
def _reading(store: Store, part: AnswerPart) -> Iterator[None]:
    """Turn errors in the block that show a missing or broken file into `DamagedAnswers`."""
    try:
        with reading_parquet(f"{store.uri}/{part.path}"):
            yield
    except FileNotFoundError:
        raise damaged(store, f"{store.uri}/{part.path} is missing") from None
    except DamagedAnswers:
        raise
    except (CorruptRun, KeyError) as error:  # KeyError: the column of the keys is not there
        raise damaged(store, str(error)) from None


def _changed(store: Store, part: AnswerPart) -> DamagedAnswers:
    return damaged(store, f"{store.uri}/{part.path} was changed after its run wrote it")
