"""Everything that this package uses of vLLM beyond its documented interface, in one file.

A new version of vLLM may move any of it: `tests/stages/test_vllm_internals.py` looks for each name
in the installed vLLM and says which one is gone; `make versions` does so for each supported vLLM.
vLLM is imported where it is needed, because that takes over ten seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast, get_type_hints

from prefect_raybatch.spec.engine import EngineFields
from prefect_raybatch.spec.request import SamplingFields
from prefect_raybatch.stages.vllm import forking
from prefect_raybatch.stages.vllm.shorter_start import share_kernel_cache, with_fewer_graphs
from prefect_raybatch.uncollected import import_all, uncollected

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import ReasoningConfig, StructuredOutputsConfig
    from vllm.lora.request import LoRARequest

    from prefect_raybatch.stages.block import Messages, Tokenizer

# Loggers whose errors never explain an engine's death. The first dumps the input of a failing step;
# the second reports a row whose grammar cannot be built, which the engine survives.
NOT_THE_CAUSE = ("vllm.logging_utils", "vllm.v1.structured_output")
# {text in an INFO message of vLLM's log: phase of an engine's start that begins then}. "compile" is
# vLLM's trial run with the most rows, which compiles the model unless it is eager; "graphs" is all
# that follows.
PHASE_LINES = {
    "Starting to load model": "weights",
    "Model loading took": "compile",  # if the model is on a GPU
    "Warming up model for the compilation": "compile",  # if it is on a CPU
    "KV cache size: ": "graphs",  # after "GPU", or after the kind of device (vLLM 0.30)
}

# Modules imported both by the front (the process that drives an engine) and by the core's process.
SHARED_MODULES = ("vllm.engine.arg_utils", "vllm.v1.engine.core")

# Modules that only the front imports.
FRONT_MODULES = (
    "vllm.engine.llm_engine",
    "vllm.v1.metrics.prometheus",
    "vllm.renderers.hf",
    "pandas",
    "pyarrow.compute",
)

# Modules that only the core imports.
CORE_MODULES = (
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.v1.structured_output.backend_outlines",
    "vllm.v1.structured_output.backend_lm_format_enforcer",
    "vllm.compilation.backends",
    "vllm.compilation.caching",
    "vllm.compilation.piecewise_backend",
    "vllm.model_executor.layers.pooler",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.gpu_ubatch_wrapper",
)


class Params(Protocol):
    """The part of vLLM's `SamplingParams` that is used here.

    A pooling request has `PoolingParams`, without these fields.
    """

    n: int
    detokenize: bool
    logprobs: int | None
    logprob_token_ids: list[int] | None


class Logprob(Protocol):
    """The part of vLLM's `Logprob` that is used here."""

    logprob: float


class CompletionOutput(Protocol):
    """The part of vLLM's `CompletionOutput` that is used here."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    logprobs: Sequence[Mapping[int, Logprob]] | None  # per token of the answer: {token id: Logprob}


class RequestOutput(Protocol):
    """The part of vLLM's `RequestOutput` that is used here."""

    request_id: str
    finished: bool
    outputs: Sequence[CompletionOutput]
    num_cached_tokens: int | None


class SchedulerStats(Protocol):
    """The part of vLLM's `SchedulerStats` that is used here."""

    num_running_reqs: int
    kv_cache_usage: float


class LLMEngine(Protocol):
    """The part of vLLM's `LLMEngine` that is used here and by the stepper."""

    vllm_config: Any
    engine_core: Any

    def add_request(
        self,
        request_id: str,
        prompt: Mapping[str, object],
        params: Params,
        *,
        lora_request: LoRARequest | None = ...,
    ) -> object: ...

    def step(self) -> Sequence[RequestOutput]: ...


