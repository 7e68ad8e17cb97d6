"""Frozen value types that travel between stages, processes and the run directory.

A row is identified by (shard, position).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.failures import Failures, Loss, failure_texts
from prefect_raybatch.ledger.positions import (
    MOST_POSITIONS,
    Positions,
    PositionsText,
    disjoint,
)
from prefect_raybatch.ledger.record_texts import COMMIT_TEXT, RECEIPT_TEXT, PieceKind
from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.ledger.strict import Count, Number, StrictRecord, read_json

JsonObject = Mapping[str, Any]
"""A JSON object in a record; another module defines its fields."""

FORMAT = 3  # version of the run directory

KINDS_OF_ROWS = ("good", "failed", "skipped")
NO_POSITIONS = Positions()

QUARANTINE = ("stage", "error", "message", "attempts", "input")
"""Columns of the quarantine's files beside the row number; `input` is a struct of the input row."""


def _table_name(name: str) -> str:
    if "/" in name or not name.endswith(".parquet"):
        raise PydanticCustomError("table_name", "not the name of a .parquet file")
    return name


def _run_key(key: str) -> str:
    if "/" in key:
        raise PydanticCustomError("run_key", "not a run key")
    return key


def _context(value: JsonObject) -> JsonObject:
    length = value.get("max_model_len")
    if type(length) is not int or length <= 0:
        raise PydanticCustomError("context", "max_model_len is not a positive integer")
    return value


def _table(value: JsonObject) -> JsonObject:
    wrong = {"format", "uri", "id", "version"} - value.keys()
    if wrong or not all(isinstance(text, str) for text in value.values()):
        raise PydanticCustomError(
            "table", "not an object of texts with format, uri, id and version"
        )
    return value


def _forked_from(value: JsonObject) -> JsonObject:
    if set(value) != {"run_key", "plan"} or not all(isinstance(v, str) for v in value.values()):
        raise PydanticCustomError("forked_from", "not an object of texts with run_key and plan")
    _run_key(value["run_key"])
    return value


TableName = Annotated[str, AfterValidator(_table_name)]
RunKey = Annotated[str, AfterValidator(_run_key)]
Context = Annotated[JsonObject, AfterValidator(_context)]
ForkedFrom = Annotated[JsonObject, AfterValidator(_forked_from)]
InputTable = Annotated[JsonObject, AfterValidator(_table)]


