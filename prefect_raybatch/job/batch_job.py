"""`BatchJob`: the YAML file, the flow parameter and the manual of a job, as one pydantic model.

Fields are grouped (source, prompt, sampling, engine, output, limits, cluster) and each describes
itself, because the same text is the form in the Prefect page and the table in docs/job.md. What
can be checked without reading the input is checked here; `plan` checks the rest.
"""

from __future__ import annotations

import copy
import difflib
import re
import reprlib
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job import sampling_ranges, vllm_fields
from prefect_raybatch.job.secrets import (
    CLEAR,
    USERINFO,
    hide_argument,
    hide_env,
    hide_options,
    hide_users,
    is_masked,
)
from prefect_raybatch.words import counted

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
# No user:password@, which would be kept in clear, and no path: Ray's client appends its own.
SERVER = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?/?\Z")
SCHEMES = ("", "file", "s3")
RESERVED = "__rb_"  # columns of ours that travel with a row


def _field(position: int, default: Any = ..., *, title: str, text: str, **kwargs: Any) -> Any:
    """A described field; `position` keeps the order in the Prefect form, which else is A to Z."""
    return Field(
        default,
        title=title,
        description=text,
        json_schema_extra={"position": position},
        **kwargs,
    )


MAX_JOB_BYTES = 4 << 20
MAX_VALUES = 100_000  # in a job file; a few aliases of aliases can stand for billions


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `15m`, `2h`, `3d`; `ConfigError` for anything else."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no duration; write 90s, 15m, 2h or 3d")
    return float(match[1]) * UNITS[match[2]]


def without_user(uri: str) -> str:
    """`uri` itself; ValueError, which does not quote it, where it holds a user or a password."""
    if USERINFO.search(uri):
        raise ValueError(
            "holds a user or a key before an @; write s3://bucket/key, and keys into the options, "
            "a credentials_block or the environment"
        )
    return uri


def check_uri(uri: str) -> str:
    """A local path, file:// or s3://bucket/key; ValueError says what is wrong otherwise."""
    if not uri or not uri.strip() or "\x00" in uri:
        raise ValueError("is empty; write a path such as data/customers.csv or s3://bucket/key")
    without_user(uri)
    scheme = uri.split("://", 1)[0].lower() if "://" in uri else ""
    if scheme not in SCHEMES:
        raise ValueError(
            f"{uri!r} has scheme {scheme!r}; local paths, file:// and s3:// are supported"
        )
    if scheme == "s3" and not uri.split("://", 1)[1].split("/", 1)[0]:
        raise ValueError(f"{uri!r} names no bucket; write s3://bucket/key")
    return uri


def check_function(name: str) -> str:
    """`package.module:function`; ValueError otherwise. Nothing is imported here."""
    if not FUNCTION.match(name):
        raise ValueError(f"{name!r} is not of the form package.module:function")
    return name


