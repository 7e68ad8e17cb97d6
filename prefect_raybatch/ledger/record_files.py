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
    """Records whose path begins with `prefix`: at most `limit` bytes. `change` says what to change
    in a job whose record would be larger."""

    prefix: str
    limit: int
    change: str


_URIS = "source.uri names very many files one by one: name their folder or a glob"
_PARTS = "the result would have very many files: raise output.file_mb, under a new run key"
RECORD_KINDS = (
    Kind(layout.PLAN, 64 << 20, _URIS),
    # A commit of 1,000,000 rows, the most a shard may have, needs 0.7 MB and 160 bytes for each
    # piece beyond the fourth.
    Kind(f"{layout.COMMITS}/", 8 << 20, "lower source.rows_per_shard, under a new run key"),
    Kind(layout.LAYOUT, 4 << 20, "let postprocess return fewer columns"),
    Kind(f"{layout.PART_NOTES}/", 1 << 16, "nothing, a resume only takes longer"),
    Kind(layout.SUCCESS, 64 << 20, _PARTS),
    Kind(layout.REPORT, 64 << 20, _PARTS),
    Kind(layout.ANSWERS_RECORD, 64 << 20, _PARTS),
    Kind(layout.BY_ROW_RECORD, 64 << 20, _PARTS),
    Kind(f"{layout.JOBS}/", 64 << 20, _URIS),
    Kind(layout.PRECISION, 1 << 20, "leave try-fp8 out"),
    Kind(f"{layout.PARTIAL_FOLDER}/", 64 << 20, _PARTS),
    Kind(f"{layout.COPIED}/", 64 << 20, "the columns of source.columns, which are too many"),
    Kind(layout.DRAIN, 1 << 20, "the run key, which has had too many attempts"),
    Kind(layout.SUPERSEDED_BY, 1 << 16, "the run key, which is too long"),
    Kind(f"{layout.PUBLISHED}/", 1 << 16, "shorten the uri in output.publish"),
    Kind(f"{layout.CHECKPOINTS}/", 64 << 20, "nothing, a resume only takes longer"),
    Kind(f"{layout.ATTEMPTS}/", 1 << 20, "the names of this host and user"),
    Kind(layout.LAST_ATTEMPT, 1 << 16, "the names of this host and user"),
    Kind(layout.PLANNED_BY, 1 << 16, "the names of this host and user"),
    Kind(f"{layout.HEARTBEATS}/", 1 << 16, "nothing, the run goes on without it"),
    Kind(layout.OUTPUT_SCHEMA, 1 << 20, "let postprocess return fewer columns"),
)
TABLE = Kind(
    f"{layout.TABLES}/", 1 << 30, "the input has very many files or rows: take it in several runs"
)


def limit_of(path: str) -> int:
    """Return the largest size in bytes of the record at `path`."""
    return _kind(path).limit


def read_record(store: Store, path: str) -> bytes:
    """Return the bytes of a record. Raises `FileNotFoundError`, and `CorruptRun` if it is larger
    than any record may be."""
    return store.read(path, limit_of(path))


def read_table(store: Store, name: str, by: str = "plan.json") -> bytes:
    """Return a table that the record `by` names, checked against the hash in its name."""
    try:
        data = read_record(store, layout.table_path(name))
    except FileNotFoundError:
        raise CorruptRun(f"{by} names {name}, which does not exist") from None
    if hashlib.sha256(data).hexdigest()[:16] not in name:
        raise CorruptRun(f"{name} does not have the hash its name says")
    return data


def hash_in_name(name: str) -> str:
    """Return the digits of the SHA-256 at the end of a table's name."""
    return name.removesuffix(".parquet").rpartition("-")[2]


def put_record(store: Store, path: str, data: bytes) -> None:
    """Write a record over what is there. Raises `ConfigError`, and writes nothing, if the record is
    too large to be read."""
    _check(store, path, data)
    store.put(path, data)


def put_record_proved(store: Store, path: str, data: bytes) -> None:
    """Write a record as `put_record` does, then check what was stored: others will rely on it."""
    _check(store, path, data)
    put_proved(store, path, data)


def put_table(store: Store, name: str, data: bytes) -> None:
    """Write a table whose name holds its hash. One that exists is left alone."""
    path = layout.table_path(name)
    _check(store, path, data)
    put_same_proved(store, path, data)


def put_record_if_absent(store: Store, path: str, data: bytes) -> bool:
    """Write a record as `put_record` does, unless one exists. Return what `Store.put_if_absent`
    does."""
    _check(store, path, data)
    return store.put_if_absent(path, data)


def _check(store: Store, path: str, data: bytes) -> None:
    kind = _kind(path)
    if len(data) > kind.limit:
        raise ConfigError(
            f"{store.uri}/{path} would have {len(data):,} bytes and is not written: readers take "
            f"at most {kind.limit:,}. What to change: {kind.change}"
        )


def _kind(path: str) -> Kind:
    for kind in RECORD_KINDS:
        if path.startswith(kind.prefix):
            return kind
    if path.startswith(TABLE.prefix) and path.endswith(".parquet"):
        return TABLE
    raise ValueError(f"{path!r} is no record of a run directory")
