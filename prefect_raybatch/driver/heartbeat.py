"""Heartbeats: small records of a run's current state, and the thread that writes them.

They are stored beside the records of attempts, for people and for processes that follow a run;
correctness never depends on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from prefect_raybatch.errors import CorruptRun
from prefect_raybatch.ledger.layout import HEARTBEATS, heartbeat_path
from prefect_raybatch.ledger.record_files import read_record
from prefect_raybatch.ledger.records import dump, load
from prefect_raybatch.storage import Store

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import Progress

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0  # seconds between two records of an attempt
SILENT_AFTER = 60.0  # seconds without one after which an attempt is shown as silent
STARTING, INFERRING, WAITING, ENDED = "starting engines", "inferring", "waiting", "ended"
UNHEARD = "waiting for the Ray job"  # phase until the driver in a Ray job has sent a heartbeat
TEXT_FIELDS = ("phase", "about", "dashboard")  # fields that hold text
COSTS = ("cost", "cost_run", "cost_end")
SINCE_COSTS = (
    "gpu_seconds",
    "to_larger",
    *COSTS,
)  # left out of a record if 0 or None: records of older versions lack them
UNKNOWN_AT_FIRST = ("seconds_left", "last_commit", *COSTS)  # numbers that may be None
MAKING = "waiting for the cluster"  # phase while a cluster is created for the run
PHASES = (STARTING, INFERRING, WAITING, ENDED)
JOIN_SECONDS = 10.0  # seconds that a thread may take to end: a user who cancels waits for it


@dataclass(frozen=True, slots=True)
class Counts:
    """A snapshot of `Progress` for other threads, taken in the driver's thread after a commit.

    `rows` and `shards` are the planned numbers. `done` counts the committed rows, `committed` the
    committed shards, and `skipped` the rows left out by `output.postprocess`. `at` and
    `window_start` are seconds since 1970. The rate is computed over the latest commits, which
    `commits`, `window_rows` and `window_start` describe; these are 0 before this attempt's first
    commit. `held_back` counts the failed rows of the shard that crossed the error budget; that
    shard is not committed. `to_larger` counts the rows that a cascade's first model has passed on
    to the larger one. `before` and `later` are the numbers of rows of the run's previous and next
    phase.
    """

    at: float
    rows: int
    shards: int
    done: int
    failed: int
    skipped: int
    committed: int
    passes: int
    engine_deaths: int
    prompt_tokens: float
    output_tokens: float
    commits: int
    window_rows: int
    window_start: float
    held_back: int = 0
    before: int = 0
    later: int = 0
    to_larger: int = 0

    @classmethod
    def whole(cls, progress: Progress) -> Counts:
        """Return the counts of a whole run: of this phase, the one before it and the one after it.

        In the requests phase, `failed` counts all rows that wait for a failed request.
        """
        own, before, later = cls.of(progress), progress.before, progress.later
        return replace(
            own,
            rows=progress.whole,
            done=progress.whole_done,
            shards=before.shards + own.shards + later.shards,
            committed=before.shards + own.committed,
            failed=progress.failed,
            before=before.rows,
            later=later.rows,
        )

    @classmethod
    def of(cls, progress: Progress, now: float | None = None) -> Counts:
        tally, recent = progress.tally, progress.recent
        return cls(
            at=time.time() if now is None else now,
            rows=progress.rows,
            shards=progress.shards,
            done=tally.rows,
            failed=tally.failed - progress.to_larger,
            to_larger=progress.to_larger,
            skipped=tally.skipped,
            committed=tally.shards,
            passes=progress.passes,
            engine_deaths=progress.engine_deaths,
            prompt_tokens=tally.stats.prompt_tokens or 0.0,
            output_tokens=tally.stats.output_tokens or 0.0,
            commits=len(recent),
            window_rows=sum(rows for _, rows in recent),
            window_start=recent[0][0] if recent else 0.0,
            held_back=progress.held_back,
        )

    def rate(self, now: float) -> float:
        """Return rows per second from the start of the latest commits until `now`.

        `now` is in seconds since 1970. The rate falls while nothing is committed; it is 0 before
        this attempt's first commit.
        """
        return self.window_rows / max(now - self.window_start, 1e-6) if self.commits else 0.0


@dataclass(frozen=True)
class Heartbeat:
    """The current state of a run, as a driver writes it to the store for others.

    Rates are per second, times are seconds; `at` and `last_commit` are seconds since 1970. `phase`
    is one of PHASES, or UNHEARD or MAKING, which are never stored. `rows` and `shards` are the
    planned numbers. `done` counts the committed rows, `committed` the committed shards, and
    `skipped` the rows left out by `output.postprocess`. `engines` is {Ray's actor state: number of
    engines}. `alarms` counts the warnings of the present stall and `quiet` is its duration; both
    are 0 while shards are being committed. `about` is a text on the stall, on what the run waits
    for, or on its start. `dashboard` is the URL of Ray's dashboard, "" if there is none.
    `held_back` counts the failed rows of the shard that crossed the error budget, in addition to
    the committed `failed` rows. `to_larger` counts the rows that a cascade's first model has passed
    on to the larger one. `gpu_seconds` and `cost` are of this attempt. `cost_run` is the cost of
    the whole run so far, and `cost_end` an estimate of it at the end of the run; an unknown cost is
    None.
    """

    at: float
    phase: str = STARTING
    rows: int = 0
    shards: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0
    committed: int = 0
    rate: float = 0.0
    prompt_tokens_rate: float = 0.0
    output_tokens_rate: float = 0.0
    seconds_left: float | None = None
    passes: int = 0
    engine_deaths: int = 0
    engines: Mapping[str, int] = field(default_factory=dict)
    last_commit: float | None = None
    alarms: int = 0
    quiet: float = 0.0
    about: str = ""
    dashboard: str = ""
    held_back: int = 0
    gpu_seconds: float = 0.0
    cost: float | None = None
    cost_run: float | None = None
    cost_end: float | None = None
    to_larger: int = 0

    @classmethod
    def of(cls, counts: Counts, now: float, **more: Any) -> Heartbeat:
        rate = counts.rate(now)
        own = counts.done - counts.before
        a_row = rate / own if own else 0.0
        left = counts.rows - counts.done - counts.later  # the later phase has another rate
        return cls(
            at=round(now, 3),
            rows=counts.rows,
            shards=counts.shards,
            done=counts.done,
            failed=counts.failed,
            skipped=counts.skipped,
            committed=counts.committed,
            rate=round(rate, 2),
            prompt_tokens_rate=round(counts.prompt_tokens * a_row, 1),
            output_tokens_rate=round(counts.output_tokens * a_row, 1),
            seconds_left=round(left / rate, 1) if rate else None,
            passes=counts.passes,
            engine_deaths=counts.engine_deaths,
            held_back=counts.held_back,
            to_larger=counts.to_larger,
            last_commit=round(counts.at, 3) if counts.commits else None,
            **more,
        )

    def with_committed(self, done: int) -> Heartbeat:
        """Return this heartbeat, with its phase corrected for a run with `done` committed rows.

        If it says that engines are starting but counts fewer rows than `done`, it is older than the
        latest commit: the phase becomes "inferring". The other numbers stay.
        """
        if self.phase == STARTING and self.done < done:
            return replace(self, phase=INFERRING, about="")
        return self

    def to_bytes(self) -> bytes:
        value = asdict(self)
        return dump({k: v for k, v in value.items() if v or k not in SINCE_COSTS})

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Heartbeat:
        """Decode a heartbeat; `what` names its record in error messages.

        Raises `CorruptRun` for anything that `to_bytes` does not write.
        """
        value = load(data, what)
        numbers = {f.name for f in fields(cls)} - set(TEXT_FIELDS) - {"engines"}
        try:
            beat = cls(**value)
            engines = {str(k)[:40]: int(v) for k, v in dict(beat.engines).items()}
        except (TypeError, ValueError) as error:
            raise CorruptRun(f"{what} is not a valid heartbeat: {error}") from None
        wrong = [n for n in numbers if not _is_number(getattr(beat, n), n)]
        wrong += [n for n in TEXT_FIELDS if not isinstance(getattr(beat, n), str)]
        if wrong or beat.phase not in PHASES:
            raise CorruptRun(
                f"{what} is not a valid heartbeat: wrong value of {', '.join(wrong) or 'phase'}"
            )
        return cls(**{**value, "engines": engines})


def to_larger_text(rows: int) -> str:
    """Return e.g. `, 12 to the larger model`, to append to a number of failed rows; "" for 0.

    `rows` counts the rows that a cascade's first model has passed on to the larger one.
    """
    return f", {rows:,} to the larger model" if rows else ""


def alive(engines: Mapping[str, int]) -> int:
    """Return the number of live engines, from the `engines` of a heartbeat."""
    return engines.get("ALIVE", 0)


def _is_number(value: object, name: str) -> bool:
    if value is None:
        return name in UNKNOWN_AT_FIRST
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Listener:
    """An observer of commits that also receives heartbeats, about once a second in a thread."""

    def __call__(self, progress: Progress) -> None:
        """Observe a commit.

        Called in the driver's thread, so it must return quickly.
        """

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Receive the current state, also while nothing is committed."""

    def on_process_end(self, cause: str) -> None:
        """Receive the reason why this process will end within seconds, without an exception."""

    def on_judge(self, uri: str) -> None:
        """Receive the directory of the run that judges the answers, before it begins."""


