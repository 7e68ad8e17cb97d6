"""Repairs a damaged run by a fork: a new run that begins with the intact shards.

The damaged run is not repaired in place: its result may hold rows of the lost shards already, and
rows inferred again would then exist twice. The fork has the same input and the same shards. In the
fork, lost shards are pending, so it is resumed, finished and verified like any run.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from prefect_raybatch.errors import ConfigError, CorruptRun, PlanMismatch
from prefect_raybatch.job.checks import check_run_key
from prefect_raybatch.ledger.accepted import accepted_note, all_accepted
from prefect_raybatch.ledger.family import Member, check_named, load_family, locate_run
from prefect_raybatch.ledger.forks import fork_key, forked, key_to_continue, supersede
from prefect_raybatch.ledger.increments import (
    Increment,
    begin_requests_phase,
    increment_of,
    requests_ledger,
)
from prefect_raybatch.ledger.layout import OUTPUT_SCHEMA, PUBLISHED, PUBLISHED_NAME, piece_path
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.missing import need_plan
from prefect_raybatch.ledger.precision import PrecisionNote, read_precision, record_precision
from prefect_raybatch.ledger.record_files import put_record_if_absent, put_table, read_record
from prefect_raybatch.ledger.records import FORMAT, JsonObject, Piece, Plan, Receipt, digest, dump
from prefect_raybatch.ledger.success import read_success
from prefect_raybatch.result.healthy import FaultHandler, IntactShard, intact_shards
from prefect_raybatch.result.verify_records import (
    StoredAnswers,
    check_answers,
    check_reports,
    check_tables,
)
from prefect_raybatch.runs.restore_records import (
    restore_answers,
    restore_precision,
    restore_records,
)
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import Store, Sums, put_file_proved, put_proved
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)

MAX_FAULTS_LISTED = 20  # most faults in the outcome
REPAIR = "repair"  # attempt of a fork that has the accepted differences of the old run


@dataclass(frozen=True)
class Repaired:
    """The outcome of a repair, which may create a fork: a new run with the intact shards.

    `run` is the URI of the damaged run. `run_key` is the key of the fork, None if no fork was
    needed. `shards` is the run's number of shards. `taken` is how many of them were intact and are
    in the fork. `lost` are the numbers of the damaged ones. `faults` says what is damaged (up to
    MAX_FAULTS_LISTED). `published` names the targets that have rows of the damaged run. `retries`
    are the keys of its retries. `restored` says which records were restored in the damaged run.

    `continue_as` is the run key with which `raybatch run` continues the fork, None without a fork.
    The placeholder {run_key} in the job stands for this key, too.
    """

    run: str
    run_key: str | None
    shards: int
    taken: int
    lost: tuple[int, ...]
    faults: tuple[str, ...]
    published: tuple[str, ...] = ()  # targets that have rows of the old run
    restored: tuple[str, ...] = ()
    retries: tuple[str, ...] = ()  # run keys of retries of the old run
    continue_as: str | None = None

    def to_dict(self) -> JsonObject:
        return asdict(self)


def repair_run(run_dir: str, options: StoreOptions | None = None) -> Repaired:
    """Repair a damaged run with a fork that begins with its intact shards.

    A run is damaged if a commit, piece, table or result file is missing or changed. An interrupted
    repair is continued; an intact run stays unchanged. If a finished run lost only raw answers or
    records, no fork is made: answers.json is rewritten to name the intact answers, and damaged row
    checksums, precision.json and report.json are recreated. Raises `ConfigError` for a run that
    cannot be forked, `CorruptRun` if its plan or anything that cannot be restored is unreadable.
    """
    root, key = locate_run(run_dir, options)
    old = Ledger(root.sub(key))
    plan = need_plan(old)
    check_named(old, plan)
    _check_alone(plan, old.store.uri)
    member = Member(key, old, plan, read_success(old.store, plan))
    faults: list[str] = []

    def fault(text: str) -> None:
        if text not in faults and len(faults) < MAX_FAULTS_LISTED:
            faults.append(text)

    lost = _lost(member, fault)
    check_tables(old, plan, member.summary, fault)
    answers = check_answers(old, plan, member.summary is not None)
    told: list[str] = []
    check_reports(old, plan, member.summary, told.append)
    if member.summary is not None and not lost and not faults:
        restored = restore_answers(old, plan, member.summary, answers)
        restored += restore_records(old, plan, member.summary)
        faults = [*answers.faults, *told][:MAX_FAULTS_LISTED]
        return Repaired(old.store.uri, None, plan.shards, 0, (), tuple(faults), restored=restored)
    asks = _asks(old, increment_of(plan), fault)
    if asks is not None and member.summary is None:  # rows will still look up answers
        _lost(asks, fault)
    for text in answers.faults:
        fault(text)
    if not lost and not faults:
        if told:
            raise _undecided(told[0])
        return Repaired(old.store.uri, None, plan.shards, 0, (), ())
    if any(_finished_since(one) for one in (member, asks) if one is not None):
        return repair_run(run_dir, options)  # its driver has removed the pieces that seem lost
    _prepare_fork(member, asks, answers)
    fork, taken = _fork(root, member, asks)
    return Repaired(
        *(old.store.uri, fork, plan.shards, taken, lost, tuple(faults)),
        published=_published_targets(old.store),
        retries=tuple(load_family(root, key).members)[1:],
        continue_as=key_to_continue(root, plan, fork),
    )


def _published_targets(store: Store) -> tuple[str, ...]:
    """Return the names of the targets that have rows of the run in `store`."""
    names = (PUBLISHED_NAME.match(info.path) for info in store.list(PUBLISHED))
    return tuple(name[1] for name in names if name)


def _fork(root: Store, member: Member, requests_run: Member | None) -> tuple[str, int]:
    """Create or complete the fork of a damaged run; return (its key, number of its commits).

    `requests_run` is the damaged run's requests phase, None if it has none. Raises `PlanMismatch`
    if the fork's directory holds another run.
    """
    old, plan = member.ledger, member.plan
    key = fork_key(member.key)
    ours = Ledger(root.sub(key))
    fork = ours.load_plan() or _begin(old, ours, plan, key)
    if fork.forked_from != forked(plan):
        raise PlanMismatch(
            f"{ours.store.uri} exists already and is not a repair of {old.store.uri}. Move it away"
        )
    increment = increment_of(plan)
    if increment is not None and requests_run is not None:
        _fork_requests_phase(requests_run, ours, increment)
    taken = _commit_intact_shards(member, ours, fork)
    supersede(old, fork.run_key)
    return fork.run_key, taken


def _check_alone(plan: Plan, where: str) -> None:
    """Raise `ConfigError` for a retry of failed rows, which cannot be repaired.

    `where` is the URI of the run.
    """
    if plan.parent is not None:
        raise ConfigError(
            f"{where} retries failed rows of {plan.parent}, and retries cannot be repaired. Move "
            f"it away and retry the rows again (raybatch retry-failed on {plan.parent})"
        )


def _prepare_fork(member: Member, requests_run: Member | None, answers: StoredAnswers) -> None:
    """Check that the damaged run `member` can be forked.

    Raises `ConfigError` if the key of the fork would be too long, or if the run is finished and all
    its raw answers are lost. If a finished run passes the check, its damaged records of the
    decision on precision are restored.
    """
    uri = member.ledger.store.uri
    try:
        check_run_key(fork_key(member.key))
    except ConfigError as error:
        raise ConfigError(
            f"{uri} cannot be repaired under a key of its own ({error}). Run the job again under a "
            "new run key"
        ) from None
    if member.summary is None:
        return
    if requests_run is not None:
        _check_answers(requests_run, answers)
    for one in (member, requests_run):
        if one is not None:
            restore_precision(one.ledger.store, one.plan)


def _asks(old: Ledger, increment: Increment | None, fault: FaultHandler) -> Member | None:
    """Return a run's requests phase; None if it has none.

    The requests phase is a run inside the run directory. It sends the requests whose answers the
    run's rows look up. `fault` is called with the error if the `_SUCCESS` of that phase is damaged.
    The phase is then returned as unfinished.
    """
    if increment is None or increment.asks is None:
        return None
    ledger, plan = requests_ledger(old.store), Plan.from_bytes(dump(increment.asks))
    try:
        return Member("asks", ledger, plan, read_success(ledger.store, plan))
    except CorruptRun as error:
        fault(str(error))
        return Member("asks", ledger, plan, None)


def _lost(member: Member, fault: FaultHandler) -> tuple[int, ...]:
    """Return the numbers of the lost shards.

    A shard is lost if its commit, a piece or a result file with its rows is missing or changed. In
    an unfinished run, a shard without a commit is pending and not lost. `fault` is called with a
    text on each fault.
    """
    committed = member.ledger.committed(member.plan)
    if member.summary is not None and not committed.all():
        absent = np.flatnonzero(~committed)
        fault(f"the commits of {counted(len(absent), 'shard')} are missing (first: {absent[0]})")
        committed[:] = True
    for whole in intact_shards(member, fault):
        committed[whole.commit.shard] = False
    return tuple(np.flatnonzero(committed).tolist())


def _finished_since(member: Member) -> bool:
    """Return whether a run that was unfinished when `member` was read is finished now."""
    with suppress(CorruptRun):  # a damaged _SUCCESS is noted among the faults
        return member.summary is None and read_success(member.ledger.store, member.plan) is not None
    return False


def _check_answers(requests_run: Member, answers: StoredAnswers) -> None:
    """Raise `ConfigError` if the requests phase has no intact shard: all answers are lost."""
    faults: list[str] = []
    if next(intact_shards(requests_run, faults.append), None) is None:
        why = "have been deleted"
        if not answers.gone:
            first = next(iter(answers.faults or faults), "none of them is intact")
            why = f"are damaged as well ({first})"
        raise ConfigError(
            f"{requests_run.ledger.store.uri}: the raw answers {why}, so lost rows cannot be "
            f"restored from them, and all {requests_run.plan.rows:,} requests would be asked "
            "again. Run the job again under a new run key"
        )


def _begin(old: Ledger, fork_ledger: Ledger, plan: Plan, key: str) -> Plan:
    """Copy the old run's snapshot, tables, reused answers and schema to a fork; write its plan.

    Returns the fork's plan. `plan` is the old run's plan, `key` is the fork's key. The accepted
    differences between job and plan are copied, too: they are recorded as an attempt at the fork.
    Raises `CorruptRun` if something to copy is lost.
    """
    fork_ledger.store.probe()
    if plan.snapshot:
        for file in old.files(plan):
            _copy(old, fork_ledger, file.uri)
    if (increment := increment_of(plan)) is not None:
        for name in increment.tables:
            put_table(fork_ledger.store, name, _table(old, name))
        for part in increment.reused:
            _copy(old, fork_ledger, part.path, part.sha256)
    try:
        put_record_if_absent(
            fork_ledger.store, OUTPUT_SCHEMA, read_record(old.store, OUTPUT_SCHEMA)
        )
    except FileNotFoundError:
        log.info("%s has no schema for its answers yet", old.store.uri)
    if (decided := _decision(old.store)) is not None:  # the precision of copied answers
        record_precision(fork_ledger.store, decided)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    if accepted := accepted_note(all_accepted(old)):  # holds for the copied rows
        fork_ledger.note_attempt(REPAIR, {"started": now, **accepted})
    fork = replace(
        plan,
        run_key=key,
        created=now,
        format=FORMAT,
        forked_from=forked(plan),
        original_created=plan.first_created,
    )
    return fork_ledger.create_plan(fork, {name: _table(old, name) for name in plan.tables})


def _fork_requests_phase(requests_run: Member, fork_ledger: Ledger, increment: Increment) -> None:
    """Create or complete the fork's requests phase from intact shards of the old requests phase."""
    ledger = requests_ledger(fork_ledger.store)
    if ledger.load_plan() is None:
        named = increment_of(requests_run.plan)
        for name in {*requests_run.plan.tables, *(named.tables if named is not None else ())}:
            put_table(ledger.store, name, _table(requests_run.ledger, name))
        own_input = increment.looks_up  # both models of a cascade read the run's input
        for file in requests_run.ledger.files(requests_run.plan) if own_input else ():
            _copy(requests_run.ledger, ledger, file.uri)
        if (decided := _decision(requests_run.ledger.store)) is not None:
            record_precision(ledger.store, decided)
    begin_requests_phase(fork_ledger.store, increment)
    _commit_intact_shards(requests_run, ledger, requests_run.plan)


