"""Sums up commits into counts, figures and stage statistics.

Memory grows by twelve numbers per shard.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefect_raybatch.ledger.failures import FailureKey
from prefect_raybatch.ledger.records import Commit
from prefect_raybatch.ledger.stats import ShardStats, StatsFold
from prefect_raybatch.report.records import NodeStats, StageStats, WorkerStats

RECENT = 120.0  # seconds over which the rate of an active run is averaged
STAGE_SECONDS = tuple((name, f"{name}_s") for name in ("read", "prepare", "engine", "finish"))
WORKERS_SHOWN = 64  # engines and nodes that a report names; the others are one line
CODES = 16  # versions of the package's code that are counted separately
KNOWN = 4096  # names counted separately at most: records are untrusted
OTHERS = "others"
LARGEST_COUNT = 2**53  # larger counts are wrong, and do not fit into a float

Place = tuple[str, str]  # attempt, and name of an engine or node


@dataclass
class Share:
    """Sums over the shards that one engine or node processed.

    `engines` are the engines of a node, as (attempt, name); empty for an engine.
    """

    shards: int = 0
    rows: int = 0
    fold: StatsFold = field(default_factory=StatsFold)
    engines: set[Place] = field(default_factory=set)  # only of a node

    def add(self, rows: int, stats: ShardStats) -> None:
        self.shards += 1
        self.rows += rows
        self.fold.add(stats)

    @property
    def stats(self) -> ShardStats:
        return self.fold.result()


@dataclass
class Series:
    """Numbers of each commit in the order in which they were added, for plots and rates.

    `prompt` and `output` are tokens. `seconds` is {stage: seconds}, NaN if a commit does not record
    them. `started` and `ended` are in seconds since 1970, 0 if not recorded. `timed` counts the
    rows that were processed between `started` and `ended`. `ended` is appended last, so readers in
    other threads take its length as the number of complete entries.
    """

    shard: array[float] = field(default_factory=lambda: array("d"))
    rows: array[float] = field(default_factory=lambda: array("d"))
    failed: array[float] = field(default_factory=lambda: array("d"))
    prompt: array[float] = field(default_factory=lambda: array("d"))
    output: array[float] = field(default_factory=lambda: array("d"))
    timed: array[float] = field(default_factory=lambda: array("d"))
    started: array[float] = field(default_factory=lambda: array("d"))
    ended: array[float] = field(default_factory=lambda: array("d"))
    seconds: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("f") for name, _ in STAGE_SECONDS}
    )

    def add(self, commit: Commit, rows: int, failed: int) -> None:
        stats = commit.stats
        self.shard.append(min(commit.shard, LARGEST_COUNT))
        self.rows.append(min(rows, LARGEST_COUNT))
        self.failed.append(min(failed, LARGEST_COUNT))
        self.prompt.append(stats.prompt_tokens or 0.0)
        self.output.append(stats.output_tokens or 0.0)
        for name, key in STAGE_SECONDS:
            seconds = getattr(stats, key)
            self.seconds[name].append(math.nan if seconds is None else seconds)
        self.timed.append(int(stats.rows or 0))
        self.started.append(stats.started or 0.0)
        self.ended.append(stats.ended or 0.0)

    def times(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (started, ended, timed) of the complete entries, as copies.

        Views would not do: an array of which there is a view cannot grow.
        """
        number = len(self.ended)
        started, ended, timed = (
            np.array(values[:number]) for values in (self.started, self.ended, self.timed)
        )
        return started, ended, timed


