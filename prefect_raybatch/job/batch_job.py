"""`BatchJob`: the YAML file, the flow parameter and the manual of a job, as one pydantic model.

Fields are grouped (source, prompt, sampling, engine, output, limits, cluster) and each describes
itself, because the same text is the form in the Prefect page and the table in docs/job.md. What
can be checked without reading the input is checked here; `plan` checks the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    ValidationError,
    field_validator,
    model_validator,
)

from prefect_raybatch.errors import ConfigError
from prefect_raybatch.job import answer_schema, chat, sampling_ranges, tasks, vllm_fields
from prefect_raybatch.job.checks import (
    NAME,
    RESERVED,
    SCHEMES,
    SERVER,
    WEB_SCHEMES,
    check_count,
    check_function,
    check_uri,
    check_web,
    is_web,
    refuse_unknown,
    template_fields,
    without_user,
)
from prefect_raybatch.job.csv_options import Csv
from prefect_raybatch.job.filter_text import parse_filter
from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group
from prefect_raybatch.job.images import DIGESTS_COLUMN, Images
from prefect_raybatch.job.job_file import explain, read_job_file
from prefect_raybatch.job.limits import Limits
from prefect_raybatch.job.publish import PublishTarget, check_targets
from prefect_raybatch.job.reuse import check_reuse
from prefect_raybatch.job.run_words import check_run_words
from prefect_raybatch.job.secrets import CLEAR
from prefect_raybatch.job.sql_types import arrow_type
from prefect_raybatch.job.table_formats import (
    TABLE_FORMATS,
    check_catalog,
    format_of_scheme,
    scheme_of,
)
from prefect_raybatch.job.web_options import Web

SourceFormat = Literal[
    "auto", "parquet", "csv", "jsonl", "arrow", "delta", "iceberg", "lance", "sql"
]


class Source(Group):
    """What to read."""

    uri: str | list[str] = field(
        1,
        title="Where",
        text="File, folder or glob, local or s3://, a file by http(s), or a list of these. A "
        "folder is read recursively. Files are taken in the order of their names. Or the folder of "
        "a table.",
    )
    format: SourceFormat = field(
        2,
        "auto",
        title="Format",
        text="By default told from the file names' endings, or by what lies in a table's folder.",
    )
    limit: int | None = field(
        3, None, title="First rows only", text="Read only the first N rows.", gt=0
    )
    columns: list[str] | None = field(
        4, None, title="Columns", text="Read only these columns; by default all.", min_length=1
    )
    rows_per_shard: int | None = field(
        5,
        None,
        title="Rows a shard",
        text="Rows read, inferred and committed as one. By default chosen from rows, workers and "
        "batch size.",
        gt=0,
        le=1_000_000,
    )
    options: dict[str, Any] = field(
        6,
        {},
        title="Store options",
        text="s3fs options for the input, such as endpoint_url or anon. Prefer credentials_block "
        "or the environment for keys.",
    )
    credentials_block: str | None = field(
        7,
        None,
        title="Credentials block",
        text="Prefect block with the keys, as type-slug/name, for example aws-credentials/nightly.",
    )
    media_root: str | None = field(
        8,
        None,
        title="Folder of media",
        text="Local folder that image paths in the rows lie in, on every node. By default rows "
        "name no local files.",
    )
    csv: Csv = field(9, Csv(), title="CSV", text="How CSV files are written.")
    version: str | None = field(
        10,
        None,
        title="Version",
        text="Of a table, to read it as it was: a version or snapshot number, a tag, or a "
        "timestamp. By default as it is when the run is planned.",
        min_length=1,
    )
    filter: str | None = field(
        11,
        None,
        title="Filter",
        text="Read only rows for which this is true, such as country = 'DE' AND amount >= 10.",
    )
    web: Web = field(12, Web(), title="Files by http(s)", text="What may be fetched.")
    catalog: dict[str, Any] = field(
        13,
        {},
        title="Catalog",
        text="Of an Iceberg table: pyiceberg's properties, such as {type: rest, uri: ...}, or "
        "{name: ...} of one in .pyiceberg.yaml. source.uri is then namespace.table.",
    )
    query: str | None = field(
        14,
        None,
        title="Query",
        text="SELECT of a database, which source.uri names as SQLAlchemy does: "
        "postgresql://host/database. It may end in ORDER BY, so that rows keep their numbers.",
        min_length=1,
    )
    types: dict[str, str] = field(
        15,
        {},
        title="Types of columns",
        text="Of a query, where its first rows do not tell: {amount: 'decimal(38,9)'}. Arrow's "
        "names, such as int64, double, string or timestamp[us, UTC].",
    )

    @field_validator("catalog")
    @classmethod
    def _catalog(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_catalog(value)
        return value

    @field_validator("version", mode="before")
    @classmethod
    def _version(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | date):
            return value
        return str(value) if isinstance(value, int) else value.isoformat()  # as YAML reads them

    @field_validator("filter")
    @classmethod
    def _filter(cls, value: str | None) -> str | None:
        if value is not None:
            parse_filter(value)
        return value

    @field_validator("media_root")
    @classmethod
    def _media_root(cls, value: str | None) -> str | None:
        if value is not None:
            check_uri(value)
            if value.startswith("s3://"):
                raise ValueError("is a local folder; rows name s3:// images by their whole URL")
        return value

    @field_validator("uri")
    @classmethod
    def _uri(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and not value:
            raise ValueError("is an empty list; name at least one file")
        for uri in [value] if isinstance(value, str) else value:
            check_run_words(uri)
            if is_web(uri):
                check_web(uri)
            elif format_of_scheme(scheme_of(uri)) is None:
                check_uri(uri)
            else:
                without_user(uri)
        return value

    @field_validator("types")
    @classmethod
    def _types(cls, value: dict[str, str]) -> dict[str, str]:
        for name, kind in value.items():
            try:
                arrow_type(kind)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return value

    @model_validator(mode="after")
    def _one_query(self) -> Source:
        if self.table_format == "sql" and self.query is None:
            raise ValueError("query: is required for a database; write the SELECT to read")
        for name in ("query", "types"):
            other = format_of_scheme(scheme_of(self.uris[0])) != "sql"
            if other and self.table_format != "sql" and getattr(self, name):
                raise ValueError(f"{name}: is of databases, and uri names none; remove it")
        return self

    @model_validator(mode="after")
    def _one_table(self) -> Source:
        told = {format_of_scheme(scheme_of(uri)) for uri in self.uris} - {None}
        name = self.table_format
        if told - {name}:
            raise ValueError(
                f"uri: {self.uris[0]!r} does not go with format: {self.format}; leave format out, "
                "and name a table or data set alone"
            )
        if name is not None and len(self.uris) > 1:
            raise ValueError(f"uri: a {TABLE_FORMATS[name].title} source is one; name it alone")
        if self.catalog and name != "iceberg":
            raise ValueError("catalog: is of Iceberg tables, with format: iceberg; remove it")
        if self.version is not None and self.format not in ("auto", *TABLE_FORMATS):
            raise ValueError(f"version: {self.format} files have no versions; remove it")
        return self

    @property
    def uris(self) -> list[str]:
        return [self.uri] if isinstance(self.uri, str) else list(self.uri)

    @property
    def table_format(self) -> str | None:
        """The table format that format or the scheme of the URI tells. A folder with format auto
        may be a table as well, which only looking into it tells."""
        if self.format in TABLE_FORMATS:
            return self.format
        if self.format == "auto" and self.catalog:
            return "iceberg"
        if self.format == "auto" and len(self.uris) == 1:
            return format_of_scheme(scheme_of(self.uris[0]))
        return None

    @property
    def stored(self) -> bool:
        """Whether the URIs name files and folders, not a table in a catalog."""
        schemes = (*SCHEMES, *WEB_SCHEMES)
        return not self.catalog and all(scheme_of(uri) in schemes for uri in self.uris)


# Fields of the prompt that vLLM's preparing of images is not told of.
WITHOUT_IMAGES = (
    *("chat_template", "chat_template_kwargs", "prefill", "continue_final_message"),
    *("tools", "documents"),
)


class Prompt(Group):
    """How a row becomes a request: a template or a function of yours."""

    template: str | None = field(
        1,
        None,
        title="User message",
        text="Text with {Column} fields. {{ and }} are literal braces.",
    )
    system: str | None = field(2, None, title="System message", text="Sent before it, as it is.")
    function: str | None = field(
        3,
        None,
        title="Function",
        text="package.module:function in place of the template. Takes the row (dict of column to "
        "value), returns the user text, a list of chat messages, or "
        "{'messages': [...], 'sampling': {...}}.",
    )
    on_null: Literal["fail", "empty"] = field(
        4,
        "fail",
        title="Null in a template column",
        text="fail: the row goes to quarantine. empty: an empty text is put in.",
    )
    on_too_long: Literal["quarantine", "truncate_left", "truncate_right"] = field(
        5,
        "quarantine",
        title="Prompt over the context length",
        text="quarantine: the row fails (PromptTooLong). truncate_left, truncate_right: the last "
        "user message loses its beginning or its end, so that there is room for max_tokens.",
    )
    messages: str | None = field(
        6,
        None,
        title="Conversation column",
        text="Column that holds whole conversations, in place of the template: lists of {role, "
        "content, ...}, or JSON text of such a list. The last message is not the assistant's.",
    )
    chat_template: str | None = field(
        7,
        None,
        title="Chat template",
        text="Jinja file (local or s3://) or text in place of the model's own chat template. Read "
        "when the run is planned.",
    )
    chat_template_kwargs: dict[str, Any] = field(
        8,
        {},
        title="Chat template arguments",
        text="What the chat template takes beside the messages, such as {enable_thinking: false}.",
    )
    prefill: str | None = field(
        9,
        None,
        title="Beginning of the answer",
        text="Text that each answer goes on from. The answer column holds what follows it.",
        min_length=1,
    )
    continue_final_message: bool = field(
        10,
        False,
        title="Continue the last message",
        text="The conversation ends with a message of the assistant, which the answer goes on "
        "from. The answer column holds what follows it.",
    )
    tools: list[dict[str, Any]] | None = field(
        11,
        None,
        title="Tools",
        text="What the model may call: definitions {type: function, function: {name, description, "
        "parameters}}, for the chat template.",
    )
    documents: str | None = field(
        12,
        None,
        title="Documents column",
        text="Column of documents for a chat template that takes them: lists of {title, text} or "
        "of texts, or JSON text of such a list.",
    )
    second: str | None = field(
        13,
        None,
        title="Second text",
        text="With engine.task score: the text that the first is compared with, with {Column} "
        "fields.",
    )
    adapter_column: str | None = field(
        14,
        None,
        title="Adapter column",
        text="Column with the name of each row's LoRA adapter, of those in engine.adapters. A null "
        "is the model alone where on_null is empty.",
    )

    images: Images = field(
        15, Images(), title="Images", text="Images that go with the text. By default none."
    )

    @field_validator("template", "second")
    @classmethod
    def _template(cls, value: str | None) -> str | None:
        if value is not None:
            template_fields(value)
        return value

    @field_validator("function")
    @classmethod
    def _function(cls, value: str | None) -> str | None:
        return None if value is None else check_function(value)

    @field_validator("messages", "documents", "chat_template")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("is empty; name it, or leave it out")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _template_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        return chat.check_template_arguments(value)

    @field_validator("tools")
    @classmethod
    def _tools(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        return chat.check_tools(value)

    @model_validator(mode="after")
    def _one(self) -> Prompt:
        if [self.template, self.function, self.messages].count(None) != 2:
            raise ValueError("set exactly one of template, function and messages")
        if self.continue_final_message and self.template is not None:
            raise ValueError(
                "continue_final_message: a template makes no message of the assistant; set prefill"
            )
        if self.continue_final_message and self.prefill is not None:
            raise ValueError(
                "prefill and continue_final_message exclude each other: an answer goes on from "
                "one text; keep one"
            )
        return self

    @model_validator(mode="after")
    def _seen(self) -> Prompt:
        if not self.images.used:
            if self.images != Images():
                raise ValueError(
                    "images.columns is empty; name the columns with the images, or set "
                    "images.per_row for a function or conversations that bring them"
                )
            return self
        if self.template is not None and not self.images.columns:
            raise ValueError("images.columns is empty; name the columns with the images")
        if self.on_too_long != "quarantine":
            raise ValueError(
                f"on_too_long {self.on_too_long} cuts text, which does not go with images; leave "
                "it at quarantine"
            )
        for name in WITHOUT_IMAGES:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} does not go with images yet; leave one of them out")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the input that are named, with the field that names them; what a function
        reads is not known."""
        named = dict.fromkeys(template_fields(self.template or ""), "prompt.template")
        for name in template_fields(self.second or ""):
            named.setdefault(name, "prompt.second")
        if self.messages is not None:
            named[self.messages] = "prompt.messages"
        if self.documents is not None:
            named[self.documents] = "prompt.documents"
        if self.adapter_column is not None:
            named.setdefault(self.adapter_column, "prompt.adapter_column")
        return named


