"""What NVIDIA's driver tells of GPUs, through NVML; nothing, and no word, where there is none."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from prefect_raybatch.bounded import within

log = logging.getLogger(__name__)

DRIVER_SECONDS = 8.0  # for an answer: a driver in trouble may never give one
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine: its product name, MiB of memory in all and in use."""

    index: int
    name: str
    mib: float
    used_mib: float
    driver: str


def gpus_here() -> tuple[list[Gpu], str]:
    """The GPUs that this machine's driver shows, and what is wrong where it shows none."""
    try:
        return within(DRIVER_SECONDS, _ask)
    except TimeoutError:
        return [], f"NVIDIA's driver does not answer within {DRIVER_SECONDS:g} s"


def _ask() -> tuple[list[Gpu], str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [], ""
    except pynvml.NVMLError as error:
        return [], f"NVIDIA's driver says: {error}"
    found: list[Gpu] = []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append(Gpu(index, name, memory.total // MIB, memory.used // MIB, driver))
    except pynvml.NVMLError as error:  # as of the memory of a GPU that was cut into parts
        return [], f"NVIDIA's driver says of GPU {len(found)}: {error}"
    finally:
        pynvml.nvmlShutdown()
    return found, "" if found else "NVIDIA's driver shows no GPU"


class Use:
    """Of the GPUs in CUDA_VISIBLE_DEVICES, which Ray sets for each actor: their mean load as a
    share (`gpu`) and the GiB in use on the fullest (`gpu_memory`); {} where that is not known."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [name.strip() for name in (shown or "").split(",") if name.strip()]
        if shown is not None and not names:
            return
        import pynvml

        try:
            pynvml.nvmlInit()  # until the process ends
            if shown is None:
                names = [str(number) for number in range(pynvml.nvmlDeviceGetCount())]
            self._handles = [_handle(name) for name in names]
        except pynvml.NVMLError as error:
            log.info("no figures of GPUs: %s", error)

    def __call__(self) -> dict[str, float]:
        if not self._handles:
            return {}
        import pynvml

        try:
            loads = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._handles]
            held = [pynvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._handles]
        except pynvml.NVMLError as error:
            log.warning("no more figures of the GPU: %s", error)
            self._handles = []
            return {}
        return {"gpu": sum(loads) / len(loads) / 100, "gpu_memory": max(held) / GIB}


def _handle(name: str) -> Any:
    import pynvml

    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
