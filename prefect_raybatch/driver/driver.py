"""The loop that turns receipts into commits: passes, budget, isolation of what kills engines.

Knows neither Ray nor Prefect: a pass is a function from work units to receipts, so the loop is
tested without either.
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
    ConfigError,
    CorruptRun,
    EngineFailure,
    EngineStartError,
    ErrorBudgetExceeded,
    RayBatchError,
    RunDrained,
    SourceError,
    StoreError,
)
from prefect_raybatch.installed import code_version
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.checkpoints import Folder
from prefect_raybatch.ledger.failures import (
    ENGINE_DIED,
    ENGINES_DIED,
    FEW_ALONE,
    Loss,
    add_failures,
    alike,
)
from prefect_raybatch.ledger.increments import Waiting
from prefect_raybatch.ledger.ledger import Coverage, Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Commit, Plan, Receipt, Unit
from prefect_raybatch.report.tally import Tally
from prefect_raybatch.words import are, counted

log = logging.getLogger(__name__)

SPLIT = 16  # parts a unit is cut into once it died alone: 4,000 rows are single rows after 3 cuts
ALONE = 2000  # units of a pass that isolates them: each takes a Ray task of its own in each stage
STRIKES = 3  # passes in a row in which nothing got through, before the infrastructure is to blame
PROBES = 3  # rows of committed shards that tell whether engines work at all
NO_RECEIPT = "no receipt came back"
LOSSES, LOSS = 20, 200  # reasons why shards were lost that are kept, and characters of each
RATE_WINDOW = 30  # commits the shown rate is taken over
DRAINED_TEXT = "drained:"  # how the message of a drained run begins
COMMON = 5  # failures named in an error


class RunPass(Protocol):
    """Sends units through the stages and yields their receipts as they come."""

    def __call__(self, units: Sequence[Unit], isolated: bool) -> Iterator[Receipt]: ...


Quarantine = Callable[[Unit, Loss], Receipt]


@dataclass(frozen=True)
class OtherLedger:
    """What one of the two ledgers of a run that reuses answers has to do; `failed`: rows of the run
    that are known to fail by it."""

    rows: int = 0
    shards: int = 0
    failed: int = 0


@dataclass
class Progress:
    """How far a run is, counted over all attempts. Rates are of this attempt, in rows a second.

    `held_back` counts failed rows of the shard that crossed the error budget: it is not committed,
    so they are not in the tally. A run that reuses asks first and then looks its rows up: `before`
    is what has been done when this begins, `later` what comes after it, and those that show it
    count the `whole`. `core_deaths` are of engines whose actor lived on, told with the shards that
    they cost; `process_deaths` are of the actors' own processes, as Ray counts them.
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
    before: OtherLedger = OtherLedger()
    later: OtherLedger = OtherLedger()
    weighed: int = 0  # failed rows, of which a request that failed may stand for several

    @property
    def whole(self) -> int:
        """Rows of the run and, where it reuses, the requests that it asks first."""
        return self.before.rows + self.rows + self.later.rows

    @property
    def whole_done(self) -> int:
        return self.before.rows + self.done

    @property
    def unit(self) -> tuple[str, str]:
        """What `whole` counts, one and several of them."""
        both = self.before.rows or self.later.rows
        return ("request or row", "requests and rows") if both else ("row", "rows")

    @property
    def engine_deaths(self) -> int:
        """How often an engine of this attempt died."""
        return self.core_deaths + self.process_deaths

    @property
    def failed(self) -> int:
        """Rows of the run that failed, also such as wait for a request that did."""
        return max(self.before.failed, self.weighed, self.tally.failed)

    @property
    def done(self) -> int:
        return self.tally.rows

    @property
    def rate(self) -> float:
        """Rows a second over the latest commits; 0 while there are none."""
        if not self.recent:
            return 0.0
        start, rows = self.recent[0][0], sum(n for _, n in self.recent)
        return rows / max(time.time() - start, 1e-6)

    @property
    def seconds_left(self) -> float | None:
        return (self.rows - self.done) / self.rate if self.rate else None

    def add(self, commit: Commit, since: float) -> None:
        """Counts a commit; `since` is when its rows' work began, for the rate."""
        before = self.tally.rows
        self.tally.add(commit)
        self.recent.append((since, self.tally.rows - before))