# Fields of vLLM that change nothing but what a result does not hold.
NOT_WRITTEN = ("output_kind", "detokenize", "prompt_logprobs", "stream_interval")
# The same, but runs have begun with them: refused where a run begins, not where one is continued.
UNWRITTEN = ("logprob_token_ids", "flat_logprobs", "routed_experts_prompt_start")

PROBABILITIES = "probabilities"  # the column of output.probabilities
LOGPROBS = "logprobs"  # the column of sampling.logprobs

MOST_REPLICAS = 4096
MOST_LABELS = 128  # of which vLLM tells the probabilities (MAX_LOGPROB_TOKEN_IDS)
MOST_LOGPROBS = 20  # unless engine.max_logprobs says more
MOST_SEQUENCES = 65536


class Sampling(Group):
    """How answers are drawn. Any field of vLLM's SamplingParams may be added."""

    model_config = ConfigDict(extra="allow", validate_default=True)

    temperature: float = field(
        1, 0.0, title="Temperature", text="0 is greedy.", ge=0, allow_inf_nan=False
    )
    max_tokens: int = field(2, 16, title="Most tokens out", text="Per answer.", gt=0)
    choice: list[str] | None = field(
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


class Engine(Group):
    """The model and how it is run. Any vLLM engine argument may be added and is passed through."""

    model_config = ConfigDict(extra="allow", validate_default=True, protected_namespaces=())

    model: str = field(
        1,
        "demo",
        title="Model",
        text="Hugging Face name, local folder, s3:// folder, or demo: the small bundled model.",
    )
    revision: str | None = field(
        2, None, title="Revision", text="Branch, tag or commit; pinned to a commit in the plan."
    )
    device: Literal["auto", "gpu", "cpu"] = field(
        3, "auto", title="Device", text="auto: GPU where the cluster has one."
    )
    replicas: int | Literal["auto"] | list[int] = field(
        4,
        "auto",
        title="Replicas",
        text="Copies of the model, each on tensor * pipeline GPUs, or on a CPU. auto: on all GPUs "
        "of the cluster, one on a CPU. [fewest, most]: as many as the cluster gives room for.",
    )
    tensor_parallel_size: int = field(
        5, 1, title="Tensor parallel", text="GPUs that share each layer.", gt=0
    )
    pipeline_parallel_size: int = field(
        6, 1, title="Pipeline parallel", text="GPUs that share the layers.", gt=0
    )
    max_model_len: int | Literal["auto"] | None = field(
        7,
        None,
        title="Context length",
        text="Prompt and answer together, in tokens; by default the model's own. auto: what "
        "max_model_len_percentile of a sample of the rows need, fixed in the run's plan.",
    )
    max_num_seqs: int | Literal["auto"] = field(
        8,
        "auto",
        title="Sequences at once",
        text="Most rows an engine computes at one time. auto: 256, or 512 where long answers and "
        "the GPU's memory make more of them pay.",
    )
    max_num_batched_tokens: int | None = field(
        9,
        None,
        title="Tokens a step",
        text="Most tokens in one engine step; by default 16384 on a GPU, 4096 on a CPU.",
        gt=0,
    )
    batch_size: int = field(
        10,
        256,
        title="Batch size",
        text="The fewest rows a shard should hold when the plan chooses.",
        gt=0,
    )
    max_concurrent_batches: int | None = field(
        11,
        None,
        title="Shards at once",
        text="Shards in flight in an engine; by default enough to keep it saturated: rows a "
        "shard * this >= max_num_seqs, and at least 2.",
        gt=0,
    )
    accelerator_type: str | None = field(
        12, None, title="Accelerator", text="Ray's name of the GPU kind, such as H100 or L4."
    )
    num_cpus: float = field(
        13, 1, title="CPUs an engine", text="Logical CPUs Ray sets aside for each engine.", gt=0
    )
    env: dict[str, str] = field(
        14, {}, title="Environment", text="Environment variables for the engine's process."
    )
    engines_per_gpu: int | Literal["auto"] = field(
        15,
        "auto",
        title="Engines a GPU",
        text="Engines that share a GPU, each with its part of the memory: one engine is held back "
        "by Python on one core before a small model with short answers fills the chip. auto: as "
        "many as pay and fit. A replica on one GPU is so many engines.",
    )
    order: Literal["auto", "input"] = field(
        16,
        "auto",
        title="Order in a shard",
        text="auto: rows that share a prefix go to the engine together, the longest first. input: "
        "as they stand. The result is in input order either way.",
    )
    deduplicate: bool = field(
        17,
        True,
        title="Ask once",
        text="Rows of a shard with the same request are inferred once, where sampling is greedy, "
        "so that they have the same answer.",
    )

    max_model_len_percentile: float = field(
        18,
        0.99,
        title="Rows that auto fits",
        text="Share of the sampled rows that max_model_len: auto is to fit; 1.0 is the longest of "
        "them and a tenth more.",
        ge=0.5,
        le=1.0,
    )

    stage: Literal["vllm", "ray.data.llm"] = field(
        19,
        "vllm",
        title="Engine stage",
        text="vllm: this package's own, on vLLM's public API. ray.data.llm: Ray's, slower and "
        "with fewer figures; order, deduplicate and limits.hang_seconds do not apply to it.",
    )
    task: tasks.TaskName = field(
        20,
        "generate",
        title="Task",
        text="generate: text. embed: a vector. classify: a label and the probability of each. "
        "score: how well two texts fit each other. docs/tasks.md.",
    )
    adapter: str | None = field(
        21,
        None,
        title="LoRA adapter",
        text="For all rows: local or s3:// folder as peft writes it, or Hugging Face name "
        "(owner/name, hf://owner/name@revision); pinned by its content in the plan.",
    )
    adapters: dict[str, str] = field(
        22,
        {},
        title="LoRA adapters",
        text="By name, for prompt.adapter_column; each as adapter.",
    )
    early_stop: Literal["decided", "first_token", "off"] = field(
        23,
        "decided",
        title="Early stop",
        text="Of an answer to sampling.choice. decided: no more tokens are asked for than tell the "
        "labels apart. first_token: one, and the rows that it leaves open are asked again. off: "
        "each label is written out. The labels are the same.",
    )

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        """Also the arguments that are no fields of ours."""
        return name == "env" or name not in cls.model_fields

    @field_validator("model")
    @classmethod
    def _model(cls, value: str) -> str:
        return without_user(value)

    @field_validator("adapter")
    @classmethod
    def _adapter(cls, value: str | None) -> str | None:
        return None if value is None else without_user(value)

    @field_validator("adapters")
    @classmethod
    def _each_adapter(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: without_user(source) for name, source in value.items()}

    @field_validator("replicas", mode="before")
    @classmethod
    def _replicas(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return check_count(value, MOST_REPLICAS)
        if len(value) != 2:
            raise ValueError("write [fewest, most], such as [2, 8]")
        fewest, most = (check_count(number, MOST_REPLICAS, auto=False) for number in value)
        if fewest > most:
            raise ValueError(f"the fewest ({fewest}) are more than the most ({most})")
        return [fewest, most]

    @field_validator("engines_per_gpu", mode="before")
    @classmethod
    def _engines_per_gpu(cls, value: Any) -> Any:
        return check_count(value, 16)

    @field_validator("max_num_seqs", mode="before")
    @classmethod
    def _sequences(cls, value: Any) -> Any:
        return check_count(value, MOST_SEQUENCES)

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
        if self.spans_nodes and self.stage == "vllm":
            if self.gpus_per_replica == 1:
                raise ValueError(
                    "distributed_executor_backend: ray joins several GPUs to one engine; set "
                    "tensor_parallel_size or pipeline_parallel_size, or leave it out"
                )
            if self.device == "cpu":
                raise ValueError(
                    "distributed_executor_backend: ray needs GPUs, and device is cpu; leave it out"
                )
        return self

    @property
    def spans_nodes(self) -> bool:
        """Whether the GPUs of one engine may be on several nodes."""
        return (self.model_extra or {}).get("distributed_executor_backend") == "ray"

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
    file_mb: int = field(8, 256, title="File size", text="Aim for result files, in MiB.", gt=0)
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
        "keep: it is a good row. auto: kept as well, and the report warns of each that had to have "
        "a form (choice, JSON, ...) and is not whole; with schema_model: fail.",
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
        """Columns that parsers fill beside the answer's, by the field that names them."""
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
        """The JSON Schema of each answer, as text. A file or class is looked at anew each time
        unless the job is `resolved`, which holds what it meant when the plan was made."""
        value = self.schema_model
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return value
        return None if value is None else answer_schema.schema_text(value)

    def resolved(self) -> Output:
        """With the text of the schema that a file or class means now; `ConfigError` for one that
        cannot be had, or that no engine would take."""
        if self.schema_model is None:
            return self
        return self.with_form(answer_schema.schema_text(self.schema_model))

    def with_form(self, text: str | None) -> Output:
        """With that text as the schema of each answer."""
        return self if text is None else self.model_copy(update={"schema_model": text})

    @property
    def fails_cut_off(self) -> bool:
        """Whether an answer that was cut off fails its row."""
        return self.on_cut_off == "fail" or self.schema_model is not None


class Stage(Group):
    """Resources of a CPU stage."""

    num_cpus: float = field(1, 0.5, title="CPUs a task", text="Logical CPUs.", gt=0)
    concurrency: int | None = field(
        2, None, title="Most tasks at once", text="By default Ray decides.", gt=0
    )
    memory: int | None = field(3, None, title="Memory a task", text="In bytes.", gt=0)


class Cluster(Group):
    """Which Ray cluster, and what the CPU stages take of it."""

    address: str | None = field(
        1,
        None,
        title="Address",
        text="host:port or auto for a running cluster; by default the environment's RAY_ADDRESS, "
        "else one is started here and stopped at the end.",
    )
    prepare: Stage = field(2, Stage(), title="Prepare stage", text="Read, template, tokens.")
    finish: Stage = field(
        3, Stage(num_cpus=0.25), title="Finish stage", text="Detokenize, postprocess, write."
    )
    job_server: str | None = field(
        4,
        None,
        title="Job server",
        text="http(s)://host:8265 of a Ray cluster: the run works there as a Ray job and outlives "
        "the flow's process; a retry finds it again.",
    )
    on_crash: Literal["reattach", "stop"] = field(
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
        step, and no room beside the prompt."""
        return Sampling(max_tokens=1) if tasks.pools(self.engine.task) else self.sampling

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
        if self.engine.stage == "ray.data.llm":
            raise ValueError("prompt.images: set engine.stage to vllm, which takes them")
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
    def _with_reuse(self) -> BatchJob:
        check_reuse(self)
        return self

    @model_validator(mode="after")
    def _one_answer(self) -> BatchJob:
        if (
            self.engine.stage == "ray.data.llm"
            and (self.sampling.model_extra or {}).get("n", 1) > 1
        ):
            raise ValueError(
                "sampling.n: ray.data.llm gives one answer a row; set engine.stage to vllm"
            )
        own = (self.engine.model_extra or {}).get("reasoning_parser")
        if own and self.output.reasoning_parser not in (None, own):
            raise ValueError(
                f"engine.reasoning_parser {own!r} is not output.reasoning_parser "
                f"{self.output.reasoning_parser!r}; leave out the engine's, which follows the other"
            )
        if self.engine.stage == "ray.data.llm" and "finish_reason" in self.output.extras:
            raise ValueError(
                "output.extras: ray.data.llm does not tell finish reasons; set engine.stage to "
                "vllm, or leave finish_reason out"
            )
        self._check_logprobs()
        if self.engine.stage == "ray.data.llm" and self.output.on_cut_off == "fail":
            raise ValueError(
                "output.on_cut_off: ray.data.llm does not tell which answers were cut off; set "
                "engine.stage to vllm, or on_cut_off to keep"
            )
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
        if self.engine.stage == "ray.data.llm":
            raise ValueError(
                "sampling.logprobs: ray.data.llm does not tell them; set engine.stage to vllm"
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
        if self.engine.stage == "ray.data.llm":
            raise ValueError(
                "output.probabilities: ray.data.llm does not tell them; set engine.stage to vllm"
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
        if self.engine.stage == "ray.data.llm":
            raise ValueError(
                "output.schema_model: ray.data.llm does not tell which answers were cut off; set "
                "engine.stage to vllm"
            )
        return self

    @property
    def fixed_form(self) -> str | None:
        """The field for which all answers must have one form, so that no row may set another."""
        if self.output.schema_model is not None:
            return "output.schema_model"
        return "output.probabilities" if self.output.probabilities else None

    def asked(self) -> dict[str, Any]:
        """The sampling fields of each request, as plain values."""
        return answer_schema.schema_sampling_fields(self.sampling.given(), self.output.answer_form)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "job") -> BatchJob:
        """Validates; raises `ConfigError` with each wrong field, its value and the remedy."""
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from None

    @classmethod
    def from_yaml(cls, path: str | Path) -> BatchJob:
        """Reads a job file; raises `ConfigError` when it is missing, not YAML or not a job."""
        return cls.from_dict(read_job_file(path), str(path))

    def kept(self, names: Sequence[str]) -> list[str]:
        """The input columns (of all `names`) that the result keeps: all but those with images,
        unless output.columns says which."""
        if self.output.columns is not None:
            return self.output.columns
        return [name for name in names if name not in self.prompt.images.columns]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON, without what equals its default."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=CLEAR)
