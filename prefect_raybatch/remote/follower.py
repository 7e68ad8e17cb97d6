"""Runs inference as a job of Ray's job server, which outlives this process, and follows it.

A run never has two live jobs for long, and every job can be found again:

- A job has a number, from which its submission id is derived. Its record is written by
  put-if-absent *before* it is submitted (`records`), so the next flow finds it even if the
  submitter dies in between. A Ray head accepts an id only once: of several submitters of the same
  record, one starts the job and the others find it.
- A flow reads the newest record and asks the server about that job. If it is live, the flow follows
  it; if it succeeded, the flow collects its outcome. If it is unknown (the submitter died first, or
  the head lost its state) and has recorded no end, the flow submits the same id. If it has ended
  otherwise, the flow writes record N + 1 and looks again; if two flows do so, one finds the other's
  record.
- A job looks for a newer record than its own and ends itself if there is one. So a late submission
  of a suspended flow has no effect, and a job that its server considered dead stops.

The result does not depend on this: each shard is committed once, so two live jobs would only infer
some rows twice.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from prefect_raybatch.driver.driver import PhaseProgress, Progress
from prefect_raybatch.driver.heartbeat import Counts, Listener, heartbeat_elsewhere, unheard
from prefect_raybatch.errors import (
    ConfigError,
    JobLost,
    JobStopped,
    RayBatchError,
    error_class,
)
from prefect_raybatch.job.cluster import ClusterAccess
from prefect_raybatch.job.secrets import hide_path
from prefect_raybatch.ledger.increments import begin_requests_phase, increment_of
from prefect_raybatch.ledger.ledger import READERS, Ledger
from prefect_raybatch.ledger.records import Commit, Plan
from prefect_raybatch.remote.client import JobServer, RayJob
from prefect_raybatch.remote.logs import LOOK_SHARE, LogFeed, parse
from prefect_raybatch.remote.records import (
    JobRecords,
    Outcome,
    Record,
    job_digest,
)
from prefect_raybatch.runs.backfill import interruptible_sleep
from prefect_raybatch.runs.cascade import passed_on
from prefect_raybatch.runs.run import Run, load_run
from prefect_raybatch.storage import open_store, read_ahead

log = logging.getLogger(__name__)

POLL = 2.0  # seconds between queries for the job's status
LOOK_EVERY = 2.0  # seconds between looks for new commits; longer if looking takes long
STOP_WAIT = 25.0  # seconds for a job to stop: Prefect kills a cancelled process after 30
ONE_BY_ONE = 1000  # commits to read individually; for more, the checkpoints are read
MOST_JOBS = 100  # jobs in a row that may end without completing the run
DIGEST_ENV = "RAYBATCH_JOB_DIGEST"  # digest of the job as it was submitted
JOBS_ENDED = (
    f"{MOST_JOBS} Ray jobs in a row ended without completing the run; see their logs in Ray's "
    "dashboard"
)
REMOTE_COMMAND = "python -m prefect_raybatch.remote"


@dataclass(frozen=True)
class Owner:
    """The flow run on whose behalf a job is followed. The defaults apply outside Prefect.

    `id` is the flow run's. `attached(submission id, server)` is called when a job is found or
    submitted. `cancelled()`, called after a signal, returns whether a user cancelled the flow run.
    `retried()`, called after a transient error, returns whether Prefect will retry. `api` is the
    URL of Prefect's API, empty if there is none. `detached()` is called when the job has ended, and
    when all shards are committed before one is found.
    """

    id: str | None = None
    attached: Callable[[str, str], None] = lambda id, server: None
    cancelled: Callable[[], bool] = lambda: False
    api: str = ""
    retried: Callable[[], bool] = lambda: False
    detached: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job as it is sent to a cluster, and the credentials that stay in this process.

    The cluster receives `job`, the batch job, and `env`, the environment variables of the Ray job;
    both are without secrets. `access` says how to reach the cluster, and `options` are those of the
    run directory's store. `stop_on_crash`: an interruption of this process stops the Ray job.
    `has_successor`: the judge's run will use the same cluster afterwards.
    """

    name: str
    job: Mapping[str, Any]
    env: Mapping[str, str]
    stop_on_crash: bool
    access: ClusterAccess
    options: Mapping[str, Any]
    has_successor: bool = False


