"""The loop of one attempt: runs passes over the uncommitted shards and commits complete shards.

It fails the run when too many rows have failed, and isolates rows that kill engines. It imports
neither Ray nor Prefect: a pass is a function from work units to receipts, so tests run the loop
without either.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from prefect_raybatch.driver.stops import Stop, failed_rows
from prefect_raybatch.errors import (
    EngineFailure,
    ErrorBudgetExceeded,
    ImagesUnavailable,
    RunDrained,
)
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.checkpoints import CheckpointWriter
from prefect_raybatch.ledger.failures import (
    ENGINE_DIED,
    ENGINES_DIED,
    FEW_ALONE,
    IMAGE_UNAVAILABLE,
    Loss,
    add_failures,
    alike,
)
from prefect_raybatch.ledger.increments import RequestWeights
from prefect_raybatch.ledger.ledger import Coverage, Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Commit, Plan, Receipt, Unit
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.words import are, counted, some_are

log = logging.getLogger(__name__)

SPLIT = 16  # parts a unit is cut into once it died alone: 4,000 rows are single rows after 3 cuts
ALONE = 2000  # most units of an isolated pass: each takes a Ray task of its own in each stage
STRIKES = 3  # passes in a row without progress, after which the run fails
PROBES = 3  # rows of committed shards that tell whether engines work at all
NO_RECEIPT = "no receipt came back"
LOSSES, LOSS = 20, 200  # how many reasons for lost shards are kept, and characters of each
RATE_WINDOW = 30  # commits over which the displayed rate is computed
DRAINED_TEXT = "drained:"  # start of the message of a drained run
COMMON = 5  # failures named in an error


class RunPass(Protocol):
    """A pass: sends units through the stages and yields their receipts as they arrive.

    With `isolated`, each engine gets only one unit at a time. A receipt whose `lost` is set says
    why its unit has no result; a unit may also end without any receipt.
    """

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]: ...


Quarantine = Callable[[Unit, Loss], Receipt]


@dataclass(frozen=True)
class PhaseProgress:
    """Size of the run's other phase: one that is over, or one that is still to come.

    `rows` and `shards` are the planned numbers. If the phase is over, `failed` counts the rows of
    the run that will fail because their request failed in it. Otherwise `failed` is 0.
    """

    rows: int = 0
    shards: int = 0
    failed: int = 0


@dataclass
class Progress:
    """Progress of one phase of a run, over all attempts at it.

    A run has two phases with reuse or `engine.order: run` (requests, then rows) and in a cascade
    (one for each model).

    - `rows` and `shards` are the planned numbers of this phase; `tally` counts what is committed.
    - `before` is the phase that is over, `later` the phase still to come. `whole` is the planned
      number of rows of all phases.
    - `rate` is of this attempt only.
    - `held_back` counts the failed rows of the shard that crossed the error budget. The tally lacks
      these rows, because that shard is not committed.
    - `core_deaths` counts deaths of an engine core whose actor survived. `process_deaths` counts
      deaths of actor processes, as Ray counts them.
    - `rows_of_failed` counts failed rows. In a requests phase, a failed request counts as all the
      rows that wait for it.
    - `recent` holds (start of the work, rows) for each of the latest commits.
    - `passed_on` holds the error classes with which a cascade's first model passes rows on to the
      larger model. It is empty outside that phase.
    """

    rows: int
    shards: int
    tally: Tally = field(default_factory=Tally)
    resumed_shards: int = 0
    began: float = field(default_factory=time.time)
    core_deaths: int = 0
    process_deaths: int = 0
    held_back: int = 0
    losses: Counter[str] = field(default_factory=Counter)  # why shards were lost
    passes: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    before: PhaseProgress = PhaseProgress()
    later: PhaseProgress = PhaseProgress()
    rows_of_failed: int = 0  # failed rows, where a failed request counts each row that waits for it
    passed_on: frozenset[str] = frozenset()  # error classes that the larger model answers again

    @property
    def to_larger(self) -> int:
        """Return how many rows a cascade's first model has passed on to the larger model."""
        failures = self.tally.failures.items() if self.passed_on else ()
        return sum(rows for key, rows in failures if key.error in self.passed_on)

    @property
    def whole(self) -> int:
        """Return the planned number of rows of all phases of the run."""
        return self.before.rows + self.rows + self.later.rows

    @property
    def whole_done(self) -> int:
        return self.before.rows + self.done

    @property
    def unit(self) -> tuple[str, str]:
        """Return the noun for what `whole` counts, as (singular, plural).

        It is "row" or, if the run has two phases, "step". A step is one request or one row of a
        phase.
        """
        both = self.before.rows or self.later.rows
        return ("step", "steps") if both else ("row", "rows")

    @property
    def engine_deaths(self) -> int:
        """Return how often an engine of this attempt died."""
        return self.core_deaths + self.process_deaths

    @property
    def failed(self) -> int:
        """Return the number of failed rows of the run.

        Includes rows that wait for a failed request, but not those that a cascade's first model
        passed on to the larger model.
        """
        return max(self.before.failed, self.rows_of_failed, self.tally.failed) - self.to_larger

    @property
    def done(self) -> int:
        return self.tally.rows

    @property
    def rate(self) -> float:
        """Return rows per second over the latest commits; 0 before the first commit."""
        if not self.recent:
            return 0.0
        start, rows = self.recent[0][0], sum(n for _, n in self.recent)
        return rows / max(time.time() - start, 1e-6)

    @property
    def seconds_left(self) -> float | None:
        return (self.rows - self.done) / self.rate if self.rate else None

    def add(self, commit: Commit, since: float) -> None:
        """Count a commit; work on its rows began at `since`, in seconds since 1970.

        The rate is computed from these times.
        """
        before = self.tally.rows
        self.tally.add(commit)
        self.recent.append((since, self.tally.rows - before))


