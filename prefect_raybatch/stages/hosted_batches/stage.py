"""The engine stage of a run that uses a server's batch API, and the removal of its batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, cast

import pyarrow as pa

from prefect_raybatch.bounded import within
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.ledger.layout import BATCHES, PLAN
from prefect_raybatch.ledger.record_files import read_record
from prefect_raybatch.ledger.records import digest
from prefect_raybatch.spec.endpoint import EndpointSpec
from prefect_raybatch.stages.endpoint.answers import HostedAnswer
from prefect_raybatch.stages.endpoint.client import EndpointEngine, HostedRequest
from prefect_raybatch.stages.endpoint.limiter import Limiter
from prefect_raybatch.stages.endpoint.stage import EndpointStage
from prefect_raybatch.stages.hosted_batches.api import BatchEngine
from prefect_raybatch.stages.hosted_batches.records import (
    Slot,
    cancel_path,
    open_slots,
    remove_records,
)
from prefect_raybatch.stages.hosted_batches.shard import ShardBatches, ShardCommitted
from prefect_raybatch.storage import Store
from prefect_raybatch.words import counted

log = logging.getLogger(__name__)
CANCEL_SECONDS = 20.0  # to cancel all batches, while the sender of SIGTERM waits
CANCELS_AT_ONCE = 16
SWEEP_SECONDS = 60.0  # for the removal of files at the server


class BatchStage(EndpointStage):
    """The engine stage of a run with `engine.endpoint.batch`.

    It sends a block's requests through the server's batch API and waits for the answers. It returns
    a lost block if the store fails, and an empty block if another driver has committed the shard
    meanwhile.
    """

    engine_class: ClassVar[type[EndpointEngine]] = BatchEngine

    def __call__(self, table: pa.Table) -> pa.Table:
        try:
            return super().__call__(table)
        except ShardCommitted:
            return table.slice(0, 0)

    def _ask_server(
        self, engine: EndpointEngine, shards: Sequence[int], requests: Sequence[HostedRequest]
    ) -> Sequence[HostedAnswer]:
        if not requests:
            return []
        spec = self.launch
        shard = ShardBatches(
            cast("BatchEngine", engine),
            spec.store,
            shards[0],
            spec.attempt,
            files_name(spec.store),
            spec.endpoint.path,
        )
        answers = shard.answer(requests)
        return [answers[request.key] for request in requests]


class _Unprobed(BatchEngine):
    """A client that only cancels batches and deletes files, so it skips the check of the model."""

    async def _probe(self) -> None:
        pass


def files_name(store: Store) -> str:
    """Return the prefix of a run's file names at the server; `store` is its run directory.

    It depends on the plan, which has the time of planning: two machines may have the same path.
    """
    return f"raybatch-{digest(store.uri.encode() + read_record(store, PLAN))[:16]}"


def cancel_batches(spec: EndpointSpec, store: Store, attempt: str) -> None:
    """Record that `attempt` was cancelled, then cancel all open batches of the run.

    The record is written first, so that engines that still run create no further batch. Errors are
    only logged.
    """
    try:
        store.put(cancel_path(attempt), b"{}")
        within(CANCEL_SECONDS, lambda: _cancel_all(spec, store))
    except (RayBatchError, TimeoutError) as error:
        log.warning(
            "not all batches are known to be cancelled: %s. Look at the server's list of batches, "
            "or run the same command again to use what they answer",
            error,
        )


def _cancel_all(spec: EndpointSpec, store: Store) -> None:
    """Cancel all open batches of the run; then raise the first error, if there was any."""
    slots = open_slots(store)
    if not slots:
        return
    log.warning("cancelling %s", counted(len(slots), "batch", "batches"))
    engine = _Unprobed(spec, spec.api_key(), Limiter(None, None, CANCELS_AT_ONCE, spec.timeout))

    def cancel(slot: Slot) -> None:
        if slot.batch_id is not None:
            engine.cancel(slot.batch_id)
            return
        for batch in engine.find(slot.file_id):  # its creation may be in flight
            engine.cancel(batch.id)

    try:
        with ThreadPoolExecutor(CANCELS_AT_ONCE) as pool:
            # Not pool.map: at the first error, it would cancel the calls that wait for a thread.
            calls = [pool.submit(cancel, slot) for slot in slots]
    finally:
        engine.close()
    for call in calls:
        call.result()


def forget_batches(spec: EndpointSpec, store: Store) -> None:
    """Delete the batch records of a finished run.

    Also delete the run's input files that a crash left at the server.
    """
    if next(iter(store.list(BATCHES)), None) is None:
        return
    name = files_name(store)
    try:
        within(SWEEP_SECONDS, lambda: _sweep(spec, name))
    except (RayBatchError, TimeoutError) as error:
        log.warning("files named %s-... may be left at the server: %s", name, error)
    remove_records(store)


def _sweep(spec: EndpointSpec, name: str) -> None:
    engine = _Unprobed(spec, spec.api_key(), Limiter(None, None, 1, spec.timeout))
    try:
        for file_id, file_name in engine.files():
            if file_name.startswith(f"{name}-"):
                engine.delete(file_id)
    finally:
        engine.close()