def dump(value: Any) -> bytes:
    """Return canonical JSON (sorted keys, no spaces): equal values have equal bytes and hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def load(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in an untrusted record.

    Raises `CorruptRun` naming `what` if it is not one.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptRun(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptRun(f"{what} holds {type(value).__name__}, not an object")
    return value


def digest(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


_CHECKSUM = b'{"checksum":"'
_DIGITS = 64


def with_checksum(record: bytes) -> bytes:
    """Return the JSON object `record` with its SHA-256 added as the first field, `checksum`."""
    return _CHECKSUM + digest(record).encode() + b'",' + record[1:]


def without_checksum(data: bytes, what: str) -> bytes:
    """Return the JSON object in `data` without the checksum that `with_checksum` added.

    Raise `CorruptRun`, which names `what`, if the checksum does not match.
    """
    end = len(_CHECKSUM) + _DIGITS
    record = b"{" + data[end + 2 :]
    if not data.startswith(_CHECKSUM) or digest(record).encode() != data[len(_CHECKSUM) : end]:
        raise CorruptRun(f"{what} does not match its checksum. Restore the file")
    return record


@dataclass(frozen=True)
class InputFile:
    """An input file as it was when the run was planned.

    `uri` is absolute, or relative to the run directory for a file of the snapshot. `rows` counts
    the rows that the run reads from it.

    `ctime_ns`, `inode` and `footer` are set for a local Parquet file that is read in place, None
    for other files. A changed ctime or inode does not prove that the file's content has changed.
    Then `footer`, a hash of the file's Parquet footer, decides. `values` are (column, value as
    text) of the columns that only the file's path gives, such as year=2024.
    """

    uri: str
    size: int
    etag: str | None
    mtime_ns: int | None
    rows: int
    ctime_ns: int | None = None
    inode: int | None = None
    footer: str | None = None
    values: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True)
class Shard:
    """Input rows [start, start + rows), which are read, inferred and committed together."""

    id: int
    start: int
    rows: int


@dataclass(frozen=True)
class Unit:
    """Positions [offset, offset + rows) of a shard, which go through the stages together.

    Usually a whole shard. After an engine death, a shard is divided into smaller units.
    """

    shard: int
    offset: int
    rows: int

    def overlaps(self, other: Unit) -> bool:
        """Return whether the two units have a position in common."""
        first, last = max(self.offset, other.offset), min(self.end, other.end)
        return self.shard == other.shard and first < last

    def without(self, other: Unit) -> list[Unit]:
        """Return what is left of this unit without the positions of `other`: 0, 1 or 2 units."""
        if not self.overlaps(other):
            return [self]
        ends = ((self.offset, other.offset), (other.end, self.end))
        return [Unit(self.shard, low, high - low) for low, high in ends if low < high]

    @property
    def end(self) -> int:
        """Return the last position plus one."""
        return self.offset + self.rows


@dataclass(frozen=True)
class Plan(StrictRecord):
    """The record of a run: its input, shards and fingerprint. Written once, never changed.

    `parts` are the job's values that `fingerprint` covers. `shards_table` and `files_table` name
    Parquet files under `_raybatch/` with their hash in the name. `input_schema` is an Arrow IPC
    schema in base64. `hash` is the SHA-256 of the record's bytes; every commit contains it.
    `row_bytes` is the mean number of bytes that a row takes in memory: its input values, or its
    prepared images if they are larger. Sizes such as rows per shard are computed from it.

    In a run that retries failed rows, `parent` is the run key of the run that they failed in, and
    `numbers_table` names the table with their row numbers in the root run's input. `context` is set
    if engine.max_model_len is auto: {max_model_len, why, and figures}. `table` is set if the input
    is a snapshot of a table: {format, uri, id, version, schema, ...}, with the schema of all its
    columns encoded as `input_schema` is. `increment` is set in a run that reuses or keeps answers
    and in a cascade (`ledger/increments.py`). `uris_table` holds the URIs of the input if the job
    names very many one by one; `job` then holds the first of them and `parts` their number and
    hash. `classifier_table` holds the file of the job's classifier. `forked_from` is the damaged
    run that this one continues: {run_key, plan}, with the plan's hash; `original_created` (in the
    file: `night`) is then the `created` of the original run.
    """

    run_key: str
    job_name: str
    created: str
    rows: Count
    rows_per_shard: Count
    shards: Count
    fingerprint: str
    parts: JsonObject
    model: JsonObject
    input_schema: str
    shards_table: TableName
    files_table: TableName
    snapshot: bool
    job: JsonObject
    row_bytes: Number
    parent: RunKey | None = None
    format: int = FORMAT
    numbers_table: TableName | None = None
    context: Context | None = None
    table: InputTable | None = None
    increment: JsonObject | None = None
    uris_table: TableName | None = None
    classifier_table: TableName | None = None
    forked_from: ForkedFrom | None = None
    original_created: Annotated[str | None, Field(alias="night")] = None

    def to_bytes(self) -> bytes:
        value = asdict(self)
        value["night"] = value.pop("original_created")
        if self.classifier_table is None:  # plans from before this field keep their hash
            del value["classifier_table"]
        return dump(value)

    @property
    def first_created(self) -> str:
        """Return when the run was planned; for a repaired run, when the original was planned."""
        return self.original_created or self.created

    @property
    def tables(self) -> set[str]:
        """Return the names of the plan's tables, without those that `increment` names."""
        named = (
            *(self.shards_table, self.files_table, self.numbers_table, self.uris_table),
            self.classifier_table,
        )
        return {name for name in named if name is not None}

    @cached_property  # every commit is compared with it
    def hash(self) -> str:
        return digest(self.to_bytes())

    def with_model(self, model: JsonObject) -> Plan:
        """Return the plan with another model, which a person accepted for an attempt.

        `hash` stays that of the recorded plan, because commits contain it.
        """
        made = replace(self, model=model)
        made.__dict__["hash"] = self.hash
        return made

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        found = load(data, "plan.json").get("format")
        if found != FORMAT:  # checked first, because another format may have other fields
            raise CorruptRun(
                f"plan.json has format {found!r}; this version reads {FORMAT}. "
                "Finish the run with the version that planned it, or choose a new run key."
            )
        plan = read_json(_PLAN, data, "plan.json")
        if (plan.parent is None) != (plan.numbers_table is None):
            raise CorruptRun("plan.json: parent and numbers_table must be set together")
        return plan