def template_fields(template: str) -> tuple[str, ...]:
    """Column names a template uses, in order of first use.

    Only plain `{Column}` fields are allowed ({{ and }} are literal braces): attribute or index
    access, conversions and format specs are refused, since a job file is untrusted input.
    """
    names: list[str] = []
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is no valid template: {error}; write {{{{ for a literal {{") from None
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion or any(c in name for c in ".[]"):
            raise ValueError(
                f"field {{{name}{'!' + conversion if conversion else ''}"
                f"{':' + spec if spec else ''}}} is not a plain {{Column}}; use "
                "prompt.function for anything more than column values"
            )
        if name not in names:
            names.append(name)
    return tuple(names)


def refuse_unknown(
    given: Mapping[str, Any], known: frozenset[str] | None, ours: set[str], where: str = ""
) -> None:
    """ValueError naming the first field that neither we nor the installed vLLM know."""
    for name in given:
        if known is not None and name not in known and name not in ours:
            raise ValueError(f"{where}unknown field {name!r}{_nearest(name, known | ours)}")


def _nearest(name: str, known: set[str] | frozenset[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "; remove it"


TABS = {
    **{"string": "One", "array": "Several", "integer": "Number", "number": "Number"},
    **{"null": "By default", "object": "Fields", "boolean": "Yes or no"},
}


def _plain(field: dict[str, Any]) -> None:
    """Makes of a field that may be left out a plain one without a default, for which Prefect's
    server takes null as well, and of int | float a number. Prefect's form shows a union as tabs
    named after Python's types, and to fill in a field one must find the right tab first; what
    remains of unions gets tabs with names for people."""
    if "ge" in field:  # pydantic leaves the bound of a union as it is
        field["minimum"] = field.pop("ge")
    kinds = [kind for kind in field.get("anyOf", ()) if kind.get("type") != "null"]
    types = [kind.get("type") for kind in kinds]
    if types == ["integer", "number"]:
        del kinds[0]
    if len(kinds) == 1:
        del field["anyOf"]
        field.update(kinds[0])
        if field.get("default", ...) is None:
            del field["default"]
        _plain(field)
    for kind in field.get("anyOf", ()):
        kind["title"] = kind.get("const") or TABS[kind["type"]]


class Group(BaseModel):
    """Fields that belong together; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", validate_default=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        for name in value if isinstance(value, Mapping) else ():
            if cls._may_hold_keys(name) and is_masked(value[name]):
                raise ValueError(
                    f"{name} holds a key that was hidden on its way through Prefect's parameters; "
                    "name a credentials_block instead, or set the key in the environment where "
                    "the flow runs"
                )
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The schema, with each field as the form in the Prefect page shows it best."""
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema)["properties"].values():
            _plain(field)
        return schema

    @model_serializer(mode="wrap")
    def _hidden(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """As JSON, keys are hidden unless the context asks for them (`to_dict` does)."""
        value: dict[str, Any] = handler(self)
        if info.mode != "json" or (info.context or {}).get("clear"):
            return value
        return {name: self._shown(name, item) for name, item in value.items()}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, item in super().__repr_args__():
            yield name, self._shown(name or "", item)

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        """Mappings whose names anybody may choose."""
        return name in ("options", "env")

    def _shown(self, name: str, value: Any) -> Any:
        if not value or not self._may_hold_keys(name):
            return value
        if name in ("options", "env"):
            return hide_options(value) if name == "options" else hide_env(value)
        return hide_argument(value, name)


class Source(Group):
    """What to read."""

    uri: str | list[str] = _field(
        1,
        title="Where",
        text="File, folder or glob, local or s3://, or a list of these. A folder is read "
        "recursively. Files are taken in the order of their names.",
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = _field(
        2, "auto", title="Format", text="By default told from the file names' endings."
    )
    limit: int | None = _field(
        3, None, title="First rows only", text="Read only the first N rows.", gt=0
    )
    columns: list[str] | None = _field(
        4, None, title="Columns", text="Read only these columns; by default all.", min_length=1
    )
    rows_per_shard: int | None = _field(
        5,
        None,
        title="Rows a shard",
        text="Rows read, inferred and committed as one. By default chosen from rows, workers and "
        "batch size.",
        gt=0,
        le=1_000_000,
    )
    options: dict[str, Any] = _field(
        6,
        {},
        title="Store options",
        text="s3fs options for the input, such as endpoint_url or anon. Prefer credentials_block "
        "or the environment for keys.",
    )
    credentials_block: str | None = _field(
        7,
        None,
        title="Credentials block",
        text="Prefect block with the keys, as type-slug/name, for example aws-credentials/nightly.",
    )

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and not value:
            raise ValueError("is an empty list; name at least one file")
        for uri in [value] if isinstance(value, str) else value:
            check_uri(uri)
        return value

    @property
    def uris(self) -> list[str]:
        return [self.uri] if isinstance(self.uri, str) else list(self.uri)


class Prompt(Group):
    """How a row becomes a request: a template or a function of yours."""

    template: str | None = _field(
        1,
        None,
        title="User message",
        text="Text with {Column} fields. {{ and }} are literal braces.",
    )
    system: str | None = _field(2, None, title="System message", text="Sent before it, as it is.")
    function: str | None = _field(
        3,
        None,
        title="Function",
        text="package.module:function in place of the template. Takes the row (dict of column to "
        "value), returns the user text, a list of chat messages, or "
        "{'messages': [...], 'sampling': {...}}.",
    )
    on_null: Literal["fail", "empty"] = _field(
        4,
        "fail",
        title="Null in a template column",
        text="fail: the row goes to quarantine. empty: an empty text is put in.",
    )
    on_too_long: Literal["quarantine", "truncate_left", "truncate_right"] = _field(
        5,
        "quarantine",
        title="Prompt over the context length",
        text="quarantine: the row fails (PromptTooLong). truncate_left, truncate_right: the last "
        "user message loses its beginning or its end, so that there is room for max_tokens.",
    )

    @field_validator("template")
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is not None:
            template_fields(value)
        return value

    @field_validator("function")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        return None if value is None else check_function(value)

    @model_validator(mode="after")
    def _one(self) -> Prompt:
        if (self.template is None) == (self.function is None):
            raise ValueError("set exactly one of template and function")
        return self


# Fields of vLLM that change nothing but what a result does not hold.
NOT_WRITTEN = ("output_kind", "detokenize", "logprobs", "prompt_logprobs", "stream_interval")
# The same, but runs have begun with them: refused where a run begins, not where one is continued.
UNWRITTEN = ("logprob_token_ids", "flat_logprobs", "routed_experts_prompt_start")


class Sampling(Group):
    """How answers are drawn. Any field of vLLM's SamplingParams may be added."""

    model_config = ConfigDict(extra="allow", validate_default=True)

    temperature: float = _field(
        1, 0.0, title="Temperature", text="0 is greedy.", ge=0, allow_inf_nan=False
    )
    max_tokens: int = _field(2, 16, title="Most tokens out", text="Per answer.", gt=0)
    choice: list[str] | None = _field(
        3,
        None,
        title="Choices",
        text="The answer is exactly one of these (structured choice).",
    )

    def given(self) -> dict[str, Any]:
        """The fields that are set, as plain values."""
        fields = self.model_dump(mode="json")
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("choice")
    @classmethod
    def _choice(cls, value: list[str] | None) -> list[str] | None:
        if value is None:
            return None
        if not value:
            raise ValueError("is an empty list; name the labels, or leave it out")
        for number, label in enumerate(value, 1):
            if not label.strip():
                raise ValueError(f"label {number} of {len(value)} is empty; remove or name it")
        repeated = sorted({label for label in value if value.count(label) > 1})
        if repeated:
            raise ValueError(f"label {repeated[0]!r} stands there twice; remove one")
        return value

    @model_validator(mode="after")
    def _known(self) -> Sampling:
        extra = self.model_extra or {}
        refuse_unknown(extra, vllm_fields.sampling_fields(), set(type(self).model_fields))
        for name in NOT_WRITTEN:
            if extra.get(name) is not None:
                raise ValueError(f"{name} is not supported: only the answer's text is written")
        wrong = sampling_ranges.wrong(dict(self))
        if wrong is not None:
            raise ValueError(wrong)
        if self.choice and extra.get("structured_outputs"):
            raise ValueError("choice and structured_outputs exclude each other; keep one")
        return self


MOST_REPLICAS = 4096
MOST_SEQUENCES = 65536


def _count(value: Any, most: int, auto: bool = True) -> Any:
    """A whole number from 1 to `most`, or auto; ValueError otherwise. A form sends text."""
    if auto and value == "auto":
        return value
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        if not (isinstance(value, float) and value.is_integer()):
            raise ValueError(f"is no whole number{' and not auto' if auto else ''}")
        value = int(value)
    if value < 1:
        raise ValueError("should be greater than 0")
    if value > most:
        raise ValueError(f"should be at most {most}")
    return value


class Engine(Group):
    """The model and how it is run. Any vLLM engine argument may be added and is passed through."""

    model_config = ConfigDict(extra="allow", validate_default=True, protected_namespaces=())

    model: str = _field(
        1,
        "demo",
        title="Model",
        text="Hugging Face name, local folder, s3:// folder, or demo: the small bundled model.",
    )
    revision: str | None = _field(
        2, None, title="Revision", text="Branch, tag or commit; pinned to a commit in the plan."
    )
    device: Literal["auto", "gpu", "cpu"] = _field(
        3, "auto", title="Device", text="auto: GPU where the cluster has one."
    )
    replicas: int | Literal["auto"] | list[int] = _field(
        4,
        "auto",
        title="Replicas",
        text="Copies of the model, each on tensor * pipeline GPUs, or on a CPU. auto: on all GPUs "
        "of the cluster, one on a CPU. [fewest, most]: as many as the cluster gives room for.",
    )
    tensor_parallel_size: int = _field(
        5, 1, title="Tensor parallel", text="GPUs that share each layer.", gt=0
    )
    pipeline_parallel_size: int = _field(
        6, 1, title="Pipeline parallel", text="GPUs that share the layers.", gt=0
    )
    max_model_len: int | Literal["auto"] | None = _field(
        7,
        None,
        title="Context length",
        text="Prompt and answer together, in tokens; by default the model's own. auto: what "
        "max_model_len_percentile of a sample of the rows need, fixed in the run's plan.",
    )
    max_num_seqs: int | Literal["auto"] = _field(
        8,
        "auto",
        title="Sequences at once",
        text="Most rows an engine computes at one time. auto: 256, or 512 where long answers and "
        "the GPU's memory make more of them pay.",
    )
    max_num_batched_tokens: int | None = _field(
        9,
        None,
        title="Tokens a step",
        text="Most tokens in one engine step; by default 16384 on a GPU, 4096 on a CPU.",
        gt=0,
    )
    batch_size: int = _field(
        10,
        256,
        title="Batch size",
        text="The fewest rows a shard should hold when the plan chooses.",
        gt=0,
    )
    max_concurrent_batches: int | None = _field(
        11,
        None,
        title="Shards at once",
        text="Shards in flight in an engine; by default enough to keep it saturated: rows a "
        "shard * this >= max_num_seqs, and at least 2.",
        gt=0,
    )
    accelerator_type: str | None = _field(
        12, None, title="Accelerator", text="Ray's name of the GPU kind, such as H100 or L4."
    )
    num_cpus: float = _field(
        13, 1, title="CPUs an engine", text="Logical CPUs Ray sets aside for each engine.", gt=0
    )
    env: dict[str, str] = _field(
        14, {}, title="Environment", text="Environment variables for the engine's process."
    )
    engines_per_gpu: int | Literal["auto"] = _field(
        15,
        "auto",
        title="Engines a GPU",
        text="Engines that share a GPU, each with its part of the memory: one engine is held back "
        "by Python on one core before a small model with short answers fills the chip. auto: as "
        "many as pay and fit. A replica on one GPU is so many engines.",
    )
    order: Literal["auto", "input"] = _field(
        16,
        "auto",
        title="Order in a shard",
        text="auto: rows that share a prefix go to the engine together, the longest first. input: "
        "as they stand. The result is in input order either way.",
    )
    deduplicate: bool = _field(
        17,
        True,
        title="Ask once",
        text="Rows of a shard with the same request are inferred once, where sampling is greedy, "
        "so that they have the same answer.",
    )

    max_model_len_percentile: float = _field(
        18,
        0.99,
        title="Rows that auto fits",
        text="Share of the sampled rows that max_model_len: auto is to fit; 1.0 is the longest of "
        "them and a tenth more.",
        ge=0.5,
        le=1.0,
    )

    stage: Literal["vllm", "ray.data.llm"] = _field(
        19,
        "vllm",
        title="Engine stage",
        text="vllm: this package's own, on vLLM's public API. ray.data.llm: Ray's, slower and "
        "with fewer figures; order, deduplicate and limits.hang_seconds do not apply to it.",
    )

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        """Also the arguments that are no fields of ours."""
        return name == "env" or name not in cls.model_fields

    @field_validator("model")
    @classmethod
    def _model(cls, value: str) -> str:
        return without_user(value)

    @field_validator("replicas", mode="before")
    @classmethod
    def _replicas(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _count(value, MOST_REPLICAS)
        if len(value) != 2:
            raise ValueError("write [fewest, most], such as [2, 8]")
        fewest, most = (_count(number, MOST_REPLICAS, auto=False) for number in value)
        if fewest > most:
            raise ValueError(f"the fewest ({fewest}) are more than the most ({most})")
        return [fewest, most]

    @field_validator("engines_per_gpu", mode="before")
    @classmethod
    def _engines_per_gpu(cls, value: Any) -> Any:
        return _count(value, 16)

    @field_validator("max_num_seqs", mode="before")
    @classmethod
    def _sequences(cls, value: Any) -> Any:
        return _count(value, MOST_SEQUENCES)

    @field_validator("max_model_len")
    @classmethod
    def _length(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value <= 0:
            raise ValueError("must be greater than 0, or auto")
        return value

    @model_validator(mode="after")
    def _known(self) -> Engine:
        extra = self.model_extra or {}
        packed = self.engines_per_gpu != "auto" and self.engines_per_gpu > 1
        if packed and self.gpus_per_replica > 1:
            raise ValueError(
                "engines_per_gpu packs engines of one GPU each; set tensor_parallel_size and "
                "pipeline_parallel_size to 1 or engines_per_gpu to 1"
            )
        refuse_unknown(extra, vllm_fields.engine_fields(), set(type(self).model_fields))
        return self

    @property
    def context(self) -> int | None:
        """`max_model_len` in tokens; None for the model's own. An `auto` must be settled first
        (`plan.settled`)."""
        return None if self.max_model_len == "auto" else self.max_model_len

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Output(Group):
    """Where the result goes and what it holds."""

    uri: str = _field(
        1, title="Where", text="Folder, local or s3://; the run is written to URI/RUN_KEY/."
    )
    column: str = _field(
        2, "response", title="Answer column", text="Name of the column with the answer."
    )
    columns: list[str] | None = _field(
        3, None, title="Input columns kept", text="By default all; [] keeps none."
    )
    postprocess: str | None = _field(
        4,
        None,
        title="Postprocess",
        text="package.module:function. Takes the row with the answer (dict), returns the dict of "
        "columns to write in place of the answer column, or None to leave the row out.",
    )
    output_schema: dict[str, str] | None = _field(
        5,
        None,
        title="Schema",
        text="Arrow type by name of what postprocess returns, such as {industry: string}; by "
        "default fixed by the first shard.",
        alias="schema",
    )
    row_number: str = _field(
        6,
        "_row",
        title="Row number column",
        text="Input row (from 0) that a result row came from; `verify` names rows by it.",
        min_length=1,
    )
    compact: bool = _field(
        7,
        True,
        title="Compact",
        text="Write data/ in input order at the end; off leaves the pieces under a manifest.",
    )
    file_mb: int = _field(8, 256, title="File size", text="Aim for result files, in MiB.", gt=0)
    options: dict[str, Any] = _field(
        9, {}, title="Store options", text="s3fs options for the output."
    )
    credentials_block: str | None = _field(
        10, None, title="Credentials block", text="Prefect block with the keys, type-slug/name."
    )
    on_cut_off: Literal["auto", "keep", "fail"] = _field(
        11,
        "auto",
        title="Cut-off answers",
        text="fail: the row goes to quarantine (AnswerCutOff) with what there is of its answer. "
        "keep: it is a good row. auto: kept as well, and the report warns of each that had to have "
        "a form (choice, JSON, ...) and is not whole.",
    )

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True)

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str) -> str:
        check_uri(value)
        if any(c in value for c in "*?["):
            raise ValueError(f"{value!r} holds a wildcard; name one folder")
        return value

    @field_validator("postprocess")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        return None if value is None else check_function(value)

    @field_validator("column")
    @classmethod
    def _column(cls, value: str) -> str:
        if not value or value.startswith(RESERVED):
            raise ValueError(f"{value!r} cannot be a column name here; choose another")
        return value

    @model_validator(mode="after")
    def _declared(self) -> Output:
        if self.output_schema is not None and self.postprocess is None:
            raise ValueError("schema describes what postprocess returns; set postprocess as well")
        return self


MAX_FAILED = 0.01  # of the planned rows, where a job sets no limit


class Limits(Group):
    """When to give up."""

    max_failed_fraction: float | None = _field(
        1,
        None,
        title="Most failed rows, as a fraction",
        text="Of the planned rows; one more fails the run. Above 0 it allows at least one row, "
        "and below 1 never all of them. By default 0.01 where no other limit is set.",
        ge=0,
        le=1,
        allow_inf_nan=False,
    )
    max_failed_rows: int | None = _field(
        2,
        None,
        title="Most failed rows, as a count",
        text="One more fails the run. With max_failed_fraction both must hold.",
        ge=0,
    )
    engine_deaths: int = _field(
        3,
        2,
        title="Deaths a row may cause",
        text="A row that, alone, kills its engine this often goes to quarantine.",
        gt=0,
    )
    warn_failed: int | float | None = _field(
        4,
        None,
        title="Failed rows that are reported",
        text="A count or a fraction as above; one more warns and sends the event "
        "raybatch.quarantine.high. By default half of what may fail.",
        ge=0,
        allow_inf_nan=False,
    )
    stall_seconds: float | None = _field(
        5,
        None,
        title="Longest pause between commits",
        text="In seconds; a longer one is reported as a stall. By default at least 60, and 10 "
        "times the mean time between commits or 3 times the slowest shard if that is more.",
        gt=0,
        allow_inf_nan=False,
    )
    stall_start_seconds: float = _field(
        6,
        1800.0,
        title="Longest wait for the first commit",
        text="In seconds, from the start of a pass, whose engines must start first.",
        gt=0,
        allow_inf_nan=False,
    )
    fail_on_stall: bool = _field(
        7,
        False,
        title="A stall ends the run",
        text="With EngineFailure, which is retried; off only reports it.",
    )
    deadline: str | None = _field(
        8,
        None,
        title="Time the run may take",
        text="Such as 45m or 6h of working time. A run that takes longer is told what would make "
        "it fit; it is not ended.",
    )
    hang_seconds: float = _field(
        9,
        600.0,
        title="Longest engine step",
        text="In seconds, twice that until an engine's first answer; an engine that takes longer "
        "is hung: it is killed and another started. 0 (or null): any time.",
        ge=0,
        allow_inf_nan=False,
    )
    function_seconds: float = _field(
        10,
        600.0,
        title="Longest call of a function",
        text="In seconds, of prompt.function or output.postprocess for a row; a row that takes "
        "longer is ended and goes to quarantine. 0 (or null): any time.",
        ge=0,
        allow_inf_nan=False,
    )
    max_failed: int | float | None = _field(
        11,
        None,
        title="Most failed rows, older form",
        text="A count (10) or, below 1 with a decimal point, a fraction of the planned rows, "
        "rounded down (0.01). In place of max_failed_fraction and max_failed_rows.",
        ge=0,
        allow_inf_nan=False,
    )

    @field_validator("hang_seconds", "function_seconds", mode="before")
    @classmethod
    def _any_time(cls, value: Any) -> Any:
        # In Prefect's form a field that may be null, but is not by default, would be no plain one.
        return 0 if value is None else value

    @field_validator("deadline")
    @classmethod
    def _known_duration(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                seconds = seconds_of(value)
            except ConfigError as error:
                raise ValueError(str(error)) from None
            if not seconds:
                raise ValueError("no time at all; write 45m or 6h")
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> Limits:
        if self.max_failed is not None:
            for name in ("max_failed_rows", "max_failed_fraction"):
                if getattr(self, name) is not None:
                    raise ValueError(f"max_failed and {name} say the same; keep one")
        return self

    def _limits(self) -> dict[str, float]:
        """The fields that bound the failed rows, with their values."""
        names = ("max_failed", "max_failed_rows", "max_failed_fraction")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return given or {"max_failed_fraction": MAX_FAILED}

    def allowed(self, rows: int) -> int:
        """Failed rows allowed of `rows` planned.

        A fraction is rounded down; `max_failed_fraction` above 0 allows at least one row, and
        below 1 not all of them, so that neither one bad row of 20 fails a run, nor one of 1 passes.
        """
        allowed = []
        for name, value in self._limits().items():
            share = _share(value, rows)
            if name == "max_failed_fraction":
                share = round(rows * value) if value in (0, 1) else min(max(1, share), rows - 1)
            allowed.append(share)
        return min(allowed)

    def said(self, rows: int) -> str:
        """The limit in words: `limits.max_failed_rows 2 (2 rows) allows`."""
        fields = [f"limits.{name} {value}" for name, value in self._limits().items()]
        words = counted(self.allowed(rows), "row")
        return f"{' and '.join(fields)} ({words}) allow{'s' if len(fields) == 1 else ''}"

    def reported(self, rows: int) -> int:
        """Failed rows of `rows` planned above which the quarantine is reported."""
        return (
            self.allowed(rows) // 2 if self.warn_failed is None else _share(self.warn_failed, rows)
        )


def _share(value: float, rows: int) -> int:
    if isinstance(value, float) and value < 1:
        return int(value * rows + 1e-6)  # 0.29 * 100 is 28.999999999999996
    return int(value)


class Stage(Group):
    """Resources of a CPU stage."""

    num_cpus: float = _field(1, 0.5, title="CPUs a task", text="Logical CPUs.", gt=0)
    concurrency: int | None = _field(
        2, None, title="Most tasks at once", text="By default Ray decides.", gt=0
    )
    memory: int | None = _field(3, None, title="Memory a task", text="In bytes.", gt=0)


class Cluster(Group):
    """Which Ray cluster, and what the CPU stages take of it."""

    address: str | None = _field(
        1,
        None,
        title="Address",
        text="host:port or auto for a running cluster; by default the environment's RAY_ADDRESS, "
        "else one is started here and stopped at the end.",
    )
    prepare: Stage = _field(2, Stage(), title="Prepare stage", text="Read, template, tokens.")
    finish: Stage = _field(
        3, Stage(num_cpus=0.25), title="Finish stage", text="Detokenize, postprocess, write."
    )
    job_server: str | None = _field(
        4,
        None,
        title="Job server",
        text="http(s)://host:8265 of a Ray cluster: the run works there as a Ray job and outlives "
        "the flow's process; a retry finds it again.",
    )
    on_crash: Literal["reattach", "stop"] = _field(
        5,
        "reattach",
        title="Job of a crashed flow run",
        text="reattach: it goes on and the next try follows it. stop: the next try stops it and "
        "begins another. Cancelling always stops it.",
    )

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("ray://"):
            raise ValueError(
                "ray:// (the Ray client) ends the work after 30 s without network; run the flow "
                "on the cluster and use auto, or give the GCS address host:6379"
            )
        return value

    @field_validator("job_server")
    @classmethod
    def _job_server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if value.startswith("ray://"):
            raise ValueError(
                "ray:// (the Ray client) ends the work after 30 s without network, so nothing "
                "would outlive the flow; write the job server's http://host:8265"
            )
        if not SERVER.match(value):
            raise ValueError(f"{value!r} is no job server; write http://host:8265, no more")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_way(self) -> Cluster:
        if self.address and self.job_server:
            raise ValueError(
                "address is for a driver in the flow's process, job_server for one on the "
                "cluster; keep one"
            )
        return self


class BatchJob(Group):
    """One batch inference job: read a table, ask a model about every row, write the answers."""

    name: str = _field(
        1, title="Name", text="Letters, digits and ._- ; part of the default run key."
    )
    source: Source = _field(2, title="Source", text="What to read.")
    prompt: Prompt = _field(3, title="Prompt", text="How a row becomes a request.")
    sampling: Sampling = _field(4, Sampling(), title="Sampling", text="How answers are drawn.")
    engine: Engine = _field(5, Engine(), title="Engine", text="The model and how it is run.")
    output: Output = _field(6, title="Output", text="Where the result goes.")
    limits: Limits = _field(7, Limits(), title="Limits", text="When to give up.")
    cluster: Cluster = _field(8, Cluster(), title="Cluster", text="Which Ray cluster.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError(
                f"{value!r} may only hold letters, digits and ._- (not first), at most 128"
            )
        return value

    @model_validator(mode="after")
    def _one_answer(self) -> BatchJob:
        if (
            self.engine.stage == "ray.data.llm"
            and (self.sampling.model_extra or {}).get("n", 1) > 1
        ):
            raise ValueError(
                "sampling.n: ray.data.llm gives one answer a row; set engine.stage to vllm"
            )
        if self.engine.stage == "ray.data.llm" and self.output.on_cut_off == "fail":
            raise ValueError(
                "output.on_cut_off: ray.data.llm does not tell which answers were cut off; set "
                "engine.stage to vllm, or on_cut_off to keep"
            )
        return self

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "job") -> BatchJob:
        """Validates; raises `ConfigError` with each wrong field, its value and the remedy."""
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise ConfigError(explain(error, where)) from None

    @classmethod
    def from_yaml(cls, path: str | Path) -> BatchJob:
        """Reads a job file; raises `ConfigError` when it is missing, not YAML or not a job."""
        import yaml

        try:
            if Path(path).stat().st_size > MAX_JOB_BYTES:
                raise ConfigError(f"{path}: is too large to be a job (over 4 MiB)")
            value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such job file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        # A date such as 2026-99-99 is a ValueError of its own.
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{path}: is not valid YAML: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path}: is nested too deeply to be a job") from None
        if not _fits(value):
            raise ConfigError(f"{path}: holds over {MAX_VALUES:,} values (aliases count each time)")
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: must hold a mapping with name, source, prompt and output")
        return cls.from_dict(value, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON, without what equals its default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=CLEAR)


def with_fields(value: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A job as plain values with `changes` ({"sampling.max_tokens": 99}) made in a copy of it.

    Groups that are not there are made; `ConfigError` where a field is taken for a group.
    """
    made = copy.deepcopy(dict(value))
    for field, new in changes.items():
        at = made
        *groups, last = field.split(".")
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{field}: {group} is no group of fields")
        at[last] = new
    return made


def check_run_key(key: str) -> str:
    """A run key is one path segment; `ConfigError` for anything that could leave the root."""
    if not NAME.match(key) or ".." in key:
        raise ConfigError(
            f"run key {key!r} may only hold letters, digits and ._- (a letter or digit first, "
            "no '..', at most 128 characters)"
        )
    return key


def explain(error: ValidationError, where: str) -> str:
    """A pydantic error as lines a person can act on: field, what is wrong, value."""
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        message = hide_users(item["msg"].removeprefix("Value error, "))
        if item["type"] == "extra_forbidden":
            message = f"unknown field{_nearest(str(item['loc'][-1]), _siblings(item['loc']))}"
        elif item["type"] == "missing":
            message = "is required"
        elif not {*item["loc"]} & {"options", "env", "hf_token"} and not isinstance(
            item.get("input"), (dict, BaseModel)
        ):
            message += f" (value: {hide_users(_short(item.get('input')))!r})"
        lines.append(": ".join(filter(None, (where, path, message))))
    return "\n".join(dict.fromkeys(lines))


def _fits(value: Any) -> bool:
    """Whether a value holds at most MAX_VALUES values; stops counting there."""
    waiting, seen = [value], 0
    while waiting and seen <= MAX_VALUES:
        seen += 1
        inner = waiting.pop()
        if isinstance(inner, dict):
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
    return seen <= MAX_VALUES


def _short(value: Any) -> str:
    """The start of a value; never all of one that aliases have blown up."""
    if isinstance(value, str):
        return value[:80]
    brief = reprlib.Repr()
    brief.maxlevel = 2
    return (brief.repr(value) if isinstance(value, (list, dict)) else str(value))[:80]


def _siblings(loc: tuple[Any, ...]) -> set[str]:
    model: type[BaseModel] = BatchJob
    for part in loc[:-1]:
        found = model.model_fields.get(str(part))
        if found is None or not isinstance(found.annotation, type):
            return set()
        if issubclass(found.annotation, BaseModel):
            model = found.annotation
    return {f.alias or name for name, f in model.model_fields.items()}
