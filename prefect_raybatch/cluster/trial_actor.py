"""Runs a precision trial on a worker of the cluster, in an actor that ends with the trial."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prefect_raybatch.bounded import Returned
from prefect_raybatch.cluster.warm import ActorOptions
from prefect_raybatch.errors import EngineFailure, RayBatchError
from prefect_raybatch.stages.trial import (
    RowOutcome,
    SampledRow,
    TrialEngine,
    TrialStages,
    interrupted,
)

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger(__name__)

HALT_LOOK = 1.0  # seconds between looks whether the run is stopped
CLOSING = 30.0  # seconds that an engine may take to end by itself

AskSample = Callable[[bool], dict[SampledRow, RowOutcome]]


@contextmanager
def trial_on_worker(
    engine: type,
    stages: TrialStages,
    resources: ActorOptions,
    halted: Callable[[], RayBatchError | None] = lambda: None,
) -> Iterator[AskSample]:
    """Start an engine on a worker for the block; yield a function that sends it the sampled rows.

    The function returns the outcome of each row; with its argument True, it sends the rows in
    another order. `engine` is the class of the engine stage, which runs with `stages` in an actor
    with these Ray `resources`. Raises the errors of `TrialEngine`, `EngineFailure` if the worker's
    process dies, `IncompleteRun` if its node is lost or another error ends the trial, and the error
    that `halted` returns once the run is stopped.
    """
    import ray

    options = {name: value for name, value in resources.items() if name != "max_task_retries"}
    made: Any = ray.remote(TrialEngine)
    actor = made.options(**{**options, "max_restarts": 0}).remote(engine, stages)
    try:
        yield lambda again: _waited(actor.outcomes.remote(again), halted)
    finally:
        try:
            ray.get(actor.close.remote(), timeout=CLOSING)
        except Exception as error:  # dead or hanging: it is killed in any case
            log.info("could not close the trial's engine: %s", error)
        ray.kill(actor)


def _waited(reference: ObjectRef[Returned], halted: Callable[[], RayBatchError | None]) -> Returned:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

    from prefect_raybatch.cluster.pipeline import is_node_loss

    while not ray.wait([reference], timeout=HALT_LOOK)[0]:
        if (stopped := halted()) is not None:
            raise stopped
    try:
        return ray.get(reference)
    except RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, RayBatchError) else interrupted(str(cause))) from None
    except RayActorError as error:
        if isinstance(error, ActorUnavailableError) or is_node_loss(error):
            raise interrupted(f"the node of its engine was lost: {error}") from None
        raise EngineFailure(f"the trial's worker died: {error}") from None
