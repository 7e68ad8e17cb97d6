"""All errors of this package, each either transient (worth a retry) or terminal.

Errors cross process boundaries (Ray workers, Prefect subprocesses), so every class takes the
message as its only argument, which lets pickle restore it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """The two parts of a message: what is wrong and where, then what to do about it."""

    fault: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fault}. {self.remedy}"


class RayBatchError(Exception):
    """Base of every error that this package raises on purpose.

    `transient` says whether a retry can help. Terminal errors are never retried: the message says
    what to change. `remedy` is the class's advice, in one line. For the Prefect page, the remedy is
    appended to the message; `plain` is then the message without it. Before that, `plain` is None.
    """

    transient = False
    plain: str | None = None
    remedy = "Fix what the message names, then run the job again. Committed shards are kept."


class ConfigError(RayBatchError):
    """The job cannot work as written: which field, which value, what to write instead."""

    remedy = "Change the field that the message names, then run the job again."


class SourceError(RayBatchError):
    """The input is missing, unreadable, inconsistent in its schema, or changed since the plan."""

    remedy = "Fix the input that the message names, then run the job again, or use a new run key."


class PlanMismatch(RayBatchError):
    """The run directory belongs to another job; the message lists the differing fields."""

    remedy = "Use a new run key, or undo the changes that the message lists."


class CorruptRun(RayBatchError):
    """A record or a piece in the run directory contradicts the plan; `raybatch verify` names it."""

    remedy = (
        "Run raybatch repair RUN_DIR. If it refuses, restore the files that raybatch verify names, "
        "or use a new run key."
    )


class NoSuchRun(RayBatchError):
    """No run exists at the given path; the message names similar runs."""

    remedy = "Correct the path or the run key. List the runs with raybatch runs OUTPUT."


class UnsafeStore(RayBatchError):
    """The output store does not honour put-if-absent, so exactly-once is impossible on it."""

    remedy = "Set output.uri to another store: this one cannot guarantee exactly-once."


class StoreError(RayBatchError):
    """The store failed in a way that a retry may not fix (permission, full disk)."""


class StoreUnavailable(StoreError):
    """The store did not answer, or answered 5xx, after the retries of a single call."""

    remedy = "Check the store and its address, then run the job again once it answers."
    transient = True


class CredentialsUnusable(StoreError):
    """The store was called with expired credentials, or with none."""

    remedy = "Renew the credentials that the message names, then run the job again."


class AccessDenied(StoreError):
    """The store denies these credentials an operation that a run needs."""

    remedy = "Grant the permission that the message names, then run the job again."


class BadUpload(StoreError):
    """The store holds other bytes than were uploaded; the local file is kept."""

    remedy = "Run the job again. If it fails again, check the store and any proxy in front of it."
    transient = True


class HubUnavailable(RayBatchError):
    """Hugging Face cannot be reached for a model that is not in the local cache."""

    remedy = "Check the network, then run the job again; or name a local or s3:// folder."
    transient = True


class InsufficientResources(RayBatchError):
    """The cluster is too small for the job; the message says what is missing."""

    remedy = "Use fewer or smaller engines, or add nodes to the cluster."


class ClusterUnavailable(InsufficientResources):
    """No Ray cluster answers: its head is down or restarting, or the address is wrong."""

    remedy = "Check the Ray head, or correct cluster.address; then run the job again."
    transient = True


class ClusterNotReady(InsufficientResources):
    """The Kubernetes cluster created for a run does not become ready; the message says why."""

    remedy = "Fix what the message names (see kubectl describe raycluster), then run the job again."


class PrefectUnavailable(RayBatchError):
    """Prefect's API does not answer: its server is down, or the URL is wrong."""

    remedy = "Start the server, or correct PREFECT_API_URL. Then run the job again."
    transient = True


class EngineStartError(RayBatchError):
    """The engine did not start (a bad model or argument), or died on its health check."""

    remedy = "Change what the engine rejects. Ray's logs on the node have the full traceback."


class EngineFailure(RayBatchError):
    """Engines kept dying, or nothing was committed: nodes are at fault, not rows."""

    remedy = "Check the nodes and their memory, then run the job again."
    transient = True


class EndpointRefused(RayBatchError):
    """The server of a hosted model will answer no request of this run."""

    remedy = "Do what the message says, then run the job again. Paid answers are kept."


class EndpointUnavailable(RayBatchError):
    """The server of a hosted model cannot be reached, or has answered nothing for minutes."""

    remedy = "Check engine.endpoint.url and the server, then run the job again."
    transient = True


class ErrorBudgetExceeded(RayBatchError):
    """More rows failed than the job's limits allow; committed shards are kept."""

    remedy = "Fix the cause, or raise the limit; then run the job again."


class ImagesUnavailable(RayBatchError):
    """Images of more rows than the limits allow cannot be fetched now; shards are kept."""

    remedy = "Run the job again once the images' servers answer."
    transient = True


class CostExceeded(RayBatchError):
    """The run has reached limits.max_cost; committed shards are kept."""

    remedy = "Raise limits.max_cost to continue from the committed shards."


class IncompleteRun(RayBatchError):
    """Some shards are not committed yet."""

    remedy = "Run the job again to finish the missing shards."
    transient = True


class JobServerUnavailable(RayBatchError):
    """Ray's job server gave no valid answer for minutes; the Ray job continues."""

    remedy = "Check the Ray head, then run the job again to follow the job."
    transient = True


class JobLost(RayBatchError):
    """The Ray job of a run ended without recording a reason: its process or node was lost."""

    remedy = (
        "Check the Ray head and the node of the Ray job, then run the job again to finish the "
        "missing shards."
    )
    transient = True


class JobStopped(RayBatchError):
    """The process or the Ray job of a run was stopped; committed shards are kept."""

    remedy = "Run the job again to continue."


class RunDrained(RayBatchError):
    """The run was drained: in-flight shards are committed, the others were not started."""

    remedy = "Run the job again to finish the missing shards."


class PublishFailed(RayBatchError):
    """A target of output.publish did not accept the rows; the result in data/ is complete."""

    remedy = (
        "Fix what the target reports, then publish again. Targets that have the rows are skipped."
    )
    transient = True


class QualityTooLow(RayBatchError):
    """The run does not show the accuracy that `quality.at_least` asks for before publishing.

    The result in data/ is complete.
    """

    remedy = "Do what the message says, then publish again. The result in data/ is complete."


def is_transient(error: BaseException) -> bool:
    """Return whether a retry can help.

    For errors of other packages (network, Ray): False for `TypeError`, `ValueError`,
    `NotImplementedError` and `KeyboardInterrupt`, else True.
    """
    if isinstance(error, RayBatchError):
        return error.transient
    return not isinstance(error, (TypeError, ValueError, NotImplementedError, KeyboardInterrupt))


def error_class(name: str) -> type[RayBatchError] | None:
    """Return this package's error class `name`; None if there is no such class."""
    found = globals().get(name)
    is_ours = isinstance(found, type) and issubclass(found, RayBatchError)
    return found if is_ours else None


def first_step(name: str) -> str:
    """Return what the user must do before a job that failed may run again, e.g. "fix the cause".

    `name` is the class of the error. Returns "" if the job can run again as it is, and for a class
    of another package.
    """
    error = error_class(name)
    if error is None or error.transient:
        return ""
    if issubclass(error, (JobStopped, RunDrained)):
        return ""
    return "correct the job" if issubclass(error, (ConfigError, PlanMismatch)) else "fix the cause"
