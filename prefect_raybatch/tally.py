"""Folds commits into counts, sums and stage statistics; memory grows by one tuple a shard."""

from __future__ import annotations

import time

from prefect_raybatch.records import Commit, StageStats, count

STAGES = tuple((name, f"{name}_s") for name in ("read", "prepare", "engine", "finish"))


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

    def add(self, commit: Commit) -> None:
        self.shards += 1
        self.good += count(commit.good)
        self.failed += count(commit.failed)
        self.skipped += count(commit.skipped)
        for key, value in commit.stats.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
            self.longest[key] = max(self.longest.get(key, 0.0), value)
        for key, rows in commit.failures.items():
            self.failures[key] = self.failures.get(key, 0) + int(rows)
        rows = int(commit.stats.get("rows", 0))
        self.ends.append((commit.stats.get("started", 0), commit.stats.get("ended", 0), rows))

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
        return StageStats(
            name=name,
            tasks=self.shards,
            rows=self.rows,
            seconds=round(seconds, 3),
            rows_per_s=round(self.rows / seconds, 1) if seconds else 0.0,
            balance=round(mean / longest, 3) if longest else 1.0,
        )


def _covered(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
