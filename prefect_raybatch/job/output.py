"""The location and the columns of the result: `output` of a job file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, field_validator, model_validator

from prefect_raybatch.job import answer_schema, chat, tasks
from prefect_raybatch.job.checks import (
    RESERVED,
    check_function,
    check_options,
    check_uri,
    run_checks,
)
from prefect_raybatch.job.escalate import Escalate
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.own_code.loading import name_of_function
from prefect_raybatch.job.placeholders import check_placeholders
from prefect_raybatch.job.publish import PublishTarget, check_targets
from prefect_raybatch.job.vllm import fields as vllm_fields

PROBABILITIES = "probabilities"  # the column of output.probabilities

LOGPROBS = "logprobs"  # the column of sampling.logprobs


class Output(Group):
    """Where the result is written and which columns it has."""

    uri: str = field(
        title="Location",
        text="Local or s3:// folder for the results. A run is written to URI/RUN_KEY/.",
    )
    column: str = field(
        "response", title="Answer column", text="Name of the column that contains the answer."
    )
    columns: list[str] | None = field(
        None,
        title="Input columns to keep",
        text="Input columns that are copied to the result; [] copies none. Default: "
        "all columns that contain no images.",
    )
    postprocess: str | None = field(
        None,
        title="Postprocess function",
        text="Python function that replaces the answer column, as "
        "package.module:function or file.py:function. It takes the row with the answer (a dict) "
        "and returns a dict of columns, or None to drop the row.",
    )
    output_schema: dict[str, str] | None = field(
        None,
        title="Postprocess schema",
        text="Arrow types of the columns that postprocess returns, such as {industry: "
        "string}. Default: the types that the first shard returns.",
        alias="schema",
    )
    row_number: str = field(
        "_row",
        title="Row number column",
        text="Name of the column with the number (from 0) of each result row among the input rows "
        "that are read: source.filter and source.sample leave rows out. `raybatch verify` uses it "
        "to identify rows.",
        min_length=1,
    )
    compact: bool = field(
        True,
        title="Compact result",
        text="Write the result to data/ in input order when all shards are done. If "
        "off, the committed pieces stay as they are, listed in a manifest.",
    )
    file_mb: int = field(
        256, title="File size", text="Target size of result files, in MiB; at most 4096.", gt=0
    )
    options: dict[str, Any] = field(
        {},
        title="Storage options",
        text="Options of the store: those of s3fs for s3:// (endpoint_url, region, ...), obstore's "
        "for gs:// (base_url, ...) and az:// (account_name, endpoint, ...). For keys, prefer "
        "credentials_block or environment variables.",
    )
    credentials_block: str | None = field(
        None,
        title="Credentials block",
        text="Saved Prefect block with the keys for the output, as type-slug/name. "
        "Example: aws-credentials/nightly.",
    )
    on_cut_off: Literal["auto", "keep", "fail"] = field(
        "auto",
        title="Truncated answers",
        text="What to do with an answer that stops at max_tokens or at the end of the "
        "context. keep: use it. fail: quarantine the row with the partial answer (AnswerCutOff). "
        "auto: use it unless it violates a required form such as choice or JSON; with "
        "schema_model, fail.",
    )
    schema_model: str | dict[str, Any] | None = field(
        None,
        title="Answer schema",
        text="JSON Schema that each answer must match: inline, as a .json file, or as "
        "a pydantic class (package.module:Class or file.py:Class). Its properties become typed "
        "columns in place of the answer column; postprocess receives the parsed object instead.",
    )
    extras: list[Literal["finish_reason", "prompt_tokens", "output_tokens", "image_digests"]] = (
        field(
            [],
            title="Extra columns",
            text="Columns to add: why the answer ended (stop or length), the tokens of "
            "the prompt, the tokens of the answer, and the SHA-256 and size of each image. With "
            "several answers per row, finish_reason and output_tokens are lists.",
        )
    )
    probabilities: bool = field(
        False,
        title="Label probabilities",
        text="Add a column named probabilities that maps each label of "
        "sampling.choice to its probability.",
    )
    reasoning_parser: str | None = field(
        None,
        title="Reasoning parser",
        text="vLLM parser that separates the model's reasoning from its answer, such "
        "as qwen3 or deepseek_r1. The reasoning goes to reasoning_column.",
    )
    reasoning_column: str = field(
        "reasoning",
        title="Reasoning column",
        text="Name of the column for the model's reasoning, if reasoning_parser is set.",
        min_length=1,
    )
    tool_parser: str | None = field(
        None,
        title="Tool parser",
        text="vLLM parser that separates tool calls from the answer, such as hermes "
        "or llama3_json. The calls go to tool_calls_column.",
    )
    tool_calls_column: str = field(
        "tool_calls",
        title="Tool calls column",
        text="Name of the column for tool calls, if tool_parser is set: a list of "
        "{id, name, arguments} with the arguments as JSON text.",
        min_length=1,
    )
    normalize: bool = field(
        True,
        title="Normalize embeddings",
        text="Scale embeddings to length 1, for engine.task: embed. If off, they are "
        "written as the model returns them.",
    )
    vector_type: tasks.VectorType = field(
        "float32",
        title="Embedding dtype",
        text="Number type of embeddings, for engine.task: embed. float16 takes half the space.",
    )
    publish: list[PublishTarget] = field(
        [],
        title="Publish targets",
        text="Tables and folders that receive the answered rows once the result is "
        "verified. Each target is published once.",
    )
    keep_answers: float | None = field(
        None,
        title="Answer retention",
        text="Number of days to keep raw answers for reuse by later runs. Default: as "
        "long as the run if reuse is set, otherwise not at all.",
        gt=0,
        allow_inf_nan=False,
    )

    escalate: Escalate = field(
        Escalate(),
        title="Cascade",
        text="A larger model that answers the rows of which the model in engine is unsure. "
        "Default: none.",
    )
    read_back: bool = field(
        False,
        title="Read back files",
        text="Read every result file again after writing it, even if the store's ETag "
        "already proves its content. Doubles the traffic.",
    )

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True)

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str) -> str:
        check_placeholders(value)
        check_uri(value)
        if any(c in value for c in "*?["):
            raise ValueError(f"{value!r} contains a wildcard; name one folder")
        return value

    _class = field_check("schema_model", by=answer_schema.form_of_class, mode="before")

    _callable = field_check("postprocess", by=name_of_function, mode="before")

    _function = field_check("postprocess", by=check_function)

    @field_validator("extras")
    @classmethod
    def _extras(cls, value: list[Any]) -> list[Any]:
        if len(set(value)) < len(value):
            raise ValueError("contains a duplicate name; remove one")
        return value

    _publish = field_check("publish", by=check_targets)

    _schema_model = field_check("schema_model", by=answer_schema.check_form)

    @field_validator("column")
    @classmethod
    def _column(cls, value: str) -> str:
        if not value or value.startswith(RESERVED):
            raise ValueError(f"{value!r} is not allowed as a column name; choose another")
        return value

    @field_validator("reasoning_parser")
    @classmethod
    def _reasoning_parser(cls, value: str | None) -> str | None:
        return chat.check_parser(value, vllm_fields.reasoning_parsers())

    @field_validator("tool_parser")
    @classmethod
    def _tool_parser(cls, value: str | None) -> str | None:
        return chat.check_parser(value, vllm_fields.tool_parsers())

    @property
    def parsed_columns(self) -> dict[str, str]:
        """{job field: column name} for the columns that the reasoning and tool parsers add."""
        fields = {}
        if self.reasoning_parser:
            fields["output.reasoning_column"] = self.reasoning_column
        if self.tool_parser:
            fields["output.tool_calls_column"] = self.tool_calls_column
        return fields

    @model_validator(mode="after")
    def _combined(self) -> Output:
        run_checks(_CHECKS, self)
        return self

    @property
    def answer_form(self) -> str | None:
        """The JSON Schema of answers, as text; None if the job has none.

        If the job names a file or class, reads it at each call. `with_answer_schema` puts the text
        into the job, and then nothing is read.
        """
        value = self.schema_model
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return value
        return None if value is None else answer_schema.schema_text(value)

    @property
    def fails_cut_off(self) -> bool:
        """Return whether every truncated answer fails its row."""
        return self.on_cut_off == "fail" or self.schema_model is not None


def _check_column_names(output: Output) -> None:
    """Raise ValueError for a column that would be written twice."""
    parsed = list(output.parsed_columns.values())
    for name in parsed:
        if [output.column, *parsed].count(name) > 1:
            raise ValueError(
                f"column {name!r} would be written twice; use different names in column, "
                "reasoning_column and tool_calls_column"
            )


def _check_files(output: Output) -> None:
    """Raise ValueError if publish is set but compact is off: only compacted files are published."""
    if output.publish and not output.compact:
        raise ValueError("publish needs the files in data/, and compact is off; set compact: true")


def _check_types(output: Output) -> None:
    """Raise ValueError if output.schema is set without output.postprocess.

    The schema describes the columns that the function in output.postprocess returns.
    """
    if output.output_schema is not None and output.postprocess is None:
        raise ValueError(
            "schema needs postprocess, whose columns it describes; set postprocess, or remove "
            "schema"
        )


def _check_parsers(output: Output) -> None:
    """Raise ValueError for a parser that cannot be combined with probabilities or a schema."""
    if output.probabilities and output.reasoning_parser is not None:
        raise ValueError(
            "probabilities and reasoning_parser exclude each other: probabilities are taken "
            "from the first output token, which belongs to the reasoning; remove one of them"
        )
    if output.schema_model is not None and output.tool_parser is not None:
        raise ValueError(
            "schema_model and tool_parser exclude each other: an answer that matches the "
            "schema cannot call a tool; remove one of them"
        )


def _check_cut_off(output: Output) -> None:
    """Raise ValueError if truncated answers are to be kept although answers must match a schema."""
    if output.schema_model is not None and output.on_cut_off == "keep":
        raise ValueError(
            "on_cut_off: keep cannot be combined with schema_model, which a truncated answer "
            "does not match; remove it, or set it to fail"
        )


def _check_options(output: Output) -> None:
    check_options(output.uri, output.options)


_CHECKS = (
    *(_check_column_names, _check_files, _check_types, _check_parsers, _check_cut_off),
    _check_options,
)
