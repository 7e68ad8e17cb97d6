"""All errors of this package, as one tree. Every error is either transient (worth a retry) or
terminal.

Errors cross process boundaries (Ray workers, Prefect subprocesses), so each takes its message as
its only argument and pickles without help.
"""

from __future__ import annotations


class RayBatchError(Exception):
    """Base of every error that this package raises on purpose.

    `transient` says whether running the same thing again can help. Terminal errors are never
    retried: the message says what to change. `remedy` says in a line what helps against errors of
    the class. `plain` is the message alone, if what to do was added to it for a page.
    """

    transient = False
    plain: str | None = None
    remedy = "Fix what the message names, then run it again. Committed shards are kept."


class ConfigError(RayBatchError):
    """The job cannot work as written: which field, which value, what to write instead."""

    remedy = "Change the field that the message names, then run it again."


class SourceError(RayBatchError):
    """The input is missing, unreadable, of changing schema, or not what the plan recorded."""

    remedy = "Fix the input that the message names, then run it again, or use a new run key."


class PlanMismatch(RayBatchError):
    """The run directory belongs to another job; the message lists the differing fields."""

    remedy = "Use another run key, or restore the job."


class CorruptRun(RayBatchError):
    """A record or a piece in the run directory contradicts the plan; `raybatch verify` names it."""

    remedy = (
        "Repair it with raybatch repair RUN_DIR. If that is refused, restore the file that verify "
        "names, or use a new run key."
    )


class NoSuchRun(RayBatchError):
    """There is no run at that place; the message names similar runs."""

    remedy = "Correct the path or the run key. raybatch runs OUTPUT lists the runs."


class UnsafeStore(RayBatchError):
    """The output store does not honour put-if-absent, so exactly-once cannot be kept on it."""

    remedy = "Use another store in output.uri: this one cannot write each result exactly once."


class StoreError(RayBatchError):
    """The store rejected a call or failed in a way that a retry may not fix (permission, full
    disk)."""


class StoreUnavailable(StoreError):
    """The store did not answer, or answered 5xx, after the retries of a single call."""

    remedy = "Check the store and its address, then run it again once it answers."
    transient = True


class CredentialsUnusable(StoreError):
    """The store was called with expired credentials, or with none."""

    remedy = "Renew the credentials where the message says they come from, then run it again."


class BadUpload(StoreError):
    """The store holds other bytes than it was sent; the local source of the upload is kept."""

    remedy = "Run it again. If it fails again, check the store and any proxy in front of it."
    transient = True


class InsufficientResources(RayBatchError):
    """The cluster can never provide what the job asks for; the message says what is missing."""

    remedy = "Give the job fewer or smaller engines, or add nodes to the cluster."


class ClusterUnavailable(InsufficientResources):
    """No Ray cluster answers at the address: a head that is down or restarting, or a wrong one."""

    remedy = "Check the Ray head, or correct cluster.address; then run it again."
    transient = True


class ClusterNotReady(InsufficientResources):
    """The Kubernetes cluster created for a run does not become ready; the message says why."""

    remedy = "Fix what the message names (see kubectl describe raycluster), then run it again."


class PrefectUnavailable(RayBatchError):
    """Prefect's API does not answer at its URL: a server that is down, or a wrong URL."""

    remedy = "Start the server, or correct PREFECT_API_URL; then run it again."

    transient = True


class EngineStartError(RayBatchError):
    """The inference engine did not start (a model that does not load, an argument that vLLM
    rejects), or started and died whatever it was asked."""

    remedy = "Change what the engine rejects. Its full log is in Ray's logs on the node."


class EngineFailure(RayBatchError):
    """Engines kept dying and no shard came through: the infrastructure is at fault, not the
    rows."""

    remedy = "Check the nodes and their memory, then run it again."
    transient = True


class ErrorBudgetExceeded(RayBatchError):
    """More rows failed than the job's limits allow; committed shards are kept."""

    remedy = "Fix the cause, or raise the limit; then run it again."


class CostExceeded(RayBatchError):
    """The run has cost as much as limits.max_cost allows; committed shards are kept."""

    remedy = "Raise limits.max_cost to continue from the committed shards."


class IncompleteRun(RayBatchError):
    """Some shards are still uncommitted; running the same command again continues."""

    remedy = "Run it again to finish the missing shards."
    transient = True


class JobServerUnavailable(RayBatchError):
    """Ray's job server did not answer properly for minutes; a job that it runs continues."""

    remedy = "Check the Ray head, then run it again to follow the job."
    transient = True


class JobLost(RayBatchError):
    """The Ray job of a run ended without a reason: its process or its node was lost."""

    remedy = (
        "Check the Ray head and the job's node, then run it again to finish the missing shards."
    )
    transient = True


class JobStopped(RayBatchError):
    """The process or the Ray job of a run was stopped; committed shards are kept."""

    remedy = "Run it again to continue."


class RunDrained(RayBatchError):
    """The run was drained: in-flight shards are committed, the others were not begun."""

    remedy = "Run it again to finish the missing shards."


class PublishFailed(RayBatchError):
    """A target of output.publish did not accept the rows; the result in data/ is complete and
    stays."""

    remedy = "Fix what the target reports, then run it again. The result is kept."
    transient = True


def is_transient(error: BaseException) -> bool:
    """Return whether a retry can help: our own errors say so, unknown ones (network, Ray) count as
    transient."""
    if isinstance(error, RayBatchError):
        return error.transient
    return not isinstance(error, (TypeError, ValueError, NotImplementedError, KeyboardInterrupt))
