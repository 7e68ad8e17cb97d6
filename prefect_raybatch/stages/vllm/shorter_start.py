"""Settings that shorten the start of an engine on GPUs.

They are fewer or no CUDA graphs, a memory measurement that is kept, and one cache of kernels for
all engines. Figures: docs/decisions/shorter-starts.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from prefect_raybatch.spec.engine import EngineFields, ModelRequest

MOST_TOKENS = 512  # of a step with a graph in vLLM's own list; 1,024 on Blackwell
BLACKWELL = 10  # the major number of its compute capability
SMALL_GRAPHS = (1, 2, 4, 8, 16, 32, 48, 64, 96)
GRAPHS_APART = 32  # tokens between two larger sizes
DECIDE_GRAPHS = (
    "compilation_config",
    "cudagraph_capture_sizes",
    "enforce_eager",
    "max_cudagraph_capture_size",
    "performance_mode",
    "speculative_config",
)

MEASURED_ONCE = "VLLM_ENABLE_STARTUP_PLAN"
"""Environment variable that makes vLLM store its memory measurement and use it at later starts."""

IN_KEY = {
    "dtype",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "quantization",
}
"""Engine arguments with which a stored memory measurement stays valid.

vLLM compares them with those of the measurement, or they do not affect memory. vLLM does not
compare other arguments that affect memory, such as gpu_memory_utilization, nor any environment
variable.
"""


def with_fewer_graphs(arguments: EngineFields, capability: int) -> EngineFields:
    """Return an engine's arguments with fewer CUDA graph sizes, or unchanged.

    They stay unchanged if they set an option that decides about graphs (DECIDE_GRAPHS) or lack
    max_num_seqs, and on GPUs from Blackwell on. `capability` is the major number of the GPU's
    compute capability. A step that fits no size is padded to the next one. vLLM itself captures 51
    sizes up to `MOST_TOKENS`, each twice; with this function there are at most 22. For the pooling
    runner there are none: it processes a prompt in one step, so nearly all of its steps have more
    tokens than the largest graph.
    """
    seqs = arguments.get("max_num_seqs")
    if not seqs or capability >= BLACKWELL or any(arguments.get(name) for name in DECIDE_GRAPHS):
        return arguments
    if arguments.get("runner") == "pooling":
        return {**arguments, "compilation_config": {"cudagraph_mode": "NONE"}}
    most = min(MOST_TOKENS, 2 * seqs)
    large = range(128, most + 1, GRAPHS_APART)
    sizes = [size for size in (*SMALL_GRAPHS, *large) if size <= most]
    return {**arguments, "compilation_config": {"cudagraph_capture_sizes": sizes}}


def memory_settings(request: ModelRequest, gpus: int, images: bool) -> Mapping[str, str]:
    """Return environment variables by which an engine reuses an earlier measurement of memory.

    `gpus` is the number of GPUs of the engine. With several, the result is {}: each process would
    decide for itself whether to measure, and then wait for the others. vLLM compares `IN_KEY`, the
    model, the GPU and its free memory before it uses a stored measurement. So the result is {} too
    if the job sets other arguments or variables, or if prompts have `images`.
    """
    load = request.vllm_arguments.get("load_format", "auto")
    differs = request.vllm_arguments.keys() - IN_KEY - {"load_format"} or request.env or images
    return {} if differs or gpus > 1 or load not in ("auto", "dummy") else {MEASURED_ONCE: "1"}


KERNEL_CACHE = "TRITON_CACHE_DIR"
"""Environment variable that names the folder in which Triton keeps compiled kernels."""


def kernel_cache(environment: Mapping[str, str]) -> str:
    """Return the folder of Triton's kernels in a process with this `environment`.

    It is Triton's own default unless the environment names another one.
    """
    home = environment.get("TRITON_HOME") or environment.get("HOME") or os.path.expanduser("~")
    return environment.get(KERNEL_CACHE) or str(Path(home) / ".triton" / "cache")


def share_kernel_cache() -> None:
    """Keep the Triton kernels of all engines of this machine in one folder; call before a start.

    Where the variable is not set, PyTorch's compiler sets it to a folder inside the compiled
    model's. The next start loads the model without the compiler, and looks for vLLM's own kernels
    in Triton's default folder. So they would be compiled again then, and again for each model and
    each `max_model_len`, `max_num_seqs` and other argument that the compiled model depends on.
    Does nothing if nothing can be written there.
    """
    folder = kernel_cache(os.environ)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ[KERNEL_CACHE] = folder