def start(arguments: EngineFields) -> LLMEngine:
    """Start and return a vLLM engine with these fields of `EngineArgs`."""
    with uncollected():
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
    import_all(FRONT_MODULES)

    fields = dict(arguments)
    if current_platform.is_cuda() and (gpu := current_platform.get_device_capability()) is not None:
        fields = dict(with_fewer_graphs(fields, gpu.major))
        share_kernel_cache()
    for name in ("structured_outputs_config", "reasoning_config"):
        if isinstance(given := fields.get(name), dict):  # EngineArgs sets attributes of it
            fields[name] = _class_of(name)(**given)
    context = forking.context_of_core()
    with _core_made_by(context), _models_inspected_by(context):
        return cast(LLMEngine, vllm.LLMEngine.from_engine_args(EngineArgs(**fields)))


def _class_of(name: str) -> type[StructuredOutputsConfig | ReasoningConfig]:
    from vllm.config import ReasoningConfig, StructuredOutputsConfig

    structured = name == "structured_outputs_config"
    return StructuredOutputsConfig if structured else ReasoningConfig


@contextlib.contextmanager
def _core_made_by(context: forking.ForkedContext | None) -> Iterator[None]:
    """Make vLLM start its core process with this multiprocessing context, in the `with` block.

    None leaves the choice to vLLM.
    """
    if context is None:
        yield
        return
    utils: Any = importlib.import_module("vllm.v1.engine.utils")
    original, utils.get_mp_context = utils.get_mp_context, lambda: context
    try:
        yield
    finally:
        utils.get_mp_context = original


@contextlib.contextmanager
def _models_inspected_by(context: forking.ForkedContext | None) -> Iterator[None]:
    """Make vLLM inspect the capabilities of model classes in a fork, in the `with` block.

    vLLM inspects a class once, and caches the result in a folder. By itself (also with None) it
    starts a new Python for that, which imports vLLM: 12 to 15 s on machines with GPUs.
    """
    if context is None:
        yield
        return
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    original = registry._run_in_subprocess

    def inspected(inspect: Callable[[], Any]) -> Any:
        try:
            return context.call(inspect)
        except forking.CallFailed:  # vLLM's own way reports the reason
            return original(inspect)

    registry._run_in_subprocess = inspected
    try:
        yield
    finally:
        registry._run_in_subprocess = original


def most_sequences(engine: LLMEngine) -> int:
    """Return the most sequences that the engine may run at once (`max_num_seqs`)."""
    return int(engine.vllm_config.scheduler_config.max_num_seqs)


def sampling_params(fields: SamplingFields) -> Params:
    """Return vLLM's `SamplingParams`, set to return whole answers only, not token by token.

    Raises `ValueError` for a value of the wrong type. vLLM would accept it, and a text as seed, for
    example, would end the engine.
    """
    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    fields, types = dict(fields), _types_of(SamplingParams)
    if isinstance(structured := fields.get("structured_outputs"), dict):
        fields["structured_outputs"] = StructuredOutputsParams(**structured)
    for name, value in fields.items():
        if name in types and name != "structured_outputs":
            try:
                fields[name] = msgspec.convert(value, types[name])
            except msgspec.ValidationError as error:
                raise ValueError(f"sampling.{name}: {error}") from None
    fields["output_kind"] = RequestOutputKind.FINAL_ONLY
    fields["skip_clone"] = True
    return cast(Params, SamplingParams(**fields))


@lru_cache(maxsize=4)
def _types_of(kind: type) -> dict[str, type]:
    return get_type_hints(kind)  # takes 0.2 ms, and is called for each set of fields


def pooling_params(fields: SamplingFields) -> Params:
    """Return vLLM's `PoolingParams` with these fields, which include `task`.

    vLLM copies the parameters of each request, which takes 60 us. These return themselves as their
    copy, because vLLM only fills in defaults, and the same for each request.
    """
    return cast(Params, _uncopied_pooling_params()(**fields))


@lru_cache(maxsize=1)
def _uncopied_pooling_params() -> Any:
    from vllm.pooling_params import PoolingParams

    class UncopiedPoolingParams(PoolingParams):
        def clone(self) -> PoolingParams:
            return self

    return UncopiedPoolingParams


