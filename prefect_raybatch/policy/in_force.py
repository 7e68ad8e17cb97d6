"""Which policy is in force: decided by where a job comes from.

A job that its owner gives on the command line or builds in Python has the owner's policy. A job
that comes through Prefect's API or a job server has the operator's. `flow/origin.py` says which
flow and task runs those are; programs that take jobs from elsewhere call `limit_process`.
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
    """Return the policy of the file that `RAYBATCH_POLICY` names, without one the strict default.

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
    """Return the policy of jobs that their owner runs in this process."""
    return owner_policy_of(operator_policy())


def policy_in_force() -> JobPolicy:
    """Return the policy of the job that this process works on now."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if _process:
        return _process[0]
    if _started_by_prefect() or any(ask() for ask in _from_elsewhere):
        return operator_policy()
    return owner_policy()


def _started_by_prefect() -> bool:
    """Return whether this process is one that Prefect starts for a flow run, or a worker of its."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] == "prefect"


@contextmanager
def under(policy: JobPolicy) -> Iterator[None]:
    """Put a policy in force for the block."""
    token = _chosen.set(policy)
    try:
        yield
    finally:
        _chosen.reset(token)


def limit_process() -> None:
    """Put the operator's policy in force for the rest of this process, in all its threads."""
    _process[:] = [operator_policy()]


def ask_for_origin(comes_from_elsewhere: Callable[[], bool]) -> None:
    """Register a function that says whether the current work came from elsewhere."""
    if comes_from_elsewhere not in _from_elsewhere:
        _from_elsewhere.append(comes_from_elsewhere)
