"""The cluster of one run: created or found by its name, waited for, kept alive, deleted.

There is at most one per run, and each is deleted in the end:

- Its name is derived from the run key: of several flows, one creates it and the others find it. An
  existing cluster is used only if its labels, run directory and spec are this run's.
- A flow that uses it records itself as the holder, unless the cluster has changed since it was
  read. The holder renews the deadline while it lives. A later flow replaces it as the holder; a
  former holder neither renews the deadline nor deletes the cluster.
- The holder deletes the cluster when the holder's work ends, in whatever way. It leaves the cluster
  only if the run's Ray job continues without the flow. Then the next flow finds both. If there is
  none until the deadline, `delete_expired` deletes the cluster, unless the cluster has changed
  since it was read.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect_raybatch.driver.heartbeat import Ticker
from prefect_raybatch.errors import ClusterNotReady, ConfigError, RayBatchError
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.trusted_places import url_check
from prefect_raybatch.kuberay.api import Conflict, KubeApi
from prefect_raybatch.kuberay.manifest import (
    DEADLINE,
    FINGERPRINT,
    FLOW_RUN,
    HOLDER,
    JOB,
    MANAGED_BY,
    RUN_KEY,
    RUN_NOTE,
    SPEC,
    JsonMapping,
    KubeObject,
    RunIdentity,
    differences,
    ray_cluster,
    workers_wanted,
)
from prefect_raybatch.kuberay.pods import PodsState, pods_state

log = logging.getLogger(__name__)

READY_POLL = 2.0  # seconds between looks at a cluster that is not ready
WARNINGS_EVERY = 10.0  # seconds between looks at events
LONGEST_RENEWAL = 60.0  # maximum seconds between renewals
END_WITHIN = 8.0  # seconds to delete: Prefect kills a cancelled process after 30
SUCCESSOR_SECONDS = 600.0  # that a cluster waits for the next run of its flow
NOBODY = "nobody"  # the holder of a cluster that is kept
RACES = 100  # lost races before giving up


class RunCluster:
    """The RayCluster of the run `owner`. As a context manager, it creates and holds the cluster.

    `tell` is called with short texts about what the run waits for, such as `head not ready, 8 s`.
    Leaving the block does not delete the cluster: call `end` or `leave` within it.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        owner: RunIdentity,
        api: KubeApi,
        tell: Callable[[str], None] = lambda text: None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.kubernetes, self.owner, self.api, self.tell, self._sleep = (
            kubernetes,
            owner,
            api,
            tell,
            sleep,
        )
        self.name = owner.name
        self.holder = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._held = False
        self.is_taken_over = False  # whether another flow, which may have a job there, held it
        every = min(LONGEST_RENEWAL, kubernetes.lease_seconds / 4)
        self._ticker = Ticker("the cluster's lease", every, self.renew)

    @property
    def url(self) -> str:
        """Return the URL of the job server on the head.

        Raises `ConfigError` if the job sets it and the policy in force does not allow its host.
        """
        url = self.kubernetes.server_url(self.name, self.api.namespace)
        if self.kubernetes.url is not None:
            url_check("cluster.kubernetes.url")(url)
        return url

    def __enter__(self) -> RunCluster:
        """Create the cluster or take it over, and renew its deadline until the block is left."""
        self.attach()
        self._ticker.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._ticker.__exit__()

    # --- make or find -----------------------------------------------------------------------

    def attach(self) -> None:
        """Ensure that the cluster exists and that this flow holds it.

        Waits while a former cluster of that name terminates. Raises `ConfigError` if the name
        belongs to something else, or if the cluster has another job or spec, and `ClusterNotReady`
        if the former cluster does not terminate in time or other flows win RACES times.
        """
        body = ray_cluster(self.kubernetes, self.owner)
        body["metadata"]["annotations"] |= self._claim()
        began = time.monotonic()
        for _ in range(RACES):
            existing = self.api.get(self.name)
            if existing is None:
                if self.api.create(body) is not None:
                    self._held = True
                    log.info("created the RayCluster %s in %s", self.name, self.api.namespace)
                    return
                continue
            self._check_ours(existing)
            if existing["metadata"].get("deletionTimestamp"):
                self._await_gone(began)
                continue
            self._check_spec(existing, body)
            try:
                if self.api.annotate(existing, self._claim()) is None:
                    continue
            except Conflict:
                continue
            self._held = True
            before = notes_of(existing).get(HOLDER)
            self.is_taken_over = before != NOBODY
            log.info("using the RayCluster %s, previously held by %s", self.name, before)
            return
        raise ClusterNotReady(
            f"RayCluster {self.name}: lost the race to create or hold it {RACES} times"
        )

    def _claim(self) -> dict[str, str]:
        return {HOLDER: self.holder, DEADLINE: _after(self.kubernetes.lease_seconds)}

    def _check_ours(self, existing: JsonMapping) -> None:
        labels, notes = existing["metadata"].get("labels") or {}, notes_of(existing)
        expected = self.owner.labels
        where = f"the RayCluster {self.name} in {self.api.namespace}"
        if labels.get(MANAGED_BY) != expected[MANAGED_BY]:
            raise ConfigError(
                f"cluster.kubernetes: {where} was not created by raybatch, but has the name that "
                f"this run key needs. Delete it (kubectl delete raycluster {self.name}), or use "
                "another run key"
            )
        pairs = {name: (labels.get(name), expected[name]) for name in (RUN_KEY, JOB, FINGERPRINT)}
        pairs["run directory"] = notes.get(RUN_NOTE), self.owner.run
        differing = [
            f"{n}: {there} there, {here} here"
            for n, (there, here) in pairs.items()
            if there != here
        ]
        if differing:
            raise ConfigError(
                f"cluster.kubernetes: {where} belongs to another run of job {labels.get(JOB)} "
                f"({'; '.join(differing)}). Wait until that run has ended, or use another run key"
            )

    def _check_spec(self, existing: JsonMapping, body: JsonMapping) -> None:
        if notes_of(existing).get(SPEC) == body["metadata"]["annotations"][SPEC]:
            return
        changes = list(differences(body["spec"], existing.get("spec") or {}))[:3]
        raise ConfigError(
            f"cluster.kubernetes: the existing RayCluster {self.name} of this run in "
            f"{self.api.namespace} differs from the job "
            f"({'; '.join(changes) or 'it has additional fields'}). Delete it (kubectl delete "
            f"raycluster {self.name}), or restore the job"
        )

    def _await_gone(self, began: float) -> None:
        waited = time.monotonic() - began
        if waited > self.kubernetes.ready_seconds:
            raise ClusterNotReady(
                f"the former RayCluster {self.name} has been terminating for {waited:.0f} s. Check "
                f"its finalizers: kubectl get raycluster {self.name} -o yaml"
            )
        self._say("former cluster terminating", began)
        self._sleep(READY_POLL)

    # --- wait -------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until the head and all workers are ready.

        Raises `ClusterNotReady` if the cluster is deleted, if it has a fault that waiting does not
        fix, or after cluster.kubernetes.ready_within. The error says what is not ready.
        """
        began = time.monotonic()
        warnings: list[KubeObject] = []
        looked, warned = 0.0, ""
        while True:
            found = self.api.get(self.name)
            if found is None or found["metadata"].get("deletionTimestamp"):
                raise ClusterNotReady(f"the RayCluster {self.name} was deleted while it started")
            now = time.monotonic()
            if not looked or now - looked > WARNINGS_EVERY:
                looked, warnings = now, self.api.warnings(self.name)
            state = self._look(found, warnings)
            self._say(state.text, began)
            if state.ready:
                log.info("cluster: %s after %.0f s", state.text, now - began)
                return
            if state.fatal:
                raise ClusterNotReady(f"RayCluster {self.name}: {state.fatal}")
            if state.trouble and state.trouble != warned:
                warned = state.trouble
                log.warning("cluster: %s", warned)
            if now - began > self.kubernetes.ready_seconds:
                raise ClusterNotReady(
                    f"RayCluster {self.name}: {state.text} after {now - began:.0f} s "
                    f"(cluster.kubernetes.ready_within)" + (f": {warned}" if warned else "")
                )
            self._sleep(READY_POLL)

    def _look(self, existing: JsonMapping, warnings: list[KubeObject]) -> PodsState:
        status, spec = existing.get("status") or {}, existing.get("spec") or {}
        state = pods_state(self.api.pods(self.name), workers_wanted(spec), warnings)
        if not state.trouble and status.get("state") == "failed" and status.get("reason"):
            return PodsState(state.head, state.workers, state.wanted, "", str(status["reason"]))
        return state

    def _say(self, text: str, began: float) -> None:
        self.tell(f"{text}, {time.monotonic() - began:.0f} s")

    # --- keep and end -----------------------------------------------------------------------

    def renew(self) -> None:
        """Extend the cluster's deadline if this flow is the holder.

        If another flow has become the holder, that is logged. From then on, this flow neither
        renews the deadline nor deletes the cluster.
        """
        if not self._held:
            return
        found = self.api.get(self.name)
        if found is None:
            return
        if notes_of(found).get(HOLDER) != self.holder:
            self._held = False
            log.warning(
                "the RayCluster %s is held by %s now, which will delete it",
                *(self.name, notes_of(found).get(HOLDER)),
            )
            return
        try:
            self.api.annotate(found, {DEADLINE: _after(self.kubernetes.lease_seconds)})
        except Conflict:
            log.debug("the RayCluster %s has changed; its lease is renewed next time", self.name)

    def leave(self) -> None:
        """Log that the cluster stays, with its Ray job, until its lease expires."""
        log.warning(
            "the RayCluster %s continues until %s; start the same run again to follow it, or "
            "delete it: kubectl delete raycluster %s",
            *(self.name, _after(self.kubernetes.lease_seconds), self.name),
        )

    def end(self, keep: bool = False, for_successor: bool = False) -> None:
        """Delete the cluster if this flow holds it.

        With `keep`, the cluster stays for the job's keep time (`keep_seconds`) and has no holder; a
        keep time of 0 deletes it. `for_successor`, which requires `keep`, extends the time to at
        least SUCCESSOR_SECONDS, so that the next run of the flow can use the cluster. A failure is
        only logged, so that it does not hide how the run ended.
        """
        if not self._held:
            return
        try:
            with self.api.briefly(END_WITHIN):
                least = SUCCESSOR_SECONDS if for_successor else 0.0
                self._end(max(self.kubernetes.keep_seconds, least) if keep else 0.0)
        except (RayBatchError, Conflict) as error:
            log.error(
                "could not delete the RayCluster %s: %s. Run kubectl delete raycluster %s, or "
                "raybatch reconcile kubernetes/%s after its lease has expired",
                *(self.name, error, self.name, self.api.namespace),
            )
        self._held = False

    def _end(self, keep: float) -> None:
        for _ in range(RACES):
            found = self.api.get(self.name)
            if found is None or found["metadata"].get("deletionTimestamp"):
                return
            holder = notes_of(found).get(HOLDER)
            if holder != self.holder:
                log.info("the RayCluster %s is not deleted: %s holds it", self.name, holder)
                return
            try:
                if keep:
                    until = _after(keep)
                    self.api.annotate(found, {DEADLINE: until, HOLDER: NOBODY})
                    log.info("the RayCluster %s is kept until %s", self.name, until)
                else:
                    self.api.delete(found, unchanged=True)
                    log.info("deleted the RayCluster %s", self.name)
                return
            except Conflict:
                continue  # the KubeRay operator may change the cluster's status at any time

    def end_left_over(self) -> None:
        """Delete the cluster that another flow left behind for this run, which is complete.

        Does nothing if the cluster is being kept on purpose. A failure is only logged.
        """
        try:
            with self.api.briefly(END_WITHIN):
                found = self.api.get(self.name)
                if found is None or notes_of(found).get(HOLDER) == NOBODY:
                    return
                self._check_ours(found)
                if self.api.delete(found):
                    log.info("deleted the RayCluster %s: its run is complete", self.name)
        except (RayBatchError, Conflict) as error:
            log.warning("could not look for the RayCluster %s: %s", self.name, error)


@dataclass(frozen=True)
class Expired:
    """A run's cluster that `delete_expired` examined, whether expired or not.

    `over` is True if the cluster's lease has expired and the cluster was deleted. In a dry run, it
    is True if the cluster would be deleted. `why` is the reason for deleting or keeping it.
    `flow_run` is the Prefect flow run that created it, None if unknown.
    """

    name: str
    run_key: str
    flow_run: str | None
    over: bool
    why: str


def delete_expired(api: KubeApi, dry_run: bool = False) -> list[Expired]:
    """Delete the run clusters in the namespace whose lease has expired; return all run clusters.

    A missing or unreadable deadline counts as expired. A dry run deletes nothing.
    """
    clusters = []
    for found in api.clusters():
        meta, notes = found["metadata"], notes_of(found)
        over = is_past(found)
        deadline = notes.get(DEADLINE)
        why = f"its lease expired at {deadline}" if over else f"its lease lasts until {deadline}"
        if not deadline:
            why = "it has no lease"
        if meta.get("deletionTimestamp"):
            over, why = False, "it is being deleted"
        elif over and not dry_run:
            try:
                if not api.delete(found, unchanged=True):
                    over, why = False, "it was deleted meanwhile"
            except Conflict:
                over, why = False, "its flow renewed the lease"
        clusters.append(
            Expired(
                str(meta["name"]),
                str(meta["labels"].get(RUN_KEY)),
                notes.get(FLOW_RUN),
                over,
                why,
            )
        )
    return clusters


def notes_of(existing: JsonMapping) -> dict[str, str]:
    """Return the annotations of a Kubernetes object; {} if it has none."""
    return dict(existing["metadata"].get("annotations") or {})


def is_past(existing: JsonMapping) -> bool:
    """Return whether the cluster's deadline has passed, is missing or is unreadable."""
    try:
        return datetime.fromisoformat(notes_of(existing)[DEADLINE]) < datetime.now(UTC)
    except (KeyError, TypeError, ValueError):
        return True


def _after(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
