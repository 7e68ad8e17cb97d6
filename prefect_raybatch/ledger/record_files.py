"""Records on their way to and from the store, through one table of how large each kind may be.

Who reads a run directory does not trust it, so each kind of record has a largest size. A record
beyond it is refused before it is written, since afterwards nobody could go on with the run.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from prefect_raybatch.errors import ConfigError, CorruptRun
from prefect_raybatch.ledger import layout
from prefect_raybatch.storage import Store, put_proved, put_same_proved


class Kind(NamedTuple):
    """Records whose path begins with `prefix`: at most `limit` bytes; `change` is what to change
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
    """The most bytes that a reader takes of the record at `path`."""
    return _kind(path).limit


def read_record(store: Store, path: str) -> bytes:
    """Return the record's bytes. Raise `FileNotFoundError`, and `CorruptRun` when it is larger than
    any of ours."""
    return store.read(path, limit_of(path))


def read_table(store: Store, name: str, by: str = "plan.json") -> bytes:
    """A table that the record `by` names, with the hash that its name says."""
    try:
        data = read_record(store, layout.table_path(name))
    except FileNotFoundError:
        raise CorruptRun(f"{by} names {name}, which does not exist") from None
    if hashlib.sha256(data).hexdigest()[:16] not in name:
        raise CorruptRun(f"{name} does not have the hash its name says")
    return data


def hash_in_name(name: str) -> str:
    """Return the digits of the SHA-256 that the name of a table ends with."""
    return name.removesuffix(".parquet").rpartition("-")[2]


def put_record(store: Store, path: str, data: bytes) -> None:
    """Writes a record, replacing what is there. Raises `ConfigError`, and writes nothing, when no
    reader would take it."""
    _check(store, path, data)
    store.put(path, data)


def put_record_proved(store: Store, path: str, data: bytes) -> None:
    """As `put_record`, and looked at once it is there: what others are going to rely on."""
    _check(store, path, data)
    put_proved(store, path, data)


def put_table(store: Store, name: str, data: bytes) -> None:
    """A table likewise, whose name tells its contents: one that is there already is left alone."""
    path = layout.table_path(name)
    _check(store, path, data)
    put_same_proved(store, path, data)


def put_record_if_absent(store: Store, path: str, data: bytes) -> bool:
    """As `put_record`, unless something is there; what it returns: `Store.put_if_absent`."""
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
