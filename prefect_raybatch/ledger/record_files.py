"""Read and write records, with a size limit for each kind.

A reader does not trust a run directory, so each kind of record has a largest size. A larger record
is refused before it is written, since nobody could continue the run afterwards.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.ledger import layout
from prefect_raybatch.storage import Store, put_proved, put_same_proved


class Kind(NamedTuple):
    """A kind of record: the `prefix` of its paths, and the `limit` of its size in bytes.

    `change` tells the user what to do about a larger record.
    """

    prefix: str
    limit: int
    change: str


_URIS = "source.uri lists too many files. Name their folder or a glob"
_PARTS = "The result has too many files. Raise output.file_mb under a new run key"
_NAMES = "Shorten the names of this host and user"
RECORD_KINDS = (
    Kind(layout.PLAN, 64 << 20, _URIS),
    # A commit of 1,000,000 rows, the most a shard may have, needs 0.7 MB and 160 bytes for each
    # piece beyond the fourth.
    Kind(f"{layout.COMMITS}/", 8 << 20, "Lower source.rows_per_shard under a new run key"),
    Kind(layout.LAYOUT, 4 << 20, "Return fewer columns from output.postprocess"),
    Kind(f"{layout.PART_NOTES}/", 1 << 16, "No action needed: a resume takes longer"),
    Kind(layout.SUCCESS, 64 << 20, _PARTS),
    Kind(layout.REPORT, 64 << 20, _PARTS),
    Kind(layout.ANSWERS_RECORD, 64 << 20, _PARTS),
    Kind(layout.BY_ROW_RECORD, 64 << 20, _PARTS),
    Kind(f"{layout.JOBS}/", 64 << 20, _URIS),
    Kind(layout.QUALITY, 1 << 20, "Name fewer columns in quality.key"),
    Kind(layout.SENT_EVENTS, 1 << 16, "Remove the file; the events are sent again"),
    Kind(layout.JUDGEMENT, 1 << 20, "Name fewer columns in quality.judge.prompt"),
    Kind(layout.AGREEMENT_RECORD, 1 << 20, "Choose shorter run keys"),
    Kind(layout.PRECISION, 1 << 20, "Remove try-fp8"),
    Kind(layout.ARRANGEMENT, 1 << 20, "Set engine.learn: false"),
    Kind(f"{layout.PARTIAL_FOLDER}/", 64 << 20, _PARTS),
    Kind(f"{layout.COPIED}/", 64 << 20, "Name fewer columns in source.columns"),
    Kind(layout.DRAIN, 1 << 20, "This run has too many attempts. Choose a new run key"),
    Kind(layout.SUPERSEDED_BY, 1 << 16, "Choose a shorter run key"),
    Kind(f"{layout.PUBLISHED}/", 1 << 16, "Shorten the uri in output.publish"),
    Kind(f"{layout.CHECKPOINTS}/", 64 << 20, "No action needed: a resume takes longer"),
    Kind(f"{layout.ATTEMPTS}/", 1 << 20, _NAMES),
    Kind(layout.LAST_ATTEMPT, 1 << 16, _NAMES),
    Kind(layout.PLANNED_BY, 1 << 16, _NAMES),
    Kind(f"{layout.HEARTBEATS}/", 1 << 16, "No action needed: the run continues without it"),
    Kind(layout.OUTPUT_SCHEMA, 1 << 20, "Return fewer columns from output.postprocess"),
)
TABLE = Kind(
    f"{layout.TABLES}/", 1 << 30, "The input has too many files or rows. Split it over several runs"
)


def limit_of(path: str) -> int:
    """Return the largest size in bytes of the record at `path`."""
    return _kind(path).limit


def read_record(store: Store, path: str) -> bytes:
    """Return the bytes of a record.

    Raises `FileNotFoundError`, and `CorruptRun` if it is larger than its kind allows.
    """
    return store.read(path, limit_of(path))


def read_table(store: Store, name: str, by: str = "plan.json") -> bytes:
    """Return a table that the record `by` names, checked against the hash in its name.

    Raises `CorruptRun` if it is missing, too large, or does not match the hash.
    """
    try:
        data = read_record(store, layout.table_path(name))
    except FileNotFoundError:
        raise CorruptRun(f"{by} names {name}, which does not exist. Restore the file") from None
    if hashlib.sha256(data).hexdigest()[:16] not in name:
        raise CorruptRun(f"{name} does not match the hash in its name. Restore the file")
    return data


def hash_in_name(name: str) -> str:
    """Return the hash in a table's name: the first hex digits of the content's SHA-256."""
    return name.removesuffix(".parquet").rpartition("-")[2]


def put_record(store: Store, path: str, data: bytes) -> None:
    """Write a record, replacing an existing one.

    Raises `ConfigError`, and writes nothing, if the record is larger than readers accept.
    """
    _check(store, path, data)
    store.put(path, data)


def put_record_proved(store: Store, path: str, data: bytes) -> None:
    """Write a record as `put_record` does, then check that the store holds the same bytes."""
    _check(store, path, data)
    put_proved(store, path, data)


def put_table(store: Store, name: str, data: bytes) -> None:
    """Write a table whose name contains its hash, and check that the store holds its bytes.

    If the store already holds the intact table, it is not written again. Raises `ConfigError` if
    the table is larger than readers accept.
    """
    path = layout.table_path(name)
    _check(store, path, data)
    put_same_proved(store, path, data)


def put_record_if_absent(store: Store, path: str, data: bytes) -> bool:
    """Write a record unless one exists.

    Return True if the file then holds exactly `data`, False if it holds other content. Raises the
    errors of `put_record`.
    """
    _check(store, path, data)
    return store.put_if_absent(path, data)


def _check(store: Store, path: str, data: bytes) -> None:
    kind = _kind(path)
    if len(data) > kind.limit:
        raise ConfigError(
            f"{store.uri}/{path} was not written: it has {len(data):,} bytes, and readers accept "
            f"at most {kind.limit:,}. {kind.change}"
        )


def _kind(path: str) -> Kind:
    for kind in RECORD_KINDS:
        if path.startswith(kind.prefix):
            return kind
    if path.startswith(TABLE.prefix) and path.endswith(".parquet"):
        return TABLE
    raise ValueError(f"{path!r} is not a record of a run directory")
