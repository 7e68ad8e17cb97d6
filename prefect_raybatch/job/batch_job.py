"""`BatchJob`: a job as one pydantic model, for the YAML file, the flow parameter and the docs.

The title and description of a field appear in the Prefect form and in the tables of
docs/reference/job.md. Checks that need the input are left to `plan`.
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
    """A batch inference job: read a table, ask a model about every row, write the answers."""

    name: str = field(
        1,
        title="Name",
        text="Used in default run keys. Up to 128 letters, digits, dots, underscores "
        "and hyphens; the first is a letter or digit.",
    )
    source: Source = field(2, title="Source", text="The table or files to read.")
    prompt: Prompt = field(3, title="Prompt", text="How a row becomes a request to the model.")
    sampling: Sampling = field(
        4,
        Sampling(),
        title="Sampling",
        text="How the model generates an answer: temperature, length, labels.",
    )
    engine: Engine = field(5, Engine(), title="Engine", text="The model and how vLLM runs it.")
    output: Output = field(
        6, title="Output", text="Where the result is written and which columns it has."
    )
    limits: Limits = field(
        7,
        Limits(),
        title="Limits",
        text="How many failed rows, how much time and what cost are acceptable.",
    )
    cluster: Cluster = field(
        8,
        Cluster(),
        title="Cluster",
        text="The Ray cluster to run on and the resources of the CPU stages.",
    )
    reuse: str | None = field(
        9,
        None,
        title="Reuse answers from",
        text="Earlier run whose raw answers are reused for rows with the same "
        "request. Either the URI of a run, or latest: the newest complete run of this job under "
        "output.uri.",
        min_length=1,
    )

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError(
                f"{value!r} is not a valid name; use up to 128 letters, digits, '.', '_' and '-', "
                "starting with a letter or digit"
            )
        return value

    @property
    def drawn(self) -> Sampling:
        """Sampling as far as sizes depend on it.

        A task that pools takes one step and reserves no tokens for the answer; answers of a schema
        have a form, wherever the job names the schema. Its file or class is not read.
        """
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
                raise ValueError(
                    "source.media_root needs prompt.images; set prompt.images, or remove media_root"
                )
            if DIGESTS_COLUMN in self.output.extras:
                raise ValueError(
                    f"output.extras: {DIGESTS_COLUMN} needs prompt.images; set prompt.images, or "
                    f"remove {DIGESTS_COLUMN}"
                )
            return self
        if tasks.pools(self.engine.task):
            raise ValueError(
                f"prompt.images: engine.task {self.engine.task} accepts only text; remove one of "
                "them"
            )
        if self.engine.adapter is not None or self.engine.adapters:
            raise ValueError("prompt.images cannot be combined with adapters; remove one of them")
        if self.engine.max_model_len == "auto":
            raise ValueError(
                "engine.max_model_len: auto counts only text, not images; set a number that "
                "includes the images, such as 8192"
            )
        engine = self.engine.model_extra or {}
        for name in ("limit_mm_per_prompt", "mm_processor_cache_gb"):
            if name in engine:
                raise ValueError(f"engine.{name} is set from prompt.images.per_row; remove it")
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
                "limits.max_cost needs the price of a GPU; set cluster.price_per_gpu_hour or "
                "cluster.price_by_card"
            )
        return self

    @model_validator(mode="after")
    def _one_answer(self) -> BatchJob:
        own = (self.engine.model_extra or {}).get("reasoning_parser")
        if own and self.output.reasoning_parser not in (None, own):
            raise ValueError(
                f"engine.reasoning_parser {own!r} is not output.reasoning_parser "
                f"{self.output.reasoning_parser!r}; remove engine.reasoning_parser"
            )
        self._check_logprobs()
        return self

    def _check_logprobs(self) -> None:
        told = (self.sampling.model_extra or {}).get("logprobs")
        if told is None:
            return
        if type(told) is not int or told < 0:
            raise ValueError(
                f"sampling.logprobs must be a whole number, at least 0, and is {str(told)[:80]!r}; "
                "set the number of most probable tokens to write for each output token"
            )
        if self.output.probabilities:
            raise ValueError(
                "sampling.logprobs and output.probabilities cannot be combined; remove one of them"
            )
        most = (self.engine.model_extra or {}).get("max_logprobs", MOST_LOGPROBS)
        if isinstance(most, int) and 0 <= most < told:
            raise ValueError(
                f"sampling.logprobs ({told}) exceeds engine.max_logprobs ({most}); lower it, or "
                "raise engine.max_logprobs"
            )

    @model_validator(mode="after")
    def _labels(self) -> BatchJob:
        if not self.output.probabilities:
            return self
        if not self.sampling.choice:
            raise ValueError("output.probabilities needs labels; set sampling.choice")
        if len(self.sampling.choice) > MOST_LABELS:
            raise ValueError(
                f"output.probabilities supports at most {MOST_LABELS} labels, and sampling.choice "
                f"has {len(self.sampling.choice)}; remove some labels"
            )
        if ((self.sampling.model_extra or {}).get("n") or 1) > 1:
            raise ValueError(
                "output.probabilities are the same for all answers of a row; remove sampling.n"
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
                    f"sampling.{name} cannot be combined with output.schema_model; remove one of "
                    "them"
                )
        if extra.get("skip_special_tokens") is False:
            raise ValueError(
                "sampling.skip_special_tokens: false would append the end token to the JSON of "
                "output.schema_model; remove it"
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
        """Return the validated job; raise `ConfigError` with each wrong field and its remedy."""
        return cls._validated(value, where)

    @classmethod
    def from_yaml(cls, path: str | Path) -> BatchJob:
        """Return the job of a file; raise `ConfigError` if it is missing, not YAML or not a job."""
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
