"""Heartbeats and events in tests: counts, what keeps them, and waiting for them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import (
    Counts,
    Heartbeat,
    Listener,
)


def wait_for(what, seconds: float = 120.0):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return found


def counts(**changed: float) -> Counts:
    made = Counts(
        at=100.0, rows=100, shards=10, done=40, failed=2, skipped=1, committed=4, passes=1,
        engine_deaths=0, prompt_tokens=400.0, output_tokens=80.0, commits=3, window_rows=30,
        window_start=85.0,
    )  # fmt: skip
    return replace(made, **changed)


class Heard(Listener):
    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.progress: list[int] = []

    def __call__(self, progress: Progress) -> None:
        self.progress.append(progress.done)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.beats.append(beat)


def caught_events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events that flows of this process send from now on, each of which Prefect confirms."""
    # Here, as engines in Ray's workers come from tests that import this module.
    from prefect_raybatch.flow import completion, events

    caught = list[dict[str, Any]]()
    monkeypatch.setattr(events, "emit_event", lambda **event: caught.append(event))
    monkeypatch.setattr(completion, "send_confirmed", lambda **event: caught.append(event))
    return caught
