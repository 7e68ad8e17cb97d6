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
from prefect_raybatch.job.checks import NAME, check_uri, run_checks
from prefect_raybatch.job.cluster import Cluster
from prefect_raybatch.job.combinations import COMBINATIONS
from prefect_raybatch.job.engine import Engine
from prefect_raybatch.job.expansion import anchored, expanded
from prefect_raybatch.job.faults import FieldPlace, explain
from prefect_raybatch.job.group import Group, field
from prefect_raybatch.job.job_file import read_job_file
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.output import Output
from prefect_raybatch.job.prompt import Prompt
from prefect_raybatch.job.sampling import Sampling
from prefect_raybatch.job.secrets import CLEAR
from prefect_raybatch.job.source import Source
from prefect_raybatch.job.tasks import pools
from prefect_raybatch.job.yaml_text import NO_TEXT, YamlText


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
        "output.uri, or all: each of them.",
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
        if pools(self.engine.task):
            return Sampling(max_tokens=1)
        if self.output.schema_model is None:
            return self.sampling
        form = {"structured_outputs": {"json": self.output.schema_model}}
        return self.sampling.model_copy(update=form)

    @property
    def keeps_answers(self) -> bool:
        """Whether a run looks its answers up and keeps them for later runs."""
        return self.reuse is not None or self.output.keep_answers is not None

    @field_validator("reuse")
    @classmethod
    def _reuse(cls, value: str | None) -> str | None:
        if value is not None and value not in ("latest", "all"):
            check_uri(value)
        return value

    @model_validator(mode="after")
    def _combined(self) -> BatchJob:
        run_checks(COMBINATIONS, self)
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
        """Return the job of a file, with `~` and variables in its paths expanded.

        Raises `ConfigError` if it is missing, not YAML or not a job.
        """
        content = read_job_file(path)
        value, faults = expanded(content.value)
        return cls._validated(anchored(value, Path(path).parent), str(path), content, faults)

    @classmethod
    def _validated(
        cls,
        value: Mapping[str, Any],
        where: str,
        text: YamlText = NO_TEXT,
        faults: Mapping[FieldPlace, str] | None = None,
    ) -> BatchJob:
        wrong = None
        try:
            job = cls.model_validate(dict(value))
        except ValidationError as error:
            wrong = error
        if wrong is None and not faults:
            return job
        raise ConfigError(explain(wrong, cls, where, text, faults))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON, without what equals its default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=CLEAR)