@dataclass(frozen=True)
class Piece:
    """A Parquet file that the finish stage wrote for a shard; `kind` is data or quarantine.

    `positions` are the positions of its rows in the shard.
    """

    path: str
    kind: PieceKind
    rows: int
    bytes: int
    sha256: str
    positions: Positions


@dataclass(frozen=True)
class Receipt:
    """The outcome of a unit in the stages: which positions of the shard its pieces hold.

    `good` rows are in data pieces, `failed` ones in quarantine pieces, and `skipped` ones were left
    out. If the rows were lost in a stage, `lost` has the reason and the receipt holds no positions;
    `part` then is (first position, number of positions) of the lost rows, None for the whole shard.
    `failures` counts failed rows by reason. `where` names node and process of the finish stage, and
    the engine.
    """

    shard: int
    attempt: str
    good: Positions = NO_POSITIONS
    failed: Positions = NO_POSITIONS
    skipped: Positions = NO_POSITIONS
    pieces: tuple[Piece, ...] = ()
    stats: ShardStats = field(default_factory=ShardStats)
    failures: Failures = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    lost: Loss | None = None
    part: tuple[int, int] | None = None

    @classmethod
    def of_lost(cls, unit: Unit, attempt: str, why: Loss) -> Receipt:
        """Return the receipt of a unit whose rows were lost in a stage."""
        return cls(unit.shard, attempt, lost=why, part=(unit.offset, unit.rows))

    @property
    def unit(self) -> Unit:
        """Return the unit of the lost rows; if none are lost, the span of the positions held."""
        if self.lost is not None:
            return Unit(self.shard, *(self.part or (0, MOST_POSITIONS)))
        held = self.good | self.failed | self.skipped
        return Unit(self.shard, held.start, held.end - held.start)

    @property
    def held(self) -> Positions | None:
        """Return the union of good, failed and skipped positions; None if any two overlap."""
        return disjoint((self.good, self.failed, self.skipped))

    def to_json(self) -> str:
        lost = None if self.lost is None else str(self.lost)
        fatal = self.lost is not None and self.lost.fatal
        is_counted = self.lost is not None and self.lost.counted
        value = {**_shallow(self), "lost": lost, "fatal": fatal, "counted": is_counted}
        for name in KINDS_OF_ROWS:
            value[name] = getattr(self, name).to_text()
        for text, piece in zip(value["pieces"], self.pieces, strict=True):
            text["positions"] = piece.positions.to_text()
        return dump(value).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        value = dict(read_json(RECEIPT_TEXT, text, "receipt").__dict__)
        lost, fatal, counted = (value.pop(name) for name in ("lost", "fatal", "counted"))
        _take_positions(value, None, "receipt")
        why = None if lost is None else replace(Loss.parse(lost, fatal), counted=counted)
        return cls(**value, lost=why)