def _decision(store: Store) -> PrecisionNote | None:
    """Return the run's decision on `try-fp8`, None if it has none.

    Raises `CorruptRun`, which says what to do, if the record is damaged.
    """
    try:
        return read_precision(store)
    except CorruptRun as error:
        raise _undecided(str(error)) from None


def _undecided(text: str) -> CorruptRun:
    return CorruptRun(
        f"{text}. Nothing else records the precision of an unfinished run: if the file is lost, "
        "run the job under a new run key"
    )


def _table(old: Ledger, name: str) -> bytes:
    """Return the bytes of a table of the old run; raise `CorruptRun` if it is lost."""
    try:
        return old.table(name)
    except CorruptRun as error:
        raise CorruptRun(
            f"{old.store.uri}: {error}. It cannot be restored. Run the job under a new run key"
        ) from None


def _copy(old: Ledger, fork_ledger: Ledger, path: str, sha256: str | None = None) -> None:
    what = "the copy of the input" if sha256 is None else "the reused answers"
    where, advice = f"{old.store.uri}/{path}, {what},", "Run the job under a new run key"
    try:
        with old.store.open(path) as stream, tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "copy"
            with local.open("wb") as copy:
                shutil.copyfileobj(stream, copy)
            with local.open("rb") as copy:
                sums = Sums.of_stream(copy)
            if sha256 not in (None, sums.sha256):
                raise CorruptRun(f"{where} differs from its checksum in plan.json. {advice}")
            put_file_proved(fork_ledger.store, path, local, sums)
    except FileNotFoundError:
        raise CorruptRun(f"{where} is missing, so no row can be asked again. {advice}") from None