class Driver:
    """Drives one attempt at a run to its end.

    `observe` is called after each commit, and once more when the error budget is crossed, of which
    `on_stop` is told. `waiting`: the rows of another run that wait for those of this one, by which
    its failed rows are counted. `draining`: whether nothing more is to be begun.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Shards,
        ledger: Ledger,
        limits: Limits,
        observe: Callable[[Progress], None] = lambda progress: None,
        on_stop: Callable[[Stop], None] = lambda stop: None,
        waiting: Waiting | None = None,
        draining: Callable[[], bool] = lambda: False,
    ):
        self.plan, self.shards, self.ledger = plan, shards, ledger
        self.limits, self.observe, self.on_stop = limits, observe, on_stop
        self.coverage = Coverage(shards)
        self.folder = Folder(ledger.store, plan.hash)
        self.progress = Progress(plan.rows, plan.shards)
        self.done = np.zeros(plan.shards, dtype=bool)
        self.waiting, self.draining = waiting, draining
        self._failed = 0  # rows, of which one may stand for many
        self._last = time.time()
        self._lost: dict[int, list[tuple[Unit, Loss]]] = {}  # of a shard, in this pass
        self._warned: set[int] = set()
        self._codes: set[str] = set()  # of workers, that were told of
        self._answered = False  # whether anything came through the stages in this attempt

    def resume(self) -> Progress:
        """Fold what is committed already. Raise `ErrorBudgetExceeded` if shards are left to do and
        too many rows have failed."""
        listing = self.ledger.listing(self.plan)
        self.done = listing.done
        if listing.strays:
            log.warning(
                "files among the commits that are none count for nothing: %s", listing.strays
            )
        for commit in self.ledger.commits(self.plan, listing, on_read=self.folder.add):
            self.progress.add(commit, self._last)
            self._failed += self._weighed(commit)
        self.progress.weighed = self._failed
        self.progress.recent.clear()
        self.progress.resumed_shards = self.progress.tally.shards
        if not self.done.all():  # else there is nothing to stop, though the limit may be lower now
            self._check_budget([])
        return self.progress

    def run(self, run_pass: RunPass, quarantine: Quarantine, suspects: int = 64) -> Progress:
        """Passes until all is committed. Call `resume` first.

        `quarantine(unit, why)` writes the piece for a single row that kills its engine and
        returns its receipt. `suspects`: units that engines can have in flight together.

        Raises the error of a fatal receipt, `ErrorBudgetExceeded`, or `EngineFailure` when
        nothing gets through any more. What is committed stays committed.
        """
        units = [Unit(s, 0, self.shards[s].rows) for s in np.flatnonzero(~self.done).tolist()]
        deaths: Counter[Unit] = Counter()
        strikes, most_alone = 0, ALONE
        while units:
            self._check_draining()
            # Isolated once what is missing may all have been in flight at a death; more than that
            # was never tried, and one unit at a time would be slow. A pass that got nothing through
            # would only die the same way again.
            few = strikes > 0 or len(units) <= suspects
            isolated = self.progress.passes > 0 and few
            before, known = self._held(), deaths.total()
            turn, later = (units[:most_alone], units[most_alone:]) if isolated else (units, [])
            asked = [*self._probes(), *turn] if isolated else turn
            self._pass(run_pass, asked, isolated)
            units = self._missing(turn)
            if units:  # what was given back is no death of a row
                self._check_draining()
            if isolated:
                units = self._after_isolation(units, deaths, quarantine)
            if later:
                units += self._missing(later)
            # Where engines work at all, a row that dies alone is progress: it ends in quarantine.
            moved = self._held() > before or (self._answered and deaths.total() > known)
            if moved:
                strikes, most_alone = 0, ALONE
            elif isolated and most_alone > FEW_ALONE and self._gave_up():
                # Which of its units were tried is not known. The next pass tries all that it asks.
                most_alone = FEW_ALONE
            else:
                strikes += 1
            if units and strikes >= STRIKES:
                reason = next((lost[0][1] for lost in self._lost.values()), NO_RECEIPT)
                raise EngineFailure(
                    f"nothing got through in {counted(strikes, 'pass', 'passes')}; "
                    f"{counted(len(units), 'unit')} of work {are(len(units))} left. Last "
                    f"reason: {reason}"
                )
            if units:
                log.warning(
                    "%d of %s not done after pass %d, to run again",
                    len({u.shard for u in units}),
                    counted(self.plan.shards, "shard"),
                    self.progress.passes,
                )
        self.folder.flush()
        return self.progress

    def _check_draining(self) -> None:
        if not self.draining():
            return
        self.folder.flush()
        done, shards = self.progress.tally.shards, self.plan.shards
        raise RunDrained(
            f"{DRAINED_TEXT} {done:,} of {counted(shards, 'shard')} {are(done)} committed; "
            f"{shards - done:,} {are(shards - done)} left for whoever runs the same command again"
        )

    def _pass(self, run_pass: RunPass, units: Sequence[Unit], isolated: bool) -> None:
        self.progress.passes += 1
        self._lost = {}  # what an earlier pass was told says nothing of a death in this one
        for receipt in run_pass(units, isolated):
            if receipt.lost is not None:
                self._note_lost(receipt.unit, receipt.lost)
                continue
            self._answered = True
            self._accept(receipt)

    def _probes(self) -> list[Unit]:
        """Rows of committed shards, asked again and their answers thrown away, while this attempt
        has seen no engine work: an earlier one may have left nothing but rows that kill."""
        done = np.flatnonzero(self.done).tolist()
        if self._answered or not done:
            return []
        chosen = {done[len(done) * at // PROBES] for at in range(PROBES)}
        return [Unit(shard, self.shards[shard].rows - 1, 1) for shard in sorted(chosen)]

    def _accept(self, receipt: Receipt) -> None:
        if self.done[receipt.shard]:
            return
        self._look_at_code(receipt)
        whole = self.coverage.add(receipt)
        if whole is not None:
            self._commit(receipt.shard, whole)

    def _look_at_code(self, receipt: Receipt) -> None:
        """Warns once of workers whose code is another than this driver's."""
        theirs, own = receipt.where.get("code"), code_version()
        if theirs is None or theirs == own or theirs in self._codes:
            return
        self._codes.add(theirs)
        log.warning(
            "workers run other code than this driver: prefect_raybatch %s on %s, and %s here. "
            "Install the same on all nodes, and start nothing in a folder that holds a "
            "prefect_raybatch of its own: Ray's workers look there first",
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
        self._failed += self._weighed(commit)
        self.progress.weighed = self._failed
        self.folder.add(commit)
        self._last = now
        self.observe(self.progress)

    def _check_budget(self, receipts: Sequence[Receipt]) -> None:
        """The shard (of these `receipts`) that would cross the limit is not committed, so raising
        the limit and running again continues from there."""
        more = sum(map(self._weighed, receipts))
        rows = self.plan.rows if self.waiting is None else self.waiting.rows
        allowed = self.limits.allowed(rows)
        failed = self._failed + more
        if failed <= allowed:
            return
        stop = Stop(failed, more, allowed, rows)
        if receipts:
            stop = self._stopped(stop, receipts)
        failures = add_failures([self.progress.tally.failures, *(r.failures for r in receipts)])
        common = alike(failures).most_common(COMMON)
        lines = [
            f"  {counted(number, 'row')}: {key.stage}: {key.error}: {key.message}"
            for key, number in common
        ]
        lines += ["Such as:"] if stop.sample else []
        lines += [f"  {line}" for line in stop.lines()]
        done, shards = self.progress.tally.shards, counted(self.plan.shards, "shard")
        raise ErrorBudgetExceeded(
            f"{failed:,} of {counted(rows, 'row')} failed, more than "
            f"{self.limits.said(rows)}. Commonest:\n"
            + "\n".join(lines)
            + f"\n{done:,} of {shards} {are(done)} committed and kept; mend the "
            "cause or raise the limit and run the same command again."
        )

    def _weighed(self, record: Receipt | Commit) -> int:
        """Failed rows of a record."""
        if self.waiting is None:
            return len(record.failed)
        return self.waiting.count(record.shard, record.failed)

    def _stopped(self, stop: Stop, receipts: Sequence[Receipt]) -> Stop:
        """Tells everybody of the failed rows that no commit will tell of."""
        shard = receipts[0].shard
        pieces = [piece for receipt in receipts for piece in receipt.pieces]
        numbers = partial(self.ledger.numbers, self.plan)
        found = failed_rows(self.ledger.store, pieces, self.shards[shard].start, numbers)
        stop = replace(stop, shard=shard, sample=found)
        self.progress.held_back = stop.held_back
        self.observe(self.progress)
        self.on_stop(stop)
        return stop

    def _note_lost(self, unit: Unit, why: Loss) -> None:
        if why.fatal:
            raise _error_of(why)
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
        """Why a unit did not come through this pass, by what was told last of any row of it: others
        of its shard may have been lost to something else."""
        told = reversed(self._lost.get(unit.shard, []))
        found = (why for lost, why in told if lost.overlaps(unit))
        return next(found, Loss(ENGINE_DIED, NO_RECEIPT))

    def _held(self) -> int:
        """Rows that are committed or held by receipts: what must grow in every pass."""
        pending = np.flatnonzero(~self.done).tolist()
        return self.plan.rows - sum(map(self.coverage.lacking, pending))

    def _missing(self, units: Sequence[Unit]) -> list[Unit]:
        """The parts of `units` that no receipt holds and nobody has committed meanwhile."""
        theirs = self.ledger.committed(self.plan) & ~self.done
        for shard in np.flatnonzero(theirs).tolist():
            self.coverage.drop(shard)
            self._count(shard, self.ledger.read_commit(self.plan, shard))
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
        """Cuts what died alone; a single row that died alone often enough goes to quarantine."""
        rest: list[Unit] = []
        for unit in units:
            why = self._why_lost(unit)
            if not why.may_be_of_a_row:
                rest.append(unit)  # the store's or the input's fault: cutting would not help
            elif unit.rows > 1:
                rest += cut(unit)
            else:
                deaths[unit] += 1
                if deaths[unit] < self.limits.engine_deaths:
                    rest.append(unit)
                else:
                    self._accept(quarantine(unit, why))
        return rest


def cut(unit: Unit) -> list[Unit]:
    """Up to 16 parts of about equal size, in order."""
    size = -(-unit.rows // SPLIT)
    return [
        Unit(unit.shard, unit.offset + at, min(size, unit.rows - at))
        for at in range(0, unit.rows, size)
    ]


FATAL: dict[str, type[RayBatchError]] = {
    kind.__name__: kind for kind in (SourceError, StoreError, CorruptRun, ConfigError)
}


def _error_of(why: Loss) -> RayBatchError:
    """The error that a fatal loss stands for."""
    kind = FATAL.get(why.kind)
    return kind(why.message) if kind else EngineStartError(f"the engine cannot work: {why}")
