"""Reports the policy in force on this machine, and whether it allows the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from prefect_raybatch.doctor.finding import Finding, Patient, passed, warned
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.policy.in_force import POLICY_FILE, operator_policy, owner_policy, under
from prefect_raybatch.policy.policy import JobPolicy


def check_policy(patient: Patient) -> Iterator[Finding]:
    """Yield the policy of jobs from elsewhere, and whether the job is allowed here and there."""
    operator = operator_policy()
    yield passed(
        "policy",
        f"jobs through Prefect's API or a job server: {operator.title}; {described(operator)}",
    )
    if patient.job is None:
        return
    with under(owner_policy()):
        check_trust(patient.job)
    if not os.environ.get(POLICY_FILE):
        return
    try:
        with under(operator):
            check_trust(patient.job)
    except ConfigError as error:
        yield warned(
            "policy",
            f"as a deployment this job is refused: {error}",
            "nothing, where it is only run by hand",
        )
    else:
        yield passed("policy", "it allows this job as a deployment, too")


def described(policy: JobPolicy) -> str:
    """Return what a policy allows, field by field."""
    lines = []
    for one in fields(policy):
        value = getattr(policy, one.name)
        if one.name in ("title", "limited"):
            continue
        if one.name == "kubernetes":
            lines += [
                f"kubernetes.{x.name}: {_shown(getattr(value, x.name))}" for x in fields(value)
            ]
        else:
            lines.append(f"{one.name}: {_shown(value)}")
    return "; ".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value)
