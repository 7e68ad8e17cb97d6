"""Data of GPU models (memory, bandwidth, speed), for choosing sizes where no GPU can be queried.

The figures are from the makers' data sheets: dense 16-bit tensor FLOPs (without sparsity; fp8 is
twice as fast on the cards that support it), and gigabytes of 10**9 bytes, so a card reports at
least that much. Ray uses one name for cards of several sizes (A100, H100, V100): `memory` is the
smallest, `most` the largest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GB = 10**9


@dataclass(frozen=True)
class Card:
    """A GPU model: bytes of memory, bytes per second (`bandwidth`) and FLOPs per second.

    `memory` and `most` are the bytes of the smallest and of the largest card with this name.
    `nvlink`: servers connect these GPUs by NVLink. `fp8`: the tensor cores multiply fp8.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    nvlink: bool
    most: int
    fp8: bool = False


FP8 = ("B200", "H200", "H100", "L40S", "L4")


def _card(name: str, gb: int, gb_s: float, tflops: float, nvlink: bool, most: int = 0) -> Card:
    most = (most or gb) * GB
    return Card(name, gb * GB, gb_s * GB, tflops * 1e12, nvlink, most, name in FP8)


CARDS = {
    card.name: card
    for card in (
        _card("B200", 180, 7700, 2250, True, 192),
        _card("H200", 141, 4800, 989, True),
        _card("H100", 80, 3350, 989, True, 94),
        _card("A100", 40, 1555, 312, True, 80),
        _card("A100-40G", 40, 1555, 312, True),
        _card("A100-80G", 80, 2039, 312, True),
        _card("L40S", 48, 864, 362, False),
        _card("L4", 24, 300, 121, False),
        _card("A10G", 24, 600, 70, False),
        _card("A10", 24, 600, 125, False),
        _card("T4", 16, 320, 65, False),
        _card("V100", 16, 900, 125, True, 32),
    )
}


@dataclass(frozen=True)
class EngineGpu:
    """The GPU on which engines run, as far as it is known.

    `card` is None if its model is unknown or the cluster has several. `memory` is in bytes, 0 if
    unknown; `most` is the memory of the largest card with this name, 0 if `memory` was measured.
    """

    name: str
    card: Card | None
    memory: int
    most: int


def card(name: str) -> Card | None:
    """Return the data of a GPU named as by Ray or by the driver; None if the model is unknown.

    Such names are `L4` and `NVIDIA H100 80GB HBM3`.
    """
    if name in CARDS:
        return CARDS[name]
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    return next((found for key, found in CARDS.items() if key in words), None)


def without_nvlink(name: str) -> bool:
    """Return whether GPUs of this name communicate over PCIe alone, as RTX cards do.

    If the model is not in `CARDS`, this is guessed: True if RTX is a word of the name, else False.
    """
    found = card(name)
    return not found.nvlink if found else "RTX" in re.split(r"[^A-Z0-9]+", name.upper())
