"""Prefect artifacts: their keys, and one version of each per flow run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import Artifact, TableArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.sorting import ArtifactSort
from prefect.runtime import flow_run

from prefect_raybatch.flow.texts import prefect_text_in
from prefect_raybatch.harmless import code_span, markdown_text

ARTIFACT_KINDS = (  # what a run shows
    "progress", "live", "plots", "stages", "failures", "report", "failure", "history",
    "history-plots",
)  # fmt: skip
MOST_FOUND = 50  # artifacts of one key that a flow run may have made, one for each of its runs


def artifact_key(job: str) -> str:
    """Return a job's name as Prefect allows in artifact keys: lower-case letters, digits and
    dashes. If that loses something, two dashes and a hash of the name follow, which no other key
    has. The key belongs to the job and not to the run, so that each run is a version of one
    artifact."""
    plain = _plain(job)
    mark = "" if job == plain else f"--{_mark(job)}"
    return f"raybatch-{plain}{mark}"


def tune_key(job: str) -> str:
    """Return the artifact key of tuning results for a job; it differs from those of runs."""
    key = artifact_key(f"tune-{job}")
    # As the keys of a run that is called tune-SOMETHING end.
    taken = key.endswith(tuple(f"-{kind}" for kind in ARTIFACT_KINDS))
    return f"{key}--{_mark(job)}" if taken else key


def put(artifact: Artifact, key: str, run_key: str | None = None) -> UUID:
    """Create the artifact, or update the one under this key that this flow run has made for that
    run, so that a retry and the end of a run continue it. Its description then ends with the run
    key. Return its id."""
    if run_key is not None:
        artifact.description = f"{artifact.description} {of_run(run_key)}"
    before = _mine(key, run_key)
    if before is not None:
        update(before, artifact)
        return before
    artifact.key = key
    _make_harmless(artifact)
    made: Any = artifact.create(_sync=True)  # type: ignore[call-arg]
    return cast(UUID, made.id)


def of_run(run_key: str) -> str:
    """Return the text that identifies the artifacts of one run among others under the same key."""
    return f"Run {code_span(run_key)}."


def _mine(key: str, run_key: str | None) -> UUID | None:
    """Return the latest artifact of this key and run that the current flow run has made; None
    without one."""
    current = flow_run.get_id()
    if current is None:
        return None
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=[key]),
                flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(str(current))]),
            ),
            sort=ArtifactSort.UPDATED_DESC,
            limit=MOST_FOUND,
        )
    for one in found:
        if run_key is None or (one.description or "").endswith(of_run(run_key)):
            return one.id
    return None


def update(known: UUID, artifact: Artifact) -> None:
    """Replace data and description of the artifact with this id by those of `artifact`."""
    _make_harmless(artifact)
    data: Any = artifact.format(_sync=True)  # type: ignore[call-arg]
    client = get_client(sync_client=True)
    client.update_artifact(known, ArtifactUpdate(data=data, description=artifact.description))


def _make_harmless(artifact: Artifact) -> None:
    """Make the texts of an artifact storable, and escape them, because the page reads each cell of
    a table as Markdown."""
    if isinstance(artifact, TableArtifact):
        artifact.table = _escaped(artifact.table)
    for name in type(artifact).model_fields:
        setattr(artifact, name, prefect_text_in(getattr(artifact, name)))


def _escaped(table: Any) -> Any:
    if isinstance(table, Mapping):
        return {name: _escaped(inner) for name, inner in table.items()}
    if isinstance(table, list):
        return [_escaped(inner) for inner in table]
    return markdown_text(table) if isinstance(table, str) else table


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
