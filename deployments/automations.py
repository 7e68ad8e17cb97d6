"""Creates two automations in Prefect, or brings them up to date: one pages someone when a run
stalls, one when a run's quarantine is high.

    python deployments/automations.py --block slack-webhook/on-call

`--block` names a saved notification block (type-slug/name: slack-webhook, email,
pager-duty-webhook, custom-webhook, ...). What "high" means is the job's limits.warn_failed, what a
stall is its limits.stall_seconds. Prefect keeps no secret of ours: the event holds run key, counts
and the text of the warning.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from uuid import UUID

from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

FIGURES = """{{ event.payload.committed }} of {{ event.payload.shards }} shards are committed,
{{ event.payload.failed }} of {{ event.payload.rows }} rows have failed.
Run directory: {{ event.payload.run }}"""


def automations(block_id: UUID) -> list[Automation]:
    """Both automations, which notify through the block of that id."""
    return [
        Automation(
            name="raybatch: a run stalls",
            description="No shard was committed for longer than the job's limits allow.",
            trigger=_each_run("raybatch.run.stalled"),
            actions=[
                SendNotification(
                    block_document_id=block_id,
                    subject="{{ event.resource.name }} stalls",
                    body="{{ event.payload.about }}\n" + FIGURES,
                )
            ],
        ),
        Automation(
            name="raybatch: the quarantine is high",
            description="More rows failed than the job's limits.warn_failed.",
            trigger=_each_run("raybatch.quarantine.high"),
            actions=[
                SendNotification(
                    block_document_id=block_id,
                    subject="{{ event.resource.name }}: many rows fail",
                    body=FIGURES,
                )
            ],
        ),
    ]


def _each_run(event: str) -> EventTrigger:
    return EventTrigger(
        expect={event},
        match={"prefect.resource.id": "raybatch.run.*"},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def block_id(client: SyncPrefectClient, block: str) -> UUID:
    """The id of a saved block `type-slug/name`; ends the program when there is none."""
    slug, _, name = block.partition("/")
    try:
        return client.read_block_document_by_name(name, slug).id
    except ObjectNotFound:
        sys.exit(
            f"there is no block {block!r} at {client.api_url}; save a notification block first"
        )


def deploy(block: str) -> list[tuple[str, str]]:
    """Creates or updates both; returns (name, created or updated)."""
    done = []
    with get_client(sync_client=True) as client:
        for automation in automations(block_id(client, block)):
            known = client.read_automations_by_name(automation.name)
            if known:
                automation.id = known[0].id
                automation.update()
            else:
                automation.create()
            done.append((automation.name, "updated" if known else "created"))
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--block", required=True, help="notification block, type-slug/name")
    for name, what in deploy(parser.parse_args().block):
        print(f"{what}: {name}")


if __name__ == "__main__":
    main()
