"""Creates the automations of a night in Prefect, or brings them up to date: whatever keeps a run
from its end, or puts it in doubt, pages someone.

    python deployments/automations.py --block slack-webhook/on-call

`--block` names a saved notification block (type-slug/name: slack-webhook, email,
pager-duty-webhook, custom-webhook, ...). They are of the flows batch_inference and retry_failed.
What "high" means is the job's limits.warn_failed, what a stall is its limits.stall_seconds, when a
run must have ended its limits.deadline. Prefect keeps no secret of ours: the events hold run key,
counts and the text of the warning.

A flow run whose process or host is gone says nothing more. The automation "a flow run is gone"
marks it Crashed when no heartbeat came for `--gone-after` seconds. It looks at runs with the tag
raybatch-heartbeat alone: give that tag to a deployment that sets PREFECT_FLOWS_HEARTBEAT_FREQUENCY
to a third of these seconds, as deployments/prefect.yaml does. Prefect's own default is 180 seconds,
so without the tag a healthy run would be marked.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from uuid import UUID

from prefect.automations import Automation
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

FLOWS = ["batch_inference", "retry_failed"]
GONE_AFTER = 90.0  # seconds: three heartbeats of deployments/prefect.yaml
LIMIT_REACHED = "Deployment concurrency limit reached."  # the state's message, by Prefect
ENDED = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
HEARTBEAT = "prefect.flow-run.heartbeat"
HEARTBEAT_TAG = "raybatch-heartbeat"  # of the deployments that set the frequency

FIGURES = """{{ event.payload.committed }} of {{ event.payload.shards }} shards are committed,
{{ event.payload.failed }} of {{ event.payload.rows }} rows have failed.
Run directory: {{ event.payload.run }}"""
STATE = """{{ flow_run.state.message }}
{{ flow_run|ui_url }}"""


def automations(block_id: UUID, gone_after: float = GONE_AFTER) -> list[Automation]:
    """All of them, which notify through the block of that id."""
    run, name = "{{ event.resource.name }}", "{{ flow_run.name }}"
    pages = [
        # name, why, the trigger, subject, body
        ("a run stalls", "No shard was committed for longer than the job's limits allow.",
         _of_run("raybatch.run.stalled"), f"{run} stalls", "{{ event.payload.about }}\n" + FIGURES),
        ("the quarantine is high", "More rows failed than the job's limits.warn_failed.",
         _of_run("raybatch.quarantine.high"), f"{run}: many rows fail", FIGURES),
        ("the deadline is at risk", "At its present rate a run ends after limits.deadline.",
         _of_run("raybatch.deadline.risk"), f"{run} will be late",
         "{{ event.payload.about }}\n" + FIGURES),
        ("the answers have drifted", "They are distributed otherwise than the night before.",
         _of_run("raybatch.answers.drifted"), f"{run}: other answers than before",
         "{{ event.payload.about }}\nRun directory: {{ event.payload.run }}"),
        ("a run failed", "A task failed and is not tried again.",
         _of_state("Failed"), f"{name} failed", STATE),
        ("a run crashed", "Its process or its host was lost; the same run key continues it.",
         _of_state("Crashed"), f"{name} crashed",
         "What goes on with it: prefect flow-run retry {{ flow_run.id }}\n" + STATE),
        ("a run is late", "No worker took it when it was due.",
         _of_state("Late"), f"{name} is late", "Is a worker of the work pool alive?\n" + STATE),
        ("a night was cancelled by the limit", "The run before it was still at work.",
         _of_state("Cancelled", {"prefect.state-message": LIMIT_REACHED}),
         f"{name} was not run", "The run before it still works; see it, then back-fill.\n" + STATE),
    ]  # fmt: skip
    notify = [
        Automation(
            name=f"raybatch: {title}",
            description=why,
            trigger=trigger,
            actions=[SendNotification(block_document_id=block_id, subject=subject, body=body)],
        )
        for title, why, trigger, subject, body in pages
    ]
    return [*notify, _gone(gone_after)]


def _gone(after: float) -> Automation:
    """Notifies nobody itself: the state that it sets does."""
    # Prefect fills in no names here: the run's own stands above this message in its page.
    said = (
        f"No heartbeat for {after:.0f} s: its process or its host is gone. What is committed is "
        "kept.\nWhat to do: see that a worker of its pool is alive, then, with this run's name:\n"
        "  prefect flow-run retry NAME"
    )
    return Automation(
        name="raybatch: a flow run is gone",
        description=f"Marks a flow run Crashed that has sent no heartbeat for {after:.0f} s. What "
        "is committed is kept; Retry in its page, or prefect flow-run retry NAME, goes on with it.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *ENDED},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.role": "tag",
                "prefect.resource.id": f"prefect.tag.{HEARTBEAT_TAG}",
            },
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=after),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=said)],
    )


def _of_run(event: str) -> EventTrigger:
    return _each(event, {"prefect.resource.id": "raybatch.run.*"})


def _of_state(state: str, labels: dict[str, str] | None = None) -> EventTrigger:
    match = {"prefect.resource.id": "prefect.flow-run.*", **(labels or {})}
    return _each(f"prefect.flow-run.{state}", match, _our_flows())


def _our_flows() -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "flow", "prefect.resource.name": FLOWS}


def _each(
    event: str, match: dict[str, str], related: dict[str, str | list[str]] | None = None
) -> EventTrigger:
    return EventTrigger(
        expect={event},
        match=match,
        match_related=related or {},
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


def deploy(block: str, gone_after: float = GONE_AFTER) -> list[tuple[str, str]]:
    """Creates or updates all; returns (name, created or updated)."""
    done = []
    with get_client(sync_client=True) as client:
        for automation in automations(block_id(client, block), gone_after):
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
    parser.add_argument("--gone-after", type=float, default=GONE_AFTER, help="seconds")
    given = parser.parse_args()
    for name, what in deploy(given.block, given.gone_after):
        print(f"{what}: {name}")


if __name__ == "__main__":
    main()