class Driver:
    """Drives one attempt at a phase until all its shards are committed or an error ends it.

    `observe` is called after each commit. When a shard crosses the error budget, `observe` is
    called once more, and `on_stop` gets the `Stop` with a sample of the shard's failed rows.
    `waiting` is set only in the requests phase, in which each shard holds requests instead of rows.
    It holds how many rows wait for each request; if a request fails, all of them fail. `draining`
    is called before each pass and after an incomplete one; once it returns True, `run` raises
    `RunDrained`. `fetches_images` is True if this phase fetches the images of its rows.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Shards,
        ledger: Ledger,
        limits: Limits,
        observe: Callable[[Progress], None] = lambda progress: None,
        on_stop: Callable[[Stop], None] = lambda stop: None,
        waiting: RequestWeights | None = None,
        draining: Callable[[], bool] = lambda: False,
        fetches_images: bool = False,
    ):
        self.plan, self.shards, self.ledger = plan, shards, ledger
        self.limits, self.observe, self.on_stop = limits, observe, on_stop
        self.coverage = Coverage(shards)
        self.checkpoints = CheckpointWriter(ledger.store, plan.hash)
        self.progress = Progress(plan.rows, plan.shards)
        self.done = np.zeros(plan.shards, dtype=bool)
        self.waiting, self.draining, self.fetches_images = waiting, draining, fetches_images
        self._last = time.time()
        self._lost: dict[int, list[tuple[Unit, Loss]]] = {}  # by shard, in this pass
        self._warned: set[int] = set()
        self._codes: set[str] = set()  # workers' versions that were warned about
        self._answered = False  # whether anything came through the stages in this attempt

    def resume(self) -> Progress:
        """Count the shards that are already committed, and return the progress.

        Raises `ErrorBudgetExceeded` if shards are pending although too many rows have failed.
        """
        listing = self.ledger.listing(self.plan)
        self.done = listing.done
        if listing.strays:
            log.warning(
                "files among the commits that are no commits are ignored: %s", listing.strays
            )
        for commit in self.ledger.commits(self.plan, listing, on_read=self.checkpoints.add):
            self.progress.add(commit, self._last)
            self.progress.rows_of_failed += self._rows_of_failed(commit)
        self.progress.recent.clear()
        self.progress.resumed_shards = self.progress.tally.shards
        if not self.done.all():  # else there is nothing to stop, though the limit may be lower now
            self._check_budget([])
        return self.progress

    def run(self, run_pass: RunPass, quarantine: Quarantine, suspects: int = 64) -> Progress:
        """Run passes until every shard is committed. Call `resume` first.

        `quarantine(unit, why)` writes the piece for a single row that kills its engine and returns
        its receipt. `suspects` is the number of units that may be in flight in engines at once. If
        a pass leaves no more units than these uncommitted, or makes no progress, the next pass
        isolates its units: each engine gets one at a time.

        Raises the error that a receipt reports as fatal, `ErrorBudgetExceeded`, `RunDrained`, or
        `EngineFailure` after STRIKES passes in a row without progress. Committed shards stay
        committed.
        """
        units = [Unit(s, 0, self.shards[s].rows) for s in np.flatnonzero(~self.done).tolist()]
        deaths: Counter[Unit] = Counter()
        strikes, most_alone, passes_before = 0, ALONE, self.progress.passes
        while units:
            self._check_draining()
            # Isolate once all missing units may have been in flight at a death. More units than
            # that were never tried, and one unit at a time would be slow. A pass without progress
            # is isolated too, because the next one would only die in the same way.
            few = strikes > 0 or len(units) <= suspects
            isolated = self.progress.passes > passes_before and few
            rows_before, deaths_before = self._rows_received(), deaths.total()
            turn, later = (units[:most_alone], units[most_alone:]) if isolated else (units, [])
            asked = [*self._probes(), *turn] if isolated else turn
            self._pass(run_pass, asked, isolated)
            units = self._lacking(turn)
            if units:  # units returned because of a drain must not count as deaths
                self._check_draining()
            if isolated:
                units = self._after_isolation(units, deaths, quarantine)
            if later:
                units += self._lacking(later)
            # If engines work at all, a death by a single row is progress: quarantine follows.
            died = self._answered and deaths.total() > deaths_before
            if died or self._rows_received() > rows_before:
                strikes, most_alone = 0, ALONE
            elif isolated and most_alone > FEW_ALONE and self._gave_up():
                # Unknown which of its units were tried. The next pass is small enough to try all.
                most_alone = FEW_ALONE
            else:
                strikes += 1
            if units:
                self._go_again(units, strikes)
        self.checkpoints.flush()
        return self.progress

    def run_once(self, run_pass: RunPass, shards: Sequence[int]) -> None:
        """Run one pass over the pending ones among `shards`.

        Call `resume` before, and `run` for the other shards after. Shards that the pass does not
        commit stay pending. Raises the errors of `run`, except `EngineFailure` for lack of
        progress.
        """
        self._check_draining()
        units = [Unit(s, 0, self.shards[s].rows) for s in shards if not self.done[s]]
        if units:
            self._pass(run_pass, units, isolated=False)
            self._check_draining()
        self.progress.recent.clear()  # other engines start now, and take another rate

    def _go_again(self, units: Sequence[Unit], strikes: int) -> None:
        """Log how many shards a pass left uncommitted.

        Raises `EngineFailure` if `strikes`, the passes in a row without progress, reaches STRIKES.
        """
        if strikes >= STRIKES:
            reason = next((lost[0][1] for lost in self._lost.values()), NO_RECEIPT)
            raise EngineFailure(
                f"no shard was committed in {counted(strikes, 'pass', 'passes')}; "
                f"{counted(len(units), 'unit')} of work {are(len(units))} left. Last "
                f"reason: {reason}"
            )
        log.warning(
            "%d of %s not committed after pass %d; running them again",
            len({u.shard for u in units}),
            counted(self.plan.shards, "shard"),
            self.progress.passes,
        )

    def _check_draining(self) -> None:
        if not self.draining():
            return
        self.checkpoints.flush()
        done, shards = self.progress.tally.shards, self.plan.shards
        raise RunDrained(
            f"{DRAINED_TEXT} {some_are(done, shards, 'shard')} committed; "
            f"{shards - done:,} {are(shards - done)} left. Run the same command again to "
            "finish them"
        )

    def _pass(self, run_pass: RunPass, units: Sequence[Unit], isolated: bool) -> None:
        self.progress.passes += 1
        self._lost = {}  # losses of an earlier pass do not explain a death in this one
        for receipt in run_pass(units, isolated):
            if receipt.lost is not None:
                self._record_loss(receipt.unit, receipt.lost)
                continue
            self._answered = True
            self._accept(receipt)

    def _probes(self) -> list[Unit]:
        """Return answered rows of committed shards, to test whether engines work at all.

        Engines infer these rows again, and the new answers are discarded. The test is needed
        because an earlier attempt may have left only rows that kill engines. Returns [] if this
        attempt has received an answer already, or if the shards looked at have no answered row.
        """
        done = np.flatnonzero(self.done).tolist()
        if self._answered or not done:
            return []
        chosen = {done[len(done) * at // PROBES] for at in range(PROBES)}
        answered = {s: self.ledger.read_commit(self.plan, s).good.bits for s in sorted(chosen)}
        return [Unit(s, bits.bit_length() - 1, 1) for s, bits in answered.items() if bits]

    def _accept(self, receipt: Receipt) -> None:
        if self.done[receipt.shard]:
            return
        self._check_worker_code(receipt)
        whole = self.coverage.add(receipt)
        if whole is not None:
            self._commit(receipt.shard, whole)

    def _check_worker_code(self, receipt: Receipt) -> None:
        """Warn, once for each version, if the worker ran another version of this package."""
        theirs, own = receipt.where.get("code"), code_version()
        if theirs is None or theirs == own or theirs in self._codes:
            return
        self._codes.add(theirs)
        log.warning(
            "workers run another version than this driver: prefect_raybatch %s on %s, and %s here. "
            "Install the same version on all nodes, and start the run outside of folders with a "
            "prefect_raybatch of their own: Ray's workers import that first",
            *(theirs, receipt.where.get("node"), own),
        )

    def _commit(self, shard: int, receipts: list[Receipt]) -> None:
        self._check_budget(receipts)
        commit = self.ledger.commit(self.plan, self.shards[shard].rows, receipts)
        if commit is None:  # another driver won; its record holds
            commit = self.ledger.read_commit(self.plan, shard)
        self._count(shard, commit)

    def _count(self, shard: int, commit: Commit) -> None:
        self.done[shard] = True
        self._lost.pop(shard, None)
        now = time.time()
        # The first commit's work began with the engines, not with this loop's start.
        since = self._last if self.progress.recent else commit.stats.started or self._last
        self.progress.add(commit, since)
        self.progress.rows_of_failed += self._rows_of_failed(commit)
        self.checkpoints.add(commit)
        self._last = now
        self.observe(self.progress)

    def _check_budget(self, receipts: Sequence[Receipt]) -> None:
        """Raise `ErrorBudgetExceeded` if more rows failed than the job's limits allow.

        Counts the failed rows of all committed shards and of `receipts`. These are the receipts of
        a shard that is about to be committed, or []. Raises `ImagesUnavailable` instead if the
        limit is exceeded only because images of rows in `receipts` could not be fetched. In both
        cases that shard stays uncommitted, so that a later attempt runs it again.
        """
        more = sum(map(self._rows_of_failed, receipts))
        rows = self.plan.rows if self.waiting is None else self.waiting.rows
        allowed = self.limits.allowed(rows)
        failed = self.progress.rows_of_failed + more
        if failed <= allowed:
            return
        self._check_images(receipts, failed, rows)
        tried = None
        if self.waiting is None:  # otherwise the phase counts requests, not rows
            tried = self.progress.tally.rows + sum(receipt.unit.rows for receipt in receipts)
        stop = Stop(failed, more, allowed, rows, tried=tried)
        if receipts:
            stop = self._stopped(stop, receipts)
        failures = add_failures([self.progress.tally.failures, *(r.failures for r in receipts)])
        common = alike(failures).most_common(COMMON)
        lines = [
            f"  {counted(number, 'row')}: {key.stage}: {key.error}: {key.message}"
            for key, number in common
        ]
        lines += ["Examples:"] if stop.sample else []
        lines += [f"  {line}" for line in stop.lines()]
        committed = some_are(self.progress.tally.shards, self.plan.shards, "shard")
        raise ErrorBudgetExceeded(
            f"{stop.share()}, more than {self.limits.sentence_start(rows)}"
            f"{stop.rest()}. Most common:\n"
            + "\n".join(lines)
            + f"\n{committed} committed and kept. Fix the cause or raise the limit, then run the "
            "job again."
        )

    def _check_images(self, receipts: Sequence[Receipt], failed: int, rows: int) -> None:
        """Raise `ImagesUnavailable` if too many rows failed only because images are unavailable.

        `failed` is the number of failed rows of the run, those in `receipts` included. `rows` is
        the number of all rows of the run. Only rows in `receipts` are checked for unavailable
        images. Does nothing in a phase that fetches no images, since a retry would not help there.
        """
        away = 0.0
        for receipt in receipts if self.fetches_images else ():
            number = sum(n for key, n in receipt.failures.items() if key.error == IMAGE_UNAVAILABLE)
            if number:  # rows of the run, also where a failed request stands for several
                away += number * self._rows_of_failed(receipt) / len(receipt.failed)
        if away and failed - round(away) <= self.limits.allowed(rows):
            raise ImagesUnavailable(
                f"the images of {counted(round(away), 'row')} in shard {receipts[0].shard} cannot "
                f"be fetched now, and {self.limits.sentence_start(rows)} fewer rows to fail"
            )

    def _rows_of_failed(self, record: Receipt | Commit) -> int:
        """Return the number of failed rows in a receipt or commit.

        In the requests phase, a failed request counts as all the rows that wait for it.
        """
        if self.waiting is None:
            return len(record.failed)
        return self.waiting.count(record.shard, record.failed)

    def _stopped(self, stop: Stop, receipts: Sequence[Receipt]) -> Stop:
        """Report that a shard crosses the error budget, by calling `observe` and `on_stop`.

        `receipts` are those of the shard. Returns `stop` with the shard's number and a sample of
        its failed rows, read from quarantine.
        """
        shard = receipts[0].shard
        pieces = [piece for receipt in receipts for piece in receipt.pieces]
        numbers = partial(self.ledger.numbers, self.plan)
        found = failed_rows(self.ledger.store, pieces, self.shards[shard].start, numbers)
        stop = replace(stop, shard=shard, sample=found)
        self.progress.held_back = stop.held_back
        self.observe(self.progress)
        self.on_stop(stop)
        return stop

    def _record_loss(self, unit: Unit, why: Loss) -> None:
        if why.fatal:
            raise why.to_error()
        if why.is_death and not why.counted:
            self.progress.core_deaths += 1
        if unit.shard not in self._warned:
            self._warned.add(unit.shard)
            log.warning("shard %d was lost: %s", unit.shard, why)
        text = str(why)[:LOSS]
        if text in self.progress.losses or len(self.progress.losses) < LOSSES:
            self.progress.losses[text] += 1
        self._lost.setdefault(unit.shard, []).append((unit, why))

    def _gave_up(self) -> bool:
        """Return whether this pass ended early because its engines kept dying."""
        losses = (why for lost in self._lost.values() for _, why in lost)
        return any(why.kind == ENGINES_DIED for why in losses)

    def _why_lost(self, unit: Unit) -> Loss:
        """Return why a unit failed in this pass: the last reason reported for any of its rows.

        Other rows of its shard may have failed for another reason. Without a reported reason, an
        engine death is assumed.
        """
        told = reversed(self._lost.get(unit.shard, []))
        found = (why for lost, why in told if lost.overlaps(unit))
        return next(found, Loss(ENGINE_DIED, NO_RECEIPT))

    def _rows_received(self) -> int:
        """Return the number of rows that are committed or held by receipts, to measure progress."""
        pending = np.flatnonzero(~self.done).tolist()
        return self.plan.rows - sum(map(self.coverage.lacking, pending))

    def _count_foreign_commits(self) -> None:
        """Count the commits that other drivers have made since the last call."""
        theirs = self.ledger.committed(self.plan) & ~self.done
        for shard in np.flatnonzero(theirs).tolist():
            self.coverage.drop(shard)
            self._count(shard, self.ledger.read_commit(self.plan, shard))

    def _lacking(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the parts of `units` that no driver has committed and that have no receipt.

        First counts the shards that other drivers have committed.
        """
        self._count_foreign_commits()
        left = []
        gaps = {u.shard: self.coverage.gaps(u.shard) for u in units if not self.done[u.shard]}
        for unit in units:
            for start, stop in gaps.get(unit.shard, ()):
                low, high = max(start, unit.offset), min(stop, unit.offset + unit.rows)
                if low < high:
                    left.append(Unit(unit.shard, low, high - low))
        return left

    def _after_isolation(
        self, units: list[Unit], deaths: Counter[Unit], quarantine: Quarantine
    ) -> list[Unit]:
        """Return the units for the pass after one in which each engine had one unit at a time.

        `units` are those that got no receipt:

        - A unit of several rows that may have killed its engine is split.
        - For a unit of one row that may have killed its engine, the death is counted in `deaths`.
          After `limits.engine_deaths` deaths the row is quarantined, if engines are known to work.
        - A unit that failed for another reason is returned as it is.

        Engines are not known to work if there are committed shards, but this attempt has received
        no answer, not even for rows of those shards (`_probes`).
        """
        rest: list[Unit] = []
        # Where there are no probes, each engine answers a fixed prompt before it blames a row.
        works = self._answered or not self._probes()
        for unit in units:
            why = self._why_lost(unit)
            if not why.may_be_caused_by_row:
                rest.append(unit)  # the store's or the input's fault: cutting would not help
            elif unit.rows > 1:
                rest += split_unit(unit)
            else:
                deaths[unit] += 1
                if deaths[unit] < self.limits.engine_deaths or not works:
                    rest.append(unit)
                else:
                    self._accept(quarantine(unit, why))
        return rest


def split_unit(unit: Unit) -> list[Unit]:
    """Split a unit into up to 16 parts of about equal size, in order."""
    size = -(-unit.rows // SPLIT)
    return [
        Unit(unit.shard, unit.offset + at, min(size, unit.rows - at))
        for at in range(0, unit.rows, size)
    ]
