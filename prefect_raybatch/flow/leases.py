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

_maintain = flow_engine.maintain_concurrency_lease
_RAISES = "raise_on_lease_renewal_failure"


def maintain_lease(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
    """Maintain a lease as Prefect does, but end no flow run of a `JobFlow` if that fails."""
    context = FlowRunContext.get()
    if context is not None and isinstance(context.flow, JobFlow):
        options[_RAISES] = False
    return _maintain(*arguments, **options)


# Prefect has no setting for it.
vars(flow_engine)["maintain_concurrency_lease"] = maintain_lease
