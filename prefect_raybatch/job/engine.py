"""The model, its hardware and its settings: `engine` of a job file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, ModelWrapValidatorHandler, field_validator, model_validator

from prefect_raybatch.job import tasks
from prefect_raybatch.job.checks import (
    check_count,
    refuse_unknown,
    with_unknown_fields,
    without_user,
)
from prefect_raybatch.job.endpoint import ModelEndpoint
from prefect_raybatch.job.group import Group, field, field_check
from prefect_raybatch.job.vllm import fields as vllm_fields

MOST_REPLICAS = 4096

MOST_SEQUENCES = 65536


class Engine(Group):
    """The model and how vLLM runs it. You can add any engine argument of vLLM."""

    model_config = ConfigDict(extra="allow", validate_default=True, protected_namespaces=())

    model: str = field(
        "demo",
        title="Model",
        text="Hugging Face name, local folder or s3:// folder of the model. Default: "
        "demo, the small bundled model.",
    )
    revision: str | None = field(
        None,
        title="Model revision",
        text="Branch, tag or commit of a Hugging Face model. It is resolved to a "
        "commit when the run is planned.",
    )
    device: Literal["auto", "gpu", "cpu"] = field(
        "auto",
        title="Device",
        text="Hardware for the engines. auto: GPUs if the cluster has any, else CPUs.",
    )
    replicas: int | Literal["auto"] | list[int] = field(
        "auto",
        title="Replicas",
        text="Number of copies of the model; each uses tensor_parallel_size * "
        "pipeline_parallel_size GPUs, or a CPU. auto: all GPUs of the cluster, or one copy on a "
        "CPU. [fewest, most]: as many as the cluster has room for.",
    )
    tensor_parallel_size: int = field(
        1,
        title="Tensor parallel size",
        text="Number of GPUs that each layer of the model is split across.",
        gt=0,
    )
    pipeline_parallel_size: int = field(
        1,
        title="Pipeline parallel size",
        text="Number of stages that the layers of the model are divided into, each on "
        "its own GPUs.",
        gt=0,
    )
    max_model_len: int | Literal["auto"] | None = field(
        None,
        title="Context length",
        text="Maximum length of prompt and answer together, in tokens. Default: the "
        "model's own limit. auto: a length that fits max_model_len_percentile of a sample of the "
        "rows, fixed when the run is planned.",
    )
    max_num_seqs: int | Literal["auto"] = field(
        "auto",
        title="Concurrent sequences",
        text="Maximum number of requests that an engine processes at the same time. "
        "auto: 256, or up to 1024 if the answers and the GPU memory make it worthwhile.",
    )
    max_num_batched_tokens: int | None = field(
        None,
        title="Tokens per step",
        text="Maximum number of tokens in one engine step. Default: 16384 on a GPU "
        "(less if memory is short), 4096 on a CPU; at least max_num_seqs.",
        gt=0,
    )
    batch_size: int = field(
        256,
        title="Batch size",
        text="Minimum number of rows per shard if source.rows_per_shard is not set.",
        gt=0,
    )
    max_concurrent_batches: int | None = field(
        None,
        title="Concurrent shards",
        text="Number of shards in flight per engine. Default: enough for max_num_seqs "
        "rows, and at least 2.",
        gt=0,
    )
    accelerator_type: str | None = field(
        None,
        title="Accelerator type",
        text="GPU model to run on, by its name in Ray, such as H100 or L4. Default: any.",
    )
    num_cpus: float = field(
        1, title="CPUs per engine", text="Logical CPUs that Ray reserves for each engine.", gt=0
    )
    env: dict[str, str] = field(
        {},
        title="Environment variables",
        text="Environment variables of the engine process. Example: {NCCL_DEBUG: WARN}.",
    )
    engines_per_gpu: int | Literal["auto"] = field(
        "auto",
        title="Engines per GPU",
        text="Number of engines that share one GPU and its memory; together they form "
        "one replica. Several can be faster for a small model with short answers, where one CPU "
        "core per engine is the bottleneck. auto: as many as fit and improve throughput.",
    )
    learn: bool = field(
        True,
        title="Learn from earlier runs",
        text="Choose engines_per_gpu and max_num_seqs also by what earlier runs of the job "
        "measured on GPUs; sizes that the job sets stay. A run may try another choice on a fifth "
        "of its shards.",
    )
    order: Literal["auto", "input", "run"] = field(
        "auto",
        title="Request order",
        text="Order in which requests are sent; the result is always in input order. "
        "auto: group the rows of a shard that share a prefix, longest first. input: keep the "
        "input order. run: group the rows of the whole run (up to 50 million) and send each "
        "distinct request once.",
    )
    deduplicate: bool = field(
        True,
        title="Deduplicate requests",
        text="Send identical requests within a shard once and use the answer for all "
        "their rows. Applies only to greedy sampling (temperature 0).",
    )

    max_model_len_percentile: float = field(
        0.99,
        title="Rows that must fit",
        text="Fraction of the sampled rows that max_model_len: auto must fit. 1.0 "
        "means the longest sampled row plus 10 %.",
        ge=0.5,
        le=1.0,
    )

    task: tasks.TaskName = field(
        "generate",
        title="Task",
        text="What the model produces for a row. generate: text. embed: an embedding. "
        "classify: a label and the probability of every label. score: how well two texts match.",
    )
    classifier: str | None = field(
        None,
        title="Classifier",
        text="JSON file of raybatch distill, in a folder or in a store. The model embeds each row, "
        "and the classifier answers with a label: as the first model of output.escalate, or alone "
        "with task: embed. The plan of the run keeps a copy, and each attempt is refused if the "
        "file differs.",
        min_length=1,
    )
    adapter: str | None = field(
        None,
        title="LoRA adapter",
        text="Adapter for all rows: a local or s3:// folder in peft format, or a "
        "Hugging Face name (owner/name or hf://owner/name@revision). Its content is pinned when "
        "the run is planned.",
    )
    adapters: dict[str, str] = field(
        {},
        title="LoRA adapters",
        text="Adapters by name, for prompt.adapter_column. Each value has the same "
        "form as adapter.",
    )
    early_stop: Literal["decided", "first_token", "off"] = field(
        "decided",
        title="Early stop",
        text="When to stop generating an answer to sampling.choice; the labels are "
        "the same in every case. decided: once the label is unambiguous. first_token: after one "
        "token; ambiguous rows are sent again. off: generate the complete label.",
    )
    endpoint: ModelEndpoint = field(
        ModelEndpoint(),
        title="Hosted model",
        text="HTTP server with the OpenAI API that answers the rows in place of vLLM. Default: "
        "engines of this run.",
    )

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        """Return whether field `name` may hold credentials.

        The field `env` and the arguments of vLLM that this class does not define may hold some.
        """
        return name == "env" or name not in cls.model_fields

    _model = field_check("model", "adapter", by=without_user)

    @field_validator("adapters")
    @classmethod
    def _each_adapter(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: without_user(source) for name, source in value.items()}

    @field_validator("early_stop", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        return "off" if value is False else value  # as YAML reads it

    @field_validator("replicas", mode="before")
    @classmethod
    def _replicas(cls, value: object) -> object:
        if not isinstance(value, (list, tuple)):
            return check_count(value, MOST_REPLICAS)
        if len(value) != 2:
            raise ValueError("must be [fewest, most]; write for example [2, 8]")
        fewest, most = (check_count(number, MOST_REPLICAS, auto=False) for number in value)
        if fewest > most:
            raise ValueError(
                f"[fewest, most]: fewest ({fewest}) exceeds most ({most}); write the smaller "
                "number first"
            )
        return [fewest, most]

    _engines_per_gpu = field_check(
        "engines_per_gpu", by=lambda value: check_count(value, 16), mode="before"
    )

    _sequences = field_check(
        "max_num_seqs", by=lambda value: check_count(value, MOST_SEQUENCES), mode="before"
    )

    @field_validator("max_model_len")
    @classmethod
    def _length(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value <= 0:
            raise ValueError("must be greater than 0, or auto")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _unknown_too(cls, value: object, handler: ModelWrapValidatorHandler[Engine]) -> Engine:
        with with_unknown_fields(cls, value, vllm_fields.engine_fields):
            return handler(value)

    @model_validator(mode="after")
    def _known(self) -> Engine:
        _check_shared_gpu(self)
        refuse_unknown(
            self.vllm_arguments, vllm_fields.engine_fields(), set(type(self).model_fields)
        )
        _check_spanning(self)
        return self

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """Return the vLLM arguments that the job sets besides the fields of this class, by name."""
        return dict(self.model_extra or {})

    @property
    def spans_nodes(self) -> bool:
        """Return whether the GPUs of one engine may be on several nodes."""
        return self.vllm_arguments.get("distributed_executor_backend") == "ray"

    @property
    def context(self) -> int | None:
        """`max_model_len` as a number of tokens; None if it is not set or `auto`.

        For `auto`, the number is decided when a run is planned.
        """
        return None if self.max_model_len == "auto" else self.max_model_len

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _check_shared_gpu(engine: Engine) -> None:
    """Raise ValueError if several engines share a GPU although each engine uses several GPUs."""
    shares = engine.engines_per_gpu != "auto" and engine.engines_per_gpu > 1
    if shares and engine.gpus_per_replica > 1:
        raise ValueError(
            "engines_per_gpu needs engines that use a single GPU; set tensor_parallel_size and "
            "pipeline_parallel_size to 1, or engines_per_gpu to 1"
        )


def _check_spanning(engine: Engine) -> None:
    """Raise ValueError if an engine that may span nodes has only one GPU, or runs on CPUs."""
    if not engine.spans_nodes:
        return
    if engine.gpus_per_replica == 1:
        raise ValueError(
            "distributed_executor_backend: ray needs an engine with several GPUs; raise "
            "tensor_parallel_size or pipeline_parallel_size, or remove it"
        )
    if engine.device == "cpu":
        raise ValueError(
            "distributed_executor_backend: ray needs GPUs, and device is cpu; remove it"
        )


TRY_FP8 = "try-fp8"
PRECISION_FIELDS = ("quantization", "kv_cache_dtype")  # of vLLM's engine: weights, KV cache


def precision_tries(engine: Engine) -> list[dict[str, str]]:
    """Return the settings {engine argument: "fp8"} to try in order, until one passes.

    The first setting has all engine arguments that the job sets to `try-fp8`. If there are several,
    a setting for each single argument follows. Returns [] if there are none.
    """
    names = [name for name in PRECISION_FIELDS if engine.vllm_arguments.get(name) == TRY_FP8]
    if not names:
        return []
    together = dict.fromkeys(names, "fp8")
    return [together, *({name: "fp8"} for name in names if len(names) > 1)]


def without_tries(engine: Engine) -> dict[str, Any]:
    """Return the engine's vLLM arguments, {name: value}, except those whose value is `try-fp8`."""
    undecided = {name for tried in precision_tries(engine) for name in tried}
    return {name: value for name, value in engine.vllm_arguments.items() if name not in undecided}
