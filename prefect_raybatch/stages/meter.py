"""Measures an engine's work in FLOPs and bytes of memory traffic, and its idle time."""

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
    """Counts FLOPs, bytes, steps and idle time of an actor's engine, and of those that replace it.

    `work` (see `sizing/roofline.py`) has the FLOPs and bytes of memory traffic that a token costs
    and the GPUs' peaks; if it is None, nothing is counted. Thread-safe, because several blocks are
    in an engine at once.
    """

    def __init__(self, work: Work | None, clock: Callable[[], float] = time.monotonic):
        self.work, self.clock = work, clock
        self._lock = threading.Lock()
        self._flops = self._bytes = 0.0
        self._since: float | None = None  # time of the last `take_stats`, or of the first requests
        self._engine: SteppedEngine | None = None
        self._steps, self._busy = 0, 0.0  # its steps and busy seconds at the last `take_stats`

    def begin(self, engine: SteppedEngine) -> None:
        """Begin to count the work of an engine that runs already.

        The steps and busy time that it spent on earlier runs are not counted.
        """
        if self.work is None:
            return
        found = engine.stats()
        with self._lock:
            self._engine, self._steps, self._busy = engine, found["steps"], found["busy_s"]

    def run(self, engine: SteppedEngine, requests: Sequence[Request]) -> list[Completion]:
        """Send `requests` to the engine, return its answers, and count the work.

        Answers with an error do not count. Raises what `engine.run` raises.
        """
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

    def take_stats(self, engine: SteppedEngine) -> ShardStats:
        """Return the engine's work since the last call.

        The first call returns the work since the engine got its first requests. `flops`,
        `moved_bytes` and `steps` are the work; `peak_flops` and `peak_bytes` are the most that its
        GPUs could have done in that time. `up_s` is the length of that time in seconds, `idle_s`
        the part in which the engine had no requests. Empty if `work` is None.
        """
        work = self.work
        if work is None:
            return ShardStats()
        found = engine.stats()
        with self._lock:
            if engine is not self._engine:  # the first engine, or a new one after a death
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
