"""Counts what an engine computes, and how long it had nothing to compute (`sizing/roofline.py`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prefect_raybatch.ledger.stats import ShardStats
from prefect_raybatch.sizing.roofline import Work

if TYPE_CHECKING:
    from prefect_raybatch.stages.vllm.stepper import Completion, Request, SteppedEngine


class Meter:
    """Counts for one engine after another.

    `work` is the cost of tokens; without it nothing is counted. Thread-safe: several blocks are in
    an engine at once.
    """

    def __init__(self, work: Work | None, clock: Callable[[], float] = time.monotonic):
        self.work, self.clock = work, clock
        self._lock = threading.Lock()
        self._flops = self._bytes = 0.0
        self._since: float | None = None  # when it told last, or its first requests came
        self._engine: SteppedEngine | None = None
        self._steps, self._busy = 0, 0.0  # of that engine, when it told last

    def begin(self, engine: SteppedEngine) -> None:
        """Start counting; earlier work of the engine for others does not count."""
        if self.work is None:
            return
        found = engine.stats()
        with self._lock:
            self._engine, self._steps, self._busy = engine, found["steps"], found["busy_s"]

    def run(self, engine: SteppedEngine, requests: Sequence[Request]) -> list[Completion]:
        """Return the engine's answers, and count them. Raises what its `run` raises."""
        if self.work is None:
            return engine.run(requests)
        with self._lock:
            if self._since is None:
                self._since = self.clock()
        answers = engine.run(requests)
        flops = moved = 0.0
        for one in answers:
            if one.error is None:
                lengths = tuple(map(len, one.token_ids))
                done = self.work.of_answer(one.prompt_tokens, one.cached_tokens, lengths)
                flops, moved = flops + done[0], moved + done[1]
        with self._lock:
            self._flops += flops
            self._bytes += moved
        return answers

    def tell(self, engine: SteppedEngine) -> ShardStats:
        """Return what was done since the last call; empty if nothing is counted."""
        work = self.work
        if work is None:
            return ShardStats()
        found = engine.stats()
        with self._lock:
            if engine is not self._engine:  # the first, or another after a death
                self._engine, self._steps, self._busy = engine, 0, 0.0
            now = self.clock()
            up = now - (now if self._since is None else self._since)
            steps, busy = found["steps"] - self._steps, found["busy_s"] - self._busy
            told = ShardStats(
                flops=self._flops,
                moved_bytes=self._bytes + steps * work.weights,
                peak_flops=up * work.peak_flops,
                peak_bytes=up * work.peak_bytes,
                steps=steps,
                up_s=round(up, 4),
                idle_s=round(max(0.0, up - busy), 4),
            )
            self._flops = self._bytes = 0.0
            self._since, self._steps, self._busy = now, found["steps"], found["busy_s"]
        return told
