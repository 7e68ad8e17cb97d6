"""A job as one command means it: its model looked up and its fingerprint taken, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.model import adapters, chat_template
from prefect_raybatch.model import pinned as models
from prefect_raybatch.plan.fingerprint import fingerprint
from prefect_raybatch.storage import is_remote


@dataclass(frozen=True)
class Resolved:
    """A job, its model as a plan pins it, and its fingerprint with what went into it (`parts`).

    `known` is the model, or None while only Hugging Face could tell its commit, which no
    fingerprint counts. `checked`: `model.check` has looked at the model's files.
    """

    job: BatchJob
    known: Mapping[str, Any] | None
    fingerprint: str
    parts: Mapping[str, Any]
    checked: bool = False

    @classmethod
    def of(
        cls,
        job: BatchJob,
        model: Mapping[str, Any] | None,
        retry: Mapping[str, Any] | None = None,
    ) -> Resolved:
        """With that model; `retry` as for `fingerprint`. A file with the chat template is read."""
        job = chat_template.with_text(job)
        return cls(job, model, *fingerprint(job, model, retry))

    @property
    def retry(self) -> Mapping[str, Any] | None:
        """Which failed rows of which run are the input ({parent, errors})."""
        return self.parts.get("retry")

    @property
    def model(self) -> dict[str, Any]:
        """What a plan pins; `ConfigError` before `pinned`."""
        if self.known is None:
            raise ConfigError(f"engine.model: {self.job.engine.model} is not pinned to a commit")
        return dict(self.known)

    def with_adapters(self) -> dict[str, Any]:
        """The model with the job's adapters pinned beside it, as a new plan keeps them."""
        found = adapters.pin_adapters(self.job.engine)
        return {**self.model, "adapters": found} if found else self.model

    def pinned(self) -> Resolved:
        """With the commit that a Hugging Face name means now."""
        if self.known is not None:
            return self
        return replace(self, known=models.pin(self.job.engine))

    def retrying(self, retry: Mapping[str, Any] | None) -> Resolved:
        """With these failed rows as its input."""
        if retry == self.retry:
            return self
        return Resolved.of(self.job, self.known, retry)


def resolve(job: BatchJob | Resolved, retry: Mapping[str, Any] | None = None) -> Resolved:
    """The job resolved, without the network unless its model lies there; one that is already
    stays as it is. Raises `ConfigError` for a job that is not trusted, a model that is not there
    and functions that cannot be imported."""
    if isinstance(job, Resolved):
        return job.retrying(retry) if retry is not None else job
    check_trust(job)
    job = job.model_copy(update={"output": job.output.resolved()})
    return Resolved.of(job, _folder_model(job.engine), retry)


def _folder_model(engine: Engine) -> dict[str, Any] | None:
    """The model with its identity where it lies in a folder; None for a Hugging Face name."""
    known = engine.model == models.DEMO or is_remote(engine.model) or os.path.exists(engine.model)
    return models.pin(engine) if known else None
