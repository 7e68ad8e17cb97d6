"""A job as one command sees it: its model resolved and its fingerprint computed, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect_raybatch.compile.fingerprint import fingerprint
from prefect_raybatch.compile.job import model_request
from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job.batch_job import BatchJob
from prefect_raybatch.job.edits import with_answer_schema, with_template_text
from prefect_raybatch.job.trust import check_trust
from prefect_raybatch.model import adapters, chat_template
from prefect_raybatch.model import pinned as models
from prefect_raybatch.spec.engine import ModelRequest
from prefect_raybatch.spec.run import Identity
from prefect_raybatch.storage import is_remote


@dataclass(frozen=True)
class Resolved:
    """A job with its texts read, its model as a plan pins it, and its identity.

    The texts are those of its chat template and answer schema.

    `known` is the model, or None while only Hugging Face could tell its commit, which is no part of
    the fingerprint. `checked`: `model.check` has checked the model's files.
    """

    job: BatchJob
    known: Mapping[str, Any] | None
    identity: Identity
    checked: bool = False

    @classmethod
    def of(
        cls,
        job: BatchJob,
        model: Mapping[str, object] | None,
        retry: Mapping[str, object] | None = None,
    ) -> Resolved:
        """Return the job resolved with that model; `retry` as for `fingerprint`.

        Reads the chat template's file.
        """
        if job.prompt.chat_template is not None:
            job = with_template_text(job, chat_template.template_text(job.prompt.chat_template))
        return cls(job, model, fingerprint(job, model, retry))

    @property
    def request(self) -> ModelRequest:
        return model_request(self.job.engine)

    @property
    def model(self) -> dict[str, Any]:
        """Return the model as a plan pins it; raise `ConfigError` before `pinned`."""
        if self.known is None:
            raise ConfigError(
                f"engine.model: {self.job.engine.model} is not pinned to a commit; call `pinned` "
                "first"
            )
        return dict(self.known)

    def with_adapters(self) -> dict[str, Any]:
        """Return the model with the job's adapters pinned too, as a new plan keeps them."""
        found = adapters.pin_adapters(self.request)
        return {**self.model, "adapters": found} if found else self.model

    def pinned(self) -> Resolved:
        """Return this with the commit that a Hugging Face name refers to now."""
        if self.known is not None:
            return self
        return replace(self, known=models.pin(self.request))

    def retrying(self, retry: Mapping[str, object] | None) -> Resolved:
        """Return this with these failed rows as its input."""
        if retry == self.identity.retry:
            return self
        return replace(self, identity=fingerprint(self.job, self.known, retry))


def resolve(job: BatchJob | Resolved, retry: Mapping[str, object] | None = None) -> Resolved:
    """Return the job resolved; a resolved one is returned as it is.

    Uses the network only if its model is there. Raises `ConfigError` for a job that is not trusted,
    a missing model, and functions that cannot be imported.
    """
    if isinstance(job, Resolved):
        return job.retrying(retry) if retry is not None else job
    check_trust(job)
    job = with_answer_schema(job)
    return Resolved.of(job, _folder_model(model_request(job.engine)), retry)


def _folder_model(request: ModelRequest) -> dict[str, Any] | None:
    """Return the model with its identity if it is in a folder; None for a Hugging Face name."""
    name = request.name
    known = name == models.DEMO or is_remote(name) or os.path.exists(name)
    return models.pin(request) if known else None
