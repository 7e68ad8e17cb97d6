"""Runs inference where the job asks for it: here, at a job server, or on a new cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import MAKING, Beat, Counts, Listener
from prefect_raybatch.errors import is_transient
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.cluster_access import ClusterAccess
from prefect_raybatch.job.edits import with_access
from prefect_raybatch.job.kubernetes import Kubernetes
from prefect_raybatch.job.ray_cluster import check_made_cluster
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.job.trusted_places import check_run_place
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.kuberay.manifest import RunIdentity
from prefect_raybatch.kuberay.run_cluster import RunCluster
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.remote.follower import Commits, Follower, Owner, infer
from prefect_raybatch.runs.run import Run, load_run
from prefect_raybatch.storage import open_store


def infer_in_place(
    job: BatchJob,
    loaded: BatchJob,
    run: Run,
    observe: Callable[[Progress], None] = lambda progress: None,
    owner: Owner | None = None,
    api_of: Callable[[Kubernetes], KubeApi] = KubeApi,
) -> Progress:
    """Run inference, on a cluster that is created for the run if `cluster.kubernetes` is set.

    Raises what `infer` does, and `ClusterNotReady`, `ClusterUnavailable` (Kubernetes does not
    answer) and `ConfigError` (Kubernetes rejects a request).
    """
    check_run_place(run.uri)
    check_trust(loaded)
    made, owner = loaded.cluster.access.kubernetes, owner or Owner()
    if made is None:
        return infer(job, loaded, run, observe, owner)
    check_made_cluster(loaded)
    ledger = Ledger(open_store(run.uri, loaded.output.options or None))
    plan = load_run(ledger, run)[0]
    commits = Commits(ledger, plan)
    commits.begin()
    whose = RunIdentity(run.run_key, job.name, run.uri, plan.fingerprint, owner.id)
    cluster = RunCluster(made, whose, api_of(made), partial(_tell, observe, commits.progress))
    follower = Follower(job, _reached(loaded, cluster.url), run, observe, owner)
    if commits.whole:
        cluster.end_left_over()
        return follower.run_to_end()
    observe(commits.progress)
    return _on_cluster(cluster, follower, owner, job.cluster.on_crash == "stop")


def _on_cluster(cluster: RunCluster, follower: Follower, owner: Owner, stops: bool) -> Progress:
    """Work on the cluster, then delete it, unless its Ray job continues without this process."""
    with cluster:
        try:
            cluster.wait_ready()
            progress = follower.run_to_end()
        except Exception as error:
            if follower.attached and is_transient(error) and owner.retried():
                cluster.leave()
            else:
                cluster.end(keep=follower.attached)
            raise
        except BaseException:  # Prefect's TerminationSignal, KeyboardInterrupt, SystemExit
            if follower.attached and not stops and not owner.cancelled():
                cluster.leave()
            else:
                cluster.end()
            raise
        cluster.end(keep=True)
    return progress


def _reached(loaded: BatchJob, url: str) -> BatchJob:
    """Return the job with another job server and the same credentials."""
    was = loaded.cluster.access
    access = ClusterAccess(None, url, was.headers, was.token, was.block)
    return with_access(loaded, access)


def _tell(observe: Callable[[Progress], None], progress: Progress, text: str) -> None:
    """Report what the run waits for as a start-up phase."""
    if isinstance(observe, Listener):
        now = time.time()
        observe.hear(Beat.of(Counts.of(progress, now), now, phase=MAKING, about=text))
