"""Prefect events of a run, which automations and other flows can act on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prefect.events import emit_event
from prefect.runtime import task_run

from prefect_raybatch.driver.heartbeat import MAKING, UNHEARD, Heartbeat, alive
from prefect_raybatch.errors import CostExceeded, ErrorBudgetExceeded, RunDrained, is_transient
from prefect_raybatch.flow.texts import prefect_text_in
from prefect_raybatch.report.report import duration
from prefect_raybatch.report.verdict import is_slow
from prefect_raybatch.words import are, counted, money

log = logging.getLogger(__name__)

COMMIT_EVERY = 5.0  # minimum seconds between two commit events
COMMIT_EVENTS = 400  # approximate maximum per run
STEADY = 5  # commits of this attempt after which its rate is used to estimate its end
COST_NEAR = 0.8  # share of limits.max_cost from which `cost.high` is emitted
EVENT_TEXT = 500  # characters of an error's message in an event


class RunEvents:
    """Emits the Prefect events of one run.

    Prefect adds the flow run, its flow and its deployment as related resources. During an outage of
    its API, Prefect queues events, and logs those that it cannot send.
    """

    def __init__(self, run_key: str, job: str):
        self.resource = {
            "prefect.resource.id": f"raybatch.run.{run_key}",
            "prefect.resource.name": run_key,
            "raybatch.job": job,
        }

    def emit(self, name: str, **payload: object) -> None:
        """Queue the event raybatch.NAME of this run with these fields as its payload."""
        self.queue(**self.event(name, payload))

    def event(self, name: str, payload: Mapping[str, object]) -> dict[str, Any]:
        """Return the fields of the event `name` of this run."""
        return {
            "event": f"raybatch.{name}",
            "resource": self.resource,
            "payload": prefect_text_in(dict(payload)),
        }

    def queue(self, **fields: Any) -> None:
        """Queue an event, which Prefect sends from another thread."""
        emit_event(**fields)

    def failed(self, error: Exception, retries: int) -> bool:
        """Emit the events for an error; return whether the run failed for good.

        The events say that the run exceeded its error budget or cost limit, was drained, or failed.
        Returns False if the run was drained, or if Prefect will retry the task: the error is
        transient, and Prefect has retried fewer than `retries` times.
        """
        text = str(error)[:EVENT_TEXT]
        if isinstance(error, RunDrained):  # requested by an operator, so no failure
            self.emit("run.drained", message=text)
            return False
        if isinstance(error, ErrorBudgetExceeded):
            self.emit("budget.exceeded", message=text)
        if isinstance(error, CostExceeded):
            self.emit("cost.exceeded", message=text)
        last = not is_transient(error) or (task_run.get_run_count() or 1) > retries
        if last:
            self.emit("run.failed", error=type(error).__name__, message=text)
        return last


class LiveEvents:
    """Turns heartbeats into Prefect events. Call `started` first.

    These events are sent:

    - commits, several in one event,
    - each stall,
    - more than `reported` failed rows,
    - a run that will probably take longer than its `deadline`, in seconds,
    - a cost that is near `max_cost` or will probably exceed it,
    - a run that takes at least twice `usual`, the usual seconds of the job's runs.

    All but commits and stalls are sent only once. `run` is the run directory.
    """

    usual: float | None = None

    def __init__(
        self,
        events: RunEvents,
        run: str,
        reported: int,
        deadline: float | None = None,
        max_cost: float | None = None,
        currency: str = "",
    ):
        self.currency = currency
        self.events, self.run, self.reported = events, run, reported
        self.deadline, self.max_cost, self._worked = deadline, max_cost, 0.0
        self.told_dear = self.told_slow = False
        self._began: float | None = None
        self._first = 0  # shards that were committed at the start
        self.told_late = False
        self._committed = self._alarms = 0
        self._at = float("-inf")
        self.told_high = False

    def started(self, beat: Heartbeat, worked: float = 0.0) -> None:
        """Emit the start event; must be called first.

        The shards in `beat` that are already committed are not reported later. `worked` is the
        seconds that earlier attempts took; it counts towards the deadline.
        """
        self._committed = self._first = beat.committed
        self._worked = worked
        self.events.emit("run.started", run=self.run, **_figures(beat))

    def outage(self, seconds: float) -> None:
        """Emit the event of an outage of Prefect's API that has ended."""
        about = (
            f"Prefect was unreachable for {duration(seconds)}. The run continued. If its "
            "deployment has a concurrency limit, the next run may start beside it"
        )
        self.events.emit("prefect.away", run=self.run, seconds=round(seconds), about=about)

    def see(self, beat: Heartbeat, now: float) -> None:
        """Emit the events that a new heartbeat calls for; `now` is monotonic, in seconds."""
        if beat.alarms > self._alarms:
            self.events.emit(
                "run.stalled", run=self.run, seconds=beat.quiet, about=beat.about, **_figures(beat)
            )
        self._alarms = beat.alarms
        if beat.failed > self.reported and not self.told_high:
            self.told_high = True
            log.warning(
                "%d rows have failed, above the warning threshold of %d (limits.warn_failed)",
                beat.failed,
                self.reported,
            )
            self.events.emit(
                "quarantine.high", run=self.run, reported=self.reported, **_figures(beat)
            )
        self._look_at_cost(beat)
        self._look_at_time(beat, now)
        self._commits(beat, now)

    def _look_at_cost(self, beat: Heartbeat) -> None:
        """Emit `cost.high` once 80 % of `max_cost` are spent or the forecast exceeds it."""
        if self.max_cost is None or self.told_dear or beat.cost_run is None:
            return
        end = beat.cost_end if self._is_steady(beat) else None
        if beat.cost_run < COST_NEAR * self.max_cost and (end is None or end <= self.max_cost):
            return
        self.told_dear = True
        expected = "" if end is None else f", about {money(end, self.currency)} at the end"
        about = (
            f"{money(beat.cost_run, self.currency)} spent{expected}; limits.max_cost is "
            f"{money(self.max_cost, self.currency)}, at which the run ends. Commits are kept; with "
            "a higher limit the same run key continues"
        )
        log.warning("the cost is near its limit: %s", about)
        self.events.emit("cost.high", run=self.run, about=about, **_figures(beat))

    def _is_steady(self, beat: Heartbeat) -> bool:
        return beat.committed - self._first >= STEADY

    def _look_at_time(self, beat: Heartbeat, now: float) -> None:
        """Emit `time.high` once for a slow run, `deadline.risk` once if it will miss its deadline.

        The rate is used only after `STEADY` commits, because the first ones include the engines'
        start. Time in which the run waits for a cluster to be created does not count.
        """
        if beat.phase in (MAKING, UNHEARD):
            return
        self._began = now if self._began is None else self._began
        if beat.committed == beat.shards:
            return
        taken = self._worked + now - self._began
        if not self.told_slow and self.usual is not None and is_slow(taken, self.usual):
            self.told_slow = True
            about = (
                f"{duration(taken)} elapsed; a run of this job usually takes "
                f"{duration(self.usual)}. {beat.committed:,} of {counted(beat.shards, 'shard')} "
                f"{are(beat.committed)} committed, {counted(alive(beat.engines), 'engine')} alive, "
                f"{counted(beat.engine_deaths, 'death')}. If commits have stopped, cancel the run "
                "and retry it: they are kept"
            )
            log.warning("the run takes at least twice the usual time: %s", about)
            self.events.emit("time.high", run=self.run, about=about, **_figures(beat))
        if self.deadline is None or self.told_late:
            return
        left = beat.seconds_left if self._is_steady(beat) else None
        if taken + (left or 0.0) <= self.deadline:
            return
        self.told_late = True
        time_left = "time left unknown" if left is None else f"about {duration(left)} left"
        about = (
            f"{duration(taken)} elapsed, {time_left}; limits.deadline is {duration(self.deadline)}"
        )
        log.warning("the run will probably miss its deadline: %s", about)
        self.events.emit("deadline.risk", run=self.run, about=about, **_figures(beat))

    def _commits(self, beat: Heartbeat, now: float) -> None:
        # Each event covers a minimum share of the shards, which bounds the events of all attempts.
        fresh = beat.committed - self._committed
        enough = fresh * COMMIT_EVENTS >= beat.shards and now - self._at >= COMMIT_EVERY
        if fresh > 0 and (enough or beat.committed == beat.shards):
            self._committed, self._at = beat.committed, now
            self.events.emit("shard.committed", run=self.run, new=fresh, **_figures(beat))


def _figures(beat: Heartbeat) -> dict[str, Any]:
    return {
        "rows": beat.rows,
        "done": beat.done,
        "failed": beat.failed,
        "shards": beat.shards,
        "committed": beat.committed,
        "rows_per_second": beat.rate,
        "seconds_left": beat.seconds_left,
        "engine_deaths": beat.engine_deaths,
        "phase": beat.phase,
        "cost": beat.cost_run,
        "cost_at_end": beat.cost_end,
    }
