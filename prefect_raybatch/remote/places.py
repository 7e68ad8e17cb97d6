"""Runs a submission at its job server, or on a cluster that is created for the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prefect_raybatch.driver.driver import Progress
from prefect_raybatch.driver.heartbeat import MAKING, Counts, Heartbeat, Listener
from prefect_raybatch.errors import ConfigError, is_transient
from prefect_raybatch.kuberay.api import KubeApi
from prefect_raybatch.kuberay.manifest import RunIdentity
from prefect_raybatch.kuberay.run_cluster import RunCluster
from prefect_raybatch.ledger.ledger import Ledger
from prefect_raybatch.remote.follower import Commits, Follower, Owner, Submission
from prefect_raybatch.runs.backfill import interruptible_sleep
from prefect_raybatch.runs.run import Run, load_run
from prefect_raybatch.storage import open_store


def infer_remotely(
    submission: Submission,
    run: Run,
    observe: Callable[[Progress], None],
    owner: Owner,
    cluster_of: Run | None = None,
) -> Progress:
    """Run inference as a Ray job and follow it; return the progress at the end.

    The Ray job runs at the submission's job server or, with Kubernetes, on a cluster created for
    `run`. A judge's run uses the cluster of `cluster_of`, the run that is judged.

    Raises the error of the Ray job, or `JobStopped`. After `JobServerUnavailable` or `JobLost`, a
    retry finds the job again. On Kubernetes, also raises `ClusterNotReady`, `ClusterUnavailable` if
    Kubernetes does not answer, and `ConfigError` if Kubernetes rejects a request.
    """
    made = submission.access.kubernetes
    if made is None:
        return Follower(submission, run, observe, owner).run_to_end()
    ledger = Ledger(open_store(run.uri, submission.options or None))
    plan = load_run(ledger, run)[0]
    commits = Commits(ledger, plan)
    commits.begin()
    if plan.parent is not None:  # a retry of failed rows is not judged
        submission = replace(submission, has_successor=False)
    whose = _identity(cluster_of or run, submission, owner)
    tell = partial(_tell, observe, commits.progress)
    api = KubeApi(made, sleep=interruptible_sleep)
    cluster = RunCluster(made, whose, api, tell, interruptible_sleep)
    access = replace(submission.access, job_server=cluster.url, kubernetes=None)
    follower = Follower(replace(submission, access=access), run, observe, owner)
    if commits.whole:
        if not submission.has_successor:  # else the judge's run of another flow may use it
            cluster.end_left_over()
        return follower.run_to_end()
    observe(commits.progress)
    return _on_cluster(cluster, follower, owner, submission)


def _identity(run: Run, submission: Submission, owner: Owner) -> RunIdentity:
    ledger = Ledger(open_store(run.uri, submission.options or None))
    plan = load_run(ledger, run)[0]
    return RunIdentity(run.run_key, submission.name, run.uri, plan.fingerprint, owner.id)


def _on_cluster(
    cluster: RunCluster, follower: Follower, owner: Owner, submission: Submission
) -> Progress:
    """Follow the run's job on the cluster, then end the cluster or leave it to its lease.

    - After success, the cluster stays for the job's keep time, or longer if
      `submission.has_successor` is set (see `RunCluster.end`).
    - After a transient error, it is left to its lease if the Ray job may continue or Prefect will
      retry.
    - After a `ConfigError`, such as an expired certificate, it is left to its lease if the Ray job
      may continue.
    - After any other error, it stays for the keep time if there was a Ray job, and else is deleted.
    - If this process is interrupted, the cluster is left to its lease if the Ray job may continue,
      `stop_on_crash` is not set, and the flow run was not cancelled. Otherwise it is deleted.
    """
    stops = submission.stop_on_crash
    with cluster:
        try:
            cluster.wait_ready()
            progress = follower.run_to_end()
        except Exception as error:
            is_used = _may_have_job(cluster, follower) or (follower.attached and owner.retried())
            is_lost_sight = isinstance(error, ConfigError) and _may_have_job(cluster, follower)
            if (is_used and is_transient(error)) or is_lost_sight:
                cluster.leave()
            else:
                cluster.end(keep=follower.attached)
            raise
        except BaseException:  # Prefect's TerminationSignal, KeyboardInterrupt, SystemExit
            if _may_have_job(cluster, follower) and not stops and not owner.cancelled():
                cluster.leave()
            else:
                cluster.end()
            raise
        cluster.end(keep=True, for_successor=submission.has_successor)
    return progress


def _may_have_job(cluster: RunCluster, follower: Follower) -> bool:
    """Return whether a Ray job may be at work on the cluster, e.g. one of an earlier attempt."""
    return follower.job_may_continue if follower.attached else cluster.is_taken_over


def _tell(observe: Callable[[Progress], None], progress: Progress, text: str) -> None:
    """If `observe` is a `Listener`, report what the run waits for (`text`) as a start-up phase."""
    if isinstance(observe, Listener):
        now = time.time()
        observe.on_heartbeat(Heartbeat.of(Counts.of(progress, now), now, phase=MAKING, about=text))
