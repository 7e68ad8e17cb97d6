"""The phases of a run: the requests that it asks first, if it reuses answers, and its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prefect_raybatch.ledger.increments import OF_ROWS, Increment, begin_asks, increment_of
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.runs.run import Run, run_of
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.spec.sizes import SizeSpec

if TYPE_CHECKING:
    from prefect_raybatch.driver.driver import OtherLedger


@dataclass(frozen=True)
class Phase:
    """One phase of a run: what it does, and its ledger with the plan and its shards.

    `increment` is the plan's record of reuse, None for an ordinary run.
    """

    spec: RunSpec
    run: Run
    ledger: Ledger
    plan: Plan
    shards: Shards
    increment: Increment | None

    @property
    def looks_up(self) -> bool:
        """Return whether every answer of this phase exists already, so that it needs no engine."""
        return self.increment is not None and self.increment.ledger == OF_ROWS

    @property
    def sizes(self) -> SizeSpec:
        """Return what the phase's sizes follow from: without engines where it only looks up."""
        return self.spec.sizes.without_engine() if self.looks_up else self.spec.sizes

    @property
    def finished(self) -> bool:
        """Return whether the phase's result is written."""
        return self.ledger.finished(self.plan) is not None

    @property
    def extent(self) -> OtherLedger:
        """Return the size of this phase, as the progress of the run's other phase shows it."""
        from prefect_raybatch.driver.driver import OtherLedger

        return OtherLedger(self.plan.rows, self.plan.shards)


def begin_phases(
    spec: RunSpec, run: Run, ledger: Ledger, plan: Plan, shards: Shards
) -> tuple[Phase | None, Phase]:
    """Return the requests phase of a run and its rows phase.

    The first is None if the run has no requests to ask or is finished. Writes the plan of the
    requests phase unless it exists.
    """
    increment = increment_of(plan)
    own = plan if run.model is None else plan.with_model(run.model)
    rows = Phase(spec, run, ledger, own, shards, increment)
    if increment is None or rows.finished:
        return None, rows
    begun = begin_asks(ledger.store, increment)
    if begun is None:
        return None, rows
    from prefect_raybatch.runs.increment import asks_of

    asks, asked = begun
    part = replace(run_of(asks.store, asked, asks), probed=run.probed)
    return Phase(asks_of(spec), part, asks, asked, asks.shards(asked), increment_of(asked)), rows
