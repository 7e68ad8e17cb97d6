"""Publishes a finished run to its targets, each once, and records it in the run directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.job.publish import PublishTarget
from prefect_raybatch.ledger.family import Member
from prefect_raybatch.ledger.published import (
    Published,
    read_published,
    record_published,
    replace_published,
)
from prefect_raybatch.ledger.success import check_parts
from prefect_raybatch.publish.base import AnsweredRows, Observe, Sink
from prefect_raybatch.publish.delta import DeltaSink
from prefect_raybatch.publish.files import FilesSink
from prefect_raybatch.publish.iceberg import IcebergSink
from prefect_raybatch.publish.lance_sets import LanceSink
from prefect_raybatch.publish.sql import SqlSink
from prefect_raybatch.result.rows import data_of, data_schema
from prefect_raybatch.schemes import options_for
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import contains

log = logging.getLogger(__name__)

SINKS: Mapping[str, type[Sink]] = {
    "delta": DeltaSink,
    "iceberg": IcebergSink,
    "sql": SqlSink,
    "lance": LanceSink,
    "parquet": FilesSink,
    "jsonl": FilesSink,
}
KEYS_NAMED = 3  # duplicate keys that an error shows


def open_sink(
    target: PublishTarget, run_key: str, options: StoreOptions, planned: bool = False
) -> Sink:
    """Return the sink of a target, with the placeholders in the target's fields filled in.

    `planned`: the sink is only to check a plan, before there is a result. Raises `ConfigError` for
    a missing library or environment variable.
    """
    filled = target.filled(run_key)
    # Without a uri, all options: only the catalog knows on which store its files are.
    given = filled.options or (options_for(filled.uri, options) if filled.uri else dict(options))
    sink = SINKS[target.format](filled, given, planned)
    sink.need_library()
    return sink


def check_publish(
    targets: Sequence[PublishTarget],
    run_key: str,
    options: StoreOptions,
    schema: pa.Schema,
    whole: bool = True,
    look: Callable[[PublishTarget, Sequence[str]], None] = lambda target, never_null: None,
) -> list[str]:
    """Check that columns `schema` can be published; return a line about each target.

    `whole`: `schema` has all columns of the result. Writes nothing. `look` is called with each
    target and the columns in which its table accepts no null, to check their values. Raises
    `ConfigError` if publishing would fail, `PublishFailed` for a target that does not answer.
    """
    sinks = [open_sink(target, run_key, options, planned=True) for target in targets]
    _check_apart(sinks)
    lines = []
    for target, sink in zip(targets, sinks, strict=True):
        lines.append(f"{target.label}: {target.place(run_key)} {sink.check(schema, whole)}")
        look(target, sink.never_null)
    return lines


def _check_apart(sinks: Sequence[Sink]) -> None:
    """Raise `ConfigError` if two targets write to the same table or folder.

    Raises it also if one target's folder is inside another's, where readers would see the rows
    twice. A Parquet and a JSON Lines target may share a folder.
    """
    for at, first in enumerate(sinks):
        for second in sinks[at + 1 :]:
            (kind, *one), (other_kind, *other) = first.place(), second.place()
            formats = {first.target.format, second.target.format}
            if formats == {"parquet", "jsonl"}:
                continue
            folders = kind == other_kind == "folder"
            if one == other and kind == other_kind:
                fault = "write to the same place"
            elif folders and (contains(one[0], other[0]) or contains(other[0], one[0])):
                fault = "write to a folder and to one inside it"
            else:
                continue
            raise ConfigError(
                f"output.publish: the targets {first.target.label!r} and {second.target.label!r} "
                f"{fault}: {second.target.place('{run_key}')}. Move or remove one of them"
            )


def publish(
    member: Member,
    targets: Sequence[PublishTarget],
    options: StoreOptions,
    observe: Observe = lambda step: None,
) -> list[Published]:
    """Publish a finished run to each target that lacks its rows; return a record for each target.

    `options` apply to targets without their own; `observe` is called at each step. Safe to call
    concurrently, and again after any crash. Raises `ConfigError`, `PublishFailed`, `CorruptRun` if
    the run is unfinished or damaged, and the store's errors. Targets published before the error
    stay recorded.
    """
    store, plan = member.ledger.store, member.plan
    rows: AnsweredRows | None = None
    sinks = [open_sink(target, plan.run_key, options) for target in targets]
    _check_apart(sinks)
    done = []
    for target, sink in zip(targets, sinks, strict=True):
        record = read_published(store, target.label)
        if record is not None:
            _check_record(record, target, plan.hash, plan.run_key, store.uri)
            if not record.rows or sink.holds(plan.hash, record.version):
                done.append(record)
                continue
            log.warning(
                "%s: the target no longer has the rows of run %s. Publishing them again",
                target.label,
                plan.run_key,
            )
        rows = rows or _rows(member)
        version = ""
        if rows.count:
            sink.check(rows.schema)
            _check_keys(target, rows)
            before = "" if record is None else record.version
            version = sink.publish(replace(rows, recorded=before), observe)
        observe("recording")
        published = _record(target, rows, version)
        record = (
            record_published(store, published)
            if record is None
            else replace_published(store, published)
        )
        _check_record(record, target, plan.hash, plan.run_key, store.uri)
        done.append(record)
    return done


def _record(target: PublishTarget, rows: AnsweredRows, version: str) -> Published:
    return Published(
        target=target.label,
        format=target.format,
        place=target.place(rows.run_key),
        mode=target.mode,
        plan=rows.plan,
        rows=rows.count,
        version=version,
        at=time.time(),
    )


def _rows(member: Member) -> AnsweredRows:
    if member.summary is None:
        raise CorruptRun(f"{member.ledger.store.uri} is not finished: it has no _SUCCESS")
    check_parts(member.ledger.store, member.summary.parts)
    return AnsweredRows(
        plan=member.plan.hash,
        run_key=member.plan.run_key,
        job=member.plan.job_name,
        count=member.summary.data,
        schema=data_schema(member),
        read=lambda: data_of(member),
    )


def _check_record(
    record: Published, target: PublishTarget, plan: str, run_key: str, where: str
) -> None:
    if record.plan != plan:
        raise CorruptRun(
            f"{where}: the record of target {target.label!r} was written for another plan"
        )
    if (record.format, record.place) != (target.format, target.place(run_key)):
        raise ConfigError(
            f"output.publish: {target.label}: this run was published under this name to "
            f"{record.format} {record.place}. Set another name for the new target"
        )


def _check_keys(target: PublishTarget, rows: AnsweredRows) -> None:
    """Raise `ConfigError` unless the target's key is unique and never null.

    All keys are held in memory.
    """
    if target.key:
        tables = [pa.Table.from_batches([batch.select(target.key)]) for batch in rows.read()]
        check_unique(target, pa.concat_tables(tables), "the result")


def check_unique(target: PublishTarget, keys: pa.Table, where: str) -> None:
    """Raise `ConfigError` unless the target's key is unique and never null in `keys`.

    `where` names the rows in the error.
    """
    for name in target.key:
        if nulls := keys[name].null_count:
            raise ConfigError(
                f"output.publish: {target.label}: key column {name!r} is null in {nulls:,} rows of "
                f"{where}. Merge by a column without nulls, or fill it in output.postprocess"
            )
    counts = keys.group_by(target.key, use_threads=False).aggregate([([], "count_all")])
    # By position: a key may have the name of the count.
    keyed = len(target.key)
    twice = counts.filter(pc.greater(counts.column(keyed), 1)).select(range(keyed))
    if len(twice):
        shown = twice.rename_columns(target.key).slice(0, KEYS_NAMED).to_pylist()
        named = "; ".join(", ".join(f"{k}={v!r}" for k, v in row.items()) for row in shown)
        raise ConfigError(
            f"output.publish: {target.label}: the key {', '.join(target.key)} is not unique in "
            f"{where}: {len(twice):,} values occur more than once ({named}). Merge by unique "
            "columns, such as the input's own id"
        )