def _commit_intact_shards(member: Member, fork_ledger: Ledger, plan: Plan) -> int:
    """Commit the intact shards of `member` in the fork; return the fork's number of commits."""
    shards, done = fork_ledger.shards(plan), fork_ledger.committed(plan)
    for whole in intact_shards(member, lambda text: None):
        shard = whole.commit.shard
        if done[shard]:
            continue
        receipt = replace(_receipt(whole), pieces=tuple(_pieces(fork_ledger, whole)))
        fork_ledger.commit(plan, shards[shard].rows, [receipt])
        done[shard] = True
    return int(np.count_nonzero(done))


def _receipt(shard: IntactShard) -> Receipt:
    commit = shard.commit
    return Receipt(
        shard=commit.shard,
        attempt=commit.attempt,
        good=commit.good,
        failed=commit.failed,
        skipped=commit.skipped,
        stats=commit.stats,
        failures=commit.failures,
        where=commit.where,
    )


def _pieces(fork_ledger: Ledger, shard: IntactShard) -> Iterator[Piece]:
    """Write the rows of an intact shard as new pieces of the fork; yield their records."""
    for held in shard.encoded_rows:
        name = f"{shard.commit.shard:08d}-{uuid.uuid4().hex}.parquet"
        put_proved(fork_ledger.store, piece_path(name), held.data)
        rows, size = len(held.positions), len(held.data)
        yield Piece(name, held.kind, rows, size, digest(held.data), held.positions)