@dataclass(frozen=True)
class Commit:
    """The only record that a shard is finished; written once by put-if-absent.

    `token` is new for every write, so that a writer can tell its own record from another's.
    `committed` is in seconds since 1970. The fields from `good` to `failures` combine the fields of
    the same names in the shard's receipts. `where` is taken from the last receipt.
    """

    shard: int
    attempt: str
    token: str
    plan_hash: str
    good: Positions
    failed: Positions
    skipped: Positions
    pieces: tuple[Piece, ...]
    stats: ShardStats
    failures: Failures
    where: Mapping[str, str]
    committed: float
    format: int = FORMAT

    @property
    def rows(self) -> int:
        return len(self.good) + len(self.failed) + len(self.skipped)

    def to_bytes(self) -> bytes:
        value = {**_shallow(self), "rows": self.rows}
        del value["good"]
        value["failed"], value["skipped"] = self.failed.to_text(), self.skipped.to_text()
        kinds = Counter(piece.kind for piece in self.pieces)
        for text, piece in zip(value["pieces"], self.pieces, strict=True):
            if kinds[piece.kind] > 1:
                text["positions"] = piece.positions.to_text()
        return dump(value)

    @cached_property
    def body(self) -> bytes:
        """Return the bytes of the commit's record.

        For a commit that was read from a record, they are the record's own bytes, since the same
        positions can be encoded in more than one way.
        """
        return self.to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "commit") -> Commit:
        text = read_json(COMMIT_TEXT, data, what)
        if text.format != FORMAT:
            raise CorruptRun(f"{what} has format {text.format!r}; this version reads {FORMAT}")
        value = dict(text.__dict__)
        _take_positions(value, value.pop("rows"), what)
        commit = cls(**value)
        commit.__dict__["body"] = data
        return commit


@dataclass(frozen=True)
class Part(StrictRecord):
    """A file of the result; `path` is relative to the run directory.

    A second file may hold checksums of its rows (`layout.row_sums_path`). `sums` is the SHA-256 of
    that second file, and `first` and `last` are the first and last row number. All three are None
    without a second file. `etag` is the ETag of the result file when it was checked, None in a
    local folder.
    """

    path: str
    rows: Count
    bytes: Count
    sha256: str
    first: int | None = None
    last: int | None = None
    sums: str | None = None
    etag: str | None = None

    @property
    def order(self) -> tuple[int, str]:
        """Return a key that sorts data files, or quarantine files, by the number in their names.

        Numbers of more than five digits are sorted correctly as well.
        """
        return len(self.path), self.path


def _shallow(record: Receipt | Commit) -> dict[str, Any]:
    """Return a record's fields as values for JSON, except positions, which are encoded later.

    Pieces are without positions.
    """
    value = dict(record.__dict__)
    value.pop("body", None)
    value["pieces"] = [
        {k: v for k, v in piece.__dict__.items() if k != "positions"} for piece in record.pieces
    ]
    value["stats"] = record.stats.to_dict()
    value["failures"] = failure_texts(record.failures)
    return value


def _take_positions(value: dict[str, Any], rows: int | None, what: str) -> None:
    """Decode the positions and pieces in `value`, the fields of a record, in place.

    For a commit, which does not list its good positions, `rows` is the number of rows in the shard.
    For a receipt, which lists them, it is None. Raises `CorruptRun`, which names `what`.
    """
    most = MOST_POSITIONS if rows is None else rows
    for name in KINDS_OF_ROWS:
        if name in value:
            value[name] = _positions(value[name], most, what, name)
    if "good" not in value:
        value["good"] = (value["failed"] | value["skipped"]).lacking(most)
    kinds = Counter(piece.kind for piece in value["pieces"])
    pieces = []
    for number, piece in enumerate(value["pieces"]):
        text, name = piece.positions, f"pieces.{number}.positions"
        if text is not None:
            positions = _positions(text, most, what, name)
        elif kinds[piece.kind] == 1:
            positions = value["good" if piece.kind == "data" else "failed"]
        else:
            raise CorruptRun(f"{what} is malformed: {name} is missing")
        pieces.append(Piece(**{**piece.__dict__, "positions": positions}))
    value["pieces"] = tuple(pieces)


def _positions(text: PositionsText, rows: int, what: str, name: str) -> Positions:
    try:
        return Positions.from_text(text, rows)
    except ValueError as error:
        raise CorruptRun(f"{what} is malformed: {name}: {error}") from None


_PLAN = TypeAdapter(Plan)
