"""Sends each event of a completed run at least once, even if the process dies in between."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

from prefect.client.orchestration import get_client
from prefect.events import Event, RelatedResource
from prefect.events.clients import get_events_client
from prefect.events.related import related_resources_from_run_context

from prefect_raybatch.bounded import within
from prefect_raybatch.errors import RayBatchError
from prefect_raybatch.flow.events import RunEvents
from prefect_raybatch.ledger.sent_events import put_sent, read_sent
from prefect_raybatch.runs.run import Run
from prefect_raybatch.spec.options import StoreOptions
from prefect_raybatch.storage import open_store

log = logging.getLogger(__name__)

ASSET = "result.asset"  # name in the record for the asset event, which Prefect itself sends
CONFIRM_SECONDS = 15.0  # for Prefect to confirm an event


class CompletionEvents:
    """Sends the events of one completed run.

    An event is recorded in the run directory once Prefect has confirmed it, so that repeating the
    command sends only the events that are missing. The id of an event depends only on the plan, the
    event's name and `version`, so that a receiver can drop duplicates, as Prefect does. `version`
    is any text; with a new one an event is sent again, e.g. after publishing to one more target.
    """

    def __init__(self, run: Run, job: str, options: StoreOptions | None):
        self.run = run
        self.events = RunEvents(run.run_key, job)
        self.store = open_store(run.uri, dict(options) if options else None)
        self._is_confirming = True
        try:
            self._sent = read_sent(self.store)
        except RayBatchError as error:  # sending events twice is better than never
            log.warning("cannot read which events were sent, so all are sent again: %s", error)
            self._sent = {}

    def is_sent(self, name: str, version: str = "") -> bool:
        """Return whether a confirmed send of this event with this `version` is recorded."""
        return self._sent.get(name) == str(self._id(name, version))

    def send(self, name: str, version: str = "", **payload: object) -> None:
        """Send the event `name`, unless a confirmed send with this `version` is recorded.

        `version` is any text; with a new one the event is sent again. An event that Prefect does
        not confirm is handed to Prefect's own queue and not recorded. So if the command is
        repeated, it sends the event again, with the same id.
        """
        if self.is_sent(name, version):
            return
        event_id = self._id(name, version)
        event = self.events.event(name, payload)
        if self._is_confirming:
            try:
                send_confirmed(id=event_id, **event)
            except Exception as error:
                self._is_confirming = False  # the next one would wait as long
                log.warning(
                    "Prefect did not confirm the event raybatch.%s: %s: %s. The same command sends "
                    "it again",
                    *(name, type(error).__name__, error),
                )
            else:
                self.record(name, version)
                return
        self.events.queue(id=event_id, **event)

    def record(self, name: str, version: str = "") -> None:
        """Record that an event was sent; an error is only logged."""
        self._sent[name] = str(self._id(name, version))
        try:
            put_sent(self.store, self._sent)
        except RayBatchError as error:
            log.warning("cannot record that the event %s was sent: %s", name, error)

    def _id(self, name: str, version: str) -> UUID:
        return uuid5(NAMESPACE_OID, f"{self.run.plan_hash}/{self.run.run_key}/{name}/{version}")


def send_confirmed(**fields: Any) -> None:
    """Send an event with these fields; raise an exception if Prefect does not confirm it."""
    event = Event(**fields)
    within(CONFIRM_SECONDS, lambda: asyncio.run(_send(event)))


async def _send(event: Event) -> None:
    exclude = {resource.id for resource in event.involved_resources}
    async with get_client() as api:
        related: list[RelatedResource] = await related_resources_from_run_context(api, exclude)
    event.related += related
    # With a checkpoint at each event the client waits for the server's answer to a ping.
    async with get_events_client(reconnection_attempts=0, checkpoint_every=1) as events:
        await events.emit(event)