def lora_request(name: str, number: int, path: str) -> LoRARequest:
    """Return vLLM's request for a LoRA adapter, with its unique name and number and its folder."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def sequences(params: Params) -> int:
    """Return how many sequences a request takes: one per answer, or one for a pooling request."""
    return int(getattr(params, "n", 1))


def vector_of(output: RequestOutput) -> np.ndarray | None:
    """Return the vector (float32[dimension]) of a pooling request; None for generated tokens."""
    data = getattr(output.outputs, "data", None)
    return None if data is None else data.float().cpu().numpy().reshape(-1)


def first_logprobs(output: RequestOutput) -> dict[int, float] | None:
    """Return {token id: log probability} at the first token of the first answer.

    None if the engine reported no log probabilities.
    """
    steps = output.outputs[0].logprobs
    if not steps:
        return None
    return {int(token): float(found.logprob) for token, found in steps[0].items()}


def answer_logprobs(answer: CompletionOutput) -> list[dict[int, float]]:
    """Return {token id: log probability} for each token of an answer, the chosen token first."""
    return [
        {int(token): float(found.logprob) for token, found in step.items()}
        for step in answer.logprobs or ()
    ]


def accept_always(params: Params) -> None:
    """Make vLLM skip its check of `params` from now on, because it has accepted them once.

    `params` must not be changed later, nor be used with another engine. vLLM's check parses the
    grammar or JSON schema for every row (16 us for nine choices, more than the rest of add_request
    for a large schema).
    """
    accepted: Any = params
    if not hasattr(accepted, "__dict__"):  # of a pooling request: vLLM parses nothing in it
        return
    if "verify" not in accepted.__dict__:
        accepted.verify = _accept


def _accept(*_: object) -> None:
    """Do nothing, in place of `SamplingParams.verify`."""


def keep_scheduler_stats(engine: Any, keep: Callable[[SchedulerStats], None], front: bool) -> None:
    """Make vLLM call `keep` in each step with the statistics of its scheduler.

    `front`: whether vLLM's own statistics in this process stay on. `keep` is never called if this
    version of vLLM has no method that gets the scheduler's statistics.
    """
    processor: Any = getattr(engine, "output_processor", None)
    if processor is not None and not front:
        engine.log_stats = processor.log_stats = False
        engine.logger_manager = None
    update = getattr(processor, "update_scheduler_stats", None)  # called in each step
    if update is None:
        return  # this version of vLLM has another name: only these figures are missing then

    def kept(stats: SchedulerStats | None) -> None:
        if stats is not None:
            keep(stats)
        update(stats)

    processor.update_scheduler_stats = kept


def running(engine: LLMEngine, stats: SchedulerStats | None) -> tuple[int, float] | None:
    """Return (number of running sequences, share of the KV cache in use); None if unknown.

    The figures are the scheduler's if the core is in this process, else those in `stats`.
    """
    core = getattr(engine.engine_core, "engine_core", None)
    scheduler = getattr(core, "scheduler", None)
    if scheduler is not None:
        return len(scheduler.running), scheduler.kv_cache_manager.usage
    if stats is not None:
        return stats.num_running_reqs, stats.kv_cache_usage
    return None


def shut_down(engine: LLMEngine, waiting: bool) -> None:
    """End the engine's core, ignoring what vLLM raises while it dies.

    With `waiting`, also wake a thread that waits in step() of an engine with a core process.
    """
    core = engine.engine_core
    with contextlib.suppress(Exception):
        core.shutdown()
    queue = getattr(core, "outputs_queue", None)
    if queue is not None and waiting:
        queue.put_nowait(RuntimeError("closed"))


def free_process() -> None:
    """Free GPU memory and process groups, so that this process can start another engine.

    vLLM keeps its process groups in globals. After an out-of-memory error, a new engine would fail
    because of them (measured with vLLM 0.29).
    """
    with contextlib.suppress(Exception):
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


def gpu_is_lost() -> bool:
    """Return whether CUDA refuses all further work of this process, as after a kernel's error."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def engine_is_gone(error: BaseException) -> bool:
    """Return whether an error of add_request means a dead engine, not a rejected request."""
    kind = type(error)
    return kind.__name__ == "EngineDeadError" or kind.__module__.split(".")[0] == "zmq"


