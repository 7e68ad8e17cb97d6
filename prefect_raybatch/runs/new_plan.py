"""Makes the plan of a new run, once its input is known."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefect_raybatch.cluster import sizes as sized
from prefect_raybatch.compile.job import public_job
from prefect_raybatch.compile.resolved import Resolved
from prefect_raybatch.ledger.records import JsonObject, Plan
from prefect_raybatch.plan import image_bytes
from prefect_raybatch.plan.plan import make_plan
from prefect_raybatch.plan.prefix_order import MOST_ORDERED
from prefect_raybatch.spec.run import RunSpec
from prefect_raybatch.storage import Store

if TYPE_CHECKING:
    from prefect_raybatch.source import Inventory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInput:
    """The input of a new run.

    `store` is rooted at the run directory; `copied`: the files are a copy there, made by `attempt`.
    """

    found: Inventory
    store: Store
    attempt: str
    copied: bool

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.found.files)

    @property
    def snapshot(self) -> Store | None:
        """Return the store that holds the files if they are a copy, else None."""
        return self.store if self.copied else None


def new_plan(
    resolved: Resolved,
    spec: RunSpec,
    run_key: str,
    taken: RunInput,
    context: JsonObject | None = None,
    numbers: bytes | None = None,
    earlier: bool = True,
) -> tuple[Plan, dict[str, bytes]]:
    """Return the plan of a new run that does `spec`, and the tables that the plan names.

    Neither is written; only the files of a run that reuses answers are. `context` records what an
    automatic context length resolved to, `numbers` the row numbers of a run that retries failed
    rows. Without `earlier`, no answers of earlier runs are reused.
    """
    found = taken.found
    return make_plan(
        spec,
        resolved.identity,
        resolved.with_adapters(),
        public_job(resolved.job, spec.finish),
        run_key,
        found.files,
        found.schema,
        image_bytes.row_bytes(
            spec.prompt.images,
            spec.engine.model,
            spec.read,
            resolved.model,
            found,
            taken.snapshot,
        ),
        snapshot=taken.copied,
        numbers=numbers,
        engines=sized.engines_to_plan_for(spec.sizes, spec.cluster),
        context=context,
        table=found.table,
        increment=_increment(resolved, spec, run_key, taken, context, earlier),
        weights=found.weights,
    )


def _increment(
    resolved: Resolved,
    spec: RunSpec,
    run_key: str,
    taken: RunInput,
    context: JsonObject | None,
    earlier: bool,
) -> JsonObject | None:
    """Return the plan's record of reuse; None for a run without a requests phase."""
    if not spec.reuse.asks_apart:
        return None
    if taken.rows > MOST_ORDERED and not spec.reuse.keeps:
        log.warning(
            "engine.order: run is ignored: the input has %d rows, and at most %d can be ordered",
            taken.rows,
            MOST_ORDERED,
        )
        return None
    from prefect_raybatch.runs.increment import increment_for

    return increment_for(resolved, spec, run_key, taken, context, earlier)