class Follower:
    """Finds or submits the Ray job of a run and follows it to its end.

    `observe` is called with the progress when there are new commits. `server_at`, `command` and
    `sleep` are for tests.
    """

    def __init__(
        self,
        submission: Submission,
        run: Run,
        observe: Callable[[Progress], None],
        owner: Owner,
        server_at: Callable[..., JobServer] = JobServer,
        command: str = REMOTE_COMMAND,
        sleep: Callable[[float], None] = interruptible_sleep,
    ):
        self.submission, self.run, self.owner = submission, run, owner
        self.access = submission.access
        self.url = str(self.access.job_server)
        self.server_at, self.command, self.sleep = server_at, command, sleep
        ledger = Ledger(open_store(run.uri, submission.options or None))
        plan = load_run(ledger, run)[0]
        self.records = JobRecords(ledger.store, run.run_key, plan.hash)
        self.digest = job_digest(plan.hash, submission.job, run.accepted, run.model)
        self.env = {**submission.env, DIGEST_ENV: self.digest}
        self.watch = Watch(ledger, plan, observe)
        self._current: tuple[Record, JobServer] | None = None
        self.job_may_continue = False  # whether the attached job may outlive this process

    def run_to_end(self) -> Progress:
        """Submit and follow jobs until every shard is committed; return the progress.

        Raises the error that the job recorded, `JobStopped` if the job was stopped, and `JobLost`
        if it ended without a recorded error or if MOST_JOBS jobs in a row left the run incomplete.
        """
        self.watch.begin()
        if self.watch.whole:
            self.owner.detached()  # an earlier attempt may have been killed while it followed a job
        with self._on_signal():
            for _ in range(MOST_JOBS):
                if self.watch.whole:
                    return self.watch.progress
                record, server = self.attach()
                self.owner.attached(record.id, record.server)
                ended = self.follow(record, server)
                if ended is not None:
                    self.owner.detached()
                    self._collect(record, ended)
        raise JobLost(f"{self.run.uri}: {JOBS_ENDED}")

    @property
    def attached(self) -> bool:
        """Return whether this flow has found or submitted a Ray job."""
        return self._current is not None

    # --- find or submit ---------------------------------------------------------------------

    def attach(self) -> tuple[Record, JobServer]:
        """Return (record, server) of the run's live or succeeded Ray job; submit one if needed.

        Stops a live job of another process first if the job sets `on_crash: stop`. Raises `JobLost`
        after MOST_JOBS jobs that did not complete the run.
        """
        for _ in range(MOST_JOBS):
            newest = self.records.newest()
            if newest is None:
                self._next(1)
                continue
            if newest.server != self.url:
                self._pass_over(newest)
                continue
            server = self.server_at(self.url, access=self.access)
            found = server.find(newest.id)
            if found is None and self._is_replaced(newest):
                self._next(newest.number + 1)
                continue
            self._current, self.job_may_continue = (newest, server), True
            if found is None:
                self.submit_recorded(newest, server)
                return newest, server
            if found.live:
                if not self.submission.stop_on_crash or _by_us(newest):
                    log.info("following the Ray job %s", newest.id)
                    self._check_accepted(newest)
                    return newest, server
                log.info("stopping the Ray job %s of an earlier attempt", newest.id)
                server.stop(newest.id, STOP_WAIT)
            elif found.status == "SUCCEEDED" and self.watch.look_now():
                return newest, server
            self._next(newest.number + 1)
        raise JobLost(f"{self.run.uri}: {JOBS_ENDED}")

    def _check_accepted(self, record: Record) -> None:
        """Warn if the Ray job was submitted before a difference between job and plan was accepted.

        That Ray job does not use the changed field.
        """
        submitted = {(accepted.field, accepted.new) for accepted in record.accepted_fields}
        for accepted in self.run.accepted:
            if (accepted.field, accepted.new) not in submitted:
                log.warning(
                    "the Ray job %s was submitted before the change of %s was accepted and does "
                    "not use it. To apply it, stop the job (ray job stop %s) and start the run "
                    "again",
                    *(record.id, accepted.field, record.id),
                )

    def _next(self, number: int) -> None:
        self.records.add(number, self.submission.job, self.url, self.owner.id, self.run)

    def _pass_over(self, record: Record) -> None:
        """Replace the recorded job, which is at another server, by a job at this flow's server.

        Only the next record is written. The other server is not contacted: anybody who may write to
        the run directory could name a server of their own, which would receive the credentials and
        could claim to run the job. Raises `ConfigError` if this flow already has a job: then
        another flow is using that server.
        """
        where = f"the Ray job {record.id} is recorded at {hide_path(record.server)[:200]!r}"
        ours = f"cluster.job_server is {self.url}"
        if self._current is not None:
            raise ConfigError(
                f"{where}, but {ours}: another flow is working on this run at the other server. "
                "Set the same cluster.job_server in both, or wait until the other flow has ended"
            )
        log.warning(
            "%s, but %s. For security, a server that only the run directory names is not "
            "contacted: job %d starts here, and the old job stops when it notices. To follow the "
            "old job instead, stop this run and set cluster.job_server to its server",
            *(where, ours, record.number + 1),
        )
        self._next(record.number + 1)

    def _is_replaced(self, record: Record) -> bool:
        """Return whether to replace the recorded job, which the server does not know, by a new one.

        If not, the recorded job is submitted again with the same number. It is replaced in two
        cases:

        - It has recorded an outcome. A second job with the same number would seem to have ended.
        - It differs from this flow's submission. This is logged as a warning.
        """
        if record.digest == self.digest:
            return self.records.outcome(record.number) is not None
        log.warning(
            "job %d of this run does not exist at the job server and differs from the present job; "
            "job %d replaces it",
            *(record.number, record.number + 1),
        )
        return True

    def submit_recorded(self, record: Record, server: JobServer) -> None:
        """Submit the job of `record` to the server, unless the server already has it."""
        metadata = {
            "raybatch_run_key": self.run.run_key,
            "raybatch_run": self.run.uri,
            "raybatch_on_crash": record.on_crash,
            **({"raybatch_flow_run": record.flow_run} if record.flow_run else {}),
        }
        command = f"{self.command} {shlex.quote(self.run.uri)} {record.number}"
        server.submit(record.id, command, metadata, self.env)
        log.info("the Ray job %s was submitted to %s", record.id, record.server)

    # --- follow -----------------------------------------------------------------------------

    def follow(self, record: Record, server: JobServer) -> RayJob | None:
        """Wait for the job's end and return the ended job; None if the server no longer has it.

        Meanwhile, show its log lines and report new commits.
        """
        feed = LogFeed(partial(server.logs, record.id))
        while True:
            found = server.find(record.id)
            over = found is None or not found.live
            feed.poll(last=over)
            self.watch.look(now=over)
            if over:
                return found
            self.sleep(POLL)

    def _collect(self, record: Record, ended: RayJob) -> None:
        """Set the progress's engine deaths and passes to the ended job's, then raise its error.

        Raises nothing if the run is complete or a newer job is recorded. Otherwise raises
        `JobStopped` if the job was stopped. If not, raises the error that the job recorded, or else
        the one that it printed. If there is neither, raises `JobLost`.
        """
        outcome = self.records.outcome(record.number)
        if outcome is not None:
            self.watch.progress.process_deaths = outcome.engine_deaths
            self.watch.progress.passes = outcome.passes
        if self.watch.whole or self.records.newest_number() > record.number:
            return
        self.job_may_continue = False
        if ended.status == "STOPPED":
            raise JobStopped(
                f"the Ray job {record.id} was stopped. Committed shards are kept; start the same "
                "run again to continue"
            )
        outcome = outcome or printed_outcome(ended.message)
        if outcome is not None and outcome.error:
            raise error_of(outcome)
        message = ended.message[-1000:]
        raise JobLost(f"the Ray job {record.id} ended with status {ended.status}: {message}")

    @contextmanager
    def _on_signal(self) -> Iterator[None]:
        """Stop the Ray job if a signal ends the `with` block and a user has cancelled the flow run.

        If this process is only interrupted (a drained worker, Ctrl-C), the Ray job continues,
        unless `on_crash` is stop. Other errors do not stop it.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:  # Prefect's TerminationSignal, KeyboardInterrupt, SystemExit
            if self._current is not None:
                record, server = self._current
                if self.submission.stop_on_crash or self.owner.cancelled():
                    self._stop(record, server)
                else:
                    text = "the Ray job %s continues; start the same run again to follow it"
                    log.warning(text, record.id)
            raise

    def _stop(self, record: Record, server: JobServer) -> None:
        log.info("stopping the Ray job %s", record.id)
        with suppress(RayBatchError):  # the signal must not be lost; reconcile stops the job later
            if server.stop(record.id, STOP_WAIT):
                log.info("the Ray job %s has stopped; committed shards are kept", record.id)
                return
        text = "the Ray job %s has not stopped; stop it with: raybatch reconcile %s"
        log.error(text, record.id, self.url)


class Watch:
    """Progress of a run, counted from its commits, whichever driver writes them.

    `asks` counts the commits of the first of two phases: the requests phase or, in a cascade, the
    first model's. It is None for a run with one phase. `own` counts the commits of the last phase.
    `observe` is called with the progress of the present phase.
    """

    def __init__(self, ledger: Ledger, plan: Plan, observe: Callable[[Progress], None]):
        self.observe = observe
        self.own = Commits(ledger, plan)
        self.asks: Commits | None = None
        increment = increment_of(plan)
        begun = begin_requests_phase(ledger.store, increment) if increment is not None else None
        if begun is not None:
            self.asks = Commits(*begun)
            self.asks.progress.later = PhaseProgress(plan.rows, plan.shards)
            self.asks.progress.passed_on = passed_on(plan)
            self.own.progress.before = PhaseProgress(begun[1].rows, begun[1].shards)
        self._next = 0.0

    @property
    def progress(self) -> Progress:
        return self.own.progress

    @property
    def whole(self) -> bool:
        return self.own.whole

    @property
    def _now(self) -> Commits:
        """Return the requests phase's commits until it is complete, then the rows phase's."""
        return self.own if self.asks is None or self.asks.whole else self.asks

    def begin(self) -> None:
        """Count the existing commits and report the progress to `observe`.

        Call it before `look`.
        """
        for commits in (self.asks, self.own):
            if commits is not None:
                commits.begin()
        self._tell()
        self.observe(self._now.progress)

    def look_now(self) -> bool:
        """Count and report new commits; return whether every shard of the run is committed."""
        self.look(now=True)
        return self.whole

    def look(self, now: bool = False) -> None:
        """Count new commits and, if there are any, report the progress to `observe`.

        Does nothing if the last look was a moment ago, unless `now`.
        """
        began = time.monotonic()
        if not now and began < self._next:
            return
        seen = self._now
        fresh = seen.look()
        if seen is self.asks and seen.whole:
            fresh = self.own.look() or fresh
        self._tell(over=now)
        if fresh:
            self.observe(self._now.progress)
        self._next = began + max(LOOK_EVERY, (time.monotonic() - began) / LOOK_SHARE)

    def _tell(self, over: bool = False) -> None:
        """If `observe` is a `Listener`, pass it the latest heartbeat of the run's driver.

        `over`: the Ray job has ended.
        """
        if not isinstance(self.observe, Listener):
            return
        commits = self._now
        counts = Counts.of(commits.progress)
        try:
            beat = heartbeat_elsewhere(commits.ledger.store, counts, over)
        except RayBatchError as error:  # heartbeats are only for display
            log.info("could not read heartbeats: %s", error)
            beat = unheard(counts)
        self.observe.on_heartbeat(beat.with_committed(commits.progress.done))


class Commits:
    """Progress of one phase of a run, counted from the commits in its ledger.

    `seen` (bool for each shard) marks the shards that are counted.
    """

    def __init__(self, ledger: Ledger, plan: Plan):
        self.ledger, self.plan = ledger, plan
        self.progress = Progress(plan.rows, plan.shards)
        self.seen = np.zeros(plan.shards, bool)
        self._last = time.time()

    @property
    def whole(self) -> bool:
        return bool(self.seen.all())

    def begin(self) -> None:
        """Count the existing commits as resumed shards."""
        listing = self.ledger.listing(self.plan)
        for commit in self.ledger.commits(self.plan, listing):
            self.progress.add(commit, self._last)
        self.seen = listing.done.copy()
        self.progress.recent.clear()
        self.progress.resumed_shards = self.progress.tally.shards

    def look(self) -> bool:
        """Count new commits; return whether there are any."""
        commits = self._fresh()
        for commit in commits:
            # Work on the first commit began when the engines had started, not with the Ray job.
            first = commit.stats.started or self._last
            self.progress.add(commit, self._last if self.progress.recent else first)
            self._last = max(self._last, commit.committed)
        return bool(commits)

    def _fresh(self) -> list[Commit]:
        listing = self.ledger.listing(self.plan)
        fresh = listing.done & ~self.seen
        shards = np.flatnonzero(fresh).tolist()
        read: Iterator[Commit]
        if len(shards) <= ONE_BY_ONE:
            read = read_ahead(
                partial(self.ledger.read_commit, self.plan), shards, READERS, 4 * READERS
            )
        else:
            read = self.ledger.commits(self.plan, replace(listing, done=fresh))
        found = sorted(read, key=lambda commit: commit.committed)
        self.seen |= fresh
        return found


def error_of(outcome: Outcome) -> Exception:
    """Return the error that a Ray job recorded at its end, as an exception to raise.

    Its class is kept if it is an error of this package or TypeError, ValueError or
    NotImplementedError; any other becomes `JobLost`.
    """
    if ours := error_class(str(outcome.error)):
        return ours(outcome.message)
    text = f"{outcome.error}: {outcome.message}"
    terminal = {kind.__name__: kind for kind in (TypeError, ValueError, NotImplementedError)}
    return terminal.get(str(outcome.error), JobLost)(text)


def printed_outcome(message: str) -> Outcome | None:
    """Return the error of this package in the last line that the job's process logged.

    Returns None if that line is no such error. `message` is the server's message about the job,
    which contains the end of the job's log. The log is needed if a job could record no outcome,
    because the node's policy refuses the run directory or its records cannot be read.
    """
    logged = list(parse(message.splitlines()))
    level, line = logged[-1] if logged else (logging.NOTSET, "")
    name, _, text = line.partition(": ")
    return Outcome(name, text) if level == logging.ERROR and error_class(name) else None


def _by_us(record: Record) -> bool:
    return (record.host, record.pid) == (socket.gethostname(), os.getpid())
