"""Reports the job policy of this machine, and whether it allows the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from prefect_raybatch.doctor.finding import CheckContext, Finding, passed, warned
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.policy.in_force import POLICY_FILE, operator_policy, owner_policy, under
from prefect_raybatch.policy.policy import JobPolicy


def check_policy(context: CheckContext) -> Iterator[Finding]:
    """Report the policy for submitted jobs, and whether it and the owner's policy allow the job."""
    operator = operator_policy()
    yield passed(
        "policy",
        f"jobs sent through Prefect's API or a job server may use only {described(operator)} "
        f"({operator.title})",
    )
    if context.job is None:
        return
    with under(owner_policy()):
        check_trust(context.job)
    if not os.environ.get(POLICY_FILE):
        return
    try:
        with under(operator):
            check_trust(context.job)
    except ConfigError as error:
        yield warned(
            "policy",
            f"this job is refused as a deployment: {error}",
            "extend the policy file (RAYBATCH_POLICY), unless the job is only run by hand",
        )
    else:
        yield passed("policy", "allows this job as a deployment")


def described(policy: JobPolicy) -> str:
    """Return the fields that allow something, with their values."""
    settings = {
        field.name: getattr(policy, field.name)
        for field in fields(policy)
        if field.name not in ("title", "limited", "kubernetes")
    }
    limits = policy.kubernetes
    settings |= {f"kubernetes.{f.name}": getattr(limits, f.name) for f in fields(limits)}
    allowed = [f"{name}: {_shown(value)}" for name, value in settings.items() if value]
    return "; ".join(allowed) or "nothing"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value)
