"""A job as records keep it."""

from __future__ import annotations

from typing import Any

from prefect_raybatch.compile.job import GIVE_WAY
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.checks import is_web
from prefect_raybatch.job.secrets import catalog_place, hide_argument, is_masked, recorded
from prefect_raybatch.spec.result import FinishSpec


def public_job(job: BatchJob, finish: FinishSpec | None = None) -> dict[str, Any]:
    """Return the job as the run directory keeps it: without possible secrets.

    Store options, environment and URL signatures are left out. `finish` has the final names of the
    result's columns.
    """
    value = job.to_dict()
    if finish is not None:
        for field in GIVE_WAY:
            if getattr(finish, field) != getattr(job.output, field):
                value["output"][field] = getattr(finish, field)
    for group in ("source", "output"):
        value.get(group, {}).pop("options", None)
    if any(is_web(uri) for uri in job.source.uris):
        plain = [recorded(uri) if is_web(uri) else uri for uri in job.source.uris]
        value["source"]["uri"] = plain[0] if isinstance(job.source.uri, str) else plain
    if job.output.publish:
        value["output"]["publish"] = [target.public() for target in job.output.publish]
    if job.source.catalog:
        value["source"]["catalog"] = catalog_place(job.source.catalog)
    engine = value.get("engine", {})
    engine.pop("env", None)
    for name in job.engine.given:
        if is_masked(hide_argument(engine.get(name), name)):
            del engine[name]
    return value