class Tally:
    """Sums up commits for the report, with twelve numbers per shard in memory.

    Rates use the times recorded in the commits, without the time between attempts, so a run that
    was killed and resumed a day later shows its working speed.
    """

    def __init__(self) -> None:
        self.good = self.failed = self.skipped = self.shards = 0
        self.longest: dict[str, float] = {}  # seconds of the longest task, by stage
        self.failures: Counter[FailureKey] = Counter()
        self.series = Series()
        self.fold = StatsFold()
        self.by_engine: dict[Place, Share] = {}
        self.by_node: dict[str, Share] = {}
        self.finished_on: dict[Place, int] = {}  # rows by the node that finish ran on
        self.codes: Counter[str] = Counter()  # rows by the package's code on the workers

    def add(self, commit: Commit) -> None:
        good, failed, skipped = map(len, (commit.good, commit.failed, commit.skipped))
        self.shards += 1
        self.good += good
        self.failed += failed
        self.skipped += skipped
        self.series.add(commit, good + failed + skipped, failed)
        self._place(commit, good + failed + skipped)
        code = commit.where.get("code")
        if isinstance(code, str) and (code in self.codes or len(self.codes) < CODES):
            self.codes[code] += good + failed + skipped
        self.fold.add(commit.stats)
        for name, key in STAGE_SECONDS:
            seconds = getattr(commit.stats, key)
            if seconds is not None:
                self.longest[name] = max(self.longest.get(name, 0.0), seconds)
        self.failures.update(commit.failures)

    def _place(self, commit: Commit, rows: int) -> None:
        """Add a commit with `rows` rows to the sums of its engine and nodes, if it names them."""
        node, engine = commit.where.get("node"), commit.where.get("engine")
        if isinstance(node, str):
            place = _known((commit.attempt, node), self.finished_on)
            self.finished_on[place] = self.finished_on.get(place, 0) + rows
        if isinstance(engine, str):
            place = _known((commit.attempt, engine), self.by_engine)
            self.by_engine.setdefault(place, Share()).add(rows, commit.stats)
            host = engine.rpartition(":")[0]
            host = host if host in self.by_node or len(self.by_node) < KNOWN else OTHERS
            self.by_node.setdefault(host, Share()).add(rows, commit.stats)
            self.by_node[host].engines.add(place)

    @property
    def stats(self) -> ShardStats:
        """Return the summed figures of all shards."""
        return self.fold.result()

    @property
    def rows(self) -> int:
        return self.good + self.failed + self.skipped

    @property
    def busy_seconds(self) -> float:
        """Return the seconds in which at least one shard was in the engine stage or after it."""
        started, ended, _ = self.series.times()
        return covered(started, ended)

    @property
    def steady_rate(self) -> float:
        """Return rows per second between the end of the first shard and the end of the last one.

        With fewer than three shards, returns the rate over the whole working time.
        """
        started, ended, rows = self.series.times()
        if len(ended) < 3 or ended.max() <= ended.min():
            return self.rows / self.busy_seconds if self.busy_seconds else 0.0
        earliest = int(np.lexsort((rows, ended))[0])
        # Time between attempts, in which nothing ran, does not count.
        first = ended[earliest]
        later = ended > first
        # If a clock was set back, shards end before they start, and cover no time.
        seconds = covered(np.maximum(started[later], first), ended[later])
        return float(rows.sum() - rows[earliest]) / seconds if seconds else 0.0

    def recent_rate(self) -> float:
        """Return rows per second of the shards that ended in the last two minutes, or 0."""
        now = time.time()
        started, ended, rows = self.series.times()
        recent = now - ended < RECENT
        if not recent.any():
            return 0.0
        return float(rows[recent].sum()) / max(now - float(started[recent].min()), 1e-6)

    def stages(self) -> tuple[StageStats, ...]:
        whole = self.stats
        each = ((name, getattr(whole, key)) for name, key in STAGE_SECONDS)
        return tuple(self._stage(name, seconds) for name, seconds in each if seconds is not None)

    def _stage(self, name: str, seconds: float) -> StageStats:
        longest = self.longest[name]
        mean = seconds / self.shards if self.shards else 0.0
        engines = {place: share.rows for place, share in self.by_engine.items()}
        places: dict[Place, int] = {"engine": engines, "finish": self.finished_on}.get(name, {})
        shares = list(_main(places).values())
        return StageStats(
            name=name,
            tasks=self.shards,
            rows=self.rows,
            seconds=round(seconds, 3),
            rows_per_s=round(self.rows / seconds, 1) if seconds else 0.0,
            balance=round(mean / longest, 3) if longest else 1.0,
            mean_s=round(mean, 3),
            slowest_s=round(longest, 3),
            busiest=busiest(shares),
        )

    @property
    def engines(self) -> int:
        """Return the number of engines of the attempt that processed most rows."""
        return len(_main({place: share.rows for place, share in self.by_engine.items()}))

    def roofline(self) -> dict[str, float]:
        """Return how the GPUs' capacity was used, as {name: share, 0 to 1}; {} if unknown.

        The time counted is from the first row in an engine to the last shard's end. If engines
        share a GPU, its capacity is divided among them. The names are

        - "mfu" and "mbu": shares of peak FLOPs and of peak memory bandwidth that the computed
          tokens used (`sizing/roofline.py`);
        - "idle_rows": share of the time in which a GPU was idle because its engine had no rows yet;
        - "idle_tail": the same, because its engine had no rows left;
        - "idle_host": the same, because its engine was busy in Python. It is left out if the GPUs'
          utilization is unknown.
        """
        whole = self.stats
        up, peak_flops, peak_bytes = whole.up_s, whole.peak_flops, whole.peak_bytes
        if not up or not peak_flops or not peak_bytes:
            return {}
        head, tail = self._ends_of_engines()
        span = up + head + tail
        waits = whole.idle_s or 0.0
        shares = {
            "mfu": (whole.flops or 0.0) / (peak_flops * span / up),
            "mbu": (whole.moved_bytes or 0.0) / (peak_bytes * span / up),
            "idle_tail": tail / span,
        }
        if whole.gpu is not None:
            idle = (1 - whole.gpu) * up
            waits = min(waits, idle)
            shares["idle_host"] = (idle - waits) / span
        shares["idle_rows"] = (waits + head) / span
        return {name: round(value, 4) for name, value in shares.items()}

    def _ends_of_engines(self) -> tuple[float, float]:
        """Return (idle seconds before the first shard, idle seconds after the last) of all engines.

        Both are sums over the engines. An engine is idle from the moment when the first engine of
        its attempt starts a shard until it starts one itself, and from its own last end until the
        last engine of the attempt ends.
        """
        by_attempt: dict[str, list[ShardStats]] = {}
        for (attempt, _), share in self.by_engine.items():
            by_attempt.setdefault(attempt, []).append(share.stats)
        head = tail = 0.0
        for engines in by_attempt.values():
            started = [stats.started for stats in engines if stats.started is not None]
            ended = [stats.ended for stats in engines if stats.ended is not None]
            head += sum(at - min(started) for at in started)
            tail += sum(max(ended) - at for at in ended)
        return head, tail

    def workers(self) -> tuple[WorkerStats, ...]:
        """Return the engines of the attempt that processed most rows, most rows first.

        If there are more than WORKERS_SHOWN engines, the last entry is the sum of all that are not
        shown.
        """
        rows = {place: share.rows for place, share in self.by_engine.items()}
        workers = [_worker(place[1], self.by_engine[place]) for place in _main(rows)]
        workers.sort(key=lambda worker: -worker.rows)
        if len(workers) > WORKERS_SHOWN:
            others = workers[WORKERS_SHOWN - 1 :]
            workers[WORKERS_SHOWN - 1 :] = [
                WorkerStats(
                    f"{len(others)} {OTHERS}",
                    sum(worker.shards for worker in others),
                    sum(worker.rows for worker in others),
                    sum(worker.tokens for worker in others),
                    sum(worker.seconds for worker in others),
                )
            ]
        return tuple(workers)

    def nodes(self) -> tuple[NodeStats, ...]:
        """Return up to 64 nodes that had engines, those with most rows first.

        A node's number of engines is the highest in any one attempt.
        """
        ordered = sorted(self.by_node.items(), key=lambda item: -item[1].rows)
        return tuple(
            NodeStats(
                name[:200],
                _engines_at_once(share.engines),
                share.shards,
                share.rows,
                share.stats.figures(),
            )
            for name, share in ordered[:WORKERS_SHOWN]
        )