def gpu_bytes() -> int:
    """Return the total memory in bytes of the GPU that this process sees."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


class ReasoningParser(Protocol):
    """The part of vLLM's `ReasoningParser` that is used here."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool: ...


class ToolCall(Protocol):
    """The part of vLLM's `FunctionCall` that is used here."""

    id: str | None
    name: str
    arguments: str


class Parser(Protocol):
    """The part of vLLM's `Parser` that is used here; a parser is for one answer."""

    def parse(
        self,
        model_output: str,
        request: object,
        enable_auto_tools: bool = ...,
        model_output_token_ids: Sequence[int] = ...,
    ) -> tuple[str | None, str | None, Sequence[ToolCall] | None]: ...


RANDOM_ID = "chatcmpl-tool-"  # prefix of the random ids that vLLM gives to tool calls


@lru_cache(maxsize=4)
def quick_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that caches its vocabulary instead of building it for each parser."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    return cast("Tokenizer", get_cached_tokenizer(cast(Any, tokenizer)))


def reasoning_parser(
    name: str, tokenizer: Tokenizer, arguments: Mapping[str, object]
) -> ReasoningParser:
    """Return vLLM's reasoning parser `name`; `arguments` are the chat template's."""
    from vllm.parser.parser_manager import ParserManager

    kind: Any = ParserManager.get_reasoning_parser(name)
    return cast(ReasoningParser, kind(tokenizer, chat_template_kwargs=dict(arguments)))


def parser_maker(
    reasoning: str | None,
    tool: str | None,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, object]] | None,
    arguments: Mapping[str, object],
) -> Callable[[], tuple[Parser, object]]:
    """Return a function that returns (a new parser for one answer, the request for its `parse`).

    `reasoning` and `tool` are vLLM's names of the parsers, `tools` the tools that the prompt
    offers, and `arguments` the chat template's arguments.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    harmony = reasoning == "openai_gptoss" or tool == "openai"
    kind: Any = ParserManager.get_parser(
        tool, reasoning, enable_auto_tools=True, is_harmony=harmony
    )
    given = {"tools": [dict(one) for one in tools]} if tools else {}
    request = ChatCompletionRequest(
        messages=[], chat_template_kwargs=dict(arguments), **cast(Any, given)
    )
    request.tool_choice = "auto" if tools else None  # None: parse too, as prompts may name tools

    def made() -> tuple[Parser, object]:
        parser = kind(tokenizer, request.tools, chat_template_kwargs=dict(arguments))
        return cast(Parser, parser), request

    return made


def version() -> str:
    """Return vLLM's version; only the same version can unpickle objects of vLLM."""
    import vllm

    return str(vllm.__version__)


Render = Callable[["Messages"], Mapping[str, Any]]


def image_renderer(
    path: str,
    revision: str | None,
    arguments: EngineFields,
    bounded: Callable[[Callable[[], object]], object],
) -> Render | None:
    """Return a function that renders one conversation with decoded images to model input.

    None if the model takes no images. Needs no GPU.

    `path` and `revision` name the model; `arguments` are the engine's. `bounded` gets a function
    that applies the chat template, and calls it under a time limit.
    """
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.renderers import renderer_from_config
    from vllm.renderers.params import ChatParams

    config = EngineArgs(model=path, revision=revision, **arguments).create_model_config()
    if not config.is_multimodal_model:
        return None
    config.quantization = None  # it concerns the weights, which are not loaded here
    # A vLLM built for GPUs finds no device on a node without GPUs, and would fail.
    device = DeviceConfig(device=cast(Any, current_platform.device_type or "cpu"))
    made: Any = renderer_from_config(VllmConfig(model_config=config, device_config=device))
    apply_template = made.render_messages
    made.render_messages = lambda *given: bounded(partial(apply_template, *given))
    chat = ChatParams()
    # The length of the prompt with its images is checked later, with our own error message.
    tokens = replace(made.default_chat_tok_params, max_total_tokens=None)

    def render(messages: Messages) -> Mapping[str, Any]:
        _, (one,) = made.render_chat([messages], chat, tokens)
        return cast(Mapping[str, Any], one)

    return render
