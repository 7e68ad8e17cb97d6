"""The model that a run asks for, and its engines, except for their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefect_raybatch.job.tasks import TaskName, pools
from prefect_raybatch.spec.endpoint import EndpointSpec

# Fields of vLLM's EngineArgs by name; vLLM defines the type of each.
EngineFields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """The model that answers, and the arguments to load it with.

    `name` is a Hugging Face name, a folder, an s3:// folder or `demo`. `context` is the context
    length in tokens, None for the model's own. `context_auto`: the length is still to be chosen, so
    that the fraction `context_share` of the rows fits. `adapter` is the LoRA adapter for all rows;
    `adapters` maps the names that rows may choose to the sources of adapters. `vllm_arguments` are
    the engine arguments that the job sets under vLLM's own names; `env` are the environment
    variables of its engines. `endpoint` is the server of a hosted model, None if the run starts
    engines.
    """

    name: str
    revision: str | None
    task: TaskName
    context: int | None
    context_auto: bool
    context_share: float
    adapter: str | None
    adapters: Mapping[str, str]
    vllm_arguments: EngineFields = field(repr=False)  # a token may be among them
    env: Mapping[str, str]
    endpoint: EndpointSpec | None = None

    @property
    def pools(self) -> bool:
        """Return whether the model pools (vectors, labels, scores) instead of generating tokens."""
        return pools(self.task)


def core_in_actor(model: ModelRequest, gpus: int) -> bool:
    """Return whether vLLM's core runs in the process of an engine's actor, on GPUs.

    It does for a pooling task on one GPU. The core of several GPUs has further processes, and vLLM
    binds only separate processes to NUMA nodes. `gpus` is the number of GPUs of one engine.
    """
    return model.pools and gpus == 1 and not model.vllm_arguments.get("numa_bind")


EarlyStop = Literal["decided", "first_token", "off"]


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The model that answers, how requests reach its engines, and when an answer is complete.

    `sort`: rows of a shard enter the engine ordered by prefix and length. `merge`: equal requests
    of a shard are sent once. `early_stop` says when an answer that must be one of several labels is
    complete: `decided`, once its tokens determine the label; `first_token`, after one token, with a
    second request if this leaves several labels; `off`, when the label is written out. `tries` are
    engine arguments for lower precisions, the preferred first: a trial on sampled rows chooses one
    before the first commit; () if the precision is fixed. `learn`: sizes that the job leaves open
    may follow from what earlier runs of the job measured.
    """

    model: ModelRequest
    sort: bool
    merge: bool
    early_stop: EarlyStop
    tries: tuple[Mapping[str, str], ...]
    learn: bool = False
