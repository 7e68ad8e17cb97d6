"""Decides which policy applies to a job, by where the job comes from.

A job that its owner runs from the command line or builds in Python has the owner's policy. A job
that comes through Prefect's API or a job server has the policy of the operator, who runs the flows
or the server. `flow/origin.py` finds out which flow and task runs came through the API; programs
that accept jobs from other people call `limit_process`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

from prefect_raybatch.policy.policy import STRICT_POLICY, JobPolicy, owner_policy_of
from prefect_raybatch.policy.policy_file import read_policy

POLICY_FILE = "RAYBATCH_POLICY"

_chosen: ContextVar[JobPolicy | None] = ContextVar("policy", default=None)
_process: list[JobPolicy] = []
_from_elsewhere: list[Callable[[], bool]] = []


def operator_policy() -> JobPolicy:
    """Return the policy in the file that `RAYBATCH_POLICY` names; the strict default if unset.

    Raises `ConfigError` for a file that cannot be used.
    """
    path = os.environ.get(POLICY_FILE, "").strip()
    if not path:
        return STRICT_POLICY
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        changed = 0
    return _read(os.path.abspath(path), changed)


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> JobPolicy:
    return read_policy(path)


def owner_policy() -> JobPolicy:
    """Return the policy of jobs whose owner runs them in this process.

    It depends on the operator's policy (see `owner_policy_of`).
    """
    return owner_policy_of(operator_policy())


def policy_in_force() -> JobPolicy:
    """Return the policy of the job that this thread or task works on now.

    In a block of `policy_applied`, this is the block's policy. Otherwise it is the operator's if
    `limit_process` was called, Prefect started this process, or a registered check says that the
    job is not the owner's. Else it is the owner's.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if _process:
        return _process[0]
    if _started_by_prefect() or any(ask() for ask in _from_elsewhere):
        return operator_policy()
    return owner_policy()


def _started_by_prefect() -> bool:
    """Return whether Prefect started this process: for a flow run, or as a Prefect worker."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] == "prefect"


@contextmanager
def policy_applied(policy: JobPolicy) -> Iterator[None]:
    """Put a policy in force within the `with` block."""
    token = _chosen.set(policy)
    try:
        yield
    finally:
        _chosen.reset(token)


def limit_process() -> None:
    """Put the operator's policy in force in all threads of this process, until it ends."""
    _process[:] = [operator_policy()]


def register_origin_check(comes_from_elsewhere: Callable[[], bool]) -> None:
    """Register a check; while it returns true, `policy_in_force` is the operator's policy.

    The check returns whether the job of this thread or task came from elsewhere, e.g. through an
    API.
    """
    if comes_from_elsewhere not in _from_elsewhere:
        _from_elsewhere.append(comes_from_elsewhere)
