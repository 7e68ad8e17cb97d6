"""Cost of a run: the time for which its engines hold GPUs, times the price of a GPU-hour.

A hosted model costs its tokens, at their prices.

Each attempt records its GPU time in its heartbeats, so a killed attempt is counted up to its last
heartbeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prefect_raybatch.driver.heartbeat import alive, read_heartbeats
from prefect_raybatch.errors import CostExceeded
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.ledger.increments import ledgers_of
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.storage import Store
from prefect_raybatch.words import money, some_are

HOUR = 3600.0  # seconds


@dataclass(frozen=True)
class Spent:
    """GPU-seconds of several attempts, and their cost at the price that applied to each.

    `unpriced` counts the GPU-seconds of attempts that had no price.
    """

    gpu_seconds: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0

    def cost_at(self, price: float | None) -> float | None:
        """Return the total cost, or None if it is unknown.

        Unpriced GPU-seconds are charged at `price` (per GPU-hour).
        """
        if price is None and (self.unpriced or not self.cost):
            return None
        return self.cost + self.unpriced * (price or 0.0) / HOUR


def spent_by(stores: Iterable[tuple[Store, Iterable[str]]]) -> Spent:
    """Add up what attempts have spent, according to their last heartbeats.

    `stores` are pairs of a run directory and the names of attempts in it.
    """
    seconds = cost = unpriced = 0.0
    for store, attempts in stores:
        for beat in read_heartbeats(store, attempts).values():
            seconds += beat.gpu_seconds
            if beat.cost is None:
                unpriced += beat.gpu_seconds
            else:
                cost += beat.cost
    return Spent(seconds, cost, unpriced)


def spent_on(ledger: Ledger, plan: Plan) -> Spent:
    """Return what all attempts at a run have spent, including those of its requests phase."""
    return spent_by((one.store, list(one.attempts())) for one in ledgers_of(ledger, plan))


class CostMeter:
    """Adds up the GPU-seconds of one attempt. Times are seconds of a monotonic clock.

    An engine holds its GPUs from the moment Ray creates its actor. An elastic pool requests more
    engines than the cluster may have room for, so engines beyond `fewest` count only once they are
    alive. `price` is per GPU-hour, and `before` what earlier attempts at the run have spent.
    """

    def __init__(
        self,
        price: float | None = None,
        gpus_an_engine: float = 0.0,
        fewest: int = 0,
        before: Spent | None = None,
        currency: str = "",
    ):
        self.currency = currency
        self.price, self.gpus_an_engine, self.fewest = price, gpus_an_engine, fewest
        self.before = before or Spent()
        self.gpu_seconds = 0.0
        self.gpus = 0.0  # GPUs held now
        self._beside = 0.0  # GPUs held now outside of a pass's engines, e.g. by a precision trial
        self._at: float | None = None
        self.tokens_cost: Callable[[], float] = lambda: 0.0  # of a hosted model, in this attempt

    def see(self, now: float, states: Mapping[str, int]) -> None:
        """Charge the GPUs held since the last call for that time; then update them from `states`.

        `states` counts engine actors by Ray state, `now` is in seconds.
        """
        if self._at is not None:
            self.gpu_seconds += self.gpus * max(0.0, now - self._at)
        living = alive(states)
        engines = max(living, min(sum(states.values()), self.fewest))
        self._at, self.gpus = now, engines * self.gpus_an_engine + self._beside

    @contextmanager
    def holding(self, gpus: float) -> Iterator[None]:
        """Charge `gpus` more GPUs for the duration of the block, e.g. of a precision trial."""
        self._beside += gpus
        try:
            yield
        finally:
            self._beside -= gpus

    def continue_from(self, earlier: CostMeter, more: float = 0.0) -> CostMeter:
        """Take over the GPU-seconds of an `earlier` meter of the same attempt; return this meter.

        Adds `more` GPU-seconds, which were spent outside of both meters.
        """
        self.gpu_seconds = earlier.gpu_seconds + more
        return self

    @property
    def cost(self) -> float | None:
        """Return the cost of this attempt so far; None if unknown."""
        gpus = None if self.price is None else self.gpu_seconds * self.price / HOUR
        tokens = self.tokens_cost()
        return (gpus or 0.0) + tokens if tokens else gpus

    @property
    def total_cost(self) -> float | None:
        """Return the cost of all attempts at the run so far; None if unknown."""
        before, own = self.before.cost_at(self.price), self.cost
        return None if before is None and own is None else (before or 0.0) + (own or 0.0)

    def at_end(self, seconds_left: float | None) -> float | None:
        """Return the expected cost of the run if it ends in `seconds_left`; None if unknown.

        Assumes that the run keeps the GPUs that it holds now until it ends.
        """
        if self.total_cost is None or self.price is None or seconds_left is None:
            return None
        return self.total_cost + self.gpus * seconds_left * self.price / HOUR

    def figures(self, seconds_left: float | None) -> JsonObject:
        """Return the cost fields of a heartbeat."""
        found = {
            "cost": self.cost,
            "cost_run": self.total_cost,
            "cost_end": self.at_end(seconds_left),
        }
        rounded = {k: None if v is None else round(v, 6) for k, v in found.items()}
        return {"gpu_seconds": round(self.gpu_seconds, 3), **rounded}


def check_cost(
    limits: Limits, cost: float | None, shards: int, committed: int, currency: str = ""
) -> None:
    """Raise `CostExceeded` if the run has reached `limits.max_cost` and has shards left to do."""
    most = limits.max_cost
    if most is None or cost is None or cost < most or committed >= shards:
        return
    raise CostExceeded(
        f"the run has cost {money(cost, currency)}, and limits.max_cost allows "
        f"{money(most, currency)}. {some_are(committed, shards, 'shard')} committed and kept. "
        "Raise the limit and run the same command again to continue"
    )
