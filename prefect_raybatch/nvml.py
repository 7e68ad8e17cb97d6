"""Reads GPU figures from NVIDIA's driver through NVML; finds nothing on machines without one."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from prefect_raybatch.bounded import within

log = logging.getLogger(__name__)

DRIVER_SECONDS = 8.0  # to wait for an answer; a faulty driver may never give one
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine: index, product name, total and used memory in MiB, driver version."""

    index: int
    name: str
    mib: float
    used_mib: float
    driver: str


def gpus_here() -> tuple[list[Gpu], str]:
    """Return (GPUs that the driver lists, why there are none).

    The second value is "" if there are GPUs, or if there is no NVIDIA driver.
    """
    try:
        return within(DRIVER_SECONDS, _ask)
    except TimeoutError:
        return [], f"NVIDIA's driver did not answer within {DRIVER_SECONDS:g} s"


def _ask() -> tuple[list[Gpu], str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [], ""
    except pynvml.NVMLError as error:
        return [], f"NVIDIA's driver reports: {error}"
    gpus: list[Gpu] = []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            gpus.append(Gpu(index, name, memory.total // MIB, memory.used // MIB, driver))
    except pynvml.NVMLError as error:  # e.g. for the memory of a GPU that is split by MIG
        return [], f"NVIDIA's driver reports for GPU {len(gpus)}: {error}"
    finally:
        pynvml.nvmlShutdown()
    return gpus, "" if gpus else "NVIDIA's driver lists no GPU"


class GpuSampler:
    """Samples the GPUs in CUDA_VISIBLE_DEVICES, which Ray sets for each actor.

    If the variable is not set, samples all GPUs. Calling it returns {"gpu": mean utilization of
    these GPUs (0 to 1), "gpu_memory": GiB used on the fullest}; {} if unknown.
    """

    def __init__(self) -> None:
        self._handles: list[object] = []
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
            log.info("GPU figures are unavailable: %s", error)

    def __call__(self) -> dict[str, float]:
        if not self._handles:
            return {}
        import pynvml

        try:
            loads = [pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._handles]
            used = [pynvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._handles]
        except pynvml.NVMLError as error:
            log.warning("GPU figures are no longer available: %s", error)
            self._handles = []
            return {}
        return {"gpu": sum(loads) / len(loads) / 100, "gpu_memory": max(used) / GIB}


def _handle(name: str) -> object:
    import pynvml

    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
