"""Settings that shorten the start of an engine on GPUs: fewer CUDA graphs, memory measured once.

Figures: docs/decisions/shorter-starts.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefect_raybatch.spec.engine import EngineFields

MOST_TOKENS = 512  # of a step with a graph, also in vLLM's own list
SMALL_GRAPHS = (1, 2, 4, 8, 16, 32, 48, 64, 96)
GRAPHS_APART = 32  # tokens between two larger sizes

MEASURED_ONCE = {"VLLM_ENABLE_STARTUP_PLAN": "1"}
"""Has vLLM keep the memory that it measured, and skip the measurement in later starts."""

# They change how much memory is left, but not the key under which vLLM keeps what it measured.
_NOT_IN_KEY = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "limit_mm_per_prompt",
    "mm_processor_kwargs",
)


def with_fewer_graphs(arguments: EngineFields) -> EngineFields:
    """Return an engine's arguments with sizes of CUDA graphs, unless the job sets any.

    `arguments` hold `max_num_seqs`. A step that fits no size is padded to the next one. vLLM
    captures 51 sizes up to `MOST_TOKENS`, each twice; these are 22.
    """
    if any(arguments.get(n) for n in ("compilation_config", "enforce_eager", "speculative_config")):
        return arguments
    most = min(MOST_TOKENS, 2 * arguments["max_num_seqs"])
    large = range(128, most + 1, GRAPHS_APART)
    sizes = [size for size in (*SMALL_GRAPHS, *large) if size <= most]
    return {**arguments, "compilation_config": {"cudagraph_capture_sizes": sizes}}


def memory_settings(arguments: EngineFields, images: bool) -> Mapping[str, str]:
    """Return variables with which an engine measures its memory once, empty where it must anew.

    `arguments` are the job's. vLLM compares the model, most arguments, the GPU and its free memory
    before it trusts what it measured.
    """
    depends = images or any(arguments.get(name) is not None for name in _NOT_IN_KEY)
    return {} if depends else MEASURED_ONCE
