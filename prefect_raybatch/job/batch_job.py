"""`BatchJob`: the YAML file, the flow parameter and the manual of a job, as one pydantic model.

Fields are grouped (source, prompt, sampling, engine, output, limits, cluster) and each describes
itself, because the same text is the form in the Prefect page and the table in
docs/reference/job.md. What can be checked without reading the input is checked here; `plan` checks
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job import tasks
from prefect_raybatch.job.checks import NAME, check_uri
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.faults import Words, explain, unknown_words
from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group
from prefect_raybatch.job.images import DIGESTS_COLUMN
from prefect_raybatch.job.job_file import read_job_file
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.precision import check_precision
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.job.secrets import CLEAR
from prefect_raybatch.job.source import Source

MOST_LABELS = 128  # of which vLLM tells the probabilities (MAX_LOGPROB_TOKEN_IDS)

MOST_LOGPROBS = 20  # unless engine.max_logprobs says more


class BatchJob(Group):
    """One batch inference job: read a table, ask a model about every row, write the answers."""

    name: str = field(
        1, title="Name", text="Letters, digits and ._- ; part of the default run key."
    )
    source: Source = field(2, title="Source", text="What to read.")
    prompt: Prompt = field(3, title="Prompt", text="How a row becomes a request.")
    sampling: Sampling = field(4, Sampling(), title="Sampling", text="How answers are drawn.")
    engine: Engine = field(5, Engine(), title="Engine", text="The model and how it is run.")
    output: Output = field(6, title="Output", text="Where the result goes.")
    limits: Limits = field(7, Limits(), title="Limits", text="When to give up.")
    cluster: Cluster = field(8, Cluster(), title="Cluster", text="Which Ray cluster.")
    reuse: str | None = field(
        9,
        None,
        title="Reuse answers",
        text="Run whose raw answers are taken over where a row's request is the same: its URI, or "
        "latest for the newest complete run of this job in output.uri. docs/increments.md.",
        min_length=1,
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError(
                f"{value!r} may only hold letters, digits and ._- (not first), at most 128"
            )
        return value

    @property
    def drawn(self) -> Sampling:
        """How the answers are drawn, as far as sizes follow from it: a task that pools takes one
        step, and no room beside the prompt; answers of a schema have a form, wherever a job names
        that. A schema's file or class is not looked at."""
        if tasks.pools(self.engine.task):
            return Sampling(max_tokens=1)
        if self.output.schema_model is None:
            return self.sampling
        form = {"structured_outputs": {"json": self.output.schema_model}}
        return self.sampling.model_copy(update=form)

    @model_validator(mode="after")
    def _one_task(self) -> BatchJob:
        tasks.check_task(self)
        tasks.check_adapters(self)
        return self

    @model_validator(mode="after")
    def _with_images(self) -> BatchJob:
        if not self.prompt.images.used:
            if self.source.media_root is not None:
                raise ValueError("source.media_root: no images are asked for (prompt.images)")
            if DIGESTS_COLUMN in self.output.extras:
                raise ValueError(
                    f"output.extras: {DIGESTS_COLUMN} are of images, and none are asked for "
                    "(prompt.images); leave it out"
                )
            return self
        if tasks.pools(self.engine.task):
            raise ValueError(
                f"prompt.images: engine.task {self.engine.task} takes text alone; leave one out"
            )
        if self.engine.adapter is not None or self.engine.adapters:
            raise ValueError("prompt.images: adapters do not go with images yet; leave one out")
        if self.engine.max_model_len == "auto":
            raise ValueError(
                "engine.max_model_len: auto counts text alone; set a number that has room for "
                "the images, such as 8192"
            )
        engine = self.engine.model_extra or {}
        for name in ("limit_mm_per_prompt", "mm_processor_cache_gb"):
            if name in engine:
                raise ValueError(f"engine.{name} follows from prompt.images.per_row; remove it")
        return self

    @property
    def keeps_answers(self) -> bool:
        """Whether a run looks its answers up and keeps them for later runs."""
        return self.reuse is not None or self.output.keep_answers is not None

    @field_validator("reuse")
    @classmethod
    def _reuse(cls, value: str | None) -> str | None:
        if value is not None and value != "latest":
            check_uri(value)
        return value

    @model_validator(mode="after")
    def _with_precision(self) -> BatchJob:
        check_precision(self)
        return self

    @model_validator(mode="after")
    def _priced(self) -> BatchJob:
        if self.limits.max_cost is not None and not self.cluster.priced:
            raise ValueError(
                "limits.max_cost: nothing says what a GPU costs; set cluster.price_per_gpu_hour "
                "or cluster.price_by_card"
            )
        return self

    @model_validator(mode="after")
    def _one_answer(self) -> BatchJob:
        own = (self.engine.model_extra or {}).get("reasoning_parser")
        if own and self.output.reasoning_parser not in (None, own):
            raise ValueError(
                f"engine.reasoning_parser {own!r} is not output.reasoning_parser "
                f"{self.output.reasoning_parser!r}; leave out the engine's, which follows the other"
            )
        self._check_logprobs()
        return self

    def _check_logprobs(self) -> None:
        told = (self.sampling.model_extra or {}).get("logprobs")
        if told is None:
            return
        if type(told) is not int or told < 0:
            raise ValueError(
                f"sampling.logprobs: {str(told)[:80]!r} is no whole number from 0 on; give how "
                "many of the most probable tokens to write beside each that was chosen"
            )
        if self.output.probabilities:
            raise ValueError(
                "sampling.logprobs and output.probabilities ask vLLM for different tokens; keep one"
            )
        most = (self.engine.model_extra or {}).get("max_logprobs", MOST_LOGPROBS)
        if isinstance(most, int) and 0 <= most < told:
            raise ValueError(
                f"sampling.logprobs: {told} is over the engine's {most}; lower it, or raise "
                "engine.max_logprobs"
            )

    @model_validator(mode="after")
    def _labels(self) -> BatchJob:
        if not self.output.probabilities:
            return self
        if not self.sampling.choice:
            raise ValueError("output.probabilities: are those of labels; set sampling.choice")
        if len(self.sampling.choice) > MOST_LABELS:
            raise ValueError(
                f"output.probabilities: of at most {MOST_LABELS} labels, and sampling.choice has "
                f"{len(self.sampling.choice)}; leave some out"
            )
        if ((self.sampling.model_extra or {}).get("n") or 1) > 1:
            raise ValueError(
                "output.probabilities: are the same for all answers to a row; leave sampling.n out"
            )
        return self

    @model_validator(mode="after")
    def _one_form(self) -> BatchJob:
        extra = self.sampling.model_extra or {}
        if self.output.schema_model is None:
            return self
        for name in ("choice", "structured_outputs"):
            if self.sampling.choice if name == "choice" else extra.get(name):
                raise ValueError(
                    f"sampling.{name}: output.schema_model is the form of each answer; keep one"
                )
        if extra.get("skip_special_tokens") is False:
            raise ValueError(
                "sampling.skip_special_tokens: the end token would stand behind the JSON of "
                "output.schema_model; leave it out"
            )
        return self

    @property
    def fixed_form(self) -> str | None:
        """The field for which all answers must have one form, so that no row may set another."""
        if self.output.schema_model is not None:
            return "output.schema_model"
        return "output.probabilities" if self.output.probabilities else None

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "job") -> BatchJob:
        """Validates; raises `ConfigError` with each wrong field, its value and the remedy."""
        return cls._validated(value, where)

    @classmethod
    def from_yaml(cls, path: str | Path) -> BatchJob:
        """Reads a job file; raises `ConfigError` when it is missing, not YAML or not a job."""
        found = read_job_file(path)
        return cls._validated(found.value, str(path), found.words)

    @classmethod
    def _validated(
        cls, value: Mapping[str, Any], where: str, words: Words = unknown_words
    ) -> BatchJob:
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where, words)) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON, without what equals its default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=CLEAR)
