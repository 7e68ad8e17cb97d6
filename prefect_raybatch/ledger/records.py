"""Frozen value types that travel between stages, processes and the run directory.

A row is known by (shard, position).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.ranges import Ranges, as_ranges, merge

FORMAT = 1  # version of the run directory; older versions stay readable or are refused by name

QUARANTINE = ("stage", "error", "message", "attempts", "input")
"""Columns of the quarantine's files beside the row number; `input` is a struct of the input row."""


def dump(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, so equal values have equal bytes and hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def load(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object from an untrusted record; `CorruptRun` names `what` when it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptRun(f"{what} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptRun(f"{what} holds {type(value).__name__}, not an object")
    return value


def digest(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class InputFile:
    """One input file as the plan saw it. `uri` is whole; `rows` counts what the run reads of it.

    Of a local Parquet file read in place: `ctime_ns` and `inode` change whenever it is written, and
    otherwise too, so `footer` (a hash) then tells whether it is still the same. `values` are the
    columns, as text, that only its path tells. None and empty elsewhere, and in plans of before.
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
    """The unit of everything: rows [start, start + rows) of the input in its recorded order."""

    id: int
    start: int
    rows: int


@dataclass(frozen=True)
class Unit:
    """Work for one trip through the stages: positions [offset, offset + rows) of a shard.

    Usually the whole shard; parts of it once its engine died on it.
    """

    shard: int
    offset: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """What a run is: input, shards and the job's fingerprint. Written once, never changed.

    `shards_table` and `files_table` name Parquet files under `_raybatch/` that carry their own
    hash in their name. `input_schema` is an Arrow IPC schema in base64. `hash` is the SHA-256 of
    the record's bytes and stands in every commit. A run that retries failed rows has the run key
    of its `parent` and a `numbers_table`: the row number of each of its rows in the root's input.
    `row_bytes` is the mean of the input's bytes a row, by which engines are packed.
    `context` is there where engine.max_model_len is auto: {max_model_len, why, and figures}.
    """

    run_key: str
    job_name: str
    created: str
    rows: int
    rows_per_shard: int
    shards: int
    fingerprint: str
    parts: Mapping[str, Any]
    model: Mapping[str, Any]
    input_schema: str
    shards_table: str
    files_table: str
    snapshot: bool
    job: Mapping[str, Any]
    parent: str | None = None
    format: int = FORMAT
    numbers_table: str | None = None
    row_bytes: float | None = None
    context: Mapping[str, Any] | None = None

    def to_bytes(self) -> bytes:
        value = asdict(self)
        # Plans from before these fields keep their bytes and hash.
        for name in ("numbers_table", "row_bytes", "context"):
            if value[name] is None:
                del value[name]
        return dump(value)

    @cached_property  # every commit is compared with it
    def hash(self) -> str:
        return digest(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        value = load(data, "plan.json")
        if value.get("format") != FORMAT:
            raise CorruptRun(
                f"plan.json has format {value.get('format')!r}; this version reads {FORMAT}. "
                "Finish the run with the version that began it, or start a new run key."
            )
        plan = _build(cls, value, "plan.json")
        for name in ("rows", "rows_per_shard", "shards"):
            if not isinstance(getattr(plan, name), int) or getattr(plan, name) < 0:
                raise CorruptRun(f"plan.json: {name} is {getattr(plan, name)!r}, not a count")
        if not isinstance(plan.row_bytes, (int, float, type(None))):
            raise CorruptRun(f"plan.json: row_bytes is {plan.row_bytes!r}, not a number")
        for name in ("shards_table", "files_table", "numbers_table"):
            table = getattr(plan, name)
            if name == "numbers_table" and table is None:
                continue
            if not isinstance(table, str) or "/" in table or not table.endswith(".parquet"):
                raise CorruptRun(f"plan.json: {name} is {table!r}, not a table name")
        if plan.parent is not None and (not isinstance(plan.parent, str) or "/" in plan.parent):
            raise CorruptRun(f"plan.json: parent is {plan.parent!r}, not a run key")
        if plan.context is not None and not _is_context(plan.context):
            raise CorruptRun(f"plan.json: context is {str(plan.context)[:80]!r}, not a length")
        if (plan.parent is None) != (plan.numbers_table is None):
            raise CorruptRun("plan.json: parent and numbers_table go together; one is missing")
        return plan


@dataclass(frozen=True)
class Piece:
    """One Parquet file that finish wrote; `kind` is data or quarantine."""

    path: str
    kind: str
    rows: int
    bytes: int
    sha256: str
    positions: Ranges

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Piece:
        piece = _build(cls, {**value, "positions": as_ranges(value["positions"])}, "piece")
        if piece.kind not in ("data", "quarantine") or "/" in str(piece.path):
            raise CorruptRun(f"piece {piece.path!r} of kind {piece.kind!r} is not one of ours")
        _check_types(piece, "piece")
        return piece


@dataclass(frozen=True)
class Receipt:
    """What one trip of (a part of) a shard through the stages gave.

    `lost` carries the reason when the positions did not get through (an engine died): such a
    receipt holds no positions and only tells the driver why. `failures` counts failed rows as
    {"stage|class|message": rows}. `stats` holds sums (tokens, seconds a stage), times, and means
    and peaks of what the engine did meanwhile. `where`: node and process of finish, engine.
    """

    shard: int
    attempt: str
    good: Ranges = ()
    failed: Ranges = ()
    skipped: Ranges = ()
    pieces: tuple[Piece, ...] = ()
    stats: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    lost: str | None = None
    fatal: bool = False

    @property
    def held(self) -> Ranges | None:
        """All positions the receipt accounts for; None when its own parts overlap."""
        return merge(self.good, self.failed, self.skipped)

    def to_json(self) -> str:
        return dump(_shallow(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Receipt:
        data = text.encode() if isinstance(text, str) else text
        return _from_positions(cls, load(data, "receipt"), "receipt")


@dataclass(frozen=True)
class Commit:
    """The only truth about a finished shard; written once by put-if-absent.

    `token` is fresh for every write, so a writer can tell its own record from another's.
    """

    shard: int
    attempt: str
    token: str
    plan_hash: str
    good: Ranges
    failed: Ranges
    skipped: Ranges
    pieces: tuple[Piece, ...]
    stats: Mapping[str, float]
    failures: Mapping[str, int]
    where: Mapping[str, str]
    committed: float
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return dump(_shallow(self))

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "commit") -> Commit:
        return _from_positions(cls, load(data, what), what)


@dataclass(frozen=True)
class Part:
    """A file of the result, path relative to the run directory.

    `first` and `last` are its row numbers at both ends, `sums` the SHA-256 of its row checksums;
    None in runs finished by a version that kept none. `etag` is that of the proved file, None on
    a disk.
    """

    path: str
    rows: int
    bytes: int
    sha256: str
    first: int | None = None
    last: int | None = None
    sums: str | None = None
    etag: str | None = None


@dataclass(frozen=True)
class StageStats:
    """One stage over the whole run: `seconds` summed over its tasks; `balance` is the mean task
    time over the longest (1 is even), `busiest` the rows of the busiest worker (engine) or node
    (finish) over the mean one. What is not known is None."""

    name: str
    tasks: int
    rows: int
    seconds: float
    rows_per_s: float
    balance: float
    mean_s: float | None = None
    slowest_s: float | None = None
    busiest: float | None = None


@dataclass(frozen=True)
class WorkerStats:
    """An engine actor, HOST:PID: what it did; `seconds` summed over shards side by side. A report
    names those of the attempt that did most rows."""

    name: str
    shards: int
    rows: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class NodeStats:
    """A node with engines: `figures` holds those of MEANS and PEAKS that are known."""

    name: str
    engines: int
    shards: int
    rows: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Charts:
    """What the plots show, of bounded size whatever the run's.

    throughput: (seconds of work, rows/s, prompt tokens/s, output tokens/s) at the end of each of
    up to 120 equal times. durations: {stage: (p5, p25, median, p75, p95, longest)} in seconds.
    cells: (shards, committed, failed rows, committed rows) of up to 2,000 equal runs of shards, in
    order.
    """

    throughput: tuple[tuple[float, ...], ...] = ()
    durations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    cells: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Charts:
        """Raises TypeError or ValueError for what is not of this shape."""
        throughput = tuple(_numbers(point, 4) for point in value["throughput"])
        durations = {str(k)[:40]: _numbers(v, 6) for k, v in dict(value["durations"]).items()}
        cells = tuple(tuple(map(int, _numbers(cell, 4))) for cell in value["cells"])
        if len(throughput) > 1000 or len(cells) > 10_000 or len(durations) > 20:
            raise ValueError("charts hold more than a report's")
        return cls(throughput, durations, cells)


@dataclass(frozen=True)
class Advice:
    """What a run's own figures advise: what is the matter, the evidence, the one change to make."""

    about: str
    evidence: str
    change: str


@dataclass(frozen=True)
class RunReport:
    """What a run came to; the JSON of report.json. Times in seconds, rates in rows a second."""

    run: str
    run_key: str
    job: str
    state: str
    rows: int
    good: int
    failed: int
    skipped: int
    shards: int
    resumed_shards: int
    seconds: float
    rows_per_s: float
    tokens: Mapping[str, float]
    stages: tuple[StageStats, ...]
    failures: Mapping[str, int]
    model: Mapping[str, Any]
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    steady_rows_per_s: float = 0.0
    engine_deaths: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)  # MEANS and PEAKS, where known
    workers: tuple[WorkerStats, ...] = ()
    nodes: tuple[NodeStats, ...] = ()
    charts: Charts = field(default_factory=Charts)
    dashboard: str = ""  # of Ray, while its cluster lives
    engines: int = 0  # of the attempt that did most rows; 0 in reports of before
    other_engines: int = 0  # of other attempts
    losses: Mapping[str, int] = field(default_factory=dict)  # why shards were lost: how often
    advice: tuple[Advice, ...] = ()

    def to_bytes(self) -> bytes:
        return dump(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> RunReport:
        value = load(data, "report.json")
        try:
            value["stages"] = tuple(StageStats(**s) for s in value["stages"])
            value["parts"] = tuple(Part(**p) for p in value["parts"])
            value["notes"] = tuple(value["notes"])
            value["workers"] = tuple(WorkerStats(**w) for w in value.get("workers", ()))
            value["nodes"] = tuple(NodeStats(**n) for n in value.get("nodes", ()))
            value["advice"] = tuple(Advice(**a) for a in value.get("advice", ()))
            if "charts" in value:  # else the report of an earlier version
                value["charts"] = Charts.from_dict(value["charts"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptRun(f"report.json is malformed: {error}") from None
        return _build(cls, value, "report.json")


def _shallow(record: Receipt | Commit) -> dict[str, Any]:
    """As `asdict`, without a copy of each position: of those there may be a million."""
    value = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return {**value, "pieces": [dict(piece.__dict__) for piece in record.pieces]}


def _numbers(values: Any, length: int) -> tuple[float, ...]:
    found = tuple(values)
    if len(found) != length or not all(map(_is_number, found)):
        raise ValueError(f"{str(values)[:80]} are not {length} numbers")
    return found


def _from_positions(cls: Any, value: dict[str, Any], what: str) -> Any:
    try:
        for name in ("good", "failed", "skipped"):
            value[name] = as_ranges(value[name])
        value["pieces"] = tuple(Piece.from_dict(piece) for piece in value["pieces"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRun(f"{what} is malformed: {type(error).__name__}: {error}") from None
    record = _build(cls, value, what)
    if isinstance(record, Commit) and record.format != FORMAT:
        raise CorruptRun(f"{what} has format {record.format!r}; this version reads {FORMAT}")
    _check_types(record, what)
    return record


def _check_types(record: Any, what: str) -> None:
    """`CorruptRun` naming the first field of another type: what is read is used unchecked."""
    for name in record.__dataclass_fields__:
        value = getattr(record, name)
        if not _TYPED.get(name, lambda _: True)(value):
            raise CorruptRun(f"{what} is malformed: {name} is {str(value)[:80]!r}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_context(value: Any) -> bool:
    length = value.get("max_model_len") if isinstance(value, dict) else None
    return type(length) is int and length > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # neither NaN nor infinite


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TYPED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("shard", "rows", "bytes"), _is_count),
    **dict.fromkeys(("attempt", "token", "plan_hash", "path", "sha256"), _is_text),
    "committed": _is_number,
    "stats": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "failures": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "where": lambda value: isinstance(value, dict),
    "lost": lambda value: value is None or _is_text(value),
    "fatal": lambda value: isinstance(value, bool),
}


def _build(cls: Any, value: Mapping[str, Any], what: str) -> Any:
    names = {f for f in cls.__dataclass_fields__}
    unknown = sorted(set(value) - names)
    if unknown:
        raise CorruptRun(f"{what} has unknown fields {', '.join(unknown)}")
    try:
        return cls(**value)
    except TypeError as error:
        raise CorruptRun(f"{what} is malformed: {error}") from None


def add_counts(*parts: Mapping[str, float]) -> dict[str, float]:
    """Key-wise sums."""
    total: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total.get(key, 0) + value
    return total


def fold_stats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of sums; `started` is the earliest and `ended` the latest of the parts, a `_peak` the
    highest; means are weighted by the `samples` behind them. A part that does not know a figure
    has no say in it."""
    apart = {*CHOSEN, *MEANS}
    total = add_counts(*({k: v for k, v in p.items() if k not in apart} for p in parts))
    for key, choose in CHOSEN.items():
        known = [p[key] for p in parts if key in p]
        if known:
            total[key] = choose(known)
    for key in MEANS:
        weighed = [(p[key], p.get("samples", 1.0)) for p in parts if key in p]
        if weighed:
            weight = sum(samples for _, samples in weighed) or 1.0
            total[key] = sum(value * samples for value, samples in weighed) / weight
    return total


# Figures of the engine and its node while a shard was in it: see stages/figures.py.
MEANS = ("running", "waiting", "sequences", "kv_cache", "steps_per_s", "node_cpu", "gpu")
PEAKS = ("kv_cache_peak", "node_memory_peak", "gpu_memory_peak")
CHOSEN: Mapping[str, Callable[[Iterable[float]], float]] = {
    "started": min,
    "ended": max,
    **dict.fromkeys(PEAKS, max),
}