class Listeners(Listener):
    """A listener that passes everything on to `observers`, in their order."""

    def __init__(self, observers: Sequence[Callable[[Progress], None]]):
        self._observers = observers
        self._listeners = [one for one in observers if isinstance(one, Listener)]

    def __call__(self, progress: Progress) -> None:
        for observer in self._observers:
            observer(progress)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        for listener in self._listeners:
            listener.on_heartbeat(beat)

    def on_process_end(self, cause: str) -> None:
        for listener in self._listeners:
            listener.on_process_end(cause)

    def on_judge(self, uri: str) -> None:
        for listener in self._listeners:
            listener.on_judge(uri)


def read_heartbeats(store: Store, attempts: Iterable[str]) -> dict[str, Heartbeat]:
    """Read the last heartbeat of each attempt, leaving out those that are missing or damaged."""
    found = {}
    for attempt in attempts:
        path = heartbeat_path(attempt)
        try:
            found[attempt] = Heartbeat.from_bytes(read_record(store, path), path)
        except FileNotFoundError:
            continue
        except CorruptRun as fault:
            log.warning("%s", fault)
    return found


def newest(store: Store) -> Heartbeat | None:
    """Return the latest heartbeat of any driver of the run; None if there is no readable one."""
    names = [i.path.rpartition("/")[2].removesuffix(".json") for i in store.list(HEARTBEATS)]
    names = [name for name in names if name.isalnum()]  # no copies that a tool made
    return max(read_heartbeats(store, names).values(), key=lambda beat: beat.at, default=None)


