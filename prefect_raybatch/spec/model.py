"""The model that a run asks for, before it is pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_raybatch.job.tasks import TaskName, pools


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Which model answers, and how it is loaded.

    `name` is a Hugging Face name, a folder, an s3:// folder or `demo`. `context` is the context
    length in tokens, None for the model's own; with `context_auto` it is still to be measured so
    that it fits the share `context_share` of the rows. `given` are vLLM engine arguments without a
    field of ours, as the job gives them; `env` are the environment variables of its engines.
    """

    name: str
    revision: str | None
    task: TaskName
    context: int | None
    context_auto: bool
    context_share: float
    adapter: str | None
    adapters: Mapping[str, str]
    given: Mapping[str, Any] = field(repr=False)  # a token may be among them
    env: Mapping[str, str]

    @property
    def pools(self) -> bool:
        """Return whether it gives a vector for each text instead of generating tokens."""
        return pools(self.task)
