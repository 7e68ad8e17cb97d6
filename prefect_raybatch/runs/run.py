"""A run's location and identity: its directory, its key, its plan."""

from __future__ import annotations

import getpass
import logging
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from prefect_raybatch.errors import (
    CorruptRun,
    CredentialsUnusable,
    RayBatchError,
    StoreUnavailable,
)
from prefect_raybatch.job.checks import NAME, check_run_key
from prefect_raybatch.job.output import Output
from prefect_raybatch.ledger.accepted import Accepted
from prefect_raybatch.ledger.forks import follow_forks
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.ledger.plan_tables import Shards
from prefect_raybatch.ledger.records import Plan
from prefect_raybatch.model.pinned import PinnedModel
from prefect_raybatch.report.records import RunReport
from prefect_raybatch.storage import Store, join, open_store

log = logging.getLogger(__name__)

STORE_AWAY = (StoreUnavailable, CredentialsUnusable)  # the whole store is unreachable


@dataclass(frozen=True)
class Run:
    """Location, key, size and state of a run, as passed between tasks; holds no secrets.

    `probed`: this command made the plan and tested the store for it, so it need not be tested
    again. `accepted` are the differences between job and plan that the user accepted. `model` is
    the job's model if it is one of these differences, else None.
    """

    uri: str
    run_key: str
    plan_hash: str
    rows: int
    shards: int
    finished: bool
    # This command made the plan and probed the store. Later commands probe it again.
    probed: bool = field(default=False, compare=False)
    # Differences from the plan that the user accepted; and the pinned model, if it is one of them.
    accepted: tuple[Accepted, ...] = field(default=(), compare=False)
    model: PinnedModel | None = field(default=None, compare=False)


def run_store(output: Output, run_key: str) -> Store:
    """Return the store rooted at the directory of run `run_key` below `output.uri`."""
    return open_store(join(output.uri, check_run_key(run_key)), output.options or None)


def latest_unfinished(root: Store, fingerprint: str) -> str | None:
    """Return the key of the newest unfinished run below `root` with `fingerprint`, or None.

    Skips runs that a repaired run continues. Also skips unreadable run directories, with a warning.
    """
    unfinished = []
    for key in run_keys(root):
        ledger = Ledger(root.sub(key))
        try:
            plan = ledger.load_plan()
            if plan is None or plan.run_key != key:  # no plan, or a copy of another run
                continue
            if plan.fingerprint != fingerprint:
                continue
            if ledger.finished(plan) is not None or follow_forks(ledger, plan)[1] is not plan:
                continue
        except STORE_AWAY:
            raise
        except RayBatchError as error:  # another format, a foreign folder, or unreadable
            log.warning("run %s is skipped in the search for one to continue: %s", key, error)
            continue
        unfinished.append((plan.created, key))
    return max(unfinished)[1] if unfinished else None


def complete_before(run: Run | RunReport) -> str:
    """Return the message that the run was already complete, so that no row was inferred."""
    key, uri = run.run_key, run.uri if isinstance(run, Run) else run.run
    return (
        f"Run {key} was complete before in {uri}, so no row was inferred. For new answers use "
        "another run key."
    )


PARTIAL_STATE = "partial"  # state of a partial result; `state_name` gives the states of runs


def user_at_host() -> str:
    """Return user@host of this process."""
    user = "unknown"
    with suppress(OSError, KeyError):  # in a container, the user id may have no name
        user = getpass.getuser()
    return f"{user}@{socket.gethostname()}"


def state_name(finished: bool, begun: bool) -> str:
    """Return a run's state: "completed", "unfinished" or "planned".

    `finished`: it has `_SUCCESS`; `begun`: at least one shard is committed, in any phase.
    """
    return "completed" if finished else "unfinished" if begun else "planned"


def run_keys(root: Store) -> list[str]:
    """Return the folders directly below `root` whose names are valid run keys, sorted."""
    return sorted(name for name in root.folders() if NAME.match(name))


def run_of(store: Store, plan: Plan, ledger: Ledger, probed: bool = False) -> Run:
    """Return the `Run` of a plan in `store`, with its state read from the ledger."""
    return Run(
        store.uri,
        plan.run_key,
        plan.hash,
        plan.rows,
        plan.shards,
        ledger.finished(plan) is not None,
        probed,
    )


def load_run(ledger: Ledger, run: Run) -> tuple[Plan, Shards]:
    """Return a run's plan and its shards; raise `CorruptRun` if the plan is missing or changed."""
    plan = ledger.load_plan()
    if plan is None:
        raise CorruptRun(
            f"{run.uri}: plan.json is missing, though it was read before. "
            f"Restore it from a backup, or run the job under a new run key"
        )
    if plan.hash != run.plan_hash:
        raise CorruptRun(
            f"{run.uri}: plan.json is not the plan that this run started with. Start it again"
        )
    return plan, ledger.shards(plan)
