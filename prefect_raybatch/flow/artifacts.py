"""Artifacts in the Prefect page: their keys, and one version of each a flow run."""

from __future__ import annotations

import hashlib
import re
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.runtime import flow_run

ARTIFACT_KINDS = ("progress", "live", "plots", "stages", "failures", "report")  # what a run shows
STAMP = re.compile(r"(\d{8})t(\d{6})z\Z")  # the end of a default run key, in lower case


def artifact_key(run_key: str) -> str:
    """A run key as Prefect wants artifact keys: lower-case letters, digits and dashes. Where that
    loses something, a hash of the run key follows, after two dashes, which no other key holds; the
    T and Z of a default run key lose nothing."""
    plain = _plain(run_key)
    mark = "" if run_key == STAMP.sub(r"\1T\2Z", plain) else f"--{_mark(run_key)}"
    return f"raybatch-{plain}{mark}"


def tune_key(job: str) -> str:
    """The artifact key of what was tuned for a job of this name: none of any run's."""
    key = artifact_key(f"tune-{job}")
    # As the keys of a run that is called tune-SOMETHING end.
    taken = key.endswith(tuple(f"-{kind}" for kind in ARTIFACT_KINDS))
    return f"{key}--{_mark(job)}" if taken else key


def put(artifact: Artifact, key: str) -> UUID:
    """Creates the artifact, or updates the one under this key that this flow run has made: a second
    try, and the end of a run, go on with what the page shows already. Returns its id."""
    before: Any = Artifact.get(key, _sync=True)  # type: ignore[call-arg]
    if before is not None and str(before.flow_run_id) == str(flow_run.get_id()):
        update(before.id, artifact)
        return cast(UUID, before.id)
    artifact.key = key
    made: Any = artifact.create(_sync=True)  # type: ignore[call-arg]
    return cast(UUID, made.id)


def update(known: UUID, artifact: Artifact) -> None:
    """Puts data and description of `artifact` in place of those of the one with this id."""
    data: Any = artifact.format(_sync=True)  # type: ignore[call-arg]
    client = get_client(sync_client=True)
    client.update_artifact(known, ArtifactUpdate(data=data, description=artifact.description))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
