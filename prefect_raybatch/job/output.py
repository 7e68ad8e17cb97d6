"""What the result holds and where it goes: `output` of a job file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, field_validator, model_validator

from prefect_raybatch.job import answer_schema, chat, tasks, vllm_fields
from prefect_raybatch.job.checks import RESERVED, check_function, check_uri
from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group
from prefect_raybatch.job.publish import PublishTarget, check_targets
from prefect_raybatch.job.run_words import check_run_words

PROBABILITIES = "probabilities"  # the column of output.probabilities

LOGPROBS = "logprobs"  # the column of sampling.logprobs


class Output(Group):
    """Where the result goes and what it holds."""

    uri: str = field(
        1, title="Where", text="Folder, local or s3://; the run is written to URI/RUN_KEY/."
    )
    column: str = field(
        2, "response", title="Answer column", text="Name of the column with the answer."
    )
    columns: list[str] | None = field(
        3,
        None,
        title="Input columns kept",
        text="By default all but those with images; [] keeps none.",
    )
    postprocess: str | None = field(
        4,
        None,
        title="Postprocess",
        text="package.module:function. Takes the row with the answer (dict), returns the dict of "
        "columns to write in place of the answer column, or None to leave the row out.",
    )
    output_schema: dict[str, str] | None = field(
        5,
        None,
        title="Schema",
        text="Arrow type by name of what postprocess returns, such as {industry: string}; by "
        "default fixed by the first shard.",
        alias="schema",
    )
    row_number: str = field(
        6,
        "_row",
        title="Row number column",
        text="Input row (from 0) that a result row came from; `verify` names rows by it.",
        min_length=1,
    )
    compact: bool = field(
        7,
        True,
        title="Compact",
        text="Write data/ in input order at the end; off leaves the pieces under a manifest.",
    )
    file_mb: int = field(
        8, 256, title="File size", text="Aim for result files, in MiB; at most 4096.", gt=0
    )
    options: dict[str, Any] = field(
        9, {}, title="Store options", text="s3fs options for the output."
    )
    credentials_block: str | None = field(
        10, None, title="Credentials block", text="Prefect block with the keys, type-slug/name."
    )
    on_cut_off: Literal["auto", "keep", "fail"] = field(
        11,
        "auto",
        title="Cut-off answers",
        text="fail: the row goes to quarantine (AnswerCutOff) with what there is of its answer. "
        "keep: it is a good row. auto: kept as well, unless it had to have a form (choice, JSON, "
        "...) that it does not fit: then, and with schema_model: fail.",
    )
    schema_model: str | dict[str, Any] | None = field(
        12,
        None,
        title="Answer schema",
        text="A JSON Schema that each answer fits: here, in a .json file, or of a pydantic class "
        "(package.module:Class). Its properties become typed columns in place of the answer "
        "column; with postprocess that gets the parsed object there.",
    )
    extras: list[Literal["finish_reason", "prompt_tokens", "output_tokens", "image_digests"]] = (
        field(
            13,
            [],
            title="About the answers",
            text="Columns of these names: why an answer ended (stop or length), the tokens of the "
            "prompt and of the answer, and SHA-256 and bytes of each image as it was fetched. With "
            "several answers a row, the first and the third are lists.",
        )
    )
    probabilities: bool = field(
        14,
        False,
        title="Label probabilities",
        text="With sampling.choice: a column of this name, a map of each label to how probable the "
        "model held it.",
    )
    reasoning_parser: str | None = field(
        15,
        None,
        title="Reasoning parser",
        text="vLLM's parser of the model's thinking, such as qwen3 or deepseek_r1: thinking and "
        "answer are two columns.",
    )
    reasoning_column: str = field(
        16,
        "reasoning",
        title="Reasoning column",
        text="Name of the column with the thinking, where a reasoning parser is set.",
        min_length=1,
    )
    tool_parser: str | None = field(
        17,
        None,
        title="Tool parser",
        text="vLLM's parser of the model's tool calls, such as hermes or llama3_json: calls and "
        "text are two columns.",
    )
    tool_calls_column: str = field(
        18,
        "tool_calls",
        title="Tool calls column",
        text="Name of the column with the calls, where a tool parser is set: a list of {id, name, "
        "arguments}, the arguments as JSON text.",
        min_length=1,
    )
    normalize: bool = field(
        19,
        True,
        title="Vectors of length 1",
        text="With engine.task embed; off writes them as the model gives them.",
    )
    vector_type: tasks.VectorType = field(
        20,
        "float32",
        title="Numbers of a vector",
        text="With engine.task embed: float16 takes half the room.",
    )
    publish: list[PublishTarget] = field(
        21,
        [],
        title="Publish to",
        text="Tables and folders of other systems that get the answered rows once the result is "
        "proved, each once.",
    )
    keep_answers: float | None = field(
        22,
        None,
        title="Days that raw answers are kept",
        text="For reuse by later runs. By default, with reuse, as long as the run; else none are "
        "kept. docs/increments.md.",
        gt=0,
        allow_inf_nan=False,
    )

    read_back: bool = field(
        23,
        False,
        title="Read files back",
        text="Read each result file whole after it was written, also where the store's ETag is "
        "the MD5 of its bytes; twice the traffic.",
    )

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True)

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str) -> str:
        check_run_words(value)
        check_uri(value)
        if any(c in value for c in "*?["):
            raise ValueError(f"{value!r} holds a wildcard; name one folder")
        return value

    @field_validator("postprocess")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        return None if value is None else check_function(value)

    @field_validator("extras")
    @classmethod
    def _extras(cls, value: list[Any]) -> list[Any]:
        if len(set(value)) < len(value):
            raise ValueError("a name stands there twice; remove one")
        return value

    @field_validator("publish")
    @classmethod
    def _publish(cls, value: list[PublishTarget]) -> list[PublishTarget]:
        return check_targets(value)

    @field_validator("schema_model")
    @classmethod
    def _schema_model(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        return None if value is None else answer_schema.check_form(value)

    @field_validator("column")
    @classmethod
    def _column(cls, value: str) -> str:
        if not value or value.startswith(RESERVED):
            raise ValueError(f"{value!r} cannot be a column name here; choose another")
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
        """Return the columns that parsers fill in addition to the answer's, by the field that names
        them."""
        fields = {}
        if self.reasoning_parser:
            fields["output.reasoning_column"] = self.reasoning_column
        if self.tool_parser:
            fields["output.tool_calls_column"] = self.tool_calls_column
        return fields

    @model_validator(mode="after")
    def _declared(self) -> Output:
        parsed = list(self.parsed_columns.values())
        for name in parsed:
            if [self.column, *parsed].count(name) > 1:
                raise ValueError(
                    f"column {name!r} would be written twice; name column, reasoning_column and "
                    "tool_calls_column apart"
                )
        if self.publish and not self.compact:
            raise ValueError("publish needs the files of data/; leave compact on")
        if self.output_schema is not None and self.postprocess is None:
            raise ValueError("schema describes what postprocess returns; set postprocess as well")
        if self.probabilities and self.reasoning_parser is not None:
            raise ValueError(
                "probabilities and reasoning_parser exclude each other: probabilities are those of "
                "an answer's first token, and thinking comes before it; keep one"
            )
        if self.schema_model is not None and self.tool_parser is not None:
            raise ValueError(
                "schema_model and tool_parser exclude each other: an answer that has the form of "
                "the schema calls no tool; keep one"
            )
        if self.schema_model is not None and self.on_cut_off == "keep":
            raise ValueError(
                "on_cut_off: an answer that is cut off does not fit schema_model; leave it out, "
                "or set it to fail"
            )
        return self

    @property
    def answer_form(self) -> str | None:
        """Return the JSON Schema of each answer, as text. A file or class is read at each call,
        unless the job holds its text already (`with_answer_schema`)."""
        value = self.schema_model
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return value
        return None if value is None else answer_schema.schema_text(value)

    @property
    def fails_cut_off(self) -> bool:
        """Return whether a truncated answer fails its row."""
        return self.on_cut_off == "fail" or self.schema_model is not None
