"""Create or update Prefect automations that notify someone when a run fails or is at risk.

    python deployments/automations.py --block slack-webhook/on-call

`--block` names a saved notification block as type-slug/name (slack-webhook, email,
pager-duty-webhook, custom-webhook, ...). The automations watch the flows batch_inference and
retry_failed. The limits come from the job: limits.warn_failed, limits.stall_seconds,
limits.deadline and limits.max_cost. The events contain the run key, counts and the text of the
warning, but no secrets.

A flow run that lost its process or host cannot report it. The automation "a flow run is gone" marks
it Crashed if it sends no heartbeat for `--gone-after` seconds. It watches only runs with the tag
raybatch-heartbeat: give that tag to a deployment that sets PREFECT_FLOWS_HEARTBEAT_FREQUENCY to a
third of these seconds, as deployments/prefect.yaml does. Prefect's default is 180 seconds, so
without the tag a healthy run would be marked.
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
# Prefect on SQLite may deliver an event several times within seconds: ring once.
RINGS_ONCE = timedelta(minutes=1)
GONE_AFTER = 90.0  # seconds: three times the heartbeat interval in deployments/prefect.yaml
LEAST_GONE_AFTER, MOST_GONE_AFTER = 10.0, 86400.0  # seconds; Prefect's own least is 10
LIMIT_REACHED = "Deployment concurrency limit reached."  # Prefect's state message
ENDED_STATES = ("Completed", "Failed", "Cancelled", "Drained", "Crashed")
ENDED = {f"prefect.flow-run.{state}" for state in ENDED_STATES}
CANCELLING = "prefect.flow-run.Cancelling"
CANCELLING_FOR = timedelta(minutes=5)  # by then a run whose worker noticed nothing has ended itself
NOT_ENDED = "No process noticed the cancellation: it was lost, or cannot reach Prefect."
UNNOTICED = ["Its worker did not notice*", f"{NOT_ENDED}*"]  # state messages
HEARTBEAT = "prefect.flow-run.heartbeat"
HEARTBEAT_TAG = "raybatch-heartbeat"  # tag of deployments that set the frequency

FIGURES = """{{ event.payload.committed }} of {{ event.payload.shards }} shards are committed,
{{ event.payload.failed }} of {{ event.payload.rows }} rows have failed.
Run directory: {{ event.payload.run }}"""
STATE = """{{ flow_run.state.message }}
{{ flow_run|ui_url }}"""
JOB = "{{ (flow_run.parameters.job or {}).name or flow_run.name }}"
LATE = (
    f"""Job `{JOB}` """
    """(deployment `{{ deployment.name }}`) has not started; it is
{{ flow_run.estimated_start_time_delta.total_seconds()|int }} s late. Start a worker:
`prefect worker start --pool {{ flow_run.work_pool_name }}`
{{ flow_run|ui_url }}"""
)
REFUSED = (
    f"""Job `{JOB}` """
    """(deployment `{{ deployment.name }}`) did not run at
{{ flow_run.expected_start_time }}, because the run before it was still active.
Once that has ended, run it for its own date:
`prefect flow-run retry {{ flow_run.id }}`
{{ flow_run|ui_url }}"""
)
UNHEEDED = """{{ flow_run.state.message }}
Restart the worker, which no longer looks for cancellations:
`prefect worker start --pool {{ flow_run.work_pool_name }}`
To continue the run, or to see that its result is complete:
`prefect flow-run retry {{ flow_run.id }}`
{{ flow_run|ui_url }}"""
CRASHED = """The process or host of this run was lost. Committed shards are kept.
Make sure that a worker is running, then continue the run:
`prefect flow-run retry {{ flow_run.id }}`
"""


def automations(block_id: UUID, gone_after: float = GONE_AFTER) -> list[Automation]:
    """Return all automations, which notify through the block with this id."""
    run, name = "{{ event.resource.name }}", "{{ flow_run.name }}"
    pages = [
        # name, why, the trigger, subject, body
        ("a run stalls", "No shard was committed for longer than the job's limits allow.",
         _of_run("raybatch.run.stalled"), f"{run} stalls", "{{ event.payload.about }}\n" + FIGURES),
        ("the quarantine is high", "More rows failed than the job's limits.warn_failed.",
         _of_run("raybatch.quarantine.high"), f"{run}: many rows fail", FIGURES),
        ("the deadline is at risk", "At its current rate, the run ends after limits.deadline.",
         _of_run("raybatch.deadline.risk"), f"{run} will be late",
         "{{ event.payload.about }}\n" + FIGURES),
        ("the cost is near its limit", "80 % of limits.max_cost, or its expected end is above it.",
         _of_run("raybatch.cost.high"), f"{run}: cost near the limit",
         "{{ event.payload.about }}\n" + FIGURES),
        ("a run takes twice the usual time", "Against the median of the completed runs before.",
         _of_run("raybatch.time.high"), f"{run} takes twice the usual time",
         "{{ event.payload.about }}\n" + FIGURES),
        ("Prefect was unreachable", "A run continued meanwhile; its lease may have expired.",
         _of_run("raybatch.prefect.away"), f"{run}: Prefect was unreachable",
         "{{ event.payload.about }}\nRun directory: {{ event.payload.run }}"),
        ("there are far fewer rows than usual", "Under half the median of the runs before.",
         _of_run("raybatch.rows.low"), f"{run}: far fewer rows than usual",
         "{{ event.payload.about }}\nRun directory: {{ event.payload.run }}"),
        ("the answers have drifted", "They, failed rows, prompts or input differ from runs before.",
         _of_run("raybatch.answers.drifted"), f"{run}: answers have drifted",
         "{{ event.payload.about }}\nRun directory: {{ event.payload.run }}"),
        ("the accuracy fell", "Golden rows or judge show less than in the job's first runs.",
         _of_run("raybatch.accuracy.fell"), f"{run}: the accuracy fell",
         "{{ event.payload.about }}\nRun directory: {{ event.payload.run }}"),
        ("the agreement fell", "A cascade's models agree on fewer rows than in the first runs.",
         _of_run("raybatch.agreement.fell"), f"{run}: the agreement fell",
         "{{ event.payload.about }}\nRun directory: {{ event.payload.run }}"),
        ("a run failed", "A task failed and will not be retried.",
         _of_state("Failed"), f"{name} failed", STATE),
        ("a run crashed", "Its process or host was lost; a retry continues it.",
         _of_state("Crashed"), f"{name} crashed",
         CRASHED + STATE),
        ("a run is late", "No worker started it when it was due.",
         _of_state("Late"), f"{JOB} is late", LATE),
        ("a run was cancelled by the concurrency limit", "The previous run was still active.",
         _of_state("Cancelled", {"prefect.state-message": LIMIT_REACHED}),
         f"{JOB} did not run", REFUSED),
        ("nobody noticed a cancellation", "The run ended itself, or did not end.",
         _of_state("Cancelled", {"prefect.state-message": UNNOTICED}),
         f"{name}: nobody noticed its cancellation", UNHEEDED),
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
    return [*notify, _gone(gone_after), _not_ended()]


def _gone(after: float) -> Automation:
    """Return the automation that marks a run without heartbeats Crashed, which notifies someone."""
    # Prefect does not render templates here, so the message cannot contain the flow run's id.
    message = (
        f"The process or host was lost: no heartbeat for {after:.0f} s. Committed shards are kept. "
        "Make sure that a worker is running.\nWhat to do: retry this flow run by its name:\n"
        "  prefect flow-run retry NAME"
    )
    return Automation(
        name="raybatch: a flow run is gone",
        description=f"Marks a flow run Crashed if it sends no heartbeat for {after:.0f} s. "
        "Committed shards are kept. To continue it: Retry on its page, or "
        "prefect flow-run retry NAME.",
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
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )


def _not_ended() -> Automation:
    """Return the automation that ends a run that stays Cancelling, which notifies someone."""
    return Automation(
        name="raybatch: a run stays Cancelling",
        description="Marks it Cancelled, so that it can be continued. Committed shards are kept.",
        trigger=EventTrigger(
            after={CANCELLING},
            expect=ENDED,
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_our_flows(),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=CANCELLING_FOR,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CANCELLED, message=f"{NOT_ENDED} Committed shards are kept."
            )
        ],
    )


def _of_run(event: str) -> EventTrigger:
    return _each(event, {"prefect.resource.id": "raybatch.run.*"})


def _of_state(state: str, labels: dict[str, str | list[str]] | None = None) -> EventTrigger:
    match: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}
    match |= labels or {}
    return _each(f"prefect.flow-run.{state}", match, _our_flows())


def _our_flows() -> dict[str, str | list[str]]:
    return {"prefect.resource.role": "flow", "prefect.resource.name": FLOWS}


def _each(
    event: str, match: dict[str, str | list[str]], related: dict[str, str | list[str]] | None = None
) -> EventTrigger:
    return EventTrigger(
        expect={event},
        match=match,
        match_related=related or {},
        for_each={"prefect.resource.id"},
        posture=Posture.Reactive,
        threshold=1,
        within=RINGS_ONCE,
    )


def block_id(client: SyncPrefectClient, block: str) -> UUID:
    """Return the id of a saved block `type-slug/name`; exit if there is none."""
    slug, _, name = block.partition("/")
    try:
        return client.read_block_document_by_name(name, slug).id
    except ObjectNotFound:
        sys.exit(
            f"block {block!r} does not exist at {client.api_url}; save a notification block first"
        )


def deploy(block: str, gone_after: float = GONE_AFTER) -> list[tuple[str, str]]:
    """Create or update all automations; return each name with `created` or `updated`."""
    changes = []
    with get_client(sync_client=True) as client:
        for automation in automations(block_id(client, block), gone_after):
            existing = client.read_automations_by_name(automation.name)
            if existing:
                automation.id = existing[0].id
                automation.update()
            else:
                automation.create()
            changes.append((automation.name, "updated" if existing else "created"))
    return changes


def _seconds(text: str) -> float:
    seconds = float(text)
    if not LEAST_GONE_AFTER <= seconds <= MOST_GONE_AFTER:
        raise argparse.ArgumentTypeError(
            f"{text} is not between {LEAST_GONE_AFTER:.0f} and {MOST_GONE_AFTER:.0f} seconds; "
            f"write e.g. {GONE_AFTER:.0f}, three times the heartbeat interval"
        )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--block", required=True, help="notification block, type-slug/name")
    parser.add_argument(
        "--gone-after",
        type=_seconds,
        default=GONE_AFTER,
        help="seconds without a heartbeat after which a run is marked Crashed",
    )
    arguments = parser.parse_args()
    for name, change in deploy(arguments.block, arguments.gone_after):
        print(f"{change}: {name}")


if __name__ == "__main__":
    main()
