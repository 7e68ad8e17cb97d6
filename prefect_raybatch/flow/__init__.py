"""Everything that imports Prefect: flows, tasks, blocks, and what its pages show.

`prefect_raybatch.flow.batch_inference` is the entrypoint that deployments name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect_raybatch.proxies import bypass_for_local_addresses

if TYPE_CHECKING:
    from prefect_raybatch.flow.flows import backfill_job, batch_inference, retry_failed, tune_job

__all__ = ["backfill_job", "batch_inference", "retry_failed", "tune_job"]

# At import, because Prefect contacts its server before it runs the code of a flow.
bypass_for_local_addresses()


def __getattr__(name: str) -> Any:
    """Import the flows on first use, because Prefect imports this package at each of its starts."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefect_raybatch.flow import flows

    return getattr(flows, name)
