"""Cost of a run: the time for which its engines hold GPUs, times the price of a GPU-hour.

For a hosted model, it is the price of the tokens instead. Each attempt records its GPU time and
cost in its heartbeats, so a killed attempt is counted up to its last heartbeat.
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
    """GPU-seconds and money that several attempts have spent.

    `cost` is at the price that each attempt had. `unpriced` is how many of the `gpu_seconds` belong
    to attempts without a price.
    """

    gpu_seconds: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0

    def cost_at(self, price: float | None) -> float | None:
        """Return the total cost, with unpriced GPU-seconds at `price` per GPU-hour.

        Without a `price`, the cost is unknown (None) if some GPU-seconds are unpriced or if `cost`
        is 0.
        """
        if price is None and (self.unpriced or not self.cost):
            return None
        return self.cost + self.unpriced * (price or 0.0) / HOUR


def spent_by(stores: Iterable[tuple[Store, Iterable[str]]]) -> Spent:
    """Return what attempts have spent, by their last heartbeats.

    `stores` has pairs (run directory, names of attempts in it).
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
    """Return what all attempts at a run have spent, in both phases if the run has two."""
    return spent_by((one.store, list(one.attempts())) for one in ledgers_of(ledger, plan))


class CostMeter:
    """Adds up the GPU-seconds and the cost of one attempt.

    An engine holds its GPUs from the moment Ray creates its actor. An elastic pool requests more
    engines than the cluster may have room for, so engines beyond the first `fewest` count only
    while they are alive. `price` is per GPU-hour, None if unknown. `before` is what earlier
    attempts at the run have spent.
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
        """Add the GPU-seconds since the last call, and note how many GPUs are held from now on.

        `states` is {Ray's actor state: number of engines}. `now` is in seconds of a monotonic
        clock.
        """
        if self._at is not None:
            self.gpu_seconds += self.gpus * max(0.0, now - self._at)
        living = alive(states)
        engines = max(living, min(sum(states.values()), self.fewest))
        self._at, self.gpus = now, engines * self.gpus_an_engine + self._beside

    @contextmanager
    def holding(self, gpus: float) -> Iterator[None]:
        """Count `gpus` more GPUs as held during the block, e.g. for a precision trial."""
        self._beside += gpus
        try:
            yield
        finally:
            self._beside -= gpus

    def continue_from(self, earlier: CostMeter, more: float = 0.0) -> CostMeter:
        """Take over the GPU-seconds of an `earlier` meter of the same attempt; return self.

        Adds `more` GPU-seconds, which neither meter has counted.
        """
        self.gpu_seconds = earlier.gpu_seconds + more
        return self

    @property
    def cost(self) -> float | None:
        """Return the cost so far of this attempt's GPU time and of a hosted model's tokens.

        None if the price of a GPU is unknown and no tokens were paid for.
        """
        gpus = None if self.price is None else self.gpu_seconds * self.price / HOUR
        tokens = self.tokens_cost()
        return (gpus or 0.0) + tokens if tokens else gpus

    @property
    def total_cost(self) -> float | None:
        """Return the cost of all attempts at the run so far, this one included.

        If only the cost of this attempt is known, or only that of the earlier ones, return that
        alone. None if both are unknown.
        """
        before, own = self.before.cost_at(self.price), self.cost
        return None if before is None and own is None else (before or 0.0) + (own or 0.0)

    def at_end(self, seconds_left: float | None) -> float | None:
        """Return the expected cost of the whole run if it ends in `seconds_left` seconds.

        Assumes that the run keeps the GPUs that it holds now. None if `seconds_left`, the price or
        the cost so far is unknown.
        """
        if self.total_cost is None or self.price is None or seconds_left is None:
            return None
        return self.total_cost + self.gpus * seconds_left * self.price / HOUR

    def figures(self, seconds_left: float | None) -> JsonObject:
        """Return the cost fields of a heartbeat.

        `seconds_left` is the expected time until the end of the run; None if unknown.
        """
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
    """Raise `CostExceeded` if the run has reached `limits.max_cost` and has uncommitted shards.

    Does nothing if the job sets no limit, or if `cost` is None (unknown). `shards` is the number of
    all shards, `committed` the number of committed ones.
    """
    most = limits.max_cost
    if most is None or cost is None or cost < most or committed >= shards:
        return
    raise CostExceeded(
        f"the run has cost {money(cost, currency)}, and limits.max_cost allows "
        f"{money(most, currency)}. {some_are(committed, shards, 'shard')} committed and kept. "
        "Raise the limit and run the same command again to continue"
    )