def heartbeat_elsewhere(store: Store, counts: Counts, over: bool = False) -> Heartbeat:
    """Return the latest heartbeat in the store, or one built from `counts` alone.

    A heartbeat is built in these cases:

    - The store has no readable one.
    - The latest one is older than SILENT_AFTER seconds.
    - The latest one says that its driver has ended, and `over` is False.

    Pass `over` if all rows are committed, or if the Ray job has ended. A stored heartbeat may count
    fewer rows than are committed (see `Heartbeat.with_committed`).
    """
    beat, now = newest(store), time.time()
    if beat is None or now - beat.at > SILENT_AFTER or (beat.phase == ENDED and not over):
        return unheard(counts)
    return beat


def unheard(counts: Counts) -> Heartbeat:
    """Build a heartbeat from `counts` for a run whose driver, in another process, has sent none."""
    return Heartbeat.of(counts, time.time(), phase=UNHEARD)


class Ticker:
    """A context manager that calls `work` every `seconds` in a thread, and once more on exit.

    An exception from `work` is logged, unless the last one had the same message, and never fails
    the run. The thread inherits the caller's contextvars, so that Prefect finds the flow run in it.
    """

    def __init__(self, name: str, seconds: float, work: Callable[[], None]):
        self.name, self.seconds, self.work = name, seconds, work
        self._wake, self._stop = threading.Event(), False
        self._said = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Ticker:
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._loop,), name=self.name, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def nudge(self) -> None:
        """Call `work` as soon as possible."""
        self._wake.set()

    def _loop(self) -> None:
        last = False
        while not last:
            self._wake.wait(self.seconds)
            self._wake.clear()
            last = self._stop  # read before the work, since the end may come during it
            self._once()

    def _once(self) -> None:
        try:
            self.work()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._said:
                self._said = text
                log.warning("%s: %s; the run continues", self.name, text)
