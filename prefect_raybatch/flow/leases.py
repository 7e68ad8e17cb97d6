"""Keeps flow runs at work that lose their lease of a deployment's concurrency limit.

Prefect ends a flow run that cannot renew its lease, e.g. after its server was unreachable, even if
the result is complete by then. The records of a run allow several drivers, so the flows of this
package continue. The worst case is that the deployment's next flow run starts beside this one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from prefect import flow_engine
from prefect.context import FlowRunContext

from prefect_raybatch.flow.job_flow import JobFlow

_NAME, _RAISES = "maintain_concurrency_lease", "raise_on_lease_renewal_failure"
_maintain: Any = vars(flow_engine).get(_NAME)  # internal to Prefect, so it may be absent


def maintain_lease(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
    """Maintain a lease as Prefect does, but end no flow run of a `JobFlow` if that fails."""
    context = FlowRunContext.get()
    if context is not None and isinstance(context.flow, JobFlow):
        options[_RAISES] = False
    maintained: AbstractContextManager[None] = _maintain(*arguments, **options)
    return maintained


if _maintain is not None:  # Prefect has no setting for it
    vars(flow_engine)[_NAME] = maintain_lease
