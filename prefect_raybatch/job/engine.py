"""Which model, on what, and how it is driven: `engine` of a job file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, ModelWrapValidatorHandler, field_validator, model_validator

from prefect_raybatch.job import tasks, vllm_fields
from prefect_raybatch.job.checks import check_count, refuse_unknown, unknown_too, without_user
from prefect_raybatch.job.form import field
from prefect_raybatch.job.group import Group

MOST_REPLICAS = 4096

MOST_SEQUENCES = 65536


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
        text="Most rows an engine computes at one time. auto: 256, or up to 1024 where the answers "
        "and the GPU's memory make more of them pay.",
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
    order: Literal["auto", "input", "run"] = field(
        16,
        "auto",
        title="Order in a shard",
        text="auto: rows that share a prefix go to the engine together, the longest first. input: "
        "as they stand. run: as auto, over all rows of the run and not only of a shard, up to 50 "
        "million; each distinct request is asked first, and rows look their answers up. The result "
        "is in input order either way.",
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

    task: tasks.TaskName = field(
        19,
        "generate",
        title="Task",
        text="generate: text. embed: a vector. classify: a label and the probability of each. "
        "score: how well two texts fit each other. docs/tasks.md.",
    )
    adapter: str | None = field(
        20,
        None,
        title="LoRA adapter",
        text="For all rows: local or s3:// folder as peft writes it, or Hugging Face name "
        "(owner/name, hf://owner/name@revision); pinned by its content in the plan.",
    )
    adapters: dict[str, str] = field(
        21,
        {},
        title="LoRA adapters",
        text="By name, for prompt.adapter_column; each as adapter.",
    )
    early_stop: Literal["decided", "first_token", "off"] = field(
        22,
        "decided",
        title="Early stop",
        text="Of an answer to sampling.choice. decided: no more tokens are asked for than tell the "
        "labels apart. first_token: one, and the rows that it leaves open are asked again. off: "
        "each label is written out. The labels are the same.",
    )

    @classmethod
    def _may_hold_keys(cls, name: str) -> bool:
        """Include arguments that are no fields of ours."""
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

    @field_validator("early_stop", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads it

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

    @model_validator(mode="wrap")
    @classmethod
    def _unknown_too(cls, value: Any, handler: ModelWrapValidatorHandler[Engine]) -> Engine:
        with unknown_too(cls, value, vllm_fields.engine_fields):
            return handler(value)

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
        if self.spans_nodes:
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
    def given(self) -> dict[str, Any]:
        """Return vLLM's engine arguments that have no field here."""
        return dict(self.model_extra or {})

    @property
    def spans_nodes(self) -> bool:
        """Return whether the GPUs of one engine may be on several nodes."""
        return self.given.get("distributed_executor_backend") == "ray"

    @property
    def context(self) -> int | None:
        """Return `max_model_len` in tokens; None for the model's own. An `auto` is settled later
        (`RunSpec.decide`)."""
        return None if self.max_model_len == "auto" else self.max_model_len

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size
