"""The settings of a job from which the sizes of its run follow: engines, GPUs, shards, context."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from prefect_raybatch.spec.engine import EngineFields

Grammar = Literal["", "xgrammar", "guidance"]


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """The properties of a job's prompts and answers from which the tokens of a row are estimated.

    The row's own columns are not included. `shared_characters` begin every prompt (the system
    prompt, and the template up to its first column); `own_characters` are the rest of the template.
    `caches`: vLLM's prefix cache computes shared prefixes once. `form` is the backend of the
    grammar that answers follow, "" without one. `text`: vLLM detokenizes answers. `out` is the
    maximum number of tokens of all answers to a row, and `out_why` the reason for this number.
    `expected` is the number of tokens that the answers probably take; 0 stands for `out`.
    """

    shared_characters: int
    own_characters: int
    images: bool
    caches: bool
    form: Grammar
    text: bool
    out: int
    out_why: str
    expected: float


@dataclass(frozen=True, kw_only=True)
class SizeSpec:
    """The sizes that a job sets; None for a size that is left to `sizing`.

    `replicas` is (fewest, most) copies of the model. `tensor` is the number of GPUs that share each
    layer, `pipeline` the number of pipeline stages. `spans_nodes`: the GPUs of a copy may be on
    several nodes. `context` is the context length in tokens, None for the model's own.
    `vllm_arguments` are the job's other engine arguments, `model` is the model's name for messages.
    `cpus` are the logical CPUs of an engine, `stage_cpus` those of one prepare task and one finish
    task together.
    """

    model: str
    device: Literal["auto", "gpu", "cpu"]
    replicas: tuple[int, int] | None
    tensor: int
    pipeline: int
    engines_per_gpu: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_concurrent_batches: int | None
    rows_per_shard: int | None
    batch_size: int
    context: int | None
    accelerator: str | None
    spans_nodes: bool
    pools: bool
    cpus: float
    stage_cpus: float
    vllm_arguments: EngineFields = field(repr=False)  # a token may be among them
    row: RowSpec

    @property
    def gpus_per_replica(self) -> int:
        return self.tensor * self.pipeline

    @property
    def takes_whole_prompts(self) -> bool:
        """True if a step must hold a whole prompt (`engine.enable_chunked_prefill: false`)."""
        return self.vllm_arguments.get("enable_chunked_prefill") in (False, 0)

    @property
    def least_sequences(self) -> int:
        """Return the least `max_num_seqs` that vLLM accepts: `engine.max_num_active_seqs` or 1."""
        active = self.vllm_arguments.get("max_num_active_seqs")
        return active if isinstance(active, int) else 1

    def device_for(self, gpus: float) -> Literal["gpu", "cpu"]:
        """Return the device of the engines in a cluster of `gpus` GPUs."""
        if self.device != "auto":
            return self.device
        return "gpu" if gpus >= 1 else "cpu"

    def with_one_engine(self) -> SizeSpec:
        """Return the sizes of a trial: one engine, alone on its GPUs."""
        return replace(self, replicas=(1, 1), engines_per_gpu=1)

    def without_engine(self) -> SizeSpec:
        """Return the sizes of a run that sends no requests to a model.

        It needs no GPU, and a fraction of a CPU for lookups.
        """
        alone = replace(self.with_one_engine(), device="cpu", tensor=1, pipeline=1)
        return replace(alone, cpus=0.1)
