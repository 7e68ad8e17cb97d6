"""How many requests with images vLLM is given at once, by their bytes."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import fake_vllm

from prefect_raybatch.stages.vllm import stepper
from prefect_raybatch.stages.vllm.stepper import WINDOW, Request, SteppedEngine

SEQUENCES = 4  # of the fake engine
LARGE = 1000


class Counting(fake_vllm.LLMEngine):
    """Notes at each step how many requests it holds."""

    held: list[int] = []

    def step(self) -> list[Any]:
        type(self).held.append(len(self.engine_core.waiting))
        return super().step()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedEngine]:
    fake_vllm.install_for(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm"], "LLMEngine", Counting)
    monkeypatch.setattr(stepper, "FEATURE_BYTES", 6 * LARGE)
    Counting.held = []
    with SteppedEngine({}) as made:
        yield made


def held(engine: SteppedEngine, bytes_each: int | None, rows: int = 40) -> list[int]:
    features = None if bytes_each is None else pickle.dumps((b"x" * bytes_each, {}, {}))
    done = engine.run([Request([1], features=features) for _ in range(rows)])
    assert len(done) == rows and all(completion.error is None for completion in done)
    return Counting.held


def test_text_fills_the_window(engine: SteppedEngine) -> None:
    assert max(held(engine, None)) == WINDOW * SEQUENCES


def test_images_fill_it_up_to_their_bytes(engine: SteppedEngine) -> None:
    assert max(held(engine, LARGE)) == 6  # each a little over LARGE


def test_small_images_fill_it_like_text(engine: SteppedEngine) -> None:
    assert max(held(engine, 10)) == WINDOW * SEQUENCES


def test_images_larger_than_it_do_not_starve_the_engine(engine: SteppedEngine) -> None:
    seen = held(engine, 10 * LARGE)
    assert max(seen) == SEQUENCES and seen.count(SEQUENCES) > 30


def test_the_bytes_of_what_is_answered_are_given_back(engine: SteppedEngine) -> None:
    threads = [threading.Thread(target=held, args=(engine, LARGE, 10)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and max(Counting.held) == 6
