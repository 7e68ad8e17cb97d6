"""A vLLM plugin that prepares each process of vLLM before it runs a model.

It is an entry point of the group `vllm.general_plugins`: vLLM calls `register` in the process that
creates an engine, in the engine's core and in its workers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping

from prefect_raybatch.stages.vllm import engine_errors, phases

log = logging.getLogger(__name__)

PLUGIN = "prefect_raybatch"  # name of the entry point
ALLOWED = "VLLM_PLUGINS"  # variable with the plugins that vLLM may load; if unset, all


def register() -> None:
    """Request AMX, and begin to record the errors that vLLM logs here and the phases of its start.

    vLLM calls this in each of its processes, perhaps several times.
    """
    ask_for_amx()
    engine_errors.listen()
    phases.listen_for_phases()


def ask_for_amx() -> None:
    """Request AMX (matrix instructions) from the kernel if the CPU has it and torch computes on it.

    A process that uses AMX tiles before it has requested them dies of an illegal instruction.
    oneDNN requests them before it uses them. vLLM's attention in bfloat16 does not, and it runs
    before oneDNN if the first forward pass is small. The permission holds for all threads and for
    processes forked later.
    """
    torch = sys.modules.get("torch")  # imported by vLLM in processes that run a model
    if torch is None or any(getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")):
        return
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
    ask = getattr(torch.cpu, "_init_amx", None)
    if has_amx is None or ask is None or not has_amx():
        return
    if not ask():
        log.warning(
            "this CPU has AMX, but the kernel does not permit it, so an engine in bfloat16 may "
            "die of an illegal instruction. Set engine.dtype: float32"
        )


def allow(environment: MutableMapping[str, str]) -> None:
    """Add this plugin to vLLM's list of allowed plugins (VLLM_PLUGINS), if there is such a list."""
    names = environment.get(ALLOWED)
    if names is not None and PLUGIN not in names.split(","):
        environment[ALLOWED] = f"{names},{PLUGIN}" if names else PLUGIN