def _worker(name: str, share: Share) -> WorkerStats:
    stats = share.stats
    tokens = (stats.prompt_tokens or 0.0) + (stats.output_tokens or 0.0)
    seconds = round(stats.engine_s or 0.0, 3)
    return WorkerStats(name[:200], share.shards, share.rows, float(tokens), float(seconds))


def busiest(shares: Iterable[float]) -> float | None:
    """Return the largest share divided by the mean (1 is even); None if all are 0 or none given."""
    values = list(shares)
    mean = sum(values) / len(values) if values else 0.0
    return round(max(values) / mean, 3) if mean > 0 else None


def _known(place: Place, places: Mapping[Place, object]) -> Place:
    return place if place in places or len(places) < KNOWN else ("", OTHERS)


def _main(rows: Mapping[Place, int]) -> dict[Place, int]:
    """Return the entries of `rows`, {(attempt, name): rows}, of the attempt with most rows."""
    by_attempt: Counter[str] = Counter()
    for (attempt, _), number in rows.items():
        by_attempt[attempt] += number
    main = max(by_attempt, key=by_attempt.__getitem__, default="")
    return {place: number for place, number in rows.items() if place[0] == main}


def _engines_at_once(engines: Iterable[Place]) -> int:
    return max(Counter(attempt for attempt, _ in engines).values(), default=0)


def covered(starts: Sequence[float] | np.ndarray, ends: Sequence[float] | np.ndarray) -> float:
    """Return the seconds covered by at least one of the intervals [start, end]."""
    order = np.argsort(starts, kind="stable")
    start, end = np.asarray(starts, np.float64)[order], np.asarray(ends, np.float64)[order]
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], end]))[:-1]
    return float(np.maximum(0.0, end - np.maximum(start, reached)).sum())
