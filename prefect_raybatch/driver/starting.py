"""Start-up phases of a run until its first shard is committed, with their durations.

The driver measures how long it waits for the cluster and for Ray's workers; after that the engines
report their own phases (`stages/vllm/phases.py`). Of several engines, the slowest one is shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from prefect_raybatch.stages.vllm.phases import (
    ENGINE_PHASES,
    FIRST_STEP,
    ON_CLUSTER,
    ON_ROWS,
    ON_WORKERS,
    STEPPED,
    Marks,
)


class Starting:
    """Measures each phase of a pass's start. Thread-safe; times are in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self.clock = clock
        self._lock = threading.Lock()
        self._phase, self._since = ON_CLUSTER, clock()
        self._seconds: dict[str, float] = {}
        self._engines: tuple[Marks, ...] = ()
        self._end: float | None = None

    def enter(self, phase: str) -> None:
        """Begin a phase; if it was entered before, its durations add up."""
        with self._lock:
            self._close(self.clock())
            self._phase = phase

    def again(self) -> None:
        """Begin another pass, with new engines in an existing cluster.

        From the second pass on, the durations start again at 0.
        """
        with self._lock:
            self._close(self.clock())
            if self._phase == ON_WORKERS:  # the second pass, or a later one
                self._seconds.clear()
            self._phase, self._engines = ON_WORKERS, ()

    def heard(self, engines: Sequence[Marks]) -> None:
        """Record the phases that the engines of the pass have reported so far."""
        with self._lock:
            self._engines = tuple(engines)

    def end(self) -> None:
        """Record that the first shard of the pass is committed."""
        with self._lock:
            self._end = self._end or self.clock()

    @property
    def ended(self) -> float | None:
        """Return the time on `clock` at which the start ended; None before that."""
        return self._end

    @property
    def engines(self) -> int:
        return len(self._engines)

    def _close(self, now: float) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now

    def seconds(self) -> dict[str, float]:
        """Return {phase: seconds so far} in chronological order.

        The last phase may still be running. Phases that were never reported are left out.
        """
        with self._lock:
            now = self._end or self.clock()
            found = dict(self._seconds)
            found[self._phase] = found.get(self._phase, 0.0) + now - self._since
            if self._phase != ON_WORKERS or not self._engines:
                return _rounded(found)
            marks = max(self._engines, key=_how_far_behind)
            began = sorted((at, name) for name, at in marks.items() if at <= now)
            if not began:
                return _rounded(found)
            before = found.pop(ON_WORKERS)
            # Prewarmed engines started before the run had them; the run did not wait for that
            # part of their start.
            began = _since(now - before, began)
            found[ON_WORKERS] = max(0.0, before - max(0.0, now - began[0][0]))
            for (at, name), (until, _) in zip(began, [*began[1:], (now, "")], strict=True):
                found[ON_ROWS if name == STEPPED else name] = max(0.0, until - at)
            return _rounded(found)

    def text(self) -> str:
        """Return the duration of each phase and, with several engines, how many are ready.

        For example `cluster 3 s, workers 2 s, imports 9 s (1 of 2 engines ready)`.
        """
        text = ", ".join(f"{name} {value:.0f} s" for name, value in self.seconds().items())
        known = self._engines
        if len(known) > 1:
            ready = sum(FIRST_STEP in marks for marks in known)
            text += f" ({ready} of {len(known)} engines ready)"
        return text


def _since(start: float, began: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the phases in `began` without those that ended before `start`.

    A phase that was in progress at `start` gets `start` as its start time. Phases are (start time,
    name), in chronological order.
    """
    over = sum(at <= start for at, _ in began[1:])
    return [(max(at, start), name) for at, name in began[over:]]


def _how_far_behind(marks: Marks) -> tuple[int, float]:
    """Return a sort key that is larger for an engine in an earlier phase.

    In the same phase, it is larger for the engine that entered it later.
    """
    order = (*ENGINE_PHASES, STEPPED)
    phase = max(order.index(name) for name in marks)
    return -phase, marks[order[phase]]


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in seconds.items()}
