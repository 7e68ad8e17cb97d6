"""Creates and updates Prefect artifacts: their keys, and one version of each per flow run."""

from __future__ import annotations

import hashlib
import logging
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

log = logging.getLogger(__name__)

ARTIFACT_KINDS = (  # artifacts of a run
    "progress", "live", "plots", "stages", "failures", "report", "failure", "history",
    "history-plots",
)  # fmt: skip
MOST_FOUND = 50  # maximum number of a flow run's artifacts with one key that are read


def artifact_key(job: str) -> str:
    """Return the artifact key of a job: its name in lower-case letters, digits and dashes.

    If that differs from the job's name, two dashes and a hash of the name follow, so that no other
    job has the key. All runs of a job have the same key, so Prefect shows them as versions of one
    artifact.
    """
    plain = _plain(job)
    mark = "" if job == plain else f"--{_mark(job)}"
    return f"raybatch-{plain}{mark}"


def tune_key(job: str) -> str:
    """Return the artifact key of tuning results for a job; it differs from those of runs."""
    key = artifact_key(f"tune-{job}")
    # Keys of a job named tune-SOMETHING end like this.
    taken = key.endswith(tuple(f"-{kind}" for kind in ARTIFACT_KINDS))
    return f"{key}--{_mark(job)}" if taken else key


def put(artifact: Artifact, key: str, run_key: str | None = None) -> UUID:
    """Create an artifact, or update the one this flow run already has under `key`; return its id.

    A retry of the flow run thus updates the artifact of its first try. With `run_key`, the
    description ends with `of_run(run_key)`, and only an artifact with that ending is updated.
    """
    if run_key is not None:
        artifact.description = f"{artifact.description} {of_run(run_key)}"
    existing = _existing(key, run_key)
    if existing is not None:
        update(existing, artifact)
        return existing
    artifact.key = key
    _make_harmless(artifact)
    created: Any = artifact.create(_sync=True)  # type: ignore[call-arg]
    return cast(UUID, created.id)


def put_or_log(artifact: Artifact, key: str) -> None:
    """Create or update an artifact like `put`; only log an error, which must not end a run."""
    try:
        put(artifact, key)
    except Exception as error:
        log_not_shown(key, error)


def log_not_shown(key: str, error: Exception) -> None:
    """Log that the artifact `key` could not be shown in Prefect because of `error`."""
    log.warning(
        "could not show the artifact %s in Prefect: %s: %s", key, type(error).__name__, error
    )


def of_run(run_key: str) -> str:
    """Return the text that ends the description of a run's artifacts and identifies the run."""
    return f"Run {code_span(run_key)}."


def _existing(key: str, run_key: str | None) -> UUID | None:
    """Return the id of the current flow run's latest artifact with this key; None without one.

    With `run_key`, only artifacts of that run count.
    """
    current = flow_run.get_id()
    if current is None:
        return None
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=[key]),
                flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(str(current))]),
            ),
            sort=ArtifactSort.UPDATED_DESC,
            limit=MOST_FOUND,
        )
    for artifact in artifacts:
        if run_key is None or (artifact.description or "").endswith(of_run(run_key)):
            return artifact.id
    return None


def update(id: UUID, artifact: Artifact) -> None:
    """Replace data and description of the stored artifact `id` by those of `artifact`."""
    _make_harmless(artifact)
    data: Any = artifact.format(_sync=True)  # type: ignore[call-arg]
    client = get_client(sync_client=True)
    client.update_artifact(id, ArtifactUpdate(data=data, description=artifact.description))


def _make_harmless(artifact: Artifact) -> None:
    """Make the texts of an artifact storable, and escape table cells, which are Markdown."""
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
