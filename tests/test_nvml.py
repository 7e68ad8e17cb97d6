"""What NVIDIA's driver tells of GPUs, and that nobody stumbles where it tells nothing."""

from __future__ import annotations

import logging
import threading

import pynvml
import pytest
from helpers.heard import wait_for
from helpers.nvidia import ABSENT, Card, show

from prefect_raybatch import nvml


def test_the_cards_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = show(monkeypatch, Card(), Card("NVIDIA L4", 23034, 20000))
    assert nvml.gpus_here() == (
        [
            nvml.Gpu(0, "NVIDIA H200", 143771, 3, "570.1"),
            nvml.Gpu(1, "NVIDIA L4", 23034, 20000, "570.1"),
        ],
        "",
    )
    assert driver.open == 0


@pytest.mark.parametrize(
    ("cards", "error", "trouble"),
    [
        ((), ABSENT, ""),
        ((), pynvml.NVML_SUCCESS, "NVIDIA's driver lists no GPU"),
        ((), pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "NVIDIA's driver reports: Driver Not Loaded"),
        (
            (Card(), Card(error=pynvml.NVML_ERROR_NO_PERMISSION)),  # cut into parts
            pynvml.NVML_SUCCESS,
            "NVIDIA's driver reports for GPU 1: Insufficient Permissions",
        ),
    ],
)
def test_where_no_card_is_shown_it_is_said_why(
    cards: tuple[Card, ...], error: int, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = show(monkeypatch, *cards, error=error)
    assert nvml.gpus_here() == ([], trouble)
    assert driver.open == 0


def test_a_driver_that_hangs_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, asked, answers = show(monkeypatch, Card()), threading.Event(), threading.Event()

    def count() -> int:
        asked.set()
        return int(answers.wait(60))

    monkeypatch.setattr(nvml, "DRIVER_SECONDS", 0.1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", count)
    assert nvml.gpus_here() == ([], "NVIDIA's driver did not answer within 0.1 s")
    assert asked.wait(60)
    answers.set()
    wait_for(lambda: driver.open == 0)  # or its thread closes the driver of another test


@pytest.mark.parametrize(
    ("shown", "use", "memory"),
    [(None, 0.6, 30), ("0", 0.8, 10), ("0,1", 0.6, 30), ("GPU-b", 0.4, 30)],
)
def test_the_gpus_of_this_process_are_looked_at(
    shown: str | None, use: float, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = show(monkeypatch, Card(used_mib=10 << 10, load=80), Card(used_mib=30 << 10, load=40))
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    asked = nvml.GpuSampler()
    assert asked() == {"gpu": pytest.approx(use), "gpu_memory": memory}
    driver.error = pynvml.NVML_ERROR_GPU_IS_LOST
    assert asked() == {}
    driver.error = pynvml.NVML_SUCCESS
    assert asked() == {}  # not asked again, every two seconds


@pytest.mark.parametrize(("shown", "error"), [("", pynvml.NVML_SUCCESS), ("0", ABSENT), ("7", 0)])
def test_a_process_without_gpus_says_nothing_of_them(
    shown: str, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    show(monkeypatch, Card(), error=error)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with caplog.at_level(logging.WARNING):
        assert nvml.GpuSampler()() == {}
    assert caplog.text == ""
