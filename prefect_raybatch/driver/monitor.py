"""Monitors one attempt while the driver works: heartbeats, stalls, metrics, costs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from prefect_raybatch.bounded import ANSWER, BoundedCalls
from prefect_raybatch.driver import metrics
from prefect_raybatch.driver.cost import CostMeter, check_cost
from prefect_raybatch.driver.heartbeat import (
    ENDED,
    HEARTBEAT_SECONDS,
    INFERRING,
    STARTING,
    WAITING,
    Counts,
    Heartbeat,
    Listener,
    Ticker,
)
from prefect_raybatch.driver.stall import Flowing, Stall, StallWatch, starts
from prefect_raybatch.driver.starting import Starting
from prefect_raybatch.errors import CostExceeded, EngineFailure, StoreError
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.layout import COMMITS, heartbeat_path
from prefect_raybatch.ledger.record_files import put_record
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.stages.vllm.phases import ON_CLUSTER, ON_TURN, Marks
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted, some_are

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import Progress

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between looks
ASK_ENGINES = 10.0  # seconds between questions to Ray
DIED_LOOKS = 2  # looks in a row that must find Ray dead
LATE_PHASE_SECONDS = (
    2.0  # seconds after the first commit in which slow engines may still report phases
)


class EngineStates(Protocol):
    """The methods of a pipeline that report on its engines; all may raise or hang.

    - `engines` returns {Ray's actor state: number of engines}.
    - `starts` returns, for each engine, when each phase of its start began.
    - `deaths` returns {actor id: (deaths so far, text with process and node)}.
    - `server_wait` returns why the run waits for a hosted model's server, "" if it does not.
    """

    def engines(self) -> Mapping[str, int]: ...
    def starts(self) -> Sequence[Marks]: ...
    def deaths(self) -> Mapping[str, tuple[int, str]]: ...
    def server_wait(self) -> str: ...


class Monitor:
    """Watches one attempt from threads of its own: heartbeats, stalls, dead engines, and costs.

    Use the monitor as a context manager around the work. The driver calls it after each commit; the
    monitor then calls `observe` with the same progress. It regularly calls the methods of the
    `EngineStates` that were passed to `watch`. `on_started` is called once, after this attempt's
    first commit, with the phases of the start. `meter` counts the costs.

    The monitor does not end the run. The caller must end it once `failure` or `spent` is set.
    `failure` is the error of a stall, with `limits.fail_on_stall`. `spent` is the error of a
    reached cost limit.
    """

    def __init__(
        self,
        attempt: str,
        plan: Plan,
        store: Store,
        limits: Limits,
        observe: Callable[[Progress], None],
        engines: Callable[[], Mapping[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        on_started: Callable[[Starting], None] = lambda starting: None,
    ):
        self.attempt, self.plan, self.store, self.limits = attempt, plan, store, limits
        self.starts: Callable[[], Sequence[Marks]] = list
        self.deaths: Callable[[], Mapping[str, tuple[int, str]]] = dict
        # Last result of `deaths`; None before the first one of the present engines.
        self._dead: Mapping[str, tuple[int, str]] | None = None
        self._counting = threading.Lock()  # deaths are looked at from two threads
        self.leaving: Callable[[], Mapping[str, float | None]] = dict  # nodes, and seconds left
        self.ray_died: Callable[[], bool] = lambda: False  # on this host
        self._ray_died = 0  # checks in a row that found it dead; one may see a normal stop
        self._left: frozenset[str] = frozenset()  # draining nodes that were logged
        self.on_started = on_started
        self.starting = Starting()
        self.noted = False
        self.observe, self.engines, self.clock = observe, engines, clock
        self.counts: Counts | None = None  # at the latest commit
        self._progress: Progress | None = None
        self.failure: EngineFailure | None = None
        self.spent: CostExceeded | None = None
        self.meter = CostMeter()
        self.limited: Callable[[], str] = lambda: ""  # why the rate limiter holds back requests
        self._longest = 0.0
        self._watch = StallWatch(limits, clock())
        self._about = ""
        self._wait_reason = ""  # why the run does not work yet
        self.server_wait: Callable[[], str] = str
        self._server_wait = ""  # why the run waits for the server of a hosted model
        self.dashboard = ""  # of Ray, known once it is connected
        self._states: Mapping[str, int] = {}
        asked = ("engines", "leaving", "deaths", "starts", "start", "note", "store", "server")
        self._questions = {name: BoundedCalls(ANSWER) for name in asked}
        self._unheard = ""  # why Ray did not report the engine states; "" if they are current
        self._asked = self._written = float("-inf")
        self._ended = False
        self._beats = Ticker("heartbeat", HEARTBEAT_SECONDS, self.write)

    def __call__(self, progress: Progress) -> None:
        """Take a snapshot of the progress for other threads; the driver calls it at each commit."""
        self.counts, self._progress = Counts.of(progress), progress
        if progress.recent:
            self.starting.end()
            series = progress.tally.series
            self._longest = max(self._longest, series.ended[-1] - series.started[-1])
        self.observe(progress)

    def set_cluster(
        self,
        dashboard: str,
        leaving: Callable[[], Mapping[str, float | None]],
        ray_died: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set the URL of Ray's dashboard ("" if none) and the functions that query Ray's nodes.

        `leaving` returns {node: seconds until it ends, None if unknown} for nodes being drained;
        `ray_died` returns whether Ray on this host has died.
        """
        self.dashboard, self.leaving, self.ray_died = dashboard, leaving, ray_died
        if dashboard:
            log.info("Ray's dashboard: %s", dashboard)

    def watch(self, engines: EngineStates) -> None:
        """Query these engines from now on, e.g. those of a new pipeline."""
        self.engines, self.starts = engines.engines, engines.starts
        self._states, self._asked = {}, float("-inf")  # forget earlier engines
        with self._counting:
            self.deaths, self._dead = engines.deaths, None
        self.server_wait = engines.server_wait

    def set_waiting(self, why: str) -> None:
        """Record why the run waits, e.g. for resources; `why` is "" once it continues.

        A waiting run is not reported as stalled.
        """
        self._wait_reason = why
        self.starting.enter(ON_TURN if why else ON_CLUSTER)
        self._beats.nudge()

    def pass_began(self) -> None:
        """Begin to watch a new pass; called in the driver's thread before its engines start."""
        if self.starting.ended is not None:
            self.note_start()
            self.starting = Starting()
        self.starting.again()
        with self._counting:
            if self._dead is None:  # as in `look_at_deaths`
                self._dead = self._ask_deaths()

    def note_start(self) -> None:
        """Call `on_started`, once, with the phases of the start before the attempt's first commit.

        Does nothing before that commit. Call it while Ray can still be queried.
        """
        if self.noted or self.starting.ended is None:
            return
        self.noted = True
        try:
            self.starting.heard(self._questions["start"](self.starts))
            self._questions["note"](partial(self.on_started, self.starting))
        except Exception as error:  # the run does not depend on it
            log.info(
                "the duration of the start could not be recorded: %s: %s",
                type(error).__name__,
                error,
            )

    def __enter__(self) -> Monitor:
        with ExitStack() as stack:
            stack.enter_context(metrics.serving(self.plan.job_name, self.plan.run_key, self.beat))
            stack.enter_context(self._beats)
            stack.enter_context(Ticker("stall detection", LOOK, self.look))
            stack.callback(self._end)
            self._stack = stack.pop_all()
        self._beats.nudge()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._ended = True

    def beat(self) -> Heartbeat:
        """Return the current state as a heartbeat."""
        latest, watch = self.counts, self._watch
        counts = self._now(latest)
        if self._ended:
            phase = ENDED
        elif watch.alarms or self._wait_reason or self._server_wait:
            phase = WAITING
        else:
            # By the current counts, which are newer than those that the watch saw last.
            starting = counts is None or latest is None or starts(latest, counts.passes)
            phase = STARTING if starting and not self.limited() else INFERRING
        more: dict[str, Any] = {
            "phase": phase,
            "engines": dict(self._states),
            "alarms": watch.alarms,
            "dashboard": self.dashboard,
        }
        about = self._about if watch.alarms else self._wait_reason or self._server_wait
        if phase == STARTING:
            about = self.starting.text()
        elif phase == INFERRING:
            about = self.limited()
        if counts is None:
            rows, shards = self.plan.rows, self.plan.shards
            more |= self.meter.figures(None)
            return Heartbeat(time.time(), rows=rows, shards=shards, about=about, **more)
        quiet = round(self.clock() - watch.since, 1) if watch.alarms else 0.0
        found = Heartbeat.of(counts, time.time(), quiet=quiet, about=about, **more)
        left = 0.0 if self._ended else found.seconds_left
        return replace(found, **self.meter.figures(left))

    def _now(self, counts: Counts | None) -> Counts | None:
        """Return `counts` with the current passes and engine deaths; None if `counts` is None."""
        progress = self._progress
        if counts is None or progress is None:
            return None
        return replace(counts, passes=progress.passes, engine_deaths=progress.engine_deaths)

    # --- the thread that checks -------------------------------------------------------------

    def look(self) -> None:
        """Check engines, nodes, costs and stalls once; called about once a second in a thread."""
        now = self.clock()
        self._look_at_ray()  # first: the process may end any moment
        if not self._ended and now - self._asked >= ASK_ENGINES:
            self._asked = now
            self._look_at_engines()
            self._look_at_server()
            self._look_at_nodes()
            self.look_at_deaths()
        latest = self.counts
        counts = self._now(latest)
        self._look_at_cost(now, counts)  # first: nothing may keep a limit on costs from holding
        self._look_at_start()
        if self._wait_reason or self._server_wait or self.limited():
            self._watch = StallWatch(self.limits, now)
        elif counts is not None and latest is not None and not self._ended:
            found = self._watch.look(now, latest, counts.passes, self._longest)
            if isinstance(found, Stall):
                self._stalled(found, counts)
            elif isinstance(found, Flowing):
                log.warning("commits flow again after %.0f s without one", found.seconds)
                self._beats.nudge()
        if isinstance(self.observe, Listener):
            self.observe.on_heartbeat(self.beat())

    def _look_at_ray(self) -> None:
        """Report, once, that Ray on this host has died: this process will end within seconds."""
        self._ray_died = self._ray_died + 1 if self.ray_died() else 0
        if self._ended or self._ray_died != DIED_LOOKS:
            return
        rows, done = self.plan.rows, self.counts.done if self.counts is not None else 0
        cause = (
            "Ray on this host died (its raylet process ended), which ends this process too. "
            f"{some_are(done, rows, 'row')} committed. If nobody stopped Ray, the "
            "host ran out of memory; see `dmesg` and /tmp/ray/session_latest/logs/raylet.out there"
        )
        log.error("%s", cause)
        if isinstance(self.observe, Listener):
            self.observe.on_process_end(cause)

    def _look_at_engines(self) -> None:
        """Update the engine states, or keep the old ones if Ray does not answer.

        An error is only logged, because costs and stalls must be checked in any case.
        """
        try:
            self._states, self._unheard = self._questions["engines"](self.engines), ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if not self._unheard:
                log.warning("Ray does not report its engines: %s; the run continues", why)
            self._unheard = why

    def _look_at_server(self) -> None:
        try:
            self._server_wait = self._questions["server"](self.server_wait)
        except Exception as error:  # only informative, as below
            log.debug("the server's state is not known: %s: %s", type(error).__name__, error)

    def _look_at_nodes(self) -> None:
        """Log each node that is being drained, once: its engines get no new shards."""
        try:
            leaving = self._questions["leaving"](self.leaving)
        except Exception as error:  # only informative: costs and stalls must still be checked
            log.debug("nodes that leave are not known: %s: %s", type(error).__name__, error)
            return
        for node in sorted(leaving.keys() - self._left):
            left = leaving[node]
            when = "" if left is None else f" within {left:.0f} s"
            log.warning(
                "node %s leaves the cluster%s: its engines finish their shards in flight and get "
                "no new ones; other nodes take the remaining shards",
                *(node, when),
            )
        self._left = frozenset(leaving)

    def look_at_deaths(self) -> None:
        """Count each engine process that died since the last call, and log a warning for it.

        Ray restarts a dead engine by itself, which takes minutes; until then nothing else reports
        it.
        """
        with self._counting:
            dead = self._ask_deaths()
            if dead is None:
                return
            # The first table also has the engines of earlier runs of this process.
            known = dead if self._dead is None else self._dead
            for engine, (times, now) in dead.items():
                before, place = known.get(engine, (0, now))
                if times > before and not self._ended:
                    self._died(times - before, times, place)
            self._dead = dead

    def _ask_deaths(self) -> Mapping[str, tuple[int, str]] | None:
        try:
            return self._questions["deaths"](self.deaths)
        except Exception as error:  # only informative, as above
            log.debug("deaths are not known: %s: %s", type(error).__name__, error)
            return None

    def _died(self, more: int, times: int, place: str) -> None:
        if self._progress is not None:
            self._progress.process_deaths += more
        place = f" ({place})" if place else ""
        if self.starting.ended is None:
            log.warning(
                "an engine's process died before its first shard%s, %s so far. If nobody "
                "stopped it, its node ran out of memory; see `dmesg` there",
                *(place, counted(times, "time")),
            )
        else:
            log.warning(
                "an engine's process died%s, %s so far; its shards in flight run again in the "
                "next pass",
                *(place, counted(times, "time")),
            )

    def _look_at_start(self) -> None:
        """Query the engines' start-up phases until the first commit of a pass.

        Shortly after the first commit of the attempt, calls `note_start`.
        """
        ended = self.starting.ended
        if ended is not None and time.time() - ended > LATE_PHASE_SECONDS:
            self.note_start()
        if self._wait_reason or self._ended or ended is not None:
            return
        try:
            self.starting.heard(self._questions["starts"](self.starts))
        except Exception as error:  # only informative: stalls must still be checked
            log.debug("the phase of the start is unknown: %s: %s", type(error).__name__, error)

    def _look_at_cost(self, now: float, counts: Counts | None) -> None:
        self.meter.see(now, self._states)
        committed = counts.committed if counts is not None else 0
        try:
            currency = self.meter.currency
            check_cost(self.limits, self.meter.total_cost, self.plan.shards, committed, currency)
        except CostExceeded as error:
            self.spent = self.spent or error

    def _stalled(self, stall: Stall, counts: Counts) -> None:
        self._look_at_engines()  # the last known states may be older than the stall
        unheard = f" (last known; Ray did not answer: {self._unheard})" if self._unheard else ""
        try:
            seen = self._questions["store"](partial(probe, self.store))
        except Exception as error:
            seen = f"listing it failed: {type(error).__name__}: {error}"
        self._about = (
            f"no shard was committed for {stall.seconds:.0f} s, where {stall.limit:.0f} s are "
            f"allowed{' until the first of a pass' if stall.starting else ''} "
            f"({counts.committed:,} of {counted(counts.shards, 'shard')}, pass {counts.passes}, "
            f"{counts.engine_deaths} engine deaths). Engines: "
            f"{_states_text(self._states, self._unheard)}{unheard}. Store: {seen}; {self._heard()}"
        )
        log.warning("%s", self._about)
        self._beats.nudge()
        if self.limits.fail_on_stall and self.failure is None:
            self.failure = EngineFailure(
                f"{self._about}. limits.fail_on_stall ends the run. Committed shards are kept; run "
                "the same command again to continue"
            )

    def _heard(self) -> str:
        if self._written == float("-inf"):
            return "no heartbeat was written yet"
        return f"the last heartbeat was written {self.clock() - self._written:.0f} s ago"

    # --- the thread that writes heartbeats --------------------------------------------------

    def write(self) -> None:
        """Write a heartbeat with the current state to the store."""
        put_record(self.store, heartbeat_path(self.attempt), self.beat().to_bytes())
        self._written = self.clock()


def probe(store: Store) -> str:
    """List the folder of commits; return text on how long that took, or on its error."""
    began = time.monotonic()
    try:
        next(iter(store.list(COMMITS)), None)
    except StoreError as error:
        return f"a listing failed after {time.monotonic() - began:.1f} s: {error}"
    return f"a listing took {time.monotonic() - began:.2f} s"


def _states_text(states: Mapping[str, int], unheard: str) -> str:
    none = "none known" if unheard else "none alive"
    return ", ".join(f"{n} {state.lower()}" for state, n in sorted(states.items())) or none
