"""Folds commits into counts, sums and stage statistics; memory grows by one tuple a shard."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prefect_raybatch.ledger.ranges import count
from prefect_raybatch.ledger.records import MEANS, PEAKS, Commit, NodeStats, StageStats, WorkerStats

STAGES = tuple((name, f"{name}_s") for name in ("read", "prepare", "engine", "finish"))
SHOWN = 64  # engines and nodes that a report names; the rest are one line
KNOWN = 4096  # names kept apart at most: records are untrusted
OTHERS = "others"
MOST = 2**53  # a larger count is nobody's, and does not fit into a float


Place = tuple[str, str]  # attempt and name: other attempts have other engines, and other nodes


@dataclass
class Folded:
    """What shards of one engine, one node or the whole run say: counts, weighted means, peaks."""

    shards: int = 0
    rows: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    engines: set[Place] = field(default_factory=set)
    means: dict[str, tuple[float, float]] = field(default_factory=dict)  # weighted sum, weight
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, rows: int, stats: Mapping[str, float]) -> None:
        self.shards += 1
        self.rows += rows
        self.tokens += stats.get("prompt_tokens", 0.0) + stats.get("output_tokens", 0.0)
        self.seconds += stats.get("engine_s", 0.0)
        samples = stats.get("samples", 0.0)
        if not samples:
            return
        for key in MEANS:
            if key in stats:
                total, weight = self.means.get(key, (0.0, 0.0))
                self.means[key] = (total + stats[key] * samples, weight + samples)
        for key in PEAKS:
            if key in stats:
                self.peaks[key] = max(self.peaks.get(key, stats[key]), stats[key])

    def figures(self) -> dict[str, float]:
        """Means and peaks that are known."""
        means = {key: total / weight for key, (total, weight) in self.means.items() if weight}
        return {key: round(value, 4) for key, value in {**means, **self.peaks}.items()}


@dataclass
class Series:
    """Numbers of each commit in the order they were added, for plots: a few bytes a shard.

    Seconds of a stage that a commit does not know are NaN.
    """

    shard: array[float] = field(default_factory=lambda: array("d"))
    rows: array[float] = field(default_factory=lambda: array("d"))
    failed: array[float] = field(default_factory=lambda: array("d"))
    prompt: array[float] = field(default_factory=lambda: array("d"))
    output: array[float] = field(default_factory=lambda: array("d"))
    seconds: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("f") for name, _ in STAGES}
    )

    def add(self, commit: Commit, rows: int, failed: int) -> None:
        stats = commit.stats
        self.shard.append(min(commit.shard, MOST))
        self.rows.append(min(rows, MOST))
        self.failed.append(min(failed, MOST))
        self.prompt.append(stats.get("prompt_tokens", 0.0))
        self.output.append(stats.get("output_tokens", 0.0))
        for name, key in STAGES:
            self.seconds[name].append(stats.get(key, math.nan))


class Tally:
    """Folds commits into what a report needs, in memory that does not grow with them.

    Rates are over the times in the commits, not over the attempts' clocks, so that a run that was
    killed and resumed a day later shows how fast it worked and not how long it slept.
    """

    def __init__(self) -> None:
        self.good = self.failed = self.skipped = self.shards = 0
        self.sums: dict[str, float] = {}
        self.longest: dict[str, float] = {}
        self.failures: dict[str, int] = {}
        self.ends: list[tuple[float, float, int]] = []  # started, ended, rows of each shard
        self.series = Series()
        self.whole = Folded()
        self.by_engine: dict[Place, Folded] = {}
        self.by_node: dict[str, Folded] = {}
        self.finished_on: dict[Place, int] = {}  # rows by the node that finish ran on

    def add(self, commit: Commit) -> None:
        good, failed, skipped = map(count, (commit.good, commit.failed, commit.skipped))
        self.shards += 1
        self.good += good
        self.failed += failed
        self.skipped += skipped
        self.series.add(commit, good + failed + skipped, failed)
        self._place(commit, good + failed + skipped)
        for key, value in commit.stats.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
            self.longest[key] = max(self.longest.get(key, 0.0), value)
        for key, rows in commit.failures.items():
            self.failures[key] = self.failures.get(key, 0) + int(rows)
        rows = int(commit.stats.get("rows", 0))
        self.ends.append((commit.stats.get("started", 0), commit.stats.get("ended", 0), rows))

    def _place(self, commit: Commit, rows: int) -> None:
        """Counts a commit for the engine and the nodes it went through, where they are known."""
        self.whole.add(rows, commit.stats)
        node, engine = commit.where.get("node"), commit.where.get("engine")
        if isinstance(node, str):
            place = _known((commit.attempt, node), self.finished_on)
            self.finished_on[place] = self.finished_on.get(place, 0) + rows
        if isinstance(engine, str):
            place = _known((commit.attempt, engine), self.by_engine)
            self.by_engine.setdefault(place, Folded()).add(rows, commit.stats)
            host = engine.rpartition(":")[0]
            host = host if host in self.by_node or len(self.by_node) < KNOWN else OTHERS
            self.by_node.setdefault(host, Folded()).add(rows, commit.stats)
            self.by_node[host].engines.add(place)

    @property
    def rows(self) -> int:
        return self.good + self.failed + self.skipped

    @property
    def busy_seconds(self) -> float:
        """Time in which at least one shard was in the engine stage or after it."""
        return _covered(sorted((start, end) for start, end, _ in self.ends))

    @property
    def steady_rate(self) -> float:
        """Rows a second between the ends of the first and the last shard: without engine start.

        With fewer than three shards that is no steady state, and the rate over all is given.
        """
        ends = sorted((end, rows) for _, end, rows in self.ends)
        if len(ends) < 3 or ends[-1][0] <= ends[0][0]:
            return self.rows / self.busy_seconds if self.busy_seconds else 0.0
        first = ends[0][0]  # from there on; time in which nothing ran, between attempts, is not
        spans = sorted((max(start, first), end) for start, end, _ in self.ends if end > first)
        return sum(rows for _, rows in ends[1:]) / _covered(spans)

    def recent_rate(self, window: float = 120.0) -> float:
        """Rows a second over the shards that ended in the last `window` seconds; 0 for none."""
        now = time.time()
        recent = [(start, rows) for start, end, rows in self.ends if now - end < window]
        if not recent:
            return 0.0
        return sum(rows for _, rows in recent) / max(now - min(s for s, _ in recent), 1e-6)

    def stages(self) -> tuple[StageStats, ...]:
        return tuple(self._stage(name, key) for name, key in STAGES if key in self.sums)

    def _stage(self, name: str, key: str) -> StageStats:
        seconds, longest = self.sums[key], self.longest[key]
        mean = seconds / self.shards if self.shards else 0.0
        engines = {place: one.rows for place, one in self.by_engine.items()}
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
        """Engines of the attempt that did most rows."""
        return len(_main({place: one.rows for place, one in self.by_engine.items()}))

    def workers(self) -> tuple[WorkerStats, ...]:
        """The engines of the attempt that did most rows, those with most rows first: what others
        did says nothing of how even these were."""
        shares = {place: one.rows for place, one in self.by_engine.items()}
        main = {place[1]: self.by_engine[place] for place in _main(shares)}
        found = [
            WorkerStats(name[:200], one.shards, one.rows, one.tokens, round(one.seconds, 3))
            for name, one in main.items()
        ]
        found.sort(key=lambda worker: -worker.rows)
        if len(found) > SHOWN:
            rest = found[SHOWN - 1 :]
            found[SHOWN - 1 :] = [
                WorkerStats(
                    f"{len(rest)} {OTHERS}",
                    sum(worker.shards for worker in rest),
                    sum(worker.rows for worker in rest),
                    sum(worker.tokens for worker in rest),
                    sum(worker.seconds for worker in rest),
                )
            ]
        return tuple(found)

    def nodes(self) -> tuple[NodeStats, ...]:
        """The nodes that had engines, those with most rows first; at most 64 of them. The engines
        of one are those of the attempt that had most of them there."""
        ordered = sorted(self.by_node.items(), key=lambda item: -item[1].rows)
        return tuple(
            NodeStats(name[:200], _at_once(one.engines), one.shards, one.rows, one.figures())
            for name, one in ordered[:SHOWN]
        )


def busiest(shares: Iterable[float]) -> float | None:
    """The largest share over the mean one (1 is even); None where there is nothing to share."""
    values = list(shares)
    mean = sum(values) / len(values) if values else 0.0
    return round(max(values) / mean, 3) if mean > 0 else None


def _known(place: Place, places: Mapping[Place, object]) -> Place:
    return place if place in places or len(places) < KNOWN else ("", OTHERS)


def _main(rows: Mapping[Place, int]) -> dict[Place, int]:
    """Those places of the attempt that did most rows."""
    by_attempt: Counter[str] = Counter()
    for (attempt, _), number in rows.items():
        by_attempt[attempt] += number
    main = max(by_attempt, key=by_attempt.__getitem__, default="")
    return {place: number for place, number in rows.items() if place[0] == main}


def _at_once(engines: Iterable[Place]) -> int:
    return max(Counter(attempt for attempt, _ in engines).values(), default=0)


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
