"""Settings that shorten the start of an engine on GPUs.

These are fewer or no CUDA graphs, a stored measurement of memory, and one cache of kernels for all
engines. Figures: docs/decisions/shorter-starts.md.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from prefect_raybatch.spec.engine import EngineFields, ModelRequest

MOST_TOKENS = 512  # in vLLM's largest default CUDA graph; 1,024 on Blackwell
BLACKWELL = 10  # major number of its compute capability
SMALL_GRAPHS = (1, 2, 4, 8, 16, 32, 48, 64, 96)
GRAPHS_APART = 32  # tokens between two graph sizes above SMALL_GRAPHS
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
"""Engine arguments that a job may set and still use a stored memory measurement.

vLLM compares their values with the measured engine's, or they do not affect memory. vLLM does not
compare other arguments that affect memory, such as gpu_memory_utilization, nor any environment
variable.
"""


def with_fewer_graphs(arguments: EngineFields, capability: int) -> EngineFields:
    """Return an engine's arguments with fewer CUDA graph sizes.

    The arguments are returned unchanged in these cases:
    - they set an option that decides about graphs (DECIDE_GRAPHS);
    - they lack max_num_seqs;
    - the GPU is Blackwell or newer. `capability` is the major number of its compute capability.

    vLLM pads a step to the next size. By itself it captures 51 sizes up to `MOST_TOKENS` tokens,
    each twice; with these arguments at most 22. For the pooling runner, no graphs are captured: it
    processes a prompt in one step, so nearly all of its steps have more tokens than the largest
    graph.
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

    The result is {} in these cases:
    - the engine has several GPUs (`gpus`): each process would decide for itself whether to measure,
      and then wait for the others;
    - the job sets arguments, variables or load formats that vLLM does not compare. Before vLLM uses
      a stored measurement, it compares the arguments `IN_KEY`, the model, the GPU and its free
      memory;
    - prompts have `images`, which vLLM does not compare either.
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

    If the variable KERNEL_CACHE is not set, PyTorch's compiler sets it to a folder inside that of
    the compiled model. The next start loads the compiled model without the compiler, and looks for
    vLLM's own kernels in Triton's default folder. So these would be compiled again, and again for
    each model and each argument that the compiled model depends on (`max_model_len`, ...).
    Does nothing if the folder cannot be written to.
    """
    folder = kernel_cache(os.environ)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ[KERNEL_CACHE] = folder
