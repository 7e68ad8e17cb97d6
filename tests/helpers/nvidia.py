"""NVIDIA's driver as NVML shows it: put in the place of pynvml's functions, which must be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pynvml
import pytest

ABSENT = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND


class Card(NamedTuple):
    name: str = "NVIDIA H200"
    mib: int = 143771
    used_mib: int = 3
    load: int = 0  # percent
    error: int = pynvml.NVML_SUCCESS  # what asking for its memory comes to


class Driver:
    """A driver with these cards; `error` is what each call comes to from then on."""

    def __init__(self, cards: tuple[Card, ...], error: int = pynvml.NVML_SUCCESS) -> None:
        self.cards, self.error = cards, error
        self.open = 0  # users that have not closed it

    def put(self, patch: pytest.MonkeyPatch) -> Driver:
        for name in ("Init", "Shutdown", "SystemGetDriverVersion", "DeviceGetCount"):
            patch.setattr(pynvml, f"nvml{name}", getattr(self, name))
        for name in ("Name", "HandleByIndex", "HandleByUUID", "MemoryInfo", "UtilizationRates"):
            patch.setattr(pynvml, f"nvmlDeviceGet{name}", getattr(self, name))
        return self

    def _check(self, error: int = pynvml.NVML_SUCCESS) -> None:
        for code in (self.error, error):
            if code != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(code)

    def Init(self) -> None:
        self._check()
        self.open += 1

    def Shutdown(self) -> None:
        self.open -= 1

    def SystemGetDriverVersion(self) -> str:
        return "570.1"

    def DeviceGetCount(self) -> int:
        return len(self.cards)

    def HandleByIndex(self, index: int) -> int:
        if index >= len(self.cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def HandleByUUID(self, uuid: str) -> int:
        return self.HandleByIndex("ab".index(uuid.removeprefix("GPU-")))

    def Name(self, card: int) -> str:
        return self.cards[card].name

    def MemoryInfo(self, card: int) -> Any:
        _, mib, used, _, error = self.cards[card]
        self._check(error)
        return SimpleNamespace(total=mib << 20, used=used << 20, free=(mib - used) << 20)

    def UtilizationRates(self, card: int) -> Any:
        self._check()
        return SimpleNamespace(gpu=self.cards[card].load, memory=0)


def show(patch: pytest.MonkeyPatch, *cards: Card, error: int = pynvml.NVML_SUCCESS) -> Driver:
    return Driver(cards, error).put(patch)
